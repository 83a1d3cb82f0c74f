"""PostgreSQL for asyncio: transactions on a few connections, and what a commit there means.

A commit is durable once the server reports it, on a synchronous standby, too, if there is one. One
trap is in the way: a commit that is cancelled while it waits for the standby reports success, and a
warning, although only the primary has it, and a fail-over removes it. So nothing here cancels a
statement: not a cancelled caller, not a time limit, not the end of the process. What must be given
up is given up with its connection. A warning during a transaction, a lost connection and a time
limit all mean that the outcome is unknown: StoreUnavailable.

A primary that was replaced may come back and accept statements. Each promotion begins a timeline
with a higher number: a connection to a server on a lower timeline than the highest seen is refused.
Until a process sees the new one, the old primary answers its reads with what it had, but it cannot
commit, since its standbys follow the new one: a read that ends with a commit is current.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from random import Random
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import asyncpg
import structlog

from seqgate.services.errors import DomainError, StoreFull, StoreUnavailable
from seqgate.services.runtime.awaiting import synchronously, wait_for
from seqgate.services.runtime.transactions import RETRY_AFTER_S, Transaction, Value, Work
from seqgate.services.runtime.waiting import Begun, Waiting, outcome
from seqgate.telemetry import names

log = structlog.get_logger()

T = TypeVar("T")

VERSION_MIN: Final = 150_000
"""The oldest server, as in server_version_num: PostgreSQL 15."""

CONNECT_MAX_S: Final = 10.0
"""How long connecting to one server may take."""

OTHERS_MAX_S: Final = 2.0
"""How much longer the other servers of a URL may take when one of them is a primary: a server that
was lost with its machine does not answer, and one that does may have replaced that primary."""

STATEMENT_MAX_S: Final = 30.0
"""How long a transaction may use a connection; then the connection is given up, and the outcome is
unknown."""

SUSPECT_AFTER_S: Final = 3.0
"""How long a transaction takes before the other servers are asked whether one of them was
promoted; then its connection is given up."""

GUARD_S: Final = 0.5
"""The interval at which running transactions are looked at."""

CLOSE_MAX_S: Final = 5.0
"""How long a process that ends waits for what runs. Its callers are gone, so then it gives up the
connections."""

LOCK_MAX_MS: Final = 10_000
"""How long a statement waits for a lock."""

IDLE_MAX_MS: Final = 5_000
"""How long a transaction may pause between statements, before the server ends it: a process that
stands still must not hold its locks."""

RUNS_MAX: Final = 8
"""How often work is run before its deadlocks and serialization failures are reported."""

RUN_AGAIN_S: Final = 0.05
"""The longest pause before work runs again, times the number of its runs."""

OPEN_MAX_S: Final = 30.0
OPEN_RETRY_S: Final = 0.2
"""How long opening a database that does not answer is retried, and the pause between attempts."""

SCAN_ROWS_MAX: Final = 16
"""The most rows of a scan that are fetched at a time; the first fetch asks for one."""

STATEMENTS_CACHED_MAX: Final = 1_000
"""The most texts of statements whose translation is kept."""

EXPECTED_URL: Final = "must be postgresql://user@host:port/database"

_DURABLE: Final = ("on", "remote_apply")
_LOUD: Final = (
    "warning",
    "notice",
    "log",
    "info",
    "debug1",
    "debug2",
    "debug3",
    "debug4",
    "debug5",
)

_ABOUT: Final = """SELECT pg_is_in_recovery(),
    CASE WHEN pg_is_in_recovery() THEN 0
        ELSE ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint END,
    current_setting('server_version_num')::int,
    current_setting('synchronous_commit'),
    current_setting('client_min_messages'),
    current_setting('synchronous_standby_names') <> ''"""


_SIZE: Final = """SELECT sum(pg_total_relation_size(name::regclass))::bigint
    FROM unnest(string_to_array(?, ' ')) AS name"""


_SET: Final = f"""SET application_name = seqgate; SET synchronous_commit = {{}};
    SET client_min_messages = warning; SET statement_timeout = 0; SET jit = off;
    SET lock_timeout = {LOCK_MAX_MS};
    SET idle_in_transaction_session_timeout = {IDLE_MAX_MS}"""


class Server(NamedTuple):
    """Where the database is, and what is asked of it.

    Attributes:
        url: postgresql://user:password@host:port,host:port/database?option=value
        writers: the most connections for changes.
        readers: the most connections for reads.
        needs_standby: whether a primary without a synchronous standby is refused, or only warned
            about.
    """

    url: str
    writers: int = 8
    readers: int = 4
    needs_standby: bool = False


class _Address(NamedTuple):
    host: str | None
    port: int | None


def addresses_of(url: str) -> list[_Address]:
    """The servers in a URL; one without a name if only its options name it.

    Raises:
        ValueError: the URL is not one of PostgreSQL's.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("postgresql", "postgres"):
        raise ValueError(EXPECTED_URL)
    found = []
    for each in parts.netloc.rpartition("@")[2].split(","):
        match = _ADDRESS.fullmatch(each)
        if match is None:
            raise ValueError(EXPECTED_URL)
        host, port = match.groups()
        found.append(_Address(host.strip("[]") or None, int(port) if port else None))
    return found


