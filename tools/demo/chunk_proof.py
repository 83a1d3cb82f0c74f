"""Did crashes interrupt large messages, and did no reader get what they left?

The log tells, entry by entry, which attempts there were to publish a message, how far each came,
and which were aborted: an attempt that a crash interrupts leaves its first chunks behind, and none
of these may ever reach a reader. Proof compares the messages that did with the data set.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import Dropped, DropReason, Message
from seqgate.types import Position
from tools.demo.line import Standing
from tools.demo.proof import Findings, Noted


@dataclass(slots=True)
class LargeFindings(Noted):
    """What was found. The last two should be 0, the two before them should not, and as many should
    be read as were sent. `chunks` counts all that the log has."""

    large_messages_sent: int = 0
    large_messages_read: int = 0
    large_messages_chunks: int = 0
    large_message_crashes: int = 0
    large_message_attempts_aborted: int = 0
    orphan_chunks_delivered: int = 0
    large_messages_wrong: int = 0

    @property
    def broken(self) -> int:
        """How many promises are broken; that crashes interrupt messages is one of them."""
        return (
            self.orphan_chunks_delivered
            + self.large_messages_wrong
            + (self.large_messages_read != self.large_messages_sent)
            + (self.large_message_crashes == 0)
            + (self.large_message_attempts_aborted == 0)
        )


@dataclass(slots=True)
class _Attempt:
    """An attempt to publish a message, by its producer's name and its uuid."""

    name: tuple[str, str]
    num_chunks: int = 0
    chunk_ids: list[int] = field(default_factory=list)
    aborted: bool = False
    reported: bool = False
    """A reader said that it left its chunks out."""

    @property
    def complete(self) -> bool:
        return len(self.chunk_ids) == self.num_chunks


class ChunkProof:
    """Collects evidence; `findings` judges it."""

    def __init__(self) -> None:
        self._attempts: dict[tuple[str, str], _Attempt] = {}
        self._attempt_at: dict[Position, _Attempt] = {}
        self._read: list[Position] = []
        self._crashes: list[list[Standing]] = []

    def see_crash(self, standing: Iterable[Standing]) -> None:
        """Something crashed while these attempts stood where they say."""
        self._crashes.append(list(standing))

    def see_entry(self, stored: pb.StoredEntry) -> None:
        """The log holds this, after what was seen before."""
        metadata = stored.metadata
        if stored.aborts:
            self._attempt(metadata.producer_name, stored.aborts).aborted = True
        if metadata.num_chunks_from_msg > 1:
            attempt = self._attempt(metadata.producer_name, metadata.uuid)
            attempt.chunk_ids.append(metadata.chunk_id)
            attempt.num_chunks = metadata.num_chunks_from_msg
            position = Position(stored.position.ledger_id, stored.position.entry_id)
            self._attempt_at[position] = attempt

    def see_message(self, message: Message) -> None:
        """A reader got this large message."""
        self._read.append(message.id.position)

    def see_dropped(self, dropped: Dropped) -> None:
        """A reader reported that it left these chunks out."""
        if dropped.reason is DropReason.ABORTED:
            self._attempt(dropped.producer, dropped.uuid).reported = True

    def findings(self, messages: Findings, sent: int) -> LargeFindings:
        """The verdict, once everything was seen.

        Args:
            messages: what was found of the messages themselves.
            sent: how many there should be.
        """
        attempts = self._attempts.values()
        found = LargeFindings(
            large_messages_sent=sent,
            large_messages_read=len(self._read),
            large_messages_chunks=len(self._attempt_at),
            large_message_crashes=sum(any(map(self._was_hit, each)) for each in self._crashes),
            large_message_attempts_aborted=sum(each.aborted for each in attempts),
            large_messages_wrong=messages.broken,
            examples=messages.examples,
        )
        for position in self._read:
            attempt = self._attempt_at.get(position)
            if attempt is not None and (attempt.aborted or not attempt.complete):
                found.note("orphan_chunks_delivered", f"{attempt.name} at {position}")
        for attempt in attempts:
            in_order = attempt.chunk_ids == list(range(len(attempt.chunk_ids)))
            if attempt.chunk_ids and (attempt.aborted == attempt.complete or not in_order):
                found.note("large_messages_wrong", str(attempt))
            if attempt.aborted != attempt.reported:
                found.note("large_messages_wrong", f"{attempt.name} aborted, or reported to be")
        return found

    def _attempt(self, producer: str, uuid: str) -> _Attempt:
        name = (producer, uuid)
        return self._attempts.setdefault(name, _Attempt(name))

    def _was_hit(self, standing: Standing) -> bool:
        """Whether the log agrees that the attempt was begun, and not complete."""
        attempt = self._attempt(standing.producer, standing.uuid)
        return 1 <= standing.chunks <= len(attempt.chunk_ids) and (
            standing.chunks < attempt.num_chunks
        )
