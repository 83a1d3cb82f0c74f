"""When to look at something again.

    set ──▶ heap, by time ──due──▶ what still awaits it

A timer is never taken back. Whoever it is for is asked, when the timer is due, whether that is
still what it waits for; and all are asked when there are many more timers than can be needed. So
there are never more than twice as many as may be needed, and a few to spare.
"""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, NamedTuple

from services.dispatcher.core.lane import Consumer, Lane

TIMERS_SPARE: Final = 1_000
"""How many timers that nobody needs any more are kept before they are looked for."""

Subject = Lane | Consumer
"""What may be looked at again."""


class _Timer(NamedTuple):
    """When, and what; of timers for one time, which came first."""

    when_ms: int
    number: int
    subject: Subject


class Timers:
    """See the module."""

    def __init__(self, needed_max: Callable[[], int]) -> None:
        """`needed_max` says how many timers may be needed now."""
        self._heap: list[_Timer] = []
        self._numbers = count()
        self._needed_max = needed_max

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_ms(self) -> int | None:
        """When the first is due; None: there is none."""
        return self._heap[0].when_ms if self._heap else None

    def set(self, subject: Subject, when_ms: int) -> None:
        """Something is to be looked at then, whatever else it waits for."""
        self.trim()
        heappush(self._heap, _Timer(when_ms, next(self._numbers), subject))

    def trim(self) -> None:
        """Fewer timers may be needed now: forget those that nobody needs, if they are many."""
        heap = self._heap
        if len(heap) > TIMERS_SPARE + 2 * self._needed_max():
            heap[:] = [each for each in heap if each.subject.awaits(each.when_ms)]
            heapify(heap)

    def look_at(self, subject: Subject, when_ms: int) -> None:
        """A key or a consumer is to be looked at then, unless it is before that anyway."""
        if subject.timer_ms is None or when_ms < subject.timer_ms:
            subject.timer_ms = when_ms
            self.set(subject, when_ms)

    def due(self, now_ms: int) -> Iterator[Subject]:
        """What is to be looked at by now. More may be set meanwhile."""
        while self._heap and self._heap[0].when_ms <= now_ms:
            when_ms, _, subject = heappop(self._heap)
            if subject.awaits(when_ms):
                yield subject
