"""Logs in one SQLite database: WAL, synchronous=FULL, a row a block of entries."""

import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import apsw

from seqgate.types import SEQUENCE_ID_MAX, Position, TopicName
from services.errors import Fenced, StoreUnavailable
from services.ledger.adapters.block import Block, decode_block, encode_block, to_columns
from services.ledger.core.columns import Columns, clip
from services.ledger.core.entry import Entry, StoredEntry
from services.ledger.core.find import Finder
from services.ledger.core.receipt import Fate, Missing
from services.ledger.ports import (
    EntryCorrupt,
    LedgerRange,
    LogState,
    TopicNotFound,
    Trimmed,
)
from services.placement.adapters.sqlite import STAGED
from services.runtime.sqlite import Connections, connections

LAYOUT: Final = 3
"""The version of the tables below. A database with another one is not opened."""

APPLICATION_ID: Final = 0x5E96A7E
"""Marks the file as ours (PRAGMA application_id)."""

REMOVE_BLOCKS_MAX: Final = 64
"""How many blocks one transaction removes, so that publishing never waits for a long trim."""

RETAIN_BLOCKS_MAX: Final = 1_000
"""How many blocks one question about retention looks at."""

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
    unfinished INTEGER NOT NULL,  -- 1: the highest is a large message, incomplete with this block
    PRIMARY KEY (topic, producer, highest, block)
) WITHOUT ROWID;
CREATE INDEX producer_block_unfinished ON producer_block (topic) WHERE unfinished;
CREATE INDEX producer_block_block ON producer_block (block);
-- The highest id of each producer in what was trimmed, unless its message was incomplete.
CREATE TABLE producer_trimmed (
    topic    INTEGER NOT NULL,
    producer TEXT NOT NULL,
    highest  INTEGER NOT NULL,
    PRIMARY KEY (topic, producer)
) WITHOUT ROWID;
"""

REMEMBER: Final = """INSERT INTO producer_trimmed VALUES (?, ?, ?)
    ON CONFLICT DO UPDATE SET highest = max(highest, excluded.highest)"""

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
_NOBODYS: Final = """SELECT id FROM topic
    WHERE name IS NULL AND id NOT IN (SELECT id FROM staged) LIMIT 1"""
_LOG: Final = """name, incarnation, ledger_id, created_ms, first_ledger, first_entry, tail_ledger,
    tail_entry, entries, messages, size_bytes"""


@asynccontextmanager
async def open_sqlite_store(
    path: Path, *, readers: int = 2, size_max_bytes: int = 0
) -> AsyncIterator["SqliteLedgerStore"]:
    """Open the database, or make it. With `size_max_bytes`, it refuses to grow beyond that."""

    def prepare(connection: apsw.Connection) -> None:
        ((version,),) = _rows(connection, "PRAGMA user_version")
        if version == 0:
            connection.execute(TABLES)
            connection.execute(f"PRAGMA user_version = {LAYOUT}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        elif version != LAYOUT:
            raise StoreUnavailable("the database has another layout", found=version, known=LAYOUT)
        connection.execute(STAGED)
        if size_max_bytes:
            ((page_bytes,),) = _rows(connection, "PRAGMA page_size")
            connection.execute(f"PRAGMA max_page_count = {size_max_bytes // page_bytes}")

    async with connections(path, readers=readers, prepare=prepare) as opened:
        store = SqliteLedgerStore(opened)
        await store.remove_deleted()
        yield store


class SqliteLedgerStore:
    """See services.ledger.ports.LedgerStore."""

    def __init__(self, opened: Connections) -> None:
        self._connections = opened

    @property
    def connections(self) -> Connections:
        """For what is noted beside the logs."""
        return self._connections

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
            state = _state(db, topic)
            if ledger_id is not None and ledger_id != state.ledger_id:
                raise Fenced("another writer has the topic", epoch=state.ledger_id)
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
                raise TopicNotFound("there is no such topic", topic=topic)
            topic_id, state = row
            if state.ledger_id != ledger_id or state.tail != expected_tail:
                raise Fenced("another writer has the topic", epoch=state.ledger_id)
            place = (topic_id, ledger_id, first_entry, block.last_entry, append_ms)
            db.execute(_INSERT_BLOCK, (*place, messages, size_bytes, *block[4:]))
            block_id = db.last_insert_rowid()
            db.executemany(
                "INSERT INTO producer_block VALUES (?, ?, ?, ?, ?, ?)",
                (
                    (topic_id, producer, each.highest, block_id, each.lowest, each.unfinished)
                    for producer, each in ranges.items()
                ),
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
            topic_id, state = _existing(db, topic)
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
                if not found:  # what lies before the damage comes first
                    raise
            return found

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
                if not found:  # what lies before the damage comes first
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
                if not found:  # what lies before the damage comes first
                    raise
            return found

        return await self._connections.read(work)

    async def ledgers(self, topic: TopicName, *, after: int, limit: int) -> list[LedgerRange]:
        def work(db: apsw.Connection) -> list[LedgerRange]:
            topic_id, state = _existing(db, topic)
            found: list[LedgerRange] = []
            ledger_id = after
            while state.first is not None and len(found) < limit:
                # Two steps down the index a ledger, however many blocks it has.
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
            # A block that the position divides counts as a whole, less what is before.
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
            finder = Finder(producer, sequence_ids, uuid)
            _show(db, topic_id, producer, sequence_ids, state.first, finder)
            trimmed = _rows(db, TRIMMED_OF, topic_id, producer)
            trimmed_through = trimmed[0][0] if trimmed else -1
            return [
                finder.place(each)
                or (Missing.TRIMMED if each <= trimmed_through else Missing.STALE)
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
                raise Fenced("another writer has the topic", epoch=state.ledger_id)
            trimmed = _rows(db, TRIMMED_OF, topic_id, producer)
            decided = max(_decided(db, topic_id, producer), *(each for (each,) in trimmed), -1)
            return None if decided < 0 else decided

        return await self._connections.read(work)

    async def trimmed_producers(
        self, topic: TopicName, *, skip: int = 0, after: str = "", limit: int
    ) -> list[tuple[str, int]]:
        def work(db: apsw.Connection) -> list[tuple[str, int]]:
            topic_id, _ = _existing(db, topic)
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

    async def trim(self, topic: TopicName, before: Position) -> Trimmed:
        removed_entries = 0
        while True:
            step = await self._connections.write(lambda db: _trim_some(db, topic, before))
            removed_entries += step.removed_entries
            if step.first is None or step.first >= before:
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

    async def renew(self, topic: TopicName) -> None:
        def work(db: apsw.Connection) -> None:
            topic_id, state = _existing(db, topic)
            renewed = state.ledger_id + 1
            db.execute(
                "UPDATE topic SET ledger_id = ?, incarnation = ? WHERE id = ?",
                (renewed, renewed, topic_id),
            )

        await self._connections.write(work)

    async def cuts_unfinished(self, topic: TopicName, before: Position) -> bool:
        def work(db: apsw.Connection) -> bool:
            topic_id, state = _existing(db, topic)
            rows = _rows(
                db,
                f"""SELECT producer, highest, {_ENTRIES_ALONE}
                    FROM producer_block JOIN block ON block.id = block
                    WHERE producer_block.topic = ? AND unfinished
                    AND (ledger_id, first_entry) < (?, ?)""",
                topic_id,
                *before,
            )
            return any(
                (entry.producer, entry.highest) == (producer, highest)
                and (state.first or before) <= position < before
                for producer, highest, *block in rows
                if highest > _decided(db, topic_id, producer)
                for position, _, entry, _ in decode_block(Block(*block))
            )

        return await self._connections.read(work)

    async def delete(self, topic: TopicName) -> None:
        def work(db: apsw.Connection) -> None:
            topic_id, state = _existing(db, topic)
            db.execute(
                "INSERT OR REPLACE INTO tombstone VALUES (?, ?)", (str(topic), state.ledger_id)
            )
            db.execute("UPDATE topic SET name = NULL WHERE id = ?", (topic_id,))

        await self._connections.write(work)
        await self.remove_deleted()

    async def remove_deleted(self) -> None:
        """Remove what deleted topics have left, this process's and earlier ones'."""
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


def _existing(db: apsw.Connection, topic: TopicName) -> tuple[int, LogState]:
    row = _row(db, topic)
    if row is None:
        raise TopicNotFound("there is no such topic", topic=topic)
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
    db.execute(
        "INSERT INTO topic (name, incarnation, ledger_id, created_ms) VALUES (?, ?, ?, ?)",
        (str(topic), ledger_id + 1, ledger_id, time.time_ns() // 1_000_000),
    )


class _Range(NamedTuple):
    """One producer's lowest and highest id, and whether the highest is still incomplete."""

    lowest: int = SEQUENCE_ID_MAX
    highest: int = -1
    unfinished: bool = False


