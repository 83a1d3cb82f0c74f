"""Ledgers that divide the topics of one store: who answers, who takes, who hands over."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import pytest_asyncio

from seqgate.services.errors import Draining, Fenced, StoreUnavailable
from seqgate.services.ledger import owners
from seqgate.services.ledger.adapters.memory import MemoryLedgerStore, MemoryRegister
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.core.entry import unit_of
from seqgate.services.ledger.core.ownership import LEASE_S, STEADY_BEATS, Beat
from seqgate.services.ledger.core.receipt import Found, Status
from seqgate.services.ledger.owners import NotOwner, SharedOwner
from seqgate.services.ledger.ports import LedgerRange, TopicNotFound
from seqgate.services.ledger.service import Ledger, Opened, Opening, ReadRange
from seqgate.services.ledger.sharing import Sharing, reading
from seqgate.services.runtime.cursors import MemoryCursors
from seqgate.types import Position, TopicName
from tests.support.entries import single
from tests.support.remembering import RememberingDeduplicator

TOPIC = TopicName.parse("public/default/shared")


class Instance:
    """A ledger process. It beats when told to."""

    def __init__(self, world: "World", address: str, now_s: Callable[[], float]) -> None:
        self.owner = SharedOwner(world.register, address, now_s=now_s)
        self.ledger = Ledger(
            LedgerConfig(),
            world.store,
            world.dedup,
            MemoryCursors(),
            world.tasks,
            owner=self.owner,
        )

    @property
    def name(self) -> str:
        return self.owner._watch.instance

    @property
    def sharing(self) -> Sharing:
        assert self.ledger._sharing is not None
        return self.ledger._sharing

    async def beat(self) -> None:
        await self.sharing.act(await self.owner.beat())


class World:
    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.store, self.register = MemoryLedgerStore(), MemoryRegister()
        self.dedup = RememberingDeduplicator()
        self.tasks = tasks
        self.now_s = 1e9
        self.instances: list[Instance] = []

    def start(self, address: str, now_s: Callable[[], float] | None = None) -> Instance:
        self.instances.append(Instance(self, address, now_s or (lambda: self.now_s)))
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
    assert (await one.ledger.get(TOPIC)).first is None
    assert await one.ledger.find_time(TOPIC, 0) is None
    assert await one.ledger.ledgers(TOPIC, after=0, limit=9) == []
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


async def test_a_range_ends_at_what_is_known_to_be_durable(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world.start("one:1")
    append = world.store.append

    async def lose_the_reply(*args: object, **kwargs: object) -> None:
        await append(*args, **kwargs)  # type: ignore[arg-type]
        raise StoreUnavailable("the outcome is unknown")

    async def fail(*_: object, **__: object) -> None:
        raise StoreUnavailable("no standby answers")

    async with publishing(one.ledger) as publish:
        assert await publish(0) is Status.STORED
        monkeypatch.setattr(world.store, "append", lose_the_reply)
        monkeypatch.setattr(world.store, "take", fail)
        assert await publish(1) is Status.FAILED
    assert len(world.store.logs[TOPIC].entries) == 2
    assert await one.ledger.ledgers(TOPIC, after=0, limit=9) == [LedgerRange(1, 0, 0)]
    assert await one.ledger.find_time(TOPIC, 0) == (1, 0)
    assert (await one.ledger.get(TOPIC)).first == (1, 0)
    assert await last(one.ledger) == (1, 0)


async def test_an_owner_that_was_taken_from_unnoticed_tells_nothing_old(world: World) -> None:
    """Its record stands, since the other one's is not written yet: only the store knows."""
    one = world.start("one:1")
    async with publishing(one.ledger) as publish:
        assert await publish(0) is Status.STORED
        await world.store.take(TOPIC, create=False)
        await world.store.append(TOPIC, 2, Position(1, 0), [single(5, "q")], 0)
        with pytest.raises(StoreUnavailable):
            await last(one.ledger)
        assert await last(one.ledger) == (2, 0)
        with pytest.raises(StoreUnavailable):
            await publish(1)


