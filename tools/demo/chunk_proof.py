"""Did crashes fall into the middle of large messages, and did no reader get what they left?

The log tells, entry by entry, how many attempts there were to publish a message, how far each came,
and which were ended: an attempt that a crash ends leaves its first chunks behind, and none of these
may ever reach a reader. That the messages which did are those of the data set is Proof's matter.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import Dropped, DropReason, Message
from seqgate.types import Position
from tools.demo.line import Standing
from tools.demo.proof import Findings, Noted

Attempt = tuple[str, str]
"""A producer's name, and a uuid."""


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
        """How many promises are broken; that crashes fall into messages is one of them."""
        return (
            self.orphan_chunks_delivered
            + self.large_messages_wrong
            + (self.large_messages_read != self.large_messages_sent)
            + (self.large_message_crashes == 0)
            + (self.large_message_attempts_aborted == 0)
        )


class ChunkProof:
    """Collects evidence; `findings` judges it."""

    def __init__(self) -> None:
        self._attempts: dict[Attempt, list[int]] = {}
        self._num_chunks: dict[Attempt, int] = {}
        self._attempt_at: dict[Position, Attempt] = {}
        self._aborted: set[Attempt] = set()
        self._told: set[Attempt] = set()
        self._read: list[Position] = []
        self._crashes: list[list[Standing]] = []

    def see_crash(self, standing: Iterable[Standing]) -> None:
        """Something crashed while these attempts stood where they say."""
        self._crashes.append(list(standing))

    def see_entry(self, stored: pb.StoredEntry) -> None:
        """The log holds this, after what was seen before."""
        metadata = stored.metadata
        if stored.aborts:
            self._aborted.add((metadata.producer_name, stored.aborts))
        if metadata.num_chunks_from_msg > 1:
            attempt = (metadata.producer_name, metadata.uuid)
            self._attempts.setdefault(attempt, []).append(metadata.chunk_id)
            self._num_chunks[attempt] = metadata.num_chunks_from_msg
            position = Position(stored.position.ledger_id, stored.position.entry_id)
            self._attempt_at[position] = attempt

    def see_message(self, message: Message) -> None:
        """A reader got this large message."""
        self._read.append(message.id.position)

    def see_dropped(self, dropped: Dropped) -> None:
        """A reader told that it left these chunks out."""
        if dropped.reason is DropReason.ABORTED:
            self._told.add((dropped.producer, dropped.uuid))

    def findings(self, messages: Findings, sent: int) -> LargeFindings:
        """What it comes to, once everything was seen.

        Args:
            messages: what was found of the messages themselves.
            sent: how many there should be.
        """
        found = LargeFindings(
            large_messages_sent=sent,
            large_messages_read=len(self._read),
            large_messages_chunks=len(self._attempt_at),
            large_message_crashes=sum(any(map(self._was_hit, each)) for each in self._crashes),
            large_message_attempts_aborted=len(self._aborted),
            large_messages_wrong=messages.broken,
            examples=messages.examples,
        )
        for position in self._read:
            attempt = self._attempt_at.get(position)
            if attempt is not None and not self._is_whole(attempt):
                found.note("orphan_chunks_delivered", f"{attempt} at {position}")
        for attempt, chunk_ids in self._attempts.items():
            ended = attempt in self._aborted
            if ended == self._is_complete(attempt) or chunk_ids != list(range(len(chunk_ids))):
                found.note("large_messages_wrong", f"{attempt} aborted {ended}: {chunk_ids}")
        for attempt in self._aborted ^ self._told:
            found.note("large_messages_wrong", f"{attempt} aborted, or told to be")
        return found

    def _is_complete(self, attempt: Attempt) -> bool:
        return len(self._attempts[attempt]) == self._num_chunks[attempt]

    def _is_whole(self, attempt: Attempt) -> bool:
        return self._is_complete(attempt) and attempt not in self._aborted

    def _was_hit(self, standing: Standing) -> bool:
        """Whether the log agrees that the attempt was begun, and not complete."""
        attempt = (standing.producer, standing.uuid)
        stored = self._attempts.get(attempt, [])
        return standing.chunks in range(1, len(stored) + 1) and (
            standing.chunks < self._num_chunks[attempt]
        )
