"""The ledger's store alone: entries a second, in durable commits that follow one another."""

import os
import time
from typing import Final

from seqgate.types import Position, TopicName
from services.ledger.adapters.sqlite import open_sqlite_store
from services.ledger.core.entry import Entry
from services.ledger.ports import LedgerStore, LogState
from tools.bench import limits
from tools.bench.bench import Bench
from tools.bench.measurement import Measurement, rate
from tools.bench.rounds import rounds_of

ENTRIES: Final = (1, 100, 1_000)
PAYLOAD_BYTES: Final = (100, 1_000)

METADATA: Final = bytes(40)
"""As large as that of a message without properties."""


async def append(bench: Bench) -> list[Measurement]:
    """Commits of different sizes. The limit is a write and fdatasync of as many bytes."""
    async with open_sqlite_store(bench.folder / "store.db") as store:
        return [
            await commits(bench, store, count, payload_bytes, bench.seconds)
            for payload_bytes in PAYLOAD_BYTES
            for count in ENTRIES
        ]


async def commits(
    bench: Bench, store: LedgerStore, count: int, payload_bytes: int, seconds: float
) -> Measurement:
    """Commits of `count` entries, for `seconds` a round."""
    topic = TopicName.parse(f"bench/store/{count}x{payload_bytes}")
    log = _Log(await store.take(topic, create=True))
    payload = os.urandom(payload_bytes)
    entries = [_entry(each, payload) for each in range(count)]

    async def commit() -> None:
        append_ms = time.time_ns() // 1_000_000
        await store.append(topic, log.ledger_id, log.tail, entries, append_ms)
        log.tail = Position(log.ledger_id, log.stored + len(entries) - 1)
        log.stored += len(entries)

    rounds = await rounds_of(commit, seconds)
    block_bytes = count * (payload_bytes + len(METADATA))
    share = min(1.0, limits.BLOCK_BYTES[-1] / block_bytes)  # more is written in several blocks
    noun = "entry" if count == 1 else "entries"
    return rate(
        f"store append, {count:,} {noun} of {payload_bytes:,} B a commit",
        "entries",
        rounds,
        each=count,
        limit=bench.limit(limits.fdatasync(block_bytes), each=count * share),
        payload_bytes=payload_bytes,
    )


def _entry(sequence_id: int, payload: bytes) -> Entry:
    return Entry(
        producer="p",
        lowest=sequence_id,
        highest=sequence_id,
        messages=None,
        steps=(),
        marker=False,
        metadata=METADATA,
        payload=payload,
    )


class _Log:
    """Where a topic ends."""

    def __init__(self, state: LogState) -> None:
        self.ledger_id = state.ledger_id
        self.tail = state.tail
        self.stored = 0
