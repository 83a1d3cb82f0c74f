"""Converts services' messages to records: a field of a proto is a field of the JSON.

A position is its text, LEDGER:ENTRY; a time is in milliseconds and its name ends in _ms; an enum's
value is its name without the enum's. An absent field and an empty text are null. Bytes are text if
they are UTF-8, and otherwise base64 in a field NAME_base64.
"""

import base64
import re
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from seqgate.api.common.v1 import common_pb2
from seqgate.times import MS_NS, milliseconds
from seqgate.types import Position

_RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "ConsumerReport": {"name": "consumer"},
    "Cursor": {"name": "cursor"},
    "FilterChange": {"policy": "on_failure"},
    "FilterReport": {"name": "filter"},
    "FilterStretch": {"policy": "on_failure"},
    "Producer": {"name": "producer"},
    "Subscription": {"name": "subscription"},
    "Topic": {"name": "topic"},
}


def record(message: Message) -> dict[str, Any]:
    renamed = _RENAMED.get(message.DESCRIPTOR.name, {})
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        name, value = renamed.get(field.name, field.name), getattr(message, field.name)
        if field.message_type and field.message_type.GetOptions().map_entry:
            found[name] = dict(sorted(value.items()))
        elif field.is_repeated:
            found[name] = [_value(field, each) for each in value]
        elif field.type == FieldDescriptor.TYPE_BYTES:
            found |= bytes_record(name, value)
        else:
            is_time = field.message_type in (Timestamp.DESCRIPTOR, Duration.DESCRIPTOR)
            is_absent = field.has_presence and not message.HasField(field.name)
            shown = None if is_absent or value == "" else _value(field, value)
            found[f"{name}_ms" if is_time else name] = shown
    return found


def _value(field: Any, value: Any) -> Any:
    if field.enum_type is not None:
        return _enum_name(field.enum_type, value)
    match value:
        case Timestamp():
            return milliseconds(value)
        case Duration():
            exact_ms = value.seconds * 1000 + value.nanos / MS_NS
            return int(exact_ms) if exact_ms.is_integer() else exact_ms
        case common_pb2.Position():
            return str(position(value))
        case Message():
            return record(value)
        case _:
            return value


def position(place: common_pb2.Position) -> Position:
    return Position(place.ledger_id, place.entry_id)


def wire_position(place: Position) -> common_pb2.Position:
    return common_pb2.Position(ledger_id=place.ledger_id, entry_id=place.entry_id)


def bytes_record(name: str, value: bytes | None) -> dict[str, str | None]:
    if value is None:
        return {name: None}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}


def enum_name(kind: Any, number: int) -> str:
    """An enum value's name without the enum's prefix; a number unknown to this version stays a
    number."""
    return _enum_name(kind.DESCRIPTOR, number)


def _enum_name(kind: EnumDescriptor, number: int) -> str:
    found = kind.values_by_number.get(number)
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.name).upper()
    return str(number) if found is None else found.name.removeprefix(f"{prefix}_")
