"""A process of the demo that is started again each time it is killed."""

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tools.stack.child import bound_to_us, tell

LOG_LINES: Final = 15
"""How many of its last lines are told when it fails."""


class ApplicationFailed(Exception):
    """A process ended with an error of its own."""


class Application:
    """One of them: `python -m MODULE ARGUMENT...`, with new arguments for each start."""

    def __init__(self, module: str, arguments: Callable[[], Sequence[str]], log: Path) -> None:
        self._module = module
        self._arguments = arguments
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def runs(self) -> bool:
        """Whether it does now."""
        return self._process is not None and self._process.returncode is None

    async def run(self) -> None:
        """Start it, and again when it was killed, until it ends well.

        Raises:
            ApplicationFailed: it ended otherwise than well, or by being killed.
        """
        while True:
            self._process = await self._spawn()
            status = await self._process.wait()
            if status == 0:
                return
            if status > 0:
                lines = self._log.read_text(errors="replace").splitlines()
                tail = "\n".join(lines[-LOG_LINES:])
                raise ApplicationFailed(f"{self._module} ended with {status}: {tail}")

    async def kill(self) -> None:
        """SIGKILL it, if it runs, and return when it is gone."""
        if self._process is not None:
            tell(self._process, signal.SIGKILL)
            await self._process.wait()

    async def _spawn(self) -> asyncio.subprocess.Process:
        with self._log.open("ab") as out:
            return await asyncio.create_subprocess_exec(
                *bound_to_us([sys.executable, "-m", self._module, *self._arguments()]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
