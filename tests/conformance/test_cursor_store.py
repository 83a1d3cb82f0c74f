"""The contract of every cursor store. A new adapter starts by being added to the fixture."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import apsw
import pytest
import pytest_asyncio

from seqgate.services.cursor.adapters import holes, rows, tables
from seqgate.services.cursor.adapters.memory import MemoryCursorStore
from seqgate.services.cursor.adapters.postgres import PostgresCursorStore, open_postgres_store
from seqgate.services.cursor.adapters.sqlite import open_sqlite_store
from seqgate.services.cursor.core.cursor import (
    BatchAck,
    Caller,
    CursorState,
    LeaseHeld,
    Range,
    Succession,
)
from seqgate.services.cursor.core.state import LEASE_MAX_MS, PAGE_ENTRIES, Batch, Head, Lease
from seqgate.services.cursor.ports import CursorCorrupt, CursorNotFound, CursorStore
from seqgate.services.errors import DomainError, Fenced, StoreFull, StoreUnavailable
from seqgate.services.ledger.adapters.sqlite import open_sqlite_store as open_ledger_store
from seqgate.services.runtime.clock import SteadyClock
from seqgate.services.runtime.postgres import Server
from seqgate.types import SEQUENCE_ID_MAX, Position, TopicName
from tests.support.depth import times
from tests.support.postgres_server import PostgresServer, empty_database

TOPIC = TopicName.parse("test/store/topic")
OTHER = TopicName.parse("test/store/topic2")
NAME = "cursor"
ANYBODY = Caller()

Change = Callable[[CursorState], object]


class Place:
    """A store that can be reopened: in memory, in a file, or in the database at a URL."""

    def __init__(self, path: Path | None = None, url: str = "") -> None:
        self.path = path
        self.url = url
        self.clock_ms = 0
        self.store: CursorStore = MemoryCursorStore(lambda: self.clock_ms)
        self._opened = AsyncExitStack()

    async def open(self) -> None:
        """Open the store, or close and reopen it; the memory store keeps its contents."""
        await self.close()
        if isinstance(self.store, MemoryCursorStore):
            self.store.begin()
        if self.path is not None:
            opening = open_sqlite_store(self.path, clock=lambda: self.clock_ms)
            self.store = await self._opened.enter_async_context(opening)
        if self.url:
            self.store = await self._opened.enter_async_context(self.another())

    def another(self) -> AbstractAsyncContextManager[PostgresCursorStore]:
        """A store on the same database, as of another process."""
        server = Server(self.url, writers=4, readers=2)
        return open_postgres_store(server, migrates=True, clock=lambda: self.clock_ms)

    async def close(self) -> None:
        await self._opened.aclose()


@pytest_asyncio.fixture(params=["memory", "sqlite", "postgres"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    match request.param:
        case "postgres":
            server: PostgresServer = request.getfixturevalue("postgres")
            place = Place(url=await empty_database(server, "cursor_tests"))
        case "sqlite":
            place = Place(tmp_path / "cursor.db")
        case _:
            place = Place()
    await place.open()
    yield place
    await place.close()


@pytest_asyncio.fixture
async def file(tmp_path: Path) -> AsyncIterator[Place]:
    """The SQLite store, for tests that need a file."""
    place = Place(tmp_path / "cursor.db")
    await place.open()
    yield place
    await place.close()


@pytest.fixture
def store(place: Place) -> CursorStore:
    return place.store


async def create(store: CursorStore, name: str = NAME, topic: TopicName = TOPIC) -> Head:
    head, created = await store.create(topic, name, mark_delete=None, properties={})
    assert created
    return head


async def change(
    store: CursorStore, change: Change, name: str = NAME, topic: TopicName = TOPIC
) -> None:
    await store.change(topic, name, lambda state, _: change(state))


class Contents(NamedTuple):
    """All the state of a cursor that these tests use."""

    head: Head
    pages: list[tuple[int, int, int]]
    batches: list[tuple[Position, Batch]]
    attempts: list[tuple[int, bytes]]
    successions: list[Position | None]


def _contents(state: CursorState) -> Contents:
    holes = state.holes
    places = [Position(ledger_id, entry_id) for ledger_id in range(6) for entry_id in range(12)]
    return Contents(
        replace(state.head, created_ms=0),
        list(holes.pages(None)),
        list(holes.batches(None)),
        [(holes.attempts(each), holes.note(each)) for each in places],
        [holes.next_after(each) for each in places],
    )


async def contents(store: CursorStore, name: str = NAME, topic: TopicName = TOPIC) -> Contents:
    return await store.look(topic, name, _contents)


def fill(state: CursorState) -> None:
    """Put some of every kind of state into a cursor."""
    state.head.mark_delete = Position(1, 2)
    state.head.mark_delete_properties = {"p": "7", "ü": ""}
    state.head.properties = {"own": "1"}
    state.head.revision += 1
    state.head.acknowledged, state.head.partial = 3, 1
    state.head.lease = Lease("owner", 4, LEASE_MAX_MS)
    state.head.lease_number += 1
    state.holes.put_page(1, 0, 0b111000)
    state.holes.put_page(2, 3, 1 << PAGE_ENTRIES - 1)
    state.holes.put_batch(Position(1, 7), Batch(10, 0b11))
    state.holes.put_attempts(Position(1, 8), 2, b"two")
    state.holes.put_succession(Position(1, 9), Position(2, 0))


async def test_a_cursor_is_created_once(store: CursorStore) -> None:
    head, created = await store.create(
        TOPIC, NAME, mark_delete=Position(1, 2), properties={"k": "v"}
    )
    assert created
    assert head == Head(TOPIC, NAME, head.created_ms, Position(1, 2), properties={"k": "v"})
    again, created = await store.create(TOPIC, NAME, mark_delete=None, properties={})
    assert not created
    assert again == head
    assert await store.look(TOPIC, NAME, lambda state: state.head) == head


@pytest.mark.parametrize("call", ["change", "look", "delete"])
async def test_a_missing_cursor_is_not_found(store: CursorStore, call: str) -> None:
    await create(store, "another")
    await create(store, topic=OTHER)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "change": lambda: change(store, lambda _: None),
        "look": lambda: contents(store),
        "delete": lambda: store.delete(TOPIC, NAME),
    }
    with pytest.raises(CursorNotFound):
        await calls[call]()


async def test_a_healthy_store_passes_its_check(store: CursorStore) -> None:
    await store.check()


async def test_a_cursor_survives_a_restart_whole(place: Place) -> None:
    await create(place.store)
    await change(place.store, fill)
    before = await contents(place.store)
    await place.open()
    after = await contents(place.store)
    assert after == before
    assert after.head == Head(
        TOPIC, NAME, 0, Position(1, 2), {"p": "7", "ü": ""}, {"own": "1"}, 1, 3, 1,
        Lease("owner", 4, LEASE_MAX_MS), 1,
    )  # fmt: skip
    assert after.pages == [(1, 0, 0b111000), (2, 3, 1 << PAGE_ENTRIES - 1)]
    assert after.batches == [(Position(1, 7), Batch(10, 0b11))]
    assert max(after.attempts) == (2, b"two")
    assert [each for each in after.successions if each] == [Position(2, 0)]


async def test_a_guessed_batch_size_stays_a_guess(place: Place) -> None:
    await create(place.store)
    guess = Batch(64, 0b101, is_guess=True)
    await change(place.store, lambda state: state.holes.put_batch(Position(1, 7), guess))
    await place.open()
    assert (await contents(place.store)).batches == [(Position(1, 7), guess)]
    found = await place.store.look(TOPIC, NAME, lambda state: state.holes.batch(Position(1, 7)))
    assert found == guess


async def test_cursors_are_listed_in_the_order_of_topic_and_name(store: CursorStore) -> None:
    places = [("a-b/c/d", "x"), ("a/b/c", "b"), ("a/b/c", "é"), ("a/b/c", "𝄞"), ("a/b/c-d", "a")]
    for topic, name in reversed(places):
        await create(store, name, TopicName.parse(topic))

    async def listed(
        topic: str = "", after: tuple[str, str] = ("", ""), limit: int = 10
    ) -> list[tuple[str, str]]:
        asked = TopicName.parse(topic) if topic else None
        heads = await store.cursors(asked, after=after, limit=limit)
        return [(str(head.topic), head.name) for head in heads]

    assert await listed() == places
    for index, place in enumerate(places):
        assert await listed(after=place, limit=2) == places[index + 1 : index + 3]
    assert await listed("a/b/c") == places[1:4]
    assert await listed("a/b/c", limit=1) == places[1:2]
    assert await listed("a/b/c", after=("a-b/c/d", "x")) == places[1:4]
    assert await listed("a/b/c", after=("a/b/c", "b"), limit=1) == places[2:3]
    assert await listed("a/b/c", after=("a/b/c", "𝄞")) == []
    assert await listed("a/b/c", after=("a/b/c-d", "")) == []
    assert await listed("a/b/nothing") == []


async def test_listed_heads_leave_out_attached_properties(
    store: CursorStore,
) -> None:
    await create(store)
    await change(store, fill)
    (head,) = await store.cursors(TOPIC, after=("", ""), limit=1)
    whole = (await contents(store)).head
    assert whole.mark_delete_properties
    assert replace(head, created_ms=0) == replace(whole, mark_delete_properties={})


async def test_a_recreated_cursor_starts_empty(place: Place) -> None:
    await create(place.store)
    await change(place.store, fill)
    await place.store.delete(TOPIC, NAME)
    assert await place.store.cursors(None, after=("", ""), limit=1) == []
    await place.open()
    await create(place.store)
    left = await contents(place.store)
    assert left.head == Head(TOPIC, NAME, 0)
    assert (left.pages, left.batches, max(left.attempts)) == ([], [], (0, b""))


async def acquire(
    store: CursorStore, owner: str, duration_ms: int = 1_000, topic: TopicName = TOPIC
) -> Lease:
    return await store.change(
        topic, NAME, lambda state, now_ms: state.acquire_lease(owner, now_ms, duration_ms)
    )


def _reset_by(epoch: int) -> Change:
    return lambda state: state.reset(Position(1, 1), Caller(epoch))


async def test_a_late_call_of_an_epoch_of_a_deleted_cursor_is_refused(place: Place) -> None:
    epochs = []
    for owner in ("first", "second", "third"):
        await create(place.store)
        epochs.append((await acquire(place.store, owner)).epoch)
        for spent in epochs[:-1]:
            with pytest.raises(Fenced):
                await change(place.store, _reset_by(spent))
        await change(place.store, _reset_by(epochs[-1]))
        await place.store.delete(TOPIC, NAME)
        await place.open()
    assert epochs == [1, 3, 5]


async def test_epochs_of_other_topics_begin_at_one(store: CursorStore) -> None:
    await create(store)
    await acquire(store, "o")
    await store.delete(TOPIC, NAME)
    await create(store, topic=OTHER)
    assert (await acquire(store, "o", topic=OTHER)).epoch == 1


async def test_epochs_do_not_recur_beyond_the_limit_of_remembered_topics(
    file: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "SPENT_TOPICS_MAX", 3)
    highest = dict[TopicName, int]()
    topics = [TopicName.parse(f"test/spent/topic{i}") for i in range(8)]
    for topic in [*topics, *topics[:4], *topics]:
        await create(file.store, topic=topic)
        epoch = (await acquire(file.store, "o", topic=topic)).epoch
        assert epoch > highest.get(topic, 0)
        highest[topic] = epoch
        await file.store.delete(topic, NAME)
    assert _count(file, "spent") <= 3


async def test_a_clock_set_back_extends_no_lease(place: Place) -> None:
    hour_ms = 3_600_000
    place.clock_ms = 2 * hour_ms
    await create(place.store)
    await acquire(place.store, "dead", 60_000)
    place.clock_ms -= hour_ms
    with pytest.raises(LeaseHeld) as refusal:
        await acquire(place.store, "living")
    assert refusal.value.details["remaining_ms"] == 60_000
    place.clock_ms += 59_999
    with pytest.raises(LeaseHeld):
        await acquire(place.store, "living")
    place.clock_ms += 1
    assert await acquire(place.store, "living") == Lease("living", 3, place.clock_ms + 1_000, 1_000)


async def test_after_a_restart_a_lease_lasts_for_its_duration_at_most(file: Place) -> None:
    file.clock_ms = 7_200_000
    await create(file.store)
    await acquire(file.store, "dead", 60_000)
    file.clock_ms = 3_600_000
    await file.open()
    file.clock_ms += 60_000  # without any call meanwhile
    assert (await acquire(file.store, "living")).owner == "living"


@pytest.mark.parametrize("layout", [1, 2, 3])
async def test_a_database_of_an_earlier_layout_is_migrated(file: Place, layout: int) -> None:
    await create(file.store)
    await change(file.store, fill)
    file.clock_ms = LEASE_MAX_MS
    await acquire(file.store, "o")
    await change(file.store, lambda state: state.holes.put_attempts(Position(1, 8), 2))
    before = await contents(file.store)
    await file.close()
    assert file.path is not None
    with apsw.Connection(str(file.path)) as db:
        db.execute("ALTER TABLE attempt DROP COLUMN note")
        if layout < 3:
            db.execute("ALTER TABLE cursor ADD COLUMN lease_expires_ms INTEGER")
            db.execute("UPDATE cursor SET lease_expires_ms = ?", (LEASE_MAX_MS + 1_000,))
            db.execute("ALTER TABLE cursor DROP COLUMN lease_number")
        if layout == 1:
            db.execute("ALTER TABLE cursor DROP COLUMN lease_duration_ms")
            db.execute("DROP TABLE spent")
        db.pragma("user_version", layout)
    await file.open()
    after = await contents(file.store)
    if layout < 3:
        assert after.head.lease == Lease("o", 6, LEASE_MAX_MS + 1_000, 1_000)
        before = before._replace(head=replace(before.head, lease_number=0))
    assert after == before._replace(head=replace(before.head, lease=after.head.lease))
    await file.store.delete(TOPIC, NAME)
    await create(file.store)
    assert (await acquire(file.store, "o")).epoch == 8


async def test_cursors_and_topics_are_independent(store: CursorStore) -> None:
    others = [("neighbour", TOPIC), (NAME, OTHER)]
    await create(store)
    for name, topic in others:
        await create(store, name, topic)
        await change(store, fill, name, topic)
    before = [await contents(store, *other) for other in others]
    await change(store, fill)
    await change(store, lambda state: state.holes.drop_through(None))
    await store.delete(TOPIC, NAME)
    assert [await contents(store, *other) for other in others] == before


async def test_cursors_of_a_topic_share_its_ledger_ends(place: Place) -> None:
    for name, topic in [(NAME, TOPIC), ("neighbour", TOPIC), (NAME, OTHER)]:
        await create(place.store, name, topic)
    last, following = Position(1, 9), Position(4, 0)
    await change(place.store, lambda state: state.holes.put_succession(last, following))
    await place.store.delete(TOPIC, NAME)
    await place.open()

    async def known(name: str, topic: TopicName) -> Position | None:
        return await place.store.look(topic, name, lambda state: state.holes.next_after(last))

    assert await known("neighbour", TOPIC) == following
    assert await known(NAME, OTHER) is None


async def test_deleting_the_last_cursor_forgets_the_ledger_ends(place: Place) -> None:
    for name, topic in [(NAME, TOPIC), ("last", TOPIC), (NAME, OTHER)]:
        await create(place.store, name, topic)
    last, following = Position(1, 9), Position(4, 0)
    for topic in (TOPIC, OTHER):
        await change(
            place.store, lambda state: state.holes.put_succession(last, following), topic=topic
        )
    await place.store.delete(TOPIC, NAME)
    await place.store.delete(TOPIC, "last")
    await place.open()
    await create(place.store)

    async def known(topic: TopicName) -> Position | None:
        return await place.store.look(topic, NAME, lambda state: state.holes.next_after(last))

    assert await known(TOPIC) is None
    assert await known(OTHER) == following


def _many_pages(state: CursorState) -> None:
    for number in range(2_000):
        state.holes.put_page(3, number, 1)


def _mark(state: CursorState) -> None:
    state.head.mark_delete = Position(5, 5)
    state.head.mark_delete_properties = {"new": "pair"}
    state.head.revision += 1


@pytest.mark.parametrize(
    "spoil",
    [
        fill,
        _mark,
        _many_pages,
        lambda state: state.holes.drop_through(None),
        lambda state: state.holes.drop_run(Position(1, 0), 9),
        lambda state: state.holes.put_page(1, 0, 0),
        lambda state: (state.holes.put_page(1, 0, 1), list(state.holes.pages(None))),
        lambda state: state.holes.put_batch(Position(1, 7), None),
        lambda state: state.holes.put_attempts(Position(1, 8), 9),
        lambda state: state.holes.put_succession(Position(1, 9), Position(5, 0)),
    ],
)
async def test_a_refused_step_changes_nothing(place: Place, spoil: Change) -> None:
    def refuse(state: CursorState) -> None:
        spoil(state)
        raise Fenced("too late", epoch=1)

    await create(place.store)
    await change(place.store, fill)
    before = await contents(place.store)
    kept = [create(place.store, f"other{i}") for i in range(3)]
    refused, *_ = await asyncio.gather(change(place.store, refuse), *kept, return_exceptions=True)
    assert isinstance(refused, Fenced)
    assert await contents(place.store) == before
    await place.open()
    assert await contents(place.store) == before
    assert len(await place.store.cursors(TOPIC, after=("", ""), limit=9)) == 4


PAGES = [(1, 0, 5), (1, 1, 1 << PAGE_ENTRIES - 1), (1, 7, 3), (2, 0, 1), (9, 2**40, 8)]
END = PAGE_ENTRIES - 1


@pytest.mark.parametrize(
    ("position", "ended"),
    [
        (Position(0, 2**62), 0),
        (Position(1, 0), 0),
        (Position(1, END - 1), 0),
        (Position(1, END), 1),  # the last entry of the page
        (Position(1, END + 1), 1),
        (Position(1, 2 * PAGE_ENTRIES - 1), 2),
        (Position(1, 8 * PAGE_ENTRIES - 2), 2),
        (Position(1, 8 * PAGE_ENTRIES - 1), 3),
        (Position(1, 2**63 - 1), 3),
        (Position(2, 0), 3),
        (Position(5, 0), 4),
        (Position(9, 2**63 - 1), 5),
        (Position(2**63 - 1, 2**63 - 1), 5),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_dropping_through_a_position_drops_the_pages_before_it(
    store: CursorStore, position: Position, ended: int, at_once: bool
) -> None:
    def put(state: CursorState) -> None:
        for page in reversed(PAGES):
            state.holes.put_page(*page)

    def drop(state: CursorState) -> None:
        assert list(state.holes.pages(position)) == PAGES[ended:]
        assert state.holes.drop_through(position) == 0
        left = [state.holes.page(ledger_id, number) for ledger_id, number, _ in PAGES]
        assert left == [0] * ended + [bits for _, _, bits in PAGES[ended:]]

    def put_and_drop(state: CursorState) -> None:
        put(state)
        drop(state)

    await create(store)
    if at_once:
        await change(store, put_and_drop)
    else:
        await change(store, put)
        assert (await contents(store)).pages == PAGES
        await change(store, drop)
    assert (await contents(store)).pages == PAGES[ended:]


async def test_a_step_sees_its_own_changes(store: CursorStore) -> None:
    def step(state: CursorState) -> None:
        holes = state.holes
        for bits in (0b1, 0b11, 0, 0b111):
            holes.put_page(1, 0, bits)
            assert holes.page(1, 0) == bits
            assert list(holes.pages(None)) == ([(1, 0, bits)] if bits else [])
        for acknowledged in (1, 3):
            holes.put_batch(Position(1, 1), Batch(4, acknowledged))
            assert holes.batch(Position(1, 1)) == Batch(4, acknowledged)
        holes.put_batch(Position(1, 1), None)
        assert holes.batch(Position(1, 1)) is None
        holes.put_attempts(Position(1, 1), 7)
        assert holes.attempts(Position(1, 1)) == 7
        holes.put_attempts(Position(1, 1), 0)
        assert holes.attempts(Position(1, 1)) == 0

    await create(store)
    await change(store, step)
    assert (await contents(store)).pages == [(1, 0, 0b111)]


async def test_a_step_may_drop_its_own_additions(store: CursorStore) -> None:
    def step(state: CursorState) -> None:
        holes, first = state.holes, Position(1, 0)
        assert holes.drop_run(first, 9) == 0  # nothing yet
        fill(state)
        assert holes.drop_run(first, 9) == 1
        assert holes.attempts(Position(1, 8)) == 0
        fill(state)
        assert holes.drop_through(Position(1, 9)) == 1
        assert holes.attempts(Position(1, 8)) == 0
        holes.drop_through(None)

    await create(store)
    await change(store, step)
    left = await contents(store)
    assert (left.pages, left.batches, max(left.attempts)) == ([], [], (0, b""))


async def test_a_step_may_touch_many_pages(store: CursorStore) -> None:
    pages = [(3, number, number + 1) for number in range(2_500)]

    def step(state: CursorState) -> None:
        for ledger_id, number, bits in pages:
            state.holes.put_page(ledger_id, number, bits)
            assert state.holes.page(ledger_id, number // 2) == number // 2 + 1

    await create(store)
    await change(store, step)
    assert (await contents(store)).pages == pages


async def test_pages_and_batches_may_be_removed_during_iteration(store: CursorStore) -> None:
    places = [Position(1, entry_id) for entry_id in range(600)]

    def put(state: CursorState) -> None:
        for page in PAGES:
            state.holes.put_page(*page)
        for place in places:
            state.holes.put_batch(place, Batch(2, 1))

    def remove(state: CursorState) -> None:
        pages = []
        for ledger_id, number, bits in state.holes.pages(None):
            pages.append((ledger_id, number, bits))
            state.holes.put_page(ledger_id, number, 0)
        assert pages == PAGES
        batches = []
        for position, _ in state.holes.batches(None):
            batches.append(position)
            state.holes.put_batch(position, None)
        assert batches == places

    await create(store)
    await change(store, put)
    await change(store, remove)
    left = await contents(store)
    assert (left.pages, left.batches) == ([], [])


BATCHES = [Position(1, 3), Position(1, 5), Position(1, 9), Position(2, 0), Position(4, 11)]


def put_batches(state: CursorState) -> None:
    for index, position in enumerate(reversed(BATCHES)):
        state.holes.put_batch(position, Batch(10_000, 1 << index * 2_499))
        state.holes.put_attempts(position, index + 1)


@pytest.mark.parametrize(
    ("position", "dropped"),
    [
        (None, 5),
        (Position(1, 2), 0),
        (Position(1, 3), 1),
        (Position(1, 8), 2),
        (Position(1, 99), 3),
        (Position(2, 0), 4),
        (Position(3, 0), 4),
        (Position(4, 11), 5),
    ],
)
async def test_batches_and_attempts_up_to_a_position_are_dropped_and_counted(
    store: CursorStore, position: Position | None, dropped: int
) -> None:
    def drop(state: CursorState) -> None:
        left = [each for each, _ in state.holes.batches(position)]
        assert left == (BATCHES if position is None else BATCHES[dropped:])
        assert state.holes.drop_through(position) == dropped

    await create(store)
    await change(store, put_batches)
    await change(store, drop)
    left = await contents(store)
    assert [each for each, _ in left.batches] == BATCHES[dropped:]
    assert len([each for each, _ in left.attempts if each]) == len(BATCHES) - dropped


@pytest.mark.parametrize(
    ("first", "last_entry", "dropped"),
    [
        (Position(1, 0), 2, 0),
        (Position(1, 0), 3, 1),
        (Position(1, 3), 3, 1),
        (Position(1, 4), 8, 1),
        (Position(1, 5), 9, 2),
        (Position(1, 0), 2**63 - 1, 3),
        (Position(2, 0), 2**63 - 1, 1),
        (Position(3, 0), 99, 0),
    ],
)
async def test_batches_and_attempts_of_a_run_are_dropped_and_counted(
    store: CursorStore, first: Position, last_entry: int, dropped: int
) -> None:
    def drop(state: CursorState) -> None:
        assert state.holes.drop_run(first, last_entry) == dropped

    await create(store)
    await change(store, put_batches)
    await change(store, drop)
    left = await contents(store)
    gone = [each for each in BATCHES if first <= each <= (first.ledger_id, last_entry)]
    assert len(gone) == dropped
    assert [each for each, _ in left.batches] == [each for each in BATCHES if each not in gone]
    assert len([each for each, _ in left.attempts if each]) == len(BATCHES) - dropped


async def test_nothing_follows_the_last_position(store: CursorStore) -> None:
    last = Position(SEQUENCE_ID_MAX, SEQUENCE_ID_MAX)

    def put(state: CursorState) -> None:
        state.holes.put_page(SEQUENCE_ID_MAX, SEQUENCE_ID_MAX // PAGE_ENTRIES, 1 << END)
        state.holes.put_batch(last, Batch(2, 1))
        state.holes.put_attempts(last, 3)

    def look(state: CursorState) -> list[object]:
        holes = state.holes
        return [*holes.pages(last), *holes.batches(last), *holes.attempted(last)]

    await create(store)
    await change(store, put)
    assert await store.look(TOPIC, NAME, look) == []
    found = await store.look(TOPIC, NAME, lambda state: state.acknowledged(None, 9))
    assert found.ranges == [Range(last, last.entry_id)]
    assert await store.look(TOPIC, NAME, lambda state: state.attempts(None, 9).counts) == [
        (last, 3, b"")
    ]
    await change(store, lambda state: state.holes.drop_through(last))
    left = await contents(store)
    assert (left.pages, left.batches) == ([], [])


@pytest.mark.parametrize("count", [0, 1, 999, 1_000, 1_001, 2_500])
async def test_counts_of_attempts_are_read_in_order(place: Place, count: int) -> None:
    places = [Position(1 + each // 700, 3 * each) for each in range(count)]
    counts = {each: 1 + each.entry_id % 5 for each in places}
    notes = {each: b"n" * (each.entry_id % 3) for each in places}
    expected = [(each, counts[each], notes[each]) for each in places]

    def put(state: CursorState) -> None:
        for position in reversed(places):
            state.holes.put_attempts(position, counts[position], notes[position])
        assert list(state.holes.attempted(None)) == expected

    def read(state: CursorState) -> None:
        assert list(state.holes.attempted(None)) == expected
        for index in range(0, count, 499):
            found = list(state.holes.attempted(places[index]))
            assert found == expected[index + 1 :]
        assert list(state.holes.attempted(Position(1, 1))) == expected[1:]

    await create(place.store)
    await create(place.store, "neighbour")
    await change(
        place.store, lambda state: state.holes.put_attempts(Position(1, 1), 9), "neighbour"
    )
    await change(place.store, put)
    await place.open()
    await place.store.look(TOPIC, NAME, read)


async def test_counts_of_attempts_may_be_removed_during_iteration(
    store: CursorStore,
) -> None:
    places = [Position(1, entry_id) for entry_id in range(2_100)]

    def step(state: CursorState) -> None:
        for place in places:
            state.holes.put_attempts(place, 1)
        found = []
        for position, *_ in state.holes.attempted(None):
            found.append(position)
            state.holes.put_attempts(position, 0)
        assert found == places

    await create(store)
    await change(store, step)
    assert await store.look(TOPIC, NAME, lambda state: list(state.holes.attempted(None))) == []


async def test_a_step_is_atomic_for_readers(store: CursorStore) -> None:
    """A reader sees the state before a step or after it."""

    def step(state: CursorState, _: int) -> int:
        state.head.revision += 1
        state.holes.put_page(1, 0, state.head.revision)
        return state.head.revision

    def look(state: CursorState) -> tuple[int, int]:
        return state.head.revision, state.holes.page(1, 0)

    await create(store)
    changes = [store.change(TOPIC, NAME, step) for _ in range(50)]
    looks = [store.look(TOPIC, NAME, look) for _ in range(50)]
    mixed: list[Any] = await asyncio.gather(
        *(each for pair in zip(changes, looks, strict=True) for each in pair)
    )
    assert mixed[0::2] == list(range(1, 51))
    assert all(revision == bits for revision, bits in mixed[1::2])


async def test_changes_of_one_cursor_are_serialized(place: Place) -> None:
    await create(place.store)

    def marking(i: int) -> Callable[[CursorState, int], tuple[int, int]]:
        def step(state: CursorState, _: int) -> tuple[int, int]:
            state.mark_delete(Position(1, 7), {"k": str(i)}, ANYBODY)
            return state.head.revision, i

        return step

    steps = [marking(i) for i in range(20)]
    seen = await asyncio.gather(*(place.store.change(TOPIC, NAME, step) for step in steps))
    assert sorted(revision for revision, _ in seen) == list(range(1, 21))
    _, last = max(seen)
    await place.open()
    head = (await contents(place.store)).head
    assert (head.mark_delete, head.mark_delete_properties) == (Position(1, 7), {"k": str(last)})


HISTORIES = times(quick=10, full=50)
KINDS = {"memory": HISTORIES, "sqlite": HISTORIES, "postgres": times(quick=2, full=50)}


@pytest.mark.parametrize(
    ("place", "history"),
    [(kind, history) for kind, histories in KINDS.items() for history in range(histories)],
    indirect=["place"],
)
async def test_every_store_agrees_with_the_memory_store(
    place: Place, seed: int, history: int
) -> None:
    random = Random(seed + history)
    model = MemoryCursorStore(lambda: place.clock_ms)
    script = [Call("create", TOPIC, name, _nothing) for name in "ab"]
    script += [_call(random) for _ in range(60)]
    for step, call in enumerate(script):
        place.clock_ms = random.randint(0, 5_000)  # the clock goes back as often as forward
        assert await _outcome(place.store, call) == await _outcome(model, call), script[: step + 1]
        if random.random() < 0.05:
            await place.open()
            model.begin()


VERBS = (
    *("mark_delete",) * 6,
    *("acknowledge",) * 12,
    *("create", "reset", "attempts", "attempts", "properties", "properties"),
    *("acquire", "acquire", "renew", "release", "delete"),
)


class Call(NamedTuple):
    verb: str
    topic: TopicName
    name: str
    step: Callable[[CursorState, int], object]


def _nothing(_: CursorState, now_ms: int) -> None:
    del now_ms


def _call(random: Random) -> Call:
    verb = random.choice(VERBS)
    topic, name = random.choice((TOPIC, TOPIC, OTHER)), random.choice("ab")
    return Call(verb, topic, name, _step(random, verb))


def _somewhere(random: Random) -> Position:
    near = random.choice((0, 0, PAGE_ENTRIES - 8))
    return Position(random.choice((1, 1, 2)), near + random.randint(0, 15))


def _step(random: Random, verb: str) -> Callable[[CursorState, int], object]:
    position, last = _somewhere(random), random.choice((15, PAGE_ENTRIES + 5))
    successions = random.choice(((), (), (Succession(Position(1, last), Position(2, 0)),)))
    caller = Caller(random.choice((None,) * 8 + (1, 2)), successions=successions)
    properties = {
        random.choice("xyz"): str(random.randint(0, 9)) for _ in range(random.randint(0, 2))
    }
    lease = random.choice(("o", "o", "p")), random.choice((1, 1, 2))
    match verb:
        case "mark_delete":
            return lambda state, _: state.mark_delete(position, properties, caller)
        case "acknowledge":
            starts = [_somewhere(random) for _ in range(random.randint(0, 4))]
            ranges = [Range(each, each.entry_id + random.randint(0, 6)) for each in starts]
            batches = [
                BatchAck(
                    _somewhere(random), 4, tuple(random.sample(range(4), random.randint(1, 3)))
                )
                for _ in range(random.randint(0, 2))
            ]
            return lambda state, _: state.acknowledge(ranges, batches, caller)
        case "reset":
            target = random.choice((None, position))
            return lambda state, _: state.reset(target, caller)
        case "attempts":
            positions = [_somewhere(random) for _ in range(3)]
            at_least = random.choice(([], [random.randint(0, 4) for _ in positions]))
            notes = [random.randbytes(each) for each in at_least]
            return lambda state, _: state.record_attempts(positions, caller, at_least, notes)
        case "properties":
            clear, gone = random.random() < 0.2, random.sample("xyz", 1)
            return lambda state, _: state.update_properties(properties, gone, caller, clear=clear)
        case "acquire":
            return lambda state, now_ms: state.acquire_lease(lease[0], now_ms, 1_000)
        case "renew":
            return lambda state, now_ms: state.renew_lease(*lease, now_ms, 1_000)
        case "release":
            return lambda state, now_ms: state.release_lease(lease[1], now_ms)
        case _:
            return _nothing


def _page(state: CursorState) -> object:
    """A cursor, its acknowledged ranges in pages of five, and its first attempts."""
    pages = [state.acknowledged(None, 5)]
    while pages[-1].next_after is not None:
        pages.append(state.acknowledged(pages[-1].next_after, 5))
    return _contents(state), pages, state.attempts(None, 5)


async def _outcome(store: CursorStore, call: Call) -> object:
    try:
        match call.verb:
            case "create":
                position = Position(1, 1)
                head, created = await store.create(
                    call.topic, call.name, mark_delete=position, properties={"x": "1"}
                )
                answer: object = replace(head, created_ms=0), created
            case "delete":
                await store.delete(call.topic, call.name)
                answer = None
            case _:
                answer = await store.change(call.topic, call.name, call.step)
    except DomainError as error:
        answer = error.reason
    heads = await store.cursors(None, after=("", ""), limit=10)
    return answer, [await store.look(each.topic, each.name, _page) for each in heads]


@pytest.mark.deep
async def test_a_million_holes_are_kept_in_a_small_file(file: Place) -> None:
    """The last ones cost about as much as the first: a tenfold cost after a hundredfold number
    would grow with the number of holes."""
    await create(file.store)
    first, costs = 2, []
    for _ in range(100):
        ranges = [Range(Position(1, first + 2 * i), first + 2 * i) for i in range(10_000)]
        first += 20_000

        def step(state: CursorState, ranges: list[Range] = ranges) -> None:
            state.acknowledge(ranges, [], ANYBODY)

        started = time.process_time()  # processor time, so that other processes do not count
        await change(file.store, step)
        costs.append(time.process_time() - started)
    assert sum(costs[-10:]) < 10 * sum(costs[:10])
    await file.open()

    def count(state: CursorState) -> int:
        return sum(bits.bit_count() for _, _, bits in state.holes.pages(None))

    assert await file.store.look(TOPIC, NAME, count) == 1_000_000
    assert (await contents(file.store)).head.acknowledged == 1_000_000
    await file.close()
    assert file.path is not None
    assert file.path.stat().st_size < 2 * 2**20


async def test_holes_without_a_pattern_are_stored_unchanged(file: Place, seed: int) -> None:
    random = Random(seed)
    pages = [(1, number, random.getrandbits(PAGE_ENTRIES)) for number in range(10)]
    pages += [(2, number, 1 << number) for number in range(10)]

    def put(state: CursorState) -> None:
        for page in pages:
            state.holes.put_page(*page)

    await create(file.store)
    await change(file.store, put)
    await file.open()
    assert (await contents(file.store)).pages == pages


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE page SET bits = x''",
        "UPDATE page SET bits = x'0000000001'",
        "UPDATE page SET bits = substr(bits, 1, length(bits) - 1)",
        "UPDATE page SET bits = CAST(bits || x'00' AS BLOB)",
        "UPDATE batch SET bits = x'00000000'",
        "UPDATE properties SET packed = x'80'",
        "DELETE FROM properties",
    ],
)
async def test_a_damaged_cursor_is_reported_and_can_be_deleted(file: Place, damage: str) -> None:
    for name in (NAME, "whole"):
        await create(file.store, name)
        await change(file.store, fill, name)
    whole = await contents(file.store, "whole")
    await file.close()
    path = str(file.path)
    with apsw.Connection(path) as db:
        cursor = "(SELECT id FROM cursor WHERE name = 'cursor')"
        where = "AND" if "WHERE" in damage else "WHERE"
        db.execute(f"{damage} {where} cursor = {cursor}")
        assert db.changes() > 0
    db.close()
    await file.open()
    with pytest.raises(CursorCorrupt) as caught:
        await contents(file.store)
    assert caught.value.reason == "CURSOR_CORRUPT"
    with pytest.raises(CursorCorrupt):
        await change(file.store, _contents)
    assert await contents(file.store, "whole") == whole
    await file.store.delete(TOPIC, NAME)
    await create(file.store)
    assert (await contents(file.store)).pages == []


async def test_attached_properties_are_read_only_on_request(file: Place) -> None:
    """Damaged or missing properties are noticed only then."""
    await create(file.store)
    await change(file.store, lambda state: state.mark_delete(Position(1, 7), {"k": "v"}, ANYBODY))
    await change(
        file.store, lambda state: state.update_properties({"own": "1"}, [], ANYBODY, clear=False)
    )
    whole = (await contents(file.store)).head
    await file.close()
    with apsw.Connection(str(file.path)) as db:
        digest = "(SELECT mark_digest FROM cursor)"
        db.execute(f"DELETE FROM properties WHERE digest = {digest}")
        assert db.changes() == 1
    db.close()
    await file.open()
    with pytest.raises(CursorCorrupt):
        await contents(file.store)
    bare = await file.store.look(TOPIC, NAME, _contents, whole=False)
    assert bare.head == replace(whole, mark_delete_properties={})


async def test_a_cursor_reads_alike_without_attached_properties(store: CursorStore) -> None:
    await create(store)
    await change(store, fill)
    whole = await contents(store)
    assert whole.head.mark_delete_properties
    bare = await store.look(TOPIC, NAME, _contents, whole=False)
    assert bare == whole._replace(head=replace(whole.head, mark_delete_properties={}))
    assert await contents(store) == whole


async def test_a_reset_forgets_damaged_pages(file: Place) -> None:
    await create(file.store)
    await change(file.store, fill)
    await file.close()
    with apsw.Connection(str(file.path)) as db:
        db.execute("UPDATE page SET bits = x'00'")
    db.close()
    await file.open()
    await change(file.store, lambda state: state.reset(Position(1, 0), Caller(epoch=4)))
    assert (await contents(file.store)).pages == []


async def test_properties_evicted_from_the_cache_are_read_again(
    file: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "PROPERTIES_HELD_BYTES_MAX", 100)
    marked = {name: {f"{name}{i}": "x" * i for i in range(40)} for name in "abcd"}

    def marking(properties: dict[str, str]) -> Change:
        def step(state: CursorState) -> None:
            state.head.mark_delete_properties = state.head.properties = properties

        return step

    for name, properties in marked.items():
        await create(file.store, name)
        await change(file.store, marking(properties), name)
    for name, properties in marked.items():
        head = (await contents(file.store, name)).head
        assert head.mark_delete_properties == head.properties == properties


async def test_pages_beyond_the_memory_limit_are_written_early(
    file: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holes, "PAGES", holes.PAGES._replace(held_max=2))
    held: list[int] = []

    def step(state: CursorState) -> None:
        for ledger in range(1, 10):
            state.acknowledge([Range(Position(ledger, 1), 3)], [], Caller())
            assert isinstance(state.holes, holes.TableHoles)
            held.append(len(state.holes._pages._values))

    await create(file.store)
    await change(file.store, step)
    assert max(held) == 2
    assert len((await contents(file.store)).pages) == 9


async def test_stored_properties_are_copies(file: Place) -> None:
    given = {"a": "1"}

    def step(state: CursorState) -> None:
        state.head.mark_delete_properties = given

    await create(file.store)
    await change(file.store, step)
    given["a"] = "2"
    assert (await contents(file.store)).head.mark_delete_properties == {"a": "1"}


async def test_properties_are_replaced_and_do_not_accumulate(file: Place) -> None:
    await create(file.store)
    for properties in ({"a": "1"}, {"a": "2"}, {"a": "2"}, {}, {"a": "3"}):

        def step(state: CursorState, properties: dict[str, str] = properties) -> None:
            state.head.mark_delete_properties = properties
            state.head.properties = {"a": "2"}

        await change(file.store, step)
        head = (await contents(file.store)).head
        assert (head.mark_delete_properties, head.properties) == (properties, {"a": "2"})
    assert _count(file, "properties") == 2


def _count(file: Place, table: str) -> int:
    with apsw.Connection(str(file.path)) as db:
        ((count,),) = db.execute(f"SELECT count(*) FROM {table}").fetchall()
    db.close()
    assert isinstance(count, int)
    return count


async def test_rows_of_deleted_cursors_are_removed_in_small_steps(
    file: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the process that deleted them stopped before."""
    monkeypatch.setattr(tables, "REMOVE_ROWS_MAX", 2)
    for name in "abc":
        await create(file.store, name)
        await change(file.store, put_batches, name)
        await change(file.store, fill, name)
    await file.store.delete(TOPIC, "a")
    await file.close()
    with apsw.Connection(str(file.path)) as db:
        db.execute("UPDATE cursor SET topic = NULL WHERE name = 'b'")
    db.close()
    await file.open()
    assert _count(file, "cursor") == 1
    assert _count(file, "batch") == len(BATCHES) + 1
    assert _count(file, "attempt") == len(BATCHES) + 1
    assert (_count(file, "page"), _count(file, "properties")) == (2, 2)


