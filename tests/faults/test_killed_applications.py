"""kill -9 of a publishing application: it restarts from its own record, with other batches, and
every message is stored once."""

import os
import sys
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from signal import SIGKILL

import pytest
import pytest_asyncio

from seqgate.dev.child import Child, tell
from tests.faults.world import World
from tests.support.checkers import Stored
from tests.support.crash_points import ORDER, Order
from tests.support.workload import POINTS, Journal, judge, message, read_log

MESSAGES = 200
NAME = "application"
_topics = count()


class Runs:
    """One application, restarted for each run."""

    def __init__(self, world: World, folder: Path) -> None:
        self.topic = f"public/applications/{next(_topics)}"
        self.journal = Journal(folder)
        self._world = world
        self._order = folder / "order"
        self._process: Child | None = None

    async def start(self, *, chunk: int, batch: int, order: Order | None = None) -> None:
        if order is not None:
            order.give(self._order)
        ledger = self._world.stack.address("ledger")
        folder = self.journal.folder
        what = map(str, (ledger, self.topic, NAME, folder, MESSAGES, chunk, batch))
        with (folder / "log").open("ab") as log:
            self._process = await self._world.stack.start_process(
                [sys.executable, "-m", "tests.support.workload", *what],
                log.fileno(),
                {**os.environ, ORDER: str(self._order)},
            )

    async def ended(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def kill(self) -> None:
        if self._process is not None:
            tell(self._process, SIGKILL)
            await self._process.wait()

    def output(self) -> str:
        return (self.journal.folder / "log").read_text()[-2000:]

    async def log(self) -> list[Stored]:
        return await read_log(self._world.stack.address("ledger"), self.topic)

    async def check(self) -> None:
        """Check that every message is stored once, and that deduplication state agrees."""
        history = self.journal.history(NAME)
        address = self._world.stack.address
        log = await judge(address("ledger"), address("dedup"), self.topic, history)
        assert len(log) == len(history.sent) == MESSAGES


@pytest_asyncio.fixture
async def runs(world: World, tmp_path: Path) -> AsyncIterator[Runs]:
    made = Runs(world, tmp_path)
    yield made
    await made.kill()


@pytest.mark.parametrize("point", POINTS)
async def test_messages_are_stored_once_if_their_application_dies_twice_at(
    runs: Runs, point: str
) -> None:
    for chunk, batch in ((30, 4), (45, 7)):
        passes = 0 if point in ("opened", "written") else 1
        await runs.start(chunk=chunk, batch=batch, order=Order(point, passes))
        assert await runs.ended() == -SIGKILL, runs.output()
    await runs.start(chunk=70, batch=1)
    assert await runs.ended() == 0, runs.output()
    await runs.check()


async def test_a_restarted_application_stores_the_rest_of_a_partly_stored_batch(runs: Runs) -> None:
    await runs.start(chunk=30, batch=4, order=Order("told"))
    assert await runs.ended() == -SIGKILL, runs.output()
    assert len(await runs.log()) == 30
    await runs.start(chunk=MESSAGES, batch=7)
    assert await runs.ended() == 0, runs.output()
    await runs.check()

    # 28 to 34 were one batch, of which 28 and 29 were stored.
    places = {stored.identity: stored.id for stored in await runs.log()}
    cut = [places[message(NAME, number)[0]] for number in range(30, 35)]
    assert len({each.position for each in cut}) == 1
    assert [each.batch_index for each in cut] == [0, 1, 2, 3, 4]
    told = {
        each.identity: each.duplicate
        for each in runs.journal.history(NAME).acknowledged[-MESSAGES:]
    }
    assert [told[message(NAME, number)[0]] for number in (27, 28, 29, 30, 31)] == (
        [True, True, True, False, False]
    )


@pytest.mark.parametrize("point", ["append.before", "append.after", "receipts.before"])
async def test_messages_are_stored_once_if_application_and_ledger_die_together(
    world: World, runs: Runs, point: str
) -> None:
    world.order("ledger", Order(point, 3))
    await runs.start(chunk=20, batch=3)
    assert await world.stack.ended("ledger") == -SIGKILL
    await runs.kill()
    await world.stack.run("ledger")
    await runs.start(chunk=50, batch=8)
    assert await runs.ended() == 0, runs.output()
    await runs.check()
