"""SQLite for asyncio: one writer thread and a few reader threads.

All writes queued when the writer becomes free go into one transaction: a group commit over all
topics, with one fsync. A piece of work is a function of the connection that refuses before it
changes anything, so a refusal does not affect the rest of its group; an error of SQLite fails and
rolls back the whole group.

SQLite restarts the write-ahead log once all of it is in the database and no reader uses it. While
reads overlap, some reader always uses it, and the log would grow for as long as they do. Above a
size, the writer waits for the readers: each reads one page, and later ones read from the database.
A store's limit applies to both files together.

The queues are bounded, by count and by the bytes of the requests. Work that has not begun is
dropped if its caller gives up; work that has begun is finished.
"""

import asyncio
import fcntl
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import apsw
import structlog

from seqgate.services.errors import DomainError, StoreFull, StoreUnavailable
from seqgate.services.runtime.transactions import RETRY_AFTER_S, Value
from seqgate.services.runtime.transactions import Work as TablesWork
from seqgate.services.runtime.waiting import Waiting, outcome
from seqgate.telemetry import names

log = structlog.get_logger()

T = TypeVar("T")
Work = Callable[[apsw.Connection], T]

GROUP_MAX: Final = 256
"""The most pieces of work in one transaction."""

AUTOCHECKPOINT_PAGES: Final = 2_000
"""The size of the log, in pages, at which SQLite begins to copy it into the database."""

BUSY_TIMEOUT_MS: Final = 5_000
"""How long to wait for another process that locks the database."""

OPEN_MAX_S: Final = 30.0
OPEN_RETRY_S: Final = 0.2
"""How long opening a failing database is retried, and the pause between attempts."""

WAL_BYTES_MAX: Final = 64 * 1024 * 1024
"""The size of the write-ahead log, in bytes, above which the writer waits for readers; for a store
with a limit, at most a sixteenth of that. One group of writes may exceed it."""

LOG_SHARE: Final = 16
"""The write-ahead log's share of a store's limit: one in this many."""

RECLAIM_PAGES_MAX: Final = 2_000
"""The most free pages that one transaction returns to the file system."""

CHECKPOINT_WAIT_MS: Final = 250
"""How long the writer waits for readers at a time; above twice the size, BUSY_TIMEOUT_MS."""


