"""The messages that share a batch."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.client import Batching
from seqgate.client._batcher import ENTRIES_MAX, Batcher, Parcel, cut_by_key
from seqgate.client._codec import Compression, OutgoingMessage, decode_entry, encode_batch
from tests.unit.test_codec import stored


def batches(batching: Batching | None, ids: list[int], payload: bytes = b"") -> list[list[int]]:
    batcher = Batcher(batching)
    parcels = [parcel for each in ids for parcel in batcher.add(OutgoingMessage(each, payload))]
    parcels += batcher.flush()
    return [[message.sequence_id for message in parcel] for parcel in parcels]


def test_without_batching_each_message_is_sent_alone() -> None:
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
def test_batches_close_at_their_size_and_before_a_suspected_duplicate(
    ids: list[int], expected: list[list[int]]
) -> None:
    assert batches(Batching(messages_max=3), ids) == expected


def test_batches_close_before_exceeding_their_size() -> None:
    batching = Batching(messages_max=100, bytes_max=250)
    assert batches(batching, [0, 1, 2, 3, 4], b"x" * 100) == [[0, 1], [2, 3], [4]]
    assert batches(batching, [0, 1], b"x" * 1000) == [[0], [1]]


def test_a_message_with_a_delivery_time_is_sent_alone_in_order() -> None:
    batcher = Batcher(Batching())
    sent = [
        OutgoingMessage(each, b"", deliver_at_ms=0 if each in (0, 3) else None) for each in range(6)
    ]
    parcels = [parcel for each in sent for parcel in batcher.add(each)] + batcher.flush()
    assert parcels == [[sent[0]], sent[1:3], [sent[3]], sent[4:]]
    assert not batcher.collecting


def test_a_suspected_duplicate_after_a_delivery_time_is_sent_alone() -> None:
    batcher = Batcher(Batching())
    batcher.add(OutgoingMessage(5, b"", deliver_at_ms=9))
    assert not batcher.collecting
    again = OutgoingMessage(4, b"")
    assert batcher.add(again) == [[again]]


# ---- filter properties of a batch


def parcels_of(batching: Batching, sent: list[OutgoingMessage]) -> list[Parcel]:
    batcher, projection = Batcher(batching), batching.projection
    assert projection is not None
    for message in sent:
        message.shown = projection.of(message.properties)
    return [parcel for each in sent for parcel in batcher.add(each)] + batcher.flush()


def messages_of(properties: list[dict[str, str]]) -> list[OutgoingMessage]:
    return [OutgoingMessage(i, b"", properties=each) for i, each in enumerate(properties)]


EU, US, EMPTY, ABSENT = {"region": "eu"}, {"region": "us"}, {"region": ""}, dict[str, str]()


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ([EU, EU, US, US], [2, 2]),
        ([EU, US, EU, US], [1, 1, 1, 1]),
        ([ABSENT, ABSENT, EMPTY, EMPTY, ABSENT], [2, 2, 1]),
        ([EU | {"a": "1"}, {"a": "2"} | EU, EU], [3]),
        ([EU | {"zone": "1", "a": "1"}, {"zone": "1"} | EU, EU], [2, 1]),
        ([EU, {"zone": "eu"}], [1, 1]),
    ],
)
def test_batches_close_before_different_filter_properties(
    properties: list[dict[str, str]], expected: list[int]
) -> None:
    batching = Batching(filter_properties=("region", "zone"))
    sent = messages_of(properties)
    parcels = parcels_of(batching, sent)
    assert [len(parcel) for parcel in parcels] == expected
    assert [message for parcel in parcels for message in parcel] == sent


def test_unlisted_property_values_share_a_batch() -> None:
    """PIP-191: 5 and 6 share a batch where 1 and 2 are listed."""
    batching = Batching(filter_properties={"version": ["1", "2"], "region": ["eu"]})
    versions = ["5", "6", "1", "1", "2", "6", "5"]
    sent = messages_of([{"version": each} for each in versions] + [US])
    parcels = parcels_of(batching, sent)
    assert [len(parcel) for parcel in parcels] == [2, 2, 1, 3]


@pytest.mark.parametrize(
    ("batching", "expected"),
    [
        (Batching(messages_max=3, filter_properties=["region"]), [3, 1, 2]),
        (Batching(bytes_max=2 * 24 + 8, filter_properties=["region"]), [2, 2, 2]),
        (Batching(bytes_max=2 * 24 + 7, filter_properties=["region"]), [1] * 6),
    ],
)
def test_filter_properties_are_one_of_several_limits_of_a_batch(
    batching: Batching, expected: list[int]
) -> None:
    """A message has 16 bytes, and 8 of properties; an entry repeats the properties once."""
    parcels = parcels_of(batching, messages_of([EU] * 4 + [US] * 2))
    assert [len(parcel) for parcel in parcels] == expected


def test_a_batch_after_a_full_one_is_cut_alike() -> None:
    batching = Batching(bytes_max=2 * 24 + 8 + 1, filter_properties=["region"])
    parcels = parcels_of(batching, messages_of([EU, EU, EU, US, US]))
    assert [len(parcel) for parcel in parcels] == [2, 1, 2]


@pytest.mark.parametrize(("bytes_max", "expected"), [(88, [3]), (87, [2, 1])])
def test_by_key_each_entry_has_its_own_filter_properties(
    bytes_max: int, expected: list[int]
) -> None:
    """72 bytes of messages, and 8 for each of two entries."""
    batching = Batching(bytes_max=bytes_max, by_key=True, filter_properties=["region"])
    parcels = parcels_of(batching, messages_of([EU, EU, US]))
    assert [len(parcel) for parcel in parcels] == expected


def test_suspects_and_delivery_times_are_sent_alone_among_equal_properties() -> None:
    sent = messages_of([EU] * 6)
    sent[2].sequence_id = 1
    sent[4].deliver_at_ms = 7
    parcels = parcels_of(Batching(filter_properties=["region"]), sent)
    assert parcels == [sent[:2], sent[2:3], sent[3:4], sent[4:5], sent[5:]]


def test_a_change_of_filter_properties_closes_only_its_keys_batch() -> None:
    batching = Batching(by_key=True, filter_properties=["region"])
    sent = messages_of([EU, US, EU, US, US, EU])
    for message, key in zip(sent, "ABABAB", strict=True):
        message.key = key
    (parcel,) = parcels_of(batching, sent)
    assert parcel == sent
    assert [[each.sequence_id for each in entry] for entry in cut_by_key(parcel)] == [
        *([0, 2], [1, 3], [4], [5])
    ]


@pytest.mark.parametrize("shows", [["region"], []])
def test_the_entries_of_a_flush_are_bounded(shows: list[str]) -> None:
    batching = Batching(messages_max=10_000, by_key=True, filter_properties=shows)
    batcher = Batcher(batching)
    count = ENTRIES_MAX + 500
    sent = [OutgoingMessage(i, b"") for i in range(count)]
    for i, message in enumerate(sent):
        if shows:
            message.key, message.shown = str(i % 2), {"region": str(i // 2)}
        else:
            message.key = str(i)
    parcels = [parcel for each in sent for parcel in batcher.add(each)] + batcher.flush()
    assert parcels == [sent[:ENTRIES_MAX], sent[ENTRIES_MAX:]]
    assert [len(cut_by_key(parcel)) for parcel in parcels] == [ENTRIES_MAX, 500]


def numbered(some: list[tuple[OutgoingMessage, int]]) -> list[OutgoingMessage]:
    ids = accumulate((step for _, step in some), initial=50)
    for (message, _), sequence_id in zip(some, ids, strict=False):
        message.sequence_id = sequence_id
    return [message for message, _ in some]


seldom = st.sampled_from([False] * 15 + [True])
streams = st.lists(
    st.tuples(
        st.builds(
            OutgoingMessage,
            sequence_id=st.just(0),
            payload=st.sampled_from([b"", b"x" * 10]),
            key=st.sampled_from([None, "k", b"k"]),
            properties=st.sampled_from(
                [
                    *([{"region": "1"}] * 4),
                    {"region": "1", "other": "2"},
                    {"region": "2"},
                    {"region": ""},
                    {"zone": "2"},
                    {"zone": "2", "region": "1"},
                    {},
                ]
            ),
            deliver_at_ms=seldom.map(lambda later: 7 if later else None),
        ),
        seldom.flatmap(lambda odd: st.integers(-3, 3) if odd else st.just(1)),
    ),
    max_size=14,
).map(numbered)
listings = st.sampled_from(
    [["region"], ["zone", "region"], {"region": ["1"], "zone": ["", "2"]}, {"zone": ["1"]}]
)


@given(
    streams,
    listings,
    st.sampled_from([1, 2, 4, 20]),
    st.sampled_from([30, 55, 60, 80, 120, 1_000]),
)
def test_batches_share_filter_properties_and_are_minimal_in_order(
    sent: list[OutgoingMessage],
    listing: list[str] | dict[str, list[str]],
    messages_max: int,
    bytes_max: int,
) -> None:
    batching = Batching(messages_max, bytes_max, filter_properties=listing)
    parcels = parcels_of(batching, sent)
    assert [message for parcel in parcels for message in parcel] == sent
    for parcel in parcels:
        _check_entry(parcel, listing)
    assert len(parcels) == fewest(sent, lambda some: _may_be(some, sent, batching, listing))


@given(streams, listings, st.integers(1, 14))
def test_by_key_entries_share_filter_properties_and_are_minimal_in_order(
    sent: list[OutgoingMessage], listing: list[str] | dict[str, list[str]], messages_max: int
) -> None:
    batching = Batching(messages_max, by_key=True, filter_properties=listing)
    parcels = parcels_of(batching, sent)
    assert [message for parcel in parcels for message in parcel] == sent
    without = Batcher(Batching(messages_max, by_key=True))
    assert parcels == [each for message in sent for each in without.add(message)] + without.flush()
    for parcel in parcels:
        entries = cut_by_key(parcel)
        assert sorted(id(each) for entry in entries for each in entry) == sorted(map(id, parcel))
        for entry in entries:
            _check_entry(entry, listing)
            assert len({each.group for each in entry}) == 1
        for group in {each.group for each in parcel}:
            of_group = [entry for entry in entries if entry[0].group == group]
            assert [each for entry in of_group for each in entry] == [
                each for each in parcel if each.group == group
            ]
            shown = [_shows(entry[0], listing) for entry in of_group]
            assert all(earlier != later for earlier, later in pairwise(shown))
        highest = [entry[-1].sequence_id for entry in entries]
        assert highest == sorted(highest)


def _check_entry(some: Parcel, listing: list[str] | dict[str, list[str]]) -> None:
    entry = encode_batch("p", some, compression=Compression.NONE, publish_time_ms=0)
    for message in some:
        assert dict(entry.metadata.properties) == _shows(message, listing)
    back = decode_entry("a/b/c", stored(entry))
    assert [each.properties for each in back] == [each.properties for each in some]
    assert [each.sequence_id for each in back] == [each.sequence_id for each in some]


def _shows(message: OutgoingMessage, listing: list[str] | dict[str, list[str]]) -> dict[str, str]:
    return {
        name: value
        for name, value in message.properties.items()
        if name in listing and (isinstance(listing, list) or value in listing[name])
    }


def _may_be(
    some: Parcel,
    sent: Parcel,
    batching: Batching,
    listing: list[str] | dict[str, list[str]],
) -> bool:
    """Whether these may be one batch, by every condition."""
    if len(some) == 1:
        return True
    shown = _shows(some[0], listing)
    size_bytes = sum(len(name) + len(value) for name, value in shown.items())
    size_bytes += sum(message.size_bytes for message in some)
    return (
        len(some) <= batching.messages_max
        and size_bytes <= batching.bytes_max
        and all(_shows(message, listing) == shown for message in some)
        and not any(_travels_alone(message, sent) for message in some)
    )


def _travels_alone(message: OutgoingMessage, sent: Parcel) -> bool:
    place = next(i for i, each in enumerate(sent) if each is message)
    highest = max((each.sequence_id for each in sent[:place]), default=-1)
    return message.deliver_at_ms is not None or message.sequence_id <= highest


def fewest(sent: Parcel, may_be: Callable[[Parcel], bool]) -> int:
    """The smallest number of batches, in order, by trying every way to cut the stream."""
    counts = [0]
    for end in range(1, len(sent) + 1):
        counts.append(1 + min(counts[i] for i in range(end) if may_be(sent[i:end])))
    return counts[-1]


# ---- for any batching


@given(st.lists(st.integers(0, 8), max_size=40), st.integers(1, 5))
def test_no_message_is_lost_or_reordered_and_ids_grow_within_a_batch(
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
def test_invalid_batching_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(messages_max|bytes_max|delay_s) must"):
        Batching(**wrong)
