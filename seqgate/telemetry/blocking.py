"""Spans for gRPC calls of those who wait in threads: what `calls` is for asyncio.

A call has a span below the current one, and none where there is no current one. A stream's ends in
the thread that reads it, when that has come to the end or gives it up: what is exported afterwards
has it.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind

from seqgate.telemetry.calls import address_of, end_call
from seqgate.telemetry.spans import rpc_attributes

_TRACER: Final = trace.get_tracer("seqgate.telemetry")


def traced_blocking_channel(channel: grpc.Channel, target: str = "") -> grpc.Channel:
    """A channel whose calls have spans.

    Args:
        channel: it is closed with this one.
        target: host:port, for server.address and server.port; empty: they are not said.
    """
    traced: Any = _TracedChannel(channel, target)
    return traced  # type: ignore[no-any-return]  # used like one


class _TracedChannel:
    def __init__(self, channel: grpc.Channel, target: str) -> None:
        self._channel: Any = channel
        self._attributes = address_of(target)

    def unary_unary(self, method: str, *more: Any, **named: Any) -> Callable[..., Any]:
        return self._answered(method, self._channel.unary_unary(method, *more, **named))

    def stream_unary(self, method: str, *more: Any, **named: Any) -> Callable[..., Any]:
        return self._answered(method, self._channel.stream_unary(method, *more, **named))

    def unary_stream(self, method: str, *more: Any, **named: Any) -> Callable[..., Any]:
        return self._streamed(method, self._channel.unary_stream(method, *more, **named))

    def stream_stream(self, method: str, *more: Any, **named: Any) -> Callable[..., Any]:
        return self._streamed(method, self._channel.stream_stream(method, *more, **named))

    def close(self) -> None:
        self._channel.close()

    def _answered(self, method: str, multi: Callable[..., Any]) -> Callable[..., Any]:
        def call(request: Any, timeout: float | None = None, **how: Any) -> Any:
            span, metadata = self._begun(method)
            try:
                answer = multi(request, timeout, metadata=metadata, **how)
            except BaseException as error:
                _end(span, error)
                raise
            end_call(span, grpc.StatusCode.OK, kind=SpanKind.CLIENT)
            return answer

        return call

    def _streamed(self, method: str, multi: Callable[..., Any]) -> Callable[..., Any]:
        def call(request: Any, timeout: float | None = None, **how: Any) -> "_Responses":
            span, metadata = self._begun(method)
            return _Responses(multi(request, timeout, metadata=metadata, **how), span)

        return call

    def _begun(self, method: str) -> tuple[Span, list[tuple[str, str]]]:
        """A call's span, and the metadata that carries it."""
        current = trace.get_current_span()
        if not current.get_span_context().is_valid:
            return current, []
        name = method.removeprefix("/")
        attributes = {**rpc_attributes(name), **self._attributes}
        span = _TRACER.start_span(name, kind=SpanKind.CLIENT, attributes=attributes)
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(span))
        return span, list(carrier.items())


class _Responses:
    """A stream, as far as it is read here."""

    def __init__(self, call: Any, span: Span) -> None:
        self._call = call
        self._span = span

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._call)
        except BaseException as error:
            _end(self._span, error)
            raise

    def cancel(self) -> None:
        self._call.cancel()
        if self._span.is_recording():
            end_call(self._span, grpc.StatusCode.CANCELLED, kind=SpanKind.CLIENT)


def _end(span: Span, error: BaseException) -> None:
    code, details = grpc.StatusCode.UNKNOWN, ""
    if isinstance(error, StopIteration):
        code = grpc.StatusCode.OK
    elif isinstance(error, grpc.Call):
        code, details = error.code(), error.details() or ""
    end_call(span, code, kind=SpanKind.CLIENT, reason=details)
