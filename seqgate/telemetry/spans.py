"""Spans for work other than calls. Each function returns a context with its span as the current
one.

    part      a step of the current span; not recorded without one
    database  a step done by a database
    shared    work for several messages at once: a child of the first, linked to the others
    exchange  a request over a stream, on the requesting side
    asked     the work for one request on a stream, a child of the context in the request
    own       the process's own work: a new trace
    apart     no span; for starting work that outlives its caller, such as a stream
    joined    work for another process, a child of the context that it passed
    command   the work that a process was started for

A stream has one span for its whole life. Work for a request on it is not a child of that, or one
trace would grow without end: it is a child of the context in the request, or is not recorded.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, ParamSpec, Protocol, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
)
from opentelemetry.util.types import AttributeValue

from seqgate.telemetry import names
from seqgate.telemetry.propagation import FIELDS, TRACEPARENT, TRACESTATE, extract, inject

P = ParamSpec("P")
T = TypeVar("T")

_TRACER: Final = trace.get_tracer("seqgate")

LINKS_MAX: Final = 128
"""The most links of a span, as OpenTelemetry keeps by default."""

Attributes = Mapping[str, AttributeValue]


def followed(properties: Iterable[Mapping[str, str]]) -> list[SpanContext]:
    """The contexts of sampled messages, at most LINKS_MAX + 1: the parent and the links."""
    found = []
    for each in properties:
        context = extract(each)
        if context.trace_flags.sampled:
            found.append(context)
            if len(found) > LINKS_MAX:
                break
    return found


def carrier() -> dict[str, str]:
    """The current span's context, for the `trace` of a message on a stream, as
    `TraceContext(**carrier())`; empty: the span is not recorded."""
    into: dict[str, str] = {}
    span = trace.get_current_span()
    if span.is_recording():
        inject(span.get_span_context(), into)
    return into


NOTHING: Final = nullcontext(INVALID_SPAN)


def part(
    name: str, attributes: Attributes | None = None, kind: SpanKind = SpanKind.INTERNAL
) -> AbstractContextManager[Span]:
    """A step of the current span, if that is recorded."""
    if not trace.get_current_span().is_recording():
        return NOTHING
    return within(_TRACER.start_span(name, kind=kind, attributes=attributes))


def database(system: str, operation: str, target: str = "") -> AbstractContextManager[Span]:
    """A database operation, as a step of the current span. `system` is names.REDIS, names.SQLITE or
    names.POSTGRESQL; `operation` is the database's name for it, on `target`."""
    if not trace.get_current_span().is_recording():
        return NOTHING
    attributes = {names.DB_SYSTEM_NAME: system, names.DB_OPERATION_NAME: operation}
    return part(f"{operation} {target}".rstrip(), attributes, SpanKind.CLIENT)


def exchange(method: str) -> AbstractContextManager[Span]:
    """A request over a stream, on the requesting side, until its answer: a step of the current
    span. Put `carrier()` into the request. `method` is package.Service/Method."""
    return part(method, rpc_attributes(method), SpanKind.CLIENT)


def rpc_attributes(method: str) -> dict[str, str]:
    return {names.RPC_SYSTEM_NAME: names.GRPC, names.RPC_METHOD: method}


@contextmanager
def shared(
    name: str,
    contexts: Sequence[SpanContext],
    attributes: Attributes | None = None,
    *,
    began_ns: int | None = None,
) -> Iterator[Span]:
    """Work for several messages at once. Without `contexts`, those of sampled messages, nothing is
    recorded. `began_ns` is the start, in nanoseconds since 1970; None: now."""
    if not contexts:
        with within(INVALID_SPAN) as span:
            yield span
        return
    lead, *others = contexts
    span = _TRACER.start_span(
        name,
        below(lead),
        attributes=attributes,
        links=[Link(each) for each in others[:LINKS_MAX]],
        start_time=began_ns,
    )
    with within(span):
        yield span


class Carried(Protocol):
    """The context in a message on a stream: a TraceContext."""

    traceparent: str
    tracestate: str


