"""Logs that are put straight into a ledger's store, before its service starts.

Entries are appended block by block, as the service does it. Producers take turns, and each numbers
its entries from 0. Payloads are empty: nothing reads them.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from seqgate.services.ledger.adapters.sqlite import open_sqlite_store
from seqgate.services.ledger.core.entry import Entry
from seqgate.services.ledger.ports import LedgerStore
from seqgate.types import Position, TopicName

PRODUCERS: Final = 100  # of a topic
BLOCK_ENTRIES: Final = 1_000  # of a block, at most
LEDGER_ID: Final = 1
INCARNATION: Final = 1  # of each log
APPENDED_MS: Final = 1_700_000_000_000

METADATA: Final = bytes(40)  # as large as that of a message without properties


class Logs(NamedTuple):
    """Topics with the same log: `prefix` and a number from 0, each with so many entries."""

    prefix: str
    topics: int
    entries: int


def producer(number: int) -> str:
    return f"producer-{number}"


def highest(entries: int) -> list[tuple[str, int]]:
    """Each producer's highest sequence id, after so many entries of a log."""
    numbers = range(min(entries, PRODUCERS))
    return [(producer(each), (entries - 1 - each) // PRODUCERS) for each in numbers]


async def fill(path: Path, all_logs: Sequence[Logs]) -> None:
    """Make the database of a ledger that has these logs."""
    path.parent.mkdir(parents=True)
    async with open_sqlite_store(path) as store:
        for logs in all_logs:
            entries = [
                entry(producer(each % PRODUCERS), each // PRODUCERS) for each in range(logs.entries)
            ]
            names = [TopicName.parse(f"{logs.prefix}{number}") for number in range(logs.topics)]
            await asyncio.gather(*(_append(store, name, entries) for name in names))


async def _append(store: LedgerStore, name: TopicName, entries: Sequence[Entry]) -> None:
    state = await store.take(name, create=True)
    assert (state.ledger_id, state.incarnation) == (LEDGER_ID, INCARNATION)
    tail: Position | None = None
    for first in range(0, len(entries), BLOCK_ENTRIES):
        block = entries[first : first + BLOCK_ENTRIES]
        await store.append(name, LEDGER_ID, tail, block, APPENDED_MS + first)
        tail = Position(LEDGER_ID, first + len(block) - 1)


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
