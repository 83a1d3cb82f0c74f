"""Children that do not outlive us.

The kernel sends them SIGTERM when the process that started them dies, however it dies. `setpriv`
(util-linux) asks for that and becomes the command; where it does not exist, children are only
stopped in good order. Asking between fork and exec, in Python, would run gRPC's fork handlers in a
child that has none of its threads.
"""

import asyncio
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from signal import Signals


def bound_to_us(command: Sequence[str]) -> list[str]:
    """The command that runs `command` for as long as this process lives."""
    setpriv = shutil.which("setpriv")
    return [*([setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []), *command]


def tell(process: asyncio.subprocess.Process, number: Signals) -> None:
    """Send a signal to a process, if it still runs.

    Process.kill() and its like look first whether the process has ended, and if it just has, they
    take its exit status away: who waits for it is told 255 (Python 3.11).
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
