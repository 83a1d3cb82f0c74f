"""Two cursor services on one PostgreSQL database: each has connections and a clock of its own."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import Any, NamedTuple

import asyncpg
import pytest
import pytest_asyncio

from seqgate.services.cursor.adapters.postgres import PostgresCursorStore, open_postgres_store
from seqgate.services.cursor.core.cursor import (
    BatchAck,
    Caller,
    CursorState,
    LeaseHeld,
    Range,
    Succession,
)
from seqgate.services.cursor.core.state import Lease
from seqgate.services.cursor.ports import CursorNotFound
from seqgate.services.errors import Fenced, StoreUnavailable
from seqgate.services.runtime.postgres import PostgresTransaction, Server
from seqgate.types import Position, TopicName
from tests.support.depth import times
from tests.support.postgres_server import PostgresServer, admin, empty_database

TOPIC = TopicName.parse("test/cursors/shared")
NAME = "cursor"
FAR_MS = 10 * 366 * 24 * 3_600_000
STEPS = 200


class Pair(NamedTuple):
    """Two stores, with clocks that are ten years apart, and the URL of their database."""

    one: PostgresCursorStore
    two: PostgresCursorStore
    url: str
    clocks_ms: list[int]


@pytest_asyncio.fixture
async def pair(postgres: PostgresServer) -> AsyncIterator[Pair]:
    url = await empty_database(postgres, "cursor_tests")
    server = Server(url, writers=4, readers=2)
    clocks_ms = [FAR_MS, 0]
    async with (
        open_postgres_store(server, migrates=True, clock=lambda: clocks_ms[0]) as one,
        open_postgres_store(server, migrates=True, clock=lambda: clocks_ms[1]) as two,
    ):
        yield Pair(one, two, url, clocks_ms)


async def create(store: PostgresCursorStore, name: str = NAME) -> bool:
    _, created = await store.create(TOPIC, name, mark_delete=None, properties={})
    return created


def acknowledging(entry_id: int) -> Callable[[CursorState, int], int]:
    def step(state: CursorState, _: int) -> int:
        state.acknowledge([Range(Position(1, entry_id), entry_id)], [], Caller())
        return state.head.acknowledged

    return step


async def test_concurrent_steps_of_one_cursor_are_all_kept(pair: Pair) -> None:
    await create(pair.one)
    stores = (pair.one, pair.two)
    seen = await asyncio.gather(
        *(stores[i % 2].change(TOPIC, NAME, acknowledging(2 * i + 1)) for i in range(STEPS))
    )
    assert sorted(seen) == list(range(1, STEPS + 1))
    for store in stores:
        page = await store.look(TOPIC, NAME, lambda state: state.acknowledged(None, STEPS + 1))
        assert [each.first.entry_id for each in page.ranges] == list(range(1, 2 * STEPS, 2))


async def test_a_busy_cursor_leaves_connections_to_the_others(pair: Pair) -> None:
    """A step that waits for its cursor's row holds one connection, however many queue behind it."""
    await create(pair.one)
    await create(pair.one, "other")
    async with admin(pair.url) as connection, connection.transaction():
        await connection.execute("SELECT 1 FROM cursor WHERE name = $1 FOR UPDATE", NAME)
        queued = [
            asyncio.create_task(pair.one.change(TOPIC, NAME, acknowledging(2 * i + 1)))
            for i in range(20)
        ]
        for i in range(5):
            await pair.one.change(TOPIC, "other", acknowledging(2 * i + 1))
        assert not any(each.done() for each in queued)
    assert await asyncio.gather(*queued) == list(range(1, 21))


async def test_a_cancelled_caller_takes_its_step_out_of_the_queue_unless_it_has_begun(
    pair: Pair,
) -> None:
    await create(pair.one)
    async with admin(pair.url) as connection, connection.transaction():
        await connection.execute("SELECT 1 FROM cursor WHERE name = $1 FOR UPDATE", NAME)
        steps = [
            asyncio.create_task(pair.one.change(TOPIC, NAME, acknowledging(2 * i + 1)))
            for i in range(3)
        ]
        await asyncio.sleep(0)
        for each in steps[:2]:
            each.cancel()
        await asyncio.wait(steps[:2])
    assert await steps[2] == 2  # after the first one, which had begun


