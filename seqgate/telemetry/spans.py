"""Spans of what is done beyond calls. Each is a context, in which its span is the current one.

    part      a step of what is being done; nothing, unless that is recorded
    database  the same, of a database's work
    shared    what is done for several messages at once: below the first, linked to the others
    exchange  a call that goes over a stream of calls, on the side that asks
    asked     what a message on a stream asks for, by the context that it carries
    own       what nobody asked for: a trace of its own
    apart     what outlives whoever begins it, as a stream does: below nothing
    joined    what is done for another process, which has handed its context on
    command   what a process was started for

A stream has one span for as long as it lasts. What a message on it asks for is not below that, or
one trace would grow without end: it is below what the message carries, or is not recorded.
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
"""To how many messages one span is linked: as many links as OpenTelemetry keeps by default."""

Attributes = Mapping[str, AttributeValue]


def followed(properties: Iterable[Mapping[str, str]]) -> list[SpanContext]:
    """The contexts of those messages that are recorded, at most LINKS_MAX and one."""
    found = []
    for each in properties:
        context = extract(each)
        if context.trace_flags.sampled:
            found.append(context)
            if len(found) > LINKS_MAX:
                break
    return found


def carrier() -> dict[str, str]:
    """The context of the current span, for the `trace` of a message on a stream, as
    `TraceContext(**carrier())`; empty: it is not recorded."""
    into: dict[str, str] = {}
    span = trace.get_current_span()
    if span.is_recording():
        inject(span.get_span_context(), into)
    return into


_NOTHING: Final = nullcontext(INVALID_SPAN)


def part(
    name: str, attributes: Attributes | None = None, kind: SpanKind = SpanKind.INTERNAL
) -> AbstractContextManager[Span]:
    """A step of what is being done: below the current span, if that is recorded."""
    if not trace.get_current_span().is_recording():
        return _NOTHING
    return within(_TRACER.start_span(name, kind=kind, attributes=attributes))


def database(system: str, operation: str, target: str = "") -> AbstractContextManager[Span]:
    """A database's work, as a step of what is being done.

    Args:
        system: names.REDIS or names.SQLITE.
        operation: what the database calls it.
        target: on what; empty: that says nothing.
    """
    if not trace.get_current_span().is_recording():
        return _NOTHING
    attributes = {names.DB_SYSTEM_NAME: system, names.DB_OPERATION_NAME: operation}
    return part(f"{operation} {target}".rstrip(), attributes, SpanKind.CLIENT)


def exchange(method: str) -> AbstractContextManager[Span]:
    """A call that goes over a stream of calls, on the side that asks, until it is answered: a step
    of what is being done. Its `carrier()` is for the message.

    Args:
        method: package.Service/Method, as if it were called alone.
    """
    return part(method, rpc_attributes(method), SpanKind.CLIENT)


def rpc_attributes(method: str) -> dict[str, str]:
    """What each span of a call says of it."""
    return {names.RPC_SYSTEM_NAME: names.GRPC, names.RPC_METHOD: method}


@contextmanager
def shared(
    name: str,
    contexts: Sequence[SpanContext],
    attributes: Attributes | None = None,
    *,
    began_ns: int | None = None,
) -> Iterator[Span]:
    """What is done for several messages at once.

    Args:
        name: of the span.
        contexts: of the messages that are followed; if there are none, nothing is recorded.
        attributes: of the span.
        began_ns: when it was begun, in nanoseconds since 1970; None: now.
    """
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
    """A context as a message on a stream carries it: an entry.v1.TraceContext."""

    traceparent: str
    tracestate: str


@contextmanager
def asked(name: str, carried: Carried, attributes: Attributes | None = None) -> Iterator[Span]:
    """What a message on a stream asks for, on the side that is asked.

    Args:
        name: of the span.
        carried: made of the other side's `carrier()`; if it is empty, nothing is recorded.
        attributes: of the span.
    """
    with within(begun(name, carried, attributes)) as span:
        yield span


def begun(name: str, carried: Carried, attributes: Attributes | None = None) -> Span:
    """As `asked`, for what ends elsewhere: whoever calls this ends the span, which is not the
    current one."""
    if not carried.traceparent:
        return INVALID_SPAN
    context = extract({TRACEPARENT: carried.traceparent, TRACESTATE: carried.tracestate})
    if not context.trace_flags.sampled:
        return INVALID_SPAN
    return _TRACER.start_span(name, below(context), kind=SpanKind.SERVER, attributes=attributes)


@contextmanager
def own(name: str, attributes: Attributes | None = None) -> Iterator[Span]:
    """What nobody asked for. Whether it is recorded, the process's sampler decides."""
    with within(_TRACER.start_span(name, Context(), attributes=attributes)) as span:
        yield span


def apart() -> AbstractContextManager[Span]:
    """To begin what outlives whoever begins it: what is current is not above it."""
    return within(INVALID_SPAN)


def handed_on() -> dict[str, str]:
    """The context of the current span, for `joined` in another process. It is there as well if the
    span is not recorded: then nothing is there either."""
    into: dict[str, str] = {}
    inject(trace.get_current_span().get_span_context(), into)
    return into


@contextmanager
def joined(
    name: str, handed: Mapping[str, str], attributes: Attributes | None = None
) -> Iterator[Span]:
    """What is done for another process.

    Args:
        name: of the span.
        handed: made of the other side's `handed_on()`; what is not recorded there, or if it is
            empty, is not recorded here.
        attributes: of the span.
    """
    context = extract(handed)
    span: Span = NonRecordingSpan(context)
    if context.trace_flags.sampled:
        span = _TRACER.start_span(name, below(context), attributes=attributes)
    with within(span):
        yield span


def environment() -> dict[str, str]:
    """The context of the current span, for the variables of a process that this one starts, by the
    W3C's environment carrier: TRACEPARENT, TRACESTATE."""
    return {name.upper(): value for name, value in handed_on().items()}


def command(name: str, variables: Mapping[str, str]) -> AbstractContextManager[Span]:
    """What a process was started for: below what its variables carry, or a trace of its own.

    Args:
        name: of the span.
        variables: those of the process, as made of another one's `environment()`.
    """
    handed = {each: variables.get(each.upper(), "") for each in FIELDS}
    return joined(name, handed) if extract(handed).is_valid else own(name)


def threaded(work: Callable[P, T]) -> Callable[P, T]:
    """The same work for another thread: what is current here is current there."""
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
    """Make a span the current one, and end it on the way out, with what fails."""
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
    """What a span is about has failed. Of the message it has the first line."""
    span.set_attribute(names.ERROR_TYPE, reason)
    span.set_status(Status(StatusCode.ERROR, message.partition("\n")[0] or reason))


def fail_with(span: Span, failure: BaseException) -> None:
    """What a span is about has failed with this: by its reason, if it has one, or else its name."""
    reason = str(getattr(failure, "reason", "")) or type(failure).__qualname__
    fail(span, reason, str(failure))


def below(context: SpanContext) -> Context:
    """To begin a span below one of which only the context is known."""
    return trace.set_span_in_context(NonRecordingSpan(context), Context())
