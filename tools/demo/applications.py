"""Processes of the demo, which are killed and started again."""

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tools.stack.child import bound_to_us, tell

LOG_LINES: Final = 15  # lines of its log that are shown when a process fails


class ApplicationFailed(Exception):
    """A process ended with an error of its own."""


class Application:
    """`python -m MODULE ARGUMENT...`, with new arguments for each start."""

    def __init__(self, module: str, arguments: Callable[[], Sequence[object]], log: Path) -> None:
        self._module = module
        self._arguments = arguments
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> asyncio.subprocess.Process:
        """Start it once."""
        arguments = map(str, self._arguments())
        with self._log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *bound_to_us([sys.executable, "-m", self._module, *arguments]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        return self._process

    async def run(self) -> None:
        """Start it, and again whenever it was killed, until it exits with 0.

        Raises:
            ApplicationFailed: it exited with another status.
        """
        while status := await (await self.start()).wait():
            if status > 0:
                raise self.failure(status)

    def failure(self, status: int) -> ApplicationFailed:
        """The error that it ended with, with the end of its log."""
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return ApplicationFailed("\n".join([f"{self._module} ended with {status}:", *lines]))

    def check(self) -> None:
        """
        Raises:
            ApplicationFailed: it ended by itself.
        """
        if self._process is not None and self._process.returncode is not None:
            raise self.failure(self._process.returncode)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self._process is not None:
            tell(self._process, number)

    async def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send it a signal, if it runs, and return when it is gone."""
        if self._process is not None:
            self.send(number)
            await self._process.wait()
