"""Which entries were read, are to be delivered later, and are not remembered but for that.

    a stretch of the log:  a bit for each entry, and a time before which none of them is due

They are read again. A stretch of which nothing can be due yet need not be.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from seqgate.types import Position

STRETCH_ENTRIES: Final = 4096
"""How many entries of a ledger one bitmap covers: 512 bytes."""

NEVER_MS: Final = 2**63
"""Later than any time."""


@dataclass(slots=True)
class _Stretch:
    """Attributes:
    bits: which of its entries are postponed.
    soonest_ms: none of them is due before.
    visited_soonest_ms: the same, of those that were postponed since the pass began.
    was_visited: whether the pass came by, which comes by all of them.
    """

    bits: int = 0
    soonest_ms: int = NEVER_MS
    visited_soonest_ms: int = NEVER_MS
    was_visited: bool = False


class Postponed:
    """See the module."""

    def __init__(self) -> None:
        self._stretches: dict[tuple[int, int], _Stretch] = {}
        self._order: list[tuple[int, int]] = []
        self._entries = 0

    def __len__(self) -> int:
        return self._entries

    def __contains__(self, position: Position) -> bool:
        stretch = self._stretches.get(self._name(position))
        return stretch is not None and bool(stretch.bits >> position[1] % STRETCH_ENTRIES & 1)

    def add(self, position: Position, when_ms: int) -> None:
        """One more is, which is not due before."""
        name = self._name(position)
        stretch = self._stretches.get(name)
        if stretch is None:
            stretch = self._stretches[name] = _Stretch()
            insort(self._order, name)
        bit = 1 << position[1] % STRETCH_ENTRIES
        self._entries += not stretch.bits & bit
        stretch.bits |= bit
        stretch.soonest_ms = min(stretch.soonest_ms, when_ms)
        stretch.visited_soonest_ms = min(stretch.visited_soonest_ms, when_ms)

    def discard(self, position: Position) -> None:
        """An entry is not, or not any more."""
        name = self._name(position)
        stretch = self._stretches.get(name)
        bit = 1 << position[1] % STRETCH_ENTRIES
        if stretch is None or not stretch.bits & bit:
            return
        self._entries -= 1
        stretch.bits ^= bit
        if not stretch.bits:
            del self._stretches[name]
            del self._order[bisect_left(self._order, name)]

    def visit(self, position: Position) -> None:
        """The pass comes by an entry, which must be postponed. It is not, unless it is anew."""
        self._stretches[self._name(position)].was_visited = True
        self.discard(position)

    def end_pass(self) -> None:
        """The pass is over. Of a stretch it came by all, or nothing."""
        for stretch in self._stretches.values():
            if stretch.was_visited:
                stretch.soonest_ms = stretch.visited_soonest_ms
            stretch.visited_soonest_ms, stretch.was_visited = NEVER_MS, False

    @property
    def soonest_ms(self) -> int:
        """None of them is due before."""
        return min((each.soonest_ms for each in self._stretches.values()), default=NEVER_MS)

    def first(self, start: Position, before_ms: int = NEVER_MS + 1) -> Position | None:
        """The first from there on in a stretch of which something may be due before that time, or
        that the pass has come by; None: there is none."""
        for name in self._order[bisect_left(self._order, self._name(start)) :]:
            stretch = self._stretches[name]
            if stretch.was_visited or stretch.soonest_ms < before_ms:
                for each in self._positions(name):
                    if each >= start:
                        return each
        return None

    def between(self, start: Position, end: Position) -> Iterator[Position]:
        """Those from `start` on up to `end`, which may be discarded meanwhile."""
        names = self._order[bisect_left(self._order, self._name(start)) :]
        for name in names:
            if name > self._name(end):
                return
            for each in self._positions(name):
                if start <= each <= end:
                    yield each

    def _name(self, position: Position) -> tuple[int, int]:
        return position[0], position[1] // STRETCH_ENTRIES

    def _positions(self, name: tuple[int, int]) -> Iterator[Position]:
        ledger_id, first = name[0], name[1] * STRETCH_ENTRIES
        bits = self._stretches[name].bits
        while bits:
            lowest = bits & -bits
            yield Position(ledger_id, first + lowest.bit_length() - 1)
            bits ^= lowest
