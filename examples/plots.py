"""A plot of lines over time, as an SVG file."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT, MARGIN, KEY = 900, 320, 60, 20
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#0aa5a5")

Point = tuple[float, float]
"""Seconds, and how many."""


def plot(
    path: Path, title: str, lines: Mapping[str, Sequence[Point]], marks: Mapping[float, str]
) -> None:
    """Draw named lines, and vertical ones at the seconds of `marks`."""
    points = [point for line in lines.values() for point in line]
    began = min((x for x, _ in points), default=0.0)
    seconds = max((x - began for x, _ in points), default=0.0) or 1.0
    top = max((y for _, y in points), default=0.0) or 1.0
    bottom = HEIGHT - MARGIN

    def across(x: float) -> float:
        return round(MARGIN + (x - began) / seconds * (WIDTH - 2 * MARGIN), 1)

    def up(y: float) -> float:
        return round(bottom - y / top * (bottom - MARGIN), 1)

    def text(x: float, y: float, what: str, colour: str = "#59636e") -> str:
        return f'<text x="{x}" y="{y}" fill="{colour}">{escape(what)}</text>'

    parts = [
        text(MARGIN, 20, title, "#1f2328"),
        f'<path d="M{MARGIN} {MARGIN}V{bottom}H{WIDTH - MARGIN}" fill="none" stroke="#59636e"/>',
        text(4, up(top), f"{top:,.0f}"),
        text(WIDTH - MARGIN, bottom + KEY, f"{seconds:,.0f} s"),
    ]
    for at, (name, line) in enumerate(sorted(lines.items())):
        colour = COLOURS[at % len(COLOURS)]
        path_points = " ".join(f"{across(x)},{up(y)}" for x, y in line)
        parts.append(f'<polyline fill="none" stroke="{colour}" points="{path_points}"/>')
        parts += [
            f'<circle r="2.5" fill="{colour}" cx="{across(x)}" cy="{up(y)}"/>' for x, y in line
        ]
        parts.append(text(MARGIN + 140 * (at % 5), HEIGHT - KEY * (1 - at // 5), name, colour))
    for x, what in marks.items():
        parts.append(f'<path d="M{across(x)} {MARGIN}V{bottom}" stroke="#d1242f"/>')
        parts.append(text(across(x) + 3, MARGIN - 4, what, "#d1242f"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + KEY}" '
    path.write_text(f'{head}font-family="sans-serif" font-size="12">{"".join(parts)}</svg>\n')
