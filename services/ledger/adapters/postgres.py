"""Logs in a PostgreSQL database: one row per block of entries, an append in one statement.

Several ledgers share a database: an append names the topic's ledger_id and tail, which fence it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import structlog

from seqgate.services.errors import DomainError, Fenced
from seqgate.services.ledger.adapters.rows import existing
from seqgate.services.ledger.adapters.tables import Group, TableLedgerStore
from seqgate.services.ledger.core.entry import Entry
from seqgate.services.ledger.core.ownership import Beat
from seqgate.services.ledger.ports import NO_INSTANCES, Trimmed
from seqgate.services.runtime.layouts import prepare
from seqgate.services.runtime.postgres import (
    PostgresDatabase,
    Server,
    insisted,
    open_postgres,
    size_of,
)
from seqgate.services.runtime.transactions import Transaction
from seqgate.types import Position, TopicName

log = structlog.get_logger()

MIGRATIONS: Final = Path(__file__).parent.parent / "migrations"

VACUUM_REST_S: Final = 0.5
"""The shortest pause before removed rows are vacuumed again; it is at least as long as the last one
took."""

VACUUM_ENTRIES: Final = 1_000
VACUUM_AFTER_S: Final = 60.0
"""The number of removed entries from which on their rows are vacuumed; fewer wait for this time."""

TABLES: Final = (
    "topic",
    "tombstone",
    "block",
    "producer_block",
    "producer_trimmed",
    "producer_instance",
    "topic_trimmed",
    "topic_clock",
    "leaving",
    "instance",
    "topic_owner",
)

_VACUUM: Final = "VACUUM (TRUNCATE FALSE) block, producer_block"
"""Without giving space back to the file system, which waits for appends."""

_APPEND: Final = """
WITH head AS (
    UPDATE topic SET tail_ledger = $2, tail_entry = $6,
        first_ledger = coalesce(first_ledger, $2), first_entry = coalesce(first_entry, $5),
        entries = entries + $7, messages = messages + $9, size_bytes = size_bytes + $10
    WHERE name = $1 AND ledger_id = $2
        AND tail_ledger IS NOT DISTINCT FROM $3 AND tail_entry IS NOT DISTINCT FROM $4
    RETURNING id
), added AS (
    INSERT INTO block (topic, ledger_id, first_entry, last_entry, append_ms, messages, size_bytes,
        entries_crc, metadata_crc, payloads_crc, entries, metadata, payloads)
    SELECT id, $2, $5, $6, $8, $9, $10, $11, $12, $13, $14, $15, $16 FROM head
    RETURNING topic, id
), producers AS (
    INSERT INTO producer_block (topic, producer, highest, block, lowest, unfinished)
    SELECT added.topic, each.producer, each.highest, added.id, each.lowest, each.unfinished
    FROM added, unnest($17::text[], $18::bigint[], $19::bigint[], $20::boolean[])
        AS each (producer, highest, lowest, unfinished)
), instances AS (
    INSERT INTO producer_instance (topic, producer, instance)
    SELECT added.topic, each.producer, each.instance
    FROM added, unnest($21::text[], $22::bytea[]) AS each (producer, instance)
    ON CONFLICT (topic, producer) DO UPDATE SET instance = excluded.instance
)
SELECT id FROM head"""

_BEAT: Final = """INSERT INTO instance VALUES ($1, $2, 1)
    ON CONFLICT (id) DO UPDATE SET beats = instance.beats + 1, address = excluded.address"""
_INSTANCES: Final = """SELECT id, address, beats,
    (SELECT count(*) FROM topic_owner WHERE topic_owner.instance = instance.id) FROM instance"""
_OWN: Final = """INSERT INTO topic_owner VALUES ($1, $2, $3)
    ON CONFLICT (topic) DO UPDATE SET ledger_id = excluded.ledger_id, instance = excluded.instance
    WHERE topic_owner.ledger_id <= excluded.ledger_id"""
_DISOWN: Final = "DELETE FROM topic_owner WHERE topic = $1 AND ledger_id <= $2"


@asynccontextmanager
async def open_postgres_store(
    server: Server, *, migrates: bool
) -> AsyncIterator["PostgresLedgerStore"]:
    """Connect to the database; with `migrates`, change its layout to this version's.

    Raises:
        StoreUnavailable: the database does not answer, has a setting that is refused, or a layout
            that this version cannot use.
    """
    async with open_postgres(server) as database:
        await insisted(lambda: prepare(database, "ledger", MIGRATIONS, migrates=migrates))
        store = PostgresLedgerStore(database)
        await insisted(store.remove_deleted)
        vacuum = asyncio.create_task(store.vacuum_forever())
        try:
            yield store
        finally:
            vacuum.cancel()
            await asyncio.wait({vacuum})


@asynccontextmanager
async def open_postgres_register(
    server: Server, store: "PostgresLedgerStore"
) -> AsyncIterator["PostgresRegister"]:
    """Connect to the register in a store's database."""
    async with open_postgres(server._replace(writers=1, readers=1)) as beats:
        yield PostgresRegister(store.database, beats)


class PostgresLedgerStore(TableLedgerStore):
    """See seqgate.services.ledger.ports.LedgerStore."""

    def __init__(self, database: PostgresDatabase) -> None:
        super().__init__(database)
        self.database: Final = database
        self._removed_entries = 0

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
        block, ranges = group.block, group.producers.values()
        appended = await self.database.change(
            _APPEND,
            str(topic),
            ledger_id,
            *(expected_tail or (None, None)),
            block.first_entry,
            block.last_entry,
            len(entries),
            append_ms,
            group.messages,
            group.size_bytes,
            *block[4:],
            [*group.producers],
            [each.highest for each in ranges],
            [each.lowest for each in ranges],
            [each.unfinished is not None for each in ranges],
            [*instances],
            [*instances.values()],
        )
        if not appended:
            _, state = await self._database.read(lambda db: existing(db, topic, ledger_id))
            raise Fenced("another writer owns the topic", epoch=state.ledger_id)

    async def trim(
        self,
        topic: TopicName,
        before: Position,
        *,
        ledger_id: int | None = None,
        renewing: bool = False,
        steps_max: int = 0,
    ) -> Trimmed:
        trimmed = await super().trim(
            topic, before, ledger_id=ledger_id, renewing=renewing, steps_max=steps_max
        )
        self._removed_entries += trimmed.removed_entries
        return trimmed

    async def size_bytes(self) -> int:
        """The size of the logs' tables with their indexes, in bytes."""
        return await self.database.read(lambda db: size_of(db, TABLES))

    async def vacuum_forever(self) -> None:
        """Vacuum after trims: autovacuum of a stock server looks once a minute, and a log that is
        trimmed as fast as it grows would take up many times its size."""
        rest_s, waited_s = VACUUM_REST_S, 0.0
        while True:
            await asyncio.sleep(rest_s)
            waited_s += rest_s
            removed_entries = self._removed_entries
            if removed_entries >= VACUUM_ENTRIES or (removed_entries and waited_s > VACUUM_AFTER_S):
                began_s = time.monotonic()
                await self._vacuum(removed_entries)
                rest_s, waited_s = max(VACUUM_REST_S, time.monotonic() - began_s), 0.0

    async def _vacuum(self, removed_entries: int) -> None:
        try:
            await self.database.alone(_VACUUM)
        except DomainError as error:
            log.warning("vacuum failed", reason=error.reason, why=str(error.__cause__))
        else:
            self._removed_entries -= removed_entries


class PostgresRegister:
    """See seqgate.services.ledger.ports.Register."""

    def __init__(self, database: PostgresDatabase, beats: PostgresDatabase) -> None:
        """
        Args:
            beats: the same database, by a connection that only beats use: they must not wait for
                appends.
        """
        self._database = database
        self._beats = beats

    async def beat(self, instance: str, address: str) -> list[Beat]:
        await self._beats.change(_BEAT, instance, address)
        return [Beat(*row) for row in await self._beats.change(_INSTANCES)]

    async def leave(self, instance: str) -> None:
        def work(db: Transaction) -> None:
            db.change("DELETE FROM topic_owner WHERE instance = ?", instance)
            db.change("DELETE FROM instance WHERE id = ?", instance)

        await self._database.write(work)

    async def owner(self, topic: TopicName) -> str | None:
        asked = "SELECT instance FROM topic_owner WHERE topic = ?"
        rows = await self._database.read(lambda db: db.rows(asked, str(topic)))
        return str(rows[0][0]) if rows else None

    async def own(self, topic: TopicName, ledger_id: int, instance: str) -> None:
        await self._database.change(_OWN, str(topic), ledger_id, instance)

    async def disown(self, topic: TopicName, ledger_id: int) -> None:
        await self._database.change(_DISOWN, str(topic), ledger_id)

    async def owned(self, instance: str) -> frozenset[str]:
        asked = "SELECT topic FROM topic_owner WHERE instance = ?"
        rows = await self._database.read(lambda db: db.rows(asked, instance))
        return frozenset(topic for (topic,) in rows)
