"""A connection to Redis on which requests arrive late, or a few bytes at a time.
(tests.support.wire loses answers.)

    caller ──▶ proxy ──▶ server          held, until the caller times out:
       x        └─ ─ ─ ▶ server          delivered afterwards

A late request is the hardest fault for a protocol: it takes effect after all later actions of its
sender.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress

from tools.stack.forwarder import CHUNK_BYTES, Ends, Forwarder

DROP_BYTES = 48
"""The piece size of slow transfers."""

SCRIPT = b"EVALSHA"
"""The command in every request that runs a script."""


class Proxy(Forwarder):
    """Forwards to a port on this machine. A connection carries one request at a time."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.slow = False
        """Transfer everything in small pieces."""
        self.held = 0
        """Requests held back, or delivered and not answered yet."""
        self.late = 0
        """Requests that were held back and have been answered."""
        self._marks: Sequence[bytes] = ()
        self._to_hold = 0
        self._before = 0
        self._delivery = asyncio.Event()
        self._answered = asyncio.Event()

    def hold(self, count: int, *marks: bytes, before: int = 0) -> None:
        """Hold back the next requests that contain a mark.

        Args:
            count: the number of requests.
            marks: any of these matches.
            before: once all are held, let this many scripts pass, the last one after the held
                requests; 0: wait for `deliver`.
        """
        self._to_hold, self._marks, self._before = count, marks, before

    async def deliver(self) -> None:
        """Deliver all held requests, and wait for their answers."""
        assert self.held
        self._delivery.set()
        self._delivery = asyncio.Event()
        while self.held:
            self._answered.clear()
            await self._answered.wait()

    def pumps(self, near: Ends, far: Ends) -> Sequence[Coroutine[object, object, None]]:
        """The two directions of a connection, which share an event for answers."""
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
                await self._delivery.wait()  # by then the caller has left
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
            with suppress(OSError):  # the caller of a late request has left
                await self._write(answer, writer)

    async def _write(self, some: bytes, writer: asyncio.StreamWriter) -> None:
        size = DROP_BYTES if self.slow else CHUNK_BYTES
        for i in range(0, len(some), size):
            writer.write(some[i : i + size])
            await writer.drain()
            if self.slow:
                await asyncio.sleep(0)
