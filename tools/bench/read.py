"""Reading end to end, with the client library, from the start of a topic, again and again.

The limit is the null ledger, which sends the same page again and again.
"""

from typing import Final

from tools.bench.bench import Bench
from tools.bench.measurement import Limit, Measurement, rate
from tools.bench.workload import Outcome, Workload

PAYLOAD_BYTES: Final = (100, 1_000)


async def read(bench: Bench) -> list[Measurement]:
    """Single messages and batches, in messages and in bytes of payload."""
    workloads = [
        _workload(bench, payload_bytes, batched=batched)
        for batched in (False, True)
        for payload_bytes in PAYLOAD_BYTES
    ]
    nulls = [_to_null(bench, each) for each in workloads]
    pairs = list(zip(workloads, nulls, strict=True))
    outcomes = await bench.load([each for pair in pairs for each in pair])
    found = []
    for each, null in pairs:
        found += _both(null, outcomes[null.name], [None, None])
        found += _both(
            each, outcomes[each.name], [Limit(one.name, one.value) for one in found[-2:]]
        )
    return found


def _both(workload: Workload, outcome: Outcome, limits: list[Limit | None]) -> list[Measurement]:
    name, rounds = workload.name, outcome.rounds
    megabytes = workload.payload_bytes / 1e6
    return [
        rate(name, "messages", rounds, limit=limits[0], cpu=outcome.cpu),
        rate(name, "MB", rounds, each=megabytes, limit=limits[1]),
    ]


def _workload(bench: Bench, payload_bytes: int, *, batched: bool) -> Workload:
    shape = "batches" if batched else "single messages"
    return Workload(
        f"read, {shape} of {payload_bytes:,} B",
        "read",
        bench.stack.address("ledger"),
        f"bench/read/{'batched' if batched else 'single'}-{payload_bytes}",
        batched,
        payload_bytes,
        processes=("ledger",),
    )


def _to_null(bench: Bench, workload: Workload) -> Workload:
    return workload._replace(
        name=f"{workload.name}, null ledger",
        address=bench.null_ledger.address,
        processes=("null",),
    )
