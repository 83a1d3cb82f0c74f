"""The report as one self-contained page: each figure beside its limit, and where its time goes."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any, Final

STYLE: Final = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1120px;padding:0 1rem;
color:#1f2328;background:#fff}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin:2.2rem 0 .4rem}
table{border-collapse:collapse;width:100%;table-layout:fixed}
td,th{padding:.25rem .8rem .25rem 0;text-align:left;vertical-align:top;
border-bottom:1px solid #d8dee4}th{font-weight:600;font-size:12px}
.number{text-align:right}td.number{font-variant-numeric:tabular-nums;white-space:nowrap}
small{color:#59636e;display:block}svg{display:block;margin-top:.2rem}
.room{fill:#eaeef2}.value{fill:#2da44e}.limit{stroke:#1f2328;stroke-width:1.5}
.key{margin-right:.8rem;font-size:12px;white-space:nowrap}.key i{display:inline-block;width:10px;
height:10px;margin-right:.3rem}
@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}
td,th{border-color:#30363d}small{color:#9198a1}.room{fill:#21262d}.limit{stroke:#e6edf3}}
"""

WIDTH: Final = 240  # of a bar, in pixels
HEIGHT: Final = 12
LIMIT_AT: Final = 0.8  # of the width, at most

COLOURS: Final = {
    "client": "#8250df",
    "ledger": "#1f6feb",
    "dedup": "#bf8700",
    "redis": "#cf222e",
    "cursor": "#1a7f37",
    "dispatcher": "#0aa5a5",
    "filter": "#bc4c00",
    "postgres": "#57606a",
    "nats": "#e85aad",
    "rabbitmq": "#7d4e2d",
}
OTHER_COLOUR: Final = "#d4a72c"


def page(report: Mapping[str, Any]) -> str:
    """The page of a report (report.json)."""
    machine = report["machine"]
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    groups = groupby(report["measurements"], key=lambda each: each["group"])
    sections = [_section(name, list(found)) for name, found in groups]
    left_out = "".join(f"<p>Left out: {escape(each)}.</p>" for each in report["left_out"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Benchmarks</title><style>{STYLE}</style></head><body><h1>Benchmarks</h1>"
        f"<p>{escape(report['date'])}, <code>{escape(report['command'])}</code></p>"
        f"<p>{escape(about)}. Each figure is the median of its rounds; bars end at the figure, and "
        "the line is its limit or a peer, measured in the same run.</p>"
        + left_out
        + "".join(sections)
        + "</body></html>\n"
    )


def _section(group: str, measurements: Sequence[Mapping[str, Any]]) -> str:
    names = dict.fromkeys(name for each in measurements for name in _prices(each))
    keys = "".join(
        f'<span class="key"><i style="background:{_colour(name)}"></i>{escape(name)}</span>'
        for name in names
    )
    rows = "".join(map(_row, measurements))
    head = (
        '<tr><th>figure</th><th class="number">value</th>'
        "<th>beside its limit or a peer</th><th>processor time each</th></tr>"
    )
    return f"<h2>{escape(group)}</h2><p>{keys}</p><table>{head}{rows}</table>"


def _row(each: Mapping[str, Any]) -> str:
    spread = f"{_number(each['min'])} to {_number(each['max'])}"
    value = f"{_number(each['value'])} {escape(each['unit'])}<small>{spread}</small>"
    return (
        f'<tr><td>{escape(each["name"])}</td><td class="number">{value}</td>'
        f"<td>{_beside_limit(each)}</td><td>{_price(each)}</td></tr>"
    )


def _beside_limit(each: Mapping[str, Any]) -> str:
    limit, ratio = each["limit"], each["ratio"]
    if limit is None:
        return ""
    width = round(min(1.0, ratio * LIMIT_AT) * WIDTH, 1)
    # A figure may exceed its limit, which is measured, too, and a peer by far.
    at = round(WIDTH / max(ratio, 1 / LIMIT_AT), 1)
    text = f"{ratio:.0%} of {_number(limit['value'])}: {escape(limit['name'])}"
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}"><rect class="room" width="{WIDTH}" '
        f'height="{HEIGHT}"/><rect class="value" width="{width}" height="{HEIGHT}"/>'
        f'<line class="limit" x1="{at}" x2="{at}" y1="0" y2="{HEIGHT}"/></svg><small>{text}</small>'
    )


def _prices(each: Mapping[str, Any]) -> dict[str, float]:
    """The processor time of each process; not that of others, which is the neighbours' as well."""
    return {name: price for name, price in each.get("cpu_us", {}).items() if name != "others"}


def _price(each: Mapping[str, Any]) -> str:
    """How the processor time is divided, as one bar."""
    prices = _prices(each)
    total = sum(prices.values())
    if not total:
        return ""
    bars, x = "", 0.0
    for name, price in prices.items():
        width = price / total * WIDTH
        title = f"<title>{escape(name)}: {_number(price)} µs</title>"
        bars += f'<rect x="{x:.1f}" width="{width:.1f}" height="{HEIGHT}" fill="{_colour(name)}">'
        bars += f"{title}</rect>"
        x += width
    told = ", ".join(f"{escape(name)} {_number(price)}" for name, price in prices.items())
    svg = f'<svg width="{WIDTH}" height="{HEIGHT}">{bars}</svg>'
    return f"{svg}<small>{_number(total)} µs: {told}</small>"


def _colour(process: str) -> str:
    return COLOURS.get(process.partition("-")[0], OTHER_COLOUR)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"
