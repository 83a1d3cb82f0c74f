"""Redis Cluster: each command goes to the node that owns its key's slot.

Only the routing is our own; all else is redis-py's. Its client for clusters is not used, because a
lost reply must be reported at once: that client sends ASKING on another connection than the
command, so a slot being moved is unreachable; it closes all connections, and waits, when one slot
is not served; and it asks nodes for the slots one after the other, each for the full timeout.

Only commands that were not executed are repeated: those that a node answered with MOVED or ASK. Any
other error goes to the caller, and makes the next command reload the map of slots.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Self

from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    RedisError,
)
from redis.exceptions import ConnectionError as NotConnected

from seqgate.services.dedup.adapters.keys import POLICIES
from seqgate.services.dedup.redis_url import Node
from seqgate.services.runtime.limiter import Limiter

SLOTS: Final = 16_384

REDIRECTIONS_MAX: Final = 5
"""The most redirections of a command: a slot has moved at most once, and is being moved."""

_KEY_AT: Final = {"EVAL": 3, "EVALSHA": 3}
"""The index of a command's key; in all other commands it directly follows the name."""


class ClusterRedis:
    """A cluster, for commands with one key and for scans. The methods are those of Redis."""

    def __init__(
        self,
        seeds: Sequence[Node],
        connect: Callable[[Node], Redis],
        *,
        timeout_s: float,
        connections_max: int,
    ) -> None:
        """
        Args:
            seeds: some nodes of the cluster.
            connect: creates a client of one node, which must not retry.
            timeout_s: the time limit of a command with all its redirections.
            connections_max: the most commands at a time on a node.
        """
        self._seeds = tuple(seeds)
        self._connect = connect
        self._timeout_s = timeout_s
        self._connections_max = connections_max
        self._clients: dict[Node, Any] = {}  # Redis, whose types mix sync and async
        self._limiters: dict[Node | None, Limiter] = {}  # None: while the node is not known
        self._owners: list[Node | None] = [None] * SLOTS
        self._learning = asyncio.Lock()
        self._learned = 0  # how often the map of slots was loaded
        self._doubtful = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in list(self._clients.values()):
            await client.aclose()

    # ---- commands

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Run a command on the node that owns its key.

        Raises:
            RedisError, OSError, TimeoutError: the command was refused, or the outcome is unknown.
            NotSent: too many commands wait for the node, or none is answered.
        """
        key = args[_KEY_AT.get(args[0], 1)]
        slot = key_slot(key if isinstance(key, bytes) else key.encode())
        async with self._limiter(self._owners[slot]).slot(self._timeout_s):
            return await self._executed(slot, args, options)

    async def _executed(self, slot: int, args: Sequence[Any], options: dict[str, Any]) -> Any:
        with self._doubting():
            async with asyncio.timeout(self._timeout_s):
                if self._doubtful:
                    await self._learn()
                return await self._routed(slot, args, options)

    async def time(self) -> tuple[int, int]:
        """The clock of the node with the policies' slot, so that all replicas use the same one."""
        script = 'return redis.call("TIME")'
        seconds, microseconds = await self.execute_command("EVAL", script, 1, POLICIES)
        return int(seconds), int(microseconds)

    async def ping(self) -> bool:
        """Return if the policies' slot is served. Without it no topic is served; another slot
        concerns only the topics in it."""
        await self._executed(key_slot(POLICIES.encode()), ("EXISTS", POLICIES), {})
        return True

    async def scan_iter(self, match: str, count: int) -> AsyncIterator[bytes]:
        """All keys of all primaries; a key that is moved meanwhile may come twice, or never."""
        with self._doubting():
            async with asyncio.timeout(self._timeout_s):
                await self._learn()
            for node in dict.fromkeys(self._owners):
                if node is None:
                    raise ClusterDownError("hash slot without a node")
                async for key in self._client(node).scan_iter(match, count):
                    yield key

    async def _routed(self, slot: int, args: Sequence[Any], options: dict[str, Any]) -> Any:
        node, asking = self._owners[slot], False
        for _ in range(REDIRECTIONS_MAX):
            if node is None:
                raise ClusterDownError("hash slot without a node")
            try:
                if asking:
                    return await _asking(self._client(node), args, options)
                return await self._client(node).execute_command(*args, **options)
            except MovedError as error:
                node, asking = _named(error, node), False
                self._owners[slot] = node
            except AskError as error:
                node, asking = _named(error, node), True
        raise ClusterDownError("the nodes disagree about the slot's owner")

    def _limiter(self, node: Node | None) -> Limiter:
        limiter = self._limiters.get(node)
        if limiter is None:
            limiter = self._limiters[node] = Limiter(self._connections_max, adapts=False)
        return limiter

    def _client(self, node: Node) -> Any:
        if node not in self._clients:
            self._clients[node] = self._connect(node)
        return self._clients[node]

    # ---- the map of slots

    @contextmanager
    def _doubting(self) -> Iterator[None]:
        """Mark the map of slots as doubtful if a command fails or is cancelled: it may have gone to
        a node that no longer owns the slot."""
        try:
            yield
        except NoScriptError:
            raise
        except BaseException:
            self._doubtful = True
            raise

    async def _learn(self) -> None:
        """Load the map of slots; concurrent callers share one load."""
        learned = self._learned
        async with self._learning:
            if self._learned != learned:
                return
            view = await self._newest_view()
            self._owners = view.owners
            self._doubtful = False
            self._learned += 1
            for node in self._clients.keys() - view.nodes - set(self._seeds):
                self._limiters.pop(node, None)
                await self._clients.pop(node).aclose()

    async def _newest_view(self) -> "_View":
        """The view of the first node that is connected to most of the cluster; all nodes are asked
        at once. A partitioned node would claim forever to own slots that others took over, so its
        view is used only if no other node answers."""
        asked = {*self._seeds, *self._clients}
        tasks = [asyncio.create_task(_view_of(node, self._client(node))) for node in asked]
        best: _View | None = None
        failure: Exception | None = None
        try:
            for answer in asyncio.as_completed(tasks, timeout=self._timeout_s / 2):
                try:
                    best = await answer
                except (RedisError, OSError) as error:
                    failure = error
                    continue
                if best.in_touch:
                    return best
        except TimeoutError as error:
            failure = error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if best is None:
            raise NotConnected("no node of the Redis cluster answers") from failure
        return best


