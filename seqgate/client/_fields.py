"""Fields of requests and responses, as the client's values."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from seqgate.api.common.v1 import common_pb2
from seqgate.client import _arguments
from seqgate.client._codec import position_of
from seqgate.message_id import MessageId
from seqgate.times import moment_of
from seqgate.types import Position, TopicName


def full_name(topic: str) -> str:
    return str(TopicName.expand(topic))


def optional_name(topic: str | None) -> str:
    """A topic's full name; empty: none is given."""
    return "" if topic is None or topic == "" else full_name(topic)


def key_bytes(key: str | bytes) -> bytes:
    key = _arguments.key_of("key", key)
    return key.encode() if isinstance(key, str) else key


def optional_key(key: str | bytes | None) -> bytes | None:
    return None if key is None else key_bytes(key)


def stored_position(name: str, message_id: MessageId) -> common_pb2.Position:
    """The place of a stored message, or of the last chunk of a large one."""
    at = _arguments.message_id(name, message_id, least=0)
    return common_pb2.Position(ledger_id=at.ledger_id, entry_id=at.entry_id)


def stored_positions(name: str, message_ids: Iterable[MessageId]) -> list[common_pb2.Position]:
    return _arguments.each_of(name, message_ids, stored_position)


def optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def optional_position(wire: Any) -> Position | None:
    return None if wire is None else position_of(wire)


def message_id_of(wire: Any) -> MessageId:
    return MessageId(*position_of(wire))


def optional_id(wire: Any) -> MessageId | None:
    return None if wire is None else message_id_of(wire)


def time_of(wire: Any) -> datetime:
    return moment_of(wire)


def enum_name(kind: Any, number: int) -> str:
    """An enum's value without the enum's name."""
    names = [each.name for each in kind.DESCRIPTOR.values]
    prefix = names[0].removesuffix("UNSPECIFIED")
    value = kind.DESCRIPTOR.values_by_number.get(number)
    return str(number) if value is None else value.name.removeprefix(prefix)
