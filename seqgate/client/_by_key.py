"""Concurrent processing, in order within each key."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

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
OnFailure = Callable[[Received, Exception], None]


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
    messages of its key. An EXCLUSIVE subscription orders the whole topic, so one handler runs at a
    time. Messages of a batch have the key of their batch.

    On cancellation, no further messages are received. Running handlers may finish within
    `stop_timeout_s`, and their messages are acknowledged; those that do not are cancelled, and
    their messages are neither acknowledged nor refused: closing the consumer redelivers them.

    Args:
        concurrency: the most handlers that run at once, 1 to 100,000.
        on_failure: called with each message that failed, and the exception; None: log it. An
            exception from it ends the processing.
        stop_timeout_s: seconds, 0 or more; None: no limit.

    Raises:
        InvalidRequestError: the concurrency or the time-out is no number, or out of its bounds.
        SeqgateError: the error that ended the consumer.
    """
    concurrency = whole("concurrency", concurrency, 1, CONCURRENCY_MAX)
    stop_timeout_s = timeout("stop_timeout_s", stop_timeout_s)
    work = _Work(consumer, handler, on_failure or _log_failure)
    tasks = [asyncio.create_task(work.run()) for _ in range(concurrency)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        await _stop(work, tasks, stop_timeout_s)


async def _stop(work: "_Work", tasks: list[asyncio.Task[None]], timeout_s: float | None) -> None:
    """Let running handlers finish within the time-out; survives further cancellation."""
    for task in tasks:
        if task not in work.handling:
            task.cancel()
    cancelled: asyncio.CancelledError | None = None
    work.is_stopping = True
    ending = asyncio.ensure_future(asyncio.wait(tasks, timeout=timeout_s))
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as again:
            cancelled = again
            for task in tasks:
                task.cancel()
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            _log.debug("handler ended while the consumer stopped", exc_info=result)
    if cancelled is not None:
        raise cancelled


class _Work:
    def __init__(self, consumer: Consumer, handler: Handler, on_failure: OnFailure) -> None:
        self.handling: set[asyncio.Task[object] | None] = set()
        self.is_stopping = False
        self._consumer = consumer
        self._handler = handler
        self._on_failure = on_failure

    async def run(self) -> None:
        task = asyncio.current_task()
        while not self.is_stopping:
            try:
                message, key = await self._consumer.receive_and_lock()
            except ConsumerClosedError:
                return
            except CorruptMessageError as damage:
                _log.warning("damaged message: %s", damage.details)
                continue
            self.handling.add(task)
            try:
                await self._process(message)
            except ConsumerClosedError:
                return  # the message is delivered to another consumer
            finally:
                self.handling.discard(task)
                self._consumer.unlock(key)

    async def _process(self, message: Received) -> None:
        with self._consumer.processing(message) as span:
            try:
                await self._handler(message)
            except Exception as failure:
                fail_with(span, failure)
                self._consumer.nack_nowait(message, reason=failure)
                self._on_failure(message, failure)
            else:
                self._consumer.ack_nowait(message)


def _log_failure(message: Received, failure: Exception) -> None:
    _log.warning("handler failed for message %s", message.id, exc_info=failure)
