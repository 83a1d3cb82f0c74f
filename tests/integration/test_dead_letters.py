"""Dead letters that are mended and discarded, through the admin client."""

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.client import (
    Admin,
    AfterDeadLetter,
    Batching,
    Chunking,
    Client,
    Consumer,
    DeadLetter,
    MessageId,
    Outgoing,
    SubscriptionOptions,
    connect,
)
from seqgate.errors import InUseError, InvalidRequestError
from seqgate.services.dispatcher.letters import operations
from tests.integration.services import Services
from tests.support.waiting import eventually

HELD = SubscriptionOptions(max_redeliveries=0, after_dead_letter=AfterDeadLetter.HOLD)


@pytest.fixture
async def client(services: Services) -> AsyncIterator[Client]:
    stack = services.stack
    async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        yield client


@pytest.fixture
async def admin(client: Client) -> Admin:
    return client.admin()


async def publish(client: Client, topic: str, *payloads: bytes, key: str = "k") -> None:
    async with client.producer(topic, name=f"p-{key}") as producer:
        for payload in payloads:
            await producer.send(payload, key=key, properties={"a": "1", "b": "2"})


async def dead(admin: Admin, topic: str, consumer: Consumer, count: int = 1) -> list[DeadLetter]:
    """Refuse the next messages until there are this many letters."""
    for _ in range(count):
        await consumer.nack(await consumer.receive(), delay_s=0)
    found: list[DeadLetter] = []

    async def are_there() -> bool:
        found[:] = [each async for each in admin.dead_letters(topic, "s")]
        return len(found) == count

    await eventually(are_there)
    return found


async def letters(admin: Admin, topic: str) -> list[DeadLetter]:
    return [each async for each in admin.dead_letters(topic, "s")]


async def kept(services: Services, topic: str) -> list[str]:
    """The names of the subscription's internal properties."""
    names = cursor_pb2.GetCursorRequest(topic=topic, cursor="s")
    return list((await services.cursor.GetCursor(names)).cursor.properties)


async def test_a_discarded_letter_resumes_its_key_and_is_never_delivered(
    services: Services, client: Client, admin: Admin, topic: str
) -> None:
    await publish(client, topic, b"poison", b"second", b"third")
    async with client.consumer(topic, "s", options=HELD) as consumer:
        (letter,) = await dead(admin, topic, consumer)
        made = await admin.discard(topic, "s", [letter.id], request_id="d1", reason="a test")
        assert (made.operation, made.letters, made.repeated) == (1, 1, False)
        again = await admin.discard(topic, "s", [letter.id], request_id="d1")
        assert again == made._replace(repeated=True)
        for payload in (b"second", b"third"):
            message = await consumer.receive()
            assert message.payload == payload
            await consumer.ack(message)
    (letter,) = await letters(admin, topic)
    assert (letter.state, letter.redriven, letter.holds_key) == ("DISCARDED", False, False)
    with pytest.raises(InUseError, match="it was discarded before") as refused:
        await admin.discard(topic, "s", [letter.id], request_id="d2")
    assert refused.value.reason == "LETTER_NOT_DISCARDABLE"
    with pytest.raises(InUseError, match="it was discarded before"):
        await admin.redrive(topic, "s", [letter.id], request_id="r1")
    with pytest.raises(InUseError, match="it was discarded before") as refused:
        await admin.mend(topic, "s", letter.id, payload=b"x", request_id="m1")
    assert refused.value.reason == "LETTER_NOT_MENDABLE"
    (operation,) = await admin.letter_operations(topic, "s")
    assert (operation.number, operation.action, operation.request_id) == (1, "DISCARD", "d1")
    assert (operation.letters, operation.count, operation.reason) == ((letter.id,), 1, "a test")
    assert (operation.topic, operation.successor) == (letter.topic, None)
    assert operation.caller
    assert not [each for each in await kept(services, topic) if "dead.key" in each]


