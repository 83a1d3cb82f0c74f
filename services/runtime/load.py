"""How much a service does at once: calls, streams, and the bytes of what they ask.

A call that exceeds a limit is refused with SERVICE_BUSY before its handler sees it, and what it
brought is let go. Health checks are never refused, so that a busy service is not taken for a dead
one. What a stream asks for later, message by message, is weighed by its servicer, with `weighed`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from services.errors import ServiceBusy
from services.runtime.budget import Budget

RETRY_AFTER_S: Final = 0.5
"""What a caller is told to wait when there is too much to do."""

CALLS_MAX: Final = 2_000
STREAMS_MAX: Final = 20_000
BYTES_MAX: Final = 256 * 1024 * 1024
"""The limits of a service that is told none: see ServiceConfig."""

_LOAD: ContextVar["Load | None"] = ContextVar("load", default=None)

ASKED_BYTES: ContextVar[int] = ContextVar("asked_bytes", default=0)
"""How large the request is that is being served, in bytes: what waits somewhere on its behalf, and
may outlive its call, weighs as much there."""


class Load:
    """What is being done.

    Args:
        calls_max: how many unary calls are served at once.
        streams_max: how many streams are open at once.
        bytes_max: how large the requests that are being served are together, in bytes, with the
            answers of unary calls that are under way. The largest one finds room alone.
    """

    def __init__(
        self, calls_max: int = CALLS_MAX, streams_max: int = STREAMS_MAX, bytes_max: int = BYTES_MAX
    ) -> None:
        self._calls_max = calls_max
        self._streams_max = streams_max
        self._budget = Budget(bytes_max)
        self.calls = 0
        """How many unary calls are being served."""
        self.streams = 0
        """How many streams are open."""

    @property
    def asked_bytes(self) -> int:
        """How large the requests that are being served and the answers under way are, in bytes."""
        return self._budget.used

    @contextmanager
    def call(self, size_bytes: int) -> Iterator[None]:
        """A unary call, while it is served.

        Raises:
            ServiceBusy: there is no room for it.
        """
        if self.calls >= self._calls_max:
            raise busy("the service answers as many calls as it may", limit="calls_max")
        with self.weighed(size_bytes):
            self.calls += 1
            try:
                yield
            finally:
                self.calls -= 1

    def answered(self, size_bytes: int) -> Callable[[object], None]:
        """Count the answer of a unary call: it was made, and whether its caller reads it is another
        matter. It exceeds the limit if it must; what is asked next is refused then. Returns what
        is to be called when the call is over."""
        self._budget.take(size_bytes)
        return lambda _: self._budget.give(size_bytes)

    @contextmanager
    def stream(self, size_bytes: int) -> Iterator[None]:
        """A stream, while it is open; a request that began it counts as long.

        Raises:
            ServiceBusy: there is no room for it.
        """
        if self.streams >= self._streams_max:
            raise busy("as many streams are open as may be", limit="streams_max")
        with self.weighed(size_bytes):
            self.streams += 1
            before = _LOAD.set(self)
            try:
                yield
            finally:
                _LOAD.reset(before)
                self.streams -= 1

    @contextmanager
    def weighed(self, size_bytes: int) -> Iterator[None]:
        """What is being asked, so many bytes, while it is served.

        Raises:
            ServiceBusy: there is no room for it.
        """
        if not self._budget.fits(size_bytes):
            raise busy("what is being asked is as large as it may be", limit="calls_bytes_max")
        self._budget.take(size_bytes)
        before = ASKED_BYTES.set(size_bytes)
        try:
            yield
        finally:
            ASKED_BYTES.reset(before)
            self._budget.give(size_bytes)


@contextmanager
def weighed(request: Any) -> Iterator[None]:
    """A message that a stream brought, while it is served.

    Raises:
        ServiceBusy: there is no room for it.
    """
    load = _LOAD.get()
    if load is None:
        yield
        return
    with load.weighed(size_of(request)):
        yield


def busy(message: str, *, limit: str) -> ServiceBusy:
    """The refusal of what there is no room for now."""
    return ServiceBusy(message, retry_after_s=RETRY_AFTER_S, limit=limit)


def size_of(request: Any) -> int:
    """How large a request is, in bytes.

    Raises:
        MalformedRequest: it cannot be read.
    """
    return len(request) if isinstance(request, bytes) else int(request.ByteSize())
