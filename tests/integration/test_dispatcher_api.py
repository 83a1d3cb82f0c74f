"""Subscriptions, by the dispatcher's API alone."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import StatusCode, aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.common.v1.common_pb2 import Position
from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import (
    DispatcherServiceStub,
    add_DispatcherServiceServicer_to_server,
)
from seqgate.api.entry.v1.entry_pb2 import EntryMetadata
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.dev.ports import free_ports
from seqgate.services.dispatcher import service as service_limits
from seqgate.services.dispatcher.adapters.cursors import SubscriptionCursors
from seqgate.services.dispatcher.adapters.filters import GrpcFilters
from seqgate.services.dispatcher.adapters.ledger import GrpcLog
from seqgate.services.dispatcher.adapters.letters import GrpcDeadLetters
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.dispatcher.ports import Letter, Ports
from seqgate.services.dispatcher.servicer import DispatcherServicer
from seqgate.services.dispatcher.shell import session as session_limits
from seqgate.services.dispatcher.wire import parsing as limits
from seqgate.services.runtime.channels import following_channel, peer_channel
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.requests import DAY_MS
from seqgate.services.runtime.server import grpc_server
from seqgate.times import TIME_MAX_MS, duration, milliseconds, timestamp
from seqgate.types import TopicName
from tests.integration.refusals import check, refused, status_of_call
from tests.integration.services import Services, channel_to, paused, serving
from tests.support.publisher import batch, publishing, single
from tests.support.raw_channel import raw
from tests.support.raw_consumer import (
    EARLIEST,
    EXCLUSIVE,
    KEY_SHARED,
    LATEST,
    SHARED,
    RawConsumer,
    connect,
    consuming,
    subscribe,
)
from tests.support.waiting import WITHIN_S, eventually

INVALID, NOT_FOUND = StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND
IN_USE, EXHAUSTED = StatusCode.FAILED_PRECONDITION, StatusCode.RESOURCE_EXHAUSTED
UNAVAILABLE = StatusCode.UNAVAILABLE

DONE, STALE, NO_SUCH = pb.SETTLE_OUTCOME_DONE, pb.SETTLE_OUTCOME_STALE, pb.SETTLE_OUTCOME_INVALID

HIGHEST = 2**63 - 1

Private = Callable[..., AbstractAsyncContextManager[Services]]


def at(entry_id: int, ledger_id: int = 1) -> Position:
    return Position(ledger_id=ledger_id, entry_id=entry_id)


async def publish(services: Services, topic: str, *keys: str, first: int = 0, **more: Any) -> None:
    """Publish a message for each of these keys, in this order; its payload is its number."""
    publications = [
        single(number, number, str(number).encode(), partition_key=key, **more)
        for number, key in enumerate(keys, first)
    ]
    await store(services, topic, *publications)


async def store(services: Services, topic: str, *publications: ledger_pb2.Publication) -> None:
    async with publishing(services.ledger, topic, "p") as publisher:
        await publisher.send(*publications)
        for publication in publications:
            receipt = await publisher.receipt(publication.request_id)
            assert receipt.status == ledger_pb2.RECEIPT_STATUS_STORED, receipt


def numbers(deliveries: Iterable[pb.Delivery]) -> list[int]:
    """The entry ids of the deliveries."""
    return [each.position.entry_id for each in deliveries]


def indexes_of(deliveries: Iterable[pb.Delivery]) -> list[list[int]]:
    return [list(each.acknowledged) for each in deliveries]


class Sub:
    """One subscription, as its administrator sees it."""

    def __init__(self, services: Services, topic: str, name: str = "s") -> None:
        self.stub = services.dispatcher
        self.names: dict[str, Any] = {"topic": topic, "subscription": name}

    async def create(self, start: common_pb2.Start = EARLIEST, **more: Any) -> pb.Subscription:
        request = pb.CreateSubscriptionRequest(start=start, **self.names, **more)
        answer = await self.stub.CreateSubscription(request)
        assert answer.created
        made: pb.Subscription = answer.subscription
        return made

    async def get(self) -> pb.Subscription:
        request = pb.GetSubscriptionRequest(**self.names)
        found: pb.Subscription = (await self.stub.GetSubscription(request)).subscription
        return found

    async def delete(self, **more: Any) -> None:
        await self.stub.DeleteSubscription(pb.DeleteSubscriptionRequest(**self.names, **more))

    async def reset(self, start: common_pb2.Start) -> pb.Subscription:
        request = pb.ResetSubscriptionRequest(start=start, **self.names)
        found: pb.Subscription = (await self.stub.ResetSubscription(request)).subscription
        return found

    async def update(self, **more: Any) -> pb.Subscription:
        request = pb.UpdateSubscriptionPropertiesRequest(**self.names, **more)
        found: pb.Subscription = (
            await self.stub.UpdateSubscriptionProperties(request)
        ).subscription
        return found

    async def release(self, key: bytes) -> None:
        await self.stub.ReleaseKey(pb.ReleaseKeyRequest(key=key, **self.names))

    async def report(self, **more: Any) -> pb.ReportResponse:
        found: pb.ReportResponse = await self.stub.Report(pb.ReportRequest(**self.names, **more))
        return found

    async def explain(self, subject: str | Position) -> pb.ExplainResponse:
        request = pb.ExplainRequest(**self.names)
        if isinstance(subject, str):
            request.key = subject.encode()
        else:
            request.position.CopyFrom(subject)
        answer: pb.ExplainResponse = await self.stub.Explain(request)
        return answer

    async def why(self, subject: str | Position) -> list[str]:
        """The reasons of `explain`, in short."""
        reasons = (await self.explain(subject)).reasons
        assert all(each.text for each in reasons)
        return [pb.Reason.Name(each.reason).removeprefix("REASON_") for each in reasons]

    async def waits_for(self, subject: str | Position, *reasons: str) -> None:
        async def so() -> bool:
            return await self.why(subject) == list(reasons)

        try:
            await eventually(so)
        except AssertionError:
            raise AssertionError(f"{await self.explain(subject)}") from None

    async def position(self) -> int:
        """The mark-delete position's entry; -1 if there is none."""
        found = await self.get()
        return found.mark_delete.entry_id if found.HasField("mark_delete") else -1


@pytest.fixture
def sub(services: Services, topic: str) -> Sub:
    return Sub(services, topic)


# ---- refusals


_MEND: dict[str, Any] = {"position": at(0), "payload": b"x", "request_id": "r"}
METHODS: dict[str, Callable[..., Any]] = {
    "CreateSubscription": lambda **names: pb.CreateSubscriptionRequest(
        **({"start": EARLIEST} | names)
    ),
    "GetSubscription": pb.GetSubscriptionRequest,
    "ListSubscriptions": pb.ListSubscriptionsRequest,
    "DeleteSubscription": pb.DeleteSubscriptionRequest,
    "ResetSubscription": lambda **names: pb.ResetSubscriptionRequest(
        **({"start": EARLIEST} | names)
    ),
    "UpdateSubscriptionProperties": pb.UpdateSubscriptionPropertiesRequest,
    "ReleaseKey": pb.ReleaseKeyRequest,
    "ListDeadLetters": pb.ListDeadLettersRequest,
    "RedriveDeadLetters": lambda **names: pb.RedriveDeadLettersRequest(
        **({"positions": [at(0)], "request_id": "r"} | names)
    ),
    "StartRedrive": lambda **names: pb.StartRedriveRequest(**({"request_id": "r"} | names)),
    "EstimateRedrive": pb.EstimateRedriveRequest,
    "GetRedrive": pb.GetRedriveRequest,
    "ListRedrives": pb.ListRedrivesRequest,
    "StopRedrive": pb.StopRedriveRequest,
    "DiscardDeadLetters": lambda **names: pb.DiscardDeadLettersRequest(
        **({"positions": [at(0)], "request_id": "r"} | names)
    ),
    "MendDeadLetter": lambda **names: pb.MendDeadLetterRequest(**(_MEND | names)),
    "ListLetterOperations": pb.ListLetterOperationsRequest,
    "GetDeadLetter": lambda **names: pb.GetDeadLetterRequest(**({"position": at(0)} | names)),
    "SetFilters": pb.SetFiltersRequest,
    "GetFilters": pb.GetFiltersRequest,
    "AnalyzeBacklog": pb.AnalyzeBacklogRequest,
    "Report": pb.ReportRequest,
    "Explain": lambda **names: pb.ExplainRequest(**({"key": b"k"} | names)),
}
"""Valid requests, with the fields of a test."""

BAD_NAMES = ("", "x" * 256, "a\nb", "\x7f", "seqgate.dedup", "seqgate.")
GOOD_NAMES = ("x", "x" * 255, "ü" * 127, "a b/c", "seqgate", "Seqgate.x")


async def call(services: Services, method: str, **fields: Any) -> Any:
    return await getattr(services.dispatcher, method)(METHODS[method](**fields))


@pytest.mark.parametrize("method", METHODS)
async def test_invalid_topic_names_are_refused(services: Services, topic: str, method: str) -> None:
    more = {} if method == "ListSubscriptions" else {"subscription": "s"}
    for bad in ("", "t", "a/b", "a/b/", "a/b/c/d", "a/b/" + "x" * 512):
        with refused(INVALID, "INVALID_TOPIC_NAME"):
            await call(services, method, topic=bad, **more)


@pytest.mark.parametrize("method", [each for each in METHODS if each != "ListSubscriptions"])
async def test_invalid_subscription_names_are_refused(
    services: Services, topic: str, method: str
) -> None:
    for bad in BAD_NAMES:
        with refused(INVALID, "INVALID_SUBSCRIPTION_NAME"):
            await call(services, method, topic=topic, subscription=bad)


@pytest.mark.parametrize(
    "method", [each for each in METHODS if each not in ("ListSubscriptions", "CreateSubscription")]
)
async def test_a_missing_subscription_is_not_found(
    services: Services, topic: str, method: str
) -> None:
    await publish(services, topic, "k")
    with refused(NOT_FOUND, "SUBSCRIPTION_NOT_FOUND"):
        await call(services, method, topic=topic, subscription="s")


async def test_a_subscription_of_a_missing_topic_is_refused(services: Services) -> None:
    for request in (
        call(services, "CreateSubscription", topic="nobody/has/this", subscription="s"),
        connect(services.dispatcher, subscribe("nobody/has/this")),
    ):
        with refused(NOT_FOUND, "TOPIC_NOT_FOUND"):
            await request


async def test_valid_subscription_names_are_accepted(services: Services, topic: str) -> None:
    await publish(services, topic, "k")
    for name in GOOD_NAMES:
        assert (await Sub(services, topic, name).create()).name == name
    found = await call(services, "ListSubscriptions", topic=topic)
    assert [each.name for each in found.subscriptions] == sorted(
        GOOD_NAMES, key=lambda name: name.encode()
    )