async def test_all_letters_of_a_discard_are_discarded_or_none(
    client: Client, admin: Admin, topic: str
) -> None:
    await publish(client, topic, b"poison")
    await publish(client, topic, b"poison", key="other")
    async with client.consumer(topic, "s", options=HELD) as consumer:
        first, second = await dead(admin, topic, consumer, 2)
        with pytest.raises(InUseError, match="no such letter"):
            await admin.discard(topic, "s", [first.id, MessageId(1, 9)], request_id="d1")
        assert [each.state for each in await letters(admin, topic)] == ["DEAD", "DEAD"]
        await admin.discard(topic, "s", [first.id, second.id], request_id="d1")
        assert {each.state for each in await letters(admin, topic)} == {"DISCARDED"}


async def test_a_mended_letter_takes_the_place_of_its_original(
    services: Services, client: Client, admin: Admin, topic: str
) -> None:
    """It is redriven to the place of the message, before the messages held behind it."""
    await publish(client, topic, b"poison", b"second")
    async with client.consumer(topic, "s", options=HELD) as consumer:
        (letter,) = await dead(admin, topic, consumer)
        change: dict[str, Any] = {
            "payload": b"cured",
            "put": {"a": "3", "c": "4"},
            "remove": ["b", "unknown"],
        }
        made = await admin.mend(topic, "s", letter.id, request_id="m1", **change)
        assert (made.operation, made.repeated) == (1, False)
        again = await admin.mend(topic, "s", letter.id, request_id="m1", **change)
        assert again == made._replace(repeated=True)

        original, mended = await letters(admin, topic)
        assert (original.state, original.successor) == ("MENDED", mended.id)
        assert (original.mend, original.holds_key) == (None, False)
        assert (mended.id, mended.state, mended.origin) == (made.letter, "DEAD", letter.origin)
        assert (mended.holds_key, mended.waiting_entries) == (True, 1)
        assert (mended.attempts, mended.failures) == (letter.attempts, letter.failures)
        assert mended.mend is not None
        assert mended.mend.original == letter.id
        _, (kept_,) = await admin.dead_letter(topic, "s", letter.id)
        assert (kept_.payload, kept_.properties["a"]) == (b"poison", "1")

        for request in ("redrive", "discard"):
            with pytest.raises(InUseError, match="it was mended before"):
                await getattr(admin, request)(topic, "s", [letter.id], request_id="x")
        await admin.redrive(topic, "s", [mended.id], request_id="r1")
        back = await consumer.receive()
        assert (back.payload, back.key, back.id) == (b"cured", "k", letter.origin)
        own = {each: value for each, value in back.properties.items() if "seqgate" not in each}
        assert own == {"a": "3", "c": "4"}
        assert "seqgate.dead.mend" not in back.properties
        assert (back.producer_name, back.sequence_id) == (letter.producer, letter.sequence_id)
        await consumer.ack(back)
        second = await consumer.receive()
        assert second.payload == b"second"
        await consumer.ack(second)
    assert [each.state for each in await letters(admin, topic)] == ["MENDED", "REDRIVEN"]
    redrive, mend = await admin.letter_operations(topic, "s")
    assert (redrive.action, redrive.letters, redrive.request_id) == ("REDRIVE", (mended.id,), "r1")
    assert (mend.action, mend.letters, mend.successor) == ("MEND", (letter.id,), mended.id)
    assert (mended.mend.caller, mended.mend.at) == (mend.caller, mend.at)
    assert not [each for each in await kept(services, topic) if "mending" in each]


async def test_a_mended_letter_is_mended_again_and_discarded(
    client: Client, admin: Admin, topic: str
) -> None:
    await publish(client, topic, b"poison", b"second")
    async with client.consumer(topic, "s", options=HELD) as consumer:
        (letter,) = await dead(admin, topic, consumer)
        first = await admin.mend(topic, "s", letter.id, put={"a": "5"}, request_id="m1")
        second = await admin.mend(topic, "s", first.letter, payload=b"", request_id="m2")
        found = await letters(admin, topic)
        assert [each.state for each in found] == ["MENDED", "MENDED", "DEAD"]
        assert [each.successor for each in found] == [first.letter, second.letter, None]
        _, (message,) = await admin.dead_letter(topic, "s", second.letter)
        assert (message.payload, message.properties["a"]) == (b"", "5")
        await admin.discard(topic, "s", [second.letter], request_id="d1")
        assert (await consumer.receive()).payload == b"second"


