"""A connection that fails: a TCP proxy that loses what the far side answers."""

import asyncio
from contextlib import suppress
from random import Random
from types import TracebackType
from typing import Self

CHUNK_BYTES = 64 * 1024


class Wire:
    """Forwards to a port on this machine, and loses answers when told to.

    `cut_next` and `swallow_next` count answers: bytes that came from the far side at one time. What
    was asked has arrived there by then.
    """

    def __init__(self, target: int, *, random: Random | None = None, share: float = 0.0) -> None:
        """
        Args:
            target: the port to forward to.
            random: decides which answers are lost, a `share` of them.
        """
        self._target = target
        self._random = random
        self.share = share
        self.cut_next = 0
        """So many answers are lost, each with its connection."""
        self.swallow_next = 0
        """So many answers are lost; their connections stay, and stay silent."""
        self.lost = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(OSError, asyncio.CancelledError):
                await self._join(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        pumps = [
            asyncio.create_task(self._there(reader, far_writer)),
            asyncio.create_task(self._back(far_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            far_writer.close()
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
            for pump in pumps:
                if not pump.cancelled():
                    pump.exception()

    async def _there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while asked := await reader.read(CHUNK_BYTES):
            writer.write(asked)
            await writer.drain()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while answer := await reader.read(CHUNK_BYTES):
            if self.cut_next > 0 or self._unlucky():
                self.cut_next = max(0, self.cut_next - 1)
                self.lost += 1
                return
            if self.swallow_next > 0:
                self.swallow_next -= 1
                self.lost += 1
                while await reader.read(CHUNK_BYTES):
                    pass
                return
            writer.write(answer)
            await writer.drain()

    def _unlucky(self) -> bool:
        return self._random is not None and self._random.random() < self.share
