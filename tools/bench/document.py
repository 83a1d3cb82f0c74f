"""Keep a run of the bench in docs/benchmarks, and show its main figures in the README.

python -m tools.bench.document [--report FILE] [--root FOLDER] [--only GROUP,...]

make bench-docs runs this after make bench. --only is for a run of some groups.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from tools.bench import peers
from tools.bench.__main__ import REPORT
from tools.bench.figures import NUMBERS, number, tabulate

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = Path("docs", "benchmarks")

SHOWN: Final = (peers.PUBLISH, f"{peers.ONE}, p50", peers.RECEIVE)
"""What the README shows, where the report has a peer's figure beside it."""
ABOUT: Final = """\
Measured on {date} by `{command}`.

Each figure is the median of its rounds, between the lowest and the highest of them, and stands
beside a limit or a peer of the same run. A ratio of 100 % reaches it, also for latencies. Processor
time is that of each process for one message, entry or claim; `others` is the rest of the machine.
"""
BEGIN: Final = "<!-- Written by make bench-docs. -->\n"
END: Final = "<!-- End of what make bench-docs writes. -->\n"


def document(report: Mapping[str, Any]) -> str:
    """The page of docs/benchmarks: how the figures were measured, and all of them."""
    machine = [[name, str(value)] for name, value in report["machine"].items()]
    parts = [
        "# Benchmarks\n",
        ABOUT.format_map(report),
        *(f"Left out: {each}.\n" for each in report["left_out"]),
        _table([["machine", ""], *machine]),
    ]
    for group, found in groupby(report["measurements"], key=lambda each: each["group"]):
        measurements = list(found)
        measured = measurements[0].get("measured")
        parts += [f"## {group}\n", *([f"{measured}\n"] if measured else [])]
        parts.append(_table(tabulate(measurements)))
    return "\n".join(parts)


def merged(
    kept: Mapping[str, Any], report: Mapping[str, Any], groups: Sequence[str]
) -> dict[str, Any]:
    """A page's report, with some groups of another run, which say how it measured."""
    load = report["machine"].get("load_before")
    measured = "Measured on {date} by `{command}`".format_map(report)
    measured += "." if load is None else f", on a machine with a load of {load:g} before."
    found: dict[str, list[Mapping[str, Any]]] = {}
    for each in kept["measurements"]:
        found.setdefault(each["group"], []).append(each)
    for group, measurements in groupby(report["measurements"], key=lambda each: each["group"]):
        if group in groups:
            found[group] = [{**each, "measured": measured} for each in measurements]
    return {**kept, "measurements": [each for group in found.values() for each in group]}


def summary(report: Mapping[str, Any]) -> str:
    """The README's section; empty if the report has no figure beside a peer's."""
    found = {each["name"]: each for each in report["measurements"] if each["group"] == "peers"}
    rows = []
    for kind in SHOWN:
        ours = found.get(f"Seqgate: {kind}")
        if ours and ours["limit"]:
            peer = found[ours["limit"]["name"]]
            name = peer["name"].partition(":")[0]
            rows.append([kind, _told(ours), f"{_told(peer)} ({name})"])
    if not rows:
        return ""
    machine = report["machine"]
    return (
        "## Figures\n\n"
        f"Messages of 100 bytes and one client process, on {machine['cpus']} cores "
        f"({machine['cpu_model']}), {report['date']}:\n\n"
        f"{_table([['', 'Seqgate', 'peer'], *rows])}\n"
        f"[{FOLDER}]({FOLDER}) has all figures, and how they were measured.\n"
    )


def with_summary(readme: str, text: str) -> str:
    """The README with another section between its marks. Raises ValueError if it has none."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the README has no marks of the figures' section")
    return f"{before}{BEGIN}{text}{END}{after}"


def _told(figure: Mapping[str, Any]) -> str:
    prices = [each for name, each in figure.get("cpu_us", {}).items() if name != "others"]
    price = f", {number(sum(prices))} µs of processor each" if prices else ""
    return f"{number(figure['value'])} {figure['unit']}{price}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = rows
    line = ["---:" if name in NUMBERS else "---" for name in head]
    cells = ([each.replace("\n", ", ").replace("|", r"\|") for each in row] for row in others)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, line, *cells))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.document",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--report", type=Path, default=REPORT, help="default: %(default)s")
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout (default: this one)")
    parser.add_argument(
        "--only", metavar="GROUP,...", help="replace these groups, and keep the page's others"
    )
    given = parser.parse_args(arguments)
    report = json.loads(given.report.read_text())
    folder, readme = given.root / FOLDER, given.root / "README.md"
    folder.mkdir(parents=True, exist_ok=True)
    if given.only:
        kept = json.loads((folder / "report.json").read_text())
        report = merged(kept, report, given.only.split(","))
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / "README.md").write_text(document(report))
    readme.write_text(with_summary(readme.read_text(), summary(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
