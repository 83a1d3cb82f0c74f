"""The process that acts as consumers of filtered subscriptions: python -m tools.bench.sifting

Takes a SiftingJob as JSON on standard input, and writes the outcomes as JSON to standard output.
Every delivery is of a subscription that is new, over the same batches as all others of its topic.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Final, NamedTuple, Self

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.filter.v1.filter_pb2 import Filter
from seqgate.client import Batching, Compression, connect
from seqgate.client._channel import open_channel
from tools.bench.load import Meter
from tools.bench.measurement import BenchError
from tools.bench.opening import ANSWER, PROPERTY, WANTED
from tools.bench.rounds import Round
from tools.bench.streams import WITHIN_S, Consumers
from tools.bench.workload import Outcome, outcomes_to_json

BATCH_MESSAGES: Final = 10
"""How many messages a batch has."""

PAYLOAD_BYTES: Final = 100

KEYS: Final = 1_000

CONSUMERS: Final = 4

FEW: Final = 10
"""Property sets, where there are few."""

PARCEL_MESSAGES: Final = 1_000
"""How many messages are sent at a time: whole batches, so that none is cut by a clock."""

BATCHING: Final = Batching(
    messages_max=PARCEL_MESSAGES,
    bytes_max=1024 * 1024,
    delay_s=0.01,
    by_key=True,
    filter_properties=(PROPERTY,),
)

DISPATCHER: Final = "dispatcher"
OPENING: Final = "opening"
"""Who delivers: the service, or the one that opens every batch."""

ACCEPTS_ALL: Final = {
    DISPATCHER: f"properties.{PROPERTY} != 'none'",
    OPENING: f"properties.{ANSWER} != ''",
}
REJECTS_HALF: Final = {
    DISPATCHER: f"properties.{PROPERTY}.startsWith('{WANTED}')",
    OPENING: f"properties.{ANSWER} == 'all'",
}


class Kind(NamedTuple):
    """What batches a topic has."""

    name: str
    are_distinct: bool


KINDS: Final = (
    Kind(f"{FEW} property sets", are_distinct=False),
    Kind("all distinct", are_distinct=True),
)


class Sieve(NamedTuple):
    """One thing to measure.

    Attributes:
        name: of the figure, without the batches' kind.
        by: who delivers.
        expression: of the filter; empty: there is none.
        share: what part of the messages it accepts.
    """

    name: str
    by: str
    expression: str
    share: float

    def figure(self, kind: Kind) -> str:
        """The whole name."""
        return f"{self.name}, {kind.name}"


UNFILTERED: Final = Sieve("delivered, no filter", DISPATCHER, "", 1)
ALL: Final = Sieve("delivered, all accepted", DISPATCHER, ACCEPTS_ALL[DISPATCHER], 1)
ALL_OPENED: Final = Sieve(
    "delivered, all accepted, batches opened", OPENING, ACCEPTS_ALL[OPENING], 1
)
HALF: Final = Sieve("judged, half rejected", DISPATCHER, REJECTS_HALF[DISPATCHER], 0.5)
HALF_OPENED: Final = Sieve(
    "judged, half rejected, batches opened", OPENING, REJECTS_HALF[OPENING], 0.5
)
SIEVES: Final = (UNFILTERED, ALL, ALL_OPENED, HALF, HALF_OPENED)


class SiftingJob(NamedTuple):
    """What the process is told: where everything is, how many batches each topic gets (an even
    number), and whose computing is measured."""

    ledger: str
    dispatchers: dict[str, str]
    prefix: str
    batches: int
    rounds: int
    pids: dict[str, int]

    def to_json(self) -> str:
        """As it travels."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The opposite of to_json."""
        return cls(*json.loads(text))


async def run(job: SiftingJob) -> dict[str, Outcome]:
    """Everything, round by round: what is compared is measured one after the other."""
    async with (
        open_channel(job.dispatchers[DISPATCHER]) as dispatcher,
        open_channel(job.dispatchers[OPENING]) as opening,
    ):
        stubs = {
            DISPATCHER: DispatcherServiceStub(dispatcher),
            OPENING: DispatcherServiceStub(opening),
        }
        work = _Work(job, stubs)
        for kind in KINDS:
            await work.publish(kind)
        for number in range(job.rounds):
            for kind in KINDS:
                # To and fro, so that none always has the same neighbours.
                for sieve in SIEVES if number % 2 == 0 else reversed(SIEVES):
                    await work.deliver(kind, sieve)
        return work.outcomes


