"""The rows of a topic, as they are stored: how a topic moves to another instance.

Blocks go as they are, with their checksums, and are not looked into: what is damaged arrives
damaged. Rows come in this order:

    topic | its own row, but for id and name
    block | a block, but for id and topic
    producer | of which producer's ids the block before holds which
    trimmed | the highest id of a producer in what was trimmed
    instance | which instance stored what was last stored under a producer's name
    clock | when the last entry was appended, of a topic of which none is left
    through | the last entry that was trimmed
    tombstone | of a topic that was deleted: the ledger id that it had
    leaving | of a topic that was deleted: its cursors are yet to be removed
"""

from collections.abc import Sequence
from typing import Any, Final

import apsw

from services.ledger.adapters.sqlite import LAYOUT
from services.placement.adapters.sqlite import PAGE_BYTES, UNSEEN, Place
from services.placement.ports import InvalidMove, Row

PRODUCERS_PAGE: Final = 4_000
"""How many producers are read at a time."""

_TOPIC: Final = """incarnation, ledger_id, created_ms, first_ledger, first_entry, tail_ledger,
    tail_entry, entries, messages, size_bytes"""
_BLOCK: Final = """ledger_id, first_entry, last_entry, append_ms, messages, size_bytes,
    entries_crc, metadata_crc, payloads_crc, entries, metadata, payloads"""
_BLOCKS: Final = f"""SELECT id, {_BLOCK} FROM block WHERE topic = ?
    AND (ledger_id, last_entry) > (?, ?) ORDER BY ledger_id, last_entry"""
_PRODUCERS: Final = (
    "SELECT producer, highest, lowest, unfinished FROM producer_block WHERE block = ?"
)
_TRIMMED: Final = """SELECT producer, highest FROM producer_trimmed
    WHERE topic = ? AND producer > ? ORDER BY producer LIMIT ?"""
_INSTANCES: Final = """SELECT producer, instance FROM producer_instance
    WHERE topic = ? AND producer > ? ORDER BY producer LIMIT ?"""
_CLOCK: Final = "SELECT append_ms FROM topic_clock WHERE topic = ?"
_THROUGH: Final = "SELECT ledger_id, entry_id FROM topic_trimmed WHERE topic = ?"
_STRAYS: Final = """SELECT name FROM
    (SELECT name FROM topic WHERE name IS NOT NULL UNION SELECT name FROM tombstone)
    WHERE name NOT IN (SELECT topic FROM holding) AND substr(name, 1, 1) <> '/' LIMIT ?"""

_COLUMNS: Final = {
    "topic": 10,
    "block": 12,
    "producer": 4,
    "trimmed": 2,
    "instance": 2,
    "clock": 1,
    "through": 2,
    "tombstone": 1,
    "leaving": 0,
}


