"""A limit on the bytes that a process holds for all of its callers."""

import asyncio


class Budget:
    """Bytes held for callers. A request of any size fits while no other bytes are held, so a small
    budget slows callers down but never blocks them."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._used = 0
        self._freed = asyncio.Event()

    @property
    def used(self) -> int:
        return self._used

    @property
    def free(self) -> int:
        """The bytes left below the limit; 0 if it is exceeded."""
        return max(0, self.bytes_max - self._used)

    def fits(self, size_bytes: int) -> bool:
        return not self._used or self._used + size_bytes <= self.bytes_max

    def take(self, size_bytes: int) -> None:
        """Hold more bytes, even beyond the limit."""
        self._used += size_bytes

    def give(self, size_bytes: int) -> None:
        self._used -= size_bytes
        assert self._used >= 0
        self._freed.set()
        self._freed = asyncio.Event()

    async def room(self, size_bytes: int = 1) -> None:
        """Wait until this many more bytes fit."""
        while not self.fits(size_bytes):
            await self._freed.wait()
