"""Message ids: order, text, bytes.

The golden bytes are Pulsar's; tests/unit/test_message_id_interop.py asks its client itself.
"""

import copy
import operator
import pickle
from dataclasses import FrozenInstanceError
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.message_id import EARLIEST_ID, LATEST_ID, ChunkMessageId, MessageId
from seqgate.types import SEQUENCE_ID_MAX, Position

INT32_MAX = 2**31 - 1
MINUS_ONE = "ff ff ff ff ff ff ff ff ff 01"
MINUS_TWO = "fe ff ff ff ff ff ff ff ff 01"
HIGHEST = "ff ff ff ff ff ff ff ff 7f"
TOO_HIGH = "80 80 80 80 80 80 80 80 80 01"  # 2^63


def chunk(first: MessageId, last: MessageId) -> ChunkMessageId:
    return ChunkMessageId(first, last)


IN_PARTITION = chunk(MessageId(0, 0, 0), MessageId(1, 1, 1))
UNPARTITIONED = chunk(MessageId(5, 7), MessageId(5, 9))

JAVA = [
    (MessageId(1, 2), "08 01 10 02 30 00"),
    (MessageId(1, 2, 3), "08 01 10 02 18 03 30 00"),
    (MessageId(300, 70000, 0), "08 ac 02 10 f0 a2 04 18 00 30 00"),
    (MessageId(1, 2, 3, 4, 10), "08 01 10 02 18 03 20 04 30 0a"),
    (MessageId(1, 2, -1, 0, 0), "08 01 10 02 20 00 30 00"),  # as a producer gets it
    (MessageId(1, 2, 3, 4, -1), "08 01 10 02 18 03 20 04"),
    (IN_PARTITION, "08 01 10 01 18 01 30 00 3a 08 08 00 10 00 18 00 30 00"),
    (UNPARTITIONED, "08 05 10 09 30 00 3a 06 08 05 10 07 30 00"),
    (EARLIEST_ID, f"08 {MINUS_ONE} 10 {MINUS_ONE} 30 00"),
    (LATEST_ID, f"08 {HIGHEST} 10 {HIGHEST} 30 00"),
]

CPP = [
    (MessageId(1, 2), "08 01 10 02"),
    (MessageId(1, 2, 3), "08 01 10 02 18 03"),
    (MessageId(300, 70000, 0), "08 ac 02 10 f0 a2 04 18 00"),
    (MessageId(1, 2, 3, 4), "08 01 10 02 18 03 20 04"),
    (IN_PARTITION, "08 01 10 01 18 01 3a 06 08 00 10 00 18 00"),
    (UNPARTITIONED, "08 05 10 09 3a 04 08 05 10 07"),
    (EARLIEST_ID, f"08 {MINUS_ONE} 10 {MINUS_ONE}"),
    (LATEST_ID, f"08 {HIGHEST} 10 {HIGHEST}"),
]

numbers = st.integers(-1, 3) | st.integers(0, SEQUENCE_ID_MAX)
small_numbers = st.integers(-1, 2) | st.integers(0, INT32_MAX)
plain_ids = st.builds(MessageId, numbers, numbers, small_numbers)
single_ids = st.builds(MessageId, numbers, numbers, small_numbers, small_numbers, small_numbers)
chunk_ids = st.lists(plain_ids, min_size=2, max_size=2).map(lambda each: chunk(*sorted(each)))
ids = single_ids | chunk_ids

# Few enough to collide.
near = st.integers(-1, 1)
near_plain_ids = st.builds(MessageId, near, near, near)
near_ids = st.builds(MessageId, near, near, near, near, near) | st.lists(
    near_plain_ids, min_size=2, max_size=2
).map(lambda each: chunk(*sorted(each)))


def key(each: MessageId) -> tuple[int, int, int, int]:
    return each.ledger_id, each.entry_id, each.partition, each.batch_index


def everything(each: MessageId) -> tuple[object, ...]:
    """All fields: equality leaves out the batch's size and the first chunk."""
    first = each.first_chunk if isinstance(each, ChunkMessageId) else None
    return type(each), key(each), each.batch_size, first and key(first)


# Values.


