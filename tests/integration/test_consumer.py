"""The consumer: each message of a subscription until it is acknowledged, despite failures."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.client import (
    AfterDeadLetter,
    AssemblyLimits,
    Breaker,
    BreakerState,
    ChunkMessageId,
    Client,
    Consumer,
    Dropped,
    DropReason,
    Incomplete,
    MessageId,
    Received,
    RetryPolicy,
    SubscriptionOptions,
    SubscriptionType,
    connect,
    process_by_key,
)
from seqgate.errors import (
    ConsumerClosedError,
    CorruptMessageError,
    InvalidRequestError,
    StaleTokenError,
    UnavailableError,
)
from seqgate.types import Position
from tests.support.fake_dispatcher import FakeDispatcher, serving_fake
from tests.support.waiting import WITHIN_S, eventually

TOPIC = "public/default/orders"
AT_ONCE = RetryPolicy(min_s=0, max_s=0)
NOBODY = "127.0.0.1:1"


@pytest.fixture
async def fake() -> AsyncIterator[FakeDispatcher]:
    async with serving_fake() as fake:
        yield fake


@pytest.fixture
async def client(fake: FakeDispatcher) -> AsyncIterator[Client]:
    async with connect(NOBODY, fake.address) as client:
        yield client


async def some(consumer: Consumer, count: int) -> list[Received]:
    """The next messages."""
    async with asyncio.timeout(WITHIN_S):
        return [await consumer.receive() for _ in range(count)]


def payloads(messages: list[Received]) -> list[bytes]:
    return [message.payload for message in messages]


def said(fake: FakeDispatcher, what: str) -> list[pb.ConsumeRequest]:
    """The requests of one kind that the service received."""
    return [request for request in fake.requests if request.HasField(what)]  # type: ignore[arg-type]


# ---- in order, until acknowledged


async def test_messages_arrive_in_order_and_acknowledged_ones_are_not_redelivered(
    client: Client, fake: FakeDispatcher
) -> None:
    for at in range(10):
        fake.publish(b"%d" % at, key=f"key-{at % 3}")
    async with client.consumer(TOPIC, "s") as consumer:
        messages = await some(consumer, 10)
        await asyncio.gather(*(consumer.ack(message) for message in messages))
        fake.publish(b"last")
        assert payloads(await some(consumer, 1)) == [b"last"]
    for key in ("key-0", "key-1", "key-2"):
        of_key = [int(message.payload) for message in messages if message.key == key]
        assert of_key == [*range(int(key[-1]), 10, 3)]
    assert {message.attempts for message in messages} == {0}
    assert fake.mark_delete == Position(1, 9)


async def test_an_acknowledgement_returns_when_it_is_durable(
    client: Client, fake: FakeDispatcher
) -> None:
    fake.publish(b"x")
    async with client.consumer(TOPIC, "s") as consumer:
        (message,) = await some(consumer, 1)
        fake.durable.clear()
        acknowledged = consumer.ack_nowait(message)
        await eventually(lambda: said(fake, "acknowledge"))
        assert not acknowledged.done()
        fake.durable.set()
        await acknowledged


async def test_acknowledgements_are_sent_together(client: Client, fake: FakeDispatcher) -> None:
    for _ in range(100):
        fake.publish(b"x")
    async with client.consumer(TOPIC, "s") as consumer:
        messages = await some(consumer, 100)
        await asyncio.gather(*(consumer.ack(message) for message in messages))
    assert len(said(fake, "acknowledge")) < 10


async def test_messages_of_a_batch_are_acknowledged_one_by_one(
    client: Client, fake: FakeDispatcher
) -> None:
    fake.publish_batch([b"a", b"b", b"c"], key="k")
    async with client.consumer(TOPIC, "s") as consumer:
        messages = await some(consumer, 3)
        assert [message.id.batch_index for message in messages] == [0, 1, 2]
        await consumer.ack(messages[0])
        await consumer.ack_id(MessageId(1, 0, batch_index=2))
        assert not fake.done
        await consumer.nack(messages[1], 0)
        (again,) = await some(consumer, 1)
        assert (again.payload, again.attempts) == (b"b", 1)
        await consumer.ack(again)
    assert fake.done == {Position(1, 0)}


async def test_an_exclusive_consumer_acknowledges_a_message_and_all_before(
    client: Client, fake: FakeDispatcher
) -> None:
    for at in range(5):
        fake.publish(b"%d" % at, key=f"key-{at}")
    async with client.consumer(TOPIC, "s", type=SubscriptionType.EXCLUSIVE) as consumer:
        messages = await some(consumer, 5)
        await consumer.ack_through(messages[3])
        assert fake.mark_delete == Position(1, 3)
        with pytest.raises(StaleTokenError):
            await consumer.ack(messages[1])


async def test_a_shared_subscription_has_no_cumulative_acknowledgement(
    client: Client, fake: FakeDispatcher
) -> None:
    fake.publish(b"x")
    async with client.consumer(TOPIC, "s") as consumer:
        (message,) = await some(consumer, 1)
        with pytest.raises(InvalidRequestError) as refused:
            await consumer.ack_through(message)
        assert refused.value.reason == "CUMULATIVE_ACK_REFUSED"


# ---- refusals


async def test_a_refused_message_is_redelivered_before_later_messages_of_its_key(
    client: Client, fake: FakeDispatcher
) -> None:
    for at in range(4):
        fake.publish(b"a%d" % at, key="a")
        fake.publish(b"b%d" % at, key="b")
    seen: list[Received] = []
    async with client.consumer(TOPIC, "s", retry=AT_ONCE) as consumer:
        while len(seen) < 9:
            (message,) = await some(consumer, 1)
            seen.append(message)
            if message.payload == b"a1" and message.attempts == 0:
                await consumer.nack(message)
            else:
                await consumer.ack(message)
    of_a = [(each.payload, each.attempts) for each in seen if each.key == "a"]
    assert of_a == [(b"a0", 0), (b"a1", 0), (b"a1", 1), (b"a2", 0), (b"a3", 0)]
    assert [each.payload for each in seen if each.key == "b"] == [b"b0", b"b1", b"b2", b"b3"]


async def test_acknowledgements_are_sent_before_a_refusal(
    client: Client, fake: FakeDispatcher
) -> None:
    fake.publish(b"a")
    fake.publish(b"b")
    async with client.consumer(TOPIC, "s") as consumer:
        first, second = await some(consumer, 2)
        acknowledged = consumer.ack_nowait(first)
        await consumer.nack(second)
        await acknowledged
    kinds = [request.WhichOneof("request") for request in fake.requests]
    assert kinds.index("acknowledge") < kinds.index("negative_acknowledge")


async def test_a_message_that_fails_too_often_leaves_a_gap(
    client: Client, fake: FakeDispatcher
) -> None:
    fake.publish(b"poison", key="k")
    fake.publish(b"next", key="k")
    options = SubscriptionOptions(max_redeliveries=1, after_dead_letter=AfterDeadLetter.CONTINUE)
    async with client.consumer(TOPIC, "s", options=options, retry=AT_ONCE) as consumer:
        for attempts in range(2):
            (message,) = await some(consumer, 1)
            assert (message.payload, message.attempts) == (b"poison", attempts)
            await consumer.nack(message)
        (message,) = await some(consumer, 1)
        assert message.payload == b"next"
        assert message.gap is not None
        assert message.gap.position == Position(1, 0)
    assert fake.dead == [Position(1, 0)]


async def test_a_token_is_valid_once(client: Client, fake: FakeDispatcher) -> None:
    fake.publish(b"x", key="k")
    async with client.consumer(TOPIC, "s") as consumer:
        (message,) = await some(consumer, 1)
        await consumer.nack(message, 0)
        for call in (consumer.ack(message), consumer.nack(message), consumer.extend(message)):
            with pytest.raises(StaleTokenError) as stale:
                await call
            assert stale.value.reason == "STALE_TOKEN"
        await consumer.ack(*await some(consumer, 1))


async def test_a_refused_message_waits_for_its_delay(client: Client, fake: FakeDispatcher) -> None:
    fake.publish(b"x", key="k")
    retry = RetryPolicy(min_s=2, max_s=100, multiplier=3)
    async with client.consumer(TOPIC, "s", retry=retry) as consumer:
        (message,) = await some(consumer, 1)
        await consumer.reconsume_later(message, 0)
        (message,) = await some(consumer, 1)
        await consumer.nack(message)
    delays = [
        each.negative_acknowledge.negative_acknowledgements[0].delay.ToMilliseconds()
        for each in said(fake, "negative_acknowledge")
    ]
    assert delays == [0, 6_000]


def reasons(fake: FakeDispatcher) -> list[str]:
    """The reasons of all refusals, in order."""
    refusals = [each.negative_acknowledge for each in said(fake, "negative_acknowledge")]
    return [it.reason for each in refusals for it in each.negative_acknowledgements]


@pytest.mark.parametrize("delay_s", [-1, 86_401, float("nan")])
async def test_a_delay_is_at_most_a_day(
    client: Client, fake: FakeDispatcher, delay_s: float
) -> None:
    fake.publish(b"x")
    async with client.consumer(TOPIC, "s") as consumer:
        (message,) = await some(consumer, 1)
        with pytest.raises(InvalidRequestError):
            await consumer.nack(message, delay_s)
        await consumer.ack(message)


async def test_a_damaged_message_raises_is_refused_and_dead_lettered(
    client: Client, fake: FakeDispatcher
) -> None:
    fake.damage(fake.publish(b"x", key="k"))
    fake.publish(b"next", key="k")
    options = SubscriptionOptions(max_redeliveries=1)
    async with client.consumer(TOPIC, "s", options=options, retry=AT_ONCE) as consumer:
        for _ in range(2):
            with pytest.raises(CorruptMessageError) as damage:
                await some(consumer, 1)
            assert damage.value.details["entry_id"] == "0"
        assert payloads(await some(consumer, 1)) == [b"next"]
    assert [each.partition(":")[0] for each in reasons(fake)] == ["CorruptMessageError"] * 2


async def test_a_refusal_may_say_why(client: Client, fake: FakeDispatcher) -> None:
    fake.publish(b"x")
    async with client.consumer(TOPIC, "s", retry=AT_ONCE) as consumer:
        for reason in ("", "no stock", ValueError("no stock")):
            (message,) = await some(consumer, 1)
            with pytest.raises(InvalidRequestError):
                await consumer.nack(message, reason="r" * 257)
            await consumer.nack(message, reason=reason)
    assert reasons(fake) == ["", "no stock", "ValueError: no stock"]


# ---- time


async def test_a_message_that_is_not_settled_in_time_is_redelivered(
    client: Client, fake: FakeDispatcher
) -> None:
    fake.publish(b"x", key="k")
    async with client.consumer(TOPIC, "s", ack_timeout_s=0.5) as consumer:
        (message,) = await some(consumer, 1)
        (again,) = await some(consumer, 1)
        assert again.attempts == 1
        with pytest.raises(StaleTokenError):
            await consumer.ack(message)
        await consumer.extend(again)
        await consumer.ack(again)


async def test_buffered_messages_do_not_time_out(client: Client, fake: FakeDispatcher) -> None:
    fake.publish(b"x", key="k")
    async with client.consumer(TOPIC, "s", ack_timeout_s=4) as consumer:
        await eventually(lambda: len(said(fake, "renew")) > 3)
        (message,) = await some(consumer, 1)
        assert message.attempts == 0
        await consumer.ack(message)


async def test_receive_times_out(client: Client, fake: FakeDispatcher) -> None:
    async with client.consumer(TOPIC, "s") as consumer:
        with pytest.raises(TimeoutError):
            await consumer.receive(timeout_s=0.01)
        fake.publish(b"x")
        assert (await consumer.receive(timeout_s=15)).payload == b"x"


# ---- the breaker


def state_of(consumer: Consumer) -> BreakerState:
    """The current state. A call, because mypy would keep the type narrowed by an earlier
    assertion."""
    return consumer.breaker_state


async def test_no_message_is_handed_out_while_the_breaker_is_open(
    client: Client, fake: FakeDispatcher
) -> None:
    for key in "abcd":
        fake.publish(key.encode(), key=key)
    breaker = Breaker(outcomes=2, pause_min_s=0.3, pause_max_s=60)
    async with client.consumer(TOPIC, "s", retry=AT_ONCE, breaker=breaker) as consumer:
        a, b, c = await some(consumer, 3)
        await asyncio.gather(consumer.nack(a), consumer.nack(b))
        assert state_of(consumer) is BreakerState.OPEN
        with pytest.raises(TimeoutError):
            await consumer.receive(timeout_s=0)
        await consumer.ack(c)  # messages handed out before are not affected
        (probe,) = await some(consumer, 1)
        assert probe.payload == b"d"
        assert state_of(consumer) is BreakerState.HALF_OPEN
        await eventually(lambda: consumer.buffered == 2)
        waiting = asyncio.create_task(some(consumer, 2))
        await asyncio.sleep(0)
        assert consumer.buffered == 2
        fake.durable.clear()
        acknowledged = consumer.ack_nowait(probe)
        assert consumer.breaker_state is BreakerState.CLOSED
        assert sorted(payloads(await waiting)) == [b"a", b"b"]
        fake.durable.set()
        await acknowledged


async def test_without_a_breaker_failures_do_not_stop_deliveries(
    client: Client, fake: FakeDispatcher
) -> None:
    fake.publish(b"x", key="k")
    often = SubscriptionOptions(max_redeliveries=1_000)
    async with client.consumer(TOPIC, "s", options=often, retry=AT_ONCE, breaker=None) as consumer:
        for _ in range(101):
            (message,) = await some(consumer, 1)
            await consumer.nack(message)
        assert consumer.breaker_state is BreakerState.CLOSED


async def test_messages_held_by_the_breaker_do_not_time_out(
    client: Client, fake: FakeDispatcher
) -> None:
    fake.publish(b"bad", key="a")
    fake.publish(b"good", key="b")
    breaker = Breaker(outcomes=1, pause_min_s=4.5)
    async with client.consumer(TOPIC, "s", ack_timeout_s=1.5, breaker=breaker) as consumer:
        (bad,) = await some(consumer, 1)
        await consumer.nack(bad)
        (good,) = await some(consumer, 1)
        assert (good.payload, good.attempts) == (b"good", 0)
        assert len(said(fake, "renew")) > 6
        await consumer.ack(good)


# ---- permits


async def test_buffered_messages_are_bounded_by_the_queue(
    client: Client, fake: FakeDispatcher
) -> None:
    for at in range(100):
        fake.publish(b"%d" % at)
    async with client.consumer(TOPIC, "s", receiver_queue=10) as consumer:
        await eventually(lambda: consumer.buffered == 10)
        (stream,) = fake.streams.values()
        assert stream.permits == [10]
        messages = await some(consumer, 4)
        await consumer.ack(messages[0])
        assert stream.permits == [10]
        messages += await some(consumer, 96)
        assert payloads(messages) == [b"%d" % at for at in range(100)]
        assert all(5 <= permits <= 10 for permits in stream.permits)


async def test_a_paused_consumer_grants_no_permits(client: Client, fake: FakeDispatcher) -> None:
    for at in range(20):
        fake.publish(b"%d" % at)
    async with client.consumer(TOPIC, "s", receiver_queue=4) as consumer:
        await eventually(lambda: consumer.buffered == 4)
        consumer.pause()
        messages = await some(consumer, 4)
        await consumer.ack(messages[0])
        assert consumer.buffered == 0
        consumer.resume()
        assert len(await some(consumer, 16)) == 16


async def test_few_large_messages_are_buffered_at_a_time(
    client: Client, fake: FakeDispatcher
) -> None:
    for _ in range(60):
        fake.publish(bytes(100_000))
    async with client.consumer(TOPIC, "s", receiver_queue_bytes=1_000_000) as consumer:
        await eventually(lambda: consumer.buffered >= 8)
        for message in await some(consumer, 50):
            await consumer.ack(message)
            assert consumer.buffered <= 16


# ---- large messages


async def test_a_large_message_is_assembled_and_acknowledged_as_one(
    client: Client, fake: FakeDispatcher
) -> None:
    body = bytes(range(256)) * 10
    positions = fake.publish_large(body, "k", chunk_bytes=1_000)
    async with client.consumer(TOPIC, "s", receiver_queue=1) as consumer:
        (message,) = await some(consumer, 1)
        assert message.payload == body
        assert isinstance(message.id, ChunkMessageId)
        await consumer.ack(message)
    assert fake.done == set(positions)


@pytest.mark.parametrize("kind", SubscriptionType, ids=lambda kind: kind.name)
async def test_a_large_message_is_refused_as_one(
    client: Client, fake: FakeDispatcher, kind: SubscriptionType
) -> None:
    fake.publish_large(b"x" * 25, "k", chunk_bytes=10)
    async with client.consumer(TOPIC, "s", type=kind) as consumer:
        (message,) = await some(consumer, 1)
        await consumer.nack(message, 0)
        fake.publish(b"after", key="k")
        (again,) = await some(consumer, 1)
        assert (again.payload, again.attempts) == (b"x" * 25, 1)
        await consumer.ack(again)
        (after,) = await some(consumer, 1)
        assert after.payload == b"after"
        await consumer.ack(after)
    assert len(fake.done) == 4


async def test_incomplete_chunks_are_reported_and_settled(
    client: Client, fake: FakeDispatcher
) -> None:
    lost = fake.publish_large(b"x" * 30, "k", chunk_bytes=10, only=[0, 2])
    fake.publish(b"after", key="k")
    dropped: list[Dropped] = []
    async with client.consumer(
        TOPIC, "s", incomplete=Incomplete.ACKNOWLEDGE, on_dropped=dropped.append
    ) as consumer:
        (message,) = await some(consumer, 1)
        assert message.payload == b"after"
        await eventually(lambda: fake.done == set(lost))
        assert consumer.dropped == {DropReason.GAP: 2}
    assert [each.reason for each in dropped] == [DropReason.GAP]


async def test_chunks_without_a_first_chunk_are_skipped_by_the_service(
    client: Client, fake: FakeDispatcher
) -> None:
    lost = fake.publish_large(b"x" * 30, "k", chunk_bytes=10, only=[1, 2])
    fake.publish(b"after", key="k")
    async with client.consumer(TOPIC, "s") as consumer:
        (message,) = await some(consumer, 1)
        assert message.payload == b"after"
        await eventually(lambda: fake.done == set(lost))
        assert not consumer.dropped


async def test_a_message_beyond_the_limits_is_moved_to_the_dead_letter_topic(
    client: Client, fake: FakeDispatcher
) -> None:
    lost = fake.publish_large(b"x" * 30, "k", chunk_bytes=10)
    fake.publish(b"after", key="k")
    async with client.consumer(
        TOPIC,
        "s",
        options=SubscriptionOptions(max_redeliveries=0),
        assembly=AssemblyLimits(message_bytes_max=20),
        retry=AT_ONCE,
    ) as consumer:
        (message,) = await some(consumer, 1)
        assert message.payload == b"after"
        assert fake.dead == lost


# ---- broken connections


async def test_unacknowledged_messages_are_redelivered_after_a_broken_connection(
    client: Client, fake: FakeDispatcher
) -> None:
    for at in range(6):
        fake.publish(b"%d" % at, key="k")
    async with client.consumer(TOPIC, "s") as consumer:
        name = consumer.name
        messages = await some(consumer, 3)
        await consumer.ack(messages[0])
        fake.cut()
        await eventually(lambda: fake.subscribed == 2)
        again = await some(consumer, 5)
        assert payloads(again) == [b"1", b"2", b"3", b"4", b"5"]
        assert again[0].attempts == 1
        assert consumer.name == name
        (stream,) = fake.streams.values()
        assert not stream.subscribe.HasField("create_at")
        with pytest.raises(StaleTokenError):
            await consumer.ack(messages[1])
        await asyncio.gather(*(consumer.ack(message) for message in again))


async def test_an_acknowledgement_in_flight_fails_when_the_connection_breaks(
    client: Client, fake: FakeDispatcher
) -> None:
    fake.publish(b"x")
    fake.durable.clear()
    async with client.consumer(TOPIC, "s") as consumer:
        (message,) = await some(consumer, 1)
        acknowledged = consumer.ack_nowait(message)
        await eventually(lambda: said(fake, "acknowledge"))
        fake.cut()
        with pytest.raises(StaleTokenError):
            await acknowledged
        fake.durable.set()


async def test_a_consumer_follows_the_owner_of_its_subscription(
    client: Client, fake: FakeDispatcher
) -> None:
    async with serving_fake() as owner:
        fake.owner = owner.address
        owner.publish(b"x")
        async with client.consumer(TOPIC, "s") as consumer:
            await consumer.ack(*await some(consumer, 1))
            # The owner stops, and the client's original target serves again.
            fake.owner = None
            fake.publish(b"y")
            owner.owner = fake.address
            owner.cut()
            assert payloads(await some(consumer, 1)) == [b"y"]


async def test_a_consumer_leaves_a_draining_service_cleanly(
    client: Client, fake: FakeDispatcher
) -> None:
    for at in range(4):
        fake.publish(b"%d" % at, key="k")
    async with client.consumer(TOPIC, "s") as consumer:
        (message,) = await some(consumer, 1)
        fake.drain()
        await consumer.ack(message)
        await eventually(lambda: fake.subscribed == 2)
        again = await some(consumer, 3)
        assert payloads(again) == [b"1", b"2", b"3"]
        assert {each.attempts for each in again} == {0}
    assert said(fake, "leave")


async def test_opening_without_a_service_raises(fake: FakeDispatcher) -> None:
    async with connect(NOBODY, NOBODY) as client:
        with pytest.raises(UnavailableError):
            await client.consumer(TOPIC, "s", open_timeout_s=0.2).open()


def test_a_client_without_a_dispatcher_has_no_consumers() -> None:
    async def make() -> None:
        async with connect(NOBODY) as client:
            client.consumer(TOPIC, "s")

    with pytest.raises(ValueError, match="dispatcher"):
        asyncio.run(make())


# ---- seeks and moved keys


async def test_a_consumer_seeks(client: Client, fake: FakeDispatcher) -> None:
    for at in range(5):
        fake.publish(b"%d" % at, key="k", now_ms=1_000 * at)
    chunks = fake.publish_large(b"x" * 20, "k", chunk_bytes=10)
    async with client.consumer(TOPIC, "s") as consumer:
        first, *_ = await some(consumer, 6)
        places: list[tuple[MessageId | datetime, list[bytes]]] = [
            (MessageId(1, 3), [b"3", b"4", b"x" * 20]),
            (datetime.fromtimestamp(3.5, tz=UTC), [b"4", b"x" * 20]),
            (ChunkMessageId(MessageId(*chunks[0]), MessageId(*chunks[1])), [b"x" * 20]),
        ]
        for place, expected in places:
            await consumer.seek(place)
            assert payloads(await some(consumer, len(expected))) == expected
        await consumer.seek("earliest")
        assert len(await some(consumer, 6)) == 6
        await consumer.seek("latest")
        fake.publish(b"new")
        assert payloads(await some(consumer, 1)) == [b"new"]
        with pytest.raises(StaleTokenError):
            await consumer.ack(first)


async def test_seeking_an_invalid_position_changes_nothing(
    client: Client, fake: FakeDispatcher
) -> None:
    fake.publish(b"x")
    async with client.consumer(TOPIC, "s") as consumer:
        (message,) = await some(consumer, 1)
        with pytest.raises(InvalidRequestError) as refused:
            await consumer.seek(MessageId(1, 99))
        assert refused.value.reason == "INVALID_START"
        await consumer.ack(message)


async def test_messages_not_handed_out_move_to_the_new_owner_of_their_key(
    client: Client, fake: FakeDispatcher
) -> None:
    for at in range(3):
        fake.publish(b"%d" % at, key="k")
    async with client.consumer(TOPIC, "s") as consumer:
        (message,) = await some(consumer, 1)
        await eventually(lambda: consumer.buffered == 2)
        fake.move(1, [1, 2, 3])
        await eventually(lambda: said(fake, "give_back"))
        assert [*said(fake, "give_back")[0].give_back.deliveries] == [2, 3]
        await consumer.ack(message)
        assert payloads(await some(consumer, 2)) == [b"1", b"2"]


# ---- closing


async def test_closing_returns_buffered_messages(client: Client, fake: FakeDispatcher) -> None:
    for at in range(5):
        fake.publish(b"%d" % at, key="k")
    async with client.consumer(TOPIC, "s") as consumer:
        first, _ = await some(consumer, 2)
        acknowledged = consumer.ack_nowait(first)
        await eventually(lambda: consumer.buffered == 3)
    assert acknowledged.done()
    assert acknowledged.exception() is None
    assert fake.requests[-1].HasField("leave")
    async with client.consumer(TOPIC, "s") as consumer:
        again = await some(consumer, 4)
        assert payloads(again) == [b"1", b"2", b"3", b"4"]
        assert {each.attempts for each in again} == {0}


async def test_closing_waits_until_acknowledgements_are_durable(
    client: Client, fake: FakeDispatcher
) -> None:
    fake.publish(b"x")
    fake.durable.clear()
    consumer = client.consumer(TOPIC, "s")
    await consumer.open()
    (message,) = await some(consumer, 1)
    acknowledged = consumer.ack_nowait(message)
    closing = asyncio.create_task(consumer.close())
    await eventually(lambda: said(fake, "acknowledge"))
    await eventually(lambda: said(fake, "leave"))
    assert not closing.done()
    assert not acknowledged.done()
    fake.durable.set()
    await closing
    await acknowledged


async def test_closing_ends_pending_receives(client: Client, fake: FakeDispatcher) -> None:
    consumer = client.consumer(TOPIC, "s")
    await consumer.open()

    async def iterate() -> int:
        return len([message async for message in consumer])

    iterating = asyncio.create_task(iterate())
    receiving = asyncio.create_task(consumer.receive())
    await asyncio.sleep(0)
    await consumer.close()
    assert await iterating == 0
    with pytest.raises(ConsumerClosedError):
        await receiving


# ---- side by side


async def test_keys_are_processed_concurrently_and_each_in_order(
    client: Client, fake: FakeDispatcher
) -> None:
    for at in range(20):
        for key in "abcd":
            fake.publish(b"%d" % at, key=key)
    seen: dict[str, list[int]] = {key: [] for key in "abcd"}
    running: set[str] = set()
    most = 0
    failed = False

    async def handle(message: Received) -> None:
        nonlocal most, failed
        key = message.key or ""
        assert key not in running
        running.add(key)
        most = max(most, len(running))
        await asyncio.sleep(0.001)
        running.discard(key)
        if message.payload == b"7" and key == "b" and not failed:
            failed = True
            raise ValueError("once")
        seen[key].append(int(message.payload))

    failures: list[Exception] = []
    async with client.consumer(TOPIC, "s", retry=AT_ONCE) as consumer:
        processing = asyncio.create_task(
            process_by_key(
                consumer,
                handle,
                concurrency=8,
                on_failure=lambda message, failure: failures.append(failure),
            )
        )
        await eventually(lambda: len(fake.done) == 80)
        processing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await processing
    assert seen == {key: [*range(20)] for key in "abcd"}
    assert most == 4
    assert [str(each) for each in failures] == ["once"]
    assert reasons(fake) == ["ValueError: once"]


async def test_cancelled_processing_lets_running_handlers_finish(
    client: Client, fake: FakeDispatcher
) -> None:
    for at in range(10):
        fake.publish(b"%d" % at, key="k")
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def handle(message: Received) -> None:
        begun.set()
        await go_on.wait()

    async with client.consumer(TOPIC, "s") as consumer:
        processing = asyncio.create_task(process_by_key(consumer, handle))
        await begun.wait()
        processing.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await processing
    assert fake.done == {Position(1, 0)}


async def test_processing_ends_when_the_consumer_is_closed(
    client: Client, fake: FakeDispatcher
) -> None:
    consumer = client.consumer(TOPIC, "s")
    await consumer.open()

    async def handle(message: Received) -> None:
        pass

    processing = asyncio.create_task(process_by_key(consumer, handle, concurrency=2))
    await asyncio.sleep(0)
    await consumer.close()
    await processing
