"""Encodes messages into entries, and decodes entries into messages."""

import base64
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import google_crc32c
import lz4.block
import zstandard

from seqgate.api.common.v1 import common_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._assembler import Piece
from seqgate.client._digest import content_digest
from seqgate.client._message import Message
from seqgate.errors import CorruptMessageError
from seqgate.message_id import ChunkMessageId, MessageId
from seqgate.payloads import PayloadDamaged, SingleMessage, open_batch, pack_batch, unpack
from seqgate.times import milliseconds
from seqgate.types import Position


class Compression(Enum):
    """How a producer compresses entries."""

    NONE = "none"
    LZ4 = "lz4"
    ZLIB = "zlib"
    ZSTD = "zstd"


_TO_WIRE: Final = {
    Compression.NONE: entry_pb2.COMPRESSION_TYPE_UNSPECIFIED,
    Compression.LZ4: entry_pb2.COMPRESSION_TYPE_LZ4,
    Compression.ZLIB: entry_pb2.COMPRESSION_TYPE_ZLIB,
    Compression.ZSTD: entry_pb2.COMPRESSION_TYPE_ZSTD,
}


_NO_CONTEXT: Final[Mapping[str, str]] = {}


@dataclass(slots=True, eq=False)
class OutgoingMessage:
    sequence_id: int
    payload: bytes
    key: str | bytes | None = None
    ordering_key: bytes | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    event_time_ms: int | None = None
    deliver_at_ms: int | None = None
    is_delay: bool = False  # deliver_at_ms was given as a delay, and is another one when sent again
    shown: Mapping[str, str] | None = None  # its projection for filters; None: not projected
    done: Any = None  # the producer's future; opaque here and in the outbox
    sealed: "Sealed | None" = None
    chunks: int = 1
    span: Any = None  # its own recorded span: see _tracing.py
    batch: Any = None  # its batch's recorded span
    size_bytes: int = field(init=False)  # about what it adds to a batch, its trace not counted

    @property
    def digest(self) -> bytes:
        """The digest of its content."""
        deliver_at_ms = None if self.is_delay else self.deliver_at_ms
        key, ordering_key, event_ms = self.key, self.ordering_key, self.event_time_ms
        return content_digest(
            self.payload, key, ordering_key, event_ms, deliver_at_ms, self.properties
        )

    def __post_init__(self) -> None:
        self.size_bytes = len(self.payload) + len(self.key or "") + 16
        if self.properties:
            of_properties = (len(name) + len(value) for name, value in self.properties.items())
            self.size_bytes += sum(of_properties)

    @property
    def shown_bytes(self) -> int:
        """The approximate bytes that its projection adds to an entry."""
        return sum(len(name) + len(value) for name, value in (self.shown or {}).items())

    @property
    def group(self) -> object:
        """The batching key: the ordering key, or else the key. Text and bytes are never equal."""
        if self.ordering_key is not None:
            return "ordering", self.ordering_key
        return "key", self.key


class Sealed(NamedTuple):
    metadata: entry_pb2.EntryMetadata
    body: bytes


class Fields(NamedTuple):
    """The fields of a Message, in its order."""

    topic: str
    id: MessageId
    payload: bytes
    producer_name: str
    sequence_id: int
    publish_time_ms: int
    append_time_ms: int
    key: str | None
    ordering_key: bytes | None
    properties: dict[str, str]
    event_time_ms: int | None
    has_bytes_key: bool


# NamedTuple._make without a Python call per message.
_position: Final[Callable[[Iterable[Any]], Position]] = partial(tuple.__new__, Position)
_fields_of: Final[Callable[[Iterable[Any]], Fields]] = partial(tuple.__new__, Fields)


def encode_single(
    producer: str,
    message: OutgoingMessage,
    *,
    compression: Compression,
    publish_time_ms: int,
    context: Mapping[str, str] = _NO_CONTEXT,
) -> ledger_pb2.Entry:
    """Make an entry of one message, with the trace `context` unless the message has its own."""
    entry = ledger_pb2.Entry()
    body = _seal_message(entry.metadata, producer, message, compression, publish_time_ms)
    if context and not message.properties.keys() & context.keys():
        entry.metadata.properties.update(context)
    entry.metadata.payload_crc32c = google_crc32c.value(body)
    entry.payload = body
    return entry


def seal_message(
    producer: str, message: OutgoingMessage, *, compression: Compression, publish_time_ms: int
) -> Sealed:
    metadata = entry_pb2.EntryMetadata()
    body = _seal_message(metadata, producer, message, compression, publish_time_ms)
    return Sealed(metadata, body)


def _seal_message(
    metadata: entry_pb2.EntryMetadata,
    producer: str,
    message: OutgoingMessage,
    compression: Compression,
    publish_time_ms: int,
) -> bytes:
    """Write a message's metadata. Returns its payload, compressed."""
    metadata.producer_name = producer
    metadata.sequence_id = message.sequence_id
    metadata.publish_time = publish_time_ms
    _describe(metadata, message)
    if message.deliver_at_ms is not None:
        metadata.deliver_at_time = message.deliver_at_ms
    metadata.content_digests = message.digest
    return _seal(metadata, message.payload, compression)


