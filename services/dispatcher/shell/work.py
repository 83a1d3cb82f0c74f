"""What is under way for a subscription: all of it ends when the subscription stops, and what may
fail is repeated until it succeeds."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import structlog

from seqgate.types import TopicName
from services.dispatcher.errors import SubscriptionFailed
from services.dispatcher.ports import EntryCorrupt, LetterRefused
from services.errors import DomainError, Kind
from services.runtime import deadline
from services.runtime.budget import Budget
from services.runtime.load import ASKED_BYTES, busy
from services.runtime.tasks import CANCEL_AGAIN_S, end

log = structlog.get_logger()

T = TypeVar("T")

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
"""How long something that failed waits before it is tried again, doubling from the first to the
longest; a letter that is refused says itself how long that is."""

FAILED_RETRY_AFTER_S: Final = 0.5
"""How soon consumers connect again to a subscription to which something unforeseen happened."""

WAITING_CHANGES_MAX: Final = 100
"""How many changes of a subscription wait for their turn or are being made. Each is finished,
whether its caller still waits or not: so calls_max does not bound them."""

WAITING_CHANGES_BYTES_MAX: Final = 64 * 1024 * 1024
"""How large the requests are together that ask for those of all subscriptions, in bytes. The
largest one finds room alone."""


class Work:
    """See the module.

    Attributes:
        stopped: why nothing is done any more; None: it is.
        failures: how often something unforeseen happened.
        changes: how many changes wait for their turn or are being made.
    """

    def __init__(
        self,
        topic: TopicName,
        name: str,
        tasks: asyncio.TaskGroup,
        at_stop: Callable[[DomainError], None],
        asked: Budget | None = None,
    ) -> None:
        """`at_stop` is called once, with the reason. `asked` is the room for requests that ask for
        changes, which all subscriptions share; None: nobody else has any."""
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
        """Return unless everything has stopped.

        Raises:
            DomainError: why it has.
        """
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
        """Cancel what is under way until it has ended: once is not always enough (see `end`), and
        nobody may ask whether it has."""
        for task in self._running:
            task.cancel()
        if self._running:
            asyncio.get_running_loop().call_later(CANCEL_AGAIN_S, self._cancel_all)

    @contextmanager
    def contained(self) -> Iterator[None]:
        """What was not foreseen is the matter of this subscription alone. Nobody knows what state
        its machine is in: it is dropped, its streams end, and who connects next takes the
        subscription anew, with what is durable."""
        try:
            yield
        except DomainError:
            raise
        except Exception:
            self._fail()

    def _fail(self) -> None:
        """Amid an exception: stop because of it."""
        self.failures += 1
        log.exception("subscription failed", topic=str(self._topic), subscription=self._name)
        self.stop(
            SubscriptionFailed(
                "something unforeseen happened to the subscription",
                retry_after_s=FAILED_RETRY_AFTER_S,
            )
        )

    async def ended(self) -> None:
        """Return when nothing is under way any more."""
        await end(*self._running)

    def start(
        self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
    ) -> asyncio.Task[None]:
        """Do something. It belongs to no call, so it inherits neither a caller's deadline nor its
        span. What begins when everything has stopped is ended soon."""
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
        """Do something that ends with the machine that wants it."""
        if self.stopped is not None:
            return
        task = self.start(work, *arguments)
        self._of_machine.add(task)
        task.add_done_callback(self._of_machine.discard)

    async def end_of_machine(self) -> None:
        """End what the machine wants: another one takes its place."""
        await end(*self._of_machine)

    async def finished(self, change: Callable[[], Awaitable[T]]) -> T:
        """Make a change to its end, whether somebody still waits for it or not. So it inherits the
        caller's span, and not its deadline: beyond that every call of it would fail.

        Raises:
            ServiceBusy: too many wait already; nothing was done.
            DomainError: why it is not done, or why everything has stopped.
        """
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
        """Count a change until what is returned is called."""
        size_bytes = ASKED_BYTES.get()
        if self.changes >= WAITING_CHANGES_MAX or not self._asked.fits(size_bytes):
            raise busy("too many changes wait for their turn", limit="WAITING_CHANGES_MAX")
        self._asked.take(size_bytes)
        self.changes += 1

        def end(_: object) -> None:
            self._asked.give(size_bytes)
            self.changes -= 1

        return end

    async def repeated(
        self, do: Callable[[], Awaitable[T]], *, unless: type[DomainError] | None = None
    ) -> T:
        """Do something until it succeeds, or is refused in the one way that is expected.

        Raises:
            DomainError: that one; or it never will succeed: everything has stopped.
        """
        backoff_s = BACKOFF_FIRST_S
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
                            "an entry is damaged",
                            topic=str(self._topic),
                            subscription=self._name,
                            **error.details,
                        )
                    self.stop(error)
                    raise
                log.debug("tried again", subscription=self._name, why=error.message)
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, _longest_wait_s(error))

    async def _until_stopped(
        self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
    ) -> None:
        try:
            with self.contained():
                await work(*arguments)
        except DomainError:
            if self.stopped is None:  # nothing that is done here is refused for good
                self._fail()


def _longest_wait_s(error: DomainError) -> float:
    """How long what failed so waits at most before it is tried again. Most refusals of letters pass
    in moments; where somebody has to do something about it, that may take hours."""
    longest_s = error.retry_after_s if isinstance(error, LetterRefused) else None
    return longest_s or BACKOFF_MAX_S
