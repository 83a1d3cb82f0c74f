"""Whatever fails in a consumer that must not: nothing waits for ever, and nothing leaks.

A history uses all of a consumer: deliveries, large messages, acknowledgements, refusals, locks, a
reconnection, the end. It is run once for each place of it, where an exception is raised:

    at an await     of each coroutine of the client: its own tasks, and the application's calls
    in a call       of the inbox, of what its requests and its chunks do, of a timer, and of a
                    callback of the application's; before it does anything, or after it did all

Then every call has returned or raised, every future is done, no task or timer is left, and the
service has nothing in flight at the consumer.
"""

import asyncio
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from seqgate.client import (
    Breaker,
    Consumer,
    Incomplete,
    SubscriptionType,
    blocking,
    connect,
)
from seqgate.client._chunk_deliveries import ChunkDeliveries
from seqgate.client._inbox import Inbox
from seqgate.client._requests import Requests
from seqgate.client.blocking._consumer import SharedInbox
from seqgate.errors import ConsumerClosedError, InternalError, SeqgateError, StaleTokenError
from tests.support.depth import deep
from tests.support.fake_dispatcher import FakeDispatcher, serving_fake
from tests.support.surprises import Boom, Plan, in_steps, is_clients, surprising
from tests.support.waiting import WITHIN_S, eventually

TOPIC = "public/default/orders"
NOBODY = "127.0.0.1:1"

EACH = deep(quick=12, full=1)
EACH_IN_THREADS = deep(quick=5, full=1)
"""One of so many places is tried; which ones of a whole history, depends on the seed."""

BATCH = 3


CALLS: dict[type, tuple[str, ...]] = {
    Inbox: (
        "subscribed", "disconnected", "receive", "requests", "take", "take_more", "take_resolved",
        "take_dropped", "unlock", "acknowledge", "acknowledge_part", "acknowledge_id",
        "negative_acknowledge", "renew", "renew_waiting", "expire", "advance", "flush", "leave",
        "_delivered", "_decode", "_conclude", "_end",
    ),
    Requests: ("add", "to_send", "settled", "abandon"),
    ChunkDeliveries: ("add", "take_dropped"),
    Consumer: ("_flush_acks", "_take_subscribed", "_take_response", "_set_due", "_disconnect"),
}  # fmt: skip


