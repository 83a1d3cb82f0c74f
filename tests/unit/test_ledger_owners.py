"""Ledgers that divide the topics of one store: who answers, who takes, who hands over."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import pytest_asyncio

from seqgate.services.errors import Draining, Fenced, StoreUnavailable
from seqgate.services.ledger.adapters.memory import MemoryLedgerStore, MemoryRegister
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.core.entry import unit_of
from seqgate.services.ledger.core.ownership import LEASE_S, STEADY_BEATS
from seqgate.services.ledger.core.receipt import Found, Status
from seqgate.services.ledger.owners import NotOwner, SharedOwner
from seqgate.services.ledger.ports import TopicNotFound
from seqgate.services.ledger.service import Ledger, Opened, Opening, ReadRange
from seqgate.services.runtime.cursors import MemoryCursors
from seqgate.types import Position, TopicName
from tests.support.entries import single
from tests.support.remembering import RememberingDeduplicator

TOPIC = TopicName.parse("public/default/shared")


class Instance:
    """A ledger process. It beats when told to."""

    def __init__(self, world: "World", address: str) -> None:
        self.owner = SharedOwner(world.register, address, now_s=lambda: world.now_s)
        self.ledger = Ledger(
            LedgerConfig(),
            world.store,
            world.dedup,
            MemoryCursors(),
            world.tasks,
            owner=self.owner,
        )

    async def beat(self) -> None:
        sent_s = await self.owner.beat()
        await self.ledger._look(sent_s, self.owner._watch.surplus())


class World:
    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.store, self.register = MemoryLedgerStore(), MemoryRegister()
        self.dedup = RememberingDeduplicator()
        self.tasks = tasks
        self.now_s = 1e9
        self.instances: list[Instance] = []

    def start(self, address: str) -> Instance:
        self.instances.append(Instance(self, address))
        return self.instances[-1]

    async def pass_time(self, seconds: float, *beating: Instance) -> None:
        """Let time pass, while these beat."""
        for _ in range(round(seconds)):
            self.now_s += 1
            for each in beating:
                await each.beat()


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    async with asyncio.TaskGroup() as tasks:
        world = World(tasks)
        yield world
        for each in world.instances:
            await each.ledger.finish(1)


async def opened(ledger: Ledger, topic: TopicName = TOPIC, producer: str = "p") -> Opened:
    opening = Opening(topic, producer, initial_sequence_id=None, takeover=True, instance=b"")
    async with asyncio.timeout(10):
        return await ledger.open(opening)


@asynccontextmanager
async def publishing(ledger: Ledger) -> AsyncIterator[Callable[[int], Awaitable[Status]]]:
    stream = await opened(ledger)

    async def publish(sequence_id: int) -> Status:
        entries = [single(sequence_id, "p")]
        unit = unit_of(stream.session.number, 1, entries, resume=True)
        stream.topic.submit(stream.session, [unit])
        async with asyncio.timeout(10):
            news = await stream.session.news()
        assert news is not None
        ((_, receipt),) = news.receipts
        return receipt.status

    try:
        yield publish
    finally:
        ledger.close(stream)


async def last(ledger: Ledger) -> Position | None:
    return (await ledger.get(TOPIC)).tail


CALLS: dict[str, Callable[[Ledger], Awaitable[object]]] = {
    "open": opened,
    "get": lambda ledger: ledger.get(TOPIC),
    "find": lambda ledger: ledger.find(TOPIC, "p", 0, ""),
    "find_time": lambda ledger: ledger.find_time(TOPIC, 0),
    "ledgers": lambda ledger: ledger.ledgers(TOPIC, after=0, limit=1),
    "trimmed": lambda ledger: ledger.trimmed_producers(TOPIC, after="", limit=1),
    "trim": lambda ledger: ledger.trim(TOPIC, Position(9, 9)),
    "delete": lambda ledger: ledger.delete(TOPIC, force=True),
    "read": lambda ledger: read(ledger),
}


async def read(ledger: Ledger) -> list[Position]:
    what = ReadRange(None, None, follow=False, entries_max=0, payloads=True)
    found: list[Position] = []
    async with ledger.readers.pages() as pages:
        async for some in ledger.read(TOPIC, what, pages, asyncio.Event()):
            assert isinstance(some, list)
            found += [each.position for each in some]
    return found


@pytest.mark.parametrize("call", CALLS)
async def test_another_instance_names_the_owner(world: World, call: str) -> None:
    one, other = world.start("one:1"), world.start("other:1")
    await other.beat()
    async with publishing(one.ledger) as publish:
        assert await publish(0) is Status.STORED
        with pytest.raises(NotOwner) as refused:
            await CALLS[call](other.ledger)
        assert refused.value.details["owner"] == "one:1"
        assert await publish(1) is Status.STORED


@pytest.mark.parametrize("call", [each for each in CALLS if each not in ("delete", "trim")])
async def test_a_free_topic_is_taken_by_whoever_is_asked(world: World, call: str) -> None:
    one, other = world.start("one:1"), world.start("other:1")
    await world.store.create(TOPIC)
    await CALLS[call](one.ledger)
    with pytest.raises(NotOwner):
        await CALLS[call](other.ledger)


async def test_a_killed_instances_topics_are_taken_after_its_lease(world: World) -> None:
    one, other = world.start("one:1"), world.start("other:1")
    await world.pass_time(3, one, other)
    async with publishing(one.ledger) as publish:
        assert await publish(0) is Status.STORED
        await world.pass_time(LEASE_S - 1, other)  # one is killed: it beats no more
        with pytest.raises(NotOwner):
            await opened(other.ledger)
        await world.pass_time(2, other)
        async with publishing(other.ledger) as publish_to_other:
            assert await publish_to_other(0) is Status.DUPLICATE
            assert await publish_to_other(1) is Status.STORED
        assert await read(other.ledger) == [(1, 0), (2, 0)]


async def test_an_instance_that_stood_still_serves_nothing_before_it_knows(world: World) -> None:
    """Its topics were taken meanwhile."""
    one, other = world.start("one:1"), world.start("other:1")
    async with publishing(one.ledger) as publish:
        assert await publish(0) is Status.STORED
        await world.pass_time(LEASE_S + 3, other)
        async with publishing(other.ledger) as publish_to_other:
            assert await publish_to_other(1) is Status.STORED
        await one.beat()  # it wakes up
        with pytest.raises(NotOwner) as refused:
            await last(one.ledger)
        assert refused.value.details["owner"] == "other:1"
        with pytest.raises(StoreUnavailable):
            await publish(2)
        assert await read(other.ledger) == [(1, 0), (2, 0)]


async def test_a_reader_waits_for_a_beat_of_an_instance_that_stood_still(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world.start("one:1")
    await world.store.create(TOPIC)
    assert await last(one.ledger) is None
    world.now_s += LEASE_S

    async def fail(*_: object) -> None:
        raise StoreUnavailable("the store failed")

    with monkeypatch.context() as patch:
        patch.setattr(world.register, "beat", fail)
        with pytest.raises(StoreUnavailable):
            await last(one.ledger)
    assert await last(one.ledger) is None


async def test_a_pause_of_three_seconds_moves_nothing(world: World) -> None:
    one, other = world.start("one:1"), world.start("other:1")
    async with publishing(one.ledger) as publish:
        for number in range(5):
            await world.pass_time(1, one, other)
            await world.pass_time(3, other)
            with pytest.raises(NotOwner):
                await opened(other.ledger)
            assert await publish(number) is Status.STORED


async def test_an_instance_that_leaves_hands_over_at_once(world: World) -> None:
    one, other = world.start("one:1"), world.start("other:1")
    await world.pass_time(1, one, other)
    async with publishing(one.ledger) as publish:
        assert await publish(0) is Status.STORED
        await one.ledger.leave()
        with pytest.raises(Draining):
            await publish(1)
    with pytest.raises(Draining):
        await opened(one.ledger)
    with pytest.raises(Draining):
        await one.owner.beat()
    async with publishing(other.ledger) as publish:
        assert await publish(0) is Status.DUPLICATE
        assert await publish(1) is Status.STORED


async def test_a_restarted_instance_takes_its_topics_at_once(world: World) -> None:
    one = world.start("one:1")
    async with publishing(one.ledger) as publish:
        assert await publish(0) is Status.STORED
        again = world.start("one:1")
        async with publishing(again.ledger) as publish_again:
            assert await publish_again(0) is Status.DUPLICATE
        with pytest.raises(StoreUnavailable):
            await publish(1)


async def test_topics_are_shared_and_stay_where_they_are_then(world: World) -> None:
    one = world.start("one:1")
    topics = [TopicName.parse(f"public/default/t{number}") for number in range(20)]
    for topic in topics:
        one.ledger.close(await opened(one.ledger, topic))
    other = world.start("other:1")
    await world.pass_time(4 * STEADY_BEATS, one, other)
    owners = [await world.register.owner(topic) for topic in topics]
    assert owners.count(one.owner._watch.instance) == 10
    for topic in topics:
        for each, another in ((one, other), (other, one)):
            with suppress(NotOwner):
                each.ledger.close(await opened(each.ledger, topic))
                with pytest.raises(NotOwner):
                    await opened(another.ledger, topic)
    await world.pass_time(4 * STEADY_BEATS, one, other)
    assert [await world.register.owner(topic) for topic in topics] == owners


async def test_a_topic_handed_over_ends_its_streams(world: World) -> None:
    one = world.start("one:1")
    other_topic = TopicName.parse("public/default/another")
    one.ledger.close(await opened(one.ledger, other_topic))
    stream = await opened(one.ledger)
    quiet = await opened(one.ledger, other_topic)
    busy = await opened(one.ledger, other_topic, "q")
    other = world.start("other:1")
    await world.pass_time(STEADY_BEATS + 2, one, other)
    with pytest.raises(Draining):  # the one with the fewest producers
        await stream.session.news()
    one.ledger.close(quiet)
    one.ledger.close(busy)
    one.ledger.close(stream)
    with pytest.raises(NotOwner):
        await opened(one.ledger)
    other.ledger.close(await opened(other.ledger))


async def test_a_released_topic_is_free(world: World) -> None:
    one, other = world.start("one:1"), world.start("other:1")
    await world.store.create(TOPIC)
    await last(one.ledger)
    live = one.ledger._live[TOPIC]
    await live.quiet()
    await one.ledger._release(TOPIC, live)
    assert await last(other.ledger) is None


async def test_reads_end_at_what_is_known_to_be_durable(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An append whose outcome is unknown is in the store, and may not outlast its primary."""
    one = world.start("one:1")
    append, take = world.store.append, world.store.take

    async def lose_the_reply(*args: object, **kwargs: object) -> None:
        await append(*args, **kwargs)  # type: ignore[arg-type]
        raise StoreUnavailable("the outcome is unknown")

    async def fail(*_: object, **__: object) -> None:
        raise StoreUnavailable("no standby answers")

    stream = await opened(one.ledger)
    monkeypatch.setattr(world.store, "append", lose_the_reply)
    monkeypatch.setattr(world.store, "take", fail)
    unit = unit_of(stream.session.number, 1, [single(0, "p")], resume=True)
    stream.topic.submit(stream.session, [unit])
    async with asyncio.timeout(10):
        while not world.store.logs[TOPIC].entries:
            await asyncio.sleep(0)
    assert await last(one.ledger) is None
    assert await read(one.ledger) == []
    with pytest.raises(StoreUnavailable):
        await one.ledger.find(TOPIC, "p", 0, "")
    monkeypatch.setattr(world.store, "append", append)
    monkeypatch.setattr(world.store, "take", take)
    async with asyncio.timeout(10):
        news = await stream.session.news()
    assert news is not None
    assert [receipt.status for _, receipt in news.receipts] == [Status.FAILED]
    one.ledger.close(await opened(one.ledger))
    assert await read(one.ledger) == [(1, 0)]
    fate = await one.ledger.find(TOPIC, "p", 0, "")
    assert isinstance(fate, Found)
    one.ledger.close(stream)


