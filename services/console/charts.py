"""Line charts, which templates draw as SVG: places of points, scales and labels."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

WIDTH: Final = 480
HEIGHT: Final = 120
"""The size of a chart, in SVG's units."""

PAD: Final = 6
POINTS_MAX: Final = 120
"""The most points of a line; of more, some are left out."""

LABEL: Final = 16
"""The width of the side margins, and the height of the labels."""

Series = Sequence[tuple[float, float]]
"""(time in seconds, value), the oldest first."""


class Line(NamedTuple):
    """A line: its points, as SVG's polyline has them, and its last value; None: it has none."""

    name: str
    points: str
    last: float | None


class Chart(NamedTuple):
    """A chart.

    Attributes:
        unit: of its values; empty: none.
        top: the value at its upper edge; the lower edge is 0.
        span_s: the time from its left to its right edge, in seconds; 0: it has too few points.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]
    top: float
    span_s: float


def line_chart(title: str, lines: Mapping[str, Series], unit: str) -> Chart:
    """A chart of up to four lines that share both scales."""
    points = [point for line in lines.values() for point in line]
    times = [at_s for at_s, _ in points]
    top = _ceiling(max((value for _, value in points), default=0))
    span_s = max(times) - min(times) if times else 0.0
    if span_s <= 0:
        return Chart(title, unit, (), top, 0)
    first_s = min(times)

    def place(at_s: float, value: float) -> str:
        x = PAD + (WIDTH - 2 * PAD) * (at_s - first_s) / span_s
        y = LABEL + (HEIGHT - 2 * LABEL) * (1 - value / top)
        return f"{x:.1f},{y:.1f}"

    return Chart(
        title,
        unit,
        tuple(
            Line(
                name,
                " ".join(place(*each) for each in _thinned(line)),
                line[-1][1] if line else None,
            )
            for name, line in lines.items()
        ),
        top,
        span_s,
    )


def _thinned(line: Series) -> Series:
    """At most POINTS_MAX points of a line, the last one among them."""
    step = -(-len(line) // POINTS_MAX)
    return [*reversed(line[::-1][:: max(1, step)])]


def _ceiling(value: float) -> float:
    """The least of 1, 2, 5, 10, 20 ... that is not below a value."""
    step = 1.0
    while True:
        for factor in (1, 2, 5):
            if value <= step * factor:
                return step * factor
        step *= 10
