"""Short constructors of entries."""

from collections.abc import Sequence
from itertools import pairwise

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.services.ledger.core.entry import Entry
from seqgate.types import Chunk

METADATA = EntryMetadata(publish_time=20_000).SerializeToString()
"""Four bytes that a ledger can parse."""


def single(sequence_id: int, producer: str = "p", payload: bytes | None = None) -> Entry:
    """An entry with a single message."""
    body = str(sequence_id).encode() if payload is None else payload
    return Entry(producer, sequence_id, sequence_id, None, (), False, METADATA, body)


def batch(ids: Sequence[int], producer: str = "p") -> Entry:
    """A batch with these ids."""
    steps = tuple(later - earlier for earlier, later in pairwise(ids))
    if all(step == 1 for step in steps):
        steps = ()
    return Entry(producer, ids[0], ids[-1], len(ids), steps, False, METADATA, b"batch")


def marker(sequence_id: int, producer: str = "p") -> Entry:
    """A marker, which carries no message."""
    return single(sequence_id, producer)._replace(marker=True)


def chunk(
    sequence_id: int,
    uuid: str,
    chunk_id: int,
    num_chunks: int,
    producer: str = "p",
    *,
    aborts: str = "",
) -> Entry:
    """A chunk of a large message, three bytes long."""
    place = Chunk(uuid, chunk_id, num_chunks, 3 * num_chunks)
    whole = single(sequence_id, producer, payload=f"{chunk_id:03d}".encode())
    return whole._replace(chunk=place, aborts=aborts)


def large(sequence_id: int, uuid: str, num_chunks: int, producer: str = "p") -> list[Entry]:
    """All chunks of a large message."""
    return [chunk(sequence_id, uuid, each, num_chunks, producer) for each in range(num_chunks)]
