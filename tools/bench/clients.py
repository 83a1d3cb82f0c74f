"""Publishing and reading end to end, with the client library, and what features cost of publishing.

Workloads also run against the null ledger, which only answers: that limit has the client, the
messages and gRPC in it. Another limit of publishing is the disk.
"""

import asyncio
import re
import time
import urllib.request
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPException
from random import Random
from typing import Any, ClassVar, Final, TypeVar

from seqgate.client import Batching, Chunking, Client, Producer, Receipt, connect
from seqgate.dev.ports import free_ports
from tools.bench import parts
from tools.bench.bench import Bench
from tools.bench.figures import MEDIAN, Measurement
from tools.bench.rounds import CALLS_MAX, BenchError, Case, Limit, Meter, Round, check, one_round
from tools.trace.receiver import otlp_receiver

W = TypeVar("W", bound="Publish")

SHAPES: Final = ("unbatched", "batched")
MIB: Final = 1024 * 1024

PENDING_MAX: Final = 10_000  # entries that a producer has pending: the client's own default
PENDING_BYTES_MAX: Final = 20 * MIB  # what the service lets be unanswered, and a burst
BURST_MESSAGES: Final = 100  # after which a producer looks at receipts
BURST_BYTES: Final = 4 * MIB  # after which it does, too, though always after a message

RESEND_MESSAGES: Final = 40_000
READ_MESSAGES: Final = 20_000
READ_BYTES: Final = 20 * MIB  # of a topic that is read, whichever comes first
READ_PAYLOAD_BYTES: Final = (100, 1_000)
BATCHING: Final = Batching(messages_max=1_000, bytes_max=MIB, delay_s=0.01)  # full before that

PAYLOAD_BYTES: Final = 100  # of a small message, as in Kafka's and Pulsar's own benchmarks
ENTRY_BYTES: Final = 150  # with its metadata, alone or in a batch, about
DISK_BLOCK_BYTES: Final = 100_000

