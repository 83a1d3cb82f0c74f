"""Publishing end to end, with the client library: messages a second, and how long one takes.

Each workload also runs against the null ledger, which only answers. That limit has the client, the
messages and gRPC in it; the other limit is the disk.
"""

from collections.abc import Sequence
from typing import Final

from tools.bench import limits
from tools.bench.bench import UNDEDUPLICATED, Bench
from tools.bench.measurement import Limit, Measurement, latency, lowest, rate
from tools.bench.statistics import in_series
from tools.bench.workload import Kind, Workload

PAYLOAD_BYTES: Final = 100
"""Of a message; what Kafka's and Pulsar's own benchmarks call small."""

ENTRY_BYTES: Final = PAYLOAD_BYTES + 50
"""With its metadata, alone or in a batch, about."""

DISK_BLOCK_BYTES: Final = 100_000

SERVICES: Final = ("ledger", "dedup", "redis")

LATENCY: Final = "publish, one at a time"


async def publish(bench: Bench) -> list[Measurement]:
    """New messages, resent messages, and single messages."""
    workloads = [
        workload_of(bench, "publish, unbatched", "publish"),
        workload_of(bench, "publish, batched", "publish", batched=True),
        workload_of(bench, "publish, unbatched, 4 producers", "publish", producers=4),
        workload_of(bench, "publish, batched, 4 producers", "publish", batched=True, producers=4),
        workload_of(bench, "publish, unbatched, all duplicates", "resend"),
        workload_of(bench, "publish, batched, all duplicates", "resend", batched=True),
    ]
    one = workload_of(bench, LATENCY, "one at a time")
    nulls = [_to_null(bench, each) for each in workloads if each.kind == "publish"]
    neighbours = sorted([*workloads, *nulls, one], key=lambda each: (each.batched, each.producers))
    outcomes = await bench.load(neighbours)

    found = []
    answering: dict[tuple[bool, int], Limit] = {}
    for null in nulls:
        measured = rate(null.name, "messages", outcomes[null.name].rounds)
        answering[null.batched, null.producers] = Limit(measured.name, measured.value)
        found.append(measured)
    for each in workloads:
        outcome = outcomes[each.name]
        limit = answering[each.batched, each.producers]
        if each.kind == "publish":
            limit = lowest(limit, _disk(bench))
        found.append(rate(each.name, "messages", outcome.rounds, limit=limit, cpu=outcome.cpu))
    rounds, cpu = outcomes[LATENCY].rounds, outcomes[LATENCY].cpu
    limit = _in_turn(bench)
    found.append(rate(LATENCY, "messages", rounds, limit=limit, cpu=cpu))
    floor = limit._replace(value=1000 / limit.value)
    found += [latency(LATENCY, 0.5, rounds, floor), latency(LATENCY, 0.99, rounds)]
    return found


async def price(bench: Bench) -> list[Measurement]:
    """The same with deduplication and without, round by round: what deduplication costs."""
    kinds: Sequence[tuple[str, Kind, bool]] = (
        ("unbatched", "publish", False),
        ("batched", "publish", True),
        ("one at a time", "one at a time", False),
    )
    pairs = [
        (
            workload_of(bench, f"publish, {text}, deduplication on", kind, batched=batched),
            workload_of(
                bench,
                f"publish, {text}, deduplication off",
                kind,
                batched=batched,
                namespace=UNDEDUPLICATED,
            ),
        )
        for text, kind, batched in kinds
    ]
    outcomes = await bench.load([each for pair in pairs for each in pair])
    found = []
    for on, off in pairs:
        without = rate(off.name, "messages", outcomes[off.name].rounds, cpu=outcomes[off.name].cpu)
        limit = Limit(off.name, without.value)
        found.append(without)
        found.append(
            rate(
                on.name,
                "messages",
                outcomes[on.name].rounds,
                limit=limit,
                cpu=outcomes[on.name].cpu,
            )
        )
    return found


def workload_of(
    bench: Bench,
    name: str,
    kind: Kind,
    *,
    batched: bool = False,
    producers: int = 1,
    namespace: str = "bench/publish",
) -> Workload:
    """A load of small messages on the ledger of a bench."""
    return Workload(
        name,
        kind,
        bench.stack.address("ledger"),
        f"{namespace}/{name.replace(', ', '-').replace(' ', '_')}",
        batched,
        PAYLOAD_BYTES,
        producers,
        SERVICES,
    )


def _to_null(bench: Bench, workload: Workload) -> Workload:
    return workload._replace(
        name=f"{workload.name}, null ledger",
        address=bench.null_ledger.address,
        processes=("null",),
    )


def _disk(bench: Bench) -> Limit:
    """One block after the other, with nothing in it but entries."""
    messages = DISK_BLOCK_BYTES / ENTRY_BYTES
    return bench.limit(limits.fdatasync(DISK_BLOCK_BYTES), each=messages)


def _in_turn(bench: Bench) -> Limit:
    """What must happen for one message, one after the other: to the ledger and back, to
    deduplication and back, its script, and the disk."""
    names = (limits.STREAM, limits.STREAM, limits.admit_script(1), limits.fdatasync(ENTRY_BYTES))
    value = in_series(*(bench.limit(name).value for name in names))
    return Limit("2 stream ping-pongs + admit script + fdatasync", value)
