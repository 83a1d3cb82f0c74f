"""kill -9 at every named point of the publish path: no message is lost or stored twice."""

import asyncio
from signal import SIGKILL
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.faults.world import REPLAY_PAGE_ENTRIES, World
from tests.support.application import Application
from tests.support.crash_points import DEDUP_VERBS, STORE_VERBS, Order
from tests.support.depth import some_of

MESSAGES = 120
"""Messages per producer and round."""

AROUND = ("before", "after")


def points(*verbs: str) -> list[str]:
    return [f"{verb}.{when}" for verb in verbs for when in AROUND]


LEDGER_POINTS = points(
    *(verb for verb in STORE_VERBS if verb != "replay"), *DEDUP_VERBS, "receipts"
)
DEDUP_POINTS = points(*DEDUP_VERBS)


async def publish_through(
    world: World, application: Application, service: str, order: Order, *dying: str
) -> None:
    """Publish until the order has been carried out, then once more when everything runs again."""
    world.order(service, order)
    dead: asyncio.Future[Any] = asyncio.gather(*(world.stack.ended(name) for name in dying))
    publishing: asyncio.Future[Any] = asyncio.create_task(application.publish(MESSAGES))
    while not dead.done():
        await asyncio.wait([dead, publishing], return_when=asyncio.FIRST_COMPLETED)
        if publishing.done():
            await publishing
            publishing = asyncio.create_task(application.publish(MESSAGES))
    assert set(await dead) == {-SIGKILL}
    for name in sorted(dying, key=["redis", "cursor", "dedup", "ledger"].index):
        await world.stack.run(name)
    await publishing
    await application.check_log()
    await application.publish(MESSAGES)
    await application.check_log()
    await application.check_state()


@pytest.mark.parametrize("point", some_of(LEDGER_POINTS, every=8))
async def test_messages_are_stored_once_if_the_ledger_dies_at(
    world: World, point: str, seed: int
) -> None:
    verb = point.split(".", maxsplit=1)[0]
    passes = 0 if verb in ("take", "rollback", "confirm") else 2  # these may be passed only once
    await publish_through(world, world.application(seed), "ledger", Order(point, passes), "ledger")


@pytest.mark.parametrize("point", some_of(DEDUP_POINTS, every=8))
async def test_messages_are_stored_once_if_dedup_dies_at(
    world: World, point: str, seed: int
) -> None:
    passes = 2 if point.startswith("admit") else 0
    await publish_through(world, world.application(seed), "dedup", Order(point, passes), "dedup")


@pytest.mark.parametrize("point", some_of(DEDUP_POINTS, every=8))
async def test_messages_are_stored_once_if_redis_dies_when_dedup_is_at(
    world: World, point: str, seed: int
) -> None:
    passes = 2 if point.startswith("admit") else 0
    order = Order(point, passes, [world.pid("redis")])
    await publish_through(world, world.application(seed), "dedup", order, "redis")


@pytest.mark.parametrize("point", some_of(points("append", "admit"), every=8))
async def test_messages_are_stored_once_if_everything_dies_when_the_ledger_is_at(
    world: World, point: str, seed: int
) -> None:
    everything = ("redis", "dedup", "ledger")
    order = Order(point, 2, [world.pid(name) for name in everything])
    await publish_through(world, world.application(seed), "ledger", order, *everything)


@pytest.mark.parametrize("service", ["ledger", "dedup"])
@pytest.mark.parametrize("when", AROUND)
async def test_messages_are_stored_once_if_a_replay_is_interrupted_between_pages(
    world: World, service: str, when: str, seed: int
) -> None:
    application = world.application(seed)
    await application.publish(MESSAGES)
    # At least as many entries as the unbatched producer has.
    assert MESSAGES > 2 * REPLAY_PAGE_ENTRIES
    async with Redis.from_url(world.stack.redis_url) as redis:
        await redis.flushall()
    await publish_through(world, application, service, Order(f"confirm.{when}", 1), service)


@pytest.mark.parametrize("when", AROUND)
async def test_messages_are_stored_once_if_the_ledger_dies_during_a_replay(
    world: World, when: str, seed: int
) -> None:
    application = world.application(seed)
    await application.publish(MESSAGES)
    async with Redis.from_url(world.stack.redis_url) as redis:
        await redis.flushall()
    await publish_through(world, application, "ledger", Order(f"replay.{when}", 1), "ledger")
