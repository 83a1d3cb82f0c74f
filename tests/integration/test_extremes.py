"""What may be stored may be read, explained, shown, filtered, dead-lettered and redriven: the
largest and the smallest value of each field that a producer chooses."""

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlencode

import pytest

from seqgate.api.filter.v1 import filter_pb2
from seqgate.client import Client, MessageId, SubscriptionOptions, SubscriptionType, connect
from seqgate.dev.ports import free_ports
from seqgate.services.console.app import Console
from seqgate.services.console.calls import calls_of
from seqgate.services.console.config import ConsoleConfig
from seqgate.services.console.serving import serving
from seqgate.times import moment
from seqgate.types import SEQUENCE_ID_MAX
from tests.integration.services import Services
from tests.support.console import Browser
from tests.support.extremes import FIELDS, FIRST_ID, store_extremes
from tests.support.waiting import WITHIN_S, eventually

IDS = [MessageId(1, entry_id) for entry_id in range(len(FIELDS))]


@pytest.fixture
async def client(services: Services) -> AsyncIterator[Client]:
    address = services.stack.address
    async with connect(
        address("ledger"), address("dispatcher"), dedup=address("dedup"), cursor=address("cursor")
    ) as client:
        yield client


@pytest.fixture
async def extreme(services: Services, topic: str) -> str:
    await store_extremes(services.ledger, topic)
    return topic


async def test_every_value_is_read_as_it_was_stored(client: Client, extreme: str) -> None:
    async with client.reader(extreme, follow=False) as reader:
        found = [each async for each in reader]
    for message, fields in zip(found, FIELDS.values(), strict=True):
        assert message.publish_time_ms == fields["publish_time"]
        assert message.event_time_ms == fields["event_time"]
    assert [each.sequence_id for each in found] == list(range(FIRST_ID, SEQUENCE_ID_MAX + 1))


async def test_every_message_is_explained_and_its_life_told(client: Client, extreme: str) -> None:
    admin = client.admin()
    await admin.create_subscription(extreme, "s")
    async with client.consumer(extreme, "s", type=SubscriptionType.SHARED) as consumer:
        first = await consumer.receive(timeout_s=WITHIN_S)
        assert first.id == IDS[0]
        for number, (where, fields) in enumerate(zip(IDS, FIELDS.values(), strict=True)):
            (why, *_) = await admin.explain_delivery(extreme, "s", message_id=where)
            if where != first.id:
                assert (why.reason, why.until) == ("DELAYED", moment(fields["deliver_at_time"]))
            for life in (
                await admin.message_life(extreme, message_id=where),
                await admin.message_life(extreme, producer="p", sequence_id=FIRST_ID + number),
            ):
                assert life.message is not None
                assert life.message.event_time_ms == fields["event_time"]
                assert not life.unknown
                (subscription,) = life.subscriptions
                assert not subscription.unknown
                assert subscription.reasons == (why,)


async def test_a_dead_letter_keeps_every_value_through_its_redrive(
    services: Services, client: Client, topic: str
) -> None:
    await store_extremes(services.ledger, topic, without=("deliver_at_time",))
    admin = client.admin()
    await admin.create_subscription(topic, "s")
    options = SubscriptionOptions(max_redeliveries=0)
    async with client.consumer(
        topic, "s", type=SubscriptionType.SHARED, options=options
    ) as consumer:
        for _ in FIELDS:
            await consumer.nack(await consumer.receive(timeout_s=WITHIN_S), delay_s=0)

        async def all_dead() -> bool:
            return len([each async for each in admin.dead_letters(topic, "s")]) == len(FIELDS)

        await eventually(all_dead, "all messages are dead letters")
        letters = [each.id async for each in admin.dead_letters(topic, "s")]
        await admin.redrive(topic, "s", letters, request_id="r")
        found = [await consumer.receive(timeout_s=WITHIN_S) for _ in FIELDS]
    assert {each.event_time_ms for each in found} == {
        each["event_time"] for each in FIELDS.values()
    }


async def test_a_filter_judges_every_time_that_it_can_hold(
    services: Services, extreme: str
) -> None:
    """An expression's numbers end at 2^63 - 1: an entry beyond fails, by the policy on failures."""
    for entry in await services.read(extreme, metadata_only=True):
        request = filter_pb2.ExplainRequest(
            expression="publish_time_ms >= 0", metadata=entry.metadata, topic=extreme
        )
        outcome = (await services.filter.Explain(request)).outcome
        if entry.metadata.publish_time > SEQUENCE_ID_MAX:
            assert outcome.failure.reason == filter_pb2.FAILURE_REASON_INVALID_METADATA
        else:
            assert outcome.verdict == filter_pb2.FILTER_VERDICT_ACCEPT


async def test_the_console_shows_every_value(
    services: Services, client: Client, extreme: str
) -> None:
    (port,) = free_ports(1)
    names = ("ledger", "dedup", "cursor", "dispatcher", "filter")
    targets: dict[str, Any] = {f"{name}_target": services.stack.address(name) for name in names}
    config = ConsoleConfig(listen=f"127.0.0.1:{port}", **targets)
    await client.admin().create_subscription(extreme, "s")
    calls = calls_of(config)
    try:
        async with (
            client.consumer(extreme, "s", type=SubscriptionType.SHARED) as consumer,
            serving(config, Console(config, calls).app),
        ):
            await consumer.receive(timeout_s=WITHIN_S)
            browser = Browser(config.listen)
            for path in _pages(extreme):
                answer = await browser.get(path)
                assert answer.status == 200, (path, answer.words)
    finally:
        await calls.close()


def _pages(topic: str) -> list[str]:
    def page(path: str, **query: object) -> str:
        return f"{path}?{urlencode({'topic': topic, **query})}"

    each_message = [
        page(path, position=f"{each.ledger_id}:{each.entry_id}")
        for path in ("/message", "/life")
        for each in IDS
    ]
    return [
        page("/topic"),
        page("/messages"),
        page("/subscription", subscription="s"),
        page("/life", producer="p", sequence_id=SEQUENCE_ID_MAX),
        *each_message,
    ]
