"""Limits on concurrent work: calls, streams, and the bytes of their requests.

A call that exceeds a limit is refused with SERVICE_BUSY before its handler sees it, and its request
is released. Health checks are never refused, so that a busy service does not look dead. Later
messages of a stream are counted by its servicer, with `weighed`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from seqgate.services.errors import ServiceBusy
from seqgate.services.runtime.budget import Budget

RETRY_AFTER_S: Final = 0.5
"""RetryInfo for a caller that is refused because of a limit."""

CALLS_MAX: Final = 2_000
STREAMS_MAX: Final = 20_000
BYTES_MAX: Final = 256 * 1024 * 1024
"""The default limits: see ServiceConfig."""

RESERVED: Final = 8
"""This fraction of the places, one in so many, is reserved for hosts that have less than half."""

_LOAD: ContextVar["Load | None"] = ContextVar("load", default=None)

ASKED_BYTES: ContextVar[int] = ContextVar("asked_bytes", default=0)
"""The size of the request being served, in bytes. Work queued on its behalf, which may outlive the
call, counts as many bytes in its queue."""


class _Places:
    """A limit on concurrent calls or streams, with a count for each host.

    A host that has half of them leaves the last eighth to others: a single caller cannot make a
    service busy for all others.
    """

    def __init__(self, most: int) -> None:
        self.taken = 0
        self._most = most
        self._of: Counter[str] = Counter()

    def has_room(self, host: str) -> bool:
        """Whether a host may have one more."""
        free = self._most - self.taken
        return free > self._most // RESERVED or (free > 0 and 2 * self._of[host] < self._most)

    @contextmanager
    def take(self, host: str) -> Iterator[None]:
        """Take one for a host meanwhile."""
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
    """The work in progress, and its limits.

    Args:
        calls_max: the most unary calls served at once.
        streams_max: the most streams open at once.
        bytes_max: the most bytes of requests being served and of unary answers being sent,
            together. While no others are served, a request of any size is accepted.
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
        """The bytes of requests being served and of unary answers being sent."""
        return self._budget.used

    @contextmanager
    def call(self, size_bytes: int, host: str) -> Iterator[None]:
        """Count a unary call from a host while it is served.

        Raises:
            ServiceBusy: a limit is reached.
        """
        if not self._calls.has_room(host):
            raise busy("too many concurrent calls (limit calls_max)", limit="calls_max")
        with self.weighed(size_bytes), self._calls.take(host):
            yield

    def answered(self, size_bytes: int) -> Callable[[object], None]:
        """Count the answer of a unary call until the call ends: the caller may read it slowly. An
        answer may exceed the limit; then the next requests are refused. Returns the callback for
        the end of the call."""
        self._budget.take(size_bytes)
        return lambda _: self._budget.give(size_bytes)

    @contextmanager
    def stream(self, size_bytes: int, host: str) -> Iterator[None]:
        """Count a stream from a host, and the request that opened it, while it is open.

        Raises:
            ServiceBusy: a limit is reached.
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
        """Count the bytes of a request while it is served.

        Raises:
            ServiceBusy: the limit is reached.
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
    """Count the bytes of a stream's message while it is served.

    Raises:
        ServiceBusy: the limit is reached.
    """
    load = _LOAD.get()
    if load is None:
        yield
        return
    with load.weighed(size_of(request)):
        yield


def busy(message: str, *, limit: str) -> ServiceBusy:
    """The refusal of work beyond a limit."""
    return ServiceBusy(message, retry_after_s=RETRY_AFTER_S, limit=limit)


def size_of(request: Any) -> int:
    """The serialized size of a request, in bytes.

    Raises:
        MalformedRequest: the request does not decode.
    """
    return len(request) if isinstance(request, bytes) else int(request.ByteSize())
