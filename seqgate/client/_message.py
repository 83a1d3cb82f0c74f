"""The messages that readers and consumers return."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from seqgate.errors import InvalidRequestError
from seqgate.message_id import MessageId
from seqgate.types import Position

MANY_MESSAGES: Final = 1_000
"""The most messages that one call returns by default."""


# Final fields, not frozen dataclasses, which take three times as long to make.


@dataclass(slots=True)
class Message:
    """A message from a reader.

    Attributes:
        topic: its topic's full name.
        id: its position, as an id to store.
        payload: the application's bytes.
        producer_name, sequence_id: its identity in the topic.
        publish_time_ms: when it was published, in milliseconds since 1970 by the producer's clock.
        append_time_ms: when it was stored, in milliseconds since 1970 by the service's clock.
        key: the key; base64 if it was published as bytes.
        ordering_key, properties, event_time_ms: as published. A dead letter's properties also name
            its origin.
        has_bytes_key: whether the key was published as bytes.
    """

    topic: Final[str]
    id: Final[MessageId]
    payload: Final[bytes]
    producer_name: Final[str]
    sequence_id: Final[int]
    publish_time_ms: Final[int]
    append_time_ms: Final[int]
    key: Final[str | None] = None
    ordering_key: Final[bytes | None] = None
    properties: Final[Mapping[str, str]] = field(default_factory=dict)
    event_time_ms: Final[int | None] = None
    has_bytes_key: Final[bool] = False

    @property
    def key_bytes(self) -> bytes | None:
        """The key in bytes; the UTF-8 of a text key."""
        if self.key is None:
            return None
        return base64.b64decode(self.key) if self.has_bytes_key else self.key.encode()


class Token(NamedTuple):
    """Identifies one delivery of a message to one consumer, until the message is settled or the
    delivery is revoked. Copied or pickled, it is the same token; for any other consumer, and for
    later connections of this one, it is stale.

    Attributes:
        epoch: the subscription's epoch.
        delivery: the delivery's number, which grows within an epoch.
        batch_index: the message's index in its batch, or -1.
        connection: the consumer's connection to the service, unlike any other's; 0: none.
    """

    epoch: int
    delivery: int
    batch_index: int
    connection: int = 0

    @property
    def bit(self) -> int:
        return 1 << self.batch_index if self.batch_index > 0 else 1


class Gap(NamedTuple):
    """A message missing from a key because it went to the dead letter topic.

    Attributes:
        position: its position in its topic.
        attempts: how often it was delivered.
    """

    position: Position
    attempts: int


@dataclass(slots=True)
class Received(Message):
    """A message from a consumer.

    Attributes:
        attempts: the earlier deliveries of it that failed, to any consumer.
        gap: the message missing from its key before it; None: none is.
        token: identifies this delivery when it is settled.
    """

    attempts: Final[int] = 0
    gap: Final[Gap | None] = None
    token: Final[Token] = Token(0, 0, -1)


def token_of(message: object) -> Token:
    """The token to settle a message with. Raises InvalidRequestError if it is none that a consumer
    received."""
    token = getattr(message, "token", None)
    if isinstance(token, Token):
        return token
    raise InvalidRequestError(
        f"message must be one that a consumer received (Received), not {type(message).__name__}",
        reason="INVALID_SETTLEMENT",
    )
