"""Ledgers that share a store and a deduplication state, over each store: nothing is stored twice
under trims, lost states, restarting producers and changing policies."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import pytest_asyncio

from seqgate.services.dedup.core.sequence import Marks, advance
from seqgate.services.errors import Fenced, StoreUnavailable
from seqgate.services.ledger.adapters.memory import MemoryRegister
from seqgate.services.ledger.adapters.postgres import PostgresLedgerStore, PostgresRegister
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.core import writer
from seqgate.services.ledger.core.entry import Entry, unit_of
from seqgate.services.ledger.core.ownership import LEASE_S, STEADY_BEATS
from seqgate.services.ledger.core.receipt import Status
from seqgate.services.ledger.owners import NotOwner, SharedOwner
from seqgate.services.ledger.ports import DedupUnavailable, LedgerStore, Register
from seqgate.services.ledger.service import Ledger, Opened, Opening
from seqgate.services.runtime.cursors import MemoryCursors
from seqgate.types import Position, TopicName
from tests.simulation.defects import find
from tests.support.entries import chunk, large, single
from tests.support.remembering import RememberingDeduplicator

TOPIC = TopicName.parse("public/default/shared")
FAR = Position(99, 0)
STORED, DUPLICATE = Status.STORED, Status.DUPLICATE


@pytest.fixture
def store(ledger_store: LedgerStore) -> LedgerStore:
    return ledger_store


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of two entries, and short waits."""
    monkeypatch.setattr(writer, "REPLAY_PAGE_ENTRIES", 2)
    monkeypatch.setattr(writer, "BACKOFF_MAX_S", 0.001)


class World:
    """Ledgers, their shared store, and a deduplicator in memory."""

    def __init__(self, store: LedgerStore, tasks: asyncio.TaskGroup) -> None:
        self.store = store
        self.dedup = RememberingDeduplicator()
        self._tasks = tasks
        self._ledgers: list[Ledger] = []
        self.register: Register = MemoryRegister()
        if isinstance(store, PostgresLedgerStore):
            self.register = PostgresRegister(store.database, store.database)
        self.now_s = 1e9

    def ledger(self, owner: SharedOwner | None = None) -> Ledger:
        """Another ledger process."""
        ledger = Ledger(
            LedgerConfig(), self.store, self.dedup, MemoryCursors(), self._tasks, owner=owner
        )
        self._ledgers.append(ledger)
        return ledger

    def instance(self, address: str) -> "Instance":
        """Another ledger process, which divides the topics with others."""
        owner = SharedOwner(self.register, address, now_s=lambda: self.now_s)
        return Instance(address, owner, self.ledger(owner))

    async def pass_time(self, seconds: float, *beating: "Instance") -> None:
        """Let time pass, while these beat."""
        for _ in range(round(seconds)):
            self.now_s += 1
            for each in beating:
                await each.beat()

    async def finish(self) -> None:
        for each in self._ledgers:
            await each.finish(1)

    async def marks(self) -> dict[str, Marks]:
        """The marks of each producer, folded from the log and the trimmed producers."""
        rebuilt = {
            name: Marks(highest, highest)
            for name, highest in await self.store.trimmed_producers(TOPIC, limit=100)
        }
        for stored in await self.store.read(
            TOPIC, None, entries_max=1_000, bytes_max=10**9, payloads=False
        ):
            entry = stored.entry
            before = rebuilt.get(entry.producer, Marks())
            rebuilt[entry.producer] = advance(before, entry.highest, entry.chunk)
        return {name: marks for name, marks in rebuilt.items() if marks != Marks()}

    async def check_state(self, ledger: Ledger) -> None:
        """The served state equals a rebuilt one, also after all state but the log is lost."""
        marks = await self.marks()
        assert self.dedup.marks(TOPIC) == marks
        self.dedup.states.clear()
        ledger.close(await opened(ledger, "nobody"))
        assert self.dedup.marks(TOPIC) == marks


