"""One message through all services: all its operations are in one connected trace."""

import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import Tracer

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.filter.v1 import filter_pb2
from seqgate.client import Client, Consumer, RetryPolicy, SubscriptionOptions, connect
from seqgate.dev.stack import SERVICES
from seqgate.telemetry import names
from tests.integration.services import Services, running
from tests.integration.test_dispatcher_owners import instance
from tests.support.otlp import Received, otel_variables, otlp_receiver
from tests.support.traced_application import APPLICATION, application
from tools.trace.receiver import Span

FILTERED = "public/default/filtered"
DYING = "public/default/dying"
DEAD = "public/default/dead"
READ = "public/default/read"
MOVED = "public/default/moved"

EVALUATE = "seqgate.api.filter.v1.FilterService/Evaluate"
ADMIT = "seqgate.api.internal.dedup.v1.DedupWriterService/Admit"
CONSUME = "seqgate.api.dispatcher.v1.DispatcherService/Consume"
ACKNOWLEDGE = "seqgate.api.cursor.v1.CursorService/Acknowledge"
AT_ONCE = RetryPolicy(min_s=0, max_s=0)


@dataclass(frozen=True, slots=True)
class Followed:
    """A stack whose spans are all exported to one receiver."""

    services: Services
    client: Client
    tracer: Tracer

    async def make(self, topic: str) -> None:
        """Create a topic, by opening a producer on it."""
        async with self.client.producer(topic):
            pass

    async def publish(self, topic: str, payload: bytes, **properties: str) -> None:
        """Publish a message, within a span that is named for its payload."""
        async with self.client.producer(topic) as producer:
            with self.tracer.start_as_current_span(payload.decode()):
                await producer.send(payload, properties=properties)

    async def take(self, consumer: Consumer) -> None:
        """Process the next message."""
        message = await consumer.receive(timeout_s=60)
        with consumer.processing(message):
            await consumer.ack(message)

    async def fail(self, consumer: Consumer) -> None:
        """Fail to process the next message."""
        message = await consumer.receive(timeout_s=60)
        with consumer.processing(message):
            await consumer.nack(message)


async def filter_some(followed: Followed) -> None:
    """Send two messages through the filter service, which accepts one of them."""
    await followed.make(FILTERED)
    subscription: dict[str, Any] = {"topic": FILTERED, "subscription": "s"}
    rule = filter_pb2.Filter(name="eu", version=1, expression='properties["region"] == "eu"')
    stub, start = followed.services.dispatcher, common_pb2.Start(earliest=common_pb2.Earliest())
    await stub.CreateSubscription(pb.CreateSubscriptionRequest(**subscription, start=start))
    await stub.SetFilters(pb.SetFiltersRequest(**subscription, filters=[rule]))
    await followed.publish(FILTERED, b"taken", region="eu")
    await followed.publish(FILTERED, b"rejected", region="us")
    async with followed.client.consumer(FILTERED, "s") as consumer:
        await followed.take(consumer)


async def die(followed: Followed) -> None:
    """Refuse a message twice, and process it as a dead letter."""
    await followed.make(DEAD)
    await followed.publish(DYING, b"poison")
    options = SubscriptionOptions(max_redeliveries=1, dead_letter_topic=DEAD)
    async with (
        followed.client.consumer(
            DYING, "s", options=options, retry=AT_ONCE, start="earliest"
        ) as consumer,
        followed.client.consumer(DEAD, "undertaker", start="earliest") as undertaker,
    ):
        await followed.fail(consumer)
        await followed.fail(consumer)
        await followed.take(undertaker)


async def move(followed: Followed, received: Received) -> int:
    """Redirect a consumer to the owner of its subscription. Returns the owner's process id."""
    await followed.publish(MOVED, b"moved")
    async with instance(followed.services, **otel_variables(received)) as owner:
        start = common_pb2.Start(earliest=common_pb2.Earliest())
        names: dict[str, Any] = {"topic": MOVED, "subscription": "s"}
        await owner.stub.CreateSubscription(pb.CreateSubscriptionRequest(**names, start=start))
        await owner.stub.SetFilters(pb.SetFiltersRequest(**names))
        async with followed.client.consumer(MOVED, "s") as consumer:
            await followed.take(consumer)
        owner.tell(signal.SIGTERM)  # so that it exports its last spans
        await owner.process.wait()
        return owner.process.pid


