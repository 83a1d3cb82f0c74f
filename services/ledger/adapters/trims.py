"""Trimming a log: removing blocks in steps, and remembering what they come to."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from seqgate.services.deduplication import NEVER
from seqgate.services.ledger.adapters.block import Block, decode_block
from seqgate.services.ledger.adapters.producers import OLDEST_OF, indexed, stored_of, trimmed_mark
from seqgate.services.ledger.adapters.rows import (
    ENTRIES_ALONE,
    WITH_METADATA,
    first_from,
    last_append_ms,
)
from seqgate.services.ledger.core.entry import Entry
from seqgate.services.ledger.core.marks import folded, remembered
from seqgate.services.ledger.ports import EntryCorrupt, LogState, Trimmed
from seqgate.services.runtime.transactions import Transaction
from seqgate.types import Position

REMOVE_BLOCKS_MAX: Final = 64
REMOVE_ENTRIES_MAX: Final = 4_000
"""The most blocks, and the most entries (though at least one block), that one transaction removes,
so that publishing never waits for a long trim."""

REMEMBER: Final = """INSERT INTO producer_trimmed VALUES (?, ?, ?)
    ON CONFLICT (topic, producer) DO UPDATE SET highest = excluded.highest"""
FORGET: Final = "DELETE FROM producer_trimmed WHERE topic = ? AND producer = ?"
_TRIMMED_THROUGH: Final = """INSERT INTO topic_trimmed VALUES (?, ?, ?)
    ON CONFLICT (topic)
    DO UPDATE SET ledger_id = excluded.ledger_id, entry_id = excluded.entry_id"""
_KEEP_CLOCK: Final = """INSERT INTO topic_clock VALUES (?, ?)
    ON CONFLICT (topic) DO UPDATE SET append_ms = excluded.append_ms"""
_INDEXED: Final = "SELECT producer, lowest, highest, unfinished FROM producer_block WHERE block = ?"
_OLDEST: Final = """SELECT id, messages, size_bytes, ledger_id, first_entry, last_entry FROM block
    WHERE topic = ? ORDER BY ledger_id, last_entry LIMIT ?"""
_DELETED_TOPIC: Final = "SELECT id FROM topic WHERE name IS NULL LIMIT 1"


def trim_some(
    db: Transaction, topic_id: int, state: LogState, before: Position, *, renewing: bool
) -> tuple[Trimmed, int]:
    """Remove a few blocks, whole or in part, and advance the topic's first entry. Returns the
    topic's ledger_id, too, which is another one after a renewal."""
    first, ledger_id = state.first, state.ledger_id
    if first is None or before <= first:
        return Trimmed(0, first), ledger_id
    going = _going(db, topic_id, first, before)
    cut = _remember(db, topic_id, going)
    if cut and renewing:
        ledger_id = renewed(db, topic_id, ledger_id)
    append_ms = last_append_ms(db, topic_id)
    _remove_blocks(db, going.blocks)
    if going.through is not None:
        db.change(_TRIMMED_THROUGH, topic_id, *going.through)
    left = first_from(db, topic_id, going.until)
    db.change(
        """UPDATE topic SET first_ledger = ?, first_entry = ?, entries = entries - ?,
            messages = messages - ?, size_bytes = size_bytes - ? WHERE id = ?""",
        *(left or (None, None)),
        going.entries,
        going.messages,
        going.size_bytes,
        topic_id,
    )
    if left is None:
        db.change(_KEEP_CLOCK, topic_id, append_ms)
    return Trimmed(going.entries, left), ledger_id


def renewed(db: Transaction, topic_id: int, above: int) -> int:
    """Renew a topic. Returns its ledger_id, the next one above another."""
    ledger_id = above + 1
    db.change(
        "UPDATE topic SET ledger_id = ?, incarnation = ? WHERE id = ?",
        ledger_id,
        ledger_id,
        topic_id,
    )
    return ledger_id


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


def _going(db: Transaction, topic_id: int, first: Position, before: Position) -> _Going:
    going = _Going(first)
    rows = db.rows(_OLDEST, topic_id, REMOVE_BLOCKS_MAX)
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
            ((*columns,),) = db.rows(f"SELECT {WITH_METADATA} FROM block WHERE id = ?", block_id)
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


def _all_of(db: Transaction, block_id: int) -> list[Entry]:
    """All entries of a block. A damaged block is represented by its index rows."""
    ((*columns,),) = db.rows(f"SELECT {ENTRIES_ALONE} FROM block WHERE id = ?", block_id)
    try:
        return [each.entry for each in decode_block(Block(*columns))]
    except EntryCorrupt:
        rows = db.rows(_INDEXED, block_id)
        return [indexed(*row) for row in rows]


def _remember(db: Transaction, topic_id: int, going: _Going) -> bool:
    """Record each producer's mark after the entries to be trimmed. Returns whether the trim cuts a
    large message that could still be completed."""
    cut = False
    for producer, entries in going.producers.items():
        mark = folded(trimmed_mark(db, topic_id, producer), entries)
        left = _left(db, topic_id, producer, going)
        decided, is_cut = remembered(mark, left)
        cut = cut or is_cut
        if decided > NEVER:
            db.change(REMEMBER, topic_id, producer, decided)
        else:
            db.change(FORGET, topic_id, producer)
    return cut


def _left(db: Transaction, topic_id: int, producer: str, going: _Going) -> Iterator[Entry]:
    """The producer's entries that this step of a trim leaves, in order."""
    for row in db.scan(OLDEST_OF, topic_id, producer, going.last_block):
        for stored in stored_of(producer, row):
            if stored.position >= going.until:
                yield stored.entry


def remove_deleted(db: Transaction) -> bool:
    """Remove a few blocks of a deleted topic. Returns whether more are left."""
    rows = db.rows(_DELETED_TOPIC)
    if not rows:
        return False
    ((topic_id,),) = rows
    blocks = db.rows("SELECT id FROM block WHERE topic = ? LIMIT ?", topic_id, REMOVE_BLOCKS_MAX)
    _remove_blocks(db, [block for (block,) in blocks])
    if not blocks:
        db.change("DELETE FROM producer_trimmed WHERE topic = ?", topic_id)
        db.change("DELETE FROM producer_instance WHERE topic = ?", topic_id)
        db.change("DELETE FROM topic_clock WHERE topic = ?", topic_id)
        db.change("DELETE FROM topic_trimmed WHERE topic = ?", topic_id)
        db.change("DELETE FROM topic WHERE id = ?", topic_id)
    return True


def _remove_blocks(db: Transaction, blocks: list[int]) -> None:
    for block in blocks:
        db.change("DELETE FROM producer_block WHERE block = ?", block)
        db.change("DELETE FROM block WHERE id = ?", block)
    if blocks:
        db.reclaim()
