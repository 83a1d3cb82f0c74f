"""The client process: workloads that take turns, round by round.

A workload is a value that travels to this process. What disturbs the machine meanwhile disturbs all
of them. Each round is bounded in time and in messages.
"""

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from seqgate.client import Batching, Chunking, Client, Producer, Receipt, connect
from seqgate.telemetry import tracing
from tools.bench.figures import CALLS_MAX, BenchError, Round
from tools.bench.worker import Meter

PENDING_MAX: Final = 10_000  # entries that a producer has pending: the client's own default
PENDING_BYTES_MAX: Final = 20 * 1024 * 1024
"""Bytes that they have together: what the service lets be unanswered, and a burst."""

BURST_MESSAGES: Final = 100
BURST_BYTES: Final = 4 * 1024 * 1024
"""A producer looks at receipts after so many messages or bytes; after one message in any case."""

RESEND_MESSAGES: Final = 20_000
READ_MESSAGES: Final = 20_000
READ_BYTES: Final = 20 * 1024 * 1024  # of what is read; whichever comes first
BATCHING: Final = Batching(messages_max=1_000, bytes_max=1024 * 1024, delay_s=0.01)
"""Batches are full: a producer that sends all it can waits for no clock."""


@dataclass(kw_only=True)
class Workload(ABC):
    """One thing to measure, on the ledger at `address`. `pids`: whose processor time is metered,
    beside the client's."""

    name: str
    address: str
    topic: str
    pids: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0
    """Of a round; set when it runs."""
    payload_bytes: int = 100
    in_bytes: bool = False
    """The figure is in MB/s, too."""

    async def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Store what is to be sent again, read or delivered."""

    @abstractmethod
    async def round(self, meter: Meter) -> Round:
        """One round."""


def run(workloads: Sequence[Workload], rounds: int, seconds: float) -> dict[str, list[Round]]:
    """The rounds of each workload, by its name."""
    with tracing("bench"):
        return asyncio.run(_run(workloads, rounds, seconds))


async def _run(
    workloads: Sequence[Workload], rounds: int, seconds: float
) -> dict[str, list[Round]]:
    done: dict[str, list[Round]] = {each.name: [] for each in workloads}
    for each in workloads:
        each.seconds = seconds
        await each.prepare()
    for number in range(rounds):
        # To and fro, so that none always has the same neighbours.
        for each in workloads if number % 2 == 0 else reversed(workloads):
            done[each.name].append(await each.round(Meter(each.pids)))
    return done


@dataclass(kw_only=True)
class Publish(Workload):
    """New messages, as many as may be pending."""

    batched: bool = False
    producers: int = 1
    chunk_bytes: int = 0
    """Messages are cut into chunks of so many bytes; 0: they are not."""

    async def round(self, meter: Meter) -> Round:
        async with connect(self.address) as client:
            producers = [self.producer(client) for _ in range(self.producers)]
            for producer in producers:
                await producer.open()
                await self.pump(producer, until=0, count_max=1)  # a burst, to warm up
            with meter:
                until = time.perf_counter() + self.seconds
                counts = await asyncio.gather(
                    *(self.pump(each, until=until, count_max=CALLS_MAX) for each in producers)
                )
            for producer in producers:
                await producer.close()
            return meter.round(sum(counts))

    def producer(self, client: Client, name: str | None = None) -> Producer:
        """A producer that is not open yet."""
        return client.producer(
            self.topic,
            name=name,
            batching=BATCHING if self.batched else None,
            chunking=Chunking(self.chunk_bytes) if self.chunk_bytes else None,
            max_pending_messages=PENDING_MAX,
        )

    @property
    def payload(self) -> bytes:
        """Bytes that do not compress. Zeros would be one page of memory, and never leave the
        cache."""
        return Random(0).randbytes(self.payload_bytes)

    async def pump(
        self,
        producer: Producer,
        *,
        until: float,
        count_max: int,
        numbered: bool = False,
        duplicate: bool = False,
    ) -> int:
        """Send as much as may be pending, until it is time or enough, and wait until all of it is
        stored: as new, or each as a duplicate. `numbered`: with sequence ids from 0."""
        payload, pace = self.payload, _Pace.of(self.payload_bytes, self.chunk_bytes)
        waiting: deque[asyncio.Future[Receipt]] = deque()
        count = 0
        for first in _bursts(pace.messages, until, count_max):
            for number in range(first, first + pace.messages):
                sequence_id = number if numbered else None
                waiting.append(producer.send_nowait(payload, sequence_id=sequence_id))
            count += pace.messages
            await asyncio.sleep(0)
            while producer.pending_messages + pace.entries > pace.pending_max:
                _check(await waiting.popleft(), duplicate=duplicate)
            while waiting and waiting[0].done():
                _check(waiting.popleft().result(), duplicate=duplicate)
        for each in waiting:
            _check(await each, duplicate=duplicate)
        return count


class Resend(Publish):
    """Messages that are stored already, by a producer that starts again and sends all of them, as
    often as there is time."""

    async def prepare(self) -> None:
        async with connect(self.address) as client, self.producer(client, "resender") as producer:
            until = float("inf")
            await self.pump(producer, until=until, count_max=RESEND_MESSAGES, numbered=True)

    async def round(self, meter: Meter) -> Round:
        count = 0
        async with connect(self.address) as client:
            while meter.elapsed_s < self.seconds and count < CALLS_MAX:
                async with self.producer(client, "resender") as producer:
                    with meter:
                        count += await self.pump(
                            producer,
                            until=time.perf_counter() + self.seconds - meter.elapsed_s,
                            count_max=RESEND_MESSAGES,
                            numbered=True,
                            duplicate=True,
                        )
        return meter.round(count)


class OneAtATime(Publish):
    """Each message waits for the receipt of the one before it."""

    async def round(self, meter: Meter) -> Round:
        payload = self.payload
        latencies_s: list[float] = []
        async with connect(self.address) as client, self.producer(client) as producer:
            await producer.send(payload)
            with meter:
                now = time.perf_counter()
                until = now + self.seconds
                while now < until and len(latencies_s) < CALLS_MAX:
                    await producer.send(payload)
                    ended = time.perf_counter()
                    latencies_s.append(ended - now)
                    now = ended
        return meter.round(len(latencies_s), latencies_s)


class Read(Publish):
    """A topic, from its start, as often as there is time."""

    async def prepare(self) -> None:
        async with connect(self.address) as client, self.producer(client) as producer:
            count_max = min(READ_MESSAGES, READ_BYTES // self.payload_bytes)
            until = time.perf_counter() + self.seconds
            await self.pump(producer, until=until, count_max=count_max)

    async def round(self, meter: Meter) -> Round:
        count = 0
        async with connect(self.address) as client:
            with meter:
                until = time.perf_counter() + self.seconds
                while time.perf_counter() < until and count < CALLS_MAX:
                    async with client.reader(self.topic, follow=False) as reader:
                        async for message in reader:
                            if len(message.payload) != self.payload_bytes:
                                raise BenchError("a message is not what was published")
                            count += 1
        return meter.round(count)


class _Pace(NamedTuple):
    """Messages in a burst, the entries that these are, and the entries that may be pending."""

    messages: int
    entries: int
    pending_max: int

    @classmethod
    def of(cls, payload_bytes: int, chunk_bytes: int) -> "_Pace":
        messages = max(1, min(BURST_MESSAGES, BURST_BYTES // payload_bytes))
        entry_bytes = chunk_bytes or payload_bytes
        entries = messages * -(-payload_bytes // entry_bytes)
        return cls(messages, entries, min(PENDING_MAX, PENDING_BYTES_MAX // entry_bytes))


def _bursts(messages: int, until: float, count_max: int) -> Iterator[int]:
    """Where each burst begins; there is always a first."""
    for first in itertools.count(0, messages):
        yield first
        if first + messages >= count_max or time.perf_counter() >= until:
            return


def _check(receipt: Receipt, *, duplicate: bool) -> None:
    if receipt.duplicate != duplicate:
        raise BenchError(f"a message came back as {receipt}")
