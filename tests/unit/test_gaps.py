"""Keys with dead-lettered messages: which ones are remembered, and the effect."""

import pytest

from seqgate.services.dispatcher.core.effects import (
    AfterDeadLetter,
    ForgetKey,
    Gap,
    KeyState,
    Options,
    SubscriptionType,
)
from seqgate.services.dispatcher.core.settling import GAPS_MAX, Gaps
from seqgate.types import Position

AFTER = list(AfterDeadLetter)


def gap(entry_id: int) -> Gap:
    return Gap(Position(1, entry_id), 3)


@pytest.mark.parametrize("after", AFTER)
def test_only_later_entries_are_beyond_a_gap(after: AfterDeadLetter) -> None:
    gaps = Gaps(Options(after_dead_letter=after), {})
    assert gaps.add(b"key", gap(5)) is None
    assert gaps.gap(b"key") == gap(5)
    assert gaps.gap(b"other") is None
    for other in AFTER:
        found = [gaps.is_beyond(b"key", Position(1, each), other) for each in (4, 5, 6)]
        assert found == [False, False, other is after]
    assert not gaps.is_beyond(b"other", Position(1, 6), after)


def test_a_keys_rule_is_kept_when_the_options_change() -> None:
    kept = {b"key": KeyState(AfterDeadLetter.HOLD, gap(1))}
    gaps = Gaps(Options(after_dead_letter=AfterDeadLetter.TAIL), kept)
    assert gaps.after(b"key") is AfterDeadLetter.HOLD
    assert gaps.after(b"other") is AfterDeadLetter.TAIL
    gaps.add(b"key", gap(7))
    assert gaps.keys[b"key"] == KeyState(AfterDeadLetter.HOLD, gap(1), has_more=True)
    assert gaps.forget(b"key") == ForgetKey(b"key")
    assert gaps.forget(b"key") is None
    assert gaps.after(b"key") is AfterDeadLetter.TAIL


def test_an_unordered_subscription_has_no_gaps() -> None:
    gaps = Gaps(Options(kind=SubscriptionType.SHARED, after_dead_letter=AfterDeadLetter.HOLD), {})
    assert gaps.after(b"key") is AfterDeadLetter.CONTINUE


def test_the_oldest_gap_that_holds_no_key_is_forgotten() -> None:
    held = {b"held": KeyState(AfterDeadLetter.HOLD, gap(0))}
    gaps = Gaps(Options(), held)
    for each in range(GAPS_MAX - 1):
        assert gaps.add(b"%d" % each, gap(each + 1)) is None
    assert gaps.add(b"0", gap(GAPS_MAX)) is None  # it is the newest now
    assert gaps.add(b"new", gap(GAPS_MAX + 1)) == ForgetKey(b"1")
    assert len(gaps.keys) == GAPS_MAX
    assert b"held" in gaps.keys
    assert b"0" in gaps.keys


def test_gaps_that_hold_keys_are_all_remembered() -> None:
    gaps = Gaps(Options(after_dead_letter=AfterDeadLetter.TAIL), {})
    assert [gaps.add(b"%d" % each, gap(each)) for each in range(GAPS_MAX + 1)] == [None] * (
        GAPS_MAX + 1
    )
