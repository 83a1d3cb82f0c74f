"""Logs that are put straight into a ledger's store, before its service starts.

One topic of a kind is appended, block by block, as the service does it; the others are copies of
its rows. Producers take turns, and each numbers its entries from 0. Payloads are empty: nothing
reads them.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import apsw

from seqgate.services.ledger.adapters.sqlite import open_sqlite_store
from seqgate.services.ledger.core.entry import Entry
from seqgate.types import Position, TopicName

PRODUCERS: Final = 100  # of a topic
BLOCK_ENTRIES: Final = 1_000  # of a block, at most
LEDGER_ID: Final = 1
INCARNATION: Final = 1  # of each log
APPENDED_MS: Final = 1_700_000_000_000

METADATA: Final = bytes(40)  # as large as that of a message without properties
_COPY_TOPICS: Final = """INSERT INTO topic
    SELECT id + n, ? || n, incarnation, ledger_id, created_ms, first_ledger, first_entry,
        tail_ledger, tail_entry, entries, messages, size_bytes
    FROM copy CROSS JOIN topic WHERE id = ?"""
_COPY_BLOCKS: Final = """INSERT INTO block
    SELECT id + n * ?, topic + n, ledger_id, first_entry, last_entry, append_ms, messages,
        size_bytes, entries_crc, metadata_crc, payloads_crc, entries, metadata, payloads
    FROM copy CROSS JOIN block WHERE topic = ?"""
_COPY_RANGES: Final = """INSERT INTO producer_block
    SELECT topic + n, producer, highest, block + n * ?, lowest, unfinished
    FROM copy CROSS JOIN producer_block WHERE topic = ? ORDER BY n, producer, highest"""


class Logs(NamedTuple):
    """Topics with the same log: `prefix` and a number from 0, each with so many entries."""

    prefix: str
    topics: int
    entries: int

    @property
    def blocks(self) -> int:
        return -(-self.entries // BLOCK_ENTRIES)


def producer(number: int) -> str:
    return f"producer-{number}"


def highest(entries: int) -> Iterator[tuple[str, int]]:
    """Each producer's highest sequence id, after so many entries of a log."""
    for number in range(min(entries, PRODUCERS)):
        yield producer(number), (entries - 1 - number) // PRODUCERS


async def fill(path: Path, all_logs: Sequence[Logs]) -> None:
    """Make the database of a ledger that has these logs."""
    path.parent.mkdir(parents=True)
    for logs in all_logs:
        async with open_sqlite_store(path) as store:
            name = TopicName.parse(f"{logs.prefix}0")
            state = await store.take(name, create=True)
            assert (state.ledger_id, state.incarnation) == (LEDGER_ID, INCARNATION)
            tail: Position | None = None
            for block in range(logs.blocks):
                first = block * BLOCK_ENTRIES
                numbers = range(first, min(first + BLOCK_ENTRIES, logs.entries))
                entries = [entry(producer(each % PRODUCERS), each // PRODUCERS) for each in numbers]
                await store.append(name, LEDGER_ID, tail, entries, APPENDED_MS + block)
                tail = Position(LEDGER_ID, numbers[-1])
        if logs.topics > 1:
            _copy(path, logs)


def entry(producer: str, sequence_id: int, payload: bytes = b"") -> Entry:
    return Entry(
        producer=producer,
        lowest=sequence_id,
        highest=sequence_id,
        messages=None,
        steps=(),
        marker=False,
        metadata=METADATA,
        payload=payload,
    )


def _copy(path: Path, logs: Logs) -> None:
    """Copy the last topic with its blocks. No other process has the database open."""
    db = apsw.Connection(str(path))
    try:
        # A copy that fails fails the benchmark: it need not survive anything.
        db.execute("PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF").fetchall()
        with db:
            db.execute("CREATE TEMP TABLE copy (n INTEGER PRIMARY KEY)")
            db.executemany("INSERT INTO copy VALUES (?)", ((n,) for n in range(1, logs.topics)))
            ((topic_id,),) = db.execute("SELECT max(id) FROM topic").fetchall()
            db.execute(_COPY_TOPICS, (logs.prefix, topic_id))
            db.execute(_COPY_BLOCKS, (logs.blocks, topic_id))
            db.execute(_COPY_RANGES, (logs.blocks, topic_id))
    finally:
        db.close()