BAD_STARTS = {
    "none": common_pb2.Start(),
    "a ledger beyond all": common_pb2.Start(at=at(0, 2**63)),
    "an entry beyond all": common_pb2.Start(after=at(2**63)),
    "a time beyond all": common_pb2.Start(time=Timestamp(seconds=2**62)),
    "a time to come": common_pb2.Start(time=timestamp(TIME_MAX_MS)),
    "an hour to come": common_pb2.Start(time=timestamp(time.time_ns() // 1_000_000 + 3_600_000)),
    "at a future entry": common_pb2.Start(at=at(2)),
    "at a future ledger": common_pb2.Start(at=at(0, 9)),
    "after a missing entry": common_pb2.Start(after=at(1)),
    "after a missing ledger": common_pb2.Start(after=at(0, 2)),
}


@pytest.mark.parametrize("start", BAD_STARTS.values(), ids=BAD_STARTS)
async def test_an_invalid_start_changes_nothing(
    services: Services, sub: Sub, start: common_pb2.Start
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "k")
    with refused(INVALID, "INVALID_START"):
        await sub.create(start)
    with refused(INVALID, "INVALID_START"):
        await connect(services.dispatcher, subscribe(topic, start=start))
    with refused(NOT_FOUND, "SUBSCRIPTION_NOT_FOUND"):
        await sub.get()
    before = await sub.create(LATEST)
    with refused(INVALID, "INVALID_START"):
        await sub.reset(start)
    async with consuming(services.dispatcher, topic) as consumer:
        settled = await consumer.seek(start)
        check(settled.error, INVALID, "INVALID_START")
        assert consumer.sought == 0
    assert (await sub.get()).mark_delete == before.mark_delete


NAME_MAX, VALUE_MAX = "n" * 96, "v" * (service_limits.PROPERTY_BYTES_MAX - 96)

BAD_PROPERTIES = {
    "no name": {"": "x"},
    "a system's name": {"seqgate.dead.next": "9"},
    "too long": {NAME_MAX: VALUE_MAX + "v"},
    "too many": {str(i): "" for i in range(service_limits.PROPERTIES_MAX + 1)},
}


@pytest.mark.parametrize("properties", BAD_PROPERTIES.values(), ids=BAD_PROPERTIES)
async def test_invalid_properties_change_nothing(
    services: Services, sub: Sub, properties: dict[str, str]
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "k")
    with refused(INVALID, "INVALID_PROPERTY"):
        await sub.create(properties=properties)
    with refused(INVALID, "INVALID_PROPERTY"):
        await connect(services.dispatcher, subscribe(topic, properties=properties))
    with refused(NOT_FOUND, "SUBSCRIPTION_NOT_FOUND"):
        await sub.get()
    await sub.create(properties={"mine": "1"})
    with refused(INVALID, "INVALID_PROPERTY"):
        await sub.update(put=properties)
    assert (await sub.get()).properties == {"mine": "1"}


async def test_properties_are_accepted_up_to_the_limits(services: Services, sub: Sub) -> None:
    await publish(services, sub.names["topic"], "k")
    most = {str(i): "" for i in range(service_limits.PROPERTIES_MAX - 1)} | {NAME_MAX: VALUE_MAX}
    assert (await sub.create(properties=most)).properties == most
    with refused(INVALID, "INVALID_PROPERTY"):
        await sub.update(put={"more": ""})
    assert (await sub.update(put={"more": ""}, remove=["0", "none"])).properties == {
        **{name: value for name, value in most.items() if name != "0"},
        "more": "",
    }


async def test_internal_properties_are_hidden_and_read_only(services: Services, sub: Sub) -> None:
    await publish(services, sub.names["topic"], "k")
    await sub.create(properties={"mine": "1"})
    hidden = {"seqgate.dead.next": "7"}
    await services.cursor.UpdateCursorProperties(
        cursor_pb2.UpdateCursorPropertiesRequest(topic=sub.names["topic"], cursor="s", put=hidden)
    )
    assert (await sub.get()).properties == {"mine": "1"}
    with refused(INVALID, "INVALID_PROPERTY"):
        await sub.update(remove=["seqgate.dead.next"])
    assert (await sub.update(put={"mine": "2"})).properties == {"mine": "2"}
    async with consuming(services.dispatcher, sub.names["topic"]) as consumer:
        assert consumer.subscribed.properties == {"mine": "2"}
    cursor = await services.cursor.GetCursor(
        cursor_pb2.GetCursorRequest(topic=sub.names["topic"], cursor="s")
    )
    assert cursor.cursor.properties == {"mine": "2", **hidden}


OPTION_LIMITS = {
    "max_in_flight_per_key": limits.IN_FLIGHT_MAX,
    "max_unacked_per_consumer": limits.UNACKED_MAX,
    "max_unacked": limits.UNACKED_MAX,
    "max_redeliveries": limits.REDELIVERIES_MAX,
}


@pytest.mark.parametrize("option", OPTION_LIMITS)
async def test_options_are_bounded(services: Services, topic: str, option: str) -> None:
    def having(value: int) -> dict[str, Any]:
        return {option: value}

    await publish(services, topic, "k")
    most = OPTION_LIMITS[option]
    with refused(INVALID, "INVALID_OPTIONS"):
        await connect(services.dispatcher, subscribe(topic, **having(most + 1)))
    with refused(NOT_FOUND, "SUBSCRIPTION_NOT_FOUND"):
        await Sub(services, topic).get()
    for right in (most, 0):
        async with consuming(services.dispatcher, topic, **having(right)):
            report = await Sub(services, topic).report()
            assert getattr(report.options, option) == right


async def test_the_drain_deadline_has_bounds_and_a_default(services: Services, topic: str) -> None:
    await publish(services, topic, "k")
    for wrong_ms in (0, DAY_MS + 1):
        with refused(INVALID, "INVALID_OPTIONS"):
            await connect(services.dispatcher, subscribe(topic, drain_deadline=duration(wrong_ms)))
    for right, expected_ms in (
        (duration(1), 1),
        (duration(DAY_MS), DAY_MS),
        (None, limits.DRAIN_DEADLINE_MS),
    ):
        async with consuming(services.dispatcher, topic, drain_deadline=right):
            report = await Sub(services, topic).report()
            assert report.options.drain_deadline.ToMilliseconds() == expected_ms


async def test_a_topic_is_not_its_own_dead_letter_topic(services: Services, topic: str) -> None:
    await publish(services, topic, "k")
    with refused(INVALID, "INVALID_OPTIONS"):
        await connect(services.dispatcher, subscribe(topic, dead_letter_topic=topic))
    with refused(NOT_FOUND, "SUBSCRIPTION_NOT_FOUND"):
        await Sub(services, topic).get()


BAD_CONSUMERS = {
    "no type": ({"type": 0}, "INVALID_OPTIONS"),
    "another type": ({"type": 99}, "INVALID_OPTIONS"),
    "another placement": ({"placement": 99}, "INVALID_OPTIONS"),
    "another policy": ({"after_dead_letter": 99}, "INVALID_OPTIONS"),
    "an invalid dead letter topic": ({"dead_letter_topic": "a/b"}, "INVALID_OPTIONS"),
    "a name too long": ({"name": "x" * 256}, "INVALID_CONSUMER"),
    "an invalid name": ({"name": "a\tb"}, "INVALID_CONSUMER"),
    "too heavy": ({"weight": limits.WEIGHT_MAX + 1}, "INVALID_CONSUMER"),
    "too short a time": ({"ack_timeout_ms": limits.ACK_TIMEOUT_MIN_MS - 1}, "INVALID_CONSUMER"),
    "too long a time": ({"ack_timeout_ms": DAY_MS + 1}, "INVALID_CONSUMER"),
    "too many ranges": ({"ranges": [(1, 1)] * (limits.RANGES_MAX + 1)}, "INVALID_CONSUMER"),
    "no ranges": ({"placement": pb.PLACEMENT_STICKY}, "INVALID_KEY_RANGE"),
    "a range beyond all slots": (
        {"placement": pb.PLACEMENT_STICKY, "ranges": [(0, 65_536)]},
        "INVALID_KEY_RANGE",
    ),
    "a range backwards": (
        {"placement": pb.PLACEMENT_STICKY, "ranges": [(2, 1)]},
        "INVALID_KEY_RANGE",
    ),
    "a range twice": (
        {"placement": pb.PLACEMENT_STICKY, "ranges": [(0, 5), (5, 9)]},
        "INVALID_KEY_RANGE",
    ),
    "another topic's name": ({"topic": "a/b"}, "INVALID_TOPIC_NAME"),
    "no name": ({"subscription": ""}, "INVALID_SUBSCRIPTION_NAME"),
    "a system's name": ({"subscription": "seqgate.dedup"}, "INVALID_SUBSCRIPTION_NAME"),
}


@pytest.mark.parametrize(("fields", "reason"), BAD_CONSUMERS.values(), ids=BAD_CONSUMERS)
async def test_an_invalid_consumer_is_refused_alone(
    services: Services, topic: str, fields: dict[str, Any], reason: str
) -> None:
    await publish(services, topic, "k")
    placement = fields.get("placement", 0) if reason == "INVALID_KEY_RANGE" else 0
    async with consuming(
        services.dispatcher,
        topic,
        placement=placement,
        ranges=[(60_000, 65_535)] if placement else (),
    ):
        with refused(INVALID, reason):
            await connect(services.dispatcher, subscribe(**({"topic": topic} | fields)))
        assert len((await Sub(services, topic).report()).consumers) == 1


async def test_the_largest_consumer_is_accepted(services: Services, topic: str) -> None:
    await publish(services, topic, "k")
    async with consuming(
        services.dispatcher,
        topic,
        name="x" * 255,
        weight=limits.WEIGHT_MAX,
        ack_timeout_ms=DAY_MS,
        placement=pb.PLACEMENT_STICKY,
        ranges=[(i, i) for i in range(limits.RANGES_MAX)],
    ) as consumer:
        assert consumer.name == "x" * 255
        assert [(each.first, each.last) for each in consumer.subscribed.ranges] in (
            [(i, i) for i in range(limits.RANGES_MAX)],
            [(0, limits.RANGES_MAX - 1)],
        )
    async with consuming(
        services.dispatcher, topic, ack_timeout_ms=limits.ACK_TIMEOUT_MIN_MS
    ) as consumer:
        assert consumer.name
        (report,) = (await Sub(services, topic).report()).consumers
        assert (report.name, report.consumer_id) == (
            consumer.name,
            consumer.subscribed.consumer_id,
        )


async def test_a_stream_starts_with_its_only_subscribe(services: Services, topic: str) -> None:
    await publish(services, topic, "k")
    for first in (
        pb.ConsumeRequest(permit=pb.Permit(messages=1)),
        pb.ConsumeRequest(leave=pb.Leave()),
        pb.ConsumeRequest(),
    ):
        stream = services.dispatcher.Consume()
        await stream.write(first)
        with refused(INVALID, "NOT_SUBSCRIBED"):
            await stream.read()
    stream = services.dispatcher.Consume()
    await stream.done_writing()
    with refused(INVALID, "NOT_SUBSCRIBED"):
        await stream.read()
    for second in ({"subscribe": subscribe(topic)}, {}):
        async with consuming(services.dispatcher, topic) as consumer:
            await consumer.write(**second)
            await ended_with(consumer, INVALID, "NOT_SUBSCRIBED")
    assert await Sub(services, topic).position() == -1


async def ended_with(consumer: RawConsumer, code: StatusCode, reason: str) -> dict[str, str]:
    """Wait until a stream ends with this refusal; its details."""
    error = await consumer.ended()
    assert error is not None
    return check(status_of_call(error), code, reason)


async def test_malformed_requests_are_refused(services: Services, topic: str) -> None:
    await publish(services, topic, "k")
    async with raw(aio.insecure_channel(services.stack.address("dispatcher"))) as channel:
        name = "/seqgate.api.dispatcher.v1.DispatcherService/"
        unary = channel.unary_unary(f"{name}GetSubscription")
        with refused(INVALID, "MALFORMED_REQUEST"):
            await unary(b"\xff")
        stream = channel.stream_stream(f"{name}Consume")()
        await stream.write(b"\xff")
        with refused(INVALID, "MALFORMED_REQUEST"):
            await stream.read()
        stream = channel.stream_stream(f"{name}Consume")()
        opening = pb.ConsumeRequest(subscribe=subscribe(topic))
        await stream.write(opening.SerializeToString())
        assert await stream.read() is not aio.EOF
        await stream.write(b"\xff")
        with refused(INVALID, "MALFORMED_REQUEST"):
            while await stream.read() is not aio.EOF:
                pass


@pytest.mark.parametrize("messages", [0, limits.PERMIT_MAX + 1, 2**32 - 1])
async def test_the_permits_of_a_request_are_bounded(
    services: Services, topic: str, messages: int
) -> None:
    await publish(services, topic, "k")
    async with consuming(services.dispatcher, topic) as consumer:
        await consumer.permit(messages)
        await ended_with(consumer, INVALID, "INVALID_PERMITS")


async def test_the_permits_of_a_consumer_are_bounded(services: Services, sub: Sub) -> None:
    await publish(services, sub.names["topic"], "k")
    async with consuming(services.dispatcher, sub.names["topic"]) as consumer:
        for _ in range(limits.PERMITS_MAX // limits.PERMIT_MAX):
            await consumer.permit(limits.PERMIT_MAX)
        await consumer.received(1)
        await consumer.still()
        assert (await sub.report()).consumers[0].permits == limits.PERMITS_MAX - 1
        await consumer.permit(1)
        await consumer.still()
        await consumer.permit(1)
        await ended_with(consumer, INVALID, "INVALID_PERMITS")


SETTLEMENTS: dict[str, Callable[[list[int]], Any]] = {
    "acknowledge": lambda some: pb.Acknowledge(
        settlements=[pb.Settlement(delivery=each) for each in some]
    ),
    "negative_acknowledge": lambda some: pb.NegativeAcknowledge(
        negative_acknowledgements=[pb.NegativeAcknowledgement(delivery=each) for each in some]
    ),
    "give_back": lambda some: pb.GiveBack(deliveries=some),
    "renew": lambda some: pb.Renew(deliveries=some),
}


@pytest.mark.parametrize("kind", SETTLEMENTS)
async def test_the_deliveries_of_a_request_are_bounded(
    services: Services, topic: str, kind: str
) -> None:
    await publish(services, topic, "k")
    async with consuming(services.dispatcher, topic, permits=1) as consumer:
        (delivery,) = await consumer.received(1)
        for wrong in ([], [delivery.delivery] * (limits.ITEMS_MAX + 1)):
            settled = await consumer.settled(await consumer.ask(kind, SETTLEMENTS[kind](wrong)))
            check(settled.error, INVALID, "INVALID_SETTLEMENT")
            assert not settled.outcomes
        most = SETTLEMENTS[kind]([delivery.delivery] * limits.ITEMS_MAX)
        settled = await consumer.settled(await consumer.ask(kind, most))
        assert not settled.HasField("error")


async def test_delays_and_batch_indexes_are_bounded(services: Services, topic: str) -> None:
    await store(services, topic, batch(1, [1, 2], partition_key="k"))
    async with consuming(services.dispatcher, topic, permits=1) as consumer:
        (delivery,) = await consumer.received(1)
        settled = await consumer.negative_acknowledge(delivery, delay_ms=DAY_MS + 1)
        check(settled.error, INVALID, "INVALID_SETTLEMENT")
        settled = await consumer.acknowledge(delivery, indexes=[limits.ITEMS_MAX])
        check(settled.error, INVALID, "INVALID_SETTLEMENT")
        for index in (2, limits.ITEMS_MAX - 1):
            settled = await consumer.acknowledge(delivery, indexes=[0, index])
            assert list(settled.outcomes) == [NO_SUCH]
        assert not (await consumer.negative_acknowledge(delivery, delay_ms=DAY_MS)).outcomes


async def test_page_sizes_are_bounded(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "k")
    await sub.create()
    for size in (-1, limits.PAGE_MAX + 1):
        with refused(INVALID, "INVALID_PAGE"):
            await call(services, "ListSubscriptions", topic=topic, page_size=size)
    with refused(INVALID, "INVALID_PAGE"):
        await call(services, "ListSubscriptions", topic=topic, page_token="\ud7ff no token")
    with refused(INVALID, "INVALID_PAGE"):
        await sub.report(max_keys=limits.KEYS_MAX + 1)
    await sub.report(max_keys=limits.KEYS_MAX)
    page = await call(services, "ListSubscriptions", topic=topic, page_size=limits.PAGE_MAX)
    assert [each.name for each in page.subscriptions] == ["s"]


async def test_an_explanation_requires_a_valid_position_or_key(
    services: Services, sub: Sub
) -> None:
    await publish(services, sub.names["topic"], "k")
    await sub.create()
    with refused(INVALID, "INVALID_POSITION"):
        await sub.stub.Explain(pb.ExplainRequest(**sub.names))
    with refused(INVALID, "INVALID_POSITION"):
        await sub.explain(at(2**63))
    assert not (await sub.get()).owner


async def test_a_consumer_with_too_many_unanswered_requests_is_cut_off(
    stoppable: Services, topic: str
) -> None:
    """Its answers wait for the cursor service, which is down."""
    await publish(stoppable, topic, "k", "k")
    async with consuming(stoppable.dispatcher, topic, permits=2) as consumer:
        first, second = await consumer.received(2)
        with paused(stoppable.stack, "cursor"):
            for _ in range(session_limits.UNANSWERED_MAX):
                await consumer.ask_acknowledge(first)
            await consumer.permit(1)  # gets no answer
            assert not consumer.has_ended
            await consumer.ask_acknowledge(second)
            details = await ended_with(consumer, EXHAUSTED, "TOO_MANY_UNANSWERED")
            assert details == {"unanswered_max": str(session_limits.UNANSWERED_MAX)}


# ---- administration


async def test_a_subscription_is_created_once(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "a", "b")
    before_ms = time.time_ns() // 1_000_000
    made = await sub.create(common_pb2.Start(after=at(0)), properties={"region": "eu"})
    assert (made.topic, made.name) == (topic, "s")
    assert made.properties == {"region": "eu"}
    assert (made.mark_delete, made.acknowledged_entries, made.owner) == (at(0), 0, "")
    assert before_ms <= made.created.ToMilliseconds() <= time.time_ns() // 1_000_000
    again = await call(
        services, "CreateSubscription", topic=topic, subscription="s", properties={"other": "1"}
    )
    assert not again.created
    assert again.subscription == made == await sub.get()
    async with consuming(services.dispatcher, topic, start=EARLIEST, properties={"x": "y"}) as c:
        assert c.subscribed.properties == {"region": "eu"}
        assert (await sub.get()).owner == services.stack.address("dispatcher")


async def test_one_of_many_concurrent_creations_succeeds(services: Services, topic: str) -> None:
    await publish(services, topic, "k")
    answers = await asyncio.gather(
        *(call(services, "CreateSubscription", topic=topic, subscription="s") for _ in range(20))
    )
    assert sum(each.created for each in answers) == 1


async def test_subscribe_creates_a_missing_subscription_only_with_a_start(
    services: Services, topic: str
) -> None:
    await publish(services, topic, "k")
    with refused(NOT_FOUND, "SUBSCRIPTION_NOT_FOUND"):
        await connect(services.dispatcher, subscribe(topic, start=None))
    async with consuming(services.dispatcher, topic, start=LATEST, properties={"a": "1"}) as made:
        assert made.subscribed.properties == {"a": "1"}
    async with consuming(services.dispatcher, topic, start=None, permits=1) as consumer:
        await publish(services, topic, "k", first=1)
        assert numbers(await consumer.received(1)) == [1]


async def test_subscriptions_are_listed_across_pages_without_internal_cursors(
    services: Services, topic: str
) -> None:
    await publish(services, topic, "k")
    names = [f"s{i}" for i in range(5)]
    for name in names:
        await Sub(services, topic, name).create()
    await services.cursor.CreateCursor(
        cursor_pb2.CreateCursorRequest(topic=topic, cursor="seqgate.other")
    )
    found: list[str] = []
    token = ""
    while True:
        page = await call(services, "ListSubscriptions", topic=topic, page_size=2, page_token=token)
        found += [each.name for each in page.subscriptions]
        token = page.next_page_token
        if not token:
            break
    assert found == names


async def test_a_subscription_in_use_is_deleted_only_by_force(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "k")
    async with consuming(services.dispatcher, topic, permits=1) as consumer:
        await consumer.received(1)
        with refused(IN_USE, "SUBSCRIPTION_BUSY"):
            await sub.delete()
        await consumer.still()
        await sub.delete(force=True)
        await ended_with(consumer, NOT_FOUND, "SUBSCRIPTION_NOT_FOUND")
    with refused(NOT_FOUND, "SUBSCRIPTION_NOT_FOUND"):
        await sub.delete()
    async with consuming(services.dispatcher, topic, permits=1) as consumer:
        (again,) = await consumer.received(1)
        assert again.attempts == 0
        await consumer.leave()
    await sub.delete()


STARTS = {
    "earliest": (EARLIEST, [0, 1, 2, 3]),
    "latest": (LATEST, []),
    "at the first": (common_pb2.Start(at=at(0)), [0, 1, 2, 3]),
    "at one": (common_pb2.Start(at=at(2)), [2, 3]),
    "at the end": (common_pb2.Start(at=at(4)), []),
    "at a ledger before all": (common_pb2.Start(at=at(5, 0)), [0, 1, 2, 3]),
    "after the first": (common_pb2.Start(after=at(0)), [1, 2, 3]),
    "after the last": (common_pb2.Start(after=at(3)), []),
    "the first time": (common_pb2.Start(time=timestamp(0)), [0, 1, 2, 3]),
}


@pytest.mark.parametrize(("start", "expected"), STARTS.values(), ids=STARTS)
async def test_a_subscription_starts_at_the_given_position(
    services: Services, sub: Sub, start: common_pb2.Start, expected: list[int]
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "a", "b", "a", "b")
    created, reset, sought = (Sub(services, topic, name) for name in ("created", "reset", "sought"))
    await created.create(start)
    for other in (reset, sought):
        await other.create(common_pb2.Start(after=at(1)))
    await reset.reset(start)
    async with consuming(services.dispatcher, topic, "sought") as consumer:
        assert not (await consumer.seek(start)).HasField("error")
        assert consumer.sought == 1
    await publish(services, topic, "a", first=4)
    for name in ("created", "reset", "sought"):
        async with consuming(services.dispatcher, topic, name, permits=10, type=EXCLUSIVE) as c:
            assert numbers(await c.received(len(expected) + 1)) == [*expected, 4]


async def test_a_subscription_starts_at_a_time(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "a", "a")
    first = milliseconds((await services.read(topic))[-1].append_time)

    async def later() -> bool:
        return time.time_ns() // 1_000_000 > first

    await eventually(later)
    await publish(services, topic, "a", first=2)
    entries = await services.read(topic)
    for start in (milliseconds(entries[2].append_time), first + 1):
        await sub.create(common_pb2.Start(time=timestamp(start)))
        async with consuming(services.dispatcher, topic, permits=10) as consumer:
            assert numbers(await consumer.received(1)) == [2]
        await sub.delete(force=True)


async def test_a_seek_revokes_all_deliveries_and_permits(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "a", "a", "b")
    async with (
        consuming(services.dispatcher, topic, name="x", permits=100) as one,
        consuming(services.dispatcher, topic, name="y", permits=100) as other,
    ):
        await eventually(lambda: len(one.deliveries) + len(other.deliveries) == 3)
        before = {each.delivery: each for each in [*one.deliveries, *other.deliveries]}
        done = one if one.deliveries else other
        assert not (await done.acknowledge(done.deliveries[0])).outcomes
        assert not (await one.seek(EARLIEST)).HasField("error")
        await other.until(lambda: other.sought)
        for consumer in (one, other):
            assert await consumer.still() == 0
            for old in before.values():
                assert list((await consumer.acknowledge(old)).outcomes) == [STALE]
                assert list((await consumer.negative_acknowledge(old)).outcomes) == [STALE]
                assert list((await consumer.give_back(old)).outcomes) == [STALE]
            await consumer.permit(100)
        await eventually(lambda: one.waiting + other.waiting == 3)
        again = [*await one.received(one.waiting), *await other.received(other.waiting)]
        assert sorted(numbers(again)) == [0, 1, 2]
        assert {each.delivery for each in again}.isdisjoint(before)
        assert await sub.position() == -1


async def test_a_reset_moves_both_ways_and_keeps_consumers_connected(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *"aaaaa")
    async with consuming(services.dispatcher, topic, permits=10) as consumer:
        first = await consumer.received(5)
        await consumer.acknowledge(first[0], first[3])
        assert (await sub.get()).acknowledged_entries == 1
        moved = await sub.reset(common_pb2.Start(at=at(2)))
        assert (moved.mark_delete, moved.acknowledged_entries) == (at(1), 0)
        await consumer.until(lambda: consumer.sought == 1)
        await consumer.permit(10)
        assert numbers(await consumer.received(3)) == [2, 3, 4]
        await sub.reset(EARLIEST)
        await consumer.until(lambda: consumer.sought == 2)
        await consumer.permit(10)
        again = await consumer.received(5)
        assert numbers(again) == [0, 1, 2, 3, 4]
        assert {each.attempts for each in again} == {0}


# ---- admission of consumers


OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "another type": {"type": SHARED},
    "exclusive": {"type": EXCLUSIVE},
    "another placement": {"placement": pb.PLACEMENT_AUTO_SPLIT},
    "out of order": {"allow_out_of_order_delivery": True},
    "another limit of a key": {"max_in_flight_per_key": 1},
    "another limit of a consumer": {"max_unacked_per_consumer": 1},
    "another limit": {"max_unacked": 1},
    "redeliveries": {"max_redeliveries": 0},
    "another dead letter topic": {"dead_letter_topic": "public/default/other"},
    "another policy": {"after_dead_letter": pb.AFTER_DEAD_LETTER_HOLD},
    "delays that hold": {"delay_holds_key": True},
    "a deadline": {"drain_deadline": duration(1)},
    "the classic rule": {"classic_join": True},
}


@pytest.mark.parametrize("options", OTHER_OPTIONS.values(), ids=OTHER_OPTIONS)
async def test_consumers_agree_on_options_while_one_is_connected(
    services: Services, topic: str, options: dict[str, Any]
) -> None:
    await publish(services, topic, "a", "b")
    async with consuming(services.dispatcher, topic, permits=1) as consumer:
        first = await consumer.received(1)
        with refused(IN_USE, "SUBSCRIPTION_BUSY"):
            await connect(services.dispatcher, subscribe(topic, **options))
        await consumer.acknowledge(*first)
        assert len((await Sub(services, topic).report()).consumers) == 1
        await consumer.leave()
    async with consuming(services.dispatcher, topic, permits=9, **options) as consumer:
        assert numbers(await consumer.received(1)) == [1]
        with refused(IN_USE, "SUBSCRIPTION_BUSY"):
            await connect(services.dispatcher, subscribe(topic))


async def test_an_exclusive_subscription_has_one_consumer(services: Services, topic: str) -> None:
    await publish(services, topic, "a", "b", "a", "c")
    async with consuming(services.dispatcher, topic, type=EXCLUSIVE, permits=9) as consumer:
        assert numbers(await consumer.received(4)) == [0, 1, 2, 3]
        with refused(IN_USE, "SUBSCRIPTION_BUSY"):
            await connect(services.dispatcher, subscribe(topic, type=EXCLUSIVE))
        await consumer.leave()
    async with consuming(services.dispatcher, topic, type=EXCLUSIVE, permits=9) as consumer:
        assert numbers(await consumer.received(4)) == [0, 1, 2, 3]


async def test_sticky_consumers_get_the_ranges_they_name(services: Services, sub: Sub) -> None:
    """`a` is in slot 27,058, `A` in 63,438."""
    topic = sub.names["topic"]
    sticky: dict[str, Any] = {"placement": pb.PLACEMENT_STICKY}
    await publish(services, topic, "a", "A", "a", "A")
    async with consuming(
        services.dispatcher, topic, ranges=[(0, 32_767)], permits=9, **sticky
    ) as low:
        assert numbers(await low.received(2)) == [0, 2]
        await sub.waits_for("A", "NO_OWNER")
        for taken in ((0, 0), (32_767, 65_535), (100, 200), (27_058, 27_058)):
            with refused(IN_USE, "RANGE_CONFLICT") as details:
                await connect(services.dispatcher, subscribe(topic, ranges=[taken], **sticky))
            assert details["consumer"] == low.name
        async with consuming(
            services.dispatcher, topic, ranges=[(32_768, 65_535)], permits=9, **sticky
        ) as high:
            assert numbers(await high.received(2)) == [1, 3]
        async with consuming(
            services.dispatcher, topic, ranges=[(32_768, 65_535)], permits=9, **sticky
        ) as again:
            assert numbers(await again.received(2)) == [1, 3]
            assert again.ranges == [(32_768, 65_535)]


async def test_the_consumers_of_a_subscription_are_bounded(private: Private, topic: str) -> None:
    async with private(
        SEQGATE_DISPATCHER_CONSUMERS_MAX="2", SEQGATE_DISPATCHER_SUBSCRIPTIONS_MAX="2"
    ) as services:
        await publish(services, topic, "k")
        stub = services.dispatcher
        async with consuming(stub, topic, type=SHARED) as one:
            async with consuming(stub, topic, type=SHARED):
                with refused(EXHAUSTED, "TOO_MANY_CONSUMERS") as details:
                    await connect(stub, subscribe(topic, type=SHARED))
                assert details == {"consumers_max": "2"}
                await one.leave()
            async with consuming(stub, topic, "t"):
                with refused(EXHAUSTED, "TOO_MANY_CONSUMERS") as details:
                    await connect(stub, subscribe(topic, "u"))
                assert details == {"subscriptions_max": "2"}


# ---- deliveries


async def test_a_delivery_has_all_published_fields(services: Services, topic: str) -> None:
    whole = single(
        1,
        7,
        b"payload",
        partition_key="key",
        ordering_key=b"ordering",
        properties={"a": "1"},
        event_time=5,
    )
    await store(services, topic, whole)
    async with consuming(services.dispatcher, topic, permits=1) as consumer:
        (delivery,) = await consumer.received(1)
        (stored,) = await services.read(topic)
        assert delivery.metadata == stored.metadata
        assert (delivery.position, delivery.payload) == (stored.position, b"payload")
        assert delivery.append_time == stored.append_time
        assert (delivery.attempts, list(delivery.acknowledged)) == (0, [])
        assert not delivery.HasField("gap")


async def test_permits_bound_the_delivered_messages(services: Services, topic: str) -> None:
    await publish(services, topic, *"abcdefghij")
    async with consuming(services.dispatcher, topic, permits=5) as consumer:
        await consumer.received(5)
        assert await consumer.still() == 0
        await consumer.permit(3)
        await consumer.received(3)
        assert await consumer.still() == 0


async def test_a_batch_may_exceed_the_permits(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await store(
        services,
        topic,
        batch(1, range(10), partition_key="k"),
        batch(2, range(10, 20), partition_key="k"),
    )
    async with consuming(services.dispatcher, topic, permits=3) as consumer:
        await consumer.received(1)
        assert (await sub.report()).consumers[0].permits == -7
        await consumer.permit(7)
        assert await consumer.still() == 0
        await consumer.permit(1)
        await consumer.received(1)


async def test_a_consumer_at_its_unacknowledged_limit_resumes_at_half(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *map(str, range(12)))
    async with consuming(
        services.dispatcher, topic, permits=20, max_unacked_per_consumer=10
    ) as consumer:
        some = await consumer.received(10)
        await sub.waits_for("11", "CONSUMER_LIMIT")
        for number, delivery in enumerate(some[:5]):
            assert await consumer.still() == 0, number
            await consumer.acknowledge(delivery)
        await consumer.received(2)


async def test_the_unacknowledged_limit_of_a_subscription_exempts_redeliveries(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *map(str, range(8)))
    async with consuming(services.dispatcher, topic, permits=20, max_unacked=4) as consumer:
        some = await consumer.received(4)
        assert (await sub.report()).blocked_on_unacked
        await sub.waits_for("7", "SUBSCRIPTION_LIMIT")
        await consumer.negative_acknowledge(some[0], delay_ms=0)
        again = await consumer.received(1)
        assert numbers(again) == numbers(some[:1])
        assert await consumer.still() == 0
        await consumer.acknowledge(*again, *some[1:])
        await consumer.received(4)


# ---- settling


async def test_an_acknowledgement_is_durable_when_it_is_answered(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *"abcab")
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        got = {each.position.entry_id: each for each in await consumer.received(5)}
        settled = await consumer.acknowledge(got[0], got[2])
        assert not settled.outcomes
        assert not settled.HasField("error")
        state = await sub.get()
        assert (state.mark_delete, state.acknowledged_entries) == (at(0), 1)
        # Settled before, unknown, and never delivered.
        settled = await consumer.acknowledge(got[0], 0, 2**64 - 1, got[1])
        assert list(settled.outcomes) == [STALE, STALE, STALE, DONE]
        assert await sub.position() == 2
        report = await sub.report()
        assert (report.unacked_messages, report.consumers[0].unacked_messages) == (2, 2)
        assert (report.totals.stale, report.totals.acknowledged_entries) == (3, 3)


async def test_tokens_of_other_consumers_and_epochs_settle_nothing(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "a")
    async with consuming(services.dispatcher, topic, permits=9) as one:
        (mine,) = await one.received(1)
        async with consuming(services.dispatcher, topic) as other:
            for ask in (
                other.acknowledge,
                other.negative_acknowledge,
                other.give_back,
                other.renew,
            ):
                assert list((await ask(mine)).outcomes) == [STALE]
        for epoch in (one.epoch - 1, one.epoch + 1, 2**64 - 1):
            for kind, make in SETTLEMENTS.items():
                request = make([mine.delivery, mine.delivery])
                request.epoch = epoch
                settled = await one.settled(await one.ask(kind, request))
                assert list(settled.outcomes) == [STALE, STALE]
    async with consuming(services.dispatcher, topic, name=one.name, permits=9) as again:
        (new,) = await again.received(1)
        assert (new.position, new.attempts) == (mine.position, 1)
        for ask in (again.acknowledge, again.negative_acknowledge, again.give_back, again.renew):
            assert list((await ask(mine)).outcomes) == [STALE]
        assert await sub.position() == -1
        assert not (await again.acknowledge(new)).outcomes
        assert await sub.position() == 0


async def test_cumulative_acknowledgement_requires_an_exclusive_consumer(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *"abcd")
    for kind in (KEY_SHARED, SHARED):
        async with consuming(services.dispatcher, topic, type=kind, permits=9) as consumer:
            some = await consumer.received(4)
            settled = await consumer.acknowledge_cumulative(some[2])
            check(settled.error, INVALID, "CUMULATIVE_ACK_REFUSED")
            assert await sub.position() == -1
            await consumer.leave()
    async with consuming(services.dispatcher, topic, type=EXCLUSIVE, permits=9) as consumer:
        some = await consumer.received(4)
        assert list((await consumer.acknowledge_cumulative(0)).outcomes) == [STALE]
        settled = await consumer.acknowledge_cumulative(some[2])
        assert not settled.outcomes
        assert not settled.HasField("error")
        assert await sub.position() == 2
        assert list((await consumer.acknowledge_cumulative(some[1])).outcomes) == [STALE]
        assert not (await consumer.acknowledge(some[3])).outcomes
        assert await sub.position() == 3


async def test_cumulative_acknowledgement_stops_within_a_batch(
    services: Services, topic: str
) -> None:
    await store(
        services, topic, single(1, 1, partition_key="a"), batch(2, [2, 3, 4, 5], partition_key="b")
    )
    async with consuming(services.dispatcher, topic, type=EXCLUSIVE, permits=9) as consumer:
        _, last = await consumer.received(2)
        assert not (await consumer.acknowledge_cumulative(last, indexes=[2])).outcomes
        assert list((await consumer.acknowledge_cumulative(last, indexes=[4])).outcomes) == [
            NO_SUCH
        ]
    async with consuming(services.dispatcher, topic, type=EXCLUSIVE, permits=9) as consumer:
        (again,) = await consumer.received(1)
        assert list(again.acknowledged) == [0, 1, 2]


async def test_messages_of_a_batch_are_acknowledged_one_by_one_and_for_good(
    stoppable: Services, topic: str
) -> None:
    sub = Sub(stoppable, topic)
    await store(
        stoppable,
        topic,
        batch(1, range(5), partition_key="k"),
        single(2, 5, partition_key="k"),
    )
    async with consuming(stoppable.dispatcher, topic, permits=9) as consumer:
        first, second = await consumer.received(2)
        await consumer.acknowledge(first, indexes=[0, 2])
        assert (await sub.report()).unacked_messages == 4
        await consumer.acknowledge(second)
        assert await sub.position() == -1
        assert list((await consumer.acknowledge(first, indexes=[0, 2])).outcomes) == []
        await consumer.leave()
    await stoppable.stack.terminate("dispatcher")
    await stoppable.stack.run("dispatcher")
    await serving(stoppable.stack.address("dispatcher"))
    async with consuming(stoppable.dispatcher, topic, permits=9) as consumer:
        (again,) = await consumer.received(1)
        assert (again.position, list(again.acknowledged)) == (first.position, [0, 2])
        assert again.attempts == 0
        for index in (4, 1):
            await consumer.acknowledge(again, indexes=[index])
            assert await sub.position() == -1
        await consumer.acknowledge(again, indexes=[3])
        assert await sub.position() == 1
        assert await consumer.still() == 0


async def test_a_failed_message_is_redelivered_first_and_holds_its_key(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "k", "k", "k", "other")
    async with consuming(services.dispatcher, topic, permits=20) as consumer:
        got = {each.position.entry_id: each for each in await consumer.received(4)}
        assert not (await consumer.negative_acknowledge(got[0], delay_ms=60_000)).outcomes
        assert consumer.revoked == {got[1].delivery, got[2].delivery}
        assert not (await consumer.acknowledge(got[3])).outcomes
        assert list((await consumer.acknowledge(got[1], got[0])).outcomes) == [STALE, STALE]
        assert await sub.why("k") == ["RETRY_DELAY"]
        assert await sub.why(at(2)) == ["IN_ORDER", "RETRY_DELAY"]
        (explained,) = (await sub.explain("k")).reasons
        assert 0 < explained.until.ToMilliseconds() - explained.since.ToMilliseconds() <= 61_000
        assert await consumer.still() == 0


async def test_a_failed_message_is_counted_and_redelivered_after_its_delay(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "k", "k")
    async with consuming(services.dispatcher, topic, permits=20) as consumer:
        first, second = await consumer.received(2)
        for attempts in (1, 2, 3):
            assert not (await consumer.negative_acknowledge(first, delay_ms=1)).outcomes
            (first,) = await consumer.received(1)
            assert (numbers([first]), first.attempts) == ([0], attempts)
            assert await consumer.still() == 0
        assert await sub.why("k") == ["RETRY", "IN_FLIGHT"]
        await consumer.acknowledge(first)
        (second,) = await consumer.received(1)
        assert (numbers([second]), second.attempts) == ([1], 0)
        assert (await sub.report()).totals.negative_acknowledgements == 3


async def test_the_default_retry_delay_is_one_second_then_two(services: Services, sub: Sub) -> None:
    await publish(services, sub.names["topic"], "k")
    async with consuming(services.dispatcher, sub.names["topic"], permits=20) as consumer:
        (first,) = await consumer.received(1)
        await consumer.negative_acknowledge(first, delay_ms=0)
        (first,) = await consumer.received(1)
        asked_ms = time.time_ns() // 1_000_000
        await consumer.negative_acknowledge(first)
        await sub.waits_for("k", "RETRY_DELAY")
        (explained,) = (await sub.explain("k")).reasons
        assert 1_900 <= explained.until.ToMilliseconds() - asked_ms <= 3_000


async def test_a_returned_message_does_not_count_as_failed(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "k", "k", "k")
    async with consuming(services.dispatcher, topic, permits=3) as consumer:
        some = await consumer.received(3)
        assert not (await consumer.give_back(some[1])).outcomes
        assert consumer.revoked == {some[2].delivery}
        assert list((await consumer.acknowledge(some[1], some[2])).outcomes) == [STALE, STALE]
        await consumer.permit(2)
        again = await consumer.received(2)
        assert (numbers(again), {each.attempts for each in again}) == ([1, 2], {0})
        assert (await sub.report()).totals.returned == 2


async def test_a_message_not_settled_in_time_is_redelivered(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "k", "k")
    async with consuming(
        services.dispatcher, topic, permits=2, ack_timeout_ms=limits.ACK_TIMEOUT_MIN_MS
    ) as consumer:
        some = await consumer.received(2)
        await consumer.until(lambda: len(consumer.revoked) == 2)
        assert list((await consumer.acknowledge(*some)).outcomes) == [STALE, STALE]
        await consumer.permit(1)
        (again,) = await consumer.received(1)
        assert (numbers([again]), again.attempts) == ([0], 1)
        assert (await sub.report()).totals.timed_out >= 1


async def test_renewing_a_delivery_extends_its_timeout(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "a", "b")
    timeout_ms = 400
    async with consuming(
        services.dispatcher, topic, permits=2, ack_timeout_ms=timeout_ms
    ) as consumer:
        kept, other = await consumer.received(2)
        began_s = time.monotonic()

        async def renewed() -> bool:
            assert not (await consumer.renew(kept)).outcomes
            return time.monotonic() - began_s > 3 * timeout_ms / 1000

        await eventually(renewed)
        assert consumer.revoked == {other.delivery}
        assert not (await consumer.acknowledge(kept)).outcomes


# ---- consumers join and leave


async def test_a_crash_fails_the_first_message_of_each_key_and_leaving_does_not(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "a", "a", "b")

    async def attempts(how: str) -> dict[int, int]:
        async with consuming(services.dispatcher, topic, permits=9) as consumer:
            found = {each.position.entry_id: each.attempts for each in await consumer.received(3)}
            if how == "leave":
                await consumer.leave()
            elif how == "finish":
                assert await consumer.finish() is None
        return found

    assert await attempts("leave") == {0: 0, 1: 0, 2: 0}
    assert await attempts("crash") == {0: 0, 1: 0, 2: 0}
    assert await attempts("leave") == {0: 1, 1: 0, 2: 1}
    assert await attempts("finish") == {0: 1, 1: 0, 2: 1}
    assert await attempts("leave") == {0: 2, 1: 0, 2: 2}
    assert (await sub.report()).totals.lost_consumers == 6


async def test_a_crash_fails_every_message_of_an_unordered_subscription(
    services: Services, topic: str
) -> None:
    await publish(services, topic, "a", "a", "b")
    for options in ({"type": SHARED}, {"allow_out_of_order_delivery": True}):
        name = next(iter(options))
        async with consuming(services.dispatcher, topic, name, permits=9, **options) as consumer:
            await consumer.received(3)
        async with consuming(services.dispatcher, topic, name, permits=9, **options) as consumer:
            assert [each.attempts for each in await consumer.received(3)] == [1, 1, 1]


async def test_leaving_waits_for_pending_acknowledgements(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *"abcdef")
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        some = await consumer.received(6)
        request = await consumer.ask_acknowledge(*some)
        await consumer.leave()
        assert consumer.has_settled(request)
    assert await sub.position() == 5


async def test_moving_keys_wait_for_their_former_owner(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *(f"{i}" for i in range(20)))
    async with consuming(services.dispatcher, topic, name="x", permits=20) as old:
        had = await old.received(20)
        await publish(services, topic, *(f"{i}" for i in range(20)), first=20)
        async with consuming(services.dispatcher, topic, name="y", permits=100) as new:
            await old.until(lambda: old.moved)
            moved = [each for each in had if each.delivery in old.moved]
            assert 0 < len(moved) < 20
            first = moved[0]
            key = first.metadata.partition_key
            assert await new.still() == 0
            report = next(each for each in (await sub.report()).consumers if each.name == "x")
            assert report.draining_keys == len(moved)
            # The consumer in possession, and the entry waited for.
            await sub.waits_for(at(int(key) + 20), "DRAINING", "IN_FLIGHT")
            reasons = (await sub.explain(at(int(key) + 20))).reasons
            assert {each.consumer for each in reasons} == {"x"}
            assert reasons[1].position == first.position
            await old.acknowledge(first)
            (second,) = await new.received(1)
            assert (second.metadata.partition_key, numbers([second])) == (key, [int(key) + 20])
            await old.give_back(*moved[1:])
            again = await new.received(2 * (len(moved) - 1))
            assert {each.attempts for each in again} == {0}
            for delivery in moved[1:]:
                key = delivery.metadata.partition_key
                of_key = [each for each in again if each.metadata.partition_key == key]
                assert numbers(of_key) == [int(key), int(key) + 20]


async def test_a_consumer_that_keeps_a_moving_key_too_long_loses_it(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *(f"{i}" for i in range(20)))
    options: dict[str, Any] = {"drain_deadline": duration(50)}
    async with consuming(services.dispatcher, topic, name="x", permits=20, **options) as old:
        had = {each.delivery: each for each in await old.received(20)}
        async with consuming(services.dispatcher, topic, name="y", permits=99, **options) as new:
            await old.until(lambda: old.moved and old.moved <= old.revoked)
            assert old.moved == old.revoked
            lost = [had[each] for each in sorted(old.moved)]
            again = await new.received(len(lost))
            assert sorted(numbers(again)) == sorted(numbers(lost))
            assert {each.attempts for each in again} == {0}
            assert set((await old.acknowledge(*lost)).outcomes) == {STALE}
            assert (await sub.report()).totals.drained == len(lost)
            assert not (await new.acknowledge(*again)).outcomes


async def test_with_classic_join_a_new_consumer_waits_for_all_earlier_messages(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *(f"{i}" for i in range(20)))
    async with consuming(
        services.dispatcher, topic, name="x", permits=20, classic_join=True
    ) as old:
        had = await old.received(20)
        async with consuming(
            services.dispatcher, topic, name="y", permits=99, classic_join=True
        ) as new:
            await publish(services, topic, *(f"{i}" for i in range(20, 60)), first=20)

            async def reads() -> bool:
                return (await sub.report()).read_position.entry_id == 59

            await eventually(reads)
            assert await new.still() == 0
            report = await sub.report()
            joining = [each for each in report.withheld if each.reason == pb.REASON_JOINING]
            assert joining[0].keys > 0
            key = next(each.key for each in report.keys if each.reason == pb.REASON_JOINING)
            assert (await sub.why(key.decode()))[0] == "JOINING"
            await old.acknowledge(*had)
            await new.received(joining[0].keys)


async def test_unacknowledged_messages_come_first_in_order(services: Services, topic: str) -> None:
    await publish(services, topic, *"abababab")
    async with consuming(services.dispatcher, topic, permits=6) as consumer:
        some = await consumer.received(6)
        await consumer.acknowledge(some[1])
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        again = numbers(await consumer.received(7))
        assert sorted(again) == sorted({*range(8)} - {some[1].position.entry_id})
        for parity in (0, 1):
            of_key = [each for each in again if each % 2 == parity]
            assert of_key == sorted(of_key)


# ---- delayed messages


async def test_a_delayed_message_is_delivered_when_due_and_holds_its_key_on_request(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    due_ms = time.time_ns() // 1_000_000 + 3_000
    await store(
        services,
        topic,
        single(1, 1, partition_key="k", deliver_at_time=due_ms),
        single(2, 2, partition_key="k"),
        single(3, 3, partition_key="other"),
    )
    holding = Sub(services, topic, "holding")
    async with (
        consuming(services.dispatcher, topic, permits=9) as consumer,
        consuming(services.dispatcher, topic, "holding", permits=9, delay_holds_key=True) as held,
    ):
        assert sorted(numbers(await consumer.received(2))) == [1, 2]
        assert numbers(await held.received(1)) == [2]
        assert (await sub.report()).delayed_entries == 1
        assert await holding.why("k") == ["DELAYED"]
        assert await holding.why(at(1)) == ["IN_ORDER", "DELAYED"]
        assert (await holding.explain("k")).reasons[0].until.ToMilliseconds() == due_ms
        assert numbers(await consumer.received(1)) == [0]
        assert time.time_ns() // 1_000_000 >= due_ms - 1
        assert numbers(await held.received(2)) == [0, 1]


# ---- dead letters


def dlq(topic: str, name: str = "s") -> str:
    return f"{topic}-{name}-DLQ"


async def letters(services: Services, topic: str) -> list[ledger_pb2.StoredEntry]:
    """The contents of a dead letter topic; a missing one is empty."""
    if topic not in [each.name for each in await services.topics(topic)]:
        return []
    return await services.read(topic)


async def origins(services: Services, topic: str) -> list[int]:
    """The positions in the log of the messages in a dead letter topic."""
    return [
        int(each.metadata.properties["seqgate.origin.id"].partition(":")[2])
        for each in await letters(services, topic)
    ]


async def dies(consumer: RawConsumer, delivery: pb.Delivery, times: int = 1) -> None:
    """Fail a delivery and its redeliveries."""
    for _ in range(times - 1):
        await consumer.negative_acknowledge(delivery, delay_ms=0)
        (delivery,) = await consumer.received(1)
    await consumer.negative_acknowledge(delivery, delay_ms=0)


async def test_a_message_is_dead_lettered_after_its_last_delivery(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    metadata: dict[str, Any] = {
        "partition_key": "k",
        "ordering_key": b"k",
        "event_time": 5,
        "properties": {"a": "1"},
        "deliver_at_time": 1,
    }
    await store(services, topic, single(7, 7, b"poison", **metadata), single(8, 8, b"next"))
    async with consuming(services.dispatcher, topic, permits=20, max_redeliveries=2) as consumer:
        got = {each.position.entry_id: each for each in await consumer.received(2)}
        await consumer.acknowledge(got[1])
        await dies(consumer, got[0], 3)

        async def moved() -> bool:
            return await sub.position() == 1

        await eventually(moved)
        assert await consumer.still() == 0
        assert [each.attempts for each in consumer.deliveries if not each.position.entry_id] == [
            0,
            1,
            2,
        ]
    (letter,) = await letters(services, dlq(topic))
    assert letter.payload == b"poison"
    kept = letter.metadata
    assert (kept.partition_key, kept.ordering_key, kept.event_time) == ("k", b"k", 5)
    assert not kept.deliver_at_time
    assert dict(kept.properties) == {
        "a": "1",
        "seqgate.origin.topic": topic,
        "seqgate.origin.subscription": "s",
        "seqgate.origin.id": "1:0",
        "seqgate.dead.generation": "1",
        "seqgate.origin.producer": "p",
        "seqgate.origin.sequence_id": "7",
        "seqgate.attempts": "3",
        "seqgate.dead.reason": "REDELIVERIES",
        "seqgate.dead.failures": kept.properties["seqgate.dead.failures"],
    }
    assert (await sub.report()).totals.dead_lettered == 1
    # Nothing is kept except what its key needs.
    names = cursor_pb2.GetCursorRequest(topic=topic, cursor="s")

    async def forgotten() -> bool:
        cursor = (await services.cursor.GetCursor(names)).cursor
        return not [each for each in cursor.properties if "letter" in each]

    await eventually(forgotten)


async def test_dead_letters_are_listed_with_their_failures_and_what_waits(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "a", "a", "b", "a")
    options: dict[str, Any] = {
        "max_redeliveries": 1,
        "after_dead_letter": pb.AFTER_DEAD_LETTER_HOLD,
    }
    async with consuming(services.dispatcher, topic, permits=20, name="c", **options) as consumer:
        got = {each.position.entry_id: each for each in await consumer.received(4)}
        await consumer.negative_acknowledge(got[0], delay_ms=0)
        (again,) = (each for each in await consumer.received(1) if not each.position.entry_id)
        await consumer.negative_acknowledge(again, delay_ms=0, reason="no stock\n'é'\0")
        await sub.waits_for("a", "HELD")

        found = (await sub.stub.ListDeadLetters(pb.ListDeadLettersRequest(**sub.names))).letters
    (letter,) = found
    assert (letter.position, letter.origin, letter.key) == (at(0), at(0), b"a")
    assert (letter.producer_name, letter.sequence_id, letter.payload_bytes) == ("p", 0, 1)
    assert (letter.num_messages, letter.attempts) == (1, 2)
    assert letter.reason == pb.DEAD_LETTER_REASON_REDELIVERIES
    assert [(each.failure, each.consumer) for each in letter.failures] == [
        (pb.DELIVERY_FAILURE_REFUSED, "c")
    ] * 2
    assert [each.reason for each in letter.failures] == ["", "no stock\n'é'\0"]
    assert milliseconds(letter.failures[0].time) <= milliseconds(letter.time)
    assert not letter.properties
    assert (letter.holds_key, letter.waiting_entries, letter.lags) == (True, 2, False)

    request = pb.GetDeadLetterRequest(position=letter.position, **sub.names)
    whole = await sub.stub.GetDeadLetter(request)
    assert (whole.letter, whole.entry.payload) == (letter, b"0")
    assert whole.dead_letter_topic == dlq(topic)
    with refused(NOT_FOUND, "LETTER_NOT_FOUND"):
        await sub.stub.GetDeadLetter(pb.GetDeadLetterRequest(position=at(9), **sub.names))


async def test_dead_letters_are_listed_in_pages_and_by_key(services: Services, sub: Sub) -> None:
    """Another subscription's letters, and messages of others, are left out."""
    topic, shared = sub.names["topic"], f"{sub.names['topic']}-dead"
    await publish(services, topic, *"abcde")
    options: dict[str, Any] = {"max_redeliveries": 0, "dead_letter_topic": shared}
    for name in ("other", "s"):
        async with consuming(
            services.dispatcher, topic, permits=20, subscription=name, **options
        ) as consumer:
            for delivery in await consumer.received(5):
                await consumer.negative_acknowledge(delivery, delay_ms=0)

            async def stored(owner: str = name) -> bool:
                return (await Sub(services, topic, owner).report()).totals.dead_lettered == 5

            await eventually(stored)
        await publish(services, shared, "a", first=6 - len(name))

    async def listed(**more: Any) -> tuple[list[int], str]:
        request = pb.ListDeadLettersRequest(**sub.names, **more)
        page = await sub.stub.ListDeadLetters(request)
        assert page.dead_letter_topic == shared
        return [each.origin.entry_id for each in page.letters], page.next_page_token

    assert (await listed())[0] == [0, 1, 2, 3, 4]
    assert (await listed(key=b"b"))[0] == [1]
    pages, token = [], ""
    while True:
        page, token = await listed(page_size=2, page_token=token, dead_letter_topic=shared)
        pages += page
        if not token:
            break
    assert pages == [0, 1, 2, 3, 4]
    with refused(INVALID, "INVALID_PAGE"):
        await listed(page_token="x")
    none = pb.ListDeadLettersRequest(dead_letter_topic=dlq(topic), **sub.names)
    assert not (await sub.stub.ListDeadLetters(none)).letters  # that topic does not exist


async def redrive(sub: Sub, *letters: Position, **more: Any) -> pb.RedriveDeadLettersResponse:
    fields: dict[str, Any] = {"request_id": "r1"} | sub.names | more
    request = pb.RedriveDeadLettersRequest(positions=letters, **fields)
    answer: pb.RedriveDeadLettersResponse = await sub.stub.RedriveDeadLetters(request)
    return answer


async def redriven(sub: Sub, *letters: Position, **more: Any) -> None:
    """Redrive letters once the acknowledgements of their messages are durable."""

    async def begun() -> bool:
        try:
            await redrive(sub, *letters, **more)
        except aio.AioRpcError as error:
            if error.code() is not IN_USE:
                raise
            return False
        return True

    await eventually(begun)


async def listed(sub: Sub) -> list[pb.DeadLetter]:
    page = await sub.stub.ListDeadLetters(pb.ListDeadLettersRequest(**sub.names))
    return list(page.letters)


async def test_a_redriven_message_comes_before_the_messages_held_behind_it(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "k", "k", "other", "k", properties={"a": "1"})
    options: dict[str, Any] = {
        "max_redeliveries": 0,
        "after_dead_letter": pb.AFTER_DEAD_LETTER_HOLD,
    }
    async with consuming(services.dispatcher, topic, permits=20, **options) as consumer:
        got = {each.position.entry_id: each for each in await consumer.received(4)}
        await consumer.acknowledge(got[2])
        await consumer.negative_acknowledge(got[0], delay_ms=0)
        await sub.waits_for("k", "HELD")
        assert await consumer.still() == 0

        trial = await redrive(sub, at(0), dry_run=True)
        assert (trial.redrive, trial.letters) == (0, 1)
        assert [each.redriven for each in await listed(sub)] == [False]
        made = await redrive(sub, at(0))
        assert (made.redrive, made.letters, made.repeated) == (1, 1, False)
        assert [each.redriven for each in await listed(sub)] == [True]
        again = await redrive(sub, at(0))
        assert (again.redrive, again.letters, again.repeated) == (1, 1, True)
        with refused(IN_USE, "LETTER_NOT_REDRIVABLE"):
            await redrive(sub, at(0), request_id="r2")

        (back,) = await consumer.received(1)
        assert await consumer.still() == 0  # the others wait for it
        assert (numbers([back]), back.payload, back.attempts) == ([0], b"0", 0)
        assert (back.metadata.producer_name, back.metadata.sequence_id) == ("p", 0)
        properties = dict(back.metadata.properties)
        assert (properties["a"], properties["seqgate.dead.redrives"]) == ("1", "1")
        await consumer.acknowledge(back)
        rest = await consumer.received(2)
        assert numbers(rest) == [1, 3]
        await consumer.acknowledge(*rest)
        assert await consumer.still() == 0
    with refused(IN_USE, "LETTER_NOT_REDRIVABLE"):
        await redrive(sub, at(0), request_id="r3")
    names = cursor_pb2.GetCursorRequest(topic=topic, cursor="s")
    kept = (await services.cursor.GetCursor(names)).cursor.properties
    assert not [each for each in kept if "return" in each or "dead.key" in each]


async def test_a_redriven_message_that_fails_again_is_another_letter(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "k", "k")
    options: dict[str, Any] = {
        "max_redeliveries": 1,
        "after_dead_letter": pb.AFTER_DEAD_LETTER_HOLD,
    }
    async with consuming(services.dispatcher, topic, permits=40, **options) as consumer:
        first, _ = await consumer.received(2)
        await dies(consumer, first, 2)
        await sub.waits_for("k", "HELD")
        for number in (1, 2):
            await redriven(sub, at(number - 1), request_id=f"r{number}")
            (back,) = await consumer.received(1)
            await dies(consumer, back, 2)

            async def is_dead(letters_: int = number + 1) -> bool:
                return len(await listed(sub)) == letters_

            await eventually(is_dead)
            await sub.waits_for("k", "HELD")
        found = await listed(sub)
        assert [each.redrives for each in found] == [0, 1, 2]
        assert [each.attempts for each in found] == [2, 2, 2]
        assert [each.redriven for each in found] == [True, True, False]
        assert {each.origin.entry_id for each in found} == {0}


async def test_a_rest_of_a_redriven_batch_is_delivered(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    """A message that was acknowledged before its batch was dead-lettered does not come back."""
    await store(services, topic, batch(1, [3, 5, 9], b"xyz"))
    async with consuming(services.dispatcher, topic, permits=40, max_redeliveries=0) as consumer:
        (first,) = await consumer.received(1)
        await consumer.acknowledge(first, indexes=[1])
        await consumer.negative_acknowledge(first, delay_ms=0)

        async def is_dead() -> bool:
            return await sub.position() == 0 and len(await listed(sub)) == 1

        await eventually(is_dead)
        await redriven(sub, at(0))
        (back,) = await consumer.received(1)
        assert (back.metadata.num_messages_in_batch, list(back.acknowledged)) == (3, [1])
        kept = back.metadata
        assert (kept.sequence_id, kept.highest_sequence_id) == (3, 9)
        assert list(kept.sequence_id_steps) == [2, 4]
        await consumer.acknowledge(back, indexes=[0])
        assert await consumer.still() == 0
        await consumer.acknowledge(back)
        assert await consumer.still() == 0


async def test_a_reset_ends_redrives_of_messages_that_it_delivers_again(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "k")
    async with consuming(services.dispatcher, topic, permits=40, max_redeliveries=0) as consumer:
        (first,) = await consumer.received(1)
        await consumer.negative_acknowledge(first, delay_ms=0)
        await redriven_when_dead(sub, at(0))
        await consumer.received(1)
        await sub.reset(EARLIEST)
        await consumer.permit(9)
        (again,) = await consumer.received(1)
        assert again.metadata.properties == {}  # from the log
        await consumer.acknowledge(again)
        assert await consumer.still() == 0
        await consumer.leave()
    # Other options: the subscription starts from its durable state.
    async with consuming(services.dispatcher, topic, permits=40, max_redeliveries=1) as consumer:
        assert await consumer.still() == 0


async def test_redriven_messages_survive_another_start_from_durable_state(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await store(services, topic, batch(1, [1, 2, 3], b"xyz"), single(2, 4, b"next"))
    async with consuming(services.dispatcher, topic, permits=40, max_redeliveries=1) as consumer:
        first, last = await consumer.received(2)
        await consumer.acknowledge(last)
        await dies(consumer, first, 2)
        await redriven_when_dead(sub, at(0))
        (back,) = await consumer.received(1)
        await consumer.acknowledge(back, indexes=[2])
        await consumer.negative_acknowledge(back, delay_ms=0)
        (back,) = await consumer.received(1)
        assert (back.attempts, list(back.acknowledged)) == (1, [2])
        await consumer.leave()
    async with consuming(services.dispatcher, topic, permits=40, max_redeliveries=2) as consumer:
        (back,) = await consumer.received(1)
        assert (back.position.entry_id, back.attempts, list(back.acknowledged)) == (0, 1, [2])
        await consumer.acknowledge(back)
        assert await consumer.still() == 0
        await consumer.leave()
    async with consuming(services.dispatcher, topic, permits=40, max_redeliveries=3) as consumer:
        assert await consumer.still() == 0


async def redriven_when_dead(sub: Sub, letter: Position) -> None:
    async def is_dead() -> bool:
        return letter in [each.position for each in await listed(sub)]

    await eventually(is_dead)
    await redriven(sub, letter)


BAD_REDRIVES: dict[str, dict[str, Any]] = {
    "no letters": {"positions": []},
    "too many letters": {"positions": [at(number) for number in range(101)]},
    "a letter twice": {"positions": [at(0), at(0)]},
    "a position beyond all": {"positions": [at(2**63)]},
    "no request id": {"request_id": ""},
    "a long request id": {"request_id": "x" * 65},
}
BAD_MENDS: dict[str, dict[str, Any]] = {
    "no change": {"payload": None},
    "a reserved property": {"put": {"seqgate.dead.mend": ""}},
    "a reserved property to remove": {"remove": ["seqgate.dead.mend"]},
    "too many properties": {"put": {str(number): "" for number in range(129)}},
    "too many properties to remove": {"remove": [""] * 129},
    "a position beyond all": {"position": at(2**63)},
    "no request id": {"request_id": ""},
    "a long request id": {"request_id": "x" * 65},
}


@pytest.mark.parametrize("fields", BAD_REDRIVES.values(), ids=BAD_REDRIVES)
async def test_invalid_redrives_and_discards_are_refused(
    services: Services, sub: Sub, fields: dict[str, Any]
) -> None:
    with refused(INVALID, "INVALID_REDRIVE"):
        await call(services, "RedriveDeadLetters", **sub.names, **fields)
    with refused(INVALID, "INVALID_DISCARD"):
        await call(services, "DiscardDeadLetters", **sub.names, **fields)
    with refused(INVALID, "INVALID_DISCARD"):
        await call(services, "DiscardDeadLetters", **sub.names, reason="x" * 257)


@pytest.mark.parametrize("fields", BAD_MENDS.values(), ids=BAD_MENDS)
async def test_invalid_mends_are_refused(
    services: Services, sub: Sub, fields: dict[str, Any]
) -> None:
    with refused(INVALID, "INVALID_MEND"):
        await call(services, "MendDeadLetter", **sub.names, **fields)


async def test_later_messages_of_a_key_report_the_gap(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "k", "k", "k", "other")
    async with consuming(
        services.dispatcher, topic, permits=20, max_redeliveries=0, dead_letter_topic=f"{topic}-d"
    ) as consumer:
        got = {each.position.entry_id: each for each in await consumer.received(4)}
        await dies(consumer, got[0])
        second, third = await consumer.received(2)
        assert numbers([second, third]) == [1, 2]
        for each in (second, third):
            assert (each.gap.position, each.gap.attempts) == (at(0), 1)
        assert not got[3].HasField("gap")
        await consumer.leave()
    async with consuming(
        services.dispatcher, topic, permits=20, max_redeliveries=0, dead_letter_topic=f"{topic}-d"
    ) as consumer:
        got = {each.position.entry_id: each for each in await consumer.received(3)}
        assert got[1].gap.position == at(0)
        await consumer.acknowledge(got[1])
        await consumer.acknowledge(got[2], got[3])
        await publish(services, topic, "k", first=4)
        (after,) = await consumer.received(1)
        assert not after.HasField("gap")
    assert await origins(services, f"{topic}-d") == [0]


async def test_a_key_stays_held_across_owners_until_released(
    stoppable: Services, topic: str
) -> None:
    sub = Sub(stoppable, topic)
    await publish(stoppable, topic, "k", "k", "other", "k")
    options: dict[str, Any] = {
        "max_redeliveries": 0,
        "after_dead_letter": pb.AFTER_DEAD_LETTER_HOLD,
    }
    async with consuming(stoppable.dispatcher, topic, permits=20, **options) as consumer:
        with refused(NOT_FOUND, "KEY_NOT_HELD"):
            await sub.release(b"k")
        got = {each.position.entry_id: each for each in await consumer.received(4)}
        await consumer.acknowledge(got[2])
        await dies(consumer, got[0])
        await sub.waits_for("k", "HELD")
        assert await sub.why(at(3)) == ["IN_ORDER", "HELD"]
        assert await consumer.still() == 0
    await stoppable.stack.kill("dispatcher")
    await stoppable.stack.run("dispatcher")
    await serving(stoppable.stack.address("dispatcher"))
    async with consuming(stoppable.dispatcher, topic, permits=20, **options) as consumer:
        await sub.waits_for("k", "HELD")
        with refused(NOT_FOUND, "KEY_NOT_HELD"):
            await sub.release(b"other")
        await sub.release(b"k")
        assert numbers(await consumer.received(2)) == [1, 3]
        with refused(NOT_FOUND, "KEY_NOT_HELD"):
            await sub.release(b"k")
    assert await origins(stoppable, dlq(topic)) == [0]


async def test_later_messages_of_a_key_are_dead_lettered_until_it_is_released(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "k", "k", "other", "k")
    async with consuming(
        services.dispatcher,
        topic,
        permits=20,
        max_redeliveries=0,
        after_dead_letter=pb.AFTER_DEAD_LETTER_TAIL,
    ) as consumer:
        got = {each.position.entry_id: each for each in await consumer.received(4)}
        await consumer.acknowledge(got[2])
        await dies(consumer, got[0])
        await publish(services, topic, "k", first=4)

        async def all_there() -> bool:
            return await origins(services, dlq(topic)) == [0, 1, 3, 4]

        await eventually(all_there)

        async def moved() -> bool:
            return await sub.position() == 4

        await eventually(moved)
        await sub.release(b"k")
        await publish(services, topic, "k", first=5)
        assert numbers(await consumer.received(1)) == [5]


async def test_a_batch_is_dead_lettered_as_a_whole(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await store(
        services,
        topic,
        batch(1, [1, 2, 3], b"batch", partition_key="k"),
        batch(2, [7, 9], b"steps", partition_key="k"),
    )
    async with consuming(services.dispatcher, topic, permits=20, max_redeliveries=0) as consumer:
        first, _ = await consumer.received(2)
        await consumer.acknowledge(first, indexes=[1])
        await dies(consumer, first)
        (second,) = await consumer.received(1)
        await dies(consumer, second)

        async def moved() -> bool:
            return await sub.position() == 1

        await eventually(moved)
    found = await letters(services, dlq(topic))
    assert [(each.payload, each.metadata.num_messages_in_batch) for each in found] == [
        (b"batch", 3),
        (b"steps", 2),
    ]


def chunks(
    sequence_id: int, uuid: str, count: int, key: str, first: int
) -> list[ledger_pb2.Publication]:
    return [
        single(
            first + chunk,
            sequence_id,
            b"%d" % chunk,
            partition_key=key,
            uuid=uuid,
            chunk_id=chunk,
            num_chunks_from_msg=count,
            total_chunk_msg_size=count,
        )
        for chunk in range(count)
    ]


async def test_a_large_message_is_dead_lettered_as_a_whole(services: Services, sub: Sub) -> None:
    """Large messages of a producer may be dead-lettered in any order; each is assembled again."""
    topic = sub.names["topic"]
    await store(services, topic, *chunks(1, "one", 3, "a", 1), *chunks(2, "two", 2, "b", 4))
    async with consuming(services.dispatcher, topic, permits=20, max_redeliveries=0) as consumer:
        got = {each.position.entry_id: each for each in await consumer.received(5)}

        async def moved() -> bool:
            return (await sub.get()).acknowledged_entries == 2

        await consumer.negative_acknowledge(got[3], got[4], delay_ms=0)
        await eventually(moved)

        async def all_moved() -> bool:
            return await sub.position() == 4

        await consumer.negative_acknowledge(got[0], got[1], got[2], delay_ms=0)
        await eventually(all_moved)
    found = await letters(services, dlq(topic))
    assert [(each.metadata.uuid, each.metadata.chunk_id) for each in found] == [
        ("two", 0),
        ("two", 1),
        ("one", 0),
        ("one", 1),
        ("one", 2),
    ]


async def test_a_crash_counts_as_an_attempt_and_leaving_does_not(
    services: Services, sub: Sub
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "k", "k")
    for _ in range(2):
        async with consuming(services.dispatcher, topic, permits=9, max_redeliveries=1) as consumer:
            assert numbers(await consumer.received(2)) == [0, 1]
    async with consuming(services.dispatcher, topic, permits=9, max_redeliveries=1) as consumer:
        (second,) = await consumer.received(1)
        assert (numbers([second]), second.gap.attempts) == ([1], 2)
    assert await origins(services, dlq(topic)) == [0]


async def test_dead_letters_of_many_keys_are_each_stored_once(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *map(str, range(40)))
    async with consuming(services.dispatcher, topic, permits=99, max_redeliveries=0) as consumer:
        some = await consumer.received(40)
        await consumer.negative_acknowledge(*some, delay_ms=0)

        async def moved() -> bool:
            return await sub.position() == 39

        await eventually(moved)
    assert sorted(await origins(services, dlq(topic))) == [*range(40)]


# ---- reports


async def test_a_report_is_complete(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *"aabbcc")
    options: dict[str, Any] = {"max_in_flight_per_key": 1, "placement": pb.PLACEMENT_AUTO_SPLIT}
    async with consuming(services.dispatcher, topic, name="x", permits=20, **options) as consumer:
        some = await consumer.received(3)
        report = await sub.report()
        assert report.epoch == consumer.epoch
        assert report.options.max_in_flight_per_key == 1
        assert report.options.placement == pb.PLACEMENT_AUTO_SPLIT
        assert report.options.type == KEY_SHARED
        assert report.options.max_redeliveries == limits.REDELIVERIES_DEFAULT == 16
        assert milliseconds(report.options.drain_deadline) == limits.DRAIN_DEADLINE_MS == 300_000
        assert report.read_position == at(5)
        assert not report.HasField("mark_delete")
        assert (report.unacked_messages, report.blocked_on_unacked) == (3, False)
        assert (report.active_keys, report.parked_entries, report.lagging) == (3, 3, 0)
        (withheld,) = report.withheld
        assert (withheld.reason, withheld.keys) == (pb.REASON_IN_FLIGHT_LIMIT, 3)
        assert len(report.keys) == 3
        assert len((await sub.report(max_keys=1)).keys) == 1
        key = min(report.keys, key=lambda each: each.key)
        assert (key.key, key.holder, key.owner) == (b"a", "x", "x")
        assert (key.oldest, key.in_flight_entries, key.parked_entries) == (at(0), 1, 1)
        (one,) = report.consumers
        assert (one.name, one.permits, one.unacked_messages) == ("x", 17, 3)
        assert [(each.first, each.last) for each in one.ranges] == consumer.ranges
        assert one.connected.ToMilliseconds() <= one.oldest_delivery.ToMilliseconds()
        await sub.waits_for("a", "IN_FLIGHT_LIMIT", "IN_FLIGHT")
        await consumer.acknowledge(*some)
        await consumer.acknowledge(*await consumer.received(3))
        report = await sub.report()
        assert (report.totals.delivered_entries, report.totals.acknowledged_entries) == (6, 6)
        assert (report.active_keys, report.unacked_messages, report.mark_delete) == (0, 0, at(5))


async def test_causes_of_withheld_keys_are_reported(services: Services, sub: Sub) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *"ab")
    await sub.create()
    assert await sub.why("a") == ["UNREAD", "NO_OWNER"]
    assert await sub.why(at(9)) == ["NO_ENTRY"]
    async with consuming(services.dispatcher, topic, permits=1) as consumer:
        (first,) = await consumer.received(1)
        assert await sub.why(at(0)) == ["IN_FLIGHT"]
        await sub.waits_for("b", "NO_PERMITS")
        await consumer.acknowledge(first)
        assert await sub.why(at(0)) == ["ACKNOWLEDGED"]
        await consumer.permit(1)
        await consumer.received(1)
        await publish(services, topic, "c", first=2)
        assert await sub.why("c") == ["UNREAD", "NO_PERMITS"]
        assert await sub.why(at(2)) == ["UNREAD", "NO_PERMITS"]


async def test_entries_beyond_the_parking_limit_are_read_again(
    private: Private, topic: str
) -> None:
    async with private(
        SEQGATE_DISPATCHER_KEY_PARKED_MAX="2", SEQGATE_DISPATCHER_READ_ENTRIES_MAX="3"
    ) as services:
        sub = Sub(services, topic)
        await publish(services, topic, *("k" * 10), "other")
        async with consuming(
            services.dispatcher, topic, permits=99, max_in_flight_per_key=1
        ) as consumer:
            await sub.waits_for(at(9), "LAGGING", "IN_ORDER", "IN_FLIGHT_LIMIT", "IN_FLIGHT")
            assert (await sub.report()).lagging == 1
            for number in range(10):
                found = [each for each in consumer.deliveries if each.metadata.partition_key == "k"]
                await consumer.until(
                    lambda number=number: any(
                        each.position.entry_id == number for each in consumer.deliveries
                    )
                )
                found = [each for each in consumer.deliveries if each.position.entry_id == number]
                await consumer.acknowledge(*found)
            of_key = [each for each in consumer.deliveries if each.metadata.partition_key == "k"]
            assert numbers(of_key) == [*range(10)]
            assert (await sub.report()).totals.scanned_entries > 0


async def test_pending_settlements_are_explained(stoppable: Services, topic: str) -> None:
    sub = Sub(stoppable, topic)
    await publish(stoppable, topic, *"abb")
    async with consuming(stoppable.dispatcher, topic, permits=9) as consumer:
        got = {each.position.entry_id: each for each in await consumer.received(3)}
        with paused(stoppable.stack, "cursor"):
            request = await consumer.ask_acknowledge(got[0])
            await consumer.negative_acknowledge(got[1], delay_ms=0)
            assert await sub.why(at(0)) == ["SETTLING"]
            assert await sub.why("b") == ["RECORDING"]
            assert not consumer.has_settled(request)
        await consumer.settled(request)
        assert await sub.why(at(0)) == ["ACKNOWLEDGED"]
        assert (await consumer.received(1))[0].attempts == 1


async def test_a_call_whose_backend_is_down_is_unavailable(stoppable: Services, topic: str) -> None:
    sub = Sub(stoppable, topic)
    await publish(stoppable, topic, "a")
    await stoppable.stack.terminate("cursor")
    for method in METHODS:
        more = {} if method == "ListSubscriptions" else {"subscription": "s"}
        with refused(UNAVAILABLE, "CURSORS_UNAVAILABLE"):
            await call(stoppable, method, topic=topic, **more)
    with refused(UNAVAILABLE, "CURSORS_UNAVAILABLE"):
        await connect(stoppable.dispatcher, subscribe(topic))
    await stoppable.stack.run("cursor")
    await stoppable.stack.terminate("ledger")

    async def without_the_ledger() -> bool:
        try:
            await sub.create()
        except aio.AioRpcError as error:
            return "the ledger" in (error.details() or "")
        raise AssertionError("it is created")

    await eventually(without_the_ledger)
    with refused(UNAVAILABLE, "LEDGER_UNAVAILABLE"):
        await connect(stoppable.dispatcher, subscribe(topic))


async def test_dead_letters_are_retried_after_an_outage(stoppable: Services, topic: str) -> None:
    sub = Sub(stoppable, topic)
    await publish(stoppable, topic, *"abcdeabcde")
    async with consuming(stoppable.dispatcher, topic, permits=99, max_redeliveries=0) as consumer:
        got = {each.position.entry_id: each for each in await consumer.received(10)}
        await stoppable.stack.kill("ledger")
        for number in (3, 1, 4, 0, 2):
            await consumer.negative_acknowledge(got[number], delay_ms=0)
        await sub.waits_for("a", "DEAD_LETTERING")
        await stoppable.stack.run("ledger")
        again = await consumer.received(5)
        assert {each.position.entry_id: each.gap.position.entry_id for each in again} == {
            5: 0,
            6: 1,
            7: 2,
            8: 3,
            9: 4,
        }
        await consumer.acknowledge(*again)
        assert await sub.position() == 9
    assert sorted(await origins(stoppable, dlq(topic))) == [0, 1, 2, 3, 4]


async def test_a_refused_dead_letter_blocks_only_its_key(private: Private, topic: str) -> None:
    """The topic is created later by an authorized caller, with restarts in between."""
    closed = "closed/letters/dead"
    options: dict[str, Any] = {"max_redeliveries": 0, "dead_letter_topic": closed}
    own = "/".join(topic.split("/")[:2])
    async with private(SEQGATE_LEDGER_AUTO_CREATE=json.dumps([own])) as services:
        sub = Sub(services, topic)

        async def opens() -> bool:
            """Accepted dead letters may have to be stored first."""
            try:
                await sub.report()
            except aio.AioRpcError as error:
                if error.code() is not UNAVAILABLE:
                    raise
                return False
            return True

        await publish(services, topic, *"abcabc")
        async with consuming(services.dispatcher, topic, permits=99, **options) as consumer:
            got = {each.position.entry_id: each for each in await consumer.received(6)}
            await consumer.negative_acknowledge(got[0], got[1], delay_ms=0)
            await consumer.acknowledge(got[2], got[5])
            for key in "ab":
                await sub.waits_for(key, "DEAD_LETTERING")
        for number in (6, 7):
            await services.stack.kill("dispatcher")
            await services.stack.run("dispatcher")
            await eventually(opens)
            await publish(services, topic, "c", first=number)
            async with consuming(services.dispatcher, topic, permits=99, **options) as consumer:
                await consumer.acknowledge(*await consumer.received(1))
                assert numbers(consumer.deliveries) == [number]
                for key in "ab":
                    await sub.waits_for(key, "DEAD_LETTERING")
        await services.ledger.CreateTopic(ledger_pb2.CreateTopicRequest(topic=closed))
        await services.stack.kill("dispatcher")
        await services.stack.run("dispatcher")
        await eventually(opens)
        async with consuming(services.dispatcher, topic, permits=99, **options) as consumer:
            assert sorted(numbers(await consumer.received(2))) == [3, 4]
        assert sorted(await origins(services, closed)) == [0, 1]


async def test_a_chunk_without_its_first_one_is_a_plain_dead_letter(
    services: Services, topic: str
) -> None:
    metadata = EntryMetadata(
        producer_name="p",
        sequence_id=7,
        publish_time=1,
        partition_key="k",
        uuid="attempt",
        num_chunks_from_msg=3,
        total_chunk_msg_size=9,
        chunk_id=1,
    )
    entry = ledger_pb2.StoredEntry(metadata=metadata, payload=b"mid", append_time=timestamp(1))
    entry.position.ledger_id = 1
    name = TopicName.parse(topic)
    async with following_channel(services.stack.address("ledger"), keepalive_s=10) as channel:
        dead = GrpcDeadLetters(channel, timeout_s=5)
        for _ in range(2):
            assert await dead.put(Letter(TopicName.parse(dlq(topic)), name, "s", 1, 2, entry))
    (stored,) = await letters(services, dlq(topic))
    assert not stored.metadata.num_chunks_from_msg
    properties = stored.metadata.properties
    assert properties["seqgate.origin.chunk"] == "2 of 3"
    assert properties["seqgate.origin.uuid"] == "attempt"
    assert properties["seqgate.origin.sequence_id"] == "7"


# ---- a consumer that does not read


@asynccontextmanager
async def in_this_process(services: Services) -> AsyncIterator[Any]:
    """A dispatcher in this process, whose limits a test can change; yields a stub for it."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    config = DispatcherConfig(listen=address)
    drain = Drain()
    async with (
        following_channel(services.stack.address("ledger"), keepalive_s=10) as ledger,
        following_channel(services.stack.address("cursor"), keepalive_s=10) as cursor,
        peer_channel(services.stack.address("filter"), keepalive_s=10) as filter_,
        asyncio.TaskGroup() as tasks,
    ):
        ports = Ports(
            GrpcLog(ledger, timeout_s=5),
            SubscriptionCursors(cursor, timeout_s=5),
            GrpcDeadLetters(ledger, timeout_s=5),
            GrpcFilters(filter_, timeout_s=5),
            address,
            lambda: time.time_ns() // 1_000_000,
        )
        dispatcher = service_limits.Dispatcher(config, ports, tasks)

        def register(server: aio.Server) -> None:
            servicer = DispatcherServicer(dispatcher, drain, config)
            add_DispatcherServiceServicer_to_server(servicer, server)

        async with (
            grpc_server(config, drain, register=register, services=[], checks={}),
            channel_to(address) as channel,
        ):
            yield DispatcherServiceStub(channel)
        await dispatcher.finish(5)


@pytest.mark.parametrize(
    ("limit", "most"), [("OUTBOX_ITEMS_MAX", 20), ("OUTBOX_BYTES_MAX", 20_000)]
)
async def test_a_slow_consumer_is_cut_off_and_does_not_block_others(
    services: Services, topic: str, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(session_limits, limit, most)
    large = [single(i, i, b"x" * 1024 * 1024, partition_key=str(i)) for i in range(5)]
    await store(services, topic, *large)
    async with in_this_process(services) as stub:
        slow = stub.Consume()
        await slow.write(pb.ConsumeRequest(subscribe=subscribe(topic, name="slow")))
        assert (await slow.read()).HasField("subscribed")
        await slow.write(pb.ConsumeRequest(permit=pb.Permit(messages=5)))
        request = pb.ReportRequest(topic=topic, subscription="s")

        async def has_all() -> bool:
            return bool((await stub.Report(request)).unacked_messages == 5)

        await eventually(has_all)

        async def is_gone() -> bool:
            async with consuming(stub, topic, name="other") as other:
                await other.leave()
            return "slow" not in {each.name for each in (await stub.Report(request)).consumers}

        await eventually(is_gone, within_s=300)  # each attempt adds an item or two
        async with consuming(stub, topic, name="other", permits=5) as other:
            assert len(await other.received(5)) == 5
            with refused(UNAVAILABLE, "SLOW_CONSUMER"):
                while await slow.read() is not aio.EOF:
                    pass
            await other.leave()


@pytest.mark.parametrize("is_half_closed", [False, True])
async def test_an_invalid_request_right_after_subscribe_ends_the_stream(
    services: Services, topic: str, *, is_half_closed: bool
) -> None:
    await publish(services, topic, "k")
    for _ in range(20):
        call = services.dispatcher.Consume()
        await call.write(pb.ConsumeRequest(subscribe=subscribe(topic)))
        with suppress(asyncio.InvalidStateError, aio.AioRpcError):  # it may have ended by then
            await call.write(pb.ConsumeRequest(permit=pb.Permit(messages=0)))
            if is_half_closed:
                await call.done_writing()
        with refused(INVALID, "INVALID_PERMITS"):
            async with asyncio.timeout(WITHIN_S):
                while await call.read() is not aio.EOF:
                    pass
                raise await ending(call)


async def ending(call: Any) -> aio.AioRpcError:
    """The error that ended a stream."""
    trailing = await call.trailing_metadata()
    return aio.AioRpcError(
        await call.code(), aio.Metadata(), trailing, details=await call.details()
    )
