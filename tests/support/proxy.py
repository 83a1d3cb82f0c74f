"""A connection to Redis on which requests arrive late, or drop by drop. (On tests.support.wire
answers are lost.)

    caller ──▶ proxy ──▶ server          held, while the caller's patience runs out:
       x        └─ ─ ─ ▶ server          delivered, when nobody waits for it any more

A late request is the worst that a network does to a protocol: it takes effect behind everything
that its sender has done since.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress

from tools.stack.forwarder import CHUNK_BYTES, Ends, Forwarder

DROP_BYTES = 48
"""How much of a request or an answer travels at a time when it travels slowly."""

SCRIPT = b"EVALSHA"
"""What every request contains that runs a script."""


class Proxy(Forwarder):
    """Forwards to a port on this machine. A connection carries one request at a time."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.slow = False
        """Whether everything travels in small pieces."""
        self.held = 0
        """How many requests are held back, or are not answered yet after that."""
        self.late = 0
        """How many requests were held back, and answered."""
        self._marks: Sequence[bytes] = ()
        self._to_hold = 0
        self._before = 0
        self._delivery = asyncio.Event()
        self._answered = asyncio.Event()

    def hold(self, count: int, *marks: bytes, before: int = 0) -> None:
        """Hold back the next requests that contain one of these marks.

        Args:
            count: how many.
            marks: any of these.
            before: when all of them are held, let so many scripts pass, the last of these behind
                what is held; 0: wait for `deliver`.
        """
        self._to_hold, self._marks, self._before = count, marks, before

    async def deliver(self) -> None:
        """Have everything that is held back arrive, and return when it is answered."""
        assert self.held
        self._delivery.set()
        self._delivery = asyncio.Event()
        while self.held:
            self._answered.clear()
            await self._answered.wait()

    def pumps(self, near: Ends, far: Ends) -> Sequence[Coroutine[object, object, None]]:
        """A connection's two directions, which know of each other whether a request is answered."""
        answered = asyncio.Event()
        return (
            self._there(near[0], far[1], answered),
            self._back(far[0], near[1], answered),
        )

    async def _there(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answered: asyncio.Event
    ) -> None:
        while asked := await reader.read(CHUNK_BYTES):
            if self._to_hold and any(each in asked for each in self._marks):
                self._to_hold -= 1
                self.held += 1
                await self._delivery.wait()  # the caller has left when this is over
                answered.clear()
                try:
                    await self._write(asked, writer)
                    await answered.wait()
                    self.late += 1
                finally:
                    self.held -= 1
                    self._answered.set()
                return
            if SCRIPT in asked and self.held and not self._to_hold and self._before:
                self._before -= 1
                if not self._before:
                    await self.deliver()
            await self._write(asked, writer)

    async def _back(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answered: asyncio.Event
    ) -> None:
        while answer := await reader.read(CHUNK_BYTES):
            answered.set()
            with suppress(OSError):  # nobody waits for a late answer
                await self._write(answer, writer)

    async def _write(self, some: bytes, writer: asyncio.StreamWriter) -> None:
        size = DROP_BYTES if self.slow else CHUNK_BYTES
        for i in range(0, len(some), size):
            writer.write(some[i : i + size])
            await writer.drain()
            if self.slow:
                await asyncio.sleep(0)