def _describe(
    metadata: entry_pb2.EntryMetadata | entry_pb2.SingleMessageMetadata, message: OutgoingMessage
) -> None:
    """Copy a message's own metadata, field by field: a constructor call with all fields, absent
    ones included, takes four times as long, and this runs for every message."""
    if message.properties:
        metadata.properties.update(message.properties)
    _describe_keys(metadata, message)
    if message.event_time_ms is not None:
        metadata.event_time = message.event_time_ms


def _describe_keys(
    metadata: entry_pb2.EntryMetadata | entry_pb2.SingleMessageMetadata, message: OutgoingMessage
) -> None:
    key = message.key
    if isinstance(key, bytes):
        metadata.partition_key = base64.b64encode(key).decode()
        metadata.partition_key_b64_encoded = True
    elif key is not None:
        metadata.partition_key = key
    if message.ordering_key is not None:
        metadata.ordering_key = message.ordering_key


def encode_batch(
    producer: str,
    messages: Sequence[OutgoingMessage],
    *,
    compression: Compression,
    publish_time_ms: int,
    keyed: bool = False,
    context: Mapping[str, str] = _NO_CONTEXT,
) -> ledger_pb2.Entry:
    """Make an entry of a batch: messages with increasing sequence ids and the same projection. With
    `keyed` they are of one group, and the entry has their key, like an entry of one message. A
    message with a delivery time must be the only one. The trace `context` applies to all messages
    without their own."""
    first = messages[0]
    ids = [message.sequence_id for message in messages]
    steps = [later - earlier for earlier, later in pairwise(ids)]
    metadata = entry_pb2.EntryMetadata(
        producer_name=producer,
        sequence_id=ids[0],
        highest_sequence_id=ids[-1],
        sequence_id_steps=steps if any(step != 1 for step in steps) else (),
        num_messages_in_batch=len(messages),
        publish_time=publish_time_ms,
    )
    if first.shown:
        metadata.properties.update(first.shown)
    if context:
        metadata.properties.update(context)
    if keyed or len(messages) == 1:
        _describe_keys(metadata, first)
    if first.deliver_at_ms is not None:
        metadata.deliver_at_time = first.deliver_at_ms
    metadata.content_digests = b"".join([message.digest for message in messages])
    payload = pack_batch(_singles(messages))
    return to_entry(metadata, _seal(metadata, payload, compression))


def _singles(
    messages: Iterable[OutgoingMessage],
) -> Iterator[tuple[entry_pb2.SingleMessageMetadata, bytes]]:
    """One metadata for all, filled anew."""
    metadata = entry_pb2.SingleMessageMetadata()
    for message in messages:
        metadata.Clear()
        metadata.sequence_id = message.sequence_id
        _describe(metadata, message)
        yield metadata, message.payload


def decode_entry(topic: str, stored: ledger_pb2.StoredEntry) -> list[Message]:
    """The messages of an entry, in order.

    Raises:
        CorruptMessageError: the payload does not match its checksum or cannot be decoded.
    """
    return [Message(*each) for each in decode_fields(topic, stored)]


def decode_fields(topic: str, stored: ledger_pb2.StoredEntry) -> list[Fields]:
    """Like `decode_entry`, for classes other than Message."""
    metadata, payload = stored.metadata, checked_payload(stored)
    try:
        if not metadata.HasField("num_messages_in_batch"):
            whole = unpack(metadata, payload)
            return [_fields(topic, stored, metadata, whole)]
        messages = open_batch(metadata, payload)
    except PayloadDamaged as error:
        raise corrupt(stored, str(error)) from error
    return _batch_fields(topic, stored, metadata, messages)


def describe_fields(topic: str, stored: ledger_pb2.StoredEntry) -> list[Fields]:
    """Like `decode_fields`, of an entry without its payload: payloads are empty, and what only an
    opened batch has (keys, event times, its messages' own properties) is absent."""
    metadata = stored.metadata
    if not metadata.HasField("num_messages_in_batch"):
        return [_fields(topic, stored, metadata, b"")]
    unopened = SingleMessage(entry_pb2.SingleMessageMetadata(), b"")
    messages = [unopened] * metadata.num_messages_in_batch
    return _batch_fields(topic, stored, metadata, messages)


def describe_large_fields(topic: str, last: ledger_pb2.StoredEntry, first: Position) -> Fields:
    """Like `decode_large_fields`, without the payload."""
    fields = _fields(topic, last, last.metadata, b"")
    return fields._replace(id=ChunkMessageId(MessageId(*first), fields.id))


def decode_large(topic: str, last: ledger_pb2.StoredEntry, body: bytes, first: Position) -> Message:
    """See decode_large_fields."""
    return Message(*decode_large_fields(topic, last, body, first))


def decode_large_fields(
    topic: str, last: ledger_pb2.StoredEntry, body: bytes, first: Position
) -> Fields:
    """Decode a large message: its last chunk, all chunks end to end, and the first chunk's
    position. Raises CorruptMessageError if the chunks do not match their checksum or cannot be
    decoded."""
    try:
        whole = unpack(last.metadata, body)
    except PayloadDamaged as error:
        raise corrupt(last, str(error)) from error
    return describe_large_fields(topic, last, first)._replace(payload=whole)


