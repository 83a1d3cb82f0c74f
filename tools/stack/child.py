"""Python modules as child processes of tools and tests."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from signal import Signals

from seqgate.dev.child import bound_to_us, tell


class ChildFailed(Exception):
    """A child ended with an error, or did not end in time."""


@asynccontextmanager
async def python_process(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    stderr: int | None = None,
) -> AsyncIterator[Process]:
    """`python -m module`, with pipes to its standard input and output; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *bound_to_us([sys.executable, "-m", module, *arguments]),
        stdin=PIPE,
        stdout=PIPE,
        stderr=stderr,
        env={**os.environ, **(environment or {})},
    )
    try:
        yield process
    finally:
        tell(process, Signals.SIGKILL)
        await process.wait()


def cancel_on_sigterm() -> None:
    """Have SIGTERM cancel the current task, so that clean-up runs."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(Signals.SIGTERM, task.cancel)
