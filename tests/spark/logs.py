"""Logs for the Spark tests, generated from a seed and written directly into a ledger's store, and
the resulting state, folded entry by entry with `advance`."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from random import Random

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.services.dedup.core.sequence import Marks, advance
from seqgate.services.ledger.adapters.sqlite import open_sqlite_store
from seqgate.services.ledger.core.entry import Entry
from seqgate.services.ledger.ports import LedgerStore
from seqgate.types import Position, TopicName
from tests.support.entries import batch, chunk, marker, single

APPENDED_MS = 1_700_000_000_000
"""The time of the first block; each later one follows after a millisecond."""


@dataclass
class Log:
    """A topic's log: blocks of entries, by ledger."""

    ledgers: list[list[list[Entry]]] = field(default_factory=list)

    @property
    def stored(self) -> Iterator[tuple[Position, int, Entry]]:
        """Each entry, with its position and append time."""
        append_ms = APPENDED_MS
        for ledger_id, blocks in enumerate(self.ledgers, start=1):
            entry_id = 0
            for block in blocks:
                for entry in block:
                    yield Position(ledger_id, entry_id), append_ms, entry
                    entry_id += 1
                append_ms += 1

    @property
    def marks(self) -> dict[str, Marks]:
        entries: dict[str, list[Entry]] = {}
        for _, _, entry in self.stored:
            if not entry.marker:
                entries.setdefault(entry.producer, []).append(entry)
        return {
            producer: reduce(
                lambda marks, entry: advance(marks, entry.highest, entry.chunk), of, Marks()
            )
            for producer, of in entries.items()
        }


def make_log(random: Random, producers: int, blocks: int, *, careless: bool = False) -> Log:
    """A log of several ledgers, with messages, batches with gaps, large messages whole, aborted and
    unfinished, and markers.

    Args:
        careless: deduplication was off for a while: ids go down, and come twice.
    """
    names = [f"producer {number} ü" for number in range(producers)]
    writers = {name: _Producer(name, Random(random.random()), careless) for name in names}
    log = Log([[]])
    for _ in range(blocks):
        if random.random() < 0.2 and log.ledgers[-1]:
            log.ledgers.append([])
        block: list[Entry] = []
        for name in random.choices(names, k=random.randint(1, 40)):
            block += writers[name].next()
        if random.random() < 0.3:
            block.append(marker(random.randint(0, 99), random.choice([*names, "system"])))
        log.ledgers[-1].append(block)
    return log


class _Producer:
    def __init__(self, name: str, random: Random, careless: bool) -> None:
        self._name = name
        self._random = random
        self._careless = careless
        self._id = random.choice((-1, 2**53, 2**62))
        self._attempts = 0

    def next(self) -> list[Entry]:
        random = self._random
        self._id += random.choice((1, 1, 1, 5))
        if self._careless and random.random() < 0.2:
            self._id = max(0, self._id - random.randint(1, 20))
        match random.choice(("single",) * 6 + ("batch", "steps", "large", "part")):
            case "single":
                return [single(self._id, self._name)]
            case "batch":
                first, self._id = self._id, self._id + 3
                return [batch(range(first, self._id + 1), self._name)]
            case "steps":
                first, self._id = self._id, self._id + 7
                metadata = EntryMetadata(sequence_id=first, sequence_id_steps=[2, 5])
                entry = batch([first, first + 2, self._id], self._name)
                return [entry._replace(metadata=metadata.SerializeToString())]
            case "large":
                return self._chunks(first=0, last=2)
            case _:  # the rest comes later or never, or another attempt follows
                entries = self._chunks(first=0, last=random.randint(0, 1))
                if random.random() < 0.5:
                    ended = entries[-1].chunk
                    assert ended is not None
                    again = self._chunks(first=0, last=random.randint(0, 2))
                    entries += [again[0]._replace(aborts=ended.uuid), *again[1:]]
                return entries

    def _chunks(self, first: int, last: int) -> list[Entry]:
        self._attempts += 1
        uuid = f"{self._name}-{self._attempts}"
        return [chunk(self._id, uuid, each, 3, self._name) for each in range(first, last + 1)]


async def fill(folder: Path, logs: Mapping[str, Log]) -> None:
    """Write logs into the SQLite store of a stack."""
    (folder / "ledger").mkdir(parents=True, exist_ok=True)
    async with open_sqlite_store(folder / "ledger" / "ledger.db") as store:
        await put(store, logs)


async def put(store: LedgerStore, logs: Mapping[str, Log]) -> None:
    await asyncio.gather(*(_put(store, topic, log) for topic, log in logs.items()))


async def _put(store: LedgerStore, topic: str, log: Log) -> None:
    name = TopicName.parse(topic)
    append_ms = APPENDED_MS
    tail: Position | None = None
    for blocks in log.ledgers:
        state = await store.take(name, create=True)
        for block in blocks:
            await store.append(name, state.ledger_id, tail, block, append_ms)
            same = tail is not None and tail.ledger_id == state.ledger_id
            first = tail.entry_id + 1 if same and tail is not None else 0
            tail = Position(state.ledger_id, first + len(block) - 1)
            append_ms += 1
