"""The report as one self-contained page."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from tools.torture import chart
from tools.torture.figures import Figures, by_second
from tools.torture.torturing import Tortured

STYLE: Final = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1120px;padding:0 1rem;
color:#1f2328;background:#fff}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin:2rem 0 .4rem}
svg{width:100%;height:auto;display:block}
.grid{stroke:#d8dee4;stroke-width:.6}.line{fill:none;stroke-width:1.3}
.tick{font-size:10px;fill:#59636e;text-anchor:middle}
.label{font-size:10.5px;fill:#59636e;text-anchor:end}
.bar{fill:#54aeff}.alarm{fill:#d1242f}
.key{margin-right:1rem;font-size:12px}.key i{display:inline-block;width:10px;height:10px;
margin-right:.35rem}
table{border-collapse:collapse}td,th{padding:.15rem .8rem .15rem 0;text-align:left;
vertical-align:top}td.number{text-align:right;font-variant-numeric:tabular-nums}
.held{color:#1a7f37}.broken{color:#d1242f}pre{white-space:pre-wrap;margin:0}
@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}
.grid{stroke:#30363d}.tick,.label{fill:#9198a1}}
"""

NAMES: Final = {"receipt": "receipts", "given": "deliveries", "done": "acknowledgements"}

TABLES: Final = {
    "operations": "operations",
    "faults": "faults",
    "errors": "errors seen by applications",
    "receipt_ms": "receipts, ms",
    "delivery_ms": "deliveries, ms",
    "logged": "warnings and errors logged by services",
    "versions": "versions",
}

SHOWN_MAX: Final = 200
"""Violations shown; report.json has all."""


def page(report: Mapping[str, Any], tortured: Tortured, figures: Figures) -> str:
    seconds = tortured.since_s(tortured.ended_ns)
    axis = chart.Axis(seconds)
    count = len(tortured.violations)
    verdict = (
        f'<p class="broken"><b>{count} violations.</b></p>'
        if count
        else '<p class="held"><b>No violation: every promise held.</b></p>'
    )
    throughput = {
        f"{NAMES[kind]} a second": [(float(at), float(counts[at])) for at in range(int(seconds))]
        for kind, counts in figures.series.items()
    }
    sections = [
        "<h1>Torture</h1>",
        f"<p>{escape(_about(report))}</p>",
        verdict,
        "<h2>Faults</h2>",
        chart.bars(axis, _fault_rows(tortured)) if tortured.happened else "<p>None injected.</p>",
        "<h2>Violations</h2>",
        chart.bars(axis, _violation_rows(tortured), style="alarm") if count else "",
        _violations(tortured) if count else "<p>None.</p>",
        "<h2>Throughput</h2>",
        chart.lines(axis, throughput, "/s"),
        "<h2>Latency of receipts</h2>",
        chart.lines(axis, _spread(figures.receipts), "ms", log=True),
        "<h2>Time from receipt to first delivery</h2>",
        chart.lines(axis, _spread(figures.waits), "ms", log=True),
        "<h2>Figures</h2>",
        *(_table(title, report[name]) for name, title in TABLES.items()),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Torture</title><style>{STYLE}</style></head><body>"
        + "".join(sections)
        + "</body></html>\n"
    )


def _about(report: Mapping[str, Any]) -> str:
    whom = "its own installation" if report["own"] else "a running installation"
    return (
        f"Seed {report['seed']}, limits: {report['limits']}, store: {report['store']}; {whom}; "
        f"faults for {report['fault_s']:.0f} s, then {report['settle_s']:.0f} s until everything "
        "was settled."
    )


def _fault_rows(tortured: Tortured) -> dict[str, list[chart.Span]]:
    rows: dict[str, list[chart.Span]] = defaultdict(list)
    for each in sorted(tortured.happened, key=lambda each: each.fault.kind.name):
        began_s, ended_s = tortured.since_s(each.began_ns), tortured.since_s(each.ended_ns)
        text = each.fault.kind.text
        what = f"{text}: {each.fault.place}, {began_s:.1f} to {ended_s:.1f} s"
        rows[text].append((began_s, ended_s, what))
    return rows


def _violation_rows(tortured: Tortured) -> dict[str, list[chart.Span]]:
    rows: dict[str, list[chart.Span]] = defaultdict(list)
    for each in tortured.violations:
        at_s = tortured.since_s(each.at_ns or tortured.ended_ns)
        rows[each.kind].append((at_s, at_s, str(each)[:300]))
    return rows


def _violations(tortured: Tortured) -> str:
    rows = "".join(
        f"<tr><td>{escape(each.kind)}</td><td>{escape(each.where)}</td>"
        f"<td><pre>{escape(each.what)}</pre></td></tr>"
        for each in tortured.violations[:SHOWN_MAX]
    )
    more = len(tortured.violations) - SHOWN_MAX
    rest = f"<p>And {more} more, in report.json.</p>" if more > 0 else ""
    return f"<table>{rows}</table>{rest}"


def _spread(points: Sequence[chart.Point]) -> dict[str, list[chart.Point]]:
    return {"median": by_second(points, 0.5), "99th percentile": by_second(points, 0.99)}


def _table(title: str, values: Mapping[str, object]) -> str:
    rows = ""
    for name, value in values.items():
        text = f"{value:,}" if isinstance(value, int | float) else str(value)
        rows += f'<tr><td>{escape(name)}</td><td class="number">{escape(text)}</td></tr>'
    return f"<h3>{escape(title)}</h3><table>{rows}</table>" if rows else ""
