"""Waits for a state, with a limit."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable

POLL_S = 0.02
"""The polling interval."""

WITHIN_S = 60.0
"""The default limit, which allows for a busy machine."""


async def eventually(
    state: Callable[[], Awaitable[object] | object], what: str = "", *, within_s: float = WITHIN_S
) -> None:
    """Wait until `state()` is true; fail after `within_s`."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                seen = state()
                if inspect.isawaitable(seen):
                    seen = await seen
                if seen:
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(
            f"not within {within_s} s: {what or inspect.getsource(state)}"
        ) from None