async def test_a_letter_tells_of_the_earlier_lives_of_its_message(
    client: Client, admin: Admin, topic: str
) -> None:
    """Each life has its failures, and as many deliveries as the first one."""
    await publish(client, topic, b"poison")
    options = SubscriptionOptions(max_redeliveries=1, after_dead_letter=AfterDeadLetter.HOLD)
    async with client.consumer(topic, "s", name="crew", options=options) as consumer:
        for life in range(3):
            for attempts in range(2):
                message = await consumer.receive()
                assert message.attempts == attempts
                assert "seqgate.dead.lives" not in message.properties
                await consumer.nack(message, delay_s=0)

            async def is_dead(count: int = life + 1) -> bool:
                return len(await letters(admin, topic)) == count

            await eventually(is_dead)
            if life < 2:
                letter = (await letters(admin, topic))[-1]

                async def is_redriven(
                    name: MessageId = letter.id, request: str = f"r{life}"
                ) -> bool:
                    """Refused until the return of the letter before has ended, soon."""
                    with suppress(InUseError):
                        await admin.redrive(topic, "s", [name], request_id=request)
                        return True
                    return False

                await eventually(is_redriven)

        async def has_ended() -> bool:
            """A letter numbered again ends the return of the one before, soon."""
            states = [each.state for each in await letters(admin, topic)]
            return states == ["REDRIVEN", "REDRIVEN", "DEAD"]

        await eventually(has_ended)
        first, second, third = await letters(admin, topic)
    assert [each.redrives for each in (first, second, third)] == [0, 1, 2]
    assert not first.lives
    (life_of_first,) = second.lives
    assert (life_of_first.letter, life_of_first.at) == (first.id, first.at)
    assert (life_of_first.reason, life_of_first.attempts) == ("REDELIVERIES", 2)
    assert life_of_first.failures == first.failures
    assert [(each.how, each.consumer) for each in first.failures] == [("REFUSED", "crew")] * 2
    assert third.lives[0] == life_of_first
    assert [each.letter for each in third.lives] == [first.id, second.id]
    assert (third.attempts, third.lives[1].failures) == (2, second.failures)


async def test_mends_beyond_the_limits_change_nothing(
    services: Services, client: Client, admin: Admin, topic: str
) -> None:
    await publish(client, topic, b"poison")
    async with client.consumer(topic, "s", options=HELD) as consumer:
        (letter,) = await dead(admin, topic, consumer)
        changes: tuple[dict[str, Any], ...] = (
            {"payload": b"x" * (6 * 1024 * 1024)},
            {"put": {"a": "x" * 130 * 1024}},
            {"put": {f"name {number}": "x" for number in range(127)}},
        )
        for change in changes:
            with pytest.raises(InvalidRequestError) as refused:
                await admin.mend(topic, "s", letter.id, request_id="m1", **change)
            assert refused.value.reason == "INVALID_MEND", refused.value
            assert [each.state for each in await letters(admin, topic)] == ["DEAD"]
        await admin.redrive(topic, "s", [letter.id], request_id="r1")
        with pytest.raises(InUseError, match="it is on its way back"):
            await admin.mend(topic, "s", letter.id, payload=b"x", request_id="m1")
        with pytest.raises(InUseError, match="it is on its way back"):
            await admin.discard(topic, "s", [letter.id], request_id="d1")
        assert (await consumer.receive()).payload == b"poison"
    assert not [each for each in await kept(services, topic) if "mending" in each]


async def test_a_batch_is_not_mended(client: Client, admin: Admin, topic: str) -> None:
    async with client.producer(topic, name="p", batching=Batching()) as producer:
        await producer.send_many([Outgoing(each, key="k") for each in (b"x", b"y")])
    async with client.consumer(topic, "s", options=HELD) as consumer:
        (letter,) = await dead(admin, topic, consumer)
        with pytest.raises(InUseError, match="it is a batch"):
            await admin.mend(topic, "s", letter.id, payload=b"x", request_id="m1")