def asked(
    name: str, carried: Carried, attributes: Attributes | None = None
) -> AbstractContextManager[Span]:
    """The work for one request on a stream, on the serving side. `carried` is the requesting side's
    `carrier()`; if it is empty, nothing is recorded."""
    if not carried.traceparent and trace.get_current_span() is INVALID_SPAN:
        return NOTHING
    return within(begun(name, carried, attributes))


def begun(name: str, carried: Carried, attributes: Attributes | None = None) -> Span:
    """Like `asked`, but the caller ends the span, which does not become the current one."""
    if not carried.traceparent:
        return INVALID_SPAN
    context = extract({TRACEPARENT: carried.traceparent, TRACESTATE: carried.tracestate})
    if not context.trace_flags.sampled:
        return INVALID_SPAN
    return _TRACER.start_span(name, below(context), kind=SpanKind.SERVER, attributes=attributes)


@contextmanager
def own(name: str, attributes: Attributes | None = None) -> Iterator[Span]:
    """The process's own work, as a new trace; the process's sampler decides on recording."""
    with within(_TRACER.start_span(name, Context(), attributes=attributes)) as span:
        yield span


def apart() -> AbstractContextManager[Span]:
    """No current span: for starting work that outlives its caller."""
    return within(INVALID_SPAN)


def handed_on() -> dict[str, str]:
    """The current span's context, for `joined` in another process. It is passed even if the span is
    not recorded: then `joined` records nothing either."""
    into: dict[str, str] = {}
    inject(trace.get_current_span().get_span_context(), into)
    return into


@contextmanager
def joined(
    name: str, handed: Mapping[str, str], attributes: Attributes | None = None
) -> Iterator[Span]:
    """Work for another process. `handed` is that process's `handed_on()`; if it is empty or not
    sampled, nothing is recorded."""
    context = extract(handed)
    span: Span = NonRecordingSpan(context)
    if context.trace_flags.sampled:
        span = _TRACER.start_span(name, below(context), attributes=attributes)
    with within(span):
        yield span


def environment() -> dict[str, str]:
    """The current span's context as environment variables for a child process, by W3C's
    environment carrier: TRACEPARENT, TRACESTATE."""
    return {name.upper(): value for name, value in handed_on().items()}


def command(name: str, variables: Mapping[str, str]) -> AbstractContextManager[Span]:
    """The work that a process was started for: a child of the context in its variables, which its
    parent made with `environment()`, or a new trace."""
    handed = {each: variables.get(each.upper(), "") for each in FIELDS}
    return joined(name, handed) if extract(handed).is_valid else own(name)


def threaded(work: Callable[P, T]) -> Callable[P, T]:
    """Wrap work for another thread: the current context of this thread is current there."""
    here = otel_context.get_current()

    def there(*args: P.args, **named: P.kwargs) -> T:
        token = otel_context.attach(here)
        try:
            return work(*args, **named)
        finally:
            otel_context.detach(token)

    return there


@contextmanager
def within(span: Span) -> Iterator[Span]:
    """Make a span the current one, and end it on exit, with the exception if there is one."""
    token = otel_context.attach(trace.set_span_in_context(span))
    try:
        yield span
    except asyncio.CancelledError:
        span.set_attribute(names.ERROR_TYPE, "CANCELLED")
        raise
    except Exception as failure:
        fail_with(span, failure)
        raise
    finally:
        otel_context.detach(token)
        span.end()


def fail(span: Span, reason: str, message: str = "") -> None:
    """Mark a span as failed. Keeps the message's first line."""
    span.set_attribute(names.ERROR_TYPE, reason)
    span.set_status(Status(StatusCode.ERROR, message.partition("\n")[0] or reason))


def fail_with(span: Span, failure: BaseException) -> None:
    """Mark a span as failed: by the exception's reason, or else its class name."""
    name = type(failure).__qualname__
    try:
        reason, said = str(getattr(failure, "reason", "")) or name, str(failure)
    except Exception:  # an application's exception cannot say what it is
        reason, said = name, ""
    fail(span, reason, said)


def below(context: SpanContext) -> Context:
    """A context for starting children of a span of which only the context is known."""
    return trace.set_span_in_context(NonRecordingSpan(context), Context())
