"""Deliveries under faults: in order per key, to one consumer at a time, none after its
acknowledgement, none lost."""

import asyncio
import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from grpc import StatusCode, aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import (
    Admin,
    AfterDeadLetter,
    Chunking,
    Consumer,
    DeadLetter,
    MessageId,
    SubscriptionOptions,
)
from seqgate.client import connect as connect_client
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import Stack
from seqgate.errors import SeqgateError, StaleTokenError, UnavailableError
from seqgate.times import duration
from seqgate.types import Position
from tests.faults.world import World
from tests.integration.refusals import check as check_refusal
from tests.integration.refusals import status_of_call
from tests.integration.services import channel_to, serving
from tests.support.crash_points import Order
from tests.support.delivering import KEYS, Group, all_acknowledged, load
from tests.support.delivery_checkers import check
from tests.support.depth import some_of
from tests.support.publisher import publishing, single
from tests.support.raw_consumer import RawConsumer, connect, consuming, subscribe
from tests.support.stubs import cursor_stub
from tests.support.waiting import eventually
from tests.support.wire import Wire

MESSAGES = 300
"""Messages in the tests that do not publish during the fault."""

KILLS = 3

QUICK: dict[str, Any] = {
    "SEQGATE_DISPATCHER_LEASE_S": "2",
    "SEQGATE_DISPATCHER_CALL_TIMEOUT_S": "1",
}


