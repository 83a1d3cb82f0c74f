"""Delayed messages take bounded memory, and are still delivered in time."""

from random import Random
from typing import Any

import pytest

from seqgate.services.dispatcher.core.delays import (
    KEPT_BYTES,
    KEPT_LEAST,
    NEVER_MS,
    DelayedBytes,
    Delays,
    Held,
    Kept,
    Postponed,
)
from seqgate.services.dispatcher.core.effects import (
    Because,
    Entry,
    Options,
    Passed,
    Persist,
    Scan,
    SubscriptionType,
)
from seqgate.services.dispatcher.core.lane import Lane, Queue, Slot
from seqgate.services.dispatcher.core.settling import UNSETTLED_MAX
from seqgate.types import Position
from tests.unit.test_subscription import A, B, C, Stage, stage

LANE = Lane(b"k", Slot(1, Queue(1_000)))


def at(entry_id: int) -> Position:
    return Position(1, entry_id)


def kept(when_ms: int) -> Kept:
    return Kept(when_ms, at(when_ms), 1, LANE)


def later(*delays_ms: int, **options: Any) -> Stage:
    """A subscription with room for two delayed messages, and messages with these delays, each with
    its own key."""
    made = stage(**({"delayed_max": 2} | options))
    publish(made, *delays_ms)
    return made


def publish(it: Stage, *delays_ms: int) -> None:
    for delay_ms in delays_ms:
        it.publish(b"key-%d" % len(it.log), deliver_at_ms=it.now_ms + delay_ms)


# ---- budgets


@pytest.mark.parametrize(
    "options", [{"delayed_max": 3}, {"delayed_bytes_max": 3 * (KEPT_BYTES + 1)}]
)
def test_delayed_entries_are_kept_up_to_the_limit(options: dict[str, Any]) -> None:
    together = DelayedBytes(10**9)
    delays = Delays(Options(**options), together)
    for when_ms in (50, 10, 40, 30, 20):
        if delays.takes(when_ms, at(when_ms), b"k"):
            delays.keep(kept(when_ms))
        while (last := delays.excess()) is not None:
            delays.forget(last.when_ms, last.position)
    assert [each.when_ms for each in delays.due(100)] == [10, 20, 30]
    assert together.size_bytes == 0


def test_delays_leave_room_to_others() -> None:
    together = DelayedBytes(2 * KEPT_LEAST * KEPT_BYTES)
    one, other = Delays(Options(), together), Delays(Options(), together)
    for each in range(10 * KEPT_LEAST):
        for delays in (one, other):
            if delays.takes(each, at(each), b"k"):
                delays.keep(kept(each))
    assert len(one) + len(other) <= 2 * KEPT_LEAST + 1
    assert min(len(one), len(other)) >= KEPT_LEAST - 1
    one.clear()
    other.clear()
    assert together.size_bytes == 0


def test_the_soonest_due_entries_are_kept() -> None:
    it = later(500, 300, 400, 100, 200)
    assert it.sub.delayed == 5
    assert len(it.sub.lanes) == 2
    for entry_id in (3, 4, 1, 2, 0):
        it.wait(100)
        assert it.got(1) == [entry_id]


def test_a_message_is_delivered_exactly_when_due(seed: int) -> None:
    random = Random(seed)
    delays_ms = [random.randrange(1, 1_000) for _ in range(300)]
    it = Stage(delayed_max=7)
    it.connect(1, 1_000)
    publish(it, *delays_ms)
    for now_ms in range(1, 1_001):
        it.wait(1)
        assert sorted(it.got(1)) == [
            each for each, delay_ms in enumerate(delays_ms) if delay_ms == now_ms
        ]
    assert it.sub.delayed == 0


def test_the_log_is_scanned_about_twice_per_full_memory(seed: int) -> None:
    random = Random(seed)
    delays_ms = [random.randrange(1, 1_000) for _ in range(2_000)]
    it = Stage(delayed_max=100)
    it.connect(1, 10_000)
    publish(it, *delays_ms)
    for _ in range(1_000):
        it.wait(1)
    assert it.sub.totals["delivered_entries"] == 2_000
    assert it.sub.totals["scanned_entries"] <= (2 * 2_000 / 100 + 2) * 2_000


def test_ordered_delays_are_scanned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.delays.STRETCH_ENTRIES", 64)
    it = Stage(delayed_max=100)
    it.connect(1, 10_000)
    publish(it, *range(1, 2_001))
    for _ in range(2_000):
        it.wait(1)
    assert it.sub.totals["delivered_entries"] == 2_000
    assert it.sub.totals["scanned_entries"] <= 40 * 1_200  # pages of 1,000 reach beyond a stretch


def test_entries_due_at_once_wait_for_room() -> None:
    it = Stage(delayed_max=2, consumer_parked_max=4, key_parked_max=2)
    it.connect(1, 3)
    publish(it, *[100] * 50)
    it.wait(100)
    got = it.got(1)
    while got and len(got) < 50:
        it.permit(1, 3)
        got += it.got(1)
    assert sorted(got) == list(range(50))


