"""The decisions of a subscription: one scenario each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from seqgate.services.dispatcher.core.effects import (
    ACCEPT,
    FILTER_FAILED,
    REJECT,
    UNJUDGED,
    AfterDeadLetter,
    DeadLetter,
    Deliver,
    Delivery,
    Drain,
    Effect,
    Entry,
    Judge,
    Options,
    Outcome,
    Persist,
    Read,
    Record,
    Revoke,
    Scan,
    SubscriptionType,
)
from seqgate.services.dispatcher.core.lane import BEYOND_ROOM_MAX, Chunk, Reason
from seqgate.services.dispatcher.core.positions import Acknowledged, runs_of
from seqgate.services.dispatcher.core.selectors import Ring
from seqgate.services.dispatcher.core.settling import UNSETTLED_MAX, Durable
from seqgate.services.dispatcher.core.subscription import Ack, Nack, Subscription
from seqgate.services.dispatcher.core.verdicts import JUDGE_ENTRIES, UNJUDGED_MAX
from seqgate.types import Position
from tests.simulation.defects import find

A, B, C = b"key-0", b"key-1", b"key-3"
"""With c1 and c2 on a ring, c1 owns A, and c2 owns B and C."""


class Stage:
    """A subscription, a log of one ledger, and the deliveries of each consumer. Effects that
    persist take effect at once unless `holds` names them, and filters give an entry the verdict in
    `says`, by default ACCEPT."""

    def __init__(
        self,
        *,
        is_filtered: bool = False,
        waits: Mapping[Position, int] | None = None,
        **options: Any,
    ) -> None:
        self.options = Options(**options)
        durable = Durable(Acknowledged(None), waits=waits or {})
        self.sub = Subscription(self.options, Ring(), durable, is_filtered=is_filtered)
        self.says: dict[int, int] = {}
        self.now_ms, self.log = 0, list[Entry]()
        self.tokens: dict[int, Delivery] = {}
        self.sent: dict[int, list[int]] = {}
        self.effects: list[Effect] = []
        self.holds: tuple[type, ...] = ()

    def do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self.effects.append(effect)
            if isinstance(effect, self.holds):
                continue
            match effect:
                case Deliver(consumer, deliveries):
                    for each in deliveries:
                        self.tokens[each.position.entry_id] = each
                        self.sent.setdefault(consumer, []).append(each.position.entry_id)
                case Persist():
                    self.do(self.sub.persisted(None, self.now_ms))
                case Record():
                    self.do(self.sub.recorded(self.now_ms))
                case DeadLetter(position, key):
                    self.do(self.sub.dead_lettered(position, key, self.now_ms))
                case Judge(positions):
                    self.answer(*positions)
                case Scan(at, after, limit):
                    start = at.entry_id if at else (after or Position(1, -1)).entry_id + 1
                    self.do(self.sub.scanned(self.log[start : start + limit], self.now_ms))

    def answer(self, *positions: Position) -> None:
        verdicts = {each: self.says.get(each.entry_id, ACCEPT) for each in positions}
        self.do(self.sub.judged(verdicts, self.now_ms))

    def refilter(self, *, is_filtered: bool = True, start: int | None = None) -> None:
        at = None if start is None else Position(1, start)
        self.do(self.sub.refilter(self.now_ms, is_filtered=is_filtered, start=at))

    def asked(self) -> list[int]:
        """The entries for which verdicts are pending, if none was answered."""
        last = [each for each in self.effects if isinstance(each, Judge)][-1]
        return [each.entry_id for each in last.positions]

    def is_full(self) -> bool:
        return self.sub.is_waiting_for_filters

    def acknowledged(self) -> list[int]:
        """The entries that were acknowledged durably and whole."""
        made = [each.entries for each in self.effects if isinstance(each, Persist)]
        return [each.entry_id for some in made for each in some]

    def connect(self, consumer: int, permits: int = 0, **settings: Any) -> None:
        self.do(self.sub.join(consumer, name=f"c{consumer}", now_ms=self.now_ms, **settings))
        self.permit(consumer, permits)

    def permit(self, consumer: int, messages: int) -> None:
        self.do(self.sub.permit(consumer, messages, self.now_ms))

    def publish(self, *keys: bytes, **of_entry: Any) -> None:
        start = len(self.log)
        new = [Entry(Position(1, start + at), key, **of_entry) for at, key in enumerate(keys)]
        self.log += new
        self.do(self.sub.read(new, self.now_ms))

    def acknowledge(self, consumer: int, *entries: int, messages: int = 0) -> list[Outcome]:
        items = [Ack(self.tokens[each].delivery, messages) for each in entries]
        effects, outcomes, _ = self.sub.acknowledge(consumer, items, self.now_ms)
        self.do(effects)
        return outcomes

    def negative_acknowledge(
        self, consumer: int, *entries: int, delay_ms: int = 0
    ) -> list[Outcome]:
        items = [Nack(self.tokens[each].delivery, delay_ms) for each in entries]
        effects, outcomes = self.sub.negative_acknowledge(consumer, items, self.now_ms)
        self.do(effects)
        return outcomes

    def give_back(self, consumer: int, *entries: int) -> list[Outcome]:
        tokens = [self.tokens[each].delivery for each in entries]
        effects, outcomes = self.sub.give_back(consumer, tokens, self.now_ms)
        self.do(effects)
        return outcomes

    def item(self, entry: int) -> Ack:
        return Ack(self.tokens[entry].delivery)

    def leave(self, consumer: int) -> None:
        self.do(self.sub.leave(consumer, now_ms=self.now_ms))

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.do(self.sub.tick(self.now_ms))

    def got(self, consumer: int) -> list[int]:
        """The deliveries to a consumer since the last call."""
        return self.sent.pop(consumer, [])

    def reason(self, key: bytes) -> Reason:
        return self.sub.lanes[key].reason


def stage(permits: int = 100, **options: Any) -> Stage:
    """A stage with c1 connected."""
    made = Stage(**options)
    made.connect(1, permits)
    return made


def test_deliveries_stay_within_the_permits() -> None:
    it = stage(permits=5)
    it.publish(*[A] * 10)
    assert it.got(1) == [0, 1, 2, 3, 4]
    it.permit(1, 3)
    assert it.got(1) == [5, 6, 7]


def test_a_batch_may_exceed_the_permits_and_stops_deliveries() -> None:
    it = stage(permits=3)
    it.publish(A, B, messages=10)
    assert it.got(1) == [0]
    it.permit(1, 7)
    assert it.got(1) == []
    it.permit(1, 1)
    assert it.got(1) == [1]


def test_a_key_whose_owner_has_no_permits_waits_alone_in_order() -> None:
    it = stage(permits=100)
    it.connect(2, 0)
    it.publish(B, A, B, A)
    assert it.got(1) == [1, 3]
    it.permit(2, 1)
    it.publish(B)
    it.permit(2, 5)
    assert it.got(2) == [0, 2, 4]


def test_a_consumer_at_its_unacknowledged_limit_resumes_at_half() -> None:
    it = stage(consumer_unacked_max=10)
    it.publish(*[A] * 20)
    assert it.got(1) == list(range(10))
    it.acknowledge(1, 0, 1, 2, 3)
    it.permit(1, 7)
    assert it.got(1) == []
    it.acknowledge(1, 4)
    assert it.got(1) == [10, 11, 12, 13, 14]


def test_at_the_limit_of_the_subscription_only_redeliveries_proceed() -> None:
    it = stage(unacked_max=2)
    it.publish(A, B, C)
    assert it.got(1) == [0, 1]
    it.negative_acknowledge(1, 1)
    assert it.got(1) == [1]
    assert it.reason(C) is Reason.SUBSCRIPTION_LIMIT


def test_permits_of_a_departed_consumer_change_nothing() -> None:
    it = stage()
    it.leave(1)
    it.permit(1, 100)
    it.publish(A)
    assert it.sent == {}


def test_a_consumer_without_permits_does_not_block_others() -> None:
    it = stage(permits=0, consumer_parked_max=10, key_parked_max=5)
    it.connect(2, 1_000)
    it.publish(*[A] * 200, *[B] * 100)
    assert it.got(2) == list(range(200, 300))
    assert it.sub.parked <= 10
    it.permit(1, 1_000)
    for _ in range(50):
        it.acknowledge(1, *it.got(1))
    assert it.sub.parked == it.sub.lagging == it.sub.unacked - 100 == 0


def test_a_key_in_flight_drains_before_it_moves_and_others_move_at_once() -> None:
    it = stage()
    it.publish(B, B, C)
    it.connect(2, 100)
    assert [each for each in it.effects if isinstance(each, Drain)] == [Drain(1, (1, 2, 3))]
    it.publish(B, C, b"key-5")
    assert it.got(2) == [5]
    assert it.reason(B) is it.reason(C) is Reason.DRAINING
    it.acknowledge(1, 2)
    assert it.got(2) == [4]
    it.acknowledge(1, 0)
    assert it.got(2) == []
    it.acknowledge(1, 1)
    assert it.got(2) == [3]


def test_draining_entries_of_a_crashed_consumer_come_first() -> None:
    it = stage()
    it.publish(B)
    it.connect(2, 100)
    it.publish(B)
    it.leave(1)
    assert it.got(2) == [0, 1]


def test_a_silent_owner_loses_the_key_at_the_deadline_and_its_token_is_stale() -> None:
    it = stage(drain_deadline_ms=500)
    it.publish(B, B)
    old = it.tokens[0]
    it.connect(2, 100)
    it.wait(499)
    assert it.got(2) == []
    it.wait(1)
    assert it.got(2) == [0, 1]
    assert (it.tokens[0].attempts, it.tokens[1].attempts) == (0, 0)
    it.tokens[0] = old
    assert it.acknowledge(1, 0) == [Outcome.STALE]


def test_a_returned_message_does_not_count_as_failed() -> None:
    it = stage()
    it.publish(B)
    it.connect(2, 100)
    assert it.give_back(1, 0) == [Outcome.DONE]
    assert it.got(2) == [0]
    assert it.tokens[0].attempts == 0


def test_a_token_settles_once_and_only_for_its_owner() -> None:
    it = stage()
    it.connect(2, 100)
    it.publish(A)
    assert (
        it.acknowledge(2, 0)
        == it.negative_acknowledge(2, 0)
        == it.give_back(2, 0)
        == [Outcome.STALE]
    )
    assert it.acknowledge(1, 0) == [Outcome.DONE]
    assert it.acknowledge(1, 0) == [Outcome.STALE]
    assert it.sub.unacked == 0


def test_only_unacknowledged_messages_of_a_batch_are_redelivered() -> None:
    it = stage()
    it.publish(A, messages=5)
    it.acknowledge(1, 0, messages=0b101)
    assert it.sub.unacked == 3
    it.leave(1)
    it.connect(2, 100)
    assert it.tokens[0].unacked == 0b11010
    it.acknowledge(2, 0, messages=0b11111)
    assert it.sub.unacked == 0
    assert not it.sub.lanes


def test_an_acknowledgement_is_confirmed_only_when_durable() -> None:
    it = stage()
    it.publish(B)
    it.connect(2, 100)
    it.holds = (Persist,)
    it.acknowledge(1, 0)
    it.publish(B)
    assert it.got(2) == []
    it.do(it.sub.persisted(None, 0))
    assert it.got(2) == [1]


def test_a_failed_message_comes_first_and_later_ones_are_revoked() -> None:
    it = stage()
    it.publish(A, A, A, B)
    it.got(1)
    it.negative_acknowledge(1, 0, 2, delay_ms=100)
    assert [each for each in it.effects if isinstance(each, Revoke)] == [Revoke(1, (2,))]
    assert it.got(1) == []
    it.wait(100)
    assert it.got(1) == [0]
    it.acknowledge(1, 0)
    assert it.got(1) == [1, 2]
    assert [it.tokens[each].attempts for each in (0, 1, 2)] == [1, 0, 1]


def test_a_failed_message_blocks_its_key_beyond_its_consumer() -> None:
    it = stage()
    it.publish(A, A)
    it.negative_acknowledge(1, 0)
    it.leave(1)
    it.connect(2, 100)
    assert it.got(2) == [0]
    assert it.reason(A) is Reason.RETRY


def test_a_crash_fails_the_first_message_of_each_key() -> None:
    it = stage()
    it.publish(A, A, B)
    it.leave(1)
    it.connect(2, 100)
    assert [it.tokens[each].attempts for each in (0, 1, 2)] == [1, 0, 1]


def test_a_message_is_dead_lettered_and_acknowledged_after_its_last_attempt() -> None:
    it = stage(redeliveries_max=2)
    it.publish(A, A)
    for _ in range(3):
        it.negative_acknowledge(1, 0)
    dead = [each for each in it.effects if isinstance(each, DeadLetter)]
    assert dead == [DeadLetter(Position(1, 0), A, 3, AfterDeadLetter.CONTINUE)]
    assert it.got(1) == [0, 1, 0, 0, 1]
    gap = it.tokens[1].gap
    assert gap is not None
    assert gap.position == Position(1, 0)


def test_a_dead_letter_has_the_reasons_of_its_refusals() -> None:
    stage = Stage(redeliveries_max=1)
    stage.connect(1, permits=9)
    stage.publish(A)
    for reason in ("no stock", ""):
        nack = Nack(stage.tokens[0].delivery, 0, reason)
        stage.do(stage.sub.negative_acknowledge(1, [nack], stage.now_ms)[0])
        stage.wait(1)
    (dead,) = (each for each in stage.effects if isinstance(each, DeadLetter))
    assert [each.reason for each in dead.failures] == ["no stock", ""]


def test_a_key_is_held_until_it_is_released() -> None:
    it = stage(redeliveries_max=0, after_dead_letter=AfterDeadLetter.HOLD)
    it.publish(A, A)
    it.negative_acknowledge(1, 0)
    assert it.reason(A) is Reason.HELD
    it.got(1)
    it.do(it.sub.release_key(A, 0))
    assert it.got(1) == [1]


def test_the_tail_of_a_key_is_dead_lettered_in_order() -> None:
    it = stage(redeliveries_max=0, after_dead_letter=AfterDeadLetter.TAIL)
    it.publish(A, A, B, A)
    it.negative_acknowledge(1, 0)
    dead = [each.position.entry_id for each in it.effects if isinstance(each, DeadLetter)]
    assert dead == [0, 1, 3]


def test_a_timed_out_message_fails_and_its_token_is_stale() -> None:
    it = Stage()
    it.connect(1, 10, ack_timeout_ms=100)
    it.publish(A)
    old = it.tokens[0]
    it.wait(100)
    assert it.got(1) == [0, 0]
    assert it.tokens[0].attempts == 1
    it.tokens[0] = old
    assert it.acknowledge(1, 0) == [Outcome.STALE]


def test_the_next_consumer_starts_at_the_first_unacknowledged_entry() -> None:
    it = stage(permits=3)
    it.publish(A, B, A, A)
    it.leave(1)
    it.publish(A)
    it.connect(2, 100)
    assert [each for each in it.got(2) if each != 1] == [0, 2, 3, 4]


def test_a_delayed_message_holds_its_key_only_on_request() -> None:
    for holds, first in ((False, [1]), (True, [])):
        it = stage(delay_holds_key=holds)
        it.publish(A, deliver_at_ms=100)
        it.publish(A)
        assert it.got(1) == first
        it.wait(100)
        assert sorted([*first, *it.got(1)]) == [0, 1]


def test_many_entries_due_at_once_need_no_further_event() -> None:
    it = stage()
    it.publish(*[A, B, C] * 10, deliver_at_ms=100)
    it.wait(100)
    assert len(it.got(1)) == 30


def test_cumulative_acknowledgement_covers_entries_in_every_state() -> None:
    it = stage(kind=SubscriptionType.EXCLUSIVE)
    it.publish(A, deliver_at_ms=1_000)
    it.publish(A, B, A)
    it.negative_acknowledge(1, 1, delay_ms=0)
    it.acknowledge(1, 1)
    effects, outcome, _ = it.sub.acknowledge_cumulative(1, Ack(it.tokens[3].delivery), 0)
    it.do(effects)
    assert outcome is Outcome.DONE
    assert not it.sub.lanes
    assert it.sub.delayed == 0


def test_the_rest_of_a_failed_large_message_follows_it() -> None:
    it = stage(max_in_flight_per_key=1, consumer_unacked_max=1)
    for is_last in (False, False, True):
        it.publish(A, chunk=Chunk("attempt", is_last))
    it.negative_acknowledge(1, 0)
    assert it.got(1) == [0, 1, 2, 0, 1, 2]


def test_a_large_message_stays_with_its_consumer() -> None:
    it = stage()
    it.publish(B, chunk=Chunk("attempt", is_last=False))
    it.connect(2, 100)
    it.publish(B, chunk=Chunk("attempt", is_last=True))
    it.publish(B)
    assert it.got(1) == [0, 1]
    it.acknowledge(1, 0, 1)
    assert it.got(2) == [2]


def test_a_consumer_at_its_returned_limit_resumes_at_half() -> None:
    it = stage(returned_max=4)
    it.publish(*[b"key-%d" % each for each in range(10, 14)])
    it.negative_acknowledge(1, 0, 1, 2, 3, delay_ms=100)
    it.got(1)
    it.publish(A)
    assert it.got(1) == []
    assert it.reason(A) is Reason.RETURNED_LIMIT
    it.wait(100)
    assert sorted(it.got(1)) == [0, 1, 2, 3, 4]


def test_timers_of_settled_deliveries_are_dropped() -> None:
    it = Stage()
    it.connect(1, 1_000_000, ack_timeout_ms=3_600_000)
    for entry in range(5_000):
        it.publish(A)
        it.acknowledge(1, entry)
    assert len(it.sub.timers) <= 1


def test_a_crash_fails_the_first_message_per_key_despite_renewal() -> None:
    it = Stage()
    it.connect(1, 100, ack_timeout_ms=1_000)
    it.publish(A, A)
    it.sub.renew(1, [it.tokens[0].delivery], 1)
    it.leave(1)
    it.connect(2, 100)
    assert [it.tokens[each].attempts for each in (0, 1)] == [1, 0]


def test_simultaneous_timeouts_fail_in_log_order() -> None:
    it = Stage()
    it.connect(1, 100, ack_timeout_ms=1_000)
    it.publish(A, A)
    it.sub.renew(1, [it.tokens[0].delivery], 1)
    it.wait(5_000)
    assert [it.tokens[each].attempts for each in (0, 1)] == [1, 0]


def test_entries_that_drain_too_long_come_in_order_without_failing() -> None:
    it = Stage(drain_deadline_ms=500)
    it.connect(1, 100)
    it.publish(B, deliver_at_ms=100)
    it.publish(B)
    it.wait(100)
    assert it.got(1) == [1, 0]
    it.connect(2, 100)
    it.wait(500)
    assert it.got(2) == [0, 1]
    assert [it.tokens[each].attempts for each in (0, 1)] == [0, 0]


def test_the_last_messages_of_a_batch_may_become_durable_while_it_waits_again() -> None:
    it = stage()
    it.publish(A, messages=2)
    it.holds = (Persist, Record)
    it.acknowledge(1, 0, messages=0b01)
    it.give_back(1, 0)
    it.acknowledge(1, 0, messages=0b10)
    it.permit(1, -1_000)
    it.give_back(1, 0)
    it.do(it.sub.persisted(None, 0))
    it.do(it.sub.persisted(None, 0))
    it.got(1)
    it.permit(1, 2_000)
    assert it.got(1) == []
    assert not it.sub.lanes
    assert it.sub.parked == it.sub.unacked == 0


def test_cumulative_acknowledgement_requires_a_valid_token() -> None:
    it = stage(kind=SubscriptionType.EXCLUSIVE)
    it.publish(A, A, messages=2)
    it.holds = (Persist,)
    for consumer, item, outcome in (
        (2, Ack(it.tokens[1].delivery), Outcome.STALE),
        (1, Ack(99), Outcome.STALE),
        (1, Ack(it.tokens[1].delivery, 0b100), Outcome.INVALID),
    ):
        assert it.sub.acknowledge_cumulative(consumer, item, 0) == ([], outcome, 0)
    effects, outcome, number = it.sub.acknowledge_cumulative(1, Ack(it.tokens[1].delivery, 0b01), 0)
    assert outcome is Outcome.DONE
    assert effects == [Persist(number, runs_of([Position(1, 0)]), ((Position(1, 1), 2, 0b01),), ())]


def test_the_next_retry_of_a_waiting_key_is_reported() -> None:
    it = stage(delay_holds_key=True, drain_deadline_ms=500)
    it.publish(A)
    lane = it.sub.lanes[A]
    assert it.sub.retry_at_ms(lane) is None
    it.negative_acknowledge(1, 0, delay_ms=70)
    assert (lane.reason, it.sub.retry_at_ms(lane)) == (Reason.RETRY_DELAY, 70)
    it.publish(C, deliver_at_ms=90)
    lane = it.sub.lanes[C]
    assert (lane.reason, it.sub.retry_at_ms(lane)) == (Reason.DELAYED, 90)
    it.publish(B)
    lane = it.sub.lanes[B]
    it.connect(2, 100)
    it.publish(B)
    assert (lane.reason, it.sub.retry_at_ms(lane)) == (Reason.DRAINING, 500)
    slot = it.sub.slot_of(B)
    assert slot is lane.slot
    assert it.sub.owner_of(slot) == 2


def test_a_key_that_drains_without_a_deadline_has_no_next_retry() -> None:
    it = stage()
    it.publish(B)
    it.connect(2, 100)
    it.publish(B)
    lane = it.sub.lanes[B]
    assert (lane.reason, it.sub.retry_at_ms(lane)) == (Reason.DRAINING, None)


def test_a_shared_subscription_serves_consumers_in_turn() -> None:
    it = stage(kind=SubscriptionType.SHARED)
    it.connect(2, 100)
    for _ in range(4):
        it.publish(A)
    assert (it.got(1), it.got(2)) == ([0, 2], [1, 3])
    assert it.sub.slot_of(b"whatever") is not None
    assert [it.sub.owner_of(slot) for slot in it.sub.parking.slots.values()] == [None]


def test_many_keys_move_to_their_new_owners() -> None:
    it = stage(permits=0)
    it.publish(*[b"key-%d" % each for each in range(3_000)])
    it.connect(2)
    slots = it.sub.parking.slots
    assert len(slots) > 2_000
    assert all(each.queue is it.sub.parking.queue_of(number) for number, each in slots.items())
    parked = [it.sub.consumers[each].queue.parked for each in (1, 2)]
    assert sum(parked) == 3_000
    assert min(parked) > 1_000
    it.permit(1, 3_000)
    it.permit(2, 3_000)
    assert (len(it.got(1)), len(it.got(2))) == tuple(parked)


def test_a_scan_without_further_entries_ends() -> None:
    it = stage(permits=0, consumer_parked_max=1, key_parked_max=1)
    it.holds = (Scan,)
    it.publish(A, A)
    it.permit(1, 1)
    assert [type(each) for each in it.effects].count(Scan) == 1
    it.do(it.sub.scanned([], 0))
    assert it.sub.lagging == 0


def test_a_key_released_during_dead_lettering_is_not_held() -> None:
    it = stage(redeliveries_max=0, after_dead_letter=AfterDeadLetter.HOLD)
    it.publish(A, A)
    it.negative_acknowledge(1, 0)
    assert it.reason(A) is Reason.HELD
    it.holds = (DeadLetter,)
    it.do(it.sub.release_key(A, 0))
    it.negative_acknowledge(1, 1)
    assert it.reason(A) is Reason.DEAD_LETTERING
    it.do(it.sub.release_key(A, 0))  # no key is held yet
    it.do(it.sub.dead_lettered(Position(1, 1), A, 0))
    assert it.sub.keys[A].after is AfterDeadLetter.HOLD


def test_other_timers_do_not_change_the_drain_of_a_key() -> None:
    for deadline_ms, taken in ((500, [0, 1]), (0, [])):
        it = stage(delay_holds_key=True, drain_deadline_ms=deadline_ms)
        it.publish(B)
        it.publish(B, deliver_at_ms=100)  # its timer visits the key
        it.connect(2, 100)
        it.wait(100)
        it.wait(399)
        assert it.got(2) == []
        it.wait(1)
        assert it.got(2) == taken


def test_a_key_that_returns_to_its_owner_stops_draining() -> None:
    it = stage(drain_deadline_ms=500)
    it.publish(B)
    it.connect(2, 100)
    it.wait(300)
    it.leave(2)
    it.wait(500)
    assert it.got(1) == [0]
    assert it.acknowledge(1, 0) == [Outcome.DONE]


def test_moving_a_key_again_does_not_extend_its_drain() -> None:
    first, second = Ring(), Ring()
    for selector, consumers in ((first, (1, 2)), (second, (1, 2, 3))):
        for each in consumers:
            selector.add(each, name=f"c{each}", weight=1, ranges=())
    keys = [b"key-%d" % each for each in range(1_000)]
    moving = [
        key
        for key in keys
        if first.owner(first.slot(key)) == 2 and second.owner(second.slot(key)) == 3
    ]
    it = stage(drain_deadline_ms=500)
    it.publish(moving[0])
    it.connect(2, 100)
    it.wait(300)
    it.connect(3, 100)
    it.wait(200)
    assert it.got(3) == [0]


def test_a_batch_acknowledged_in_parts_is_persisted_whole() -> None:
    it = stage()
    it.publish(A, A, messages=2)
    it.holds = (Persist,)
    it.acknowledge(1, 0)
    it.acknowledge(1, 1, messages=0b01)
    it.acknowledge(1, 1, messages=0b10)
    it.do(it.sub.persisted(None, 0))
    assert it.effects[-1] == Persist(2, runs_of([Position(1, 1)]), (), ())


def test_a_consumer_that_acknowledged_a_moving_key_is_not_asked_to_return_it() -> None:
    it = stage()
    it.publish(B, C, B)
    it.holds = (Persist,)
    it.acknowledge(1, 1, 2)
    it.connect(2, 100)
    assert [each for each in it.effects if isinstance(each, Drain)] == [Drain(1, (1,))]
    it = stage()
    it.publish(B)
    it.holds = (Persist,)
    it.acknowledge(1, 0)
    it.connect(2, 100)
    assert not [each for each in it.effects if isinstance(each, Drain)]


def test_cumulative_acknowledgement_settles_earlier_failed_messages() -> None:
    it = stage(kind=SubscriptionType.EXCLUSIVE)
    it.publish(A, A)
    it.holds = (Persist, Record)
    it.acknowledge(1, 1)
    it.negative_acknowledge(1, 0, delay_ms=1_000)
    effects, outcome, number = it.sub.acknowledge_cumulative(1, Ack(it.tokens[1].delivery), 0)
    assert (effects, outcome, number) == ([], Outcome.DONE, 2)
    it.do(it.sub.persisted(None, 0))
    assert it.effects[-1] == Persist(2, runs_of([Position(1, 0)]), (), ())
    it.do(it.sub.persisted(Position(1, 1), 0))
    it.do(it.sub.recorded(0))
    it.wait(1_000)
    assert it.got(1) == [0, 1]
    assert it.sub.parked == 0
    assert not it.sub.lanes


# ---- filters


def filtered(permits: int = 100, **options: Any) -> Stage:
    """A stage with filters, and c1 connected."""
    made = Stage(is_filtered=True, **options)
    made.connect(1, permits)
    return made


def test_rejected_entries_are_acknowledged_and_take_no_permit() -> None:
    it = filtered(permits=2)
    it.publish(A, A, B, verdict=REJECT)
    it.publish(A, B)
    assert it.got(1) == [3, 4]
    assert it.acknowledged() == [0, 1, 2]
    assert it.sub.totals["rejected_entries"] == 3


def test_a_rejected_backlog_is_acknowledged_without_permits() -> None:
    it = filtered(permits=0)
    it.says = dict.fromkeys(range(5_000), REJECT)
    it.publish(*[A, B, C] * 300, verdict=UNJUDGED)
    assert sorted(it.acknowledged()) == list(range(900))
    assert (it.sub.parked, it.sub.unjudged) == (0, 0)
    assert not it.sub.lanes


def test_a_rescheduled_message_holds_only_its_key() -> None:
    it = filtered(permits=3)
    it.publish(A, verdict=100)
    it.publish(A, B)
    assert it.got(1) == [2]
    assert it.reason(A) is Reason.RESCHEDULED
    assert it.sub.retry_at_ms(it.sub.lanes[A]) == 100
    it.wait(99)
    assert it.got(1) == []
    it.says = {0: 50}
    it.wait(1)
    assert it.got(1) == []
    it.says = {}
    it.wait(50)
    assert it.got(1) == [0, 1]
    assert it.tokens[0].attempts == 0
    assert it.sub.totals["rescheduled"] == 2


def test_rescheduling_is_bounded_in_time_and_number() -> None:
    it = filtered(reschedule_max_ms=10, reschedules_max=2)
    it.says = {0: 1_000}
    it.publish(A, verdict=1_000)
    for expected in ([], [], [0]):
        assert it.got(1) == expected
        it.wait(10)
    assert it.sub.totals["rescheduled"] == 2
    it = filtered(reschedules_max=0)
    it.publish(A, verdict=1_000)
    assert it.got(1) == [0]


def test_without_key_order_unjudged_entries_hold_nothing() -> None:
    for options in ({"in_order": False}, {"kind": SubscriptionType.SHARED}):
        it = filtered(**options)
        it.holds = (Judge,)
        for verdict in (100, FILTER_FAILED, UNJUDGED):
            it.publish(A, verdict=verdict)
        it.publish(A)
        assert it.got(1) == [3]
        assert (it.sub.rescheduled, it.sub.filter_failed, it.sub.unjudged) == (1, 1, 1)
        assert it.sub.parked == 3
        it.holds = ()
        it.answer(Position(1, 2))
        assert it.got(1) == [2]
        it.wait(100)
        assert it.got(1) == [0]
        it.refilter()
        assert it.got(1) == [1]


def test_a_redriven_message_is_not_filtered_when_filters_change() -> None:
    it = filtered()
    it.publish(A, A)
    it.acknowledge(1, *it.got(1))
    it.permit(1, 1 - it.sub.consumers[1].permits)
    it.publish(A)  # it has the last permit
    assert it.got(1) == [2]
    it.do(it.sub.redrive(it.log[:1], it.now_ms))
    it.says = {0: REJECT}
    it.refilter(start=0)
    it.acknowledge(1, 2)
    it.permit(1, 1)
    assert it.got(1) == [0]


def test_a_key_with_failed_filters_waits_alone_and_resumes_in_order() -> None:
    it = filtered()
    it.publish(A, verdict=FILTER_FAILED)
    it.publish(A, B)
    assert it.got(1) == [2]
    assert it.reason(A) is Reason.FILTER_FAILED
    assert it.sub.verdict_of(it.sub.lanes[A], Position(1, 0)) == FILTER_FAILED
    it.publish(A, verdict=UNJUDGED)  # judged behind it, without effect on it
    assert it.got(1) == []
    assert it.reason(A) is Reason.FILTER_FAILED
    it.says = {1: REJECT}
    it.refilter()
    assert it.got(1) == [0, 1, 3]


def test_during_an_outage_only_judged_entries_proceed_and_then_all_in_order() -> None:
    it = filtered()
    it.holds = (Judge,)
    it.publish(A)
    it.publish(A, A, B, verdict=UNJUDGED)
    it.publish(C)
    assert it.got(1) == [0, 4]
    assert it.reason(A) is it.reason(B) is Reason.FILTERING
    it.acknowledge(1, 0, 4)
    it.holds = ()
    it.says = {2: REJECT}
    it.answer(Position(1, 1))
    assert it.got(1) == [1, 3]
    assert it.acknowledged() == [0, 4, 2]


def test_the_first_entry_of_each_key_is_judged_before_second_ones() -> None:
    it = filtered()
    it.holds = (Judge,)
    it.publish(A, verdict=UNJUDGED)
    assert it.asked() == [0]
    keys = [b"%d" % each for each in range(JUDGE_ENTRIES - 1)]
    it.publish(*[A] * 10, *keys, *keys, verdict=UNJUDGED)
    it.answer(Position(1, 0))
    asked = it.asked()
    assert len(asked) == JUDGE_ENTRIES
    assert asked == [1, *range(11, 11 + len(keys))]
    it.answer(*(Position(1, each) for each in asked))
    assert it.asked() == [2, *range(11 + len(keys), 11 + 2 * len(keys))]
    it.answer(*(Position(1, each) for each in it.asked()))
    assert it.asked() == [*range(3, 11)]


def test_reading_stops_while_too_many_entries_are_unjudged() -> None:
    it = filtered(permits=100_000)
    it.holds = (Judge,)
    it.publish(*[b"%d" % each for each in range(UNJUDGED_MAX)], verdict=UNJUDGED)
    assert it.is_full()
    reads = [each for each in it.effects if isinstance(each, Read)]
    it.answer(*(Position(1, each) for each in it.asked()))
    assert not it.is_full()
    assert len([each for each in it.effects if isinstance(each, Read)]) == len(reads) + 1


def test_a_shared_subscription_stops_reading_at_the_limit_of_failed_entries() -> None:
    it = filtered(kind=SubscriptionType.SHARED, consumer_parked_max=2)
    it.publish(A, verdict=FILTER_FAILED)
    assert not it.is_full()
    it.publish(A, verdict=100)
    assert it.is_full()
    it.wait(100)
    assert it.got(1) == [1]
    assert not it.is_full()


def test_parked_keys_with_failed_filters_are_bounded_and_others_come_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert BEYOND_ROOM_MAX == 10_000
    monkeypatch.setattr("seqgate.services.dispatcher.core.lane.BEYOND_ROOM_MAX", 4)
    it = filtered(consumer_parked_max=3)
    keys = [b"%d" % each for each in range(20)]
    it.publish(*keys, verdict=FILTER_FAILED)
    assert it.sub.parked == 7
    it.log = [each._replace(verdict=ACCEPT) for each in it.log]
    it.refilter()
    assert sorted(it.got(1)) == [*range(20)]
    assert it.sub.parked == 0


def test_redelivered_entries_are_judged_again_and_those_in_flight_are_not() -> None:
    it = filtered()
    it.holds = (Judge,)
    it.publish(A, A, B)
    it.refilter(start=0)
    assert not [each for each in it.effects if isinstance(each, Judge)]
    it.got(1)
    it.negative_acknowledge(1, 0)
    assert it.asked() == [0, 1]
    assert it.got(1) == []
    it.holds = ()
    it.says = {0: REJECT}
    it.answer(Position(1, 0), Position(1, 1))
    assert it.got(1) == [1]
    assert it.acknowledged() == [0]


def test_a_message_that_failed_too_often_is_dead_lettered_despite_filters() -> None:
    it = filtered(redeliveries_max=0)
    it.says = {0: REJECT}
    it.publish(A, A)
    it.negative_acknowledge(1, 0)
    assert [each.position.entry_id for each in it.effects if isinstance(each, DeadLetter)] == [0]
    assert it.sub.totals["rejected_entries"] == 0


def test_a_gap_is_reported_after_the_next_message_was_rejected() -> None:
    it = filtered(redeliveries_max=0)
    it.publish(A, A, A)
    it.says = {1: REJECT}
    it.negative_acknowledge(1, 0)
    assert it.got(1) == [0, 1, 2, 2]
    gap = it.tokens[2].gap
    assert gap is not None
    assert gap.position == Position(1, 0)


def test_verdicts_of_replaced_filters_are_ignored() -> None:
    it = filtered()
    it.holds = (Judge,)
    it.publish(A, verdict=UNJUDGED)
    it.refilter()
    it.says = {0: REJECT}
    it.answer(Position(1, 0))
    assert it.acknowledged() == []
    assert it.asked() == [0]
    it.says = {}
    it.answer(Position(1, 0))
    assert it.got(1) == [0]


def test_new_filters_judge_waiting_entries_from_their_start() -> None:
    it = filtered(permits=0)
    it.publish(A, B, A, B)
    it.says = dict.fromkeys(range(4), REJECT)
    it.refilter(start=2)
    assert it.acknowledged() == [2, 3]
    it.permit(1, 10)
    assert sorted(it.got(1)) == [0, 1]


def test_removing_filters_delivers_the_entries_that_waited_for_them() -> None:
    it = filtered()
    it.holds = (Judge,)
    it.publish(A, verdict=UNJUDGED)
    it.publish(B, verdict=FILTER_FAILED)
    it.publish(C, verdict=1_000)
    it.refilter(is_filtered=False)
    assert sorted(it.got(1)) == [0, 1, 2]
    it.negative_acknowledge(1, 0)
    assert it.got(1) == [0]


def test_the_chunks_of_a_large_message_share_the_verdict_of_the_first() -> None:
    first, rest, last = (Chunk("attempt", is_last=each) for each in (False, False, True))
    it = filtered()
    it.publish(A, chunk=first, verdict=REJECT)
    it.publish(A, chunk=rest)
    it.publish(A, chunk=last)
    assert it.acknowledged() == [0, 1, 2]
    it.publish(A, chunk=first)  # another attempt at the same message
    it.publish(A, chunk=rest, verdict=REJECT)
    it.publish(A, chunk=last, verdict=FILTER_FAILED)
    assert it.got(1) == [3, 4, 5]


def test_waiting_chunks_of_a_large_message_are_judged_as_one() -> None:
    it = filtered(permits=0)
    it.publish(A, chunk=Chunk("attempt", is_last=False), verdict=100)
    it.wait(60)
    it.publish(A, chunk=Chunk("attempt", is_last=False))
    it.publish(A, verdict=FILTER_FAILED)
    it.says = {0: FILTER_FAILED, 1: REJECT}
    it.wait(40)
    assert it.sub.filter_failed == 3
    it.says = {0: REJECT, 3: FILTER_FAILED}
    it.refilter()
    assert it.acknowledged() == [0, 1]
    it.publish(A, chunk=Chunk("attempt", is_last=True))
    assert it.acknowledged() == [0, 1, 3]
    it.permit(1, 10)
    assert it.got(1) == [2]


def test_lagging_entries_are_judged_with_room_and_rejected_once() -> None:
    it = filtered(permits=0, key_parked_max=1, consumer_parked_max=1)
    it.holds = (Scan,)
    it.publish(A, A, A)
    it.publish(A, verdict=REJECT)
    assert it.acknowledged() == [3]
    it.holds = ()
    it.log[2] = it.log[2]._replace(verdict=REJECT)
    it.permit(1, 10)
    assert it.got(1) == [0, 1]
    assert it.acknowledged() == [3, 2]


def test_entries_read_during_a_page_of_a_scan_are_scanned_too() -> None:
    it = stage(permits=0, consumer_parked_max=1, key_parked_max=1)
    it.holds = (Scan,)
    it.publish(A, A)
    it.permit(1, 10)
    page = it.log[1:]
    it.publish(A)
    it.holds = ()
    it.do(it.sub.scanned(page, 0))
    assert sorted(it.got(1)) == [0, 1, 2]


def test_an_empty_page_of_a_scan_does_not_cover_entries_read_meanwhile() -> None:
    it = stage(permits=0, consumer_parked_max=1, key_parked_max=1)
    it.holds = (Scan,)
    it.publish(A, A)
    it.permit(1, 10)
    it.publish(A)
    it.holds = ()
    it.do(it.sub.scanned([], 0))  # the entries read earlier are trimmed by now
    assert it.got(1) == [0, 2]


def test_pages_of_a_scan_may_be_cut_anywhere() -> None:
    it = stage(permits=0, consumer_parked_max=1, key_parked_max=1)
    it.holds = (Scan,)
    it.publish(A, A, A, A)
    it.permit(1, 10)
    it.holds = ()
    it.do(it.sub.scanned(it.log[1:2], 0))
    assert sorted(it.got(1)) == [0, 1, 2, 3]


def test_the_rest_of_a_large_message_waits_for_permits_of_its_consumer() -> None:
    it = stage(permits=1)
    it.publish(B, chunk=Chunk("attempt", is_last=False))
    it.connect(2, 100)
    it.publish(B, chunk=Chunk("attempt", is_last=True))
    assert (it.got(1), it.got(2)) == ([0], [])
    assert it.sub.consumers[1].permits == 0
    assert it.reason(B) is Reason.DRAINING
    it.permit(1, 1)
    assert it.got(1) == [1]
    assert it.sub.consumers[1].permits == 0


def _batch_in_part(*, is_under_way: bool) -> Stage:
    """A batch of three with one acknowledged message, whose acknowledgement is not durable: it is
    under way, or waits for others."""
    it = stage()
    it.holds = (Persist,)
    if not is_under_way:
        it.publish(B)
        it.acknowledge(1, 0)
    it.publish(A, messages=3)
    entry = len(it.log) - 1
    it.acknowledge(1, entry, messages=0b010)
    return it


def test_an_acknowledged_message_is_not_redelivered_with_its_failed_batch() -> None:
    for is_under_way in (True, False):
        it = _batch_in_part(is_under_way=is_under_way)
        entry = len(it.log) - 1
        it.negative_acknowledge(1, entry)
        assert it.tokens[entry].unacked == 0b101
        it.give_back(1, entry)
        assert it.tokens[entry].unacked == 0b101
        it.connect(2)
        it.leave(1)
        it.permit(2, 100)
        assert it.tokens[entry].unacked == 0b101


def test_acknowledgements_of_a_batch_add_up_across_deliveries() -> None:
    it = _batch_in_part(is_under_way=False)
    it.give_back(1, 1)
    it.acknowledge(1, 1, messages=0b001)
    it.give_back(1, 1)
    assert it.tokens[1].unacked == 0b100
    it.holds = ()
    it.do(it.sub.persisted(None, 0))
    assert it.sub.partial == {Position(1, 1): 0b100}
    it.acknowledge(1, 1)
    assert it.sub.unacked == 0
    assert Position(1, 1) in it.sub.acknowledged


def test_any_key_releases_the_held_key_of_a_totally_ordered_subscription() -> None:
    it = stage(
        kind=SubscriptionType.EXCLUSIVE, redeliveries_max=0, after_dead_letter=AfterDeadLetter.HOLD
    )
    it.publish(A, B)
    it.negative_acknowledge(1, 0)
    assert it.got(1) == [0, 1]
    assert it.reason(it.sub.lane_key(A)) is Reason.HELD
    it.do(it.sub.release_key(A, 0))
    assert it.got(1) == [1]


def test_entries_whose_filters_failed_for_a_day_are_dead_lettered() -> None:
    it = stage()
    it.publish(A, verdict=FILTER_FAILED)
    it.publish(A, B)
    assert it.got(1) == [2]
    day_ms = it.options.filter_failed_max_ms
    assert day_ms == 86_400_000
    it.wait(day_ms - 1)
    assert it.acknowledged() == []
    it.wait(1)
    assert it.acknowledged() == [0]
    assert it.got(1) == [1]
    assert [each.position.entry_id for each in it.effects if isinstance(each, DeadLetter)] == [0]


def test_a_shared_subscription_dead_letters_entries_failed_for_a_day() -> None:
    it = stage(kind=SubscriptionType.SHARED, is_filtered=True)
    it.says[0] = FILTER_FAILED
    it.publish(A, verdict=UNJUDGED)
    it.wait(86_400_000)
    assert it.acknowledged() == [0]


def test_the_first_entry_with_failed_filters_is_known() -> None:
    it = stage(is_filtered=True)
    assert it.sub.judging.first_failed() is None
    it.publish(B, A, verdict=FILTER_FAILED)
    it.publish(A)
    assert it.sub.judging.first_failed() == Position(1, 0)
    it.refilter(is_filtered=False)
    assert it.sub.judging.first_failed() is None


def test_an_entry_with_failed_filters_is_known_while_new_ones_judge_it() -> None:
    it = filtered()
    it.publish(A, verdict=FILTER_FAILED)
    it.holds = (Judge,)
    it.refilter()
    assert it.sub.judging.first_failed() == Position(1, 0)
    it.refilter()
    assert it.sub.judging.first_failed() == Position(1, 0)
    it.says = {0: 50}
    it.answer()  # verdicts of the previous filters
    it.answer(Position(1, 0))
    assert it.sub.judging.first_failed() is None


def test_failed_entries_are_known_after_a_takeover_before_they_are_judged() -> None:
    it = stage(is_filtered=True, waits={Position(1, 1): 0})
    it.holds = (Judge,)
    it.publish(A, B, C, verdict=UNJUDGED)
    assert it.sub.judging.first_failed() == Position(1, 1)
    it.answer(Position(1, 0), Position(1, 1), Position(1, 2))
    assert it.sub.judging.first_failed() is None


def test_a_chunk_that_waited_before_a_takeover_may_have_been_withheld() -> None:
    it = stage(is_filtered=True, waits={Position(1, 0): 0})
    it.holds = (Judge,)
    it.publish(A, chunk=Chunk("attempt", is_last=False), verdict=UNJUDGED)
    assert it.sub.judging.first_failed() is None
    it.publish(A, chunk=Chunk("attempt", is_last=True), verdict=UNJUDGED)
    it.says = {0: FILTER_FAILED}
    it.answer(Position(1, 0))
    it.refilter()
    assert it.sub.judging.first_failed() == Position(1, 0)


def _rejected_while_nothing_is_durable() -> None:
    """The cursor service is down, and filters reject every entry."""
    it = stage(permits=10)
    it.holds = (Persist,)
    while any(isinstance(each, Read) for each in it.effects):
        it.effects.clear()
        it.publish(*[A] * 500, verdict=REJECT)
        assert len(it.log) <= UNSETTLED_MAX + 500
    assert len([*it.sub.settling.unsettled]) >= UNSETTLED_MAX
    it.holds = ()
    it.do(it.sub.persisted(None, 0))
    assert any(isinstance(each, Read) for each in it.effects), "reading goes on"
    it.publish(A)
    assert it.got(1) == [len(it.log) - 1]


def test_reading_stops_while_too_many_rejections_are_not_durable() -> None:
    _rejected_while_nothing_is_durable()


@pytest.mark.deep
def test_without_that_limit_rejections_accumulate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find("B2").apply(monkeypatch)
    with pytest.raises(AssertionError):
        _rejected_while_nothing_is_durable()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("id_", "shown"),
    [
        (
            "A16",
            test_the_rest_of_a_large_message_waits_for_permits_of_its_consumer,
        ),
        (
            "F2",
            test_an_acknowledged_message_is_not_redelivered_with_its_failed_batch,
        ),
        ("F11", test_entries_read_during_a_page_of_a_scan_are_scanned_too),
    ],
)
def test_a_defect_of_the_machine_is_found(
    id_: str, shown: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    find(id_).apply(monkeypatch)
    with pytest.raises(AssertionError):
        shown()


def test_other_events_do_not_restart_the_withheld_time_of_a_key() -> None:
    it = stage(max_in_flight_per_key=1)
    it.publish(A, A)
    it.wait(10)
    it.connect(2, 100)
    it.publish(A)
    it.leave(2)
    lane = it.sub.lanes[A]
    assert (lane.reason, lane.since_ms) == (Reason.IN_FLIGHT_LIMIT, 0)
    it.wait(10)
    it.acknowledge(1, 0)
    assert it.got(1) == [0, 1]
    assert (lane.reason, lane.since_ms) == (Reason.IN_FLIGHT_LIMIT, 20)
