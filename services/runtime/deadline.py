"""A caller's deadline, passed on to every call that is made on its behalf."""

import asyncio
from contextvars import ContextVar

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)


def set_remaining_s(remaining_s: float | None) -> None:
    """Note, for the current task, how long its caller will wait; None: for ever."""
    now = asyncio.get_running_loop().time()
    _deadline.set(None if remaining_s is None else now + remaining_s)


def remaining_s(at_most: float | None) -> float | None:
    """How long a call may take that is made now: what is left of the caller's deadline, and never
    more than `at_most`."""
    deadline = _deadline.get()
    if deadline is None:
        return at_most
    left = max(0.0, deadline - asyncio.get_running_loop().time())
    return left if at_most is None else min(left, at_most)