async def test_the_latest_operations_are_listed(client: Client, admin: Admin, topic: str) -> None:
    """More are forgotten, and their numbers are not used again."""
    await publish(client, topic, b"poison")
    async with client.consumer(topic, "s", options=HELD) as consumer:
        (letter,) = await dead(admin, topic, consumer)
        last, count = letter.id, operations.OPERATIONS_MAX + 2
        for number in range(1, count + 1):
            request_id = f"m{number}"
            made = await admin.mend(topic, "s", last, payload=b"x", request_id=request_id)
            last = made.letter
            assert made.operation == number
        found = await admin.letter_operations(topic, "s")
        assert [each.number for each in found] == list(range(count, 2, -1))
        with pytest.raises(InUseError, match="it was mended before"):
            await admin.mend(topic, "s", letter.id, payload=b"x", request_id="m1")


LARGE = b"".join(b"%07d," % number for number in range(4_000))


async def publish_large(client: Client, topic: str) -> None:
    """A large message of many chunks, and two small ones behind it."""
    chunking = Chunking(chunk_bytes=4_000)
    async with client.producer(topic, name="p", chunking=chunking) as producer:
        for payload in (LARGE, b"second", b"third"):
            await producer.send(payload, key="k")


async def test_a_large_letter_goes_whole(
    services: Services, client: Client, admin: Admin, topic: str
) -> None:
    """It is listed once, and any of its chunks takes back all. It is delivered once, before the
    messages held behind it; if it fails again, it is another letter."""
    await publish_large(client, topic)
    async with client.consumer(topic, "s", options=HELD) as consumer:
        (letter,) = await dead(admin, topic, consumer)
        assert (letter.chunk, letter.chunks, letter.payload_bytes) == (7, 8, len(LARGE))
        assert (letter.holds_key, letter.waiting_entries) == (True, 2)
        chunks = [MessageId(1, number) for number in range(8)]
        with pytest.raises(InUseError, match="it is a large message"):
            await admin.mend(topic, "s", letter.id, payload=b"x", request_id="m1")

        made = await admin.redrive(topic, "s", [chunks[3], chunks[5]], request_id="r1")
        assert made.letters == 2
        back = await consumer.receive()
        assert (back.payload, back.id) == (LARGE, letter.origin)
        with pytest.raises(InUseError, match="it is on its way back"):
            await admin.redrive(topic, "s", [letter.id], request_id="r2")
        await consumer.nack(back, delay_s=0)

        async def is_dead() -> bool:
            return len(await letters(admin, topic)) == 2

        await eventually(is_dead)
        first, second = await letters(admin, topic)
        assert (first.state, second.state, second.redrives) == ("REDRIVEN", "DEAD", 1)
        assert second.holds_key
        await admin.redrive(topic, "s", [second.id], request_id="r3")
        for payload in (LARGE, b"second", b"third"):
            message = await consumer.receive()
            assert message.payload == payload
            await consumer.ack(message)
    assert [each.state for each in await letters(admin, topic)] == ["REDRIVEN", "REDRIVEN"]
    left = await kept(services, topic)
    assert not [each for each in left if "return" in each or "dead.key" in each]


async def test_a_discarded_large_letter_resumes_its_key(
    client: Client, admin: Admin, topic: str
) -> None:
    await publish_large(client, topic)
    async with client.consumer(topic, "s", options=HELD) as consumer:
        (letter,) = await dead(admin, topic, consumer)
        await admin.discard(topic, "s", [MessageId(1, 2)], request_id="d1")
        assert (await consumer.receive()).payload == b"second"
        with pytest.raises(InUseError, match="it was discarded before"):
            await admin.redrive(topic, "s", [letter.id], request_id="r1")


async def test_a_large_letter_without_all_chunks_is_not_redriven(
    client: Client, admin: Admin, topic: str
) -> None:
    await publish_large(client, topic)
    async with client.consumer(topic, "s", options=HELD) as consumer:
        (letter,) = await dead(admin, topic, consumer)
        await admin.trim_topic(letter.topic, MessageId(1, 3))
        with pytest.raises(InUseError, match="some chunks of its large message are missing"):
            await admin.redrive(topic, "s", [letter.id], request_id="r1")
        (letter,) = await letters(admin, topic)
        assert letter.state == "DEAD"
