"""Interrupted snapshots, and recoveries from them: no message is lost or stored twice."""

import asyncio
from collections.abc import AsyncIterator
from signal import SIGKILL

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from tests.faults.test_crash_points import MESSAGES, points, publish_through
from tests.faults.world import World
from tests.support.crash_points import RECOVERY_VERBS, SNAPSHOT_VERBS, Order
from tests.support.depth import some_of

OFTEN = "[cluster]\nsnapshot_entries = 5\nsnapshot_interval_s = 0\n"


@pytest_asyncio.fixture(scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """One stack that takes snapshots continuously."""
    made = World(tmp_path_factory.mktemp("snapshots"), policies=OFTEN)
    async with made.stack:
        yield made


async def flush(world: World) -> None:
    async with Redis.from_url(world.stack.redis_url) as redis:
        await redis.flushall()


async def judge(world: World, seed: int) -> None:
    """Check that messages published across a flush are stored once, by a state from a snapshot."""
    application = world.application(seed)
    await application.publish(MESSAGES)
    await flush(world)
    await application.publish(MESSAGES)
    await application.check_log()
    await application.check_state()


@pytest.mark.parametrize("point", some_of(points(*SNAPSHOT_VERBS), every=8))
async def test_messages_are_stored_once_if_dedup_dies_in_a_snapshot(
    world: World, point: str, seed: int
) -> None:
    await publish_through(world, world.application(seed), "dedup", Order(point, 2), "dedup")
    await judge(world, seed)


@pytest.mark.parametrize("point", some_of(points("mark_delete", "get"), every=8))
async def test_publishing_continues_if_the_cursor_service_dies_in_a_snapshot(
    world: World, point: str, seed: int
) -> None:
    """Publishers do not notice, and the next snapshots are taken."""
    application = world.application(seed)
    world.order("dedup", Order(point, 2, [world.pid("cursor")]))
    ended = asyncio.create_task(world.stack.ended("cursor"))
    while not ended.done():
        await application.publish(MESSAGES)
    assert await ended == -SIGKILL
    await application.publish(MESSAGES)
    await application.check_log()
    await world.stack.run("cursor")
    await application.publish(MESSAGES)
    await flush(world)
    await application.publish(MESSAGES)
    await application.check_log()
    await application.check_state()


@pytest.mark.parametrize("victim", ["dedup", "cursor", "redis"])
@pytest.mark.parametrize("point", some_of(points(*RECOVERY_VERBS), every=8))
async def test_messages_are_stored_once_if_a_recovery_is_interrupted(
    world: World, point: str, victim: str, seed: int
) -> None:
    application = world.application(seed)
    await application.publish(MESSAGES)
    await flush(world)
    pids = [world.pid(victim)]
    await publish_through(world, application, "dedup", Order(point, 0, pids), victim)


async def test_messages_are_stored_once_if_everything_dies_in_a_snapshot(
    world: World, seed: int
) -> None:
    application = world.application(seed)
    # The process that carries out the order is killed last.
    everything = ("cursor", "ledger", "redis", "dedup")
    order = Order("mark_delete.after", 2, [world.pid(name) for name in everything])
    await publish_through(world, application, "dedup", order, *everything)
    await judge(world, seed)
