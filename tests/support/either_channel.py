"""Runs one test body on the real grpc.aio over loopback, and on the simulated network.

@either
async def test_that(world: World) -> None:
    await world.serve({"Echo": unary(echo)})
    ...
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import grpc
import pytest
from grpc import aio

from tests.simulation.ground import Network, Process, installed, run, virtual_loop
from tests.support.raw_channel import RawChannel
from tests.support.waiting import eventually
from tools.stack.forwarder import close_listeners

SERVICE = "test.Service"

ROUND_ROBIN = [
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 2000),
]
"""The options of our own channels."""

KEEPALIVE = [
    ("grpc.keepalive_time_ms", 300),
    ("grpc.keepalive_timeout_ms", 300),
    ("grpc.http2.ping_timeout_ms", 300),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
]

WITHIN_S = 60.0


class World(Protocol):
    """The interface to a test body."""

    async def serve(
        self,
        handlers: Mapping[str, Any],
        *,
        options: Sequence[tuple[str, Any]] = (),
        interceptors: Sequence[Any] = (),
    ) -> None:
        """Serve methods of `SERVICE`."""

    def channel(
        self, options: Sequence[tuple[str, Any]] = (), interceptors: Sequence[Any] = ()
    ) -> RawChannel:
        """A channel to the server, which need not be running yet."""

    async def stop(self, grace: float | None) -> None:
        """Stop the server."""

    def break_connections(self) -> None:
        """Reset all connections."""

    def hold(self, *, held: bool) -> None:
        """Hold all traffic, or release it."""

    async def until(self, state: Callable[[], object]) -> None:
        """Wait until `state()` is true."""


class Simulated:
    """A World on the simulated network."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._process = Process("server")
        self._server: Any = None

    async def serve(
        self,
        handlers: Mapping[str, Any],
        *,
        options: Sequence[tuple[str, Any]] = (),
        interceptors: Sequence[Any] = (),
    ) -> None:
        async def start() -> None:
            self._server = _server(handlers, options, interceptors)
            assert self._server.add_insecure_port("[::]:7000") == 7000
            await self._server.start()

        await self._process.spawn(start)

    def channel(
        self, options: Sequence[tuple[str, Any]] = (), interceptors: Sequence[Any] = ()
    ) -> RawChannel:
        given = [*ROUND_ROBIN, *options]
        return aio.insecure_channel("server:7000", options=given, interceptors=interceptors)

    async def stop(self, grace: float | None) -> None:
        await self._process.spawn(lambda: self._server.stop(grace))

    def break_connections(self) -> None:
        self._network.reset("world", "server")

    def hold(self, *, held: bool) -> None:
        if held:
            self._network.cut("world", "server")
        else:
            self._network.heal("world", "server")

    async def until(self, state: Callable[[], object]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not state():
                await asyncio.sleep(0.01)


class Real:
    """A World on grpc.aio, through a proxy that can break and hold connections."""

    def __init__(self) -> None:
        self._server: Any = None
        self._proxy: Any = None
        self._target = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._channels: list[aio.Channel] = []

    async def __aenter__(self) -> Real:
        self._proxy = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._port = self._proxy.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        for channel in self._channels:
            await channel.close()
        if self._server is not None:
            await self._server.stop(None)
        await close_listeners(self._proxy)
        self.break_connections()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            with suppress(asyncio.CancelledError, OSError):
                await self._connect(reader, writer)
        finally:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers.append(far_writer)
        ways = [
            asyncio.ensure_future(self._forward(reader, far_writer)),
            asyncio.ensure_future(self._forward(far_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            far_writer.transport.abort()
            await asyncio.wait(ways)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                await self._open.wait()
                writer.write(data)
                await writer.drain()

    async def serve(
        self,
        handlers: Mapping[str, Any],
        *,
        options: Sequence[tuple[str, Any]] = (),
        interceptors: Sequence[Any] = (),
    ) -> None:
        self._server = _server(handlers, options, interceptors)
        self._target = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    def channel(
        self, options: Sequence[tuple[str, Any]] = (), interceptors: Sequence[Any] = ()
    ) -> RawChannel:
        given = [*ROUND_ROBIN, *options, ("grpc.use_local_subchannel_pool", 1)]
        channel = aio.insecure_channel(
            f"127.0.0.1:{self._port}", options=given, interceptors=interceptors
        )
        self._channels.append(channel)
        return channel

    async def stop(self, grace: float | None) -> None:
        await self._server.stop(grace)

    def break_connections(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.transport.abort()

    def hold(self, *, held: bool) -> None:
        if held:
            self._open.clear()
        else:
            self._open.set()

    async def until(self, state: Callable[[], object]) -> None:
        await eventually(state)


def _server(
    handlers: Mapping[str, Any], options: Sequence[tuple[str, Any]], interceptors: Sequence[Any]
) -> aio.Server:
    server = aio.server(interceptors=interceptors, options=[("grpc.so_reuseport", 0), *options])
    server.add_registered_method_handlers(SERVICE, dict(handlers))
    generic = grpc.method_handlers_generic_handler(SERVICE, dict(handlers))
    server.add_generic_rpc_handlers((generic,))
    return server


Body = Callable[[World], Awaitable[None]]


def either(body: Body) -> Any:
    """Make a test that runs a body on both."""

    @pytest.mark.parametrize("ground", ["grpc.aio", "simulated"])
    async def test(ground: str) -> None:
        if ground == "grpc.aio":
            async with Real() as world:
                async with asyncio.timeout(WITHIN_S):
                    await body(world)
            return

        async def simulated() -> None:
            network = Network(virtual_loop())
            with installed(network):
                await body(Simulated(network))
            assert virtual_loop().failures == []

        for seed in range(3):
            run(simulated, seed=seed, limit_s=600)

    test.__name__ = body.__name__
    test.__doc__ = inspect.getdoc(body)
    return test
