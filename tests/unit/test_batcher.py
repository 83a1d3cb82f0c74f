"""Which messages travel together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.client import Batching
from seqgate.client._batcher import Batcher
from seqgate.client._codec import OutgoingMessage


def batches(batching: Batching | None, ids: list[int], payload: bytes = b"") -> list[list[int]]:
    batcher = Batcher(batching)
    parcels = [parcel for each in ids for parcel in batcher.add(OutgoingMessage(each, payload))]
    parcels += batcher.flush()
    return [[message.sequence_id for message in parcel] for parcel in parcels]


def test_without_batching_each_message_travels_alone() -> None:
    assert batches(None, [0, 1, 1]) == [[0], [1], [1]]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([0, 1, 2], [[0, 1, 2]]),
        ([0, 1, 2, 3], [[0, 1, 2], [3]]),
        ([2, 3, 5, 2, 4, 6], [[2, 3, 5], [2], [4], [6]]),
        ([5, 5], [[5], [5]]),
        ([5, 4, 6, 7], [[5], [4], [6, 7]]),
    ],
)
def test_batches_close_at_their_size_and_before_a_suspect(
    ids: list[int], expected: list[list[int]]
) -> None:
    assert batches(Batching(messages_max=3), ids) == expected


def test_batches_close_before_they_are_too_large() -> None:
    batching = Batching(messages_max=100, bytes_max=250)
    assert batches(batching, [0, 1, 2, 3, 4], b"x" * 100) == [[0, 1], [2, 3], [4]]
    assert batches(batching, [0, 1], b"x" * 1000) == [[0], [1]]


def test_a_message_with_a_delivery_time_travels_alone_in_its_place() -> None:
    batcher = Batcher(Batching())
    sent = [
        OutgoingMessage(each, b"", deliver_at_ms=0 if each in (0, 3) else None) for each in range(6)
    ]
    parcels = [parcel for each in sent for parcel in batcher.add(each)] + batcher.flush()
    assert parcels == [[sent[0]], sent[1:3], [sent[3]], sent[4:]]
    assert not batcher.collecting


def test_what_comes_again_behind_a_message_with_a_delivery_time_travels_alone() -> None:
    batcher = Batcher(Batching())
    batcher.add(OutgoingMessage(5, b"", deliver_at_ms=9))
    assert not batcher.collecting
    again = OutgoingMessage(4, b"")
    assert batcher.add(again) == [[again]]


@given(st.lists(st.integers(0, 8), max_size=40), st.integers(1, 5))
def test_nothing_is_lost_or_reordered_and_ids_only_grow_in_a_batch(
    ids: list[int], messages_max: int
) -> None:
    parcels = batches(Batching(messages_max=messages_max), ids)
    assert [each for parcel in parcels for each in parcel] == ids
    for parcel in parcels:
        assert parcel
        assert len(parcel) <= messages_max
        assert parcel == sorted(set(parcel))


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages_max": 0},
        {"messages_max": 10_001},
        {"bytes_max": 0},
        {"delay_s": -0.1},
    ],
)
def test_a_batching_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"a batch holds|bytes_max is"):
        Batching(**wrong)
