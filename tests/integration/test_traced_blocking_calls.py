"""Spans of blocking calls: each kind, and every way in which a call can end."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.experimental
import pytest
from grpc import StatusCode
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import SpanKind

from seqgate.telemetry import calls, extract, names, traced_blocking_channel
from tests.support.recorded import Recorded

SERVICE = "test.Calls"

KINDS = {
    "unary": "unary_unary",
    "streaming": "unary_stream",
    "collecting": "stream_unary",
    "echoing": "stream_stream",
    "refusing": "unary_unary",
    "breaking": "unary_stream",
}


class Handlers:
    """A handler for each kind; `seen` has the context received with each call."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def note(self, context: Any) -> None:
        self.seen.append(extract(dict(context.invocation_metadata())).span_id)

    def unary(self, request: bytes, context: Any) -> bytes:
        self.note(context)
        return request

    def streaming(self, request: bytes, context: Any) -> Iterator[bytes]:
        self.note(context)
        yield from [request] * 3

    def collecting(self, requests: Iterator[bytes], context: Any) -> bytes:
        self.note(context)
        return b"".join(requests)

    def echoing(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self.note(context)
        yield from requests

    def refusing(self, request: bytes, context: Any) -> bytes:
        self.note(context)
        context.abort(StatusCode.NOT_FOUND, "nothing here")
        raise AssertionError("unreachable")

    def breaking(self, request: bytes, context: Any) -> Iterator[bytes]:
        yield request
        context.abort(StatusCode.UNAVAILABLE, "going away")


@contextmanager
def calling(handlers: Handlers) -> Iterator[Any]:
    """A function that returns the callable of a method, by its name."""
    server = grpc.server(ThreadPoolExecutor(2))
    made = {
        name: getattr(grpc, f"{kind}_rpc_method_handler")(getattr(handlers, name))
        for name, kind in KINDS.items()
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, made)])
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    # As in the Spark data source: a stream is read in its reader's thread.
    options = [(grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)]
    with grpc.insecure_channel(target, options) as channel:
        traced = traced_blocking_channel(channel, target)
        yield lambda name: getattr(traced, KINDS[name])(f"/{SERVICE}/{name}")
    server.stop(None).wait()


def recording(monkeypatch: pytest.MonkeyPatch, sampler: Sampler) -> Recorded:
    recorded = Recorded(sampler)
    monkeypatch.setattr(calls, "_TRACER", recorded.tracer)
    return recorded


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return recording(monkeypatch, ALWAYS_ON)


def code(span: ReadableSpan) -> object:
    assert span.kind is SpanKind.CLIENT
    return (span.attributes or {})[names.RPC_RESPONSE_STATUS_CODE]


def test_each_kind_of_call_has_a_child_span_and_sends_its_context(
    recorded: Recorded,
) -> None:
    handlers = Handlers()
    with calling(handlers) as call, recorded.tracer.start_as_current_span("whole") as whole:
        assert call("unary")(b"a", timeout=20) == b"a"
        assert list(call("streaming")(b"a", timeout=20)) == [b"a"] * 3
        assert call("collecting")(iter([b"a", b"b"]), timeout=20) == b"ab"
        assert list(call("echoing")(iter([b"a"]), timeout=20)) == [b"a"]
    *called, _ = recorded.spans
    assert [each.name for each in called] == [f"{SERVICE}/{each}" for each in list(KINDS)[:4]]
    for span, seen in zip(called, handlers.seen, strict=True):
        assert code(span) == "OK"
        assert span.parent == whole.get_span_context()
        assert span.context.span_id == seen


def test_a_span_ends_with_the_code_of_its_call(recorded: Recorded) -> None:
    with calling(Handlers()) as call, recorded.tracer.start_as_current_span("whole"):
        with pytest.raises(grpc.RpcError):
            call("refusing")(b"", timeout=20)
        with pytest.raises(grpc.RpcError):
            list(call("breaking")(b"", timeout=20))
        given_up = call("streaming")(b"", timeout=20)
        next(given_up)
        given_up.cancel()
        given_up.cancel()
        read = call("streaming")(b"", timeout=20)
        list(read)
        read.cancel()
    *called, _ = recorded.spans
    assert [code(each) for each in called] == ["NOT_FOUND", "UNAVAILABLE", "CANCELLED", "OK"]
    assert called[0].status.description == "nothing here"


def test_a_call_without_a_current_span_has_none(recorded: Recorded) -> None:
    handlers = Handlers()
    with calling(handlers) as call:
        assert call("unary")(b"a", timeout=20) == b"a"
        assert list(call("streaming")(b"a", timeout=20)) == [b"a"] * 3
    assert recorded.spans == []
    assert handlers.seen == [0, 0]


def test_an_unsampled_context_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = recording(monkeypatch, ALWAYS_OFF)
    handlers = Handlers()
    with calling(handlers) as call, recorded.tracer.start_as_current_span("whole"):
        assert call("unary")(b"a", timeout=20) == b"a"
    assert recorded.spans == []
    assert handlers.seen != [0]
