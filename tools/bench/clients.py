"""Publishing and reading end to end, with the client library.

Workloads also run against the null ledger, which only answers: that limit has the client, the
messages and gRPC in it. Another limit of publishing is the disk.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from seqgate.services.ledger.adapters.sqlite import open_sqlite_store
from tools.bench import limits, store
from tools.bench.bench import Bench
from tools.bench.figures import Limit, Measurement, latency
from tools.bench.load import OneAtATime, Publish, Read, Resend, Workload, figures

W = TypeVar("W", bound=Workload)

KIB: Final = 1024
MIB: Final = 1024 * KIB

PAYLOAD_BYTES: Final = 100  # of a small message, as in Kafka's and Pulsar's own benchmarks
ENTRY_BYTES: Final = PAYLOAD_BYTES + 50  # with its metadata, alone or in a batch, about
DISK_BLOCK_BYTES: Final = 100_000
READ_PAYLOAD_BYTES: Final = (100, 1_000)

LARGE_BYTES: Final = 4 * MIB
CHUNK_BYTES: Final = (MIB, 64 * KIB)
"""A fifth of the largest entry that the service takes, and far less."""

COMMIT_BYTES: Final = 8 * MIB  # of a commit of the service, by default
LARGE_SECONDS_MAX: Final = 0.15
"""Rounds of large messages are short: there are many, and one writes some ten megabytes."""


def small(
    bench: Bench,
    text: str,
    kind: type[Publish] = Publish,
    *,
    namespace: str = "bench/publish",
    **more: Any,
) -> Publish:
    """Publishing of small messages to a bench's own ledger; batched, if `text` begins so."""
    name = f"publish, {text}"
    return kind(
        name=name,
        address=bench.stack.address("ledger"),
        topic=f"{namespace}/{name.replace(', ', '-').replace(' ', '_')}",
        pids=bench.pids("ledger", "dedup", "redis"),
        payload_bytes=PAYLOAD_BYTES,
        batched=text.startswith("batched"),
        **more,
    )


def beside_null(bench: Bench, workload: W) -> list[W]:
    """The same load on the null ledger, and a load that is held against that."""
    name, address = f"{workload.name}, null ledger", bench.null.address
    null = replace(workload, name=name, address=address, pids=bench.pids("null"), limits=())
    return [null, replace(workload, limits=(name, *workload.limits))]


async def publish(bench: Bench) -> list[Measurement]:
    """New messages, resent messages, and single messages."""
    # One block after the other, with nothing in it but entries.
    block = limits.fdatasync(DISK_BLOCK_BYTES)
    disk = bench.limit(block, each=DISK_BLOCK_BYTES / ENTRY_BYTES)
    workloads: list[Publish] = []
    for shape in ("unbatched", "batched"):
        alone = beside_null(bench, small(bench, shape, limits=[disk]))
        four = small(bench, f"{shape}, 4 producers", producers=4, limits=[disk])
        again = small(bench, f"{shape}, all duplicates", Resend, limits=[alone[0].name])
        workloads += [*alone, *beside_null(bench, four), again]
    # One after the other: to the ledger and back, to deduplication and back, script, disk.
    names = (limits.STREAM, limits.STREAM, limits.admit_script(1), limits.fdatasync(ENTRY_BYTES))
    in_turn = bench.series("2 stream ping-pongs + admit script + fdatasync", *names)
    one = small(bench, "one at a time", OneAtATime, limits=[in_turn])
    workloads.append(one)
    rounds = await bench.load(workloads)
    return [
        *figures(workloads, rounds).values(),
        latency(one.name, 0.5, rounds[one.name], in_turn.floor),
        latency(one.name, 0.99, rounds[one.name]),
    ]


async def read(bench: Bench) -> list[Measurement]:
    """A topic from its start, again and again; the null ledger sends one page again and again."""
    workloads: list[Read] = []
    for shape in ("single messages", "batches"):
        for payload_bytes in READ_PAYLOAD_BYTES:
            real = Read(
                name=f"read, {shape} of {payload_bytes:,} B",
                address=bench.stack.address("ledger"),
                topic=f"bench/read/{shape.split()[0]}-{payload_bytes}",
                pids=bench.pids("ledger"),
                payload_bytes=payload_bytes,
                in_bytes=True,
                batched=shape == "batches",
            )
            workloads += beside_null(bench, real)
    return await bench.compare(workloads)


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
    workloads: list[Publish] = []
    for chunk_bytes, alone in zip(CHUNK_BYTES, stored, strict=True):
        disk = Limit(alone.name, alone.value)
        workloads += _chunked(bench, Publish, chunk_bytes, ("ledger", "dedup", "redis"), [disk])
        workloads += _chunked(bench, Read, chunk_bytes, ("ledger",), [])
    return [*stored, *await bench.compare(workloads, seconds=seconds)]


def _chunked(
    bench: Bench,
    kind: type[Publish],
    chunk_bytes: int,
    services: Sequence[str],
    disk: Sequence[Limit],
) -> list[Publish]:
    """Single messages, and large ones in chunks of their size; each on the null ledger, too."""
    text, size = kind.__name__.lower(), _size(chunk_bytes)
    single = kind(
        name=f"{text}, single messages of {size}",
        address=bench.stack.address("ledger"),
        topic=f"bench/large/{text}-single-{chunk_bytes}",
        pids=bench.pids(*services),
        limits=disk,
        payload_bytes=chunk_bytes,
        in_bytes=True,
    )
    chunked = replace(
        single,
        name=f"{text}, {_size(LARGE_BYTES)} in chunks of {size}",
        topic=f"bench/large/{text}-chunked-{chunk_bytes}",
        payload_bytes=LARGE_BYTES,
        chunk_bytes=chunk_bytes,
    )
    single_null, single = beside_null(bench, single)
    chunked_null, chunked = beside_null(bench, chunked)
    chunked_null.limits, chunked.limits = [single_null.name], [single.name]
    return [single_null, chunked_null, single, chunked]


def _size(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // KIB} KiB"
