"""Concurrent processing, in order within each key."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final, cast

from seqgate.client._arguments import timeout, whole
from seqgate.client._consumer import Consumer
from seqgate.client._message import Received
from seqgate.errors import ConsumerClosedError, CorruptMessageError
from seqgate.telemetry.spans import fail_with

STOP_TIMEOUT_S: Final = 30.0
"""How long running handlers may take to finish after a cancellation, by default."""

CONCURRENCY_MAX: Final = 100_000
"""The most handlers that may run at once: each is a task."""

_log: Final = logging.getLogger("seqgate.client")

Handler = Callable[[Received], Awaitable[object]]
OnFailure = Callable[[Received, Any], object]


async def process_by_key(
    consumer: Consumer,
    handler: Handler,
    *,
    concurrency: int = 16,
    on_failure: OnFailure | None = None,
    stop_timeout_s: float | None = STOP_TIMEOUT_S,
) -> None:
    """Call a handler for each message: concurrently for different keys, one at a time and in order
    within a key. Returns when the consumer is closed.

    A message is acknowledged when its handler returns, and refused when it raises, for the reason
    that the exception gives: it is redelivered after the delay of `Consumer.nack`, before later
    messages of its key. A CancelledError of something inside the handler is a failure like others.
    An EXCLUSIVE subscription orders the whole topic, so one handler runs at a time. Messages of a
    batch have the key of their batch.

    On cancellation, no further messages are received. Running handlers may finish within
    `stop_timeout_s`, and their messages are acknowledged; those that do not are cancelled, and
    their messages are neither acknowledged nor refused: the consumer receives them again, or
    closing it redelivers them.

    Args:
        handler: an `async def` function, or a callable that returns an awaitable.
        concurrency: the most handlers that run at once, 1 to 100,000.
        on_failure: called with each message that failed, and the exception, and awaited if it is
            asynchronous; None: log it. An exception from it ends the processing.
        stop_timeout_s: seconds, 0 or more; None: no limit.

    Raises:
        InvalidRequestError: the concurrency or the time-out is no number, or out of its bounds.
        TypeError: the handler is not asynchronous. A function that is not is refused before
            anything is received. For others it shows when they are called: then the message is
            neither acknowledged nor refused, and no other is processed.
        SeqgateError: the error that ended the consumer.
        KeyboardInterrupt, SystemExit and other exceptions that are no Exception: a handler raised
            it. Its message was refused.
    """
    concurrency = whole("concurrency", concurrency, 1, CONCURRENCY_MAX)
    stop_timeout_s = timeout("stop_timeout_s", stop_timeout_s)
    _check_asynchronous(handler)
    work = _Work(consumer, handler, _log_failure if on_failure is None else on_failure)
    tasks = [asyncio.create_task(work.run()) for _ in range(concurrency)]
    working = set(tasks)
    try:
        while working:
            ended, working = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                if (end := task.result()) is not None:
                    raise end
    finally:
        await _stop(work, tasks, stop_timeout_s)


async def _stop(
    work: "_Work", tasks: list[asyncio.Task[BaseException | None]], timeout_s: float | None
) -> None:
    """Let running handlers finish within the time-out; survives further cancellation."""
    work.is_stopping = True
    for task in tasks:
        if task not in work.handling:
            task.cancel()
    cancelled: asyncio.CancelledError | None = None
    ending = asyncio.ensure_future(asyncio.wait(tasks, timeout=timeout_s))
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as again:
            cancelled = again
            work.cancel(tasks)
    work.cancel(tasks)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            _log.debug("handler ended while the consumer stopped", exc_info=result)
    if cancelled is not None:
        raise cancelled


class _Work:
    """What the workers share.

    Attributes:
        handling: the workers whose handlers run.
        is_stopping: no message is received any more.
    """

    def __init__(self, consumer: Consumer, handler: Handler, on_failure: OnFailure) -> None:
        self.handling: set[asyncio.Task[Any] | None] = set()
        self.is_stopping = False
        self._is_cancelling = False
        self._consumer = consumer
        self._handler = handler
        self._on_failure = on_failure
        self._caller = asyncio.current_task()
        self._cancellations = self._caller.cancelling() if self._caller is not None else 0

    def cancel(self, tasks: list[asyncio.Task[BaseException | None]]) -> None:
        self._is_cancelling = True
        for task in tasks:
            task.cancel()

    async def run(self) -> BaseException | None:
        """Work until the consumer is closed. Returns what is to be raised to the caller:
        KeyboardInterrupt and SystemExit must not leave a task, or they end the event loop."""
        task = asyncio.current_task()
        while not self.is_stopping:
            try:
                message, key = await self._consumer.receive_and_lock()
            except ConsumerClosedError:
                return None
            except CorruptMessageError as damage:
                _log.warning("damaged message: %s", damage.details)
                continue
            self.handling.add(task)
            try:
                if (end := await self._process(message)) is not None:
                    return end
            except ConsumerClosedError:
                return None  # the message is delivered to another consumer
            finally:
                self.handling.discard(task)
                self._consumer.unlock(key)
        return None

    async def _process(self, message: Received) -> BaseException | None:
        if self.is_stopping:
            self._consumer.put_back(message)
            return None
        with self._consumer.processing(message) as span:
            try:
                handling: Any = self._handler(message)
                if not inspect.isawaitable(handling):
                    self.is_stopping = True
                    self._consumer.put_back(message)
                    return _not_asynchronous(self._handler)
                await handling
            except BaseException as failure:
                if self._is_end(failure):
                    self._consumer.put_back(message)
                    raise
                self._consumer.nack_nowait(message, reason=failure)
                fail_with(span, failure)
                return await self._failed(message, failure)
            self._consumer.ack_nowait(message)
        return None

    async def _failed(self, message: Received, failure: BaseException) -> BaseException | None:
        if not _is_failure(failure):
            return failure
        try:
            said = self._on_failure(message, failure)
            if inspect.isawaitable(said):
                await said
        except BaseException as surprise:
            if self._is_end(surprise):
                raise
            return surprise
        return None

    def _is_end(self, failure: BaseException) -> bool:
        """Whether an exception ends this task, and is not one of the application: a cancellation of
        process_by_key. Any other one is the application's, even of this task."""
        if isinstance(failure, GeneratorExit):  # the event loop is gone
            return True
        if not isinstance(failure, asyncio.CancelledError):
            return False
        caller = self._caller
        if self._is_cancelling or caller is None or caller.cancelling() > self._cancellations:
            return True
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()
        return False


