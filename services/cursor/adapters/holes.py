"""The holes of a cursor in tables: see cursor.core.state.Holes.

The first access reads what most steps need, in one statement: the first rows of each table, and the
successions from the mark-delete position on.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from seqgate.services.cursor.adapters.bits import packed, unpacked
from seqgate.services.cursor.adapters.places import (
    FIRST_PLACE,
    LAST_PLACE,
    Place,
    Places,
    Table,
    next_place,
)
from seqgate.services.cursor.adapters.rows import Row, corrupt, spent_epoch
from seqgate.services.cursor.core.cursor import BEFORE_FIRST
from seqgate.services.cursor.core.state import PAGE_ENTRIES, Attempted, Batch
from seqgate.services.runtime.transactions import Transaction
from seqgate.types import Position

_ENTRY: Final = ("ledger_id", "entry_id")

PAGES: Final = Table.of(
    "page", ("ledger_id", "number"), ("bits",), ahead=2, page=4, held_max=1_024
)  # of at most 8 KiB each
BATCHES: Final = Table.of("batch", _ENTRY, ("size", "bits"), ahead=64, page=256, held_max=4_096)
ATTEMPTS: Final = Table.of(
    "attempt", _ENTRY, ("count", "note"), ahead=64, page=1_000, held_max=10_000
)  # of at most NOTE_BYTES_MAX each

_NONE: Final = (0, b"")

_PAGES_FIRST: Final = 2
_ROWS_FIRST: Final = 16
"""The rows of a table that the first access reads: of pages, and of others."""

_FIRST: Final = """
    SELECT 'page', ledger_id, number, 0, 0, bits FROM (SELECT * FROM page
        WHERE cursor = ?1 ORDER BY ledger_id, number LIMIT ?2) AS first_pages
    UNION ALL SELECT 'batch', ledger_id, entry_id, size, 0, bits FROM (SELECT * FROM batch
        WHERE cursor = ?1 ORDER BY ledger_id, entry_id LIMIT ?3) AS first_batches
    UNION ALL SELECT 'attempt', ledger_id, entry_id, count, 0, note FROM (SELECT * FROM attempt
        WHERE cursor = ?1 ORDER BY ledger_id, entry_id LIMIT ?3) AS first_attempts
    UNION ALL SELECT 'start', last_ledger, last_entry, next_ledger, next_entry, NULL
        FROM succession WHERE topic = ?4 AND last_ledger = ?5 AND last_entry = ?6
    UNION ALL SELECT 'succession', last_ledger, last_entry, next_ledger, next_entry, NULL
        FROM (SELECT * FROM succession WHERE topic = ?4 AND (last_ledger, last_entry) >= (?7, ?8)
            ORDER BY last_ledger, last_entry LIMIT ?2) AS first_successions"""

_SUCCESSION: Final = """SELECT next_ledger, next_entry FROM succession
    WHERE topic = ? AND last_ledger = ? AND last_entry = ?"""
_PUT_SUCCESSION: Final = """INSERT INTO succession VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (topic, last_ledger, last_entry)
    DO UPDATE SET next_ledger = excluded.next_ledger, next_entry = excluded.next_entry"""


class TableHoles:
    """See seqgate.services.cursor.core.state.Holes. `write` writes what is held in memory."""

    def __init__(self, db: Transaction, row: Row) -> None:
        self._db = db
        self._row = row
        self._is_begun = False
        self._all_pages = Places[int](db, row.cursor_id, PAGES, _page_columns, self._unpacked)
        self._all_batches = Places[Batch](
            db, row.cursor_id, BATCHES, _batch_columns, self._unpacked_batch
        )
        self._all_attempts = Places[tuple[int, bytes]](
            db, row.cursor_id, ATTEMPTS, _attempt_columns, _attempt
        )
        self._following: dict[Place, Position | None] = {}
        """What is known to follow the ends of ledgers."""
        self._following_known: tuple[Place, Place] = (LAST_PLACE, FIRST_PLACE)
        """The first and the last of the places between which all ends of ledgers are known."""
        self._noted: dict[Position, Position] = {}

    @property
    def _pages(self) -> Places[int]:
        self._begin()
        return self._all_pages

    @property
    def _batches(self) -> Places[Batch]:
        self._begin()
        return self._all_batches

    @property
    def _attempts(self) -> Places[tuple[int, bytes]]:
        self._begin()
        return self._all_attempts

    def _begin(self) -> None:
        if self._is_begun:
            return
        self._is_begun = True
        row = self._row
        mark = BEFORE_FIRST
        if row.mark_ledger is not None and row.mark_entry is not None:
            mark = Position(row.mark_ledger, row.mark_entry)
        found = defaultdict[str, list[tuple[Any, ...]]](list)
        limits = (_PAGES_FIRST, _ROWS_FIRST)
        places = (row.topic, *BEFORE_FIRST, *mark)
        for kind, *columns in self._db.rows(_FIRST, row.cursor_id, *limits, *places):
            found[kind].append(tuple(columns))
        self._all_pages.learn(
            FIRST_PLACE, [(*each[:2], each[4]) for each in found["page"]], _PAGES_FIRST
        )
        self._all_batches.learn(
            FIRST_PLACE, [(*each[:3], each[4]) for each in found["batch"]], _ROWS_FIRST
        )
        self._all_attempts.learn(
            FIRST_PLACE, [(*each[:3], each[4]) for each in found["attempt"]], _ROWS_FIRST
        )
        self._following[BEFORE_FIRST] = None
        for last_ledger, last_entry, *following, _ in found["start"] + found["succession"]:
            self._following[last_ledger, last_entry] = Position(*following)
        is_full = len(found["succession"]) == _PAGES_FIRST
        last = max((each[0], each[1]) for each in found["succession"]) if is_full else LAST_PLACE
        self._following_known = mark, last

    def page(self, ledger_id: int, number: int) -> int:
        return self._pages.get((ledger_id, number)) or 0

    def put_page(self, ledger_id: int, number: int, bits: int) -> None:
        assert bits.bit_length() <= PAGE_ENTRIES
        self._pages.put((ledger_id, number), bits or None)

    def pages(self, after: Position | None) -> Iterator[tuple[int, int, int]]:
        start = FIRST_PLACE if after is None else _page_of_next(after)
        for (ledger_id, number), bits in self._pages.after(start):
            yield ledger_id, number, bits

    def batch(self, position: Position) -> Batch | None:
        return self._batches.get(position)

    def put_batch(self, position: Position, batch: Batch | None) -> None:
        self._batches.put(position, batch)

    def batches(self, after: Position | None) -> Iterator[tuple[Position, Batch]]:
        start = FIRST_PLACE if after is None else next_place(after)
        for place, batch in self._batches.after(start):
            yield Position(*place), batch

    def attempts(self, position: Position) -> int:
        return (self._attempts.get(position) or _NONE)[0]

    def note(self, position: Position) -> bytes:
        return (self._attempts.get(position) or _NONE)[1]

    def put_attempts(self, position: Position, count: int, note: bytes = b"") -> None:
        self._attempts.put(position, (count, note) if count else None)

    def attempted(self, after: Position | None) -> Iterator[Attempted]:
        start = FIRST_PLACE if after is None else next_place(after)
        for place, counted in self._attempts.after(start):
            yield Attempted(Position(*place), *counted)

    def drop_run(self, first: Position, last_entry: int) -> int:
        last = (first.ledger_id, last_entry)
        self._attempts.drop(first, last)
        return self._batches.drop(first, last)

    def next_after(self, last: Position) -> Position | None:
        self._begin()
        start, end = self._following_known
        if last not in self._following and not start <= last <= end:
            rows = self._db.rows(_SUCCESSION, self._row.topic, *last)
            self._following[last] = Position(*rows[0]) if rows else None
        return self._following.get(last)

    def put_succession(self, last: Position, following: Position) -> None:
        self._following[last] = self._noted[last] = following

    def spent_epoch(self) -> int:
        return spent_epoch(self._db, self._row.topic)

    def drop_through(self, position: Position | None) -> int:
        if position is None:
            self._pages.drop(FIRST_PLACE, LAST_PLACE)
        else:
            ledger_id, number = _page_of_next(position)
            self._pages.drop(FIRST_PLACE, (ledger_id, number - 1))
        last = position or LAST_PLACE
        self._attempts.drop(FIRST_PLACE, last)
        return self._batches.drop(FIRST_PLACE, last)

    def write(self) -> None:
        """Write all changes, in the same order in every transaction."""
        if self._noted:
            topic = self._row.topic
            self._db.each(
                _PUT_SUCCESSION, [(topic, *each) for each in _flat(sorted(self._noted.items()))]
            )
            self._noted.clear()
        for table in (self._all_pages, self._all_batches, self._all_attempts):
            table.write()

    def _unpacked(self, stored: bytes) -> int:
        bits = unpacked(stored)
        if bits is None:
            raise corrupt(self._row)
        return bits

    def _unpacked_batch(self, size: int, bits: bytes) -> Batch:
        return Batch(abs(size), self._unpacked(bits), is_guess=size < 0)


def _page_columns(bits: int) -> tuple[bytes]:
    return (packed(bits),)


def _batch_columns(batch: Batch) -> tuple[int, bytes]:
    """A size below 0 is a guess."""
    return -batch.size if batch.is_guess else batch.size, packed(batch.acknowledged)


def _attempt(count: int, note: bytes | None) -> tuple[int, bytes]:
    return count, note or b""


def _attempt_columns(counted: tuple[int, bytes]) -> tuple[int, bytes | None]:
    count, note = counted
    return count, note or None


def _flat(pairs: list[tuple[Position, Position]]) -> Iterator[tuple[int, int, int, int]]:
    for last, following in pairs:
        yield (*last, *following)


def _page_of_next(position: Position) -> Place:
    """The page of the next entry: the first page that does not end at or before the position."""
    return position.ledger_id, (position.entry_id + 1) // PAGE_ENTRIES
