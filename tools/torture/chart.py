"""Charts over time, as SVG: lines, and bars for durations."""

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, log10
from typing import Final

WIDTH: Final = 1_120
LEFT: Final = 310
RIGHT: Final = 20
HEIGHT: Final = 170
ROW: Final = 18
TICKS: Final = 12

COLOURS: Final = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df")

Point = tuple[float, float]
Span = tuple[float, float, str]
"""Start and end in seconds, and a description."""


class Axis:
    def __init__(self, seconds: float) -> None:
        self.seconds = max(seconds, 1.0)

    def x(self, at_s: float) -> float:
        share = min(max(at_s / self.seconds, 0.0), 1.0)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def ticks(self, bottom: float) -> str:
        """Lines with time labels, from the top to `bottom`."""
        step = _step(self.seconds / TICKS)
        marks = [step * at for at in range(int(self.seconds / step) + 1)]
        return "".join(
            f'<line class="grid" x1="{self.x(at)}" y1="0" x2="{self.x(at)}" y2="{bottom}"/>'
            f'<text class="tick" x="{self.x(at)}" y="{bottom + 13}">{_time(at)}</text>'
            for at in marks
        )


def lines(axis: Axis, named: Mapping[str, Sequence[Point]], unit: str, *, log: bool = False) -> str:
    """Draw named lines. With `log` the scale is logarithmic, and values below 1 count as 1."""
    highest = max((value for points in named.values() for _, value in points), default=1.0)
    top = max(highest, 1.0)

    def y(value: float) -> float:
        share = log10(max(value, 1.0)) / max(log10(top), 0.3) if log else value / top
        return round(HEIGHT - min(share, 1.0) * (HEIGHT - 12), 1)

    parts = [axis.ticks(HEIGHT)]
    scale = [10**power for power in range(ceil(log10(top)) + 1)] if log else [0, top / 2, top]
    for value in scale:
        if value <= top:
            label = f"{value:,.0f} {unit}"
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" ')
            parts.append(f'y1="{y(value)}" y2="{y(value)}"/>')
            parts.append(f'<text class="label" x="{LEFT - 6}" y="{y(value) + 4}">{label}</text>')
    for (name, points), colour in zip(named.items(), COLOURS, strict=False):
        path = " ".join(f"{axis.x(at_s)},{y(value)}" for at_s, value in points)
        title = f"<title>{escape(name)}</title>"
        parts.append(f'<polyline class="line" stroke="{colour}" points="{path}">{title}</polyline>')
    keys = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in zip(named, COLOURS, strict=False)
    )
    return f"<div>{keys}</div>{_svg(HEIGHT + 20, parts)}"


def bars(axis: Axis, rows: Mapping[str, Sequence[Span]], *, style: str = "bar") -> str:
    """Draw a row of bars for each name; an instant is a short mark."""
    bottom = ROW * max(1, len(rows))
    parts = [axis.ticks(bottom)]
    for at, (name, spans) in enumerate(rows.items()):
        y = at * ROW
        parts.append(f'<text class="label" x="{LEFT - 6}" y="{y + 13}">{escape(name)}</text>')
        for began_s, ended_s, what in spans:
            width = max(3.0, axis.x(ended_s) - axis.x(began_s))
            parts.append(
                f'<rect class="{style}" x="{axis.x(began_s)}" y="{y + 3}" width="{width:.1f}" '
                f'height="{ROW - 6}"><title>{escape(what)}</title></rect>'
            )
    return _svg(bottom + 20, parts)


def _svg(height: float, parts: Sequence[str]) -> str:
    inside = "".join(parts)
    return f'<svg viewBox="0 -4 {WIDTH} {height + 4}" role="img">{inside}</svg>'


def _step(seconds: float) -> float:
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1_800, 3_600)
    return next((step for step in steps if step >= seconds), steps[-1])


def _time(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
