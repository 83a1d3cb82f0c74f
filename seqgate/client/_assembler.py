"""Assembles large messages from chunks.

A producer cuts a large message into chunks and publishes each as an entry of its own (PIP-37). A
uuid names the attempt to publish the message. Between two chunks of an attempt the log may hold
anything: plain messages, chunks of other attempts, copies of chunks of the same attempt.

    log    A0  B0  A1  plain  B1  A2        A has three chunks, B has two
    out                       B   A

The assembler takes a topic's chunks in log order, holds the chunks of each incomplete attempt (its
context), and returns each message with its last chunk.

No chunk is lost. Each is returned once: in a message, in a Dropped, or as a Headless; and chunks
held together are returned together, so that the owner can acknowledge or return them as one
(Pulsar's consumer leaves gaps here: apache/pulsar#21070, apache/pulsar#21101). Only a redelivery,
the entry at a position already held, is not returned again.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

import google_crc32c

from seqgate.client._arguments import COUNT_MAX, invalid, settle, whole
from seqgate.types import Position

MESSAGES_MAX: Final = 1_000
"""The most incomplete messages: each chunk is checked against all."""

CHUNKS_MAX: Final = 2**31 - 1
"""The most chunks of a message: Pulsar counts them in a signed 32-bit integer."""


@dataclass(frozen=True, slots=True)
class AssemblyLimits:
    """Limits of an assembler. The body of a complete message is neither held nor counted.

    Attributes:
        messages_max: the most incomplete messages, 1 to 1,000; each chunk is checked against all.
            (Pulsar's maxPendingChunkedMessage: 10.)
        bytes_max: the most bytes of their payloads together, 1 or more.
        chunks_max: the most chunks that a message may declare, 1 to 2^31 - 1.
        message_bytes_max: the most bytes that a message may declare, 1 to bytes_max.
        expiry_ms: how long a message may be incomplete after its chunk 0 arrived, in milliseconds;
            0: no limit. (Pulsar's expireTimeOfIncompleteChunkedMessage: one minute.)

    Raises:
        InvalidRequestError: one is no whole number, or out of its bounds.
    """

    messages_max: int = 100
    bytes_max: int = 512 * 1024 * 1024
    chunks_max: int = 10_000
    message_bytes_max: int = 512 * 1024 * 1024
    expiry_ms: int = 3_600_000

    def __post_init__(self) -> None:
        settle(
            self,
            messages_max=whole("messages_max", self.messages_max, 1, MESSAGES_MAX),
            bytes_max=whole("bytes_max", self.bytes_max, 1, COUNT_MAX, "bytes"),
            chunks_max=whole("chunks_max", self.chunks_max, 1, CHUNKS_MAX),
            message_bytes_max=whole("message_bytes_max", self.message_bytes_max, 1),
            expiry_ms=whole("expiry_ms", self.expiry_ms, 0, COUNT_MAX, "milliseconds"),
        )
        if self.message_bytes_max > self.bytes_max:
            invalid("message_bytes_max must be 1 to bytes_max")


class Piece(NamedTuple):
    """One chunk in the log.

    Attributes:
        producer, sequence_id: identify its message.
        uuid: the attempt to publish the message.
        chunk_id: its number, 0 to num_chunks - 1.
        num_chunks: the number of the message's chunks, 1 or more.
        total_bytes: the size of all chunks together.
        crc32c: CRC-32C of all chunks end to end; None: not known.
    """

    position: Position
    producer: str
    sequence_id: int
    uuid: str
    chunk_id: int
    num_chunks: int
    total_bytes: int
    crc32c: int | None
    payload: bytes

    @property
    def is_last(self) -> bool:
        return self.chunk_id == self.num_chunks - 1

    @property
    def attempt(self) -> tuple[str, str]:
        return self.producer, self.uuid

    @property
    def message(self) -> tuple[str, int]:
        return self.producer, self.sequence_id

    @property
    def layout(self) -> tuple[int, int, int, int | None]:
        """The fields that all chunks of an attempt share; a re-chunked message differs in them."""
        return self.sequence_id, self.num_chunks, self.total_bytes, self.crc32c


class DropReason(Enum):
    """Why chunks make no message.

    Four are final in a log with deduplication: ABORTED, RESTARTED, DUPLICATE and CORRUPT chunks
    never make a message, for any reader; acknowledge them, and report CORRUPT ones. The others mean
    "not held here": the message of EVICTED, EXPIRED, TOO_LARGE, HEADLESS and GAP chunks may be
    whole in the log, and can be read again.
    """

    ABORTED = auto()  # ended by the log, or by another attempt at the message
    RESTARTED = auto()  # the same attempt started again (apache/pulsar#21070)
    DUPLICATE = auto()  # the same chunk is held, from another position (apache/pulsar#20948)
    CORRUPT = auto()  # the size or checksum differs from the declared one
    EVICTED = auto()  # other messages needed the room
    EXPIRED = auto()  # incomplete for too long (apache/pulsar#17110)
    TOO_LARGE = auto()  # the message declares more bytes or chunks than allowed
    HEADLESS = auto()  # the chunks before it are not held
    GAP = auto()  # a chunk in between is missing, or the last one has another layout


class Dropped(NamedTuple):
    """Chunks of one attempt that are dropped together, in the order in which they were added."""

    reason: DropReason
    producer: str
    sequence_id: int
    uuid: str
    positions: tuple[Position, ...]


class Assembled(NamedTuple):
    """A complete message: its chunks end to end, and their positions in order."""

    producer: str
    sequence_id: int
    uuid: str
    body: bytes
    positions: tuple[Position, ...]


class Headless(NamedTuple):
    """The last chunk of a message whose other chunks are not held: reading began after them, or
    they were dropped. The owner may fetch the whole message by other means. Not counted as
    dropped."""

    piece: Piece

    @property
    def dropped(self) -> Dropped:
        piece = self.piece
        positions = (piece.position,)
        return Dropped(
            DropReason.HEADLESS, piece.producer, piece.sequence_id, piece.uuid, positions
        )


class Added(NamedTuple):
    """The result of adding a chunk: dropped chunks, and the message if the chunk was its last."""

    dropped: tuple[Dropped, ...] = ()
    outcome: Assembled | Headless | None = None


@dataclass(slots=True)
class _Context:
    """The held chunks of one attempt: from 0 on, without a gap."""

    first: Piece
    started_ms: int
    positions: list[Position] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    size_bytes: int = 0
    crc32c: int = 0

    def append(self, piece: Piece) -> None:
        assert piece.chunk_id == len(self.positions)
        self.positions.append(piece.position)
        self.payloads.append(piece.payload)
        self.size_bytes += len(piece.payload)
        if piece.crc32c is not None:
            self.crc32c = google_crc32c.extend(self.crc32c, piece.payload)

    @property
    def is_sound(self) -> bool:
        """Whether the size and checksum so far match what the chunks declare."""
        claimed = self.first
        if len(self.positions) < claimed.num_chunks:
            return self.size_bytes <= claimed.total_bytes
        return self.size_bytes == claimed.total_bytes and claimed.crc32c in (None, self.crc32c)


class Assembler:
    """Assembles the large messages of one topic.

    Sizes are computed on each read: a separate counter can drift from the contexts (Pulsar's
    counter of incomplete messages does, and drops messages too early).
    """

    def __init__(self, limits: AssemblyLimits, *, evicts_newest: bool = False) -> None:
        """`evicts_newest` selects the message to drop when there is no room. True: the newest but
        the one that has just grown, for an owner to whom dropped chunks are redelivered when others
        are complete. False: the oldest, for an owner that does not get them again."""
        self._evicts_newest = evicts_newest
        self.counts: Final = Counter[DropReason]()
        """Dropped chunks, by reason."""
        self._limits = limits
        # By attempt, in the order in which they started. An OrderedDict finds its oldest item in
        # constant time; a dict scans the slots of all items removed before it.
        self._contexts: OrderedDict[tuple[str, str], _Context] = OrderedDict()
        # By message: a message has one attempt at a time.
        self._by_message: dict[tuple[str, int], _Context] = {}

    @property
    def messages(self) -> int:
        """The number of incomplete messages."""
        return len(self._contexts)

    @property
    def bytes_held(self) -> int:
        """The bytes of their payloads together."""
        return sum(context.size_bytes for context in self._contexts.values())

    def add(self, piece: Piece, now_ms: int) -> Added:
        """Take a chunk, the next one in the log or a redelivered one. If its entry aborts an
        attempt, call `abort` first. `now_ms` is of a monotonic clock."""
        assert 0 <= piece.chunk_id < piece.num_chunks
        expired = self.expire(now_ms)
        added = self._start(piece, now_ms) if piece.chunk_id == 0 else self._continue(piece)
        return added._replace(dropped=expired + added.dropped) if expired else added

    def abort(self, producer: str, uuid: str, at: Position | None = None) -> Dropped | None:
        """Drop an attempt that an entry at this position ends; None: wherever it began. Returns its
        chunks, if any are held. If it began again after the entry, which may come late or be
        redelivered, it goes on."""
        context = self._contexts.get((producer, uuid))
        if context is None or (at is not None and context.first.position > at):
            return None
        return self._end(DropReason.ABORTED, context)

    def expire(self, now_ms: int) -> tuple[Dropped, ...]:
        """Drop the messages whose chunk 0 arrived more than expiry_ms ago."""
        expired = []
        while self._limits.expiry_ms and self._contexts:
            oldest = self._oldest()
            if now_ms - oldest.started_ms <= self._limits.expiry_ms:
                break
            expired.append(self._end(DropReason.EXPIRED, oldest))
        return tuple(expired)

    def clear(self) -> None:
        """Forget all chunks without dropping them: reading continues elsewhere."""
        self._contexts.clear()
        self._by_message.clear()

    def _start(self, piece: Piece, now_ms: int) -> Added:
        rivals = self._rivals(piece)
        for reason, held in rivals:
            if piece.position < held.first.position:
                # A redelivery of a chunk that `held` replaced must not end the newer attempt.
                return self._refuse(reason, piece)
        ended: list[Dropped] = []
        for reason, held in rivals:
            if piece.position == held.first.position:
                self._remove(held)  # the whole attempt is redelivered
            else:
                ended.append(self._end(reason, held))
        added = self._open(piece, now_ms)
        return Added((*ended, *added.dropped), added.outcome)

    def _rivals(self, piece: Piece) -> list[tuple[DropReason, _Context]]:
        """The contexts that a new chunk 0 ends: usually at most one."""
        same_attempt = self._contexts.get(piece.attempt)
        same_message = self._by_message.get(piece.message)
        rivals = []
        if same_attempt is not None:
            rivals.append((DropReason.RESTARTED, same_attempt))
        if same_message is not None and same_message is not same_attempt:
            rivals.append((DropReason.ABORTED, same_message))
        return rivals

    def _open(self, piece: Piece, now_ms: int) -> Added:
        if self._is_too_large(piece):
            return self._refuse(DropReason.TOO_LARGE, piece)
        context = _Context(piece, now_ms)
        self._contexts[piece.attempt] = self._by_message[piece.message] = context
        return self._append(context, piece)

    def _continue(self, piece: Piece) -> Added:
        context = self._contexts.get(piece.attempt)
        if context is None:
            return self._without_context(piece)
        if piece.position < context.first.position:
            return self._refuse(DropReason.RESTARTED, piece)
        expected = len(context.positions)
        if piece.chunk_id > expected or piece.layout != context.first.layout:
            context.positions.append(piece.position)
            return Added((self._end(DropReason.GAP, context),))
        if piece.chunk_id == expected:
            return self._append(context, piece)
        if piece.position == context.positions[piece.chunk_id]:
            return Added()
        return self._refuse(DropReason.DUPLICATE, piece)

    def _without_context(self, piece: Piece) -> Added:
        # Each chunk declares its message's size, so there is no need to remember refused messages.
        if self._is_too_large(piece):
            return self._refuse(DropReason.TOO_LARGE, piece)
        if piece.is_last:
            return Added(outcome=Headless(piece))
        return self._refuse(DropReason.HEADLESS, piece)

    def _append(self, context: _Context, piece: Piece) -> Added:
        context.append(piece)
        if not context.is_sound:
            return Added((self._end(DropReason.CORRUPT, context),))
        if not piece.is_last:
            return Added(self._make_room(context))
        self._remove(context)
        body, positions = b"".join(context.payloads), tuple(context.positions)
        return Added(
            outcome=Assembled(piece.producer, piece.sequence_id, piece.uuid, body, positions)
        )

    def _make_room(self, grown: _Context) -> tuple[Dropped, ...]:
        """Drop messages until the limits hold. If the oldest are dropped, the one that has just
        grown may be among them: newer ones are more likely to be completed."""
        evicted = []
        excess_bytes = self.bytes_held - self._limits.bytes_max
        while excess_bytes > 0 or len(self._contexts) > self._limits.messages_max:
            context = self._newest_beside(grown) if self._evicts_newest else self._oldest()
            excess_bytes -= context.size_bytes
            evicted.append(self._end(DropReason.EVICTED, context))
        return tuple(evicted)

    def _is_too_large(self, piece: Piece) -> bool:
        limits = self._limits
        return piece.total_bytes > limits.message_bytes_max or piece.num_chunks > limits.chunks_max

    def _newest_beside(self, grown: _Context) -> _Context:
        """The newest other one. It exists: a single message never exceeds the limits."""
        return next(each for each in reversed(self._contexts.values()) if each is not grown)

    def _oldest(self) -> _Context:
        return next(iter(self._contexts.values()))

    def _end(self, reason: DropReason, context: _Context) -> Dropped:
        self._remove(context)
        return self._drop(reason, context.first, context.positions)

    def _remove(self, context: _Context) -> None:
        del self._contexts[context.first.attempt]
        del self._by_message[context.first.message]

    def _refuse(self, reason: DropReason, piece: Piece) -> Added:
        return Added((self._drop(reason, piece, [piece.position]),))

    def _drop(self, reason: DropReason, of: Piece, positions: list[Position]) -> Dropped:
        self.counts[reason] += len(positions)
        return Dropped(reason, of.producer, of.sequence_id, of.uuid, tuple(positions))
