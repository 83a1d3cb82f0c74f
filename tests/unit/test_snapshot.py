"""A topic's state, written as properties and read back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.dedup.core.snapshot import (
    ABOUT,
    Snapshot,
    UnreadableSnapshot,
    covers_more,
    decode,
    encode,
)
from seqgate.services.dedup.core.topic import Frozen, Persisted
from seqgate.services.deduplication import Writer
from seqgate.types import SEQUENCE_ID_MAX, Chunk, Position

AT = Position(3, 41)
HALF = Chunk("two/½ %20", 1, 3, 300)

ids = st.integers(0, SEQUENCE_ID_MAX)
names = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20)
chunks = st.builds(
    lambda uuid, num, chunk: Chunk(uuid, min(chunk, num - 2), num, num + 5),
    names,
    st.integers(2, 1000),
    st.integers(0, 1000),
)
states = st.lists(
    st.builds(Persisted, names | names.map("#{}".format), ids, st.none() | chunks, ids),
    unique_by=lambda each: each.producer,
)


@given(states)
def test_a_snapshot_is_read_back_unchanged(producers: list[Persisted]) -> None:
    properties = encode(Frozen(7, AT, 100, producers), taken_ms=8)
    assert decode(properties, now_ms=0) == Snapshot(7, AT, sorted(producers), 8)


def test_a_complete_id_is_a_bare_number_like_pulsars() -> None:
    frozen = Frozen(7, AT, 0, [Persisted("p", 41, None, 5), Persisted("q", 9, HALF, 6)])
    properties = encode(frozen, taken_ms=8)
    about = json.loads(properties.pop(ABOUT))
    assert properties == {"p": "41", "q": "9/1/3/300/two%2F%C2%BD%20%2520"}
    expected = {"layout": 1, "incarnation": 7, "position": [3, 41], "taken_ms": 8}
    assert about == expected | {"active_ms": [5, 6]}


def test_a_snapshot_of_an_earlier_version_does_not_tell_when_it_was_taken() -> None:
    about = '{"layout": 1, "incarnation": 7, "position": [3, 41], "active_ms": [5]}'
    snapshot = decode({"p": "41", ABOUT: about}, now_ms=99)
    assert snapshot == Snapshot(7, AT, [Persisted("p", 41, None, 5)], 0)


def test_a_snapshot_of_pulsar_fits_any_log_and_counts_as_active_now() -> None:
    snapshot = decode({"p": "41"}, now_ms=99)
    assert snapshot == Snapshot(None, None, [Persisted("p", 41, None, 99)])
    assert snapshot.is_of(7, AT)


def test_a_snapshot_belongs_to_one_incarnation_and_position() -> None:
    snapshot = decode(encode(Frozen(7, AT, 0, []), taken_ms=0), now_ms=0)
    assert snapshot.is_of(7, AT)
    assert not snapshot.is_of(8, AT)
    assert not snapshot.is_of(7, Position(3, 42))


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"p": ""},
        {"p": "-1"},
        {"p": "x"},
        {"p": "²"},
        {"p": str(SEQUENCE_ID_MAX + 1)},
        {"p": "9/1/3"},
        {"p": "9/2/3/300/u"},
        {"p": "9/1/3/2/u"},
        {"p": "9/1/3/300/"},
        {ABOUT: "no json"},
        {ABOUT: "[]"},
        {ABOUT: '{"layout": 2, "incarnation": 1, "position": [1, 1], "active_ms": []}'},
        {ABOUT: '{"layout": 1, "incarnation": 1, "active_ms": []}'},
        {ABOUT: '{"layout": 1, "incarnation": 1, "position": [1], "active_ms": []}'},
        {ABOUT: '{"layout": 1, "incarnation": 1, "position": [1, 1], "active_ms": [1]}'},
        {"p": "1", ABOUT: '{"layout": 1, "incarnation": 1, "position": [1, 1], "active_ms": []}'},
    ],
)
def test_an_unreadable_snapshot_is_not_used_in_part(properties: dict[str, str]) -> None:
    with pytest.raises(UnreadableSnapshot):
        decode(properties, now_ms=0)


@pytest.mark.parametrize(
    ("snapshot", "log_end", "confirmed", "expected"),
    [
        (AT, Position(3, 50), None, True),
        (AT, Position(3, 50), Position(3, 40), True),
        (AT, AT, Position(2, 99), True),
        (AT, Position(3, 50), AT, False),
        (AT, Position(3, 50), Position(3, 42), False),
        (AT, Position(3, 40), None, False),  # ahead of the log
        (AT, None, None, False),
        (None, Position(3, 50), None, False),
    ],
)
def test_a_snapshot_is_loaded_if_newer_than_the_state_and_within_the_log(
    snapshot: Position | None,
    log_end: Position | None,
    confirmed: Position | None,
    expected: bool,
) -> None:
    assert covers_more(snapshot, Writer(1, 1, log_end), confirmed) is expected
