"""Spans for gRPC calls, on both sides.

    channel = traced_channel(aio.insecure_channel("localhost:7702"))
    server = aio.server(interceptors=[TracingServerInterceptor()])

Every call has a client span and a server span, named by its method, with the attributes of
OpenTelemetry's RPC conventions. The context travels in the metadata, in the format that
OTEL_PROPAGATORS sets, by default W3C's. Errors and cancellations end the span with their code. A
stream has one span for its whole life; its messages have spans of their own. gRPC's own services,
health and reflection, have none on either side.

Client spans are a hook of the channel, not an interceptor: seqgate/channels.py has the reason.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import grpc
from grpc import StatusCode, aio
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status
from opentelemetry.trace import StatusCode as SpanStatus

from seqgate.channels import Call, End, HookedBlockingChannel, HookedChannel, OnEnd
from seqgate.telemetry import names
from seqgate.telemetry.spans import rpc_attributes

_TRACER: Final = trace.get_tracer("seqgate.telemetry")

GRPCS_OWN: Final = "grpc."
"""The prefix of methods without spans, which probes call continuously."""

_SERVER_ERRORS: Final = frozenset(
    {
        StatusCode.UNKNOWN,
        StatusCode.DEADLINE_EXCEEDED,
        StatusCode.UNIMPLEMENTED,
        StatusCode.INTERNAL,
        StatusCode.UNAVAILABLE,
        StatusCode.DATA_LOSS,
    }
)
"""The codes that mark a server span as failed. All others are refusals, which the RPC conventions
do not count as errors of the server."""


def end_call(
    span: Span,
    code: StatusCode,
    *,
    kind: SpanKind,
    reason: str = "",
    expected: StatusCode = StatusCode.OK,
) -> None:
    if span.is_recording():
        span.set_attribute(names.RPC_RESPONSE_STATUS_CODE, code.name)
        failed = code in _SERVER_ERRORS if kind is SpanKind.SERVER else code is not StatusCode.OK
        if failed and code is not expected:
            span.set_attribute(names.ERROR_TYPE, code.name)
            span.set_status(Status(SpanStatus.ERROR, reason or None))
    span.end()


# ---- the client's side

_EXPECTED: ContextVar[StatusCode] = ContextVar("expected", default=StatusCode.OK)


@contextmanager
def expecting(code: StatusCode) -> Iterator[None]:
    """Calls that begin within the context may end with this code, which their caller plans for: it
    does not mark their client spans as failed."""
    token = _EXPECTED.set(code)
    try:
        yield
    finally:
        _EXPECTED.reset(token)


def traced_channel(channel: aio.Channel, target: str = "") -> aio.Channel:
    """A channel whose calls have spans. Closing it closes `channel`. `target` (host:port) sets
    server.address and server.port; empty: omit both."""
    return HookedChannel(channel, [Tracing(target)])


def traced_blocking_channel(channel: grpc.Channel, target: str = "") -> grpc.Channel:
    """The same for threads, except that a call without a current span has no span."""
    return HookedBlockingChannel(channel, [Tracing(target, roots=False)])


class Tracing:
    """A channel hook that gives each call a span, whose context travels in the metadata."""

    def __init__(self, target: str = "", *, roots: bool = True) -> None:
        """`target` (host:port) sets server.address and server.port; empty: omit both. `roots`:
        whether a call without a current span starts a trace."""
        self._address = _address(target)
        self._roots = roots

    def __call__(self, call: Call) -> OnEnd | None:
        if call.method.startswith(GRPCS_OWN):
            return None
        if not (self._roots or trace.get_current_span().get_span_context().is_valid):
            return None
        attributes = {**rpc_attributes(call.method), **self._address}
        span = _TRACER.start_span(call.method, kind=SpanKind.CLIENT, attributes=attributes)
        if not span.get_span_context().is_valid:
            return None
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(span))
        call.metadata = (*call.metadata, *carrier.items())
        return partial(_end_client, span, _EXPECTED.get()) if span.is_recording() else None


def _end_client(span: Span, expected: StatusCode, end: End) -> None:
    if end.error is not None:
        span.record_exception(end.error)
    end_call(span, end.code, kind=SpanKind.CLIENT, reason=end.details, expected=expected)


def _address(target: str) -> dict[str, str | int]:
    host, _, port = target.rpartition("/")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return {}
    return {names.SERVER_ADDRESS: host.strip("[]"), names.SERVER_PORT: int(port)}


# ---- the server's side


class TracingServerInterceptor(aio.ServerInterceptor):
    """Spans for a server's calls, whatever their handlers' style: unary, async generator, or read
    and write on the context. Within a handler the span is the current one."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.removeprefix("/")
        if handler is None or method.startswith(GRPCS_OWN):
            return handler
        return traced_handler(handler, method)


def traced_handler(handler: Any, name: str) -> Any:
    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    behaviour = next(filter(None, (getattr(handler, kind) for kind in kinds)))
    attributes = rpc_attributes(name)

    async def around(request: Any, context: Any) -> Any:
        carrier = {
            key: value
            for key, value in context.invocation_metadata() or ()
            if isinstance(value, str)
        }
        parent = propagate.extract(carrier)
        span = _TRACER.start_span(name, parent, kind=SpanKind.SERVER, attributes=attributes)
        if not span.get_span_context().is_valid:
            return await handled(request, context)
        token = otel_context.attach(trace.set_span_in_context(span, parent))
        code = StatusCode.UNKNOWN
        try:
            answer = await handled(request, context)
            code = code_set(context, StatusCode.OK)
        except asyncio.CancelledError:
            code = StatusCode.CANCELLED
            raise
        except aio.AbortError:
            code = code_set(context, StatusCode.UNKNOWN)
            raise
        except BaseException as error:
            span.record_exception(error)
            raise
        else:
            return answer
        finally:
            otel_context.detach(token)
            end_call(span, code, kind=SpanKind.SERVER, reason=context.details() or "")

    async def written(request: Any, context: Any) -> None:
        # Not a generator itself: grpc.aio abandons those when a call is cancelled.
        async with aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    handled = written if inspect.isasyncgenfunction(behaviour) else behaviour
    make: Any = _MAKERS[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(
        around,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def code_set(context: Any, default: StatusCode) -> StatusCode:
    """The code that a handler set, as a status or as a number."""
    code = context.code()
    if not code:
        return default
    return code if isinstance(code, StatusCode) else _CODES.get(code, default)


_CODES: Final = {code.value[0]: code for code in StatusCode}


_MAKERS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
