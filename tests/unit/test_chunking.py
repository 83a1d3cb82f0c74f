"""Chunking of large messages, and the metadata of chunks."""

from dataclasses import FrozenInstanceError

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client._chunking import Chunking, LargeMessage, chunks_of
from seqgate.client._codec import Compression, OutgoingMessage, seal_message
from seqgate.message_id import ChunkMessageId, MessageId
from seqgate.types import PRODUCER_NAME_BYTES_MAX, SEQUENCE_ID_MAX, Position

BODY = bytes(range(100))


def entry_of(message: LargeMessage, chunk_id: int) -> pb.Entry:
    entry = pb.Entry()
    message.fill(entry, chunk_id)
    return entry


def large(body: bytes = BODY, chunk_bytes: int = 7, **fields: object) -> LargeMessage:
    made = OutgoingMessage(3, body, **fields)  # type: ignore[arg-type]
    sealed = seal_message("p", made, compression=Compression.NONE, publish_time_ms=0)
    return LargeMessage(made, *sealed, chunk_bytes)


def entries(message: LargeMessage) -> list[pb.Entry]:
    return [entry_of(message, chunk_id) for chunk_id in range(message.num_chunks)]


def counted_bytes(entry: pb.Entry) -> int:
    """The size that a service counts against its window: core/entry.py's Entry.size_bytes."""
    return len(entry.metadata.SerializeToString()) + len(entry.payload)


def shared(entry: pb.Entry) -> bytes:
    """The fields that all chunks of a message share."""
    metadata = entry_pb2.EntryMetadata()
    metadata.CopyFrom(entry.metadata)
    metadata.ClearField("chunk_id")
    metadata.ClearField("payload_crc32c")
    return metadata.SerializeToString(deterministic=True)


# ---- the chunk size


@pytest.mark.parametrize(
    ("asked", "limit", "size"),
    [(0, 100, 100), (1, 100, 1), (99, 100, 99), (100, 100, 100), (101, 100, 100), (0, 1, 1)],
)
def test_the_chunk_size_is_the_least_of_request_and_limit(
    asked: int, limit: int, size: int
) -> None:
    assert Chunking(asked).size(limit) == size


def test_chunks_have_no_negative_size() -> None:
    with pytest.raises(ValueError, match="chunk_bytes must be 0 to"):
        Chunking(-1)
    assert Chunking() == Chunking(0)
    with pytest.raises(FrozenInstanceError):
        Chunking().chunk_bytes = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("body_bytes", "chunk_bytes", "chunks"),
    [
        (0, 10, 1),  # an empty message is a message
        (1, 10, 1),
        (9, 10, 1),
        (10, 10, 1),
        (11, 10, 2),
        (20, 10, 2),
        (21, 10, 3),
        (5, 1, 5),
        (2**31 - 1, 2**31 - 1, 1),
        (2**31 - 1, 1, 2**31 - 1),
        (2**53 + 1, 2, 2**52 + 1),  # beyond the precision of floats
    ],
)
def test_a_payload_has_this_many_chunks(body_bytes: int, chunk_bytes: int, chunks: int) -> None:
    assert chunks_of(body_bytes, chunk_bytes) == chunks


@given(body_bytes=st.integers(1, 10**12), chunk_bytes=st.integers(1, 10**12))
def test_chunks_cover_the_payload_and_none_is_empty(body_bytes: int, chunk_bytes: int) -> None:
    chunks = chunks_of(body_bytes, chunk_bytes)
    assert (chunks - 1) * chunk_bytes < body_bytes <= chunks * chunk_bytes


# ---- chunks


@given(body=st.binary(min_size=2, max_size=200), chunk_bytes=st.integers(1, 250))
def test_concatenated_chunks_are_the_payload(body: bytes, chunk_bytes: int) -> None:
    message = large(body, chunk_bytes)
    found = entries(message)
    assert b"".join(entry.payload for entry in found) == body
    assert [entry.metadata.chunk_id for entry in found] == list(range(len(found)))
    assert all(len(entry.payload) == chunk_bytes for entry in found[:-1])
    assert 0 < len(found[-1].payload) <= chunk_bytes
    for entry in found:
        assert entry.metadata.num_chunks_from_msg == len(found)
        assert entry.metadata.total_chunk_msg_size == len(body)
        assert entry.metadata.message_crc32c == google_crc32c.value(body)
        assert entry.metadata.payload_crc32c == google_crc32c.value(entry.payload)


def test_chunks_differ_only_in_index_and_checksum() -> None:
    message = large(key="k", properties={"a": "b", "c": "d"}, ordering_key=b"o", event_time_ms=9)
    found = entries(message)
    assert len({shared(entry) for entry in found}) == 1
    metadata = found[3].metadata
    assert (metadata.producer_name, metadata.sequence_id) == ("p", 3)
    assert (metadata.partition_key, dict(metadata.properties)) == ("k", {"a": "b", "c": "d"})
    assert (metadata.ordering_key, metadata.event_time) == (b"o", 9)
    assert not metadata.HasField("num_messages_in_batch")


