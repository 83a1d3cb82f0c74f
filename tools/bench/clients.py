"""Publishing and reading end to end, with the client library, and what features cost of it.

Workloads also run against the null ledger, which only answers: that limit has the client, the
messages and gRPC in it. Another limit of publishing is the disk. Deduplication, tracing and metrics
are held against the same load without them.
"""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from http.client import HTTPException
from itertools import chain
from typing import Any, Final, TypeVar

from seqgate.services.ledger.adapters.sqlite import open_sqlite_store
from tools.bench import limits, store
from tools.bench.bench import UNDEDUPLICATED, Bench
from tools.bench.figures import BenchError, Limit, Measurement, Round, in_series, latency, rate
from tools.bench.load import OneAtATime, Publish, Read, Resend, Workload
from tools.stack.ports import free_ports
from tools.trace.receiver import otlp_receiver

W = TypeVar("W", bound=Workload)

KIB: Final = 1024
MIB: Final = 1024 * KIB

PAYLOAD_BYTES: Final = 100  # of a small message, as in Kafka's and Pulsar's own benchmarks
ENTRY_BYTES: Final = PAYLOAD_BYTES + 50  # with its metadata, alone or in a batch, about
DISK_BLOCK_BYTES: Final = 100_000

LATENCY: Final = "publish, one at a time"

READ_PAYLOAD_BYTES: Final = (100, 1_000)

LARGE_BYTES: Final = 4 * MIB
CHUNK_BYTES: Final = (MIB, 64 * KIB)
"""A fifth of the largest entry that the service takes, and far less."""

COMMIT_BYTES: Final = 8 * MIB  # of a commit of the service, by default
LARGE_SECONDS_MAX: Final = 0.15
"""Rounds of large messages are short: there are many, and one writes some ten megabytes."""

SERVICES: Final = ("cursor", "dedup", "ledger")
"""What publishing needs, in the order of their start."""

SAMPLED: Final = {"0": "0 percent", "0.01": "1 percent", "1": "100 percent"}
"""Shares of messages that are traced."""

SCRAPE_INTERVAL_S: Final = 1.0  # Prometheus scrapes every 15 seconds or every minute
SCRAPE_TIMEOUT_S: Final = 10.0

SCRAPED_LENGTH: Final = 3  # rounds are so many times as long as others: each has a scrape in it


async def publish(bench: Bench) -> list[Measurement]:
    """New messages, resent messages, and single messages."""
    new = [
        _publish(bench, f"{shape}{who}", batched=shape == "batched", producers=producers)
        for producers, who in ((1, ""), (4, ", 4 producers"))
        for shape in ("unbatched", "batched")
    ]
    again = [
        _publish(bench, f"{shape}, all duplicates", Resend, batched=shape == "batched")
        for shape in ("unbatched", "batched")
    ]
    one = _publish(bench, "one at a time", OneAtATime)
    nulls = [_to_null(bench, each) for each in new]
    neighbours = [*new, *nulls, *again, one]
    neighbours.sort(key=lambda each: (each.batched, each.producers))
    rounds = await bench.load(neighbours)

    answered = [_figure(rounds, each) for each in nulls]
    # One block after the other, with nothing in it but entries.
    block = limits.fdatasync(DISK_BLOCK_BYTES)
    disk = bench.limit(block, each=DISK_BLOCK_BYTES / ENTRY_BYTES)
    found = [*answered]
    found += [_figure(rounds, *each, disk) for each in zip(new, answered, strict=True)]
    found += [_figure(rounds, *each) for each in zip(again, answered[:2], strict=True)]
    # One after the other: to the ledger and back, to deduplication and back, script, disk.
    names = (limits.STREAM, limits.STREAM, limits.admit_script(1), limits.fdatasync(ENTRY_BYTES))
    in_turn = Limit(
        "2 stream ping-pongs + admit script + fdatasync",
        in_series(*(bench.limit(name).value for name in names)),
    )
    found.append(_figure(rounds, one, in_turn))
    found.append(latency(LATENCY, 0.5, rounds[LATENCY], in_turn.floor))
    found.append(latency(LATENCY, 0.99, rounds[LATENCY]))
    return found


