"""The rows of one cursor in one table, by place: read ahead, and written together.

A statement may be a round trip, and a step may touch ten thousand places. So rows are read several
at a time, and changes are held in memory until they are many or the step ends. What is known of the
table is one window of places, and single places around it:

    places    ----------[ window: every row is known )------ x ------ x ---->
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from seqgate.services.runtime.transactions import Transaction, Value
from seqgate.types import SEQUENCE_ID_MAX

V = TypeVar("V")

Place = tuple[int, int]
"""A ledger, and a number there: of an entry, or of a page."""

FIRST_PLACE: Final = (-1, -1)
LAST_PLACE: Final = (SEQUENCE_ID_MAX, SEQUENCE_ID_MAX)


def next_place(place: Place) -> Place:
    ledger_id, number = place
    return (ledger_id, number + 1) if number < SEQUENCE_ID_MAX else (ledger_id + 1, -1)


class Table(NamedTuple):
    """Statements about rows of a cursor, each of which has a place and more columns, and limits."""

    read: str
    """Rows from a place on, in order, at most so many."""
    put: str
    drop: str
    """Rows from one place through another."""
    ahead: int
    """How many rows are read when one is asked for: the following ones are often next."""
    page: int
    """How many rows an iteration reads at a time."""
    held_max: int
    """The most places that are held in memory."""

    @classmethod
    def of(
        cls,
        name: str,
        place: tuple[str, str],
        more: tuple[str, ...],
        *,
        ahead: int,
        page: int,
        held_max: int,
    ) -> "Table":
        key, values = ", ".join(place), ", ".join(more)
        marks = ", ".join("?" for _ in range(3 + len(more)))
        changed = ", ".join(f"{each} = excluded.{each}" for each in more)
        return cls(
            f"""SELECT {key}, {values} FROM {name}
                WHERE cursor = ? AND ({key}) >= (?, ?) ORDER BY {key} LIMIT ?""",
            f"""INSERT INTO {name} (cursor, {key}, {values}) VALUES ({marks})
                ON CONFLICT (cursor, {key}) DO UPDATE SET {changed}""",
            f"DELETE FROM {name} WHERE cursor = ? AND ({key}) >= (?, ?) AND ({key}) <= (?, ?)",
            ahead,
            page,
            held_max,
        )


class Places(Generic[V]):
    """
    Args:
        columns: the columns of a value.
        value: the value of the columns of a row; it is not called before the value is asked for.
    """

    def __init__(
        self,
        db: Transaction,
        cursor_id: int,
        table: Table,
        columns: Callable[[V], Sequence[Value]],
        value: Callable[..., V],
    ) -> None:
        self._db = db
        self._cursor_id = cursor_id
        self._table = table
        self._to_columns = columns
        self._to_value = value
        self._places: list[Place] = []
        """The places with a value, as far as known, in order."""
        self._values: dict[Place, V] = {}
        self._unread: dict[Place, Sequence[Any]] = {}
        """The columns of the places whose value was not asked for."""
        self._in_table: set[Place] = set()
        """The known places that have a row."""
        self._dirty: set[Place] = set()
        self._drops: list[tuple[Place, Place]] = []
        self._window: tuple[Place, Place] | None = None

    def learn(self, start: Place, rows: Sequence[Sequence[Any]], limit: int) -> None:
        """Take in the first rows from a place on, of which at most `limit` were read."""
        found = sorted(((ledger_id, number), more) for ledger_id, number, *more in rows)
        for place, columns in found:
            self._in_table.add(place)
            if place not in self._dirty and place not in self._values:
                if place not in self._unread:
                    insort(self._places, place)
                self._unread[place] = columns
        self._window = start, LAST_PLACE if len(found) < limit else found[-1][0]

    def get(self, place: Place) -> V | None:
        if place in self._values:
            return self._values[place]
        if place in self._unread:
            self._values[place] = self._to_value(*self._unread.pop(place))
            return self._values[place]
        if place in self._dirty or self._covers(place, place):
            return None
        self._read(place, self._table.ahead)
        return self.get(place)

    def put(self, place: Place, value: V | None) -> None:
        """Store a value; None removes it."""
        is_known = place in self._values or place in self._unread
        if value is None:
            if is_known:
                self._forget(bisect_left(self._places, place))
        else:
            if not is_known:
                self._make_room()
                insort(self._places, place)
            self._unread.pop(place, None)
            self._values[place] = value
        self._dirty.add(place)

    def after(self, start: Place) -> Iterator[tuple[Place, V]]:
        """The values from a place on, in order. They may be changed meanwhile."""
        while start <= LAST_PLACE:
            if not self._covers(start, start):
                self._read(start, self._table.page)
            assert self._window is not None
            last = self._window[1]
            for place in self._places[slice(*self._between(start, last))]:
                value = self.get(place)
                if value is not None:
                    yield place, value
            start = next_place(last)
            self._make_room()

    def drop(self, first: Place, last: Place) -> int:
        """Remove all values from a place through another. Returns their number."""
        if last < first:
            return 0
        if not self._covers(first, last):
            self._read(first, self._table.ahead)
        start, end = self._between(first, last)
        gone = self._places[start:end]
        if self._covers(first, last):
            if not self._in_table.isdisjoint(gone):
                self._drops.append((first, last))
            count = len(gone)
        else:
            self.write()
            count = self._db.change(self._table.drop, self._cursor_id, *first, *last)
        self._places[start:end] = []
        for place in gone:
            self._values.pop(place, None)
            self._unread.pop(place, None)
            self._in_table.discard(place)
        self._dirty.difference_update(gone)  # removals stay: their rows may be all that is dropped
        return count

    def write(self) -> None:
        """Write all changes."""
        table, cursor_id = self._table, self._cursor_id
        drops = [(cursor_id, *first, *last) for first, last in self._drops]
        puts = []
        for place in sorted(self._dirty):
            if place in self._values:
                puts.append((cursor_id, *place, *self._to_columns(self._values[place])))
                self._in_table.add(place)
            elif place in self._in_table or not self._covers(place, place):
                drops.append((cursor_id, *place, *place))
                self._in_table.discard(place)
        self._drops.clear()
        self._dirty.clear()
        if drops:
            self._db.each(table.drop, drops)
        if puts:
            self._db.each(table.put, puts)

    def _covers(self, first: Place, last: Place) -> bool:
        window = self._window
        return window is not None and window[0] <= first and last <= window[1]

    def _between(self, first: Place, last: Place) -> tuple[int, int]:
        return bisect_left(self._places, first), bisect_right(self._places, last)

    def _read(self, start: Place, limit: int) -> None:
        if self._drops:
            self.write()
        self._make_room()
        self.learn(start, self._db.rows(self._table.read, self._cursor_id, *start, limit), limit)

    def _forget(self, index: int) -> None:
        place = self._places.pop(index)
        self._values.pop(place, None)
        self._unread.pop(place, None)

    def _make_room(self) -> None:
        """Write what is held, and forget it, if it is too much."""
        if len(self._places) < self._table.held_max:
            return
        self.write()
        for held in (self._places, self._values, self._unread, self._in_table):
            held.clear()
        self._window = None
