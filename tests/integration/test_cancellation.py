"""The asyncio client, when a call is cancelled at any of its waits.

Nothing that it had taken is lost, no slot leaks, and the next calls work.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from seqgate.client import Client, Consumer, Received, SubscriptionType, connect, process_by_key
from seqgate.dev.stack import Stack
from seqgate.errors import ConsumerClosedError, ProducerClosedError
from tests.support.cancelling import at_each_wait, cancelled
from tests.support.fake_dispatcher import FakeDispatcher, serving_fake
from tests.support.waiting import WITHIN_S, eventually

TOPIC = "public/default/orders"


@pytest.fixture
async def fake() -> AsyncIterator[FakeDispatcher]:
    async with serving_fake() as fake:
        yield fake


@pytest.fixture
async def faked(fake: FakeDispatcher) -> AsyncIterator[Client]:
    async with connect("127.0.0.1:1", fake.address) as client:
        yield client


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    addresses = [stack.address("ledger"), stack.address("dispatcher")]
    async with connect(*addresses, dedup=stack.address("dedup")) as client:
        yield client


# ---- consuming

TAKING: dict[str, Callable[[Consumer], Awaitable[Any]]] = {
    "receive": lambda consumer: consumer.receive(),
    "receive with a time-out": lambda consumer: consumer.receive(WITHIN_S),
    "receive_many": lambda consumer: consumer.receive_many(),
    "iterate": lambda consumer: anext(consumer),
    "receive_and_lock": lambda consumer: consumer.receive_and_lock(),
    "wait_for": lambda consumer: asyncio.wait_for(consumer.receive(), WITHIN_S),
}


@pytest.mark.parametrize("take", TAKING)
@pytest.mark.parametrize("arrives", [True, False], ids=["as it arrives", "before"])
async def test_a_message_that_a_cancelled_call_waited_for_goes_to_the_next(
    faked: Client, fake: FakeDispatcher, take: str, arrives: bool
) -> None:
    async with faked.consumer(TOPIC, "s") as consumer:
        for at in range(10):
            waiting = asyncio.ensure_future(TAKING[take](consumer))
            await asyncio.sleep(0)
            if not arrives:
                waiting.cancel()
            fake.publish(b"%d" % at, key="a")
            await until_buffered(consumer)
            waiting.cancel()  # it is about to be woken
            try:
                message = await waiting  # Python 3.11's wait_for prefers the result
            except asyncio.CancelledError:
                message = await consumer.receive(WITHIN_S)
            assert (message.payload, message.attempts) == (b"%d" % at, 0)
            await consumer.ack(message)


async def until_buffered(consumer: Consumer) -> None:
    """Without a task switch between the message's arrival and the return."""
    async with asyncio.timeout(WITHIN_S):
        while not consumer.buffered:
            await asyncio.sleep(0)


SETTLING: dict[str, Callable[[Consumer, Received], Awaitable[Any]]] = {
    "ack": lambda consumer, message: consumer.ack(message),
    "ack_many": lambda consumer, message: consumer.ack_many([message]),
    "ack_id": lambda consumer, message: consumer.ack_id(message.id),
    "nack": lambda consumer, message: consumer.nack(message, delay_s=0),
    "extend": lambda consumer, message: consumer.extend(message),
    "flush": lambda consumer, message: consumer.flush(),
    "seek": lambda consumer, message: consumer.seek(message.id),
}


@pytest.mark.parametrize("settle", SETTLING)
async def test_a_consumer_goes_on_after_a_cancelled_settlement(
    faked: Client, fake: FakeDispatcher, settle: str
) -> None:
    async with faked.consumer(TOPIC, "s", breaker=None) as consumer:

        async def scenario(at: int) -> bool:
            fake.publish(b"%d" % at, key="a")
            message = await consumer.receive(WITHIN_S)
            was_cancelled, _ = await cancelled(lambda: SETTLING[settle](consumer, message), at)
            await consumer.flush()  # a seek under way goes on
            if settle in ("nack", "seek", "extend", "flush"):
                await consumer.seek(message.id)
                await consumer.ack(await consumer.receive(WITHIN_S))
            await consumer.flush()
            assert consumer._inbox.is_answered
            return was_cancelled

        assert await at_each_wait(scenario) >= (1 if settle != "flush" else 0)
    assert not consumer.is_connected


@pytest.mark.parametrize("how", ["open", "close", "enter", "exit"])
async def test_a_consumer_that_is_cancelled_while_it_is_opened_or_closed_is_closed(
    faked: Client, fake: FakeDispatcher, how: str
) -> None:
    async def scenario(at: int) -> bool:
        consumer = faked.consumer(TOPIC, "s", type=SubscriptionType.EXCLUSIVE)
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "open": consumer.open,
            "enter": consumer.__aenter__,
            "close": consumer.close,
            "exit": lambda: consumer.__aexit__(None, None, None),
        }
        waiting = None
        if how in ("close", "exit"):
            await consumer.open()
            waiting = asyncio.create_task(consumer.receive())
            await asyncio.sleep(0)
        was_cancelled, _ = await cancelled(calls[how], at)
        if waiting is not None:
            async with asyncio.timeout(WITHIN_S):
                with pytest.raises(ConsumerClosedError):
                    await waiting
        if was_cancelled:
            with pytest.raises(ConsumerClosedError):
                await consumer.receive()
        async with asyncio.timeout(WITHIN_S):
            await consumer.close()
        await eventually(lambda: not fake.streams, "its stream has ended")
        return was_cancelled

    assert await at_each_wait(scenario) >= 1


