"""Chunks of messages that are incomplete, and the deliveries that carry them.

The assembler says which chunks make a message, or never will; the deliveries of those have to be
settled, as one. So each chunk that is held is known twice: to the assembler by its place, and here,
with what settles it. What comes of a chunk is a list of effects, and each chunk is in one of them:

    Whole      all chunks of a message are here: they are one unit now
    LetGo      chunks that make no message here
    GoesBack   chunks that the service takes back
    Damaged    a chunk that is not what was published

Chunks go back when one of their attempt was revoked or moved, or when there is no room for them:
the service has the attempt delivered anew, from its first chunk. What it had sent of it before it
heard of that goes back as well, so an attempt is returning until its first chunk comes again, or
all of that is answered.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple, cast

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._assembler import (
    Assembled,
    Assembler,
    AssemblyLimits,
    Dropped,
    DropReason,
    Headless,
    Piece,
)
from seqgate.client._codec import checked_payload
from seqgate.errors import SeqgateError
from seqgate.types import Position

Attempt = tuple[str, str]
"""An attempt to publish a large message: the producer's name, and the attempt's uuid."""


class Whole(NamedTuple):
    """A message is complete: its deliveries, where it begins, and its chunks end to end."""

    deliveries: tuple[int, ...]
    first: Position
    body: bytes


class LetGo(NamedTuple):
    """Chunks make no message here, and are to be settled: their deliveries, their key, and where
    they begin. What was dropped may be more; of that nothing is held."""

    dropped: Dropped
    deliveries: tuple[int, ...]
    key: bytes
    first: Position


class GoesBack(NamedTuple):
    """Chunks go back: to be told to `note_returned` when that is answered. Those that there is no
    room for come again, with the rest of their message, when the others are done."""

    attempt: Attempt
    deliveries: tuple[int, ...]
    key: bytes
    first: Position
    no_room: bool = False


class Damaged(NamedTuple):
    """A chunk is not what was published. It is held no more; the rest of its attempt goes back."""

    error: SeqgateError


Effect = Whole | LetGo | GoesBack | Damaged


class _Held(NamedTuple):
    """A chunk in the assembly."""

    delivery: int
    attempt: Attempt
    key: bytes


class HeldChunks:
    """See the module. Mutable, synchronous, one owner."""

    def __init__(self, limits: AssemblyLimits) -> None:
        self.dropped: Final = Counter[DropReason]()
        """How many chunks were let go, by reason."""
        self._assembler = Assembler(limits, evicts_newest=True)
        self._chunks: dict[Position, _Held] = {}
        self._positions: dict[int, Position] = {}  # of the same, by delivery
        self._unanswered: Counter[Attempt] = Counter()  # how many answers are to come
        self._returning: set[Attempt] = set()  # which of these are not delivered anew yet
        self._no_room: set[Attempt] = set()  # which come again when it is their turn

    @property
    def deliveries(self) -> Collection[int]:
        """The deliveries that carry what is held."""
        return self._positions.keys()

    def add(
        self, delivery: pb.Delivery, position: Position, key: bytes, now_ms: int
    ) -> list[Effect]:
        """A chunk has come."""
        number = delivery.delivery
        attempt = (delivery.metadata.producer_name, delivery.metadata.uuid)
        held = _Held(number, attempt, key)
        if attempt in self._returning:
            if delivery.metadata.chunk_id:
                return [self._send_back(attempt, {position: held})]
            self._returning.discard(attempt)  # what was sent before has come before
            self._no_room.discard(attempt)
        self._chunks[position] = held
        self._positions[number] = position
        try:
            piece = _piece(delivery, position)
        except SeqgateError as damage:
            return [*self._abandon(attempt, gone=(number,)), Damaged(damage)]
        added = self._assembler.add(piece, now_ms)
        effects: list[Effect] = [self._drop(dropped) for dropped in added.dropped]
        match added.outcome:
            case Assembled(_, _, _, body, positions):
                numbers = tuple(self._take_out(each).delivery for each in positions)
                effects.append(Whole(numbers, positions[0], body))
            case Headless():
                lost = (piece.producer, piece.sequence_id, piece.uuid, (position,))
                effects.append(self._drop(Dropped(DropReason.HEADLESS, *lost)))
        return effects

    def abort(self, producer: str, uuid: str) -> list[Effect]:
        """The log says that an attempt will not be finished."""
        dropped = self._assembler.abort(producer, uuid)
        return [] if dropped is None else [self._drop(dropped)]

    def expire(self, now_ms: int) -> list[Effect]:
        """Let go of messages that were incomplete for too long."""
        return [self._drop(dropped) for dropped in self._assembler.expire(now_ms)]

    def take_back(self, delivery: int, *, gone: Iterable[int] = ()) -> list[Effect]:
        """The service wants a chunk back. All of its attempt goes, but for deliveries that are gone
        already."""
        position = self._positions.get(delivery)
        if position is None:
            return []
        return self._abandon(self._chunks[position].attempt, gone=gone)

    def note_returned(self, attempt: Attempt) -> None:
        """That chunks of an attempt went back is answered."""
        self._unanswered[attempt] -= 1
        if self._unanswered[attempt] <= 0:
            del self._unanswered[attempt]
            self._returning.discard(attempt)
            self._no_room.discard(attempt)

    def send_back(self, chunks: LetGo) -> GoesBack:
        """Chunks that were let go for want of room, or of time, go back."""
        attempt = (chunks.dropped.producer, chunks.dropped.uuid)
        self._note_returning(attempt)
        self._no_room.add(attempt)
        return GoesBack(attempt, chunks.deliveries, chunks.key, chunks.first, no_room=True)

    def clear(self) -> None:
        """Forget everything but the count."""
        self._assembler.clear()
        self._chunks.clear()
        self._positions.clear()
        self._unanswered.clear()
        self._returning.clear()
        self._no_room.clear()

    def _drop(self, dropped: Dropped) -> LetGo:
        held = [self._take_out(each) for each in dropped.positions if each in self._chunks]
        self.dropped[dropped.reason] += len(dropped.positions)
        key = held[0].key if held else b""
        numbers = tuple(each.delivery for each in held)
        return LetGo(dropped, numbers, key, min(dropped.positions))

    def _abandon(self, attempt: Attempt, *, gone: Iterable[int]) -> list[Effect]:
        """Forget the chunks of an attempt, and return those that are not gone already."""
        self._assembler.abort(*attempt)  # it is begun anew: this is no drop
        positions = [each for each, held in self._chunks.items() if held.attempt == attempt]
        dead = set(gone)
        held = {position: self._take_out(position) for position in positions}
        left = {position: each for position, each in held.items() if each.delivery not in dead}
        return [self._send_back(attempt, left)] if left else []

    def _send_back(self, attempt: Attempt, chunks: dict[Position, _Held]) -> GoesBack:
        self._note_returning(attempt)
        first = min(chunks)
        numbers = tuple(each.delivery for each in chunks.values())
        no_room = attempt in self._no_room
        return GoesBack(attempt, numbers, chunks[first].key, first, no_room)

    def _note_returning(self, attempt: Attempt) -> None:
        self._unanswered[attempt] += 1
        self._returning.add(attempt)

    def _take_out(self, position: Position) -> _Held:
        held = self._chunks.pop(position)
        del self._positions[held.delivery]
        return held


def _piece(delivery: pb.Delivery, position: Position) -> Piece:
    """A chunk, as the assembler takes it.

    Raises:
        CorruptMessageError: it is not what was published.
    """
    metadata = delivery.metadata
    payload = checked_payload(cast("ledger_pb2.StoredEntry", delivery))
    return Piece(
        position,
        metadata.producer_name,
        metadata.sequence_id,
        metadata.uuid,
        metadata.chunk_id,
        metadata.num_chunks_from_msg,
        metadata.total_chunk_msg_size,
        metadata.message_crc32c if metadata.HasField("message_crc32c") else None,
        payload,
    )
