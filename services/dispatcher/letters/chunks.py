"""The chunks of a large message in a log: one that is dead-lettered, or replayed, goes whole."""

from collections.abc import Callable
from typing import Final

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.ports import Log
from seqgate.types import Position, TopicName

NEAR_FIRST: Final = 100
NEAR_MAX: Final = 10_000
"""How far before a chunk of a large message its first one is looked for, in entries: near it at
first."""

CHUNKS_SCANNED_MAX: Final = 20_000
"""The most entries read from there on for the other chunks."""

PAGE_ENTRIES: Final = 1_000
"""How many entries are read at a time."""


def is_earlier_chunk(entry: StoredEntry) -> bool:
    """Whether an entry is a chunk that is not listed: a large message is listed once, by its last
    chunk, which is there if all are."""
    metadata = entry.metadata
    return metadata.chunk_id < metadata.num_chunks_from_msg - 1


def message_of(entry: StoredEntry) -> tuple[str, str, int, int]:
    """What the chunks of an attempt at a large message share."""
    metadata = entry.metadata
    layout = metadata.num_chunks_from_msg, metadata.total_chunk_msg_size
    return metadata.producer_name, metadata.uuid, *layout


def put(chunks: dict[int, StoredEntry], entry: StoredEntry) -> None:
    """Add a chunk to those before it, by number. A first one begins the message again: it was sent
    twice."""
    if entry.metadata.chunk_id == 0:
        chunks.clear()
    chunks.setdefault(entry.metadata.chunk_id, entry)


async def whole(
    log: Log, topic: TopicName, entry: StoredEntry, belongs: Callable[[StoredEntry], bool]
) -> list[StoredEntry]:
    """The chunks of a large message, given any of them, in order, without payloads: entries that
    `belong`. Some may be missing. Of another message, its entry. Raises TopicNotFound,
    LedgerUnavailable, EntryCorrupt."""
    if entry.metadata.num_chunks_from_msg <= 1:
        return [entry]
    found: dict[int, StoredEntry] = {}
    for start in await _starts(log, topic, position_of(entry)):
        found = await _chunks(log, topic, entry, start, belongs)
        if 0 in found:
            break
    return [found[number] for number in sorted(found)]


async def _starts(log: Log, topic: TopicName, position: Position) -> list[Position]:
    """Where to look for the first chunk of a message: near it, and at most NEAR_MAX entries before
    it."""
    ledger_id, entry_id = position
    near = [Position(ledger_id, max(0, entry_id - each)) for each in (NEAR_FIRST, NEAR_MAX)]
    if entry_id < NEAR_MAX:
        before = await log.last_before(topic, ledger_id)
        if before is not None:
            near.append(Position(before.ledger_id, max(0, before.entry_id - NEAR_MAX)))
    return near


async def _chunks(
    log: Log,
    topic: TopicName,
    entry: StoredEntry,
    start: Position,
    belongs: Callable[[StoredEntry], bool],
) -> dict[int, StoredEntry]:
    """The chunks of a message from a position on, up to its last one, by number."""
    message, last = message_of(entry), entry.metadata.num_chunks_from_msg - 1
    found: dict[int, StoredEntry] = {}
    at: Position | None = start
    after: Position | None = None
    scanned = 0
    while scanned < CHUNKS_SCANNED_MAX:
        entries = await log.scan(topic, at, after, PAGE_ENTRIES)
        if not entries:
            break
        for each in entries:
            if message_of(each) == message and belongs(each):
                put(found, each)
                if last in found and position_of(each) >= position_of(entry):
                    return found
        at, after = None, position_of(entries[-1])
        scanned += len(entries)
    return found