async def price(bench: Bench) -> list[Measurement]:
    """What deduplication costs: the same load with it and without."""
    pairs: list[tuple[Publish, Publish]] = []
    for text, kind in (("unbatched", Publish), ("batched", Publish), ("one at a time", OneAtATime)):
        batched = text == "batched"
        off = _publish(
            bench, f"{text}, deduplication off", kind, batched=batched, namespace=UNDEDUPLICATED
        )
        pairs.append((_publish(bench, f"{text}, deduplication on", kind, batched=batched), off))
    rounds = await bench.load(list(chain.from_iterable(pairs)))
    return list(chain.from_iterable(_beside(rounds, off, on) for on, off in pairs))


async def read(bench: Bench) -> list[Measurement]:
    """A topic from its start, again and again; the null ledger sends one page again and again."""
    pairs = []
    for batched, shape in ((False, "single messages"), (True, "batches")):
        for payload_bytes in READ_PAYLOAD_BYTES:
            real = Read(
                name=f"read, {shape} of {payload_bytes:,} B",
                address=bench.stack.address("ledger"),
                topic=f"bench/read/{'batched' if batched else 'single'}-{payload_bytes}",
                pids=bench.pids("ledger"),
                payload_bytes=payload_bytes,
                in_bytes=True,
                batched=batched,
            )
            pairs.append((real, _to_null(bench, real)))
    rounds = await bench.load(list(chain.from_iterable(pairs)))
    return list(chain.from_iterable(_beside(rounds, null, real) for real, null in pairs))


async def large(bench: Bench) -> list[Measurement]:
    """Large messages in chunks, beside the same bytes in single messages of a chunk's size: chunks
    are stored one by one, as these are.

    in chunks  <  single messages of a chunk's size  <  the store alone, the null ledger
    """
    seconds = min(bench.seconds, LARGE_SECONDS_MAX)
    async with open_sqlite_store(bench.folder / "large.db") as log:
        stored = [
            await store.commits(bench, log, COMMIT_BYTES // chunk_bytes, chunk_bytes, seconds)
            for chunk_bytes in CHUNK_BYTES
        ]
    fours = []
    for kind, text, pids in (
        (Publish, "publish", bench.pids("ledger", "dedup", "redis")),
        (Read, "read", bench.pids("ledger")),
    ):
        for chunk_bytes in CHUNK_BYTES:
            single = kind(
                name=f"{text}, single messages of {_size(chunk_bytes)}",
                address=bench.stack.address("ledger"),
                topic=f"bench/large/{text}-single-{chunk_bytes}",
                pids=pids,
                payload_bytes=chunk_bytes,
                in_bytes=True,
            )
            chunked = replace(
                single,
                name=f"{text}, {_size(LARGE_BYTES)} in chunks of {_size(chunk_bytes)}",
                topic=f"bench/large/{text}-chunked-{chunk_bytes}",
                payload_bytes=LARGE_BYTES,
                chunk_bytes=chunk_bytes,
            )
            fours.append((_to_null(bench, single), _to_null(bench, chunked), single, chunked))
    rounds = await bench.load(list(chain.from_iterable(fours)), seconds=seconds)
    found = list(stored)
    others = [*([each] for each in stored), *([] for _ in CHUNK_BYTES)]
    for (single_null, chunked_null, single, chunked), limiting in zip(fours, others, strict=True):
        answered, cut = _beside(rounds, single_null, chunked_null)
        uncut = _figure(rounds, single, answered, *limiting)
        found += [answered, cut, uncut, _figure(rounds, chunked, uncut)]
    return found


async def tracing(bench: Bench) -> list[Measurement]:
    """What tracing costs, at several shares of traced messages. Each share has services of its own,
    one after the other. Clients and services record alike; spans go to a receiver in this process,
    whose time is not counted, but which needs a processor as well."""
    without = await _traced(bench, "no tracing", {})
    found = without
    for share, percent in SAMPLED.items():
        async with otlp_receiver() as received:
            environment = {
                "OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint,
                "OTEL_METRICS_EXPORTER": "none",
                "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
                "OTEL_TRACES_SAMPLER_ARG": share,
            }
            traced = await _traced(bench, f"tracing at {percent}", environment)
        pairs = zip(traced, without, strict=True)
        found = [*found, *(replace(each, limit=limit) for each, limit in pairs)]
    return found


async def _traced(bench: Bench, text: str, environment: Mapping[str, str]) -> list[Measurement]:
    async with bench.another(services=SERVICES, environment=environment) as own:
        workloads = [
            _publish(own, f"{shape}, {text}", batched=shape == "batched")
            for shape in ("unbatched", "batched")
        ]
        rounds = await own.load(workloads, environment=environment)
    return [_figure(rounds, each) for each in workloads]


async def metrics(bench: Bench) -> list[Measurement]:
    """What metrics cost. Of two sets of services one has metrics, which this process scrapes. The
    loads take turns, so that the processor time of a scrape is taken from both: what the figures
    differ by is what the services do."""
    ports = dict(zip(SERVICES, free_ports(len(SERVICES)), strict=True))
    environment = {}
    for service, port in ports.items():
        prefix = f"SEQGATE_{service.upper()}_METRICS"
        environment[f"{prefix}_LISTEN"] = f"127.0.0.1:{port}"
        environment[f"{prefix}_TOPICS"] = '["bench/*/*"]'  # a time series for each
    async with (
        bench.another(services=SERVICES) as plain,
        bench.another(services=SERVICES, environment=environment) as telling,
    ):
        pids = telling.pids("ledger", "dedup", "redis").items()
        pairs = []
        for shape in ("unbatched", "batched"):
            batched = shape == "batched"
            with_ = _publish(telling, f"{shape}, metrics, scraped every second", batched=batched)
            with_.pids = {f"telling {name}": pid for name, pid in pids}
            pairs.append((_publish(plain, f"{shape}, no metrics", batched=batched), with_))
        async with _scraping(ports.values()):
            seconds = bench.seconds * SCRAPED_LENGTH
            rounds = await plain.load(list(chain.from_iterable(pairs)), seconds=seconds)
    figures = (_beside(rounds, without, with_, paired=True) for without, with_ in pairs)
    return list(chain.from_iterable(figures))


@asynccontextmanager
async def _scraping(ports: Iterable[int]) -> AsyncIterator[None]:
    """Scrape these ports meanwhile.

    Raises:
        BenchError: one did not answer, so nothing was measured.
    """
    over = asyncio.Event()
    scraping = [asyncio.create_task(_scrape(port, over)) for port in ports]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*scraping)


