"""kill -9 at every step of a move, of whoever takes part, under load: the topic is in one place,
and nothing is lost, doubled or reordered."""

import asyncio
import os
from collections.abc import AsyncIterator
from random import Random
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest
from grpc import StatusCode, aio

from tests.faults.world import World
from tests.integration.refusals import refused
from tests.support.application import Application
from tests.support.crash_points import Order
from tests.support.delivering import Group, all_acknowledged, load
from tests.support.delivery_checkers import check
from tests.support.placing import Instances, instances_of
from tests.support.waiting import eventually

MESSAGES = 60
"""How many each producer publishes a round."""

ENVIRONMENT = {
    "SEQGATE_DISPATCHER_LEASE_S": "0.5",
    "SEQGATE_DISPATCHER_CALL_TIMEOUT_S": "0.5",
    "SEQGATE_LEDGER_KEEPALIVE_S": "1",
    "SEQGATE_LEDGER_FOLLOW_POLL_S": "0.1",
}

KEEPER, SOURCE, TARGET = "", "-1", "-2"
"""By the names of their processes: ledger, ledger-1, ledger-2."""


def points(*verbs: str) -> list[str]:
    return [f"{verb}.{when}" for verb in verbs for when in ("before", "after")]


STEPS = [
    *((SOURCE, point) for point in points("seal", "send", "place", "locate", "forget")),
    *((TARGET, point) for point in points("stage", "received", "show")),
    *((KEEPER, point) for point in points("place")),
]
"""Who dies, and where."""


@pytest.fixture(scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Three instances: the keeper takes no part in the moves."""
    world = World(tmp_path_factory.mktemp("moves"), instances=3, **ENVIRONMENT)
    async with world.stack:
        yield world


@pytest.fixture(scope="module")
async def ledgers(world: World) -> AsyncIterator[Instances]:
    async with instances_of(world.stack, "ledger") as instances:
        yield instances


@pytest.fixture(scope="module")
async def cursors(world: World) -> AsyncIterator[Instances]:
    async with instances_of(world.stack, "cursor") as instances:
        yield instances


async def moves(instances: Instances, topic: str, to: str) -> None:
    """Move a topic; when that fails, run it again."""

    async def moved() -> bool:
        try:
            await instances.move(topic, to)
        except aio.AioRpcError as error:
            if error.code() is not StatusCode.UNAVAILABLE:
                raise
            return False
        return True

    await eventually(moved, f"{topic} is moved to {to}", within_s=40)


def order_at(point: str) -> Order:
    """To die at a step. The other instance is asked twice: whether it is there, and in the end."""
    return Order(point, passes=1 if point.startswith("locate") else 0)


async def is_there_alone(instances: Instances, topic: str, name: str) -> None:
    """Wait until an instance has a topic, and no other has anything of it."""
    assert await instances.where(topic) == name

    async def alone() -> bool:
        return await instances.holding(topic) == [name]

    await eventually(alone, f"{topic} is at {name} alone")


async def died(world: World, name: str) -> None:
    """Wait until a process has carried out its order, and start it again."""
    async with asyncio.timeout(40):
        assert await world.stack.ended(name) == -SIGKILL
    await world.stack.run(name)


async def move_under_load(
    world: World, ledgers: Instances, application: Application, to: str, dying: str, point: str
) -> None:
    """Move an application's topic while it publishes, and somebody dies at a step of that."""
    world.order(dying, order_at(point))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(application.publish(MESSAGES))
        tasks.create_task(moves(ledgers, application.topic, to))
        tasks.create_task(died(world, dying))
    await is_there_alone(ledgers, application.topic, to)
    await application.check_log()
    await application.publish(MESSAGES)
    await application.check_log()
    await application.check_state()


@pytest.mark.parametrize(("who", "point"), STEPS)
async def test_a_log_moves_while_somebody_dies_at(
    world: World, ledgers: Instances, who: str, point: str, seed: int
) -> None:
    application = world.application(seed)
    await application.publish(MESSAGES)
    await moves(ledgers, application.topic, f"ledger{SOURCE}")
    await move_under_load(world, ledgers, application, f"ledger{TARGET}", f"ledger{who}", point)


@pytest.mark.parametrize("point", points("seal", "place", "forget"))
async def test_a_log_leaves_the_keeper_while_that_dies_at(
    world: World, ledgers: Instances, point: str, seed: int
) -> None:
    application = world.application(seed)
    await application.publish(MESSAGES)
    await moves(ledgers, application.topic, "ledger")
    await move_under_load(world, ledgers, application, "ledger-1", "ledger", point)


@pytest.mark.parametrize("point", points("show"))
async def test_a_log_comes_to_the_keeper_while_that_dies_at(
    world: World, ledgers: Instances, point: str, seed: int
) -> None:
    application = world.application(seed)
    await application.publish(MESSAGES)
    await moves(ledgers, application.topic, "ledger-1")
    await move_under_load(world, ledgers, application, "ledger", "ledger", point)


@pytest.mark.parametrize(("who", "point"), [each for each in STEPS if each[1].endswith("after")])
async def test_cursors_move_while_somebody_dies_at(
    world: World, cursors: Instances, who: str, point: str, seed: int
) -> None:
    topic = f"public/default/cursors{who}-{point}"
    group = Group(topic, [world.stack.address("dispatcher")], Random(seed))
    async with group.running():
        async with load(world.stack, topic):
            await group.given(20)
            await moves(cursors, topic, f"cursor{SOURCE}")
            dying = f"cursor{who}"
            world.order(dying, order_at(point))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(moves(cursors, topic, f"cursor{TARGET}"))
                tasks.create_task(died(world, dying))
            await is_there_alone(cursors, topic, f"cursor{TARGET}")
            await group.given(20)
        published = await all_acknowledged(world.stack, topic)
    check(group.history, published)


async def test_logs_and_cursors_go_back_and_forth_under_load(
    world: World, ledgers: Instances, cursors: Instances, seed: int
) -> None:
    random = Random(seed)
    topic = "public/default/back-and-forth"
    application = world.application(seed)
    group = Group(topic, [world.stack.address("dispatcher")], random)
    async with group.running():
        async with load(world.stack, topic):
            await group.given(10)
            for _ in range(6):
                await application.publish(10)
                for instances in (ledgers, cursors):
                    await moves(instances, topic, random.choice(instances.names))
                await moves(ledgers, application.topic, random.choice(ledgers.names))
                await group.given(10)
        published = await all_acknowledged(world.stack, topic)
    check(group.history, published)
    await application.check_log()
    await application.publish(MESSAGES)
    await application.check_state()


async def test_a_target_that_stands_still_costs_a_pause_and_no_more(
    world: World, ledgers: Instances, seed: int
) -> None:
    application = world.application(seed)
    await application.publish(MESSAGES)
    await moves(ledgers, application.topic, "ledger-1")
    world.order("ledger-2", Order("stage.before", number=SIGSTOP))
    try:
        with refused(StatusCode.UNAVAILABLE, "MOVE_FAILED"):
            await ledgers.move(application.topic, "ledger-2")
        await application.publish(MESSAGES)
    finally:
        os.kill(world.pid("ledger-2"), SIGCONT)
    await application.check_log()
    await moves(ledgers, application.topic, "ledger-2")
    await is_there_alone(ledgers, application.topic, "ledger-2")
    await application.publish(MESSAGES)
    await application.check_log()
    await application.check_state()
