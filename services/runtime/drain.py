"""Graceful shutdown.

After SIGTERM a service reports NOT_SERVING, sends Draining on its streams, refuses new calls, waits
for the streams to close, lets unary calls finish, and exits with 0. grpc's own stop() would cut
long streams at the end of its grace period, without warning.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from grpc import aio

from seqgate.services.errors import Draining


class Drain:
    """The state of the shutdown, and the number of open streams."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self._streams = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def begin(self) -> None:
        self._begun.set()

    @property
    def begun(self) -> bool:
        return self._begun.is_set()

    @property
    def event(self) -> asyncio.Event:
        return self._begun

    async def wait(self) -> None:
        await self._begun.wait()

    def cut(self) -> None:
        """End the grace period: open streams must close now."""
        self._over.set()

    async def wait_over(self) -> None:
        await self._over.wait()

    def check(self) -> None:
        if self.begun:
            raise Draining("the service is shutting down", retry_after_s=0.5)

    @asynccontextmanager
    async def unless_begun(self) -> AsyncIterator[None]:
        """For what a stream waits for before it can be told to move.

        Raises:
            Draining: the drain began, and cut the wait short.
        """
        self.check()
        loop = asyncio.get_running_loop()
        is_waiting, waiting = True, asyncio.timeout(None)

        def cut(_: object) -> None:
            if is_waiting:
                waiting.reschedule(loop.time())

        told = asyncio.ensure_future(self._begun.wait())
        try:
            async with waiting:
                told.add_done_callback(cut)
                try:
                    yield
                finally:
                    is_waiting = False
                    told.cancel()
        except TimeoutError:
            if waiting.expired():
                self.check()
            raise

    @property
    def streams(self) -> int:
        return self._streams

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream as open while the context lasts."""
        self._streams += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._streams -= 1
            if self._streams == 0:
                self._empty.set()

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until all streams have closed. Returns False on timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def requests(self, context: Any, *over: asyncio.Event) -> AsyncIterator[Any]:
        """The messages of a stream, until the caller closes its side, the drain begins, or one of
        the events `over` is set."""
        loop = asyncio.get_running_loop()
        reading: asyncio.Timeout | None = None
        is_over = False

        def end(_: object) -> None:
            nonlocal is_over
            if reading is not None and not is_over:
                reading.reschedule(loop.time())
            is_over = True

        ends = [asyncio.ensure_future(each.wait()) for each in (self._begun, *over)]
        for each in ends:
            each.add_done_callback(end)
        try:
            while not is_over:
                # Read in this task: a task for each read costs more than a small request.
                try:
                    async with asyncio.timeout(None) as reading:
                        request = await context.read()
                except TimeoutError:
                    if reading is not None and reading.expired():
                        return
                    raise
                finally:
                    reading = None
                if request is aio.EOF:
                    return
                yield request
        finally:
            for each in ends:
                each.cancel()