async def test_a_step_that_conflicts_runs_again_and_counts_once(pair: Pair) -> None:
    await create(pair.one)
    runs = Counter[str]()

    def conflicting(state: CursorState, _: int) -> int:
        runs["all"] += 1
        state.acknowledge([Range(Position(1, 5), 6)], [], Caller())
        state.head.revision += 1
        if runs["all"] < 3:
            raise asyncpg.SerializationError("another transaction was first")
        return state.head.revision

    assert await pair.one.change(TOPIC, NAME, conflicting) == 1
    head = await pair.two.look(TOPIC, NAME, lambda state: state.head)
    assert (head.revision, head.acknowledged) == (1, 2)


async def test_the_size_of_the_tables_is_known(pair: Pair) -> None:
    await create(pair.one)
    assert await pair.two.size_bytes() >= 8_192


async def test_a_cursor_is_created_once(pair: Pair) -> None:
    stores = (pair.one, pair.two)
    created = await asyncio.gather(*(create(stores[i % 2]) for i in range(8)))
    assert sum(created) == 1


async def test_deletions_of_the_last_cursors_at_once_forget_the_ledger_ends(pair: Pair) -> None:
    names = [str(i) for i in range(8)]
    last, following = Position(1, 9), Position(2, 0)

    def note(state: CursorState, _: int) -> None:
        caller = Caller(successions=(Succession(last, following),))
        state.acknowledge([], [], caller)

    for name in names:
        await create(pair.one, name)
        await pair.one.change(TOPIC, name, note)
    stores = (pair.one, pair.two)
    await asyncio.gather(*(stores[i % 2].delete(TOPIC, name) for i, name in enumerate(names)))
    await create(pair.one)
    assert await pair.two.look(TOPIC, NAME, lambda state: state.holes.next_after(last)) is None
    async with admin(pair.url) as connection:
        assert await connection.fetchval("SELECT count(*) FROM cursor") == 1


async def test_steps_beside_deletions_and_creations_find_a_whole_cursor(pair: Pair) -> None:
    def checked(state: CursorState, _: int) -> None:
        found = sum(bits.bit_count() for _, _, bits in state.holes.pages(None))
        assert state.head.acknowledged == found
        state.acknowledge([Range(Position(1, 2 * found + 1), 2 * found + 1)], [], Caller())

    async def moving(store: PostgresCursorStore) -> None:
        for _ in range(30):
            try:
                await store.change(TOPIC, NAME, checked)
            except CursorNotFound:
                await create(store)

    async def deleting(store: PostgresCursorStore) -> None:
        for _ in range(10):
            try:
                await store.delete(TOPIC, NAME)
            except CursorNotFound:
                await create(store)

    await asyncio.gather(*(each(of) for each in (moving, deleting) for of in pair[:2]))


async def acquire(store: PostgresCursorStore, owner: str) -> Lease:
    return await store.change(
        TOPIC, NAME, lambda state, now_ms: state.acquire_lease(owner, now_ms, 1_000)
    )


async def renew(store: PostgresCursorStore, owner: str, epoch: int) -> Lease:
    return await store.change(
        TOPIC, NAME, lambda state, now_ms: state.renew_lease(owner, epoch, now_ms, 1_000)
    )


async def test_a_lease_is_judged_by_each_stores_own_clock(pair: Pair) -> None:
    def wait(ms: int) -> None:
        for i in range(2):
            pair.clocks_ms[i] += ms

    await create(pair.one)
    granted = await acquire(pair.one, "a")
    wait(999)
    with pytest.raises(LeaseHeld) as refused:
        await acquire(pair.two, "b")  # which sees it for the first time
    assert refused.value.details["remaining_ms"] == 1_000
    renewed = await renew(pair.two, "a", granted.epoch)
    assert renewed == Lease("a", granted.epoch, pair.clocks_ms[1] + 1_000, 1_000)
    wait(600)
    with pytest.raises(LeaseHeld):
        await acquire(pair.one, "b")  # which sees the renewal for the first time
    wait(400)
    taken = await acquire(pair.two, "b")
    assert taken.epoch == granted.epoch + 2
    with pytest.raises(Fenced):
        await renew(pair.one, "a", granted.epoch)
    with pytest.raises(LeaseHeld):
        await acquire(pair.one, "a")


async def test_a_store_that_starts_counts_each_lease_as_just_granted(pair: Pair) -> None:
    await create(pair.one)
    await acquire(pair.one, "dead")
    pair.clocks_ms[0] += 5_000
    clock_ms = [-FAR_MS]
    server = Server(pair.url, writers=1, readers=1)
    async with open_postgres_store(server, migrates=False, clock=lambda: clock_ms[0]) as started:
        clock_ms[0] += 999
        with pytest.raises(LeaseHeld):
            await acquire(started, "living")
        clock_ms[0] += 1
        assert (await acquire(started, "living")).owner == "living"


