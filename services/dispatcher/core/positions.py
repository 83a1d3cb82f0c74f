"""Compact sets and queues of positions: parked entries, and acknowledged ones."""

from array import array
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator
from typing import Final, NamedTuple

from seqgate.types import Position

_WORDS: Final = 4
"""A run: ledger id, first entry id, number of entries, messages in each."""

_COMPACT_RUNS: Final = 64
"""Number of taken runs at the front at which the rest is moved down."""

_CHUNK_ENTRIES: Final = 4096
"""Number of entries of a ledger in one bitmap."""

_WHOLE_CHUNK: Final = (1 << _CHUNK_ENTRIES) - 1

_ALL: Final = -1
"""A bitmap in which every bit is set, which takes no memory."""


class Run(NamedTuple):
    """Consecutive entries of one ledger, through `last_entry_id`."""

    first: Position
    last_entry_id: int

    @property
    def size(self) -> int:
        return self.last_entry_id - self.first.entry_id + 1


def runs_of(positions: Iterable[Position]) -> tuple[Run, ...]:
    """Entries as runs of neighbours, in the order of the log."""
    runs: list[Run] = []
    ordered = sorted(positions)
    if not ordered:
        return ()
    first = last = ordered[0]
    for position in ordered:
        if position[1] > last[1] + 1 or position[0] != last[0]:
            runs.append(Run(first, last[1]))
            first = position
        last = position
    runs.append(Run(first, last[1]))
    return tuple(runs)


def positions_of(runs: Iterable[Run]) -> list[Position]:
    return [
        Position(ledger_id, entry_id)
        for (ledger_id, first), last in runs
        for entry_id in range(first, last + 1)
    ]


class Parked(NamedTuple):
    """A waiting entry, and its number of messages."""

    position: Position
    messages: int


class Runs:
    """Waiting entries in the order of the log, in 32 bytes for each run of neighbours with equally
    many messages."""

    __slots__ = ("_entries", "_head", "_words")

    def __init__(self) -> None:
        self._words = array("Q")
        self._head = 0  # index of the first run
        self._entries = 0

    def __len__(self) -> int:
        return self._entries

    def __iter__(self) -> Iterator[Parked]:
        words = self._words
        for at in range(self._head, len(words), _WORDS):
            ledger_id, first, count, messages = words[at : at + _WORDS]
            for entry_id in range(first, first + count):
                yield Parked(Position(ledger_id, entry_id), messages)

    def append(self, position: Position, messages: int) -> None:
        """Add an entry after all others."""
        words = self._words
        ledger_id, entry_id = position
        self._entries += 1
        if len(words) > self._head:
            same = words[-4] == ledger_id and words[-1] == messages
            if same and words[-3] + words[-2] == entry_id:
                words[-2] += 1
                return
        words.extend((ledger_id, entry_id, 1, messages))

    def insert(self, position: Position, messages: int) -> None:
        """Add an entry in the order of the log."""
        words, (ledger_id, entry_id) = self._words, position
        runs = range(self._head, len(words), _WORDS)
        before = bisect_left(runs, position, key=lambda at: Position(words[at], words[at + 1]))
        self._entries += 1
        if before:
            at = runs[before - 1]
            same = words[at] == ledger_id and words[at + 3] == messages
            if same and words[at + 1] + words[at + 2] == entry_id:
                words[at + 2] += 1
                return
        at = self._head + before * _WORDS
        words[at:at] = array("Q", (ledger_id, entry_id, 1, messages))

    def first(self) -> Parked:
        """The first entry. There must be one."""
        words, at = self._words, self._head
        return Parked(Position(words[at], words[at + 1]), words[at + 3])

    @property
    def last(self) -> Position:
        """The last entry. There must be one."""
        ledger_id, first, count, _ = self._words[-_WORDS:]
        return Position(ledger_id, first + count - 1)

    def drop_first(self) -> None:
        """Remove the first entry. There must be one."""
        words, at = self._words, self._head
        self._entries -= 1
        if words[at + 2] > 1:
            words[at + 1] += 1
            words[at + 2] -= 1
            return
        self._head += _WORDS
        if self._head >= _COMPACT_RUNS * _WORDS and self._head * 2 >= len(words):
            del words[: self._head]
            self._head = 0

    def discard(self, positions: Container[Position]) -> int:
        """Remove these entries. Returns how many were found."""
        kept = Runs()
        for each in self:
            if each.position not in positions:
                kept.append(*each)
        gone = self._entries - kept._entries
        self._words, self._head, self._entries = kept._words, 0, kept._entries
        return gone

    @property
    def runs(self) -> int:
        return (len(self._words) - self._head) // _WORDS


class Acknowledged:
    """The acknowledged entries: all up to the mark-delete position, and bitmaps of those beyond it,
    of which a full one takes no memory."""

    def __init__(self, mark_delete: Position | None) -> None:
        self.mark_delete = mark_delete
        self.highest = mark_delete
        self._chunks: dict[tuple[int, int], int] = {}

    def __contains__(self, position: Position) -> bool:
        if self.highest is None or position > self.highest:
            return False
        if self.mark_delete is not None and position <= self.mark_delete:
            return True
        bits = self._chunks.get((position[0], position[1] // _CHUNK_ENTRIES), 0)
        return bool(bits >> position[1] % _CHUNK_ENTRIES & 1)

    def add(self, position: Position) -> None:
        ledger_id, entry_id = position
        at = (ledger_id, entry_id // _CHUNK_ENTRIES)
        bits = self._chunks.get(at, 0) | 1 << entry_id % _CHUNK_ENTRIES
        self._chunks[at] = _ALL if bits == _WHOLE_CHUNK else bits
        if self.highest is None or position > self.highest:
            self.highest = position

    def add_range(self, first: Position, last_entry_id: int) -> None:
        """Add entries of one ledger, through `last_entry_id`."""
        ledger_id, entry_id = first
        while entry_id <= last_entry_id:
            chunk, offset = divmod(entry_id, _CHUNK_ENTRIES)
            end = min(last_entry_id, (chunk + 1) * _CHUNK_ENTRIES - 1)
            bits = (1 << end - entry_id + 1) - 1 << offset
            bits |= self._chunks.get((ledger_id, chunk), 0)
            self._chunks[ledger_id, chunk] = _ALL if bits == _WHOLE_CHUNK else bits
            entry_id = end + 1
        last = Position(ledger_id, last_entry_id)
        if self.highest is None or last > self.highest:
            self.highest = last

    def advance(self, mark_delete: Position) -> None:
        """Move the mark-delete position forward; an earlier one is ignored."""
        if self.mark_delete is not None and mark_delete <= self.mark_delete:
            return
        self.mark_delete = mark_delete
        if self.highest is None or mark_delete > self.highest:
            self.highest = mark_delete
        before = (mark_delete.ledger_id, mark_delete.entry_id // _CHUNK_ENTRIES)
        for chunk in [each for each in self._chunks if each < before]:
            del self._chunks[chunk]
