"""Logs in one SQLite database: WAL, synchronous=FULL, one row per block of entries."""

import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import apsw

from seqgate.services.deduplication import NEVER, Mark
from seqgate.services.errors import Fenced, StoreUnavailable
from seqgate.services.ledger.adapters.block import Block, decode_block, encode_block, to_columns
from seqgate.services.ledger.core.columns import Columns, clip
from seqgate.services.ledger.core.entry import Entry, StoredEntry
from seqgate.services.ledger.core.find import Finder, clusters
from seqgate.services.ledger.core.marks import (
    folded,
    is_cut,
    last_mark,
    last_unfinished,
    last_whole,
    remembered,
)
from seqgate.services.ledger.core.receipt import Fate, Missing
from seqgate.services.ledger.ports import (
    NO_INSTANCES,
    EntryCorrupt,
    LedgerRange,
    LogState,
    Newest,
    ReplayPage,
    TopicNotFound,
    Trimmed,
)
from seqgate.services.runtime.sqlite import Connections, connections
from seqgate.types import SEQUENCE_ID_MAX, Chunk, Position, TopicName

LAYOUT: Final = 3
"""The version of the tables below. A database with another version is not opened."""

APPLICATION_ID: Final = 0x5E96A7E
"""Marks the file as ours (PRAGMA application_id)."""

REMOVE_BLOCKS_MAX: Final = 64
REMOVE_ENTRIES_MAX: Final = 4_000
"""The most blocks, and the most entries (though at least one block), that one transaction removes,
so that publishing never waits for a long trim."""

CLUSTERS_MAX: Final = 16
"""The most index queries for ids that are far apart. Each scans the producer's rows from its id on;
a block without any of the ids is never decoded."""

FIND_BLOCKS: Final = 16
FIND_FACTOR: Final = 4
"""The number of candidate blocks that a look-up reads first, newest first, in addition to one per
id; each further step reads this many times more."""

RETAIN_BLOCKS_MAX: Final = 1_000
"""The most blocks that one retention query reads."""

TABLES: Final = """
CREATE TABLE topic (
    id          INTEGER PRIMARY KEY,
    name        TEXT UNIQUE,            -- NULL: deleted, its blocks are yet to be removed
    incarnation INTEGER NOT NULL,
    ledger_id   INTEGER NOT NULL,
    created_ms  INTEGER NOT NULL,
    first_ledger INTEGER, first_entry INTEGER,   -- the first entry that is left; NULL: none is
    tail_ledger INTEGER, tail_entry INTEGER,     -- NULL: nothing was ever appended
    entries     INTEGER NOT NULL DEFAULT 0,
    messages    INTEGER NOT NULL DEFAULT 0,
    size_bytes  INTEGER NOT NULL DEFAULT 0
);
-- What a deleted topic leaves behind: its ledger_id never goes back.
CREATE TABLE tombstone (name TEXT PRIMARY KEY, ledger_id INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE block (
    id          INTEGER PRIMARY KEY,
    topic       INTEGER NOT NULL REFERENCES topic (id),
    ledger_id   INTEGER NOT NULL,
    first_entry INTEGER NOT NULL,
    last_entry  INTEGER NOT NULL,
    append_ms   INTEGER NOT NULL,
    messages    INTEGER NOT NULL,
    size_bytes  INTEGER NOT NULL,
    entries_crc INTEGER NOT NULL,
    metadata_crc INTEGER NOT NULL,
    payloads_crc INTEGER NOT NULL,
    -- What is read most comes first: the pages of what follows it are not touched.
    entries     BLOB NOT NULL,
    metadata    BLOB NOT NULL,
    payloads    BLOB NOT NULL
);
CREATE UNIQUE INDEX block_place ON block (topic, ledger_id, last_entry);
-- Which block holds a producer's ids.
CREATE TABLE producer_block (
    topic    INTEGER NOT NULL,
    producer TEXT NOT NULL,
    highest  INTEGER NOT NULL,
    block    INTEGER NOT NULL,
    lowest   INTEGER NOT NULL,
    unfinished INTEGER NOT NULL,  -- 1: after this block a large message may be incomplete
    PRIMARY KEY (topic, producer, highest, block)
) WITHOUT ROWID;
CREATE INDEX producer_block_unfinished ON producer_block (topic) WHERE unfinished;
CREATE INDEX producer_block_block ON producer_block (block);
-- What the entries of each producer that were trimmed come to (see core/marks.py).
CREATE TABLE producer_trimmed (
    topic    INTEGER NOT NULL,
    producer TEXT NOT NULL,
    highest  INTEGER NOT NULL,
    PRIMARY KEY (topic, producer)
) WITHOUT ROWID;
"""

INSTANCES: Final = """
-- Which instance stored what was last stored under a producer's name. Made where it is missing, so
-- that a database from before it keeps its layout.
CREATE TABLE IF NOT EXISTS producer_instance (
    topic    INTEGER NOT NULL,
    producer TEXT NOT NULL,
    instance BLOB NOT NULL,
    PRIMARY KEY (topic, producer)
) WITHOUT ROWID;
-- The last entry that was trimmed. Likewise.
CREATE TABLE IF NOT EXISTS topic_trimmed (
    topic     INTEGER PRIMARY KEY,
    ledger_id INTEGER NOT NULL,
    entry_id  INTEGER NOT NULL
);
"""

INDEXES: Final = """
-- Where a producer's last entries are: blocks of a topic are numbered in their order.
CREATE INDEX IF NOT EXISTS producer_block_order ON producer_block (topic, producer, block);
"""

