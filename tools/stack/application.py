"""An application under test: a process that is killed and restarted."""

import os
import sys
from asyncio import timeout
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import Signals
from typing import Final

from seqgate.dev.child import Child, tail, tell
from seqgate.dev.stack import Stack

END_S: Final = 30.0  # the default limit from a signal to the end


class ApplicationFailed(Exception):
    """An application exited with an error of its own."""


class Application:
    """`python -m MODULE ARGUMENT...`, with new arguments for each start."""

    def __init__(self, module: str, arguments: Callable[[], Sequence[object]], log: Path) -> None:
        self.log = log
        self.process: Child | None = None
        """The process, until `end` is called."""
        self._module = module
        self._arguments = arguments

    async def start(self) -> Child:
        command = [sys.executable, "-m", self._module, *map(str, self._arguments())]
        with self.log.open("ab") as log:
            self.process = await Stack.start_process(command, log.fileno(), os.environ)
        return self.process

    async def run(self) -> None:
        """Start the process, and restart it whenever it was killed, until it exits with 0. Raises
        ApplicationFailed if it exits with another status."""
        while status := await (await self.start()).wait():
            if status > 0:
                raise self._failure(status)

    def check(self) -> None:
        """Raise ApplicationFailed if the process ended unexpectedly."""
        if (status := self.ended()) is not None:
            raise self._failure(status)

    def ended(self) -> int | None:
        """The exit status of a process that ended before `end` was called, else None."""
        return None if self.process is None else self.process.returncode

    def send(self, number: Signals) -> None:
        if self.process is not None:
            tell(self.process, number)

    async def end(self, number: Signals = Signals.SIGKILL, within_s: float = END_S) -> int | None:
        """Send a signal and wait until the process is gone. Returns its exit status; None if it was
        not running, or had to be killed."""
        process, self.process = self.process, None
        if process is None:
            return None
        tell(process, number)
        try:
            async with timeout(within_s):
                return await process.wait()
        except TimeoutError:
            return None
        finally:
            tell(process, Signals.SIGKILL)
            async with timeout(END_S):
                await process.wait()

    def _failure(self, status: int) -> ApplicationFailed:
        return ApplicationFailed(f"{self._module} ended with {status}:\n{tail(self.log)}")
