"""The process that acts as consumers: python -m tools.bench.delivery

Takes a DeliveryJob as JSON on standard input, and writes the outcomes as JSON to standard output.
Consumers are bare streams.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from grpc import aio

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import Producer, connect
from seqgate.client._channel import open_channel
from tools.bench.load import Meter
from tools.bench.measurement import BenchError
from tools.bench.rounds import Round
from tools.bench.streams import WITHIN_S, Consumers
from tools.bench.workload import Outcome, outcomes_to_json

if TYPE_CHECKING:
    from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceAsyncStub

PAYLOAD_BYTES: Final = 100

READ: Final = "plain read of the log, metadata and payloads"
FOLLOWED: Final = "published until a plain read has it"
DELIVERED: Final = "published until it is delivered"

EARLIEST: Final = pb.Start(earliest=pb.Earliest())


class Consuming(NamedTuple):
    """One thing to measure: so many consumers of a topic with so many keys."""

    consumers: int
    keys: int
    is_stuck: bool = False

    def name(self, *, bare: bool = False, is_stuck: bool | None = None) -> str:
        """Of the figure; `bare`: where the dispatcher only answers. `is_stuck`: of what all but one
        get, where that one is stuck, or nobody is; None: as it is, and of what all get if nobody
        is."""
        noun = "1 consumer" if self.consumers == 1 else f"{self.consumers} consumers"
        noun += f", {self.keys:,} keys"
        if bare:
            return f"bare stream, {noun}"
        if is_stuck is None and not self.is_stuck:
            return f"delivered, {noun}"
        word = "none" if is_stuck is False else "one"
        return f"delivered, what {self.consumers - 1} of {noun} get, {word} stuck"


class DeliveryJob(NamedTuple):
    """What the process is told: where everything is, how many messages each topic gets, and whose
    computing is measured."""

    ledger: str
    dispatcher: str
    null: str
    prefix: str
    messages: int
    consuming: list[Consuming]
    rounds: int
    seconds: float
    pids: dict[str, int]

    def to_json(self) -> str:
        """As it travels."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The opposite of to_json."""
        job = cls(*json.loads(text))
        return job._replace(consuming=[Consuming(*each) for each in job.consuming])


async def run(job: DeliveryJob) -> dict[str, Outcome]:
    """Everything, round by round."""
    async with (
        open_channel(job.ledger) as ledger,
        open_channel(job.dispatcher) as dispatcher,
        open_channel(job.null) as null,
    ):
        work = _Work(job, LedgerServiceStub(ledger), DispatcherServiceStub(dispatcher), null)
        await work.prepare()
        for _ in range(job.rounds):
            await work.read()
            for each in job.consuming:
                if each.is_stuck:
                    await work.deliver_around_stuck(each)
                else:
                    await work.deliver_bare(each)
                    await work.deliver(each)
            await work.follow()
        return work.outcomes


