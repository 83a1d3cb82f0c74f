"""Spans of calls: all four kinds, each style of handler, and every way in which a call can end."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from seqgate.telemetry import TracingServerInterceptor, names, traced_channel
from seqgate.telemetry import calls as traced_calls
from tests.support.raw_channel import raw
from tests.support.waiting import eventually

SERVICE = "test.Calls"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The spans recorded by the test's own provider."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traced_calls, "_TRACER", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


class Handlers:
    """A handler for each kind and style. `seen` has the span that was current in each."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.waiting = asyncio.Event()

    def note(self) -> None:
        self.seen.append(trace.get_current_span().get_span_context().span_id)

    async def unary(self, request: bytes, context: Any) -> bytes:
        self.note()
        return request

    async def generating(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(3):
            self.note()
            yield request

    async def collecting(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        self.note()
        return b"".join([request async for request in requests])

    async def echoing(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            self.note()
            yield request

    async def reading_and_writing(self, _: Any, context: Any) -> None:
        while (request := await context.read()) is not aio.EOF:
            self.note()
            await context.write(request)

    async def refusing(self, request: bytes, context: Any) -> bytes:
        await context.abort(StatusCode.FAILED_PRECONDITION, "not now")
        raise AssertionError("unreachable")

    async def saying_so(self, request: bytes, context: Any) -> bytes:
        context.set_code(StatusCode.NOT_FOUND)
        return request

    async def failing(self, request: bytes, context: Any) -> bytes:
        raise KeyError("surprise")

    async def waits(self, request: bytes, context: Any) -> bytes:
        self.waiting.set()
        never: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        return await never

    async def waits_in_a_stream(self, _: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        self.waiting.set()
        await asyncio.get_running_loop().create_future()


KINDS = {
    "unary": "unary_unary",
    "generating": "unary_stream",
    "collecting": "stream_unary",
    "echoing": "stream_stream",
    "reading_and_writing": "stream_stream",
    "refusing": "unary_unary",
    "saying_so": "unary_unary",
    "failing": "unary_unary",
    "waits": "unary_unary",
    "waits_in_a_stream": "stream_stream",
}


@asynccontextmanager
async def calling(handlers: Handlers) -> AsyncIterator[Any]:
    """A function that returns the callable of a method, by its name."""
    server = aio.server(interceptors=[TracingServerInterceptor()])
    made = {
        name: getattr(grpc, f"{kind}_rpc_method_handler")(getattr(handlers, name))
        for name, kind in KINDS.items()
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, made)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = f"127.0.0.1:{port}"
    async with traced_channel(aio.insecure_channel(target), target) as channel:
        yield lambda name: getattr(channel, KINDS[name])(f"/{SERVICE}/{name}")
    await server.stop(None)


async def pair(spans: InMemorySpanExporter, name: str) -> tuple[ReadableSpan, ReadableSpan]:
    """The client's and the server's span of the only call of a method."""
    full = f"{SERVICE}/{name}"

    def ended() -> list[ReadableSpan]:
        return [span for span in spans.get_finished_spans() if span.name == full]

    await eventually(lambda: len(ended()) == 2, f"both spans of {name} end")
    client, server = sorted(ended(), key=lambda span: span.kind is SpanKind.SERVER)
    assert (client.kind, server.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
    assert client.context is not None
    assert server.context is not None
    assert server.parent is not None
    assert server.context.trace_id == client.context.trace_id
    assert server.parent.span_id == client.context.span_id
    return client, server


def ended_with(span: ReadableSpan) -> tuple[object, object]:
    """The status code of the call, and the span's error type."""
    assert span.attributes is not None
    return (
        span.attributes[names.RPC_RESPONSE_STATUS_CODE],
        span.attributes.get(names.ERROR_TYPE),
    )


async def talk(call: Any, style: str) -> list[bytes]:
    """Send two messages on a stream, in either of the client's styles."""
    if style == "iterator":

        async def requests() -> AsyncIterator[bytes]:
            yield b"a"
            yield b"b"

        return [response async for response in call(requests())]
    stream = call()
    responses = []
    for request in (b"a", b"b"):
        await stream.write(request)
        responses.append(await stream.read())
    await stream.done_writing()
    assert await stream.read() is aio.EOF
    return responses


@pytest.mark.parametrize("style", ["iterator", "read and write"])
@pytest.mark.parametrize("name", ["echoing", "reading_and_writing"])
async def test_a_bidirectional_stream_has_a_span_at_each_end(
    spans: InMemorySpanExporter, name: str, style: str
) -> None:
    handlers = Handlers()
    async with calling(handlers) as method:
        assert await talk(method(name), style) == [b"a", b"b"]
        client, server = await pair(spans, name)
    assert ended_with(client) == ended_with(server) == ("OK", None)
    assert server.context is not None
    assert handlers.seen == [server.context.span_id] * 2


async def test_unary_calls_and_one_way_streams_have_a_span_at_each_end(
    spans: InMemorySpanExporter,
) -> None:
    handlers = Handlers()

    async def requests() -> AsyncIterator[bytes]:
        yield b"a"
        yield b"b"

    async with calling(handlers) as method:
        assert await method("unary")(b"x") == b"x"
        assert [each async for each in method("generating")(b"x")] == [b"x"] * 3
        assert await method("collecting")(requests()) == b"ab"
        for name in ("unary", "generating", "collecting"):
            client, server = await pair(spans, name)
            assert ended_with(client) == ended_with(server) == ("OK", None)
            assert client.attributes is not None
            assert client.attributes[names.RPC_METHOD] == f"{SERVICE}/{name}"
            assert client.attributes[names.RPC_SYSTEM_NAME] == "grpc"
            assert client.attributes[names.SERVER_ADDRESS] == "127.0.0.1"
            assert isinstance(client.attributes[names.SERVER_PORT], int)


@pytest.mark.parametrize(
    ("name", "code", "of_client", "of_server"),
    [
        ("refusing", "FAILED_PRECONDITION", "FAILED_PRECONDITION", None),
        ("saying_so", "NOT_FOUND", "NOT_FOUND", None),
        ("failing", "UNKNOWN", "UNKNOWN", "UNKNOWN"),
    ],
)
async def test_a_failed_call_ends_its_spans_with_its_code(
    spans: InMemorySpanExporter, name: str, code: str, of_client: str, of_server: str | None
) -> None:
    """A refusal is a failure of the call, not of the server."""
    async with calling(Handlers()) as method:
        with pytest.raises(aio.AioRpcError):
            await method(name)(b"x")
        client, server = await pair(spans, name)
    assert ended_with(client) == (code, of_client)
    assert ended_with(server) == (code, of_server)
    assert client.status.is_ok is False
    assert server.status.is_ok is (of_server is None)


@pytest.mark.parametrize("name", ["waits", "waits_in_a_stream"])
async def test_a_cancelled_call_ends_its_spans_as_cancelled(
    spans: InMemorySpanExporter, name: str
) -> None:
    handlers = Handlers()
    async with calling(handlers) as method:
        call = method(name)(b"x") if name == "waits" else method(name)()
        await handlers.waiting.wait()
        call.cancel()
        client, server = await pair(spans, name)
    assert ended_with(client) == ("CANCELLED", "CANCELLED")
    assert ended_with(server)[0] == "CANCELLED"


async def test_a_call_beyond_its_deadline_ends_its_spans_with_its_code(
    spans: InMemorySpanExporter,
) -> None:
    async with calling(Handlers()) as method:
        with pytest.raises(aio.AioRpcError):
            await method("waits")(b"x", timeout=0.05)
        client, server = await pair(spans, "waits")
    assert ended_with(client)[0] == "DEADLINE_EXCEEDED"
    assert ended_with(server)[0] in {"CANCELLED", "DEADLINE_EXCEEDED"}


async def test_a_call_without_an_sdk_sends_no_context() -> None:
    """Without an SDK the channel's own method is called."""
    seen: list[Any] = []

    class Channel:
        def unary_unary(self, method: str) -> Any:
            return lambda *request, metadata=None, **how: seen.append((request, metadata, how))

    inner: Any = Channel()
    raw(traced_channel(inner)).unary_unary("/a/b")(b"x", timeout=1.0)
    assert seen == [((b"x",), (), {"timeout": 1.0})]
