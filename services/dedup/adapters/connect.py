"""Connections to Redis: one server, the master that Sentinels name, or a cluster.

In all cases no command is sent twice, and after an error the next command finds the right server:
broken connections are reopened, Sentinels are asked on each new connection, and a cluster's nodes
for the map of slots.

A command's time limit is `_Client`'s, and the handshake's is `_greeted`'s: with redis-py's
`socket_timeout`, each command would cost a task.

A command beyond the most connections waits for one (limiter.py), and its time limit begins when it
has one. redis-py's own pools would refuse it, or lose its place in the order. PING does not wait: a
busy service must not look dead.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import ReadOnlyError
from redis.exceptions import TimeoutError as NotInTime

from seqgate.services.dedup.adapters.cluster import ClusterRedis
from seqgate.services.dedup.redis_url import Node, RedisUrl, Served, parse_redis_url
from seqgate.services.runtime.limiter import Limiter


@asynccontextmanager
async def connect_redis(
    url: str, *, timeout_s: float, connections_max: int, password_file: Path | None = None
) -> AsyncIterator[Any]:
    """A client, Redis or ClusterRedis, with at most `connections_max` connections (in a cluster, to
    each node) and one for PING. It never retries. A command that has a connection takes at most
    `timeout_s`; one that waits for a connection raises NotSent if none answers for as long."""
    at = parse_redis_url(url)
    if password_file is not None:
        at = at._replace(
            options=_with_password(at.options, password_file),
            sentinel=_with_password(at.sentinel, password_file),
        )
    options: dict[str, Any] = {
        "max_connections": sys.maxsize,  # or redis-py refuses commands beyond 100
        "redis_connect_func": partial(_greeted, timeout_s),
        **at.options,
        **_patience(timeout_s),
    }
    async with AsyncExitStack() as stack:
        client: Any
        if at.served is Served.SENTINEL:
            client = await stack.enter_async_context(_master(at, timeout_s, options))
            client.limiter = Limiter(connections_max, adapts=False)
        elif at.served is Served.CLUSTER:

            def connect(node: Node) -> Redis:
                return _Client(timeout_s, host=node.host, port=node.port, **options)

            client = ClusterRedis(
                at.nodes, connect, timeout_s=timeout_s, connections_max=connections_max
            )
        else:
            if at.served is Served.SOCKET:
                client = _Server(timeout_s, unix_socket_path=at.path, db=at.database, **options)
            else:
                ((host, port),) = at.nodes
                client = _Server(timeout_s, host=host, port=port, db=at.database, **options)
            client.limiter = Limiter(connections_max, adapts=False)
        yield await stack.enter_async_context(client)


def _with_password(options: Mapping[str, Any], file: Path) -> dict[str, Any]:
    given = dict(options)
    user = given.pop("username", "")
    return {**given, "credential_provider": _FromFile(user, file)}


class _FromFile(CredentialProvider):
    """A user whose password is in a file, which is read for each connection."""

    def __init__(self, user: str, file: Path) -> None:
        self._user = user
        self._file = file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = self._file.read_text().strip()
        except OSError as error:
            raise NotConnected(f"the password cannot be read: {error}") from error
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()  # inherited, it logs a warning for each connection


def _patience(timeout_s: float) -> dict[str, Any]:
    return {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
    }


async def _greeted(timeout_s: float, connection: Connection) -> None:
    """The handshake on a new connection."""
    try:
        async with asyncio.timeout(timeout_s):
            await connection.on_connect()
    except TimeoutError as error:
        raise NotInTime("no answer to the handshake") from error


@asynccontextmanager
async def _master(at: RedisUrl, timeout_s: float, options: dict[str, Any]) -> AsyncIterator[Redis]:
    """The master, as Sentinels name it. They are asked one after the other; all of them and the
    connection to the master share one connection's time limit, so that a silent Sentinel does not
    use it up."""
    share_s = timeout_s / (len(at.nodes) + 1)
    asked_in_s = {**_patience(share_s), "socket_timeout": share_s}
    sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
        at.nodes, sentinel_kwargs={**at.sentinel, **asked_in_s}
    )
    own = {
        "socket_connect_timeout": share_s,
        "redis_connect_func": partial(_greeted_by_a_master, timeout_s),
    }
    async with sentinel:
        master = sentinel.master_for(at.master, _Client, db=at.database, **(options | own))
        master.timeout_s = timeout_s
        yield master


async def _greeted_by_a_master(timeout_s: float, connection: Connection) -> None:
    """Check a new connection's server. Outdated Sentinels may name a demoted, and so stale,
    master."""
    try:
        async with asyncio.timeout(timeout_s):
            await connection.on_connect()
            await connection.send_command("ROLE")
            role, *_ = await connection.read_response()
    except TimeoutError as error:
        raise NotInTime("no answer to the handshake") from error
    if role != b"master":
        raise NotConnected(f"role is {role!r}, not master")


class _Client(Redis):
    """A client whose commands have a time limit, which begins when they have a connection.

    Attributes:
        limiter: limits its commands; None: they are limited elsewhere.
    """

    def __init__(self, timeout_s: float | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.timeout_s = timeout_s
        self.limiter: Limiter | None = None

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        if self.limiter is None or args[0] == "PING":
            return await self._executed(*args, **options)
        async with self.limiter.slot(self.timeout_s or 0):
            return await self._executed(*args, **options)

    async def _executed(self, *args: Any, **options: Any) -> Any:
        # redis-py's own method also retries and keeps statistics, which doubles a command's price.
        pool: Any = self.connection_pool
        connection = await pool.get_connection()
        try:
            async with asyncio.timeout(self.timeout_s):
                await connection.send_command(*args)
                return await self.parse_response(connection, args[0], **options)
        finally:
            await pool.release(connection)


class _Server(_Client):
    """One address, behind which the server may change: after one refuses writes, the next
    connection may lead to its successor."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().execute_command(*args, **options)
        except ReadOnlyError:
            await self.connection_pool.disconnect(inuse_connections=False)
            raise
