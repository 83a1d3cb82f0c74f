"""The rows of a topic's cursors, as they are stored: how they move to another instance.

Rows come in this order, cursor by cursor:

    cursor | its own row, but for id and topic
    properties, page, batch, attempt | what belongs to it, but for its id
    succession | what was said of the topic's log, but for the topic
    spent | the highest epoch that a deleted cursor of the topic had, at least
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import apsw

from services.cursor.adapters.sqlite import LAYOUT, bound_leases, spend_epoch, spent_epoch
from services.placement.adapters.sqlite import PAGE_BYTES, UNSEEN, Place
from services.placement.ports import InvalidMove, Row
from services.runtime.clock import Clock

_CURSOR: Final = """name, created_ms, mark_ledger, mark_entry, version, acknowledged, partial,
    lease_owner, lease_epoch, lease_expires_ms, mark_digest, own_digest, lease_duration_ms"""
_CURSOR_COLUMNS: Final = 13


class _Part(NamedTuple):
    """A table of what belongs to a cursor: its key within it, and its other columns."""

    table: str
    key: tuple[str, ...]
    more: tuple[str, ...]
    first: tuple[Any, ...]
    """A key before all others."""

    @property
    def columns(self) -> tuple[str, ...]:
        """All but the cursor's id."""
        return self.key + self.more


_PARTS: Final = (
    _Part("properties", ("digest",), ("packed",), (b"",)),
    _Part("page", ("ledger_id", "number"), ("bits",), (-1, -1)),
    _Part("batch", ("ledger_id", "entry_id"), ("size", "bits"), (-1, -1)),
    _Part("attempt", ("ledger_id", "entry_id"), ("count",), (-1, -1)),
)
_BY_TABLE: Final = {part.table: part for part in _PARTS}
_SUCCESSION: Final = ("last_ledger", "last_entry", "next_ledger", "next_entry")

_STRAYS: Final = """SELECT topic FROM
    (SELECT topic FROM cursor WHERE topic IS NOT NULL UNION SELECT topic FROM succession
        UNION SELECT topic FROM spent WHERE topic <> '')
    WHERE topic NOT IN (SELECT topic FROM holding) AND substr(topic, 1, 1) <> '/' LIMIT ?"""


