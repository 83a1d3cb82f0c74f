"""Spans of what is done beyond calls. Each is a context, in which its span is the current one.

    part      a step of what is being done; nothing, unless that is recorded
    database  the same, of a database's work
    shared    what is done for several messages at once: below the first, linked to the others
    asked     what a message on a stream asks for, by the context that it carries
    own       what nobody asked for: a trace of its own

A stream has one span for as long as it lasts. What a message on it asks for is not below that, or
one trace would grow without end: it is below what the message carries, or is not recorded.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Protocol

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
from seqgate.telemetry.propagation import TRACEPARENT, TRACESTATE, extract, inject

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


@contextmanager
def shared(
    name: str, contexts: Sequence[SpanContext], attributes: Attributes | None = None
) -> Iterator[Span]:
    """What is done for several messages at once.

    Args:
        name: of the span.
        contexts: of the messages that are followed; if there are none, nothing is recorded.
        attributes: of the span.
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
    span: Span = INVALID_SPAN
    context = span.get_span_context()
    if carried.traceparent:
        context = extract({TRACEPARENT: carried.traceparent, TRACESTATE: carried.tracestate})
    if context.trace_flags.sampled:
        span = _TRACER.start_span(name, below(context), kind=SpanKind.SERVER, attributes=attributes)
    with within(span):
        yield span


@contextmanager
def own(name: str, attributes: Attributes | None = None) -> Iterator[Span]:
    """What nobody asked for. Whether it is recorded, the process's sampler decides."""
    with within(_TRACER.start_span(name, Context(), attributes=attributes)) as span:
        yield span


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
        fail(span, str(getattr(failure, "reason", "")) or type(failure).__qualname__, str(failure))
        raise
    finally:
        otel_context.detach(token)
        span.end()


def fail(span: Span, reason: str, message: str = "") -> None:
    """What a span is about has failed."""
    span.set_attribute(names.ERROR_TYPE, reason)
    span.set_status(Status(StatusCode.ERROR, message or reason))


def below(context: SpanContext) -> Context:
    """To begin a span below one of which only the context is known."""
    return trace.set_span_in_context(NonRecordingSpan(context), Context())