def _producer_ranges(entries: Sequence[Entry]) -> dict[str, _Range]:
    """The ids of each producer; markers are no messages."""
    ranges: dict[str, _Range] = {}
    for entry in entries:
        if not entry.marker:
            lowest, highest, unfinished = ranges.get(entry.producer, _Range())
            if entry.highest >= highest:
                highest, unfinished = entry.highest, entry.unfinished
            ranges[entry.producer] = _Range(min(lowest, entry.lowest), highest, unfinished)
    return ranges


def _decided(db: apsw.Connection, topic_id: int, producer: str) -> int:
    """The highest id of a producer that is complete, or that a higher one has overtaken; or -1."""
    rows = _rows(
        db,
        """SELECT highest - unfinished FROM producer_block WHERE topic = ? AND producer = ?
            ORDER BY highest DESC, block DESC LIMIT 1""",
        topic_id,
        producer,
    )
    return int(rows[0][0]) if rows else -1


def _remember(db: apsw.Connection, topic_id: int, producer: str, highest: int) -> None:
    """Note, while it is still there, what is about to be trimmed."""
    decided = min(highest, _decided(db, topic_id, producer))
    if decided >= 0:
        db.execute(REMEMBER, (topic_id, producer, decided))


def _entries(
    db: apsw.Connection,
    topic_id: int,
    after: Position | None,
    first: Position,
    *,
    payloads: bool,
) -> Iterator[StoredEntry]:
    """Entries after one position and from another on, in order."""
    start = _start(after, first)
    for block in _blocks(db, topic_id, start, _WITH_PAYLOADS if payloads else _WITH_METADATA):
        for stored in decode_block(block):
            if stored.position > start:
                yield stored


