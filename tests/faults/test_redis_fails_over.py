"""Another Redis takes over, behind Sentinels and in a cluster: producers notice only latency."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from seqgate.services.dedup.adapters.keys import topic_key
from seqgate.types import TopicName
from tests.faults.world import World
from tests.support.application import Application
from tests.support.redis_groups import (
    SLOTS,
    Cluster,
    Sentinels,
    command,
    info,
    slot_of,
    standing_still,
)
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(600)  # each test waits for several state changes

MESSAGES = 50
TIMEOUTS: dict[str, Any] = {
    "SEQGATE_DEDUP_REDIS_TIMEOUT_S": "1",
    "SEQGATE_LEDGER_DEDUP_TIMEOUT_S": "2",
}


@pytest_asyncio.fixture(scope="module")
async def behind_sentinels(
    sentinels: Sentinels, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("behind-sentinels")
    world = World(folder, SEQGATE_DEDUP_REDIS_URL=sentinels.url, **TIMEOUTS)
    async with world.stack:
        yield world


@pytest_asyncio.fixture(scope="module")
async def in_cluster(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("in-cluster")
    world = World(folder, SEQGATE_DEDUP_REDIS_URL=cluster.url, **TIMEOUTS)
    async with world.stack:
        yield world


class Publishing:
    """An application that publishes until it is stopped."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self._enough = False
        self._task = asyncio.create_task(self._publish())

    async def _publish(self) -> None:
        while not self._enough:
            await self.application.publish(MESSAGES)

    async def some(self) -> None:
        """Return when more messages are acknowledged."""
        known = len(self.application.history.acknowledged)

        def more() -> bool:
            assert not self._task.done()
            return len(self.application.history.acknowledged) >= known + MESSAGES

        await eventually(more, "messages are acknowledged")

    async def judge(self) -> None:
        """Stop, then check the log and the state."""
        self._enough = True
        await self._task
        await self.application.publish(MESSAGES)
        await self.application.check_log()
        await self.application.check_state()


def in_slots(world: World, slots: range, seed: int) -> Application:
    """An application whose topic is in one of these slots."""
    while True:
        application = world.application(seed)
        if slot_of(topic_key(TopicName.parse(application.topic))) in slots:
            return application


async def written_without_replica(server: RedisServer) -> int:
    """Disconnect the suspended replica. Returns the offset of a write that it does not get."""

    def written() -> int:
        return int(info(server, "replication")["master_repl_offset"])

    command(server, "CLIENT", "KILL", "TYPE", "REPLICA")
    before = written()
    await eventually(lambda: written() > before, "something is written")
    return written()


async def test_messages_are_stored_once_if_a_dead_masters_successor_lacks_the_newest_writes(
    behind_sentinels: World, sentinels: Sentinels, seed: int
) -> None:
    sentinels.settle()
    publishing = Publishing(behind_sentinels.application(seed))
    await publishing.some()
    old, new = sentinels.master, sentinels.replica
    with standing_still(new):
        written = await written_without_replica(old)
        await publishing.some()
        old.kill()
    await eventually(lambda: sentinels.master is new, "the replica takes over")
    assert info(new, "replication")["second_repl_offset"] <= written
    await publishing.some()
    old.start()
    await publishing.some()
    await publishing.judge()
    sentinels.settle()


async def test_messages_are_stored_once_if_a_healthy_master_is_replaced(
    behind_sentinels: World, sentinels: Sentinels, seed: int
) -> None:
    sentinels.settle()
    publishing = Publishing(behind_sentinels.application(seed))
    await publishing.some()
    old = sentinels.master
    await sentinels.fail_over()
    await publishing.some()
    # Until then the old master accepts the latest writes, and loses them.
    await eventually(lambda: info(old, "replication")["role"] == "slave", "the old one follows")
    await publishing.judge()
    sentinels.settle()


async def test_messages_are_stored_once_if_a_dead_primarys_successor_lacks_the_newest_writes(
    in_cluster: World, cluster: Cluster, seed: int
) -> None:
    cluster.settle()
    publishing = Publishing(in_slots(in_cluster, range(SLOTS // 3), seed))
    await publishing.some()
    old = cluster.owner(0)
    (new,) = (each for each in cluster.servers if each not in cluster.owners())
    with standing_still(new):
        written = await written_without_replica(old)
        await publishing.some()
        old.kill()
    await eventually(lambda: cluster.owner(0) is new, "the replica takes over")
    assert info(new, "replication")["second_repl_offset"] <= written
    await publishing.some()
    old.start()
    await publishing.judge()
    cluster.settle()


async def test_messages_are_stored_once_while_a_slot_moves_there_and_back(
    in_cluster: World, cluster: Cluster, seed: int
) -> None:
    cluster.settle()
    application = in_slots(in_cluster, range(SLOTS // 3, SLOTS), seed)
    slot = slot_of(topic_key(TopicName.parse(application.topic)))
    source = cluster.owner(slot)
    (target,) = (each for each in cluster.primaries[1:] if each is not source)
    publishing = Publishing(application)
    await publishing.some()
    for home in (target, source):
        for _ in cluster.move_slot(slot, home):
            await publishing.some()
    await publishing.judge()
    cluster.settle()