class CursorRows:
    """See services.placement.adapters.sqlite.Rows."""

    layout = LAYOUT

    def __init__(self, now_ms: Clock) -> None:
        self._now_ms = now_ms

    def strays(self, db: apsw.Connection, limit: int) -> list[str]:
        return [topic for (topic,) in _rows(db, _STRAYS, limit)]

    def seal(self, db: apsw.Connection, topic: str) -> None:
        """Calls are held off before, and what they wrote is written: nobody else writes cursors."""

    def page(
        self, db: apsw.Connection, topic: str, place: Place | None
    ) -> tuple[list[Row], Place | None]:
        """A place is a cursor's id, and a key in the table that is its kind."""
        if place is None:
            return self._cursor(db, topic, after=0)
        if place.kind == "succession":
            return _successions(db, topic, place.after)
        cursor_id, *key = place.after
        part = _BY_TABLE[place.kind]
        found: list[Row] = []
        size_bytes = 0
        columns, keys = ", ".join(part.columns), ", ".join(part.key)
        rows: Any = db.execute(
            f"""SELECT {columns} FROM {part.table} WHERE cursor = ? AND ({keys}) > ({_marks(key)})
                ORDER BY {keys}""",
            (cursor_id, *key),
        )
        for row in rows:
            found.append((part.table, *row))
            size_bytes += sum(len(each) if isinstance(each, bytes) else 8 for each in row)
            if size_bytes >= PAGE_BYTES:
                return found, Place(part.table, (cursor_id, *row[: len(part.key)]))
        following = _PARTS.index(part) + 1
        if following < len(_PARTS):
            return found, _beginning(_PARTS[following], cursor_id)
        more, place = self._cursor(db, topic, after=cursor_id)
        return found + more, place

    def _cursor(
        self, db: apsw.Connection, topic: str, *, after: int
    ) -> tuple[list[Row], Place | None]:
        """The row of the next cursor."""
        rows = _rows(
            db,
            f"SELECT id, {_CURSOR} FROM cursor WHERE topic = ? AND id > ? ORDER BY id LIMIT 1",
            topic,
            after,
        )
        if not rows:
            return [], Place("succession", (-1, -1))
        ((cursor_id, *row),) = rows
        return [("cursor", *row)], _beginning(_PARTS[0], cursor_id)

    def insert(self, db: apsw.Connection, move: str, parent: int, row: Row) -> int:
        kind, *values = row
        if kind == "cursor" and len(values) == _CURSOR_COLUMNS:
            db.execute(f"INSERT INTO cursor ({_CURSOR}) VALUES ({_marks(values)})", values)
            cursor_id = db.last_insert_rowid()
            db.execute("INSERT INTO staged VALUES (?, ?)", (cursor_id, move))
            return cursor_id
        if kind == "succession" and len(values) == len(_SUCCESSION):
            values = [UNSEEN + move, *values]
            db.execute(f"INSERT INTO succession VALUES ({_marks(values)})", values)
            return parent
        if kind == "spent" and len(values) == 1:
            spend_epoch(db, UNSEEN + move, int(values[0]))
            return parent
        part = _BY_TABLE.get(kind)
        if part is None or not parent or len(values) != len(part.columns):
            raise InvalidMove("a topic's cursors have no such row here", field="rows", row=kind)
        columns = ", ".join(part.columns)
        db.execute(
            f"INSERT INTO {part.table} (cursor, {columns}) VALUES ({_marks([parent, *values])})",
            (parent, *values),
        )
        return parent

    def show(self, db: apsw.Connection, topic: str, move: str) -> None:
        shown = "UPDATE cursor SET topic = ? WHERE id IN (SELECT id FROM staged WHERE move = ?)"
        db.execute(shown, (topic, move))
        db.execute("DELETE FROM succession WHERE topic = ?", (topic,))
        db.execute("UPDATE succession SET topic = ? WHERE topic = ?", (topic, UNSEEN + move))
        if epoch := spent_epoch(db, UNSEEN + move):
            spend_epoch(db, topic, epoch)
            db.execute("DELETE FROM spent WHERE topic = ?", (UNSEEN + move,))
        bound_leases(db, self._now_ms())

    def forget(self, db: apsw.Connection, topic: str) -> None:
        db.execute("UPDATE cursor SET topic = NULL WHERE topic = ?", (topic,))
        db.execute("DELETE FROM succession WHERE topic = ?", (topic,))
        db.execute("DELETE FROM spent WHERE topic = ?", (topic,))

    def unstage(self, db: apsw.Connection, move: str) -> None:
        db.execute("DELETE FROM succession WHERE topic = ?", (UNSEEN + move,))
        db.execute("DELETE FROM spent WHERE topic = ?", (UNSEEN + move,))


def _beginning(part: _Part, cursor_id: int) -> Place:
    return Place(part.table, (cursor_id, *part.first))


def _successions(
    db: apsw.Connection, topic: str, after: tuple[Any, ...]
) -> tuple[list[Row], Place | None]:
    limit = PAGE_BYTES // 64
    rows = _rows(
        db,
        """SELECT last_ledger, last_entry, next_ledger, next_entry FROM succession
            WHERE topic = ? AND (last_ledger, last_entry) > (?, ?)
            ORDER BY last_ledger, last_entry LIMIT ?""",
        topic,
        *after,
        limit,
    )
    found: list[Row] = [("succession", *row) for row in rows]
    if len(rows) == limit:
        return found, Place("succession", tuple(rows[-1][:2]))
    epoch = spent_epoch(db, topic)
    return found + ([("spent", epoch)] if epoch else []), None


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _rows(db: apsw.Connection, sql: str, *values: int | str) -> list[Any]:
    return db.execute(sql, values).fetchall()
