"""The write-ahead log of a store stays small while others read."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from seqgate.services.errors import StoreFull
from seqgate.services.runtime import sqlite
from seqgate.services.runtime.sqlite import Connections, DiskShare, connections
from tests.simulation.defects import find
from tests.support.waiting import eventually

ROW_BYTES = 32 * 1024
LOG_BYTES = 512 * 1024
READERS = 4


def table(db: apsw.Connection) -> None:
    db.execute("CREATE TABLE IF NOT EXISTS row (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL)")


def insert(db: apsw.Connection) -> None:
    db.execute("INSERT INTO row (bytes) VALUES (randomblob(?))", (ROW_BYTES,))


class Overlapping:
    """Readers of which one is always in a transaction: each ends its own only after another one has
    begun."""

    def __init__(self, store: Connections) -> None:
        self._store = store
        self._turn = threading.Condition()
        self._begun = 0
        self._over = False
        self.tasks = [asyncio.create_task(self._read_on()) for _ in range(READERS)]

    async def begun(self) -> None:
        await eventually(lambda: self._begun > READERS)

    async def end(self) -> None:
        with self._turn:
            self._over = True
            self._turn.notify_all()
        await asyncio.gather(*self.tasks)

    async def _read_on(self) -> None:
        while not self._over:
            await self._store.read(self._read)

    def _read(self, db: apsw.Connection) -> None:
        db.execute("SELECT count(*) FROM row").fetchall()
        with self._turn:
            self._begun += 1
            mine = self._begun
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._over or self._begun > mine, timeout=5)


async def grown(folder: Path, writes: int) -> int:
    """The largest size of the log while others read."""
    largest = 0
    async with connections(folder / "s.db", readers=READERS, prepare=table) as store:
        readers = Overlapping(store)
        try:
            await readers.begun()
            for _ in range(writes):
                await store.write(insert)
                largest = max(largest, store.log_bytes)
        finally:
            await readers.end()
        assert await store.read(lambda db: db.execute("SELECT count(*) FROM row").fetchall()) == [
            (writes,)
        ]
    return largest


async def fill(store: Connections, look: Callable[[], None] = lambda: None) -> None:
    """Write until a write is refused."""
    for _ in range(200):
        await store.write(insert)
        look()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "WAL_BYTES_MAX", LOG_BYTES)


@pytest.mark.usefixtures("small")
async def test_the_write_ahead_log_is_bounded_beside_four_long_readers(tmp_path: Path) -> None:
    assert await grown(tmp_path, writes=100) < LOG_BYTES + 4 * ROW_BYTES


@pytest.mark.deep
@pytest.mark.usefixtures("small")
async def test_an_unbounded_write_ahead_log_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find("B4").apply(monkeypatch)
    assert await grown(tmp_path, writes=100) > 4 * LOG_BYTES


async def test_a_reader_that_does_not_end_fills_a_store_with_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes are refused until it ends; the log takes at most twice its share, and a group."""
    monkeypatch.setattr(sqlite, "CHECKPOINT_WAIT_MS", 1)
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 1)
    limit = sqlite.LOG_SHARE * LOG_BYTES
    path = tmp_path / "s.db"
    async with connections(path, readers=1, prepare=table, size_max_bytes=limit) as store:
        begun, end = threading.Event(), threading.Event()

        def read(db: apsw.Connection) -> None:
            db.execute("SELECT count(*) FROM row").fetchall()
            begun.set()
            assert end.wait(30)

        reading = asyncio.create_task(store.read(read))
        await eventually(begun.is_set)
        with pytest.raises(StoreFull) as refusal:
            await fill(store)
        assert refusal.value.retry_after_s
        assert store.log_bytes < 2 * LOG_BYTES + 4 * ROW_BYTES
        end.set()
        await reading
        await store.write(insert)


async def test_a_limit_covers_the_database_and_its_log(tmp_path: Path) -> None:
    limit = 2_000_000
    path = tmp_path / "s.db"
    async with connections(path, readers=1, prepare=table, size_max_bytes=limit) as store:
        sizes: list[int] = []
        with pytest.raises(StoreFull):
            await fill(store, lambda: sizes.append(path.stat().st_size + store.log_bytes))
        assert limit / 2 < max(sizes) <= limit


@pytest.mark.parametrize(
    ("limit", "share"),
    [
        (0, (0, sqlite.WAL_BYTES_MAX)),
        (1_600, (1_500, 100)),
        (2**40, (2**40 - sqlite.WAL_BYTES_MAX, sqlite.WAL_BYTES_MAX)),
    ],
)
def test_a_limit_is_divided(limit: int, share: tuple[int, int]) -> None:
    assert DiskShare.of(limit) == share
