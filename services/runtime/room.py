"""A limit on the bytes being sent to callers, shared by all streams of a process.

    take ──▶ read from the store or the cache ──▶ sent ──▶ release

A stream that waits for room holds none, so streams do not deadlock. The stream of a caller that
does not read while others wait is cut off after a time limit, so every wait ends.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Room:
    """The bytes taken by all streams, and the streams that wait.

    Attributes:
        used_bytes: the bytes taken.
        bytes_max: the limit. A share may exceed it while all others are empty, so that an entry of
            any size can be sent.
        peak_bytes: the most bytes ever taken at once.
    """

    def __init__(self, bytes_max: int, *, slow_s: float) -> None:
        """`slow_s` is how long a caller may not read while others wait."""
        self.used_bytes = 0
        self.peak_bytes = 0
        self.bytes_max = bytes_max
        self._slow_s = slow_s
        self._waiting: deque[_Turn] = deque()
        self._writing: dict[Share, float] = {}

    def share(self, cut_off: Callable[[], None]) -> "Share":
        return Share(self, cut_off)

    @property
    def is_waited_for(self) -> bool:
        """Whether another share waits; waiting shares go first."""
        return bool(self._waiting)

    def fits(self, share: "Share", size_bytes: int) -> bool:
        used_bytes = self.used_bytes
        return used_bytes + size_bytes <= self.bytes_max or used_bytes == share.size_bytes

    def count(self, size_bytes: int) -> None:
        """Add to the bytes taken; a negative number subtracts."""
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    async def wait(self, share: "Share", size_bytes: int) -> None:
        turn = _Turn(share, size_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        try:
            while not turn.come.done():
                await asyncio.wait({turn.come}, timeout=self._slow_s)
                if not turn.come.done():
                    self._cut_off(self.used_bytes + size_bytes - self.bytes_max)
        except BaseException:
            if turn.come.done():
                share.give(size_bytes)
            else:
                self._waiting.remove(turn)
                self.serve()
            raise

    def begin_writing(self, share: "Share") -> None:
        self._writing[share] = asyncio.get_running_loop().time()

    def end_writing(self, share: "Share") -> None:
        """Record that the write ended: the caller read, or disconnected."""
        self._writing.pop(share, None)

    def serve(self) -> None:
        """Give room to the waiting shares, in order, as far as it reaches."""
        while self._waiting and self.fits(*self._waiting[0][:2]):
            turn = self._waiting.popleft()
            turn.share.add(turn.size_bytes)
            turn.come.set_result(None)

    def _cut_off(self, missing_bytes: int) -> None:
        """Cut off callers that have not read for `slow_s`, slowest first, until enough is free."""
        now_s = asyncio.get_running_loop().time()
        for share, since_s in list(self._writing.items()):
            if missing_bytes <= 0 or now_s - since_s < self._slow_s:
                return
            missing_bytes -= share.size_bytes
            del self._writing[share]
            share.cut_off()


class Share:
    """The bytes that one stream has taken from a Room.

    Attributes:
        size_bytes: the number of these bytes.
        cut_off: ends the stream.
    """

    def __init__(self, room: Room, cut_off: Callable[[], None]) -> None:
        self.size_bytes = 0
        self.cut_off = cut_off
        self._room = room

    def try_take(self, size_bytes: int) -> bool:
        """Take bytes if they are free and no share waits. Returns whether they were taken."""
        room = self._room
        if room.is_waited_for or not room.fits(self, size_bytes):
            return False
        self.add(size_bytes)
        return True

    async def take(self, size_bytes: int) -> None:
        """Wait for free bytes and take them. The share must be empty."""
        assert not self.size_bytes
        if not self.try_take(size_bytes):
            await self._room.wait(self, size_bytes)

    def add(self, size_bytes: int) -> None:
        """Take bytes even if they are not free."""
        self.size_bytes += size_bytes
        self._room.count(size_bytes)

    def give(self, size_bytes: int) -> None:
        self.size_bytes -= size_bytes
        self._room.count(-size_bytes)
        self._room.serve()

    def give_all(self) -> None:
        self.give(self.size_bytes)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Mark a write to the caller as in progress while the context lasts."""
        self._room.begin_writing(self)
        try:
            yield
        finally:
            self._room.end_writing(self)


class _Turn(NamedTuple):
    """A share that waits for room."""

    share: Share
    size_bytes: int
    come: "asyncio.Future[None]"
