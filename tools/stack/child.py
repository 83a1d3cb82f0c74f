"""Children that do not outlive us.

The kernel sends them SIGTERM when the process that started them dies, however it dies. `setpriv`
(util-linux) asks for that and becomes the command; where it does not exist, children are only
stopped in good order. Asking between fork and exec, in Python, would run gRPC's fork handlers in a
child that has none of its threads.
"""

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from signal import Signals
from typing import Protocol


class Child(Protocol):
    """A process that we started."""

    @property
    def pid(self) -> int:
        """Its id."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; None: it runs."""
        ...

    async def wait(self) -> int:
        """Its exit status, when it has ended."""
        ...


async def start_process(command: Sequence[str], log: int, environment: Mapping[str, str]) -> Child:
    """Run a command for as long as this process lives.

    Args:
        command: the command.
        log: the descriptor of the file that it writes to.
        environment: all of its variables.
    """
    return await asyncio.create_subprocess_exec(
        *bound_to_us(command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
    )


def bound_to_us(command: Sequence[str]) -> list[str]:
    """The command that runs `command` for as long as this process lives."""
    setpriv = shutil.which("setpriv")
    return [*([setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []), *command]


def tell(process: Child, number: Signals) -> None:
    """Send a signal to a process, if it still runs.

    Process.kill() and its like look first whether the process has ended, and if it just has, they
    take its exit status away: who waits for it is told 255 (Python 3.11).
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
