"""Heads of cursors in tables, and their properties."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

import msgpack

from seqgate.services.cursor.core.state import Head, Lease
from seqgate.services.cursor.ports import CursorCorrupt, CursorNotFound
from seqgate.services.runtime.transactions import Transaction
from seqgate.types import Position, TopicName

PROPERTIES_HELD_BYTES_MAX: Final = 32 * 2**20
"""The limit of cached properties, by stored size: twice the largest that one position has."""

SPENT_TOPICS_MAX: Final = 10_000
"""The number of topics for which the highest epoch of their deleted cursors is kept, a hundred
bytes each. Beyond that, the lowest of these epochs applies to every topic: new cursors then begin
with higher epochs, which is harmless."""

_SELECT: Final = """SELECT id, topic, name, created_ms, mark_ledger, mark_entry, version,
    acknowledged, partial, lease_owner, lease_epoch, lease_number, lease_duration_ms,
    mark_digest, own_digest FROM cursor """
_BY_NAME: Final = _SELECT + "WHERE topic = ? AND name = ?"
_AFTER: Final = _SELECT + "WHERE (topic, name) > (?, ?) ORDER BY topic, name LIMIT ?"
_AFTER_IN_TOPIC: Final = (
    _SELECT
    + """WHERE topic = ?1 AND topic >= ?2 AND name > CASE WHEN topic = ?2 THEN ?3 ELSE '' END
    ORDER BY name LIMIT ?4"""
)
_LEASED: Final = _SELECT + "WHERE lease_duration_ms > 0 AND topic IS NOT NULL LIMIT ?"
_INSERT: Final = """INSERT INTO cursor
    (topic, name, created_ms, version, acknowledged, partial, lease_number)
    VALUES (?, ?, ?, 0, 0, 0, 0)"""
_UPDATE: Final = """UPDATE cursor SET mark_ledger = ?, mark_entry = ?, version = ?,
    acknowledged = ?, partial = ?, lease_owner = ?, lease_epoch = ?, lease_number = ?,
    lease_duration_ms = ?, mark_digest = ?, own_digest = ? WHERE id = ?"""

_SPENT: Final = "SELECT coalesce(max(epoch), 0) FROM spent WHERE topic IN (?, '')"
_SPEND: Final = """INSERT INTO spent VALUES (?, ?) ON CONFLICT (topic) DO UPDATE SET epoch =
    CASE WHEN spent.epoch < excluded.epoch THEN excluded.epoch ELSE spent.epoch END"""
_LOWEST_SPENT: Final = """SELECT topic, epoch FROM spent WHERE topic <> '' ORDER BY epoch, topic
    LIMIT (SELECT CASE WHEN count(*) > ?1 THEN count(*) - ?1 ELSE 0 END FROM spent)"""
_PROPERTIES: Final = "SELECT packed FROM properties WHERE cursor = ? AND digest = ?"
_PUT_PROPERTIES: Final = """INSERT INTO properties VALUES (?, ?, ?)
    ON CONFLICT (cursor, digest) DO NOTHING"""
_DROP_PROPERTIES: Final = "DELETE FROM properties WHERE cursor = ? AND digest NOT IN (?, ?)"


class Row(NamedTuple):
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
    lease_number: int
    lease_duration_ms: int | None
    mark_digest: bytes | None
    own_digest: bytes | None


_UNCHANGING: Final = 4
"""The number of leading columns that never change."""


class Heads:
    """Heads, read and written as rows. All threads share it."""

    def __init__(self) -> None:
        self._properties = _Properties()

    def read(self, db: Transaction, row: Row) -> Head:
        """A head, with a lease that no observer has judged yet."""
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
            row.lease_number,
        )

    def write(self, db: Transaction, row: Row, before: Head, head: Head) -> None:
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
            lease_number=head.lease_number,
            lease_duration_ms=head.lease and head.lease.duration_ms,
            mark_digest=mark_digest,
            own_digest=own_digest,
        )
        if changed == row:
            return
        db.change(_UPDATE, *changed[_UNCHANGING:], row.cursor_id)
        if (mark_digest, own_digest) != (row.mark_digest, row.own_digest):
            db.change(_DROP_PROPERTIES, row.cursor_id, mark_digest or b"", own_digest or b"")


class _Properties:
    """A cache of properties by the digest of their stored form, so that unchanged ones are neither
    read nor unpacked again. All threads share it and the mappings that it returns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, tuple[int, Mapping[str, str]]] = OrderedDict()
        self._size_bytes = 0

    def read(self, db: Transaction, row: Row, digest: bytes | None) -> Mapping[str, str]:
        if digest is None:
            return {}
        with self._lock:
            if digest in self._held:
                self._held.move_to_end(digest)
                return self._held[digest][1]
        rows = db.rows(_PROPERTIES, row.cursor_id, digest)
        packed: bytes = rows[0][0] if rows else b""
        if _digest(packed) != digest:
            raise corrupt(row)
        properties: dict[str, str] = msgpack.unpackb(packed)
        self._hold(digest, len(packed), properties)
        return properties

    def write(self, db: Transaction, row: Row, properties: Mapping[str, str]) -> bytes | None:
        """Store properties of a cursor. Returns their digest; None: there are none."""
        if not properties:
            return None
        copy = dict(properties)
        packed: bytes = msgpack.packb(copy)
        digest = _digest(packed)
        db.change(_PUT_PROPERTIES, row.cursor_id, digest, packed)
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


