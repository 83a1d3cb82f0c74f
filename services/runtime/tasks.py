"""Ending tasks for certain."""

import asyncio
from typing import Any, Final

CANCEL_AGAIN_S: Final = 0.1
"""How long a cancelled task may go on before it is cancelled again."""


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and return when they have ended.

    Once is not always enough: until Python 3.12, asyncio.wait_for swallows a cancellation that
    arrives just as what it waits for is done (python/cpython#86296), and libraries use it.
    """
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
