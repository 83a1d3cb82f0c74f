"""Cuts large messages into chunks.

A message whose compressed payload exceeds an entry is cut into chunks, each published as an entry,
all under the message's sequence id (PIP-37). An *attempt* is one way of cutting it, under a unique
uuid. An attempt continues after a reconnection. If it cannot, because the service lacks earlier
chunks or now takes smaller entries only, the message starts again as a new attempt. Chunks of two
attempts are never assembled together.
"""

import uuid
from dataclasses import dataclass
from typing import Final

import google_crc32c

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client._arguments import settle, whole
from seqgate.client._codec import OutgoingMessage
from seqgate.message_id import ChunkMessageId, MessageId
from seqgate.telemetry import names
from seqgate.types import LARGE_MESSAGE_BYTES_MAX, Position

PLACE_BYTES: Final = 96
"""The most bytes that a chunk's number and checksum add to its message's metadata."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """How a producer cuts messages that are too large for one entry.

    Attributes:
        chunk_bytes: the largest chunk, in bytes, up to 2^31 - 1, the size of the largest message;
            0: the service's limit, which always applies. (Pulsar's chunkMaxMessageSize.)

    Raises:
        InvalidRequestError: it is no whole number, or out of its bounds.
    """

    chunk_bytes: int = 0

    def __post_init__(self) -> None:
        most = LARGE_MESSAGE_BYTES_MAX
        settle(self, chunk_bytes=whole("chunk_bytes", self.chunk_bytes, 0, most, "bytes"))

    def size(self, max_message_bytes: int) -> int:
        """The chunk size for a service that takes entries of `max_message_bytes`."""
        return min(self.chunk_bytes or max_message_bytes, max_message_bytes)


def chunks_of(body_bytes: int, chunk_bytes: int) -> int:
    """The number of chunks of a payload; 1: it is not cut."""
    return max(1, -(-body_bytes // chunk_bytes))


class LargeMessage:
    """A message being published in chunks. Entries are made when they are sent, and not kept: only
    the payload stays in memory.

    Attributes:
        message: the message of the payload.
        chunk_bytes: the size of its chunks; the last one may be smaller.
        resolved: whether its outcome is known.
        broken: whether this attempt cannot continue.
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
        self.resolved = False
        self._metadata = metadata
        self._body = body
        metadata.total_chunk_msg_size = len(body)
        metadata.message_crc32c = google_crc32c.value(body)
        self.start_again(chunk_bytes)

    def start_again(self, chunk_bytes: int) -> None:
        """Start a new attempt, of which nothing is stored."""
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
        return chunks_of(len(self._body), self.chunk_bytes)

    def size_bytes(self, chunk_id: int) -> int:
        """An upper bound of a chunk's size, for the window."""
        left = len(self._body) - chunk_id * self.chunk_bytes
        return min(self.chunk_bytes, left) + self._metadata.ByteSize() + PLACE_BYTES

    def fill(self, entry: pb.Entry, chunk_id: int) -> None:
        first = chunk_id * self.chunk_bytes
        chunk = self._body[first : first + self.chunk_bytes]
        entry.metadata.CopyFrom(self._metadata)
        entry.metadata.chunk_id = chunk_id
        entry.metadata.payload_crc32c = google_crc32c.value(chunk)
        entry.payload = chunk

    def stored(self, chunk_id: int, position: Position, *, duplicate: bool) -> None:
        """Record that a chunk is in the log; `duplicate`: it was there before."""
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
        """The message's id, once all its chunks are stored."""
        if self._unanswered or self._first is None or self._last is None:
            return None
        return ChunkMessageId(MessageId(*self._first), MessageId(*self._last))
