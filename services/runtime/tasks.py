"""Reliable cancellation of tasks."""

import asyncio
from typing import Any, Final

CANCEL_AGAIN_S: Final = 0.1
"""The time after which a cancelled task that still runs is cancelled again."""


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended.

    One cancellation is not always enough: until Python 3.12, asyncio.wait_for swallows one that
    arrives just as its awaitable completes (python/cpython#86296), and libraries use it.
    """
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
