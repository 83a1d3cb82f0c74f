"""Waits for a state, with a limit."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

POLL_FIRST_S = 0.01
POLL_LAST_S = 0.1
"""The polling interval grows from the first to the last: polls took a fifth of the suite's
processor time, and slowed what they waited for."""

WITHIN_S = 60.0
"""The default limit, which allows for a busy machine."""


async def eventually(
    state: Callable[[], Awaitable[object] | object], what: str = "", *, within_s: float = WITHIN_S
) -> None:
    """Wait until `state()` is true; fail after `within_s`."""
    poll_s = POLL_FIRST_S
    try:
        async with asyncio.timeout(within_s):
            while True:
                seen = state()
                if inspect.isawaitable(seen):
                    seen = await seen
                if seen:
                    return
                await asyncio.sleep(poll_s)
                poll_s = min(1.5 * poll_s, POLL_LAST_S)
    except TimeoutError:
        raise AssertionError(
            f"not within {within_s} s: {what or inspect.getsource(state)}"
        ) from None


def until(state: Callable[[], object], what: str = "", *, within_s: float = WITHIN_S) -> None:
    """`eventually` for tests without an event loop."""
    poll_s = POLL_FIRST_S
    ends_s = time.monotonic() + within_s
    while not state():
        if time.monotonic() > ends_s:
            raise AssertionError(f"not within {within_s} s: {what or inspect.getsource(state)}")
        time.sleep(poll_s)
        poll_s = min(1.5 * poll_s, POLL_LAST_S)
