"""A token settles the delivery for which it was made, and no other.

Epochs and numbers of two subscriptions are often equal, and with a dispatcher of 0.2.0 they begin
at the same numbers. So here each consumer has a dispatcher of its own, whose tokens are those of
all others.
"""

import asyncio
import copy
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from seqgate.client import (
    Message,
    MessageId,
    Received,
    SubscriptionType,
    Token,
    blocking,
    connect,
)
from seqgate.errors import InvalidRequestError, StaleTokenError
from seqgate.message_id import topic_of
from seqgate.types import Position
from tests.support.fake_dispatcher import FakeDispatcher, serving_fake
from tests.support.waiting import WITHIN_S

TOPIC, OTHER = "public/default/orders", "public/default/invoices"
NOBODY = "127.0.0.1:1"

SETTLING = ("acknowledge", "acknowledge_cumulative", "negative_acknowledge", "give_back", "renew")


class Side:
    """A consumer of either client, used from a coroutine. Blocking ones are used in threads."""

    def __init__(self, consumer: Any) -> None:
        self.consumer = consumer
        self.is_blocking = isinstance(consumer, blocking.Consumer)

    async def call(self, verb: str, *about: Any) -> Any:
        method = getattr(self.consumer, verb)
        if not self.is_blocking:
            return await method(*about)
        return await asyncio.to_thread(self._call, method, about)

    def _call(self, method: Callable[..., Any], about: tuple[Any, ...]) -> Any:
        result = method(*about)
        return result.result(WITHIN_S) if hasattr(result, "add_done_callback") else result

    async def receive(self, count: int) -> list[Received]:
        return [await self.call("receive", WITHIN_S) for _ in range(count)]


Opening = Callable[..., Awaitable[Side]]


@pytest.fixture(params=["asyncio", "blocking"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Opening]:
    """Opens a consumer of a client of its own, with its own dispatcher unless one is given."""
    async with AsyncExitStack() as stack:

        async def open_one(
            fake: FakeDispatcher, topic: str = TOPIC, subscription: str = "s", **more: Any
        ) -> Side:
            more = {"type": SubscriptionType.EXCLUSIVE} | more
            if request.param == "asyncio":
                client = await stack.enter_async_context(connect(NOBODY, fake.address))
                consumer = client.consumer(topic, subscription, **more)
                return Side(await stack.enter_async_context(consumer))
            side = await asyncio.to_thread(_blocking, fake.address, topic, subscription, more)
            stack.push_async_callback(asyncio.to_thread, side.consumer._owner.close)
            return side

        yield open_one


def _blocking(address: str, topic: str, subscription: str, more: dict[str, Any]) -> Side:
    consumer = blocking.connect(NOBODY, address).consumer(topic, subscription, **more)
    consumer.open()
    return Side(consumer)


@asynccontextmanager
async def loaded(*payloads: bytes) -> AsyncIterator[FakeDispatcher]:
    async with serving_fake() as fake:
        for each in payloads:
            fake.publish(each, key="k")
        yield fake


@pytest.fixture
async def fake() -> AsyncIterator[FakeDispatcher]:
    async with loaded(b"own", b"next", b"last") as fake:
        yield fake


@pytest.fixture
async def elsewhere() -> AsyncIterator[FakeDispatcher]:
    """Another dispatcher, with the same epoch and numbers."""
    async with loaded(b"foreign") as fake:
        yield fake


def settled(fake: FakeDispatcher) -> list[str]:
    """The requests about deliveries that a service received."""
    asked = [each.WhichOneof("request") or "" for each in fake.requests]
    return [each for each in asked if each in SETTLING]


# ---- tokens that fit nothing

RECEIVE = """
import asyncio, pickle, sys
from seqgate.client import connect

async def main():
    async with connect("127.0.0.1:1", sys.argv[1]) as client:
        async with client.consumer(sys.argv[2], "s") as consumer:
            sys.stdout.buffer.write(pickle.dumps(await consumer.receive()))

asyncio.run(main())
"""


async def of_another(opened: Opening, elsewhere: FakeDispatcher, *names: str) -> Received:
    """A message of a consumer with these names, which stays open."""
    (message,) = await (await opened(elsewhere, *names)).receive(1)
    return message


async def of_a_closed_one(opened: Opening, elsewhere: FakeDispatcher) -> Received:
    side = await opened(elsewhere)
    (message,) = await side.receive(1)
    await side.call("close")
    return message


async def of_another_process(opened: Opening, elsewhere: FakeDispatcher) -> Received:
    told = await in_process(RECEIVE, elsewhere.address, TOPIC)
    message = pickle.loads(told)
    assert isinstance(message, Received)
    return message


async def in_process(program: str, *about: str, given: bytes = b"") -> bytes:
    run = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program, *about], input=given, capture_output=True
    )
    assert run.returncode == 0, run.stderr.decode()
    return run.stdout