@pytest.fixture(scope="module")
async def quick(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """A stack whose subscriptions change hands quickly."""
    world = World(tmp_path_factory.mktemp("dispatcher"), **QUICK)
    async with world.stack:
        yield world


async def publish(world: World, topic: str, count: int) -> None:
    """Publish `count` messages to a few keys each."""
    async with (
        connect_client(world.stack.address("ledger")) as client,
        client.producer(topic, name="q", batching=None) as producer,
    ):
        await asyncio.gather(
            *(producer.send_nowait(b"x", key=f"k{i % KEYS}") for i in range(count))
        )


async def restart(world: World, name: str) -> None:
    await world.stack.kill(name)
    await world.stack.run(name)


@pytest.mark.parametrize("victims", ["dispatcher", "cursor", "ledger", "consumer", "all"])
async def test_kills_under_load_leave_every_key_in_order(
    quick: World, seed: int, victims: str
) -> None:
    random = Random(f"{seed} {victims}")
    topic = f"public/default/kills-{victims}"
    await publish(quick, topic, 1)
    group = Group(topic, [quick.stack.address("dispatcher")], random)
    names = ["dispatcher", "cursor", "ledger", "consumer"] if victims == "all" else [victims]
    async with group.running():
        async with load(quick.stack, topic):
            for kill in range(max(KILLS, len(names))):
                await group.given(random.randint(10, 60))
                victim = names[kill % len(names)]
                if victim == "consumer":
                    for _ in range(3):
                        await group.crash_one()
                        await group.given(random.randint(5, 20))
                else:
                    await restart(quick, victim)
            await group.given(10)
        published = await all_acknowledged(quick.stack, topic)
    check(group.history, published)


@asynccontextmanager
async def dispatcher(stack: Stack, port: int, **environment: str) -> AsyncIterator[Any]:
    """Start another dispatcher, and yield its process."""
    with (stack.folder / "logs" / f"dispatcher-{port}.log").open("ab") as log:
        process = await stack.start_process(
            [sys.executable, "-m", "seqgate.services.dispatcher"],
            log.fileno(),
            {
                **os.environ,
                **stack.settings,
                "SEQGATE_DISPATCHER_LISTEN": f"127.0.0.1:{port}",
                **environment,
            },
        )
    try:
        await serving(f"127.0.0.1:{port}")
        yield process
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()


async def test_a_rolling_restart_under_load_leaves_every_key_in_order(
    quick: World, seed: int
) -> None:
    random = Random(seed)
    topic = "public/default/rolling"
    await publish(quick, topic, 1)
    ports = free_ports(2)
    group = Group(topic, [f"127.0.0.1:{port}" for port in ports], random)
    async with (
        dispatcher(quick.stack, ports[0]) as first,
        dispatcher(quick.stack, ports[1]) as second,
        group.running(),
        AsyncExitStack() as started,
    ):
        async with load(quick.stack, topic):
            for port, process in zip(ports, (first, second), strict=True):
                await started.enter_async_context(again(quick, port, process, group))
            for name in list(group.connected):
                await group.given(20)
                await group.connected[name].crash()
            await group.given(20)
        published = await all_acknowledged(quick.stack, topic)
    check(group.history, published)


@asynccontextmanager
async def again(world: World, port: int, process: Any, group: Group) -> AsyncIterator[None]:
    """Stop a dispatcher and restart it."""
    await group.given(50)
    os.kill(process.pid, signal.SIGTERM)
    assert await process.wait() == 0
    async with dispatcher(world.stack, port):
        await group.given(20)
        yield


async def test_a_repeatedly_paused_instance_leaves_every_key_in_order(
    quick: World, seed: int
) -> None:
    """Its subscription moves back and forth; late actions have no effect."""
    random = Random(seed)
    topic = "public/default/zombies"
    await publish(quick, topic, 1)
    ports = free_ports(2)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    group = Group(topic, addresses, random)
    async with (
        dispatcher(quick.stack, ports[0]) as first,
        dispatcher(quick.stack, ports[1]) as second,
        group.running(),
    ):
        async with load(quick.stack, topic):
            for _ in range(2):
                await group.given(random.randint(20, 60))
                owner = await owner_of(quick, topic)
                zombie = first if owner == addresses[0] else second
                os.kill(zombie.pid, signal.SIGSTOP)
                # One consumer waits for the paused instance; the others move to the other instance.
                group.addresses = [each for each in addresses if each != owner]
                for name in list(group.connected)[:2]:
                    await group.connected[name].crash()
                await group.given(random.randint(20, 60))
                os.kill(zombie.pid, signal.SIGCONT)
                group.addresses = addresses
                await group.given(20)
        published = await all_acknowledged(quick.stack, topic)
    check(group.history, published)


async def owner_of(world: World, topic: str) -> str:
    async with channel_to(world.stack.address("cursor")) as channel:
        stub: Any = cursor_stub(channel)
        request = cursor_pb2.GetCursorRequest(topic=topic, cursor="s")
        return str((await stub.GetCursor(request)).cursor.lease.owner)


async def test_lost_answers_of_the_cursor_service_leave_every_key_in_order(
    quick: World, seed: int
) -> None:
    random = Random(seed)
    topic = "public/default/lost-answers"
    await publish(quick, topic, MESSAGES)
    (port,) = free_ports(1)
    async with Wire(quick.stack.ports["cursor"], random=random) as wire:
        group = Group(topic, [f"127.0.0.1:{port}"], random)
        target = {"SEQGATE_DISPATCHER_CURSOR_TARGET": wire.address}
        async with dispatcher(quick.stack, port, **target), group.running():
            await group.given(20)
            wire.share = 0.1
            await eventually(lambda: wire.lost >= 10)
            wire.share = 0
            published = await all_acknowledged(quick.stack, topic)
    check(group.history, published)


async def fill(cursors: Any, cursor: dict[str, Any]) -> None:
    """Fill the cursor store until it has no room for even the first hole of another cursor.

    A change of a row in place, such as a mark-delete, needs no space. So each acknowledgement here
    adds a row of the same kind as a cursor's first hole.
    """
    ledgers = itertools.count(2)
    for count in (1_000, 50, 1):
        full = False
        while not full:
            entries = (
                common_pb2.Position(ledger_id=next(ledgers), entry_id=9) for _ in range(count)
            )
            holes = [cursor_pb2.PositionRange(first=each, last_entry_id=9) for each in entries]
            try:
                await cursors.Acknowledge(cursor_pb2.AcknowledgeRequest(**cursor, ranges=holes))
            except aio.AioRpcError as error:
                check_refusal(status_of_call(error), StatusCode.RESOURCE_EXHAUSTED, "STORE_FULL")
                # A write-ahead log that is too long is shortened soon, so that refusal does not end
                # the loop.
                full = error.details() == "the store is full"


async def test_a_full_cursor_store_acknowledges_nothing_and_loses_nothing(
    tmp_path: Path,
) -> None:
    """This holds until the lease expires that was renewed before the store was full."""
    settings: dict[str, Any] = {
        "SEQGATE_DISPATCHER_LEASE_S": "60",
        "SEQGATE_DISPATCHER_LOG_LEVEL": "debug",
    }
    world = World(tmp_path / "full", SEQGATE_CURSOR_STORE_BYTES_MAX="1000000", **settings)
    topic = "public/default/full"
    filler: dict[str, Any] = {"topic": topic, "cursor": "filler"}
    async with (
        world.stack,
        channel_to(world.stack.address("cursor")) as to_cursor,
        channel_to(world.stack.address("ledger")) as to_ledger,
        channel_to(world.stack.address("dispatcher")) as to_dispatcher,
    ):
        cursors: Any = cursor_stub(to_cursor)
        dispatchers: Any = DispatcherServiceStub(to_dispatcher)
        async with publishing(LedgerServiceStub(to_ledger), topic, "p") as publisher:
            for i in range(4):
                await publisher.store(single(i, i, partition_key="ab"[i % 2]))
        await cursors.CreateCursor(cursor_pb2.CreateCursorRequest(**filler))
        async with consuming(dispatchers, topic, permits=9, max_in_flight_per_key=1) as consumer:
            first, second = await consumer.received(2)
            await fill(cursors, filler)
            acknowledgement = await consumer.ask_acknowledge(second)
            log = world.stack.folder / "logs" / "dispatcher.log"
            await eventually(lambda: '"the store is full"' in log.read_text())
            await consumer.renew(first)
            assert not consumer.has_settled(acknowledgement)
            assert await consumer.still() == 0
            await cursors.DeleteCursor(cursor_pb2.DeleteCursorRequest(**filler))
            assert not (await consumer.settled(acknowledgement)).outcomes
            (fourth,) = await consumer.received(1)
            assert fourth.position.entry_id == 3
            await consumer.acknowledge(first)
            (third,) = await consumer.received(1)
            assert third.position.entry_id == 2


STEPS = {
    "before the letter is numbered": Order("set_properties.before"),
    "the letter is numbered": Order("set_properties.after"),
    "before the letter is published": Order("put.before"),
    "the letter is published": Order("put.after"),
    "before the entry is acknowledged": Order("persist.before"),
    "the entry is acknowledged": Order("persist.after"),
    "before the number is forgotten": Order("set_properties.before", passes=1),
    "the number is forgotten": Order("set_properties.after", passes=1),
}


@pytest.mark.parametrize(
    ("order", "policy"),
    some_of(
        [
            *((order, "HOLD") for order in STEPS.values()),
            (STEPS["the letter is numbered"], "CONTINUE"),
            (STEPS["the letter is published"], "CONTINUE"),
            (STEPS["the entry is acknowledged"], "CONTINUE"),
            (STEPS["the letter is numbered"], "TAIL"),
            (STEPS["the letter is published"], "TAIL"),
            (STEPS["the entry is acknowledged"], "TAIL"),
        ],
        every=2,
    ),
    ids=lambda each: each if isinstance(each, str) else f"{each.point}-{each.passes}",
)
async def test_a_crash_during_dead_lettering_loses_and_duplicates_nothing(
    quick: World, order: Order, policy: str
) -> None:
    topic = f"public/default/{policy}-{order.point}-{order.passes}"
    stack = quick.stack
    options: dict[str, Any] = {
        "max_redeliveries": 0,
        "after_dead_letter": pb.AfterDeadLetter.Value(f"AFTER_DEAD_LETTER_{policy}"),
    }
    async with (
        channel_to(stack.address("ledger")) as to_ledger,
        channel_to(stack.address("dispatcher")) as to_dispatcher,
    ):
        ledger: Any = LedgerServiceStub(to_ledger)
        dispatchers: Any = DispatcherServiceStub(to_dispatcher)
        async with publishing(ledger, topic, "p") as publisher:
            for i, key in enumerate("kko"):
                await publisher.store(single(i, i, partition_key=key))
        async with consuming(dispatchers, topic, permits=9, **options) as consumer:
            got = {each.position.entry_id: each for each in await consumer.received(3)}
            await consumer.acknowledge(got[2])
            quick.order("dispatcher", order)
            await consumer.negative_acknowledge(got[0], delay_ms=0)
            assert await stack.ended("dispatcher") == -signal.SIGKILL
        await stack.run("dispatcher")
        await serving(stack.address("dispatcher"))
        async with consuming(dispatchers, topic, permits=9, **options) as consumer:

            async def gone_on() -> bool:
                """Check that the message is dead-lettered, and that its key follows the policy."""
                for each in consumer.deliveries[consumer.waiting * -1 :]:
                    if each.position.entry_id == 0 and each.delivery not in seen:
                        seen.add(each.delivery)
                        await consumer.negative_acknowledge(each, delay_ms=0)
                found = await dispatchers.GetSubscription(
                    pb.GetSubscriptionRequest(topic=topic, subscription="s")
                )
                return bool(
                    found.subscription.mark_delete.entry_id == (2 if policy == "TAIL" else 0)
                ) and (found.subscription.HasField("mark_delete"))

            seen: set[int] = set()
            await eventually(gone_on)
            if policy == "HOLD":
                request = pb.ExplainRequest(topic=topic, subscription="s", key=b"k")

                async def held() -> bool:
                    answer = await dispatchers.Explain(request)
                    return bool(answer.reasons[0].reason == pb.REASON_HELD)

                await eventually(held)
                release = pb.ReleaseKeyRequest(topic=topic, subscription="s", key=b"k")
                await dispatchers.ReleaseKey(release)
            if policy != "TAIL":
                await consumer.until(lambda: alive(consumer, 1))
                last = alive(consumer, 1)[-1]
                assert last.HasField("gap") is (policy == "CONTINUE")
                assert not (await consumer.acknowledge(last)).outcomes
        letters = await origins(ledger, f"{topic}-s-DLQ")
    assert letters == ([0, 1] if policy == "TAIL" else [0])


REDRIVING: dict[str, Order] = {
    "before the redrive is durable": Order("set_properties.before"),
    "the redrive is durable": Order("set_properties.after"),
}
SETTLING: dict[str, Order] = {
    "before the letter is settled": Order("set_properties.before"),
    "the letter is settled": Order("set_properties.after"),
    "before its entry is acknowledged again": Order("persist.before"),
    "its entry is acknowledged again": Order("persist.after"),
}


@pytest.mark.parametrize(
    ("redriving", "settling"),
    [
        *((REDRIVING[each], None) for each in REDRIVING),
        *((None, SETTLING[each]) for each in SETTLING),
    ],
    ids=[*REDRIVING, *SETTLING],
)
async def test_a_crash_during_a_redrive_loses_and_duplicates_nothing(
    quick: World, redriving: Order | None, settling: Order | None
) -> None:
    """A redriven message is delivered and acknowledged once more and no more than that, before the
    messages that were held behind it."""
    order = redriving or settling
    assert order is not None
    topic = f"public/default/redrive-{order.point}-{redriving is None}"
    stack = quick.stack
    names: dict[str, Any] = {"topic": topic, "subscription": "s"}
    options: dict[str, Any] = {
        "max_redeliveries": 0,
        "after_dead_letter": pb.AFTER_DEAD_LETTER_HOLD,
    }
    async with (
        channel_to(stack.address("ledger")) as to_ledger,
        channel_to(stack.address("dispatcher")) as to_dispatcher,
    ):
        ledger: Any = LedgerServiceStub(to_ledger)
        dispatchers: Any = DispatcherServiceStub(to_dispatcher)
        async with publishing(ledger, topic, "p") as publisher:
            for i in range(3):
                await publisher.store(single(i, i, partition_key="k"))

        async def redriven() -> bool:
            """Redrive the letter, however often it takes; it is made once."""
            return await redriven_first(dispatchers, names, "r") == 1

        async def is_dead() -> bool:
            asked = pb.GetSubscriptionRequest(**names)
            found = (await dispatchers.GetSubscription(asked)).subscription
            return bool(found.HasField("mark_delete"))

        async with consuming(dispatchers, topic, permits=9, **options) as consumer:
            first, *_ = await consumer.received(3)
            await consumer.negative_acknowledge(first, delay_ms=0)
            await eventually(is_dead)
            if redriving is not None:
                quick.order("dispatcher", redriving)
                assert not await redriven()
            else:
                await eventually(redriven)
                await consumer.until(lambda: len(alive(consumer, 0)) == 2)
                assert settling is not None
                quick.order("dispatcher", settling)
                await consumer.ask_acknowledge(alive(consumer, 0)[-1])
            assert await stack.ended("dispatcher") == -signal.SIGKILL
        await stack.run("dispatcher")
        await serving(stack.address("dispatcher"))
        is_settled = settling is not None and settling.point != "set_properties.before"
        consumer = await taken_over(dispatchers, topic, **options)
        await consumer.permit(9)
        await eventually(redriven)
        await check_order(consumer, [1, 2] if is_settled else [0, 1, 2])
        consumer = await taken_over(dispatchers, topic, **options)
        await consumer.permit(9)
        await check_order(consumer, [])
        assert await redriven_first(dispatchers, names, "again") is None
        assert await origins(ledger, f"{topic}-s-DLQ") == [0]


async def redriven_first(dispatchers: Any, names: dict[str, Any], request_id: str) -> int | None:
    """Redrive the first letter of a subscription. Returns the number of the redrive, None: it is
    not made, or it is not known whether it is."""
    place = common_pb2.Position(ledger_id=1, entry_id=0)
    request = pb.RedriveDeadLettersRequest(**names, positions=[place], request_id=request_id)
    try:
        return int((await dispatchers.RedriveDeadLetters(request)).redrive)
    except aio.AioRpcError:
        return None


async def check_order(consumer: RawConsumer, entries: list[int]) -> None:
    """Check that a consumer gets these entries and no others, the first one before it acknowledges
    any, and let it leave."""
    if entries[:1] == [0]:  # the others are held behind it
        (back,) = await consumer.received(1)
        assert back.position.entry_id == 0
        assert await consumer.still() == 0
        await consumer.acknowledge(back)
    rest = [each for each in entries if each > 0]
    found = await consumer.received(len(rest)) if rest else []
    assert [each.position.entry_id for each in found] == rest
    if found:
        await consumer.acknowledge(*found)
    assert await consumer.still() == 0
    await consumer.leave()


REDRIVEN = 6
"""Messages in the tests of redrives of many: each step redrives two of them."""


@pytest.mark.parametrize("is_replay", [False, True], ids=["letters", "replay"])
@pytest.mark.parametrize(
    "order",
    some_of(
        [
            Order(f"{verb}.{when}", passes)
            for verb, passes_max in (("set_properties", 8), ("persist", 3))
            for passes in range(passes_max)
            for when in ("before", "after")
        ],
        every=22,
    ),
    ids=lambda order: f"{order.point}-{order.passes}",
)
async def test_a_crash_during_a_redrive_of_many_redrives_each_message_once(
    quick: World, order: Order, *, is_replay: bool
) -> None:
    topic, stack = f"public/default/many-{is_replay}-{order.point}-{order.passes}", quick.stack
    options = SubscriptionOptions(max_redeliveries=0, max_in_flight_per_key=1)
    settled: Counter[bytes] = Counter()
    async with connect_client(stack.address("ledger"), stack.address("dispatcher")) as client:
        admin = client.admin()
        start = partial(admin.replay if is_replay else admin.start_redrive, topic, "s")

        async def is_dead() -> bool:
            return (await admin.subscription(topic, "s")).mark_delete == (1, REDRIVEN - 1)

        async def is_over() -> bool:
            """Start the redrive, however often it takes. Returns whether it has ended."""
            try:
                started = await start(request_id="r", letters_per_s=2)
                found = await admin.redrive_info(topic, "s", started.number)
            except SeqgateError:
                return False
            return not (found.is_running or found.returning)

        async def acknowledge(consumer: Consumer) -> None:
            while True:
                message = await consumer.receive()
                with suppress(SeqgateError):  # the crash took it back, or its answer
                    await consumer.ack(message)
                    settled[message.payload] += 1

        async with (
            client.producer(topic, name="p", batching=None) as producer,
            client.consumer(topic, "s", options=options) as consumer,
            asyncio.timeout(60),
        ):
            for each in range(REDRIVEN):
                await producer.send(b"%d" % each, key=f"k{each % 2}")
            for _ in range(REDRIVEN):
                message = await consumer.receive()
                await (consumer.ack(message) if is_replay else consumer.nack(message, delay_s=0))
            await eventually(is_dead)
            quick.order("dispatcher", order)
            async with asyncio.TaskGroup() as tasks:
                acknowledging = tasks.create_task(acknowledge(consumer))
                redriving = tasks.create_task(eventually(is_over))
                assert await stack.ended("dispatcher") == -signal.SIGKILL
                await stack.run("dispatcher")
                await redriving
                for key in ("k0", "k1"):  # nothing is left before these
                    await producer.send(key.encode(), key=key)
                await eventually(lambda: {b"k0", b"k1"} <= settled.keys())
                acknowledging.cancel()
        (found,) = await admin.redrives(topic, "s")
    assert (found.number, found.state) == (1, "DONE")
    assert found.outcomes == {"REDRIVEN": REDRIVEN}
    assert set(settled.values()) == {1}
    assert len(settled) >= REDRIVEN  # of one in flight for each key, the answer may be lost


@pytest.mark.parametrize(
    "point",
    some_of(
        [
            "set_properties.before",
            "set_properties.after",
            "persist.after",
            "persist.before",
            "put.before",
            "put.after",
        ],
        every=2,
    ),
)
async def test_a_pause_during_dead_lettering_duplicates_nothing(quick: World, point: str) -> None:
    """Another instance takes the subscription over during the pause, and a third one after that."""
    topic = f"public/default/still-{point}"
    stack = quick.stack
    options: dict[str, Any] = {"max_redeliveries": 0}
    ports = free_ports(2)
    async with (
        channel_to(stack.address("ledger")) as to_ledger,
        channel_to(stack.address("dispatcher")) as to_zombie,
        channel_to(f"127.0.0.1:{ports[0]}") as to_other,
        channel_to(f"127.0.0.1:{ports[1]}") as to_third,
        dispatcher(stack, ports[0]) as other,
        dispatcher(stack, ports[1]),
    ):
        ledger: Any = LedgerServiceStub(to_ledger)
        async with publishing(ledger, topic, "p") as publisher:
            for i, key in enumerate("kkl"):
                await publisher.store(single(i, i, partition_key=key))
        stub: Any = DispatcherServiceStub(to_zombie)
        async with consuming(stub, topic, permits=9, **options) as late:
            got = {each.position.entry_id: each for each in await late.received(3)}
            zombie = quick.pid("dispatcher")
            quick.order("dispatcher", Order(point, number=signal.SIGSTOP))
            await late.write(
                negative_acknowledge=pb.NegativeAcknowledge(
                    request_id=1,
                    epoch=late.epoch,
                    negative_acknowledgements=[
                        pb.NegativeAcknowledgement(delivery=got[0].delivery, delay=duration(0))
                    ],
                )
            )
            await eventually(lambda: is_stopped(zombie))
            try:
                current = await taken_over(DispatcherServiceStub(to_other), topic, **options)
                await current.permit(9)
                await all_dead(current, ledger, topic, [0, 2])
            finally:
                os.kill(zombie, signal.SIGCONT)
            error = await late.ended()
            assert error is not None
            assert error.code() is StatusCode.ABORTED
            await current.leave()
        os.kill(other.pid, signal.SIGTERM)
        assert await other.wait() == 0
        third = await taken_over(DispatcherServiceStub(to_third), topic, **options)
        await third.permit(9)
        (last,) = await third.received(1)
        assert (last.position.entry_id, last.gap.position.entry_id) == (1, 0)
        await third.acknowledge(last)
        await third.crash()
        assert sorted(await origins(ledger, f"{topic}-s-DLQ")) == [0, 2]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def taken_over(stub: Any, topic: str, **options: Any) -> RawConsumer:
    """A stream, opened once no other instance has the subscription."""
    found: list[RawConsumer] = []

    async def connected() -> bool:
        with suppress(aio.AioRpcError):
            found.append(await connect(stub, subscribe(topic, **options)))
        return bool(found)

    await eventually(connected)
    return found[0]


async def all_dead(consumer: RawConsumer, ledger: Any, topic: str, entries: list[int]) -> None:
    """Fail these messages until they are in the dead letter topic and acknowledged."""
    failed = set[int]()

    async def dead() -> bool:
        for each in consumer.deliveries:
            if each.position.entry_id in entries and each.delivery not in failed:
                failed.add(each.delivery)
                await consumer.negative_acknowledge(each, delay_ms=0)
        try:
            found = await origins(ledger, f"{topic}-s-DLQ")
        except aio.AioRpcError:
            return False
        return set(found) == set(entries)

    await eventually(dead)


def alive(consumer: RawConsumer, entry_id: int) -> list[pb.Delivery]:
    """The deliveries of an entry that were not revoked."""
    return [
        each
        for each in consumer.deliveries
        if each.position.entry_id == entry_id and each.delivery not in consumer.revoked
    ]


async def origins(ledger: Any, topic: str) -> list[int]:
    """The positions in the log of the messages in a dead letter topic."""
    found: list[int] = []
    request = ledger_pb2.ReadRequest(
        topic=topic, start=common_pb2.Start(earliest=common_pb2.Earliest())
    )
    async for response in ledger.Read(request):
        found += (
            int(each.metadata.properties["seqgate.origin.id"].partition(":")[2])
            for each in response.entries.entries
        )
    return found


class Letters:
    """The dead letters of a topic's subscription `s`."""

    def __init__(self, stack: Stack, admin: Admin, topic: str) -> None:
        self._stack = stack
        self._admin = admin
        self._topic = topic

    async def listed(self) -> list[DeadLetter]:
        return [each async for each in self._admin.dead_letters(self._topic, "s")]

    async def are_settled(self) -> bool:
        """Whether there are letters, and their numbers are forgotten."""
        names = cursor_pb2.GetCursorRequest(topic=self._topic, cursor="s")
        async with channel_to(self._stack.address("cursor")) as channel:
            found = (await cursor_stub(channel).GetCursor(names)).cursor.properties
        return bool(await self.listed()) and not [each for each in found if "letter" in each]


async def done(call: Awaitable[object]) -> bool:
    """Whether a call is answered: if not, it may be made or not."""
    try:
        await call
    except UnavailableError:
        return False
    return True


async def crashed_and_back(stack: Stack) -> None:
    """Wait until the dispatcher has died of its order, and start it again."""
    assert await stack.ended("dispatcher") == -signal.SIGKILL
    await stack.run("dispatcher")
    await serving(stack.address("dispatcher"))


@pytest.mark.parametrize("step", some_of([*REDRIVING, *SETTLING], every=3))
async def test_a_crash_during_a_redrive_of_a_large_message_keeps_it_whole(
    quick: World, step: str
) -> None:
    """It is delivered whole and acknowledged once more, before the messages held behind it."""
    order, stack = (REDRIVING | SETTLING)[step], quick.stack
    topic = f"public/default/large-{order.point}-{step in REDRIVING}"
    options = SubscriptionOptions(max_redeliveries=0, after_dead_letter=AfterDeadLetter.HOLD)
    large = bytes(range(256)) * 80
    async with connect_client(stack.address("ledger"), stack.address("dispatcher")) as client:
        admin = client.admin()
        chunking = Chunking(chunk_bytes=4_096)
        async with client.producer(topic, name="p", chunking=chunking) as producer:
            for payload in (large, b"second"):
                await producer.send(payload, key="k")

        letters = Letters(stack, admin, topic)

        async def redriven() -> bool:
            return await done(admin.redrive(topic, "s", [MessageId(1, 2)], request_id="r"))

        async with client.consumer(topic, "s", options=options) as consumer:
            await consumer.nack(await consumer.receive(), delay_s=0)
            await eventually(letters.are_settled)
            if step in REDRIVING:
                quick.order("dispatcher", order)
                assert not await redriven()
            else:
                assert await redriven()
                back = await consumer.receive()
                quick.order("dispatcher", order)
                with suppress(StaleTokenError):
                    await consumer.ack(back)
            await crashed_and_back(stack)
            await eventually(redriven)
            message = await consumer.receive()
            if message.payload == b"second":  # the large one's acknowledgement was durable
                assert step in ("the letter is settled", *[*SETTLING][2:])
            else:
                assert message.payload == large
                await consumer.ack(message)
                message = await consumer.receive()
            assert message.payload == b"second"
            await consumer.ack(message)
        left = await admin.subscription(topic, "s")
        assert left.mark_delete == Position(1, 5)


CHUNKS = 3
CHUNK_BYTES = 4_096


@pytest.mark.parametrize(
    "order",
    some_of(
        [
            Order(f"{verb}.{when}", passes)
            for verb, passes_max in (("persist", CHUNKS), ("put", CHUNKS), ("set_properties", 6))
            for passes in range(passes_max)
            for when in ("before", "after")
        ],
        every=8,
    ),
    ids=lambda order: f"{order.point}-{order.passes}",
)
async def test_a_crash_while_a_large_message_is_dead_lettered_keeps_its_letter_whole(
    quick: World, order: Order
) -> None:
    """One chunk failed. Once its letter is redriven and acknowledged, its key goes on."""
    topic, stack = f"public/default/whole-{order.point}-{order.passes}", quick.stack
    options = SubscriptionOptions(max_redeliveries=0, after_dead_letter=AfterDeadLetter.HOLD)
    large = Random(topic).randbytes(CHUNKS * CHUNK_BYTES)
    async with (
        connect_client(stack.address("ledger"), stack.address("dispatcher")) as client,
        channel_to(stack.address("ledger")) as to_ledger,
        channel_to(stack.address("dispatcher")) as to_dispatcher,
    ):
        chunking = Chunking(chunk_bytes=CHUNK_BYTES)
        async with client.producer(topic, name="p", chunking=chunking) as producer:
            for payload in (large, b"second"):
                await producer.send(payload, key="k")
        stub: Any = DispatcherServiceStub(to_dispatcher)
        rule: Any = {"max_redeliveries": 0, "after_dead_letter": pb.AFTER_DEAD_LETTER_HOLD}
        async with consuming(stub, topic, permits=9, **rule) as failing:
            first, *_ = await failing.received(CHUNKS)
            quick.order("dispatcher", order)
            await failing.negative_acknowledge(first, delay_ms=0)
            await crashed_and_back(stack)
        letters = Letters(stack, client.admin(), topic)
        async with client.consumer(topic, "s", options=options) as consumer:
            await eventually(letters.are_settled)
            (letter,) = await letters.listed()
            found = await letter_chunks(LedgerServiceStub(to_ledger), f"{topic}-s-DLQ")
            assert found == list(range(CHUNKS))
            await client.admin().redrive(topic, "s", [letter.id], request_id="r")
            for payload in (large, b"second"):
                message = await consumer.receive()
                assert message.payload == payload
                await consumer.ack(message)


async def letter_chunks(ledger: Any, topic: str) -> list[int]:
    """The numbers of the chunks in a dead letter topic."""
    request = ledger_pb2.ReadRequest(
        topic=topic, start=common_pb2.Start(earliest=common_pb2.Earliest()), metadata_only=True
    )
    return [
        each.metadata.chunk_id
        async for response in ledger.Read(request)
        for each in response.entries.entries
    ]


AMENDING: dict[str, tuple[str, Order]] = {
    "before the mend is numbered": ("mend", Order("set_properties.before")),
    "the mend is numbered": ("mend", Order("set_properties.after")),
    "before the copy is published": ("mend", Order("add.before")),
    "the copy is published": ("mend", Order("add.after")),
    "before the copy counts": ("mend", Order("set_properties.before", passes=1)),
    "the copy counts": ("mend", Order("set_properties.after", passes=1)),
    "before the discard is durable": ("discard", Order("set_properties.before")),
    "the discard is durable": ("discard", Order("set_properties.after")),
}


@pytest.mark.parametrize("step", some_of([*AMENDING], every=3))
async def test_a_crash_during_a_mend_or_discard_loses_and_duplicates_nothing(
    quick: World, step: str
) -> None:
    """A letter has one mended copy, which is delivered once, before the messages held behind it; a
    discarded one is never delivered."""
    action, order = AMENDING[step]
    topic, stack = f"public/default/{action}-{order.point}-{order.passes}", quick.stack
    options = SubscriptionOptions(max_redeliveries=0, after_dead_letter=AfterDeadLetter.HOLD)
    async with connect_client(stack.address("ledger"), stack.address("dispatcher")) as client:
        admin = client.admin()
        async with client.producer(topic, name="p") as producer:
            for payload in (b"poison", b"second", b"third"):
                await producer.send(payload, key="k")

        letters = Letters(stack, admin, topic)

        async def made() -> bool:
            """Mend or discard the letter, however often it takes; it is made once."""
            if action == "mend":
                return await done(
                    admin.mend(topic, "s", first.id, payload=b"cured", request_id="a")
                )
            return await done(admin.discard(topic, "s", [first.id], request_id="a"))

        async with client.consumer(topic, "s", options=options) as consumer:
            await consumer.nack(await consumer.receive(), delay_s=0)
            await eventually(letters.are_settled)
            (first,) = await letters.listed()
            quick.order("dispatcher", order)
            assert not await made()
            await crashed_and_back(stack)
            await eventually(made)
            found = await letters.listed()
            wanted = [b"second", b"third"]
            if action == "mend":
                assert [each.state for each in found] == ["MENDED", "DEAD"]
                assert found[0].successor == found[1].id
                await admin.redrive(topic, "s", [found[1].id], request_id="r")
                wanted = [b"cured", *wanted]
            else:
                assert [each.state for each in found] == ["DISCARDED"]
            for payload in wanted:
                message = await consumer.receive()
                assert message.payload == payload
                await consumer.ack(message)
            operations = await admin.letter_operations(topic, "s")
            assert [each.request_id for each in operations].count("a") == 1
        left = await admin.subscription(topic, "s")
        assert left.mark_delete == Position(1, 2)


async def test_failures_before_a_kill_are_counted_and_shown(quick: World) -> None:
    """Of a message that has no letter yet, and of one that came back from the dead letter topic."""
    topic, stack = "public/default/failures", quick.stack
    options: dict[str, Any] = {"max_redeliveries": 2}
    began = datetime.now(UTC).replace(microsecond=0)
    async with (
        connect_client(stack.address("ledger"), stack.address("dispatcher")) as client,
        channel_to(stack.address("dispatcher")) as channel,
    ):
        admin, dispatchers = client.admin(), DispatcherServiceStub(channel)
        letters = Letters(stack, admin, topic)
        async with client.producer(topic, name="p") as producer:
            for key in ("fresh", "back"):
                await producer.send(b"poison", key=key)

        async def fail(consumer: RawConsumer, entry_id: int, attempts: int) -> None:
            """Fail an entry, which failed so many times."""
            await consumer.until(lambda: alive(consumer, entry_id)[-1:])
            await consumer.until(lambda: alive(consumer, entry_id)[-1].attempts == attempts)
            await consumer.negative_acknowledge(alive(consumer, entry_id)[-1], delay_ms=0)

        early = await connect(dispatchers, subscribe(topic, name="early", **options))
        await early.permit(99)
        for attempts in range(3):
            await fail(early, 1, attempts)
        await eventually(letters.are_settled)
        (first,) = await letters.listed()
        await admin.redrive(topic, "s", [first.id], request_id="r")
        for entry_id in (0, 1):
            for attempts in range(2):
                await fail(early, entry_id, attempts)
        for entry_id in (0, 1):  # delivered again, so the failures are recorded
            await early.until(lambda entry=entry_id: alive(early, entry)[-1].attempts == 2)
        await stack.kill("dispatcher")
        await stack.run("dispatcher")
        await serving(stack.address("dispatcher"))
        late = await taken_over(dispatchers, topic, name="late", **options)
        await late.permit(99)
        for entry_id in (0, 1):
            await fail(late, entry_id, 2)

        async def dead() -> bool:
            with suppress(UnavailableError):  # the client may not have connected again
                return len(await letters.listed()) == 3
            return False

        await eventually(dead)
        again = [each for each in await letters.listed() if each.id != first.id]
        for each in again:
            assert [failed.consumer for failed in each.failures] == ["early", "early", "late"]
            times = [failed.at for failed in each.failures]
            assert began <= times[0] <= times[1] <= times[2] <= datetime.now(UTC)
            assert (each.attempts, {failed.how for failed in each.failures}) == (3, {"REFUSED"})
        lives = [life for each in again for life in each.lives]
        assert [(life.letter, life.failures) for life in lives] == [(first.id, first.failures)]
        await late.crash()