async def read(followed: Followed) -> None:
    """Read two messages: one with a sampled trace, one that its publisher did not sample."""
    await followed.publish(READ, b"written")
    await followed.publish(READ, b"ignored", traceparent=f"00-{1:032x}-{1:016x}-00")
    async with followed.client.reader(READ, start="earliest", follow=False) as reader:
        assert [message.payload async for message in reader] == [b"written", b"ignored"]


@dataclass(frozen=True, slots=True)
class Everything:
    """Everything that the receiver has at the end, and the process id of the dispatcher to which a
    consumer was redirected."""

    received: Received
    owner: int


@pytest.fixture
async def everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Everything]:
    async with otlp_receiver() as received:
        async with (
            running(tmp_path / "stack", **otel_variables(received)) as services,
            application(received, monkeypatch) as tracer,
            connect(
                services.stack.address("ledger"), services.stack.address("dispatcher")
            ) as client,
        ):
            followed = Followed(services, client, tracer)
            await filter_some(followed)
            await die(followed)
            await read(followed)
            owner = await move(followed, received)
        yield Everything(received, owner)


def trace_of(received: Received, payload: str) -> list[Span]:
    """The trace of the message with this payload; checks that it contains the parent of each of its
    spans."""
    (root,) = received.named(payload)
    assert not root.parent_id
    spans = received.trace(root.trace_id)
    known = {span.span_id for span in spans}
    assert [span.name for span in spans if span.parent_id not in known] == [payload]
    return spans


def one(spans: list[Span], name: str, service: str) -> Span:
    (found,) = [span for span in spans if (span.name, span.service) == (name, service)]
    return found


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def check_chain(spans: list[Span], *chain: tuple[str, str, str]) -> None:
    """Check that each of these spans occurs once and is the parent of the next: its service, name
    and kind."""
    found = [one(spans, name, service) for service, name, _ in chain]
    assert [span.kind for span in found] == [kind for _, _, kind in chain]
    for above, below in pairwise(found):
        assert below.parent_id == above.span_id, f"{below.name} is not below {above.name}"


async def test_every_operation_on_a_message_is_in_its_trace(
    everything: Everything,
) -> None:
    received = everything.received
    check_filtered(received)
    check_dying(received)
    check_read(received)
    check_moved(received, everything.owner)


def check_filtered(received: Received) -> None:
    spans = trace_of(received, "taken")
    assert {span.service for span in spans} == {APPLICATION, *SERVICES}
    send = (APPLICATION, f"send {FILTERED}", "PRODUCER")
    publish = ("ledger", f"publish {FILTERED}", "SERVER")
    check_chain(
        spans,
        send,
        publish,
        ("ledger", f"admit {FILTERED}", "INTERNAL"),
        ("ledger", ADMIT, "CLIENT"),
        ("dedup", ADMIT, "SERVER"),
    )
    scripts = [span for span in spans if span.attributes.get(names.DB_SYSTEM_NAME) == names.REDIS]
    assert one(spans, ADMIT, "dedup").span_id in {script.parent_id for script in scripts}
    append = one(spans, f"append {FILTERED}", "ledger")
    assert append.parent_id == one(spans, publish[1], "ledger").span_id
    (commit,) = [span for span in spans if span.parent_id == append.span_id]
    assert commit.attributes[names.DB_SYSTEM_NAME] == names.SQLITE
    check_chain(
        spans,
        (APPLICATION, "taken", "INTERNAL"),
        send,
        ("dispatcher", f"evaluate {FILTERED}", "INTERNAL"),
        ("dispatcher", EVALUATE, "CLIENT"),
        ("filter", EVALUATE, "SERVER"),
    )
    check_chain(spans, send, ("dispatcher", f"deliver {FILTERED}", "INTERNAL"))
    check_chain(
        spans,
        send,
        (APPLICATION, f"process {FILTERED}", "CONSUMER"),
        (APPLICATION, f"ack {FILTERED}", "CLIENT"),
        ("dispatcher", f"settle {FILTERED}", "SERVER"),
        ("dispatcher", f"persist {FILTERED}", "INTERNAL"),
        ("dispatcher", ACKNOWLEDGE, "CLIENT"),
        ("cursor", ACKNOWLEDGE, "SERVER"),
    )
    settle = one(spans, f"settle {FILTERED}", "dispatcher")
    assert (settle.attributes[names.ENTRIES], settle.attributes[names.STALE]) == (1, 0)
    assert settle.end_ns >= one(spans, f"persist {FILTERED}", "dispatcher").end_ns
    check_evaluated(received, spans)


