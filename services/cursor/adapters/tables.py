"""Cursors in tables: what is the same on every database.

A step gets the head as a value, and the holes as rows, which are read on demand and written at its
end, or earlier if they become too many. Large values that seldom change have tables of their own: a
moved cursor rewrites its head, a hundred bytes, and no properties.

A cursor's row is locked by each transaction that changes the cursor. Whether a lease is over is
judged by this process's sightings of it, in the order in which it read the cursor's row.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

from seqgate.services.cursor.adapters.holes import TableHoles
from seqgate.services.cursor.adapters.rows import (
    Heads,
    Row,
    existing,
    insert,
    leased_rows,
    row_of,
    rows_after,
    spend_epoch,
    without_attached,
    without_properties,
)
from seqgate.services.cursor.core.cursor import CursorState
from seqgate.services.cursor.core.sightings import SIGHTINGS_MAX, Sightings
from seqgate.services.cursor.core.state import Head
from seqgate.services.cursor.ports import CursorNotFound
from seqgate.services.runtime.clock import Clock
from seqgate.services.runtime.transactions import Database, Transaction
from seqgate.types import Position, TopicName

T = TypeVar("T")

REMOVE_ROWS_MAX: Final = 1_000
"""The most rows per table and transaction removed for a deleted cursor, so that other calls never
wait long."""

_OF_TOPIC: Final = "SELECT id FROM cursor WHERE topic = ? ORDER BY id"
_LAST_IS_GONE: Final = """DELETE FROM succession
    WHERE topic = ?1 AND NOT EXISTS (SELECT 1 FROM cursor WHERE topic = ?1)"""
_NOBODYS: Final = "SELECT id FROM cursor WHERE topic IS NULL ORDER BY id LIMIT 1"
_REMOVE_SOME: Final = tuple(
    f"""DELETE FROM {table} WHERE cursor = ?1 AND ({key}) IN
        (SELECT {key} FROM {table} WHERE cursor = ?1 LIMIT ?2)"""
    for table, key in (
        ("page", "ledger_id, number"),
        ("properties", "digest"),
        ("batch", "ledger_id, entry_id"),
        ("attempt", "ledger_id, entry_id"),
    )
)


class TableCursorStore:
    """See seqgate.services.cursor.ports.CursorStore.

    Raises:
        CursorCorrupt: from every method that reads the damaged part of a cursor.
    """

    def __init__(self, database: Database, now_ms: Clock) -> None:
        self._database = database
        self._heads = Heads()
        self._sightings = Sightings()
        self._sightings_lock = threading.Lock()
        self.now_ms: Final = now_ms

    async def begin(self) -> None:
        """Note all leases, and finish what earlier processes have begun."""

        def work(db: Transaction) -> None:
            for row in leased_rows(db, SIGHTINGS_MAX):
                self._read(db, without_properties(row), matters=False)

        await self._database.read(work)
        await self.remove_deleted()

    async def create(
        self,
        topic: TopicName,
        name: str,
        *,
        mark_delete: Position | None,
        properties: Mapping[str, str],
    ) -> tuple[Head, bool]:
        def work(db: Transaction) -> tuple[Head, bool]:
            row = row_of(db, topic, name)
            if row is not None:
                return self._read(db, row), False
            row = insert(db, topic, name, self.now_ms())
            empty = self._read(db, row)
            head = replace(empty, mark_delete=mark_delete, properties=dict(properties))
            self._heads.write(db, row, empty, head)
            return head, True

        return await self._database.write(work)

    async def change(self, topic: TopicName, name: str, step: Callable[[CursorState, int], T]) -> T:
        def work(db: Transaction) -> tuple[T, Head, int, bool]:
            row = existing(db, topic, name)
            before = self._read(db, row)
            now_ms = self.now_ms()
            holes = TableHoles(db, row)
            state = CursorState(replace(before), holes)
            result = step(state, now_ms)
            holes.write()
            self._heads.write(db, row, before, state.head)
            return result, state.head, now_ms, state.head.lease_number != before.lease_number

        result, head, now_ms, has_lease_changed = await self._database.write(work)
        if has_lease_changed:
            with self._sightings_lock:
                self._sightings.changed(head, now_ms)
        return result

    async def look(
        self, topic: TopicName, name: str, look: Callable[[CursorState], T], *, whole: bool = True
    ) -> T:
        def work(db: Transaction) -> T:
            row = existing(db, topic, name)
            if not whole:
                row = without_attached(row)
            return look(CursorState(self._read(db, row, matters=False), TableHoles(db, row)))

        return await self._database.read(work)

    async def cursors(
        self, topic: TopicName | None, *, after: tuple[str, str], limit: int
    ) -> list[Head]:
        def work(db: Transaction) -> list[Head]:
            rows = rows_after(db, topic, after, limit)
            return [self._read(db, without_attached(row), matters=False) for row in rows]

        return await self._database.read(work)

    async def delete(self, topic: TopicName, name: str, *, created_ms: int | None = None) -> None:
        def work(db: Transaction) -> None:
            # Of two that delete the topic's last cursors at once, one sees the other's deletion.
            db.rows(_OF_TOPIC + db.for_update, str(topic))
            row = existing(db, topic, name)
            if created_ms not in (None, row.created_ms):
                raise CursorNotFound("cursor not found", topic=topic, cursor=name)
            db.change("UPDATE cursor SET topic = NULL WHERE id = ?", row.cursor_id)
            if row.lease_epoch is not None:
                spend_epoch(db, str(topic), row.lease_epoch)
            db.change(_LAST_IS_GONE, str(topic))

        await self._database.write(work)
        await self.remove_deleted()

    async def remove_deleted(self) -> None:
        """Remove the leftovers of deleted cursors, also those of earlier processes."""
        while await self._database.write(_remove_deleted):
            pass

    async def check(self) -> None:
        await self._database.read(lambda db: db.rows("SELECT 1 FROM cursor LIMIT 1"))

    def _read(self, db: Transaction, row: Row, *, matters: bool = True) -> Head:
        """The head in a row that was just read."""
        head = self._heads.read(db, row)
        with self._sightings_lock:
            head.lease = self._sightings.judged(head, self.now_ms(), matters=matters)
        return head


def _remove_deleted(db: Transaction) -> bool:
    """Remove a few rows of a deleted cursor. Returns whether more are left."""
    rows = db.rows(_NOBODYS + db.for_update)
    if not rows:
        return False
    ((cursor_id,),) = rows
    removed = 0
    for statement in _REMOVE_SOME:
        removed += db.change(statement, cursor_id, REMOVE_ROWS_MAX)
    if not removed:
        db.change("DELETE FROM cursor WHERE id = ?", cursor_id)
    db.reclaim()
    return True
