"""Locks by key: one for each key that a task holds or waits for."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Locks(Generic[Key]):
    """See the module. A free lock may still be in use: a waiter that was just woken does not hold
    it yet. So a lock is kept until no task wants it, not until no task holds it."""

    def __init__(self) -> None:
        self._locks: dict[Key, asyncio.Lock] = {}
        self._users: Counter[Key] = Counter()

    @asynccontextmanager
    async def of(self, key: Key) -> AsyncIterator[None]:
        """Hold the lock of a key; those of other keys stay free."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._locks[key]
