"""The client's calls for many messages at once."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from seqgate.client import (
    Batching,
    Chunking,
    Client,
    Outgoing,
    Receipt,
    Received,
    SendManyError,
    connect,
)
from seqgate.dev.stack import Stack
from seqgate.errors import (
    FencedError,
    InvalidRequestError,
    MessageTooLargeError,
    MixedSequenceIdsError,
    ProducerClosedError,
    StaleSequenceIdError,
    StaleTokenError,
)
from tests.support.waiting import WITHIN_S, eventually

COUNT = 500


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        yield client


async def stored(client: Client, topic: str) -> list[bytes]:
    found: list[bytes] = []
    async with client.reader(topic, follow=False) as reader:
        while messages := await reader.read_many(7):
            assert len(messages) <= 7
            found += [each.payload for each in messages]
    return found


def numbered(count: int) -> list[bytes]:
    return [b"%d" % each for each in range(count)]


@pytest.mark.parametrize("batching", [None, Batching(messages_max=50)])
async def test_many_messages_are_stored_in_order(
    client: Client, topic: str, batching: Batching | None
) -> None:
    async with client.producer(topic, batching=batching, max_pending_messages=64) as producer:
        receipts = await producer.send_many(numbered(COUNT))
        assert await producer.send_many([]) == []
    assert [each.sequence_id for each in receipts] == [*range(COUNT)]
    assert not any(each.duplicate for each in receipts)
    assert sorted({each.message_id for each in receipts}) == [each.message_id for each in receipts]
    assert await stored(client, topic) == numbered(COUNT)


async def test_many_messages_have_what_they_are_given(client: Client, topic: str) -> None:
    sent = Outgoing(b"a", key="k", properties={"x": "y"}, sequence_id=7, ordering_key=b"o")
    async with client.producer(topic) as producer:
        await producer.send_many(
            [sent, Outgoing(b"b", key=b"\xff", sequence_id=9, event_time_ms=5)]
        )
    async with client.reader(topic, follow=False) as reader:
        first, second = await reader.read_many()
        assert await reader.read_many() == []
    assert (first.key, first.properties, first.sequence_id) == ("k", {"x": "y"}, 7)
    assert (first.ordering_key, second.event_time_ms, second.has_bytes_key) == (b"o", 5, True)


async def test_one_invalid_message_sends_none(client: Client, topic: str) -> None:
    async with client.producer(topic) as producer:
        with pytest.raises(InvalidRequestError, match="key must be text or bytes"):
            await producer.send_many([b"good", Outgoing(b"bad", key="\ud800")])
        await producer.send_many([b"next"])
    assert await stored(client, topic) == [b"next"]
    with pytest.raises(ProducerClosedError):
        await producer.send_many([b"late"])


async def test_even_no_messages_are_refused_once_another_producer_took_over(
    client: Client, topic: str
) -> None:
    async with (
        client.producer(topic, name="p") as old,
        client.producer(topic, name="p", takeover=True) as new,
    ):

        async def refused() -> bool:
            try:
                await old.send_many([])
            except FencedError as error:
                return error.reason == "PRODUCER_TAKEN_OVER"
            return False

        await eventually(refused)
        assert await new.send_many([]) == []
    with pytest.raises(ProducerClosedError):
        await new.send_many([])


async def test_failures_among_many_messages_are_told_with_the_receipts(
    client: Client, topic: str
) -> None:
    async with client.producer(topic) as producer:
        await producer.send(b"before", sequence_id=5)
        ids = [4, 5, 6, None]
        with pytest.raises(SendManyError) as failure:
            await producer.send_many([Outgoing(b"x", sequence_id=each) for each in ids])
    stale, duplicate, new, mixed = failure.value.outcomes
    assert isinstance(stale, StaleSequenceIdError)
    assert stale.sequence_id == 4
    assert isinstance(duplicate, Receipt)
    assert isinstance(new, Receipt)
    assert (duplicate.duplicate, new.duplicate) == (True, False)
    assert isinstance(mixed, MixedSequenceIdsError)
    assert failure.value.reason == stale.reason
    assert str(failure.value).startswith("2 of 4 messages failed; the first: ")


async def test_a_flush_waits_for_many_messages(client: Client, topic: str) -> None:
    async with client.producer(topic) as producer:
        sending = asyncio.create_task(producer.send_many(numbered(COUNT)))
        await asyncio.sleep(0)
        await producer.flush()
        assert producer.pending_messages == 0
        assert len(await sending) == COUNT
    assert await stored(client, topic) == numbered(COUNT)


async def test_a_flush_ends_after_many_messages_were_cancelled(client: Client, topic: str) -> None:
    async with client.producer(topic, max_pending_messages=64) as producer:
        sending = asyncio.create_task(producer.send_many(numbered(COUNT)))
        await asyncio.sleep(0)
        sending.cancel()
        async with asyncio.timeout(WITHIN_S):
            await producer.flush()
    assert await stored(client, topic) == numbered(64)


async def test_a_message_too_large_fails_among_many(client: Client, topic: str) -> None:
    async with client.producer(topic, chunking=Chunking(1_000)) as producer:
        limit = producer._limits.max_large_message_bytes
        with pytest.raises(SendManyError) as failure:
            await producer.send_many([b"small", bytes(limit + 1), b"next"])
    small, large, following = failure.value.outcomes
    assert isinstance(small, Receipt)
    assert isinstance(large, MessageTooLargeError)
    assert isinstance(following, Receipt)


@pytest.mark.parametrize("batching", [None, Batching(messages_max=7), Batching(messages_max=300)])
async def test_many_messages_are_received_and_acknowledged(
    client: Client, topic: str, batching: Batching | None
) -> None:
    async with client.producer(topic, batching=batching) as producer:
        await producer.send_many(numbered(COUNT))
    found: list[bytes] = []
    messages: list[Received] = []
    async with client.consumer(topic, "s") as consumer, asyncio.timeout(WITHIN_S):
        while len(found) < COUNT:
            messages = await consumer.receive_many(100)
            assert 1 <= len(messages) <= 100
            found += [each.payload for each in messages]
            await consumer.ack_many(messages)
        assert sorted(map(int, found)) == [*range(COUNT)]
        with pytest.raises(StaleTokenError):
            await consumer.ack_many(messages)
        await consumer.ack_many([])
        with pytest.raises(ValueError, match="at least 1"):
            await consumer.receive_many(0)
    async with client.consumer(topic, "s") as consumer:
        with pytest.raises(TimeoutError):
            await consumer.receive_many(timeout_s=0.05)


async def test_acknowledging_a_batch_waits_for_what_is_acknowledged_already(
    client: Client, topic: str
) -> None:
    async with client.producer(topic, batching=Batching(messages_max=4)) as producer:
        await producer.send_many(numbered(4))
    async with client.consumer(topic, "s") as consumer, asyncio.timeout(WITHIN_S):
        messages = await consumer.receive_many(3)
        assert [int(each.payload) for each in messages] == [0, 1, 2]
        first = consumer.ack_nowait(messages[0])
        await consumer.ack_many(messages)
        assert first.done()
        await consumer.ack_many([messages[1], messages[1]])
        (last,) = await consumer.receive_many()
        await consumer.ack_many([last])
    async with client.consumer(topic, "s") as consumer:
        with pytest.raises(TimeoutError):
            await consumer.receive_many(timeout_s=0.05)
