"""Objects that belong to the event loop in which they were made.

Their futures, timers and connections are that loop's: used from another one, they would wait for
ever, and from a thread, break.
"""

import asyncio
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeVar

T = TypeVar("T")

_SPECIAL: Final = ("__aenter__", "__aexit__", "__anext__")


def of_one_loop(cls: type[T]) -> type[T]:
    """Have each public method of a class, inherited ones included, raise RuntimeError unless it is
    called in the event loop in which its object was made. Properties may be read anywhere."""
    made = cls.__init__

    @wraps(made)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        self._made_in = _running("make")
        made(self, *args, **kwargs)

    cls.__init__ = make  # type: ignore[method-assign]
    cls._what = cls.__name__.lower()  # type: ignore[attr-defined]
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        is_public = not name.startswith("_") or name in _SPECIAL
        if is_public and inspect.isfunction(member):
            setattr(cls, name, _checked(member))
    return cls


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check(self)
        return method(self, *args, **kwargs)

    @wraps(method)
    async def checked_later(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check(self)
        return await method(self, *args, **kwargs)

    return checked_later if inspect.iscoroutinefunction(method) else checked


def _check(self: Any) -> None:
    if _running("use") is not self._made_in:
        raise RuntimeError(
            f"this {self._what} was made in another event loop: use it there, or make another"
            " client in this one"
        )


def _running(do: str) -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            f"no event loop is running in this thread: {do} the asyncio client in `async def`"
            " code, or make a client of seqgate.client.blocking"
        ) from None
