"""The gate before the verdicts: answers if the state does not match the writer."""

from typing import Any

import pytest

from seqgate.services.dedup.core.sequence import Marks
from seqgate.services.dedup.core.topic import Full, TopicState
from seqgate.services.deduplication import (
    Applied,
    Behind,
    Changed,
    Claim,
    Confirmation,
    Judged,
    ProducerClaims,
    ProducerEntries,
    Verdict,
    Writer,
)
from seqgate.services.errors import Fenced
from seqgate.types import Position

AT_3 = Position(1, 3)


def state_at(position: Position | None, **more: Any) -> TopicState:
    return TopicState(incarnation=1, epoch=2, confirmed=position, revision=5, **more)


def ask(state: TopicState | None, writer: Writer, **more: Any) -> Any:
    state = TopicState.entered_by(state, writer)
    claims = [ProducerClaims("p", (Claim(7, 7),))]
    given = {"now_ms": 1, "max_producers": 10} | more
    return state.admit(writer, given.pop("confirmation", None), claims, **given)


def entries(after: Position | None, through: Position, *highest: int) -> Confirmation:
    return Confirmation(after, through, (ProducerEntries("p", highest, 1),), len(highest))


@pytest.mark.parametrize(
    ("writer", "answer"),
    [
        (Writer(1, 2, AT_3), Judged),
        (Writer(1, 2, AT_3, revision=5), Judged),
        (Writer(1, 2, Position(1, 4)), Behind(AT_3)),
        (Writer(1, 2, Position(2, 0)), Behind(AT_3)),
        (Writer(1, 3, AT_3), Judged),  # a takeover
        (Writer(1, 3, Position(1, 9)), Behind(AT_3)),
        (Writer(1, 2, AT_3, revision=4), Changed(5)),
        (Writer(1, 3, AT_3, revision=5), Changed(6)),  # the takeover itself raised it
        (Writer(2, 1, None), Judged),  # the topic was recreated
        (Writer(2, 1, Position(9, 9)), Behind(None)),
    ],
)
def test_answers_depend_on_the_writer(writer: Writer, answer: Any) -> None:
    outcome = ask(state_at(AT_3), writer)
    assert isinstance(outcome, answer) if isinstance(answer, type) else outcome == answer


@pytest.mark.parametrize(
    "writer",
    [
        Writer(1, 1, AT_3),  # an older epoch
        Writer(1, 2, Position(1, 2)),  # another writer has appended meanwhile
        Writer(1, 2, None),
        Writer(0, 9, AT_3),  # an older incarnation
    ],
)
def test_zombies_are_fenced(writer: Writer) -> None:
    with pytest.raises(Fenced):
        ask(state_at(AT_3), writer)


def test_a_topic_lost_by_redis_is_behind_unless_its_log_is_empty() -> None:
    assert ask(None, Writer(1, 2, AT_3)) == Behind(None)
    assert isinstance(ask(None, Writer(1, 2, None)), Judged)


def test_a_confirmation_is_applied_before_claims_are_judged() -> None:
    state = state_at(AT_3)
    outcome = ask(
        state, Writer(1, 2, Position(1, 5)), confirmation=entries(AT_3, Position(1, 5), 6, 7)
    )
    assert outcome.producers[0].verdicts == [Verdict.DUPLICATE]
    assert state.confirmed == (1, 5)


def test_a_confirmation_that_leaves_a_gap_changes_nothing() -> None:
    state = state_at(AT_3)
    gap = entries(Position(1, 4), Position(1, 5), 7)
    assert state.confirm(Writer(1, 2, Position(1, 5)), gap) == Behind(AT_3)
    assert state.confirmed == AT_3
    assert not state.producers


def test_confirming_again_is_harmless() -> None:
    state = state_at(AT_3)
    writer = Writer(1, 2, Position(1, 5))
    for _ in range(2):
        assert state.confirm(writer, entries(AT_3, Position(1, 5), 6, 7)) == Applied(5, unsaved=2)
    assert state.producers["p"].marks == Marks(7, 7)
    assert state.counts.confirmed_entries == 2


def test_a_takeover_withdraws_claims_of_the_previous_writer() -> None:
    state = state_at(AT_3)
    assert ask(state, Writer(1, 2, AT_3)).producers[0].verdicts == [Verdict.NEW]
    assert ask(state, Writer(1, 2, AT_3)).producers[0].verdicts == [Verdict.IN_FLIGHT]
    assert ask(state, Writer(1, 3, AT_3)).producers[0].verdicts == [Verdict.NEW]


def test_a_full_topic_judges_nothing() -> None:
    state = state_at(AT_3)
    assert ask(state, Writer(1, 2, AT_3), max_producers=0) == Full(tracked=0, wanted=1)
    assert not state.producers
    assert isinstance(ask(state, Writer(1, 2, AT_3), max_producers=1), Judged)
    assert isinstance(ask(state, Writer(1, 2, AT_3), max_producers=0), Judged)  # already known


def test_a_rollback_withdraws_even_when_the_state_is_behind() -> None:
    state = state_at(AT_3)
    ask(state, Writer(1, 2, AT_3))
    assert state.rollback(Writer(1, 2, Position(1, 9)), None, []) == Behind(AT_3)
    assert not state.producers["p"].marks.in_flight