@asynccontextmanager
async def planted(plan: Plan, patch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    for owner, names in CALLS.items():
        for name in names:
            patch.setattr(owner, name, surprising(plan, getattr(owner, name)))
    asyncio.get_running_loop().set_task_factory(in_steps(plan))
    try:
        yield
    finally:
        asyncio.get_running_loop().set_task_factory(None)


class History:
    """Uses a consumer, whatever fails."""

    def __init__(self, plan: Plan, fake: FakeDispatcher, consumer: Consumer) -> None:
        self.futures: list[asyncio.Future[Any]] = []
        self.waiting: list[asyncio.Task[Any]] = []
        self._plan, self._fake, self._consumer = plan, fake, consumer

    async def call(self, call: Coroutine[Any, Any, Any]) -> Any:
        """A call of the application's, in a task of its own; None if it fails."""
        task = asyncio.create_task(call)
        done, _ = await asyncio.wait([task], timeout=WITHIN_S)
        assert done, f"{call} hangs after {self._plan.where}"
        error = task.exception()
        assert error is None or isinstance(error, Boom | SeqgateError), repr(error)
        return None if error is not None else task.result()

    def begin(self, call: Callable[..., "asyncio.Future[Any]"], *about: Any) -> None:
        with suppress(SeqgateError):
            self.futures.append(call(*about))

    async def run(self) -> None:
        consumer, fake, call = self._consumer, self._fake, self.call
        await call(consumer.open())
        messages = [each for _ in range(3) if (each := await call(consumer.receive()))]
        if locked := await call(consumer.receive_and_lock()):
            messages.append(locked[0])
            await call(self._unlock(locked[1]))
        messages += await call(consumer.receive_many()) or []
        for each in messages[:2]:
            self.begin(consumer.ack_nowait, each)
        for each in messages[2:3]:
            await call(consumer.extend(each))
            await call(consumer.ack_id(each.id))
        for each in messages[3:4]:
            self.begin(consumer.nack_nowait, each, 0.0)
        for each in messages[4:5]:
            await call(consumer.ack(each))
        await call(consumer.ack_many(messages[5:8]))
        await call(consumer.flush())
        fake.durable.clear()  # what is acknowledged from here on stays unanswered
        for each in messages[8:9]:
            self.begin(consumer.ack_nowait, each)
            self.waiting.append(asyncio.create_task(consumer.ack_many([each])))
        for _ in range(9):
            fake.publish(b"more", key="m")
        fake.cut()
        if await call(consumer.receive()) is not None:
            fake.durable.set()
            if (last := await call(consumer.receive())) is not None:
                self.begin(consumer.ack_nowait, last)
        fake.durable.set()
        # Some receive what has come; the others wait until the end.
        self.waiting += [asyncio.create_task(consumer.receive()) for _ in range(40)]
        await call(consumer.close())

    async def _unlock(self, key: bytes) -> None:
        self._consumer.unlock(key)


def dropping(plan: Plan) -> Callable[[object], None]:
    return lambda dropped: plan.pass_by("on_dropped")


async def lived(at: int | None, patch: pytest.MonkeyPatch) -> int:
    """Run a history, with an exception at this place. Returns how many places it had."""
    async with serving_fake() as fake, connect(NOBODY, fake.address) as client:
        for number in range(6):
            fake.publish(b"%d" % number, key=f"k{number % 3}")
        fake.publish_batch([b"a", b"b", b"c"], key="k3")
        fake.publish_large(b"x" * 90, "k4", 30)
        fake.publish_large(b"y" * 90, "k4", 30, only=[0, 2])
        plan = Plan(at)
        consumer = client.consumer(
            TOPIC,
            "s",
            type=SubscriptionType.SHARED,
            ack_timeout_s=0.15,
            incomplete=Incomplete.ACKNOWLEDGE,
            breaker=Breaker(outcomes=1, pause_min_s=0.001, pause_max_s=0.002),
            on_dropped=dropping(plan),
        )
        history = History(plan, fake, consumer)
        with patch.context() as inner:
            async with planted(plan, inner):
                await history.run()
            places = plan.places
        await nothing_is_left(history, fake, consumer, plan)
        return places


async def nothing_is_left(
    history: History, fake: FakeDispatcher, consumer: Consumer, plan: Plan
) -> None:
    where = plan.where
    pending = [*history.futures, *history.waiting]
    if pending:
        _, open_ = await asyncio.wait(pending, timeout=WITHIN_S)
        assert not open_, f"{open_} stay open after {where}"
    for each in pending:
        error = each.exception()
        assert error is None or isinstance(error, SeqgateError | Boom), (where, error)
    await no_stream(fake, plan)
    await eventually(lambda: not tasks_of_consumers(), f"no task is left after {where}")
    assert (consumer._linger, consumer._due) == (None, None), where
    inbox = consumer._inbox
    assert (inbox._units, inbox._by_position, inbox.buffered) == ({}, {}, 0), where
    assert inbox.is_answered, where
    assert not consumer.is_connected, where
    with pytest.raises((ConsumerClosedError, InternalError)):
        await consumer.receive()


async def no_stream(fake: FakeDispatcher, plan: Plan) -> None:
    await eventually(lambda: not fake.streams, f"the stream ends after {plan.where}")


def tasks_of_consumers() -> list[Any]:
    return [task for task in asyncio.all_tasks() if is_clients(task.get_coro())]


async def test_nothing_waits_for_ever_whatever_fails(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The places of a history differ a little between runs: tasks meet in another order."""
    places = await lived(None, monkeypatch)
    assert places > 100
    for at in range(random.Random(seed).randrange(EACH), places, EACH):
        await lived(at, monkeypatch)


# ---- in threads

IN_THREADS = (
    "take", "fill", "withdraw", "do_what_is_left", "key_of", "unlock", "acknowledge",
    "acknowledge_part", "negative_acknowledge", "receive", "requests", "take_resolved", "flush",
    "leave", "disconnected",
)  # fmt: skip


class Threads:
    """Uses a consumer of the blocking client, whatever fails."""

    def __init__(self, consumer: blocking.Consumer) -> None:
        self._consumer = consumer
        self._futures: list[Any] = []

    def run(self) -> None:
        consumer, call = self._consumer, self.call
        call(consumer.open)
        messages = [each for _ in range(4) if (each := call(consumer.receive, WITHIN_S))]
        if locked := call(consumer.receive_and_lock):
            messages.append(locked[0])
            call(consumer.unlock, locked[1])
        messages += call(consumer.receive_many, 2, WITHIN_S) or []
        for each in messages[:2]:
            self._futures.append(call(consumer.ack_nowait, each))
        for each in messages[2:4]:
            self._futures.append(call(consumer.nack_nowait, each, 60))
        call(consumer.ack_many, messages[4:])
        waits = threading.Thread(target=call, args=[list, consumer])
        waits.start()
        call(consumer.flush)
        call(consumer.close)
        waits.join(WITHIN_S)
        assert not waits.is_alive()
        for future in self._futures:
            assert future is None or isinstance(future.exception(WITHIN_S), SeqgateError | None)

    def call(self, call: Callable[..., Any], *about: Any) -> Any:
        """None if it fails."""
        try:
            return call(*about)
        except (SeqgateError, Boom):
            return None


def used_in_threads(address: str) -> None:
    with blocking.connect(NOBODY, address) as client:
        Threads(client.consumer(TOPIC, "s", type=SubscriptionType.SHARED)).run()


@pytest.mark.parametrize("name", IN_THREADS)
async def test_nothing_waits_for_ever_in_threads_whatever_fails(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    method = getattr(SharedInbox, name)
    at = 0
    while True:
        plan = Plan(at)
        monkeypatch.setattr(SharedInbox, name, surprising(plan, method))
        async with serving_fake() as fake:
            for number in range(8):
                fake.publish(b"%d" % number, key=f"k{number % 3}")
            async with asyncio.timeout(WITHIN_S):
                await asyncio.to_thread(used_in_threads, fake.address)
            await no_stream(fake, plan)
        if not plan.where:
            return  # it is called less often
        at += EACH_IN_THREADS


# ---- what is known to fail


async def test_closing_the_client_first_fails_what_waits_for_its_consumer() -> None:
    async with serving_fake() as fake:
        fake.publish(b"0")
        fake.durable.clear()
        client = connect(NOBODY, fake.address)
        consumer = client.consumer(TOPIC, "s")
        await consumer.open()
        acknowledged = consumer.ack_nowait(await consumer.receive())
        await eventually(lambda: any(each.HasField("acknowledge") for each in fake.requests))
        received = asyncio.create_task(consumer.receive())
        await asyncio.sleep(0)
        await client.close()
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises(StaleTokenError):
                await acknowledged
            with pytest.raises(ConsumerClosedError):
                await received
            await consumer.flush()
            await consumer.close()


async def test_a_surprise_is_logged_and_named_by_every_later_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(dropped: object) -> None:
        raise ZeroDivisionError("of the application")

    async with serving_fake() as fake, connect(NOBODY, fake.address) as client:
        fake.publish_large(b"y" * 90, "k", 30, only=[0, 2])
        consumer = client.consumer(TOPIC, "s", on_dropped=fails)
        with caplog.at_level(logging.ERROR, "seqgate.client"):
            await consumer.open()
            async with asyncio.timeout(WITHIN_S):
                with pytest.raises(InternalError, match="ZeroDivisionError: of the application"):
                    await consumer.receive()
        (said,) = caplog.records
        assert said.exc_info is not None
        assert isinstance(said.exc_info[1], ZeroDivisionError)
        with pytest.raises(InternalError) as failed:
            await consumer.seek("earliest")
        assert isinstance(failed.value.__cause__, ZeroDivisionError)
        await consumer.close()
