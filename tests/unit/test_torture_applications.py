"""The processes of torture's applications: told to end, they did not end by themselves."""

import asyncio
import os
import sys
from pathlib import Path
from signal import Signals

from tests.support.nursery import Nursery
from tools.torture.applications import Applications

SERVICE = [sys.executable, "-m", "seqgate.services.filter"]


async def test_who_is_told_to_end_is_not_taken_for_one_that_ended_by_itself(
    nursery: Nursery, tmp_path: Path
) -> None:
    applications = Applications(tmp_path, {})
    environment = {**os.environ, "SEQGATE_FILTER_LISTEN": "127.0.0.1:0"}
    with applications.log("a").open("ab") as log:
        applications._processes["a"] = await nursery.start(SERVICE, log.fileno(), environment)
    finishing = asyncio.create_task(applications.finish("a", 30))
    while not finishing.done():
        assert applications.ended() == {}
        await asyncio.sleep(0)
    assert await finishing in (0, -Signals.SIGTERM)
    assert applications.ended() == {}
    assert await applications.finish("a", 30) is None