def row_of(db: Transaction, topic: TopicName, name: str) -> Row | None:
    rows = db.rows(_BY_NAME + db.for_update, str(topic), name)
    return Row(*rows[0]) if rows else None


def existing(db: Transaction, topic: TopicName, name: str) -> Row:
    row = row_of(db, topic, name)
    if row is None:
        raise CursorNotFound("cursor not found", topic=topic, cursor=name)
    return row


def insert(db: Transaction, topic: TopicName, name: str, created_ms: int) -> Row:
    db.change(_INSERT, str(topic), name, created_ms)
    return existing(db, topic, name)


def rows_after(
    db: Transaction, topic: TopicName | None, after: tuple[str, str], limit: int
) -> list[Row]:
    if topic is None:
        rows = db.rows(_AFTER, *after, limit)
    else:
        rows = db.rows(_AFTER_IN_TOPIC, str(topic), *after, limit)
    return [Row(*each) for each in rows]


def leased_rows(db: Transaction, limit: int) -> list[Row]:
    """Cursors whose lease was not released."""
    return [Row(*each) for each in db.rows(_LEASED, limit)]


def spent_epoch(db: Transaction, topic: str) -> int:
    """See seqgate.services.cursor.core.state.Holes."""
    return int(db.rows(_SPENT, topic)[0][0])


def spend_epoch(db: Transaction, topic: str, epoch: int) -> None:
    """Record the epoch of a deleted cursor: later cursors of the topic get higher ones."""
    db.change(_SPEND, topic, epoch)
    for other, lowest in db.rows(_LOWEST_SPENT, SPENT_TOPICS_MAX):
        db.change(_SPEND, "", lowest)
        db.change("DELETE FROM spent WHERE topic = ?", other)


def without_attached(row: Row) -> Row:
    """The row without the properties of its mark-delete position."""
    return row._replace(mark_digest=None)


def without_properties(row: Row) -> Row:
    return row._replace(mark_digest=None, own_digest=None)


def corrupt(row: Row) -> CursorCorrupt:
    return CursorCorrupt(
        "stored cursor does not match its checksum", topic=row.topic, cursor=row.name
    )


def _digest(packed: bytes) -> bytes:
    return blake2b(packed, digest_size=16).digest()


def _position(ledger_id: int | None, entry_id: int | None) -> Position | None:
    return None if ledger_id is None or entry_id is None else Position(ledger_id, entry_id)


def _lease(row: Row) -> Lease | None:
    if row.lease_owner is None:
        return None
    assert row.lease_epoch is not None
    assert row.lease_duration_ms is not None
    return Lease(row.lease_owner, row.lease_epoch, 0, row.lease_duration_ms)
