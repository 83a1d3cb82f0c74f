"""The ledger's store alone: entries a second, in durable commits that follow one another."""

import time
from typing import Final

from seqgate.types import Position, TopicName
from services.ledger.adapters.sqlite import open_sqlite_store
from services.ledger.core.entry import Entry
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
    found = []
    async with open_sqlite_store(bench.folder / "store.db") as store:
        for payload_bytes in PAYLOAD_BYTES:
            for count in ENTRIES:
                topic = TopicName.parse(f"bench/store/{count}x{payload_bytes}")
                state = await store.take(topic, create=True)
                log = _Log(state.tail)
                entries = [
                    Entry(
                        producer="p",
                        lowest=each,
                        highest=each,
                        messages=None,
                        steps=(),
                        marker=False,
                        metadata=METADATA,
                        payload=bytes(payload_bytes),
                    )
                    for each in range(count)
                ]

                async def commit(
                    topic: TopicName = topic,
                    ledger_id: int = state.ledger_id,
                    log: _Log = log,
                    entries: list[Entry] = entries,
                ) -> None:
                    append_ms = time.time_ns() // 1_000_000
                    await store.append(topic, ledger_id, log.tail, entries, append_ms)
                    log.tail = Position(ledger_id, log.stored + len(entries) - 1)
                    log.stored += len(entries)

                rounds = await rounds_of(commit, bench.seconds)
                block_bytes = count * (payload_bytes + len(METADATA))
                noun = "entry" if count == 1 else "entries"
                found.append(
                    rate(
                        f"store append, {count:,} {noun} of {payload_bytes:,} B a commit",
                        "entries",
                        rounds,
                        each=count,
                        limit=bench.limit(limits.fdatasync(block_bytes), each=count),
                    )
                )
    return found


class _Log:
    """Where a topic ends."""

    def __init__(self, tail: Position | None) -> None:
        self.tail = tail
        self.stored = 0
