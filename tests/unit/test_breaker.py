"""When the breaker opens and closes. Times are in milliseconds."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.client._breaker import Brake, Breaker, BreakerState

ANY = {*range(1_000)}.__contains__
"""All deliveries are live."""


def brake(outcomes: int = 4, ratio: float = 1.0, longest_s: float = 5.0) -> Brake:
    return Brake(Breaker(outcomes, ratio, pause_min_s=1.0, pause_max_s=longest_s))


def record(machine: Brake, outcomes: Iterable[bool], now_ms: int = 0) -> None:
    """Acknowledge (True) or refuse messages."""
    for is_done in outcomes:
        if is_done:
            machine.record_acknowledged(0, 1)
        else:
            machine.record_refused(0, 1, now_ms)


def opened(now_ms: int = 0, longest_s: float = 5.0) -> Brake:
    machine = brake(longest_s=longest_s)
    record(machine, [False] * 4, now_ms)
    assert machine.state is BreakerState.OPEN
    return machine


def state_of(machine: Brake) -> BreakerState:
    """The current state. A call, because mypy would keep the type narrowed by an earlier
    assertion."""
    return machine.state


def probed(machine: Brake, delivery: int) -> int:
    """Wait out the pause and hand out a message. Returns the time."""
    assert machine.due_ms is not None
    now_ms = machine.due_ms
    assert machine.admits(now_ms, ANY)
    machine.record_taken(delivery, 1, now_ms)
    return now_ms


@pytest.mark.parametrize(
    ("ratio", "outcomes", "is_open"),
    [
        (1.0, "fff", False),
        (1.0, "ffff", True),
        (1.0, "afff", False),
        (1.0, "affff", True),
        (1.0, "fffaffff", True),
        (1.0, "fffafff", False),
        (0.5, "ff", False),
        (0.5, "faaf", True),
        (0.5, "ffaaa", False),  # the second failure of the last four is one short
        (0.5, "ffaaf", True),
        (0.5, "faaaf", False),
        (0.25, "aaaf", True),
        (0.29, "aaff", True),
    ],
)
def test_the_breaker_opens_when_failures_in_the_window_reach_the_ratio(
    ratio: float, outcomes: str, is_open: bool
) -> None:
    machine = brake(4, ratio)
    record(machine, (each == "a" for each in outcomes[:-1]))
    assert state_of(machine) is BreakerState.CLOSED
    record(machine, (each == "a" for each in outcomes[-1:]))
    assert (machine.state is BreakerState.OPEN) == is_open


@given(st.integers(1, 20), st.floats(0.01, 1), st.lists(st.booleans(), max_size=100))
def test_the_breaker_stays_closed_while_no_window_ending_in_a_failure_has_enough_failures(
    outcomes: int, ratio: float, history: list[bool]
) -> None:
    machine = Brake(Breaker(outcomes, ratio))
    for at, is_done in enumerate(history, 1):
        record(machine, [is_done])
        window = history[at - outcomes : at] if at >= outcomes else []
        is_enough = bool(window) and window.count(False) / outcomes >= ratio
        assert (machine.state is BreakerState.OPEN) == (is_enough and not is_done)
        if machine.state is BreakerState.OPEN:
            break


def test_no_message_is_handed_out_during_the_pause() -> None:
    machine = opened(now_ms=500)
    assert machine.due_ms == 1_500
    assert not machine.admits(1_499, ANY)
    assert machine.admits(1_500, ANY)
    assert machine.state is BreakerState.HALF_OPEN


def test_there_is_one_probe_at_a_time() -> None:
    machine = opened()
    now_ms = probed(machine, 7)
    assert not machine.admits(now_ms, ANY)
    assert not machine.admits(now_ms + 4_999, ANY)


def test_an_acknowledged_probe_closes_the_breaker_and_forgets_earlier_outcomes() -> None:
    machine = opened()
    probed(machine, 7)
    machine.record_acknowledged(7, 1)
    assert machine.state is BreakerState.CLOSED
    assert machine.due_ms is None
    record(machine, [False] * 3)
    assert machine.admits(2_000, ANY)
    record(machine, [False], now_ms=2_000)
    assert machine.due_ms == 3_000  # the first pause again


def test_a_refused_probe_doubles_the_pause_up_to_the_longest() -> None:
    machine = opened()
    pauses = []
    for delivery in range(5):
        now_ms = probed(machine, delivery)
        machine.record_refused(delivery, 1, now_ms)
        assert machine.state is BreakerState.OPEN
        assert machine.due_ms is not None
        pauses.append(machine.due_ms - now_ms)
    assert pauses == [2_000, 4_000, 5_000, 5_000, 5_000]


def test_outcomes_of_messages_handed_out_before_the_breaker_opened_are_ignored() -> None:
    machine = opened()
    record(machine, [True, False])
    assert state_of(machine) is BreakerState.OPEN
    assert machine.due_ms == 1_000
    probed(machine, 7)
    record(machine, [True, False])
    machine.record_acknowledged(7, 2)  # another message of that batch
    assert machine.state is BreakerState.HALF_OPEN


def test_a_revoked_probe_is_followed_by_another_one() -> None:
    machine = opened()
    now_ms = probed(machine, 7)
    assert machine.admits(now_ms, {8}.__contains__)
    machine.record_taken(8, 1, now_ms)
    assert not machine.admits(now_ms, {8}.__contains__)
    machine.forget_probes()
    assert machine.admits(now_ms, {8}.__contains__)


def test_a_probe_without_an_outcome_is_followed_by_another_one_and_still_counts() -> None:
    machine = opened()
    now_ms = probed(machine, 7)
    assert machine.due_ms == now_ms + 5_000
    assert machine.admits(machine.due_ms, ANY)
    machine.record_taken(8, 1, machine.due_ms)
    assert machine.due_ms == now_ms + 10_000
    machine.record_acknowledged(7, 1)
    assert machine.state is BreakerState.CLOSED


@pytest.mark.parametrize(
    ("outcomes", "ratio", "pause_min_s", "pause_max_s"),
    [
        (0, 1, 1, 1),
        (10_001, 1, 1, 1),
        (1, 0, 1, 1),
        (1, 1.1, 1, 1),
        (1, 1, 0, 1),
        (1, 1, 2, 1),
        (1, 1, 1, 86_401),
    ],
)
def test_a_breaker_has_bounds(
    outcomes: int, ratio: float, pause_min_s: float, pause_max_s: float
) -> None:
    with pytest.raises(ValueError):
        Breaker(outcomes, ratio, pause_min_s, pause_max_s)
