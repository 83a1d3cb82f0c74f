"""A subscription's tasks: all end when it stops, and calls that may fail are retried until they
succeed."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import structlog

from seqgate.services.dispatcher.errors import SubscriptionFailed
from seqgate.services.dispatcher.ports import EntryCorrupt, LetterRefused
from seqgate.services.errors import DomainError, Kind
from seqgate.services.runtime import deadline
from seqgate.services.runtime.backoff import Backoff
from seqgate.services.runtime.budget import Budget
from seqgate.services.runtime.load import ASKED_BYTES, busy
from seqgate.services.runtime.tasks import CANCEL_AGAIN_S, end
from seqgate.types import TopicName

log = structlog.get_logger()

T = TypeVar("T")

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
"""The delay before a retry, doubling from the first to the longest; a refused dead letter names its
own longest delay."""

FAILED_RETRY_AFTER_S: Final = 0.5
"""The delay after which consumers reconnect to a subscription that failed unexpectedly."""

WAITING_CHANGES_MAX: Final = 100
"""The most queued and running changes of a subscription. Each completes even if its caller has
gone, so calls_max does not bound them."""

WAITING_CHANGES_BYTES_MAX: Final = 64 * 1024 * 1024
"""The total size of the requests behind the changes of all subscriptions, in bytes. The largest
request fits alone."""


class Work:
    """The tasks of one subscription.

    Attributes:
        stopped: why everything stopped; None while it runs.
        failures: how often it failed unexpectedly.
        changes: the number of queued and running changes.
    """

    def __init__(
        self,
        topic: TopicName,
        name: str,
        tasks: asyncio.TaskGroup,
        at_stop: Callable[[DomainError], None],
        asked: Budget | None = None,
    ) -> None:
        """`at_stop` is called once, with the reason. `asked` is the budget for requests for
        changes, shared by all subscriptions; None: not shared."""
        self.stopped: DomainError | None = None
        self.failures = 0
        self.changes = 0
        self._asked = asked or Budget(WAITING_CHANGES_BYTES_MAX)
        self._topic = topic
        self._name = name
        self._tasks = tasks
        self._at_stop = at_stop
        self._running: set[asyncio.Task[None]] = set()
        self._of_machine: set[asyncio.Task[None]] = set()

    def check(self) -> None:
        """Raise the reason if everything has stopped."""
        if self.stopped is not None:
            raise self.stopped

    def stop(self, error: DomainError) -> None:
        """Stop everything at once."""
        if self.stopped is not None:
            return
        self.stopped = error
        self._at_stop(error)
        self._cancel_all()

    def _cancel_all(self) -> None:
        """Cancel all tasks until they have ended: once is not always enough (see `end`)."""
        for task in self._running:
            task.cancel()
        if self._running:
            asyncio.get_running_loop().call_later(CANCEL_AGAIN_S, self._cancel_all)

    @contextmanager
    def contained(self) -> Iterator[None]:
        """Limit an unexpected exception to this subscription. The state of its machine is unknown:
        the machine is dropped, its streams end, and the next consumer takes the subscription again
        from durable state."""
        try:
            yield
        except DomainError:
            raise
        except Exception:
            self._fail()

    def _fail(self) -> None:
        """Stop because of the exception being handled."""
        self.failures += 1
        log.exception("subscription failed", topic=str(self._topic), subscription=self._name)
        self.stop(
            SubscriptionFailed(
                "internal error: the subscription is being reloaded",
                retry_after_s=FAILED_RETRY_AFTER_S,
            )
        )

    async def ended(self) -> None:
        """Wait until no task is running."""
        await end(*self._running)

    def start(
        self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
    ) -> asyncio.Task[None]:
        """Start a task. It belongs to no call and inherits neither deadline nor span. A task that
        starts after the stop is cancelled soon."""
        return self._start(contextvars.Context(), work, *arguments)

    def _start(
        self,
        context: contextvars.Context,
        work: Callable[..., Coroutine[Any, Any, None]],
        *arguments: Any,
    ) -> asyncio.Task[None]:
        task = self._tasks.create_task(self._until_stopped(work, *arguments), context=context)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        if self.stopped is not None:
            asyncio.get_running_loop().call_later(CANCEL_AGAIN_S, self._cancel_all)
        return task

    def start_for_machine(
        self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
    ) -> None:
        """Start a task that ends with the current machine."""
        if self.stopped is not None:
            return
        task = self.start(work, *arguments)
        self._of_machine.add(task)
        task.add_done_callback(self._of_machine.discard)

    async def end_of_machine(self) -> None:
        """End the machine's tasks: it is being replaced."""
        await end(*self._of_machine)

    async def finished(self, change: Callable[[], Awaitable[T]]) -> T:
        """Complete a change even if its caller is gone. It inherits the caller's span but not its
        deadline, beyond which all its calls would fail. Raises ServiceBusy before the change when
        too many wait already, else what the change raises, or why everything has stopped."""
        outcome: list[T | DomainError] = []

        async def doing() -> None:
            try:
                outcome.append(await change())
            except DomainError as error:
                outcome.append(error)

        self.check()
        end = self._begin_change()
        context = contextvars.copy_context()
        context.run(deadline.set_remaining_s, None)
        task = self._start(context, doing)
        task.add_done_callback(end)
        await asyncio.wait({task})
        self.check()
        (found,) = outcome
        if isinstance(found, DomainError):
            raise found
        return found

    def _begin_change(self) -> Callable[[object], None]:
        """Count a change until the returned function is called."""
        size_bytes = ASKED_BYTES.get()
        if self.changes >= WAITING_CHANGES_MAX:
            raise busy("too many changes of subscriptions waiting", limit="WAITING_CHANGES_MAX")
        if not self._asked.fits(size_bytes):
            raise busy(
                "waiting changes of subscriptions too large",
                limit="WAITING_CHANGES_BYTES_MAX",
            )
        self._asked.take(size_bytes)
        self.changes += 1

        def end(_: object) -> None:
            self._asked.give(size_bytes)
            self.changes -= 1

        return end

    async def repeated(
        self, do: Callable[[], Awaitable[T]], *, unless: type[DomainError] | None = None
    ) -> T:
        """Retry a call until it succeeds. Raises the refusal `unless`; a final one (neither
        UNAVAILABLE nor EXHAUSTED), which stops everything; or why everything has stopped."""
        backoff = Backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S)
        while True:
            self.check()
            try:
                return await do()
            except DomainError as error:
                if unless is not None and isinstance(error, unless):
                    raise
                if error.kind is not Kind.UNAVAILABLE and error.kind is not Kind.EXHAUSTED:
                    if isinstance(error, EntryCorrupt):
                        log.critical(
                            "damaged entry",
                            topic=str(self._topic),
                            subscription=self._name,
                            **error.details,
                        )
                    self.stop(error)
                    raise
                log.debug("retrying", subscription=self._name, why=error.message)
                await asyncio.sleep(backoff.next_s(_longest_wait_s(error)))

    async def _until_stopped(
        self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
    ) -> None:
        try:
            with self.contained():
                await work(*arguments)
        except DomainError:
            if self.stopped is None:  # a bug: a final refusal stops everything first
                self._fail()


def _longest_wait_s(error: DomainError) -> float:
    """The longest delay before the retry. Most refusals of dead letters pass in moments; one that
    an operator must resolve may take hours."""
    longest_s = error.retry_after_s if isinstance(error, LetterRefused) else None
    return longest_s or BACKOFF_MAX_S
