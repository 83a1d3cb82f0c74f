"""Messages, encoded to entries and decoded."""

from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import Compression, Message, MessageId
from seqgate.client._codec import OutgoingMessage, decode_entry, encode_batch, encode_single
from seqgate.errors import CorruptMessageError
from seqgate.payloads import SingleMessage, pack_batch
from seqgate.times import timestamp


def stored(entry: pb.Entry) -> pb.StoredEntry:
    arrived = pb.Entry.FromString(entry.SerializeToString())
    back = pb.StoredEntry(
        metadata=arrived.metadata, payload=arrived.payload, append_time=timestamp(9)
    )
    back.position.ledger_id, back.position.entry_id = 3, 4
    return back


texts = st.text(max_size=5)
messages = st.builds(
    OutgoingMessage,
    sequence_id=st.just(0),
    payload=st.binary(max_size=300),
    key=st.none() | texts | st.binary(max_size=5),
    ordering_key=st.none() | st.binary(max_size=5),
    properties=st.dictionaries(texts, texts, max_size=3),
    event_time_ms=st.none() | st.integers(0, 2**63 - 1),
)


@given(messages, st.sampled_from(Compression))
def test_a_message_is_decoded_unchanged(message: OutgoingMessage, compression: Compression) -> None:
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
def test_a_batch_is_decoded_unchanged(
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


def same(sent: OutgoingMessage, back: Message) -> bool:
    names = ("payload", "ordering_key", "properties", "event_time_ms")
    return same_key(sent.key, back) and all(
        getattr(sent, name) == getattr(back, name) for name in names
    )


def same_key(key: str | bytes | None, back: Message) -> bool:
    found = back.key, back.key_bytes, back.has_bytes_key
    match key:
        case None:
            return found == (None, None, False)
        case str():
            return found == (key, key.encode(), False)
        case _:
            return found == (b64encode(key).decode(), key, True)


def encoded(message: OutgoingMessage) -> entry_pb2.EntryMetadata:
    entry = encode_single("p", message, compression=Compression.NONE, publish_time_ms=0)
    return entry.metadata


def test_a_binary_key_is_encoded_like_pulsar() -> None:
    metadata = encoded(OutgoingMessage(0, b"", key=b"\x00\xff"))
    assert (metadata.partition_key, metadata.partition_key_b64_encoded) == ("AP8=", True)
    text = encoded(OutgoingMessage(0, b"", key="AP8="))
    assert (text.partition_key, text.HasField("partition_key_b64_encoded")) == ("AP8=", False)


def test_the_delivery_time_is_stored_in_the_entry() -> None:
    assert encoded(OutgoingMessage(0, b"", deliver_at_ms=0)).HasField("deliver_at_time")
    assert encoded(OutgoingMessage(0, b"", deliver_at_ms=7)).deliver_at_time == 7
    assert not encoded(OutgoingMessage(0, b"")).HasField("deliver_at_time")


@pytest.mark.parametrize("key", ["%", "AP8", "AP8=\n", "ä", "A"])
@pytest.mark.parametrize("batched", [False, True])
def test_an_invalid_base64_key_is_reported(key: str, batched: bool) -> None:
    metadata = entry_pb2.EntryMetadata(partition_key=key, partition_key_b64_encoded=True)
    entry = pb.StoredEntry(metadata=metadata)
    if batched:
        single = entry_pb2.SingleMessageMetadata(partition_key=key, partition_key_b64_encoded=True)
        entry = pb.StoredEntry(payload=pack_batch([SingleMessage(single, b"")]))
        entry.metadata.num_messages_in_batch = 1
    with pytest.raises(CorruptMessageError):
        list(decode_entry("a/b/c", entry))


def test_key_fields_are_unset_without_a_key() -> None:
    metadata = entry_pb2.EntryMetadata(partition_key_b64_encoded=True)
    (back,) = decode_entry("a/b/c", pb.StoredEntry(metadata=metadata))
    assert same_key(None, back)


@pytest.mark.parametrize(
    ("key", "ordering_key"),
    [(None, None), ("k", None), (b"k", None), ("k", b"o"), (b"", b""), (None, b"o")],
)
def test_a_batch_with_one_key_has_that_key(
    key: str | bytes | None, ordering_key: bytes | None
) -> None:
    some = [OutgoingMessage(i, b"", key=key, ordering_key=ordering_key) for i in range(2)]
    entry = encode_batch("p", some, compression=Compression.NONE, publish_time_ms=0, keyed=True)
    alone = encoded(some[0])
    for name in ("partition_key", "partition_key_b64_encoded", "ordering_key"):
        assert entry.metadata.HasField(name) == alone.HasField(name)
        assert getattr(entry.metadata, name) == getattr(alone, name)
    assert all(same_key(key, back) for back in decode_entry("a/b/c", stored(entry)))


def test_a_batch_with_many_keys_has_no_key() -> None:
    some = [OutgoingMessage(i, b"", key="k", ordering_key=b"o") for i in range(2)]
    entry = encode_batch("p", some, compression=Compression.NONE, publish_time_ms=0)
    assert not entry.metadata.HasField("partition_key")
    assert not entry.metadata.HasField("ordering_key")


def test_keys_of_different_kinds_differ() -> None:
    keys: list[tuple[str | bytes | None, bytes | None]] = [
        (None, None),
        ("k", None),
        (b"k", None),
        ("", None),
        (b"", None),
        (None, b"k"),
        (None, b""),
    ]
    groups = {OutgoingMessage(0, b"", key=key, ordering_key=order).group for key, order in keys}
    assert len(groups) == len(keys)
    for key in ("k", b"k", None):  # the ordering key decides
        assert OutgoingMessage(0, b"", key=key, ordering_key=b"o").group == ("ordering", b"o")


def test_properties_of_a_batch_apply_to_its_messages() -> None:
    some = [
        OutgoingMessage(0, b""),
        OutgoingMessage(1, b"", properties={"origin": "own", "a": "b"}),
    ]
    entry = encode_batch("p", some, compression=Compression.NONE, publish_time_ms=0)
    entry.metadata.properties.update({"origin": "its batch's"})
    back = decode_entry("a/b/c", stored(entry))
    assert [each.properties for each in back] == [
        {"origin": "its batch's"},
        {"origin": "own", "a": "b"},
    ]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shown", [{}, {"origin": "EWR"}])
def test_a_batch_has_its_filter_properties_and_messages_keep_their_own(
    shown: dict[str, str], count: int
) -> None:
    some = [
        OutgoingMessage(i, b"", properties={"n": str(i), "carrier": "AA"} | shown, shown=shown)
        for i in range(count)
    ]
    entry = encode_batch("p", some, compression=Compression.NONE, publish_time_ms=0)
    assert dict(entry.metadata.properties) == shown
    back = decode_entry("a/b/c", stored(entry))
    assert [each.properties for each in back] == [each.properties for each in some]


def test_a_batch_of_one_has_the_delivery_time_and_the_keys_of_its_message() -> None:
    message = OutgoingMessage(0, b"", "k", b"o", deliver_at_ms=0, event_time_ms=7, shown={})
    batch = encode_batch("p", [message], compression=Compression.NONE, publish_time_ms=0)
    alone = encoded(message)
    for name in ("partition_key", "ordering_key", "deliver_at_time"):
        assert batch.metadata.HasField(name)
        assert getattr(batch.metadata, name) == getattr(alone, name)
    (back,) = decode_entry("a/b/c", stored(batch))
    assert (back.key, back.ordering_key, back.event_time_ms) == ("k", b"o", 7)


def test_consecutive_ids_take_no_bytes() -> None:
    some = [OutgoingMessage(i, b"") for i in range(5)]
    entry = encode_batch("p", some, compression=Compression.NONE, publish_time_ms=0)
    assert not entry.metadata.sequence_id_steps


@pytest.mark.parametrize("compression", [*Compression])
def test_damage_is_reported(compression: Compression) -> None:
    message = OutgoingMessage(0, b"hello " * 20)
    entry = stored(encode_single("p", message, compression=compression, publish_time_ms=0))
    entry.payload = bytes([entry.payload[0] ^ 1]) + entry.payload[1:]
    with pytest.raises(CorruptMessageError) as error:
        list(decode_entry("a/b/c", entry))
    assert error.value.details == {"ledger_id": "3", "entry_id": "4"}


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZLIB, Compression.ZSTD])
@pytest.mark.parametrize("claimed", [1, 119, 121, 2**31])
def test_a_payload_with_a_false_size_is_not_decompressed(
    compression: Compression, claimed: int
) -> None:
    message = OutgoingMessage(0, b"hello " * 20)
    entry = stored(encode_single("p", message, compression=compression, publish_time_ms=0))
    entry.metadata.uncompressed_size = claimed
    with pytest.raises(CorruptMessageError):
        list(decode_entry("a/b/c", entry))


def test_a_batch_that_contradicts_its_metadata_is_reported() -> None:
    some = [OutgoingMessage(i, b"") for i in range(3)]
    entry = stored(encode_batch("p", some, compression=Compression.NONE, publish_time_ms=0))
    entry.metadata.num_messages_in_batch = 2
    with pytest.raises(CorruptMessageError):
        list(decode_entry("a/b/c", entry))