async def test_an_owner_that_takes_its_topic_again_keeps_its_streams(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world.start("one:1")
    append, take = world.store.append, world.store.take
    taken, go = asyncio.Event(), asyncio.Event()

    async def lose_the_reply(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(world.store, "append", append)
        await append(*args, **kwargs)
        raise StoreUnavailable("the outcome is unknown")

    async def take_slowly(*args: Any, **kwargs: Any) -> object:
        state = await take(*args, **kwargs)
        taken.set()
        await go.wait()
        return state

    async with publishing(one.ledger) as publish:
        monkeypatch.setattr(world.store, "append", lose_the_reply)
        monkeypatch.setattr(world.store, "take", take_slowly)
        publication = asyncio.ensure_future(publish(0))
        async with asyncio.timeout(10):
            await taken.wait()
        with pytest.raises(StoreUnavailable):
            await last(one.ledger)
        go.set()
        await publication
        assert await publish(1) is Status.STORED
        assert (await last(one.ledger) or Position(0, 0)).ledger_id == 2


async def test_a_topic_taken_while_its_owner_looks_is_not_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look's answer is older than the take."""
    one = world.start("one:1", now_s=time.monotonic)
    owned, looked, go = world.register.owned, asyncio.Event(), asyncio.Event()

    async def slowly(instance: str) -> frozenset[str]:
        found = await owned(instance)
        looked.set()
        await go.wait()
        return found

    monkeypatch.setattr(world.register, "owned", slowly)
    looking = asyncio.ensure_future(one.beat())
    await looked.wait()
    async with publishing(one.ledger) as publish:
        go.set()
        await looking
        assert await publish(0) is Status.STORED


async def test_of_two_that_are_asked_for_a_free_topic_one_takes_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is suspended after it found that nobody owns the topic."""
    one, other = world.start("one:1"), world.start("other:1")
    await world.store.create(TOPIC)
    found, looked, go = world.register.owner, asyncio.Event(), asyncio.Event()
    looks = 0

    async def suspended(topic: TopicName) -> str | None:
        nonlocal looks
        owner = await found(topic)
        looks += 1
        if looks == 2:  # the second look is the one it acts upon
            looked.set()
            await go.wait()
        return owner

    monkeypatch.setattr(world.register, "owner", suspended)
    late = asyncio.ensure_future(opened(other.ledger))
    await looked.wait()
    monkeypatch.setattr(world.register, "owner", found)
    async with publishing(one.ledger) as publish:
        assert await publish(0) is Status.STORED
        go.set()
        with pytest.raises(StoreUnavailable, match="new owner"):
            await late
        assert await publish(1) is Status.STORED
        with pytest.raises(NotOwner):
            await opened(other.ledger)


async def test_readers_that_wait_for_a_beat_share_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world.start("one:1")
    await world.store.create(TOPIC)
    await last(one.ledger)
    world.now_s += LEASE_S
    beat, go, beats = world.register.beat, asyncio.Event(), 0

    async def wait(instance: str, address: str) -> list[Beat]:
        nonlocal beats
        beats += 1
        await go.wait()
        return await beat(instance, address)

    monkeypatch.setattr(world.register, "beat", wait)
    readers = [asyncio.ensure_future(one.owner.confirm()) for _ in range(50)]
    while not beats:
        await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*readers)
    assert beats == 1


async def test_beats_go_on_while_a_topic_is_handed_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others would take all topics of an instance that waits for one topic's publications."""
    one, other = world.start("one:1"), world.start("other:1")
    for number in range(4):
        topic = TopicName.parse(f"public/default/t{number}")
        one.ledger.close(await opened(one.ledger, topic))
    asked, beat = asyncio.Event(), world.register.beat

    async def beat_both(instance: str, address: str) -> list[Beat]:
        await asyncio.sleep(0)
        world.now_s += 1
        await beat(other.name, "other:1")
        return await beat(instance, address)

    async def never_quiet() -> None:
        asked.set()
        await asyncio.Event().wait()

    for live in one.ledger._live.values():
        monkeypatch.setattr(live, "quiet", never_quiet)
    monkeypatch.setattr(world.register, "beat", beat_both)
    monkeypatch.setattr(owners, "BEAT_S", 0)
    sharing = asyncio.ensure_future(one.ledger.share_forever())
    async with asyncio.timeout(30):
        await asked.wait()
        _, before = world.register.instances[one.name]
        while world.register.instances[one.name][1] < before + 20:
            await asyncio.sleep(0)
    assert len([each for each in one.ledger._live.values() if not each.stopped]) == 4
    sharing.cancel()
    await asyncio.wait({sharing})


async def test_a_topic_handed_over_is_taken_and_retained_before_anybody_asks(world: World) -> None:
    one, other = world.start("one:1"), world.start("other:1")
    await world.store.create(TOPIC)
    await world.pass_time(1, one, other)
    await world.register.own(TOPIC, 1, other.name)
    await world.pass_time(1, one, other)
    assert TOPIC in other.ledger._live
    assert await other.sharing.retains(TOPIC)
    assert not await one.sharing.retains(TOPIC)


async def test_one_instance_retains_a_topic_that_nobody_owns(world: World) -> None:
    instances = [world.start(f"i{number}:1") for number in range(3)]
    await world.store.create(TOPIC)
    await world.pass_time(2, *instances)
    assert [await each.sharing.retains(TOPIC) for each in instances].count(True) == 1


async def test_retention_leaves_a_topic_to_the_one_that_retains_it(world: World) -> None:
    instances = [world.start(f"i{number}:1") for number in range(3)]
    async with publishing(instances[0].ledger) as publish:
        assert await publish(0) is Status.STORED
    live = instances[0].ledger._live[TOPIC]
    await live.quiet()
    await instances[0].ledger._release(TOPIC, live)
    await world.pass_time(2, *instances)
    first, *others = sorted(instances, key=lambda each: each.name)
    for each in (*others, first):
        assert (await world.store.get(TOPIC)).entries == 1
        each.ledger._config = LedgerConfig(retention_bytes=0)
        await each.ledger._retain(await world.store.get(TOPIC))
    assert (await world.store.get(TOPIC)).entries == 0


async def test_one_instance_retains_a_topic_of_another_that_is_over(world: World) -> None:
    killed, one, other = (world.start(f"{name}:1") for name in ("killed", "one", "other"))
    await world.store.create(TOPIC)
    await last(killed.ledger)
    await world.pass_time(2, killed, one, other)
    assert [await each.sharing.retains(TOPIC) for each in (killed, one, other)] == [
        True,
        False,
        False,
    ]
    await world.pass_time(LEASE_S + 1, one, other)
    assert [await each.sharing.retains(TOPIC) for each in (one, other)].count(True) == 1


async def test_a_topic_that_failed_here_is_still_retained_here(world: World) -> None:
    one = world.start("one:1")
    await world.store.create(TOPIC)
    await last(one.ledger)
    await one.beat()
    one.ledger._live[TOPIC].stop(Draining("a bug stopped it"))
    assert await one.sharing.retains(TOPIC)


async def test_a_topic_that_is_read_is_not_idle(world: World) -> None:
    one = world.start("one:1")
    await world.store.create(TOPIC)
    await last(one.ledger)
    live = one.ledger._live[TOPIC]
    await live.quiet()
    before = live.idle
    with reading(live):
        meanwhile = live.idle
    assert (before, meanwhile, live.idle) == (True, False, True)


async def test_what_could_not_be_given_up_is_given_up_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = world.start("one:1"), world.start("other:1")
    await world.store.create(TOPIC)
    await last(one.ledger)
    live = one.ledger._live[TOPIC]
    await live.quiet()

    async def fail(*_: object) -> None:
        raise StoreUnavailable("the store failed")

    with monkeypatch.context() as patch:
        patch.setattr(world.register, "disown", fail)
        await one.ledger._release(TOPIC, live)
        await one.beat()
        assert TOPIC not in one.ledger._live
    with pytest.raises(NotOwner):
        await last(other.ledger)
    await one.beat()
    assert TOPIC not in one.ledger._live
    assert await last(other.ledger) is None


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