_ADDRESS: Final = re.compile(r"(\[[^\]]*\]|[^:]*)(?::(\d+))?")


class _Connection:
    """A connection, and what happened on it."""

    def __init__(self, raw: "asyncpg.Connection[Any]", timeline: int) -> None:
        self.raw = raw
        self.timeline = timeline
        self.warning = ""
        self.busy_since_s = 0.0
        raw.add_log_listener(self._hear)

    def _hear(self, _: object, message: Any) -> None:
        if message.severity_en == "WARNING":
            self.warning = message.message

    def busy_s(self) -> float:
        """How long the transaction has taken, in seconds."""
        return time.monotonic() - self.busy_since_s

    def check(self) -> None:
        """Return if what was reported as committed is.

        Raises:
            StoreUnavailable: the server warned, as it does when a commit that waits for a standby
                is cancelled.
        """
        if self.warning:
            raise StoreUnavailable(
                "the database does not say that the change is durable",
                retry_after_s=RETRY_AFTER_S,
                warning=self.warning,
            )

    @property
    def is_usable(self) -> bool:
        return not (self.warning or self.raw.is_closed() or self.raw.is_in_transaction())


class Servers:
    """Connects to the primary among the servers of a URL."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._addresses = addresses_of(server.url)
        self._current: _Address | None = None
        self._is_warned = False
        self.timeline = 0
        """The highest timeline seen."""

    async def connect(self) -> _Connection:
        """Connect to the primary with the highest timeline.

        Raises:
            StoreUnavailable: none answers that can be used.
        """
        if self._current is not None and len(self._addresses) > 1:
            with suppress(StoreUnavailable, _NotPrimary):
                return await self._connect(self._current)
        asked = [asyncio.create_task(self._connect(each)) for each in self._addresses]
        try:
            await _one_or_all(asked)
        finally:
            for each in asked:
                each.cancel()
            await asyncio.wait(asked)
        found = [
            (each.result(), address)
            for each, address in zip(asked, self._addresses, strict=True)
            if _is_successful(each)
        ]
        if not found:
            errors = [error for each in asked if (error := each.exception()) is not None]
            for error in errors:
                if not isinstance(error, _NotPrimary):
                    raise error
            raise _unavailable("no server of postgres_url is the primary", errors[0])
        found.sort(key=lambda each: each[0].timeline, reverse=True)
        (newest, self._current), *others = found
        for other, _ in others:
            other.raw.terminate()
        return newest

    async def _connect(self, address: _Address) -> _Connection:
        try:
            raw = await asyncpg.connect(
                self._server.url,
                host=address.host,
                port=address.port,
                timeout=CONNECT_MAX_S,
            )
        except _FAILED as error:
            raise _unavailable("the database cannot be reached", error) from error
        try:
            return await self._checked(raw)
        except BaseException as error:
            raw.terminate()
            if isinstance(error, _FAILED):
                raise _unavailable("the database cannot be reached", error) from error
            raise

    async def _checked(self, raw: "asyncpg.Connection[Any]") -> _Connection:
        about = await raw.fetchrow(_ABOUT)
        assert about is not None
        in_recovery, timeline, version, commit, messages, has_standby = about
        if version < VERSION_MIN:
            raise StoreUnavailable("PostgreSQL is older than 15", server_version_num=version)
        if in_recovery:
            raise _NotPrimary("the server is a standby")
        if timeline < self.timeline:
            raise _NotPrimary(f"timeline {timeline} was replaced by {self.timeline}")
        if commit not in _DURABLE:
            raise StoreUnavailable(
                f"synchronous_commit is {commit}: set it to on, or acknowledged messages get lost",
                synchronous_commit=commit,
            )
        if messages not in _LOUD:
            raise StoreUnavailable(
                f"client_min_messages is {messages}: set it to warning, or a cancelled commit "
                "looks like a durable one",
                client_min_messages=messages,
            )
        self._judge_standby(has_standby=has_standby)
        self.timeline = timeline
        # A change of the server's configuration no longer applies to this connection.
        await raw.execute(_SET.format(commit))
        return _Connection(raw, timeline)

    def _judge_standby(self, *, has_standby: bool) -> None:
        if has_standby:
            self._is_warned = False
        elif self._server.needs_standby:
            raise StoreUnavailable(
                "PostgreSQL has no synchronous standby: set synchronous_standby_names, or "
                "postgres_standby_required to false"
            )
        elif not self._is_warned:
            self._is_warned = True
            log.warning(
                "PostgreSQL has no synchronous standby: a primary that is lost takes acknowledged "
                "messages with it"
            )

    async def look(self) -> None:
        """Look for a primary with a higher timeline."""
        self._current = None
        with suppress(StoreUnavailable):
            (await self.connect()).raw.terminate()


async def _one_or_all(asked: Sequence["asyncio.Task[Any]"]) -> None:
    """Wait until one has succeeded, and OTHERS_MAX_S for the others; or until all have failed."""
    waiting = set(asked)
    while waiting and not any(map(_is_successful, asked)):
        _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if waiting:
        await asyncio.wait(waiting, timeout=OTHERS_MAX_S)


def _is_successful(task: "asyncio.Task[Any]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


class _NotPrimary(Exception):
    """A server that can be connected to, and is not the primary."""


class _Lane:
    """Connections for one kind of work, used by one piece of it at a time."""

    def __init__(self, servers: Servers, count: int) -> None:
        self._servers = servers
        self._idle: list[_Connection] = []
        self._free = asyncio.Semaphore(count)
        self.used: set[_Connection] = set()

    @asynccontextmanager
    async def connection(self, begun: Begun) -> AsyncIterator[_Connection]:
        async with self._free:
            begun.begin()
            connection = self._pick() or await self._servers.connect()
            connection.busy_since_s = time.monotonic()
            self.used.add(connection)
            try:
                yield connection
            finally:
                self.used.discard(connection)
                if connection.is_usable:
                    self._idle.append(connection)
                else:
                    connection.raw.terminate()

    def _pick(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and connection.timeline == self._servers.timeline:
                return connection
            connection.raw.terminate()
        return None

    async def close(self) -> None:
        for connection in self._idle:
            with suppress(Exception):  # it is closed in either case
                await connection.raw.close(timeout=1)
        for connection in self.used:
            connection.raw.terminate()


class PostgresTransaction:
    """See seqgate.services.runtime.transactions.Transaction."""

    def __init__(self, raw: "asyncpg.Connection[Any]", for_update: str) -> None:
        self._raw = raw
        self.for_update = for_update

    def rows(self, sql: str, *values: Value) -> list[Any]:
        return wait_for(self._raw.fetch(numbered(sql), *values))

    def scan(self, sql: str, *values: Value) -> Iterator[Any]:
        cursor = wait_for(_opened(self._raw, numbered(sql), values))
        count = 1
        while found := wait_for(cursor.fetch(count)):
            yield from found
            if len(found) < count:
                return
            count = min(2 * count, SCAN_ROWS_MAX)

    def change(self, sql: str, *values: Value) -> int:
        status = wait_for(self._raw.execute(numbered(sql), *values))
        count = status.rpartition(" ")[2]  # such as of UPDATE 1
        return int(count) if count.isdigit() else 0

    def each(self, sql: str, values: Iterable[Sequence[Value]]) -> None:
        wait_for(self._raw.executemany(numbered(sql), values))

    def reclaim(self) -> None:
        """VACUUM does, outside of transactions."""


async def _opened(raw: "asyncpg.Connection[Any]", sql: str, values: Sequence[Value]) -> Any:
    return await raw.cursor(sql, *values)


@lru_cache(STATEMENTS_CACHED_MAX)
def numbered(sql: str) -> str:
    """A statement with PostgreSQL's $1 in place of `?` and `?1`."""
    count = 0

    def place(match: "re.Match[str]") -> str:
        nonlocal count
        count += 1
        return f"${match[1] or count}"

    return re.sub(r"\?(\d*)", place, sql)


