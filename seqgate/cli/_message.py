"""Messages as JSON, one per line: the input of `publish` and the output of `read`.

Bytes are text if they are UTF-8, and otherwise base64 in a field NAME_base64. `publish` takes the
fields of `read` that describe the message itself.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.cli._failure import InvalidInput
from seqgate.cli._output import Output, shown, time_shown
from seqgate.cli._wire import bytes_record
from seqgate.client import Message, Received
from seqgate.types import SEQUENCE_ID_MAX

FIELDS: Final = (
    "payload",
    "payload_base64",
    "key",
    "ordering_key",
    "ordering_key_base64",
    "properties",
    "sequence_id",
    "event_time_ms",
)

ENTRY_FIELDS: Final = ("key", "properties", "producer", "sequence_id", "publish_time_ms")
"""The fields of a read message that describe its entry; `num_messages` describes a batch."""

BATCH_MESSAGES_MAX: Final = 10_000

_READ_FIELDS: Final = (*FIELDS, "message_id", "append_time_ms", "attempts", "missing_before")

_PREVIEW_CHARACTERS: Final = 80


class Draft(NamedTuple):
    """A message to publish: the arguments of the client's `send`."""

    payload: bytes
    key: str | None = None
    ordering_key: bytes | None = None
    properties: Mapping[str, str] = {}
    sequence_id: int | None = None
    event_time_ms: int | None = None


def parse(line: bytes) -> Draft:
    """Parse a line, or raise InvalidInput. A null field counts as absent."""
    values = _object(line, FIELDS)
    payload = _bytes(values, "payload")
    if payload is None:
        raise InvalidInput("payload or payload_base64 is required")
    return Draft(
        payload,
        key=_text(values, "key"),
        ordering_key=_bytes(values, "ordering_key"),
        properties=_properties(values),
        sequence_id=_number(values, "sequence_id"),
        event_time_ms=_number(values, "event_time_ms"),
    )


def parse_entry(line: bytes) -> EntryMetadata:
    """Parse a line of `read` as the metadata of an entry with this message only; with
    `num_messages`, of a batch. Raises InvalidInput if the line does not describe an entry."""
    values = _object(line, (*ENTRY_FIELDS, "num_messages"), ignored=_READ_FIELDS)
    return EntryMetadata(
        partition_key=_text(values, "key"),
        properties=_properties(values),
        producer_name=_text(values, "producer"),
        sequence_id=_number(values, "sequence_id"),
        publish_time=_number(values, "publish_time_ms"),
        num_messages_in_batch=_number(values, "num_messages", BATCH_MESSAGES_MAX),
    )


def record(message: Message) -> dict[str, Any]:
    """A read message as JSON. A subscription's message also has its failed attempts, and the
    message missing before it in its key."""
    found: dict[str, Any] = {
        "message_id": str(message.id),
        "producer": message.producer_name,
        "sequence_id": message.sequence_id,
        "publish_time_ms": message.publish_time_ms,
        "append_time_ms": message.append_time_ms,
        "event_time_ms": message.event_time_ms,
        "key": message.key,
        **bytes_record("ordering_key", message.ordering_key),
        "properties": dict(message.properties),
        **bytes_record("payload", message.payload),
    }
    if isinstance(message, Received):
        gap = message.gap
        found |= {
            "attempts": message.attempts,
            "missing_before": None if gap is None else str(gap.position),
        }
    return found


class Listing:
    """Prints messages as they arrive: one line each, under headings."""

    def __init__(self, output: Output, *, whole: bool) -> None:
        """`whole`: show payloads whole, not only how they start."""
        self._output = output
        self._whole = whole
        self._widths: list[int] = []

    def add(self, message: Message) -> None:
        """Print a message. Raises OutputClosed if the reader of the output has gone."""
        if self._output.json:
            self._output.record(record(message))
            return
        if not self._widths:
            self._widths = [14, 24, 16, 8, 8]
            self._write("MESSAGE", "APPENDED", "PRODUCER", "SEQUENCE", "KEY", "PAYLOAD")
        self._write(
            str(message.id),
            shown(time_shown(message.append_time_ms)),
            shown(message.producer_name),
            str(message.sequence_id),
            shown(message.key),
            self._payload(message.payload),
        )

    def _write(self, *cells: str) -> None:
        # Widths are the maximum so far: later cells are not known yet.
        *leading, last = cells
        self._widths = [max(*each) for each in zip(self._widths, map(len, leading), strict=True)]
        padded = (f"{cell:<{width}}" for cell, width in zip(leading, self._widths, strict=True))
        self._output.line("  ".join((*padded, last)))

    def _payload(self, payload: bytes) -> str:
        try:
            text = shown(payload.decode())
        except UnicodeDecodeError:
            text = f"base64:{base64.b64encode(payload).decode()}"
        if self._whole or len(text) <= _PREVIEW_CHARACTERS:
            return text
        return f"{text[:_PREVIEW_CHARACTERS]}… ({len(payload)} bytes)"


def _object(
    line: bytes, fields: Sequence[str], *, ignored: Sequence[str] = ()
) -> Mapping[str, Any]:
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError:
        raise InvalidInput("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise InvalidInput(f"not JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError):  # a number too long, or lists nested too deeply
        raise InvalidInput("JSON nested too deeply or with too long a number") from None
    if not isinstance(values, dict):
        raise InvalidInput("not a JSON object")
    for name in values:
        if name not in fields and name not in ignored:
            raise InvalidInput(f"unknown field {name!r}, expected {', '.join(fields)}")
    return values


def _bytes(values: Mapping[str, Any], name: str) -> bytes | None:
    text, encoded = _text(values, name), _text(values, f"{name}_base64")
    if text is not None and encoded is not None:
        raise InvalidInput(f"{name} and {name}_base64 are mutually exclusive")
    if encoded is None:
        return None if text is None else text.encode()
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError:
        raise InvalidInput(f"{name}_base64 is not base64") from None


def _text(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    return None if value is None else _unicode(name, value)


def _properties(values: Mapping[str, Any]) -> Mapping[str, str]:
    properties = values.get("properties")
    if properties is None:
        return {}
    if not isinstance(properties, dict):
        raise InvalidInput("properties must be an object of strings")
    return {
        _unicode("a property's name", name): _unicode(f"property {name!r}", value)
        for name, value in properties.items()
    }


def _unicode(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{name} must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise InvalidInput(f"{name} is not valid Unicode") from None
    return value


def _number(values: Mapping[str, Any], name: str, most: int = SEQUENCE_ID_MAX) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise InvalidInput(f"{name} must be a number from 0 to {most}")
    return value
