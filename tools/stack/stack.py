"""Every service, and an embedded Redis server, as child processes.

Used by `python -m tools.stack`, by the demo, and by tests. A stack keeps its data in one folder and
goes on from it:

    redis/        the append-only file
    redis-1/ ...  those of further Redis servers
    ledger/       the SQLite database of the logs
    cursor/       the SQLite database of the cursors
    logs/         what each process wrote, appended
    policies.toml deduplication policies, if there are any
"""

import asyncio
import fcntl
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tools.stack.child import Child, start_process, tell
from tools.stack.ports import free_ports
from tools.stack.redis_server import redis_command

READY_TIMEOUT_S: Final = 30.0
"""How long a process may take to be ready."""

STOP_TIMEOUT_S: Final = 30.0
"""How long a process may take to stop after SIGTERM."""

SERVICES: Final = ("cursor", "dedup", "ledger", "filter", "dispatcher")
"""In the order in which they depend on each other; stopped the other way round."""

PORTS: Final = ("redis", "dedup", "ledger", "cursor", "dispatcher", "filter")
"""In the order of their ports, where these are consecutive."""

STORES: Final = ("cursor", "ledger")
"""The services that keep a SQLite database."""


class StackError(Exception):
    """A process did not start, or ended by itself."""


class Stack:
    """The processes, by name: redis, and those of SERVICES that are asked for."""

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
    ) -> None:
        """
        Args:
            folder: where data and logs are kept; made if it does not exist.
            services: which of SERVICES to run, in their order.
            environment: settings (SEQGATE_<SERVICE>_<NAME>) on top of the stack's own.
            commands: what to run instead of `python -m seqgate.services.<name>`.
            ports: on which ports to listen, by name; free ones otherwise.
            instances: how many processes each of STORES has, all on its one store: ledger,
                ledger-1, ledger-2 ...
            replicas: how many each of the others has, in the same way.
            redis_servers: how many of these: redis, redis-1 ... They know nothing of each other
                until somebody tells them.
        """
        self.folder = folder.resolve()
        counts = {service: instances if service in STORES else replicas for service in SERVICES}
        self.instances = {
            service: [service, *(f"{service}-{number}" for number in range(1, count))]
            for service, count in counts.items()
        }
        """The names of the processes of each service."""
        self.services = tuple(name for service in services for name in self.instances[service])
        self.redis = ["redis", *(f"redis-{number}" for number in range(1, redis_servers))]
        """The names of the Redis servers."""
        self.environment = dict(environment or {})
        """Settings on top of the stack's own; a change counts from a process's next start on."""
        self._commands = dict(commands or {})
        # A service that does not run has an address, too.
        more = (name for names in self.instances.values() for name in names[1:])
        names = [*PORTS, *more, *self.redis[1:]]
        chosen = dict(zip(names, free_ports(len(names)), strict=True)) | dict(ports or {})
        self.ports = chosen
        self._processes: dict[str, Child] = {}
        self._lock: int | None = None

    # ---- addresses

    @property
    def redis_url(self) -> str:
        """Where Redis is."""
        return f"redis://127.0.0.1:{self.ports['redis']}/0"

    def address(self, service: str) -> str:
        """Where a service, or an instance of one, listens."""
        return f"127.0.0.1:{self.ports[service]}"

    def target(self, service: str) -> str:
        """Where any instance of a service answers."""
        addresses = [self.address(each) for each in self.instances[service]]
        return addresses[0] if len(addresses) == 1 else "ipv4:" + ",".join(addresses)

    @property
    def policy_file(self) -> Path:
        """Where deduplication policies are read from."""
        return self.folder / "policies.toml"

    @property
    def endpoints(self) -> dict[str, object]:
        """All addresses and process ids."""
        return {
            **{service: self.address(service) for service in self.services},
            "redis": self.redis_url,
            "pids": {name: process.pid for name, process in self._processes.items()},
        }

    def write_endpoints(self, file: Path) -> None:
        """Write the endpoints as JSON, all at once."""
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        scratch.write_text(json.dumps(self.endpoints, indent=2) + "\n")
        scratch.replace(file)

    # ---- life

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything, and return when all of it is ready.

        Raises:
            StackError: a process ended, or was not ready in time; another stack has the folder.
        """
        for part in ("logs", *self.redis, *STORES):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        if not self.policy_file.exists():
            self.policy_file.write_text("# Deduplication policies; read again when this changes.\n")
        self._take_folder()
        for name in (*self.redis, *self.services):
            await self.spawn(name)
        for name in (*self.redis, *self.services):
            await self.ready(name)

    async def stop(self) -> None:
        """Stop everything in good order."""
        for name in (*reversed(self.services), *self.redis):
            await self.terminate(name)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def wait(self) -> str:
        """Return the name of the first process that ends by itself."""
        waits = {
            asyncio.create_task(process.wait()): name for name, process in self._processes.items()
        }
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return waits[done.pop()]

    async def run(self, name: str) -> None:
        """Start one process again, and return when it is ready."""
        await self.spawn(name)
        await self.ready(name)

    async def terminate(self, name: str) -> int | None:
        """Stop one process in good order. Returns its exit status; None if it does not run."""
        process = self._processes.pop(name, None)
        if process is None:
            return None
        tell(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                return await process.wait()
        except TimeoutError:
            tell(process, signal.SIGKILL)
            return await process.wait()

    async def kill(self, name: str) -> None:
        """SIGKILL one process, and return when it is gone."""
        process = self._processes.pop(name)
        tell(process, signal.SIGKILL)
        await process.wait()

    async def ended(self, name: str) -> int:
        """Wait for a process to end by itself. Returns its exit status, negative for a signal."""
        status = await self._processes[name].wait()
        del self._processes[name]
        return status

    async def ready(self, name: str) -> None:
        """Return when a process is ready.

        Raises:
            StackError: it ended, or was not ready in time.
        """
        process = self._processes[name]
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not await self._answers(name):
                    if process.returncode is not None:
                        raise StackError(
                            f"{name} ended with {process.returncode}: {self.log_tail(name)}"
                        )
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise StackError(f"{name} was not ready in time: {self.log_tail(name)}") from None

    def log_tail(self, name: str) -> str:
        """The last lines that a process wrote."""
        log = self.folder / "logs" / f"{name}.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-15:])

    def process(self, name: str) -> Child | None:
        """A process as it was started last; None: it was stopped, or never started."""
        return self._processes.get(name)

    async def spawn(self, name: str) -> None:
        """Start one process, and do not wait until it is ready."""
        assert name not in self._processes
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            environment = {**os.environ, **self.settings, **self._own_settings(name)}
            self._processes[name] = await self.start_process(
                self._command(name), log.fileno(), environment
            )

    def _command(self, name: str) -> Sequence[str]:
        if name in self.redis:
            return redis_command(self.folder / name, self.ports[name])
        module = f"seqgate.services.{_service(name)}"
        return self._commands.get(name, (sys.executable, "-m", module))

    def _own_settings(self, name: str) -> dict[str, str]:
        """What one of several instances is told besides."""
        service = _service(name)
        if len(self.instances.get(service, [])) < 2:
            return {}
        return {f"SEQGATE_{service.upper()}_LISTEN": self.address(name)}

    @property
    def settings(self) -> dict[str, str]:
        """What processes are told by their environment."""
        return {
            "SEQGATE_DEDUP_LISTEN": self.address("dedup"),
            "SEQGATE_DEDUP_REDIS_URL": self.redis_url,
            "SEQGATE_DEDUP_CURSOR_TARGET": self.target("cursor"),
            "SEQGATE_DEDUP_POLICY_FILE": str(self.policy_file),
            "SEQGATE_DEDUP_POLICY_INTERVAL_S": "0.2",
            "SEQGATE_DEDUP_HEALTH_INTERVAL_S": "0.1",
            "SEQGATE_LEDGER_LISTEN": self.address("ledger"),
            "SEQGATE_LEDGER_DEDUP_TARGET": self.target("dedup"),
            "SEQGATE_LEDGER_CURSOR_TARGET": self.target("cursor"),
            "SEQGATE_LEDGER_STORE_PATH": str(self.folder / "ledger" / "ledger.db"),
            "SEQGATE_LEDGER_HEALTH_INTERVAL_S": "0.1",
            "SEQGATE_CURSOR_LISTEN": self.address("cursor"),
            "SEQGATE_CURSOR_STORE_PATH": str(self.folder / "cursor" / "cursor.db"),
            "SEQGATE_CURSOR_HEALTH_INTERVAL_S": "0.1",
            "SEQGATE_FILTER_LISTEN": self.address("filter"),
            "SEQGATE_FILTER_HEALTH_INTERVAL_S": "0.1",
            "SEQGATE_DISPATCHER_LISTEN": self.address("dispatcher"),
            "SEQGATE_DISPATCHER_LEDGER_TARGET": self.target("ledger"),
            "SEQGATE_DISPATCHER_CURSOR_TARGET": self.target("cursor"),
            "SEQGATE_DISPATCHER_FILTER_TARGET": self.target("filter"),
            "SEQGATE_DISPATCHER_HEALTH_INTERVAL_S": "0.1",
            "SEQGATE_DISPATCHER_LEASE_S": "3",
            **self.environment,
        }

    async def _answers(self, name: str) -> bool:
        if name in self.redis:
            return await _pings(self.ports[name])
        return await _serves(self.address(name))

    def _take_folder(self) -> None:
        lock = os.open(self.folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise StackError(f"another stack is using {self.folder}") from None
        self._lock = lock


def _service(name: str) -> str:
    """Of which service a process is an instance."""
    return name.partition("-")[0]


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


async def _serves(address: str) -> bool:
    async with aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
        except aio.AioRpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
