"""Waiting for a state, with a bound."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable

POLL_S = 0.02
"""How often the state is looked at."""

WITHIN_S = 60.0
"""How long it may take where nothing else is said: a machine may have much else to do."""


async def eventually(
    state: Callable[[], Awaitable[object] | object], what: str = "", *, within_s: float = WITHIN_S
) -> None:
    """Return when `state()` is true; fail when that takes too long."""
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
