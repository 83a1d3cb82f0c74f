"""Requests arrive long after their callers gave up: no message is lost or duplicated."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from hashlib import sha1

import pytest
import pytest_asyncio
from grpc import aio
from redis.asyncio import Redis

from seqgate.api.ledger.v1 import ledger_pb2_grpc
from seqgate.dev.ports import free_ports
from seqgate.services.dedup.adapters.redis import script_text
from tests.faults.world import World
from tests.support.application import Application
from tests.support.depth import some_of
from tests.support.proxy import Proxy
from tests.support.publisher import publishing
from tests.support.waiting import eventually
from tests.support.workload import Book

MESSAGES = 60
TIMEOUT_S = 0.3
GROUP = 3
"""Entries of one group, so that the next group is claimed while this one is being appended."""


VERBS = ("admit", "confirm", "rollback")
SCRIPTS = {name: sha1(script_text(name).encode()).hexdigest().encode() for name in VERBS}
"""The scripts, by the names that requests give them."""


class Late:
    """A stack with a proxy between dedup and Redis."""

    def __init__(self, world: World, proxy: Proxy) -> None:
        self.world = world
        self.proxy = proxy

    async def held(self, count: int) -> None:
        """Wait until this many requests are held back."""
        await eventually(lambda: self.proxy.held == count, f"{count} requests are held")


@pytest_asyncio.fixture(scope="module")
async def late(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Late]:
    ports = dict(zip(("redis", "dedup", "ledger"), free_ports(3), strict=True))
    async with Proxy(ports["redis"]) as proxy:
        world = World(
            tmp_path_factory.mktemp("late"),
            ports=ports,
            SEQGATE_DEDUP_REDIS_URL=f"redis://127.0.0.1:{proxy.port}/0",
            SEQGATE_DEDUP_REDIS_TIMEOUT_S=str(TIMEOUT_S),
            SEQGATE_LEDGER_DEDUP_TIMEOUT_S=str(2 * TIMEOUT_S),
            SEQGATE_LEDGER_GROUP_ENTRIES_MAX=str(GROUP),
        )
        async with world.stack:
            yield Late(world, proxy)


async def judge(application: Application) -> None:
    await application.publish(MESSAGES)
    await application.check_log()
    await application.check_state()


@pytest.mark.parametrize("scripts_later", some_of([1, 2, 3, 4], every=3))
@pytest.mark.parametrize("verb", VERBS)
async def test_a_script_run_after_some_later_ones_loses_and_duplicates_nothing(
    late: Late, verb: str, scripts_later: int
) -> None:
    """The later scripts are the writer's calls after its time-out. A late Admit claims ids that
    will not be appended; a late Rollback withdraws ids that are being appended, and the next group
    claims copies of those."""
    stack = late.world.stack
    book = Book(stack, f"public/late/{verb}-{scripts_later}")
    async with (
        aio.insecure_channel(stack.address("ledger")) as channel,
        publishing(ledger_pb2_grpc.LedgerServiceStub(channel), book.topic, "p") as publisher,
    ):
        await book.publish(publisher, range(GROUP))
        await book.judge()
        if verb != "admit":
            async with Redis.from_url(stack.redis_url) as redis:
                await redis.flushall()  # so that there is something to confirm and to roll back
        ran_late = late.proxy.late
        late.proxy.hold(1, SCRIPTS[verb], before=scripts_later)
        groups = [range(first, first + GROUP) for first in range(GROUP, 5 * GROUP, GROUP)]
        sent = []
        for group in groups:
            sent += book.publications(group)
            sent += book.publications(group, again=10**6)
        await publisher.send(*sent)
        for each in sent:
            book.note([each], {each.request_id: await publisher.receipt(each.request_id)})
        assert late.proxy.late == ran_late + 1
    assert len(await book.judge()) == 5 * GROUP


@pytest.mark.parametrize("count", some_of([3, 1], every=2))
async def test_a_script_run_after_all_later_ones_loses_and_duplicates_nothing(
    late: Late, count: int, seed: int
) -> None:
    application = late.world.application(seed)
    await application.publish(MESSAGES)
    late.proxy.hold(count, *SCRIPTS.values())
    await application.publish(MESSAGES)
    await late.held(count)
    publishing = asyncio.create_task(application.publish(MESSAGES))
    await late.proxy.deliver()
    await publishing
    await application.check_log()
    await judge(application)


@pytest.mark.parametrize("count", some_of([3, 1], every=2))
async def test_a_late_script_without_publishers_loses_and_duplicates_nothing(
    late: Late, count: int, seed: int
) -> None:
    """Nothing contradicts it: the admitted claims look in flight, and are never appended."""
    application = late.world.application(seed)
    await application.publish(MESSAGES)
    late.proxy.hold(count, *SCRIPTS.values())
    await application.publish(MESSAGES)
    await late.held(count)
    await application.check_state()
    await late.proxy.deliver()
    await judge(application)


async def test_a_late_script_of_a_dead_ledger_loses_and_duplicates_nothing(
    late: Late, seed: int
) -> None:
    """The claims of a dead process are admitted after its death, and before its successor
    starts."""
    application, stack = late.world.application(seed), late.world.stack
    await application.publish(MESSAGES)
    late.proxy.hold(1, *SCRIPTS.values())
    publishing = asyncio.create_task(application.publish(MESSAGES))
    await late.held(1)
    await stack.kill("ledger")
    await late.proxy.deliver()
    await stack.run("ledger")
    await publishing
    await judge(application)


async def test_slow_connections_lose_and_duplicate_nothing(late: Late, seed: int) -> None:
    application = late.world.application(seed)
    late.proxy.slow = True
    try:
        await application.publish(MESSAGES)
        await judge(application)
    finally:
        late.proxy.slow = False


@pytest.mark.parametrize("name", some_of(["dedup", "ledger"], every=2))
async def test_a_service_paused_beyond_every_timeout_loses_and_duplicates_nothing(
    late: Late, name: str, seed: int
) -> None:
    """Requests meanwhile wait in its sockets, and are executed after their callers gave up."""
    application, stack = late.world.application(seed), late.world.stack
    await application.publish(MESSAGES)
    publishing = asyncio.create_task(application.publish(10 * MESSAGES))
    told = len(application.history.acknowledged)
    await eventually(lambda: len(application.history.acknowledged) > told)
    pid = late.world.pid(name)
    log = stack.folder / "logs" / "ledger.log"
    failures = log.read_text().count("deduplication failed")
    os.kill(pid, signal.SIGSTOP)
    try:
        if name == "dedup":
            await eventually(lambda: log.read_text().count("deduplication failed") > failures + 1)
        else:
            # No caller abandons the ledger: another process acts during the pause.
            async with Redis.from_url(stack.redis_url) as redis:
                await redis.flushall()
    finally:
        os.kill(pid, signal.SIGCONT)
    await publishing
    await judge(application)
