"""Opening a store survives a brief failure of its disk, but not a long one."""

from pathlib import Path

import apsw
import pytest

from seqgate.services.errors import DomainError, StoreFull, StoreUnavailable
from seqgate.services.runtime import sqlite
from seqgate.services.runtime.sqlite import connections


class Failing:
    """Prepares a database after this many failures."""

    def __init__(self, error: apsw.Error, times: int) -> None:
        self.left = times
        self._error = error

    def __call__(self, db: apsw.Connection) -> None:
        self.left -= 1
        if self.left >= 0:
            raise self._error
        db.execute("CREATE TABLE prepared (id INTEGER)")


@pytest.mark.parametrize("error", [apsw.IOError("disk I/O error"), apsw.FullError("full")])
async def test_a_brief_disk_failure_is_retried(
    tmp_path: Path, error: apsw.Error, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "OPEN_RETRY_S", 0.001)
    prepare = Failing(error, times=3)
    async with connections(tmp_path / "a.db", readers=1, prepare=prepare) as store:
        assert await store.read(lambda db: db.execute("SELECT * FROM prepared").fetchall()) == []
    assert prepare.left == -1


@pytest.mark.parametrize(
    ("error", "refusal"),
    [(apsw.IOError("disk I/O error"), StoreUnavailable), (apsw.FullError("full"), StoreFull)],
)
async def test_a_long_disk_failure_is_raised(
    tmp_path: Path,
    error: apsw.Error,
    refusal: type[DomainError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sqlite, "OPEN_MAX_S", 0.0)
    with pytest.raises(refusal):
        async with connections(tmp_path / "a.db", readers=1, prepare=Failing(error, times=3)):
            raise AssertionError


async def test_an_invalid_path_fails_at_once(tmp_path: Path) -> None:
    prepare = Failing(apsw.IOError(), times=0)
    with pytest.raises(StoreUnavailable):
        async with connections(tmp_path / "none" / "a.db", readers=1, prepare=prepare):
            raise AssertionError
    assert prepare.left == 0
