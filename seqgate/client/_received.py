"""What an application gets from a consumer: a message, and what names it when it is settled."""

from dataclasses import dataclass
from typing import NamedTuple

from seqgate.client._codec import Message
from seqgate.types import Position


class Token(NamedTuple):
    """Names a message of a delivery: the subscription's epoch, the delivery's number, and of a
    batch the message's index, or -1. It is good for one consumer, until the message is settled, or
    the delivery counts no more."""

    epoch: int
    delivery: int
    batch_index: int

    @property
    def bit(self) -> int:
        """Which bit of its delivery the message is."""
        return 1 << self.batch_index if self.batch_index > 0 else 1


class Gap(NamedTuple):
    """A message that is missing in a key because it went to the dead letter topic.

    Attributes:
        position: where it is in its topic.
        attempts: how often it was delivered.
    """

    position: Position
    attempts: int


@dataclass(frozen=True, slots=True)
class Received(Message):
    """A message as a consumer gets it.

    Attributes:
        attempts: how often it was delivered before, to anybody, and failed.
        gap: what is missing in its key before it; None: nothing is.
        token: what its acknowledgement names.
    """

    attempts: int = 0
    gap: Gap | None = None
    token: Token = Token(0, 0, -1)
