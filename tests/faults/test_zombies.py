"""A ledger that was paused while another one took over its topic stores nothing more, and
acknowledges only messages that it had stored.

The processes share one SQLite file, as in a misconfigured deployment, or as replicas over a
replicated log. The zombie stops at an exact point; messages sent meanwhile wait in its socket.
"""

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc
from seqgate.client._status import error_of_call
from seqgate.dev.child import Child, tell
from seqgate.dev.ports import free_ports
from seqgate.services.runtime.channels import check_health
from tests.faults.world import World
from tests.support.crash_points import ORDER, Order
from tests.support.depth import some_of
from tests.support.publisher import publishing
from tests.support.waiting import eventually
from tests.support.workload import Book

ROUND = 20
"""Messages sent at a time."""

WHILE_PUBLISHING = [
    f"{verb}.{when}"
    for verb in ("admit", "append", "receipts", "confirm", "find")
    for when in ("before", "after")
]
WHILE_OPENING = [
    "take.after",
    "rollback.before",
    "rollback.after",
    "highest.before",
    "highest.after",
]


class Zombie:
    """A second ledger process over the stack's database."""

    def __init__(self, world: World, folder: Path) -> None:
        stack = world.stack
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self.channel: Any = None
        self.stub: Any = None
        self._order = folder / "order"
        self._log = folder / "zombie.log"
        self._environment = {
            **stack.settings,
            ORDER: str(self._order),
            "SEQGATE_LEDGER_LISTEN": self.address,
        }
        self._process: Child | None = None
        self._start = stack.start_process

    async def start(self) -> None:
        with self._log.open("wb") as log:
            self._process = await self._start(
                [sys.executable, "-m", "tests.support.crash_points", "ledger"],
                log.fileno(),
                {**os.environ, **self._environment},
            )

    async def ready(self) -> bool:
        try:
            await check_health(self.channel)
        except (aio.AioRpcError, ConnectionError):
            return False
        return True

    async def end(self) -> None:
        if self._process is not None:
            tell(self._process, signal.SIGKILL)
            await self._process.wait()

    def stop_at(self, point: str) -> None:
        Order(point, number=signal.SIGSTOP).give(self._order)

    async def stopped(self) -> None:
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/stat")
        await eventually(
            lambda: status.read_text().rpartition(")")[2].split()[0] == "T",
            f"the zombie stops: {self._log.read_text()[-2000:]}",
        )

    def go_on(self) -> None:
        assert self._process is not None
        tell(self._process, signal.SIGCONT)


@pytest_asyncio.fixture(scope="module")
async def second_ledger(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Zombie]:
    made = Zombie(world, tmp_path_factory.mktemp("zombie"))
    try:
        await made.start()
        async with aio.insecure_channel(made.address) as channel:
            made.channel, made.stub = channel, ledger_pb2_grpc.LedgerServiceStub(channel)
            await eventually(made.ready, "the second ledger is ready")
            yield made
    finally:
        await made.end()


@pytest.fixture
def zombie(second_ledger: Zombie) -> Iterator[Zombie]:
    """The second ledger, resumed after the test."""
    yield second_ledger
    second_ledger.go_on()


def reason_of(error: aio.AioRpcError | None) -> str:
    """The reason of a call's refusal; empty if it succeeded."""
    return "" if error is None else error_of_call(error).reason


@pytest.mark.parametrize("point", some_of(WHILE_PUBLISHING, every=2))
async def test_a_ledger_replaced_while_paused_stores_nothing_more(
    world: World, zombie: Zombie, point: str
) -> None:
    book = Book(world.stack, f"public/zombies/publishing-{point}")
    ledger = world.stack.address("ledger")
    async with publishing(zombie.stub, book.topic, "p") as old:
        await book.publish(old, range(ROUND))
        zombie.stop_at(point)
        # Copies make the ledger search its log. Not both: a paused append would hold SQLite's lock,
        # and its successor could not start.
        copies = point.startswith("find")
        numbers = range(ROUND) if copies else range(ROUND, 2 * ROUND)
        caught = book.publications(numbers, again=10**6)
        await old.send(*caught)
        await zombie.stopped()
        waiting = book.publications(range(2 * ROUND, 3 * ROUND))
        await old.send(*waiting)

        async with (
            aio.insecure_channel(ledger) as channel,
            publishing(ledger_pb2_grpc.LedgerServiceStub(channel), book.topic, "p") as new,
        ):
            await book.publish(new, range(ROUND // 2, 2 * ROUND + ROUND // 2))
            before = await book.log()
            zombie.go_on()
            assert reason_of(await old.ended()) == "FENCED"
            book.note([*caught, *waiting], old.receipts)
            assert await book.log() == before
            # Nor does it disturb its successor.
            await book.publish(new, range(2 * ROUND, 4 * ROUND), again=10**6)
        assert len(await book.judge()) == 4 * ROUND


async def open_and_send(call: Any, publication: pb.Publication) -> None:
    """Continue at a sent Open. A ledger that had only the reply left to send sends it, and then
    refuses what is published."""
    await call.read()
    publication.entries[0].metadata.producer_name = "p"
    await call.write(pb.PublishRequest(publications=pb.Publications(publications=[publication])))
    await call.read()


@pytest.mark.parametrize("point", WHILE_OPENING)
async def test_a_ledger_replaced_while_opening_a_stream_stores_nothing_from_it(
    world: World, zombie: Zombie, point: str
) -> None:
    book = Book(world.stack, f"public/zombies/opening-{point}")
    async with aio.insecure_channel(world.stack.address("ledger")) as channel:
        stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        async with publishing(stub, book.topic, "p") as first:
            await book.publish(first, range(ROUND))
        zombie.stop_at(point)
        call = zombie.stub.Publish()
        await call.write(pb.PublishRequest(open=pb.Open(topic=book.topic, producer_name="p")))
        await zombie.stopped()
        # This ledger had the topic before, and has not yet noticed the loss.
        with suppress(aio.AioRpcError):
            async with publishing(stub, book.topic, "p"):
                pass
        async with publishing(stub, book.topic, "p") as new:
            await book.publish(new, range(ROUND, 2 * ROUND), again=10**6)
            before = await book.log()
            zombie.go_on()
            with pytest.raises(aio.AioRpcError) as refused:
                await open_and_send(call, *book.publications([ROUND]))
            assert reason_of(refused.value) in {"FENCED", "STORE_UNAVAILABLE"}
            assert await book.log() == before
            await book.publish(new, range(2 * ROUND, 3 * ROUND), again=10**7)
    assert len(await book.judge()) == 3 * ROUND
