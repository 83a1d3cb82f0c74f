"""How is a large message cut?

A message whose payload, once compressed, is larger than an entry may be is cut into chunks; each is
published as an entry of its own, all under the message's one sequence id (PIP-37). An *attempt* is
one way of cutting it, under a uuid that nobody else uses: an attempt goes on after a reconnection,
and a message that cannot go on, because the service lacks what came before, or takes only smaller
entries now, starts again as a new attempt. Chunks of two attempts are never mixed, wherever they
end up.
"""

import uuid
from dataclasses import dataclass
from typing import Final

import google_crc32c

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client._codec import OutgoingMessage
from seqgate.message_id import ChunkMessageId, MessageId
from seqgate.telemetry import names
from seqgate.types import Position

PLACE_BYTES: Final = 96
"""At most how many bytes a chunk's place adds to its message's metadata."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """How a producer cuts messages that are too large for one entry.

    Attributes:
        chunk_bytes: the largest chunk, in bytes, 1 or more; 0: as large as the service takes. The
            service's own limit holds in any case. (Pulsar's chunkMaxMessageSize.)
    """

    chunk_bytes: int = 0

    def __post_init__(self) -> None:
        if self.chunk_bytes < 0:
            raise ValueError("chunk_bytes is not negative")

    def size(self, max_message_bytes: int) -> int:
        """How large a chunk is, where the service takes entries of `max_message_bytes`."""
        return min(self.chunk_bytes or max_message_bytes, max_message_bytes)


def chunks_of(body_bytes: int, chunk_bytes: int) -> int:
    """How many chunks a payload makes; 1: it is not cut."""
    return max(1, -(-body_bytes // chunk_bytes))


class LargeMessage:
    """A message that is being published in chunks. Their entries are made when they are sent, and
    not kept: only the payload is held in memory.

    Attributes:
        message: whose payload it is.
        chunk_bytes: how large its chunks are, the last one excepted.
        settled: whether its outcome is known.
        broken: whether this attempt cannot go on.
        duplicate: whether the last chunk was in the log before.
    """

    def __init__(
        self,
        message: OutgoingMessage,
        metadata: entry_pb2.EntryMetadata,
        body: bytes,
        chunk_bytes: int,
    ) -> None:
        self.message = message
        self.settled = False
        self._metadata = metadata
        self._body = body
        metadata.total_chunk_msg_size = len(body)
        metadata.message_crc32c = google_crc32c.value(body)
        self.start_again(chunk_bytes)

    def start_again(self, chunk_bytes: int) -> None:
        """Begin a new attempt, of which nothing is stored."""
        self.chunk_bytes = chunk_bytes
        self.broken = False
        self.duplicate = False
        self._first: Position | None = None
        self._last: Position | None = None
        self._unanswered = self.num_chunks
        self._metadata.uuid = uuid.uuid4().hex
        self._metadata.num_chunks_from_msg = self.num_chunks

    @property
    def num_chunks(self) -> int:
        """How many chunks there are."""
        return chunks_of(len(self._body), self.chunk_bytes)

    def size_bytes(self, chunk_id: int) -> int:
        """What a chunk counts against windows, at most."""
        left = len(self._body) - chunk_id * self.chunk_bytes
        return min(self.chunk_bytes, left) + self._metadata.ByteSize() + PLACE_BYTES

    def fill(self, entry: pb.Entry, chunk_id: int) -> None:
        """Make this a chunk's entry."""
        first = chunk_id * self.chunk_bytes
        chunk = self._body[first : first + self.chunk_bytes]
        entry.metadata.CopyFrom(self._metadata)
        entry.metadata.chunk_id = chunk_id
        entry.metadata.payload_crc32c = google_crc32c.value(chunk)
        entry.payload = chunk

    def stored(self, chunk_id: int, position: Position, *, duplicate: bool) -> None:
        """A chunk is in the log; was it there already?"""
        self._unanswered -= 1
        if chunk_id == 0:
            self._first = position
        if (span := self.message.span) is not None:
            where = str(MessageId(*position))
            span.add_event(
                names.CHUNK, {names.CHUNK_ID: chunk_id, names.MESSAGING_MESSAGE_ID: where}
            )
        if chunk_id == self.num_chunks - 1:
            self._last, self.duplicate = position, duplicate

    @property
    def message_id(self) -> MessageId | None:
        """Where the message is, once all its chunks are stored."""
        if self._unanswered or self._first is None or self._last is None:
            return None
        return ChunkMessageId(MessageId(*self._first), MessageId(*self._last))
