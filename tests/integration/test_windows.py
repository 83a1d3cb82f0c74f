"""Unread messages of a stream stay within a window: services/runtime/windows.py."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio

from seqgate.services.runtime import channels, server
from seqgate.services.runtime.channels import peer_channel
from seqgate.services.runtime.config import ServiceConfig
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.server import grpc_server
from seqgate.services.runtime.windows import WINDOW_BYTES
from tests.support.raw_channel import RawChannel
from tests.support.waiting import eventually

SERVICE = "seqgate.api.test.Windows"
MESSAGE = bytes(32 * 1024)
WARM_MESSAGES = 2_000
"""After this many messages gRPC has estimated the connection's bandwidth, and would grow
windows."""

UNREAD_MAX = 2 * WINDOW_BYTES + 4 * len(MESSAGE)
"""Bytes that may be unread: the receiver's window, and the sender's buffers."""

POLLS = 50
"""A sender has stopped if its count has not changed in this many checks."""


class Ends:
    """Two ends of a connection; counts the bytes sent to an end that does not read."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.over = asyncio.Event()

    async def take(self, _: Any, context: Any) -> None:
        """Read the warm-up messages, and then nothing."""
        for _ in range(WARM_MESSAGES):
            await context.read()
        await context.write(b"enough")
        await self.over.wait()

    async def give(self, _: Any, context: Any) -> None:
        """Send without end."""
        while not self.over.is_set():
            await context.write(MESSAGE)
            self.sent_bytes += len(MESSAGE)

    def register(self, server: aio.Server) -> None:
        handlers = {
            "take": grpc.stream_stream_rpc_method_handler(self.take, bytes, bytes),
            "give": grpc.stream_stream_rpc_method_handler(self.give, bytes, bytes),
        }
        server.add_registered_method_handlers(SERVICE, handlers)

    async def stands_still(self) -> None:
        looks: list[int] = []

        def has_not_changed() -> bool:
            looks.append(self.sent_bytes)
            return len(looks) > POLLS and looks[-1] == looks[-POLLS]

        await eventually(has_not_changed, "the sender waits")


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Ends, RawChannel]]:
    ends = Ends()
    serving = grpc_server(
        ServiceConfig(drain_timeout_s=0.1, stop_grace_s=0.1),
        Drain(),
        register=ends.register,
        services=[SERVICE],
        checks={},
    )
    async with serving as port, peer_channel(f"127.0.0.1:{port}", keepalive_s=10) as channel:
        try:
            yield ends, channel
        finally:
            ends.over.set()


async def sent_to_a_server() -> int:
    """The bytes that a client can send to a server that does not read."""
    async with connected() as (ends, channel):
        call = channel.stream_stream(f"/{SERVICE}/take")()
        for _ in range(WARM_MESSAGES):
            await call.write(MESSAGE)
        assert await call.read() == b"enough"

        async def send() -> None:
            while True:
                await call.write(MESSAGE)
                ends.sent_bytes += len(MESSAGE)

        sending = asyncio.create_task(send())
        await ends.stands_still()
        sending.cancel()
        call.cancel()
    return ends.sent_bytes


async def sent_to_a_peer() -> int:
    """The bytes that a server can send to a caller that does not read."""
    async with connected() as (ends, channel):
        call = channel.stream_stream(f"/{SERVICE}/give")()
        for _ in range(WARM_MESSAGES):
            await call.read()
        await ends.stands_still()
        call.cancel()
    return ends.sent_bytes - WARM_MESSAGES * len(MESSAGE)


@pytest.mark.parametrize("sent", [sent_to_a_server, sent_to_a_peer])
async def test_unread_messages_stay_within_a_window(
    sent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert WINDOW_BYTES // 2 < await sent() < UNREAD_MAX
    for module in (server, channels):
        monkeypatch.setattr(module, "WINDOWS", ())
    assert await sent() > UNREAD_MAX, "windows that grow are seen"
