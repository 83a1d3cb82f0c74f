"""Spans of messages that carry a trace: of their delivery to a consumer or a dead letter topic.

Each is a child of the span that published the message, and is recorded if that one is: the
publisher decides what is sampled. Each also links to that span, as OpenTelemetry's messaging
conventions ask. If OTEL_* ask for no spans, no message is inspected.
"""

from collections.abc import Mapping
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import Link, SpanKind
from opentelemetry.util.types import AttributeValue

from seqgate.telemetry import extract, names
from seqgate.telemetry.setup import NONE, exporter_asked_for
from seqgate.telemetry.spans import below, fail

_TRACER: Final = trace.get_tracer("seqgate.services.dispatcher")


class MessageSpans:
    """The spans of one operation on a topic's messages."""

    def __init__(
        self,
        operation: str,
        topic: str,
        more: Mapping[str, str],
    ) -> None:
        """`operation` is the first word of the spans' name; `more` are attributes of all spans."""
        self.is_on = exporter_asked_for("TRACES") != NONE
        self._name = f"{operation} {topic}"
        self._attributes: dict[str, AttributeValue] = {
            names.MESSAGING_SYSTEM: names.SEQGATE,
            names.MESSAGING_OPERATION_NAME: operation,
            names.MESSAGING_DESTINATION_NAME: topic,
            **more,
        }

    def record(
        self,
        properties: Mapping[str, str],
        began_ns: int,
        about: Mapping[str, str | int],
        failure: str = "",
    ) -> None:
        """Record the operation on a message, from `began_ns` (since 1970) until now, if the entry's
        properties carry a sampled trace. `failure` is the reason of a failure; empty: success."""
        context = extract(properties)
        if not context.trace_flags.sampled:
            return
        span = _TRACER.start_span(
            self._name,
            below(context),
            kind=SpanKind.INTERNAL,
            attributes={**self._attributes, **about},
            links=[Link(context)],
            start_time=began_ns,
        )
        if failure:
            fail(span, failure)
        span.end()