class _Work:
    """What is measured, and what came of it."""

    def __init__(self, job: DeliveryJob, ledger: Any, dispatcher: Any, null: aio.Channel) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._job = job
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._null = DispatcherServiceStub(null)
        self._numbers = itertools.count()

    async def prepare(self) -> None:
        """Publish what is consumed; the null ledger keeps a page of it."""
        for keys in sorted({each.keys for each in self._job.consuming}):
            for address in (self._job.ledger, self._job.null):
                async with (
                    connect(address) as client,
                    client.producer(self._topic(keys), name="p") as producer,
                ):
                    sending = [_send(producer, each, keys) for each in range(self._job.messages)]
                    await asyncio.gather(*sending)

    async def read(self) -> None:
        """The log, as the ledger service gives it to anybody."""
        keys = self._job.consuming[0].keys
        request = ledger_pb2.ReadRequest(
            topic=self._topic(keys), earliest=ledger_pb2.Earliest(), follow=False
        )
        meter = self._meter()
        count = 0
        with meter:
            async for response in self._ledger.Read(request, timeout=WITHIN_S):
                count += len(response.entries.entries)
        self._check(count, self._job.messages)
        self._note(READ, count, meter)

    async def deliver(self, consuming: Consuming) -> None:
        """A new subscription, until all of it is acknowledged, durably."""
        name, meter = consuming.name(), self._meter()
        async with self._consumers(consuming) as consumers:
            with meter:
                await consumers.take(self._job.messages)
        self._note(name, self._job.messages, meter)

    async def deliver_bare(self, consuming: Consuming) -> None:
        """The same messages over the same streams, from a dispatcher that only answers."""
        meter = self._meter()
        async with self._consumers(consuming, stub=self._null) as consumers:
            with meter:
                count = await consumers.take(self._job.messages)
        self._note(consuming.name(bare=True), count, meter)

    async def deliver_around_stuck(self, consuming: Consuming) -> None:
        """What all but one consumer get, when that one is stuck, and when it is not."""
        meter = self._meter()
        async with self._consumers(consuming) as consumers:
            with meter:
                await consumers.take(self._job.messages)
            others = consumers.others
        self._note(consuming.name(is_stuck=False), others, meter)
        meter = self._meter()
        async with self._consumers(consuming, is_stuck=True) as consumers:
            with meter:
                await consumers.take(others)
        self._note(consuming.name(), others, meter)

    async def follow(self) -> None:
        """One message at a time: how long until a plain read has it, and until a consumer has."""
        async with connect(self._job.ledger) as client:
            topic = self._topic(0)
            async with client.producer(topic) as producer:
                await producer.send(b"")
                request = ledger_pb2.ReadRequest(
                    topic=topic, latest=ledger_pb2.Latest(), follow=True
                )
                reading = self._ledger.Read(request)
                await reading.read()  # it has started
                self._note_latencies(FOLLOWED, await self._one_by_one(producer, _reads(reading)))
                reading.cancel()
                one = Consuming(1, 0)
                async with self._consumers(one, start=pb.Start(latest=pb.Latest())) as consumers:
                    arriving = consumers.arriving()
                    latencies_s = await self._one_by_one(producer, arriving)
                    await arriving.aclose()
                self._note_latencies(DELIVERED, latencies_s)

    async def _one_by_one(self, producer: Producer, arriving: AsyncIterator[None]) -> list[float]:
        latencies_s: list[float] = []
        until = time.perf_counter() + self._job.seconds
        payload = bytes(PAYLOAD_BYTES)
        while not latencies_s or time.perf_counter() < until:
            began = time.perf_counter()
            sent = producer.send_nowait(payload)
            async with asyncio.timeout(WITHIN_S):
                await anext(arriving)
                latencies_s.append(time.perf_counter() - began)
                await sent
        return latencies_s

    # ---- around it

    @asynccontextmanager
    async def _consumers(
        self,
        consuming: Consuming,
        *,
        stub: "DispatcherServiceAsyncStub | None" = None,
        is_stuck: bool = False,
        start: pb.Start | None = None,
    ) -> AsyncIterator[Consumers]:
        topic = self._topic(consuming.keys)
        subscription = f"s{next(self._numbers)}"
        consumers = Consumers(stub or self._dispatcher, is_stuck=is_stuck)
        try:
            for number in range(consuming.consumers):
                await consumers.join(topic, subscription, number, start or EARLIEST)
            yield consumers
        finally:
            await consumers.close()

    def _topic(self, keys: int) -> str:
        return f"{self._job.prefix}/{keys}-keys"

    def _meter(self) -> Meter:
        return Meter(self._job.pids)

    def _check(self, count: int, expected: int) -> None:
        if count != expected:
            raise BenchError(f"{count} messages came, and not {expected}")

    def _note(self, name: str, messages: int, meter: Meter) -> None:
        outcome = self.outcomes.setdefault(name, Outcome([], {}))
        outcome.rounds.append(Round(messages, meter.elapsed_s, []))
        for process, seconds in meter.computed_s.items():
            outcome.cpu_s[process] = outcome.cpu_s.get(process, 0.0) + seconds

    def _note_latencies(self, name: str, latencies_s: list[float]) -> None:
        outcome = self.outcomes.setdefault(name, Outcome([], {}))
        outcome.rounds.append(Round(len(latencies_s), sum(latencies_s), latencies_s))


async def _send(producer: Producer, number: int, keys: int) -> None:
    await producer.send(bytes(PAYLOAD_BYTES), key=f"key-{number % keys}")


async def _reads(reading: Any) -> AsyncIterator[None]:
    """Whenever a plain read gets a message."""
    while True:
        response = await reading.read()
        for _ in response.entries.entries:
            yield


def main() -> int:
    job = DeliveryJob.from_json(sys.stdin.read())
    print(outcomes_to_json(asyncio.run(run(job))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
