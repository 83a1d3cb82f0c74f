"""Chunks that cannot be assembled, in a subscription: one scenario each."""

from typing import Any

import pytest

from seqgate.services.dispatcher.core.effects import (
    REJECT,
    AfterDeadLetter,
    Because,
    DeadLetter,
    Effect,
    Entry,
    Outcome,
    Passed,
    Persist,
    Revoke,
    SubscriptionType,
)
from seqgate.services.dispatcher.core.lane import Chunk, Reason
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.core.selectors import Ring
from seqgate.services.dispatcher.core.settling import Durable
from seqgate.services.dispatcher.core.subscription import Ack, Subscription
from seqgate.types import Position
from tests.unit.test_subscription import A, B, Stage, stage

KINDS = list(SubscriptionType)


def chunks(attempt: str, count: int) -> list[Chunk]:
    """All chunks of a large message."""
    return [Chunk(attempt, each == count - 1, each) for each in range(count)]


def passed(effects: list[Effect]) -> list[int]:
    """The entries reported as passed."""
    told = [each for each in effects if isinstance(each, Passed)]
    assert all(each.because is Because.HEADLESS for each in told)
    return [position.entry_id for each in told for position in each.positions]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_a_message_older_than_the_subscription_is_skipped(
    kind: SubscriptionType,
) -> None:
    it = stage(kind=kind)
    _, second, last = chunks("attempt", 3)
    it.publish(A, chunk=second)
    it.publish(A)
    it.publish(A, chunk=last)
    it.publish(A, B)
    assert it.got(1) == [1, 3, 4]
    assert passed(it.effects) == [0, 2]
    assert it.acknowledged() == [0, 2]
    assert it.sub.totals["passed_entries"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_a_message_with_an_acknowledged_start_is_skipped(
    kind: SubscriptionType,
) -> None:
    it = stage(kind=kind)
    first, second, last = chunks("attempt", 3)
    it.publish(A, chunk=first)
    it.publish(A, chunk=second)
    it.acknowledge(1, 0, 1)
    it.publish(A, chunk=last)
    it.publish(A)
    assert it.got(1) == [0, 1, 3]
    assert passed(it.effects) == [2]


def test_chunks_of_a_rejected_message_are_rejected() -> None:
    it = stage(is_filtered=True)
    first, second, last = chunks("attempt", 3)
    it.publish(A, chunk=first, verdict=REJECT)
    it.publish(A, chunk=second)
    it.publish(A, chunk=last)
    assert it.got(1) == passed(it.effects) == []
    assert it.sub.totals["rejected_entries"] == 3


def test_an_evicted_rest_is_skipped_when_it_is_read_again() -> None:
    it = stage(permits=1, key_parked_max=1, consumer_parked_max=1)
    first, second, last = chunks("attempt", 3)
    it.publish(A, chunk=first)
    it.publish(A)
    it.publish(A, chunk=second)
    it.publish(A, chunk=last)
    assert it.got(1) == [0]
    it.acknowledge(1, 0)
    it.permit(1, 10)
    assert it.got(1) == [1]
    assert passed(it.effects) == [2, 3]


def test_none_of_very_many_unfinished_messages_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.large.UNFINISHED_MAX", 2)
    it = stage()
    messages = [chunks(f"attempt-{each}", 2) for each in range(4)]
    for first, _ in messages:
        it.publish(A, chunk=first)
    for _, last in messages:
        it.publish(A, chunk=last)
    assert it.got(1) == list(range(8))
    assert passed(it.effects) == []


@pytest.mark.parametrize("kind", [SubscriptionType.KEY_SHARED, SubscriptionType.EXCLUSIVE])
def test_none_of_very_many_finished_messages_to_read_again_is_skipped(
    kind: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.large.FINISHED_MAX", 1)
    it = stage(kind=kind, permits=0, key_parked_max=1, consumer_parked_max=1)
    for each in range(4):
        for chunk in chunks(f"attempt-{each}", 2):
            it.publish(A, chunk=chunk)
    got = []
    for _ in range(4):
        it.permit(1, 2)
        got.append(it.got(1))
        it.acknowledge(1, *got[-1])
    assert got == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert passed(it.effects) == []


def test_a_headless_chunk_after_forgotten_messages_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.large.FINISHED_MAX", 1)
    it = stage(permits=0)
    for each in range(3):
        for chunk in chunks(f"attempt-{each}", 2):
            it.publish(A, chunk=chunk)
    it.publish(A, chunk=chunks("headless", 2)[1])
    it.permit(1, 10)
    assert it.got(1) == list(range(6))
    assert passed(it.effects) == [6]


def test_a_takeover_skips_the_rest_of_a_partly_acknowledged_message() -> None:
    before = stage()
    for each in chunks("attempt", 2):
        before.publish(A, chunk=each)
    it = Stage()
    it.sub.acknowledged.advance(Position(1, 0))
    it.connect(1, 100)
    it.do(it.sub.read([Entry(*each) for each in before.log], 0))
    assert it.got(1) == []
    assert passed(it.effects) == [1]


def begun(kind: SubscriptionType, *attempts: str, **options: Any) -> Stage:
    """A stage with c1 connected and in possession of the first chunks of large messages of three
    chunks each."""
    it = stage(kind=kind, **options)
    for each in attempts:
        it.publish(A, chunk=chunks(each, 3)[0])
    assert it.got(1) == list(range(len(attempts)))
    return it


def no_room(it: Stage, *entries: int) -> None:
    tokens = [it.tokens[each].delivery for each in entries]
    effects, outcomes = it.sub.give_back(1, tokens, it.now_ms, no_room=True)
    assert outcomes == [Outcome.DONE] * len(entries)
    it.do(effects)


@pytest.mark.parametrize("kind", KINDS)
def test_withheld_chunks_are_skipped_with_the_last_one(kind: SubscriptionType) -> None:
    it = begun(kind, "attempt")
    _, second, last = chunks("attempt", 3)
    it.publish(A, chunk=second)
    no_room(it, 1)
    it.acknowledge(1, 0)
    it.publish(A, chunk=last)
    assert sorted(passed(it.effects)) == [1, 2]
    assert it.sub.parking.kept_back == 0
    assert not it.sub.lanes


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_without_room_is_delivered_whole_at_its_last_chunk(
    kind: SubscriptionType,
) -> None:
    it = begun(kind, "one", "two")
    no_room(it, 1)
    it.publish(A)
    it.publish(A, chunk=chunks("two", 3)[1])
    it.publish(A, chunk=chunks("one", 3)[1])
    it.publish(A)
    assert it.got(1) == [2, 4, 5]
    it.publish(A, chunk=chunks("two", 3)[2])
    it.publish(A)
    assert it.got(1) == [1, 3, 6, 7]
    assert it.sub.attempts == {}
    assert it.sub.parking.kept_back == 0


@pytest.mark.parametrize("turn", [1, 2, 3, 16])
def test_a_failed_withheld_chunk_holds_nothing_before_its_last_chunk(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of entries per turn."""
    monkeypatch.setattr("seqgate.services.dispatcher.core.delivering.TURN_ENTRIES", turn)
    it = begun(SubscriptionType.EXCLUSIVE, "one", "no room", "two")
    for attempt, number in (("one", 1), ("two", 1), ("two", 2), ("one", 2)):
        it.publish(A, chunk=chunks(attempt, 3)[number])
    assert it.got(1) == [3, 4, 5, 6]
    no_room(it, 1)
    it.negative_acknowledge(1, 0)
    assert it.got(1) == [2, 4, 5, 0, 3, 6]


def test_dead_chunks_are_not_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.delivering.KEPT_BACK_MAX", 2)
    it = begun(SubscriptionType.EXCLUSIVE, "one", "two", "three", redeliveries_max=0)
    it.publish(A, chunk=chunks("one", 3)[1])
    no_room(it, 1, 0)
    it.negative_acknowledge(1, 3)
    assert letters(it) == [0, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_withheld_chunks_of_an_aborted_message_are_acknowledged(
    kind: SubscriptionType,
) -> None:
    it = begun(kind, "one", "two")
    no_room(it, 0, 1)
    it.publish(A, aborts="one")
    assert it.acknowledged() == [0]
    it.publish(A, chunk=chunks("two", 3)[1])
    it.publish(A, aborts="two")
    assert sorted(it.acknowledged()) == [0, 1, 3]
    assert it.got(1) == [2, 4]
    assert passed(it.effects) == []


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_in_flight_of_an_aborted_message_are_revoked(
    kind: SubscriptionType,
) -> None:
    """Their consumer might not receive the abort, and would wait for the rest."""
    it = begun(kind, "one", "two")
    it.publish(A, chunk=chunks("one", 3)[1])
    it.publish(A)
    tokens = {each: it.tokens[each].delivery for each in range(4)}
    it.publish(B, aborts="one")
    assert [each for each in it.effects if isinstance(each, Revoke)] == [
        Revoke(1, (tokens[0], tokens[2]))
    ]
    assert it.acknowledged() == [0, 2]
    assert it.acknowledge(1, 0) == [Outcome.STALE]
    assert it.sub.consumers[1].unacked == 3
    assert it.got(1) == [2, 3, 4]
    assert passed(it.effects) == []


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_chunks_of_an_aborted_message_are_not_delivered(
    kind: SubscriptionType,
) -> None:
    it = stage(permits=0, kind=kind)
    first, second, _ = chunks("attempt", 3)
    it.publish(A, chunk=first)
    it.publish(A, chunk=second)
    it.publish(A, aborts="attempt")
    it.publish(A, chunk=first)  # with deduplication off
    it.permit(1, 10)
    assert sorted(it.got(1)) == [2, 3]
    assert it.acknowledged() == [0, 1]
    assert passed(it.effects) == []


def test_an_evicted_chunk_of_an_ended_message_is_not_delivered() -> None:
    it = stage(permits=1, key_parked_max=1, consumer_parked_max=1)
    it.publish(A)
    it.publish(A)
    it.publish(A, chunk=chunks("attempt", 2)[0])
    it.publish(A, aborts="attempt")
    it.acknowledge(1, 0)
    for each in (1, 3):
        it.permit(1, 1)
        it.acknowledge(1, each)
    assert it.got(1) == [0, 1, 3]
    assert sorted(it.acknowledged()) == [0, 1, 2, 3]


def test_a_message_unfinished_for_a_day_is_dead_lettered_whole() -> None:
    it = begun(SubscriptionType.EXCLUSIVE, "one", "two")
    no_room(it, 1)
    it.publish(A, chunk=chunks("two", 3)[1])
    day_ms = it.options.unfinished_max_ms
    assert day_ms == 86_400_000
    it.wait(day_ms - 1)
    assert it.acknowledged() == []
    it.wait(1)
    assert it.acknowledged() == [1, 2]
    it.publish(A, chunk=chunks("two", 3)[2])
    it.publish(A)
    assert letters(it) == [1, 2, 3]
    assert it.got(1) == [4]


@pytest.mark.parametrize("refused", [(0,), (0, 1, 2)])
def test_a_message_that_holds_its_key_is_dead_lettered_whole(
    refused: tuple[int, ...],
) -> None:
    it = stage(redeliveries_max=0, after_dead_letter=AfterDeadLetter.HOLD)
    for each in chunks("attempt", 3):
        it.publish(A, chunk=each)
    it.publish(A)
    it.got(1)
    it.negative_acknowledge(1, *refused)
    for delivery in {0, 1, 2}.difference(refused):
        it.give_back(1, delivery)
    assert letters(it) == [0, 1, 2]
    assert it.reason(A) is Reason.HELD


def test_a_key_released_amid_a_dead_letter_is_not_held() -> None:
    """Even if it is released twice: the cursor forgets the key with the first release, so that only
    this owner would hold it after the second."""
    it = stage(redeliveries_max=0, after_dead_letter=AfterDeadLetter.HOLD)
    for each in chunks("attempt", 2):
        it.publish(A, chunk=each)
    it.publish(A)
    it.got(1)
    it.holds = (DeadLetter,)
    it.negative_acknowledge(1, 0)
    it.do(it.sub.dead_lettered(Position(1, 0), A, 0))
    assert letters(it) == [0, 1]
    it.do(it.sub.release_key(A, 0))
    it.do(it.sub.release_key(A, 0))
    it.do(it.sub.dead_lettered(Position(1, 1), A, 0))
    assert it.sub.keys == {}
    assert it.got(1) == [2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_is_revoked_whole_when_a_chunk_failed_too_often(
    kind: SubscriptionType,
) -> None:
    it = stage(kind=kind, redeliveries_max=0)
    for each in chunks("attempt", 3)[:2]:
        it.publish(A, chunk=each)
    assert it.got(1) == [0, 1]
    it.negative_acknowledge(1, 1)
    it.publish(A, chunk=chunks("attempt", 3)[2])
    it.publish(A)
    assert letters(it) == [0, 1, 2]
    assert it.got(1) == [3]
    assert it.sub.totals["returned"] == 1


def test_a_chunk_dead_lettered_on_delivery_is_not_sent() -> None:
    it = stage(permits=0, redeliveries_max=0)
    it.sub.settling.attempts[Position(1, 1)] = 1
    for each in chunks("attempt", 2):
        it.publish(A, chunk=each)
    it.effects.clear()
    it.permit(1, 5)
    assert letters(it) == [0, 1]
    assert it.got(1) == []
    assert not [each for each in it.effects if isinstance(each, Revoke)]
    assert it.sub.consumers[1].permits == 5
    assert it.sub.totals["returned"] == 0


def test_a_chunk_does_not_wait_for_a_departed_consumer() -> None:
    it = stage(permits=0, kind=SubscriptionType.SHARED)
    it.connect(2, 2)
    for each in chunks("attempt", 3)[:2]:
        it.publish(A, chunk=each)
    assert it.got(2) == [0, 1]
    it.holds = (Persist,)
    it.acknowledge(2, 1)
    it.negative_acknowledge(2, 0)
    it.permit(1, 5)
    assert it.got(1) == []
    it.do(it.sub.close(2, 0))
    assert it.got(1) == [0]


def test_a_message_that_ends_in_a_dead_lettered_tail_is_dead_lettered_whole() -> None:
    """Its first chunk, before the dead letter, was at a consumer that would never get the rest."""
    it = stage(redeliveries_max=0, after_dead_letter=AfterDeadLetter.TAIL)
    first, last = chunks("attempt", 2)
    it.publish(A, chunk=first)
    it.publish(A)
    it.negative_acknowledge(1, 1)
    it.publish(A, chunk=last)
    assert letters(it) == [1, 0, 2]
    assert it.sub.unacked == 0


def test_a_forgotten_message_is_dead_lettered_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.large.FINISHED_MAX", 1)
    it = stage(redeliveries_max=0)
    for name in ("one", "two"):
        for each in chunks(name, 2):
            it.publish(A, chunk=each)
    it.publish(A)
    it.negative_acknowledge(1, 1)
    assert letters(it) == [0, 1]
    assert it.got(1) == [0, 1, 2, 3, 4, 2, 3, 4]


def letters(it: Stage) -> list[int]:
    """The entries sent to the dead letter topic, in order."""
    return [each.position.entry_id for each in it.effects if isinstance(each, DeadLetter)]


def test_a_failed_chunk_beyond_the_withholding_limit_counts_an_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.subscription.KEPT_BACK_MAX", 1)
    it = begun(SubscriptionType.EXCLUSIVE, "one", "two")
    no_room(it, 0, 1)
    assert it.sub.attempts == {Position(1, 1): 1}


def test_cumulative_acknowledgement_spares_an_unfinished_message() -> None:
    it = begun(SubscriptionType.EXCLUSIVE, "one")
    it.publish(A)
    effects, outcome, _ = it.sub.acknowledge_cumulative(1, Ack(it.tokens[1].delivery), 0)
    it.do(effects)
    assert outcome is Outcome.DONE
    assert it.acknowledged() == [1]
    for each in chunks("one", 3)[1:]:
        it.publish(A, chunk=each)
    it.publish(A)
    assert it.got(1) == [1, 2, 3, 4]
    it.do(it.sub.acknowledge_cumulative(1, Ack(it.tokens[4].delivery), 0)[0])
    assert it.acknowledged() == [1, 0, 2, 3, 4]


def test_an_entry_refused_by_the_dead_letter_topic_is_skipped_and_its_key_continues() -> None:
    it = stage(redeliveries_max=0)
    it.holds = (DeadLetter,)
    it.publish(A, A, B)
    it.negative_acknowledge(1, 0)
    assert it.got(1) == [0, 1, 2]
    it.do(it.sub.dead_lettered(Position(1, 0), A, 0, Because.LETTER_REFUSED))
    assert it.got(1) == [1]
    assert it.effects.count(Passed((Position(1, 0),), Because.LETTER_REFUSED)) == 1
    assert it.acknowledged() == [0]
    assert it.sub.totals["dead_lettered"] == 0


def test_an_entry_numbered_as_a_dead_letter_is_not_delivered() -> None:
    durable = Durable(Acknowledged(None), doomed=frozenset({Position(1, 0)}))
    it = Stage()
    it.sub = Subscription(it.options, Ring(), durable)
    it.connect(1, 10)
    it.publish(A, A)
    assert it.got(1) == [1]
    assert it.acknowledged() == [0]


# ---- the same attempt, stored more than once: its producer began again under its uuid


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_attempt_stored_before_it_began_again_is_taken_back(
    kind: SubscriptionType,
) -> None:
    """The log names no abort. Otherwise the first chunk would stay in flight, and hold back the
    mark-delete position."""
    it = stage(kind=kind)
    first, second, last = chunks("attempt", 3)
    it.publish(A, chunk=first)
    it.publish(A, chunk=second)
    tokens = it.tokens[0].delivery, it.tokens[1].delivery
    it.publish(A, chunk=first)
    assert [each for each in it.effects if isinstance(each, Revoke)] == [Revoke(1, tokens)]
    assert it.acknowledged() == [0, 1]
    it.publish(A, chunk=second)
    it.publish(A, chunk=last)
    assert it.got(1) == [0, 1, 2, 3, 4]
    it.acknowledge(1, 2, 3, 4)
    assert sorted(it.acknowledged()) == [0, 1, 2, 3, 4]
    assert passed(it.effects) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_beginning_of_an_attempt_that_is_aborted_twice_is_acknowledged(
    kind: SubscriptionType,
) -> None:
    it = stage(permits=0, kind=kind)
    first, last = chunks("attempt", 2)
    it.publish(A, chunk=first)
    it.publish(A, aborts="attempt")
    it.publish(A, chunk=first)
    it.publish(A, chunk=last)
    it.publish(A, chunk=first)
    it.publish(A, aborts="attempt")
    it.permit(1, 10)
    assert sorted(it.got(1)) == [1, 2, 3, 5]
    assert sorted(it.acknowledged()) == [0, 4]
    assert passed(it.effects) == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_repetition_does_not_take_back_the_message(kind: SubscriptionType) -> None:
    it = stage(kind=kind)
    first, last = chunks("attempt", 2)
    it.publish(A, chunk=first)
    it.publish(A, chunk=last)
    it.publish(A, chunk=first)
    token = it.tokens[2].delivery
    it.publish(A, aborts="attempt")
    assert [each for each in it.effects if isinstance(each, Revoke)] == [Revoke(1, (token,))]
    it.negative_acknowledge(1, 0, 1)
    it.wait(60_000)
    assert sorted(each for each in it.got(1) if each < 2) == [0, 0, 1, 1]
    it.acknowledge(1, 0, 1)
    assert sorted(it.acknowledged()) == [0, 1, 2]
    assert passed(it.effects) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failed", [(0, 1), (2, 3)])
def test_each_copy_of_a_message_is_redelivered_whole(
    kind: SubscriptionType, failed: tuple[int, int]
) -> None:
    it = stage(kind=kind)
    for chunk in chunks("attempt", 2) * 2:
        it.publish(A, chunk=chunk)
    it.got(1)
    it.acknowledge(1, *({0, 1, 2, 3} - {*failed}))
    it.negative_acknowledge(1, *failed)
    it.wait(60_000)
    assert it.got(1) == [*failed]
    it.acknowledge(1, *failed)
    assert sorted(it.acknowledged()) == [0, 1, 2, 3]
    assert passed(it.effects) == []


def test_withheld_chunks_of_a_repetition_survive_the_message() -> None:
    it = stage(kind=SubscriptionType.SHARED)
    first, last = chunks("attempt", 2)
    for chunk in (first, last, first):
        it.publish(A, chunk=chunk)
    no_room(it, 2)
    it.acknowledge(1, 0, 1)
    assert sorted(it.acknowledged()) == [0, 1]
    it.publish(A, chunk=last)
    assert it.got(1)[-2:] == [2, 3]
    it.acknowledge(1, 2, 3)
    assert sorted(it.acknowledged()) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_is_redelivered_while_its_copy_is_acknowledged(kind: SubscriptionType) -> None:
    it = stage(kind=kind, max_in_flight_per_key=0)
    for chunk in chunks("attempt", 2) * 2:
        it.publish(A, chunk=chunk)
    it.got(1)
    it.acknowledge(1, 2)
    it.negative_acknowledge(1, 0, 1)
    it.wait(60_000)
    assert it.got(1)[:2] == [0, 1]