LARGE_BYTES: Final = 4 * MIB
CHUNK_BYTES: Final = {MIB: "1 MiB", MIB // 16: "64 KiB"}  # the largest entry has 5 MiB
COMMIT_BYTES: Final = 8 * MIB  # of a commit of the service, by default
LARGE_SECONDS_MAX: Final = 0.15  # of a round: there are many, and one writes some ten megabytes

UNDEDUPLICATED: Final = "bench/off"  # the namespace without deduplication
POLICIES: Final = f'[namespace."{UNDEDUPLICATED}"]\nenabled = false\n'
SERVICES: Final = ("cursor", "dedup", "ledger")  # what publishing needs, as they start
SAMPLED: Final = {"0": "0 percent", "0.01": "1 percent", "1": "100 percent"}  # of messages
SCRAPE_INTERVAL_S: Final = 1.0  # Prometheus scrapes every 15 seconds or every minute
SCRAPE_TIMEOUT_S: Final = 10.0
SCRAPED_LENGTH: Final = 3  # times the length of other rounds, so that each has a scrape in it


@dataclass(kw_only=True)
class Workload(Case):
    """Messages, of the service at `address`."""

    address: str
    topic: str
    units: Mapping[str, float] = field(default_factory=lambda: {"messages": 1})
    payload_bytes: int = PAYLOAD_BYTES

    @property
    def payload(self) -> bytes:
        """Bytes that do not compress. Zeros would be one page of memory, and never leave the
        cache."""
        return Random(0).randbytes(self.payload_bytes)


@dataclass(kw_only=True)
class Publish(Workload):
    """New messages, as many as may be pending.

    Attributes:
        chunk_bytes: the size of chunks that messages are cut into; 0: none.
    """

    verb: ClassVar = "publish"
    services: ClassVar[Sequence[str]] = ("ledger", "dedup", "redis")
    batched: bool = False
    producers: int = 1
    chunk_bytes: int = 0

    async def round(self, meter: Meter) -> Round:
        async with connect(self.address) as client:
            producers = self.all_producers(client)
            for producer in producers:
                await producer.open()
                await self.pump(producer, until=0, count_max=1)  # a burst, to warm up
            with meter:
                until = time.perf_counter() + self.seconds
                counts = await asyncio.gather(*(self.pump(each, until=until) for each in producers))
            for producer in producers:
                await producer.close()
            return meter.round(sum(counts))

    def all_producers(self, client: Client) -> list[Producer]:
        return [self.producer(client) for _ in range(self.producers)]

    def producer(self, client: Client, name: str | None = None) -> Producer:
        return client.producer(
            self.topic,
            name=name,
            batching=BATCHING if self.batched else None,
            chunking=Chunking(self.chunk_bytes) if self.chunk_bytes else None,
            max_pending_messages=PENDING_MAX,
        )

    async def pump(
        self,
        producer: Producer,
        *,
        until: float,
        count_max: int = CALLS_MAX,
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

        async def settle() -> None:
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
            while waiting and (waiting[0].done() or producer.pending_messages > pending_max):
                await settle()
        while waiting:
            await settle()
        return count


class Resend(Publish):
    """Messages that are stored already, by a producer that starts again."""

    async def prepare(self) -> None:
        async with connect(self.address) as client, self.producer(client, "resender") as producer:
            until = float("inf")
            await self.pump(producer, until=until, count_max=RESEND_MESSAGES, numbered=True)

    async def round(self, meter: Meter) -> Round:
        async with connect(self.address) as client, self.producer(client, "resender") as producer:
            resend = partial(self.pump, producer, numbered=True, duplicate=True)
            with meter:
                until = time.perf_counter() + self.seconds
                count = await resend(until=until, count_max=RESEND_MESSAGES)
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

    verb = "read"
    services = ("ledger",)

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
                            check(len(message.payload), self.payload_bytes)
                            count += 1
        return meter.round(count)


def workload(
    bench: Bench,
    kind: type[W],
    text: str,
    size_bytes: int = 0,
    *,
    namespace: str = "bench/clients",
    **more: Any,
) -> W:
    """A load on a bench's own ledger, with a topic of its own; batched, if `text` begins so; in
    MB/s, too, if it has a size."""
    name = f"{kind.verb}, {text}"
    return kind(
        name,
        address=bench.address("ledger"),
        topic=f"{namespace}/{re.sub(r'[^a-zA-Z0-9]+', '-', name)}",
        pids=bench.pids(*kind.services),
        batched=text.startswith("batch"),
        payload_bytes=size_bytes or PAYLOAD_BYTES,
        in_bytes=size_bytes > 0,
        **more,
    )


def _beside_null(bench: Bench, workload: W) -> list[W]:
    """The same load on the null ledger, and a load that is held against that."""
    name, address = f"{workload.name}, null ledger", bench.address("null")
    null = replace(workload, name=name, address=address, pids=bench.pids("null"), limits=())
    return [null, replace(workload, limits=(name, *workload.limits))]


async def publish(bench: Bench) -> list[Measurement]:
    # One block after the other, with nothing in it but entries.
    block = parts.fdatasync(DISK_BLOCK_BYTES)
    disk = bench.limit(block, each=DISK_BLOCK_BYTES / ENTRY_BYTES)
    workloads: list[Publish] = []
    for shape in SHAPES:
        alone = _beside_null(bench, workload(bench, Publish, shape, limits=[disk]))
        four = workload(bench, Publish, f"{shape}, 4 producers", producers=4, limits=[disk])
        again = workload(bench, Resend, f"{shape}, all duplicates", limits=[alone[0].name])
        workloads += [*alone, *_beside_null(bench, four), again]
    # One after the other: to the ledger and back, to deduplication and back, script, disk.
    names = (parts.STREAM, parts.STREAM, parts.admit_script(1), parts.fdatasync(ENTRY_BYTES))
    in_turn = bench.series("2 stream ping-pongs + admit script + fdatasync", *names)
    shares = (MEDIAN, 0.99)
    one = workload(bench, OneAtATime, "one at a time", limits=[in_turn], shares=shares)
    return await bench.measure([*workloads, one])


async def read(bench: Bench) -> list[Measurement]:
    """A topic from its start, again and again; the null ledger sends one page again and again."""
    workloads: list[Read] = []
    for shape in ("single messages", "batches"):
        for size_bytes in READ_PAYLOAD_BYTES:
            text = f"{shape} of {size_bytes:,} B"
            workloads += _beside_null(bench, workload(bench, Read, text, size_bytes))
    return await bench.measure(workloads)


async def large(bench: Bench) -> list[Measurement]:
    """Large messages in chunks, beside the same bytes in single messages of a chunk's size: chunks
    are stored one by one, as these are.

    in chunks  <  single messages of a chunk's size  <  the store alone, the null ledger
    """
    seconds = min(bench.seconds, LARGE_SECONDS_MAX)
    commits = [(COMMIT_BYTES // chunk_bytes, chunk_bytes) for chunk_bytes in CHUNK_BYTES]
    stored = await parts.commits(bench, commits, seconds)
    workloads: list[Publish] = []
    for (chunk_bytes, size), alone in zip(CHUNK_BYTES.items(), stored, strict=True):
        disk = Limit(alone.name, alone.value)
        kinds: dict[type[Publish], list[Limit]] = {Publish: [disk], Read: []}
        for kind, limits in kinds.items():
            text = f"single messages of {size}"
            single = workload(bench, kind, text, chunk_bytes, limits=limits)
            text = f"4 MiB in chunks of {size}"
            chunked = workload(bench, kind, text, LARGE_BYTES, chunk_bytes=chunk_bytes)
            single_null, single = _beside_null(bench, single)
            chunked_null, chunked = _beside_null(bench, chunked)
            chunked_null.limits, chunked.limits = [single_null.name], [single.name]
            workloads += [single_null, chunked_null, single, chunked]
    return [*stored, *await bench.measure(workloads, seconds=seconds)]


# ---- what features cost of publishing: the same load without them, beside it


async def price(bench: Bench) -> list[Measurement]:
    """What deduplication costs: it is off in a namespace of the same services."""
    workloads: list[Publish] = []
    for text, kind in (("unbatched", Publish), ("batched", Publish), ("one at a time", OneAtATime)):
        off = workload(bench, kind, f"{text}, deduplication off", namespace=UNDEDUPLICATED)
        on = workload(bench, kind, f"{text}, deduplication on", limits=[off.name])
        workloads += [off, on]
    return await bench.measure(workloads)


async def tracing(bench: Bench) -> list[Measurement]:
    """What tracing costs, at several shares of traced messages, by services of their own for each.
    Spans go to a receiver in this process, whose time is not counted, but which needs a processor
    as well."""
    without = found = await _traced(bench, "no tracing", {})
    for share, percent in SAMPLED.items():
        async with otlp_receiver() as received:
            environment = received.environment(share)
            found = [*found, *await _traced(bench, f"tracing at {percent}", environment, without)]
    return found


async def _traced(
    bench: Bench, text: str, environment: dict[str, str], without: Iterable[Measurement] = ()
) -> list[Measurement]:
    async with bench.another(services=SERVICES, environment=environment) as own:
        workloads = [workload(own, Publish, f"{shape}, {text}") for shape in SHAPES]
        for each, limit in zip(workloads, without, strict=False):
            each.limits = [Limit(limit.name, limit.value)]
        return await own.measure(workloads, environment=environment)


async def metrics(bench: Bench) -> list[Measurement]:
    """What metrics cost. Of two sets of services one has metrics, which this process scrapes. Their
    loads take turns, so that the time of a scrape is taken from both."""
    ports = free_ports(len(SERVICES))
    environment = {}
    for service, port in zip(SERVICES, ports, strict=True):
        prefix = f"SEQGATE_{service.upper()}_METRICS"
        environment[f"{prefix}_LISTEN"] = f"127.0.0.1:{port}"
        environment[f"{prefix}_TOPICS"] = '["bench/*/*"]'  # a time series for each
    async with (
        bench.another(services=SERVICES) as plain,
        bench.another(services=SERVICES, environment=environment) as telling,
    ):
        workloads: list[Publish] = []
        for shape in SHAPES:
            without = workload(plain, Publish, f"{shape}, no metrics")
            text = f"{shape}, metrics, scraped every second"
            scraped = workload(telling, Publish, text, limits=[without.name])
            scraped.pids = {f"telling {name}": pid for name, pid in scraped.pids.items()}
            workloads += [without, scraped]
        scraping = asyncio.create_task(_scrape(ports))
        try:
            seconds = bench.seconds * SCRAPED_LENGTH
            found = await plain.measure(workloads, seconds=seconds, paired=True)
            if scraping.done():
                await scraping  # raises what ended it
            return found
        finally:
            scraping.cancel()


async def _scrape(ports: Sequence[int]) -> None:
    while True:
        await asyncio.gather(*(asyncio.to_thread(_get_metrics, port) for port in ports))
        await asyncio.sleep(SCRAPE_INTERVAL_S)


def _get_metrics(port: int) -> None:
    url = f"http://127.0.0.1:{port}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as answer:
            answer.read()
    except (OSError, HTTPException) as error:
        raise BenchError(f"no metrics at port {port}: {error}") from error
