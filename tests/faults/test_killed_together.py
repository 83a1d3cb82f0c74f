"""kill -9 of several processes at once, at each point; and of the ledger while it takes over a
topic with a history."""

import asyncio
from contextlib import suppress
from signal import SIGKILL

import pytest

from seqgate.dev.stack import StackError
from tests.faults.test_crash_points import (
    DEDUP_POINTS,
    LEDGER_POINTS,
    MESSAGES,
    points,
    publish_through,
)
from tests.faults.world import World
from tests.support.crash_points import Order
from tests.support.depth import some_of

ONCE = ("take", "rollback", "confirm")
"""Points that may be passed only once while a topic is published to."""


def passes(point: str) -> int:
    return 0 if point.startswith(ONCE) else 1


@pytest.mark.parametrize("point", some_of(LEDGER_POINTS, every=8))
async def test_messages_are_stored_once_if_ledger_and_dedup_die_when_the_ledger_is_at(
    world: World, point: str, seed: int
) -> None:
    dying = ("dedup", "ledger")
    order = Order(point, passes(point), [world.pid(name) for name in dying])
    await publish_through(world, world.application(seed), "ledger", order, *dying)


@pytest.mark.parametrize("point", some_of(points("append", "receipts"), every=8))
async def test_messages_are_stored_once_if_dedup_dies_when_the_ledger_is_at(
    world: World, point: str, seed: int
) -> None:
    order = Order(point, passes(point), [world.pid("dedup")])
    await publish_through(world, world.application(seed), "ledger", order, "dedup")


@pytest.mark.parametrize("point", some_of(DEDUP_POINTS, every=8))
async def test_messages_are_stored_once_if_dedup_and_redis_die_when_dedup_is_at(
    world: World, point: str, seed: int
) -> None:
    dying = ("redis", "dedup")
    order = Order(point, passes(point), [world.pid(name) for name in dying])
    await publish_through(world, world.application(seed), "dedup", order, *dying)


@pytest.mark.parametrize(
    "point", some_of([each for each in LEDGER_POINTS if each.startswith(ONCE)], every=8)
)
async def test_messages_are_stored_once_if_the_ledger_dies_again_during_recovery_at(
    world: World, point: str, seed: int
) -> None:
    """The first death left open claims and unconfirmed entries; the second comes while these are
    resolved."""
    application, stack = world.application(seed), world.stack
    await application.publish(MESSAGES)
    world.order("ledger", Order("append.after", 1))
    publishing = asyncio.create_task(application.publish(MESSAGES))
    assert await stack.ended("ledger") == -SIGKILL
    world.order("ledger", Order(point))
    with suppress(StackError):  # it may die before it is ready
        await stack.run("ledger")
    assert await stack.ended("ledger") == -SIGKILL
    await stack.run("ledger")
    await publishing
    await application.check_log()
    await application.publish(MESSAGES)
    await application.check_log()
    await application.check_state()
