"""The machine of a subscription, and everything around it that only answers: its log is numbers,
its consumers acknowledge at once, and what it wants durable is.

    page of entries ──▶ machine ──▶ deliveries ──▶ acknowledged ──▶ persisted ──▶ next page

Only the machine is timed, in processor time: it never waits, and the neighbours must not count.
Beside it: the least that Python can do for the same entries.
"""

import asyncio
import time
import tracemalloc
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from heapq import heappush
from typing import Final

from seqgate.services.dispatcher.core.effects import (
    DeadLetter,
    Deliver,
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
from seqgate.services.dispatcher.core.subscription import Ack, Subscription
from seqgate.types import Position
from tools.bench.figures import BenchError

PAGE_ENTRIES: Final = 500  # read at a time: the service's own default
PERMITS: Final = 1_000
"""How many messages a consumer takes before it acknowledges: the client's own default."""

PLENTY: Final = 10_000_000  # never reached
ROOMY: Final = Options(
    key_parked_max=PLENTY, consumer_parked_max=PLENTY, consumer_unacked_max=0, unacked_max=0
)
"""What is read is remembered, whatever it is."""

STUCK: Final = 1  # the consumer that acknowledges nothing, where one does not
NOW_MS: Final = 1_700_000_000_000


class Log:
    """Entries whose keys take turns."""

    def __init__(self, keys: int) -> None:
        self._keys = keys
        self._next = 0

    def page(self, entries: int = PAGE_ENTRIES) -> list[Entry]:
        """The next entries."""
        numbers = range(self._next, self._next + entries)
        self._next = numbers.stop
        return [Entry(Position(1, each), b"key-%d" % (each % self._keys)) for each in numbers]


class Machine:
    """One subscription with some consumers."""

    def __init__(
        self, consumers: int, keys: int, *, options: Options | None = None, is_stuck: bool = False
    ) -> None:
        self.subscription = Subscription(options or Options(), Ring(), Durable(Acknowledged(None)))
        self.log = Log(keys)
        self._stuck = STUCK if is_stuck else 0
        self._unsettled = 0
        for consumer in range(1, consumers + 1):
            self.join(consumer)

    def join(self, consumer: int) -> None:
        """One more consumer, that takes nothing yet."""
        self.subscription.join(consumer, name=f"consumer-{consumer}", now_ms=NOW_MS)

    def take(self, messages: int = PERMITS) -> None:
        """Have all consumers take messages."""
        for consumer in list(self.subscription.consumers):
            self.settle(self.subscription.permit(consumer, messages, NOW_MS))

    def step(self, page: Sequence[Entry]) -> int:
        """Read a page, and have what is delivered acknowledged, durably. Returns how much of it
        was."""
        self._unsettled += len(page)
        return self.settle(self.subscription.read(page, NOW_MS))

    def settle(self, effects: Sequence[Effect]) -> int:
        """Do what is to be done, but for reading on. Returns how many deliveries were
        acknowledged."""
        subscription = self.subscription
        todo = deque(effects)
        settled = 0
        while todo:
            match todo.popleft():
                case Deliver(consumer, deliveries):
                    if consumer == self._stuck:
                        continue
                    items = [Ack(each.delivery) for each in deliveries]
                    more, _, _ = subscription.acknowledge(consumer, items, NOW_MS)
                    todo += more
                    todo += subscription.permit(consumer, len(items), NOW_MS)
                    settled += len(items)
                case Persist(entries=entries):
                    self._unsettled -= len(entries)
                    through = None if self._unsettled else subscription.read_position
                    todo += subscription.persisted(through, NOW_MS)
                case Record():
                    todo += subscription.recorded(NOW_MS)
                case Scan() | DeadLetter():
                    raise BenchError("what is measured was to be read once, and delivered")
                case _:
                    pass  # for consumers, or for the log
        return settled

    def share_of_others(self, keys: int) -> float:
        """The share of the keys that all consumers own but the one that is stuck, or could be."""
        selector = self.subscription.selector
        page = Log(keys).page(keys)
        owners = [selector.owner(selector.slot(each.key)) for each in page if each.key is not None]
        return 1 - owners.count(STUCK) / len(owners)

    def keep_in_flight(self, effects: Sequence[Effect]) -> None:
        """Do what is to be done, and acknowledge nothing."""
        self.settle([each for each in effects if not isinstance(each, Deliver)])


class Loop:
    """The least that is done for the same entries: a dict for each consumer, of what it has."""

    def __init__(self, consumers: int, keys: int) -> None:
        self.log = Log(keys)
        self._flights: list[dict[int, Entry]] = [{} for _ in range(consumers)]
        self._deliveries = 0

    def step(self, page: Sequence[Entry]) -> int:
        """Put entries in flight, by key, and take them out again."""
        flights = self._flights
        delivered = []
        for entry in page:
            self._deliveries += 1
            of_consumer = flights[hash(entry.key) % len(flights)]
            of_consumer[self._deliveries] = entry
            delivered.append((of_consumer, self._deliveries))
        done = {of_consumer.pop(delivery).position for of_consumer, delivery in delivered}
        return len(done)


def timed(step: Callable[[Sequence[Entry]], int], log: Log) -> Callable[[], tuple[int, float]]:
    """The step with the log's next page, timed in seconds."""

    def timed_step() -> tuple[int, float]:
        page = log.page()
        began = time.process_time()
        return step(page), time.process_time() - began

    return timed_step


# ---- much at a time


async def parked(entries: int, keys: int, consumers: int = 2) -> Machine:
    """A machine that has read so many entries, with consumers that take none."""
    machine = Machine(consumers, keys, options=ROOMY)
    for first in range(0, entries, SCAN_ENTRIES):
        await asyncio.sleep(0)  # a signal is to be heard
        machine.step(machine.log.page(min(SCAN_ENTRIES, entries - first)))
    if machine.subscription.parked != entries:
        raise BenchError(f"{machine.subscription.parked} entries wait, and not {entries}")
    return machine


def in_flight(entries: int, keys: int) -> Machine:
    """A machine with two consumers: the first takes nothing, and the second has so many entries in
    flight."""
    machine = Machine(2, keys, options=ROOMY)
    machine.keep_in_flight(machine.subscription.permit(2, entries, NOW_MS))
    while machine.subscription.consumers[2].permits > 0:
        machine.keep_in_flight(machine.subscription.read(machine.log.page(), NOW_MS))
    return machine


def leave(machine: Machine) -> tuple[int, float]:
    """Have the second consumer go without a word, which is timed, and come back."""
    subscription = machine.subscription
    entries = len(subscription.consumers[2].flights)
    began = time.process_time()
    effects = subscription.leave(2, now_ms=NOW_MS)
    took_s = time.process_time() - began
    machine.keep_in_flight(effects)
    machine.join(2)
    machine.keep_in_flight(subscription.permit(2, entries, NOW_MS))
    if len(subscription.consumers[2].flights) != entries:
        raise BenchError("not everything is in flight again")
    return 1, took_s


def join(machine: Machine) -> tuple[int, float]:
    """Have a consumer join, which is timed, and go again."""
    began = time.process_time()
    machine.subscription.join(9, name="consumer-9", now_ms=NOW_MS)
    took_s = time.process_time() - began
    machine.settle(machine.subscription.close(9, NOW_MS))
    return 1, took_s


def heaps(entries: int, keys: int) -> tuple[int, float]:
    """Put so many entries from a dict into a heap for each key, timed."""
    flights = dict(enumerate(Log(keys).page(entries)))
    returned: dict[bytes, list[Position]] = {}
    began = time.process_time()
    for entry in flights.values():
        assert entry.key is not None
        heappush(returned.setdefault(entry.key, []), entry.position)
    return 1, time.process_time() - began


# ---- memory


async def traced(make: Callable[[], Awaitable[object]]) -> int:
    """How many bytes what is made has."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        made = await make()
        after, _ = tracemalloc.get_traced_memory()
        del made
    finally:
        tracemalloc.stop()
    return after - before


async def deques(entries: int, keys: int) -> dict[bytes, deque[Position]]:
    """The same entries as plainly as can be: their positions, by key."""
    found: dict[bytes, deque[Position]] = {}
    log = Log(keys)
    for _ in range(0, entries, PAGE_ENTRIES):
        for entry in log.page():
            assert entry.key is not None
            found.setdefault(entry.key, deque()).append(entry.position)
    return found