def size_of(db: Transaction, tables: Sequence[str]) -> int:
    """The size of tables with their indexes, in bytes."""
    ((size_bytes,),) = db.rows(_SIZE, " ".join(tables))
    return int(size_bytes)


class _RunAgain(Exception):
    """Work that did nothing, for a reason that may have passed."""


class PostgresDatabase:
    """See seqgate.services.runtime.transactions.Database. Created by `open_postgres`."""

    def __init__(self, server: Server, *, confirms_reads: bool = False) -> None:
        self._servers = Servers(server)
        self._look = _CONFIRMED_LOOK if confirms_reads else _LOOK
        self._writers = _Lane(self._servers, server.writers)
        self._readers = _Lane(self._servers, server.readers)
        self._writes, self._reads = Waiting("writes"), Waiting("reads")
        self._running: set[asyncio.Task[Any]] = set()
        self._random = Random()

    async def write(self, work: Work[T]) -> T:
        def transact(connection: _Connection) -> Awaitable[T]:
            return _transact(connection, _CHANGE, work)

        return await self._run(self._writers, transact, self._writes, names.COMMIT)

    async def read(self, work: Work[T]) -> T:
        def transact(connection: _Connection) -> Awaitable[T]:
            return _transact(connection, self._look, work)

        return await self._run(self._readers, transact, self._reads, names.SELECT)

    async def change(self, sql: str, *values: object) -> list[Any]:
        """Run one statement as a transaction of its own, and return its rows.

        Raises:
            ServiceBusy, StoreFull, StoreUnavailable: as from write.
        """

        def transact(connection: _Connection) -> Awaitable[list[Any]]:
            return _execute(connection, sql, values)

        return await self._run(self._writers, transact, self._writes, names.COMMIT)

    async def alone(self, sql: str) -> None:
        """Run a statement that cannot be in a transaction, such as VACUUM, on a connection of its
        own; it may take long.

        Raises:
            StoreFull, StoreUnavailable: as from write.
        """
        connection = await self._servers.connect()
        try:
            await connection.raw.execute(sql)
        except _FAILED as error:
            raise _translated(error) from error
        finally:
            connection.raw.terminate()

    async def _run(
        self,
        lane: _Lane,
        transact: Callable[[_Connection], Awaitable[T]],
        waiting: Waiting,
        operation: str,
    ) -> T:
        """Run a transaction in a task that nobody cancels once it has its turn. Before that, it is
        dropped if its caller gives up."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting.begin(done)
        begun = Begun()
        running = asyncio.create_task(self._resolve(done, lane, transact, begun))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        with begun.dropping(running, done):
            return await outcome(names.POSTGRESQL, operation, asyncio.shield(done))

    async def _resolve(
        self,
        done: "asyncio.Future[T]",
        lane: _Lane,
        transact: Callable[[_Connection], Awaitable[T]],
        begun: Begun,
    ) -> None:
        try:
            done.set_result(await self._attempted(lane, transact, begun))
        except Exception as error:  # raised in the waiting caller
            done.set_exception(error)
            done.exception()  # mark it as retrieved: the caller may be cancelled right now

    async def _attempted(
        self, lane: _Lane, transact: Callable[[_Connection], Awaitable[T]], begun: Begun
    ) -> T:
        runs = 0
        while True:
            runs += 1
            try:
                async with lane.connection(begun) as connection:
                    return await transact(connection)
            except _RunAgain as again:
                if runs == RUNS_MAX:
                    raise _unavailable("the database has too many conflicts", again) from again
            await asyncio.sleep(self._random.uniform(0, RUN_AGAIN_S * runs))

    async def guard_forever(self) -> None:
        """Give up connections whose transaction takes too long, or whose server was replaced."""
        while True:
            await asyncio.sleep(GUARD_S)
            used = [*self._writers.used, *self._readers.used]
            slow = [each for each in used if each.busy_s() > SUSPECT_AFTER_S]
            if not slow:
                continue
            await self._servers.look()
            for each in slow:
                if each.busy_s() > STATEMENT_MAX_S or each.timeline < self._servers.timeline:
                    log.warning("connection to PostgreSQL given up", seconds=round(each.busy_s()))
                    each.raw.terminate()

    async def close(self) -> None:
        """Wait for what runs, for CLOSE_MAX_S, and close all connections."""
        if self._running:
            await asyncio.wait(self._running, timeout=CLOSE_MAX_S)
        for lane in (self._writers, self._readers):
            await lane.close()


@asynccontextmanager
async def open_postgres(
    server: Server, *, confirms_reads: bool = False
) -> AsyncIterator[PostgresDatabase]:
    """Connect to a database. Retries while no server answers.

    Args:
        confirms_reads: whether each read costs a commit, which a replaced primary cannot make; for
            callers that do not confirm by other means that theirs is the primary.

    Raises:
        StoreUnavailable: no server answered for OPEN_MAX_S, or one has a setting that is refused.
    """
    database = PostgresDatabase(server, confirms_reads=confirms_reads)
    guard = asyncio.create_task(database.guard_forever())
    try:
        await insisted(lambda: database.read(lambda db: db.rows("SELECT 1")))
        yield database
    finally:
        guard.cancel()
        await asyncio.wait({guard})
        await database.close()


async def insisted(begin: Callable[[], Awaitable[T]]) -> T:
    """Do what a process needs before it serves, repeatedly while no server answers: a fail-over
    that begins meanwhile must not end the process.

    Raises:
        StoreUnavailable: it failed for OPEN_MAX_S, or for a reason that does not pass.
    """
    until_s = time.monotonic() + OPEN_MAX_S
    while True:
        try:
            return await begin()
        except StoreUnavailable as error:
            may_pass = error.retry_after_s is not None
            if not may_pass or time.monotonic() >= until_s:
                raise
            log.warning("PostgreSQL cannot be reached", why=str(error.__cause__ or error))
            await asyncio.sleep(OPEN_RETRY_S)


async def _transact(connection: _Connection, how: "_How", work: Work[T]) -> T:
    raw = connection.raw
    try:
        await raw.execute(how.begin)
    except _FAILED as error:  # the server, or what is in between, closed it while it was idle
        raw.terminate()
        raise _RunAgain(str(error)) from error
    try:
        result = await synchronously(lambda: work(PostgresTransaction(raw, how.for_update)))
        await raw.execute(how.end)
    except _CONFLICTS as error:
        await _roll_back(raw)
        raise _RunAgain(str(error)) from error
    except DomainError:
        await _roll_back(raw)
        raise
    except _FAILED as error:
        raw.terminate()
        raise _translated(error) from error
    connection.check()
    return result


async def _execute(connection: _Connection, sql: str, values: Sequence[object]) -> list[Any]:
    try:
        rows = await connection.raw.fetch(sql, *values)
    except _CONFLICTS as error:
        raise _RunAgain(str(error)) from error
    except _FAILED as error:
        connection.raw.terminate()
        raise _translated(error) from error
    connection.check()
    return rows


async def _roll_back(raw: "asyncpg.Connection[Any]") -> None:
    with suppress(*_FAILED):
        if raw.is_in_transaction():
            await raw.execute("ROLLBACK")


class _How(NamedTuple):
    begin: str
    for_update: str
    end: str = "COMMIT"


_CHANGE: Final = _How("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE", " FOR UPDATE")
_LOOK: Final = _How("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "")
# A commit of nothing would not wait for a standby; this one writes a message that nobody reads.
_CONFIRMED_LOOK: Final = _LOOK._replace(
    end="SELECT pg_logical_emit_message(true, 'seqgate', ''); COMMIT"
)

_CONFLICTS: Final = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.UniqueViolationError,  # two transactions inserted the same row
)
"""Errors of a transaction that did nothing, and may succeed when it runs again."""

_FAILED: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the server closed the connection at a surprising moment
    OSError,
)


def _translated(error: Exception) -> DomainError:
    if isinstance(error, asyncpg.DiskFullError):
        return StoreFull("the store is full", retry_after_s=RETRY_AFTER_S)
    return _unavailable("the store failed", error)


def _unavailable(message: str, error: BaseException) -> StoreUnavailable:
    refusal = StoreUnavailable(message, retry_after_s=RETRY_AFTER_S)
    refusal.__cause__ = error
    return refusal