async def insistently(store: PostgresCursorStore, step: Callable[[CursorState, int], int]) -> None:
    """Repeat a step that may be repeated, until the store answers."""
    while True:
        try:
            await store.change(TOPIC, NAME, step)
        except StoreUnavailable:
            await asyncio.sleep(0.001)
        else:
            return


async def test_steps_are_kept_whole_while_connections_are_cut(pair: Pair) -> None:
    await create(pair.one)
    done = Counter[str]()

    async def moving(store: PostgresCursorStore, first: int) -> None:
        for entry_id in range(first, 2 * STEPS, 8):
            await insistently(store, acknowledging(entry_id))
            done["steps"] += 1

    moves = [asyncio.create_task(moving((pair.one, pair.two)[i % 2], 2 * i + 1)) for i in range(4)]
    async with admin(pair.url) as connection:
        for _ in range(times(quick=10, full=100)):
            await connection.execute(
                """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                    WHERE datname = current_database() AND pid <> pg_backend_pid()"""
            )
            wanted = done["steps"] + 1
            while done["steps"] < wanted and not all(each.done() for each in moves):
                await asyncio.sleep(0.001)
    await asyncio.gather(*moves)
    page = await pair.one.look(TOPIC, NAME, lambda state: state.acknowledged(None, 2 * STEPS))
    assert [each.first.entry_id for each in page.ranges] == list(range(1, 2 * STEPS, 2))
    assert (await pair.two.look(TOPIC, NAME, lambda state: state.head)).acknowledged == STEPS


def busy_step(state: CursorState, _: int) -> int:
    """A step that uses every table."""
    first = 100_000 * (state.head.revision + 1)
    state.record_attempts([Position(1, first + 2)], Caller())
    caller = Caller(successions=(Succession(Position(1, first), Position(2, first)),))
    state.acknowledge(
        [Range(Position(1, first + 4), first + 9)],
        [BatchAck(Position(1, first + 1), 5, (1, 2))],
        caller,
    )
    state.mark_delete(Position(1, first - 1), {"first": str(first)}, Caller())
    return state.head.revision


@pytest.mark.parametrize("is_lasting", [False, True])
async def test_every_statement_may_fail_once_or_for_ever(
    pair: Pair, is_lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call whose statement fails changes nothing, and the next one works if the database does."""
    left = [0]

    def failing(method: str) -> None:
        run = getattr(PostgresTransaction, method)

        def call(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 or (left[0] < 0 and is_lasting):
                raise asyncpg.ConnectionDoesNotExistError("cut")
            return run(*args)

        monkeypatch.setattr(PostgresTransaction, method, call)

    await create(pair.one)
    assert await pair.one.change(TOPIC, NAME, busy_step) == 1
    for method in ("rows", "change", "each"):
        failing(method)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "change": lambda: pair.one.change(TOPIC, NAME, busy_step),
        "create": lambda: pair.one.create(TOPIC, "new", mark_delete=None, properties={"a": "b"}),
        "look": lambda: pair.one.look(TOPIC, NAME, lambda state: state.acknowledged(None, 9)),
        "cursors": lambda: pair.one.cursors(TOPIC, after=("", ""), limit=9),
        "delete": lambda: pair.one.delete(TOPIC, NAME),
    }
    for name, call in calls.items():
        for at in count(1):
            left[0] = 10**9
            before = await whole(pair.two)
            left[0] = at
            try:
                await call()
            except StoreUnavailable:
                left[0] = 10**9
                after = await whole(pair.two)
                is_deleted = (
                    name == "delete" and NAME not in after
                )  # its rows are yet to be removed
                assert after == before or is_deleted
                if is_deleted:
                    break
            else:
                assert at > 1
                break
    left[0] = 10**9
    await pair.one.remove_deleted()
    assert await whole(pair.two) == {"new": (0, 0, [])}


async def whole(store: PostgresCursorStore) -> dict[str, object]:
    """All cursors, with what is acknowledged in each."""

    def look(state: CursorState) -> object:
        head = state.head
        return head.revision, head.acknowledged, list(state.acknowledged(None, 99).ranges)

    heads = await store.cursors(TOPIC, after=("", ""), limit=9)
    return {each.name: await store.look(TOPIC, each.name, look) for each in heads}
