"""Subscriptions: how fast messages are delivered, what a consumer that is stuck costs the others,
and what coming and going costs.

    the machine of a subscription alone    beside dicts, in the same process
    end to end, through real processes     beside a plain read of the log, and beside a stream on
                                           which a dispatcher that only answers sends the same
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Final

from services.dispatcher.core.effects import Entry
from tools.bench import delivery, machines
from tools.bench.bench import Bench, converse
from tools.bench.delivery import Consuming, DeliveryJob
from tools.bench.measurement import Limit, Measurement, latency, lowest, rate
from tools.bench.rounds import ROUNDS, Round
from tools.bench.statistics import over_rounds
from tools.bench.workload import Outcome, outcomes_from_json

CONSUMERS: Final = (1, 4, 16)
KEYS: Final = (10, 10_000, 1_000_000)
"""How many consumers share how many keys."""

STUCK_CONSUMERS: Final = 4
"""How many there are, one of which is stuck."""

USUAL_KEYS: Final = 10_000

PARKED: Final = ((0, USUAL_KEYS), (1_000_000, USUAL_KEYS), (100_000, 100_000))
"""How many messages, of how many keys, wait when a consumer joins."""

IN_FLIGHT: Final = 50_000
"""How many messages a consumer has that leaves: as many as it may."""

MEMORY_ENTRIES: Final = 100_000
"""How many messages, or keys, memory is divided by."""

MEMORY_KEYS: Final = 1_000
"""How many keys the messages have that wait."""

MESSAGES: Final = 20_000
"""How many messages a topic has that is consumed end to end."""

SERVICES: Final = ("dispatcher", "ledger", "cursor")

GRACE_S: Final = 300.0
"""How long everything end to end may take."""


async def dispatch(bench: Bench) -> list[Measurement]:
    """Everything."""
    return [
        *await _cores(bench),
        *await _stuck(bench),
        *await _comings_and_goings(bench),
        *await _memory(bench),
        *await _end_to_end(bench),
    ]


# ---- the machine alone


async def _cores(bench: Bench) -> list[Measurement]:
    found = []
    for keys in KEYS:
        for consumers in CONSUMERS:
            noun = f"{_people(consumers)}, {keys:,} keys"
            loop = machines.Loop(consumers, keys)
            limit = rate(
                f"dict loop, {noun}", "messages", await _rounds(bench, loop.step, loop.log)
            )
            machine = machines.Machine(consumers, keys)
            machine.take()
            rounds = await _rounds(bench, machine.step, machine.log)
            beside = Limit(limit.name, limit.value)
            found += [limit, rate(f"machine, {noun}", "messages", rounds, limit=beside)]
    return found


async def _stuck(bench: Bench) -> list[Measurement]:
    """What the others get a second, of consumers of whom one is stuck, or none."""
    noun = f"of {STUCK_CONSUMERS}, {USUAL_KEYS:,} keys"
    going = machines.Machine(STUCK_CONSUMERS, USUAL_KEYS)
    stuck = machines.Machine(STUCK_CONSUMERS, USUAL_KEYS, is_stuck=True)
    pages = []
    for machine in (going, stuck):
        machine.take()
        pages.append(machines.timed(machine.step, machine.log))
    # In turn: what disturbs the machine meanwhile disturbs both.
    rounds = [[await _round(each, bench.seconds) for each in pages] for _ in range(ROUNDS)]
    without, with_ = (list(each) for each in zip(*rounds, strict=True))
    share = _share_of_others(going)
    none = rate(f"machine, what 3 get {noun}, none stuck", "messages", without, each=share)
    limit = Limit(none.name, none.value)
    one = rate(f"machine, what 3 get {noun}, one stuck", "messages", with_, limit=limit)
    return [none, one]


def _share_of_others(machine: machines.Machine) -> float:
    """Of the keys, the share that all but one of the consumers own."""
    selector = machine.subscription.selector
    page = machines.Log(USUAL_KEYS).page(USUAL_KEYS)
    owners = [selector.owner(selector.slot(each.key)) for each in page if each.key is not None]
    return 1 - owners.count(machines.STUCK) / len(owners)


async def _rounds(
    bench: Bench, step: Callable[[Sequence[Entry]], int], log: machines.Log
) -> list[Round]:
    pages = machines.timed(step, log)
    next(pages)
    return [await _round(pages, bench.seconds) for _ in range(ROUNDS)]


async def _round(pages: Iterator[tuple[int, float]], seconds: float) -> Round:
    """Pages for so long. What reading them would take is not counted."""
    count, elapsed_s = 0, 0.0
    while not count or elapsed_s < seconds:
        await asyncio.sleep(0)  # a signal is to be heard
        delivered, took_s = next(pages)
        count += delivered
        elapsed_s += took_s
    return Round(count, elapsed_s, [])


async def _comings_and_goings(bench: Bench) -> list[Measurement]:
    found: list[Measurement] = []
    for entries, keys in PARKED:
        machine = await machines.parked(bench.scaled(entries), keys)
        rounds = await _repeated(bench, partial(machines.join, machine))
        limit = Limit(found[0].name, found[0].value) if found else None
        noun = f"{bench.scaled(entries):,} parked" + (f" of {keys:,} keys" if entries else "")
        found.append(latency(f"machine, join, {noun}", 0.5, rounds, limit))
    entries = bench.scaled(IN_FLIGHT)
    rounds = await _repeated(bench, partial(machines.heaps, entries, USUAL_KEYS))
    heaps = latency(f"{entries:,} entries from a dict into heaps", 0.5, rounds)
    machine = machines.in_flight(entries, USUAL_KEYS)
    rounds = await _repeated(bench, partial(machines.leave, machine))
    beside = Limit(heaps.name, heaps.value)
    leave = latency(f"machine, leave, {entries:,} in flight", 0.5, rounds, beside)
    return [*found, heaps, leave]


async def _repeated(bench: Bench, call: Callable[[], float]) -> list[Round]:
    """Rounds of what says itself how long it computed, in seconds."""
    rounds = []
    for _ in range(ROUNDS):
        latencies_s: list[float] = []
        until = time.perf_counter() + bench.seconds
        while not latencies_s or time.perf_counter() < until:
            await asyncio.sleep(0)  # a signal is to be heard
            latencies_s.append(call())
        rounds.append(Round(len(latencies_s), sum(latencies_s), latencies_s))
    return rounds


# ---- memory


async def _memory(bench: Bench) -> list[Measurement]:
    """Of a message that waits, where many have a key; and of a key, where each has one."""
    entries = -(-bench.scaled(MEMORY_ENTRIES) // machines.PAGE_ENTRIES) * machines.PAGE_ENTRIES
    found = []
    for noun, keys in (("message parked", MEMORY_KEYS), ("active key, a message each", entries)):
        plain = await _bytes(
            f"positions in deques, {noun}",
            entries,
            partial(machines.deques, entries, keys),
        )
        limit = Limit(plain.name, plain.value)
        found.append(plain)
        found.append(
            await _bytes(
                f"machine, {noun}",
                entries,
                partial(machines.parked, entries, keys),
                limit,
            )
        )
    return found


async def _bytes(
    name: str, count: int, make: Callable[[], Awaitable[object]], limit: Limit | None = None
) -> Measurement:
    spread = over_rounds([await machines.traced(make) / count for _ in range(ROUNDS)])
    return Measurement(name, "B", spread, ROUNDS, limit, lower_is_better=True)


# ---- end to end


async def _end_to_end(bench: Bench) -> list[Measurement]:
    messages = bench.scaled(MESSAGES)
    usual = [Consuming(each, USUAL_KEYS) for each in CONSUMERS]
    few_keys = Consuming(STUCK_CONSUMERS, KEYS[0])
    stuck = Consuming(STUCK_CONSUMERS, USUAL_KEYS, is_stuck=True)
    pids = bench.stack.endpoints["pids"]
    assert isinstance(pids, dict)
    job = DeliveryJob(
        bench.stack.address("ledger"),
        bench.stack.address("dispatcher"),
        bench.null_ledger.address,
        "bench/dispatch",
        messages,
        [*usual, few_keys, stuck],
        ROUNDS,
        bench.seconds,
        {name: pids[name] for name in SERVICES},
    )
    answer = await converse("tools.bench.delivery", job.to_json(), GRACE_S)
    outcomes = outcomes_from_json(answer)
    read = _measured(delivery.READ, outcomes)
    found = [read]
    for each in (*usual, few_keys):
        bare = _measured(each.name(bare=True), outcomes)
        limit = lowest(*(Limit(other.name, other.value) for other in (read, bare)))
        found += [bare, _measured(each.name(), outcomes, limit)]
    none = _measured(stuck.name(is_stuck=False), outcomes)
    limit = Limit(none.name, none.value)
    found += [none, _measured(stuck.name(), outcomes, limit)]
    for share in (0.5, 0.99):
        followed = latency(delivery.FOLLOWED, share, outcomes[delivery.FOLLOWED].rounds)
        limit = Limit(followed.name, followed.value)
        delivered = outcomes[delivery.DELIVERED].rounds
        found += [followed, latency(delivery.DELIVERED, share, delivered, limit)]
    return found


def _measured(name: str, outcomes: dict[str, Outcome], limit: Limit | None = None) -> Measurement:
    outcome = outcomes[name]
    return rate(name, "messages", outcome.rounds, limit=limit, cpu=outcome.cpu or None)


def _people(consumers: int) -> str:
    return "1 consumer" if consumers == 1 else f"{consumers} consumers"
