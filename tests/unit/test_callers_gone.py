"""Failed sends: those to disconnected callers are not logged, and defects of the service are."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc._cython import cygrpc
from structlog.testing import capture_logs

from seqgate.services.errors import Draining
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.interceptors import Interceptor, logged, translated
from seqgate.services.runtime.refusal_log import RefusalLog
from tests.support.raw_channel import RawChannel
from tests.support.waiting import eventually

METHOD = "/seqgate.api.test.Service/Stream"
BYTES_MAX = 1_000_000


class Serving:
    """A service that repeatedly writes as many bytes as requested."""

    def __init__(self) -> None:
        self.refusals = RefusalLog()
        self.ended = 0
        self.may_write = asyncio.Event()

    async def stream(self, request: bytes, context: Any) -> None:
        try:
            while True:
                await context.write(b"x" * int(request))
                await self.may_write.wait()
        finally:
            self.ended += 1

    async def __aenter__(self) -> "Serving":
        arounds = [logged(self.refusals), translated(self.refusals)]
        interceptor = Interceptor(arounds, Drain(), message_bytes_max=BYTES_MAX)
        limit = [("grpc.max_send_message_length", BYTES_MAX)]
        self._server = aio.server(interceptors=[interceptor], options=limit)
        handler = grpc.unary_stream_rpc_method_handler(self.stream, bytes, bytes)
        self._server.add_registered_method_handlers("seqgate.api.test.Service", {"Stream": handler})
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    def channel(self) -> RawChannel:
        return aio.insecure_channel(f"127.0.0.1:{self.port}")


async def test_a_disconnected_caller_is_no_failure() -> None:
    with capture_logs() as lines:
        async with Serving() as serving:
            for count in range(20):
                async with serving.channel() as channel:
                    assert await channel.unary_stream(METHOD)(b"100").read()
                    serving.may_write.set()
                await eventually(lambda: serving.ended > count, "the handler ends")  # noqa: B023
    assert not serving.refusals.counts
    assert [each for each in lines if each["log_level"] != "debug"] == []


class Gone:
    """The context of a call whose caller has disconnected: nothing is sent."""

    def set_code(self, code: grpc.StatusCode) -> None:
        pass

    def set_details(self, details: str) -> None:
        pass

    async def abort_with_status(self, status: grpc.Status) -> None:
        raise cygrpc.ExecuteBatchError("Failed")


@pytest.mark.parametrize("error", [cygrpc.ExecuteBatchError("Failed"), Draining("no")])
async def test_a_response_to_a_disconnected_caller_is_no_failure(
    error: Exception,
) -> None:
    refusals = RefusalLog()
    with pytest.raises(asyncio.CancelledError):
        async with translated(refusals)(METHOD, Gone()):  # type: ignore[arg-type]
            raise error
    assert not refusals.counts


async def test_a_response_above_the_limit_is_an_internal_failure() -> None:
    with capture_logs() as lines:
        async with Serving() as serving, serving.channel() as channel:
            call = channel.unary_stream(METHOD)(b"%d" % (BYTES_MAX + 1))
            with pytest.raises(aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            await eventually(lambda: serving.ended == 1, "the handler ends")
    assert serving.refusals.counts == {("INTERNAL", METHOD): 1}
    assert [each["of"] for each in lines if each["log_level"] == "error"] == ["ResponseTooLarge"]
