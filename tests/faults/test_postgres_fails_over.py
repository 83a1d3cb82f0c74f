"""Three nodes of PostgreSQL whose primary is killed under load: what was acknowledged is on the
standby that is promoted, once and in order."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest

from seqgate.services.cursor.adapters.postgres import PostgresCursorStore
from seqgate.services.cursor.adapters.postgres import open_postgres_store as open_cursor_store
from seqgate.services.cursor.core.cursor import Caller, CursorState, Range
from seqgate.services.errors import Fenced, StoreUnavailable
from seqgate.services.ledger.adapters.postgres import PostgresLedgerStore, open_postgres_store
from seqgate.services.runtime.postgres import Server
from seqgate.types import Position, TopicName
from tests.support.entries import single
from tests.support.waiting import eventually
from tools.stack.postgres_cluster import PostgresCluster

T = TypeVar("T")

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

TOPICS = [TopicName.parse(f"public/default/fail-over-{number}") for number in range(4)]
WRITERS = 8
BLOCKS_A_TAKE = 20
"""After so many blocks a writer takes another topic from its writer."""

PAUSE_MAX_S = 60.0
"""The longest time without an acknowledgement, on a busy machine."""


USED = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'seqgate'"
"""The connections that a store uses; those that it refuses have no name yet."""


ALL_WAIT = """SELECT count(*) > 0 AND bool_and(wait_event IN ('SyncRep', 'transactionid', 'tuple'))
    FROM pg_stat_activity WHERE application_name = 'seqgate' AND state = 'active'"""
"""Whether commits wait for a standby, and all other work for them."""


class Load:
    """Writers on two stores, as of two processes, that take each other's topics."""

    def __init__(self, stores: list[PostgresLedgerStore]) -> None:
        self._stores = stores
        self.acknowledged: dict[TopicName, set[int]] = {topic: set() for topic in TOPICS}
        self.unknown: dict[TopicName, set[int]] = {topic: set() for topic in TOPICS}
        self.last_s = time.monotonic()
        self.longest_s = 0.0
        self._is_over = False
        self._number = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            for number in range(WRITERS):
                tasks.create_task(self._write(number))
            await self.progress()
            yield
            await self.progress()
            self._is_over = True

    async def progress(self, blocks: int = 200) -> None:
        enough = self.count + blocks
        await eventually(lambda: self.count >= enough, "appends go on", within_s=PAUSE_MAX_S)

    @property
    def count(self) -> int:
        return sum(map(len, self.acknowledged.values()))

    async def _write(self, number: int) -> None:
        store = self._stores[number % len(self._stores)]
        while not self._is_over:
            number += 1
            topic = TOPICS[number % len(TOPICS)]
            try:
                state = await store.take(topic, create=True)
                await self._append(store, topic, state.ledger_id, state.tail)
            except Fenced:
                continue
            except StoreUnavailable:
                await asyncio.sleep(0.05)

    async def _append(
        self, store: PostgresLedgerStore, topic: TopicName, ledger_id: int, tail: Position | None
    ) -> None:
        for entry_id in range(BLOCKS_A_TAKE):
            self._number = each = self._number + 1
            try:
                await store.append(topic, ledger_id, tail, [single(each)], 1)
            except StoreUnavailable:
                self.unknown[topic].add(each)
                raise
            now_s = time.monotonic()
            self.longest_s = max(self.longest_s, now_s - self.last_s)
            self.last_s = now_s
            self.acknowledged[topic].add(each)
            tail = Position(ledger_id, entry_id)

    async def check(self) -> None:
        """Every acknowledged block is there once; nothing else but what is unknown; each ledger's
        entries are consecutive."""
        for topic in TOPICS:
            found = await self._stores[0].read(
                topic, None, entries_max=10**6, bytes_max=10**9, payloads=False
            )
            ids = [each.entry.lowest for each in found]
            assert len(ids) == len(set(ids)), "stored twice"
            assert self.acknowledged[topic] - set(ids) == set(), "lost"
            assert set(ids) - self.acknowledged[topic] <= self.unknown[topic], "never sent"
            places = [each.position for each in found]
            for before, after in pairwise(places):
                assert after in (
                    before._replace(entry_id=before.entry_id + 1),
                    Position(after.ledger_id, 0),
                )
                assert after > before


