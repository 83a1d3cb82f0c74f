"""Redrives of many, and replays: over real services, by the admin client."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from grpc import StatusCode

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.client import (
    Admin,
    AfterDeadLetter,
    Chunking,
    Client,
    Consumer,
    MessageId,
    Received,
    RedriveInfo,
    SubscriptionOptions,
    connect,
)
from seqgate.dev.stack import Stack
from seqgate.errors import InUseError, InvalidRequestError, NotFoundError
from tests.integration.refusals import refused
from tests.integration.services import Services
from tests.support.waiting import eventually

LETTERS = SubscriptionOptions(max_redeliveries=0, max_in_flight_per_key=1)
NEW = "seqgate.dead.redrives"


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        yield client


@pytest.fixture
async def admin(client: Client) -> Admin:
    return client.admin()


async def publish(client: Client, topic: str, count: int) -> None:
    """Publish messages 0, 1, ... of the keys k0, k1 and k2; even ones are red, others green."""
    async with client.producer(topic, name="p", batching=None) as producer:
        for each in range(count):
            tag = ("red", "green")[each % 2]
            await producer.send(f"{each}".encode(), key=f"k{each % 3}", properties={"tag": tag})


async def given(consumer: Consumer, count: int) -> list[Received]:
    return [await consumer.receive(20) for _ in range(count)]


def numbers(messages: Sequence[Received]) -> list[int]:
    return [int(each.payload) for each in messages]


async def refuse(admin: Admin, consumer: Consumer, topic: str, count: int) -> None:
    """Have the next messages dead-lettered."""
    for _ in range(count):
        await consumer.nack(await consumer.receive(20), delay_s=0)

    async def are_dead() -> bool:
        return len([each async for each in admin.dead_letters(topic, "s")]) == count

    await eventually(are_dead)


async def ended(admin: Admin, topic: str, number: int) -> RedriveInfo:
    """A redrive, once it has ended and all its messages are settled."""
    found: list[RedriveInfo] = []

    async def is_over() -> bool:
        found[:] = [await admin.redrive_info(topic, "s", number)]
        return not found[0].is_running and not found[0].returning

    await eventually(is_over)
    return found[0]


async def taken(consumer: Consumer, count: int) -> list[Received]:
    """The next messages, each acknowledged before the next."""
    found = []
    for _ in range(count):
        found += await given(consumer, 1)
        await consumer.ack(found[-1])
    return found


async def acknowledge(consumer: Consumer, messages: Sequence[Received]) -> None:
    for each in messages:
        await consumer.ack(each)


async def test_all_letters_are_redriven_once_in_the_order_of_their_keys(
    client: Client, admin: Admin, topic: str
) -> None:
    await publish(client, topic, 9)
    async with client.consumer(topic, "s", options=LETTERS) as consumer:
        await refuse(admin, consumer, topic, 9)
        started = await admin.start_redrive(topic, "s", request_id="all")
        again = await admin.start_redrive(topic, "s", request_id="all")
        back = await taken(consumer, 9)
        for key in ("k0", "k1", "k2"):
            of_key = [int(each.payload) for each in back if each.key == key]
            assert of_key == sorted(of_key)
        assert sorted(numbers(back)) == list(range(9))
        assert all(each.properties[NEW] == "1" for each in back)
        found = await ended(admin, topic, started.number)
        assert (again.number, found.state, found.outcomes) == (1, "DONE", {"REDRIVEN": 9})
        assert (found.entries, found.entries_read) == (9, 9)
        assert found.dead_letter_topic == f"{topic}-s-DLQ"

        second = await admin.start_redrive(topic, "s", request_id="once more")
        found = await ended(admin, topic, second.number)
        assert (found.number, found.outcomes) == (2, {"SETTLED": 9})
    assert [each.number for each in await admin.redrives(topic, "s")] == [2, 1]


async def test_a_key_or_an_expression_selects_letters(
    client: Client, admin: Admin, topic: str
) -> None:
    await publish(client, topic, 6)
    async with client.consumer(topic, "s", options=LETTERS) as consumer:
        await refuse(admin, consumer, topic, 6)
        red = "properties['tag'] == 'red' && producer == 'p'"
        about = await admin.estimate_redrive(topic, "s", key="k0", expression=red)
        assert (about.is_complete, about.entries) == (True, 6)
        counted = {each: count.entries for each, count in about.outcomes.items()}
        assert counted == {"REDRIVEN": 1, "NOT_SELECTED": 5}
        assert await admin.redrives(topic, "s") == []

        await admin.start_redrive(topic, "s", key="k0", expression=red, request_id="a")
        back = await given(consumer, 1)
        assert numbers(back) == [0]
        await acknowledge(consumer, back)
        assert (await ended(admin, topic, 1)).outcomes == counted

        reason = "properties['seqgate.dead.reason'] == 'REDELIVERIES' && int(key) < 9"
        failed = await admin.start_redrive(topic, "s", expression=reason, request_id="b")
        assert (await ended(admin, topic, failed.number)).outcomes == {"EXPRESSION_FAILED": 6}
        with pytest.raises(InvalidRequestError, match="nonsense"):
            await admin.start_redrive(topic, "s", expression="nonsense", request_id="c")
        assert len(await admin.redrives(topic, "s")) == 2


async def publish_large(client: Client, topic: str) -> list[bytes]:
    """Publish two large messages among small ones, and return all in the order of the log."""
    bodies = [b"0", b"1" * 3_500, b"2", b"3" * 2_500, b"4"]
    async with client.producer(topic, name="p", chunking=Chunking(1_000)) as producer:
        for body in bodies:
            await producer.send(body, key="k", properties={"size": f"{len(body)}"})
    return bodies


async def test_large_messages_are_redriven_and_replayed_whole(
    client: Client, admin: Admin, topic: str
) -> None:
    bodies = await publish_large(client, topic)
    async with client.consumer(topic, "s", options=LETTERS) as consumer:
        await refuse(admin, consumer, topic, len(bodies))
        large = "properties['size'] != '1'"
        about = await admin.estimate_redrive(topic, "s", expression=large)
        assert about.outcomes["REDRIVEN"].entries == 2
        started = await admin.start_redrive(topic, "s", expression=large, request_id="large")
        assert [each.payload for each in await taken(consumer, 2)] == [bodies[1], bodies[3]]
        found = await ended(admin, topic, started.number)
        assert (found.state, found.outcomes) == ("DONE", {"REDRIVEN": 2, "NOT_SELECTED": 3})

        started = await admin.start_redrive(topic, "s", request_id="the others")
        assert [each.payload for each in await taken(consumer, 3)] == bodies[::2]
        found = await ended(admin, topic, started.number)
        assert found.outcomes == {"REDRIVEN": 3, "SETTLED": 2}

        started = await admin.replay(topic, "s", request_id="replay")
        assert [each.payload for each in await taken(consumer, 5)] == bodies
        found = await ended(admin, topic, started.number)
        assert (found.outcomes, found.entries_read) == ({"REDRIVEN": 5}, 10)


async def test_a_slow_redrive_is_watched_and_stopped(
    client: Client, admin: Admin, topic: str
) -> None:
    await publish(client, topic, 4)
    async with client.consumer(topic, "s", options=LETTERS) as consumer:
        await refuse(admin, consumer, topic, 4)
        started = await admin.start_redrive(topic, "s", letters_per_s=1, request_id="slow")
        with pytest.raises(InUseError, match=f"redrive {started.number}"):
            await admin.start_redrive(topic, "s", request_id="another")
        await given(consumer, 1)
        stopped = await admin.stop_redrive(topic, "s", started.number)
        assert stopped.state == "STOPPED"
        redriven = stopped.outcomes["REDRIVEN"]
        assert stopped.entries_read == redriven < 4
        assert await admin.stop_redrive(topic, "s", started.number) == stopped
        rest = await admin.start_redrive(topic, "s", request_id="rest")
        found = (await admin.redrive_info(topic, "s", rest.number)).outcomes

        async def is_done() -> bool:
            nonlocal found
            found = (await admin.redrive_info(topic, "s", rest.number)).outcomes
            return sum(found.values()) == 4

        await eventually(is_done)
        assert found["REDRIVEN"] == 4 - redriven
    with pytest.raises(NotFoundError):
        await admin.redrive_info(topic, "s", 99)
    with pytest.raises(NotFoundError):
        await admin.stop_redrive(topic, "s", 99)


async def test_a_letter_redriven_by_name_is_in_the_same_list(
    client: Client, admin: Admin, topic: str
) -> None:
    await publish(client, topic, 2)
    async with client.consumer(topic, "s", options=LETTERS) as consumer:
        await refuse(admin, consumer, topic, 2)
        await eventually_redriven(admin, topic, MessageId(1, 0))
        back = await given(consumer, 1)
        await admin.start_redrive(topic, "s", request_id="rest")
        rest = await given(consumer, 1)
        await acknowledge(consumer, [*back, *rest])
        found = await ended(admin, topic, 2)
        assert found.outcomes == {"REDRIVEN": 1, "RETURNING": 1}
        named = await admin.redrive_info(topic, "s", 1)
        assert (named.state, named.request_id, named.outcomes) == ("DONE", "one", {"REDRIVEN": 1})
        assert [each.number for each in await admin.redrives(topic, "s")] == [2, 1]


async def eventually_redriven(admin: Admin, topic: str, letter: MessageId) -> None:
    async def is_redriven() -> bool:
        try:
            await admin.redrive(topic, "s", [letter], request_id="one")
        except InUseError:
            return False
        return True

    await eventually(is_redriven)


async def test_a_redrive_of_a_held_key_resumes_it(client: Client, admin: Admin, topic: str) -> None:
    async with client.producer(topic, name="p", batching=None) as producer:
        for each in range(3):
            await producer.send(f"{each}".encode(), key="k")
    options = replace(LETTERS, after_dead_letter=AfterDeadLetter.HOLD)
    async with client.consumer(topic, "s", options=options) as consumer:
        await refuse(admin, consumer, topic, 1)
        await admin.start_redrive(topic, "s", request_id="all")
        for number in range(3):
            message = await consumer.receive(20)
            assert int(message.payload) == number
            await consumer.ack(message)
        assert (await ended(admin, topic, 1)).outcomes == {"REDRIVEN": 1}


# ---- replays


async def test_a_stretch_is_replayed_and_acknowledged_once_more(
    client: Client, admin: Admin, topic: str
) -> None:
    await publish(client, topic, 6)
    async with client.consumer(topic, "s") as consumer:
        first = await given(consumer, 6)
        await acknowledge(consumer, first[:5])
        before = await admin.subscription(topic, "s")
        start, end = (next(e.id for e in first if int(e.payload) == n) for n in (1, 5))
        stretch: dict[str, Any] = {"start": start, "end": end}
        red = "properties['tag'] == 'red'"
        about = await admin.estimate_replay(topic, "s", **stretch, expression=red)
        counted = {each: count.entries for each, count in about.outcomes.items()}
        assert (about.is_complete, about.entries) == (True, 4)

        started = await admin.replay(topic, "s", **stretch, expression=red, request_id="r")
        back = await given(consumer, counted["REDRIVEN"])
        assert {int(each.payload) for each in back} <= {2, 4}
        assert not any(NEW in each.properties for each in back)
        await acknowledge(consumer, back)
        found = await ended(admin, topic, started.number)
        assert (found.outcomes, found.dead_letter_topic) == (counted, None)
        assert (found.after, found.through) == ((1, 0), (1, 4))
        after = await admin.subscription(topic, "s")
        assert (after.mark_delete, after.acknowledged_entries) == (
            before.mark_delete,
            before.acknowledged_entries,
        )
    async with client.consumer(topic, "s") as consumer:  # only what nobody acknowledged
        assert numbers(await given(consumer, 1)) == numbers(first[5:])


async def test_a_topic_is_replayed_into_a_new_subscription(
    client: Client, admin: Admin, topic: str
) -> None:
    await publish(client, topic, 6)
    about = await admin.estimate_replay(topic, "s", key="k1", create=True)
    assert {each: found.about for each, found in about.outcomes.items()} == {
        "REDRIVEN": 2,
        "NOT_SELECTED": 4,
    }
    with pytest.raises(NotFoundError):
        await admin.replay(topic, "s", key="k1", request_id="r")
    await admin.replay(topic, "s", key="k1", request_id="r", create=True)
    async with client.consumer(topic, "s") as consumer:
        back = await given(consumer, 2)
        assert numbers(back) == [1, 4]
        await acknowledge(consumer, back)
        assert (await ended(admin, topic, 1)).outcomes == {"REDRIVEN": 2, "NOT_SELECTED": 4}
        async with client.producer(topic, name="q", batching=None) as producer:
            await producer.send(b"9", key="k1")
        assert numbers(await given(consumer, 1)) == [9]


async def test_a_replayed_message_that_fails_is_a_letter(
    client: Client, admin: Admin, topic: str
) -> None:
    await publish(client, topic, 1)
    async with client.consumer(topic, "s", options=LETTERS) as consumer:
        await acknowledge(consumer, await given(consumer, 1))
        await admin.replay(topic, "s", request_id="r")
        await refuse(admin, consumer, topic, 1)
        assert (await ended(admin, topic, 1)).outcomes == {"REDRIVEN": 1}
        await admin.start_redrive(topic, "s", request_id="back")
        back = await given(consumer, 1)
        await acknowledge(consumer, back)
        assert (await ended(admin, topic, 2)).outcomes == {"REDRIVEN": 1}
        (letter,) = [each async for each in admin.dead_letters(topic, "s")]
        assert letter.redriven


async def test_a_replayed_message_that_nobody_receives_is_explained(
    client: Client, admin: Admin, topic: str
) -> None:
    await publish(client, topic, 1)
    await admin.replay(topic, "new", request_id="r", create=True)

    async def is_back() -> bool:
        return (await admin.redrive_info(topic, "new", 1)).returning == 1

    await eventually(is_back)
    (why,) = await admin.explain_delivery(topic, "new", message_id=MessageId(1, 0))
    assert why.reason == "NO_OWNER"


# ---- refusals

EARLIEST = common_pb2.Start(earliest=common_pb2.Earliest())
STRETCH = pb.TopicStretch(start=EARLIEST)
BAD: dict[str, dict[str, Any]] = {
    "no request id": {"request_id": ""},
    "too fast": {"letters_per_second": 10_001},
    "a long key": {"selection": pb.RedriveSelection(key=b"k" * 513)},
    "a long expression": {"selection": pb.RedriveSelection(expression="é" * 513)},
    "a dead letter topic with a stretch": {
        "dead_letter_topic": "a/b/c",
        "selection": pb.RedriveSelection(stretch=STRETCH),
    },
    "letters for a new subscription": {"create_subscription": True},
}


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD)
async def test_invalid_redrives_are_refused(
    services: Services, topic: str, fields: dict[str, Any]
) -> None:
    request: dict[str, Any] = {"request_id": "r", "topic": topic, "subscription": "s"}
    with refused(StatusCode.INVALID_ARGUMENT, "INVALID_REDRIVE"):
        await services.dispatcher.StartRedrive(pb.StartRedriveRequest(**request | fields))
