"""The machine of a subscription alone, beside the least that Python can do for the same entries.

Times are of the processor: the machine never waits, and the neighbours must not count.
"""

import asyncio
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from heapq import heappush
from typing import Any, Final

from seqgate.services.dispatcher.core import effects
from seqgate.services.dispatcher.core.lags import SCAN_ENTRIES
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.core.selectors import Ring
from seqgate.services.dispatcher.core.settling import Durable
from seqgate.services.dispatcher.core.subscription import Subscription
from seqgate.types import Position
from tools.bench.bench import Bench
from tools.bench.figures import MEDIAN, Measurement, latency, over_rounds
from tools.bench.rounds import ROUNDS, BenchError, Call, Repeated, Took, check, take_turns

KEYS: Final = 10_000
PARKED: Final = ((1_000_000, KEYS), (100_000, 100_000))  # messages, and keys, that wait
IN_FLIGHT: Final = 50_000  # messages that a consumer has when it leaves: as many as it may
MEMORY_ENTRIES: Final = 100_000  # messages, or keys, that memory is divided by
MEMORY_KEYS: Final = 1_000  # keys of the messages that wait

PAGE_ENTRIES: Final = 500  # read at a time: the service's own default
PLENTY: Final = 10_000_000  # never reached
ROOMY: Final = effects.Options(
    key_parked_max=PLENTY, consumer_parked_max=PLENTY, consumer_unacked_max=0, unacked_max=0
)
NOW_MS: Final = 1_700_000_000_000


async def machine(bench: Bench) -> list[Measurement]:
    idle, flights = "machine, join, 0 parked", bench.scaled(IN_FLIGHT)
    heaps = f"{flights:,} entries from a dict into heaps"
    timed = [(idle, "", partial(_join, 0, KEYS))]
    for waiting, keys in PARKED:
        entries = bench.scaled(waiting)
        name = f"machine, join, {entries:,} parked of {keys:,} keys"
        timed.append((name, idle, partial(_join, entries, keys)))
    timed.append((heaps, "", partial(_heaps, flights)))
    timed.append((f"machine, leave, {flights:,} in flight", heaps, partial(_leave, flights)))
    found: dict[str, Measurement] = {}
    # One after the other: the collector visits what the others hold.
    for name, limit, make in timed:
        rounds = await take_turns([Repeated(name, await make())], ROUNDS, bench.seconds)
        found[name] = latency(name, MEDIAN, rounds[name], found.get(limit))

    entries = -(-bench.scaled(MEMORY_ENTRIES) // PAGE_ENTRIES) * PAGE_ENTRIES
    for noun, keys in (("message parked", MEMORY_KEYS), ("active key, a message each", entries)):
        plain = f"positions in deques, {noun}"
        for name, hold in ((plain, _deques), (f"machine, {noun}", _parked)):
            values = []
            for _ in range(ROUNDS):
                tracemalloc.start()
                held = await hold(entries, keys)
                values.append(tracemalloc.get_traced_memory()[0] / entries)
                tracemalloc.stop()
                del held
            found[name] = Measurement(name, "B", over_rounds(values), values, found.get(plain))
    return list(found.values())


class Machine:
    """One subscription with consumers 1 and 2, which take nothing yet, and a log of entries whose
    keys take turns."""

    def __init__(self, keys: int) -> None:
        self.subscription = Subscription(ROOMY, Ring(), Durable(Acknowledged(None)))
        self._keys = keys
        self._next = 0
        self.join(1)
        self.join(2)

    def join(self, consumer: int) -> None:
        self.subscription.join(consumer, name=f"consumer-{consumer}", now_ms=NOW_MS)

    def read(self, entries: int) -> None:
        self.perform(self.subscription.read(_log(self._next, entries, self._keys), NOW_MS))
        self._next += entries

    def perform(self, todo: Iterable[effects.Effect]) -> None:
        """Leave deliveries in flight, and record failed attempts."""
        for effect in todo:
            if isinstance(effect, effects.Record):
                self.perform(self.subscription.recorded(NOW_MS))
            elif isinstance(effect, effects.Persist | effects.Scan | effects.DeadLetter):
                raise BenchError("the machine acknowledged or scanned entries")


def _log(first: int, count: int, keys: int) -> list[effects.Entry]:
    numbers = range(first, first + count)
    return [effects.Entry(Position(1, each), b"key-%d" % (each % keys)) for each in numbers]


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
        for entry in _log(first, PAGE_ENTRIES, keys):
            found.setdefault(entry.key, deque()).append(entry.position)
    return found


async def _join(entries: int, keys: int) -> Call:
    """A third consumer joins, and goes again."""
    machine = await _parked(entries, keys)

    def close(_: object) -> None:
        machine.perform(machine.subscription.close(3, NOW_MS))

    return _timed(partial(machine.join, 3), close)


async def _leave(entries: int) -> Call:
    """The second consumer, which has these entries in flight, is disconnected and comes back."""
    machine = Machine(KEYS)
    subscription = machine.subscription
    machine.perform(subscription.permit(2, entries, NOW_MS))
    while subscription.consumers[2].permits > 0:
        machine.read(PAGE_ENTRIES)

    def come_back(todo: Iterable[effects.Effect]) -> None:
        machine.perform(todo)
        machine.join(2)
        machine.perform(subscription.permit(2, entries, NOW_MS))
        check(len(subscription.consumers[2].flights), entries)

    return _timed(partial(subscription.leave, 2, now_ms=NOW_MS), come_back)


async def _heaps(entries: int) -> Call:
    """Entries go from a dict into a heap for each key."""
    flights = dict(enumerate(_log(0, entries, KEYS)))

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
