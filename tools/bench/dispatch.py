"""Subscriptions: the rate of delivery, the cost of a stuck consumer for the others, and the cost of
joining and leaving.

    joining, leaving, memory               of the machine alone, beside less work in this process
    end to end, through real processes     beside a plain read of the log, and beside a stream on
                                           which a dispatcher that only answers sends the same
"""

import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Final

from tools.bench import machines
from tools.bench.bench import Bench
from tools.bench.delivery import Arrive, Backlog, Deliver, ReadLog
from tools.bench.figures import Measurement, latency, over_rounds
from tools.bench.load import Workload, figures
from tools.bench.rounds import ROUNDS, rounds_of

USUAL_KEYS: Final = 10_000
MANY_KEYS: Final = 1_000_000  # more than there are messages
SHAPES: Final = (
    *((consumers, USUAL_KEYS) for consumers in (1, 4, 16)),
    *((4, keys) for keys in (10, MANY_KEYS)),
)
"""Consumers, and the keys that they share."""

STUCK_SHAPE: Final = (4, USUAL_KEYS)  # where one consumer is stuck

PARKED: Final = ((0, USUAL_KEYS), (1_000_000, USUAL_KEYS), (100_000, 100_000))
"""Messages, and their keys, that wait when a consumer joins."""

IN_FLIGHT: Final = 50_000  # messages that a consumer has when it leaves: as many as it may
MEMORY_ENTRIES: Final = 100_000  # messages, or keys, that memory is divided by
MEMORY_KEYS: Final = 1_000  # keys of the messages that wait
MESSAGES: Final = 20_000  # messages of a topic that is consumed end to end


async def dispatch(bench: Bench) -> list[Measurement]:
    return [*await _joins_and_leaves(bench), *await _memory(bench), *await _end_to_end(bench)]


# ---- the machine alone


async def _joins_and_leaves(bench: Bench) -> list[Measurement]:
    found: list[Measurement] = []
    for parked, keys in PARKED:
        entries = bench.scaled(parked)
        machine = await machines.parked(entries, keys)
        rounds = await rounds_of(partial(machines.join, machine), bench.seconds)
        noun = f"{entries:,} parked" + (f" of {keys:,} keys" if entries else "")
        none = found[0] if found else None
        found.append(latency(f"machine, join, {noun}", 0.5, rounds, none))
    entries = bench.scaled(IN_FLIGHT)
    flights = dict(enumerate(machines.Log(USUAL_KEYS).page(entries)))
    rounds = await rounds_of(partial(machines.heaps, flights), bench.seconds)
    heaps = latency(f"{entries:,} entries from a dict into heaps", 0.5, rounds)
    machine = machines.in_flight(entries, USUAL_KEYS)
    rounds = await rounds_of(partial(machines.leave, machine), bench.seconds)
    leave = latency(f"machine, leave, {entries:,} in flight", 0.5, rounds, heaps)
    return [*found, heaps, leave]


async def _memory(bench: Bench) -> list[Measurement]:
    """Of a message that waits, where many have a key; and of a key, where each has one."""
    entries = -(-bench.scaled(MEMORY_ENTRIES) // machines.PAGE_ENTRIES) * machines.PAGE_ENTRIES
    found = []
    for noun, keys in (("message parked", MEMORY_KEYS), ("active key, a message each", entries)):
        make = partial(machines.deques, entries, keys)
        plain = await _bytes(f"positions in deques, {noun}", entries, make)
        park = partial(machines.parked, entries, keys)
        found += [plain, await _bytes(f"machine, {noun}", entries, park, plain)]
    return found


async def _bytes(
    name: str, count: int, make: Callable[[], Awaitable[object]], limit: Measurement | None = None
) -> Measurement:
    """The memory that `make` takes, divided by `count`."""
    values = []
    for _ in range(ROUNDS):
        tracemalloc.start()
        try:
            made = await make()
            values.append(tracemalloc.get_traced_memory()[0] / count)
            del made
        finally:
            tracemalloc.stop()
    return Measurement(name, "B", over_rounds(values), values, limit)


# ---- end to end


async def _end_to_end(bench: Bench) -> list[Measurement]:
    plain = ReadLog(
        name="plain read of the log, metadata and payloads",
        address=bench.stack.address("ledger"),
        topic=_topic(USUAL_KEYS),
        pids=bench.pids("dispatcher", "ledger", "cursor"),
        backlog=_backlog(bench, USUAL_KEYS),
    )
    workloads: list[Workload] = [plain]
    for shape in SHAPES:
        noun = _noun(*shape)
        answered = _deliver(bench, f"bare stream, {noun}", *shape, null=True)
        delivered = _deliver(bench, f"delivered, {noun}", *shape)
        delivered.limits = [plain.name, answered.name]
        workloads += [answered, delivered]
    workloads += _stuck(bench)
    followed = Arrive(
        name="published until a plain read has it",
        address=bench.stack.address("ledger"),
        topic=_topic(0),
    )
    dispatcher = bench.stack.address("dispatcher")
    arrived = replace(followed, name="published until it is delivered", dispatcher=dispatcher)
    rounds = await bench.load([*workloads, followed, arrived])
    found = list(figures(workloads, rounds).values())
    for share in (0.5, 0.99):
        limit = latency(followed.name, share, rounds[followed.name])
        found += [limit, latency(arrived.name, share, rounds[arrived.name], limit)]
    return found


def _stuck(bench: Bench) -> list[Deliver]:
    """The other consumers' messages, while none or one is stuck."""
    noun = f"delivered, what {STUCK_SHAPE[0] - 1} of {_noun(*STUCK_SHAPE)} get"
    none = _deliver(bench, f"{noun}, none stuck", *STUCK_SHAPE)
    one = _deliver(bench, f"{noun}, one stuck", *STUCK_SHAPE)
    none.of_others = one.of_others = one.stuck = True
    one.limits = [none.name]
    return [none, one]


def _deliver(bench: Bench, name: str, consumers: int, keys: int, *, null: bool = False) -> Deliver:
    return Deliver(
        name=name,
        address=bench.null.address if null else bench.stack.address("dispatcher"),
        topic=_topic(keys),
        pids=bench.pids("dispatcher", "ledger", "cursor"),
        backlog=_backlog(bench, keys, null=null),
        consumers=consumers,
    )


def _backlog(bench: Bench, keys: int, *, null: bool = False) -> Backlog:
    ledger = bench.null.address if null else bench.stack.address("ledger")
    return Backlog(ledger, _topic(keys), bench.scaled(MESSAGES), keys)


def _topic(keys: int) -> str:
    return f"bench/dispatch/{keys}-keys"


def _noun(consumers: int, keys: int) -> str:
    people = "1 consumer" if consumers == 1 else f"{consumers} consumers"
    return f"{people}, {keys:,} keys"