def test_ids_default_to_no_partition_and_no_batch() -> None:
    assert everything(MessageId(5, 9)) == everything(MessageId(5, 9, -1, -1, 0))
    assert MessageId(5, 9).position == Position(5, 9)


def test_a_chunk_id_is_its_last_chunks_id() -> None:
    assert key(UNPARTITIONED) == (5, 9, -1, -1)
    assert UNPARTITIONED.position == Position(5, 9)
    assert UNPARTITIONED.batch_size == 0
    assert everything(UNPARTITIONED.first_chunk) == everything(MessageId(5, 7))
    assert everything(UNPARTITIONED.last_chunk) == everything(MessageId(5, 9))


def test_the_chunks_of_a_chunk_id_are_plain_ids() -> None:
    nested = chunk(UNPARTITIONED, chunk(MessageId(5, 9), MessageId(6, 0)))
    assert everything(nested) == everything(chunk(MessageId(5, 9), MessageId(6, 0)))
    assert type(nested.first_chunk) is type(nested.last_chunk) is MessageId


@pytest.mark.parametrize(
    ("first", "last", "reason"),
    [
        (MessageId(5, 9), MessageId(5, 7), "first chunk 5:9:-1 is after its last 5:7:-1"),
        (MessageId(5, 7), EARLIEST_ID, "is after"),  # Pulsar's receipt of a duplicate
        (MessageId(5, 7, -1, 0), MessageId(5, 9), "a chunk is in a batch"),
        (MessageId(5, 7), MessageId(5, 9, -1, 0), "a chunk is in a batch"),
    ],
)
def test_an_invalid_range_of_chunks_is_refused(
    first: MessageId, last: MessageId, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        ChunkMessageId(first, last)


@pytest.mark.parametrize("message_id", [MessageId(1, 2, 3, 4, 10), UNPARTITIONED])
def test_ids_are_immutable_values(message_id: MessageId) -> None:
    with pytest.raises(FrozenInstanceError):
        message_id.entry_id = 3  # type: ignore[misc]
    assert not hasattr(message_id, "__dict__")
    assert everything(copy.deepcopy(message_id)) == everything(message_id)
    assert everything(pickle.loads(pickle.dumps(message_id))) == everything(message_id)
    assert everything(eval(repr(message_id))) == everything(message_id)


# Order.


def test_an_entry_is_before_its_batch_and_a_partition_decides_first() -> None:
    ordered = [
        EARLIEST_ID,
        MessageId(0, 9),
        MessageId(1, 1),
        MessageId(1, 1, -1, 0),
        MessageId(1, 1, -1, 1),
        MessageId(1, 1, 0),
        UNPARTITIONED.first_chunk,
        UNPARTITIONED,
        LATEST_ID,
    ]
    assert all(earlier < later for earlier, later in pairwise(ordered))


def test_a_chunk_id_equals_its_last_chunks_id_as_a_key() -> None:
    """Pulsar's hashes differ, which broke the redelivery of chunked messages
    (apache/pulsar#25229)."""
    chunked, last = IN_PARTITION, MessageId(1, 1, 1)
    assert chunked == last
    assert last == chunked
    assert hash(chunked) == hash(last)
    by_chunked: dict[MessageId, str] = {chunked: "held"}
    assert by_chunked[last] == "held"
    by_last = {last: "held"}
    assert by_last[chunked] == "held"
    assert chunked == chunk(MessageId(1, 0, 1), last)


def test_the_batch_size_does_not_affect_comparison() -> None:
    assert MessageId(1, 2, 3, 4, 10) == MessageId(1, 2, 3, 4, -1)
    assert hash(MessageId(1, 2, 3, 4, 10)) == hash(MessageId(1, 2, 3, 4, -1))
    assert not MessageId(1, 2, 3, 4, 9) < MessageId(1, 2, 3, 4, 10)


@pytest.mark.parametrize("message_id", [MessageId(1, 1, 1), IN_PARTITION])
@pytest.mark.parametrize("other", [(1, 1, 1, -1), Position(1, 1), "1:1:1", 1, None])
def test_an_id_equals_no_other_type(message_id: MessageId, other: Any) -> None:
    assert message_id != other
    assert other != message_id
    for compare in (operator.lt, operator.le, operator.gt, operator.ge):
        with pytest.raises(TypeError):
            compare(message_id, other)


@given(ids | near_ids, ids | near_ids)
def test_ids_are_ordered_by_ledger_entry_partition_and_batch_index(
    left: MessageId, right: MessageId
) -> None:
    assert (left < right) == (key(left) < key(right))
    assert (left <= right) == (key(left) <= key(right))
    assert (left > right) == (key(left) > key(right))
    assert (left >= right) == (key(left) >= key(right))
    assert (left == right) == (key(left) == key(right))
    assert (left != right) == (key(left) != key(right))
    assert [left < right, left == right, left > right].count(True) == 1


@given(near_ids, near_ids)
def test_equal_ids_have_equal_hashes(left: MessageId, right: MessageId) -> None:
    assert left != right or hash(left) == hash(right)
    assert len({left, right}) == len({key(left), key(right)})


# Text.


@pytest.mark.parametrize(
    ("message_id", "text"),
    [
        (MessageId(5, 9), "5:9:-1"),
        (MessageId(5, 9, 3), "5:9:3"),
        (MessageId(5, 9, -1, 3), "5:9:-1:3"),
        (UNPARTITIONED, "5:7:-1;5:9:-1"),
        (IN_PARTITION, "0:0:0;1:1:1"),
        (EARLIEST_ID, "-1:-1:-1"),
        (LATEST_ID, "9223372036854775807:9223372036854775807:-1"),
    ],
)
def test_ids_are_written_as_pulsar_writes_them(message_id: MessageId, text: str) -> None:
    assert str(message_id) == text
    assert everything(MessageId.parse(text)) == everything(message_id)


@pytest.mark.parametrize(
    ("text", "message_id"),
    [
        ("5:9", MessageId(5, 9)),  # the partition may be left out
        ("5:9:-1:-1", MessageId(5, 9)),
        ("(5,9,-1,-1)", MessageId(5, 9)),
        ("(5,9,2,3)", MessageId(5, 9, 2, 3)),
        ("(5,7,-1,-1);(5,9,-1,-1)", UNPARTITIONED),
        ("(0,0,0,-1);(1,1,1,-1)", IN_PARTITION),
        ("5:9:-1;5:9:-1", chunk(MessageId(5, 9), MessageId(5, 9))),
        (f"0:0:{SEQUENCE_ID_MAX}:{SEQUENCE_ID_MAX}", MessageId(0, 0, *[SEQUENCE_ID_MAX] * 2)),
    ],
)
def test_other_spellings_of_an_id_are_parsed(text: str, message_id: MessageId) -> None:
    assert everything(MessageId.parse(text)) == everything(message_id)


@pytest.mark.parametrize(
    "text",
    [
        *["", "5", "5:", "5:x", "1:2:3:4:5", "5:-2", f"1:{2**63}", f"{2**63}:1:-1"],
        *["1:2:-2", "1:2:3:-2", f"1:2:{2**63}", f"1:2:3:{2**63}", "1:" + "9" * 5000],
        *[" 5:9", "5:9\n", "5: 9", "+5:9", "-0:9", "05:9", "1_0:9", "5:٩", "5.0:9", "5,9,-1,-1"],
        *["(5,9,-1)", "(5,9)", "(5,9,-1,-1", "5,9,-1,-1)", "(5, 9, -1, -1)", "(5:9:-1:-1)"],
        *["(5,9,-1,-2)", f"(5,{2**63},-1,-1)", "(5,9,-1,-1);", ";(5,9,-1,-1)"],
        *["5:7:-1;", ";5:9:-1", ";", "5:7;5:9", "5:7:-1;5:9", "5:7:-1;5:8:-1;5:9:-1"],
        *["5:7:-1:0;5:9:-1", "5:7:-1;5:9:-1:0", "(5,7,-1,0);(5,9,-1,-1)", "5:7:-1,5:9:-1"],
        *["(5,7,-1,-1);5:9:-1", "5:7:-1;(5,9,-1,-1)", f"5:7:-1;5:{2**63}:-1"],
        *["5:9:-1;5:7:-1", "(5,9,-1,-1);(5,7,-1,-1)", "5:9:1;5:9:0"],  # the first is after the last
    ],
)
def test_invalid_ids_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a message id"):
        MessageId.parse(text)


@given(ids)
def test_a_formatted_id_is_parsed_unchanged(message_id: MessageId) -> None:
    back = MessageId.parse(str(message_id))
    assert type(back) is type(message_id)
    assert str(back) == str(message_id)
    assert back == message_id


@given(st.text(alphabet="0123-:;(),", max_size=24))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        message_id = MessageId.parse(text)
    except ValueError:
        return
    assert everything(MessageId.parse(str(message_id))) == everything(message_id)


# Bytes.


@pytest.mark.parametrize(("message_id", "data"), JAVA)
def test_ids_are_encoded_as_pulsars_java_client_does(message_id: MessageId, data: str) -> None:
    assert message_id.to_bytes().hex(" ") == data


@pytest.mark.parametrize(("message_id", "data"), JAVA + CPP)
def test_ids_encoded_by_pulsars_clients_are_decoded(message_id: MessageId, data: str) -> None:
    decoded = MessageId.from_bytes(bytes.fromhex(data))
    assert type(decoded) is type(message_id)
    assert decoded == message_id
    assert decoded.batch_size == max(message_id.batch_size, 0)
    if isinstance(decoded, ChunkMessageId):
        assert isinstance(message_id, ChunkMessageId)
        assert decoded.first_chunk == message_id.first_chunk


@pytest.mark.parametrize(
    ("data", "message_id"),
    [
        # An ack set, packed and not, and unknown fields.
        ("08 01 10 02 28 07 28 01", MessageId(1, 2)),
        ("08 01 10 02 2a 02 07 01", MessageId(1, 2)),
        ("08 01 10 02 40 05 4a 02 aa bb", MessageId(1, 2)),
        # A field of another type is unknown as well.
        ("08 01 10 02 1a 01 03", MessageId(1, 2)),
        # In any order; the last of two applies.
        ("18 03 10 02 08 09 08 01", MessageId(1, 2, 3)),
        # Unset, but written.
        (f"08 01 10 02 18 {MINUS_ONE} 30 {MINUS_ONE}", MessageId(1, 2)),
        (f"08 01 10 02 20 {MINUS_ONE} 30 {MINUS_ONE}", MessageId(1, 2, -1, -1, -1)),
        # Only a batch has a size.
        ("08 01 10 02 30 0a", MessageId(1, 2)),
    ],
)
def test_other_encodings_of_an_id_are_decoded(data: str, message_id: MessageId) -> None:
    assert everything(MessageId.from_bytes(bytes.fromhex(data))) == everything(message_id)


def test_an_id_with_a_batch_index_and_a_first_chunk_is_a_batch_id() -> None:
    data = bytes.fromhex("08 01 10 02 18 03 20 04 30 0a 3a 06 08 01 10 01 18 03")
    assert everything(MessageId.from_bytes(data)) == everything(MessageId(1, 2, 3, 4, 10))


def test_other_fields_of_a_first_chunk_are_ignored() -> None:
    data = bytes.fromhex("08 01 10 02 3a 0e 08 01 10 01 20 04 30 0a 3a 04 08 01 10 00")
    expected = chunk(MessageId(1, 1), MessageId(1, 2))
    assert everything(MessageId.from_bytes(data)) == everything(expected)


def test_the_id_of_a_topics_message_keeps_its_first_chunk() -> None:
    """A topic id has the bytes of the inner id: Pulsar reads them with another method, which turns
    a chunk id into a plain one."""
    inside = chunk(MessageId(5, 7, 2), MessageId(5, 9, 2))
    decoded = MessageId.from_bytes(inside.to_bytes())
    assert everything(decoded) == everything(inside)
    assert str(decoded) == "5:7:2;5:9:2"


def test_unset_fields_are_not_encoded() -> None:
    assert MessageId(1, 2, -1).to_bytes().hex(" ") == "08 01 10 02 30 00"
    assert MessageId(1, 2, -1, 4, -1).to_bytes().hex(" ") == "08 01 10 02 20 04"
    assert MessageId.from_bytes(bytes.fromhex("08 01 10 02")).partition == -1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("", "no ledger or no entry"),
        ("08 01", "no ledger or no entry"),
        ("10 02", "no ledger or no entry"),
        ("0a 01 01 10 02", "no ledger or no entry"),  # a ledger of another type
        ("08 01 10 02 3a 00", "no ledger or no entry"),  # of the first chunk
        ("08 01 10 02 3a 02 08 01", "no ledger or no entry"),
        ("08", "malformed"),
        ("08 01 10 82", "malformed"),
        ("08 01 10 " + "ff " * 10 + "01", "malformed"),
        ("08 01 10 02 3a 04 08 01", "malformed"),
        ("08 01 10 02 3a 01 08", "malformed"),
        ("00 01", "malformed"),
        (f"08 {MINUS_TWO} 10 02", "out of bounds"),
        (f"08 01 10 {MINUS_TWO}", "out of bounds"),
        (f"08 01 10 {TOO_HIGH}", "out of bounds"),
        (f"08 01 10 02 18 {MINUS_TWO}", "out of bounds"),
        (f"08 01 10 02 20 {MINUS_TWO}", "out of bounds"),
        (f"08 01 10 02 20 00 30 {MINUS_TWO}", "out of bounds"),
        (f"08 01 10 02 3a 0d 08 01 10 {MINUS_TWO}", "out of bounds"),
        ("08 01 10 02 3a 04 08 01 10 03", "first chunk 1:3:-1 is after its last 1:2:-1"),
    ],
)
def test_malformed_bytes_are_refused(data: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"not a message id.*{reason}"):
        MessageId.from_bytes(bytes.fromhex(data))


