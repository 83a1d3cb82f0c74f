"""The spans of messages that a client publishes, and the contexts that they add to entries."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from opentelemetry.trace import SpanKind

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import Compression, MessageId, Receipt, _tracing
from seqgate.client._chunking import LargeMessage
from seqgate.client._codec import (
    OutgoingMessage,
    decode_entry,
    encode_batch,
    encode_single,
    seal_message,
)
from seqgate.client._message import Message
from seqgate.client._tracing import Publishing, shared_context
from seqgate.errors import StaleSequenceIdError
from seqgate.telemetry import extract, names
from seqgate.types import Position
from tests.support.recorded import Recorded, links

TOPIC = "public/default/t"
MESSAGE_BYTES_MAX = 5 * 1024 * 1024
STORED = Receipt(MessageId(3, 4), 7, duplicate=False)
OTHER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


Recording = Callable[[Sampler], Recorded]


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    def begin(sampler: Sampler) -> Recorded:
        recorded = Recorded(sampler)
        monkeypatch.setattr(_tracing, "_TRACER", recorded.tracer)
        return recorded

    return begin


@pytest.fixture
def recorded(recording: Recording) -> Recorded:
    return recording(ParentBased(ALWAYS_ON))


def outgoing(sequence_id: int = 7, **properties: str) -> OutgoingMessage:
    return OutgoingMessage(sequence_id, b"payload", properties=properties)


def sent(spans: Publishing, *messages: OutgoingMessage, batch: bool) -> list[Message]:
    """The messages as a reader gets them."""
    spans.begin_batch(list(messages), "p")
    return read(list(messages), batch=batch)


def read(messages: Sequence[OutgoingMessage], *, batch: bool) -> list[Message]:
    context = shared_context(messages)
    if batch:
        entry = encode_batch(
            "p", messages, compression=Compression.LZ4, publish_time_ms=1, context=context
        )
    else:
        (message,) = messages
        entry = encode_single(
            "p", message, compression=Compression.LZ4, publish_time_ms=1, context=context
        )
    return decode_entry(TOPIC, pb.StoredEntry(metadata=entry.metadata, payload=entry.payload))


def names_span(message: Message, span: ReadableSpan) -> bool:
    context = extract(message.properties)
    return (context.trace_id, context.span_id) == (span.context.trace_id, span.context.span_id)


def test_a_message_sent_alone_has_a_span_until_its_receipt(recorded: Recorded) -> None:
    spans = Publishing(TOPIC, is_batching=False)
    message = outgoing(a="1")
    with recorded.tracer.start_as_current_span("application") as application:
        spans.begin(message, "p", MESSAGE_BYTES_MAX)
    (stored,) = sent(spans, message, batch=False)
    assert [span.name for span in recorded.spans] == ["application"]
    spans.end(message, STORED)
    send = recorded.one(f"send {TOPIC}")
    assert send.kind is SpanKind.PRODUCER
    assert send.parent == application.get_span_context()
    assert dict(send.attributes or {}) == {
        names.MESSAGING_SYSTEM: "seqgate",
        names.MESSAGING_OPERATION_NAME: "send",
        names.MESSAGING_OPERATION_TYPE: "send",
        names.MESSAGING_DESTINATION_NAME: TOPIC,
        names.PRODUCER_NAME: "p",
        names.SEQUENCE_ID: 7,
        names.MESSAGING_MESSAGE_BODY_SIZE: 7,
        names.MESSAGING_MESSAGE_ID: "3:4:-1",
    }
    assert names_span(stored, send)
    assert stored.properties["a"] == "1"


def test_a_failure_ends_the_span_with_its_reason(recorded: Recorded) -> None:
    spans = Publishing(TOPIC, is_batching=False)
    message = outgoing()
    spans.begin(message, "p", MESSAGE_BYTES_MAX)
    spans.end(message, StaleSequenceIdError("late", reason="STALE"))
    send = recorded.one(f"send {TOPIC}")
    assert not send.status.is_ok
    assert (send.attributes or {})[names.ERROR_TYPE] == "STALE"


def test_a_batch_has_one_span_whose_context_its_messages_share(recorded: Recorded) -> None:
    spans = Publishing(TOPIC, is_batching=True)
    messages = [outgoing(1, a="1"), outgoing(2), outgoing(3)]
    for message in messages:
        spans.begin(message, "p", MESSAGE_BYTES_MAX)
    stored = sent(spans, *messages, batch=True)
    for message in messages:
        assert not recorded.spans
        spans.end(message, STORED)
    (send,) = recorded.spans
    assert (send.name, send.kind, send.parent) == (f"send {TOPIC}", SpanKind.PRODUCER, None)
    assert (send.attributes or {})[names.MESSAGING_BATCH_MESSAGE_COUNT] == 3
    assert names.MESSAGING_MESSAGE_ID not in (send.attributes or {})
    assert all(names_span(message, send) for message in stored)


def test_a_message_of_a_sampled_span_has_its_own_context_in_a_batch(recorded: Recorded) -> None:
    spans = Publishing(TOPIC, is_batching=True)
    messages = [outgoing(1), outgoing(2), outgoing(3, traceparent=OTHER)]
    with recorded.tracer.start_as_current_span("application") as application:
        spans.begin(messages[0], "p", MESSAGE_BYTES_MAX)
    for message in messages[1:]:
        spans.begin(message, "p", MESSAGE_BYTES_MAX)
    stored = sent(spans, *messages, batch=True)
    for message in messages:
        spans.end(message, STORED)
    create, send = recorded.one(f"create {TOPIC}"), recorded.one(f"send {TOPIC}")
    assert create.kind is send.kind is SpanKind.PRODUCER
    assert (create.parent, send.parent) == (application.get_span_context(), None)
    assert names_span(stored[0], create)
    assert names_span(stored[1], send)
    assert stored[2].properties == {"traceparent": OTHER}
    other = extract({"traceparent": OTHER})
    assert links(send) == [
        (create.context.trace_id, create.context.span_id),
        (other.trace_id, other.span_id),
    ]


@pytest.mark.parametrize("batch", [True, False])
def test_a_batch_whose_messages_have_their_own_contexts_is_a_clients(
    recorded: Recorded,
    batch: bool,
) -> None:
    spans = Publishing(TOPIC, is_batching=True)
    message = outgoing()
    with recorded.tracer.start_as_current_span("application"):
        spans.begin(message, "p", MESSAGE_BYTES_MAX)
    (stored,) = sent(spans, message, batch=batch)
    spans.end(message, STORED)
    assert recorded.one(f"send {TOPIC}").kind is SpanKind.CLIENT
    assert names_span(stored, recorded.one(f"create {TOPIC}"))
    for span in recorded.spans[1:]:
        assert (span.attributes or {})[names.MESSAGING_MESSAGE_ID] == "3:4:-1"


def test_the_rest_of_a_batch_is_sent_again_with_its_context(recorded: Recorded) -> None:
    spans = Publishing(TOPIC, is_batching=True)
    messages = [outgoing(1), outgoing(2), outgoing(3)]
    sent(spans, *messages, batch=True)
    again = [*read(messages[1:], batch=True), *read(messages[2:], batch=False)]
    for message in messages:
        spans.end(message, STORED)
    (send,) = recorded.spans
    assert all(names_span(message, send) for message in again)


def test_the_existing_context_of_a_message_is_kept_and_linked(recorded: Recorded) -> None:
    spans = Publishing(TOPIC, is_batching=False)
    message = outgoing(traceparent=OTHER)
    spans.begin(message, "p", MESSAGE_BYTES_MAX)
    (stored,) = sent(spans, message, batch=False)
    spans.end(message, STORED)
    (send,) = recorded.spans
    other = extract({"traceparent": OTHER})
    assert stored.properties == {"traceparent": OTHER}
    assert (send.kind, links(send)) == (SpanKind.CLIENT, [(other.trace_id, other.span_id)])


def test_the_chunks_of_a_large_message_carry_one_context(recorded: Recorded) -> None:
    spans = Publishing(TOPIC, is_batching=False)
    message = outgoing(a="1")
    message.sealed = seal_message("p", message, compression=Compression.NONE, publish_time_ms=1)
    spans.begin(message, "p", MESSAGE_BYTES_MAX)
    large = LargeMessage(message, *message.sealed, chunk_bytes=4)
    contexts = set()
    for chunk_id in range(2):
        entry = pb.Entry()
        large.fill(entry, chunk_id)
        contexts.add(extract(entry.metadata.properties).span_id)
        large.stored(chunk_id, Position(3, chunk_id), duplicate=False)
    spans.end(message, STORED)
    (send,) = recorded.spans
    assert contexts == {send.context.span_id}
    assert [(event.name, dict(event.attributes or {})) for event in send.events] == [
        ("chunk", {names.CHUNK_ID: at, names.MESSAGING_MESSAGE_ID: f"3:{at}:-1"}) for at in range(2)
    ]


def test_no_context_is_added_above_the_size_limit(recorded: Recorded) -> None:
    many = {f"name-{at}": "" for at in range(128)}
    for full in (many, {"large": "é" * 63 * 1024}):
        alone = Publishing(TOPIC, is_batching=False)
        message = outgoing(1, **full)
        alone.begin(message, "p", MESSAGE_BYTES_MAX)
        assert sent(alone, message, batch=False)[0].properties == full
        batched = Publishing(TOPIC, is_batching=True)
        messages = [outgoing(1, **full), outgoing(2)]
        assert [each.properties for each in sent(batched, *messages, batch=True)] == [full, {}]


def test_without_recording_no_context_is_added(recording: Recording) -> None:
    recorded = recording(ParentBased(ALWAYS_OFF))
    for is_batching in (False, True):
        spans = Publishing(TOPIC, is_batching=is_batching)
        with recorded.tracer.start_as_current_span("not sampled"):
            message = outgoing(a="1")
            spans.begin(message, "p", MESSAGE_BYTES_MAX)
        (stored,) = sent(spans, message, batch=is_batching)
        assert stored.properties == {"a": "1"}
        assert message.span is message.batch is None
    assert not recorded.spans


class Untouchable:
    """A tracer that fails on any use."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("nobody records anything")


def test_a_process_without_a_provider_creates_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    assert not _tracing.is_traced()
    publishing = _tracing.Publishing("public/default/t", is_batching=False)
    batching = _tracing.Publishing("public/default/t", is_batching=True)
    consuming = _tracing.Consuming("public/default/t", "s")
    monkeypatch.setattr(_tracing, "_TRACER", Untouchable())
    message = OutgoingMessage(1, b"payload")
    publishing.begin(message, "p", 1024)
    batching.begin(message, "p", 1024)
    batching.begin_batch([message], "p")
    consuming.settling("ack", None, None)  # type: ignore[arg-type]
    assert not message.properties
    monkeypatch.setattr(_tracing, "_TRACER", trace.ProxyTracer("seqgate.client"))
    with consuming.processing(followed()):
        assert trace.get_current_span() is trace.INVALID_SPAN
    reading = _tracing.Reading("public/default/t")
    assert not reading.is_on
    monkeypatch.setattr(_tracing, "_TRACER", Untouchable())
    assert _tracing.is_traced()


def followed() -> Message:
    """A message with another process's context."""
    publishing = Publishing(TOPIC, is_batching=False)
    return sent(publishing, outgoing(traceparent=OTHER), batch=False)[0]