class DiskShare(NamedTuple):
    """The shares of a store's limit, in bytes; 0: the database has no limit."""

    database: int
    log: int

    @classmethod
    def of(cls, size_max_bytes: int) -> "DiskShare":
        """The shares of a limit on both files together; 0: no limit."""
        if not size_max_bytes:
            return cls(0, WAL_BYTES_MAX)
        log_bytes = min(WAL_BYTES_MAX, size_max_bytes // LOG_SHARE)
        return cls(size_max_bytes - log_bytes, log_bytes)


class _Task(NamedTuple, Generic[T]):
    """Work, and the future on which its caller waits. A caller that gives up cancels the future but
    not work that has begun, so `ended` is called when the work is over: a shield around the future
    would cost as much as the rest of the hand-over."""

    work: Work[T]
    done: "asyncio.Future[T]"
    ended: Callable[[], None]


class Connections:
    """The threads and the queues of one database. Created by `connections`."""

    def __init__(
        self, path: Path, *, readers: int, prepare: Work[None], size_max_bytes: int = 0
    ) -> None:
        self._path = path
        self._wal = path.with_name(f"{path.name}-wal")
        self._share = DiskShare.of(size_max_bytes)
        self._is_limited = size_max_bytes > 0
        self._prepare = prepare
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Task[object] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_forever, name="sqlite-writer")
        self._writes, self._reads = Waiting("writes"), Waiting("reads")
        self._local = threading.local()
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="sqlite-reader")

    async def write(self, work: Work[T]) -> T:
        """Run `work` in the next transaction, and return when it is durable.

        Raises:
            DomainError: the refusal of `work`; nothing changed.
            ServiceBusy: the queue is full; nothing changed.
            StoreFull: nothing changed.
            StoreUnavailable: the outcome is unknown.
        """
        done: asyncio.Future[T] = self._loop.create_future()
        task = _Task(work, done, self._writes.enter())
        self._queue.put(task)  # type: ignore[arg-type]
        return await outcome(names.SQLITE, names.COMMIT, done)

    async def read(self, work: Work[T]) -> T:
        """Run `work` on a reader's connection, in one transaction.

        Raises:
            ServiceBusy: the queue is full.
            StoreUnavailable: SQLite failed.
        """
        done: asyncio.Future[T] = self._loop.create_future()
        task = _Task(work, done, self._reads.enter())
        given_up = threading.Event()
        self._readers.submit(self._answer, task, given_up)
        try:
            return await outcome(names.SQLITE, names.SELECT, done)
        except asyncio.CancelledError:
            given_up.set()
            raise

    def _answer(self, task: _Task[T], given_up: threading.Event) -> None:
        """Run the work, unless its caller has given up."""
        result: object = None
        if not given_up.is_set():
            try:
                result = self._read(task.work)
            except Exception as error:  # raised in the waiting caller
                result = error
        self._loop.call_soon_threadsafe(_resolve, [task], [result])  # type: ignore[arg-type]

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
                if connection is None:
                    connection = _connect(self._path, _WRITE)
                    _limit(connection, self._share)
                self._check_room(connection)
                results = _commit(connection, group)
            except DomainError as refusal:
                results = [refusal] * len(group)
            except apsw.Error as error:
                results = [_translated(error)] * len(group)
            except Exception as error:  # a bug of ours: raised in the waiting callers, which stop
                results = [error] * len(group)
            self._loop.call_soon_threadsafe(_resolve, group, results)
            if connection is not None:
                self._bound_log(connection)
            first = None if stop else self._queue.get()
        if connection is not None:
            connection.close()

    @property
    def log_bytes(self) -> int:
        try:
            return self._wal.stat().st_size
        except OSError:
            return 0

    def _check_room(self, connection: apsw.Connection) -> None:
        """Refuse writes while readers keep the log at twice its share of a limit.

        Raises:
            StoreFull: the log has that size.
        """
        if not self._is_limited or self.log_bytes < 2 * self._share.log:
            return
        self._bound_log(connection)
        if self.log_bytes >= 2 * self._share.log:
            raise StoreFull(
                "the store is full until its readers finish", retry_after_s=RETRY_AFTER_S
            )

    def _bound_log(self, connection: apsw.Connection) -> None:
        """Restart the write-ahead log if it is too large."""
        size_bytes = self.log_bytes
        if size_bytes <= self._share.log:
            return
        is_far_above = size_bytes > 2 * self._share.log
        connection.set_busy_timeout(BUSY_TIMEOUT_MS if is_far_above else CHECKPOINT_WAIT_MS)
        try:
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        except apsw.Error:
            return  # a reader still uses it; try again after the next group
        finally:
            connection.set_busy_timeout(BUSY_TIMEOUT_MS)

    async def open(self) -> None:
        """Start the writer and prepare the database. Retries while the disk fails or is full.

        Raises:
            StoreFull, StoreUnavailable: opening failed for OPEN_MAX_S, or for a reason other than
                the disk.
        """
        self._writer.start()
        until_s = self._loop.time() + OPEN_MAX_S
        while True:
            try:
                await self.write(self._prepare)
            except (StoreFull, StoreUnavailable) as error:
                if not isinstance(error.__cause__, _PASSING) or self._loop.time() >= until_s:
                    raise
                log.warning(
                    "store cannot be opened", path=str(self._path), why=str(error.__cause__)
                )
                await asyncio.sleep(OPEN_RETRY_S)
            else:
                return

    async def close(self) -> None:
        """End all threads, after the queued writes."""
        self._queue.put(None)
        await asyncio.to_thread(self._writer.join)
        await asyncio.to_thread(self._readers.shutdown)


@asynccontextmanager
async def connections(
    path: Path, *, readers: int, prepare: Work[None], size_max_bytes: int = 0
) -> AsyncIterator[Connections]:
    """Open a database; `prepare` runs first, in a transaction. With `size_max_bytes`, it refuses to
    grow beyond that size, its write-ahead log included; but while readers use the log, that may
    grow to twice its share, and by one group of writes."""
    opened = Connections(path, readers=readers, prepare=prepare, size_max_bytes=size_max_bytes)
    try:
        await opened.open()
        with _used_alone(path):
            yield opened
    finally:
        await opened.close()


