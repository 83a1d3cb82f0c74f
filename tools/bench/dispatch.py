"""Subscriptions: how fast messages are delivered, what a stuck consumer costs the others, and what
joining and leaving cost.

    the machine of a subscription alone    beside dicts, in the same process
    end to end, through real processes     beside a plain read of the log, and beside a stream on
                                           which a dispatcher that only answers sends the same
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from tools.bench import machines
from tools.bench.bench import Bench
from tools.bench.delivery import Arrive, Backlog, Deliver, ReadLog
from tools.bench.figures import ROUNDS, Measurement, Round, latency, over_rounds, rate
from tools.bench.load import Workload

CONSUMERS: Final = (1, 4, 16)
KEYS: Final = (10, 10_000, 1_000_000)  # that the consumers share
STUCK_CONSUMERS: Final = 4  # consumers of which one is stuck
USUAL_KEYS: Final = 10_000

PARKED: Final = ((0, USUAL_KEYS), (1_000_000, USUAL_KEYS), (100_000, 100_000))
"""Messages, and their keys, that wait when a consumer joins."""

IN_FLIGHT: Final = 50_000  # messages that a consumer has when it leaves: as many as it may
MEMORY_ENTRIES: Final = 100_000  # messages, or keys, that memory is divided by
MEMORY_KEYS: Final = 1_000  # keys of the messages that wait
MESSAGES: Final = 20_000  # messages of a topic that is consumed end to end
READ: Final = "plain read of the log, metadata and payloads"
FOLLOWED: Final = "published until a plain read has it"
DELIVERED: Final = "published until it is delivered"


async def dispatch(bench: Bench) -> list[Measurement]:
    """Everything."""
    return [
        *await _cores(bench),
        *await _stuck(bench),
        *await _joins_and_leaves(bench),
        *await _memory(bench),
        *await _end_to_end(bench),
    ]


# ---- the machine alone


async def _cores(bench: Bench) -> list[Measurement]:
    found = []
    for keys in KEYS:
        for consumers in CONSUMERS:
            noun = _noun(consumers, keys)
            loop = machines.Loop(consumers, keys)
            (plain,) = await _clocked(bench, machines.timed(loop.step, loop.log))
            limit = rate(f"dict loop, {noun}", "messages", plain)
            machine = machines.Machine(consumers, keys)
            machine.take()
            (rounds,) = await _clocked(bench, machines.timed(machine.step, machine.log))
            found += [limit, rate(f"machine, {noun}", "messages", rounds, limit)]
    return found


async def _stuck(bench: Bench) -> list[Measurement]:
    """What the others get a second, of consumers one or none of which is stuck."""
    noun = f"what 3 get of {STUCK_CONSUMERS}, {USUAL_KEYS:,} keys"
    going = machines.Machine(STUCK_CONSUMERS, USUAL_KEYS)
    stuck = machines.Machine(STUCK_CONSUMERS, USUAL_KEYS, is_stuck=True)
    for machine in (going, stuck):
        machine.take()
    steps = [machines.timed(each.step, each.log) for each in (going, stuck)]
    without, with_ = await _clocked(bench, *steps)
    share = going.share_of_others(USUAL_KEYS)
    none = rate(f"machine, {noun}, none stuck", "messages", without, each=share)
    return [none, rate(f"machine, {noun}, one stuck", "messages", with_, none)]


async def _joins_and_leaves(bench: Bench) -> list[Measurement]:
    found: list[Measurement] = []
    for parked, keys in PARKED:
        entries = bench.scaled(parked)
        machine = await machines.parked(entries, keys)
        (rounds,) = await _clocked(bench, partial(machines.join, machine))
        noun = f"{entries:,} parked" + (f" of {keys:,} keys" if entries else "")
        none = found[0] if found else None
        found.append(latency(f"machine, join, {noun}", 0.5, rounds, none))
    entries = bench.scaled(IN_FLIGHT)
    (rounds,) = await _clocked(bench, partial(machines.heaps, entries, USUAL_KEYS))
    heaps = latency(f"{entries:,} entries from a dict into heaps", 0.5, rounds)
    machine = machines.in_flight(entries, USUAL_KEYS)
    (rounds,) = await _clocked(bench, partial(machines.leave, machine))
    leave = latency(f"machine, leave, {entries:,} in flight", 0.5, rounds, heaps)
    return [*found, heaps, leave]


async def _clocked(
    bench: Bench, *steps: Callable[[], tuple[int, float]]
) -> Sequence[Sequence[Round]]:
    """Rounds of each step, which take turns. A step returns how much it did, in how many seconds of
    its own: what comes before and after is not counted. The first one warms up."""
    for step in steps:
        step()
    turns = [[await _clocked_round(step, bench.seconds) for step in steps] for _ in range(ROUNDS)]
    return list(zip(*turns, strict=True))


async def _clocked_round(step: Callable[[], tuple[int, float]], seconds: float) -> Round:
    count, latencies_s = 0, list[float]()
    until = time.perf_counter() + seconds
    while not count or time.perf_counter() < until:
        await asyncio.sleep(0)  # signals must get through
        done, took_s = step()
        count += done
        latencies_s.append(took_s)
    return Round(count, sum(latencies_s), latencies_s)


# ---- memory


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
    values = [await machines.traced(make) / count for _ in range(ROUNDS)]
    return Measurement(name, "B", over_rounds(values), values, limit, lower_is_better=True)


# ---- end to end


async def _end_to_end(bench: Bench) -> list[Measurement]:
    ledger = bench.stack.address("ledger")
    pids = bench.pids("dispatcher", "ledger", "cursor")

    def topic(keys: int) -> str:
        return f"bench/dispatch/{keys}-keys"

    def backlog(keys: int, address: str = ledger) -> Backlog:
        return Backlog(address, topic(keys), bench.scaled(MESSAGES), keys)

    def deliver(consumers: int, keys: int, *, stuck: bool | None = None) -> Deliver:
        noun, name = _noun(consumers, keys), f"delivered, {_noun(consumers, keys)}"
        if stuck is not None:
            which = "one stuck" if stuck else "none stuck"
            name = f"delivered, what {consumers - 1} of {noun} get, {which}"
        return Deliver(
            name=name,
            address=bench.stack.address("dispatcher"),
            topic=topic(keys),
            pids=pids,
            backlog=backlog(keys),
            consumers=consumers,
            stuck=stuck,
        )

    def bare(consumers: int, keys: int) -> Deliver:
        return Deliver(
            name=f"bare stream, {_noun(consumers, keys)}",
            address=bench.null.address,
            topic=topic(keys),
            pids=pids,
            backlog=backlog(keys, bench.null.address),
            consumers=consumers,
        )

    shapes = [*((each, USUAL_KEYS) for each in CONSUMERS), (STUCK_CONSUMERS, KEYS[0])]
    read = ReadLog(
        name=READ, address=ledger, topic=topic(USUAL_KEYS), pids=pids, backlog=backlog(USUAL_KEYS)
    )
    pairs = [(bare(*shape), deliver(*shape)) for shape in shapes]
    around = [deliver(STUCK_CONSUMERS, USUAL_KEYS, stuck=stuck) for stuck in (False, True)]
    followed = Arrive(name=FOLLOWED, address=ledger, topic=topic(0))
    dispatcher = bench.stack.address("dispatcher")
    delivered = Arrive(name=DELIVERED, address=ledger, topic=topic(0), dispatcher=dispatcher)
    workloads: list[Workload] = [read, *around, followed, delivered]
    workloads[1:1] = [each for pair in pairs for each in pair]
    rounds = await bench.load(workloads)

    def figure(workload: Workload, *limits: Measurement) -> Measurement:
        return rate(workload.name, "messages", rounds[workload.name], *limits)

    found = [plain := figure(read)]
    for answering, real in pairs:
        found += [answered := figure(answering), figure(real, plain, answered)]
    found += [none := figure(around[0]), figure(around[1], none)]
    for share in (0.5, 0.99):
        limit = latency(FOLLOWED, share, rounds[FOLLOWED])
        found += [limit, latency(DELIVERED, share, rounds[DELIVERED], limit)]
    return found


def _noun(consumers: int, keys: int) -> str:
    people = "1 consumer" if consumers == 1 else f"{consumers} consumers"
    return f"{people}, {keys:,} keys"
