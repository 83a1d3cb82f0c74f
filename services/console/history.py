"""Recent values of what readers watch, for charts and rates.

Services keep no history, and the console has no rights to gather one: a series grows while a
reader looks at its page. Each reader's are apart, since rights differ.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

SERIES_MAX: Final = 1_000
"""The most series kept, of all readers; the one that was longest unused goes first."""

POINTS_MAX: Final = 300
"""The most points of a series: a quarter of an hour at the default interval."""

GAP_MIN_S: Final = 0.5
"""Points closer than this, in seconds, count as one: several windows may show one page."""


class Point(NamedTuple):
    """Values at a moment, in seconds by a monotonic clock."""

    at_s: float
    values: Mapping[str, float]


class History:
    def __init__(self, series_max: int = SERIES_MAX, points_max: int = POINTS_MAX) -> None:
        self._series: OrderedDict[tuple[str, ...], deque[Point]] = OrderedDict()
        self._series_max = series_max
        self._points_max = points_max

    def add(
        self, key: tuple[str, ...], at_s: float, values: Mapping[str, float]
    ) -> Sequence[Point]:
        """Add a point, unless the last one is too recent. Returns all points, the oldest first."""
        points = self._series.setdefault(key, deque(maxlen=self._points_max))
        self._series.move_to_end(key)
        if len(self._series) > self._series_max:
            self._series.popitem(last=False)
        if not points or at_s - points[-1].at_s >= GAP_MIN_S:
            points.append(Point(at_s, dict(values)))
        return list(points)


def levels(points: Sequence[Point], name: str) -> list[tuple[float, float]]:
    """(time, value) of a value that is a level."""
    return [(each.at_s, each.values[name]) for each in points if name in each.values]


def rates(points: Sequence[Point], name: str) -> list[tuple[float, float]]:
    """(time, growth per second) of a value that is a count. A count that fell began anew: there is
    no rate over that interval."""
    counts = levels(points, name)
    return [
        (at_s, (value - before) / (at_s - before_s))
        for (before_s, before), (at_s, value) in pairwise(counts)
        if value >= before
    ]


def latest(series: Sequence[tuple[float, float]]) -> float | None:
    """The last value of a series; None: it has none."""
    return series[-1][1] if series else None
