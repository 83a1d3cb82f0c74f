"""The rows of a topic, as they are stored: how a topic moves to another instance.

Blocks go as they are, with their checksums, and are not looked into: what is damaged arrives
damaged. Rows come in this order:

    topic | its own row, but for id and name
    block | a block, but for id and topic
    producer | of which producer's ids the block before holds which
    trimmed | the highest id of a producer in what was trimmed
    tombstone | of a topic that was deleted: the ledger id that it had
"""

from collections.abc import Sequence
from typing import Any, Final

import apsw

from services.ledger.adapters.sqlite import LAYOUT
from services.placement.adapters.sqlite import PAGE_BYTES, UNSEEN, Place
from services.placement.ports import InvalidMove, Row

TRIMMED_PAGE: Final = 4_000
"""How many producers of what was trimmed are read at a time."""

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
_STRAYS: Final = """SELECT name FROM
    (SELECT name FROM topic WHERE name IS NOT NULL UNION SELECT name FROM tombstone)
    WHERE name NOT IN (SELECT topic FROM holding) AND substr(name, 1, 1) <> '/' LIMIT ?"""

_COLUMNS: Final = {"topic": 10, "block": 12, "producer": 4, "trimmed": 2, "tombstone": 1}


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
        found = _rows(db, "SELECT id FROM topic WHERE name = ?", topic)
        if not found:
            rows = _rows(db, "SELECT ledger_id FROM tombstone WHERE name = ?", topic)
            return [("tombstone", *row) for row in rows], None
        ((topic_id,),) = found
        if place is None:
            rows = _rows(db, f"SELECT {_TOPIC} FROM topic WHERE id = ?", topic_id)
            return [("topic", *row) for row in rows], Place("block", (-1, -1))
        if place.kind == "block":
            return self._blocks(db, topic_id, place)
        rows = _rows(db, _TRIMMED, topic_id, *place.after, TRIMMED_PAGE)
        more = len(rows) == TRIMMED_PAGE
        return [("trimmed", *row) for row in rows], Place("trimmed", rows[-1][:1]) if more else None

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
        else:
            db.execute("INSERT INTO producer_trimmed VALUES (?, ?, ?)", (topic_id, *values))
        return parent

    def show(self, db: apsw.Connection, topic: str, move: str) -> None:
        shown = "UPDATE topic SET name = ? WHERE id IN (SELECT id FROM staged WHERE move = ?)"
        db.execute("DELETE FROM tombstone WHERE name = ?", (topic,))
        db.execute(shown, (topic, move))
        db.execute("UPDATE tombstone SET name = ? WHERE name = ?", (topic, UNSEEN + move))

    def forget(self, db: apsw.Connection, topic: str) -> None:
        db.execute("UPDATE topic SET name = NULL WHERE name = ?", (topic,))
        db.execute("DELETE FROM tombstone WHERE name = ?", (topic,))

    def unstage(self, db: apsw.Connection, move: str) -> None:
        db.execute("DELETE FROM tombstone WHERE name = ?", (UNSEEN + move,))


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _rows(db: apsw.Connection, sql: str, *values: int | str) -> list[Any]:
    return db.execute(sql, values).fetchall()
