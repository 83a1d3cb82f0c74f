"""SQLite from asyncio: one thread that writes, a few that read.

What waits to be written when the writer's thread is free goes into one transaction: a group commit
over all topics, and one fsync. A piece of work is a function of the connection that refuses before
it changes anything, so a refusal spares the rest of its group; an error of SQLite fails the whole
group, which is rolled back.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

import apsw

from seqgate.telemetry import names, spans
from services.errors import DomainError, StoreFull, StoreUnavailable

T = TypeVar("T")
Work = Callable[[apsw.Connection], T]

GROUP_MAX: Final = 256
"""How many pieces of work one transaction holds at most."""

BUSY_TIMEOUT_MS: Final = 5_000
"""How long another process may hold the database."""

RETRY_AFTER_S: Final = 0.5
"""What a caller is told to wait when the store fails."""


class _Task(NamedTuple, Generic[T]):
    work: Work[T]
    done: "asyncio.Future[T]"


class Connections:
    """See the module. Made by `connections`."""

    def __init__(self, path: Path, *, readers: int, prepare: Work[None]) -> None:
        self._path = path
        self._prepare = prepare
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Task[object] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_forever, name="sqlite-writer")
        self._local = threading.local()
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="sqlite-reader")

    async def write(self, work: Work[T]) -> T:
        """Do this within the next transaction, and return when it is durable.

        Raises:
            DomainError: what the work refused with; nothing changed.
            StoreFull: nothing changed.
            StoreUnavailable: it may have been done.
        """
        done: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_Task(work, done))  # type: ignore[arg-type]
        return await _recorded(names.COMMIT, asyncio.shield(done))

    async def read(self, work: Work[T]) -> T:
        """Do this on a reader's connection, in one transaction.

        Raises:
            StoreUnavailable: SQLite failed.
        """
        done = self._loop.run_in_executor(self._readers, self._read, work)
        return await _recorded(names.SELECT, done)

    def _read(self, work: Work[T]) -> T:
        try:
            connection: apsw.Connection | None = getattr(self._local, "connection", None)
            if connection is None:
                connection = _connect(self._path, apsw.SQLITE_OPEN_READONLY)
                self._local.connection = connection
            connection.execute("BEGIN")
            try:
                return work(connection)
            finally:
                connection.execute("ROLLBACK")
        except apsw.Error as error:
            raise _translated(error) from error

    def _write_forever(self) -> None:
        connection: apsw.Connection | None = None
        first = self._queue.get()
        while first is not None:
            group = [first]
            stop = False
            while len(group) < GROUP_MAX:
                try:
                    task = self._queue.get_nowait()
                except queue.Empty:
                    break
                if task is None:
                    stop = True
                    break
                group.append(task)
            results: list[object]
            try:
                connection = connection or _connect(self._path, _WRITE)
                results = _commit(connection, group)
            except apsw.Error as error:
                results = [_translated(error)] * len(group)
            except Exception as error:  # a mistake of ours: whoever waits is told, and stops
                results = [error] * len(group)
            self._loop.call_soon_threadsafe(_resolve, group, results)
            first = None if stop else self._queue.get()
        if connection is not None:
            connection.close()

    async def open(self) -> None:
        """Start the writer and prepare the database."""
        self._writer.start()
        await self.write(self._prepare)

    async def close(self) -> None:
        """End all threads; what is queued is written first."""
        self._queue.put(None)
        await asyncio.to_thread(self._writer.join)
        await asyncio.to_thread(self._readers.shutdown)


@asynccontextmanager
async def connections(
    path: Path, *, readers: int, prepare: Work[None]
) -> AsyncIterator[Connections]:
    """Open a database; `prepare` runs first, in a transaction."""
    opened = Connections(path, readers=readers, prepare=prepare)
    try:
        await opened.open()
        yield opened
    finally:
        await opened.close()


async def _recorded(operation: str, done: "asyncio.Future[T]") -> T:
    """What comes of a piece of work, which is a step of what is being done. A refusal is an answer,
    and no failure of the database."""
    with spans.database(names.SQLITE, operation):
        try:
            return await done
        except (StoreFull, StoreUnavailable):
            raise
        except DomainError as error:
            refusal = error
    raise refusal


_WRITE: Final = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE


def _connect(path: Path, flags: int) -> apsw.Connection:
    connection = apsw.Connection(str(path), flags=flags)
    connection.set_busy_timeout(BUSY_TIMEOUT_MS)
    if flags & apsw.SQLITE_OPEN_READWRITE:
        connection.execute("PRAGMA page_size = 8192")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 2000")
        connection.execute("PRAGMA journal_size_limit = 67108864")
    return connection


def _commit(connection: apsw.Connection, group: list[_Task[object]]) -> list[object]:
    """Do the work of a group in one transaction. Returns what came of each, refusals included.

    Raises:
        apsw.Error: nothing was done; or, when the commit itself failed, nobody knows.
    """
    results: list[object] = []
    try:
        connection.execute("BEGIN IMMEDIATE")
        for task in group:
            try:
                results.append(task.work(connection))
            except DomainError as refusal:
                results.append(refusal)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return results


def _resolve(group: list[_Task[object]], results: list[object]) -> None:
    for task, result in zip(group, results, strict=True):
        if task.done.cancelled():
            continue
        if isinstance(result, Exception):
            task.done.set_exception(result)
        else:
            task.done.set_result(result)


def _translated(error: apsw.Error) -> DomainError:
    if isinstance(error, apsw.FullError):
        refusal: DomainError = StoreFull("the store is full", retry_after_s=RETRY_AFTER_S)
    else:
        refusal = StoreUnavailable("the store failed", retry_after_s=RETRY_AFTER_S)
    refusal.__cause__ = error
    return refusal
