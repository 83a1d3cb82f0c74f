"""Child processes: a signal at the moment of their end; workers, their results and failures."""

import asyncio
import time
from pathlib import Path
from signal import SIGCONT

import pytest

from seqgate.dev.child import tell
from tools.stack.child import ChildFailed
from tools.stack.worker import in_worker

CHILDREN = 100
TELLING_S = 0.005
"""Longer than the child lives."""


async def test_a_child_that_ends_during_a_write_keeps_its_exit_status() -> None:
    for _ in range(CHILDREN):
        child = await asyncio.create_subprocess_exec("true")
        end = time.monotonic() + TELLING_S
        while time.monotonic() < end:  # the loop is blocked, as during other work
            tell(child, SIGCONT)
        assert await child.wait() == 0


async def test_a_module_gets_input_and_settings_and_returns_its_output(
    tmp_path: Path,
) -> None:
    code = "import os\ndef run(*given):\n    print('noise')\n    return os.environ['WORD'], *given"
    (tmp_path / "echo.py").write_text(code)
    environment = {"PYTHONPATH": str(tmp_path), "WORD": "a"}
    assert await in_worker("echo", b"b", 3, environment=environment) == ("a", b"b", 3)


@pytest.mark.parametrize(
    ("code", "within_s", "failure"),
    [
        ("raise SystemExit('no room')", 60.0, "broken ended with 1: no room"),
        ("import threading; threading.Event().wait()", 0.05, "broken did not end within"),
    ],
)
async def test_a_worker_that_fails_or_hangs_is_reported(
    code: str, within_s: float, failure: str, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(code)
    with pytest.raises(ChildFailed, match=failure):
        await in_worker("broken", environment={"PYTHONPATH": str(tmp_path)}, within_s=within_s)
