"""Counts and measurements of a torture, from the journals alone."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tools.bench.figures import percentile
from tools.stack.journal import Line

SECOND_NS: Final = 1_000_000_000


@dataclass
class Figures:
    """Counts and measurements. Times are seconds since the start; durations are milliseconds.

    Attributes:
        operations: the number of journal lines of each kind: sent, receipt, given, done ...
        errors: the number of errors that applications got, by kind and reason.
        receipts: (second, latency) of each receipt, from the last send of its message.
        waits: (second, wait) of each first delivery, from its message's receipt.
        series: the number of events in each second, by kind.
    """

    operations: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    receipts: list[tuple[float, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    series: dict[str, Counter[int]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "operations": dict(sorted(self.operations.items())),
            "errors": dict(self.errors.most_common()),
            "receipt_ms": percentiles([latency for _, latency in self.receipts]),
            "delivery_ms": percentiles([wait for _, wait in self.waits]),
        }


def figures_of(journals: Mapping[str, Sequence[Line]], began_ns: int) -> Figures:
    figures = Figures(series={kind: Counter() for kind in ("receipt", "given", "done")})
    stored_ns: dict[str, int] = {}
    for role, lines in journals.items():
        handed_ns: dict[int, int] = {}
        for line in lines:
            event, at_ns = line["e"], line["t"]
            figures.operations[event] += 1
            if event in ("error", "failed", "refused", "not"):
                figures.errors[f"{event} {line.get('why') or line.get('what')}"] += 1
            if event in figures.series:
                figures.series[event][(at_ns - began_ns) // SECOND_NS] += 1
            if event == "sent":
                handed_ns[line["n"]] = at_ns
            elif event == "receipt":
                uid = f"{role}.{line['n']}"
                stored_ns.setdefault(uid, at_ns)
                since_ns = handed_ns.get(line["n"], at_ns)
                figures.receipts.append(_point(at_ns, began_ns, at_ns - since_ns))
    for lines in journals.values():
        seen: set[str] = set()
        for line in lines:
            if line["e"] == "given" and line["u"] in stored_ns and line["u"] not in seen:
                seen.add(line["u"])
                wait_ns = max(0, line["t"] - stored_ns[line["u"]])
                figures.waits.append(_point(line["t"], began_ns, wait_ns))
    return figures


def _point(at_ns: int, began_ns: int, took_ns: int) -> tuple[float, float]:
    return (at_ns - began_ns) / SECOND_NS, took_ns / 1e6


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Percentiles of values; empty without values."""
    ordered = sorted(values)
    shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0} if ordered else {}
    return {name: round(percentile(ordered, share), 1) for name, share in shares.items()}


def by_second(points: Sequence[tuple[float, float]], share: float) -> list[tuple[float, float]]:
    """For each second with values, the percentile `share` of them."""
    seconds: dict[int, list[float]] = {}
    for at_s, value in points:
        seconds.setdefault(int(at_s), []).append(value)
    return [(float(at), percentile(values, share)) for at, values in sorted(seconds.items())]
