"""Work that is done one after another by key, so that what waits for the same row does not use up
connections while it waits."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar

from seqgate.services.runtime.locks import Locks
from seqgate.services.runtime.waiting import Begun, Waiting

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


class Turns(Generic[Key]):
    """Bounded as `Waiting` is. Cancelling a caller drops its work, unless that has begun."""

    def __init__(self, what: str) -> None:
        self._waiting = Waiting(what)
        self._locks = Locks[Key]()
        self._running: set[asyncio.Task[None]] = set()

    async def take(self, key: Key, work: Callable[[], Awaitable[T]]) -> T:
        """Do work when all earlier work of the key is done.

        Raises:
            ServiceBusy: too much waits; nothing was done.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.begin(done)
        begun = Begun()

        def begin() -> Awaitable[T]:
            begun.begin()
            return work()

        running = asyncio.create_task(self._resolve(done, key, begin))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        with begun.dropping(running, done):
            return await asyncio.shield(done)

    async def _resolve(
        self, done: "asyncio.Future[Any]", key: Key, work: Callable[[], Awaitable[Any]]
    ) -> None:
        try:
            async with self._locks.of(key):
                result = await work()
        except Exception as error:  # raised in the waiting caller
            done.set_exception(error)
            done.exception()  # mark it as retrieved: the caller may be cancelled right now
        else:
            done.set_result(result)

    async def close(self, timeout_s: float) -> None:
        """Wait for the work that has begun, and for what waits."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)