def test_a_postponed_entry_precedes_later_ones_of_its_key() -> None:
    it = stage(permits=2, kind=SubscriptionType.EXCLUSIVE, delayed_max=1)
    it.publish(A, deliver_at_ms=50)
    it.publish(A, deliver_at_ms=100)
    it.publish(B, B, B)
    assert it.got(1) == [2, 3]
    it.wait(100)
    for entry_id in (0, 1, 4):
        it.permit(1, 1)
        assert it.got(1) == [entry_id]


# ---- delays that hold keys


def test_a_postponed_message_outside_memory_holds_its_key() -> None:
    it = stage(delay_holds_key=True, delayed_max=1)
    it.publish(B, deliver_at_ms=50)
    it.publish(A, deliver_at_ms=100)
    it.publish(A, C)
    assert it.got(1) == [3]
    assert it.sub.delayed == 2
    it.wait(50)
    assert it.got(1) == [0]
    it.publish(A)
    assert it.got(1) == []
    it.wait(50)
    assert it.got(1) == [1, 2, 4]


def test_entries_behind_a_postponed_message_are_postponed_with_it() -> None:
    it = stage(delay_holds_key=True, delayed_max=1)
    it.publish(A, deliver_at_ms=100)
    it.publish(A, A)
    it.publish(B, deliver_at_ms=50)
    assert list(it.sub.lanes) == [B]
    assert it.sub.delayed == 3
    it.wait(100)
    assert it.got(1) == [3, 0, 1, 2]


def test_keys_beyond_the_limit_wait_by_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.delays.HELD_KEYS_MAX", 100)
    keys, held_ = [b"%d" % each for each in range(1_000)], Held()
    for slot, key in enumerate(keys, 1):
        held_.add(key, slot)
        held_.add(key, slot)
    assert all(held_.has(key, slot) for slot, key in enumerate(keys, 1))
    assert not any(held_.has(b"%d" % each, each) for each in range(2_000, 3_000))
    assert held_.has(b"another", 1_000)
    assert not held_.has(b"another", 100)


# ---- acknowledgements and trims


def test_an_entry_acknowledged_cumulatively_is_never_delivered() -> None:
    it = stage(kind=SubscriptionType.EXCLUSIVE, delayed_max=1)
    it.publish(A, B, C, deliver_at_ms=100)
    it.publish(A)
    effects, _, number = it.sub.acknowledge_cumulative(1, it.item(3), 0)
    it.do(effects)
    assert number
    assert sorted(it.acknowledged()) == [0, 1, 2, 3]
    it.wait(100)
    assert it.got(1) == [3]
    assert it.sub.delayed == 0


def test_trimmed_entries_are_skipped() -> None:
    it = later(300, 100, 200, 300, 300)
    gone = it.log[3]
    it.log[3] = Entry(gone.position, None)
    it.holds = (Scan,)
    it.wait(100)
    it.do(it.sub.scanned([each for each in it.log if each is not it.log[3]], it.now_ms))
    assert Passed((gone.position,), Because.GONE) in it.effects
    assert 3 in it.acknowledged()
    assert it.sub.delayed == 3


def test_scans_stop_while_too_many_acknowledgements_are_not_durable() -> None:
    it = Stage(delayed_max=1)
    it.connect(1, 10)
    publish(it, 100, 100, 100)
    it.holds = (Persist,)
    it.publish(*[None] * UNSETTLED_MAX)  # type: ignore[arg-type]
    it.wait(100)
    assert not any(isinstance(each, Scan) for each in it.effects)
    assert it.got(1) == [0]
    assert it.sub.next_timer_ms is None
    it.holds = ()
    it.do(it.sub.persisted(None, it.now_ms))
    assert sorted(it.got(1)) == [1, 2]


# ---- the set of postponed entries


def test_a_range_is_skipped_until_one_of_its_entries_may_be_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.delays.STRETCH_ENTRIES", 4)
    some = Postponed()
    for entry_id, when_ms in ((1, 50), (2, 90), (5, 70), (11, 60)):
        some.add(at(entry_id), when_ms)
    assert some.soonest_ms == 50
    assert some.first(at(0), 50) is None
    assert some.first(at(0), 51) == at(1)
    assert some.first(at(3), 70) == at(11)
    some.visit(at(1))
    assert some.first(at(1), 40) == at(2)  # the rest of the range that the pass visits
    some.visit(at(2))
    some.add(at(2), 90)
    some.end_pass()
    assert (some.soonest_ms, len(some)) == (60, 3)
    assert some.first(at(0), 90) == at(5)
    assert list(some.between(at(2), at(5))) == [at(2), at(5)]
    for entry_id in (2, 5, 11, 11):
        some.discard(at(entry_id))
    assert (len(some), some.soonest_ms, some.first(at(0))) == (0, NEVER_MS, None)


def test_postponed_entries_behave_like_a_set(seed: int) -> None:
    random, some, model = Random(seed), Postponed(), set[Position]()
    for _ in range(2_000):
        position = Position(random.choice((1, 2)), random.randrange(20_000))
        if random.random() < 0.7:
            some.add(position, random.randrange(100))
            model.add(position)
        else:
            some.discard(position)
            model.discard(position)
        assert (position in some) == (position in model)
    assert len(some) == len(model)
    assert list(some.between(Position(0, 0), Position(9, 0))) == sorted(model)
