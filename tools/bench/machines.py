"""The machine of a subscription alone, with a log that is numbers, and the least that Python can do
for the same entries.

Times are of the processor: the machine never waits, and the neighbours must not count.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from heapq import heappush
from typing import Final

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
from tools.bench.rounds import BenchError, Took

PAGE_ENTRIES: Final = 500  # read at a time: the service's own default
PLENTY: Final = 10_000_000  # never reached
ROOMY: Final = Options(
    key_parked_max=PLENTY, consumer_parked_max=PLENTY, consumer_unacked_max=0, unacked_max=0
)
"""No limit on remembered entries."""

NOW_MS: Final = 1_700_000_000_000


class Log:
    """Entries whose keys take turns."""

    def __init__(self, keys: int) -> None:
        self._keys = keys
        self._next = 0

    def page(self, entries: int = PAGE_ENTRIES) -> list[Entry]:
        numbers = range(self._next, self._next + entries)
        self._next = numbers.stop
        return [Entry(Position(1, each), b"key-%d" % (each % self._keys)) for each in numbers]


class Machine:
    """One subscription with two consumers, which take nothing yet."""

    def __init__(self, keys: int) -> None:
        self.subscription = Subscription(ROOMY, Ring(), Durable(Acknowledged(None)))
        self.log = Log(keys)
        self.join(1)
        self.join(2)

    def join(self, consumer: int) -> None:
        self.subscription.join(consumer, name=f"consumer-{consumer}", now_ms=NOW_MS)

    def read(self, entries: int) -> None:
        """Read the log's next entries, and deliver none."""
        page = self.log.page(entries)
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


async def parked(entries: int, keys: int) -> Machine:
    """A machine that has read these entries, with two consumers that take none."""
    machine = Machine(keys)
    for first in range(0, entries, SCAN_ENTRIES):
        await asyncio.sleep(0)  # a signal is to be heard
        machine.read(min(SCAN_ENTRIES, entries - first))
    if machine.subscription.parked != entries:
        raise BenchError(f"{machine.subscription.parked} entries wait, and not {entries}")
    return machine


async def deques(entries: int, keys: int) -> dict[bytes | None, deque[Position]]:
    """The same entries as plainly as can be: their positions, by key."""
    found: dict[bytes | None, deque[Position]] = {}
    log = Log(keys)
    for _ in range(0, entries, PAGE_ENTRIES):
        for entry in log.page():
            found.setdefault(entry.key, deque()).append(entry.position)
    return found


def in_flight(entries: int, keys: int) -> Machine:
    """A machine with two consumers: the first takes nothing, and the second has these entries in
    flight."""
    machine = Machine(keys)
    machine.perform(machine.subscription.permit(2, entries, NOW_MS))
    while machine.subscription.consumers[2].permits > 0:
        machine.read(PAGE_ENTRIES)
    return machine


async def join(machine: Machine) -> Took:
    """Have a consumer join, which is timed, and go again."""
    began = time.process_time()
    machine.join(9)
    took = Took(time.process_time() - began)
    machine.perform(machine.subscription.close(9, NOW_MS))
    return took


async def leave(machine: Machine) -> Took:
    """Disconnect the second consumer, which is timed, and have it come back."""
    subscription = machine.subscription
    entries = len(subscription.consumers[2].flights)
    began = time.process_time()
    effects = subscription.leave(2, now_ms=NOW_MS)
    took = Took(time.process_time() - began)
    machine.perform(effects)
    machine.join(2)
    machine.perform(subscription.permit(2, entries, NOW_MS))
    if len(subscription.consumers[2].flights) != entries:
        raise BenchError("not everything is in flight again")
    return took


async def heaps(flights: dict[int, Entry]) -> Took:
    """Put entries from a dict into a heap for each key, timed."""
    returned: dict[bytes | None, list[Position]] = {}
    began = time.process_time()
    for entry in flights.values():
        heappush(returned.setdefault(entry.key, []), entry.position)
    return Took(time.process_time() - began)
