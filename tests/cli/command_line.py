"""The installed `seqgate`, as a separate process."""

import asyncio
import json
import re
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import Any

from seqgate.dev.child import tell
from tests.support.nursery import SEQGATE, Nursery

PATIENCE_S = 20.0
"""The limit of a command and of a wait for its output, in seconds."""


def is_wait(line: str) -> bool:
    """Whether a line of standard error says what a command waits for."""
    return '{"reason":"WAITING"' in line or line.rstrip().endswith(" (WAITING)")


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str
    waits: tuple[str, ...] = field(default=(), compare=False)
    """The lines of its standard error that say what it waited for, which `err` lacks: on a busy
    machine, any command may wait for a second."""

    @classmethod
    def of(cls, code: int, out: str, err: str) -> "Ended":
        lines = err.splitlines(keepends=True)
        waits = [each for each in lines if is_wait(each)]
        rest = "".join(each for each in lines if not is_wait(each))
        return cls(code, out, rest, tuple(waits))

    @property
    def records(self) -> list[Any]:
        """The JSON objects of its output."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def record(self) -> Any:
        (record,) = self.records
        return record

    @property
    def rows(self) -> list[list[str]]:
        """The rows of its table, split at the gaps between columns."""
        return [re.split(" {2,}", line) for line in self.out.splitlines()]

    @property
    def errors(self) -> list[Any]:
        """The errors that it reported as JSON, without notes."""
        told = map(json.loads, self.err.splitlines())
        return [each["error"] for each in told if "note" not in each]

    @property
    def error(self) -> Any:
        (error,) = self.errors
        return error


class Running:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def record(self, *, patience_s: float = PATIENCE_S) -> Any:
        """The next object of its output."""
        return json.loads(await self.line(patience_s=patience_s))

    async def line(self, *, patience_s: float = PATIENCE_S) -> str:
        """The next line of its output."""
        assert self._process.stdout is not None
        async with asyncio.timeout(patience_s):
            return (await self._process.stdout.readline()).decode()

    async def write(self, *lines: Any) -> None:
        """Write JSON lines to its input."""
        assert self._process.stdin is not None
        self._process.stdin.write(json_lines(*lines))
        await self._process.stdin.drain()

    def interrupt(self) -> None:
        """Interrupt it, as Ctrl-C does."""
        self.send(signal.SIGINT)

    def send(self, number: signal.Signals) -> None:
        tell(self._process, number)

    async def error_line(self, *, patience_s: float = PATIENCE_S) -> str:
        """The next line of its standard error, except those that say a wait."""
        assert self._process.stderr is not None
        async with asyncio.timeout(patience_s):
            while is_wait(line := (await self._process.stderr.readline()).decode()):
                pass
            return line

    async def wait_line(self, *, patience_s: float = PATIENCE_S) -> str:
        """The next line of its standard error that says a wait."""
        assert self._process.stderr is not None
        async with asyncio.timeout(patience_s):
            while not is_wait(line := (await self._process.stderr.readline()).decode()):
                assert line, "it ended"
            return line

    async def ended(self) -> Ended:
        """Close its input, and wait until it ends."""
        async with asyncio.timeout(PATIENCE_S):
            out, err = await self._process.communicate(b"")
        assert self._process.returncode is not None
        return Ended.of(self._process.returncode, (out or b"").decode(), err.decode())

    async def exit_code(self, *, patience_s: float = PATIENCE_S) -> int:
        """Wait until it ends, with its input still open."""
        async with asyncio.timeout(patience_s):
            return await self._process.wait()


@dataclass(frozen=True, slots=True)
class CommandLine:
    """`seqgate` in an environment."""

    nursery: Nursery
    environment: Mapping[str, str]

    def with_(self, **variables: str) -> "CommandLine":
        """The same command line with more variables."""
        return CommandLine(self.nursery, {**self.environment, **variables})

    async def __call__(
        self, *arguments: str, stdin: bytes = b"", patience_s: float = PATIENCE_S
    ) -> Ended:
        """Run a command until it ends."""
        with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            streams = [each.fileno() for each in (given, out, err)]
            process = await self.nursery.seqgate(arguments, self.environment, streams)
            try:
                async with asyncio.timeout(patience_s):
                    code = await process.wait()
            finally:
                tell(process, signal.SIGKILL)
                await process.wait()
            for each in (out, err):
                each.seek(0)
            return Ended.of(code, out.read().decode(), err.read().decode())

    @asynccontextmanager
    async def running(self, *arguments: str, stdout: int = PIPE) -> AsyncIterator[Running]:
        """Start a command, and kill it at the end of the block."""
        async with self._process(*arguments, stdin=PIPE, stdout=stdout) as process:
            yield Running(process)

    async def on_terminal(self, *arguments: str, terminal: int, keyboard: int = DEVNULL) -> int:
        """Run a command that writes to a terminal, and reads from `keyboard`. Returns its exit
        code."""
        async with self._process(*arguments, stdin=keyboard, stdout=terminal) as process:
            async with asyncio.timeout(PATIENCE_S):
                return await process.wait()

    @asynccontextmanager
    async def _process(
        self, *arguments: str, stdin: int, stdout: int = PIPE
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await asyncio.create_subprocess_exec(
            SEQGATE, *arguments, stdin=stdin, stdout=stdout, stderr=PIPE, env=self.environment
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()


def json_lines(*records: Any) -> bytes:
    """Objects as JSON, one per line."""
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)