class LedgerRows:
    """See services.placement.adapters.sqlite.Rows."""

    layout = LAYOUT

    def strays(self, db: apsw.Connection, limit: int) -> list[str]:
        return [name for (name,) in _rows(db, _STRAYS, limit)]

    def seal(self, db: apsw.Connection, topic: str) -> None:
        # Whoever wrote it is fenced, here and towards deduplication.
        db.execute("UPDATE topic SET ledger_id = ledger_id + 1 WHERE name = ?", (topic,))

    def page(
        self, db: apsw.Connection, topic: str, place: Place | None
    ) -> tuple[list[Row], Place | None]:
        topics = _rows(db, "SELECT id FROM topic WHERE name = ?", topic)
        if not topics:
            rows = _rows(db, "SELECT ledger_id FROM tombstone WHERE name = ?", topic)
            leaving = _rows(db, "SELECT 1 FROM leaving WHERE name = ?", topic)
            left: list[Row] = [("tombstone", *row) for row in rows]
            return left + [("leaving",) for _ in leaving], None
        ((topic_id,),) = topics
        if place is None:
            rows = _rows(db, f"SELECT {_TOPIC} FROM topic WHERE id = ?", topic_id)
            through = _rows(db, _THROUGH, topic_id)
            about: list[Row] = [("topic", *row) for row in rows]
            about += [("through", *row) for row in through]
            return about, Place("block", (-1, -1))
        if place.kind == "block":
            return self._blocks(db, topic_id, place)
        asked, then = (
            (_TRIMMED, Place("instance", ("",))) if place.kind == "trimmed" else (_INSTANCES, None)
        )
        rows = _rows(db, asked, topic_id, *place.after, PRODUCERS_PAGE)
        found: list[Row] = [(place.kind, *row) for row in rows]
        if len(rows) == PRODUCERS_PAGE:
            return found, Place(place.kind, rows[-1][:1])
        if then is None:
            found += [("clock", *row) for row in _rows(db, _CLOCK, topic_id)]
        return found, then

    def _blocks(
        self, db: apsw.Connection, topic_id: int, place: Place
    ) -> tuple[list[Row], Place | None]:
        found: list[Row] = []
        size_bytes = 0
        blocks: Any = db.execute(_BLOCKS, (topic_id, *place.after))
        for block_id, *block in blocks:
            found.append(("block", *block))
            found += [("producer", *each) for each in _rows(db, _PRODUCERS, block_id)]
            size_bytes += sum(len(each) for each in block if isinstance(each, bytes))
            if size_bytes >= PAGE_BYTES:
                return found, Place("block", (block[0], block[2]))
        return found, Place("trimmed", ("",))

    def insert(self, db: apsw.Connection, move: str, parent: int, row: Row) -> int:
        kind, *values = row
        if len(values) != _COLUMNS.get(kind):
            raise InvalidMove(
                "a topic has no such row", field="rows", row=kind, columns=len(values)
            )
        if kind == "topic":
            db.execute(f"INSERT INTO topic ({_TOPIC}) VALUES ({_marks(values)})", values)
            topic_id = db.last_insert_rowid()
            db.execute("INSERT INTO staged VALUES (?, ?)", (topic_id, move))
            return parent
        if kind == "tombstone":
            db.execute("INSERT INTO tombstone VALUES (?, ?)", (UNSEEN + move, *values))
            return parent
        if kind == "leaving":
            db.execute("INSERT INTO leaving VALUES (?)", (UNSEEN + move,))
            return parent
        found = _rows(db, "SELECT id FROM staged WHERE move = ?", move)
        if not found or (kind == "producer" and not parent):
            raise InvalidMove("a row comes before what it belongs to", field="rows", row=kind)
        ((topic_id,),) = found
        if kind == "block":
            marks = _marks([topic_id, *values])
            db.execute(f"INSERT INTO block (topic, {_BLOCK}) VALUES ({marks})", (topic_id, *values))
            return db.last_insert_rowid()
        if kind == "producer":
            producer, highest, lowest, unfinished = values
            row = (topic_id, producer, highest, parent, lowest, unfinished)
            db.execute("INSERT INTO producer_block VALUES (?, ?, ?, ?, ?, ?)", row)
        elif kind == "through":
            db.execute("INSERT INTO topic_trimmed VALUES (?, ?, ?)", (topic_id, *values))
        elif kind == "instance":
            db.execute("INSERT INTO producer_instance VALUES (?, ?, ?)", (topic_id, *values))
        elif kind == "clock":
            db.execute("INSERT INTO topic_clock VALUES (?, ?)", (topic_id, *values))
        else:
            db.execute("INSERT INTO producer_trimmed VALUES (?, ?, ?)", (topic_id, *values))
        return parent

    def show(self, db: apsw.Connection, topic: str, move: str) -> None:
        shown = "UPDATE topic SET name = ? WHERE id IN (SELECT id FROM staged WHERE move = ?)"
        db.execute("DELETE FROM tombstone WHERE name = ?", (topic,))
        db.execute(shown, (topic, move))
        db.execute("UPDATE tombstone SET name = ? WHERE name = ?", (topic, UNSEEN + move))
        db.execute("DELETE FROM leaving WHERE name = ?", (topic,))
        db.execute("UPDATE leaving SET name = ? WHERE name = ?", (topic, UNSEEN + move))

    def forget(self, db: apsw.Connection, topic: str) -> None:
        db.execute("UPDATE topic SET name = NULL WHERE name = ?", (topic,))
        db.execute("DELETE FROM tombstone WHERE name = ?", (topic,))
        db.execute("DELETE FROM leaving WHERE name = ?", (topic,))

    def unstage(self, db: apsw.Connection, move: str) -> None:
        db.execute("DELETE FROM tombstone WHERE name = ?", (UNSEEN + move,))
        db.execute("DELETE FROM leaving WHERE name = ?", (UNSEEN + move,))


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _rows(db: apsw.Connection, sql: str, *values: int | str) -> list[Any]:
    return db.execute(sql, values).fetchall()