class _Work:
    """What is measured, and what came of it."""

    def __init__(self, job: SiftingJob, stubs: dict[str, Any]) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._job = job
        self._stubs = stubs
        self._messages = job.batches * BATCH_MESSAGES
        self._numbers = itertools.count()

    async def publish(self, kind: Kind) -> None:
        """Publish what is delivered."""
        payloads = Random(0)
        async with (
            connect(self._job.ledger) as client,
            client.producer(
                self._topic(kind), batching=BATCHING, compression=Compression.LZ4
            ) as producer,
        ):
            for some in _parcels(self._messages):
                await asyncio.gather(
                    *(
                        producer.send_nowait(
                            payloads.randbytes(PAYLOAD_BYTES // 2).hex().encode(),
                            key=f"key-{batch % KEYS}",
                            properties={PROPERTY: _origin(kind, batch)},
                        )
                        for batch in (number // BATCH_MESSAGES for number in some)
                    )
                )

    async def deliver(self, kind: Kind, sieve: Sieve) -> None:
        """A new subscription, until all that it lets through is acknowledged, durably."""
        stub = self._stubs[sieve.by]
        wanted = round(self._messages * sieve.share)
        meter = Meter(self._job.pids)
        async with self._consumers(kind, sieve) as (consumers, names):
            with meter:
                delivered = await consumers.take(wanted)
            report = await stub.Report(pb.ReportRequest(**names), timeout=WITHIN_S)
        self._check(delivered, wanted)
        totals = report.filtering.filters[0] if sieve.expression else pb.FilterReport()
        self._check(totals.rejected.messages, self._messages - wanted)
        self._check(totals.accepted.messages, wanted if sieve.expression else 0)
        outcome = self.outcomes.setdefault(sieve.figure(kind), Outcome([], {}))
        outcome.rounds.append(Round(self._messages, meter.elapsed_s, []))
        for process, seconds in meter.computed_s.items():
            outcome.cpu_s[process] = outcome.cpu_s.get(process, 0.0) + seconds

    @asynccontextmanager
    async def _consumers(
        self, kind: Kind, sieve: Sieve
    ) -> AsyncIterator[tuple[Consumers, dict[str, Any]]]:
        names: dict[str, Any] = {
            "topic": self._topic(kind),
            "subscription": f"s{next(self._numbers)}",
        }
        stub = self._stubs[sieve.by]
        earliest = pb.Start(earliest=pb.Earliest())
        # The dispatcher that opens batches may have just started.
        await stub.CreateSubscription(
            pb.CreateSubscriptionRequest(**names, start=earliest),
            timeout=WITHIN_S,
            wait_for_ready=True,
        )
        if sieve.expression:
            filter_ = Filter(name="bench", version=1, expression=sieve.expression)
            await stub.SetFilters(
                pb.SetFiltersRequest(**names, filters=[filter_]), timeout=WITHIN_S
            )
        consumers = Consumers(stub)
        try:
            for number in range(CONSUMERS):
                await consumers.join(**names, number=number, start=earliest)
            yield consumers, names
        finally:
            await consumers.close()

    def _topic(self, kind: Kind) -> str:
        return f"{self._job.prefix}/{'distinct' if kind.are_distinct else 'few'}"

    def _check(self, count: int, expected: int) -> None:
        if count != expected:
            raise BenchError(f"{count} messages, and not {expected}")


def _parcels(messages: int) -> Iterator[range]:
    for first in range(0, messages, PARCEL_MESSAGES):
        yield range(first, min(first + PARCEL_MESSAGES, messages))


def _origin(kind: Kind, batch: int) -> str:
    """The property of a batch's messages. The last batch of a topic is wanted, so that whoever has
    all that is wanted has been judged everything."""
    letter = WANTED if batch % 2 else "B"
    return f"{letter}{batch if kind.are_distinct else batch % FEW}"


def main() -> int:
    job = SiftingJob.from_json(sys.stdin.read())
    print(outcomes_to_json(asyncio.run(run(job))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
