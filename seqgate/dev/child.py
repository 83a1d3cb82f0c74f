"""Children that do not outlive this process.

The kernel sends them SIGTERM when their parent dies, however it dies. `setpriv` (util-linux)
requests that and then becomes the command; where it does not exist, children are stopped by orderly
shutdown only. Requesting it between fork and exec, in Python, would run gRPC's fork handlers in a
child without their threads.
"""

import asyncio
import os
import shutil
from asyncio.subprocess import DEVNULL
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import Signals
from typing import Final, Protocol

LOG_LINES: Final = 15  # lines of a failed process's log that are shown


class Child(Protocol):
    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        ...

    async def wait(self) -> int: ...


async def start_process(command: Sequence[str], log: int, environment: Mapping[str, str]) -> Child:
    """Run a command for as long as this process lives, with its output in the file of descriptor
    `log`, and with this complete environment."""
    return await asyncio.create_subprocess_exec(
        *bound_to_us(command), stdin=DEVNULL, stdout=log, stderr=log, env=environment
    )


def bound_to_us(command: Sequence[str]) -> list[str]:
    setpriv = shutil.which("setpriv")
    return [*([setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []), *command]


def tail(log: Path) -> str:
    """The last lines of a log, for errors about its process."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-LOG_LINES:])


def tell(process: Child, number: Signals) -> None:
    """Send a signal to a process, if it runs.

    Process.kill() and its like first poll whether the process has ended. If it just has, they take
    its exit status away, and its waiter gets 255 (Python 3.11).
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
