"""Limits on concurrent work: calls, streams, and the bytes of their requests.

A call that exceeds a limit is refused with SERVICE_BUSY before it reaches its handler, and its
request is released. Health checks are never refused: a busy service must not look dead. Later
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
"""RetryInfo for a caller refused at a limit."""

CALLS_MAX: Final = 2_000
STREAMS_MAX: Final = 20_000
BYTES_MAX: Final = 256 * 1024 * 1024
"""The defaults of the limits: see ServiceConfig."""

RESERVED: Final = 8
"""One in this many places is reserved for hosts with less than half of them."""

_LOAD: ContextVar["Load | None"] = ContextVar("load", default=None)

ASKED_BYTES: ContextVar[int] = ContextVar("asked_bytes", default=0)
"""The size of the request being served, in bytes. Work queued for it, which may outlive the call,
counts as this many bytes in its queue."""


class _Places:
    """A limit on concurrent calls or streams, counted per host.

    A host with half of them leaves the last eighth to other hosts, so that one caller alone cannot
    make a service busy for all.
    """

    def __init__(self, most: int) -> None:
        self.taken = 0
        self._most = most
        self._of: Counter[str] = Counter()

    def has_room(self, host: str) -> bool:
        free = self._most - self.taken
        return free > self._most // RESERVED or (free > 0 and 2 * self._of[host] < self._most)

    @contextmanager
    def take(self, host: str) -> Iterator[None]:
        """Take a place for a host while the context lasts."""
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
        calls_max: the most concurrent unary calls.
        streams_max: the most open streams.
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
        return self._calls.taken

    @property
    def streams(self) -> int:
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
        """Count a unary answer until the call ends, since its caller may read slowly. It may exceed
        the limit; the next requests are then refused. Returns the callback for the end of the
        call."""
        self._budget.take(size_bytes)
        return lambda _: self._budget.give(size_bytes)

    @contextmanager
    def stream(self, size_bytes: int, host: str) -> Iterator[None]:
        """Count a stream from a host, and the request that opened it, while the stream is open.

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
    return ServiceBusy(message, retry_after_s=RETRY_AFTER_S, limit=limit)


def size_of(request: Any) -> int:
    """The serialized size of a request, in bytes.

    Raises:
        MalformedRequest: the request does not decode.
    """
    return len(request) if isinstance(request, bytes) else int(request.ByteSize())
