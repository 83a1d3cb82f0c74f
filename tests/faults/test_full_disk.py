"""The store refuses writes: producers wait, and no acknowledged message is lost or duplicated."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.faults.world import World
from tests.support.application import Application
from tests.support.crash_points import FILE_BYTES_MAX

MESSAGES = 120
ROUNDS_MAX = 100
STORE_BYTES_MAX = 400_000


async def publish_until_full(
    application: Application, log: Path, sign: str
) -> "asyncio.Task[None]":
    """Publish rounds until the service's log contains the sign. Returns the round in progress."""
    for _ in range(ROUNDS_MAX):
        publishing = asyncio.create_task(application.publish(MESSAGES))
        while not publishing.done():
            await asyncio.sleep(0.01)
            if sign in log.read_text():
                return publishing
        await publishing
    raise AssertionError("the disk never was full")


@pytest.mark.parametrize(
    ("environment", "sign"),
    [
        # SQLite's limit on pages.
        ({"SEQGATE_LEDGER_STORE_BYTES_MAX": str(STORE_BYTES_MAX)}, "STORE_FULL"),
        # The kernel's limit on file sizes: a write of SQLite fails midway.
        ({FILE_BYTES_MAX: str(STORE_BYTES_MAX)}, "STORE_"),
    ],
    ids=["the store's own bound", "the kernel refuses"],
)
async def test_messages_that_await_disk_space_are_stored_once(
    tmp_path: Path, seed: int, environment: dict[str, Any], sign: str
) -> None:
    world = World(tmp_path / "world", **environment)
    async with world.stack:
        application = world.application(seed)
        log = world.stack.folder / "logs" / "ledger.log"
        publishing = await publish_until_full(application, log, sign)
        told = len(application.history.acknowledged)
        await world.stack.terminate("ledger")
        for name in environment:  # the same service, with space again
            del world.stack.environment[name]
        await world.stack.run("ledger")
        await publishing
        assert len(application.history.acknowledged) > told
        await application.publish(MESSAGES)
        await application.check_log()
        await application.check_state()
