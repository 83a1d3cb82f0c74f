"""Rules of a subscription whose absence random histories do not reveal, or rarely: a scenario for
each, which fails without the rule."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from seqgate.services.dispatcher.core.delivering import Delivering
from seqgate.services.dispatcher.core.effects import (
    FILTER_FAILED,
    REJECT,
    UNJUDGED,
    AfterDeadLetter,
    Gap,
    Judge,
    KeyState,
    Options,
    Outcome,
    Outgoing,
    Persist,
    SubscriptionType,
)
from seqgate.services.dispatcher.core.flights import Flights
from seqgate.services.dispatcher.core.judging import Judging
from seqgate.services.dispatcher.core.lane import Chunk, Lane, Reason
from seqgate.services.dispatcher.core.large import LargeMessages
from seqgate.services.dispatcher.core.parking import Parking
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.core.settling import Durable, Gaps, Settling
from seqgate.services.dispatcher.core.subscription import Ack, Subscription
from seqgate.services.dispatcher.core.verdicts import WAITS, WAITS_MAX, Verdicts, from_text, to_text
from seqgate.services.dispatcher.service import PROPERTY_BYTES_MAX
from seqgate.types import Position
from tests.simulation.dispatch import rebuilt
from tests.unit import test_subscription as scenarios
from tests.unit.test_large_deliveries import begun, chunks, no_room, passed
from tests.unit.test_subscription import A, B, Stage, filtered, stage

# ---- large messages


def test_a_key_waits_while_a_chunk_of_its_next_message_is_in_flight() -> None:
    it = begun(SubscriptionType.KEY_SHARED, "attempt")
    it.publish(A, chunk=chunks("attempt", 3)[1])
    assert it.got(1) == [1]
    no_room(it, 1)
    it.publish(A, chunk=chunks("attempt", 3)[2])
    assert it.got(1) == []
    assert it.reason(A) is Reason.RETRY
    assert it.sub.lanes[A].is_kept_back(Position(1, 1))
    assert not it.sub.lanes[A].is_kept_back(Position(1, 0))
    no_room(it, 0)
    assert it.got(1) == [0, 1, 2]


def test_a_message_read_again_precedes_other_keys_under_any_permits() -> None:
    it = begun(SubscriptionType.KEY_SHARED, "attempt", permits=1)
    no_room(it, 0)
    assert it.sub.consumers[1].permits == 0
    for each in chunks("attempt", 3)[1:]:
        it.publish(A, chunk=each)
    it.publish(B, B)
    got = []
    for _ in range(5):
        it.permit(1, 1)
        got += it.got(1)
    assert got == [0, 1, 2, 3, 4]


def test_a_chunk_beyond_the_limit_of_withheld_ones_is_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.delivering.KEPT_BACK_MAX", 1)
    it = begun(SubscriptionType.KEY_SHARED, "attempt")
    no_room(it, 0)
    it.publish(A, chunk=chunks("attempt", 3)[1])
    assert it.got(1) == [1]


def test_a_withheld_chunk_that_new_filters_reject_is_released() -> None:
    it = filtered()
    for attempt in ("one", "two"):
        it.publish(A, chunk=chunks(attempt, 3)[0])
    no_room(it, 0, 1)
    assert it.sub.parking.kept_back == 2
    it.says[0] = REJECT
    it.refilter(start=0)
    assert it.acknowledged() == [0]
    assert it.sub.parking.kept_back == 1
    for each in chunks("two", 3)[1:]:
        it.publish(A, chunk=each)
    it.publish(A)
    assert it.got(1) == [0, 1, 1, 2, 3, 4]
    it.acknowledge(1, 1, 2, 3, 4)
    assert not it.sub.lanes


def test_rests_of_rejected_messages_beyond_the_limit_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.judging.REJECTED_ATTEMPTS_MAX", 1)
    it = filtered()
    for attempt in ("one", "two"):
        it.publish(A, chunk=chunks(attempt, 2)[0], verdict=REJECT)
    for attempt in ("one", "two"):
        it.publish(A, chunk=chunks(attempt, 2)[1])
    assert it.got(1) == []
    assert passed(it.effects) == [2]
    assert it.sub.totals["rejected_entries"] == 3


def test_without_key_order_chunks_judged_late_stay_in_order() -> None:
    it = filtered(in_order=False, max_in_flight_per_key=1)
    it.holds = (Judge,)
    it.publish(B)
    first, last = chunks("attempt", 2)
    it.publish(A, chunk=first, verdict=UNJUDGED)
    it.publish(A)
    it.publish(A)
    it.publish(A, chunk=last, verdict=UNJUDGED)
    assert it.got(1) == [0, 2]
    it.holds = ()
    it.refilter(is_filtered=False)
    got = []
    for each in (2, 1, 3, 4):
        it.acknowledge(1, each)
        got += it.got(1)
    assert got == [1, 3, 4]


def _attempts() -> tuple[LargeMessages, Settling]:
    settling = Settling(Options(), Durable(Acknowledged(None)), Outgoing(), {})
    return LargeMessages(settling), settling


def test_the_oldest_of_too_many_ended_attempts_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.large.OVER_MAX", 1)
    large, _ = _attempts()
    for name in ("one", "two"):
        large.record_abort(name, Position(1, 1))
    assert not large.is_over("one", Position(1, 0))
    assert large.is_over("two", Position(1, 0))


@pytest.mark.parametrize("is_whole", [True, False])
def test_only_chunks_of_the_ended_attempt_are_over(is_whole: bool) -> None:
    """Without deduplication the same attempt may be in the log more than once."""
    large, _ = _attempts()
    first, last = chunks("attempt", 2)
    large.record_read(first, Position(1, 0), A)
    large.record_read(last, Position(1, 1), A)
    if not is_whole:
        large.record_read(first, Position(1, 2), A)
    large.record_abort("attempt", Position(1, 3))
    over = [each for each in range(5) if large.is_over("attempt", Position(1, each))]
    assert over == ([] if is_whole else [2])


def test_a_chunk_after_a_forgotten_acknowledged_message_is_headless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.large.FINISHED_MAX", 1)
    large, settling = _attempts()
    for place, attempt in enumerate(("one", "two")):
        for number, chunk in enumerate(chunks(attempt, 2)):
            large.record_read(chunk, Position(1, 2 * place + number), A)
        settling.acknowledge_entry(Position(1, 2 * place), None)
    assert large.is_headless(chunks("one", 2)[1], Position(1, 1))


def test_a_forgotten_message_is_recorded_as_dead() -> None:
    large, _ = _attempts()
    large.record_dead("forgotten", Position(1, 0), A)
    assert large.is_dead(Chunk("forgotten", is_last=True, number=1))


@pytest.mark.parametrize("kind", list(SubscriptionType))
def test_a_large_message_with_a_returned_chunk_is_redelivered_whole(
    kind: SubscriptionType,
) -> None:
    it = begun(kind, "attempt")
    for each in chunks("attempt", 3)[1:]:
        it.publish(A, chunk=each)
    it.publish(A)
    assert it.got(1) == [1, 2, 3]
    it.give_back(1, 0)
    assert it.got(1) == ([0, 1, 2, 3] if it.options.orders_keys else [0, 1, 2])


def test_an_acknowledged_chunk_is_not_revoked_with_the_others() -> None:
    it = begun(SubscriptionType.SHARED, "attempt")
    for each in chunks("attempt", 3)[1:]:
        it.publish(A, chunk=each)
    it.holds = (Persist,)
    it.acknowledge(1, 1)
    assert it.got(1) == [1, 2]
    it.give_back(1, 0)
    assert it.got(1) == [0, 2]


def test_cumulative_acknowledgement_spares_waiting_chunks_of_an_unfinished_message() -> None:
    it = begun(SubscriptionType.EXCLUSIVE, "attempt")
    it.negative_acknowledge(1, 0, delay_ms=100)
    lane = next(iter(it.sub.lanes.values()))
    assert it.sub.parking.take_before(lane, Position(1, 9), whole=frozenset()) == []
    assert it.sub.parking.take_before(lane, Position(1, 9), whole={"attempt"}) == [Position(1, 0)]


# ---- waiting times across takeovers

DAY_MS = 86_400_000
BEGAN_MS = DAY_MS - 1_000
"""The waiting time so far when the subscription is taken over at time 0."""


def taken_over(waits: dict[Position, int], **options: Any) -> Stage:
    made, machine = Stage(**options), cast("Any", scenarios)
    made.sub = machine.Subscription(
        made.options,
        machine.Ring(),
        machine.Durable(machine.Acknowledged(None), waits=waits),
        is_filtered=True,
    )
    made.connect(1, 100)
    return made


def test_a_takeover_does_not_restart_the_wait_of_a_failed_entry() -> None:
    it = taken_over({Position(1, 0): -BEGAN_MS})
    it.publish(A, verdict=FILTER_FAILED)
    it.publish(B, verdict=FILTER_FAILED)
    assert it.sub.waits == {Position(1, 0): -BEGAN_MS, Position(1, 1): 0}
    it.wait(1_000)
    assert it.acknowledged() == [0]
    assert it.sub.waits == {Position(1, 1): 0}
    it.wait(DAY_MS - 1_000)
    assert it.acknowledged() == [0, 1]
    assert it.sub.waits == {}


def test_a_takeover_does_not_restart_the_wait_of_a_withheld_chunk() -> None:
    it = taken_over({Position(1, 0): -BEGAN_MS})
    for each in chunks("attempt", 3)[:2]:
        it.publish(A, chunk=each)
    no_room(it, 1, 0)
    assert it.sub.waits == {Position(1, 0): -BEGAN_MS}
    it.wait(1_000)
    assert it.acknowledged() == [0, 1]


@pytest.mark.parametrize("over", ["accepted", "judged anew"])
def test_a_new_filter_failure_restarts_the_wait(over: str) -> None:
    it = taken_over({Position(1, 0): -BEGAN_MS})
    it.publish(A, verdict=FILTER_FAILED)
    it.now_ms = 5
    if over == "accepted":
        it.refilter()
        it.says[0] = FILTER_FAILED
        it.give_back(1, 0)
    else:
        it.says[0] = FILTER_FAILED
        it.refilter()
    assert it.sub.waits == {Position(1, 0): 5}


def test_a_chunk_withheld_again_restarts_its_wait() -> None:
    it = taken_over({Position(1, 0): -BEGAN_MS})
    for each in chunks("attempt", 3)[:2]:
        it.publish(A, chunk=each)
    no_room(it, 0, 1)
    it.publish(A, chunk=chunks("attempt", 3)[2])
    assert it.got(1) == [0, 1, 0, 1, 2]
    it.now_ms = 5
    no_room(it, 0)
    assert it.sub.waits == {Position(1, 0): 5}


def test_the_oldest_waiting_entries_are_remembered() -> None:
    it = taken_over({}, consumer_parked_max=1_000)
    for each in range(WAITS_MAX + 5):
        it.publish(b"%d" % each, verdict=FILTER_FAILED)
        it.now_ms += 1
    assert it.sub.waits == {Position(1, each): each for each in range(WAITS_MAX)}
    text = to_text({Position(2**63 - 1, 2**63 - 1 - each): 2**41 for each in range(WAITS_MAX)})
    assert len(text) + len(WAITS) <= PROPERTY_BYTES_MAX
    assert from_text(to_text(it.sub.waits)) == it.sub.waits
    assert from_text("1:2 x:1@5 1:2@ 3:4@\u0665 7:8@9") == {Position(7, 8): 9}


# ---- reasons for withholding a key


def test_a_key_is_withheld_for_one_reason_at_a_time_and_since_the_first_time() -> None:
    it = stage(permits=0)
    it.publish(A)
    lane, parking = it.sub.lanes[A], it.sub.parking
    for reason, now_ms in (
        (Reason.RETRY, 5),
        (Reason.DRAINING, 6),
    ):
        parking.withhold(lane, reason, now_ms)
        parking.wake(lane)
        parking.withhold(lane, reason, now_ms + 10)
        assert (lane.reason, lane.since_ms) == (reason, now_ms)
    assert [reason for reason, lanes in parking.withheld.items() if lane in lanes] == [
        Reason.DRAINING
    ]


def test_a_withheld_key_without_entries_is_forgotten() -> None:
    it = stage(permits=0)
    it.publish(A)
    lane, parking = it.sub.lanes[A], it.sub.parking
    parking.withhold(lane, Reason.RETRY, 0)
    lane.waiting, lane.is_ready = None, False
    parking.drop_if_idle(lane)
    assert A not in it.sub.lanes
    assert not any(lane in lanes for lanes in parking.withheld.values())


# ---- acknowledgements from elsewhere


def test_entries_before_the_cursor_are_not_delivered() -> None:
    """The cursor was moved by a succession or by another instance."""
    it = stage(permits=1)
    it.holds = (Persist,)
    it.publish(A, A, A)
    it.acknowledge(1, 0)
    it.do(it.sub.persisted(Position(1, 1), 0))
    it.permit(1, 10)
    assert it.got(1) == [0, 2]


def test_entries_passed_meanwhile_are_not_rejected_again() -> None:
    it = filtered(permits=1)
    it.holds = (Judge, Persist)
    it.publish(B)
    it.acknowledge(1, 0)
    it.publish(A)
    it.refilter(start=0)
    assert it.asked() == [1]
    it.do(it.sub.persisted(Position(1, 1), 0))
    it.says[1] = REJECT
    it.answer(Position(1, 1))
    assert it.sub.totals["rejected_entries"] == 0


def test_a_batch_acknowledged_message_by_message_ends_with_the_last() -> None:
    it = stage()
    it.holds = (Persist,)
    it.publish(A, messages=2)
    it.acknowledge(1, 0, messages=0b01)
    it.give_back(1, 0)
    it.acknowledge(1, 0, messages=0b10)
    it.holds = ()
    it.do(it.sub.persisted(None, 0))
    assert it.sub.acknowledged.mark_delete == Position(1, 0) or (
        Position(1, 0) in it.sub.acknowledged
    )
    assert not it.sub.lanes


@pytest.mark.parametrize("remembered", [1, 20_000])
def test_cumulative_acknowledgement_includes_entries_due_by_now(remembered: int) -> None:
    """Whether it is in memory until then, or was postponed and is read again."""
    it = stage(
        kind=SubscriptionType.EXCLUSIVE, permits=1, delay_holds_key=False, delayed_max=remembered
    )
    it.publish(A, A, deliver_at_ms=100)
    it.publish(A)
    assert it.got(1) == [2]
    it.wait(100)
    assert it.got(1) == []
    effects, outcome, _ = it.sub.acknowledge_cumulative(1, Ack(it.tokens[2].delivery), it.now_ms)
    it.do(effects)
    assert outcome is Outcome.DONE
    assert sorted(it.acknowledged()) == [0, 1, 2]


def test_leaving_twice_changes_nothing() -> None:
    it = stage()
    it.publish(A)
    it.leave(7)
    assert it.sub.attempts == {}
    it.acknowledge(1, 0)
    assert it.acknowledged() == [0]


# ---- mutants: each rule removed

MUTANTS: list[tuple[type, str, str, Callable[[], None]]] = [
    (
        Subscription,
        "if entries else self._scanned_to",
        "if entries else self.read_position",
        scenarios.test_an_empty_page_of_a_scan_does_not_cover_entries_read_meanwhile,
    ),
    (
        Settling,
        "flight.pending | _pending(self._batch, flight.position)",
        "flight.pending",
        scenarios.test_acknowledgements_of_a_batch_add_up_across_deliveries,
    ),
    (
        Delivering,
        "return Reason.RETRY",
        "pass",
        test_a_key_waits_while_a_chunk_of_its_next_message_is_in_flight,
    ),
    (
        Lane,
        "return any(position in positions for positions in kept_back.values())",
        "return False",
        test_a_key_waits_while_a_chunk_of_its_next_message_is_in_flight,
    ),
    (
        Delivering,
        "if consumer.gathering is not None:\n                self._offer",
        "if False:\n                self._offer",
        test_a_message_read_again_precedes_other_keys_under_any_permits,
    ),
    (
        Parking,
        "lane.waiting.insert(*aside)",
        "lane.waiting.append(*aside)",
        test_without_key_order_chunks_judged_late_stay_in_order,
    ),
    (
        Parking,
        "self._discard_kept(lane, positions)",
        "pass",
        test_a_withheld_chunk_that_new_filters_reject_is_released,
    ),
    (
        Delivering,
        "if self._settling.is_over(position):",
        "if False:",
        test_entries_before_the_cursor_are_not_delivered,
    ),
    (
        Judging,
        "if not self._settling.is_settled(position):\n                self._ack",
        "self._ack",
        test_entries_passed_meanwhile_are_not_rejected_again,
    ),
    (
        Flights,
        "last = flight.position",
        "pass",
        lambda: test_a_large_message_with_a_returned_chunk_is_redelivered_whole(
            SubscriptionType.EXCLUSIVE
        ),
    ),
    (
        Flights,
        "if not flight.is_settling:\n",
        "if True:\n",
        test_an_acknowledged_chunk_is_not_revoked_with_the_others,
    ),
    (
        Parking,
        "if chunk is None or chunk.attempt in whole:",
        "if True:",
        test_cumulative_acknowledgement_spares_waiting_chunks_of_an_unfinished_message,
    ),
    (
        Parking,
        "self._release(lane)\n            self.withheld",
        "pass\n            self.withheld",
        test_a_key_is_withheld_for_one_reason_at_a_time_and_since_the_first_time,
    ),
    (
        Parking,
        "if lane.last_reason is not reason:",
        "if True:",
        test_a_key_is_withheld_for_one_reason_at_a_time_and_since_the_first_time,
    ),
    (
        Parking,
        "self._release(lane)\n            lane.timer_ms",
        "pass\n            lane.timer_ms",
        test_a_withheld_key_without_entries_is_forgotten,
    ),
    (
        Verdicts,
        "since_ms = self._waits.since_ms(position, now_ms) if before is None else before",
        "since_ms = now_ms if before is None else before",
        test_a_takeover_does_not_restart_the_wait_of_a_failed_entry,
    ),
    (
        Parking,
        "since_ms = self._waits.since_ms(position, now_ms)",
        "since_ms = now_ms",
        test_a_takeover_does_not_restart_the_wait_of_a_withheld_chunk,
    ),
    (
        Subscription,
        "if consumer in self.consumers:\n                name",
        "if True:\n                name",
        test_leaving_twice_changes_nothing,
    ),
]

AS_IT_IS: Mapping[str, int] = {}
"""The machine's limits stay unchanged."""