@dataclass
class Instance:
    """A ledger process beside others. It beats when told to."""

    address: str
    owner: SharedOwner
    ledger: Ledger

    async def beat(self) -> None:
        sharing = self.ledger._sharing
        assert sharing is not None
        await sharing.act(await self.owner.beat())


@pytest_asyncio.fixture
async def world(store: LedgerStore) -> AsyncIterator[World]:
    async with asyncio.TaskGroup() as tasks:
        world = World(store, tasks)
        yield world
        await world.finish()


async def opened(ledger: Ledger, producer: str, topic: TopicName = TOPIC) -> Opened:
    opening = Opening(topic, producer, initial_sequence_id=None, takeover=True, instance=b"")
    return await ledger.open(opening)


@asynccontextmanager
async def publishing(
    ledger: Ledger, producer: str = "p"
) -> AsyncIterator[tuple[Opened, Callable[..., Awaitable[list[Status]]]]]:
    """A stream, and a function that publishes entries on it, one by one; it returns their
    statuses."""
    stream = await opened(ledger, producer)

    async def publish(*entries: Entry) -> list[Status]:
        statuses = []
        for entry in entries:
            unit = unit_of(stream.session.number, 1, [entry], resume=True)
            stream.topic.submit(stream.session, [unit])
            async with asyncio.timeout(5):
                news = await stream.session.news()
            assert news is not None
            ((_, receipt),) = news.receipts
            statuses.append(receipt.status)
        return statuses

    try:
        yield stream, publish
    finally:
        ledger.close(stream)


async def published(ledger: Ledger, entries: Sequence[Entry], producer: str = "p") -> list[Status]:
    """Publish on a stream of its own; returns the statuses once everything is confirmed."""
    async with publishing(ledger, producer) as (stream, publish):
        statuses = await publish(*entries)
        await stream.topic.quiet()
    return statuses


async def last_id(ledger: Ledger, producer: str = "p") -> int | None:
    stream = await opened(ledger, producer)
    ledger.close(stream)
    return stream.last_sequence_id


def ids(*sequence_ids: int, producer: str = "p") -> list[Entry]:
    return [single(each, producer) for each in sequence_ids]


# ---- producers that start over: their last entry decides


async def test_a_forgotten_producer_that_starts_over_is_at_its_new_id(
    world: World,
) -> None:
    ledger = world.ledger()
    await published(ledger, ids(8, 9))
    world.dedup.evict(TOPIC, "p")
    assert await published(ledger, ids(1, 2)) == [STORED, STORED]
    assert await last_id(ledger) == 2
    await ledger.trim(TOPIC, FAR)
    assert await last_id(ledger) == 2
    await world.check_state(ledger)
    assert await published(ledger, ids(2)) == [Status.STALE]
    assert await published(ledger, ids(3)) == [STORED]
    await world.check_state(ledger)


async def test_automatic_ids_continue_after_deduplication_was_off(world: World) -> None:
    """No other producer had the name: the last id is its own."""
    ledger = world.ledger()
    await published(ledger, ids(*range(10)))
    world.dedup.enabled = False
    assert await last_id(ledger) is None, "ids begin anew"
    assert await published(ledger, ids(0, 1, 2)) == [STORED] * 3
    world.dedup.enabled = True
    assert await last_id(ledger) == 2
    await ledger.trim(TOPIC, FAR)
    assert await last_id(ledger) == 2
    assert await published(ledger, ids(3)) == [STORED]
    await world.check_state(ledger)


async def test_the_rest_of_a_lower_message_is_refused_after_its_start_is_trimmed(
    world: World,
) -> None:
    ledger = world.ledger()
    await published(ledger, ids(9))
    world.dedup.evict(TOPIC, "p")
    first, second, third = large(3, "a", 3)
    assert await published(ledger, [first]) == [STORED]
    await ledger.trim(TOPIC, FAR)
    assert await published(ledger, [second]) == [Status.CHUNK_GAP]
    assert await last_id(ledger) == 2
    await world.check_state(ledger)
    assert await published(ledger, large(3, "b", 2)) == [STORED, STORED]
    assert await published(ledger, [third]) == [DUPLICATE]
    await world.check_state(ledger)


