"""Statistics of scattered figures."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench.figures import (
    Spread,
    in_series,
    over_rounds,
    percentile,
    percentile_over_rounds,
    rate,
    ratio,
)
from tools.bench.rounds import Round

values = st.lists(st.floats(0, 1e9), min_size=1, max_size=50)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.001, 1),
        (0.01, 1),
        (0.011, 2),
        (0.07, 7),  # 0.07 * 100 is 7.000000000000001
        (0.29, 29),  # 0.29 * 100 is 28.999999999999996
        (0.5, 50),
        (0.99, 99),
        (0.991, 100),
        (1, 100),
    ],
)
def test_a_percentile_of_a_hundred_values_is_its_rank(share: float, expected: int) -> None:
    assert percentile(range(100, 0, -1), share) == expected


@given(values, st.floats(0.01, 1))
def test_a_percentile_is_a_value_that_enough_others_do_not_exceed(
    given: list[float], share: float
) -> None:
    found = percentile(given, share)

    assert found in given
    assert sum(each <= found for each in given) >= share * len(given) - 1e-6
    assert sum(each < found for each in given) < share * len(given) + 1e-6


@pytest.mark.parametrize("share", [0, -0.5, 1.01])
def test_a_percentile_share_is_above_0_and_at_most_1(share: float) -> None:
    with pytest.raises(AssertionError):
        percentile([1], share)


def test_rounds_give_their_median_between_the_lowest_and_the_highest() -> None:
    assert over_rounds([30, 10, 20]) == (20, 10, 30)
    assert over_rounds([1, 1, 100, 100]) == (50.5, 1, 100)


@given(st.lists(values, min_size=1, max_size=5), st.floats(0.01, 1))
def test_the_percentile_of_all_rounds_is_between_those_of_each(
    rounds: list[list[float]], share: float
) -> None:
    value, lowest, highest = percentile_over_rounds(rounds, share)

    assert lowest <= value <= highest


@pytest.mark.parametrize(
    ("value", "limit", "lower_is_better", "expected"),
    [
        (50, 200, False, 0.25),
        (200, 200, False, 1),
        (8, 2, True, 0.25),  # four times its minimum duration
        (2, 2, True, 1),
        (1, 0, False, math.inf),
    ],
)
def test_a_ratio_of_one_reaches_the_limit_and_less_does_not(
    *, value: float, limit: float, lower_is_better: bool, expected: float
) -> None:
    assert ratio(value, limit, lower_is_better=lower_is_better) == expected


def test_durations_of_sequential_parts_add_up() -> None:
    assert in_series(100) == 100
    assert in_series(100, 100) == 50
    assert in_series(1000, 500, 500) == pytest.approx(200)


def test_alternating_measurements_are_compared_round_by_round() -> None:
    slow_machine_now_and_then = [Round(calls, 1.0, []) for calls in (100, 10, 1000)]
    ours = [Round(calls, 1.0, []) for calls in (90, 8, 500)]

    theirs = rate("theirs", "calls", slow_machine_now_and_then, each=2)
    found = rate("ours", "calls", ours, theirs, each=2, paired=True)

    assert found.value == 180
    assert found.limit is theirs
    assert theirs.value == 200
    assert found.pairs == Spread(0.8, 0.5, 0.9)
    assert found.ratio == 0.8
