"""A call always ends, whatever happens to its handler's work."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio

from seqgate.client._status import error_of_call
from seqgate.errors import UnavailableError
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.interceptors import Interceptor, translated
from seqgate.services.runtime.refusal_log import RefusalLog
from tests.simulation.ground import Network, Process, installed, passes, run, virtual_loop
from tests.support.raw_channel import raw

PATH = "/seqgate.api.test.Service/"


async def wait_for_what_is_cancelled(request: Any, context: Any) -> bytes:
    waiting = asyncio.ensure_future(asyncio.Event().wait())
    asyncio.get_running_loop().call_later(1, waiting.cancel)
    await waiting
    return b""


async def write_and_wait(request: Any, context: Any) -> AsyncIterator[bytes]:
    yield b"1"
    await wait_for_what_is_cancelled(request, context)


async def serve() -> None:
    server = aio.server(interceptors=[Interceptor([translated(RefusalLog())], Drain())])
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(wait_for_what_is_cancelled, bytes, bytes),
        "Stream": grpc.unary_stream_rpc_method_handler(write_and_wait, bytes, bytes),
    }
    server.add_registered_method_handlers("seqgate.api.test.Service", handlers)
    server.add_insecure_port("[::]:7000")
    await server.start()
    await server.wait_for_termination()


def test_a_handler_whose_work_was_cancelled_answers_its_caller() -> None:

    async def main() -> None:
        with installed(Network(virtual_loop())):
            Process("server").start(serve)
            await passes(1)
            async with raw(aio.insecure_channel("server:7000")) as channel:
                stream = channel.unary_stream(PATH + "Stream")(b"")
                assert await stream.read() == b"1"
                calls: list[Any] = [channel.unary_unary(PATH + "Unary")(b""), stream.read()]
                for call in calls:
                    with pytest.raises(aio.AioRpcError) as caught:
                        await asyncio.wait_for(call, 60)
                    assert caught.value.code() is StatusCode.UNAVAILABLE
                    error = error_of_call(caught.value)
                    assert isinstance(error, UnavailableError)
                    assert error.reason == "GIVEN_UP"

    run(main, seed=1)


def test_a_cancelled_handler_records_no_refusal() -> None:
    ends: list[str] = []

    async def wait(request: Any, context: Any) -> bytes:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        raise AssertionError

    async def main() -> None:
        async def serve_it() -> None:
            refusals = RefusalLog()
            server = aio.server(interceptors=[Interceptor([translated(refusals)], Drain())])
            handler = grpc.unary_unary_rpc_method_handler(wait, bytes, bytes)
            server.add_registered_method_handlers("seqgate.api.test.Service", {"Wait": handler})
            server.add_insecure_port("[::]:7000")
            await server.start()
            await passes(60)
            assert not refusals.counts
            await server.stop(None)

        server = Process("server")
        with installed(Network(virtual_loop())):
            server.start(serve_it)
            await passes(1)
            async with raw(aio.insecure_channel("server:7000")) as channel:
                with pytest.raises(aio.AioRpcError) as caught:
                    await channel.unary_unary(PATH + "Wait")(b"", timeout=1)
                assert caught.value.code() is StatusCode.DEADLINE_EXCEEDED
            await server.ended()
            assert server.failure is None
        assert ends == ["cancelled"]

    run(main, seed=1)
