"""A rebuild as a process in its own session, shared by its JVM and workers: however it ends, no
process of the session remains.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any, NamedTuple

from seqgate.dev.child import bound_to_us
from seqgate.dev.stack import Stack
from tests.support.spark_classes import java_options
from tests.support.waiting import eventually

PATIENCE_S = 300.0
"""The limit of a job's step: Spark starts slowly on a busy machine."""

WAVE = "1"

JAVA = b"org.apache.spark"
"""Part of the JVM's command line."""

WORKERS = b"pyspark.daemon"
"""Part of the command line of processes that run tasks."""


class Member(NamedTuple):
    """A process of a session."""

    pid: int
    command: bytes


def quick_spark(folder: Path) -> dict[str, str]:
    """Variables that make Spark start and compile quickly, with its files in a folder."""
    java = " ".join([*java_options(), f"-Djava.io.tmpdir={folder}"])
    return {
        "PYSPARK_SUBMIT_ARGS": f"--driver-java-options '{java}' pyspark-shell",
        "TMPDIR": str(folder),
    }


class Rebuild:
    """`python -m seqgate.jobs.rebuild --json`, with one topic per wave."""

    def __init__(self, process: asyncio.subprocess.Process, errors: Path) -> None:
        self._process = process
        self._errors = errors
        self.said: list[dict[str, Any]] = []
        """The lines printed so far."""

    @property
    def outcomes(self) -> dict[str, str]:
        """The outcomes of topics so far."""
        return {each["topic"]: each["outcome"] for each in self.said if each["kind"] == "topic"}

    @property
    def warned(self) -> str:
        """Its standard error."""
        return self._errors.read_text()

    def members(self) -> list[Member]:
        """The running processes of its session."""
        return list(_session(self._process.pid))

    async def runs(self, command: bytes) -> None:
        """Wait until a process with this in its command line runs."""

        def found() -> bool:
            assert self._process.returncode is None, self.warned
            return any(command in each.command for each in self.members())

        await eventually(found, f"{command!r} runs", within_s=PATIENCE_S)

    async def topics(self, count: int) -> None:
        """Wait until it has reported this many topics, or has ended."""
        while len(self.outcomes) < count and await self._line():
            pass

    async def ended(self) -> int:
        """Wait until its whole session has ended. Returns the exit status."""
        while await self._line():
            pass
        async with asyncio.timeout(PATIENCE_S):
            status = await self._process.wait()
        await self._gone()
        return status

    async def kill(self) -> None:
        """SIGKILL only this process, and wait until its session has ended."""
        assert self._process.returncode is None, self.warned
        os.kill(self._process.pid, SIGKILL)
        assert await self._process.wait() == -SIGKILL
        await self._gone()

    async def end(self) -> None:
        """Kill the whole session."""
        if self._process.returncode is None:
            os.kill(self._process.pid, SIGKILL)
        for each in self.members():
            with suppress(ProcessLookupError):
                os.kill(each.pid, SIGKILL)
        await self._process.communicate()

    async def _line(self) -> bool:
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            line = await self._process.stdout.readline()
        if line:
            self.said.append(json.loads(line))
        return bool(line)

    async def _gone(self) -> None:
        await eventually(lambda: not self.members(), "nothing of it is left", within_s=30)


@asynccontextmanager
async def rebuilding(stack: Stack, folder: Path, *arguments: str) -> AsyncIterator[Rebuild]:
    """Start a rebuild, and kill what is left of it at the end.

    Args:
        stack: the stack whose topics are rebuilt.
        folder: the folder of its files.
        arguments: further arguments.
    """
    addresses = [
        part
        for name in ("ledger", "dedup", "cursor")
        for part in (f"--{name}", stack.address(name))
    ]
    command = [sys.executable, "-m", "seqgate.jobs.rebuild", "--json", "--entries-per-wave", WAVE]
    command += [*addresses, *arguments]
    errors = folder / "rebuild.err"
    with errors.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *bound_to_us(command),
            stdout=PIPE,
            stderr=stderr,
            env={**os.environ, **quick_spark(folder)},
            start_new_session=True,
        )
    job = Rebuild(process, errors)
    try:
        yield job
    finally:
        await job.end()


def _session(session: int) -> list[Member]:
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError):  # the process has ended
            # pid (name) state parent group session ...; the name may hold anything
            state, _, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append(Member(int(folder.name), (folder / "cmdline").read_bytes()))
    return found
