"""Servers of peers: children of the bench on ports of loopback, with their logs in its folder."""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from signal import Signals
from typing import Final

from seqgate.dev.child import Child, start_process, tail, tell
from tools.stack.child import ChildFailed
from tools.stack.processes import kill

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.02


def program(name: str) -> str | None:
    """The path of a program beside this Python, where packages install theirs, or else on PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


@asynccontextmanager
async def server(
    command: Sequence[str],
    port: int,
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[int]:
    """Run a server for as long as it is used. Yields its process id once it accepts connections.
    Raises ChildFailed if it ends before, or is not ready in time."""
    with log.open("wb") as file:
        child = await start_process(command, file.fileno(), {**os.environ, **(environment or {})})
    try:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await _ready(child, port, log)
        except TimeoutError:
            raise ChildFailed(f"{log.stem} was not ready in time: {tail(log)}") from None
        yield child.pid
    finally:
        tell(child, Signals.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await child.wait()
        except TimeoutError:
            await asyncio.to_thread(kill, child.pid)
            await child.wait()


async def _ready(child: Child, port: int, log: Path) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if child.returncode is not None:
                raise ChildFailed(f"{log.stem} ended: {tail(log)}") from None
            await asyncio.sleep(POLL_S)
        else:
            writer.close()
            return
