"""Hooks of channels: their changes to calls, and that each learns of a call's end exactly once."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio

from seqgate.channels import Call, End, Hook, HookedBlockingChannel, HookedChannel, OnEnd
from tests.support.raw_channel import RawChannel

SERVICE = "test.Hooks"


class Recorder:
    """A hook that records calls and their ends."""

    def __init__(self, name: str = "", log: list[Any] | None = None) -> None:
        self._name = name
        self.log: list[Any] = [] if log is None else log

    def __call__(self, call: Call) -> OnEnd:
        self.log.append((self._name, call.method, call.is_unary, call.timeout_s))

        def on_end(end: End) -> None:
            self.log.append((self._name, end.code, end.details))

        return on_end


def show(call: Call) -> None:
    """A hook that sets a timeout and adds metadata."""
    call.timeout_s = 20.0
    call.metadata = (*call.metadata, ("shown", "yes"))


def fail(_: Call) -> None:
    """A hook that refuses every call."""
    raise KeyError("no token")


def echo(request: bytes, context: grpc.ServicerContext) -> bytes:
    assert 0 < context.time_remaining() < 1800  # of 20 s, not of an hour
    shown = dict(context.invocation_metadata())
    return f"{shown['own']!s} {shown['shown']!s}".encode()


def count(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    yield b"1"
    yield b"2"


def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
    context.abort(StatusCode.NOT_FOUND, "nothing here")
    raise AssertionError("unreachable")


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "echo": grpc.unary_unary_rpc_method_handler(echo),
        "count": grpc.unary_stream_rpc_method_handler(count),
        "refuse": grpc.unary_unary_rpc_method_handler(refuse),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def for_asyncio(address: str, *hooks: Hook) -> RawChannel:
    return HookedChannel(aio.insecure_channel(address), hooks)


def for_threads(address: str, *hooks: Hook) -> grpc.Channel:
    return HookedBlockingChannel(grpc.insecure_channel(address), hooks)


async def test_hooks_change_calls_and_learn_how_they_end(address: str) -> None:
    recorder = Recorder()
    async with for_asyncio(address, show, recorder) as channel:
        unary = channel.unary_unary(f"/{SERVICE}/echo")
        call = unary(b"", timeout=3600, metadata=(("own", "mine"),))
        assert await call == b"mine yes"
        stream = channel.unary_stream(f"/{SERVICE}/count")(b"")
        assert [each async for each in stream] == [b"1", b"2"]
        with pytest.raises(aio.AioRpcError):
            await channel.unary_unary(f"/{SERVICE}/refuse")(b"")
    assert recorder.log == EXPECTED


def test_hooks_are_the_same_for_threads(address: str) -> None:
    recorder = Recorder()
    with for_threads(address, show, recorder) as channel:
        unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/echo")
        assert unary(b"", timeout=3600, metadata=(("own", "mine"),)) == b"mine yes"
        many: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
            f"/{SERVICE}/count"
        )
        stream = many(b"")
        assert list(stream) == [b"1", b"2"]
        stream.cancel()  # it has ended already
        unary = channel.unary_unary(f"/{SERVICE}/refuse")
        with pytest.raises(grpc.RpcError):
            unary(b"")
    assert recorder.log == EXPECTED


EXPECTED = [
    ("", f"{SERVICE}/echo", True, 20.0),
    ("", StatusCode.OK, ""),
    ("", f"{SERVICE}/count", False, 20.0),
    ("", StatusCode.OK, ""),
    ("", f"{SERVICE}/refuse", True, 20.0),
    ("", StatusCode.NOT_FOUND, "nothing here"),
]


@pytest.mark.parametrize("opened", [for_asyncio, for_threads])
async def test_a_hook_that_raises_ends_the_call_for_the_hooks_before_it(
    opened: Callable[..., Any],
) -> None:
    log: list[Any] = []
    ends: list[End] = []

    def kept(_: Call) -> OnEnd:
        return ends.append

    channel = opened("127.0.0.1:1", Recorder("first", log), kept, fail, Recorder("last", log))
    with pytest.raises(KeyError):
        channel.unary_unary(f"/{SERVICE}/echo")(b"")
    assert [each[0] for each in log] == ["first", "first"]
    assert [(end.code, type(end.error)) for end in ends] == [(StatusCode.UNKNOWN, KeyError)]
    if isinstance(channel, aio.Channel):
        await channel.close()
    else:
        channel.close()
