"""The spans of a consumer: processing of messages, and their settlement."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from opentelemetry.trace import SpanKind

from seqgate.client import Client, Received, RetryPolicy, _tracing, connect, process_by_key
from seqgate.errors import StaleTokenError
from seqgate.telemetry import extract, names
from tests.support.fake_dispatcher import FakeDispatcher, serving_fake
from tests.support.recorded import Recorded, links
from tests.support.waiting import WITHIN_S

TOPIC = "public/default/orders"
ORIGIN = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
UNSAMPLED = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}


@pytest.fixture
async def fake() -> AsyncIterator[FakeDispatcher]:
    async with serving_fake() as fake:
        yield fake


@pytest.fixture
async def client(fake: FakeDispatcher) -> AsyncIterator[Client]:
    async with connect("127.0.0.1:1", fake.address) as client:
        yield client


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded(ParentBased(ALWAYS_ON))
    monkeypatch.setattr(_tracing, "_TRACER", recorded.tracer)
    return recorded


async def test_a_message_is_processed_and_settled_in_one_trace(
    client: Client, fake: FakeDispatcher, recorded: Recorded
) -> None:
    fake.publish(b"four", properties=ORIGIN)
    async with client.consumer(TOPIC, "s") as consumer:
        message = await consumer.receive(timeout_s=30)
        with (
            recorded.tracer.start_as_current_span("application"),
            consumer.processing(message) as current,
        ):
            await consumer.ack(message)
            assert current.is_recording()
    process, ack = recorded.one(f"process {TOPIC}"), recorded.one(f"ack {TOPIC}")
    origin = extract(ORIGIN)
    assert process.kind is SpanKind.CONSUMER
    assert process.parent is not None
    assert (process.parent.trace_id, process.parent.span_id) == (origin.trace_id, origin.span_id)
    assert links(process) == links(ack) == [(origin.trace_id, origin.span_id)]
    assert (ack.kind, ack.parent) == (SpanKind.CLIENT, process.context)
    common = {
        names.MESSAGING_SYSTEM: "seqgate",
        names.MESSAGING_DESTINATION_NAME: TOPIC,
        names.MESSAGING_DESTINATION_SUBSCRIPTION_NAME: "s",
        names.MESSAGING_MESSAGE_ID: str(message.id),
    }
    assert dict(process.attributes or {}) == {
        **common,
        names.MESSAGING_OPERATION_NAME: "process",
        names.MESSAGING_OPERATION_TYPE: "process",
        names.MESSAGING_MESSAGE_BODY_SIZE: 4,
        names.PRODUCER_NAME: message.producer_name,
        names.SEQUENCE_ID: message.sequence_id,
    }
    assert dict(ack.attributes or {}) == {
        **common,
        names.MESSAGING_OPERATION_NAME: "ack",
        names.MESSAGING_OPERATION_TYPE: "settle",
    }


async def test_a_joint_settlement_carries_its_first_recorded_span(
    client: Client, fake: FakeDispatcher, recorded: Recorded
) -> None:
    for properties in (UNSAMPLED, ORIGIN, ORIGIN):
        fake.publish(b"x", properties=properties)
    async with client.consumer(TOPIC, "s") as consumer:
        messages = [await consumer.receive(timeout_s=30) for _ in range(3)]
        answers = []
        for message in messages:  # in one turn of the loop: in one request
            with consumer.processing(message):
                answers.append(consumer.ack_nowait(message))
        await asyncio.gather(*answers)
        fake.publish(b"x", properties=UNSAMPLED)
        message = await consumer.receive(timeout_s=30)
        with consumer.processing(message):
            await consumer.nack(message)
    acks = [span for span in recorded.spans if span.name == f"ack {TOPIC}"]
    first = min(acks, key=lambda span: span.start_time or 0)
    requests = {each.WhichOneof("request"): each for each in fake.requests}
    carried = extract({"traceparent": requests["acknowledge"].trace.traceparent})
    assert (carried.trace_id, carried.span_id) == (first.context.trace_id, first.context.span_id)
    assert not requests["negative_acknowledge"].HasField("trace")


async def test_a_failed_message_fails_its_span(
    client: Client, fake: FakeDispatcher, recorded: Recorded
) -> None:
    fake.publish(b"x")
    async with client.consumer(TOPIC, "s") as consumer:
        message = await consumer.receive(timeout_s=30)
        with pytest.raises(ValueError, match="never"), consumer.processing(message):
            raise ValueError("never")
        await consumer.nack(message)
        with pytest.raises(StaleTokenError):
            await consumer.ack(message)
    process, ack = recorded.one(f"process {TOPIC}"), recorded.one(f"ack {TOPIC}")
    assert (process.parent, links(process)) == (None, [])
    assert (process.attributes or {})[names.ERROR_TYPE] == "ValueError"
    assert (ack.attributes or {})[names.ERROR_TYPE]
    assert not process.status.is_ok
    assert not ack.status.is_ok
    assert recorded.one(f"nack {TOPIC}").parent is None


async def test_processing_by_key_has_a_span_for_each_attempt(
    client: Client, fake: FakeDispatcher, recorded: Recorded
) -> None:
    fake.publish(b"x", properties=ORIGIN)
    attempts = []
    done = asyncio.Event()

    async def handle(message: Received) -> None:
        attempts.append(message.attempts)
        if len(attempts) == 1:
            raise ValueError("once")
        done.set()

    async with client.consumer(TOPIC, "s", retry=RetryPolicy(min_s=0, max_s=0)) as consumer:
        processing = asyncio.create_task(
            process_by_key(consumer, handle, on_failure=lambda message, failure: None)
        )
        async with asyncio.timeout(WITHIN_S):
            await done.wait()
        processing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await processing
    spans = [span for span in recorded.spans if span.name == f"process {TOPIC}"]
    first, second = sorted(spans, key=lambda span: span.start_time or 0)
    assert [first.status.is_ok, second.status.is_ok] == [False, True]
    assert recorded.one(f"nack {TOPIC}").parent == first.context
    assert recorded.one(f"ack {TOPIC}").parent == second.context


@pytest.mark.parametrize(
    ("sampler", "properties"),
    [(ParentBased(ALWAYS_OFF), {}), (ParentBased(ALWAYS_ON), UNSAMPLED), (ALWAYS_OFF, ORIGIN)],
    ids=["undecided", "not sampled by the publisher", "not sampled by the application"],
)
async def test_unsampled_messages_have_no_child_spans(
    client: Client,
    fake: FakeDispatcher,
    monkeypatch: pytest.MonkeyPatch,
    sampler: Sampler,
    properties: dict[str, str],
) -> None:
    recorded = Recorded(sampler)
    monkeypatch.setattr(_tracing, "_TRACER", recorded.tracer)
    fake.publish(b"x", properties=properties)
    async with client.consumer(TOPIC, "s") as consumer:
        message = await consumer.receive(timeout_s=30)
        with consumer.processing(message) as current:
            await consumer.ack(message)
            assert not current.is_recording()
    assert not recorded.spans
