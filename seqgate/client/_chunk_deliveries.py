"""Chunks of incomplete messages, and the deliveries that carry them.

The assembler identifies chunks by position, and decides which ones make a message, or never will;
the service identifies them by delivery. This module maps between the two: a chunk leads to a list
of effects, and each delivery is in exactly one of them:

    Complete      all chunks of a message are here: they are one unit now
    Damaged       a chunk does not match its checksum
    Acknowledge   chunks that make no message, or whose message is not wanted
    Refuse        chunks whose message this consumer cannot take: it counts as a failure
    GiveBack      chunks to be redelivered that did not fail

Chunks are given back when a chunk of their attempt was revoked or moved, or when the attempt was
evicted or expired: the service redelivers it from its first chunk. Its chunks that were already on
their way are given back as well. So an attempt is *returning* until its first chunk arrives again,
or everything given back is answered.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._assembler import (
    Assembled,
    Assembler,
    AssemblyLimits,
    Dropped,
    DropReason,
    Headless,
)
from seqgate.client._codec import piece_of
from seqgate.client._subscribing import Incomplete
from seqgate.errors import SeqgateError
from seqgate.types import Position

Attempt = tuple[str, str]
"""One attempt at a large message: the producer's name, and the attempt's uuid."""

_NEVER_COMPLETE: Final = frozenset(
    (DropReason.ABORTED, DropReason.RESTARTED, DropReason.DUPLICATE, DropReason.CORRUPT)
)
"""Reasons to acknowledge chunks: they never make a message."""

_NOT_NOW: Final = frozenset((DropReason.EVICTED, DropReason.EXPIRED))
"""Reasons to give chunks back: they are redelivered when it is their message's turn."""


class Complete(NamedTuple):
    """A complete message: its deliveries, where it begins, and its chunks end to end."""

    deliveries: tuple[int, ...]
    first: Position
    body: bytes


class Damaged(NamedTuple):
    """The chunk that just arrived is damaged. The rest of its attempt is given back."""

    error: SeqgateError


class Acknowledge(NamedTuple):
    deliveries: tuple[int, ...]


class Refuse(NamedTuple):
    """Chunks to refuse, their key, where they begin, and why."""

    deliveries: tuple[int, ...]
    key: bytes
    first: Position
    reason: str


class GiveBack(NamedTuple):
    """Chunks to give back; report the answer to `given_back`. With `no_room`, the service
    redelivers them, with the rest of their message, when other messages are complete."""

    deliveries: tuple[int, ...]
    key: bytes
    first: Position
    attempt: Attempt
    no_room: bool


Effect = Complete | Damaged | Acknowledge | Refuse | GiveBack


class _Chunk(NamedTuple):
    delivery: int
    attempt: Attempt
    key: bytes


