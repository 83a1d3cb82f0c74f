"""Loads that make services use memory, and measurements of their peak.

    async with running(folder, **SMALL) as services:
        with peak_of(services, "dispatcher") as peak:
            await stopped_consumer(services, topic, messages=200, size_bytes=1_000_000)
        assert peak.grown_bytes < 64 * MIB

`python -m tests.support.memory_loads [WORD ...]` runs each load whose name contains one of the
words, or all, with the services' default budgets, and prints a table.
"""

import asyncio
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client import Producer, connect
from tests.integration.services import Services, paused, pids_of, running
from tests.support import raw_consumer
from tests.support.delivery_runs import each_delivery
from tests.support.publisher import publishing, single
from tests.support.waiting import eventually

KIB = 1024
MIB = 1024 * KIB

REST_POLLS = 100
"""A process is at rest once its peak was unchanged in this many polls."""

SENT_TOGETHER = 5_000
OPENED_TOGETHER = 50


@dataclass
class Peak:
    """A process's memory before a load and at its peak, in bytes."""

    before_bytes: int
    most_bytes: int = 0

    @property
    def grown_bytes(self) -> int:
        """The growth from before to the peak."""
        return self.most_bytes - self.before_bytes


@contextmanager
def peak_of(services: Services, process: str) -> Iterator[Peak]:
    """Measure the peak memory of a process inside the context, as the kernel counts it."""
    folder = Path("/proc") / str(pids_of(services.stack)[process])
    (folder / "clear_refs").write_text("5")  # resets the peak
    peak = Peak(_status(folder, "VmRSS"))
    try:
        yield peak
    finally:
        peak.most_bytes = _status(folder, "VmHWM")


def _status(folder: Path, name: str) -> int:
    for line in (folder / "status").read_text().splitlines():
        field, _, rest = line.partition(":")
        if field == name:
            return int(rest.split()[0]) * KIB
    raise LookupError(name)


async def stopped_consumer(
    services: Services, topic: str, *, messages: int, size_bytes: int
) -> None:
    """A consumer permits everything, does not read until the dispatcher stops sending, and then
    reads it all."""
    await _fill(services, topic, messages=messages, size_bytes=size_bytes)
    call = services.dispatcher.Consume()
    request = dispatcher_pb2.ConsumeRequest
    await call.write(request(subscribe=raw_consumer.subscribe(topic, delivery_runs=True)))
    await call.write(request(permit=dispatcher_pb2.Permit(messages=messages)))
    await at_rest(services, "dispatcher")
    received = 0
    while received < messages:
        async with asyncio.timeout(raw_consumer.WAIT_S):
            response = await call.read()
        received += sum(1 for _ in each_delivery(response.deliveries))
    call.cancel()


async def at_rest(services: Services, process: str) -> None:
    """Wait until a process's peak stops growing."""
    folder = Path("/proc") / str(pids_of(services.stack)[process])
    sizes: deque[int] = deque(maxlen=REST_POLLS)

    def grows_no_more() -> bool:
        sizes.append(_status(folder, "VmHWM"))
        return len(sizes) == REST_POLLS and sizes[-1] == sizes[0]

    await eventually(grows_no_more, f"{process} comes to rest")


async def flooding_producers(
    services: Services, topic: str, *, producers: int, messages: int, size_bytes: int
) -> None:
    """Producers fill their windows while deduplication does not answer; then all messages are
    stored."""
    payload = bytes(size_bytes)
    async with connect(services.stack.address("ledger")) as client, AsyncExitStack() as opened:
        floods: list[Producer] = [
            await opened.enter_async_context(
                client.producer(topic, name=f"p{number}", send_timeout_s=None)
            )
            for number in range(producers)
        ]
        with paused(services.stack, "dedup"):
            sends = [
                asyncio.create_task(each.send(payload)) for _ in range(messages) for each in floods
            ]
            await at_rest(services, "ledger")
        await asyncio.gather(*sends)


async def idle_streams(services: Services, topic: str, *, streams: int) -> None:
    """Connect equally many idle producers and consumers."""
    async with AsyncExitStack() as opened:

        async def open_both(number: int) -> None:
            await opened.enter_async_context(publishing(services.ledger, topic, f"p{number}"))
            await opened.enter_async_context(
                raw_consumer.consuming(
                    services.dispatcher, topic, name=f"c{number}", type=raw_consumer.SHARED
                )
            )

        await open_both(0)  # creates the topic and the subscription
        for first in range(1, streams, OPENED_TOGETHER):
            numbers = range(first, min(first + OPENED_TOGETHER, streams))
            await asyncio.gather(*map(open_both, numbers))


async def idle_topics(services: Services, topic: str, *, streams: int) -> None:
    """Connect idle producers, each on a topic of its own."""
    async with AsyncExitStack() as opened:
        for first in range(0, streams, OPENED_TOGETHER):
            numbers = range(first, min(first + OPENED_TOGETHER, streams))
            streams_of_some = (
                publishing(services.ledger, f"{topic}-{number}", "p") for number in numbers
            )
            await asyncio.gather(*map(opened.enter_async_context, streams_of_some))


