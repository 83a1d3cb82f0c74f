"""Figures that scatter: the median of some rounds, between the lowest and the highest.

On a machine that others use too, a mean tells mostly of the others.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """A figure, and the lowest and the highest that a round gave."""

    value: float
    lowest: float
    highest: float


def median(values: Sequence[float]) -> float:
    """The value in the middle; of an even number, the mean of the two."""
    return float(statistics.median(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share (above 0, at most 1) of the values does not exceed:
    the nearest rank, always one of the values."""
    assert values
    assert 0 < share <= 1
    rank = math.ceil(share * len(values) - 1e-9)  # 0.07 * 100 is a little more than 7
    return sorted(values)[max(rank, 1) - 1]


def over_rounds(values: Sequence[float]) -> Spread:
    """One value a round."""
    return Spread(median(values), min(values), max(values))


def percentile_over_rounds(rounds: Sequence[Sequence[float]], share: float) -> Spread:
    """The percentile of what all rounds gave, between the percentiles of each."""
    alone = [percentile(values, share) for values in rounds]
    together = [value for values in rounds for value in values]
    return Spread(percentile(together, share), min(alone), max(alone))


def ratio(value: float, limit: float, *, lower_is_better: bool = False) -> float:
    """How close a figure comes to its limit: 1 reaches it, less does not."""
    over, under = (limit, value) if lower_is_better else (value, limit)
    return over / under if under else math.inf


def in_series(*rates: float) -> float:
    """The rate of doing things one after the other that have these rates alone."""
    return 1 / sum(1 / rate for rate in rates)