def _entries_at(
    db: apsw.Connection, topic_id: int, positions: Sequence[Position], *, payloads: bool
) -> Iterator[StoredEntry]:
    """The entries at positions, in order. A block is decoded once, however many are in it."""
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
    """Entries after one position and through another, in order, by block."""
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
    """The place after which to read: after a position, but from the first entry on."""
    return first._replace(entry_id=first.entry_id - 1) if after is None or after < first else after


def _blocks(db: apsw.Connection, topic_id: int, start: Position, columns: str) -> Iterator[Block]:
    """What holds entries after a position, in order."""
    rows: Iterator[Any] = db.execute(
        f"""SELECT {columns} FROM block WHERE topic = ? AND (ledger_id, last_entry) > (?, ?)
            ORDER BY ledger_id, last_entry""",
        (topic_id, *start),
    )
    return map(Block._make, rows)


def _show(
    db: apsw.Connection,
    topic_id: int,
    producer: str,
    sequence_ids: Sequence[int],
    first: Position | None,
    finder: Finder,
) -> None:
    """Show what may hold a producer's ids to the finder, until it is done."""
    rows: Iterator[Any] = db.execute(
        f"""SELECT {_ENTRIES_ALONE} FROM block WHERE id IN (
                SELECT block FROM producer_block
                WHERE topic = ? AND producer = ? AND highest >= ? AND lowest <= ?
            ) ORDER BY ledger_id, last_entry""",
        (topic_id, producer, min(sequence_ids), max(sequence_ids)),
    )
    for row in rows:
        for stored in decode_block(Block(*row)):
            if first is not None and stored.position >= first:
                finder.show(stored)
        if finder.done:
            break


