"""Redis loses its newest writes or everything, or refuses writes: producers notice only latency."""

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.faults.world import World
from tests.support.application import Application

MESSAGES = 120


def redis(world: World) -> Redis:
    return Redis.from_url(world.stack.redis_url)


async def judge(application: Application) -> None:
    await application.publish(MESSAGES)
    await application.check_log()
    await application.check_state()


async def amid(application: Application, world: World) -> "asyncio.Task[None]":
    """Publishing that has begun and has not ended."""
    publishing = asyncio.create_task(application.publish(5 * MESSAGES))
    while len(application.history.acknowledged) < MESSAGES:
        assert not publishing.done()
        await asyncio.sleep(0.005)
    return publishing


async def test_messages_are_stored_once_if_redis_is_flushed(world: World, seed: int) -> None:
    application = world.application(seed)
    publishing = await amid(application, world)
    async with redis(world) as client:
        for _ in range(3):
            await client.flushall()
            known = len(application.history.acknowledged)
            while len(application.history.acknowledged) == known and not publishing.done():
                await asyncio.sleep(0.005)
    await publishing
    await judge(application)


async def test_messages_are_stored_once_if_redis_is_flushed_without_publishers(
    world: World, seed: int
) -> None:
    application = world.application(seed)
    await application.publish(MESSAGES)
    async with redis(world) as client:
        await client.flushall()
    await judge(application)


async def test_messages_are_stored_once_if_redis_returns_to_an_older_state_under_its_writer(
    world: World, seed: int
) -> None:
    """A lagging replica takes over: an earlier state of the same epoch."""
    application = world.application(seed)
    await application.publish(MESSAGES)
    async with redis(world) as client:
        older: dict[Any, Any] = {key: await client.dump(key) for key in await client.keys("*")}
        publishing = await amid(application, world)
        for key, value in older.items():
            await client.restore(key, 0, value, replace=True)
        await publishing
        await judge(application)
        for key, value in older.items():  # and again without publishers
            await client.restore(key, 0, value, replace=True)
    await judge(application)


async def test_messages_are_stored_once_if_an_older_copy_of_redis_is_restored(
    world: World, seed: int, tmp_path: Path
) -> None:
    application = world.application(seed)
    files = world.stack.folder / "redis"
    publishing = await amid(application, world)
    shutil.copytree(files, tmp_path / "copy")
    await publishing
    publishing = await amid(application, world)
    await world.stack.kill("redis")
    shutil.rmtree(files)
    shutil.copytree(tmp_path / "copy", files)
    await world.stack.run("redis")
    await publishing
    await judge(application)


async def test_messages_are_stored_once_if_redis_restarts_empty(world: World, seed: int) -> None:
    application = world.application(seed)
    publishing = await amid(application, world)
    await world.stack.kill("redis")
    shutil.rmtree(world.stack.folder / "redis")
    await world.stack.run("redis")
    await publishing
    await judge(application)


@pytest.mark.parametrize(
    ("setting", "refusing", "taking"),
    [("maxmemory", "1", "0"), ("min-replicas-to-write", "1", "0")],
)
async def test_messages_are_stored_once_if_redis_refuses_writes(
    world: World, seed: int, setting: str, refusing: str, taking: str
) -> None:
    application = world.application(seed)
    publishing = await amid(application, world)
    async with redis(world) as client:
        await client.config_set(setting, refusing)
        refused = (await client.info("stats"))["total_error_replies"]
        while (await client.info("stats"))["total_error_replies"] < refused + 3:
            await asyncio.sleep(0.01)
        assert not publishing.done()
        await client.config_set(setting, taking)
    await publishing
    await judge(application)


async def test_messages_are_stored_once_if_redis_is_paused_beyond_every_timeout(
    tmp_path: Path, seed: int
) -> None:
    world = World(
        tmp_path, SEQGATE_DEDUP_REDIS_TIMEOUT_S="0.2", SEQGATE_LEDGER_DEDUP_TIMEOUT_S="0.3"
    )
    async with world.stack:
        application = world.application(seed)
        publishing = await amid(application, world)
        log = tmp_path / "logs" / "ledger.log"
        os.kill(world.pid("redis"), signal.SIGSTOP)
        try:
            while "deduplication failed" not in log.read_text():
                await asyncio.sleep(0.02)
        finally:
            os.kill(world.pid("redis"), signal.SIGCONT)
        await publishing
        await judge(application)