async def test_cancelled_processing_loses_nothing(faked: Client, fake: FakeDispatcher) -> None:
    async with faked.consumer(TOPIC, "s") as consumer:

        async def scenario(at: int) -> bool:
            async def handle(message: Received) -> None:
                await asyncio.sleep(0)

            for number in range(3):
                fake.publish(b"%d" % number, key="a")
            processing = asyncio.create_task(
                cancelled(lambda: process_by_key(consumer, handle, stop_timeout_s=1), at)
            )
            await asyncio.wait([processing], timeout=0.02)
            processing.cancel()
            await asyncio.wait([processing])
            await finish(consumer, fake)
            return at < 3  # it waits twice: for its end, and for its handlers'

        await at_each_wait(scenario)


async def finish(consumer: Consumer, fake: FakeDispatcher) -> None:
    """Process what is left; none of it has failed."""

    async def handle(message: Received) -> None:
        assert message.attempts == 0

    processing = asyncio.create_task(process_by_key(consumer, handle))
    await eventually(lambda: len(fake.done) == len(fake.log))
    processing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await processing


# ---- publishing


@pytest.mark.parametrize("method", ["send", "send waits", "send_many", "flush"])
async def test_a_producer_goes_on_after_a_cancelled_call(
    client: Client, topic: str, method: str
) -> None:
    async with client.producer(topic, max_pending_messages=1) as producer:
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "send": lambda: producer.send(b"0"),
            "send waits": lambda: producer.send(b"0"),
            "send_many": lambda: producer.send_many([b"0", b"1"]),
            "flush": producer.flush,
        }

        async def scenario(at: int) -> bool:
            before = producer.send_nowait(b"before") if method != "send" else None
            was_cancelled, _ = await cancelled(calls[method], at)
            if before is not None:
                await before
            await producer.send(b"after")
            assert (producer.pending_messages, producer.pending_bytes) == (0, 0)
            return was_cancelled

        async with asyncio.timeout(WITHIN_S):
            assert await at_each_wait(scenario) >= 1


@pytest.mark.parametrize("how", ["open", "close", "exit"])
async def test_a_producer_that_is_cancelled_while_it_is_opened_or_closed_is_closed(
    client: Client, topic: str, how: str
) -> None:
    async def scenario(at: int) -> bool:
        producer = client.producer(topic, name="p", takeover=True)
        pending = None
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "open": producer.open,
            "close": producer.close,
            "exit": lambda: producer.__aexit__(None, None, None),
        }
        if how != "open":
            await producer.open()
            pending = producer.send_nowait(b"0")
        was_cancelled, _ = await cancelled(calls[how], at)
        if pending is not None:
            assert pending.done()
            if pending.exception() is not None:
                assert isinstance(pending.exception(), ProducerClosedError)
        if was_cancelled:
            with pytest.raises(ProducerClosedError):
                await producer.send(b"1")
        await producer.close()
        assert producer.pending_messages == 0
        return was_cancelled

    async with asyncio.timeout(WITHIN_S):
        assert await at_each_wait(scenario) >= 1


# ---- reading, and managing


@pytest.mark.parametrize("method", ["read", "iterate", "read_many"])
async def test_a_reader_goes_on_after_a_cancelled_call(
    client: Client, topic: str, method: str
) -> None:
    async with client.producer(topic) as producer:
        await producer.send_many([b"%d" % number for number in range(3)])

    async def scenario(at: int) -> bool:
        read: list[bytes] = []
        reader = client.reader(topic)

        async def take() -> None:
            match method:
                case "read":
                    message = await reader.read()
                    assert message is not None
                    read.append(message.payload)
                case "iterate":
                    read.append((await anext(reader)).payload)
                case _:
                    read.extend(each.payload for each in await reader.read_many())

        was_cancelled, _ = await cancelled(take, at)
        while len(read) < 3:
            await take()
        assert read == [b"0", b"1", b"2"]
        await cancelled(reader.has_message_available, at)
        assert not await reader.has_message_available()
        await reader.close()
        return was_cancelled

    async with asyncio.timeout(WITHIN_S):
        assert await at_each_wait(scenario) >= 1


async def test_an_admin_goes_on_after_a_cancelled_call(client: Client, topic: str) -> None:
    admin = client.admin()
    await admin.create_topic(topic)

    async def scenario(at: int) -> bool:
        was_cancelled, _ = await cancelled(lambda: admin.topic(topic), at)
        assert (await admin.topic(topic)).name == topic
        return was_cancelled

    assert await at_each_wait(scenario) >= 1
