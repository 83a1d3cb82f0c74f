"""Cancels a coroutine at one of its suspensions, as Task.cancel does."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from itertools import count
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Cancelling(Generic[T]):
    def __init__(self, inner: Awaitable[T], at: int) -> None:
        self._inner = inner
        self._at = at

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._inner.__await__()
        suspensions = 0
        send, value = steps.send, None
        while True:
            try:
                waited_for = send(value)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            if suspensions == self._at:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            suspensions += 1
            try:
                send, value = steps.send, (yield waited_for)
            except BaseException as error:
                send, value = steps.throw, error


async def cancelled(call: Callable[[], Awaitable[T]], at: int) -> tuple[bool, T | None]:
    """Run a coroutine in a task, and cancel that when it has waited so often. Returns whether it
    had, and otherwise its result."""

    async def run() -> T:
        return await _Cancelling(call(), at)

    task = asyncio.create_task(run())
    await asyncio.wait([task])
    return (True, None) if task.cancelled() else (False, task.result())


async def at_each_wait(scenario: Callable[[int], Awaitable[bool]]) -> int:
    """Run a scenario cancelled at one suspension after another, until it says that it ended before.
    Returns the number of suspensions."""
    for at in count():
        if not await scenario(at):
            return at
    raise AssertionError("unreachable")
