"""Payloads: the only module that decompresses them, and packs and opens batches.

A batch has Pulsar's layout, for each message:

    4 bytes, big-endian | SingleMessageMetadata | payload
    its size              payload_size bytes ───┘

Services decide by metadata and never open a batch. To prove it, opened batches are counted.
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import lz4.block
import zstandard
from google.protobuf.message import DecodeError

from seqgate.api.entry.v1 import entry_pb2

UNCOMPRESSED_BYTES_MAX: Final = 512 * 1024 * 1024
"""The largest payload to unpack, in bytes."""

_SIZE: Final = struct.Struct(">I")

_batches_opened = 0


class PayloadDamaged(ValueError):
    """A payload contradicts its metadata; the text names the contradiction."""


def batches_opened() -> int:
    """How many batches this process opened, or tried to. Threads that open batches at the same
    moment may count as one, but never as none."""
    return _batches_opened


class SingleMessage(NamedTuple):
    metadata: entry_pb2.SingleMessageMetadata
    payload: bytes


# SingleMessage._make without a Python call per message.
_single: Final[Callable[[Iterable[Any]], SingleMessage]] = partial(tuple.__new__, SingleMessage)


def pack_batch(messages: Iterable[tuple[entry_pb2.SingleMessageMetadata, bytes]]) -> bytes:
    """The uncompressed payload of a batch. Sets the messages' payload_size. Takes one message after
    the other, which may share a metadata that is filled anew."""
    parts: list[bytes] = []
    for metadata, payload in messages:
        metadata.payload_size = len(payload)
        described = metadata.SerializeToString()
        parts += _SIZE.pack(len(described)), described, payload
    return b"".join(parts)


def open_batch(metadata: entry_pb2.EntryMetadata, payload: bytes) -> Sequence[SingleMessage]:
    """The messages of a batch entry, in order. Raises PayloadDamaged if it cannot be unpacked or
    parsed, or has another number of messages."""
    global _batches_opened
    _batches_opened += 1
    try:
        messages = list(_messages(unpack(metadata, payload)))
    except (DecodeError, struct.error) as error:
        raise PayloadDamaged("the batch does not decode") from error
    if len(messages) != metadata.num_messages_in_batch:
        raise PayloadDamaged("the number of messages in the batch differs from its metadata")
    return messages


def _messages(opened: bytes) -> Iterator[SingleMessage]:
    end = 0
    while end < len(opened):
        (size,) = _SIZE.unpack_from(opened, end)
        start = end + _SIZE.size
        metadata = entry_pb2.SingleMessageMetadata.FromString(opened[start : start + size])
        start += size
        end = start + metadata.payload_size
        if not metadata.HasField("payload_size") or not start <= end <= len(opened):
            raise PayloadDamaged("a message of the batch exceeds its payload")
        yield _single((metadata, opened[start:end]))


def unpack(metadata: entry_pb2.EntryMetadata, payload: bytes) -> bytes:
    """Decompress a payload, if it is compressed. For a large message, pass all chunks end to end.
    Raises PayloadDamaged if it cannot be decompressed, has another size than declared, or would
    exceed UNCOMPRESSED_BYTES_MAX."""
    if not metadata.compression:
        return payload
    size = metadata.uncompressed_size
    if size > UNCOMPRESSED_BYTES_MAX:
        raise PayloadDamaged("the payload is too large to decompress")
    try:
        opened = _decompress(metadata.compression, payload, size)
    except Exception as error:
        raise PayloadDamaged("the payload does not decompress") from error
    if len(opened) != size:
        raise PayloadDamaged("the size of the payload differs from its metadata")
    return opened


def _decompress(compression: int, payload: bytes, size: int) -> bytes:
    opened: bytes
    match compression:
        case entry_pb2.COMPRESSION_TYPE_LZ4:
            opened = lz4.block.decompress(payload, uncompressed_size=size)
        case entry_pb2.COMPRESSION_TYPE_ZLIB:
            # Read one byte too many to notice an excess, and never unpack a whole bomb.
            opened = zlib.decompressobj().decompress(payload, size + 1)
        case entry_pb2.COMPRESSION_TYPE_ZSTD:
            with zstandard.ZstdDecompressor().stream_reader(payload) as reader:
                opened = reader.read(size + 1)
        case _:
            raise ValueError(f"unknown compression {compression}")
    return opened
