"""Reading end to end, with the client library, from the start of a topic, again and again.

The limit is the null ledger, which sends the same page again and again.
"""

from typing import Final

from tools.bench.bench import Bench
from tools.bench.measurement import Limit, Measurement, rate
from tools.bench.workload import Outcome, Workload

PAYLOAD_BYTES: Final = (100, 1_000)


async def read(bench: Bench) -> list[Measurement]:
    """Single messages and batches."""
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
        alone = _measured(null, outcomes[null.name])
        limit = Limit(alone.name, alone.value)
        found += [alone, _measured(each, outcomes[each.name], limit)]
    return found


def _measured(workload: Workload, outcome: Outcome, limit: Limit | None = None) -> Measurement:
    return rate(
        workload.name,
        "messages",
        outcome.rounds,
        limit=limit,
        cpu=outcome.cpu,
        payload_bytes=workload.payload_bytes,
    )


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