async def of_an_older_client(opened: Opening, elsewhere: FakeDispatcher) -> Received:
    """As 0.2.0 pickled them: without a connection."""
    message = await of_another(opened, elsewhere)
    return replace(message, token=Token(*message.token[:3]))


FOREIGN: dict[str, Callable[[Opening, FakeDispatcher], Awaitable[Received]]] = {
    "topic": lambda opened, fake: of_another(opened, fake, OTHER),
    "subscription": lambda opened, fake: of_another(opened, fake, TOPIC, "t"),
    "client": of_another,
    "closed consumer": of_a_closed_one,
    "process": of_another_process,
    "release": of_an_older_client,
}

VERBS: dict[str, Callable[[Received, Received], tuple[Any, ...]]] = {
    "ack": lambda foreign, own: (foreign,),
    "ack_nowait": lambda foreign, own: (foreign,),
    "ack_many": lambda foreign, own: ([foreign],),
    "ack_many, own first": lambda foreign, own: ([own, foreign],),
    "ack_many, own last": lambda foreign, own: (iter([foreign, own]),),
    "ack_through": lambda foreign, own: (foreign,),
    "nack": lambda foreign, own: (foreign,),
    "nack_nowait": lambda foreign, own: (foreign, 0.0),
    "reconsume_later": lambda foreign, own: (foreign, 0.0),
    "extend": lambda foreign, own: (foreign,),
}


@pytest.mark.parametrize("origin", FOREIGN)
async def test_a_message_of_another_consumer_settles_nothing(
    opened: Opening, fake: FakeDispatcher, elsewhere: FakeDispatcher, origin: str
) -> None:
    side = await opened(fake)
    own, following, _ = await side.receive(3)
    foreign = await FOREIGN[origin](opened, elsewhere)
    for carried in (foreign, copy.deepcopy(foreign), pickle.loads(pickle.dumps(foreign))):
        assert carried.token[:3] == own.token[:3]
        for verb, about in VERBS.items():
            with pytest.raises(StaleTokenError, match="through another consumer"):
                await side.call(verb.partition(",")[0], *about(carried, own))
    if origin == "topic":
        with pytest.raises(StaleTokenError, match=f"of a message of {OTHER}"):
            await side.call("ack_id", foreign.id)
    await side.call("flush")
    assert settled(fake) == []
    assert not fake.done
    await side.call("ack_many", [following])
    assert fake.done == {following.id.position}
    await side.call("ack", own)


@pytest.mark.parametrize("verb", VERBS)
async def test_a_message_of_an_earlier_connection_settles_nothing(
    opened: Opening, fake: FakeDispatcher, verb: str
) -> None:
    """The dispatcher has lost all that it knew: its numbers begin again. What is acknowledged
    together with a message of an earlier connection is acknowledged all the same: to lose a
    connection is no mistake of the caller's."""
    side = await opened(fake)
    (old, *_) = await side.receive(3)
    fake._deliveries = 1
    fake._renew()
    fake.cut()
    again, own, _ = await side.receive(3)
    assert old.token[:3] == again.token[:3]
    with pytest.raises(StaleTokenError):
        await side.call(verb.partition(",")[0], *VERBS[verb](old, own))
    await side.call("flush")
    is_with_own = verb.startswith("ack_many,")
    assert fake.done == ({own.id.position} if is_with_own else set())
    assert settled(fake) == (["acknowledge"] if is_with_own else [])
    await side.call("ack", again)


async def test_a_message_of_a_subscription_that_was_moved_settles_nothing(
    opened: Opening, fake: FakeDispatcher
) -> None:
    side = await opened(fake)
    (old, *_) = await side.receive(3)
    await side.call("seek", "earliest")
    (again,) = await side.receive(1)
    for verb, about in VERBS.items():
        if not verb.startswith("ack_many,"):
            with pytest.raises(StaleTokenError):
                await side.call(verb, *about(old, again))
    assert settled(fake) == []
    await side.call("ack", again)


# ---- copies


THROUGH = "import pickle, sys; sys.stdout.buffer.write(pickle.dumps(pickle.load(sys.stdin.buffer)))"

COPIES: dict[str, Callable[[Received], Any]] = {
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": lambda each: pickle.loads(pickle.dumps(each)),
    "old pickle": lambda each: pickle.loads(pickle.dumps(each, protocol=2)),
    "changed": lambda each: replace(each, payload=b"another"),
}


