"""Room for what is on its way to callers: so many bytes for all streams of a process.

    take ──▶ read, or taken from what is kept ──▶ sent ──▶ give back

Whoever waits for room has none, so that nobody waits for somebody who waits; and who does not read
what it is sent, while others wait for the room that it takes up, is cut off after a while. So every
wait ends.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Room:
    """See the module.

    Attributes:
        used_bytes, bytes_max: how much is taken, and how much may be. One share may have more than
            that if no other one has anything, since one entry always is sent.
        peak_bytes: the most that was taken.
    """

    def __init__(self, bytes_max: int, *, slow_s: float) -> None:
        """`slow_s` is for how long a caller may not read while others wait."""
        self.used_bytes = 0
        self.peak_bytes = 0
        self.bytes_max = bytes_max
        self._slow_s = slow_s
        self._waiting: deque[_Turn] = deque()
        self._writing: dict[Share, float] = {}

    def share(self, cut_off: Callable[[], None]) -> "Share":
        """What one stream takes. `cut_off` is called when its caller does not read."""
        return Share(self, cut_off)

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody waits, who has its turn first."""
        return bool(self._waiting)

    def fits(self, share: "Share", size_bytes: int) -> bool:
        """Whether a share may have so much more."""
        used_bytes = self.used_bytes
        return used_bytes + size_bytes <= self.bytes_max or used_bytes == share.size_bytes

    def count(self, size_bytes: int) -> None:
        """So much more is taken; less, if it is below zero."""
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    async def wait(self, share: "Share", size_bytes: int) -> None:
        """Wait until there is room, and take it."""
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
        """A caller is to read something from now on."""
        self._writing[share] = asyncio.get_running_loop().time()

    def end_writing(self, share: "Share") -> None:
        """It has, or is gone."""
        self._writing.pop(share, None)

    def serve(self) -> None:
        """Who waits has its turn, as far as there is room."""
        while self._waiting and self.fits(*self._waiting[0][:2]):
            turn = self._waiting.popleft()
            turn.share.add(turn.size_bytes)
            turn.come.set_result(None)

    def _cut_off(self, missing_bytes: int) -> None:
        """Somebody waits for too long: those go who have not read for as long, the slowest first,
        until as much is missing no more."""
        now_s = asyncio.get_running_loop().time()
        for share, since_s in list(self._writing.items()):
            if missing_bytes <= 0 or now_s - since_s < self._slow_s:
                return
            missing_bytes -= share.size_bytes
            del self._writing[share]
            share.cut_off()


class Share:
    """What one stream has of a Room.

    Attributes:
        size_bytes: how much.
        cut_off: ends the stream.
    """

    def __init__(self, room: Room, cut_off: Callable[[], None]) -> None:
        self.size_bytes = 0
        self.cut_off = cut_off
        self._room = room

    def try_take(self, size_bytes: int) -> bool:
        """Take so much if it is there and nobody waits; whether it was."""
        room = self._room
        if room.is_waited_for or not room.fits(self, size_bytes):
            return False
        self.add(size_bytes)
        return True

    async def take(self, size_bytes: int) -> None:
        """Take so much as soon as it is there. The share must have nothing."""
        assert not self.size_bytes
        if not self.try_take(size_bytes):
            await self._room.wait(self, size_bytes)

    def add(self, size_bytes: int) -> None:
        """So much more is taken, whether it is there or not."""
        self.size_bytes += size_bytes
        self._room.count(size_bytes)

    def give(self, size_bytes: int) -> None:
        """Give so much back."""
        self.size_bytes -= size_bytes
        self._room.count(-size_bytes)
        self._room.serve()

    def give_all(self) -> None:
        """Give everything back."""
        self.give(self.size_bytes)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The caller is to read something meanwhile."""
        self._room.begin_writing(self)
        try:
            yield
        finally:
            self._room.end_writing(self)


class _Turn(NamedTuple):
    """Somebody who waits for room."""

    share: Share
    size_bytes: int
    come: "asyncio.Future[None]"