@contextmanager
def _used_alone(path: Path) -> Iterator[None]:
    """Warn if another process has the database open: it would serve what this one changes, and the
    other way round. The lock on a file beside the database ends with the process."""
    with ExitStack() as stack:
        try:
            # Not the database itself: closing it would release SQLite's own locks.
            file = stack.enter_context(path.with_name(f"{path.name}-lock").open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning(
                "store is open in another process: SQLite is for one instance; for several, set "
                "postgres_url",
                store=path.name,
            )
        except OSError as error:
            log.info("cannot tell whether another process uses the store", why=str(error))
        yield


class SqliteTransaction:
    """See seqgate.services.runtime.transactions.Transaction. One writes at a time."""

    for_update = ""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def rows(self, sql: str, *values: Value) -> list[Any]:
        return self._connection.execute(sql, values).fetchall()

    def scan(self, sql: str, *values: Value) -> Iterator[Any]:
        return self._connection.execute(sql, values)

    def change(self, sql: str, *values: Value) -> int:
        self._connection.execute(sql, values)
        return self._connection.changes()

    def each(self, sql: str, values: Iterable[Sequence[Value]]) -> None:
        self._connection.executemany(sql, values)

    def reclaim(self) -> None:
        self.rows(f"PRAGMA incremental_vacuum({RECLAIM_PAGES_MAX})")


class SqliteDatabase:
    """See seqgate.services.runtime.transactions.Database."""

    def __init__(self, opened: Connections) -> None:
        self._connections = opened

    async def write(self, work: TablesWork[T]) -> T:
        return await self._connections.write(lambda db: work(SqliteTransaction(db)))

    async def read(self, work: TablesWork[T]) -> T:
        return await self._connections.read(lambda db: work(SqliteTransaction(db)))


_PASSING: Final = (apsw.IOError, apsw.FullError, apsw.BusyError)
"""Errors that may pass: opening is retried."""

_WRITE: Final = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE


def _connect(path: Path, flags: int) -> apsw.Connection:
    connection = apsw.Connection(str(path), flags=flags)
    connection.set_busy_timeout(BUSY_TIMEOUT_MS)
    if flags & apsw.SQLITE_OPEN_READWRITE:
        connection.execute("PRAGMA page_size = 8192")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {AUTOCHECKPOINT_PAGES}")
        connection.execute("PRAGMA journal_size_limit = 67108864")
    return connection


def _limit(connection: apsw.Connection, share: DiskShare) -> None:
    if share.database:
        page_bytes = int(connection.pragma("page_size"))
        connection.pragma("max_page_count", share.database // page_bytes)
        pages = max(1, min(AUTOCHECKPOINT_PAGES, share.log // 2 // page_bytes))
        connection.pragma("wal_autocheckpoint", pages)


def _commit(connection: apsw.Connection, group: list[_Task[object]]) -> list[object]:
    """Run the work of a group in one transaction. Returns all results, refusals included.

    Raises:
        apsw.Error: nothing was done; or, if the commit itself failed, the outcome is unknown.
    """
    results: list[object] = []
    try:
        connection.execute("BEGIN IMMEDIATE")
        for task in group:
            if task.done.cancelled():  # nobody waits for it
                results.append(None)
                continue
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
        task.ended()
        if task.done.cancelled():
            continue
        if isinstance(result, Exception):
            task.done.set_exception(result)
            task.done.exception()  # mark it as retrieved: the caller may be cancelled right now
        else:
            task.done.set_result(result)


def _translated(error: apsw.Error) -> DomainError:
    if isinstance(error, apsw.FullError):
        refusal: DomainError = StoreFull("the store is full", retry_after_s=RETRY_AFTER_S)
    else:
        refusal = StoreUnavailable("the store failed", retry_after_s=RETRY_AFTER_S)
    refusal.__cause__ = error
    return refusal
