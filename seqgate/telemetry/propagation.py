"""Trace contexts in message properties (W3C Trace Context). They connect spans across logs and
queues, where no call leads from one process to the next."""

from collections.abc import Mapping, MutableMapping
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    NonRecordingSpan,
    SpanContext,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
FIELDS: Final = (TRACEPARENT, TRACESTATE)

_PROPAGATOR: Final = TraceContextTextMapPropagator()


def inject(context: SpanContext, into: MutableMapping[str, str]) -> None:
    """Write a valid context into properties; ignore an invalid one."""
    if context.is_valid:
        _PROPAGATOR.inject(into, set_span_in_context(NonRecordingSpan(context), Context()))


def extract(properties: Mapping[str, str]) -> SpanContext:
    """Read the context from properties. It is invalid if they have none, or a damaged one."""
    if TRACEPARENT not in properties:
        return INVALID_SPAN_CONTEXT
    found = _PROPAGATOR.extract(properties, Context())
    return get_current_span(found).get_span_context()


def trace_id_of(properties: Mapping[str, str]) -> str:
    """The trace id in properties, in hexadecimal digits; empty: none."""
    context = extract(properties)
    return f"{context.trace_id:032x}" if context.is_valid else ""
