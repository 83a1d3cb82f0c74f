"""Locks by key: as many as there are keys that somebody holds one of, or waits for."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Locks(Generic[Key]):
    """See the module. A lock that is free is not nobody's: who was just woken does not hold it yet.
    So it is kept until nobody wants it, and not until nobody holds it."""

    def __init__(self) -> None:
        self._locks: dict[Key, asyncio.Lock] = {}
        self._users: Counter[Key] = Counter()

    @asynccontextmanager
    async def of(self, key: Key) -> AsyncIterator[None]:
        """Hold a key's; other keys' are free."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._locks[key]
