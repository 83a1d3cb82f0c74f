"""What a subscription makes of chunks that nobody can put together, one scenario each."""

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
    """All of a large message."""
    return [Chunk(attempt, each == count - 1, each) for each in range(count)]


def passed(effects: list[Effect]) -> list[int]:
    """What was passed, and said to be."""
    told = [each for each in effects if isinstance(each, Passed)]
    assert all(each.because is Because.HEADLESS for each in told)
    return [position.entry_id for each in told for position in each.positions]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_a_message_that_began_before_the_subscription_is_passed(
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
def test_the_rest_of_a_message_whose_beginning_was_acknowledged_is_passed(
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


def test_what_filters_rejected_with_its_first_chunk_is_rejected_and_not_passed() -> None:
    it = stage(is_filtered=True)
    first, second, last = chunks("attempt", 3)
    it.publish(A, chunk=first, verdict=REJECT)
    it.publish(A, chunk=second)
    it.publish(A, chunk=last)
    assert it.got(1) == passed(it.effects) == []
    assert it.sub.totals["rejected_entries"] == 3


def test_a_rest_that_was_not_kept_is_passed_when_it_is_read_again() -> None:
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


def test_of_very_many_unfinished_messages_none_is_passed_by_mistake(
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
def test_of_very_many_finished_messages_that_wait_to_be_read_again_none_is_passed_by_mistake(
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


def test_what_continues_nothing_is_passed_behind_messages_that_were_forgotten(
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


def test_who_takes_over_passes_what_is_left_of_a_message_that_was_acknowledged_in_part() -> None:
    before = stage()
    for each in chunks("attempt", 2):
        before.publish(A, chunk=each)
    it = Stage()
    it.sub.acknowledged.advance(Position(1, 0))
    it.connect(1, 100)
    it.do(it.sub.read([Entry(*each) for each in before.log], 0))
    assert it.got(1) == []
    assert passed(it.effects) == [1]


def begun(kind: SubscriptionType, *attempts: str, **options: object) -> Stage:
    """With c1 connected, who has the first chunks of large messages of three chunks each."""
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
def test_what_is_kept_back_is_passed_with_the_last_chunk(kind: SubscriptionType) -> None:
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
def test_a_message_that_there_is_no_room_for_comes_whole_when_it_is_the_turn_of_its_last(
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
def test_what_failed_and_is_kept_back_holds_nothing_before_the_last_of_its_message(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many entries are looked at at a time."""
    monkeypatch.setattr("seqgate.services.dispatcher.core.delivering.TURN_ENTRIES", turn)
    it = begun(SubscriptionType.EXCLUSIVE, "one", "no room", "two")
    for attempt, number in (("one", 1), ("two", 1), ("two", 2), ("one", 2)):
        it.publish(A, chunk=chunks(attempt, 3)[number])
    assert it.got(1) == [3, 4, 5, 6]
    no_room(it, 1)
    it.refuse(1, 0)
    assert it.got(1) == [2, 4, 5, 0, 3, 6]


def test_what_is_dead_is_not_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.delivering.KEPT_BACK_MAX", 2)
    it = begun(SubscriptionType.EXCLUSIVE, "one", "two", "three", redeliveries_max=0)
    it.publish(A, chunk=chunks("one", 3)[1])
    no_room(it, 1, 0)
    it.refuse(1, 3)
    assert letters(it) == [0, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_kept_back_of_a_message_that_will_not_be_finished_are_acknowledged(
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
def test_chunks_in_flight_of_a_message_that_will_not_be_finished_are_taken_back(
    kind: SubscriptionType,
) -> None:
    """Whoever has them may not get what ends their message, and would wait for the rest."""
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
def test_chunks_that_wait_of_a_message_that_will_not_be_finished_are_delivered_to_nobody(
    kind: SubscriptionType,
) -> None:
    it = stage(permits=0, kind=kind)
    first, second, _ = chunks("attempt", 3)
    it.publish(A, chunk=first)
    it.publish(A, chunk=second)
    it.publish(A, aborts="attempt")
    it.publish(A, chunk=first)  # while nobody deduplicates
    it.permit(1, 10)
    assert sorted(it.got(1)) == [2, 3]
    assert it.acknowledged() == [0, 1]
    assert passed(it.effects) == []


def test_a_chunk_that_was_not_kept_of_a_message_that_is_over_is_delivered_to_nobody() -> None:
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


def test_chunks_that_wait_for_their_last_for_a_day_are_dead_lettered_and_so_is_the_rest() -> None:
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
def test_a_message_whose_letter_holds_its_key_is_all_in_the_letter(refused: tuple[int]) -> None:
    it = stage(redeliveries_max=0, after_dead_letter=AfterDeadLetter.HOLD)
    for each in chunks("attempt", 3):
        it.publish(A, chunk=each)
    it.publish(A)
    it.got(1)
    it.refuse(1, *refused)
    for each in {0, 1, 2}.difference(refused):
        it.give_back(1, each)
    assert letters(it) == [0, 1, 2]
    assert it.reason(A) is Reason.HELD


def test_a_key_that_is_released_amid_a_letter_is_not_held_however_often_it_is_released() -> None:
    """The cursor forgets it with the first time: it would be held here, and nowhere else."""
    it = stage(redeliveries_max=0, after_dead_letter=AfterDeadLetter.HOLD)
    for each in chunks("attempt", 2):
        it.publish(A, chunk=each)
    it.publish(A)
    it.got(1)
    it.holds = (DeadLetter,)
    it.refuse(1, 0)
    it.do(it.sub.dead_lettered(Position(1, 0), A, 0))
    assert letters(it) == [0, 1]
    it.do(it.sub.release_key(A, 0))
    it.do(it.sub.release_key(A, 0))
    it.do(it.sub.dead_lettered(Position(1, 1), A, 0))
    assert it.sub.keys == {}
    assert it.got(1) == [2]


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_a_message_is_taken_back_for_its_letter_when_a_chunk_failed_too_often(
    kind: SubscriptionType,
) -> None:
    it = stage(kind=kind, redeliveries_max=0)
    for each in chunks("attempt", 3)[:2]:
        it.publish(A, chunk=each)
    assert it.got(1) == [0, 1]
    it.refuse(1, 1)
    it.publish(A, chunk=chunks("attempt", 3)[2])
    it.publish(A)
    assert letters(it) == [0, 1, 2]
    assert it.got(1) == [3]
    assert it.sub.totals["returned"] == 1


def test_a_chunk_that_is_dead_lettered_as_it_is_delivered_is_not_sent() -> None:
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


def test_a_chunk_does_not_wait_for_a_consumer_that_left_with_an_acknowledgement_pending() -> None:
    it = stage(permits=0, kind=SubscriptionType.SHARED)
    it.connect(2, 2)
    for each in chunks("attempt", 3)[:2]:
        it.publish(A, chunk=each)
    assert it.got(2) == [0, 1]
    it.holds = (Persist,)
    it.acknowledge(2, 1)
    it.refuse(2, 0)
    it.permit(1, 5)
    assert it.got(1) == []
    it.do(it.sub.close(2, 0))
    assert it.got(1) == [0]


def test_a_message_that_ends_behind_a_letter_with_its_tail_is_all_in_the_letters() -> None:
    """Its first chunk was before the letter, at a consumer who would never have got the rest."""
    it = stage(redeliveries_max=0, after_dead_letter=AfterDeadLetter.TAIL)
    first, last = chunks("attempt", 2)
    it.publish(A, chunk=first)
    it.publish(A)
    it.refuse(1, 1)
    it.publish(A, chunk=last)
    assert letters(it) == [1, 0, 2]
    assert it.sub.unacked == 0


def test_a_message_that_was_forgotten_is_all_in_the_letter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.large.FINISHED_MAX", 1)
    it = stage(redeliveries_max=0)
    for name in ("one", "two"):
        for each in chunks(name, 2):
            it.publish(A, chunk=each)
    it.publish(A)
    it.refuse(1, 1)
    assert letters(it) == [0, 1]
    assert it.got(1) == [0, 1, 2, 3, 4, 2, 3, 4]


def letters(it: Stage) -> list[int]:
    """What went to the dead letter topic, in order."""
    return [each.position.entry_id for each in it.effects if isinstance(each, DeadLetter)]


def test_more_chunks_than_are_kept_back_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.core.subscription.KEPT_BACK_MAX", 1)
    it = begun(SubscriptionType.EXCLUSIVE, "one", "two")
    no_room(it, 0, 1)
    assert it.sub.attempts == {Position(1, 1): 1}


def test_who_acknowledges_all_before_a_message_does_not_mean_one_that_is_unfinished_there() -> None:
    it = begun(SubscriptionType.EXCLUSIVE, "one")
    it.publish(A)
    effects, outcome, _ = it.sub.acknowledge_through(1, Ack(it.tokens[1].delivery), 0)
    it.do(effects)
    assert outcome is Outcome.DONE
    assert it.acknowledged() == [1]
    for each in chunks("one", 3)[1:]:
        it.publish(A, chunk=each)
    it.publish(A)
    assert it.got(1) == [1, 2, 3, 4]
    it.do(it.sub.acknowledge_through(1, Ack(it.tokens[4].delivery), 0)[0])
    assert it.acknowledged() == [1, 0, 2, 3, 4]


def test_an_entry_that_the_dead_letter_topic_does_not_take_is_passed_and_its_key_goes_on() -> None:
    it = stage(redeliveries_max=0)
    it.holds = (DeadLetter,)
    it.publish(A, A, B)
    it.refuse(1, 0)
    assert it.got(1) == [0, 1, 2]
    it.do(it.sub.dead_lettered(Position(1, 0), A, 0, Because.LETTER_REFUSED))
    assert it.got(1) == [1]
    assert it.effects.count(Passed((Position(1, 0),), Because.LETTER_REFUSED)) == 1
    assert it.acknowledged() == [0]
    assert it.sub.totals["dead_lettered"] == 0


def test_what_has_a_number_as_a_dead_letter_is_delivered_to_nobody() -> None:
    durable = Durable(Acknowledged(None), doomed=frozenset({Position(1, 0)}))
    it = Stage()
    it.sub = Subscription(it.options, Ring(), durable)
    it.connect(1, 10)
    it.publish(A, A)
    assert it.got(1) == [1]
    assert it.acknowledged() == [0]