async def test_a_step_receives_the_time(tmp_path: Path) -> None:
    clock = SteadyClock()
    async with open_sqlite_store(tmp_path / "cursor.db", clock=clock) as store:
        await create(store)
        earliest = clock()
        told = await store.change(TOPIC, NAME, lambda _, now_ms: now_ms)
        assert earliest <= told <= store.now_ms() <= clock()
        assert (await store.cursors(None, after=("", ""), limit=1))[0].created_ms <= told


async def test_a_full_store_changes_nothing_and_shrinks_after_deletions(
    tmp_path: Path, seed: int
) -> None:
    random = Random(seed)

    def grow(state: CursorState) -> None:
        for number in range(100):
            state.holes.put_page(1, number, random.getrandbits(PAGE_ENTRIES))

    async with open_sqlite_store(tmp_path / "cursor.db", size_max_bytes=400_000) as store:
        await create(store)
        await change(store, fill)
        before = await contents(store)
        with pytest.raises(StoreFull):
            await change(store, grow)
        assert await contents(store) == before
        await change(store, _mark)
        await store.delete(TOPIC, NAME)


@pytest.mark.parametrize(
    "spoil",
    [
        "PRAGMA user_version = 99",
        "PRAGMA user_version = 0",
        "PRAGMA application_id = 1",
        "PRAGMA application_id = 0",
    ],
)
async def test_a_database_of_another_layout_is_refused(file: Place, spoil: str) -> None:
    await file.close()
    with apsw.Connection(str(file.path)) as db:
        db.execute(spoil)
    db.close()
    with pytest.raises(StoreUnavailable):
        await file.open()


async def test_a_database_of_another_application_is_refused(tmp_path: Path) -> None:
    async with open_ledger_store(tmp_path / "ledger.db"):
        pass
    with apsw.Connection(str(tmp_path / "any.db")) as db:
        db.execute("CREATE TABLE anything (at_all)")
    db.close()
    for name in ("ledger.db", "any.db"):
        with pytest.raises(StoreUnavailable):
            await Place(tmp_path / name).open()


async def test_only_the_cursor_that_was_created_then_is_deleted(store: CursorStore) -> None:
    """Its deletion may be decided before another one gets its name."""
    head = await create(store)
    with pytest.raises(CursorNotFound):
        await store.delete(TOPIC, NAME, created_ms=head.created_ms + 1)
    assert await store.cursors(TOPIC, after=("", ""), limit=9)
    await store.delete(TOPIC, NAME, created_ms=head.created_ms)
    assert await store.cursors(TOPIC, after=("", ""), limit=9) == []