async def test_a_trim_and_a_deletion_are_fenced(world: World) -> None:
    """Another instance takes the topic between the decision and the act."""
    one = world.start("one:1")
    async with publishing(one.ledger) as publish:
        await publish(0)
    delete, trim = world.store.delete, world.store.trim

    async def taken_first(*args: Any, **kwargs: Any) -> None:
        await world.store.take(TOPIC, create=False)
        change: Any = delete if len(args) == 1 else trim
        await change(*args, **kwargs)

    world.store.delete = world.store.trim = taken_first  # type: ignore[method-assign,assignment]
    for change in (
        lambda: one.ledger.trim(TOPIC, Position(9, 9)),
        lambda: one.ledger.delete(TOPIC, force=True),
    ):
        with pytest.raises(StoreUnavailable, match="new owner") as refused:
            await change()
        assert isinstance(refused.value.__cause__, Fenced)
    assert (await world.store.get(TOPIC)).entries == 1


async def test_a_missing_topic_is_not_owned(world: World) -> None:
    one = world.start("one:1")
    with pytest.raises(TopicNotFound):
        await last(one.ledger)
    async with publishing(one.ledger) as publish:
        await publish(0)
    await one.ledger.delete(TOPIC, force=True)
    assert await world.register.owner(TOPIC) is None
    with pytest.raises(TopicNotFound):
        await last(one.ledger)
