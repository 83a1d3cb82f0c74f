"""A limit on the bytes that a process holds for all of its callers together."""

import asyncio


class Budget:
    """Bytes held for callers. A request always fits while no other bytes are held, whatever its
    size: a small budget slows callers down and blocks none."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._used = 0
        self._freed = asyncio.Event()

    @property
    def used(self) -> int:
        """How many bytes are held."""
        return self._used

    @property
    def free(self) -> int:
        """How many more may be held."""
        return max(0, self.bytes_max - self._used)

    def fits(self, size_bytes: int) -> bool:
        """Whether so many more may be held now."""
        return not self._used or self._used + size_bytes <= self.bytes_max

    def take(self, size_bytes: int) -> None:
        """Hold so many more, whether they fit or not."""
        self._used += size_bytes

    def give(self, size_bytes: int) -> None:
        """Let go of so many."""
        self._used -= size_bytes
        assert self._used >= 0
        self._freed.set()
        self._freed = asyncio.Event()

    async def room(self, size_bytes: int = 1) -> None:
        """Return when so many more fit."""
        while not self.fits(size_bytes):
            await self._freed.wait()
