"""Applications under test, distinguishing a requested end from a failure."""

import asyncio
import os
import sys
from pathlib import Path
from signal import Signals

import pytest

from tests.support.nursery import Nursery
from tools.stack.application import Application, ApplicationFailed

FILTER = "seqgate.services.filter"


async def test_a_process_told_to_end_is_not_taken_for_one_that_ended_by_itself(
    nursery: Nursery, tmp_path: Path
) -> None:
    application = Application(FILTER, list, tmp_path / "log")
    environment = {**os.environ, "SEQGATE_FILTER_LISTEN": "127.0.0.1:0"}
    with application.log.open("ab") as log:
        command = [sys.executable, "-m", FILTER]
        application.process = await nursery.start(command, log.fileno(), environment)
    ending = asyncio.create_task(application.end(Signals.SIGTERM))
    while not ending.done():
        assert application.ended() is None
        await asyncio.sleep(0)
    assert await ending in (0, -Signals.SIGTERM)
    application.check()
    assert await application.end() is None


async def test_a_process_that_fails_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    application = Application(FILTER, lambda: ["--unknown"], tmp_path / "log")
    process = await application.start()
    status = await process.wait()
    assert application.ended() == status != 0
    with pytest.raises(ApplicationFailed, match="unknown"):
        application.check()
    with pytest.raises(ApplicationFailed, match="unknown"):
        await application.run()
