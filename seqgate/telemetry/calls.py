"""Spans for gRPC calls, on both sides, for asyncio.

    channel = traced_channel(aio.insecure_channel("localhost:7702"))
    server = aio.server(interceptors=[TracingServerInterceptor()])

Every call has a span of its kind, named by its method, with the attributes of the RPC conventions;
the context travels in the metadata, by the W3C's trace context, or as OTEL_PROPAGATORS says. A
call that ends with an error, or is cancelled, ends its span with that. A stream has one span for as
long as it lasts; what its messages are about has spans of its own.

On the client's side this stands around the channel and is none of gRPC's interceptors: those put a
queue between a stream and who writes to it, and a call that is cancelled in them never ends its
span (grpc.aio 1.85).
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Final

import grpc
from grpc import StatusCode, aio
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status
from opentelemetry.trace import StatusCode as SpanStatus

from seqgate.telemetry import names
from seqgate.telemetry.spans import rpc_attributes

_TRACER: Final = trace.get_tracer("seqgate.telemetry")

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
"""With these a server failed; with the others it said no, which is no error of its own (RPC
conventions)."""


def end_call(span: Span, code: StatusCode, *, kind: SpanKind, reason: str = "") -> None:
    """End a call's span with what the call ended with."""
    if span.is_recording():
        span.set_attribute(names.RPC_RESPONSE_STATUS_CODE, code.name)
        failed = code in _SERVER_ERRORS if kind is SpanKind.SERVER else code is not StatusCode.OK
        if failed:
            span.set_attribute(names.ERROR_TYPE, code.name)
            span.set_status(Status(SpanStatus.ERROR, reason or None))
    span.end()


# ---- the client's side


def traced_channel(channel: Any, target: str = "") -> aio.Channel:
    """A channel whose calls have spans.

    Args:
        channel: an aio.Channel, or what is used like one.
        target: host:port, for server.address and server.port; empty: they are not said.
    """
    traced: Any = TracedChannel(channel, target)
    return traced  # type: ignore[no-any-return]  # used like one


class TracedChannel:
    """See traced_channel. Used like an aio.Channel, by stubs."""

    def __init__(self, channel: Any, target: str = "") -> None:
        self._channel = channel
        self._attributes = address_of(target)

    def unary_unary(self, method: str, *more: Any, **named: Any) -> Callable[..., Any]:
        """See aio.Channel."""
        return self._made("unary_unary", method, more, named)

    def unary_stream(self, method: str, *more: Any, **named: Any) -> Callable[..., Any]:
        """See aio.Channel."""
        return self._made("unary_stream", method, more, named)

    def stream_unary(self, method: str, *more: Any, **named: Any) -> Callable[..., Any]:
        """See aio.Channel."""
        return self._made("stream_unary", method, more, named)

    def stream_stream(self, method: str, *more: Any, **named: Any) -> Callable[..., Any]:
        """See aio.Channel."""
        return self._made("stream_stream", method, more, named)

    def _made(self, kind: str, method: str, more: Any, named: Any) -> Callable[..., Any]:
        multi = getattr(self._channel, kind)(method, *more, **named)
        name = method.removeprefix("/")
        attributes = {**rpc_attributes(name), **self._attributes}

        def call(*request: Any, metadata: Any = None, **how: Any) -> Any:
            span = _TRACER.start_span(name, kind=SpanKind.CLIENT, attributes=attributes)
            if not span.get_span_context().is_valid:
                return multi(*request, metadata=metadata, **how)
            carrier: dict[str, str] = {}
            propagate.inject(carrier, trace.set_span_in_context(span))
            metadata = (*(metadata or ()), *carrier.items())
            try:
                made = multi(*request, metadata=metadata, **how)
            except BaseException as error:
                span.record_exception(error)
                end_call(span, StatusCode.UNKNOWN, kind=SpanKind.CLIENT)
                raise
            if span.is_recording():
                made.add_done_callback(lambda done: _end(span, done))
            return made

        return call

    async def close(self, grace: float | None = None) -> None:
        """See aio.Channel."""
        await self._channel.close(grace)

    async def __aenter__(self) -> "TracedChannel":
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


def address_of(target: str) -> dict[str, str | int]:
    """What the span of a call says of host:port."""
    host, _, port = target.rpartition("/")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return {}
    return {names.SERVER_ADDRESS: host.strip("[]"), names.SERVER_PORT: int(port)}


def _end(span: Span, call: Any) -> None:
    """A call is over."""
    end_call(
        span,
        _at_once(call.code()) or StatusCode.UNKNOWN,
        kind=SpanKind.CLIENT,
        reason=_at_once(call.details()) or "",
    )


def _at_once(asked: Coroutine[Any, Any, Any]) -> Any:
    """What a call that is over says of its end, which it does without waiting."""
    try:
        asked.send(None)
    except StopIteration as answer:
        return answer.value
    except (grpc.RpcError, asyncio.CancelledError, asyncio.InvalidStateError):
        return None
    asked.close()
    return None


# ---- the server's side


class TracingServerInterceptor(aio.ServerInterceptor):
    """Spans for a server's calls, whatever their handlers' style: unary, async generator, or read
    and write on the context. Within a handler the span is the current one."""

    def __init__(self, *, except_for: str = "/grpc.") -> None:
        """
        Args:
            except_for: how the methods begin that have none: health, reflection.
        """
        self._except_for = except_for

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(self._except_for):
            return handler
        return traced_handler(handler, method.removeprefix("/"))


def traced_handler(handler: Any, name: str) -> Any:
    """A handler whose calls have spans."""
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
            code = _code_of(context, StatusCode.OK)
        except asyncio.CancelledError:
            code = StatusCode.CANCELLED
            raise
        except aio.AbortError:
            code = _code_of(context, StatusCode.UNKNOWN)
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
        # Not a generator: grpc.aio abandons those when a call is cancelled.
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


def _code_of(context: Any, otherwise: StatusCode) -> StatusCode:
    """The code that a handler has set, as a status or as its number."""
    said = context.code()
    if not said:
        return otherwise
    if isinstance(said, StatusCode):
        return said
    return next((code for code in StatusCode if code.value[0] == said), otherwise)


_MAKERS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
