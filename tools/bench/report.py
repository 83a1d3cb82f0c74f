"""Figures for people, as tables, and for machines, as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from tools.bench import machine
from tools.bench.measurement import Measurement

BUSY_PERCENT: Final = 85.0
"""A process that computes so much of a core has hardly time for more: most of its work is done by
one thread. When it is the others who compute so much, the figure says little of us."""


def as_json(groups: Sequence[tuple[str, Sequence[Measurement]]]) -> str:
    """The whole report."""
    report = {
        "machine": machine.description(),
        "measurements": [
            _fields(group, each) for group, measurements in groups for each in measurements
        ],
    }
    return json.dumps(report, indent=2)


def write(path: Path, text: str) -> None:
    """Write the report where it is asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def print_group(console: Console, group: str, measurements: Sequence[Measurement]) -> None:
    """A table of what was measured together."""
    table = Table(title=group, title_justify="left", title_style="bold")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("min … max", justify="right")
    in_bytes = any(each.mb_per_s is not None for each in measurements)
    if in_bytes:
        table.add_column("MB/s", justify="right")
    table.add_column("limit")
    table.add_column("ratio", justify="right")
    computing = any(each.cpu for each in measurements)
    if computing:
        table.add_column("% of a core: who is busy")
    for each in measurements:
        value, least, most = (_number(number) for number in each.spread)
        cells = [each.name, value, each.unit, f"{least} … {most}"]
        if in_bytes:
            cells.append("" if each.mb_per_s is None else _number(each.mb_per_s))
        if each.limit is None or each.ratio is None:
            cells += ["", ""]
        else:
            cells += [f"{_number(each.limit.value)}  {each.limit.name}", _ratio(each.ratio, each)]
        if computing:
            cells.append(_computing(each))
        table.add_row(*cells)
    console.print(table)


def busy(measurement: Measurement) -> str:
    """Which processes could hardly compute more; "none" when all of them wait for something."""
    cpu = measurement.cpu or {}
    names = [name for name, percent in cpu.items() if percent >= BUSY_PERCENT]
    return " and ".join(names) or "none"


def _fields(group: str, measurement: Measurement) -> dict[str, Any]:
    limit, ratio = measurement.limit, measurement.ratio
    fields: dict[str, Any] = {
        "group": group,
        "name": measurement.name,
        "unit": measurement.unit,
        "value": _rounded(measurement.spread.value),
        "min": _rounded(measurement.spread.lowest),
        "max": _rounded(measurement.spread.highest),
        "rounds": measurement.rounds,
        "limit": None if limit is None else {"name": limit.name, "value": _rounded(limit.value)},
        "ratio": None if ratio is None else _rounded(ratio),
    }
    if measurement.pairs is not None:
        fields["ratio_min"] = _rounded(measurement.pairs.lowest)
        fields["ratio_max"] = _rounded(measurement.pairs.highest)
    if measurement.mb_per_s is not None:
        fields["mb_per_s"] = _rounded(measurement.mb_per_s)
    if measurement.cpu is not None:
        fields["cpu_percent"] = {name: round(each, 1) for name, each in measurement.cpu.items()}
        fields["busy"] = busy(measurement)
    return fields


def _computing(measurement: Measurement) -> str:
    if measurement.cpu is None:
        return ""
    shares = ", ".join(f"{name} {percent:.0f}" for name, percent in measurement.cpu.items())
    return f"{shares}: {busy(measurement)}"


def _ratio(ratio: float, measurement: Measurement) -> str:
    pairs = measurement.pairs
    return f"{ratio:.0%}" + (f"\n{pairs.lowest:.0%} … {pairs.highest:.0%}" if pairs else "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:,.3g}" if value < 1 else f"{value:,.1f}"


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
