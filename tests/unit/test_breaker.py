"""When a consumer stops because everything fails, and how it goes on. Times are milliseconds."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.client._breaker import Brake, Breaker, BreakerState

ANY = {*range(1_000)}.__contains__
"""All deliveries count."""


def brake(outcomes: int = 4, ratio: float = 1.0, longest_s: float = 5.0) -> Brake:
    return Brake(Breaker(outcomes, ratio, pause_min_s=1.0, pause_max_s=longest_s))


def note(machine: Brake, outcomes: Iterable[bool], now_ms: int = 0) -> None:
    """Messages are acknowledged (True), or refused."""
    for is_done in outcomes:
        if is_done:
            machine.record_acknowledged(0, 1)
        else:
            machine.record_refused(0, 1, now_ms)


def opened(now_ms: int = 0, longest_s: float = 5.0) -> Brake:
    machine = brake(longest_s=longest_s)
    note(machine, [False] * 4, now_ms)
    assert machine.state is BreakerState.OPEN
    return machine


def probed(machine: Brake, delivery: int) -> int:
    """The pause is over and a message is handed out. Returns when."""
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
def test_it_opens_when_the_share_of_failures_among_the_last_reaches_the_ratio(
    ratio: float, outcomes: str, is_open: bool
) -> None:
    machine = brake(4, ratio)
    note(machine, (each == "a" for each in outcomes[:-1]))
    assert machine.state is BreakerState.CLOSED
    note(machine, (each == "a" for each in outcomes[-1:]))
    assert (machine.state is BreakerState.OPEN) == is_open


@given(st.integers(1, 20), st.floats(0.01, 1), st.lists(st.booleans(), max_size=100))
def test_it_is_closed_as_long_as_no_window_that_ends_in_a_failure_has_enough_of_them(
    outcomes: int, ratio: float, history: list[bool]
) -> None:
    machine = Brake(Breaker(outcomes, ratio))
    for at, is_done in enumerate(history, 1):
        note(machine, [is_done])
        window = history[at - outcomes : at] if at >= outcomes else []
        is_enough = bool(window) and window.count(False) / outcomes >= ratio
        assert (machine.state is BreakerState.OPEN) == (is_enough and not is_done)
        if machine.state is BreakerState.OPEN:
            break


def test_nothing_is_handed_out_until_the_pause_is_over() -> None:
    machine = opened(now_ms=500)
    assert machine.due_ms == 1_500
    assert not machine.admits(1_499, ANY)
    assert machine.admits(1_500, ANY)
    assert machine.state is BreakerState.HALF_OPEN


def test_one_message_is_tried_at_a_time() -> None:
    machine = opened()
    now_ms = probed(machine, 7)
    assert not machine.admits(now_ms, ANY)
    assert not machine.admits(now_ms + 4_999, ANY)


def test_a_probe_that_succeeds_closes_it_and_what_was_before_is_forgotten() -> None:
    machine = opened()
    probed(machine, 7)
    machine.record_acknowledged(7, 1)
    assert machine.state is BreakerState.CLOSED
    assert machine.due_ms is None
    note(machine, [False] * 3)
    assert machine.admits(2_000, ANY)
    note(machine, [False], now_ms=2_000)
    assert machine.due_ms == 3_000  # the first pause again


def test_a_probe_that_fails_opens_it_for_twice_as_long_up_to_a_bound() -> None:
    machine = opened()
    pauses = []
    for delivery in range(5):
        now_ms = probed(machine, delivery)
        machine.record_refused(delivery, 1, now_ms)
        assert machine.state is BreakerState.OPEN
        assert machine.due_ms is not None
        pauses.append(machine.due_ms - now_ms)
    assert pauses == [2_000, 4_000, 5_000, 5_000, 5_000]


def test_what_was_handed_out_before_says_nothing() -> None:
    machine = opened()
    note(machine, [True, False])
    assert machine.state is BreakerState.OPEN
    assert machine.due_ms == 1_000
    probed(machine, 7)
    note(machine, [True, False])
    machine.record_acknowledged(7, 2)  # another message of that batch
    assert machine.state is BreakerState.HALF_OPEN


def test_a_probe_that_counts_no_more_is_followed_by_another_one() -> None:
    machine = opened()
    now_ms = probed(machine, 7)
    assert machine.admits(now_ms, {8}.__contains__)
    machine.record_taken(8, 1, now_ms)
    assert not machine.admits(now_ms, {8}.__contains__)
    machine.forget_probes()
    assert machine.admits(now_ms, {8}.__contains__)


def test_a_probe_of_which_nothing_is_heard_is_followed_by_another_one_and_still_counts() -> None:
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