def _trim_some(db: apsw.Connection, topic: TopicName, before: Position) -> Trimmed:
    """Remove a few blocks, whole or in part, and move the topic's first entry accordingly."""
    topic_id, state = _existing(db, topic)
    first = state.first
    if first is None or before <= first:
        return Trimmed(0, first)
    entries = messages = size_bytes = 0
    gone: list[int] = []
    rows = _rows(
        db,
        f"""SELECT id, messages, size_bytes, {_WITH_METADATA} FROM block
            WHERE topic = ? ORDER BY ledger_id, last_entry LIMIT ?""",
        topic_id,
        REMOVE_BLOCKS_MAX,
    )
    for block_id, block_messages, block_bytes, *columns in rows:
        block = Block(*columns)
        if Position(block.ledger_id, block.first_entry) >= before:
            break
        last = Position(block.ledger_id, block.last_entry)
        if last < before:
            gone.append(block_id)
        if last < before and Position(block.ledger_id, block.first_entry) >= first:
            entries += block.last_entry + 1 - block.first_entry
            messages += block_messages
            size_bytes += block_bytes
            continue
        trimmed = [each for each in decode_block(block) if first <= each.position < before]
        entries += len(trimmed)
        messages += sum(each.entry.message_count for each in trimmed)
        size_bytes += sum(each.size_bytes for each in trimmed)
        for producer, each in _producer_ranges([each.entry for each in trimmed]).items():
            _remember(db, topic_id, producer, each.highest)
    _remove_blocks(db, gone)
    first = _first_from(db, topic_id, max(first, before) if len(gone) < len(rows) else first)
    db.execute(
        """UPDATE topic SET first_ledger = ?, first_entry = ?, entries = entries - ?,
            messages = messages - ?, size_bytes = size_bytes - ? WHERE id = ?""",
        (*(first or (None, None)), entries, messages, size_bytes, topic_id),
    )
    return Trimmed(entries, first)


class _Run(NamedTuple):
    """A block, but for what it holds."""

    ledger_id: int
    first_entry: int
    last_entry: int
    append_ms: int


def _run_from(db: apsw.Connection, topic_id: int, ledger_id: int, entry_id: int) -> _Run:
    """The block that holds the first entry at or after a position; there is one."""
    (row,) = _rows(db, _RUN_FROM, topic_id, ledger_id, entry_id)
    return _Run._make(row)


def _first_since(
    db: apsw.Connection, topic_id: int, first: Position, tail: Position, append_ms: int
) -> Position | None:
    """See LedgerStore.find_time. The log is halved by ledgers, and then the ledger by entries; all
    the while, `before` was appended earlier, and what begins at `ledger_id`, or `high`, was not."""
    before = _run_from(db, topic_id, *first)
    if _run_from(db, topic_id, *tail).append_ms < append_ms:
        return None
    if before.append_ms >= append_ms:
        return first

    ledger_id = tail.ledger_id + 1  # nothing begins there, and the entry before it is not earlier
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
    """The first entry at or after a position."""
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
    """Remove a few blocks of a deleted topic; whether there is more to remove."""
    rows = _rows(db, _NOBODYS)
    if not rows:
        return False
    ((topic_id,),) = rows
    blocks = _rows(db, "SELECT id FROM block WHERE topic = ? LIMIT ?", topic_id, REMOVE_BLOCKS_MAX)
    _remove_blocks(db, [block for (block,) in blocks], remember=False)
    if not blocks:
        db.execute("DELETE FROM producer_trimmed WHERE topic = ?", (topic_id,))
        db.execute("DELETE FROM topic WHERE id = ?", (topic_id,))
    return True


def _remove_blocks(db: apsw.Connection, blocks: list[int], *, remember: bool = True) -> None:
    for block in blocks:
        if remember:
            rows = _rows(
                db, "SELECT topic, producer, highest FROM producer_block WHERE block = ?", block
            )
            for topic_id, producer, highest in rows:
                _remember(db, topic_id, producer, highest)
        db.execute("DELETE FROM producer_block WHERE block = ?", (block,))
        db.execute("DELETE FROM block WHERE id = ?", (block,))
    if blocks:
        _rows(db, "PRAGMA incremental_vacuum(2000)")
