"""Links between two processes, which faults break.

open       everything passes
slow       everything passes late, in small pieces
silent     nothing passes, without an error; bytes sent meanwhile arrive when the link heals, or
           never
closed     connections are refused
"""

import asyncio
from enum import StrEnum, auto
from typing import Final

from tools.stack.forwarder import CHUNK_BYTES, Ends, Forwarder

SLOW_BYTES: Final = 1_024
SLOW_S: Final = 0.02
"""The piece size and the delay of each piece on a slow link."""


class Way(StrEnum):
    OPEN = auto()
    SLOW = auto()
    SILENT = auto()
    CLOSED = auto()


class Link(Forwarder):
    """A link to one process, or to the first of several that listens."""

    def __init__(self, name: str, *targets: int) -> None:
        super().__init__(*targets)
        self.name = name
        self.way = Way.OPEN
        self._healed = asyncio.Event()
        self._healed.set()

    def go(self, way: Way) -> None:
        self.way = way
        if way is Way.SILENT:
            self._healed.clear()
        else:
            self._healed.set()
        if way is Way.CLOSED:
            self.cut()

    async def there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._carry(reader, writer)

    async def back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._carry(reader, writer)

    async def opened(self) -> Ends:
        if self.way is Way.CLOSED:
            raise ConnectionRefusedError(self.name)
        return await super().opened()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while some := await reader.read(CHUNK_BYTES):
            await self._healed.wait()
            if self.way is not Way.SLOW:
                writer.write(some)
                await writer.drain()
                continue
            for at in range(0, len(some), SLOW_BYTES):
                await asyncio.sleep(SLOW_S)
                writer.write(some[at : at + SLOW_BYTES])
                await writer.drain()
