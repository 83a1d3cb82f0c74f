"""The consumer against real services: the cases of test_consumer.py, whose fake service fails on
request, as far as they are visible from outside."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from grpc import aio

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.client import (
    Batching,
    Breaker,
    BreakerState,
    Chunking,
    Client,
    Consumer,
    MessageId,
    Received,
    RetryPolicy,
    SubscriptionType,
    connect,
    process_by_key,
)
from seqgate.dev.stack import Stack
from seqgate.errors import InUseError, NotFoundError, StaleTokenError
from tests.support.stubs import cursor_stub
from tests.support.waiting import WITHIN_S, eventually

AT_ONCE = RetryPolicy(min_s=0, max_s=0)


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        yield client


async def some(consumer: Consumer, count: int) -> list[Received]:
    """The next messages."""
    async with asyncio.timeout(WITHIN_S):
        return [await consumer.receive() for _ in range(count)]


async def publish(client: Client, topic: str, count: int, keys: int) -> None:
    async with client.producer(topic, name="p") as producer:
        for at in range(count):
            producer.send_nowait(b"%d" % at, key=f"key-{at % keys}")
        await producer.flush()


async def test_keys_stay_in_order_despite_a_failed_message(client: Client, topic: str) -> None:
    await publish(client, topic, 60, keys=3)
    seen: dict[str | None, list[int]] = {}
    failed: list[Received] = []
    done = asyncio.Event()

    async def handle(message: Received) -> None:
        if message.payload == b"7" and not failed:
            failed.append(message)
            raise ValueError("once")
        seen.setdefault(message.key, []).append(int(message.payload))
        if sum(map(len, seen.values())) == 60:
            done.set()

    async with client.consumer(topic, "s", retry=AT_ONCE) as consumer:
        processing = asyncio.create_task(
            process_by_key(consumer, handle, on_failure=lambda message, failure: None)
        )
        async with asyncio.timeout(WITHIN_S):
            await done.wait()
        processing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await processing
    assert seen == {f"key-{at}": [*range(at, 60, 3)] for at in range(3)}
    with pytest.raises(TimeoutError):
        async with client.consumer(topic, "s") as consumer:
            await consumer.receive(timeout_s=0.05)


async def test_a_failure_of_every_key_opens_the_breaker(client: Client, topic: str) -> None:
    await publish(client, topic, 60, keys=30)
    tried: list[str | None] = []
    done: dict[str | None, list[int]] = {}
    is_down = True

    async def handle(message: Received) -> None:
        if is_down:
            tried.append(message.key)
            raise ConnectionError("the database is away")
        done.setdefault(message.key, []).append(int(message.payload))

    breaker = Breaker(outcomes=5, pause_min_s=0.02, pause_max_s=0.05)
    async with client.consumer(topic, "s", retry=AT_ONCE, breaker=breaker) as consumer:
        processing = asyncio.create_task(
            process_by_key(
                consumer, handle, concurrency=4, on_failure=lambda message, failure: None
            )
        )
        await eventually(lambda: len(tried) >= 10)
        tripped = consumer.breaker_state
        assert tripped is not BreakerState.CLOSED
        assert len(set(tried)) < 20
        is_down = False
        await eventually(lambda: sum(map(len, done.values())) == 60)
        assert consumer.breaker_state is BreakerState.CLOSED
        processing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await processing
    assert done == {f"key-{at}": [at, at + 30] for at in range(30)}


async def test_unacknowledged_messages_go_to_the_next_consumer(client: Client, topic: str) -> None:
    await publish(client, topic, 10, keys=1)
    async with client.consumer(topic, "s") as consumer:
        messages = await some(consumer, 4)
        await asyncio.gather(*(consumer.ack(message) for message in messages[:3]))
    async with client.consumer(topic, "s", start=None) as consumer:
        again = await some(consumer, 7)
        assert [int(message.payload) for message in again] == [*range(3, 10)]
        assert {message.attempts for message in again} == {0}


async def test_a_large_message_is_refused_and_acknowledged_as_one(
    client: Client, topic: str
) -> None:
    async with client.producer(topic, name="p", chunking=Chunking(1_000)) as producer:
        await producer.send(b"z" * 5_500, key="k")
        await producer.send(b"after", key="k")
    async with client.consumer(topic, "s", retry=AT_ONCE) as consumer:
        large, after = await some(consumer, 2)
        await consumer.nack(large)
        with pytest.raises(StaleTokenError):
            await consumer.ack(after)
        (again,) = await some(consumer, 1)
        assert (again.payload, again.attempts) == (b"z" * 5_500, 1)
        await consumer.ack(again)
        (after,) = await some(consumer, 1)
        assert (after.payload, after.attempts) == (b"after", 0)
        await consumer.ack(after)


async def test_acknowledged_messages_of_a_batch_stay_acknowledged(
    client: Client, topic: str
) -> None:
    async with client.producer(topic, name="p", batching=Batching(delay_s=60)) as producer:
        for at in range(5):
            producer.send_nowait(b"%d" % at)
        await producer.flush()
    async with client.consumer(topic, "s", type=SubscriptionType.SHARED) as consumer:
        messages = await some(consumer, 5)
        for at in (0, 3):
            await consumer.ack(messages[at])
    async with client.consumer(topic, "s", type=SubscriptionType.SHARED) as consumer:
        assert [message.payload for message in await some(consumer, 3)] == [b"1", b"2", b"4"]


async def test_a_consumer_seeks_back_and_forth(client: Client, topic: str) -> None:
    await publish(client, topic, 6, keys=1)
    async with client.consumer(topic, "s", type=SubscriptionType.EXCLUSIVE) as consumer:
        messages = await some(consumer, 6)
        await consumer.ack_through(messages[4])
        await consumer.seek(messages[2].id)
        assert [int(each.payload) for each in await some(consumer, 4)] == [2, 3, 4, 5]
        await consumer.seek("earliest")
        assert len(await some(consumer, 6)) == 6
        with pytest.raises(StaleTokenError):
            await consumer.ack(messages[5])


async def test_a_missing_or_busy_subscription_is_refused(client: Client, topic: str) -> None:
    await publish(client, topic, 1, keys=1)
    with pytest.raises(NotFoundError) as missing:
        await client.consumer(topic, "s", start=None).open()
    assert missing.value.reason == "SUBSCRIPTION_NOT_FOUND"
    async with client.consumer(topic, "s", type=SubscriptionType.EXCLUSIVE) as consumer:
        with pytest.raises(InUseError) as busy:
            await client.consumer(topic, "s", type=SubscriptionType.EXCLUSIVE).open()
        assert busy.value.reason == "SUBSCRIPTION_BUSY"
        (message,) = await some(consumer, 1)
        assert message.id == MessageId(*message.id.position)
        await consumer.ack(message)


async def test_connected_consumers_follow_a_manual_reset_of_the_cursor(
    stack: Stack, client: Client, topic: str
) -> None:
    await publish(client, topic, 5, keys=1)
    async with client.consumer(topic, "s") as consumer:
        for message in await some(consumer, 5):
            await consumer.ack(message)
        async with aio.insecure_channel(stack.address("cursor")) as channel:
            request = cursor_pb2.ResetCursorRequest(topic=topic, cursor="s")
            await cursor_stub(channel).ResetCursor(request)
        async with client.producer(topic) as producer:
            await producer.send(b"5", key="key-0")
        (new,) = await some(consumer, 1)
        with pytest.raises(StaleTokenError):
            await consumer.ack(new)
        for at, message in enumerate(await some(consumer, 6)):
            assert int(message.payload) == at
            await consumer.ack(message)
