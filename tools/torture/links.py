"""A connection that somebody else breaks: one between every two parts.

as it is   everything travels
slow       everything travels late, and in small pieces
silent     nothing travels, and nobody is told; what was sent meanwhile arrives when it heals,
           or never
closed     nobody gets through
"""

import asyncio
from enum import StrEnum, auto
from typing import Final

from tools.stack.forwarder import CHUNK_BYTES, Ends, Forwarder

SLOW_BYTES: Final = 1_024
SLOW_S: Final = 0.02
"""How much travels at a time when it is slow, and how late."""


class Way(StrEnum):
    """What a link does; see the module."""

    OPEN = auto()
    SLOW = auto()
    SILENT = auto()
    CLOSED = auto()


class Link(Forwarder):
    """From one part to another one, or to whichever of several is there."""

    def __init__(self, name: str, *targets: int) -> None:
        super().__init__(*targets)
        self.name = name
        self.way = Way.OPEN
        self._healed = asyncio.Event()
        self._healed.set()

    def go(self, way: Way) -> None:
        """Break it, or heal it."""
        self.way = way
        if way is Way.SILENT:
            self._healed.clear()
        else:
            self._healed.set()
        if way is Way.CLOSED:
            self.cut()

    async def there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """See the module."""
        await self._carry(reader, writer)

    async def back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """See the module."""
        await self._carry(reader, writer)

    async def opened(self) -> Ends:
        """See the module."""
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
