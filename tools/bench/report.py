"""Figures as tables, and as JSON."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import apsw
import grpc
from rich.console import Console
from rich.table import Table

from tools.bench.figures import Measurement

BUSY_PERCENT: Final = 85.0
"""From here on a process has hardly time for more: one thread does most of its work. Where others
are busy, the figure says little about us."""

NUMBERS: Final = ("value", "min … max", "MB/s", "ratio")


def as_json(groups: Sequence[tuple[str, Sequence[Measurement]]]) -> str:
    measurements = [_fields(group, each) for group, found in groups for each in found]
    return json.dumps({"machine": _machine(), "measurements": measurements}, indent=2)


def print_group(console: Console, group: str, measurements: Sequence[Measurement]) -> None:
    """The table of a group, without columns that would be empty."""
    rows = [_cells(_fields(group, each)) for each in measurements]
    table = Table(title=group, title_justify="left", title_style="bold")
    shown = [name for name in rows[0] if name == "limit" or any(row[name] for row in rows)]
    for name in shown:
        table.add_column(name, justify="right" if name in NUMBERS else "left")
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    console.print(table)


def _machine() -> dict[str, object]:
    """What a reader of the figures must know; nothing that says whose machine it is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": next(models, "unknown"),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "grpc": grpc.__version__,
        "sqlite": apsw.sqlite_lib_version(),
    }


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
        # Which processes could hardly compute more; "none" when all wait for something.
        busy = [name for name, each in measurement.cpu.items() if each >= BUSY_PERCENT]
        fields["cpu_percent"] = {name: round(each, 1) for name, each in measurement.cpu.items()}
        fields["busy"] = " and ".join(busy) or "none"
    return fields


def _cells(fields: Mapping[str, Any]) -> dict[str, str]:
    """A measurement's row, from its fields in the report."""
    limit, ratio, speed = fields["limit"], fields["ratio"], fields.get("mb_per_s")
    shares = ", ".join(f"{name} {each:.0f}" for name, each in fields.get("cpu_percent", {}).items())
    least = fields.get("ratio_min")
    pairs = "" if least is None else f"\n{least:.0%} … {fields['ratio_max']:.0%}"
    return {
        "figure": fields["name"],
        "value": _number(fields["value"]),
        "unit": fields["unit"],
        "min … max": f"{_number(fields['min'])} … {_number(fields['max'])}",
        "MB/s": _number(speed) if speed else "",
        "limit": f"{_number(limit['value'])}  {limit['name']}" if limit else "",
        "ratio": "" if ratio is None else f"{ratio:.0%}{pairs}",
        "% of a core: who is busy": f"{shares}: {fields['busy']}" if shares else "",
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:,.3g}" if value < 1 else f"{value:,.1f}"


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
