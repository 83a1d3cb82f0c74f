"""Fields of requests and responses, as the client's values."""

from datetime import UTC, datetime
from typing import Any

from seqgate.client._codec import position_of
from seqgate.message_id import MessageId
from seqgate.times import milliseconds
from seqgate.types import Position, TopicName


def full_name(topic: str) -> str:
    return str(TopicName.expand(topic))


def key_bytes(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


def optional_key(key: str | bytes | None) -> bytes | None:
    return None if key is None else key_bytes(key)


def optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def optional_position(wire: Any) -> Position | None:
    return None if wire is None else position_of(wire)


def message_id_of(wire: Any) -> MessageId:
    return MessageId(*position_of(wire))


def optional_id(wire: Any) -> MessageId | None:
    return None if wire is None else message_id_of(wire)


def time_of(wire: Any) -> datetime:
    return datetime.fromtimestamp(milliseconds(wire) / 1000, UTC)


def enum_name(kind: Any, number: int) -> str:
    """An enum's value without the enum's name."""
    names = [each.name for each in kind.DESCRIPTOR.values]
    prefix = names[0].removesuffix("UNSPECIFIED")
    value = kind.DESCRIPTOR.values_by_number.get(number)
    return str(number) if value is None else value.name.removeprefix(prefix)
