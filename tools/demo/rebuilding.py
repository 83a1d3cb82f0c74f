"""Redis has lost everything, and Spark jobs bring it back from the log.

`python -m tools.demo.rebuilding LEDGER DEDUP CURSOR` runs the jobs in one session: it rebuilds what
was lost, compares everything with the whole log, and audits the log. Each job prints its own JSON
lines, and then one with its exit status.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from tools.stack.stack import Stack

ENDED: Final = "ended"  # the kind of the line with a job's exit status
ENDED_WELL: Final = (0, 1)
"""Exit statuses of a job; 1: it found differences, or what it is there to find."""


class JobFailed(Exception):
    """A job did not run to its end."""


class Rebuilt(NamedTuple):
    """What the rebuild did; `differences` counts producers that then differ from the log, and
    `failed` topics that were not rebuilt."""

    topics: int
    producers: int
    entries: int
    seconds: float
    differences: int
    failed: int

    @property
    def broken(self) -> bool:
        """Whether the state is not what the log says."""
        return bool(self.differences or self.failed or not self.topics)


class Audited(NamedTuple):
    """What the audit looked at, and found."""

    topics: int
    producers: int
    entries: int
    messages: int
    findings: int
    seconds: float


async def recover(stack: Stack) -> tuple[Rebuilt, Audited]:
    """Rebuild every topic whose state was lost, from snapshots and the log after them; compare with
    what the whole log says; and prove from the log alone that nothing is stored twice.

    Raises:
        JobFailed: one of these did not run to its end.
    """
    jobs = await _jobs(stack)
    rebuilt, compared, audited = jobs["rebuild"], jobs["compare"], jobs["audit"]
    topics = [line for line in compared if line["kind"] == "topic"]
    failed = [line for line in rebuilt if line["kind"] == "topic" and line["outcome"] != "loaded"]
    failed += [line for line in topics if line["outcome"] not in ("equal", "different")]
    summary = _summary(rebuilt)
    return (
        Rebuilt(
            **{name: summary[name] for name in Rebuilt._fields[:-2]},
            differences=sum(line["differing"] for line in topics),
            failed=len(failed),
        ),
        Audited(
            **{name: _summary(audited)[name] for name in Audited._fields[:-1]},
            seconds=audited[-1]["seconds"],
        ),
    )


async def _jobs(stack: Stack) -> dict[str, list[dict[str, Any]]]:
    """Run the jobs; what each printed, line by line."""
    addresses = [stack.address(name) for name in ("ledger", "dedup", "cursor")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, *addresses),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        printed, trouble = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    jobs: dict[str, list[dict[str, Any]]] = {}
    lines = []
    for line in map(json.loads, printed.decode().splitlines()):
        lines.append(line)
        if line["kind"] == ENDED:
            jobs[line["job"]], lines = lines, []
            if line["status"] not in ENDED_WELL:
                raise JobFailed(f"{line['job']} ended with {line['status']}")
    if process.returncode != 0:
        raise JobFailed(f"the jobs ended with {process.returncode}: {trouble.decode()[-2000:]}")
    return jobs


def _summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return next(line for line in lines if line["kind"] == "summary")


def main() -> None:
    # The demo itself has no Spark.
    from seqgate.jobs.audit.__main__ import main as audit
    from seqgate.jobs.rebuild.__main__ import main as rebuild
    from seqgate.spark import local_session

    ledger, dedup, cursor = sys.argv[1:]
    log = ["--json", "--ledger", ledger]
    everything = [*log, "--dedup", dedup, "--cursor", cursor]
    spark = local_session("seqgate demo")
    jobs: dict[str, Callable[[], int]] = {
        "rebuild": lambda: rebuild(everything, spark),
        "compare": lambda: rebuild([*everything, "--dry-run", "--diff", "*"], spark),
        "audit": lambda: audit(log, spark),
    }
    for name, run in jobs.items():
        started = time.monotonic()
        status = run()
        seconds = round(time.monotonic() - started, 1)
        print(json.dumps({"kind": ENDED, "job": name, "status": status, "seconds": seconds}))


if __name__ == "__main__":
    main()
