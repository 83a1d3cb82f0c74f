"""The machine of a subscription alone, with a log that is numbers, beside the least that Python can
do for the same entries.

Times are of the processor: the machine never waits, and the neighbours must not count.
"""

import asyncio
import time
import tracemalloc
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from heapq import heappush
from typing import Any, Final

from seqgate.services.dispatcher.core.effects import (
    DeadLetter,
    Effect,
    Entry,
    Options,
    Persist,
    Record,
    Scan,
)
from seqgate.services.dispatcher.core.lags import SCAN_ENTRIES
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.core.selectors import Ring
from seqgate.services.dispatcher.core.settling import Durable
from seqgate.services.dispatcher.core.subscription import Subscription
from seqgate.types import Position
from tools.bench.bench import Bench
from tools.bench.figures import MEDIAN, Measurement, latency, over_rounds
from tools.bench.rounds import ROUNDS, BenchError, Call, Repeated, Took, check, take_turns

USUAL_KEYS: Final = 10_000
PARKED: Final = ((1_000_000, USUAL_KEYS), (100_000, 100_000))
"""Messages, and their keys, that wait when a consumer joins."""

IN_FLIGHT: Final = 50_000  # messages that a consumer has when it leaves: as many as it may
MEMORY_ENTRIES: Final = 100_000  # messages, or keys, that memory is divided by
MEMORY_KEYS: Final = 1_000  # keys of the messages that wait

PAGE_ENTRIES: Final = 500  # read at a time: the service's own default
PLENTY: Final = 10_000_000  # never reached
ROOMY: Final = Options(
    key_parked_max=PLENTY, consumer_parked_max=PLENTY, consumer_unacked_max=0, unacked_max=0
)
"""No limit on remembered entries."""

NOW_MS: Final = 1_700_000_000_000
HOLDER: Final = 2  # the consumer that has entries in flight
PASSER: Final = 9  # the consumer that joins and goes


async def machine(bench: Bench) -> list[Measurement]:
    """Joining, leaving and memory."""
    flights = bench.scaled(IN_FLIGHT)
    first = "machine, join, 0 parked"
    heaps = f"{flights:,} entries from a dict into heaps"
    timed = [(first, "", _joins(0, USUAL_KEYS))]
    for waiting, keys in PARKED:
        entries = bench.scaled(waiting)
        name = f"machine, join, {entries:,} parked of {keys:,} keys"
        timed.append((name, first, _joins(entries, keys)))
    timed.append((heaps, "", _heaps(flights)))
    timed.append((f"machine, leave, {flights:,} in flight", heaps, _leaves(flights)))
    found: dict[str, Measurement] = {}
    # One after the other: the collector visits what the others hold.
    for name, limit, made in timed:
        case = Repeated(name, await made)
        rounds = await take_turns([case], ROUNDS, bench.seconds)
        found[name] = latency(name, MEDIAN, rounds[name], found.get(limit))

    entries = -(-bench.scaled(MEMORY_ENTRIES) // PAGE_ENTRIES) * PAGE_ENTRIES
    for noun, keys in (("message parked", MEMORY_KEYS), ("active key, a message each", entries)):
        plain, parked = f"positions in deques, {noun}", f"machine, {noun}"
        for name, made_of in ((plain, _deques), (parked, _parked)):
            values = [await _bytes(made_of(entries, keys)) / entries for _ in range(ROUNDS)]
            found[name] = Measurement(name, "B", over_rounds(values), values, found.get(plain))
    return list(found.values())


async def _bytes(making: Awaitable[object]) -> int:
    """The memory that something takes."""
    tracemalloc.start()
    try:
        made = await making
        size_bytes, _ = tracemalloc.get_traced_memory()
        del made
    finally:
        tracemalloc.stop()
    return size_bytes


class Machine:
    """One subscription with two consumers, which take nothing yet, and a log of entries whose keys
    take turns."""

    def __init__(self, keys: int) -> None:
        self.subscription = Subscription(ROOMY, Ring(), Durable(Acknowledged(None)))
        self._keys = keys
        self._next = 0
        self.join(1)
        self.join(HOLDER)

    def join(self, consumer: int) -> None:
        self.subscription.join(consumer, name=f"consumer-{consumer}", now_ms=NOW_MS)

    def read(self, entries: int) -> None:
        """Read the log's next entries."""
        page = _entries(self._next, entries, self._keys)
        self._next += entries
        self.perform(self.subscription.read(page, NOW_MS))

    def perform(self, effects: Sequence[Effect]) -> None:
        """Leave deliveries in flight, and record failed attempts."""
        todo = deque(effects)
        while todo:
            effect = todo.popleft()
            if isinstance(effect, Record):
                todo += self.subscription.recorded(NOW_MS)
            elif isinstance(effect, Persist | Scan | DeadLetter):
                raise BenchError("the machine acknowledged or scanned entries")


def _entries(first: int, count: int, keys: int) -> list[Entry]:
    numbers = range(first, first + count)
    return [Entry(Position(1, each), b"key-%d" % (each % keys)) for each in numbers]


async def _parked(entries: int, keys: int) -> Machine:
    """A machine that has read these entries."""
    machine = Machine(keys)
    for first in range(0, entries, SCAN_ENTRIES):
        await asyncio.sleep(0)  # a signal is to be heard
        machine.read(min(SCAN_ENTRIES, entries - first))
    check(machine.subscription.parked, entries)
    return machine


async def _deques(entries: int, keys: int) -> dict[bytes | None, deque[Position]]:
    """The same entries as plainly as can be: their positions, by key."""
    found: dict[bytes | None, deque[Position]] = {}
    for first in range(0, entries, PAGE_ENTRIES):
        for entry in _entries(first, PAGE_ENTRIES, keys):
            found.setdefault(entry.key, deque()).append(entry.position)
    return found


async def _joins(entries: int, keys: int) -> Call:
    """A consumer joins, and goes again."""
    machine = await _parked(entries, keys)

    def close(_: object) -> None:
        machine.perform(machine.subscription.close(PASSER, NOW_MS))

    return _timed(partial(machine.join, PASSER), close)


async def _leaves(entries: int) -> Call:
    """The consumer that has entries in flight is disconnected, and comes back."""
    machine = Machine(USUAL_KEYS)
    subscription = machine.subscription
    machine.perform(subscription.permit(HOLDER, entries, NOW_MS))
    while subscription.consumers[HOLDER].permits > 0:
        machine.read(PAGE_ENTRIES)

    def come_back(effects: Sequence[Effect]) -> None:
        machine.perform(effects)
        machine.join(HOLDER)
        machine.perform(subscription.permit(HOLDER, entries, NOW_MS))
        check(len(subscription.consumers[HOLDER].flights), entries)

    return _timed(partial(subscription.leave, HOLDER, now_ms=NOW_MS), come_back)


async def _heaps(entries: int) -> Call:
    """Entries go from a dict into a heap for each key."""
    flights = dict(enumerate(_entries(0, entries, USUAL_KEYS)))

    def put() -> None:
        returned: dict[bytes | None, list[Position]] = {}
        for entry in flights.values():
            heappush(returned.setdefault(entry.key, []), entry.position)

    return _timed(put, lambda _: None)


def _timed(act: Callable[[], Any], undo: Callable[[Any], None]) -> Call:
    """A call that takes as long as `act`. `undo` gets its result."""

    async def call() -> Took:
        began = time.process_time()
        result = act()
        took = Took(time.process_time() - began)
        undo(result)
        return took

    return call