CLOCKS: Final = """
-- When the last entry of a topic was appended of which nothing is left.
CREATE TABLE IF NOT EXISTS topic_clock (topic INTEGER PRIMARY KEY, append_ms INTEGER NOT NULL);
"""

LEAVING: Final = """
-- Topics that were deleted and whose cursors are yet to be removed; each has a tombstone. Likewise.
CREATE TABLE IF NOT EXISTS leaving (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""

REMEMBER: Final = "INSERT OR REPLACE INTO producer_trimmed VALUES (?, ?, ?)"
FORGET: Final = "DELETE FROM producer_trimmed WHERE topic = ? AND producer = ?"

TRIMMED_OF: Final = "SELECT highest FROM producer_trimmed WHERE topic = ? AND producer = ?"

_NEXT_LEDGER: Final = """SELECT ledger_id, first_entry FROM block
    WHERE topic = ? AND ledger_id > ? ORDER BY ledger_id, last_entry LIMIT 1"""
_LEDGER_END: Final = """SELECT last_entry FROM block
    WHERE topic = ? AND ledger_id = ? ORDER BY last_entry DESC LIMIT 1"""
_INSERT_BLOCK: Final = """INSERT INTO block (topic, ledger_id, first_entry, last_entry, append_ms,
    messages, size_bytes, entries_crc, metadata_crc, payloads_crc, entries, metadata, payloads)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_GROW_TOPIC: Final = """UPDATE topic SET tail_ledger = ?, tail_entry = ?,
    first_ledger = coalesce(first_ledger, ?), first_entry = coalesce(first_entry, ?),
    entries = entries + ?, messages = messages + ?, size_bytes = size_bytes + ? WHERE id = ?"""

_BLOCK: Final = """ledger_id, first_entry, last_entry, append_ms, entries_crc, metadata_crc,
    payloads_crc, entries, """
_WITH_PAYLOADS: Final = _BLOCK + "metadata, payloads"
_WITH_METADATA: Final = _BLOCK + "metadata, NULL"
_ENTRIES_ALONE: Final = _BLOCK + "NULL, NULL"
_BLOCK_AT: Final = """SELECT {} FROM block WHERE id = (
        SELECT id FROM block WHERE topic = ?1 AND ledger_id = ?2 AND last_entry >= ?3
        ORDER BY last_entry LIMIT 1
    ) AND first_entry <= ?3"""
_RUN_FROM: Final = """SELECT ledger_id, first_entry, last_entry, append_ms FROM block
    WHERE topic = ? AND (ledger_id, last_entry) >= (?, ?) ORDER BY ledger_id, last_entry LIMIT 1"""
_UNFINISHED: Final = "SELECT DISTINCT producer FROM producer_block WHERE topic = ? AND unfinished"
_BLOCKS_OF: Final = f"""SELECT lowest, highest, unfinished, {_ENTRIES_ALONE}
    FROM producer_block JOIN block ON block.id = block
    WHERE producer_block.topic = ? AND producer = ? AND """
_NEWEST_OF: Final = _BLOCKS_OF + "block > 0 ORDER BY block DESC"
_OLDEST_OF: Final = _BLOCKS_OF + "block >= ? ORDER BY block"
_INDEXED: Final = "SELECT producer, lowest, highest, unfinished FROM producer_block WHERE block = ?"
_OLDEST: Final = """SELECT id, messages, size_bytes, ledger_id, first_entry, last_entry FROM block
    WHERE topic = ? ORDER BY ledger_id, last_entry LIMIT ?"""
_LAST_APPEND: Final = """SELECT append_ms FROM block
    WHERE topic = ? ORDER BY ledger_id DESC, last_entry DESC LIMIT 1"""
_CLOCK: Final = "SELECT append_ms FROM topic_clock WHERE topic = ?"
_HOLDING: Final = """SELECT block, lowest, highest FROM producer_block
    WHERE topic = ? AND producer = ? AND highest >= ? AND lowest <= ?"""
_DELETED_TOPIC: Final = "SELECT id FROM topic WHERE name IS NULL LIMIT 1"
_LOG: Final = """name, incarnation, ledger_id, created_ms, first_ledger, first_entry, tail_ledger,
    tail_entry, entries, messages, size_bytes"""


