"""The histories of messages: records, look-ups, and the budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.dispatcher.core.history import (
    DETAILS_BYTES_MAX,
    OVERHEAD_BYTES,
    Histories,
    History,
    What,
    find,
    records_of,
    records_of_runs,
)
from seqgate.services.dispatcher.core.positions import runs_of
from seqgate.types import Position, TopicName

TOPIC = TopicName.parse("public/default/t")
POSITIONS = st.sets(
    st.builds(Position, st.integers(1, 3), st.integers(0, 12)), min_size=1, max_size=20
)


def history(bytes_max: int = 1_000_000) -> History:
    made = Histories(bytes_max).of(TOPIC, "s")
    made.begin(0, 1, "me")
    return made


@given(given=POSITIONS, about=st.builds(Position, st.integers(1, 3), st.integers(0, 12)))
def test_a_record_is_about_its_entries_and_no_others(given: set[Position], about: Position) -> None:
    delivered = records_of(What.DELIVERED, 5, list(given), ("crew",))
    acknowledged = records_of_runs(7, runs_of(given))
    assert [bool(find(each, about)) for each in (delivered, acknowledged)] == [about in given] * 2
    for event in find(delivered, about):
        assert (event.what, event.at_ms, event.named) == (What.DELIVERED, 5, {"consumer": "crew"})
    assert len(delivered) == len(acknowledged) == len({each.ledger_id for each in given})


def test_a_run_takes_no_more_than_one_entry() -> None:
    run = [Position(1, each) for each in range(500)]
    (whole,), (one,) = (records_of(What.DELIVERED, 0, each, ("c",)) for each in (run, run[:1]))
    assert len(whole) == len(one) < 64


def test_long_details_are_cut() -> None:
    at = Position(1, 0)
    details = ("f", "1", "é" * DETAILS_BYTES_MAX)
    (event,) = find(records_of(What.FILTER_FAILED, 0, [at], details), at)
    assert event.named["text"].startswith("é" * 1_900)
    assert event.named["filter"] == "f"


def test_a_reason_may_be_left_out_and_contain_any_character() -> None:
    at = Position(1, 0)
    for reason in ((), ("line 1\nline 2\0 and \0",)):
        details = ("REFUSED", "2", "crew", *reason)
        (event,) = find(records_of(What.FAILED, 0, [at], details), at)
        assert event.details == details


@pytest.mark.parametrize(
    ("mark_delete", "is_told"), [(None, True), (Position(1, 4), True), (Position(1, 5), False)]
)
def test_a_reset_concerns_the_entries_after_it(mark_delete: Position | None, is_told: bool) -> None:
    made = history()
    made.record_reset(1, mark_delete)
    found = find(made.records, Position(1, 5))
    assert [each.what for each in found] == [What.TAKEN, *[What.RESET] * is_told]


def test_the_oldest_records_of_all_subscriptions_are_forgotten_first() -> None:
    everything = Histories(10_000)
    quiet, busy = (everything.of(TOPIC, each) for each in ("quiet", "busy"))
    quiet.begin(1, 1, "me")
    busy.begin(2, 1, "me")
    quiet.record(What.DELIVERED, 3, [Position(1, 0)], "c")
    assert (quiet.since_ms, busy.since_ms) == (1, 2)
    for number in range(1_000):
        busy.record(What.DELIVERED, 10 + number, [Position(1, number)], "c")
        assert everything.size_bytes <= 10_000
    assert len(quiet) == 0
    assert quiet.since_ms == 3
    kept = busy.records
    assert sum(len(each) + OVERHEAD_BYTES for each in kept) == everything.size_bytes > 9_800
    assert find(kept, Position(1, 0)) == []
    assert [each.at_ms for each in find(kept, Position(1, 999))] == [1_009]
    assert busy.since_ms == 1_009 - len(kept)


def test_a_history_outlives_a_release_and_ends_with_its_subscription() -> None:
    everything = Histories(10_000)
    made = everything.of(TOPIC, "s")
    made.begin(1, 1, "me")
    made.record(What.DELIVERED, 2, [Position(1, 0)], "c")
    again = everything.of(TOPIC, "s")
    again.begin(9, 3, "me")
    assert [each.what for each in find(again.records, Position(1, 0))] == [
        *(What.TAKEN, What.DELIVERED, What.TAKEN)
    ]
    assert again.since_ms == 9
    everything.end(TOPIC, "s")
    assert everything.of(TOPIC, "s").records == []


def test_empty_histories_of_past_subscriptions_are_not_kept() -> None:
    everything = Histories(200)
    for number in range(100):
        everything.of(TOPIC, str(number)).begin(number, 1, "me")
    assert len(everything._of) < 10