_Own = tuple[str | None, bytes | None, dict[str, str], int | None, bool]
"""The last five of Fields."""


def _fields(
    topic: str, stored: ledger_pb2.StoredEntry, metadata: entry_pb2.EntryMetadata, payload: bytes
) -> Fields:
    """The fields of an entry's only message."""
    position = stored.position
    return _fields_of(
        (
            topic,
            MessageId(position.ledger_id, position.entry_id, _topic=topic),
            payload,
            metadata.producer_name,
            metadata.sequence_id,
            metadata.publish_time,
            milliseconds(stored.append_time),
            *_own(stored, metadata),
        )
    )


def _batch_fields(
    topic: str,
    stored: ledger_pb2.StoredEntry,
    metadata: entry_pb2.EntryMetadata,
    messages: Sequence[SingleMessage],
) -> list[Fields]:
    """The fields of a batch's messages. What they share is looked up once."""
    ledger_id, entry_id = stored.position.ledger_id, stored.position.entry_id
    producer_name, publish_time_ms = metadata.producer_name, metadata.publish_time
    append_time_ms = milliseconds(stored.append_time)
    steps = metadata.sequence_id_steps or [1] * (len(messages) - 1)
    sequence_ids = accumulate(steps, initial=metadata.sequence_id)
    fields = [
        _fields_of(
            (
                topic,
                MessageId(ledger_id, entry_id, -1, index, _topic=topic),
                payload,
                producer_name,
                sequence_id,
                publish_time_ms,
                append_time_ms,
                *_own(stored, own),
            )
        )
        for index, ((own, payload), sequence_id) in enumerate(
            zip(messages, sequence_ids, strict=True)
        )
    ]
    if metadata.properties:
        shared = dict(metadata.properties)
        fields = [each._replace(properties=shared | each.properties) for each in fields]
    return fields


def _own(
    stored: ledger_pb2.StoredEntry,
    own: entry_pb2.EntryMetadata | entry_pb2.SingleMessageMetadata,
) -> _Own:
    """What a message says of itself."""
    has = own.HasField
    has_key = has("partition_key")
    has_bytes_key = has_key and own.partition_key_b64_encoded
    if has_bytes_key:
        _check_base64(stored, own.partition_key)
    return (
        own.partition_key if has_key else None,
        own.ordering_key if has("ordering_key") else None,
        dict(properties) if (properties := own.properties) else {},
        own.event_time if has("event_time") else None,
        has_bytes_key,
    )


def _check_base64(stored: ledger_pb2.StoredEntry, key: str) -> None:
    try:
        base64.b64decode(key, validate=True)
    except ValueError as error:
        raise corrupt(stored, "a bytes key is not valid base64") from error


def to_entry(metadata: entry_pb2.EntryMetadata, body: bytes) -> ledger_pb2.Entry:
    """Make an entry of a payload that is already compressed."""
    metadata.payload_crc32c = google_crc32c.value(body)
    return ledger_pb2.Entry(metadata=metadata, payload=body)


def _seal(metadata: entry_pb2.EntryMetadata, payload: bytes, compression: Compression) -> bytes:
    if compression is Compression.NONE or not payload:
        return payload
    metadata.compression = _TO_WIRE[compression]
    metadata.uncompressed_size = len(payload)
    return _compress(compression, payload)


def _compress(compression: Compression, payload: bytes) -> bytes:
    packed: bytes
    match compression:
        case Compression.LZ4:
            packed = lz4.block.compress(payload, store_size=False)
        case Compression.ZLIB:
            packed = zlib.compress(payload)
        case _:
            packed = zstandard.compress(payload)
    return packed


def checked_payload(stored: ledger_pb2.StoredEntry) -> bytes:
    """An entry's payload. Raises CorruptMessageError if it does not match its checksum."""
    metadata, payload = stored.metadata, stored.payload
    if (
        metadata.HasField("payload_crc32c")
        and google_crc32c.value(payload) != metadata.payload_crc32c
    ):
        raise corrupt(stored, "the payload does not match its checksum")
    return payload


def piece_of(stored: ledger_pb2.StoredEntry) -> Piece:
    """Parse a chunk's entry. Raises CorruptMessageError if its checksum does not match."""
    metadata = stored.metadata
    return Piece(
        position_of(stored.position),
        metadata.producer_name,
        metadata.sequence_id,
        metadata.uuid,
        metadata.chunk_id,
        metadata.num_chunks_from_msg,
        metadata.total_chunk_msg_size,
        metadata.message_crc32c if metadata.HasField("message_crc32c") else None,
        checked_payload(stored),
    )


def position_of(wire: common_pb2.Position) -> Position:
    return _position((wire.ledger_id, wire.entry_id))


def corrupt(stored: ledger_pb2.StoredEntry, message: str) -> CorruptMessageError:
    position = stored.position
    return CorruptMessageError(
        message,
        details={"ledger_id": str(position.ledger_id), "entry_id": str(position.entry_id)},
    )
