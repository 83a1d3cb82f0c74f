"""Spans of what takes messages further that carry a trace: to a consumer, or to another topic.

They are children of the span that published the message, and are recorded if that one is: whoever
publishes decides what is followed. They have a link to that span as well, as the messaging
conventions want it. Where OTEL_* ask for no spans, nothing is looked at.
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
    """The spans of one thing that is done with messages of a topic."""

    def __init__(
        self,
        operation: str,
        topic: str,
        more: Mapping[str, str],
    ) -> None:
        """
        Args:
            operation: what is done: the first word of the spans' name.
            topic: with which topic's messages.
            more: attributes that all spans have.
        """
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
        """Something was done with a message, from `began_ns` until now.

        Args:
            properties: of the message's entry; nothing is noted if they carry no sampled trace.
            began_ns: in nanoseconds since 1970.
            about: more attributes.
            failure: the reason for which it failed; empty: it did not.
        """
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
