"""The client process: workloads that take turns, round by round.

A workload is a value that travels to this process. What disturbs the machine meanwhile disturbs all
of them. Each round is bounded in time and in messages.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final

from seqgate.client import Batching, Chunking, Client, Producer, Receipt, connect
from seqgate.telemetry import tracing
from tools.bench.figures import Limit, Measurement, rate
from tools.bench.rounds import CALLS_MAX, BenchError, Meter, Round, one_round

PENDING_MAX: Final = 10_000  # entries that a producer has pending: the client's own default
PENDING_BYTES_MAX: Final = 20 * 1024 * 1024
"""Bytes that they have together: what the service lets be unanswered, and a burst."""

BURST_MESSAGES: Final = 100
BURST_BYTES: Final = 4 * 1024 * 1024
"""A producer looks at receipts after so many messages or bytes; after one message in any case."""

RESEND_MESSAGES: Final = 20_000
READ_MESSAGES: Final = 20_000
READ_BYTES: Final = 20 * 1024 * 1024  # of a topic that is read, whichever comes first
BATCHING: Final = Batching(messages_max=1_000, bytes_max=1024 * 1024, delay_s=0.01)
"""Batches are full: a producer that sends all it can waits for no clock."""


@dataclass(kw_only=True)
class Workload(ABC):
    """One thing to measure, on the service at `address`.

    Attributes:
        limits: to compare with: limits, and names of workloads of the same load.
        pids: whose processor time is metered, beside the client's.
        seconds: of a round; set when it runs.
        in_bytes: the figure is in MB/s, too.
    """

    name: str
    address: str
    topic: str
    limits: Sequence[Limit | str] = ()
    pids: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0
    payload_bytes: int = 100
    in_bytes: bool = False

    async def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Store the messages that rounds resend, read or deliver."""

    @abstractmethod
    async def round(self, meter: Meter) -> Round:
        """One round."""


def figures(
    workloads: Sequence[Workload], rounds: Mapping[str, Sequence[Round]], *, paired: bool = False
) -> dict[str, Measurement]:
    """Messages a second of each, by name. A workload comes after its limits."""
    found: dict[str, Measurement] = {}
    for each in workloads:
        found[each.name] = rate(
            each.name,
            "messages",
            rounds[each.name],
            *(found[limit] if isinstance(limit, str) else limit for limit in each.limits),
            payload_bytes=each.payload_bytes if each.in_bytes else None,
            paired=paired,
        )
    return found


def run(workloads: Sequence[Workload], rounds: int, seconds: float) -> dict[str, list[Round]]:
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
    """New messages, as many as may be pending.

    Attributes:
        chunk_bytes: the size of chunks that messages are cut into; 0: none.
    """

    batched: bool = False
    producers: int = 1
    chunk_bytes: int = 0

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
        """Send bursts, as much as may be pending, until it is time or enough, and wait until all of
        it is stored: as new, or each as a duplicate. `numbered`: with sequence ids from 0."""
        payload = self.payload
        burst = max(1, min(BURST_MESSAGES, BURST_BYTES // self.payload_bytes))
        entry_bytes = self.chunk_bytes or self.payload_bytes
        entries = burst * -(-self.payload_bytes // entry_bytes)
        pending_max = min(PENDING_MAX, PENDING_BYTES_MAX // entry_bytes) - entries
        waiting: deque[asyncio.Future[Receipt]] = deque()

        async def settle(*, all_of_it: bool = False) -> None:
            while waiting and (
                all_of_it or waiting[0].done() or producer.pending_messages > pending_max
            ):
                receipt = await waiting.popleft()
                if receipt.duplicate != duplicate:
                    raise BenchError(f"a message came back as {receipt}")

        count = 0
        while not count or (count < count_max and time.perf_counter() < until):
            for number in range(count, count + burst):
                sequence_id = number if numbered else None
                waiting.append(producer.send_nowait(payload, sequence_id=sequence_id))
            count += burst
            await asyncio.sleep(0)
            await settle()
        await settle(all_of_it=True)
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
        async with connect(self.address) as client, self.producer(client) as producer:
            send = partial(producer.send, self.payload)
            await send()
            return await one_round(send, self.seconds, meter)


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