def test_the_entries_of_chunks_share_no_state() -> None:
    """A change of one entry affects neither the message nor earlier entries."""
    message = large(properties={"a": "b"})
    before = [entry.SerializeToString(deterministic=True) for entry in entries(message)]
    first = entry_of(message, 0)
    entry_of(message, 5)
    assert (first.metadata.chunk_id, first.payload) == (0, BODY[:7])
    first.metadata.properties["a"] = "changed"
    first.metadata.uuid = "changed"
    first.metadata.ClearField("message_crc32c")
    after = [entry.SerializeToString(deterministic=True) for entry in entries(message)]
    assert after == before


def test_encoding_a_chunk_again_gives_the_same_entry() -> None:
    message = large()
    assert entries(message) == entries(message)


# ---- counted bytes


TEXTS = st.text(max_size=40)


@given(
    name=st.text("pé\U0001f600", min_size=1, max_size=60).filter(
        lambda name: len(name.encode()) <= PRODUCER_NAME_BYTES_MAX
    ),
    sequence_id=st.sampled_from([0, 1, 2**32, SEQUENCE_ID_MAX]),
    key=st.none() | TEXTS | st.just("k" * 5_000),
    ordering_key=st.none() | st.binary(max_size=30),
    properties=st.dictionaries(TEXTS, TEXTS, max_size=5),
    publish_time_ms=st.sampled_from([0, 2**41, 2**63]),
    cut=st.sampled_from([(2, 1), (200, 1), (300, 7), (129, 128), (60_000, 5)]),
)
def test_the_counted_size_of_a_chunk_covers_the_services(
    name: str,
    sequence_id: int,
    key: str | None,
    ordering_key: bytes | None,
    properties: dict[str, str],
    publish_time_ms: int,
    cut: tuple[int, int],
) -> None:
    """Otherwise the producer would exceed its window, and lose its stream."""
    body_bytes, chunk_bytes = cut
    made = OutgoingMessage(sequence_id, bytes(body_bytes), key, ordering_key, properties)
    sealed = seal_message(name, made, compression=Compression.NONE, publish_time_ms=publish_time_ms)
    message = LargeMessage(made, *sealed, chunk_bytes)
    last = message.num_chunks - 1
    for chunk_id in {0, 1, last // 2, last}:
        counted = counted_bytes(entry_of(message, chunk_id))
        assert counted <= message.size_bytes(chunk_id) <= counted + 100


def test_chunk_ids_of_any_length_are_counted() -> None:
    message = large(bytes(2_000_000), 1)
    for chunk_id in (0, 9_999, 10_000, 99_999, 1_999_999):
        assert counted_bytes(entry_of(message, chunk_id)) <= message.size_bytes(chunk_id)


def test_the_counted_size_of_a_chunk_follows_a_new_attempt() -> None:
    message = large()
    message.start_again(3)
    assert message.num_chunks == 34
    assert counted_bytes(entry_of(message, 33)) <= message.size_bytes(33) < message.size_bytes(0)


# ---- attempts


def test_each_attempt_has_a_unique_uuid() -> None:
    message = large()
    names = set()
    for _ in range(50):
        names |= {entry.metadata.uuid for entry in entries(message)}
        message.start_again(7)
    assert len(names) == 50
    assert entry_of(large(), 0).metadata.uuid != entry_of(large(), 0).metadata.uuid


def test_a_new_attempt_shares_nothing_with_its_predecessor() -> None:
    message = large()
    before = entry_of(message, 0)
    for chunk_id in range(message.num_chunks - 1):
        message.stored(chunk_id, Position(1, chunk_id), duplicate=True)
    message.broken = True
    message.start_again(50)
    assert (message.num_chunks, message.broken, message.duplicate) == (2, False, False)
    assert message.message_id is None
    found = entries(message)
    assert b"".join(entry.payload for entry in found) == BODY
    assert {entry.metadata.num_chunks_from_msg for entry in found} == {2}
    assert (before.metadata.num_chunks_from_msg, len(before.payload)) == (15, 7)
    message.stored(1, Position(2, 1), duplicate=False)
    assert message.message_id is None
    message.stored(0, Position(2, 0), duplicate=False)
    assert str(message.message_id) == "2:0:-1;2:1:-1"


@given(order=st.permutations(range(5)), duplicates=st.sets(st.integers(0, 4)))
def test_the_id_of_a_message_is_known_once_all_chunks_are_stored(
    order: list[int], duplicates: set[int]
) -> None:
    message = large(bytes(50), 10)
    for chunk_id in order:
        assert message.message_id is None
        duplicate = chunk_id in duplicates
        message.stored(chunk_id, Position(1, 2 * chunk_id), duplicate=duplicate)
    assert isinstance(message.message_id, ChunkMessageId)
    assert str(message.message_id) == str(ChunkMessageId(MessageId(1, 0), MessageId(1, 8)))
    assert message.duplicate == (4 in duplicates)
