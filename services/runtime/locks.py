"""Locks by key: one per key that a task holds or waits for."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Locks(Generic[Key]):
    """A lock is kept as long as a task wants it, not only while a task holds it: a waiter that was
    just woken does not hold its lock yet."""

    def __init__(self) -> None:
        self._locks: dict[Key, asyncio.Lock] = {}
        self._users: Counter[Key] = Counter()

    @asynccontextmanager
    async def of(self, key: Key) -> AsyncIterator[None]:
        """Hold the lock of a key; other keys' locks are independent."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._locks[key]
