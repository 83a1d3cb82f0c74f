"""Translates stored entries for the machine, from their metadata: payloads are never opened."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.keys import sticky_key
from seqgate.services.dispatcher.core.effects import ACCEPT, Entry
from seqgate.services.dispatcher.core.lane import Chunk
from seqgate.types import Position

# NamedTuple._make without a Python call per entry.
_position: Final[Callable[[Iterable[Any]], Position]] = partial(tuple.__new__, Position)
_entry: Final[Callable[[Iterable[Any]], Entry]] = partial(tuple.__new__, Entry)


def position_of(stored: StoredEntry) -> Position:
    position = stored.position
    return _position((position.ledger_id, position.entry_id))


def entry_of(stored: StoredEntry, verdict: int = ACCEPT) -> Entry:
    """The machine's view of an entry. A marker has no key."""
    metadata, place = stored.metadata, stored.position
    position = _position((place.ledger_id, place.entry_id))
    if metadata.HasField("marker_type"):
        return Entry(position, None)
    chunk = None
    if metadata.num_chunks_from_msg > 1:
        is_last = metadata.chunk_id == metadata.num_chunks_from_msg - 1
        chunk = Chunk(f"{metadata.producer_name}\0{metadata.uuid}", is_last, metadata.chunk_id)
    aborts = stored.aborts
    if aborts:
        aborts = f"{metadata.producer_name}\0{aborts}"
    key, messages = sticky_key(metadata), metadata.num_messages_in_batch or 1
    return _entry((position, key, messages, metadata.deliver_at_time, chunk, verdict, aborts))
