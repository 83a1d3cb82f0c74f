"""What is settled together, and what was asked for.

A unit is an entry, which may be a batch, or all chunks of a large message: the service settles it
under one number, or under one for each chunk. A unit is live until it is settled, refused,
returned, or revoked. Each of its messages is a bit, the one of its index in the batch, or bit 0:

    unacked    those that are not acknowledged durably
    asked      those whose acknowledgement was asked for, answered or not: they are not handed out
    waiting    how many are not handed out; 0 when the unit is dead

A ticket is what somebody asked for, until its last answer is here. It counts answers, and changes
nothing itself: what follows from it is up to whoever asked.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, cast

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._codec import decode_fields, decode_large_fields
from seqgate.client._received import Gap, Received, Token
from seqgate.client._subscribing import position_of
from seqgate.errors import SeqgateError
from seqgate.types import Position


@dataclass(slots=True, eq=False)
class Unit:
    """What is settled together.

    Attributes:
        deliveries: the numbers: one, or of a large message one for each chunk.
        first, last: where it begins and ends.
        source: its (last) entry; body: of a large message, all chunks end to end.
        messages: those that are not handed out, once they are decoded, the first one last.
        damage: why it cannot be handed out.
        renewed_ms: when its time-out began anew.
        tickets: of acknowledgements that are not answered, by their bits.
    """

    deliveries: tuple[int, ...]
    first: Position
    last: Position
    key: bytes
    source: pb.Delivery
    body: bytes | None
    unacked: int
    waiting: int
    size_bytes: int
    renewed_ms: int
    asked: int = 0
    is_live: bool = True
    is_begun: bool = False
    messages: list[Received] | None = None
    damage: SeqgateError | None = None
    tickets: "dict[int, Ticket]" = field(default_factory=dict)

    @property
    def all_bits(self) -> int:
        """The bits of all messages, acknowledged or not."""
        return (1 << messages_in(self.source)) - 1

    @property
    def is_between(self) -> bool:
        """Whether something of it waits, and all that was handed out of it is acknowledged."""
        if not self.waiting or self.messages is None:
            return False
        waiting = 0
        for message in self.messages:
            waiting |= message.token.bit
        return not self.unacked & ~self.asked & ~waiting

    def decode(self, topic: str, epoch: int) -> list[Received]:
        """Make those messages that are not acknowledged, the first one last.

        Raises:
            CorruptMessageError: the unit is damaged.
        """
        if self.damage is not None:
            raise self.damage
        source = self.source
        stored = cast("ledger_pb2.StoredEntry", source)  # it has the same names for what is read
        if self.body is None:
            messages = decode_fields(topic, stored)
        else:
            messages = [decode_large_fields(topic, stored, self.body, self.first)]
            self.body = None
        gap = None
        if source.HasField("gap"):
            gap = Gap(position_of(source.gap.position), source.gap.attempts)
        number, attempts = self.deliveries[-1], source.attempts
        decoded = []
        for fields in reversed(messages):
            token = Token(epoch, number, fields.id.batch_index)
            if self.unacked & token.bit:
                decoded.append(Received(*fields, attempts, gap, token))
        self.messages = decoded
        return decoded


class What(Enum):
    """What somebody waits for."""

    ACKNOWLEDGED = auto()
    ACKNOWLEDGED_THROUGH = auto()
    REFUSED = auto()
    RETURNED = auto()
    RENEWED = auto()
    SOUGHT = auto()


@dataclass(slots=True, eq=False)
class Ticket:
    """Something that was asked for.

    Attributes:
        left: how many answers are to come.
        waiters: who is told.
        unit, bits: what is acknowledged, or renewed.
        attempt: of chunks that go back.
        guarded: the key that is guarded until then.
        error: the first that was answered.
    """

    what: What
    left: int
    waiters: list[Any] = field(default_factory=list)
    unit: Unit | None = None
    bits: int = 0
    attempt: tuple[str, str] | None = None
    guarded: bytes | None = None
    error: SeqgateError | None = None

    def answer(self, error: SeqgateError | None) -> bool:
        """There is an answer. Returns whether it was the last one."""
        if self.left <= 0:
            return False
        self.left -= 1
        if error is not None:
            self.error = self.error or error
        return self.left == 0


def messages_in(delivery: pb.Delivery) -> int:
    """How many messages an entry has, acknowledged ones included."""
    metadata = delivery.metadata
    return metadata.num_messages_in_batch if metadata.HasField("num_messages_in_batch") else 1
