"""Synchronous code that awaits: `synchronously` runs it on the event loop, in a greenlet that
`wait_for` suspends until an awaitable is done."""

import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

T = TypeVar("T")


async def synchronously(code: Callable[[], T]) -> T:
    """Run code whose `wait_for` awaits in this task. A cancellation is raised in the code."""
    current = getcurrent()
    running = greenlet(code, parent=current)
    running.gr_context = current.gr_context
    asked: Any = running.switch()
    while not running.dead:
        try:
            result = await asked
        except BaseException:  # raised in the code that waits for it
            asked = running.throw(*sys.exc_info())
        else:
            asked = running.switch(result)
    done: T = asked
    return done


def wait_for(awaitable: Awaitable[T]) -> T:
    """Wait for an awaitable, from code that `synchronously` runs."""
    waiting_task = getcurrent().parent
    assert waiting_task is not None, "only code that `synchronously` runs can wait"
    result: T = waiting_task.switch(awaitable)
    return result
