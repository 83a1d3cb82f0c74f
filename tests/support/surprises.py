"""Exceptions that nobody expects, each at one place of a history that uses a client.

Places are the awaits of the client's coroutines, in tasks that `in_steps` makes, and the calls of
methods that `surprising` wraps.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any


class Boom(Exception):
    """What nobody expects."""


class Plan:
    """Counts places, and raises at one of them."""

    def __init__(self, at: int | None) -> None:
        self.places = 0
        self.where = ""
        self._at = at

    def is_here(self, where: str) -> bool:
        """Count a place. Whether to raise here."""
        self.places += 1
        if self.places - 1 != self._at:
            return False
        self.where = where
        return True

    def pass_by(self, where: str) -> None:
        if self.is_here(where):
            raise Boom(where)


class Steps(Coroutine[Any, Any, Any]):
    """A coroutine, each await of which is a place."""

    def __init__(self, coroutine: Any, plan: Plan) -> None:
        self._coroutine, self._plan = coroutine, plan
        self.cr_code = coroutine.cr_code
        self._has_begun = False

    def send(self, value: Any) -> Any:
        where = f"an await of {self._coroutine.__qualname__}"
        if self._has_begun and self._plan.is_here(where):
            return self._coroutine.throw(Boom(where))
        self._has_begun = True
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()


def in_steps(plan: Plan) -> Callable[..., "asyncio.Task[Any]"]:
    """A task factory for tasks of the client."""

    def make(loop: Any, coroutine: Any, **more: Any) -> "asyncio.Task[Any]":
        runs = Steps(coroutine, plan) if is_clients(coroutine) else coroutine
        return asyncio.Task(runs, loop=loop, **more)

    return make


def is_clients(coroutine: Any) -> bool:
    """Whether a coroutine is of the client, or stands for one."""
    code = getattr(coroutine, "cr_code", None)
    return code is not None and "/seqgate/client/" in code.co_filename


HANDING_OVER = ("take_resolved", "settled", "abandon")
"""What these return, nobody else has any more: it would be lost if they raised afterwards."""


def surprising(plan: Plan, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def surprised(*args: Any, **kwargs: Any) -> Any:
        plan.pass_by(f"before {method.__qualname__}")
        result = method(*args, **kwargs)
        if method.__name__ not in HANDING_OVER:
            plan.pass_by(f"after {method.__qualname__}")
        return result

    return surprised
