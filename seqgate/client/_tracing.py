"""Spans of publishing, processing and settling, by OpenTelemetry's messaging conventions.

    message sent alone, or large     send; its context is in the message's properties
    message sent in a batch          the batch's send; all messages of the batch share its context
       within a sampled span         create; its context is in the message's own properties, and
                                     the batch's send has a link to it
    message returned by a reader     receive, a child of the message's context, with a link to it
    message processed                process, a child of the message's context, with a link to it;
                                     a root if the message has none
    message settled                  settle, a child of the current span, such as process; a
                                     request that settles several carries the first one's context

A message that has a context when it is published keeps it: its send, or its batch's, links to it.
Without recording, no property is added. A producer checks once, when it is made, whether the
process has a tracer provider; if so, each message costs a look at the current span, or a call of
the sampler.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanContext, SpanKind

from seqgate.api.common.v1.common_pb2 import TraceContext
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.client._codec import OutgoingMessage
from seqgate.client._message import Message
from seqgate.client._outbox import Receipt
from seqgate.errors import SeqgateError
from seqgate.telemetry import extract, inject, names
from seqgate.telemetry.propagation import TRACEPARENT, TRACESTATE
from seqgate.telemetry.spans import below, fail_with, within

PROPERTIES_MAX: Final = 128
"""The most properties of a message."""

ROOM_BYTES: Final = 124 * 1024
"""The largest properties and keys of a message that gets a context, in bytes: an entry's metadata
may have 128 KiB, and a context has up to about 600 bytes."""

CONTEXT_BYTES_MAX: Final = 1024
"""The most bytes that a context adds to a message."""

_SETTLING: Final = frozenset({"acknowledge", "acknowledge_cumulative", "negative_acknowledge"})

_TRACER: Final = trace.get_tracer("seqgate.client")


@dataclass(slots=True)
class BatchSpan:
    """The span of a batch: `carrier` is its context, for the properties that its messages share;
    `left` counts its messages without an outcome."""

    span: Span
    carrier: Mapping[str, str]
    left: int
    is_alone: bool


def is_traced() -> bool:
    """Whether this process has a tracer provider by now: without one, nothing is ever recorded."""
    tracer, provider = _TRACER, trace.get_tracer_provider()
    return not (
        isinstance(tracer, trace.ProxyTracer) and isinstance(provider, trace.ProxyTracerProvider)
    )


class Publishing:
    def __init__(self, topic: str, *, is_batching: bool) -> None:
        self._is_on = is_traced()
        self._is_batching = is_batching
        self._topic = topic
        self._send = _attributes(topic, names.SEND)
        self._create = _attributes(topic, names.CREATE)

    def begin(self, message: OutgoingMessage, producer: str, message_bytes_max: int) -> None:
        """Start the span of a message that has its sequence id, if it gets one, and write its
        context."""
        if not self._is_on:
            return
        if self._is_batching:
            if not _is_sampled() or TRACEPARENT in message.properties:
                return
            span = _TRACER.start_span(
                f"{names.CREATE} {self._topic}", kind=SpanKind.PRODUCER, attributes=self._create
            )
        else:
            has_context = TRACEPARENT in message.properties
            span = _TRACER.start_span(
                f"{names.SEND} {self._topic}",
                kind=SpanKind.CLIENT if has_context else SpanKind.PRODUCER,
                attributes=self._send,
            )
        if not span.is_recording():
            return
        message.span = span
        _describe(span, message, producer)
        if TRACEPARENT in message.properties:
            _link(span, [extract(message.properties)])
        else:
            self._write(span, message, message_bytes_max)

    def _write(self, span: Span, message: OutgoingMessage, message_bytes_max: int) -> None:
        if self._is_batching and message.size_bytes + CONTEXT_BYTES_MAX > message_bytes_max:
            return  # in a batch, properties are part of the payload
        carrier: dict[str, str] = {}
        inject(span.get_span_context(), carrier)
        if not _has_room(message, carrier):
            return
        message.properties = {**message.properties, **carrier}
        if message.sealed is not None:
            message.sealed.metadata.properties.update(carrier)

    def begin_batch(self, messages: list[OutgoingMessage], producer: str) -> None:
        """Start the span of messages that are sent together, in one entry or one per key."""
        if not (self._is_on and self._is_batching):
            return
        all_have_one = all(_has_context(message) for message in messages)
        span = _TRACER.start_span(
            f"{names.SEND} {self._topic}",
            Context(),  # a root: the current span belongs to one message of many
            kind=SpanKind.CLIENT if all_have_one else SpanKind.PRODUCER,
            attributes=self._send,
        )
        if not span.is_recording():
            return
        is_alone = len(messages) == 1
        if is_alone:
            _describe(span, messages[0], producer)
        else:
            span.set_attribute(names.PRODUCER_NAME, producer)
            span.set_attribute(names.MESSAGING_BATCH_MESSAGE_COUNT, len(messages))
        own = [_context_of(message) for message in messages if _has_context(message)]
        _link(span, own)
        carrier: dict[str, str] = {}
        inject(span.get_span_context(), carrier)
        if own:
            carrier.pop(TRACESTATE, None)  # or messages with a bare traceparent inherit it
        if not all(_has_room(message, carrier) for message in messages):
            carrier = {}
        batch = BatchSpan(span, carrier, len(messages), is_alone)
        for message in messages:
            message.batch = batch

    def end(self, message: OutgoingMessage, outcome: Receipt | SeqgateError) -> None:
        span, batch = message.span, message.batch
        if span is not None:
            _record_outcome(span, outcome, is_alone=True)
            span.end()
            message.span = None
        if batch is not None:
            _record_outcome(batch.span, outcome, is_alone=batch.is_alone)
            batch.left -= 1
            if not batch.left:
                batch.span.end()


def shared_context(messages: Iterable[OutgoingMessage]) -> Mapping[str, str]:
    """The trace context that these messages share in their entry; empty: none."""
    batch = next(iter(messages)).batch
    return {} if batch is None else batch.carrier


class Reading:
    """The spans of one reader. `is_on`: whether any are recorded."""

    def __init__(self, topic: str) -> None:
        self.is_on = is_traced()
        self._topic = topic
        self._receive = _attributes(topic, names.RECEIVE)

    def record(self, message: Message, began_ns: int) -> None:
        """Record that the application got a message, for which it waited since `began_ns`, in
        nanoseconds since 1970. Only sampled messages have a span."""
        origin = extract(message.properties)
        if not origin.trace_flags.sampled:
            return
        span = _TRACER.start_span(
            f"{names.RECEIVE} {self._topic}",
            below(origin),
            kind=SpanKind.CLIENT,
            attributes=self._receive,
            links=[trace.Link(origin)],
            start_time=began_ns,
        )
        if span.is_recording():
            _describe_received(span, message)
        span.end()


class Consuming:
    """The spans of one consumer. `is_on`: whether any are recorded."""

    def __init__(self, topic: str, subscription: str) -> None:
        more = {names.MESSAGING_DESTINATION_SUBSCRIPTION_NAME: subscription}
        self.is_on = is_traced()
        self._topic = topic
        self._process = {**_attributes(topic, names.PROCESS), **more}
        self._settle = {**_attributes(topic, names.SETTLE), **more}
        self._settling: dict[asyncio.Future[None], SpanContext] = {}

    @property
    def are_settling(self) -> bool:
        """Whether unanswered settlements have spans."""
        return bool(self._settling)

    def carry(self, request: pb.ConsumeRequest, waiters: Callable[[int], Iterable[object]]) -> None:
        """Write a context into a request that settles messages: the first one with a span.
        `waiters` returns the futures of a request, by its id."""
        kind = request.WhichOneof("request")
        if kind not in _SETTLING:
            return
        for waiter in waiters(getattr(request, kind).request_id):
            context = self._settling.get(cast("asyncio.Future[None]", waiter))
            if context is not None:
                carrier: dict[str, str] = {}
                inject(context, carrier)
                request.trace.CopyFrom(TraceContext(**carrier))
                return

    @contextmanager
    def processing(self, message: Message) -> Iterator[Span]:
        """See Consumer.processing."""
        if not is_traced():  # otherwise the message's own context would become current
            yield INVALID_SPAN
            return
        origin = extract(message.properties)
        span = _TRACER.start_span(
            f"{names.PROCESS} {self._topic}",
            below(origin) if origin.is_valid else Context(),
            kind=SpanKind.CONSUMER,
            attributes=self._process,
            links=[trace.Link(origin)] if origin.is_valid else None,
        )
        if not span.get_span_context().is_valid:
            yield span
            return
        if span.is_recording():
            _describe_received(span, message)
        with within(span):
            yield span

    def settling(self, name: str, message: Message | None, answer: "asyncio.Future[None]") -> None:
        """Start the span of a settlement (names.ACK or names.NACK), which its answer ends."""
        if not self.is_on:
            return
        span = _TRACER.start_span(
            f"{name} {self._topic}", kind=SpanKind.CLIENT, attributes=self._settle
        )
        if not span.is_recording():
            return
        span.set_attribute(names.MESSAGING_OPERATION_NAME, name)
        if message is not None:
            span.set_attribute(names.MESSAGING_MESSAGE_ID, str(message.id))
            _link(span, [extract(message.properties)])
        self._settling[answer] = span.get_span_context()
        answer.add_done_callback(lambda answered: self._settled(span, answered))

    def _settled(self, span: Span, answered: "asyncio.Future[None]") -> None:
        del self._settling[answered]
        _end_settling(span, answered)


def _end_settling(span: Span, answered: "asyncio.Future[None]") -> None:
    if answered.cancelled():
        span.set_attribute(names.ERROR_TYPE, "CANCELLED")
    elif (failure := answered.exception()) is not None:
        fail_with(span, failure)
    span.end()


def _attributes(topic: str, operation: str) -> dict[str, str]:
    return {
        names.MESSAGING_SYSTEM: names.SEQGATE,
        names.MESSAGING_OPERATION_NAME: operation,
        names.MESSAGING_OPERATION_TYPE: operation,
        names.MESSAGING_DESTINATION_NAME: topic,
    }


def _describe(span: Span, message: OutgoingMessage, producer: str) -> None:
    span.set_attributes(
        {
            names.PRODUCER_NAME: producer,
            names.SEQUENCE_ID: message.sequence_id,
            names.MESSAGING_MESSAGE_BODY_SIZE: len(message.payload),
        }
    )


def _describe_received(span: Span, message: Message) -> None:
    span.set_attributes(
        {
            names.MESSAGING_MESSAGE_ID: str(message.id),
            names.MESSAGING_MESSAGE_BODY_SIZE: len(message.payload),
            names.PRODUCER_NAME: message.producer_name,
            names.SEQUENCE_ID: message.sequence_id,
        }
    )


def _record_outcome(span: Span, outcome: Receipt | SeqgateError, *, is_alone: bool) -> None:
    if not isinstance(outcome, Receipt):
        fail_with(span, outcome)
    elif is_alone:
        span.set_attribute(names.MESSAGING_MESSAGE_ID, str(outcome.message_id))


def _is_sampled() -> bool:
    current = trace.get_current_span()
    return current is not INVALID_SPAN and current.get_span_context().trace_flags.sampled


def _has_context(message: OutgoingMessage) -> bool:
    return message.span is not None or TRACEPARENT in message.properties


def _context_of(message: OutgoingMessage) -> SpanContext:
    if message.span is None:
        return extract(message.properties)
    context: SpanContext = message.span.get_span_context()
    return context


def _link(span: Span, contexts: Iterable[SpanContext]) -> None:
    for context in contexts:
        if context.is_valid:
            span.add_link(context)


def _has_room(message: OutgoingMessage, carrier: Mapping[str, str]) -> bool:
    properties = message.properties
    if len(properties.keys() | carrier.keys()) > PROPERTIES_MAX:
        return False
    keys = 2 * (len(message.key or "") + len(message.ordering_key or ""))
    about = sum(len(name) + len(value) for name, value in properties.items()) + keys
    if about * 4 < ROOM_BYTES:  # a character has at most 4 bytes in UTF-8
        return True
    encoded = sum(
        len(name.encode()) + len(value.encode()) + 8 for name, value in properties.items()
    )
    return encoded + 2 * keys < ROOM_BYTES