@asynccontextmanager
async def loaded(folder: Path) -> AsyncIterator[tuple[PostgresCluster, Load]]:
    async with PostgresCluster(folder, is_lasting=False) as cluster:
        server = Server(cluster.url(), writers=4, readers=2, needs_standby=True)
        async with (
            open_postgres_store(server, migrates=True) as one,
            open_postgres_store(server, migrates=True) as other,
        ):
            load = Load([one, other])
            async with load.running():
                yield cluster, load
            await load.check()


async def test_a_killed_primary_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    async with loaded(tmp_path) as (cluster, load):
        old = cluster.primary
        await cluster.kill(old)
        await cluster.promote()
        await load.progress()
        await cluster.return_as_standby(old)
        await load.progress()
    assert load.longest_s < PAUSE_MAX_S


async def test_a_primary_that_was_replaced_and_comes_back_is_not_used(tmp_path: Path) -> None:
    """It would even commit alone."""
    async with loaded(tmp_path) as (cluster, load):
        old = cluster.primary
        await cluster.kill(old)
        await cluster.promote()
        await load.progress()
        await cluster.start_again(old, {"synchronous_standby_names": ""})
        second = cluster.primary
        await cluster.kill(second)  # so that the stores look for another one
        await cluster.promote()
        await cluster.return_as_standby(second)
        await load.progress(500)
        assert await cluster.ask(old, USED) == 0


async def test_a_replaced_primary_answers_no_read_of_cursors(tmp_path: Path) -> None:
    """It still has what the new one no longer has: a dispatcher would deliver again what is
    acknowledged."""
    topic = TOPICS[0]

    def acknowledge(state: CursorState, _: int) -> None:
        state.acknowledge([Range(Position(1, 0), 0)], [], Caller())

    async def marks(store: PostgresCursorStore) -> list[Position | None]:
        """What a service answers, by each of its reads."""
        head = await store.look(topic, "s", lambda state: state.head)
        (listed,) = await store.cursors(topic, after=("", ""), limit=2)
        return [head.mark_delete, listed.mark_delete]

    async with PostgresCluster(tmp_path, is_lasting=False) as cluster:
        server = Server(cluster.url(), needs_standby=True)
        async with (
            open_cursor_store(server, migrates=True) as one,
            open_cursor_store(server, migrates=True) as other,
        ):
            await one.create(topic, "s", mark_delete=None, properties={})
            assert await marks(other) == [None, None]
            old = cluster.primary
            await cluster.pause(old)
            await cluster.promote()
            cluster.resume(old)
            await insisted(lambda: one.change(topic, "s", acknowledge))
            assert await cluster.ask(old, USED), "the other one has noticed nothing"
            assert await insisted(lambda: marks(other)) == [Position(1, 0)] * 2


async def test_a_replaced_primary_says_of_no_topic_that_it_is_gone(tmp_path: Path) -> None:
    """It may have been recreated, and its cursors would be deleted."""
    topic = TOPICS[0]
    async with PostgresCluster(tmp_path, is_lasting=False) as cluster:
        server = Server(cluster.url(), needs_standby=True)
        async with (
            open_postgres_store(server, migrates=True) as one,
            open_postgres_store(server, migrates=True) as other,
        ):
            await one.create(topic)
            await one.delete(topic, leaves_cursors=True)
            assert await other.is_leaving(topic)
            old = cluster.primary
            await cluster.pause(old)
            await cluster.promote()
            cluster.resume(old)
            await insisted(lambda: one.create(topic))
            assert await cluster.ask(old, USED), "the other one has noticed nothing"
            assert not await insisted(lambda: other.is_leaving(topic))


async def insisted(call: Callable[[], Awaitable[T]]) -> T:
    """The result of a call, repeated while the store is unavailable."""
    async with asyncio.timeout(PAUSE_MAX_S):
        while True:
            try:
                return await call()
            except StoreUnavailable:
                await asyncio.sleep(0.05)


async def test_appends_wait_while_no_standby_answers(tmp_path: Path) -> None:
    async with loaded(tmp_path) as (cluster, load):
        standbys = list(cluster.standbys)
        for name in standbys:
            await cluster.pause(name)

        async def all_wait() -> bool:
            return bool(await cluster.ask(cluster.primary, ALL_WAIT))

        await eventually(all_wait, "commits wait")
        before = load.count
        for _ in range(20):
            assert await all_wait()
        assert load.count == before, "acknowledged without a standby"
        cluster.resume(standbys[0])
        await load.progress()
        cluster.resume(standbys[1])
