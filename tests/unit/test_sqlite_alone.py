"""SQLite is for one process: a second one that opens a store says so."""

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from seqgate.services.runtime.sqlite import SqliteDatabase, connections

HOLD = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, fcntl.LOCK_EX); print(1)"


async def warnings_of_opening(path: Path) -> list[str]:
    with capture_logs() as lines:
        async with connections(path, readers=1, prepare=lambda _: None) as opened:
            assert await SqliteDatabase(opened).read(lambda db: db.rows("SELECT 1")) == [(1,)]
    return [each["event"] for each in lines if each["log_level"] == "warning"]


@contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Another process that has the store open; then it is killed."""
    program = [sys.executable, "-c", f"{HOLD}; sys.stdout.flush(); sys.stdin.read()"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*program, f"{path}-lock"], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield
        process.kill()


async def test_a_store_that_another_process_uses_opens_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    assert await warnings_of_opening(path) == []
    with in_use(path):
        (warning,) = await warnings_of_opening(path)
        assert "postgres_url" in warning
    assert await warnings_of_opening(path) == []


async def test_a_store_opens_where_no_lock_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert await warnings_of_opening(tmp_path / "store.db") == []
