"""Delayed messages: those due soonest are kept in memory, the others are read again when due.

    for later ──▶ kept, by time ──due──▶ waits for its turn
                   │  ▲
      due last, no │  │ a pass: postponed entries are read again
      room for all ▼  │ when they may be due, or half of the room is free
                 postponed: a bit for each entry

While entries are postponed, no message due after them is newly kept, so a pass keeps those due
soonest. N messages and room for K take about 2 N/K passes. A pass visits postponed entries only,
and skips ranges of the log that are due later than the newly postponed ones.

Where a delayed message holds its key, later messages of the key are postponed with it, and the pass
visits them all. Such keys are remembered by digests of 8 bytes, and beyond HELD_KEYS_MAX by their
slots. A key that merely shares a digest or a slot waits with them until the pass has read the log:
a key never waits too briefly, and practically never too long.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Container, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

from seqgate.services.dispatcher.core.effects import Options
from seqgate.services.dispatcher.core.lane import Lane
from seqgate.types import Position

HELD_KEYS_MAX: Final = 250_000
"""Limit of keys remembered by digest, in 4 MiB; further ones are remembered by slot."""

TABLE_FIRST: Final = 64
"""Initial number of places in a table of digests, of which at most half are used."""


class Held:
    """The keys held by postponed messages, as digests, and beyond HELD_KEYS_MAX as slots."""

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * TABLE_FIRST))
        self._digests = 0
        self._slots = 0  # a bit each

    def __bool__(self) -> bool:
        return bool(self._digests or self._slots)

    def has(self, key: bytes, slot: int) -> bool:
        """Whether a key is held, or shares a digest or a slot with one that is."""
        if self._slots >> slot & 1:
            return True
        if not self._digests:
            return False
        digest = _digest(key)
        return self._table[self._place(self._table, digest)] == digest

    def add(self, key: bytes, slot: int) -> None:
        digest = _digest(key)
        place = self._place(self._table, digest)
        if self._table[place] == digest:
            return
        if self._digests >= HELD_KEYS_MAX:
            self._slots |= 1 << slot
            return
        self._table[place] = digest
        self._digests += 1
        if self._digests * 2 > len(self._table):
            self._grow()

    def _grow(self) -> None:
        table = array("Q", bytes(16 * len(self._table)))
        for digest in self._table:
            if digest:
                table[self._place(table, digest)] = digest
        self._table = table

    def _place(self, table: "array[int]", digest: int) -> int:
        """The index of a digest, or of the free place that it would take."""
        mask = len(table) - 1
        place = digest & mask
        while table[place] not in (0, digest):
            place = (place + 1) & mask
        return place


def _digest(key: bytes) -> int:
    """Never 0, which marks a free place."""
    return int.from_bytes(blake2b(key, digest_size=8).digest()) or 1


STRETCH_ENTRIES: Final = 4096
"""Number of entries of a ledger in one bitmap of 512 bytes."""

NEVER_MS: Final = 2**63
"""Later than any time."""


@dataclass(slots=True)
class _Stretch:
    """Postponed entries of a range of one ledger, a bit each. `soonest_ms` is a lower bound of
    their due times, `visited_soonest_ms` of those postponed since the pass began."""

    bits: int = 0
    soonest_ms: int = NEVER_MS
    visited_soonest_ms: int = NEVER_MS
    was_visited: bool = False


class Postponed:
    """The postponed entries, by stretches of the log."""

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
        """Postpone an entry that is not due before `when_ms`."""
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
        """Remove an entry, if it is postponed."""
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
        """Remove an entry that the pass visits. It may be postponed again."""
        self._stretches[self._name(position)].was_visited = True
        self.discard(position)

    def end_pass(self) -> None:
        """Raise the bounds of visited stretches, in which the pass visited every entry."""
        for stretch in self._stretches.values():
            if stretch.was_visited:
                stretch.soonest_ms = stretch.visited_soonest_ms
            stretch.visited_soonest_ms, stretch.was_visited = NEVER_MS, False

    @property
    def soonest_ms(self) -> int:
        """A lower bound of all due times."""
        return min((each.soonest_ms for each in self._stretches.values()), default=NEVER_MS)

    def first(self, start: Position, before_ms: int = NEVER_MS + 1) -> Position | None:
        """The first entry at or after `start`, in a stretch that the pass has visited or that may
        have an entry due before `before_ms`; None: none."""
        for name in self._order[bisect_left(self._order, self._name(start)) :]:
            stretch = self._stretches[name]
            if stretch.was_visited or stretch.soonest_ms < before_ms:
                for each in self._positions(name):
                    if each >= start:
                        return each
        return None

    def between(self, start: Position, end: Position) -> Iterator[Position]:
        """Entries from `start` through `end`. The caller may discard each as it is yielded."""
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


KEPT_BYTES: Final = 1_200
"""Memory of a kept message in bytes, besides its key, which may be referenced nowhere else."""

KEPT_LEAST: Final = 100
"""Number of delayed messages that a subscription may keep even if others use up the budget."""

_FIRST: Final = Position(0, 0)
"""No entry is before this."""


class DelayedBytes:
    """The memory budget for delayed messages that all subscriptions of the process share."""

    def __init__(self, bytes_max: int) -> None:
        self.size_bytes = 0
        self.bytes_max = bytes_max


class Kept(NamedTuple):
    """A delayed message in memory."""

    when_ms: int
    position: Position
    messages: int
    lane: Lane

    @property
    def size_bytes(self) -> int:
        return KEPT_BYTES + len(self.lane.key)


class Delays:
    """See the module. `holds_keys`: whether a delayed message holds its key."""

    def __init__(self, options: Options, together: DelayedBytes) -> None:
        self.holds_keys = options.orders_keys and options.delay_holds_key
        self.postponed = Postponed()
        self.is_passing = False
        self._together = together
        self._kept_max = options.delayed_max
        self._bytes_max = options.delayed_bytes_max
        self._kept: list[Kept] = []
        self._bytes = 0
        self._horizon_ms = NEVER_MS
        self._most = 0
        self._held = self._held_anew = Held()
        self._page_start = _FIRST

    def __len__(self) -> int:
        return len(self._kept)

    # ---- kept entries

    def takes(self, when_ms: int, position: Position, key: bytes) -> bool:
        """Whether to keep a message: there is room, or a kept one is due later; and it is due
        before all postponed ones, or, during a pass, before those postponed since it began."""
        if self.postponed and when_ms >= self._horizon_ms:
            return False
        if self._has_room(KEPT_BYTES + len(key)):
            return True
        return (when_ms, position) < self._kept[-1][:2]

    def keep(self, kept: Kept) -> None:
        insort(self._kept, kept, key=_order)
        self._count(kept.size_bytes)

    def forget(self, when_ms: int, position: Position) -> None:
        """Remove a message, if it is kept."""
        at = bisect_left(self._kept, (when_ms, position), key=_order)
        if at < len(self._kept) and self._kept[at].position == position:
            self._count(-self._kept.pop(at).size_bytes)

    def excess(self) -> Kept | None:
        """The entry due last, if too many are kept; the caller postpones it."""
        is_over = len(self._kept) > 1 and not self._has_room(0, 0)
        return self._kept[-1] if is_over else None

    def due(self, now_ms: int) -> list[Kept]:
        """Remove and return the entries that are due."""
        end = bisect_left(self._kept, now_ms + 1, key=_when)
        due, self._kept[:end] = self._kept[:end], []
        self._count(-sum(each.size_bytes for each in due))
        return due

    def clear(self) -> None:
        """Remove all kept messages, which frees their share of the budget."""
        self._kept.clear()
        self._count(-self._bytes)

    def _has_room(self, size_bytes: int, entries: int = 1) -> bool:
        kept, together = len(self._kept) + entries, self._together
        if kept <= 1:
            return True
        if kept > self._kept_max or self._bytes + size_bytes > self._bytes_max:
            return False
        return kept <= KEPT_LEAST or together.size_bytes + size_bytes <= together.bytes_max

    def _count(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        self._together.size_bytes += size_bytes

    # ---- postponed entries

    def postpone(self, position: Position, when_ms: int) -> None:
        """Leave a message out of memory; a pass reads it again."""
        if not (self.postponed or self.is_passing):
            self._forget_pass()
        self.postponed.add(position, when_ms)
        self._horizon_ms = min(self._horizon_ms, when_ms)
        self._most = max(self._most, len(self._kept))

    def drop(self, position: Position) -> None:
        """Remove an entry that will not be delivered, if it is postponed. If it may have held its
        key, a pass is due at once, which finds the entries that it held."""
        if position in self.postponed:
            self.postponed.discard(position)
            if self.holds_keys:
                self._horizon_ms = 0

    def hold(self, key: bytes, slot: int) -> None:
        """Make later messages of a key wait for its postponed ones."""
        self._held_anew.add(key, slot)

    def is_held(self, key: bytes, slot: int, *, is_new: bool) -> bool:
        """Whether an earlier entry of the key is postponed. Only a new entry follows those that the
        pass has yet to visit; one that is read again precedes them."""
        if not (self.holds_keys and self.postponed):
            return False
        return self._held_anew.has(key, slot) or (is_new and self._held.has(key, slot))

    def take_before(self, end: Position) -> list[Position]:
        """Remove and return the postponed entries before an entry."""
        taken = [each for each in self.postponed.between(_FIRST, end) if each < end]
        for each in taken:
            self.postponed.discard(each)
        return taken

    def _forget_pass(self) -> None:
        self._horizon_ms, self._most = NEVER_MS, 0
        self._held = self._held_anew = Held()

    # ---- the pass

    def next_ms(self, now_ms: int) -> int | None:
        """When the next kept message or pass is due, except a pass due by now; None: never."""
        due_ms = self._kept[0].when_ms if self._kept else NEVER_MS
        if self.postponed and not self.is_passing and self._horizon_ms > now_ms:
            due_ms = min(due_ms, self._horizon_ms)
        return None if due_ms == NEVER_MS else due_ms

    def wants_pass(self, now_ms: int) -> bool:
        """Whether postponed entries may be due, or half of the room has become free."""
        if self.is_passing or not self.postponed:
            return False
        kept = len(self._kept)
        return self._horizon_ms <= now_ms or (kept < self._most and kept * 2 <= self._most)

    def begin_pass(self) -> Position:
        """Begin a pass over the postponed entries. Returns its first position."""
        first = self.postponed.first(_FIRST)
        assert first is not None
        self._page_start, self.is_passing = first, True
        self._horizon_ms, self._most = NEVER_MS, 0
        self._held_anew = Held()
        return first

    def next_page(self, last: Position, *, is_whole: bool) -> Position | None:
        """The next position that the pass reads; None: it has ended. `is_whole`: the scan reads all
        later entries anyway, for lags."""
        start = Position(last[0], last[1] + 1)
        before_ms = NEVER_MS + 1 if self.holds_keys else self._horizon_ms
        next_ = self.postponed.first(start, before_ms)
        self._page_start = start if is_whole or next_ is None else next_
        return next_

    def visit(self, position: Position) -> None:
        """Remove a postponed entry that was read again. It may be postponed again."""
        if self.is_passing:
            self.postponed.visit(position)
        else:
            self.postponed.discard(position)

    def gone(self, last: Position, found: Container[Position]) -> list[Position]:
        """End a page of the pass. Removes and returns entries that the log no longer has."""
        gone = [
            each for each in self.postponed.between(self._page_start, last) if each not in found
        ]
        for each in gone:
            self.postponed.discard(each)
        return gone

    def end_pass(self) -> None:
        """End the pass: it has visited every entry that may be kept."""
        self.is_passing = False
        self.postponed.end_pass()
        self._horizon_ms = self.postponed.soonest_ms
        self._most = len(self._kept)
        self._held = self._held_anew


def _order(kept: Kept) -> tuple[int, Position]:
    return kept.when_ms, kept.position


def _when(kept: Kept) -> int:
    return kept.when_ms
