"""The breaker of a consumer, as its application's log, `explain` and the report show it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.client import (
    Breaker,
    BreakerState,
    Client,
    Consumer,
    Outgoing,
    SubscriptionType,
    connect,
)
from seqgate.dev.stack import Stack
from tests.integration.services import Services
from tests.support.fake_dispatcher import FakeDispatcher, serving_fake
from tests.support.waiting import WITHIN_S, eventually

STAYS_OPEN = Breaker(outcomes=3, pause_min_s=60)


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        yield client


async def refuse(consumer: Consumer, count: int) -> None:
    for _ in range(count):
        await consumer.nack(await consumer.receive(WITHIN_S), delay_s=60)


async def test_a_breaker_is_logged_explained_and_reported_until_it_closes(
    client: Client, services: Services, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    names: dict[str, Any] = {"topic": topic, "subscription": "s"}
    breaker = Breaker(outcomes=3, pause_min_s=0.1)

    async def reported() -> pb.ConsumerReport:
        consumer: pb.ConsumerReport
        (consumer,) = (await services.dispatcher.Report(pb.ReportRequest(**names))).consumers
        return consumer

    async with client.producer(topic) as producer:
        receipts = await producer.send_many([Outgoing(b"%d" % at) for at in range(6)])
    shared = SubscriptionType.SHARED
    async with client.consumer(topic, "s", type=shared, name="c", breaker=breaker) as consumer:
        assert not (await reported()).HasField("breaker")
        with caplog.at_level(logging.WARNING, "seqgate.client"):
            await refuse(consumer, 3)
            assert consumer.breaker_state is not BreakerState.CLOSED
            report = await reported()
            assert report.breaker.open
            assert report.breaker.pause.ToMilliseconds() == 100
            assert report.HasField("breaker_opened")
            request = pb.ExplainRequest(**names)
            last = receipts[-1].message_id
            request.position.ledger_id, request.position.entry_id = last.position
            (why, *_) = (await services.dispatcher.Explain(request)).reasons
            assert why.text.endswith(
                "; the circuit breaker of c is open, since its application refused the last"
                " messages: it tries one every 0.1 s"
            )
            await consumer.ack(await consumer.receive(WITHIN_S))
            assert not (await reported()).HasField("breaker")
            assert (
                "circuit breaker"
                not in (await services.dispatcher.Explain(request)).reasons[0].text
            )
    opened, closed = [each.getMessage() for each in caplog.records]
    assert opened.startswith(
        f"consumer 'c' of subscription 's' of {topic} hands out nothing for 0.1 s, then one"
        " message at a time: the breaker is open"
    )
    assert "give breaker= to Client.consumer" in opened
    assert closed.startswith(f"consumer 'c' of subscription 's' of {topic} goes on")


async def test_an_open_breaker_is_told_again_on_a_new_stream() -> None:
    async with serving_fake() as fake, connect("127.0.0.1:1", fake.address) as client:
        for at in range(4):
            fake.publish(b"%d" % at, key=f"{at}")
        async with client.consumer("public/default/t", "s", breaker=STAYS_OPEN) as consumer:
            async with asyncio.timeout(WITHIN_S):
                for _ in range(3):
                    await consumer.nack(await consumer.receive(), delay_s=60)
            (told,) = told_by(fake)
            assert (told.breaker.open, told.breaker.pause.ToSeconds()) == (True, 60)
            fake.cut()
            await eventually(lambda: fake.subscribed == 2)
            assert fake.first.breaker == told.breaker


def told_by(fake: FakeDispatcher) -> list[pb.ConsumeRequest]:
    return [each for each in fake.requests if each.HasField("breaker")]
