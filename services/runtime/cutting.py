"""Streams that end although their peer takes nothing of what it is sent."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

Cut = Callable[[Exception], None]
"""Ends a stream with an error; once it is over, it does nothing."""


@asynccontextmanager
async def until_cut() -> AsyncIterator[Cut]:
    """What is done meanwhile, until it is cut off: whatever it waits for, it waits no longer.

    Raises:
        Exception: the one that it was cut off with.
    """
    loop = asyncio.get_running_loop()
    patience = asyncio.timeout(None)
    causes: list[Exception] = []
    is_over = False

    def cut(error: Exception) -> None:
        if not (is_over or causes):
            causes.append(error)
            patience.reschedule(loop.time())

    try:
        async with patience:
            try:
                yield cut
            finally:
                is_over = True
    except TimeoutError as error:
        if not patience.expired():
            raise
        raise causes[0] from error