def check_evaluated(received: Received, taken: list[Span]) -> None:
    """Both messages were evaluated in one call: the span is a child of the first one's and linked
    to the other one's."""
    evaluate = one(taken, f"evaluate {FILTERED}", "dispatcher")
    rejected = one(trace_of(received, "rejected"), f"send {FILTERED}", APPLICATION)
    assert evaluate.links == [(rejected.trace_id, rejected.span_id)]
    verdicts = {f"{names.VERDICTS}accepted": 1, f"{names.VERDICTS}rejected": 1}
    assert evaluate.attributes.items() >= {names.ENTRIES: 2, **verdicts}.items()
    asked, answered = (one(taken, EVALUATE, service) for service in ("dispatcher", "filter"))
    rpc = {names.RPC_SYSTEM_NAME: names.GRPC, names.RPC_METHOD: EVALUATE}
    assert asked.attributes == rpc
    assert answered.attributes == {
        **rpc,
        names.ENTRIES: 2,
        names.EVALUATED: 2,
        names.REMEMBERED: 0,
        f"{names.VERDICTS}accepted": 1,
        f"{names.VERDICTS}rejected": 1,
    }


def check_dying(received: Received) -> None:
    """Each attempt, and each operation on the dead letter, is a child of the publisher's span."""
    spans = trace_of(received, "poison")
    send = one(spans, f"send {DYING}", APPLICATION)
    origin = (send.trace_id, send.span_id)
    delivers, processes = named(spans, f"deliver {DYING}"), named(spans, f"process {DYING}")
    assert [span.attributes[names.ATTEMPTS] for span in delivers] == [0, 1]
    assert len(processes) == 2
    dead = one(spans, f"dead_letter {DYING}", "dispatcher")
    for span in (*delivers, *processes, dead):
        assert (span.parent_id, span.links) == (send.span_id, [origin])
    assert (dead.attributes[names.ATTEMPTS], dead.failed) == (2, False)
    assert dead.attributes[names.DEAD_LETTER_TOPIC] == DEAD
    for process in processes:
        (nack,) = [span for span in spans if span.parent_id == process.span_id]
        (settle,) = [span for span in spans if span.parent_id == nack.span_id]
        assert (nack.name, settle.name) == (f"nack {DYING}", f"settle {DYING}")
    check_chain(
        spans,
        (APPLICATION, f"send {DYING}", "PRODUCER"),
        (APPLICATION, f"process {DEAD}", "CONSUMER"),
        (APPLICATION, f"ack {DEAD}", "CLIENT"),
        ("dispatcher", f"settle {DEAD}", "SERVER"),
    )


def check_read(received: Received) -> None:
    spans = trace_of(received, "written")
    send, receive = (one(spans, f"{each} {READ}", APPLICATION) for each in ("send", "receive"))
    assert (receive.kind, receive.parent_id) == ("CLIENT", send.span_id)
    assert receive.links == [(send.trace_id, send.span_id)]
    assert receive.attributes[names.MESSAGING_MESSAGE_ID] == "1:0:-1"
    assert len(received.named(receive.name)) == 1


def check_moved(received: Received, owner: int) -> None:
    """The dispatcher that the consumer called first has no span of the message."""
    spans = trace_of(received, "moved")
    of_dispatchers = [span for span in spans if span.service == "dispatcher"]
    assert {span.resource["process.pid"] for span in of_dispatchers} == {owner}
    check_chain(
        spans,
        (APPLICATION, f"send {MOVED}", "PRODUCER"),
        (APPLICATION, f"process {MOVED}", "CONSUMER"),
        (APPLICATION, f"ack {MOVED}", "CLIENT"),
        ("dispatcher", f"settle {MOVED}", "SERVER"),
    )
    refused = [
        span.resource["process.pid"]
        for span in received.named(CONSUME)
        if span.kind == "SERVER"
        and span.attributes[names.RPC_RESPONSE_STATUS_CODE] == "FAILED_PRECONDITION"
    ]
    assert refused
    assert owner not in refused
