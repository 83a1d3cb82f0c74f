"""Translates stored entries for the machine, from their metadata: payloads are never opened."""

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.keys import sticky_key
from seqgate.services.dispatcher.core.effects import ACCEPT, Entry
from seqgate.services.dispatcher.core.lane import Chunk
from seqgate.types import Position


def position_of(stored: StoredEntry) -> Position:
    return Position(stored.position.ledger_id, stored.position.entry_id)


def entry_of(stored: StoredEntry, verdict: int = ACCEPT) -> Entry:
    """The machine's view of an entry. A marker has no key."""
    metadata = stored.metadata
    position = position_of(stored)
    if metadata.HasField("marker_type"):
        return Entry(position, None)
    chunk = None
    if metadata.num_chunks_from_msg > 1:
        is_last = metadata.chunk_id == metadata.num_chunks_from_msg - 1
        chunk = Chunk(f"{metadata.producer_name}\0{metadata.uuid}", is_last, metadata.chunk_id)
    aborts = f"{metadata.producer_name}\0{stored.aborts}" if stored.aborts else ""
    return Entry(
        position,
        sticky_key(metadata),
        metadata.num_messages_in_batch or 1,
        metadata.deliver_at_time,
        chunk,
        verdict,
        aborts,
    )
