"""The code that decodes payloads, and the count of decoded batches."""

import ast
from pathlib import Path
from typing import Final

import pytest

import seqgate
from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import Compression
from seqgate.client._codec import OutgoingMessage, decode_entry, encode_batch, encode_single
from seqgate.errors import CorruptMessageError
from seqgate.payloads import PayloadDamaged, batches_opened, open_batch, pack_batch, unpack

ROOT = Path(seqgate.__file__).parents[1]

INSIDE = {"SingleMessageMetadata", "lz4", "zstandard"}
"""The contents of payloads, and their codecs."""

OPENING = {"FromString", "ParseFromString", "MergeFromString", "Parse", "ParseDict"}
OPENING |= {"decompress", "decompressobj", "ZstdDecompressor"}
"""Names that decode a payload."""


def names_in(source: str) -> set[str]:
    """The names in a module: its variables, attributes, imports and strings."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                names.add(name.split(".")[-1])
            case ast.Import(names=imported) | ast.ImportFrom(names=imported):
                names |= {part for each in imported for part in each.name.split(".")}
                names |= set((getattr(node, "module", None) or "").split("."))
    return names


def may_open(source: str) -> bool:
    if not any(name in source for name in INSIDE):
        return False  # parsing every module takes seconds
    names = names_in(source)
    return bool(names & INSIDE and names & OPENING)


@pytest.mark.parametrize(
    "source",
    [
        "entry_pb2.SingleMessageMetadata.FromString(payload)",
        "from a.entry_pb2 import SingleMessageMetadata as B\nB().ParseFromString(payload)",
        "one = entry_pb2.SingleMessageMetadata()\none.MergeFromString(payload)",
        "message_class('seqgate.api.entry.v1.SingleMessageMetadata').FromString(payload)",
        "import lz4.block\nlz4.block.decompress(payload)",
        "from lz4 import block\nblock.decompress(payload)",
        "import zstandard as z\nz.decompress(payload)",
        "from zstandard import ZstdDecompressor",
    ],
)
def test_code_that_may_open_payloads_is_detected(source: str) -> None:
    assert may_open(source)


def test_payloads_are_opened_in_one_module() -> None:
    sources = {
        file.relative_to(ROOT).as_posix(): file.read_text()
        for room in ("seqgate", "services", "tools")
        for file in (ROOT / room).rglob("*.py")
        if ROOT / "seqgate" / "api" not in file.parents
    }
    assert {file for file, source in sources.items() if may_open(source)} == {"seqgate/payloads.py"}


def batch(compression: Compression = Compression.NONE) -> pb.StoredEntry:
    some = [OutgoingMessage(i, b"hello") for i in range(3)]
    entry = encode_batch("p", some, compression=compression, publish_time_ms=0)
    return pb.StoredEntry(metadata=entry.metadata, payload=entry.payload)


@pytest.mark.parametrize("compression", [*Compression])
def test_a_batch_is_counted_when_it_is_opened(compression: Compression) -> None:
    stored = batch(compression)
    before = batches_opened()
    assert [each.payload for each in open_batch(stored.metadata, stored.payload)] == [b"hello"] * 3
    assert batches_opened() == before + 1
    decode_entry("a/b/c", stored)
    assert batches_opened() == before + 2


def test_an_unreadable_batch_is_counted_too() -> None:
    stored = batch()
    before = batches_opened()
    with pytest.raises(PayloadDamaged, match="does not decode"):
        open_batch(stored.metadata, b"\xff")
    stored.metadata.num_messages_in_batch = 4
    with pytest.raises(CorruptMessageError, match="number of messages"):
        decode_entry("a/b/c", stored)
    assert batches_opened() == before + 2


@pytest.mark.parametrize("compression", [*Compression])
def test_a_single_message_is_not_counted(compression: Compression) -> None:
    message = OutgoingMessage(0, b"hello " * 20)
    entry = encode_single("p", message, compression=compression, publish_time_ms=0)
    before = batches_opened()
    assert unpack(entry.metadata, entry.payload) == message.payload
    decode_entry("a/b/c", pb.StoredEntry(metadata=entry.metadata, payload=entry.payload))
    assert batches_opened() == before


# ---- Pulsar's layout of a batch

PULSARS: Final = (
    b"\x00\x00\x00\x07" b"\x12\x01k\x18\x05\x40\x07" b"hello"
    b"\x00\x00\x00\x04" b"\x18\x00\x40\x08"
)  # fmt: skip
"""Two messages: sequence id 7 with the key k, and sequence id 8 without a payload. Each has the
size of its metadata (4 bytes, big-endian), SingleMessageMetadata (partition_key 2, payload_size 3,
sequence_id 8), and the payload."""


def in_batch(messages: int) -> EntryMetadata:
    return EntryMetadata(num_messages_in_batch=messages)


def test_a_batch_has_the_layout_of_pulsar() -> None:
    first, second = open_batch(in_batch(2), PULSARS)
    assert (first.payload, first.metadata.partition_key) == (b"hello", "k")
    assert (first.metadata.sequence_id, second.metadata.sequence_id) == (7, 8)
    assert second.payload == b""
    assert pack_batch([first, second]) == PULSARS


def test_the_client_writes_the_layout_of_pulsar() -> None:
    some = [OutgoingMessage(7, b"hello", key="k"), OutgoingMessage(8, b"")]
    entry = encode_batch("p", some, compression=Compression.NONE, publish_time_ms=0)
    assert entry.payload == PULSARS


def test_pulsars_other_fields_are_kept() -> None:
    beyond = b"\x00\x00\x00\x06\x18\x01\x20\x00\x48\x01x"  # compacted_out, null_value
    (message,) = open_batch(in_batch(1), beyond)
    assert pack_batch([message]) == beyond


@pytest.mark.parametrize(
    "damaged",
    [
        PULSARS[:-1],
        PULSARS[:-4],
        PULSARS[:-6],
        PULSARS + b"\x00",
        PULSARS + b"\x00\x00\x00\x00",
        b"\xff" + PULSARS[1:],
        PULSARS.replace(b"\x18\x05", b"\x18\x7f"),  # a payload beyond the end
        PULSARS.replace(b"\x18\x05", b"\x28\x05"),  # no payload_size
        b"\x00\x00\x00\x0b\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # payload_size -1
        # payload_size -17, which leads back to a complete message inside the metadata
        b"\x00\x00\x00\x13\x7a\x06\x00\x00\x00\x02\x18\x0b\x18\xef" + b"\xff" * 8 + b"\x01",
    ],
)
def test_a_damaged_batch_is_reported(damaged: bytes) -> None:
    with pytest.raises(PayloadDamaged):
        open_batch(in_batch(2), damaged)
