"""A name server on loopback that answers for every name with one address, which tests change."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

HEADER_BYTES: Final = 12
TYPE_A: Final = 1
ANSWER: Final = b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x00\x00\x04"
"""The name of the question, type A, class IN, 0 seconds to live, 4 bytes of address."""


class NameServer(asyncio.DatagramProtocol):
    def __init__(self, address: str) -> None:
        self.address = address
        self.questions = 0
        self._transport: Any = None

    @property
    def port(self) -> int:
        return int(self._transport.get_extra_info("sockname")[1])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, peer: Any) -> None:
        end = data.index(b"\0", HEADER_BYTES) + 5  # the name, its type and its class
        kind = int.from_bytes(data[end - 4 : end - 2])
        answers = ANSWER + socket.inet_aton(self.address) if kind == TYPE_A else b""
        counts = b"\0\1" + (b"\0\1" if answers else b"\0\0") + bytes(4)
        self._transport.sendto(
            data[:2] + b"\x81\x80" + counts + data[HEADER_BYTES:end] + answers, peer
        )
        self.questions += kind == TYPE_A


@asynccontextmanager
async def name_server(address: str) -> AsyncIterator[NameServer]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(
        lambda: NameServer(address), local_addr=("127.0.0.1", 0)
    )
    try:
        yield server
    finally:
        transport.close()
