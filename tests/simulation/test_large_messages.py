"""Large messages with crashes between their chunks: the promises of publish.py, and that each
message is read back byte for byte or not at all."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from seqgate.services.ledger.core.writer import Effect, TopicWriter
from seqgate.types import Position
from tests.simulation.publish import World
from tests.support.depth import times

HISTORIES = times(quick=80, full=2_000)
STEPS_INTO_A_MESSAGE_MAX = 200

TIMEOUT_S = 600
"""All histories form one test, which takes about a minute on an idle machine."""


class Publishing(RuleBasedStateMachine):
    """Applications publish large messages. Everything may die at any moment, most often while a
    message is partly stored."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.world = World(seed, cutting=0.9)

    @rule(steps=st.integers(1, 40))
    def all_goes_well(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step(failing=False)
            self.world.check()

    @rule(steps=st.integers(1, 20))
    def calls_fail_or_are_late(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step(failing=True)
            self.world.check()

    @rule()
    def a_message_is_stored_in_part(self) -> None:
        for _ in range(STEPS_INTO_A_MESSAGE_MAX):
            if self.world.unfinished:
                break
            self.world.step(failing=False)
            self.world.check()

    @rule()
    def the_ledger_dies(self) -> None:
        self.world.ledger_dies()

    @rule()
    def the_ledger_is_replaced_and_does_not_know(self) -> None:
        self.world.ledger_is_replaced()

    @rule()
    def dedup_dies(self) -> None:
        self.world.dedup_dies()

    @rule()
    def redis_is_copied(self) -> None:
        self.world.state.remember()

    @rule()
    def redis_forgets(self) -> None:
        self.world.redis_forgets()

    @rule()
    def redis_forgets_a_producer(self) -> None:
        self.world.redis_forgets_a_producer()

    @rule()
    def redis_goes_back_to_a_copy(self) -> None:
        self.world.redis_goes_back()

    @rule(which=st.integers(0, 2))
    def an_application_dies_and_cuts_otherwise(self, which: int) -> None:
        applications = self.world.applications
        applications[which % len(applications)].restart()

    @rule(which=st.integers(0, 2))
    def a_stream_breaks(self, which: int) -> None:
        applications = self.world.applications
        applications[which % len(applications)].break_stream()

    @rule()
    def all_services_die(self) -> None:
        self.world.dedup_dies()
        self.world.redis_goes_back()
        self.world.ledger_dies()

    @invariant()
    def what_was_promised_holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


test_large_messages_survive_everything = pytest.mark.timeout(TIMEOUT_S)(Publishing.TestCase)
Publishing.TestCase.settings = settings(
    max_examples=HISTORIES, stateful_step_count=20, derandomize=True
)


_reopened = TopicWriter.reopened


def _without_doubt(self: TopicWriter, ledger_id: int, tail: Position | None) -> list[Effect]:
    self._in_doubt.clear()
    return _reopened(self, ledger_id, tail)


FORGETFUL_HISTORIES = times(quick=60, full=1_000)


def test_a_forgotten_attempt_is_aborted_by_the_next_message(seed: int) -> None:
    forgotten = [_forget_between_chunks(each) for each in range(seed, seed + FORGETFUL_HISTORIES)]
    assert sum(forgotten) > FORGETFUL_HISTORIES // 4


@pytest.mark.deep
@pytest.mark.parametrize(
    ("rule_of_the_log", "wrong"),
    [
        ("_track_unfinished", lambda *_: None),
        ("left_unfinished", lambda *_: None),
        ("reopened", _without_doubt),
    ],
)
def test_an_attempt_that_is_not_aborted_is_found(
    rule_of_the_log: str, wrong: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TopicWriter, rule_of_the_log, wrong)
    for each in range(seed, seed + 1_000):
        try:
            _forget_between_chunks(each)
        except AssertionError:
            return
    pytest.fail(f"every history passes without {rule_of_the_log}")


def _forget_between_chunks(seed: int) -> bool:
    """Returns True if the history forgot a producer in the middle of a message."""
    world = World(seed, cutting=0.9)
    forgotten = False
    for _ in range(STEPS_INTO_A_MESSAGE_MAX):
        world.step(failing=seed % 4 > 1)
        world.check()
        if not forgotten and world.unfinished and world.redis_forgets_a_producer():
            forgotten = True
            if seed % 2:
                world.random.choice(world.applications).restart()
    world.settle()
    return forgotten