async def test_a_message_whose_start_is_trimmed_is_not_completed_elsewhere(
    world: World,
) -> None:
    """The store starts a new incarnation in the same step that removes the message's beginning."""
    one, other = world.ledger(), world.ledger()
    first, second, _ = large(3, "a", 3)
    async with publishing(one) as (_, publish):
        assert await publish(first) == [STORED]
        before = await world.store.get(TOPIC)
        await other.trim(TOPIC, FAR)
        assert (await world.store.get(TOPIC)).incarnation > before.incarnation
    assert await published(other, [second]) == [Status.CHUNK_GAP]
    await world.check_state(other)


# ---- a trim between two pages of a replay


class Pages:
    """Runs an action between two pages of a replay."""

    def __init__(self, world: World, after: int, act: Callable[[], Awaitable[object]]) -> None:
        self._left, self._act = after, act
        self._replay = world.store.replay
        self.acted = False

    async def replay(self, *args: object, **kwargs: object) -> object:
        if self._left == 0:
            await self._act()
            self.acted = True
        self._left -= 1
        return await self._replay(*args, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("pages", range(4))
@pytest.mark.parametrize("trimmed_before", [0, 3])
async def test_nothing_is_stored_twice_when_another_process_trims_during_a_replay(
    world: World, monkeypatch: pytest.MonkeyPatch, pages: int, trimmed_before: int
) -> None:
    one, other = world.ledger(), world.ledger()
    names = [f"p{each}" for each in range(8)]
    for name in names:
        assert await published(one, ids(0, producer=name), name) == [STORED]
    await other.trim(TOPIC, Position(1, trimmed_before))
    world.dedup.states.clear()
    between = Pages(world, pages, lambda: other.trim(TOPIC, Position(1, 7)))
    monkeypatch.setattr(world.store, "replay", between.replay)
    third = world.ledger()
    for name in names:
        (status,) = await published(third, ids(0, producer=name), name)
        assert status in (DUPLICATE, Status.STALE), name
    assert between.acted
    await world.check_state(third)


async def test_a_replay_cut_off_among_trimmed_producers_starts_over(
    world: World,
) -> None:
    one, other = world.ledger(), world.ledger()
    names = [f"p{each}" for each in range(8)]
    for name in names:
        await published(one, ids(0, producer=name), name)
    await other.trim(TOPIC, Position(1, 5))
    world.dedup.states.clear()
    reached = asyncio.Event()
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def stop_at_second_page(call: str) -> asyncio.Future[None] | None:
        state = world.dedup.states.get(TOPIC)
        if call == "confirm" and state is not None and state.confirmed is not None:
            reached.set()
            return never
        return None

    world.dedup.before = stop_at_second_page
    opening = asyncio.ensure_future(opened(world.ledger(), "x"))
    await reached.wait()
    opening.cancel()
    world.dedup.before = lambda _: None
    await other.trim(TOPIC, Position(1, 7))
    third = world.ledger()
    for name in names[:7]:
        assert await published(third, ids(0, producer=name), name) == [Status.STALE]
    never.cancel()
    await world.check_state(third)


@pytest.mark.parametrize("page", range(4))
async def test_a_page_of_a_replay_whose_confirmation_has_no_reply_is_replaced_after_a_trim(
    world: World, page: int
) -> None:
    """The page is applied, its reply is lost, and the log is trimmed further: the same producers
    have later ids then."""
    one, other = world.ledger(), world.ledger()
    names = [f"p{each}" for each in range(4)]
    for sequence_id in range(2):
        for name in names:
            await published(one, ids(sequence_id, producer=name), name)
    await other.trim(TOPIC, Position(1, 4))
    world.dedup.states.clear()
    third, left, trims = world.ledger(), page, []

    def lose_a_reply() -> None:
        nonlocal left
        left -= 1
        if left == -1:
            trims.append(asyncio.ensure_future(other.trim(TOPIC, Position(1, 8))))
            raise DedupUnavailable("the reply is lost")

    world.dedup.confirmed = lose_a_reply
    assert await last_id(third, "p0") == 1
    assert trims
    await asyncio.gather(*trims)
    for name in names:
        assert await published(third, ids(1, producer=name), name) == [Status.STALE]
    await world.check_state(third)


async def test_a_state_that_ends_at_the_trim_position_is_kept(world: World) -> None:
    one, other = world.ledger(), world.ledger()
    await published(one, ids(0, 1))
    state = world.dedup.states[TOPIC]
    kept = (state.confirmed, dict(state.producers))
    await published(one, ids(2, 3))
    state.confirmed, state.producers = kept
    await other.trim(TOPIC, Position(1, 2))
    forgotten: list[str] = []

    def note(call: str) -> None:
        forgotten.extend([call] if call == "forget_topic" else [])

    world.dedup.before = note
    assert await published(other, ids(3)) == [DUPLICATE]
    assert not forgotten


async def test_served_and_rebuilt_state_agree_over_the_life_of_a_topic(
    world: World,
) -> None:
    ledger = world.ledger()
    steps: list[list[Entry]] = [
        ids(5, 6),
        large(7, "a", 3)[:2],
        ids(9),
        [*large(10, "b", 2), chunk(11, "c", 0, 2)],
        large(11, "d", 2),
    ]
    for each in steps:
        await published(ledger, each)
        tail = (await world.store.get(TOPIC)).tail
        assert tail is not None
        await ledger.trim(TOPIC, Position(tail.ledger_id, max(0, tail.entry_id - 1)))
        await world.check_state(ledger)
    assert (await world.marks())["p"] == Marks(11, 11)


# ---- sensitivity: every seeded defect is found


@pytest.mark.deep
@pytest.mark.parametrize(
    ("defect", "test"),
    [
        ("A2", test_the_rest_of_a_lower_message_is_refused_after_its_start_is_trimmed),
        ("A3", test_automatic_ids_continue_after_deduplication_was_off),
        ("A3", test_a_forgotten_producer_that_starts_over_is_at_its_new_id),
    ],
)
async def test_deliberate_defects_are_found(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    defect: str,
    test: Callable[[World], Awaitable[None]],
) -> None:
    find(defect).apply(monkeypatch)
    with pytest.raises(AssertionError):
        await test(world)


@pytest.mark.deep
async def test_a_replay_across_a_trim_is_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    find("F1").apply(monkeypatch)
    with pytest.raises(AssertionError):
        await test_nothing_is_stored_twice_when_another_process_trims_during_a_replay(
            world, monkeypatch, 1, 0
        )


# ---- topics deleted by another ledger


async def test_a_topic_deleted_by_another_ledger_is_released_and_recreated(world: World) -> None:
    """Deduplication lacks entries that no longer exist: the log could be replayed forever."""
    one, other = world.ledger(), world.ledger()
    await published(one, ids(1))
    await other.delete(TOPIC, force=True)
    world.dedup.states.clear()
    with pytest.raises(StoreUnavailable, match="the topic has a new owner"):
        await opened(one, "p")
    assert await published(one, ids(1)) == [STORED]
    await world.check_state(one)


@pytest.mark.parametrize("enabled", [True, False])
async def test_a_topic_deleted_by_another_ledger_is_recreated_by_publishing(
    world: World, enabled: bool
) -> None:
    """The stream whose publication finds out ends; it and all later ones used to fail forever."""
    world.dedup.enabled = enabled
    one, other = world.ledger(), world.ledger()
    async with publishing(one) as (stream, publish):
        assert await publish(*ids(1)) == [STORED]
        await stream.topic.quiet()
        await other.delete(TOPIC, force=True)
        with pytest.raises(Fenced, match="deleted the topic"):
            await publish(*ids(2))
    assert await published(one, ids(1)) == [STORED]
    if enabled:
        await world.check_state(one)


# ---- ledgers that divide topics by a register


async def named(instance: Instance, topic: TopicName = TOPIC) -> str:
    """The address of a topic's owner, as an instance tells it."""
    try:
        stream = await opened(instance.ledger, "asks", topic)
    except NotOwner as error:
        return str(error.details["owner"])
    instance.ledger.close(stream)
    return instance.address


async def test_a_killed_ledgers_topic_goes_on_elsewhere_and_its_zombie_is_fenced(
    world: World,
) -> None:
    one, other, third = (world.instance(f"{name}:1") for name in ("one", "other", "third"))
    await world.pass_time(2, one, other, third)
    async with publishing(one.ledger) as (_, publish):
        assert await publish(*ids(0)) == [STORED]
        await world.pass_time(3, other, third)  # a pause moves nothing
        assert [await named(each) for each in (other, third)] == ["one:1", "one:1"]
        await world.pass_time(LEASE_S, other, third)
        assert [await named(each) for each in (other, third)] == ["other:1", "other:1"]
        assert await published(other.ledger, ids(0, 1)) == [DUPLICATE, STORED]
        with pytest.raises(StoreUnavailable):
            await publish(*ids(2))  # before its first beat
    assert await named(one) == "other:1"
    assert await published(other.ledger, ids(1, 2)) == [DUPLICATE, STORED]
    await world.check_state(other.ledger)


async def at_positions(ledger: Ledger) -> object:
    async with ledger.readers.pages() as pages:
        found = ledger.read_at(TOPIC, [SECOND], pages, asyncio.Event(), payloads=True)
        return [each.position async for some in found for each in some]


async def of_ledgers(ledger: Ledger) -> object:
    return [each.ledger_id for each in await ledger.ledgers(TOPIC, after=0, limit=10)]


async def since_a_time(ledger: Ledger) -> object:
    return await ledger.find_time(TOPIC, 10**12)


async def to_the_end(ledger: Ledger) -> object:
    return (await ledger.get(TOPIC)).tail


SECOND = Position(2, 0)
"""What the zombie's successor stores."""


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (at_positions, [SECOND]),
        (of_ledgers, [2]),
        (since_a_time, SECOND),
        (to_the_end, SECOND),
    ],
)
async def test_a_zombie_does_not_deny_what_its_successor_stored(
    world: World, asked: Callable[[Ledger], Awaitable[object]], told: object
) -> None:
    """A dispatcher, for one, acknowledges what the log no longer has."""
    one, other = world.instance("one:1"), world.instance("other:1")
    await world.pass_time(2, one, other)
    one.ledger.close(await opened(one.ledger, "p"))
    await world.pass_time(LEASE_S + 1, other)
    assert await published(other.ledger, ids(0)) == [STORED]
    with pytest.raises(StoreUnavailable, match="new owner"):
        await asked(one.ledger)
    assert await asked(other.ledger) == told


async def test_topics_are_divided_drained_and_never_doubled(world: World) -> None:
    one = world.instance("one:1")
    topics = [TopicName.parse(f"public/default/t{number}") for number in range(6)]
    for topic in topics:
        assert await named(one, topic) == "one:1"
    other = world.instance("other:1")
    await world.pass_time(STEADY_BEATS + 2, one, other)
    told = [await named(one, topic) for topic in topics]
    assert told == [await named(other, topic) for topic in topics]
    assert sorted(told) == ["one:1"] * 3 + ["other:1"] * 3
    await world.pass_time(2 * STEADY_BEATS, one, other)
    assert told == [await named(one, topic) for topic in topics]
    await one.ledger.leave()
    await world.pass_time(1, other)
    assert [await named(other, topic) for topic in topics] == ["other:1"] * 6
    assert len(await world.register.beat("asks", "asks:1")) == 2