@pytest.mark.parametrize(
    ("owner", "right", "wrong", "scenario"), MUTANTS, ids=[each[1][:50] for each in MUTANTS]
)
def test_a_missing_rule_is_found(
    owner: type,
    right: str,
    wrong: str,
    scenario: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def play(machine: Mapping[str, Any]) -> None:
        monkeypatch.setattr(scenarios, "Subscription", machine["Subscription"])
        monkeypatch.setattr(scenarios, "Acknowledged", machine["Acknowledged"])
        scenario()

    play(rebuilt(limits=AS_IT_IS))
    broken = rebuilt(owner, right, wrong, AS_IT_IS)
    with pytest.raises((AssertionError, KeyError)):
        play(broken)


@pytest.mark.parametrize("is_returning", [False, True])
def test_a_key_is_held_behind_several_letters_only_if_none_is_on_its_way_back(
    *, is_returning: bool
) -> None:
    held = KeyState(AfterDeadLetter.HOLD, Gap(Position(1, 3), 1))
    returned = {Position(1, 3)} if is_returning else set()
    gaps = Gaps(Options(), {A: held}, returned)
    state = KeyState(AfterDeadLetter.HOLD, Gap(Position(1, 1), 1), has_more=not is_returning)
    assert gaps.with_gap(A, Gap(Position(1, 1), 1)) == state
