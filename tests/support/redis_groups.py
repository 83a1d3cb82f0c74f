"""Groups of real Redis servers: a master and a replica behind Sentinels, and a cluster.

They detect failures within a second or two; the defaults are many seconds.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from seqgate.dev.child import bound_to_us
from seqgate.dev.ports import free_ports
from seqgate.dev.redis_server import redis_binary
from tests.support.redis_server import RedisServer
from tests.support.waiting import WITHIN_S, eventually

MASTER: Final = "seqgate"
"""The master's name at the Sentinels."""

DOWN_AFTER_MS: Final = 1_000
"""The time without an answer after which a server counts as down. It allows for a busy machine."""

SENTINELS: Final = 3
PRIMARIES: Final = 3
SLOTS: Final = 16_384

SENTINEL = f"""\
sentinel monitor {MASTER} 127.0.0.1 {{master}} 1
sentinel down-after-milliseconds {MASTER} {{down_after_ms}}
sentinel failover-timeout {MASTER} 2000
"""
"""One Sentinel notices first, so votes are not split; a second one must still agree."""

QUICK_MS = {"ask-period": 50, "info-period": 100, "ping-period": 200, "publish-period": 400}
"""Intervals of a Sentinel's work, by default a second or more. A replica whose last answer is five
pings old is not promoted; a server that wrongly claims for four publishings to be the master is
made a replica again."""

FAILOVER_AGAIN_S = 5.0
"""The interval of requests for a failover, in seconds: Sentinel silently aborts one if the
replica's last answer is too old."""


def until(state: Callable[[], object], what: str, *, within_s: float = WITHIN_S) -> None:
    """Wait until `state()` is true. A Redis error counts as false."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            if state():
                return
        except RedisError:
            pass
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.01)


def command(server: RedisServer, *words: str | int) -> Any:
    """Run a command and return the answer."""
    with Redis(port=server.port, decode_responses=True) as redis:
        return redis.execute_command(*words)


def info(server: RedisServer, section: str) -> dict[str, Any]:
    """A section of a server's INFO."""
    with Redis(port=server.port, decode_responses=True) as redis:
        found: dict[str, Any] = redis.info(section)
    return found


def has_replica_in_step(master: RedisServer) -> bool:
    """True if a replica has all data of the master."""
    seen = info(master, "replication")
    replica = seen.get("slave0", {})
    return bool(
        replica.get("state") == "online" and replica["offset"] == seen["master_repl_offset"]
    )


