"""Redis has lost everything, and Spark jobs bring it back from the log.

The jobs run one after the other in one session: one rebuilds the lost state, from snapshots and the
log after them; one compares it with the whole log; and one audits the log.
"""

import json
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, Final

from tools.stack.stack import Stack
from tools.stack.worker import in_worker

ENDED_WELL: Final = (0, 1)
"""Exit statuses of a job; 1: it found differences, or what it is there to find."""

REBUILT: Final = ("topics", "producers", "entries", "seconds")
AUDITED: Final = ("topics", "producers", "entries", "messages", "findings")
"""The fields of the jobs' summaries that are reported."""

Fields = dict[str, Any]


async def recover(stack: Stack) -> tuple[Fields, Fields]:
    """Run the jobs in a process of their own.

    Returns:
        The rebuild's figures: `differences` counts producers that then differ from the log, and
        `failed` topics that were not rebuilt. And the audit's figures.

    Raises:
        ChildFailed: a job did not run to its end.
    """
    addresses = [stack.address(name) for name in ("ledger", "dedup", "cursor")]
    found: tuple[Fields, Fields] = await in_worker(__name__, *addresses)
    return found


def run(ledger: str, dedup: str, cursor: str) -> tuple[Fields, Fields]:
    """Run the jobs in this process."""
    # The demo itself has no Spark.
    from seqgate.jobs.audit.__main__ import main as audit
    from seqgate.jobs.rebuild.__main__ import main as rebuild
    from seqgate.spark import local_session

    log = ["--json", "--ledger", ledger]
    everything = [*log, "--dedup", dedup, "--cursor", cursor]
    spark = local_session("seqgate demo")
    rebuilt = _lines("rebuild", lambda: rebuild(everything, spark))
    compared = _lines("compare", lambda: rebuild([*everything, "--dry-run", "--diff", "*"], spark))
    started = time.monotonic()
    audited = _lines("audit", lambda: audit(log, spark))
    seconds = round(time.monotonic() - started, 1)
    topics = [line for line in compared if line["kind"] == "topic"]
    failed = [line for line in rebuilt if line["kind"] == "topic" and line["outcome"] != "loaded"]
    failed += [line for line in topics if line["outcome"] not in ("equal", "different")]
    differences = sum(line["differing"] for line in topics)
    return (
        _summary(rebuilt, REBUILT) | {"differences": differences, "failed": len(failed)},
        _summary(audited, AUDITED) | {"seconds": seconds},
    )


def _lines(name: str, job: Callable[[], int]) -> list[Fields]:
    """The JSON lines that a job prints."""
    printed = StringIO()
    with redirect_stdout(printed):
        status = job()
    if status not in ENDED_WELL:
        raise SystemExit(f"{name} ended with {status}: {printed.getvalue()}")
    return list(map(json.loads, printed.getvalue().splitlines()))


def _summary(lines: list[Fields], names: tuple[str, ...]) -> Fields:
    summary = next(line for line in lines if line["kind"] == "summary")
    return {name: summary[name] for name in names}
