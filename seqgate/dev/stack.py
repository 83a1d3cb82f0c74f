"""Every service, and an embedded Redis server, as child processes.

Used by `seqgate dev`, the demo and tests. A stack keeps its data in one folder, across runs:

    redis/        the append-only file
    redis-1/ ...  those of further Redis servers
    ledger/       the SQLite database of the logs
    cursor/       the SQLite database of the cursors
    postgres/     or a PostgreSQL server's data: logs and cursors
    logs/         the output of each process, appended
    policies.toml deduplication policies, if there are any
"""

import asyncio
import fcntl
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import Any, Final, Self, TypeVar

from grpc import aio
from grpc_health.v1 import health_pb2
from redis.asyncio import Redis
from redis.exceptions import RedisError

from seqgate.dev.child import Child, start_process, tail, tell
from seqgate.dev.ports import free_ports
from seqgate.dev.postgres_server import (
    is_ready,
    make_database_folder,
    postgres_command,
    postgres_url,
)
from seqgate.dev.redis_server import redis_command
from seqgate.services.runtime.channels import health_check

T = TypeVar("T")

READY_TIMEOUT_S: Final = 300.0
"""How long a process that is alive may take to become ready: on a busy machine, minutes."""

TELL_AFTER_S: Final = 5.0
"""How long a start is waited for in silence, and how often it is told that it goes on."""

ANSWER_TIMEOUT_S: Final = 5.0
"""How long one answer is waited for, before the process is asked again."""

REDIS_PATIENCE_S: Final = 10.0
"""How long a Redis server may take to answer."""

STOP_TIMEOUT_S: Final = 30.0
"""How long a process may take to stop after SIGTERM."""

SERVICES: Final = ("cursor", "dedup", "ledger", "filter", "dispatcher")
"""In the order of their dependencies; stopped in reverse."""

PORTS: Final = (
    "redis",
    "dedup",
    "ledger",
    "cursor",
    "dispatcher",
    "filter",
    "postgres",
    "console",
)
"""In the order of their ports, if these are consecutive."""

CONSOLE: Final = "console"
"""Not one of SERVICES: a client of them all, that runs if chosen."""

STORES: Final = ("cursor", "ledger")
"""The services with a database."""

POSTGRES: Final = "postgres"
"""The name of a PostgreSQL server."""


CALLS: Final = (
    ("ledger", "dedup"),
    ("ledger", "cursor"),
    ("dedup", "cursor"),
    ("dispatcher", "ledger"),
    ("dispatcher", "cursor"),
    ("dispatcher", "filter"),
)
"""(caller, callee)."""


class StackError(Exception):
    """A process did not start, or ended unexpectedly."""


