"""Starts a process again whenever it ends, as Kubernetes does."""

import asyncio
import time
from collections.abc import Callable
from signal import Signals

from seqgate.dev.stack import Stack, StackError
from seqgate.errors import SeqgateError
from seqgate.services.runtime.restarts import Restarts

Tell = Callable[[str], None]


class NotStarted(SeqgateError):
    """Seqgate cannot run on this machine: a port, a folder or a program is missing, or a process
    ended."""

    default_reason = "NOT_STARTED"


async def keep_running(stack: Stack, until: asyncio.Event, tell: Tell) -> None:
    """Keep all processes of a stack running until an event. Raises StackError if one of them ends
    again and again before it is ready. `tell` gets a sentence about each new start."""
    told = asyncio.create_task(until.wait())
    keeping = [asyncio.create_task(_keep(stack, name, tell)) for name in stack.names]
    try:
        done, _ = await asyncio.wait({told, *keeping}, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        for task in (told, *keeping):
            task.cancel()
        await asyncio.wait({told, *keeping})


async def _keep(stack: Stack, name: str, tell: Tell) -> None:
    restarts = Restarts()
    ready_at_s: float | None = time.monotonic()
    while True:
        status = await stack.ended(name)
        listened_s = None if ready_at_s is None else time.monotonic() - ready_at_s
        pause_s = restarts.ended(listened_s)
        how = ending(status)
        if pause_s is None:
            raise StackError(f"{name} {how} before it was ready: {stack.last_words(name)}")
        await asyncio.sleep(pause_s)  # Ctrl-C reaches all processes: we may be told to stop, too
        tell(f"{name} {how}, and is started again; its log is {stack.log(name)}")
        await stack.spawn(name)
        try:
            await stack.ready(name)
            ready_at_s = time.monotonic()
        except StackError:
            stack.signal(name, Signals.SIGKILL)
            ready_at_s = None


def ending(status: int) -> str:
    """How a process ended, given its exit status."""
    return f"was killed by {Signals(-status).name}" if status < 0 else f"ended with {status}"
