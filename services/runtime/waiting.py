"""Work that waits for a store, bounded by count and by the bytes of the requests. Work that has
begun outlives a caller that gives up; what has not is dropped."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from seqgate.services.errors import DomainError, StoreFull, StoreUnavailable
from seqgate.services.runtime.budget import Budget
from seqgate.services.runtime.load import ASKED_BYTES, busy
from seqgate.telemetry import spans

WAITING_MAX: Final = 10_000
"""The most pieces of work queued or running, for writes and for reads each."""

WAITING_BYTES_MAX: Final = 256 * 1024 * 1024
"""The most bytes of requests whose writes are queued or running, and the same for reads. A request
of any size is accepted while there are no others. (The ledger's appends have their own budget.)"""

T = TypeVar("T")


class Waiting:
    def __init__(self, what: str) -> None:
        self._what = what
        self._budget = Budget(WAITING_BYTES_MAX)
        self.count = 0

    def begin(self, done: "asyncio.Future[Any]") -> None:
        """Count a piece of work until it is done.

        Raises:
            ServiceBusy: the queue is full; nothing was done.
        """
        end = self.enter()
        done.add_done_callback(lambda _: end())

    def enter(self) -> Callable[[], None]:
        """Count a piece of work until the returned function is called.

        Raises:
            ServiceBusy: the queue is full; nothing was done.
        """
        size_bytes = ASKED_BYTES.get()
        if self.count >= WAITING_MAX or not self._budget.fits(size_bytes):
            raise busy(f"too many {self._what} or bytes waiting for the store", limit="WAITING_MAX")
        self._budget.take(size_bytes)
        self.count += 1

        def end() -> None:
            self._budget.give(size_bytes)
            self.count -= 1

        return end


class Begun:
    """Whether a piece of work, run by a task of its own, has begun."""

    def __init__(self) -> None:
        self._has_begun = False

    def begin(self) -> None:
        self._has_begun = True

    @contextmanager
    def dropping(self, *both: "asyncio.Future[Any]") -> Iterator[None]:
        """Wait for the work inside the context. If the wait is cancelled before the work has begun,
        cancel `both`, its task and its result."""
        try:
            yield
        except asyncio.CancelledError:
            if not self._has_begun:
                for each in both:
                    each.cancel()
            raise


async def outcome(system: str, operation: str, done: Awaitable[T]) -> T:
    """Await work of a database, with a span. A refusal is a result, not a failure of the
    database."""
    with spans.database(system, operation):
        try:
            return await done
        except (StoreFull, StoreUnavailable):
            raise
        except DomainError as error:
            refusal = error
    raise refusal
