"""The nursery leaves no process of a test behind."""

import asyncio
import os
import sys
from pathlib import Path
from signal import Signals

from tests.support.nursery import Nursery
from tests.support.waiting import eventually

FILTER = [sys.executable, "-m", "seqgate.services.filter"]


async def test_an_abandoned_process_is_killed(tmp_path: Path) -> None:
    nursery = Nursery()
    environment = {**os.environ, "SEQGATE_FILTER_LISTEN": "127.0.0.1:0"}
    with (tmp_path / "log").open("ab") as log:
        starting = asyncio.create_task(nursery.start(FILTER, log.fileno(), environment))
        while not nursery._asked:
            await asyncio.sleep(0)
        starting.cancel()
        while not nursery._running:
            await asyncio.sleep(0.001)
    (forked,) = nursery._running.values()

    async def is_gone() -> bool:
        return forked.returncode is not None

    await eventually(is_gone)
    assert forked.returncode == -Signals.SIGKILL
    assert not nursery._running
    nursery.close()