class _View(NamedTuple):
    """A node's view of the cluster."""

    in_touch: bool
    owners: list[Node | None]
    nodes: set[Node]


async def _view_of(node: Node, client: Any) -> _View:
    async with client.pipeline(transaction=False) as pipeline:
        pipeline.execute_command("CLUSTER INFO")
        pipeline.execute_command("CLUSTER SLOTS")
        info, ranges = await pipeline.execute()
    owners: list[Node | None] = [None] * SLOTS
    nodes: set[Node] = set()
    for first, last, *serving in ranges:
        listed = [_at(str(host or b"", "utf-8"), port, node) for host, port, *_ in serving]
        owners[first : last + 1] = [listed[0]] * (last + 1 - first)
        nodes.update(listed)
    return _View(info["cluster_state"] == "ok", owners, nodes)


async def _asking(client: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run a command on the node to which its slot moves. ASKING applies to the connection's next
    command."""
    async with client.pipeline(transaction=False) as pipeline:
        pipeline.execute_command("ASKING")
        pipeline.execute_command(*args, **options)
        asked, reply = await pipeline.execute(raise_on_error=False)
    for each in (asked, reply):
        if isinstance(each, Exception):
            raise each
    return reply


def _named(error: AskError, by: Node) -> Node:
    return _at(error.host, error.port, by)


def _at(host: str, port: int, by: Node) -> Node:
    """A node as `by` names it; without a host, it has the host of `by`."""
    return Node(by.host if host in ("", "?") else host, port)