class Sentinels:
    """Three Sentinels, a master and a replica."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ports = free_ports(SENTINELS)
        self.servers = [RedisServer(folder / str(i), options=_LAGGING) for i in range(2)]
        self._processes: list[subprocess.Popen[bytes]] = []
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self.url = f"redis+sentinel://{hosts}/{MASTER}"

    def start(self) -> None:
        for server in self.servers:
            server.start()
        first, second = self.servers
        command(second, "REPLICAOF", "127.0.0.1", first.port)
        for number, port in enumerate(self.ports):
            patience_ms = DOWN_AFTER_MS * (20 if number else 1)
            file = self._folder / f"sentinel-{port}.conf"
            address = f"port {port}\nbind 127.0.0.1\ndir {self._folder}\nloglevel warning\n"
            file.write_text(address + SENTINEL.format(master=first.port, down_after_ms=patience_ms))
            self._processes.append(
                subprocess.Popen(
                    bound_to_us([str(redis_binary()), str(file), "--sentinel"]),
                    stdout=subprocess.DEVNULL,
                )
            )
            until(partial(self._hurry, port), "a Sentinel answers")
        self.settle()

    def settle(self) -> None:
        """Wait until all know each other and the replica is in step."""
        until(lambda: all(map(self._at_ease, self.ports)), "the Sentinels are at ease")
        until(lambda: has_replica_in_step(self.master), "the replica is in step")

    @property
    def master(self) -> RedisServer:
        """The master according to the first Sentinel."""
        port = int(self._said(self.ports[0])["port"])
        return next(server for server in self.servers if server.port == port)

    def flush(self) -> None:
        """Delete all data."""
        command(self.master, "FLUSHALL")

    async def fail_over(self) -> None:
        """Promote the replica while the master is healthy, and wait until it is the master."""
        new, begun_s = self.replica, -FAILOVER_AGAIN_S

        def promoted() -> bool:
            nonlocal begun_s
            if self.master is new:
                return True
            if time.monotonic() - begun_s >= FAILOVER_AGAIN_S:
                with suppress(RedisError), Redis(port=self.ports[0]) as sentinel:
                    sentinel.execute_command("SENTINEL", "FAILOVER", MASTER)
                    begun_s = time.monotonic()
            return False

        await eventually(promoted, "the replica takes over")

    @property
    def replica(self) -> RedisServer:
        """The server that is not the master."""
        return next(server for server in self.servers if server.port != self.master.port)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for server in self.servers:
            server.kill()

    def _hurry(self, port: int) -> bool:
        with Redis(port=port) as sentinel:
            quick = [word for pair in QUICK_MS.items() for word in pair]
            return bool(sentinel.execute_command("SENTINEL", "DEBUG", *quick))

    def _said(self, port: int) -> dict[str, Any]:
        with Redis(port=port, decode_responses=True) as sentinel:
            said: dict[str, Any] = sentinel.sentinel_master(MASTER)
        return said

    def _at_ease(self, port: int) -> bool:
        said = self._said(port)
        return bool(
            said["flags"] == "master"
            and said["num-other-sentinels"] == SENTINELS - 1
            and said["num-slaves"] == 1
        )


_LAGGING = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")


class Cluster:
    """Three primaries, the first with replicas."""

    def __init__(self, folder: Path, *, replicas: int = 0) -> None:
        ports = free_ports(2 * (PRIMARIES + replicas))
        pairs = list(zip(ports[::2], ports[1::2], strict=True))
        self._buses = dict(pairs)
        self.servers = [
            RedisServer(folder / str(port), port=port, options=(*_LAGGING, *_clustered(bus)))
            for port, bus in pairs
        ]
        self.primaries = self.servers[:PRIMARIES]
        """The initial primaries."""
        self.replicas = self.servers[PRIMARIES:]
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        self.url = f"redis+cluster://{hosts}"

    def start(self) -> None:
        for number, server in enumerate(self.servers):
            server.start()
            command(server, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        first, *others = self.servers
        for server in others:
            bus = self._buses[server.port]
            command(first, "CLUSTER", "MEET", "127.0.0.1", server.port, bus)
        bounds = [SLOTS * i // PRIMARIES for i in range(PRIMARIES + 1)]
        for server, start, end in zip(self.primaries, bounds[:-1], bounds[1:], strict=True):
            command(server, "CLUSTER", "ADDSLOTSRANGE", start, end - 1)
        until(lambda: all(map(self._knows_all, self.servers)), "the nodes know each other")
        for server in self.replicas:
            until(
                partial(command, server, "CLUSTER", "REPLICATE", self.id_of(first)),
                "a replica knows its primary",
            )
        self.settle()

    def settle(self) -> None:
        """Wait until every running node sees the cluster as healthy."""
        until(lambda: all(map(self._content, self.servers)), "the cluster is whole")
        if self.replicas:
            until(lambda: has_replica_in_step(self.owner(0)), "the replica is in step")

    def flush(self) -> None:
        """Delete all data."""
        for server in self.owners():
            command(server, "FLUSHALL")

    def owners(self) -> list[RedisServer]:
        """The current primaries."""
        ranges = command(self.primaries[-1], "CLUSTER", "SLOTS")
        ports = {port for _, _, (_, port, *_), *_ in ranges}
        return [server for server in self.servers if server.port in ports]

    def owner(self, slot: int) -> RedisServer:
        """The primary of a slot, according to the last initial primary."""
        for start, end, (_, port, *_), *_ in command(self.primaries[-1], "CLUSTER", "SLOTS"):
            if start <= slot <= end:
                return next(server for server in self.servers if server.port == port)
        raise AssertionError(f"no primary has slot {slot}")

    def id_of(self, server: RedisServer) -> str:
        """A node's id."""
        return str(command(server, "CLUSTER", "MYID"))

    def move_slot(self, slot: int, to: RedisServer) -> Iterator[str]:
        """Move a slot with its keys in steps, and yield the name of each step."""
        source = self.owner(slot)
        giving, taking = self.id_of(source), self.id_of(to)
        command(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", giving)
        yield "importing"
        command(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", taking)
        yield "migrating"
        while keys := command(source, "CLUSTER", "GETKEYSINSLOT", slot, 10):
            for key in keys:
                command(source, "MIGRATE", "127.0.0.1", to.port, key, 0, 5000)
        yield "migrated"
        for server in (to, source):
            command(server, "CLUSTER", "SETSLOT", slot, "NODE", taking)
        yield "moved"

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    def _knows_all(self, server: RedisServer) -> bool:
        nodes = command(server, "CLUSTER", "NODES").splitlines()
        return len(nodes) == len(self.servers) and "handshake" not in " ".join(nodes)

    def _content(self, server: RedisServer) -> bool:
        said = command(server, "CLUSTER", "INFO").splitlines()
        whole = "cluster_state:ok" in said and f"cluster_slots_ok:{SLOTS}" in said
        return whole and self._knows_all(server)


def _clustered(bus: int) -> Sequence[str]:
    options = {
        "cluster-enabled": "yes",
        "cluster-port": str(bus),
        "cluster-node-timeout": str(2 * DOWN_AFTER_MS),
        "cluster-replica-validity-factor": "0",
    }
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def slot_of(key: str) -> int:
    """The slot of a key."""
    return int(key_slot(key.encode()))


@contextmanager
def standing_still(server: RedisServer) -> Iterator[None]:
    """A server that is suspended inside the context."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@contextmanager
def running(group: Sentinels | Cluster) -> Iterator[Any]:
    try:
        group.start()
        yield group
    finally:
        group.kill()