async def idle_readers(services: Services, topic: str, *, streams: int) -> None:
    """Open readers at the end of a topic, which wait for more."""
    await services.ledger.CreateTopic(ledger_pb2.CreateTopicRequest(topic=topic))
    calls = []
    for first in range(0, streams, OPENED_TOGETHER):
        some = [
            services.ledger.Read(
                ledger_pb2.ReadRequest(
                    topic=topic, start=common_pb2.Start(earliest=common_pb2.Earliest()), follow=True
                )
            )
            for _ in range(min(OPENED_TOGETHER, streams - first))
        ]
        for started in await asyncio.gather(*(each.read() for each in some)):
            assert started.HasField("started")
        calls += some
    for call in calls:
        call.cancel()


async def idle_exchanges(services: Services, topic: str, *, streams: int) -> None:
    """Open dedup streams of writers that asked once and are idle."""
    calls = []
    for first in range(0, streams, OPENED_TOGETHER):
        numbers = range(first, min(first + OPENED_TOGETHER, streams))
        some = [services.dedup.Exchange() for _ in numbers]
        for number, call in zip(numbers, some, strict=True):
            writer = writer_pb2.Writer(incarnation=1, epoch=1)
            asked = writer_pb2.AdmitRequest(topic=f"{topic}-{number}", writer=writer)
            await call.write(writer_pb2.ExchangeRequest(request_id=1, admit=asked))
        for answer in await asyncio.gather(*(each.read() for each in some)):
            assert answer.request_id == 1
        calls += some
    for call in calls:
        call.cancel()


async def delayed_messages(services: Services, topic: str, *, messages: int) -> None:
    """Fill a topic with delayed messages, and connect a consumer."""
    async with (
        connect(services.stack.address("ledger")) as client,
        client.producer(topic, name="p") as producer,
    ):
        for first in range(0, messages, SENT_TOGETHER):
            some = range(first, min(first + SENT_TOGETHER, messages))
            await asyncio.gather(
                *(producer.send(b"x", deliver_after_s=86_400, key=str(each)) for each in some)
            )
    async with raw_consumer.consuming(services.dispatcher, topic, permits=1_000) as consumer:
        await at_rest(services, "dispatcher")
        assert consumer.deliveries == []


async def _fill(services: Services, topic: str, *, messages: int, size_bytes: int) -> None:
    payload = bytes(size_bytes)
    async with publishing(services.ledger, topic, "p") as publisher:
        for number in range(messages):
            stored = await publisher.store(
                single(number + 1, sequence_id=number, payload=payload, partition_key=str(number))
            )
            assert stored.status == ledger_pb2.RECEIPT_STATUS_STORED


async def _main() -> None:
    """Run the loads with the services' default budgets."""
    loads: list[tuple[str, str, Callable[[Services], Awaitable[None]]]] = [
        (
            "a consumer stops before 120 messages of 5 MB",
            "dispatcher",
            lambda all_: stopped_consumer(all_, named("stop"), messages=120, size_bytes=5_000_000),
        ),
        (
            "20 producers send 100 messages of 1 MiB each",
            "ledger",
            lambda all_: flooding_producers(
                all_, named("flood"), producers=20, messages=100, size_bytes=MIB
            ),
        ),
        (
            "1,000 idle producers and as many consumers",
            "ledger",
            lambda all_: idle_streams(all_, named("idle"), streams=1_000),
        ),
        (
            "1,000 idle consumers and as many producers",
            "dispatcher",
            lambda all_: idle_streams(all_, named("idle-too"), streams=1_000),
        ),
        (
            "1,000 idle producers on as many topics",
            "ledger",
            lambda all_: idle_topics(all_, named("idle-topics"), streams=1_000),
        ),
        (
            "1,000 idle producers on as many topics",
            "dedup",
            lambda all_: idle_topics(all_, named("idle-topics"), streams=1_000),
        ),
        (
            "1,000 idle readers",
            "ledger",
            lambda all_: idle_readers(all_, named("idle-read"), streams=1_000),
        ),
        (
            "1,000 idle streams of writers",
            "dedup",
            lambda all_: idle_exchanges(all_, named("idle-exchange"), streams=1_000),
        ),
        (
            "1,000,000 delayed messages",
            "dispatcher",
            lambda all_: delayed_messages(all_, named("delayed"), messages=1_000_000),
        ),
    ]
    words = sys.argv[1:]
    write = sys.stdout.write
    write(f"{'load':48}{'process':12}{'before':>9}{'grown':>9}  MiB\n")
    for what, process, load in loads:
        if words and not any(word in what for word in words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            async with running(Path(folder) / "stack") as services:
                with peak_of(services, process) as peak:
                    await load(services)
        before, grown = peak.before_bytes / MIB, peak.grown_bytes / MIB
        write(f"{what:48}{process:12}{before:9.0f}{grown:9.0f}\n")
        sys.stdout.flush()


def named(name: str) -> str:
    """A topic's full name."""
    return f"public/default/{name}"


if __name__ == "__main__":
    asyncio.run(_main())
