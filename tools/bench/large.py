"""Large messages end to end, with the client library: published in chunks, and put together again.

The limit of messages in chunks is the same bytes in single messages of a chunk's size, since chunks
are stored one by one as such messages are. The limits of these are measured, too:

    in chunks  <  single messages of a chunk's size  <  the store alone, the null ledger
"""

from collections.abc import Mapping
from itertools import chain
from typing import Final, NamedTuple

from services.ledger.adapters.sqlite import open_sqlite_store
from tools.bench import store
from tools.bench.bench import Bench
from tools.bench.measurement import Limit, Measurement, rate
from tools.bench.workload import Kind, Outcome, Workload

KIB: Final = 1024
MIB: Final = 1024 * KIB

MESSAGE_BYTES: Final = 4 * MIB
"""Of a large message."""

CHUNK_BYTES: Final = (MIB, 64 * KIB)
"""A fifth of the largest entry that the service takes, and far less."""

COMMIT_BYTES: Final = 8 * MIB
"""What the service stores together at most, unless told otherwise."""

SECONDS_MAX: Final = 0.15
"""How long a round takes at most: there are many, and one writes some ten megabytes."""

SERVICES: Final[Mapping[Kind, tuple[str, ...]]] = {
    "publish": ("ledger", "dedup", "redis"),
    "read": ("ledger",),
}

Outcomes = Mapping[str, Outcome]


class _Four(NamedTuple):
    """What is compared for one size of chunks."""

    single_null: Workload
    chunked_null: Workload
    single: Workload
    chunked: Workload

    def measured(self, outcomes: Outcomes, *others: Measurement) -> list[Measurement]:
        """The figures, each beside its limit; `others` limit the single messages as well."""
        single_null = _measured(self.single_null, outcomes)
        single = _measured(self.single, outcomes, single_null, *others)
        return [
            single_null,
            _measured(self.chunked_null, outcomes, single_null),
            single,
            _measured(self.chunked, outcomes, single),
        ]


async def large(bench: Bench) -> list[Measurement]:
    """Publishing and reading, for each size of chunks."""
    seconds = min(bench.seconds, SECONDS_MAX)
    publishing = [_four(bench, "publish", chunk_bytes) for chunk_bytes in CHUNK_BYTES]
    reading = [_four(bench, "read", chunk_bytes) for chunk_bytes in CHUNK_BYTES]
    stored = await _stored(bench, seconds)
    workloads = chain.from_iterable([*publishing, *reading])
    outcomes = await bench.load(list(workloads), seconds=seconds)
    found = list(stored)
    for four, alone in zip(publishing, stored, strict=True):
        found += four.measured(outcomes, alone)
    for four in reading:
        found += four.measured(outcomes)
    return found


async def _stored(bench: Bench, seconds: float) -> list[Measurement]:
    async with open_sqlite_store(bench.folder / "large.db") as log:
        return [
            await store.commits(bench, log, COMMIT_BYTES // chunk_bytes, chunk_bytes, seconds)
            for chunk_bytes in CHUNK_BYTES
        ]


def _measured(workload: Workload, outcomes: Outcomes, *limits: Measurement) -> Measurement:
    """The figure beside the lowest of its limits, which are for messages of other sizes."""
    outcome, payload_bytes = outcomes[workload.name], workload.payload_bytes
    lowest = min(limits, key=lambda each: each.mb_per_s or 0, default=None)
    limit = None
    if lowest is not None and lowest.mb_per_s is not None:
        limit = Limit(lowest.name, lowest.mb_per_s * 1e6 / payload_bytes)
    return rate(
        workload.name,
        "messages",
        outcome.rounds,
        limit=limit,
        cpu=outcome.cpu,
        payload_bytes=payload_bytes,
    )


def _four(bench: Bench, kind: Kind, chunk_bytes: int) -> _Four:
    single = Workload(
        f"{kind}, single messages of {_size(chunk_bytes)}",
        kind,
        bench.stack.address("ledger"),
        f"bench/large/{kind}-single-{chunk_bytes}",
        batched=False,
        payload_bytes=chunk_bytes,
        processes=SERVICES[kind],
    )
    chunked = single._replace(
        name=f"{kind}, {_size(MESSAGE_BYTES)} in chunks of {_size(chunk_bytes)}",
        topic=f"bench/large/{kind}-chunked-{chunk_bytes}",
        payload_bytes=MESSAGE_BYTES,
        chunk_bytes=chunk_bytes,
    )
    return _Four(_to_null(bench, single), _to_null(bench, chunked), single, chunked)


def _to_null(bench: Bench, workload: Workload) -> Workload:
    return workload._replace(
        name=f"{workload.name}, null ledger",
        address=bench.null_ledger.address,
        processes=("null",),
    )


def _size(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // KIB} KiB"