class Stack:
    """The processes, by name: Redis servers, and the chosen ones of SERVICES and
    CONSOLE."""

    start_process = staticmethod(start_process)

    def __init__(
        self,
        folder: Path,
        *,
        services: Sequence[str] = SERVICES,
        environment: Mapping[str, str] | None = None,
        commands: Mapping[str, Sequence[str]] | None = None,
        ports: Mapping[str, int] | None = None,
        instances: int = 1,
        replicas: int = 1,
        redis_servers: int = 1,
        on_postgres: bool = False,
        postgres_url: str = "",
        ready_timeout_s: float = READY_TIMEOUT_S,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            folder: the folder of data and logs; created if missing.
            services: the ones of SERVICES to run, in their order, and CONSOLE last, if at all.
            environment: settings (SEQGATE_<SERVICE>_<NAME>) that override the stack's own.
            commands: commands that replace `python -m seqgate.services.<name>`.
            ports: ports to listen on, by name; free ones by default.
            instances: the number of processes of each of STORES, on one store: ledger, ledger-1,
                ledger-2 ...
            replicas: the number of processes of each other service, named likewise.
            redis_servers: the number of Redis servers: redis, redis-1 ... They are independent
                until made replicas.
            on_postgres: whether STORES keep their data in PostgreSQL, and not in SQLite.
            postgres_url: a PostgreSQL database of the caller's, for the data of STORES.
            ready_timeout_s: how long each process may take to become ready, while it is alive.
            tell: gets a sentence now and then about a process that is waited for.
        """
        self.folder = folder.resolve()
        counts = {service: instances if service in STORES else replicas for service in SERVICES}
        counts[CONSOLE] = 1
        self.instances = {
            service: [service, *(f"{service}-{number}" for number in range(1, count))]
            for service, count in counts.items()
        }
        """The names of the processes of each service."""
        self.services = tuple(name for service in services for name in self.instances[service])
        self.redis = ["redis", *(f"redis-{number}" for number in range(1, redis_servers))]
        self.databases = [POSTGRES] if on_postgres else []
        """The names of the PostgreSQL servers."""
        self._postgres_url = postgres_url
        self._ready_timeout_s = ready_timeout_s
        self._tell = tell
        self.environment = dict(environment or {})
        """Overrides of the stack's own settings. A change applies to processes started later."""
        self._commands = dict(commands or {})
        # A service that does not run still has an address.
        more = (name for names in self.instances.values() for name in names[1:])
        names = [*PORTS, *more, *self.redis[1:]]
        chosen = dict(zip(names, free_ports(len(names)), strict=True)) | dict(ports or {})
        self.ports = chosen
        self._processes: dict[str, Child] = {}
        self._lock: int | None = None

    @property
    def names(self) -> Sequence[str]:
        """The names of all processes, in the order of their start."""
        return (*self.redis, *self.databases, *self.services)

    # ---- addresses

    @property
    def redis_url(self) -> str:
        return f"redis://127.0.0.1:{self.ports['redis']}/0"

    @property
    def postgres_url(self) -> str:
        """The PostgreSQL database of STORES; empty: they use SQLite."""
        if self.databases:
            return postgres_url(*(self.ports[each] for each in self.databases))
        return self._postgres_url

    def address(self, service: str) -> str:
        return f"127.0.0.1:{self.ports[service]}"

    def target(self, service: str) -> str:
        return any_of([self.address(each) for each in self.instances[service]])

    @property
    def policy_file(self) -> Path:
        return self.folder / "policies.toml"

    @property
    def endpoints(self) -> dict[str, object]:
        return {
            **{service: self.address(service) for service in self.services},
            "redis": self.redis_url,
            **dict.fromkeys(self.databases, self.postgres_url),
            "pids": {name: process.pid for name, process in self._processes.items()},
        }

    # ---- life

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything, and return when all of it is ready. Raises StackError if a process ends
        or is not ready in time, or another stack uses the folder."""
        stores = () if self.postgres_url else STORES
        for part in ("logs", *self.redis, *self.databases, *stores):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        if not self.policy_file.exists():
            self.policy_file.write_text("# Deduplication policies; read again when this changes.\n")
        self._take_folder()
        for name in self.databases:
            await asyncio.to_thread(make_database_folder, self.folder / name)
        for name in self.names:
            await self.spawn(name)
        for name in self.names:
            await self.ready(name)

    async def stop(self) -> None:
        for name in (*reversed(self.services), *self.databases, *self.redis):
            await self.terminate(name)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def wait(self) -> str:
        """Wait until a process ends unexpectedly, and return its name."""
        waits = {
            asyncio.create_task(process.wait()): name for name, process in self._processes.items()
        }
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return waits[done.pop()]

    async def while_running(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that needs all processes, and return its result. Raises StackError, and cancels
        the work, if a process ends unexpectedly."""
        working, ending = asyncio.create_task(work), asyncio.create_task(self.wait())
        try:
            await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            name = ending.result()
            raise StackError(f"{name} ended:\n{self.last_words(name)}")
        finally:
            for task in (working, ending):
                task.cancel()
            await asyncio.wait({working, ending})

    async def run(self, name: str) -> None:
        """Start one process, and wait until it is ready."""
        await self.spawn(name)
        await self.ready(name)

    async def terminate(self, name: str) -> int | None:
        """Stop one process gracefully. Returns its exit status; None if it is not running."""
        process = self._processes.pop(name, None)
        if process is None:
            return None
        # PostgreSQL would wait for its clients after SIGTERM.
        tell(process, Signals.SIGINT if name in self.databases else Signals.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                return await process.wait()
        except TimeoutError:
            tell(process, Signals.SIGKILL)
            return await process.wait()

    async def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        tell(process, Signals.SIGKILL)
        await process.wait()

    async def ended(self, name: str) -> int:
        """Wait until a process ends by itself. Returns its exit status, negative for a signal."""
        status = await self._processes[name].wait()
        del self._processes[name]
        return status

    async def ready(self, name: str) -> None:
        """Wait until a process is ready. Raises StackError if it ended, or is not ready in time."""
        process = self._processes[name]
        began_s = time.monotonic()
        told = 0
        while not await self._answers_in_time(name):
            if process.returncode is not None:
                raise StackError(f"{name} ended with {process.returncode}: {self.last_words(name)}")
            waited_s = time.monotonic() - began_s
            if waited_s > self._ready_timeout_s:
                raise StackError(
                    f"{name} is alive, but was not ready within {self._ready_timeout_s:g} s, the "
                    f"limit (--ready-timeout of seqgate dev): {self.last_words(name)}"
                )
            if waited_s > (told + 1) * TELL_AFTER_S:
                told += 1
                self._tell(f"{name} is alive and not ready yet, after {waited_s:.0f} s")
            await asyncio.sleep(0.02)

    def store(self, service: str) -> Path:
        """The database shared by all instances of a service."""
        return self.folder / service / f"{service}.db"

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def log_tail(self, name: str) -> str:
        return tail(self.log(name))

    def last_words(self, name: str) -> str:
        """The last lines of a process's log, for an error about it."""
        return self.log_tail(name) or f"it has written nothing to {self.log(name)}"

    def signal(self, name: str, number: Signals) -> None:
        if name in self._processes:
            tell(self._processes[name], number)

    def process(self, name: str) -> Child | None:
        """A process as last started; None if it was stopped or never started."""
        return self._processes.get(name)

    def pid(self, name: str) -> int | None:
        """A process's id; None if it is not running."""
        process = self._processes.get(name)
        return None if process is None or process.returncode is not None else process.pid

    async def ask_redis(self, name: str, *words: str | int) -> None:
        """Run a command on a server, once it answers. Raises TimeoutError if it does not."""
        async with asyncio.timeout(REDIS_PATIENCE_S):
            while True:
                try:
                    async with Redis(port=self.ports[name], socket_timeout=1) as redis:
                        await redis.execute_command(*words)  # type: ignore[no-untyped-call]
                        return
                except RedisError:
                    await asyncio.sleep(0.05)

    async def spawn(self, name: str) -> None:
        """Start one process without waiting for it to be ready."""
        assert name not in self._processes
        with self.log(name).open("ab") as log:
            environment = {**os.environ, **self.settings, **self._own_settings(name)}
            self._processes[name] = await self.start_process(
                self._command(name), log.fileno(), environment
            )

    def _command(self, name: str) -> Sequence[str]:
        if name in self.redis:
            return redis_command(self.folder / name, self.ports[name])
        if name in self.databases:
            return postgres_command(self.folder / name, self.ports[name])
        module = f"seqgate.services.{service_of(name)}"
        return self._commands.get(name, (sys.executable, "-m", module))

    def _own_settings(self, name: str) -> dict[str, str]:
        """Settings that distinguish one of several instances."""
        service = service_of(name)
        if len(self.instances.get(service, [])) < 2:
            return {}
        return {f"SEQGATE_{service.upper()}_LISTEN": self.address(name)}

    @property
    def settings(self) -> dict[str, str]:
        own = {
            "DEDUP_REDIS_URL": self.redis_url,
            "DEDUP_POLICY_FILE": str(self.policy_file),
            "DEDUP_POLICY_INTERVAL_S": "0.2",
            "DISPATCHER_LEASE_S": "3",
        }
        for service in SERVICES:
            own[f"{service.upper()}_LISTEN"] = self.address(service)
        own["CONSOLE_LISTEN"] = self.address(CONSOLE)
        for caller, callee in (*CALLS, *((CONSOLE, service) for service in SERVICES)):
            own[f"{caller.upper()}_{callee.upper()}_TARGET"] = self.target(callee)
        for service in STORES:
            if self.postgres_url:
                own[f"{service.upper()}_POSTGRES_URL"] = self.postgres_url
            else:
                own[f"{service.upper()}_STORE_PATH"] = str(self.store(service))
        return {f"SEQGATE_{name}": value for name, value in own.items()} | self.environment

    async def _answers_in_time(self, name: str) -> bool:
        try:
            async with asyncio.timeout(min(ANSWER_TIMEOUT_S, self._ready_timeout_s)):
                return await self._answers(name)
        except TimeoutError:
            return False

    async def _answers(self, name: str) -> bool:
        if name in self.redis:
            return await _pings(self.ports[name])
        if name in self.databases:
            return await asyncio.to_thread(is_ready, self.ports[name])
        if name == CONSOLE:
            return await _answers_http(self.ports[name], "/readyz")
        return await _serves(self.address(name))

    def _take_folder(self) -> None:
        lock = os.open(self.folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise StackError(f"another process is using the folder {self.folder}") from None
        self._lock = lock


def service_of(name: str) -> str:
    return name.partition("-")[0]


def any_of(addresses: Sequence[str]) -> str:
    return addresses[0] if len(addresses) == 1 else "ipv4:" + ",".join(addresses)


async def _pings(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return (await reader.readline()).startswith(b"+PONG")
    except OSError:
        return False
    finally:
        writer.close()


async def _answers_http(port: int, path: str) -> bool:
    """Whether a server on loopback answers a request with 200."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()


async def _serves(address: str) -> bool:
    async with aio.insecure_channel(address) as channel:
        try:
            reply = await health_check(channel)(health_pb2.HealthCheckRequest(), timeout=1)
        except aio.AioRpcError:
            return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING
