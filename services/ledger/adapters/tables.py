"""Logs in tables: what is the same on every database.

A topic's row is locked by each transaction that changes its log.
"""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

from seqgate.services.errors import Fenced
from seqgate.services.ledger.adapters.block import Block, encode_block
from seqgate.services.ledger.adapters.producers import (
    UNFINISHED,
    Range,
    cuts,
    finder_of,
    newest_before,
    newest_first,
    producer_ranges,
    trimmed_mark,
    trimmed_producers,
)
from seqgate.services.ledger.adapters.rows import (
    LEDGER_END,
    LOG,
    NEXT_LEDGER,
    entries_at,
    existing,
    first_since,
    last_append_ms,
    log_state,
    page_of,
    row_of,
    runs_after,
    start_after,
)
from seqgate.services.ledger.adapters.trims import remove_deleted, renewed, trim_some
from seqgate.services.ledger.core.columns import Columns
from seqgate.services.ledger.core.entry import Entry, StoredEntry
from seqgate.services.ledger.core.find import goes_on_after, last_of
from seqgate.services.ledger.core.marks import last_mark, last_open, last_whole
from seqgate.services.ledger.core.receipt import Fate, Missing
from seqgate.services.ledger.ports import (
    EntryCorrupt,
    LedgerRange,
    LogState,
    Newest,
    ReplayPage,
    Trimmed,
)
from seqgate.services.runtime.transactions import Database, Transaction
from seqgate.types import Position, TopicName

RETAIN_BLOCKS_MAX: Final = 1_000
"""The most blocks that one retention query reads."""

_BURY: Final = """INSERT INTO tombstone VALUES (?, ?)
    ON CONFLICT (name) DO UPDATE SET ledger_id = excluded.ledger_id"""
_RESERVE: Final = """INSERT INTO tombstone VALUES (?, ?)
    ON CONFLICT (name) DO UPDATE SET ledger_id = excluded.ledger_id
    WHERE tombstone.ledger_id < excluded.ledger_id"""
_UNEARTH: Final = """INSERT INTO tombstone VALUES (?, 0)
    ON CONFLICT (name) DO UPDATE SET ledger_id = tombstone.ledger_id RETURNING ledger_id"""


class TableLedgerStore:
    """All of LedgerStore but appends, on any database with these tables."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, topic: TopicName) -> tuple[LogState, bool]:
        def work(db: Transaction) -> tuple[LogState, bool]:
            created = row_of(db, topic) is None and _create(db, topic)
            return existing(db, topic)[1], created

        return await self._database.write(work)

    async def take(
        self, topic: TopicName, *, create: bool, ledger_id: int | None = None
    ) -> LogState:
        def work(db: Transaction) -> LogState:
            if create and row_of(db, topic) is None:
                _create(db, topic)
            _, state = existing(db, topic, ledger_id)
            db.change("UPDATE topic SET ledger_id = ledger_id + 1 WHERE name = ?", str(topic))
            return state._replace(ledger_id=state.ledger_id + 1)

        return await self._database.write(work)

    async def read(
        self,
        topic: TopicName,
        after: Position | None,
        *,
        entries_max: int,
        bytes_max: int,
        payloads: bool,
    ) -> list[StoredEntry]:
        def work(db: Transaction) -> list[StoredEntry]:
            return page_of(
                db, *existing(db, topic), after, entries_max, bytes_max, payloads=payloads
            )

        return await self._database.read(work)

    async def read_at(
        self, topic: TopicName, positions: Sequence[Position], *, bytes_max: int, payloads: bool
    ) -> list[StoredEntry]:
        def work(db: Transaction) -> list[StoredEntry]:
            topic_id, state = existing(db, topic)
            if state.first is None or state.tail is None:
                return []
            first, end = bisect_left(positions, state.first), bisect_right(positions, state.tail)
            found: list[StoredEntry] = []
            size_bytes = 0
            try:
                for stored in entries_at(db, topic_id, positions[first:end], payloads=payloads):
                    size_bytes += stored.size_bytes if payloads else len(stored.entry.metadata)
                    if found and size_bytes > bytes_max:
                        break
                    found.append(stored)
            except EntryCorrupt:
                if not found:  # first return the entries before the damage
                    raise
            return found

        return await self._database.read(work)

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
        def work(db: Transaction) -> list[Columns]:
            topic_id, state = existing(db, topic)
            if state.first is None:
                return []
            start = start_after(after, state.first)
            found: list[Columns] = []
            size_bytes = 0
            try:
                for run in runs_after(db, topic_id, start, through, metadata=metadata):
                    size_bytes += run.size_bytes
                    if found and (len(found) >= runs_max or size_bytes > bytes_max):
                        break
                    found.append(run)
            except EntryCorrupt:
                if not found:  # first return the entries before the damage
                    raise
            return found

        return await self._database.read(work)

    async def ledgers(self, topic: TopicName, *, after: int, limit: int) -> list[LedgerRange]:
        def work(db: Transaction) -> list[LedgerRange]:
            topic_id, state = existing(db, topic)
            found: list[LedgerRange] = []
            ledger_id = after
            while state.first is not None and len(found) < limit:
                # Two index look-ups per ledger, however many blocks it has.
                rows = db.rows(NEXT_LEDGER, topic_id, ledger_id)
                if not rows:
                    break
                ((ledger_id, first_entry),) = rows
                ((last_entry,),) = db.rows(LEDGER_END, topic_id, ledger_id)
                first = max(state.first, Position(ledger_id, first_entry))
                found.append(LedgerRange(ledger_id, first.entry_id, last_entry))
            return found

        return await self._database.read(work)

    async def count_after(self, topic: TopicName, position: Position | None) -> int:
        def work(db: Transaction) -> int:
            topic_id, _ = existing(db, topic)
            ledger_id, entry_id = position or (-1, -1)
            # A block that contains the position counts in full, minus its earlier entries.
            ((count,),) = db.rows(
                """SELECT coalesce(sum(last_entry - CASE
                    WHEN ledger_id = ?2 AND first_entry <= ?3 THEN ?3 ELSE first_entry - 1 END), 0)
                    FROM block WHERE topic = ?1 AND (ledger_id, last_entry) > (?2, ?3)""",
                topic_id,
                ledger_id,
                entry_id,
            )
            return int(count)

        return await self._database.read(work)

    async def find(
        self, topic: TopicName, producer: str, sequence_ids: Sequence[int], *, uuid: str = ""
    ) -> list[Fate]:
        def work(db: Transaction) -> list[Fate]:
            topic_id, state = existing(db, topic)
            finder = finder_of(db, topic_id, state.first, producer, sequence_ids, uuid)
            trimmed = trimmed_mark(db, topic_id, producer)
            return [
                finder.place(each)
                or (Missing.TRIMMED if each <= trimmed.highest else Missing.STALE)
                for each in sequence_ids
            ]

        return await self._database.read(work)

    async def goes_on(self, topic: TopicName, producer: str, uuid: str, position: Position) -> bool:
        def work(db: Transaction) -> bool:
            topic_id, state = existing(db, topic)
            sequence_id = last_of(uuid, newest_before(db, topic_id, producer, position))
            if sequence_id is None:
                return False
            finder = finder_of(db, topic_id, state.first, producer, [sequence_id], uuid)
            return goes_on_after(position, finder.place(sequence_id))

        return await self._database.read(work)

    async def find_time(self, topic: TopicName, append_ms: int) -> Position | None:
        def work(db: Transaction) -> Position | None:
            topic_id, state = existing(db, topic)
            if state.first is None or state.tail is None:
                return None
            return first_since(db, topic_id, state.first, state.tail, append_ms)

        return await self._database.read(work)

    async def highest(self, topic: TopicName, ledger_id: int, producer: str) -> int | None:
        def work(db: Transaction) -> int | None:
            topic_id, state = existing(db, topic)
            if ledger_id != state.ledger_id:
                raise Fenced("another writer owns the topic", epoch=state.ledger_id)
            stored = newest_first(db, topic_id, producer, state.first)
            before = trimmed_mark(db, topic_id, producer)
            decided = last_mark(before, (each.entry for each in stored)).decided
            return None if decided < 0 else decided

        return await self._database.read(work)

    async def last_append_ms(self, topic: TopicName) -> int:
        def work(db: Transaction) -> int:
            topic_id, _ = existing(db, topic)
            return last_append_ms(db, topic_id)

        return await self._database.read(work)

    async def trimmed_through(self, topic: TopicName) -> Position | None:
        def work(db: Transaction) -> Position | None:
            topic_id, _ = existing(db, topic)
            rows = db.rows(
                "SELECT ledger_id, entry_id FROM topic_trimmed WHERE topic = ?", topic_id
            )
            return Position(*rows[0]) if rows else None

        return await self._database.read(work)

    async def newest(self, topic: TopicName, producer: str) -> Newest:
        def work(db: Transaction) -> Newest:
            topic_id, state = existing(db, topic)
            rows = db.rows(
                "SELECT instance FROM producer_instance WHERE topic = ? AND producer = ?",
                topic_id,
                producer,
            )
            stored = newest_first(db, topic_id, producer, state.first)
            before = trimmed_mark(db, topic_id, producer)
            whole = last_whole(before, (each.entry for each in stored))
            again = newest_first(db, topic_id, producer, state.first)
            unfinished = last_open(each.entry for each in again)
            return Newest(bytes(rows[0][0]) if rows else None, whole, unfinished)

        return await self._database.read(work)

    async def trimmed_producers(
        self, topic: TopicName, *, skip: int = 0, after: str = "", limit: int
    ) -> list[tuple[str, int]]:
        def work(db: Transaction) -> list[tuple[str, int]]:
            topic_id, _ = existing(db, topic)
            return trimmed_producers(db, topic_id, after, limit, skip)

        return await self._database.read(work)

    async def replay(
        self,
        topic: TopicName,
        after: Position | None,
        *,
        producers_after: str | None,
        limit: int,
        bytes_max: int,
    ) -> ReplayPage:
        def work(db: Transaction) -> ReplayPage:
            topic_id, state = existing(db, topic)
            producers: list[tuple[str, int]] = []
            entries: list[StoredEntry] = []
            if producers_after is not None:
                producers = trimmed_producers(db, topic_id, producers_after, limit)
            if not producers:
                entries = page_of(db, topic_id, state, after, limit, bytes_max, payloads=False)
            return ReplayPage(state.start, producers, entries)

        return await self._database.read(work)

    async def get(self, topic: TopicName) -> LogState:
        return await self._database.read(lambda db: existing(db, topic)[1])

    async def topics(self, *, prefix: str, after: str, limit: int) -> list[LogState]:
        def work(db: Transaction) -> list[LogState]:
            rows = db.rows(
                f"""SELECT {LOG} FROM topic WHERE name > ?1 AND substr(name, 1, ?2) = ?3
                    ORDER BY name LIMIT ?4""",
                after,
                len(prefix),
                prefix,
                limit,
            )
            return [log_state(row) for row in rows]

        return await self._database.read(work)

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

        def work(db: Transaction) -> tuple[Trimmed, int]:
            topic_id, state = existing(db, topic, owned)
            return trim_some(db, topic_id, state, before, renewing=renewing)

        removed_entries = steps = 0
        while True:
            step, left_id = await self._database.write(work)
            owned = None if ledger_id is None else left_id
            removed_entries, steps = removed_entries + step.removed_entries, steps + 1
            if step.first is None or step.first >= before or steps == steps_max:
                return Trimmed(removed_entries, step.first)

    async def retained_from(
        self, topic: TopicName, *, appended_since_ms: int | None, bytes_max: int | None
    ) -> Position | None:
        def work(db: Transaction) -> Position | None:
            topic_id, state = existing(db, topic)
            if state.first is None:
                return None
            kept, left_bytes = state.first, state.size_bytes
            rows = db.scan(
                """SELECT ledger_id, first_entry, last_entry, append_ms, size_bytes FROM block
                    WHERE topic = ? ORDER BY ledger_id, last_entry LIMIT ?""",
                topic_id,
                RETAIN_BLOCKS_MAX,
            )
            for ledger_id, first_entry, last_entry, append_ms, size_bytes in rows:
                old = appended_since_ms is not None and append_ms < appended_since_ms
                if not (old or (bytes_max is not None and left_bytes > bytes_max)):
                    return max(state.first, Position(ledger_id, first_entry))
                kept = Position(ledger_id, last_entry + 1)
                left_bytes -= size_bytes
            return kept

        return await self._database.read(work)

    async def renew(
        self, topic: TopicName, *, ledger_id: int | None = None, above: int = 0
    ) -> LogState:
        def work(db: Transaction) -> LogState:
            topic_id, state = existing(db, topic, ledger_id)
            renewed(db, topic_id, max(state.ledger_id, above))
            return existing(db, topic)[1]

        return await self._database.write(work)

    async def reserve(self, topic: TopicName, above: int) -> None:
        def work(db: Transaction) -> None:
            if row_of(db, topic) is None:
                db.change(_RESERVE, str(topic), above)

        await self._database.write(work)

    async def cuts_unfinished(self, topic: TopicName, before: Position) -> bool:
        def work(db: Transaction) -> bool:
            topic_id, state = existing(db, topic)
            first = state.first
            if first is None or before <= first:
                return False
            producers = db.rows(UNFINISHED, topic_id)
            return any(cuts(db, topic_id, each, first, before) for (each,) in producers)

        return await self._database.read(work)

    async def delete(
        self, topic: TopicName, *, ledger_id: int | None = None, leaves_cursors: bool = False
    ) -> None:
        def work(db: Transaction) -> None:
            topic_id, state = existing(db, topic, ledger_id)
            if leaves_cursors:
                db.change("INSERT INTO leaving VALUES (?) ON CONFLICT DO NOTHING", str(topic))
            db.change(_BURY, str(topic), state.ledger_id)
            db.change("UPDATE topic SET name = NULL WHERE id = ?", topic_id)

        await self._database.write(work)
        await self.remove_deleted()

    async def leaving(self, *, after: str, limit: int) -> list[TopicName]:
        asked = "SELECT name FROM leaving WHERE name > ? ORDER BY name LIMIT ?"
        rows = await self._database.read(lambda db: db.rows(asked, after, limit))
        return [TopicName.parse(name) for (name,) in rows]

    async def is_leaving(self, topic: TopicName) -> bool:
        def work(db: Transaction) -> bool:
            asked = f"SELECT name FROM leaving WHERE name = ?{db.for_update}"
            return bool(db.rows(asked, str(topic)))

        # As a change: only a primary that was not replaced can commit the lock of a row.
        return await self._database.write(work)

    async def left(self, topic: TopicName) -> None:
        def work(db: Transaction) -> None:
            db.change("DELETE FROM leaving WHERE name = ?", str(topic))

        await self._database.write(work)

    async def remove_deleted(self) -> None:
        """Remove the leftovers of deleted topics, also those of earlier processes."""
        while await self._database.write(remove_deleted):
            pass

    async def check(self) -> None:
        await self._database.read(lambda db: db.rows("SELECT 1 FROM topic LIMIT 1"))


class Group(NamedTuple):
    """Entries to be appended together, as rows."""

    block: Block
    messages: int
    size_bytes: int
    producers: dict[str, Range]

    @classmethod
    def of(
        cls, ledger_id: int, tail: Position | None, append_ms: int, entries: Sequence[Entry]
    ) -> "Group":
        """Entries that follow a tail."""
        assert entries
        is_same = tail is not None and tail.ledger_id == ledger_id
        first_entry = tail.entry_id + 1 if tail is not None and is_same else 0
        return cls(
            encode_block(ledger_id, first_entry, append_ms, entries),
            sum(entry.message_count for entry in entries),
            sum(entry.size_bytes for entry in entries),
            producer_ranges(entries),
        )


def _create(db: Transaction, topic: TopicName) -> bool:
    """Create a topic. Returns whether it was this transaction. The row of its tombstone, which is
    there meanwhile, lets one transaction at a time create a topic of this name."""
    ((ledger_id,),) = db.rows(_UNEARTH, str(topic))
    created = db.change(
        """INSERT INTO topic (name, incarnation, ledger_id, created_ms) VALUES (?, ?, ?, ?)
            ON CONFLICT (name) DO NOTHING""",
        str(topic),
        ledger_id + 1,
        ledger_id,
        time.time_ns() // 1_000_000,
    )
    db.change("DELETE FROM tombstone WHERE name = ?", str(topic))
    db.change("DELETE FROM leaving WHERE name = ?", str(topic))
    return created > 0
