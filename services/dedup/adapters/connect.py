"""Connections to Redis: one server, the master that Sentinels name, or a cluster.

In all cases no command is sent twice, and after an error the next command finds the right server:
broken connections are reopened, Sentinels are asked on each new connection, and a cluster's nodes
for the map of slots.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import ReadOnlyError

from seqgate.services.dedup.adapters.cluster import ClusterRedis
from seqgate.services.dedup.redis_url import Node, RedisUrl, Served, parse_redis_url


@asynccontextmanager
async def connect_redis(url: str, *, timeout_s: float, connections_max: int) -> AsyncIterator[Any]:
    """A client, Redis or ClusterRedis, with at most `connections_max` connections (in a cluster, to
    each node). It never retries, and never waits longer than `timeout_s`."""
    at = parse_redis_url(url)
    patience = _patience(timeout_s)
    options: dict[str, Any] = {"max_connections": connections_max, **at.options}
    async with AsyncExitStack() as stack:
        client: Any
        if at.served is Served.SENTINEL:
            client = await stack.enter_async_context(_master(at, timeout_s, options | patience))
        elif at.served is Served.CLUSTER:

            def connect(node: Node) -> Redis:
                return Redis(host=node.host, port=node.port, **options, **patience)

            client = ClusterRedis(at.nodes, connect, timeout_s=timeout_s)
        elif at.served is Served.SOCKET:
            client = _Server(unix_socket_path=at.path, db=at.database, **options, **patience)
        else:
            ((host, port),) = at.nodes
            client = _Server(host=host, port=port, db=at.database, **options, **patience)
        yield await stack.enter_async_context(client)


def _patience(timeout_s: float) -> dict[str, Any]:
    return {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
    }


@asynccontextmanager
async def _master(at: RedisUrl, timeout_s: float, options: dict[str, Any]) -> AsyncIterator[Redis]:
    """The master, as Sentinels name it. They are asked one after the other; all of them and the
    connection to the master share one connection's time limit, so that a silent Sentinel does not
    use it up."""
    share_s = timeout_s / (len(at.nodes) + 1)
    sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
        at.nodes, sentinel_kwargs={**at.sentinel, **_patience(share_s)}
    )
    async with sentinel:
        yield sentinel.master_for(
            at.master,
            db=at.database,
            redis_connect_func=_to_a_master,
            **(options | {"socket_connect_timeout": share_s}),
        )


async def _to_a_master(connection: Connection) -> None:
    """Check a new connection's server. Outdated Sentinels may name a demoted, and so stale,
    master."""
    await connection.on_connect()
    await connection.send_command("ROLE")
    role, *_ = await connection.read_response()
    if role != b"master":
        raise NotConnected(f"role is {role!r}, not master")


class _Server(Redis):
    """One address, behind which the server may change: after one refuses writes, the next
    connection may lead to its successor."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except ReadOnlyError:
            await self.connection_pool.disconnect(inuse_connections=False)
            raise