async def _scrape(port: int, over: asyncio.Event) -> None:
    while not over.is_set():
        try:
            await asyncio.to_thread(_get_metrics, port)
        except (OSError, HTTPException) as error:
            raise BenchError(f"no metrics at port {port}: {error}") from error
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), SCRAPE_INTERVAL_S)


def _get_metrics(port: int) -> None:
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as answer:
        answer.read()


# ---- workloads and their figures


def _publish(
    bench: Bench,
    text: str,
    kind: type[Publish] = Publish,
    *,
    namespace: str = "bench/publish",
    **shape: Any,
) -> Publish:
    """A load of small messages on a bench's own ledger."""
    name = f"publish, {text}"
    return kind(
        name=name,
        address=bench.stack.address("ledger"),
        topic=f"{namespace}/{name.replace(', ', '-').replace(' ', '_')}",
        pids=bench.pids("ledger", "dedup", "redis"),
        payload_bytes=PAYLOAD_BYTES,
        **shape,
    )


def _to_null(bench: Bench, workload: W) -> W:
    """The same load on the null ledger."""
    name, address = f"{workload.name}, null ledger", bench.null.address
    return replace(workload, name=name, address=address, pids=bench.pids("null"))


def _figure(
    rounds: Mapping[str, Sequence[Round]],
    workload: Workload,
    *limits: Limit | Measurement,
    paired: bool = False,
) -> Measurement:
    """Messages a second."""
    payload_bytes = workload.payload_bytes if workload.in_bytes else None
    done = rounds[workload.name]
    return rate(
        workload.name, "messages", done, *limits, payload_bytes=payload_bytes, paired=paired
    )


def _beside(
    rounds: Mapping[str, Sequence[Round]],
    limit: Workload,
    workload: Workload,
    *,
    paired: bool = False,
) -> tuple[Measurement, Measurement]:
    """A limit, and what is held against it."""
    alone = _figure(rounds, limit)
    return alone, _figure(rounds, workload, alone, paired=paired)


def _size(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // KIB} KiB"