class ChunkDeliveries:
    """See the module. Mutable, synchronous, one owner."""

    def __init__(self, limits: AssemblyLimits, incomplete: Incomplete) -> None:
        self.counts: Final = Counter[DropReason]()
        """Dropped chunks, by reason."""
        self._assembler = Assembler(limits, evicts_newest=True)
        self._incomplete = incomplete
        self._chunks: dict[Position, _Chunk] = {}
        self._positions: dict[int, Position] = {}  # of the same chunks, by delivery
        self._unanswered: Counter[Attempt] = Counter()  # GiveBacks without an answer
        self._returning: set[Attempt] = set()
        self._no_room: set[Attempt] = set()  # returning attempts that wait for others
        self._reports: list[Dropped] = []

    @property
    def deliveries(self) -> Collection[int]:
        return self._positions.keys()

    def take_dropped(self) -> list[Dropped]:
        """The chunks dropped since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def add(
        self,
        number: int,
        entry: ledger_pb2.StoredEntry,
        position: Position,
        key: bytes,
        now_ms: int,
    ) -> list[Effect]:
        attempt = (entry.metadata.producer_name, entry.metadata.uuid)
        chunk = _Chunk(number, attempt, key)
        if attempt in self._returning:
            if entry.metadata.chunk_id:
                return [self._give_back(attempt, {position: chunk})]
            self._returning.discard(attempt)  # chunks arrive in the order in which they were sent
            self._no_room.discard(attempt)
        self._chunks[position] = chunk
        self._positions[number] = position
        try:
            piece = piece_of(entry)
        except SeqgateError as damage:
            return [*self._abandon(attempt, gone=(number,)), Damaged(damage)]
        added = self._assembler.add(piece, now_ms)
        effects = self._drop(*added.dropped)
        match added.outcome:
            case Assembled(_, _, _, body, positions):
                numbers = tuple(self._take_out(each).delivery for each in positions)
                effects.append(Complete(numbers, positions[0], body))
            case Headless() as headless:
                effects += self._drop(headless.dropped)
        return effects

    def abort(self, producer: str, uuid: str, at: Position) -> list[Effect]:
        """An entry at this position has ended an attempt: drop its chunks."""
        dropped = self._assembler.abort(producer, uuid, at)
        return [] if dropped is None else self._drop(dropped)

    def expire(self, now_ms: int) -> list[Effect]:
        return self._drop(*self._assembler.expire(now_ms))

    def take_back(self, delivery: int, *, gone: Iterable[int] = ()) -> list[Effect]:
        """The service takes back a chunk: give back its whole attempt, except `gone` deliveries."""
        position = self._positions.get(delivery)
        if position is None:
            return []
        return self._abandon(self._chunks[position].attempt, gone=gone)

    def given_back(self, attempt: Attempt) -> None:
        """Count the answer to a GiveBack of an attempt."""
        self._unanswered[attempt] -= 1
        if self._unanswered[attempt] <= 0:
            del self._unanswered[attempt]
            self._returning.discard(attempt)
            self._no_room.discard(attempt)

    def clear(self) -> None:
        """Forget everything except the counts and unreported drops."""
        self._assembler.clear()
        self._chunks.clear()
        self._positions.clear()
        self._unanswered.clear()
        self._returning.clear()
        self._no_room.clear()

    def _drop(self, *dropped: Dropped) -> list[Effect]:
        effects: list[Effect] = []
        for each in dropped:
            self._reports.append(each)
            self.counts[each.reason] += len(each.positions)
            chunks = {
                position: self._take_out(position)
                for position in each.positions
                if position in self._chunks
            }
            if chunks:
                effects.append(self._settle(each, chunks))
        return effects

    def _settle(self, dropped: Dropped, chunks: dict[Position, _Chunk]) -> Effect:
        numbers = tuple(each.delivery for each in chunks.values())
        if dropped.reason in _NEVER_COMPLETE or self._incomplete is Incomplete.ACKNOWLEDGE:
            return Acknowledge(numbers)
        key, first = next(iter(chunks.values())).key, min(dropped.positions)
        if dropped.reason in _NOT_NOW:
            attempt = (dropped.producer, dropped.uuid)
            self._no_room.add(attempt)
            return self._returned(attempt, numbers, key, first)
        reason = f"a large message was not put together: {dropped.reason.name}"
        return Refuse(numbers, key, first, reason)

    def _abandon(self, attempt: Attempt, *, gone: Iterable[int]) -> list[Effect]:
        self._assembler.abort(*attempt)  # not a drop: it is redelivered
        positions = [each for each, chunk in self._chunks.items() if chunk.attempt == attempt]
        dead = set(gone)
        chunks = {position: self._take_out(position) for position in positions}
        left = {position: each for position, each in chunks.items() if each.delivery not in dead}
        return [self._give_back(attempt, left)] if left else []

    def _give_back(self, attempt: Attempt, chunks: dict[Position, _Chunk]) -> GiveBack:
        first = min(chunks)
        numbers = tuple(each.delivery for each in chunks.values())
        return self._returned(attempt, numbers, chunks[first].key, first)

    def _returned(
        self, attempt: Attempt, numbers: tuple[int, ...], key: bytes, first: Position
    ) -> GiveBack:
        self._unanswered[attempt] += 1
        self._returning.add(attempt)
        return GiveBack(numbers, key, first, attempt, attempt in self._no_room)

    def _take_out(self, position: Position) -> _Chunk:
        chunk = self._chunks.pop(position)
        del self._positions[chunk.delivery]
        return chunk