@asynccontextmanager
async def open_sqlite_store(
    path: Path, *, readers: int = 2, size_max_bytes: int = 0
) -> AsyncIterator["SqliteLedgerStore"]:
    """Open the database, or create it. With `size_max_bytes`, it refuses to grow beyond that size,
    its write-ahead log included; see `connections`."""

    def prepare(connection: apsw.Connection) -> None:
        ((version,),) = _rows(connection, "PRAGMA user_version")
        if version == 0:
            connection.execute(TABLES)
            connection.execute(f"PRAGMA user_version = {LAYOUT}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        elif version != LAYOUT:
            raise StoreUnavailable(
                "store_path has another version's layout", found=version, known=LAYOUT
            )
        connection.execute(INDEXES)
        connection.execute(INSTANCES)
        connection.execute(CLOCKS)
        connection.execute(LEAVING)

    async with connections(
        path, readers=readers, prepare=prepare, size_max_bytes=size_max_bytes
    ) as opened:
        store = SqliteLedgerStore(opened)
        await store.remove_deleted()
        yield store


class SqliteLedgerStore:
    """See seqgate.services.ledger.ports.LedgerStore."""

    def __init__(self, opened: Connections) -> None:
        self._connections = opened

    async def create(self, topic: TopicName) -> tuple[LogState, bool]:
        def work(db: apsw.Connection) -> tuple[LogState, bool]:
            created = _row(db, topic) is None
            if created:
                _create(db, topic)
            return _state(db, topic), created

        return await self._connections.write(work)

    async def take(
        self, topic: TopicName, *, create: bool, ledger_id: int | None = None
    ) -> LogState:
        def work(db: apsw.Connection) -> LogState:
            if create and _row(db, topic) is None:
                _create(db, topic)
            _, state = _existing(db, topic, ledger_id)
            db.execute("UPDATE topic SET ledger_id = ledger_id + 1 WHERE name = ?", (str(topic),))
            return state._replace(ledger_id=state.ledger_id + 1)

        return await self._connections.write(work)

    async def append(
        self,
        topic: TopicName,
        ledger_id: int,
        expected_tail: Position | None,
        entries: Sequence[Entry],
        append_ms: int,
        *,
        instances: Mapping[str, bytes] = NO_INSTANCES,
    ) -> None:
        assert entries
        same = expected_tail is not None and expected_tail.ledger_id == ledger_id
        first_entry = expected_tail.entry_id + 1 if same and expected_tail else 0
        block = encode_block(ledger_id, first_entry, append_ms, entries)
        messages = sum(entry.message_count for entry in entries)
        size_bytes = sum(entry.size_bytes for entry in entries)
        ranges = _producer_ranges(entries)

        def work(db: apsw.Connection) -> None:
            row = _row(db, topic)
            if row is None:
                raise TopicNotFound("topic not found", topic=topic)
            topic_id, state = row
            if state.ledger_id != ledger_id or state.tail != expected_tail:
                raise Fenced("another writer owns the topic", epoch=state.ledger_id)
            place = (topic_id, ledger_id, first_entry, block.last_entry, append_ms)
            db.execute(_INSERT_BLOCK, (*place, messages, size_bytes, *block[4:]))
            block_id = db.last_insert_rowid()
            db.executemany(
                "INSERT INTO producer_block VALUES (?, ?, ?, ?, ?, ?)",
                (
                    (topic_id, producer, each.highest, block_id, each.lowest, bool(each.unfinished))
                    for producer, each in ranges.items()
                ),
            )
            db.executemany(
                "INSERT OR REPLACE INTO producer_instance VALUES (?, ?, ?)",
                ((topic_id, producer, instance) for producer, instance in instances.items()),
            )
            tail, first = (ledger_id, block.last_entry), (ledger_id, first_entry)
            db.execute(_GROW_TOPIC, (*tail, *first, len(entries), messages, size_bytes, topic_id))

        await self._connections.write(work)

    async def read(
        self,
        topic: TopicName,
        after: Position | None,
        *,
        entries_max: int,
        bytes_max: int,
        payloads: bool,
    ) -> list[StoredEntry]:
        def work(db: apsw.Connection) -> list[StoredEntry]:
            return _page(
                db, *_existing(db, topic), after, entries_max, bytes_max, payloads=payloads
            )

        return await self._connections.read(work)

    async def read_at(
        self, topic: TopicName, positions: Sequence[Position], *, bytes_max: int, payloads: bool
    ) -> list[StoredEntry]:
        def work(db: apsw.Connection) -> list[StoredEntry]:
            topic_id, state = _existing(db, topic)
            if state.first is None or state.tail is None:
                return []
            first, end = bisect_left(positions, state.first), bisect_right(positions, state.tail)
            found: list[StoredEntry] = []
            size_bytes = 0
            try:
                for stored in _entries_at(db, topic_id, positions[first:end], payloads=payloads):
                    size_bytes += stored.size_bytes if payloads else len(stored.entry.metadata)
                    if found and size_bytes > bytes_max:
                        break
                    found.append(stored)
            except EntryCorrupt:
                if not found:  # first return the entries before the damage
                    raise
            return found

        return await self._connections.read(work)

    async def columns(
        self,
        topic: TopicName,
        after: Position | None,
        *,
        through: Position,
        metadata: bool,
        runs_max: int,
        bytes_max: int,
    ) -> list[Columns]:
        def work(db: apsw.Connection) -> list[Columns]:
            topic_id, state = _existing(db, topic)
            if state.first is None:
                return []
            start = _start(after, state.first)
            found: list[Columns] = []
            size_bytes = 0
            try:
                for run in _runs(db, topic_id, start, through, metadata=metadata):
                    size_bytes += run.size_bytes
                    if found and (len(found) >= runs_max or size_bytes > bytes_max):
                        break
                    found.append(run)
            except EntryCorrupt:
                if not found:  # first return the entries before the damage
                    raise
            return found

        return await self._connections.read(work)

    async def ledgers(self, topic: TopicName, *, after: int, limit: int) -> list[LedgerRange]:
        def work(db: apsw.Connection) -> list[LedgerRange]:
            topic_id, state = _existing(db, topic)
            found: list[LedgerRange] = []
            ledger_id = after
            while state.first is not None and len(found) < limit:
                # Two index look-ups per ledger, however many blocks it has.
                rows = _rows(db, _NEXT_LEDGER, topic_id, ledger_id)
                if not rows:
                    break
                ((ledger_id, first_entry),) = rows
                ((last_entry,),) = _rows(db, _LEDGER_END, topic_id, ledger_id)
                first = max(state.first, Position(ledger_id, first_entry))
                found.append(LedgerRange(ledger_id, first.entry_id, last_entry))
            return found

        return await self._connections.read(work)

    async def count_after(self, topic: TopicName, position: Position | None) -> int:
        def work(db: apsw.Connection) -> int:
            topic_id, _ = _existing(db, topic)
            ledger_id, entry_id = position or (-1, -1)
            # A block that contains the position counts in full, minus its earlier entries.
            ((count,),) = _rows(
                db,
                """SELECT coalesce(sum(last_entry + 1 - max(first_entry,
                    CASE ledger_id WHEN ?2 THEN ?3 + 1 ELSE 0 END)), 0)
                    FROM block WHERE topic = ?1 AND (ledger_id, last_entry) > (?2, ?3)""",
                topic_id,
                ledger_id,
                entry_id,
            )
            return int(count)

        return await self._connections.read(work)

    async def find(
        self, topic: TopicName, producer: str, sequence_ids: Sequence[int], *, uuid: str = ""
    ) -> list[Fate]:
        def work(db: apsw.Connection) -> list[Fate]:
            topic_id, state = _existing(db, topic)
            finder = _found(db, topic_id, state.first, producer, sequence_ids, uuid)
            trimmed = _trimmed(db, topic_id, producer)
            return [
                finder.place(each)
                or (Missing.TRIMMED if each <= trimmed.highest else Missing.STALE)
                for each in sequence_ids
            ]

        return await self._connections.read(work)

    async def find_time(self, topic: TopicName, append_ms: int) -> Position | None:
        def work(db: apsw.Connection) -> Position | None:
            topic_id, state = _existing(db, topic)
            if state.first is None or state.tail is None:
                return None
            return _first_since(db, topic_id, state.first, state.tail, append_ms)

        return await self._connections.read(work)

    async def highest(self, topic: TopicName, ledger_id: int, producer: str) -> int | None:
        def work(db: apsw.Connection) -> int | None:
            topic_id, state = _existing(db, topic)
            if ledger_id != state.ledger_id:
                raise Fenced("another writer owns the topic", epoch=state.ledger_id)
            stored = _newest_first(db, topic_id, producer, state.first)
            before = _trimmed(db, topic_id, producer)
            decided = last_mark(before, (each.entry for each in stored)).decided
            return None if decided < 0 else decided

        return await self._connections.read(work)

    async def last_append_ms(self, topic: TopicName) -> int:
        def work(db: apsw.Connection) -> int:
            topic_id, _ = _existing(db, topic)
            return _last_append_ms(db, topic_id)

        return await self._connections.read(work)

    async def trimmed_through(self, topic: TopicName) -> Position | None:
        def work(db: apsw.Connection) -> Position | None:
            topic_id, _ = _existing(db, topic)
            rows = _rows(
                db, "SELECT ledger_id, entry_id FROM topic_trimmed WHERE topic = ?", topic_id
            )
            return Position(*rows[0]) if rows else None

        return await self._connections.read(work)

    async def newest(self, topic: TopicName, producer: str) -> Newest:
        def work(db: apsw.Connection) -> Newest:
            topic_id, state = _existing(db, topic)
            rows = _rows(
                db,
                "SELECT instance FROM producer_instance WHERE topic = ? AND producer = ?",
                topic_id,
                producer,
            )
            stored = _newest_first(db, topic_id, producer, state.first)
            before = _trimmed(db, topic_id, producer)
            whole = last_whole(before, (each.entry for each in stored))
            again = _newest_first(db, topic_id, producer, state.first)
            unfinished = last_unfinished(each.entry for each in again)
            return Newest(bytes(rows[0][0]) if rows else None, whole, unfinished)

        return await self._connections.read(work)

    async def trimmed_producers(
        self, topic: TopicName, *, skip: int = 0, after: str = "", limit: int
    ) -> list[tuple[str, int]]:
        def work(db: apsw.Connection) -> list[tuple[str, int]]:
            topic_id, _ = _existing(db, topic)
            return _trimmed_producers(db, topic_id, after, limit, skip)

        return await self._connections.read(work)

    async def replay(
        self,
        topic: TopicName,
        after: Position | None,
        *,
        producers_after: str | None,
        limit: int,
        bytes_max: int,
    ) -> ReplayPage:
        def work(db: apsw.Connection) -> ReplayPage:
            topic_id, state = _existing(db, topic)
            producers: list[tuple[str, int]] = []
            entries: list[StoredEntry] = []
            if producers_after is not None:
                producers = _trimmed_producers(db, topic_id, producers_after, limit)
            if not producers:
                entries = _page(db, topic_id, state, after, limit, bytes_max, payloads=False)
            return ReplayPage(state.start, producers, entries)

        return await self._connections.read(work)

    async def get(self, topic: TopicName) -> LogState:
        return await self._connections.read(lambda db: _existing(db, topic)[1])

    async def topics(self, *, prefix: str, after: str, limit: int) -> list[LogState]:
        def work(db: apsw.Connection) -> list[LogState]:
            rows = _rows(
                db,
                f"""SELECT {_LOG} FROM topic WHERE name > ?1 AND substr(name, 1, ?2) = ?3
                    ORDER BY name LIMIT ?4""",
                after,
                len(prefix),
                prefix,
                limit,
            )
            return [_log_state(row) for row in rows]

        return await self._connections.read(work)

    async def trim(
        self,
        topic: TopicName,
        before: Position,
        *,
        ledger_id: int | None = None,
        renewing: bool = False,
        steps_max: int = 0,
    ) -> Trimmed:
        owned = ledger_id

        def work(db: apsw.Connection) -> tuple[Trimmed, int]:
            topic_id, state = _existing(db, topic, owned)
            return _trim_some(db, topic_id, state, before, renewing=renewing)

        removed_entries = steps = 0
        while True:
            step, left_id = await self._connections.write(work)
            owned = None if ledger_id is None else left_id
            removed_entries, steps = removed_entries + step.removed_entries, steps + 1
            if step.first is None or step.first >= before or steps == steps_max:
                return Trimmed(removed_entries, step.first)

    async def retained_from(
        self, topic: TopicName, *, appended_since_ms: int | None, bytes_max: int | None
    ) -> Position | None:
        def work(db: apsw.Connection) -> Position | None:
            topic_id, state = _existing(db, topic)
            if state.first is None:
                return None
            kept, left_bytes = state.first, state.size_bytes
            rows: Iterator[Any] = db.execute(
                """SELECT ledger_id, first_entry, last_entry, append_ms, size_bytes FROM block
                    WHERE topic = ? ORDER BY ledger_id, last_entry LIMIT ?""",
                (topic_id, RETAIN_BLOCKS_MAX),
            )
            for ledger_id, first_entry, last_entry, append_ms, size_bytes in rows:
                old = appended_since_ms is not None and append_ms < appended_since_ms
                if not (old or (bytes_max is not None and left_bytes > bytes_max)):
                    return max(state.first, Position(ledger_id, first_entry))
                kept = Position(ledger_id, last_entry + 1)
                left_bytes -= size_bytes
            return kept

        return await self._connections.read(work)

    async def renew(self, topic: TopicName, *, ledger_id: int | None = None) -> None:
        def work(db: apsw.Connection) -> None:
            topic_id, state = _existing(db, topic, ledger_id)
            _renew(db, topic_id, state)

        await self._connections.write(work)

    async def cuts_unfinished(self, topic: TopicName, before: Position) -> bool:
        def work(db: apsw.Connection) -> bool:
            topic_id, state = _existing(db, topic)
            first = state.first
            if first is None or before <= first:
                return False
            producers = _rows(db, _UNFINISHED, topic_id)
            return any(_is_cut(db, topic_id, each, first, before) for (each,) in producers)

        return await self._connections.read(work)

    async def delete(
        self, topic: TopicName, *, ledger_id: int | None = None, leaves_cursors: bool = False
    ) -> None:
        def work(db: apsw.Connection) -> None:
            topic_id, state = _existing(db, topic, ledger_id)
            if leaves_cursors:
                db.execute("INSERT OR REPLACE INTO leaving VALUES (?)", (str(topic),))
            db.execute(
                "INSERT OR REPLACE INTO tombstone VALUES (?, ?)", (str(topic), state.ledger_id)
            )
            db.execute("UPDATE topic SET name = NULL WHERE id = ?", (topic_id,))

        await self._connections.write(work)
        await self.remove_deleted()

    async def leaving(self, *, after: str, limit: int) -> list[TopicName]:
        asked = "SELECT name FROM leaving WHERE name > ? ORDER BY name LIMIT ?"
        rows = await self._connections.read(lambda db: _rows(db, asked, after, limit))
        return [TopicName.parse(name) for (name,) in rows]

    async def left(self, topic: TopicName) -> None:
        def work(db: apsw.Connection) -> None:
            db.execute("DELETE FROM leaving WHERE name = ?", (str(topic),))

        await self._connections.write(work)

    async def remove_deleted(self) -> None:
        """Remove the leftovers of deleted topics, also those of earlier processes."""
        while await self._connections.write(_remove_deleted):
            pass

    async def check(self) -> None:
        await self._connections.read(lambda db: _rows(db, "SELECT 1 FROM topic LIMIT 1"))


def _rows(db: apsw.Connection, sql: str, *values: int | str) -> list[Any]:
    return db.execute(sql, values).fetchall()


def _row(db: apsw.Connection, topic: TopicName) -> tuple[int, LogState] | None:
    rows = _rows(db, f"SELECT id, {_LOG} FROM topic WHERE name = ?", str(topic))
    if not rows:
        return None
    topic_id, *log = rows[0]
    return topic_id, _log_state(log)


def _existing(
    db: apsw.Connection, topic: TopicName, ledger_id: int | None = None
) -> tuple[int, LogState]:
    """A topic's row, if it has the given ledger_id; None: any."""
    row = _row(db, topic)
    if row is None:
        raise TopicNotFound("topic not found", topic=topic)
    _, state = row
    if ledger_id not in (None, state.ledger_id):
        raise Fenced("another writer owns the topic", epoch=state.ledger_id)
    return row


def _state(db: apsw.Connection, topic: TopicName) -> LogState:
    return _existing(db, topic)[1]


def _log_state(row: Sequence[object]) -> LogState:
    name, incarnation, ledger_id, created_ms, *positions, entries, messages, size_bytes = row
    first_ledger, first_entry, tail_ledger, tail_entry = positions
    assert isinstance(name, str)
    return LogState(
        TopicName.parse(name),
        _integer(incarnation),
        _integer(ledger_id),
        _integer(created_ms),
        _position(first_ledger, first_entry),
        _position(tail_ledger, tail_entry),
        _integer(entries),
        _integer(messages),
        _integer(size_bytes),
    )


def _position(ledger_id: object, entry_id: object) -> Position | None:
    return None if ledger_id is None else Position(_integer(ledger_id), _integer(entry_id))


def _integer(value: object) -> int:
    assert isinstance(value, int)
    return value


def _create(db: apsw.Connection, topic: TopicName) -> None:
    before = _rows(db, "SELECT ledger_id FROM tombstone WHERE name = ?", str(topic))
    ledger_id = before[0][0] if before else 0
    db.execute("DELETE FROM tombstone WHERE name = ?", (str(topic),))
    db.execute("DELETE FROM leaving WHERE name = ?", (str(topic),))
    db.execute(
        "INSERT INTO topic (name, incarnation, ledger_id, created_ms) VALUES (?, ?, ?, ?)",
        (str(topic), ledger_id + 1, ledger_id, time.time_ns() // 1_000_000),
    )


def _renew(db: apsw.Connection, topic_id: int, state: LogState) -> int:
    renewed = state.ledger_id + 1
    db.execute(
        "UPDATE topic SET ledger_id = ?, incarnation = ? WHERE id = ?",
        (renewed, renewed, topic_id),
    )
    return renewed


class _Range(NamedTuple):
    """One producer's lowest and highest id, and the message left unfinished, if any."""

    lowest: int = SEQUENCE_ID_MAX
    highest: int = -1
    unfinished: Chunk | None = None


def _producer_ranges(entries: Sequence[Entry]) -> dict[str, _Range]:
    ranges: dict[str, _Range] = {}
    for entry in entries:
        if not entry.marker:
            lowest, highest, unfinished = ranges.get(entry.producer, _Range())
            chunk = entry.chunk
            if chunk is None:
                unfinished = None
            elif not chunk.is_last:
                unfinished = chunk
            elif unfinished is not None and unfinished.layout == chunk.layout:
                unfinished = None
            ids = _Range(min(lowest, entry.lowest), max(highest, entry.highest), unfinished)
            ranges[entry.producer] = ids
    return ranges


def _trimmed(db: apsw.Connection, topic_id: int, producer: str) -> Mark:
    """A producer's mark after its trimmed entries."""
    rows = _rows(db, TRIMMED_OF, topic_id, producer)
    return Mark(rows[0][0]) if rows else Mark()


def _newest_first(
    db: apsw.Connection, topic_id: int, producer: str, first: Position | None
) -> Iterator[StoredEntry]:
    """A producer's entries, newest first, back to the start of the log."""
    for row in db.execute(_NEWEST_OF, (topic_id, producer)):
        for stored in reversed(_stored_of(producer, row)):
            if first is not None and stored.position >= first:
                yield stored


def _stored_of(producer: str, row: Any) -> list[StoredEntry]:
    """A producer's entries in a block. A damaged block is represented by its index row: the highest
    id, and whether its message may be incomplete."""
    lowest, highest, unfinished, *columns = row
    block = Block(*columns)
    try:
        stored = decode_block(block)
    except EntryCorrupt:
        entry = _indexed(producer, lowest, highest, unfinished)
        return [StoredEntry(Position(block.ledger_id, block.last_entry), 0, entry, 0)]
    return [each for each in stored if each.entry.producer == producer and not each.entry.marker]


def _indexed(producer: str, lowest: int, highest: int, unfinished: int) -> Entry:
    """The stand-in for a producer's entries in an unreadable block."""
    chunk = Chunk("", 0, 2, 2) if unfinished else None
    return Entry(
        producer, lowest, highest, None, (), marker=False, metadata=b"", payload=b"", chunk=chunk
    )


def _is_cut(
    db: apsw.Connection, topic_id: int, producer: str, first: Position, before: Position
) -> bool:
    """Whether a trim removes entries of a producer's last message that could still be completed."""
    stored = _newest_first(db, topic_id, producer, first)
    mark = last_mark(_trimmed(db, topic_id, producer), (each.entry for each in stored))
    again = _newest_first(db, topic_id, producer, first)
    return is_cut(mark, ((each.position, each.entry) for each in again), before)


def _trimmed_producers(
    db: apsw.Connection, topic_id: int, after: str, limit: int, skip: int = 0
) -> list[tuple[str, int]]:
    rows = _rows(
        db,
        """SELECT producer, highest FROM producer_trimmed WHERE topic = ? AND producer > ?
            ORDER BY producer LIMIT ? OFFSET ?""",
        topic_id,
        after,
        limit,
        skip,
    )
    return [(producer, highest) for producer, highest in rows]


def _page(
    db: apsw.Connection,
    topic_id: int,
    state: LogState,
    after: Position | None,
    entries_max: int,
    bytes_max: int,
    *,
    payloads: bool,
) -> list[StoredEntry]:
    if state.first is None:
        return []
    found: list[StoredEntry] = []
    size_bytes = 0
    try:
        for stored in _entries(db, topic_id, after, state.first, payloads=payloads):
            size_bytes += stored.size_bytes if payloads else len(stored.entry.metadata)
            if found and (len(found) >= entries_max or size_bytes > bytes_max):
                break
            found.append(stored)
    except EntryCorrupt:
        if not found:  # first return the entries before the damage
            raise
    return found


def _entries(
    db: apsw.Connection,
    topic_id: int,
    after: Position | None,
    first: Position,
    *,
    payloads: bool,
) -> Iterator[StoredEntry]:
    """Entries after `after` and not before `first`, in order."""
    start = _start(after, first)
    for block in _blocks(db, topic_id, start, _WITH_PAYLOADS if payloads else _WITH_METADATA):
        for stored in decode_block(block):
            if stored.position > start:
                yield stored


def _entries_at(
    db: apsw.Connection, topic_id: int, positions: Sequence[Position], *, payloads: bool
) -> Iterator[StoredEntry]:
    columns = _WITH_PAYLOADS if payloads else _WITH_METADATA
    index = 0
    while index < len(positions):
        ledger_id, entry_id = positions[index]
        rows = _rows(db, _BLOCK_AT.format(columns), topic_id, ledger_id, entry_id)
        if not rows:
            index += 1
            continue
        block = Block._make(rows[0])
        entries = decode_block(block)
        end = bisect_right(positions, (ledger_id, block.last_entry), index)
        for _, entry_id in positions[index:end]:
            yield entries[entry_id - block.first_entry]
        index = end


def _runs(
    db: apsw.Connection, topic_id: int, start: Position, through: Position, *, metadata: bool
) -> Iterator[Columns]:
    if start >= through:
        return
    for block in _blocks(db, topic_id, start, _WITH_METADATA if metadata else _ENTRIES_ALONE):
        if Position(block.ledger_id, block.first_entry) > through:
            return
        yield clip(
            to_columns(block),
            start.entry_id + 1 if block.ledger_id == start.ledger_id else block.first_entry,
            through.entry_id if block.ledger_id == through.ledger_id else block.last_entry,
        )


def _start(after: Position | None, first: Position) -> Position:
    """The position to read after: `after`, but not before the start of the log."""
    return first._replace(entry_id=first.entry_id - 1) if after is None or after < first else after


def _blocks(db: apsw.Connection, topic_id: int, start: Position, columns: str) -> Iterator[Block]:
    rows: Iterator[Any] = db.execute(
        f"""SELECT {columns} FROM block WHERE topic = ? AND (ledger_id, last_entry) > (?, ?)
            ORDER BY ledger_id, last_entry""",
        (topic_id, *start),
    )
    return map(Block._make, rows)


def _found(
    db: apsw.Connection,
    topic_id: int,
    first: Position | None,
    producer: str,
    sequence_ids: Sequence[int],
    uuid: str,
) -> Finder:
    """Look up a producer's ids in candidate blocks. Most ids are in one block; if they are in
    many, the newest blocks are read first, then earlier ones until all ids are found."""
    wanted = sorted(set(sequence_ids))
    blocks: set[int] = set()
    for lowest, highest in clusters(wanted, CLUSTERS_MAX):
        rows = db.execute(_HOLDING, (topic_id, producer, lowest, highest))
        for block, block_lowest, block_highest in rows:
            if _is_in(wanted, block_lowest, block_highest):
                blocks.add(block)
    in_order = sorted(blocks)  # blocks of a topic are numbered in append order
    count = len(wanted) + FIND_BLOCKS
    while True:
        finder = Finder(producer, sequence_ids, uuid)
        for block_id in in_order[-count:]:
            ((*columns,),) = _rows(db, f"SELECT {_ENTRIES_ALONE} FROM block WHERE id = ?", block_id)
            for stored in decode_block(Block(*columns)):
                if first is not None and stored.position >= first:
                    finder.show(stored)
        if finder.done or count >= len(in_order):
            return finder
        count *= FIND_FACTOR


def _is_in(wanted: Sequence[int], lowest: int, highest: int) -> bool:
    return bisect_left(wanted, lowest) < bisect_right(wanted, highest)


def _trim_some(
    db: apsw.Connection, topic_id: int, state: LogState, before: Position, *, renewing: bool
) -> tuple[Trimmed, int]:
    """Remove a few blocks, whole or in part, and advance the topic's first entry. Returns the
    topic's ledger_id, too, which is another one after a renewal."""
    first, ledger_id = state.first, state.ledger_id
    if first is None or before <= first:
        return Trimmed(0, first), ledger_id
    going = _going(db, topic_id, first, before)
    cut = _remember(db, topic_id, going)
    if cut and renewing:
        ledger_id = _renew(db, topic_id, state)
    append_ms = _last_append_ms(db, topic_id)
    _remove_blocks(db, going.blocks)
    if going.through is not None:
        db.execute(
            "INSERT OR REPLACE INTO topic_trimmed VALUES (?, ?, ?)", (topic_id, *going.through)
        )
    left = _first_from(db, topic_id, going.until)
    db.execute(
        """UPDATE topic SET first_ledger = ?, first_entry = ?, entries = entries - ?,
            messages = messages - ?, size_bytes = size_bytes - ? WHERE id = ?""",
        (*(left or (None, None)), going.entries, going.messages, going.size_bytes, topic_id),
    )
    if left is None:
        db.execute("INSERT OR REPLACE INTO topic_clock VALUES (?, ?)", (topic_id, append_ms))
    return Trimmed(going.entries, left), ledger_id


def _last_append_ms(db: apsw.Connection, topic_id: int) -> int:
    rows = _rows(db, _LAST_APPEND, topic_id) or _rows(db, _CLOCK, topic_id)
    return int(rows[0][0]) if rows else 0


@dataclass(slots=True)
class _Going:
    """The entries that one step of a trim removes: all before `until`, whole blocks by their ids,
    and each producer's entries. `through` is the last entry."""

    until: Position
    through: Position | None = None
    blocks: list[int] = field(default_factory=list)
    entries: int = 0
    messages: int = 0
    size_bytes: int = 0
    producers: dict[str, list[Entry]] = field(default_factory=dict)
    last_block: int = 0

    def take(self, entry: Entry) -> None:
        if not entry.marker:
            self.producers.setdefault(entry.producer, []).append(entry)


def _going(db: apsw.Connection, topic_id: int, first: Position, before: Position) -> _Going:
    going = _Going(first)
    rows = _rows(db, _OLDEST, topic_id, REMOVE_BLOCKS_MAX)
    for block_id, messages, size_bytes, ledger_id, first_entry, last_entry in rows:
        start, last = Position(ledger_id, first_entry), Position(ledger_id, last_entry)
        entries_then = going.entries + last_entry + 1 - first_entry
        if start >= before or (going.entries and entries_then > REMOVE_ENTRIES_MAX):
            break
        going.last_block = block_id
        if first <= start and last < before:
            entries = _all_of(db, block_id)
            going.through = last
            going.entries += last_entry + 1 - first_entry
            going.messages += messages
            going.size_bytes += size_bytes
        else:
            ((*columns,),) = _rows(db, f"SELECT {_WITH_METADATA} FROM block WHERE id = ?", block_id)
            stored = decode_block(Block(*columns))
            some = [each for each in stored if first <= each.position < before]
            entries = [each.entry for each in some]
            going.through = some[-1].position if some else going.through
            going.entries += len(some)
            going.messages += sum(each.entry.message_count for each in some)
            going.size_bytes += sum(each.size_bytes for each in some)
        for entry in entries:
            going.take(entry)
        if last < before:
            going.blocks.append(block_id)
            going.until = Position(ledger_id, last_entry + 1)
        else:
            going.until = before
    return going


def _all_of(db: apsw.Connection, block_id: int) -> list[Entry]:
    """All entries of a block. A damaged block is represented by its index rows."""
    ((*columns,),) = _rows(db, f"SELECT {_ENTRIES_ALONE} FROM block WHERE id = ?", block_id)
    try:
        return [each.entry for each in decode_block(Block(*columns))]
    except EntryCorrupt:
        rows = _rows(db, _INDEXED, block_id)
        return [_indexed(*row) for row in rows]


def _remember(db: apsw.Connection, topic_id: int, going: _Going) -> bool:
    """Record each producer's mark after the entries to be trimmed. Returns whether the trim cuts a
    large message that could still be completed."""
    cut = False
    for producer, entries in going.producers.items():
        mark = folded(_trimmed(db, topic_id, producer), entries)
        left = _left(db, topic_id, producer, going)
        decided, is_cut = remembered(mark, left)
        cut = cut or is_cut
        if decided > NEVER:
            db.execute(REMEMBER, (topic_id, producer, decided))
        else:
            db.execute(FORGET, (topic_id, producer))
    return cut


def _left(db: apsw.Connection, topic_id: int, producer: str, going: _Going) -> Iterator[Entry]:
    """The producer's entries that this step of a trim leaves, in order."""
    for row in db.execute(_OLDEST_OF, (topic_id, producer, going.last_block)):
        for stored in _stored_of(producer, row):
            if stored.position >= going.until:
                yield stored.entry


class _Run(NamedTuple):
    """A block without its blobs."""

    ledger_id: int
    first_entry: int
    last_entry: int
    append_ms: int


def _run_from(db: apsw.Connection, topic_id: int, ledger_id: int, entry_id: int) -> _Run:
    """The block with the first entry at or after a position, which must exist."""
    (row,) = _rows(db, _RUN_FROM, topic_id, ledger_id, entry_id)
    return _Run._make(row)


def _first_since(
    db: apsw.Connection, topic_id: int, first: Position, tail: Position, append_ms: int
) -> Position | None:
    """See LedgerStore.find_time. A binary search over ledgers, then over the entries of one.
    Invariant: `before` was appended before `append_ms`; the entries from `ledger_id`, or from
    `high`, on were not."""
    before = _run_from(db, topic_id, *first)
    if _run_from(db, topic_id, *tail).append_ms < append_ms:
        return None
    if before.append_ms >= append_ms:
        return first

    ledger_id = tail.ledger_id + 1  # empty; and the tail was not appended before
    while ledger_id - before.ledger_id > 1:
        middle = (before.ledger_id + ledger_id) // 2
        run = _run_from(db, topic_id, middle, 0)
        if run.append_ms < append_ms:
            before = run
        else:
            ledger_id = middle

    ((end,),) = _rows(db, _LEDGER_END, topic_id, before.ledger_id)
    low, high = before.last_entry, end + 1
    while high - low > 1:
        run = _run_from(db, topic_id, before.ledger_id, (low + high) // 2)
        if run.append_ms < append_ms:
            low = run.last_entry
        else:
            high = run.first_entry
    if high <= end:
        return Position(before.ledger_id, high)
    run = _run_from(db, topic_id, ledger_id, 0)
    return Position(run.ledger_id, run.first_entry)


def _first_from(db: apsw.Connection, topic_id: int, position: Position) -> Position | None:
    rows = _rows(
        db,
        """SELECT ledger_id, first_entry FROM block
            WHERE topic = ? AND (ledger_id, last_entry) >= (?, ?)
            ORDER BY ledger_id, last_entry LIMIT 1""",
        topic_id,
        *position,
    )
    return max(Position(*rows[0]), position) if rows else None


def _remove_deleted(db: apsw.Connection) -> bool:
    """Remove a few blocks of a deleted topic. Returns whether more are left."""
    rows = _rows(db, _DELETED_TOPIC)
    if not rows:
        return False
    ((topic_id,),) = rows
    blocks = _rows(db, "SELECT id FROM block WHERE topic = ? LIMIT ?", topic_id, REMOVE_BLOCKS_MAX)
    _remove_blocks(db, [block for (block,) in blocks])
    if not blocks:
        db.execute("DELETE FROM producer_trimmed WHERE topic = ?", (topic_id,))
        db.execute("DELETE FROM producer_instance WHERE topic = ?", (topic_id,))
        db.execute("DELETE FROM topic_clock WHERE topic = ?", (topic_id,))
        db.execute("DELETE FROM topic_trimmed WHERE topic = ?", (topic_id,))
        db.execute("DELETE FROM topic WHERE id = ?", (topic_id,))
    return True


def _remove_blocks(db: apsw.Connection, blocks: list[int]) -> None:
    for block in blocks:
        db.execute("DELETE FROM producer_block WHERE block = ?", (block,))
        db.execute("DELETE FROM block WHERE id = ?", (block,))
    if blocks:
        _rows(db, "PRAGMA incremental_vacuum(2000)")
