"""A failing connection: a TCP proxy that loses answers."""

import asyncio
from random import Random

from tools.stack.forwarder import CHUNK_BYTES, Forwarder


class Wire(Forwarder):
    """Forwards to a port on this machine, and loses answers when told to.

    `cut_next` and `swallow_next` count answers: bytes read from the far side at one time. By then
    the far side has received the request.
    """

    def __init__(self, target: int, *, random: Random | None = None, share: float = 0.0) -> None:
        """
        Args:
            target: the port to forward to.
            random: decides which answers are lost, a `share` of them.
        """
        super().__init__(target)
        self._random = random
        self.share = share
        self.cut_next = 0
        """The number of next answers to lose together with their connections."""
        self.swallow_next = 0
        """The number of next answers to lose on connections that stay open and silent."""
        self.lost = 0

    async def back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward answers, except the lost ones."""
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
