"""How much a service does at once: calls, streams, and the bytes of what they ask.

A call that exceeds a limit is refused with SERVICE_BUSY before its handler sees it, and what it
brought is let go. Health checks are never refused, so that a busy service is not taken for a dead
one. What a stream asks for later, message by message, is weighed by its servicer, with `weighed`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from seqgate.services.errors import ServiceBusy
from seqgate.services.runtime.budget import Budget

RETRY_AFTER_S: Final = 0.5
"""What a caller is told to wait when there is too much to do."""

CALLS_MAX: Final = 2_000
STREAMS_MAX: Final = 20_000
BYTES_MAX: Final = 256 * 1024 * 1024
"""The limits of a service that is told none: see ServiceConfig."""

RESERVED: Final = 8
"""One in so many is left to callers who have less than half."""

_LOAD: ContextVar["Load | None"] = ContextVar("load", default=None)

ASKED_BYTES: ContextVar[int] = ContextVar("asked_bytes", default=0)
"""How large the request is that is being served, in bytes: what waits somewhere on its behalf, and
may outlive its call, weighs as much there."""


class _Places:
    """How many may be there at once, and from which host they are.

    A host that has half of them leaves the last eighth to others: one caller alone cannot make a
    service busy for everybody.
    """

    def __init__(self, most: int) -> None:
        self.taken = 0
        self._most = most
        self._of: Counter[str] = Counter()

    def has_room(self, host: str) -> bool:
        """Whether there is one more for a host."""
        free = self._most - self.taken
        return free > self._most // RESERVED or (free > 0 and 2 * self._of[host] < self._most)

    @contextmanager
    def take(self, host: str) -> Iterator[None]:
        """One is taken meanwhile."""
        self.taken += 1
        self._of[host] += 1
        try:
            yield
        finally:
            self.taken -= 1
            self._of[host] -= 1
            if not self._of[host]:
                del self._of[host]


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
        self._calls = _Places(calls_max)
        self._streams = _Places(streams_max)
        self._budget = Budget(bytes_max)

    @property
    def calls(self) -> int:
        """How many unary calls are being served."""
        return self._calls.taken

    @property
    def streams(self) -> int:
        """How many streams are open."""
        return self._streams.taken

    @property
    def asked_bytes(self) -> int:
        """How large the requests that are being served and the answers under way are, in bytes."""
        return self._budget.used

    @contextmanager
    def call(self, size_bytes: int, host: str) -> Iterator[None]:
        """A unary call from a host, while it is served.

        Raises:
            ServiceBusy: there is no room for it.
        """
        if not self._calls.has_room(host):
            raise busy("too many concurrent calls (limit calls_max)", limit="calls_max")
        with self.weighed(size_bytes), self._calls.take(host):
            yield

    def answered(self, size_bytes: int) -> Callable[[object], None]:
        """Count the answer of a unary call: it was made, and whether its caller reads it is another
        matter. It exceeds the limit if it must; what is asked next is refused then. Returns what
        is to be called when the call is over."""
        self._budget.take(size_bytes)
        return lambda _: self._budget.give(size_bytes)

    @contextmanager
    def stream(self, size_bytes: int, host: str) -> Iterator[None]:
        """A stream from a host, while it is open; a request that began it counts as long.

        Raises:
            ServiceBusy: there is no room for it.
        """
        if not self._streams.has_room(host):
            raise busy("too many open streams (limit streams_max)", limit="streams_max")
        with self.weighed(size_bytes), self._streams.take(host):
            before = _LOAD.set(self)
            try:
                yield
            finally:
                _LOAD.reset(before)

    @contextmanager
    def weighed(self, size_bytes: int) -> Iterator[None]:
        """What is being asked, so many bytes, while it is served.

        Raises:
            ServiceBusy: there is no room for it.
        """
        if not self._budget.fits(size_bytes):
            raise busy(
                "concurrent requests too large (limit calls_bytes_max)", limit="calls_bytes_max"
            )
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
