"""The admin client."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from seqgate.client import (
    LATEST,
    Admin,
    Batching,
    Chunking,
    Client,
    MessageId,
    PolicyValues,
    SubscriptionOptions,
    connect,
)
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import Stack
from seqgate.errors import (
    InUseError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from seqgate.message_id import LATEST_ID
from seqgate.types import InvalidNameError, Position
from tests.support.waiting import eventually
from tools.stack.forwarder import Ends, Forwarder


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with connect(
        stack.address("ledger"),
        stack.address("dispatcher"),
        dedup=stack.address("dedup"),
        cursor=stack.address("cursor"),
    ) as client:
        yield client


@pytest.fixture
async def admin(client: Client) -> Admin:
    return client.admin()


async def published(client: Client, topic: str, count: int) -> None:
    async with client.producer(topic, name="p") as producer:
        for number in range(count):
            await producer.send(b"x", key=f"k{number % 2}")


# ---- topics


async def test_a_topic_is_created_described_listed_and_deleted(
    client: Client, admin: Admin, topic: str
) -> None:
    before = datetime.now(UTC)
    made = await admin.create_topic(topic)
    assert (made.name, made.entries, made.first, made.last) == (topic, 0, None, None)
    assert abs((made.created_at - before).total_seconds()) < 60
    assert (await admin.create_topic(topic)).created_at == made.created_at
    await published(client, topic, 3)

    found = await admin.topic(topic)
    assert (found.entries, found.messages, found.connected_producers) == (3, 3, 0)
    assert (found.first, found.last) == (MessageId(1, 0), MessageId(1, 2))
    assert found.size_bytes > 3
    assert [each.name async for each in admin.topics(topic)] == [topic]

    async with client.producer(topic, name="p"):
        with pytest.raises(InUseError, match="producers"):
            await admin.delete_topic(topic)
    await admin.delete_topic(topic)
    with pytest.raises(NotFoundError):
        await admin.topic(topic)
    with pytest.raises(NotFoundError):
        await admin.delete_topic(topic)
    assert [each async for each in admin.topics(topic)] == []


async def test_a_short_name_is_one_in_public_default(admin: Admin, topic: str) -> None:
    short = topic.replace("/", "-")
    made = await admin.create_topic(short)
    assert made.name == f"public/default/{short}"
    assert [each.name async for each in admin.topics(short)] == [made.name]


async def test_a_topic_is_trimmed_as_far_as_its_cursors_allow(
    client: Client, admin: Admin, topic: str
) -> None:
    await published(client, topic, 4)
    await admin.create_cursor(topic, "held", start=MessageId(1, 2))
    trimmed = await admin.trim_topic(topic, MessageId(1, 3))
    assert (trimmed.removed_entries, trimmed.first) == (2, MessageId(1, 2))
    assert "held" in trimmed.held_back_by


# ---- deduplication


async def test_a_publication_is_explained(client: Client, admin: Admin, topic: str) -> None:
    await published(client, topic, 3)
    again = await admin.explain_publication(topic, "p", 1)
    assert (again.verdict, again.pushed_sequence_id) == ("DUPLICATE", 2)
    assert again.persisted_sequence_id in (1, 2)
    assert again.explanation
    assert (await admin.explain_publication(topic, "p", 3)).verdict == "NEW"
    unknown = await admin.explain_publication(topic, "q", 0)
    assert (unknown.persisted_sequence_id, unknown.pushed_sequence_id) == (None, None)


async def test_deduplication_is_described(client: Client, admin: Admin, topic: str) -> None:
    await published(client, topic, 3)

    async def all_confirmed() -> bool:
        return (await admin.deduplication(topic)).confirmed == Position(1, 2)

    await eventually(all_confirmed, "the last entry is confirmed")
    assert await admin.take_snapshot(topic) == Position(1, 2)
    found = await admin.deduplication(topic)
    assert (found.state, found.producers, found.duplicates) == ("ACTIVE", 1, 0)
    assert (found.confirmed, found.entries_to_replay) == (Position(1, 2), 0)
    assert (found.snapshot, found.snapshot_unknown) == (Position(1, 2), False)
    assert (found.policy.enabled, found.policy.max_producers) == (True, 10_000)
    assert None not in (found.policy.evicts_when_full, found.policy.snapshot_interval_s)


async def test_a_policy_is_set_on_a_topic_or_a_namespace_and_removed(
    client: Client, admin: Admin, topic: str
) -> None:
    await admin.create_topic(topic)
    namespace = topic.rpartition("/")[0]
    values = PolicyValues(
        enabled=False,
        producer_inactivity_timeout_s=120,
        max_producers=7,
        evicts_when_full=False,
        snapshot_entries=0,
        snapshot_interval_s=5,
        refuses_conflicts=True,
    )
    await admin.set_policy(topic, values)
    assert await admin.policy(topic) == values
    assert (await admin.deduplication(topic)).policy == values
    await admin.set_policy(topic, PolicyValues(max_producers=9))
    assert await admin.policy(topic) == PolicyValues(max_producers=9)
    await admin.set_policy(topic, PolicyValues())
    assert await admin.policy(topic) == PolicyValues()

    await admin.set_policy(namespace, PolicyValues(max_producers=11))
    assert await admin.policy(namespace) == PolicyValues(max_producers=11)
    assert (await admin.deduplication(topic)).policy.max_producers == 11
    await admin.set_policy(namespace, PolicyValues())
    with pytest.raises(InvalidRequestError):
        await admin.set_policy(topic, PolicyValues(max_producers=0))


# ---- subscriptions


async def test_a_subscription_is_created_moved_changed_and_deleted(
    client: Client, admin: Admin, topic: str
) -> None:
    await published(client, topic, 4)
    made = await admin.create_subscription(topic, "s", start=MessageId(1, 2), properties={"a": "b"})
    assert (made.topic, made.name, made.mark_delete) == (topic, "s", Position(1, 1))
    assert made.properties == {"a": "b"}
    assert await admin.create_subscription(topic, "s") == made
    assert [each.name async for each in admin.subscriptions(topic)] == ["s"]

    assert (await admin.reset_subscription(topic, "s", LATEST)).mark_delete == Position(1, 3)
    since = datetime(1970, 1, 1, tzinfo=UTC)
    assert (await admin.reset_subscription(topic, "s", since)).mark_delete is None
    changed = await admin.update_subscription(topic, "s", put={"c": "d"}, remove=("a",))
    assert changed.properties == {"c": "d"}

    consumer = client.consumer(topic, "s")
    await consumer.open()
    with pytest.raises(InUseError):
        await admin.delete_subscription(topic, "s")
    await admin.delete_subscription(topic, "s", force=True)
    await consumer.close()
    with pytest.raises(NotFoundError):
        await admin.subscription(topic, "s")


async def test_a_waiting_key_and_a_message_are_explained(
    client: Client, admin: Admin, topic: str
) -> None:
    await published(client, topic, 3)
    async with client.consumer(topic, "s", name="c") as consumer:
        first = await consumer.receive()
        (reason, *_) = await admin.explain_delivery(topic, "s", message_id=first.id)
        assert (reason.reason, reason.consumer) == ("IN_FLIGHT", "c")
        assert reason.text
        assert await admin.explain_delivery(topic, "s", key="k0")
    with pytest.raises(InvalidRequestError, match="either a key or"):
        await admin.explain_delivery(topic, "s")
    with pytest.raises(InvalidRequestError, match="either a key or"):
        await admin.explain_delivery(topic, "s", key="k0", message_id=first.id)


async def test_a_dead_letter_is_listed_and_read(client: Client, admin: Admin, topic: str) -> None:
    await published(client, topic, 2)
    options = SubscriptionOptions(max_redeliveries=0)
    async with client.consumer(topic, "s", name="c", options=options) as consumer:
        refused = await consumer.receive()
        await consumer.nack(refused, delay_s=0)

        async def is_there() -> bool:
            return bool([each async for each in admin.dead_letters(topic, "s")])

        await eventually(is_there)
    (letter,) = [each async for each in admin.dead_letters(topic, "s", key=refused.key)]
    assert not [each async for each in admin.dead_letters(topic, "s", key="another")]
    assert (letter.origin, letter.producer, letter.attempts) == (refused.id, "p", 1)
    assert (letter.reason, letter.holds_key, letter.chunk) == ("REDELIVERIES", False, None)
    assert [(each.how, each.consumer) for each in letter.failures] == [("REFUSED", "c")]
    again, (message,) = await admin.dead_letter(topic, "s", letter.id)
    assert (again, message.payload, message.id) == (letter, b"x", letter.id)
    with pytest.raises(NotFoundError):
        await admin.dead_letter(topic, "s", MessageId(1, 99))


# ---- cursors


async def test_a_cursor_is_created_moved_and_deleted(
    client: Client, admin: Admin, topic: str
) -> None:
    await published(client, topic, 4)
    made = await admin.create_cursor(topic, "c", start=MessageId(1, 1), properties={"a": "b"})
    assert (made.mark_delete, made.properties, made.owner) == (Position(1, 0), {"a": "b"}, None)
    assert await admin.create_cursor(topic, "c") == made
    assert (await admin.create_cursor(topic, "first")).mark_delete is None
    assert (await admin.reset_cursor(topic, "c", LATEST)).mark_delete == Position(1, 3)
    for end in (datetime.now(UTC), MessageId(1, 4), LATEST_ID):
        assert (await admin.reset_cursor(topic, "c", end)).mark_delete == Position(1, 3)
    assert (await admin.cursor(topic, "c")).revision > made.revision
    assert {each.name async for each in admin.cursors(topic)} >= {"c", "first"}
    assert {each.topic async for each in admin.cursors()} >= {topic}
    await admin.delete_cursor(topic, "c")
    with pytest.raises(NotFoundError):
        await admin.cursor(topic, "c")


@pytest.mark.parametrize(
    "place",
    [MessageId(1, 5), MessageId(7, 7), datetime(9999, 1, 1, tzinfo=UTC)],
    ids=["entry", "ledger", "time"],
)
async def test_a_cursor_and_a_subscription_are_not_moved_beyond_the_end(
    client: Client, admin: Admin, topic: str, place: MessageId | datetime
) -> None:
    await published(client, topic, 4)
    cursor = await admin.create_cursor(topic, "c")
    await admin.create_subscription(topic, "s")
    for attempt in (
        admin.create_cursor(topic, "new", start=place),
        admin.reset_cursor(topic, "c", place),
        admin.create_subscription(topic, "new", start=place),
        admin.reset_subscription(topic, "s", place),
        admin.replay(topic, "s", start=place, request_id="r"),
        admin.replay(topic, "s", end=place, request_id="r"),
    ):
        with pytest.raises(InvalidRequestError, match="beyond the end") as refused:
            await attempt
        assert refused.value.reason == "INVALID_START"
        assert refused.value.details["last"] == "1:3"
    assert (await admin.cursor(topic, "c")) == cursor
    assert (await admin.subscription(topic, "s")).mark_delete is None
    assert "new" not in {each.name async for each in admin.cursors(topic)}


async def test_a_cursor_before_a_batch_or_a_large_message(
    client: Client, admin: Admin, topic: str
) -> None:
    async with client.producer(topic, name="b", batching=Batching(delay_s=60)) as producer:
        futures = [producer.send_nowait(b"x") for _ in range(3)]
        await producer.flush()
    async with client.producer(topic, name="l", chunking=Chunking(1024)) as producer:
        large = await producer.send(bytes(3000))
    in_batch = futures[1].result().message_id
    assert (await admin.create_cursor(topic, "a", start=in_batch)).mark_delete is None
    found = await admin.create_cursor(topic, "b", start=large.message_id)
    assert found.mark_delete == Position(1, 0)


# ---- errors


async def test_a_service_that_is_not_given_is_named(stack: Stack, topic: str) -> None:
    async with connect(stack.address("ledger")) as client:
        with pytest.raises(ValueError, match="needs the cursor service: give its address"):
            await client.admin().cursor(topic, "c")


async def test_a_service_that_does_not_answer_in_time_is_named(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seqgate.client._client.ADMIN_TIMEOUT_S", 0.1)
    async with connect("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError, match=r"ledger service at 127\.0\.0\.1:1 does not"):
            await client.admin().topic(topic)


class Restarting(Forwarder):
    """The address of a service that restarts; `refused` counts connections that failed so far."""

    refused = 0

    async def opened(self) -> Ends:
        try:
            return await super().opened()
        except OSError:
            self.refused += 1
            raise


async def test_calls_wait_for_a_service_that_restarts(stack: Stack, topic: str) -> None:
    async with Restarting(*free_ports(1)) as service, connect(service.address) as client:
        making = asyncio.create_task(client.admin().create_topic(topic))
        await eventually(lambda: service.refused > 1)
        assert not making.done()
        service.targets = (stack.ports["ledger"],)
        assert (await making).name == topic


async def test_an_invalid_name_is_refused(admin: Admin) -> None:
    with pytest.raises(InvalidNameError):
        await admin.topic("a//b")
