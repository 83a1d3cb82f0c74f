"""Which chunks the log admits: those that directly follow each other among a producer's entries.

An attempt at a large message is stored chunk by chunk. Every entry of its producer either continues
it, or ends it and names it (`Entry.aborts`); what would continue an ended attempt is refused with
CHUNK_GAP. Entries of other producers do not matter:

    stored     u0:0   u0:1   7 (ends u0)   u1:0   u1:1   u1:2
    refused                  u0:2          u1:2

So whoever was told STORED for every chunk has a message, and nobody who reads the log must look
back, or ahead. The rule holds whether deduplication is on, off, or switched amid a message: with
deduplication on it refuses nothing that deduplication admits, as its fold (`advance`) is the same.
"""

from typing import NamedTuple

from seqgate.services.deduplication import continues
from seqgate.types import Chunk


class OpenAttempt(NamedTuple):
    """The attempt that a producer's newest entry leaves unfinished.

    Attributes:
        sequence_id: of its message.
        chunk: the newest entry.
        is_whole: whether all chunks before it are in the log, with nothing of the producer between.
            Otherwise it cannot be continued: chunks were trimmed, or stored by a version that
            admitted any chunk while deduplication was off.
    """

    sequence_id: int
    chunk: Chunk
    is_whole: bool

    def continues_with(self, sequence_id: int, chunk: Chunk) -> bool:
        same = self.is_whole and self.sequence_id == sequence_id
        return same and continues(self.chunk, chunk)


def is_gap(before: OpenAttempt | None, sequence_id: int, chunk: Chunk | None) -> bool:
    """Whether an entry is a chunk that continues nothing."""
    if chunk is None or chunk.chunk_id == 0:
        return False
    return before is None or not before.continues_with(sequence_id, chunk)


def ended_by(before: OpenAttempt | None, chunk: Chunk | None) -> str:
    """The uuid of the attempt that an entry ends, which is no gap; empty: none. An attempt that
    begins again is not named: its first chunk says so."""
    if before is None or (chunk is not None and chunk.uuid == before.chunk.uuid):
        return ""
    return before.chunk.uuid


def follow(before: OpenAttempt | None, sequence_id: int, chunk: Chunk | None) -> OpenAttempt | None:
    """The open attempt after one more entry of the producer, which is not a marker."""
    if chunk is None or chunk.is_last:
        return None
    return OpenAttempt(sequence_id, chunk, not is_gap(before, sequence_id, chunk))