def test_endlessly_nested_first_chunks_are_refused() -> None:
    data = b""
    for _ in range(200):
        size = len(data)
        length = bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])
        data = b"\x08\x01\x10\x02\x3a" + length + data
    with pytest.raises(ValueError, match="malformed"):
        MessageId.from_bytes(data)


@pytest.mark.parametrize("data", [None, "08011002", 5])
def test_decoding_other_types_raises_type_error(data: object) -> None:
    with pytest.raises(TypeError):
        MessageId.from_bytes(data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message_id",
    [
        *[MessageId(-2, 0), MessageId(0, -2), MessageId(2**63, 0), MessageId(0, 2**63)],
        *[MessageId(0, 0, -2), MessageId(0, 0, 2**31), MessageId(0, 0, 0, -2)],
        *[MessageId(0, 0, 0, 2**31), MessageId(0, 0, 0, 0, -2), MessageId(0, 0, 0, 0, 2**31)],
        *[chunk(MessageId(0, -2), MessageId(0, 0)), chunk(MessageId(0, 0), MessageId(0, 2**63))],
    ],
)
def test_an_id_out_of_bounds_is_not_encoded(message_id: MessageId) -> None:
    with pytest.raises(ValueError, match="out of bounds"):
        message_id.to_bytes()


@given(ids)
def test_an_encoded_id_is_decoded_unchanged(message_id: MessageId) -> None:
    back = MessageId.from_bytes(message_id.to_bytes())
    assert back == message_id
    assert type(back) is type(message_id)
    assert str(back) == str(message_id)
    in_batch = message_id.batch_index != -1
    assert back.batch_size == (max(message_id.batch_size, 0) if in_batch else 0)


field = st.sampled_from([0x08, 0x10, 0x18, 0x20, 0x28, 0x30, 0x3A, 0x40])
varint = st.binary(max_size=9).map(lambda data: bytes(each | 128 for each in data) + b"\1")


@given(
    st.binary(max_size=40)
    | st.lists(st.tuples(field, varint), max_size=8).map(
        lambda fields: b"".join(bytes([tag]) + value for tag, value in fields)
    )
)
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        message_id = MessageId.from_bytes(data)
    except ValueError:
        return
    assert MessageId.from_bytes(message_id.to_bytes()) == message_id
    assert type(MessageId.from_bytes(message_id.to_bytes())) is type(message_id)
