"""Cursors in one SQLite database: WAL, synchronous=FULL, one row per page of holes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

import apsw

from seqgate.services.cursor.adapters.tables import TableCursorStore
from seqgate.services.cursor.core.state import LEASE_MAX_MS
from seqgate.services.errors import DomainError, StoreUnavailable
from seqgate.services.runtime.clock import Clock, SteadyClock
from seqgate.services.runtime.sqlite import SqliteDatabase, connections
from seqgate.services.runtime.transactions import Transaction, Work

T = TypeVar("T")

LAYOUT: Final = 4
"""The version of the tables below. Earlier ones are upgraded on opening; any other one is
refused."""

APPLICATION_ID: Final = 0x5E96A7C
"""Marks the file as ours (PRAGMA application_id)."""

TABLES: Final = """
CREATE TABLE cursor (
    id          INTEGER PRIMARY KEY,
    topic       TEXT,               -- NULL: deleted, its rows are yet to be removed
    name        TEXT NOT NULL,
    created_ms  INTEGER NOT NULL,
    mark_ledger INTEGER, mark_entry INTEGER,    -- NULL: nothing is acknowledged from the start on
    version     INTEGER NOT NULL,
    acknowledged INTEGER NOT NULL,
    partial     INTEGER NOT NULL,
    lease_owner TEXT, lease_epoch INTEGER,      -- NULL: nobody ever asked
    lease_duration_ms INTEGER,                  -- how long the lease was granted for
    lease_number INTEGER NOT NULL,              -- changes with each grant, renewal and release
    mark_digest BLOB, own_digest BLOB           -- of the properties; NULL: there are none
);
CREATE UNIQUE INDEX cursor_place ON cursor (topic, name);
CREATE TABLE properties (
    cursor  INTEGER NOT NULL,
    digest  BLOB NOT NULL,          -- BLAKE2b of what is packed, 16 bytes
    packed  BLOB NOT NULL           -- a MessagePack map
);
CREATE UNIQUE INDEX properties_place ON properties (cursor, digest);
CREATE TABLE page (
    cursor    INTEGER NOT NULL,
    ledger_id INTEGER NOT NULL,
    number    INTEGER NOT NULL,
    bits      BLOB NOT NULL         -- see bits.py
);
CREATE UNIQUE INDEX page_place ON page (cursor, ledger_id, number);
CREATE TABLE batch (
    cursor    INTEGER NOT NULL,
    ledger_id INTEGER NOT NULL,
    entry_id  INTEGER NOT NULL,
    size      INTEGER NOT NULL,     -- below 0: how large it really is, is not known
    bits      BLOB NOT NULL,        -- see bits.py
    PRIMARY KEY (cursor, ledger_id, entry_id)
) WITHOUT ROWID;
CREATE TABLE attempt (
    cursor    INTEGER NOT NULL,
    ledger_id INTEGER NOT NULL,
    entry_id  INTEGER NOT NULL,
    count     INTEGER NOT NULL,
    note      BLOB,                 -- the caller's; NULL: none
    PRIMARY KEY (cursor, ledger_id, entry_id)
) WITHOUT ROWID;
-- Facts about the log: they outlive all but the last of its cursors.
CREATE TABLE succession (
    topic       TEXT NOT NULL,
    last_ledger INTEGER NOT NULL, last_entry INTEGER NOT NULL,
    next_ledger INTEGER NOT NULL, next_entry INTEGER NOT NULL,
    PRIMARY KEY (topic, last_ledger, last_entry)
) WITHOUT ROWID;
"""

SPENT: Final = """CREATE TABLE IF NOT EXISTS spent (
    topic TEXT PRIMARY KEY,         -- '': every topic
    epoch INTEGER NOT NULL          -- the highest that a deleted cursor of it had
) WITHOUT ROWID"""

_FROM_LAYOUT_1: Final = "ALTER TABLE cursor ADD COLUMN lease_duration_ms INTEGER"
_FROM_LAYOUT_2: Final = """ALTER TABLE cursor ADD COLUMN lease_number INTEGER NOT NULL DEFAULT 0;
    UPDATE cursor SET lease_duration_ms = max(1, min(?, lease_expires_ms - ?))
        WHERE lease_duration_ms IS NULL AND lease_owner IS NOT NULL;
    ALTER TABLE cursor DROP COLUMN lease_expires_ms"""
_FROM_LAYOUT_3: Final = "ALTER TABLE attempt ADD COLUMN note BLOB"


@asynccontextmanager
async def open_sqlite_store(
    path: Path, *, readers: int = 2, size_max_bytes: int = 0, clock: Clock | None = None
) -> AsyncIterator[TableCursorStore]:
    """Open the database, or create it. With `size_max_bytes`, it refuses to grow beyond that size,
    its write-ahead log included; see `connections`.

    Raises:
        StoreUnavailable: SQLite cannot open it, or it has another layout.
    """
    now_ms = clock or SteadyClock()
    async with connections(
        path,
        readers=readers,
        prepare=lambda db: _make_tables(db, now_ms()),
        size_max_bytes=size_max_bytes,
    ) as opened:
        store = TableCursorStore(_StepsDatabase(opened), now_ms)
        await store.begin()
        yield store


def _make_tables(db: apsw.Connection, now_ms: int) -> None:
    application, layout = db.pragma("application_id"), db.pragma("user_version")
    is_ours = application == APPLICATION_ID
    if is_ours and layout == LAYOUT:
        return
    if is_ours and layout in (1, 2, 3):
        if layout == 1:
            db.execute(_FROM_LAYOUT_1)
            db.execute(SPENT)
        if layout < 3:
            db.execute(_FROM_LAYOUT_2, (LEASE_MAX_MS, now_ms))
        db.execute(_FROM_LAYOUT_3)
        db.pragma("user_version", LAYOUT)
        return
    is_empty = not db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
    if (application, layout) != (0, 0) or not is_empty:
        raise StoreUnavailable(
            "store_path is not a cursor database, or has another version's layout",
            found=layout,
            known=LAYOUT,
        )
    db.execute(TABLES)
    db.execute(SPENT)
    db.pragma("user_version", LAYOUT)
    db.pragma("application_id", APPLICATION_ID)


class _StepsDatabase(SqliteDatabase):
    """Undoes the writes of a refused step, without affecting the rest of its group."""

    async def write(self, work: Work[T]) -> T:
        def undone_when_refused(db: Transaction) -> T:
            db.rows("SAVEPOINT step")
            try:
                result = work(db)
            except DomainError:
                db.rows("ROLLBACK TO step")
                db.rows("RELEASE step")
                raise
            db.rows("RELEASE step")
            return result

        return await super().write(undone_when_refused)
