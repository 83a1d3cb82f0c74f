"""SQLite without threads: the real adapters, with work run in the calling task after a delay.

Each process opens its own connections to a history's files, which are in memory where the machine
offers that. Other tasks run between two pieces of work, as with threads.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import apsw

from seqgate.services.runtime import sqlite

T = TypeVar("T")

IN_MEMORY: Final = Path("/dev/shm")
"""Linux's file system in memory."""


class InlineConnections:
    """Replaces seqgate.services.runtime.sqlite.Connections."""

    latency_s: Callable[[], float] = staticmethod(lambda: 0.0)
    """The delay before a piece of work."""

    opened: list[apsw.Connection]
    """All connections of a history, closed at its end."""

    def __init__(
        self, path: Path, *, readers: int, prepare: Callable[[Any], None], size_max_bytes: int = 0
    ) -> None:
        del readers, size_max_bytes  # stores.py simulates a full store
        self._path = path
        self._prepare = prepare
        self._writer: apsw.Connection | None = None
        self._reader: apsw.Connection | None = None

    async def write(self, work: Callable[[Any], T]) -> T:
        """As Connections.write."""
        await asyncio.sleep(self.latency_s())
        if self._writer is None:
            self._writer = self._connect(sqlite._WRITE)
        return self._do(self._writer, work, "COMMIT", "BEGIN IMMEDIATE")

    async def read(self, work: Callable[[Any], T]) -> T:
        """As Connections.read."""
        await asyncio.sleep(self.latency_s())
        if self._reader is None:
            self._reader = self._connect(apsw.SQLITE_OPEN_READONLY)
        return self._do(self._reader, work, "ROLLBACK", "BEGIN")

    def _connect(self, flags: int) -> apsw.Connection:
        try:
            connection = sqlite._connect(self._path, flags)
        except apsw.Error as error:
            raise sqlite._translated(error) from error
        connection.execute("PRAGMA synchronous = OFF")
        self.opened.append(connection)
        return connection

    def _do(self, connection: apsw.Connection, work: Callable[[Any], T], end: str, begin: str) -> T:
        try:
            connection.execute(begin)
            try:
                result = work(connection)
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute(end)
        except apsw.Error as error:
            raise sqlite._translated(error) from error
        return result

    async def open(self) -> None:
        """Prepare the database."""
        await self.write(self._prepare)

    async def close(self) -> None:
        """Do nothing: `databases` closes the connections."""


@contextmanager
def databases(rng: Random) -> Iterator[Path]:
    """A folder for a history's databases; inside the context SQLite runs without threads."""
    parent = IN_MEMORY if IN_MEMORY.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="seqgate-", dir=parent))
    opened: list[apsw.Connection] = []
    kind: Any = type(
        "Connections",
        (InlineConnections,),
        {"latency_s": staticmethod(lambda: rng.random() * 0.001), "opened": opened},
    )
    before = sqlite.Connections
    sqlite.Connections = kind  # type: ignore[misc]
    try:
        yield folder
    finally:
        sqlite.Connections = before  # type: ignore[misc]
        for connection in opened:
            connection.close()
        shutil.rmtree(folder, ignore_errors=True)