@pytest.mark.parametrize("made", COPIES)
async def test_a_copied_message_acknowledges_as_its_original(
    opened: Opening, fake: FakeDispatcher, made: str
) -> None:
    side = await opened(fake)
    first, second, third = await side.receive(3)
    copies = [COPIES[made](each) for each in (first, second, third)]
    if made != "changed":
        assert copies == [first, second, third]
        assert [topic_of(each.id) for each in copies] == [TOPIC] * 3
    await side.call("ack", copies[0])
    await side.call("extend", copies[1])
    await side.call("ack_many", [copies[1], copies[1]])
    await side.call("nack", copies[2], 0.0)
    assert fake.done == {first.id.position, second.id.position}
    (again,) = await side.receive(1)
    assert (again.id, again.attempts) == (third.id, 1)
    for late in (copies[0], copies[2]):
        with pytest.raises(StaleTokenError, match="settled already"):
            await side.call("ack", late)
    await side.call("ack_through", COPIES[made](again))
    assert fake.mark_delete == Position(1, 2)


async def test_a_message_that_went_through_another_process_acknowledges_as_its_original(
    opened: Opening, fake: FakeDispatcher
) -> None:
    side = await opened(fake)
    messages = await side.receive(3)
    returned = pickle.loads(await in_process(THROUGH, given=pickle.dumps(messages)))
    assert returned == messages
    await side.call("ack_many", returned)
    assert fake.mark_delete == Position(1, 2)


# ---- ids


async def test_an_id_that_was_stored_names_a_place_in_the_consumers_own_topic(
    opened: Opening, fake: FakeDispatcher, elsewhere: FakeDispatcher
) -> None:
    side = await opened(fake)
    messages = await side.receive(3)
    foreign = await of_another(opened, elsewhere, OTHER)
    assert foreign.id == messages[0].id
    for carried in (foreign.id, copy.copy(foreign.id), pickle.loads(pickle.dumps(foreign.id))):
        with pytest.raises(StaleTokenError, match=OTHER):
            await side.call("ack_id", carried)
    with pytest.raises(InvalidRequestError, match="no message with this index"):
        await side.call("ack_id", MessageId(*foreign.id.position, batch_index=2**31 - 1))
    assert settled(fake) == []
    await side.call("ack_id", MessageId.parse(str(foreign.id)))
    await side.call("ack_id", MessageId.from_bytes(messages[1].id.to_bytes()))
    await side.call("ack_id", messages[2].id)
    assert fake.mark_delete == Position(1, 2)


async def test_messages_of_a_batch_settle_nothing_elsewhere(
    opened: Opening, elsewhere: FakeDispatcher
) -> None:
    async with serving_fake() as fake:
        fake.publish_batch([b"a", b"b", b"c"], key="k")
        elsewhere.publish_batch([b"x", b"y", b"z"], key="k")
        side, other = await opened(fake), await opened(elsewhere, OTHER)
        own = await side.receive(3)
        _, *foreign = await other.receive(4)
        foreign = [replace(each, token=each.token._replace(delivery=1)) for each in foreign]
        assert [each.token[:3] for each in foreign] == [each.token[:3] for each in own]
        with pytest.raises(StaleTokenError):
            await side.call("ack_many", [*own[:2], foreign[2]])
        with pytest.raises(StaleTokenError):
            await side.call("ack_id", foreign[0].id)
        assert settled(fake) == []
        await side.call("ack_many", own)
        assert fake.mark_delete == Position(1, 0)


# ---- what is no message


READ = Message(TOPIC, MessageId(1, 0), b"read", "p", 0, 0, 0)

NOT_TOKEN: Any = (7, 1, -1)

NO_MESSAGES: dict[str, Any] = {
    "None": None,
    "text": "1:0",
    "number": 1,
    "read": READ,
    "id": MessageId(1, 0),
    "token": Token(7, 1, -1),
    "list": [],
    "type": Received,
    "without token": Received(TOPIC, MessageId(1, 0), b"", "p", 0, 0, 0, token=NOT_TOKEN),
}


@pytest.mark.parametrize("what", NO_MESSAGES)
async def test_what_no_consumer_received_is_refused_without_effect(
    opened: Opening, fake: FakeDispatcher, what: str
) -> None:
    side = await opened(fake)
    own, *_ = await side.receive(3)
    given = NO_MESSAGES[what]
    for verb, about in VERBS.items():
        with pytest.raises(InvalidRequestError, match="message must be one") as refused:
            await side.call(verb.partition(",")[0], *about(given, own))
        assert refused.value.reason == "INVALID_SETTLEMENT"
    if not isinstance(given, MessageId):
        with pytest.raises(InvalidRequestError, match="message_id must be a MessageId"):
            await side.call("ack_id", given)
    for many in (None, 1, own):
        with pytest.raises(InvalidRequestError):
            await side.call("ack_many", many)
    await side.call("flush")
    assert settled(fake) == []
    await side.call("ack", own)


async def test_a_list_that_fails_while_it_is_made_acknowledges_nothing(
    opened: Opening, fake: FakeDispatcher
) -> None:
    side = await opened(fake)
    own, *_ = await side.receive(3)

    def made() -> Any:
        yield own
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await side.call("ack_many", made())
    await side.call("flush")
    assert settled(fake) == []
    await side.call("ack", own)
