"""Messages through real services, and the spans of all operations at one receiver."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from opentelemetry.trace import Tracer

from seqgate.client import Batching, Chunking, Client, connect
from seqgate.telemetry import names
from tests.integration.services import running
from tests.support.otlp import Received, otel_variables, otlp_receiver
from tests.support.traced_application import APPLICATION, application, below
from tools.trace.receiver import Span

SERVING = {"ledger", "dedup", "cursor", "dispatcher"}
KINDS = {
    "alone": None,
    "batch": Batching(delay_s=60),
    "large": Chunking(chunk_bytes=1024),
}


async def publish(client: Client, tracer: Tracer, topic: str, kind: str) -> None:
    """Publish two messages, the first within a span."""
    how = KINDS[kind]
    batching = how if isinstance(how, Batching) else None
    chunking = how if isinstance(how, Chunking) else None
    async with client.producer(topic, name="p", batching=batching, chunking=chunking) as producer:
        with tracer.start_as_current_span(f"{kind} order"):
            first = producer.send_nowait(b"first" * 500)
        second = producer.send_nowait(b"second" * 500)
        await producer.flush()
        await asyncio.gather(first, second)


async def consume(client: Client, topic: str) -> None:
    async with client.consumer(topic, "s", start="earliest") as consumer:
        for _ in range(2):
            message = await consumer.receive(timeout_s=60)
            with consumer.processing(message):
                await consumer.ack(message)


@pytest.fixture
async def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Received]:
    """Everything that the receiver has at the end."""
    async with otlp_receiver() as received:
        async with (
            running(tmp_path / "stack", **otel_variables(received)) as services,
            application(received, monkeypatch) as tracer,
            connect(
                services.stack.address("ledger"), services.stack.address("dispatcher")
            ) as client,
        ):
            for kind in KINDS:
                await publish(client, tracer, f"public/default/{kind}", kind)
                await consume(client, f"public/default/{kind}")
        yield received


def ids(span: Span) -> tuple[str, str]:
    return span.trace_id, span.span_id


def processed(received: Received, topic: str) -> list[Span]:
    """The spans of processing; checks that each has its acknowledgement as a child with the same
    link."""
    found = sorted(received.named(f"process {topic}"), key=lambda span: span.start_ns)
    for process in found:
        assert process.kind == "CONSUMER"
        assert process.links == [(process.trace_id, process.parent_id)]
        (ack,) = below(received, process)
        assert (ack.name, ack.kind, ack.links) == (f"ack {topic}", "CLIENT", process.links)
    return found


async def test_a_message_is_traced_from_publish_to_acknowledgement(
    received: Received,
) -> None:
    for kind in ("alone", "large"):
        check_alone(received, kind)
    check_batch(received)
    for kind in KINDS:
        check_within_services(received, kind)
    check_services(received)
    assert not [span for span in received.spans if span.failed and span.service == APPLICATION]


def check_alone(received: Received, kind: str) -> None:
    topic = f"public/default/{kind}"
    (order,) = received.named(f"{kind} order")
    sends = sorted(received.named(f"send {topic}"), key=lambda span: span.start_ns)
    assert [(each.kind, each.parent_id) for each in sends] == [
        ("PRODUCER", order.span_id),
        ("PRODUCER", ""),
    ]
    first, second = processed(received, topic)
    assert [first.links, second.links] == [[ids(each)] for each in sends]
    for send, process in zip(sends, (first, second), strict=True):
        message_id = process.attributes[names.MESSAGING_MESSAGE_ID]
        assert send.attributes[names.MESSAGING_MESSAGE_ID] == message_id
        chunks = [event.attributes[names.CHUNK_ID] for event in send.events]
        size_bytes = send.attributes[names.MESSAGING_MESSAGE_BODY_SIZE]
        assert isinstance(size_bytes, int)
        assert chunks == ([*range(-(-size_bytes // 1024))] if kind == "large" else [])


def check_batch(received: Received) -> None:
    topic = "public/default/batch"
    (order,), (send,) = received.named("batch order"), received.named(f"send {topic}")
    (create,) = received.named(f"create {topic}")
    assert (create.kind, create.trace_id, create.parent_id) == ("PRODUCER", *ids(order))
    assert (send.kind, send.parent_id, send.links) == ("PRODUCER", "", [ids(create)])
    assert send.attributes[names.MESSAGING_BATCH_MESSAGE_COUNT] == 2
    first, second = processed(received, topic)
    assert (first.links, second.links) == ([ids(create)], [ids(send)])


def check_within_services(received: Received, kind: str) -> None:
    """Each entry is received, stored and delivered once, in a descendant of the span that sent
    it."""
    topic = f"public/default/{kind}"
    for send in received.named(f"send {topic}"):
        children = list(below(received, send))
        found = [(each.service, each.name) for each in children]
        entries = max(1, len(send.events))
        assert found.count(("dispatcher", f"deliver {topic}")) == entries
        assert found.count((APPLICATION, f"process {topic}")) == 1
        arrived = [each for each in children if each.name == f"publish {topic}"]
        assert [each.attributes[names.RECEIPT] for each in arrived] == ["STORED"] * entries
        for publish in arrived:
            assert (publish.service, publish.kind) == ("ledger", "SERVER")
            assert publish.attributes[names.PRODUCER_NAME] == "p"
            parts = [each.name for each in below(received, publish)]
            assert parts.count(f"append {topic}") == 1
    check_judged(received, topic)
    check_read(received, topic)
    for append in received.named(f"append {topic}"):
        group = append.attributes[names.GROUP_ENTRIES]
        assert isinstance(group, int)
        assert group >= 1
    for deliver in received.named(f"deliver {topic}"):
        assert deliver.attributes[names.MESSAGING_DESTINATION_SUBSCRIPTION_NAME] == "s"
        assert deliver.attributes[names.ATTEMPTS] == 0
        assert deliver.links == [(deliver.trace_id, deliver.parent_id)]


def check_judged(received: Received, topic: str) -> None:
    """Each publication is judged, and later confirmed, maybe together with others: as a child of
    the first of the group, linked to the others. The dedup service's spans are children of these
    calls."""
    of: Counter[tuple[str, str]] = Counter()
    for operation, outcome in (("admit", names.VERDICTS + "new"), ("confirm", names.OUTCOME)):
        for asking in received.named(f"{operation} {topic}"):
            of.update([(asking.trace_id, asking.parent_id), *asking.links])
            (asked,) = below(received, asking)
            (answered,) = below(received, asked)
            assert (asked.service, asked.kind) == ("ledger", "CLIENT")
            assert (answered.service, answered.kind) == ("dedup", "SERVER")
            assert asked.name == answered.name
            assert outcome in asking.attributes
    assert of == dict.fromkeys(map(ids, received.named(f"publish {topic}")), 2)


def check_read(received: Received, topic: str) -> None:
    """A page read is a child of its first message's span, and linked to the others."""
    of: set[tuple[str, str]] = set()
    for read in received.named(f"read {topic}"):
        of.update([(read.trace_id, read.parent_id), *read.links])
    assert of == {ids(send) for send in received.named(f"send {topic}")}


def check_services(received: Received) -> None:
    """Each call served is a child of the call made."""
    by_ids = {ids(span): span for span in received.spans}
    calls = [span for span in received.spans if names.RPC_METHOD in span.attributes]
    served = [span for span in calls if span.kind == "SERVER" and span.parent_id]
    for span in served:
        made = by_ids[span.trace_id, span.parent_id]
        assert (made.kind, made.name) == ("CLIENT", span.name)
        assert made.service != span.service
    assert {span.service for span in served} >= SERVING
    of_application = {
        span.name.rpartition("/")[2]
        for span in served
        if by_ids[span.trace_id, span.parent_id].service == APPLICATION
    }
    assert {"Publish", "Consume"} <= of_application
