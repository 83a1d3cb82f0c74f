"""The deadline of the call being served, inherited by every call made on its behalf."""

import asyncio
from contextvars import ContextVar

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)


def set_remaining_s(remaining_s: float | None) -> None:
    """Set the remaining time of the call that the current task serves; None: no deadline."""
    now = asyncio.get_running_loop().time()
    _deadline.set(None if remaining_s is None else now + remaining_s)


def remaining_s(at_most: float | None) -> float | None:
    """The time limit of a call made now: the rest of the caller's deadline, at most `at_most`."""
    deadline = _deadline.get()
    if deadline is None:
        return at_most
    left = max(0.0, deadline - asyncio.get_running_loop().time())
    return left if at_most is None else min(left, at_most)
