"""Message ids, as Pulsar's own client (C++, as its Python package) reads and writes them."""

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.message_id import EARLIEST_ID, LATEST_ID, ChunkMessageId, MessageId
from seqgate.types import SEQUENCE_ID_MAX

SINGLE = [
    MessageId(1, 2),
    MessageId(1, 2, 3),
    MessageId(300, 70000, 0),
    MessageId(1, 2, 3, 4),
    MessageId(1, 2, -1, 0),
    MessageId(2**32, 2**40, 2**31 - 1, 2**31 - 1),
    EARLIEST_ID,
    LATEST_ID,
]
CHUNKS = [
    ChunkMessageId(MessageId(0, 0, 0), MessageId(1, 1, 1)),
    ChunkMessageId(MessageId(5, 7), MessageId(5, 9)),
    ChunkMessageId(MessageId(5, 2**40, 3), MessageId(2**62, 0, 3)),
]

entries = st.integers(-1, 3) | st.integers(0, SEQUENCE_ID_MAX)
small = st.integers(-1, 2) | st.integers(0, 2**31 - 1)
places = st.tuples(entries, entries)
single_ids = st.builds(MessageId, entries, entries, small, small, small)


def chunk_id(ends: tuple[tuple[int, int], tuple[int, int]], partition: int) -> ChunkMessageId:
    """All chunks are in one partition: Pulsar's client writes the first chunk's partition only if
    the last one has one."""
    first, last = sorted(ends)
    return ChunkMessageId(MessageId(*first, partition), MessageId(*last, partition))


chunk_ids = st.builds(chunk_id, st.tuples(places, places), small)


def theirs(each: MessageId) -> pulsar.MessageId:
    return pulsar.MessageId(each.partition, each.ledger_id, each.entry_id, each.batch_index)


def in_their_words(each: MessageId) -> str:
    if isinstance(each, ChunkMessageId):
        return f"{in_their_words(each.first_chunk)};{in_their_words(each.last_chunk)}"
    return f"({each.ledger_id},{each.entry_id},{each.partition},{each.batch_index})"


@pytest.mark.parametrize("message_id", SINGLE, ids=str)
def test_ids_encoded_by_pulsars_client_are_decoded(message_id: MessageId) -> None:
    back = MessageId.from_bytes(theirs(message_id).serialize())
    assert type(back) is MessageId
    assert back == message_id
    assert MessageId.parse(str(theirs(message_id))) == message_id


@pytest.mark.parametrize("message_id", [*SINGLE, *CHUNKS], ids=str)
def test_encoded_ids_are_decoded_by_pulsars_client(message_id: MessageId) -> None:
    back = pulsar.MessageId.deserialize(message_id.to_bytes())
    assert str(back) == in_their_words(message_id)
    assert (back.ledger_id(), back.entry_id()) == message_id.position
    assert (back.partition(), back.batch_index()) == (message_id.partition, message_id.batch_index)


@pytest.mark.parametrize("message_id", CHUNKS, ids=str)
def test_a_chunk_id_keeps_its_first_chunk_through_pulsars_client(
    message_id: ChunkMessageId,
) -> None:
    """Pulsar's package cannot create a chunk id, but decodes one and encodes it in its own form."""
    again = pulsar.MessageId.deserialize(message_id.to_bytes()).serialize()
    assert again != message_id.to_bytes()
    for back in (MessageId.from_bytes(again), MessageId.parse(in_their_words(message_id))):
        assert isinstance(back, ChunkMessageId)
        assert str(back) == str(message_id)


def test_the_batch_size_survives_pulsars_client() -> None:
    again = pulsar.MessageId.deserialize(MessageId(1, 2, 3, 4, 10).to_bytes()).serialize()
    assert MessageId.from_bytes(again).batch_size == 10


def test_the_earliest_and_latest_ids_are_pulsars() -> None:
    assert MessageId.from_bytes(pulsar.MessageId.earliest.serialize()) == EARLIEST_ID
    assert MessageId.from_bytes(pulsar.MessageId.latest.serialize()) == LATEST_ID
    assert pulsar.MessageId.deserialize(EARLIEST_ID.to_bytes()) == pulsar.MessageId.earliest
    assert pulsar.MessageId.deserialize(LATEST_ID.to_bytes()) == pulsar.MessageId.latest


def test_topic_message_ids_are_read_by_both_sides() -> None:
    data = CHUNKS[0].to_bytes()
    with_topic = pulsar.MessageId.deserialize(data, topic="persistent://a/b/c-partition-1")
    assert str(with_topic) == in_their_words(CHUNKS[0])
    back = MessageId.from_bytes(with_topic.serialize())
    assert isinstance(back, ChunkMessageId)
    assert str(back) == str(CHUNKS[0])


@given(single_ids | chunk_ids)
def test_every_id_survives_pulsars_client(message_id: MessageId) -> None:
    back = pulsar.MessageId.deserialize(message_id.to_bytes())
    assert str(back) == in_their_words(message_id)
    ours = MessageId.from_bytes(back.serialize())
    assert type(ours) is type(message_id)
    assert str(ours) == str(message_id)
