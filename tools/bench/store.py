"""The ledger's store alone: entries a second, in durable commits that follow one another."""

import os
import time
from typing import Final

from seqgate.services.ledger.adapters.sqlite import open_sqlite_store
from seqgate.services.ledger.ports import LedgerStore
from seqgate.types import Position, TopicName
from tools.bench import limits
from tools.bench.bench import Bench
from tools.bench.figures import Measurement, rate
from tools.bench.logs import METADATA, entry
from tools.bench.rounds import rounds_of

ENTRIES: Final = (1, 100, 1_000)
PAYLOAD_BYTES: Final = (100, 1_000)


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
    log = await store.take(topic, create=True)
    ledger_id, tail, stored = log.ledger_id, log.tail, 0
    payload = os.urandom(payload_bytes)
    entries = [entry("p", number, payload) for number in range(count)]

    async def commit() -> None:
        nonlocal tail, stored
        await store.append(topic, ledger_id, tail, entries, time.time_ns() // 1_000_000)
        stored += count
        tail = Position(ledger_id, stored - 1)

    rounds = await rounds_of(commit, seconds)
    block_bytes = count * (payload_bytes + len(METADATA))
    share = min(1.0, limits.BLOCK_BYTES[-1] / block_bytes)  # more is written in several blocks
    noun = "entry" if count == 1 else "entries"
    return rate(
        f"store append, {count:,} {noun} of {payload_bytes:,} B a commit",
        "entries",
        rounds,
        bench.limit(limits.fdatasync(block_bytes), each=count * share),
        each=count,
        payload_bytes=payload_bytes,
    )
