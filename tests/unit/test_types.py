"""Names and ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.types import (
    SEQUENCE_ID_MAX,
    InvalidNameError,
    MessageId,
    Position,
    TopicName,
    check_producer_name,
)


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("orders", "public/default/orders"),
        ("acme/shop/orders", "acme/shop/orders"),
        ("persistent://acme/shop/orders-partition-0", "acme/shop/orders-partition-0"),
        ("__system", "public/default/__system"),
    ],
)
def test_topics_are_named_as_people_name_them(text: str, full: str) -> None:
    assert str(TopicName.expand(text)) == full


@pytest.mark.parametrize(
    "text",
    [
        *["", "a", "a/b", "a/b/", "/b/c", "a//c", "a/b/c/d", "a/b/c d", "a/b/{c}", "a/b/-c"],
        *["a/b/..", "a/b/c\n", "a/b/ü", "a/b/" + "c" * 252],
    ],
)
def test_what_cannot_be_a_topic_is_refused(text: str) -> None:
    with pytest.raises(InvalidNameError):
        TopicName.parse(text)


def test_the_longest_topic_name_is_255_bytes_long() -> None:
    assert TopicName.parse("a/b/" + "c" * 251).namespace == "a/b"


@pytest.mark.parametrize("name", ["p", "naïve 📈", "a" * 255, "{x}", "with space"])
def test_producers_are_named_freely(name: str) -> None:
    assert check_producer_name(name) == name


@pytest.mark.parametrize("name", ["", "a" * 256, "ü" * 128, "a\nb", "a\x00", "a\x7f", "\ud800"])
def test_what_cannot_be_a_producer_is_refused(name: str) -> None:
    with pytest.raises(InvalidNameError):
        check_producer_name(name)


@pytest.mark.parametrize(
    ("message_id", "text"),
    [
        (MessageId(5, 9), "5:9:-1"),
        (MessageId(5, 9, 3), "5:9:3"),
        (MessageId(5, 9, -1, 3), "5:9:-1:3"),
    ],
)
def test_ids_are_written_as_pulsar_writes_them(message_id: MessageId, text: str) -> None:
    assert str(message_id) == text
    assert MessageId.parse(text) == message_id


def test_the_partition_may_be_left_out() -> None:
    assert MessageId.parse("5:9") == MessageId(5, 9)
    assert MessageId.parse("5:9").position == Position(5, 9)


@pytest.mark.parametrize("text", ["", "5", "5:", "5:x", "1:2:3:4:5", "5:-2", f"1:{2**63}"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a message id"):
        MessageId.parse(text)


numbers = st.integers(-1, 3) | st.integers(0, SEQUENCE_ID_MAX)
ids = st.builds(MessageId, numbers, numbers, st.integers(-1, 2), st.integers(-1, 2))


@given(ids, ids)
def test_ids_are_ordered_by_ledger_entry_partition_and_batch_index(
    left: MessageId, right: MessageId
) -> None:
    def key(each: MessageId) -> tuple[int, int, int, int]:
        return each.ledger_id, each.entry_id, each.partition, each.batch_index

    assert (left < right) == (key(left) < key(right))
    assert (left == right) == (key(left) == key(right))
    assert MessageId.parse(str(left)) == left
