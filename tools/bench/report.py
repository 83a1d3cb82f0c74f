"""Figures as tables, and as JSON."""

import json
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from tools.bench import machine
from tools.bench.figures import Measurement

BUSY_PERCENT: Final = 85.0
"""From here on a process has hardly time for more: one thread does most of its work. Where others
are busy, the figure says little about us."""

NUMBERS: Final = ("value", "min … max", "MB/s", "ratio")


def as_json(groups: Sequence[tuple[str, Sequence[Measurement]]]) -> str:
    measurements = [_fields(group, each) for group, found in groups for each in found]
    return json.dumps({"machine": machine.description(), "measurements": measurements}, indent=2)


def print_group(console: Console, group: str, measurements: Sequence[Measurement]) -> None:
    """The table of a group, without columns that would be empty."""
    rows = [_cells(each) for each in measurements]
    table = Table(title=group, title_justify="left", title_style="bold")
    shown = [name for name in rows[0] if name == "limit" or any(row[name] for row in rows)]
    for name in shown:
        table.add_column(name, justify="right" if name in NUMBERS else "left")
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    console.print(table)


def busy(measurement: Measurement) -> str:
    """Which processes could hardly compute more; "none" when all of them wait for something."""
    cpu = measurement.cpu or {}
    return " and ".join(name for name, each in cpu.items() if each >= BUSY_PERCENT) or "none"


def _fields(group: str, measurement: Measurement) -> dict[str, Any]:
    limit, ratio, pairs = measurement.limit, measurement.ratio, measurement.pairs
    value, lowest, highest = map(_rounded, measurement.spread)
    fields: dict[str, Any] = {
        "group": group,
        "name": measurement.name,
        "unit": measurement.unit,
        "value": value,
        "min": lowest,
        "max": highest,
        "rounds": len(measurement.values),
        "limit": None if limit is None else {"name": limit.name, "value": _rounded(limit.value)},
        "ratio": None if ratio is None else _rounded(ratio),
    }
    if pairs is not None:
        fields |= {"ratio_min": _rounded(pairs.lowest), "ratio_max": _rounded(pairs.highest)}
    if measurement.mb_per_s is not None:
        fields["mb_per_s"] = _rounded(measurement.mb_per_s)
    if measurement.cpu is not None:
        fields["cpu_percent"] = {name: round(each, 1) for name, each in measurement.cpu.items()}
        fields["busy"] = busy(measurement)
    return fields


def _cells(measurement: Measurement) -> dict[str, str]:
    limit, ratio, pairs = measurement.limit, measurement.ratio, measurement.pairs
    _, lowest, highest = measurement.spread
    shares = ", ".join(f"{name} {each:.0f}" for name, each in (measurement.cpu or {}).items())
    between = f"\n{pairs.lowest:.0%} … {pairs.highest:.0%}" if pairs else ""
    return {
        "figure": measurement.name,
        "value": _number(measurement.value),
        "unit": measurement.unit,
        "min … max": f"{_number(lowest)} … {_number(highest)}",
        "MB/s": _number(measurement.mb_per_s) if measurement.mb_per_s else "",
        "limit": f"{_number(limit.value)}  {limit.name}" if limit else "",
        "ratio": "" if ratio is None else f"{ratio:.0%}{between}",
        "% of a core: who is busy": f"{shares}: {busy(measurement)}" if shares else "",
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:,.3g}" if value < 1 else f"{value:,.1f}"


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
