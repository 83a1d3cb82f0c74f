"""A TCP proxy on loopback, whose subclasses break connections."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Final, Self

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
"""One side of a connection."""

CHUNK_BYTES: Final = 64 * 1024
"""The most bytes read from a connection at a time."""

TURNS: Final = 3
"""Turns of the loop from accepting a connection until its task runs."""


class Forwarder:
    """Forwards connections to local ports. Subclasses override `there` and `back` to disturb
    bytes."""

    def __init__(self, *targets: int) -> None:
        """A connection goes to the first of these ports that accepts it."""
        self.targets = targets
        """The ports to forward to. A change applies to new connections."""
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        return len(self._tasks)

    async def there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward requests. The connection ends when this returns."""
        await forward(reader, writer)

    async def back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward answers. The connection ends when this returns."""
        await forward(reader, writer)

    def pumps(self, near: Ends, far: Ends) -> Sequence[Coroutine[object, object, None]]:
        """The two directions of a connection, which ends with the first of them."""
        return self.there(near[0], far[1]), self.back(far[0], near[1])

    async def opened(self) -> Ends:
        """Connect to the first target that accepts. Raises OSError if none does."""
        for target in self.targets[:-1]:
            with suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", target)
        return await asyncio.open_connection("127.0.0.1", self.targets[-1])

    def cut(self) -> int:
        """End all connections. Returns their number."""
        for task in self._tasks:
            task.cancel()
        return len(self._tasks)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        await close_listeners(self._server)
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)

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
        far = await self.opened()
        pumps = [asyncio.create_task(each) for each in self.pumps((reader, writer), far)]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            far[1].close()
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
            for pump in pumps:
                if not pump.cancelled():
                    pump.exception()


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while some := await reader.read(CHUNK_BYTES):
        writer.write(some)
        await writer.drain()


async def close_listeners(server: asyncio.Server) -> None:
    """Stop listening. A connection that is accepted already has its task then: asyncio would never
    close one that is accepted in the same turn of the loop as the server is closed."""
    loop = asyncio.get_running_loop()
    for each in server.sockets:
        loop.remove_reader(each.fileno())
    for _ in range(TURNS):
        await asyncio.sleep(0)
    server.close()
