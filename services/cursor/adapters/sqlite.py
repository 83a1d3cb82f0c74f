"""Cursors in one SQLite database: WAL, synchronous=FULL, one row per page of holes.

A step gets the head as a value, and the holes as rows, which are read on demand and written at its
end, or earlier if they become too many. Large values that seldom change have tables of their own: a
moved cursor rewrites its head, a hundred bytes, and no properties.

The store's clock is steady within a process; see services/runtime/clock.py. Leases that an earlier
process wrote by another clock are bounded when the database is opened: none lasts longer than its
duration from then on.
"""

import threading
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import apsw
import google_crc32c
import msgpack

from seqgate.services.cursor.core.cursor import CursorState
from seqgate.services.cursor.core.state import LEASE_MAX_MS, PAGE_ENTRIES, Batch, Head, Lease
from seqgate.services.cursor.ports import CursorCorrupt, CursorNotFound
from seqgate.services.errors import DomainError, StoreUnavailable
from seqgate.services.runtime.clock import Clock, SteadyClock
from seqgate.services.runtime.sqlite import Connections, connections
from seqgate.types import SEQUENCE_ID_MAX, Position, TopicName

T = TypeVar("T")

LAYOUT: Final = 2
"""The version of the tables below. Layout 1 is upgraded on opening; any other one is refused."""

APPLICATION_ID: Final = 0x5E96A7C
"""Marks the file as ours (PRAGMA application_id)."""

REMOVE_ROWS_MAX: Final = 1_000
"""The most rows per table and transaction removed for a deleted cursor, so that other calls never
wait long."""

PAGES_HELD_MAX: Final = 1_024
"""The most pages, of at most 8 KiB each, that a step holds in memory before it writes them."""

BATCHES_READ: Final = 256
"""The number of batches read at a time."""

ATTEMPTS_READ: Final = 1_000
"""The number of attempt counts read at a time."""

PROPERTIES_HELD_BYTES_MAX: Final = 32 * 2**20
"""The limit of cached properties, by stored size: twice the largest that one position has."""

