"""Messages to entries and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import Compression, MessageId
from seqgate.client._codec import OutgoingMessage, decode_entry, encode_batch, encode_single
from seqgate.errors import CorruptMessageError


def stored(entry: pb.Entry) -> pb.StoredEntry:
    arrived = pb.Entry.FromString(entry.SerializeToString())
    back = pb.StoredEntry(metadata=arrived.metadata, payload=arrived.payload, append_time=9)
    back.position.ledger_id, back.position.entry_id = 3, 4
    return back


texts = st.text(max_size=5)
messages = st.builds(
    OutgoingMessage,
    sequence_id=st.just(0),
    payload=st.binary(max_size=300),
    key=st.none() | texts,
    ordering_key=st.none() | st.binary(max_size=5),
    properties=st.dictionaries(texts, texts, max_size=3),
    event_time_ms=st.none() | st.integers(0, 2**63 - 1),
)


@given(messages, st.sampled_from(Compression))
def test_a_message_comes_back_as_it_was(message: OutgoingMessage, compression: Compression) -> None:
    entry = encode_single("p", message, compression=compression, publish_time_ms=7)
    (back,) = decode_entry("a/b/c", stored(entry))
    assert back.id == MessageId(3, 4)
    assert (back.topic, back.producer_name, back.sequence_id) == ("a/b/c", "p", 0)
    assert (back.publish_time_ms, back.append_time_ms) == (7, 9)
    assert same(message, back)


@given(
    st.lists(st.tuples(messages, st.integers(1, 2**40)), min_size=1, max_size=6),
    st.sampled_from(Compression),
)
def test_a_batch_comes_back_as_it_was(
    steps: list[tuple[OutgoingMessage, int]], compression: Compression
) -> None:
    sequence_id = 2**53
    sent = []
    for message, step in steps:
        sequence_id += step
        message.sequence_id = sequence_id
        sent.append(message)
    entry = encode_batch("p", sent, compression=compression, publish_time_ms=7)
    back = list(decode_entry("a/b/c", stored(entry)))
    assert [each.sequence_id for each in back] == [each.sequence_id for each in sent]
    assert [each.id.batch_index for each in back] == list(range(len(sent)))
    assert all(same(*pair) for pair in zip(sent, back, strict=True))


def same(sent: OutgoingMessage, back: object) -> bool:
    names = ("payload", "key", "ordering_key", "properties", "event_time_ms")
    return all(getattr(sent, name) == getattr(back, name) for name in names)


def test_consecutive_ids_cost_nothing() -> None:
    some = [OutgoingMessage(i, b"") for i in range(5)]
    entry = encode_batch("p", some, compression=Compression.NONE, publish_time_ms=0)
    assert not entry.metadata.sequence_id_steps


@pytest.mark.parametrize("compression", [*Compression])
def test_damage_is_noticed(compression: Compression) -> None:
    message = OutgoingMessage(0, b"hello " * 20)
    entry = stored(encode_single("p", message, compression=compression, publish_time_ms=0))
    entry.payload = bytes([entry.payload[0] ^ 1]) + entry.payload[1:]
    with pytest.raises(CorruptMessageError) as error:
        list(decode_entry("a/b/c", entry))
    assert error.value.details == {"ledger_id": "3", "entry_id": "4"}


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZLIB, Compression.ZSTD])
@pytest.mark.parametrize("claimed", [1, 119, 121, 2**31])
def test_a_payload_that_lies_about_its_size_is_not_unpacked(
    compression: Compression, claimed: int
) -> None:
    message = OutgoingMessage(0, b"hello " * 20)
    entry = stored(encode_single("p", message, compression=compression, publish_time_ms=0))
    entry.metadata.uncompressed_size = claimed
    with pytest.raises(CorruptMessageError):
        list(decode_entry("a/b/c", entry))


def test_a_batch_that_does_not_hold_what_it_says_is_noticed() -> None:
    some = [OutgoingMessage(i, b"") for i in range(3)]
    entry = stored(encode_batch("p", some, compression=Compression.NONE, publish_time_ms=0))
    entry.metadata.num_messages_in_batch = 2
    with pytest.raises(CorruptMessageError):
        list(decode_entry("a/b/c", entry))
