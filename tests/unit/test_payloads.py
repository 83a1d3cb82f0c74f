"""Who opens payloads, and how often a batch was opened."""

import ast
from pathlib import Path

import pytest

import seqgate
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import Compression
from seqgate.client._codec import OutgoingMessage, decode_entry, encode_batch, encode_single
from seqgate.errors import CorruptMessageError
from seqgate.payloads import PayloadDamaged, batches_opened, open_batch, unpack

ROOT = Path(seqgate.__file__).parents[1]

INSIDE = {"BatchPayload", "lz4", "zstandard"}
"""What is in payloads, and what they are made with."""

OPENING = {"FromString", "ParseFromString", "MergeFromString", "Parse", "ParseDict"}
OPENING |= {"decompress", "decompressobj", "ZstdDecompressor"}
"""What opens one."""


def names_in(source: str) -> set[str]:
    """What a module names: its variables, attributes, imports and texts."""
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
        return False  # to read every module as Python takes seconds
    names = names_in(source)
    return bool(names & INSIDE and names & OPENING)


@pytest.mark.parametrize(
    "source",
    [
        "entry_pb2.BatchPayload.FromString(payload)",
        "from a.entry_pb2 import BatchPayload as B\nB().ParseFromString(payload)",
        "batch = entry_pb2.BatchPayload()\nbatch.MergeFromString(payload)",
        "message_class('seqgate.api.entry.v1.BatchPayload').FromString(payload)",
        "import lz4.block\nlz4.block.decompress(payload)",
        "from lz4 import block\nblock.decompress(payload)",
        "import zstandard as z\nz.decompress(payload)",
        "from zstandard import ZstdDecompressor",
    ],
)
def test_what_could_open_a_payload_is_noticed(source: str) -> None:
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


def test_a_batch_that_cannot_be_read_is_counted_too() -> None:
    stored = batch()
    before = batches_opened()
    with pytest.raises(PayloadDamaged, match="does not decode"):
        open_batch(stored.metadata, b"\xff")
    stored.metadata.num_messages_in_batch = 4
    with pytest.raises(CorruptMessageError, match="number of messages"):
        decode_entry("a/b/c", stored)
    assert batches_opened() == before + 2


@pytest.mark.parametrize("compression", [*Compression])
def test_a_message_that_is_no_batch_is_not_counted(compression: Compression) -> None:
    message = OutgoingMessage(0, b"hello " * 20)
    entry = encode_single("p", message, compression=compression, publish_time_ms=0)
    before = batches_opened()
    assert unpack(entry.metadata, entry.payload) == message.payload
    decode_entry("a/b/c", pb.StoredEntry(metadata=entry.metadata, payload=entry.payload))
    assert batches_opened() == before
