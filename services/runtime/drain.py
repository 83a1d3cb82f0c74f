"""Going away in good order.

After SIGTERM a service reports NOT_SERVING, tells its streams in-band that it is draining, refuses
new calls, waits for the streams to move away, lets unary calls finish, and exits with 0.
grpc's own stop() would cut long streams at the end of its grace without a word.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from grpc import aio

from seqgate.services.errors import Draining


class Drain:
    """Whether this process is going away, and who is still there."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self._streams = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def begin(self) -> None:
        """Tell everyone who waits."""
        self._begun.set()

    @property
    def begun(self) -> bool:
        """Whether this process is going away."""
        return self._begun.is_set()

    @property
    def event(self) -> asyncio.Event:
        """Set when this process is going away."""
        return self._begun

    async def wait(self) -> None:
        """Return when this process is going away."""
        await self._begun.wait()

    def cut(self) -> None:
        """Tell the streams that are left that their time is over."""
        self._over.set()

    async def wait_over(self) -> None:
        """Return when the time to move away is over."""
        await self._over.wait()

    def check(self) -> None:
        """Raise Draining if new work comes too late."""
        if self.begun:
            raise Draining("the service is shutting down", retry_after_s=0.5)

    @property
    def streams(self) -> int:
        """How many streams are open."""
        return self._streams

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream while it lasts."""
        self._streams += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._streams -= 1
            if self._streams == 0:
                self._empty.set()

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until the last stream has gone; False when that takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def requests(self, context: Any, *over: asyncio.Event) -> AsyncIterator[Any]:
        """What a stream brings, until the caller closes its side, the drain begins, or one of these
        is set."""
        ends = [asyncio.ensure_future(each.wait()) for each in (self._begun, *over)]
        try:
            while not any(each.done() for each in ends):
                read = asyncio.ensure_future(context.read())
                await asyncio.wait({read, *ends}, return_when=asyncio.FIRST_COMPLETED)
                if not read.done():
                    read.cancel()
                    return
                if (request := read.result()) is aio.EOF:
                    return
                yield request
        finally:
            for each in ends:
                each.cancel()
