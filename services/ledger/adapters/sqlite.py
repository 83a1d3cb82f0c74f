"""Logs in one SQLite database: WAL, synchronous=FULL, one row per block of entries."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import apsw

from seqgate.services.errors import Fenced, StoreUnavailable
from seqgate.services.ledger.adapters.rows import existing
from seqgate.services.ledger.adapters.tables import Group, TableLedgerStore
from seqgate.services.ledger.core.entry import Entry
from seqgate.services.ledger.ports import NO_INSTANCES
from seqgate.services.runtime.sqlite import SqliteDatabase, connections
from seqgate.services.runtime.transactions import Transaction
from seqgate.types import Position, TopicName

LAYOUT: Final = 3
"""The version of the tables below. A database with another version is not opened."""

APPLICATION_ID: Final = 0x5E96A7E
"""Marks the file as ours (PRAGMA application_id)."""

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

_INSERT_BLOCK: Final = """INSERT INTO block (topic, ledger_id, first_entry, last_entry, append_ms,
    messages, size_bytes, entries_crc, metadata_crc, payloads_crc, entries, metadata, payloads)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING id"""
_GROW_TOPIC: Final = """UPDATE topic SET tail_ledger = ?, tail_entry = ?,
    first_ledger = coalesce(first_ledger, ?), first_entry = coalesce(first_entry, ?),
    entries = entries + ?, messages = messages + ?, size_bytes = size_bytes + ? WHERE id = ?"""


@asynccontextmanager
async def open_sqlite_store(
    path: Path, *, readers: int = 2, size_max_bytes: int = 0
) -> AsyncIterator["SqliteLedgerStore"]:
    """Open the database, or create it. With `size_max_bytes`, it refuses to grow beyond that size,
    its write-ahead log included; see `connections`."""

    def prepare(connection: apsw.Connection) -> None:
        version = connection.pragma("user_version")
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
        store = SqliteLedgerStore(SqliteDatabase(opened))
        await store.remove_deleted()
        yield store


class SqliteLedgerStore(TableLedgerStore):
    """See seqgate.services.ledger.ports.LedgerStore."""

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
        group = Group.of(ledger_id, expected_tail, append_ms, entries)
        block = group.block
        placed = (ledger_id, block.first_entry, block.last_entry, append_ms)
        counts = (group.messages, group.size_bytes)

        def work(db: Transaction) -> None:
            topic_id, state = existing(db, topic, ledger_id)
            if state.tail != expected_tail:
                raise Fenced("another writer owns the topic", epoch=state.ledger_id)
            ((block_id,),) = db.rows(_INSERT_BLOCK, topic_id, *placed, *counts, *block[4:])
            db.each(
                "INSERT INTO producer_block VALUES (?, ?, ?, ?, ?, ?)",
                (
                    (topic_id, producer, each.highest, block_id, each.lowest, bool(each.unfinished))
                    for producer, each in group.producers.items()
                ),
            )
            db.each(
                "INSERT OR REPLACE INTO producer_instance VALUES (?, ?, ?)",
                ((topic_id, producer, instance) for producer, instance in instances.items()),
            )
            tail, first = (ledger_id, block.last_entry), (ledger_id, block.first_entry)
            db.change(_GROW_TOPIC, *tail, *first, len(entries), *counts, topic_id)

        await self._database.write(work)