SPENT_TOPICS_MAX: Final = 10_000
"""The number of topics for which the highest epoch of their deleted cursors is kept, a hundred
bytes each. Beyond that, the lowest of these epochs applies to every topic: new cursors then begin
with higher epochs, which is harmless."""

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
    lease_owner TEXT, lease_epoch INTEGER, lease_expires_ms INTEGER,    -- NULL: nobody ever asked
    mark_digest BLOB, own_digest BLOB,          -- of the properties; NULL: there are none
    lease_duration_ms INTEGER                   -- how long the lease was granted for
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
    bits      BLOB NOT NULL         -- see _packed
);
CREATE UNIQUE INDEX page_place ON page (cursor, ledger_id, number);
CREATE TABLE batch (
    cursor    INTEGER NOT NULL,
    ledger_id INTEGER NOT NULL,
    entry_id  INTEGER NOT NULL,
    size      INTEGER NOT NULL,     -- below 0: how large it really is, is not known
    bits      BLOB NOT NULL,        -- see _packed
    PRIMARY KEY (cursor, ledger_id, entry_id)
) WITHOUT ROWID;
CREATE TABLE attempt (
    cursor    INTEGER NOT NULL,
    ledger_id INTEGER NOT NULL,
    entry_id  INTEGER NOT NULL,
    count     INTEGER NOT NULL,
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

_SELECT: Final = """SELECT id, topic, name, created_ms, mark_ledger, mark_entry, version,
    acknowledged, partial, lease_owner, lease_epoch, lease_expires_ms, mark_digest, own_digest,
    lease_duration_ms FROM cursor """
_BY_NAME: Final = _SELECT + "WHERE topic = ? AND name = ?"
_AFTER: Final = _SELECT + "WHERE (topic, name) > (?, ?) ORDER BY topic, name LIMIT ?"
_AFTER_IN_TOPIC: Final = (
    _SELECT
    + """WHERE topic = ?1 AND ?2 <= ?1 AND name > CASE ?2 WHEN ?1 THEN ?3 ELSE '' END
    ORDER BY name LIMIT ?4"""
)
_INSERT: Final = """INSERT INTO cursor (topic, name, created_ms, version, acknowledged, partial)
    VALUES (?, ?, ?, 0, 0, 0)"""
_UPDATE: Final = """UPDATE cursor SET mark_ledger = ?, mark_entry = ?, version = ?,
    acknowledged = ?, partial = ?, lease_owner = ?, lease_epoch = ?, lease_expires_ms = ?,
    mark_digest = ?, own_digest = ?, lease_duration_ms = ? WHERE id = ?"""
_BOUND_LEASES: Final = """UPDATE cursor
    SET lease_expires_ms = ?1 + coalesce(lease_duration_ms, ?2)
    WHERE lease_expires_ms > ?1 + coalesce(lease_duration_ms, ?2)"""

_SPENT: Final = "SELECT coalesce(max(epoch), 0) FROM spent WHERE topic IN (?, '')"
_SPEND: Final = """INSERT INTO spent VALUES (?, ?)
    ON CONFLICT DO UPDATE SET epoch = max(epoch, excluded.epoch)"""
_LOWEST_SPENT: Final = """SELECT topic, epoch FROM spent WHERE topic <> ''
    ORDER BY epoch, topic LIMIT max(0, (SELECT count(*) FROM spent) - ?)"""
_PROPERTIES: Final = "SELECT packed FROM properties WHERE cursor = ? AND digest = ?"
_DROP_PROPERTIES: Final = """DELETE FROM properties
    WHERE cursor = ? AND digest NOT IN (coalesce(?, x''), coalesce(?, x''))"""

_PAGE: Final = "SELECT bits FROM page WHERE cursor = ? AND ledger_id = ? AND number = ?"
_NEXT_PAGE: Final = """SELECT ledger_id, number, bits FROM page
    WHERE cursor = ? AND (ledger_id, number) >= (?, ?) ORDER BY ledger_id, number LIMIT 1"""
_PUT_PAGE: Final = """INSERT INTO page VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET bits = excluded.bits"""
_DROP_PAGE: Final = "DELETE FROM page WHERE cursor = ? AND ledger_id = ? AND number = ?"
_DROP_PAGES: Final = "DELETE FROM page WHERE cursor = ? AND (ledger_id, number) < (?, ?)"

_BATCH: Final = "SELECT size, bits FROM batch WHERE cursor = ? AND ledger_id = ? AND entry_id = ?"
_NEXT_BATCHES: Final = """SELECT ledger_id, entry_id, size, bits FROM batch
    WHERE cursor = ? AND (ledger_id, entry_id) > (?, ?) ORDER BY ledger_id, entry_id LIMIT ?"""
_PUT_BATCH: Final = "INSERT OR REPLACE INTO batch VALUES (?, ?, ?, ?, ?)"
_DROP_BATCH: Final = "DELETE FROM batch WHERE cursor = ? AND ledger_id = ? AND entry_id = ?"
_DROP_BATCHES: Final = "DELETE FROM batch WHERE cursor = ? AND (ledger_id, entry_id) <= (?, ?)"

_DROP_BATCHES_OF: Final = """DELETE FROM batch
    WHERE cursor = ? AND ledger_id = ? AND entry_id BETWEEN ? AND ?"""

_ATTEMPT: Final = "SELECT count FROM attempt WHERE cursor = ? AND ledger_id = ? AND entry_id = ?"
_NEXT_ATTEMPTS: Final = """SELECT ledger_id, entry_id, count FROM attempt
    WHERE cursor = ? AND (ledger_id, entry_id) > (?, ?) ORDER BY ledger_id, entry_id LIMIT ?"""
_PUT_ATTEMPT: Final = "INSERT OR REPLACE INTO attempt VALUES (?, ?, ?, ?)"
_DROP_ATTEMPT: Final = "DELETE FROM attempt WHERE cursor = ? AND ledger_id = ? AND entry_id = ?"
_DROP_ATTEMPTS: Final = "DELETE FROM attempt WHERE cursor = ? AND (ledger_id, entry_id) <= (?, ?)"
_DROP_ATTEMPTS_OF: Final = """DELETE FROM attempt
    WHERE cursor = ? AND ledger_id = ? AND entry_id BETWEEN ? AND ?"""
_ANY: Final = {
    "attempt": "SELECT 1 FROM attempt WHERE cursor = ? LIMIT 1",
    "batch": "SELECT 1 FROM batch WHERE cursor = ? LIMIT 1",
}

_SUCCESSION: Final = """SELECT next_ledger, next_entry FROM succession
    WHERE topic = ? AND last_ledger = ? AND last_entry = ?"""
_PUT_SUCCESSION: Final = "INSERT OR REPLACE INTO succession VALUES (?, ?, ?, ?, ?)"

_NOBODYS: Final = "SELECT id FROM cursor WHERE topic IS NULL LIMIT 1"
_REMOVE_SOME: Final = (
    "DELETE FROM page WHERE rowid IN (SELECT rowid FROM page WHERE cursor = ? LIMIT ?)",
    "DELETE FROM properties WHERE rowid IN (SELECT rowid FROM properties WHERE cursor = ? LIMIT ?)",
    """DELETE FROM batch WHERE (cursor, ledger_id, entry_id) IN
        (SELECT cursor, ledger_id, entry_id FROM batch WHERE cursor = ? LIMIT ?)""",
    """DELETE FROM attempt WHERE (cursor, ledger_id, entry_id) IN
        (SELECT cursor, ledger_id, entry_id FROM attempt WHERE cursor = ? LIMIT ?)""",
)

_BEFORE_ALL: Final = Position(-1, -1)


@asynccontextmanager
async def open_sqlite_store(
    path: Path, *, readers: int = 2, size_max_bytes: int = 0, clock: Clock | None = None
) -> AsyncIterator["SqliteCursorStore"]:
    """Open the database, or create it. With `size_max_bytes`, it refuses to grow beyond that size,
    its write-ahead log included; see `connections`.

    Raises:
        StoreUnavailable: SQLite cannot open it, or it has another layout.
    """

    now_ms = clock or SteadyClock()

    def prepare(db: apsw.Connection) -> None:
        _make_tables(db)
        bound_leases(db, now_ms())

    async with connections(
        path, readers=readers, prepare=prepare, size_max_bytes=size_max_bytes
    ) as opened:
        store = SqliteCursorStore(opened, now_ms)
        await store.remove_deleted()
        yield store


def _make_tables(db: apsw.Connection) -> None:
    found = (db.pragma("application_id"), db.pragma("user_version"))
    if found == (APPLICATION_ID, LAYOUT):
        return
    if found == (APPLICATION_ID, 1):
        db.execute(_FROM_LAYOUT_1)
        db.execute(SPENT)
        db.pragma("user_version", LAYOUT)
        return
    if found != (0, 0) or _rows(db, "SELECT 1 FROM sqlite_schema LIMIT 1"):
        raise StoreUnavailable(
            "store_path is not a cursor database, or has another version's layout",
            found=found[1],
            known=LAYOUT,
        )
    db.execute(TABLES)
    db.execute(SPENT)
    db.pragma("user_version", LAYOUT)
    db.pragma("application_id", APPLICATION_ID)


def bound_leases(db: apsw.Connection, now_ms: int) -> None:
    """Bound every lease to its duration from now on, whatever clock it was written by."""
    db.execute(_BOUND_LEASES, (now_ms, LEASE_MAX_MS))


def spent_epoch(db: apsw.Connection, topic: str) -> int:
    """See seqgate.services.cursor.core.state.Holes."""
    return int(_rows(db, _SPENT, topic)[0][0])


def spend_epoch(db: apsw.Connection, topic: str, epoch: int) -> None:
    """Record the epoch of a deleted cursor: later cursors of the topic get higher ones."""
    db.execute(_SPEND, (topic, epoch))
    for other, lowest in _rows(db, _LOWEST_SPENT, SPENT_TOPICS_MAX):
        db.execute(_SPEND, ("", lowest))
        db.execute("DELETE FROM spent WHERE topic = ?", (other,))


class SqliteCursorStore:
    """See seqgate.services.cursor.ports.CursorStore.

    Raises:
        CursorCorrupt: from every method that reads the damaged part of a cursor.
    """

    def __init__(self, opened: Connections, now_ms: Clock) -> None:
        self._connections = opened
        self._properties = _Properties()
        self.now_ms: Final = now_ms

    async def create(
        self,
        topic: TopicName,
        name: str,
        *,
        mark_delete: Position | None,
        properties: Mapping[str, str],
    ) -> tuple[Head, bool]:
        def work(db: apsw.Connection) -> tuple[Head, bool]:
            row = _row(db, topic, name)
            if row is not None:
                return self._head(db, row), False
            db.execute(_INSERT, (str(topic), name, self.now_ms()))
            row = _existing(db, topic, name)
            empty = self._head(db, row)
            head = replace(empty, mark_delete=mark_delete, properties=dict(properties))
            self._write_head(db, row, empty, head)
            return head, True

        return await self._connections.write(work)

    async def change(self, topic: TopicName, name: str, step: Callable[[CursorState, int], T]) -> T:
        def work(db: apsw.Connection) -> T:
            now_ms = self.now_ms()
            row = _bounded(db, _existing(db, topic, name), now_ms)
            before = self._head(db, row)
            holes = _Holes(db, row)
            state = CursorState(replace(before), holes)
            with _undone_when_refused(db):
                result = step(state, now_ms)
                holes.write()
                self._write_head(db, row, before, state.head)
            return result

        return await self._connections.write(work)

    async def look(
        self, topic: TopicName, name: str, look: Callable[[CursorState], T], *, whole: bool = True
    ) -> T:
        def work(db: apsw.Connection) -> T:
            row = _existing(db, topic, name)
            if not whole:
                row = row._replace(mark_digest=None)
            return look(CursorState(self._head(db, row), _Holes(db, row)))

        return await self._connections.read(work)

    async def cursors(
        self, topic: TopicName | None, *, after: tuple[str, str], limit: int
    ) -> list[Head]:
        def work(db: apsw.Connection) -> list[Head]:
            if topic is None:
                rows = _rows(db, _AFTER, *after, limit)
            else:
                rows = _rows(db, _AFTER_IN_TOPIC, str(topic), *after, limit)
            bare = (_Row._make(row)._replace(mark_digest=None) for row in rows)
            return [self._head(db, row) for row in bare]

        return await self._connections.read(work)

    async def delete(self, topic: TopicName, name: str) -> None:
        def work(db: apsw.Connection) -> None:
            row = _existing(db, topic, name)
            db.execute("UPDATE cursor SET topic = NULL WHERE id = ?", (row.cursor_id,))
            if row.lease_epoch is not None:
                spend_epoch(db, str(topic), row.lease_epoch)
            if not _rows(db, "SELECT 1 FROM cursor WHERE topic = ? LIMIT 1", str(topic)):
                db.execute("DELETE FROM succession WHERE topic = ?", (str(topic),))

        await self._connections.write(work)
        await self.remove_deleted()

    async def remove_deleted(self) -> None:
        """Remove the leftovers of deleted cursors, also those of earlier processes."""
        while await self._connections.write(_remove_deleted):
            pass

    async def check(self) -> None:
        await self._connections.read(lambda db: _rows(db, "SELECT 1 FROM cursor LIMIT 1"))

    def _head(self, db: apsw.Connection, row: "_Row") -> Head:
        return Head(
            TopicName.parse(row.topic),
            row.name,
            row.created_ms,
            _position(row.mark_ledger, row.mark_entry),
            self._properties.read(db, row, row.mark_digest),
            self._properties.read(db, row, row.own_digest),
            row.version,
            row.acknowledged,
            row.partial,
            _lease(row),
        )

    def _write_head(self, db: apsw.Connection, row: "_Row", before: Head, head: Head) -> None:
        """Write a head if it changed. Properties that are still the same object are unchanged."""
        mark_digest, own_digest = row.mark_digest, row.own_digest
        if head.mark_delete_properties is not before.mark_delete_properties:
            mark_digest = self._properties.write(db, row, head.mark_delete_properties)
        if head.properties is not before.properties:
            own_digest = self._properties.write(db, row, head.properties)
        changed = row._replace(
            mark_ledger=head.mark_delete and head.mark_delete.ledger_id,
            mark_entry=head.mark_delete and head.mark_delete.entry_id,
            version=head.revision,
            acknowledged=head.acknowledged,
            partial=head.partial,
            lease_owner=head.lease and head.lease.owner,
            lease_epoch=head.lease and head.lease.epoch,
            lease_expires_ms=head.lease and head.lease.expires_ms,
            mark_digest=mark_digest,
            own_digest=own_digest,
            lease_duration_ms=head.lease and head.lease.duration_ms,
        )
        if changed == row:
            return
        db.execute(_UPDATE, (*changed[_UNCHANGING:], row.cursor_id))
        if (mark_digest, own_digest) != (row.mark_digest, row.own_digest):
            db.execute(_DROP_PROPERTIES, (row.cursor_id, mark_digest, own_digest))


class _Row(NamedTuple):
    cursor_id: int
    topic: str
    name: str
    created_ms: int
    mark_ledger: int | None
    mark_entry: int | None
    version: int
    acknowledged: int
    partial: int
    lease_owner: str | None
    lease_epoch: int | None
    lease_expires_ms: int | None
    mark_digest: bytes | None
    own_digest: bytes | None
    lease_duration_ms: int | None


_UNCHANGING: Final = 4
"""The number of leading columns that never change."""


class _Properties:
    """A cache of properties by the digest of their stored form, so that unchanged ones are neither
    read nor unpacked again. All threads share it and the mappings that it returns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, tuple[int, Mapping[str, str]]] = OrderedDict()
        self._size_bytes = 0

    def read(self, db: apsw.Connection, row: _Row, digest: bytes | None) -> Mapping[str, str]:
        if digest is None:
            return {}
        with self._lock:
            if digest in self._held:
                self._held.move_to_end(digest)
                return self._held[digest][1]
        rows = _rows(db, _PROPERTIES, row.cursor_id, digest)
        packed: bytes = rows[0][0] if rows else b""
        if _digest(packed) != digest:
            raise _corrupt(row)
        properties: dict[str, str] = msgpack.unpackb(packed)
        self._hold(digest, len(packed), properties)
        return properties

    def write(self, db: apsw.Connection, row: _Row, properties: Mapping[str, str]) -> bytes | None:
        """Store properties of a cursor. Returns their digest; None: there are none."""
        if not properties:
            return None
        copy = dict(properties)
        packed: bytes = msgpack.packb(copy)
        digest = _digest(packed)
        db.execute(
            "INSERT OR IGNORE INTO properties VALUES (?, ?, ?)", (row.cursor_id, digest, packed)
        )
        self._hold(digest, len(packed), copy)
        return digest

    def _hold(self, digest: bytes, size_bytes: int, properties: Mapping[str, str]) -> None:
        with self._lock:
            if digest in self._held:
                return
            self._held[digest] = (size_bytes, properties)
            self._size_bytes += size_bytes
            while self._size_bytes > PROPERTIES_HELD_BYTES_MAX:
                _, (gone_bytes, _) = self._held.popitem(last=False)
                self._size_bytes -= gone_bytes


class _Holes:
    """See cursor.core.state.Holes. Pages are held in memory until the step ends, since a step may
    change one ten thousand times; all else is written at once."""

    def __init__(self, db: apsw.Connection, row: _Row) -> None:
        self._db = db
        self._row = row
        self._cursor_id = row.cursor_id
        self._pages: dict[tuple[int, int], int] = {}
        self._dirty: set[tuple[int, int]] = set()
        self._known: dict[str, bool] = {}

    def page(self, ledger_id: int, number: int) -> int:
        place = (ledger_id, number)
        if place not in self._pages:
            rows = _rows(self._db, _PAGE, self._cursor_id, *place)
            self._hold(place, self._unpacked(rows[0][0]) if rows else 0)
        return self._pages[place]

    def put_page(self, ledger_id: int, number: int, bits: int) -> None:
        assert bits.bit_length() <= PAGE_ENTRIES
        self._hold((ledger_id, number), bits)
        self._dirty.add((ledger_id, number))

    def _hold(self, place: tuple[int, int], bits: int) -> None:
        if place not in self._pages and len(self._pages) >= PAGES_HELD_MAX:
            self.write()
            self._pages.clear()
        self._pages[place] = bits

    def write(self) -> None:
        for place in sorted(self._dirty):
            bits = self._pages[place]
            if bits:
                self._db.execute(_PUT_PAGE, (self._cursor_id, *place, _packed(bits)))
            else:
                self._db.execute(_DROP_PAGE, (self._cursor_id, *place))
        self._dirty.clear()

    def pages(self, after: Position | None) -> Iterator[tuple[int, int, int]]:
        place = (-1, -1) if after is None else _page_of_next(after)
        while True:
            self.write()  # include the caller's changes since the last page
            rows = _rows(self._db, _NEXT_PAGE, self._cursor_id, *place)
            if not rows:
                return
            ((ledger_id, number, packed),) = rows
            yield ledger_id, number, self._unpacked(packed)
            place = (ledger_id, number + 1)

    def batch(self, position: Position) -> Batch | None:
        rows = _rows(self._db, _BATCH, self._cursor_id, *position)
        return self._batch(*rows[0]) if rows else None

    def put_batch(self, position: Position, batch: Batch | None) -> None:
        if batch is None:
            self._db.execute(_DROP_BATCH, (self._cursor_id, *position))
        else:
            self._known["batch"] = True
            bits = _packed(batch.acknowledged)
            size = -batch.size if batch.is_guess else batch.size
            self._db.execute(_PUT_BATCH, (self._cursor_id, *position, size, bits))

    def batches(self, after: Position | None) -> Iterator[tuple[Position, Batch]]:
        place = after or _BEFORE_ALL
        while True:
            rows = _rows(self._db, _NEXT_BATCHES, self._cursor_id, *place, BATCHES_READ)
            for ledger_id, entry_id, size, bits in rows:
                place = Position(ledger_id, entry_id)
                yield place, self._batch(size, bits)
            if len(rows) < BATCHES_READ:
                return

    def _batch(self, size: int, bits: bytes) -> Batch:
        return Batch(abs(size), self._unpacked(bits), is_guess=size < 0)

    def attempts(self, position: Position) -> int:
        rows = _rows(self._db, _ATTEMPT, self._cursor_id, *position)
        return int(rows[0][0]) if rows else 0

    def put_attempts(self, position: Position, count: int) -> None:
        if count:
            self._known["attempt"] = True
            self._db.execute(_PUT_ATTEMPT, (self._cursor_id, *position, count))
        else:
            self._db.execute(_DROP_ATTEMPT, (self._cursor_id, *position))

    def attempted(self, after: Position | None) -> Iterator[tuple[Position, int]]:
        place = after or _BEFORE_ALL
        while True:
            rows = _rows(self._db, _NEXT_ATTEMPTS, self._cursor_id, *place, ATTEMPTS_READ)
            for ledger_id, entry_id, count in rows:
                place = Position(ledger_id, entry_id)
                yield place, count
            if len(rows) < ATTEMPTS_READ:
                return

    def drop_run(self, first: Position, last_entry: int) -> int:
        run = (self._cursor_id, *first, last_entry)
        if self._has("attempt"):
            self._db.execute(_DROP_ATTEMPTS_OF, run)
        if not self._has("batch"):
            return 0
        self._db.execute(_DROP_BATCHES_OF, run)
        return self._db.changes()

    def _has(self, table: str) -> bool:
        """Whether the cursor may have rows in a table. Cached: most cursors have none, and a step
        that acknowledges ten thousand runs asks as often."""
        if table not in self._known:
            self._known[table] = bool(_rows(self._db, _ANY[table], self._cursor_id))
        return self._known[table]

    def next_after(self, last: Position) -> Position | None:
        rows = _rows(self._db, _SUCCESSION, self._row.topic, *last)
        return Position(*rows[0]) if rows else None

    def put_succession(self, last: Position, following: Position) -> None:
        self._db.execute(_PUT_SUCCESSION, (self._row.topic, *last, *following))

    def spent_epoch(self) -> int:
        return spent_epoch(self._db, self._row.topic)

    def drop_through(self, position: Position | None) -> int:
        page = (SEQUENCE_ID_MAX, SEQUENCE_ID_MAX) if position is None else _page_of_next(position)
        last = position or Position(SEQUENCE_ID_MAX, SEQUENCE_ID_MAX)
        dropped = [place for place in self._pages if place < page]
        for place in dropped:
            del self._pages[place]
        self._dirty.difference_update(dropped)
        self._db.execute(_DROP_PAGES, (self._cursor_id, *page))
        self._db.execute(_DROP_ATTEMPTS, (self._cursor_id, *last))
        self._db.execute(_DROP_BATCHES, (self._cursor_id, *last))
        return self._db.changes()

    def _unpacked(self, packed: bytes) -> int:
        bits = _unpacked(packed)
        if bits is None:
            raise _corrupt(self._row)
        return bits


def _page_of_next(position: Position) -> tuple[int, int]:
    """The page of the next entry: the first page that does not end at or before the position."""
    return position.ledger_id, (position.entry_id + 1) // PAGE_ENTRIES


_RAW: Final = b"\0"
_ZLIB: Final = b"\1"
_CHECKSUM_BYTES: Final = 4
_LEVEL: Final = 1  # higher levels shrink neither alternating nor random bits further


def _packed(bits: int) -> bytes:
    """The stored form of bits:

    CRC-32C of the rest (4 bytes, little endian) | 0: raw, 1: zlib | little-endian bytes
    """
    raw = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
    small = zlib.compress(raw, _LEVEL)
    rest = _ZLIB + small if len(small) < len(raw) else _RAW + raw
    return _checksum(rest) + rest


def _unpacked(packed: bytes) -> int | None:
    """The bits of a stored form; None: it is damaged."""
    checksum, rest = packed[:_CHECKSUM_BYTES], packed[_CHECKSUM_BYTES:]
    if not rest or checksum != _checksum(rest):
        return None
    raw = zlib.decompress(rest[1:]) if rest[:1] == _ZLIB else rest[1:]
    return int.from_bytes(raw, "little")


def _checksum(rest: bytes) -> bytes:
    crc: int = google_crc32c.value(rest)
    return crc.to_bytes(_CHECKSUM_BYTES, "little")


def _digest(packed: bytes) -> bytes:
    return blake2b(packed, digest_size=16).digest()


def _corrupt(row: _Row) -> CursorCorrupt:
    return CursorCorrupt(
        "stored cursor does not match its checksum", topic=row.topic, cursor=row.name
    )


@contextmanager
def _undone_when_refused(db: apsw.Connection) -> Iterator[None]:
    """Undo the writes of a refused step, without affecting the rest of its group."""
    db.execute("SAVEPOINT step")
    try:
        yield
    except DomainError:
        db.execute("ROLLBACK TO step")
        db.execute("RELEASE step")
        raise
    db.execute("RELEASE step")


def _rows(db: apsw.Connection, sql: str, *values: int | str | bytes) -> list[Any]:
    return db.execute(sql, values).fetchall()


def _row(db: apsw.Connection, topic: TopicName, name: str) -> _Row | None:
    rows = _rows(db, _BY_NAME, str(topic), name)
    return _Row._make(rows[0]) if rows else None


def _existing(db: apsw.Connection, topic: TopicName, name: str) -> _Row:
    row = _row(db, topic, name)
    if row is None:
        raise CursorNotFound("cursor not found", topic=topic, cursor=name)
    return row


def _position(ledger_id: int | None, entry_id: int | None) -> Position | None:
    return None if ledger_id is None or entry_id is None else Position(ledger_id, entry_id)


def _lease(row: _Row) -> Lease | None:
    if row.lease_owner is None:
        return None
    assert row.lease_epoch is not None
    assert row.lease_expires_ms is not None
    duration_ms = LEASE_MAX_MS if row.lease_duration_ms is None else row.lease_duration_ms
    return Lease(row.lease_owner, row.lease_epoch, row.lease_expires_ms, duration_ms)


def _bounded(db: apsw.Connection, row: _Row, now_ms: int) -> _Row:
    """Bound the lease in a row. This is kept even if the step that follows refuses."""
    lease = _lease(row)
    if lease is None or lease.bounded(now_ms) == lease:
        return row
    row = row._replace(lease_expires_ms=lease.bounded(now_ms).expires_ms)
    db.execute(_UPDATE, (*row[_UNCHANGING:], row.cursor_id))
    return row


def _remove_deleted(db: apsw.Connection) -> bool:
    """Remove a few rows of a deleted cursor. Returns whether more are left."""
    rows = _rows(db, _NOBODYS)
    if not rows:
        return False
    ((cursor_id,),) = rows
    removed = 0
    for statement in _REMOVE_SOME:
        db.execute(statement, (cursor_id, REMOVE_ROWS_MAX))
        removed += db.changes()
    if not removed:
        db.execute("DELETE FROM cursor WHERE id = ?", (cursor_id,))
    _rows(db, "PRAGMA incremental_vacuum(2000)")
    return True