def _is_failure(failure: BaseException) -> bool:
    """Whether an exception is about its message alone."""
    if isinstance(failure, BaseExceptionGroup):
        return all(map(_is_failure, failure.exceptions))
    return isinstance(failure, Exception | asyncio.CancelledError)


def _check_asynchronous(handler: object) -> None:
    """Raise TypeError if a handler is known not to return an awaitable: a function that is not
    `async def`, unless it says that it returns one."""
    if not callable(handler):
        raise TypeError(f"handler must be an async function, not {handler!r}")
    function: Any = inspect.unwrap(cast("Any", _bare(handler)))
    function = _bare(function)
    is_known = isinstance(function, FunctionType) and function.__name__ != "<lambda>"
    if is_known and not inspect.iscoroutinefunction(function):
        returned = str(function.__annotations__.get("return", ""))
        if not any(each in returned for each in ("Awaitable", "Coroutine", "Future", "Task")):
            raise _not_asynchronous(handler)


def _bare(handler: object) -> object:
    """The function of partials and methods."""
    while isinstance(handler, partial | MethodType):
        handler = handler.func if isinstance(handler, partial) else handler.__func__
    return handler


def _not_asynchronous(handler: object) -> TypeError:
    name = getattr(_bare(handler), "__qualname__", None) or type(handler).__qualname__
    return TypeError(
        f"handler {name} must be asynchronous: make it an `async def` function, which may await"
        " asyncio.to_thread(...) for what blocks"
    )


def _log_failure(message: Received, failure: BaseException) -> None:
    _log.warning("handler failed for message %s", message.id, exc_info=failure)
