"""Redis forgets everything, and a Spark job brings it back from the log."""

import asyncio
import json
import sys
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis

from tools.stack.stack import Stack

ENDED: Final = "ended"
"""The kind of the line that says how a job ended."""

OK: Final = 0
FOUND: Final = 1
"""How a job ends that found differences, or what it is there to find."""


class JobFailed(Exception):
    """A job did not run to its end."""


class Rebuilt(NamedTuple):
    """What the rebuild did; `differences` is how many producers are then other than the log says,
    and `failed` how many topics were not rebuilt."""

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


async def forget(stack: Stack) -> None:
    """Redis loses everything, while nobody publishes."""
    async with Redis.from_url(stack.redis_url) as redis:
        await redis.flushall()


async def recover(stack: Stack) -> tuple[Rebuilt, Audited]:
    """Rebuild every topic whose state was lost, from snapshots and the log after them; compare with
    what the whole log says; and prove from the log alone that nothing is stored twice.

    Raises:
        JobFailed: one of these did not run to its end.
    """
    jobs = await _jobs(stack)
    rebuilt, compared, audited = jobs["rebuild"], jobs["compare"], jobs["audit"]
    summary = _summary(rebuilt)
    topics = [line for line in compared if line["kind"] == "topic"]
    return (
        Rebuilt(
            topics=summary["topics"],
            producers=summary["producers"],
            entries=summary["entries"],
            seconds=summary["seconds"],
            differences=sum(line["differing"] for line in topics),
            failed=sum(line["kind"] == "topic" and line["outcome"] != "loaded" for line in rebuilt)
            + sum(line["outcome"] not in ("equal", "different") for line in topics),
        ),
        Audited(
            **{name: _summary(audited)[name] for name in Audited._fields[:-1]},
            seconds=audited[-1]["seconds"],
        ),
    )


async def _jobs(stack: Stack) -> dict[str, list[dict[str, Any]]]:
    """Run the jobs; what each said, line by line."""
    addresses = [stack.address(name) for name in ("ledger", "dedup", "cursor")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tools.demo.jobs", *addresses),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, complained = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    jobs: dict[str, list[dict[str, Any]]] = {}
    lines = []
    for line in map(json.loads, said.decode().splitlines()):
        lines.append(line)
        if line["kind"] == ENDED:
            jobs[line["job"]], lines = lines, []
            if line["status"] not in (OK, FOUND):
                raise JobFailed(f"{line['job']} ended with {line['status']}")
    if process.returncode != 0:
        raise JobFailed(f"the jobs ended with {process.returncode}: {complained.decode()[-2000:]}")
    return jobs


def _summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return next(line for line in lines if line["kind"] == "summary")
