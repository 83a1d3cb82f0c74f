"""A process that starts slowly is waited for and named; one that never does is named with the
limit and its last words."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from seqgate.dev import stack as stacks
from seqgate.dev.stack import Stack, StackError
from tests.support.waiting import eventually

HANGS = "import signal; signal.pause()"
SAYS = "print('the disk is slow', flush=True); " + HANGS


def stack(folder: Path, program: str, **more: object) -> Stack:
    """A stack with a filter service that runs this program instead."""
    commands = {"filter": (sys.executable, "-c", program)}
    return Stack(folder, services=("filter",), commands=commands, **more)  # type: ignore[arg-type]


@asynccontextmanager
async def spawned(folder: Path, program: str, **more: object) -> AsyncIterator[Stack]:
    """The filter service alone, not waited for."""
    alone = stack(folder, program, **more)
    (folder / "logs").mkdir()
    await alone.spawn("filter")
    try:
        yield alone
    finally:
        await alone.stop()
        assert alone.pid("filter") is None


async def test_a_process_that_is_never_ready_is_named_with_the_limit_and_its_last_words(
    tmp_path: Path,
) -> None:
    async with spawned(tmp_path, SAYS, ready_timeout_s=0.1) as slow:
        await eventually(lambda: slow.log_tail("filter"), "it says something")
        with pytest.raises(StackError) as failed:
            await slow.ready("filter")
    told = str(failed.value)
    assert re.match(r"filter is alive, but was not ready within 0\.1 s", told), told
    assert "--ready-timeout" in told
    assert told.endswith("the disk is slow")


async def test_a_silent_process_is_said_to_have_written_nothing(tmp_path: Path) -> None:
    async with spawned(tmp_path, HANGS, ready_timeout_s=0.1) as silent:
        with pytest.raises(StackError, match=r"it has written nothing to .*filter\.log$"):
            await silent.ready("filter")


async def test_a_process_that_ends_without_a_word_is_named(tmp_path: Path) -> None:
    async with spawned(tmp_path, "import sys; sys.exit(3)") as ended:
        with pytest.raises(StackError, match="filter ended with 3: it has written nothing"):
            await ended.ready("filter")


async def test_a_slow_start_is_waited_for_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "TELL_AFTER_S", 0.05)
    told: list[str] = []
    enough = asyncio.Event()

    def tell(text: str) -> None:
        if text.startswith("filter is alive and not ready yet, after "):
            told.append(text)  # a busy machine may also wait for the Redis server
        if len(told) == 3:
            enough.set()

    slow = stack(tmp_path, HANGS, tell=tell)
    starting = asyncio.create_task(slow.start())
    await enough.wait()
    assert not starting.done()
    monkeypatch.setattr(slow, "_answers", _true)  # now it answers
    await starting
    await slow.stop()


async def _true(_name: str) -> bool:
    return True
