"""A proxy loses replies of Redis, dedup and the ledger: no message is lost or stored twice."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from seqgate.client import _channel
from seqgate.dev.ports import free_ports
from tests.faults.world import World
from tests.support.application import Application
from tests.support.depth import some_of
from tests.support.wire import Wire

MESSAGES = 120
LINKS = ("dedup to Redis", "ledger to dedup", "producer to ledger")
TIMEOUT_S = 0.4


class Wires:
    """A stack with a wire on each of its links."""

    def __init__(self, world: World, wires: dict[str, Wire]) -> None:
        self.world = world
        self.wires = wires

    def application(self, seed: int) -> Application:
        """An application behind its wire."""
        return self.world.application(seed, ledger=self.wires["producer to ledger"].address)


@asynccontextmanager
async def wired(folder: Path, seed: int) -> AsyncIterator[Wires]:
    async with AsyncExitStack() as stack:
        ports = dict(zip(("redis", "dedup", "ledger"), free_ports(3), strict=True))
        wires = {}
        for link, port in zip(LINKS, ports.values(), strict=True):
            wire = Wire(port, random=Random(f"{seed}/{link}"))
            wires[link] = await stack.enter_async_context(wire)
        world = World(
            folder,
            ports=ports,
            SEQGATE_DEDUP_REDIS_URL=f"redis://{wires['dedup to Redis'].address}/0",
            SEQGATE_DEDUP_REDIS_TIMEOUT_S=str(TIMEOUT_S),
            SEQGATE_LEDGER_DEDUP_TARGET=wires["ledger to dedup"].address,
            SEQGATE_LEDGER_DEDUP_TIMEOUT_S=str(TIMEOUT_S),
            SEQGATE_LEDGER_KEEPALIVE_S="1",
        )
        await stack.enter_async_context(world.stack)
        yield Wires(world, wires)


@pytest_asyncio.fixture(scope="module")
async def wires(tmp_path_factory: pytest.TempPathFactory, seed: int) -> AsyncIterator[Wires]:
    async with wired(tmp_path_factory.mktemp("wires"), seed) as made:
        yield made


async def judge(application: Application) -> None:
    """Everything is answered: publish once more over whole wires, and check the log and the
    state."""
    await application.publish(MESSAGES)
    await application.check_log()
    await application.check_state()


@pytest.mark.parametrize("count", some_of([4, 1], every=2))
@pytest.mark.parametrize("link", LINKS)
async def test_messages_are_stored_once_if_replies_are_lost_with_their_connection(
    wires: Wires, link: str, count: int, seed: int
) -> None:
    application, wire = wires.application(seed), wires.wires[link]
    await application.publish(MESSAGES)
    lost = wire.lost
    publishing = asyncio.create_task(application.publish(MESSAGES))
    for _ in range(count):
        wire.cut_next = 1
        while wire.cut_next and not publishing.done():
            await asyncio.sleep(0.005)
    await publishing
    assert wire.lost > lost
    wire.cut_next = 0
    await judge(application)


@pytest.mark.parametrize("link", LINKS)
async def test_messages_are_stored_once_if_a_reply_never_comes(
    wires: Wires, link: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller times out, or finds the connection dead; its request was executed."""
    quick = {"grpc.keepalive_time_ms": 1000, "grpc.http2.ping_timeout_ms": 500}
    monkeypatch.setattr(_channel, "OPTIONS", list((dict(_channel.OPTIONS) | quick).items()))
    application, wire = wires.application(seed), wires.wires[link]
    await application.publish(MESSAGES)
    wire.swallow_next = 1
    await application.publish(MESSAGES)
    assert wire.swallow_next == 0
    await judge(application)


@pytest.mark.parametrize("link", LINKS)
async def test_messages_are_stored_once_if_many_replies_are_lost(
    wires: Wires, link: str, seed: int
) -> None:
    application, wire = wires.application(seed), wires.wires[link]
    lost = wire.lost
    wire.share = 0.05
    rounds = 0
    while wire.lost < lost + 3:
        await application.publish(MESSAGES)
        rounds += 1
        assert rounds < 30
    wire.share = 0.0
    await judge(application)
