"""The time-out for the first message of a stream: services/runtime/silence.py."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio

from seqgate.client._status import error_of_call
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.interceptors import FIRST_MESSAGE_TIMEOUT_S, Interceptor, translated
from seqgate.services.runtime.refusal_log import RefusalLog
from tests.simulation.ground import Network, Process, installed, passes, run, virtual_loop
from tests.support.raw_channel import raw

PATH = "/seqgate.api.test.Service/"


async def read_all(_: Any, context: Any) -> None:
    while (message := await context.read()) is not aio.EOF:
        await context.write(message)


async def iterate(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


async def serve() -> None:
    server = aio.server(interceptors=[Interceptor([translated(RefusalLog())], Drain())])
    handlers = {
        "read_all": grpc.stream_stream_rpc_method_handler(read_all, bytes, bytes),
        "iterate": grpc.stream_stream_rpc_method_handler(iterate, bytes, bytes),
    }
    server.add_registered_method_handlers("seqgate.api.test.Service", handlers)
    server.add_insecure_port("[::]:7000")
    await server.start()
    await server.wait_for_termination()


@pytest.mark.parametrize("method", ["read_all", "iterate"])
def test_a_stream_without_a_first_message_times_out(method: str) -> None:
    assert FIRST_MESSAGE_TIMEOUT_S == 30

    async def main() -> None:
        with installed(Network(virtual_loop())):
            Process("server").start(serve)
            await passes(1)
            async with raw(aio.insecure_channel("server:7000")) as channel:
                began_s = asyncio.get_running_loop().time()
                call = channel.stream_stream(PATH + method)()
                with pytest.raises(aio.AioRpcError) as caught:
                    await call.read()
                took_s = asyncio.get_running_loop().time() - began_s
                assert FIRST_MESSAGE_TIMEOUT_S <= took_s < FIRST_MESSAGE_TIMEOUT_S + 1
                assert caught.value.code() is StatusCode.UNAVAILABLE
                assert error_of_call(caught.value).reason == "SILENT_STREAM"

    run(main, seed=1)


@pytest.mark.parametrize("method", ["read_all", "iterate"])
def test_a_stream_may_be_silent_after_its_first_message(method: str) -> None:

    async def main() -> None:
        with installed(Network(virtual_loop())):
            Process("server").start(serve)
            await passes(1)
            async with raw(aio.insecure_channel("server:7000")) as channel:
                call = channel.stream_stream(PATH + method)()
                for message in (b"1", b"2"):
                    await call.write(message)
                    assert await call.read() == message
                    await passes(10 * FIRST_MESSAGE_TIMEOUT_S)
                await call.done_writing()
                assert await call.read() is aio.EOF

    run(main, seed=1)
