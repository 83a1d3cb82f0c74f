"""The life of one message: what became of it in each subscription."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.filter.v1 import filter_pb2
from seqgate.client import (
    Admin,
    AfterDeadLetter,
    Batching,
    Chunking,
    Client,
    Consumer,
    DeadLetter,
    MessageId,
    Received,
    SubscriptionLife,
    SubscriptionOptions,
    connect,
)
from seqgate.dev.stack import Stack
from seqgate.errors import InvalidRequestError, NotFoundError, SeqgateError
from seqgate.telemetry.propagation import TRACEPARENT
from tests.integration.services import Services
from tests.support.waiting import eventually

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with connect(
        stack.address("ledger"), stack.address("dispatcher"), dedup=stack.address("dedup")
    ) as client:
        yield client


@pytest.fixture
async def admin(client: Client) -> Admin:
    return client.admin()


def kinds(life: SubscriptionLife) -> list[str]:
    return [each.kind for each in life.events if each.kind != "TAKEN"]


async def ended(admin: Admin, topic: str, name: str, message_id: MessageId) -> SubscriptionLife:
    """The life of a message in a subscription once it is acknowledged."""

    async def is_over() -> bool:
        life = await admin.message_history(topic, name, message_id)
        return kinds(life)[-1:] in (["ACKNOWLEDGED"], ["REJECTED"])

    await eventually(is_over, "the message is acknowledged")
    return await admin.message_history(topic, name, message_id)


async def letters(admin: Admin, topic: str, name: str) -> list[DeadLetter]:
    return [each async for each in admin.dead_letters(topic, name)]


async def refuse(consumer: Consumer, reason: str | Exception = "") -> Received:
    received = await consumer.receive()
    await consumer.nack(received, delay_s=0, reason=reason)
    return received


async def test_a_life_shows_filters_failures_letters_redrives_and_acknowledgements(
    client: Client, admin: Admin, services: Services, topic: str
) -> None:
    async with client.producer(topic, name="p") as producer:
        traced = {"region": "us", TRACEPARENT: f"00-{TRACE}-b7ad6b7169203331-01"}
        sent = await producer.send(b"x", key="k", properties=traced, sequence_id=7)
    await admin.create_subscription(topic, "filtered")
    eu = filter_pb2.Filter(name="eu", version=3, expression="properties.region == 'eu'")
    names: dict[str, Any] = {"topic": topic, "subscription": "filtered"}
    await services.dispatcher.SetFilters(pb.SetFiltersRequest(**names, filters=[eu]))
    options = SubscriptionOptions(max_redeliveries=1, after_dead_letter=AfterDeadLetter.HOLD)
    async with (
        client.consumer(topic, "filtered"),
        client.consumer(topic, "s", name="crew", options=options) as consumer,
    ):
        await refuse(consumer)
        await refuse(consumer, ValueError("no stock"))

        async def is_dead() -> bool:
            return bool(await letters(admin, topic, "s"))

        await eventually(is_dead)
        (letter,) = await letters(admin, topic, "s")
        await admin.redrive(topic, "s", [letter.id], request_id="r")
        await consumer.ack(await consumer.receive())
        await ended(admin, topic, "s", sent.message_id)
        rejected = await ended(admin, topic, "filtered", sent.message_id)

    life = await admin.message_life(topic, producer="p", sequence_id=7)
    filtered, settled = life.subscriptions
    assert (life.topic, life.id, life.fate, life.trace_id) == (
        topic,
        sent.message_id,
        "STORED",
        TRACE,
    )
    assert life.verdict is not None
    assert life.verdict.verdict == "DUPLICATE"
    assert life.message is not None
    assert (life.message.payload, life.message.key, life.messages) == (b"x", "k", 1)
    assert life.unknown == {}

    assert filtered == rejected
    check_rejected(filtered)
    check_settled(settled, topic, letter)

    assert await admin.message_life(topic, message_id=sent.message_id) == life
    assert await admin.message_life(topic, trace_id=TRACE.upper()) == life
    before = datetime.now(UTC) - timedelta(minutes=1)
    assert await admin.message_life(topic, trace_id=TRACE, since=before) == life


def check_rejected(filtered: SubscriptionLife) -> None:
    (refusal,) = (each for each in filtered.events if each.kind == "REJECTED")
    assert (refusal.filter, refusal.filter_version) == ("eu", 3)
    assert filtered.reasons[-1].reason == "REJECTED"


def check_settled(settled: SubscriptionLife, topic: str, letter: DeadLetter) -> None:
    """Two failures, a letter, a redrive, and an acknowledgement."""
    assert kinds(settled) == [
        *("DELIVERED", "FAILED") * 2,
        *("DEAD_LETTERED", "REDRIVEN"),
        *("DELIVERED", "ACKNOWLEDGED"),
    ]
    events = [each for each in settled.events if each.kind != "TAKEN"]
    assert {each.consumer for each in events} == {"crew", None}
    assert [(each.failure, each.attempts) for each in events if each.kind == "FAILED"] == [
        ("REFUSED", 1),
        ("REFUSED", 2),
    ]
    why = "ValueError: no stock"
    assert [each.text for each in events if each.kind == "FAILED"] == ["", why]
    assert [each.reason for each in letter.failures] == ["", why]
    assert events[3].sentence == f"delivery failed, the 2nd: refused by crew: {why}"
    dead, redriven = events[4:6]
    assert (dead.target, dead.attempts, dead.text) == (f"{topic}-s-DLQ", 2, "REDELIVERIES")
    assert dead.number > 0
    assert redriven.number == 1
    assert events[-1].consumer == "crew"
    assert [each.at for each in events] == sorted(each.at for each in events)
    (again,) = settled.letters
    assert (again.id, again.redriven, settled.redrive) == (letter.id, True, None)
    assert settled.complete_since is not None
    assert settled.complete_since <= events[0].at


async def test_a_message_is_named_in_one_way_and_must_be_there(
    client: Client, admin: Admin, topic: str
) -> None:
    with pytest.raises(NotFoundError):
        await admin.message_life(topic, producer="p", sequence_id=0)
    async with client.producer(topic, name="p") as producer:
        sent = await producer.send(b"x", sequence_id=5)
    with pytest.raises(InvalidRequestError):
        await admin.message_life(topic)
    with pytest.raises(InvalidRequestError):
        await admin.message_life(topic, producer="p")
    with pytest.raises(InvalidRequestError):
        await admin.message_life(topic, message_id=sent.message_id, trace_id=TRACE)
    with pytest.raises(NotFoundError, match="1 entries"):
        await admin.message_life(topic, trace_id=TRACE)
    with pytest.raises(NotFoundError, match="yet"):
        await admin.message_life(topic, message_id=MessageId(1, 1))
    missing = await admin.message_life(topic, producer="p", sequence_id=4)
    assert (missing.fate, missing.id, missing.message) == ("STALE", None, None)
    assert missing.verdict is not None
    assert missing.subscriptions == ()


async def test_what_a_client_cannot_reach_stays_unknown(stack: Stack, topic: str) -> None:
    async with connect(stack.address("ledger")) as client:
        async with client.producer(topic, name="p") as producer:
            sent = await producer.send(b"x")
        life = await client.admin().message_life(topic, message_id=sent.message_id)
    assert life.fate == "STORED"
    assert life.unknown.keys() == {"dedup", "dispatcher"}


async def test_the_parts_of_a_batch_and_a_large_message_have_lives(
    client: Client, admin: Admin, topic: str
) -> None:
    async with client.producer(topic, name="b", batching=Batching(delay_s=60)) as producer:
        traced = {TRACEPARENT: f"00-{TRACE}-b7ad6b7169203331-01"}
        some = [
            producer.send_nowait(str(number).encode(), properties=traced if number else {})
            for number in range(2)
        ]
        await producer.flush()
    async with client.producer(topic, name="l", chunking=Chunking(1024)) as producer:
        large = await producer.send(bytes(3000))
    async with client.consumer(topic, "s", name="c") as consumer:
        first = await consumer.receive()
        await consumer.ack(first)

        async def has_part() -> bool:
            found = await admin.message_history(topic, "s", first.id)
            return "PARTLY_ACKNOWLEDGED" in kinds(found)

        await eventually(has_part)
        for _ in range(2):
            await consumer.ack(await consumer.receive())
        batch = await ended(admin, topic, "s", first.id)
        whole = await ended(admin, topic, "s", large.message_id)

    part = next(each for each in batch.events if each.kind == "PARTLY_ACKNOWLEDGED")
    assert (part.indexes, part.consumer) == ((0,), "c")
    assert kinds(batch) == ["DELIVERED", "PARTLY_ACKNOWLEDGED", "ACKNOWLEDGED"]
    assert kinds(whole) == ["DELIVERED", "ACKNOWLEDGED"]
    found = await admin.message_life(topic, trace_id=TRACE)
    assert found.message is not None
    assert (found.message.payload, found.messages) == (b"1", 2)
    assert found.id == (await some[1]).message_id
    told = await admin.message_life(topic, producer="l", sequence_id=0)
    assert told.id == large.message_id
    assert told.message is not None
    assert told.message.payload == b""


async def test_operations_on_its_letters_are_part_of_a_life(
    client: Client, admin: Admin, topic: str
) -> None:
    async with client.producer(topic, name="p") as producer:
        mended, discarded = [(await producer.send(b"x", key=key)).message_id for key in "ab"]
    options = SubscriptionOptions(max_redeliveries=0)
    async with client.consumer(topic, "s", options=options) as consumer:
        for _ in range(2):
            await refuse(consumer)

        async def are_dead() -> bool:
            return len(await letters(admin, topic, "s")) == 2

        await eventually(are_dead)
        of = {each.origin: each for each in await letters(admin, topic, "s")}
        copy = await admin.mend(topic, "s", of[mended].id, payload=b"y", request_id="m")
        await admin.discard(topic, "s", [of[discarded].id], request_id="d", reason="a test")
        one = await admin.message_history(topic, "s", mended)
        other = await admin.message_history(topic, "s", discarded)

    assert (one.events[-1].kind, one.events[-1].text) == ("MENDED", str(copy.letter.position))
    assert other.events[-1].kind == "DISCARDED"
    assert other.events[-1].caller
    assert other.events[-1].sentence.endswith("a test")


@pytest.mark.parametrize("trace_id", ["", "0" * 32, TRACE[1:], TRACE + "0", "g" * 32, f"{TRACE} "])
async def test_what_is_no_trace_id_is_refused(client: Client, topic: str, trace_id: str) -> None:
    async with client.producer(topic) as producer:
        await producer.send(b"without a trace")
    with pytest.raises(InvalidRequestError, match="32 hexadecimal digits"):
        await client.admin().message_life(topic, trace_id=trace_id)


async def test_a_letter_of_an_earlier_topic_of_the_name_is_refused_as_one(
    client: Client, admin: Admin, topic: str
) -> None:
    options = SubscriptionOptions(max_redeliveries=0)
    async with client.producer(topic) as producer:
        first = (await producer.send(b"x", key="k")).message_id
    async with client.consumer(topic, "s", options=options, start="earliest") as consumer:
        await consumer.nack(await consumer.receive(timeout_s=30), delay_s=0)

        async def is_dead() -> bool:
            return bool([each async for each in admin.dead_letters(topic, "s")])

        await eventually(is_dead, "the message is a dead letter")
    await admin.delete_subscription(topic, "s", force=True)
    await admin.delete_topic(topic, force=True)
    async with client.producer(topic) as producer:
        again = (await producer.send(b"y", key="k")).message_id
    assert again.ledger_id > first.ledger_id, "ids are not repeated"
    await admin.create_subscription(topic, "s")
    (letter,) = [each async for each in admin.dead_letters(topic, "s")]
    with pytest.raises(SeqgateError, match="an earlier topic of this name") as refused:
        await admin.redrive(topic, "s", [letter.id], request_id="r")
    assert refused.value.reason == "LETTER_NOT_REDRIVABLE"
