"""Redis forgets everything, and a Spark job brings it back from the log."""

import asyncio
import json
import sys
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis

from tools.stack.stack import Stack

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


async def rebuild(stack: Stack) -> Rebuilt:
    """Rebuild every topic whose state was lost, from snapshots and the log after them; then compare
    with what the whole log says."""
    lines = await _job(stack, "tools.rebuild")
    compared = await _job(stack, "tools.rebuild", "--dry-run", "--diff", "*")
    summary = _summary(lines)
    topics = [line for line in compared if line["kind"] == "topic"]
    return Rebuilt(
        topics=summary["topics"],
        producers=summary["producers"],
        entries=summary["entries"],
        seconds=summary["seconds"],
        differences=sum(line["differing"] for line in topics),
        failed=sum(line["kind"] == "topic" and line["outcome"] != "loaded" for line in lines)
        + sum(line["outcome"] not in ("equal", "different") for line in topics),
    )


async def audit(stack: Stack) -> Audited:
    """Prove from the log alone that nothing is stored twice."""
    started = asyncio.get_running_loop().time()
    summary = _summary(await _job(stack, "tools.audit"))
    seconds = round(asyncio.get_running_loop().time() - started, 1)
    return Audited(**{name: summary[name] for name in Audited._fields[:-1]}, seconds=seconds)


async def _job(stack: Stack, module: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a job; what it says, line by line."""
    addresses = {"ledger": stack.address("ledger")}
    if module == "tools.rebuild":
        addresses |= {name: stack.address(name) for name in ("dedup", "cursor")}
    options = [part for name, address in addresses.items() for part in (f"--{name}", address)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--json", *options, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, complained = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode not in (OK, FOUND):
        raise JobFailed(f"{module} ended with {process.returncode}: {complained.decode()[-2000:]}")
    return [json.loads(line) for line in said.decode().splitlines()]


def _summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return next(line for line in lines if line["kind"] == "summary")
