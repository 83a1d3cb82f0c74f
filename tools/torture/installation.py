"""The installation under torture: two of each service on one store, two Redis servers, and a link
from every process to each one it calls.

    applications ═▶ ledger ═▶ dedup ─▶ the Redis master
        ║           ║ ▲        ║
        ║           ▼ ║        ▼
        ╚═▶ dispatcher ═▶ cursor, filter

A ═▶ is a link for each pair of processes.

On SQLite, applications have one ledger link per home, which leads to one instance, and to the other
one while the first does not listen. On PostgreSQL ledgers name each other, so each link leads to
one instance; and the store is a cluster of three servers, with a link from every ledger and cursor
service to each.
"""

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from signal import Signals
from typing import Final

from seqgate.dev.postgres_server import postgres_url
from seqgate.dev.stack import CALLS, STORES, Stack, any_of, service_of
from tools.stack.postgres_cluster import DATABASE, NAMES, PostgresCluster
from tools.stack.redis_files import copy_files
from tools.torture.clock import shift_clock
from tools.torture.limits import settings_of
from tools.torture.links import Link

POLICIES: Final = "[cluster]\nsnapshot_entries = 500\nsnapshot_interval_s = 5\n"


class Installation(Stack):
    """A stack with links, clocks, and limits of its own.

    Attributes:
        links: by name, `caller>callee`.
        master: the name of the current Redis master.
        cluster: the PostgreSQL servers; None on SQLite.
    """

    def __init__(self, folder: Path, *, limits: str, seed: str, on_postgres: bool = False) -> None:
        """`limits` is one of limits.LIMITS; `seed` draws each process's, if they are mixed."""
        # What a killed server wrote survives: it is the kernel's.
        self.cluster = (
            PostgresCluster(folder / "postgres", is_lasting=False) if on_postgres else None
        )
        url = self.cluster.url() if self.cluster else ""
        super().__init__(folder, instances=2, replicas=2, redis_servers=2, postgres_url=url)
        self.links: dict[str, Link] = {}
        self.master = self.redis[0]
        random = Random(f"{seed}/limits")
        self._limits = {
            name: settings_of(service, limits, random)
            for service, names in self.instances.items()
            for name in names
        }
        self._life = AsyncExitStack()

    # ---- addresses

    @property
    def ledgers(self) -> list[str]:
        """The ledger's addresses for applications, by home; on PostgreSQL, each is a list of all
        instances, the home's own first."""
        names = self.instances["ledger"]
        addresses = [self.links[f"applications>{each}"].address for each in names]
        if self.cluster is None:
            return addresses
        return [any_of([*addresses[home:], *addresses[:home]]) for home in range(len(addresses))]

    @property
    def dispatchers(self) -> list[str]:
        """The dispatcher's addresses for applications, by home: each is a list of all instances."""
        return [self._linked("applications", "dispatcher")] * len(self.instances["dispatcher"])

    @property
    def endpoints(self) -> dict[str, object]:
        links = {name: link.address for name, link in self.links.items()}
        return {**super().endpoints, "links": links}

    def _linked(self, caller: str, service: str) -> str:
        """A target for any instance of a service, over the caller's own links."""
        names = self.instances[service]
        return any_of([self.links[f"{caller}>{each}"].address for each in names])

    # ---- life

    async def start(self) -> None:
        if self.cluster is not None:
            await self._life.enter_async_context(self.cluster)
        for link in self._made_links():
            self.links[link.name] = await self._life.enter_async_context(link)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.policy_file.write_text(POLICIES)
        for name in self.services:
            self.set_clock(name, 0)
        await super().start()
        await self.follow(self.replica, self.master)
        text = json.dumps(self.endpoints, indent=2)
        (self.folder / "endpoints.json").write_text(f"{text}\n")

    async def stop(self) -> None:
        for name in (*self.services, *self.redis):
            self.signal(name, Signals.SIGCONT)
        await super().stop()
        await self._life.aclose()

    def _made_links(self) -> Iterator[Link]:
        ports, instances = self.ports, self.instances
        for who, whom in CALLS:
            for caller in instances[who]:
                for callee in instances[whom]:
                    yield Link(f"{caller}>{callee}", ports[callee])
        for caller in instances["dedup"]:
            yield Link(f"{caller}>redis", ports[self.master])
        for name in instances["dispatcher"]:
            # A dispatcher redirects consumers to its address, so no other may answer there.
            yield Link(f"applications>{name}", ports[name])
        for name in instances["ledger"]:
            others = [ports[each] for each in instances["ledger"] if each != name]
            yield Link(f"applications>{name}", ports[name], *([] if self.cluster else others))
        if self.cluster is not None:
            for service in STORES:
                for caller in instances[service]:
                    for server, port in self.cluster.ports.items():
                        yield Link(f"{caller}>{server}", port)

    def _command(self, name: str) -> Sequence[str]:
        if name in self.redis:
            return super()._command(name)
        clock, service = str(self._clock(name)), service_of(name)
        return [sys.executable, "-m", "tools.torture.clock", clock, f"seqgate.services.{service}"]

    def _own_settings(self, name: str) -> dict[str, str]:
        """The process's limits, and the targets of its calls, over its own links."""
        if name in self.redis:
            return {}
        who = service_of(name)
        told = {
            f"{callee.upper()}_TARGET": self._linked(name, callee)
            for service, callee in CALLS
            if service == who
        }
        if who == "dedup":
            told["REDIS_URL"] = f"redis://{self.links[f'{name}>redis'].address}/0"
        if who == "dispatcher" or (self.cluster is not None and who == "ledger"):
            told["ADVERTISE"] = self.links[f"applications>{name}"].address
        if self.cluster is not None and who in STORES:
            servers = (self.links[f"{name}>{each}"].port for each in NAMES)
            told["POSTGRES_URL"] = postgres_url(*servers, database=DATABASE)
        linked = {f"SEQGATE_{who.upper()}_{key}": value for key, value in told.items()}
        return super()._own_settings(name) | self._limits[name] | linked

    # ---- faults

    def set_clock(self, name: str, seconds: float) -> None:
        shift_clock(self._clock(name), seconds)

    def _clock(self, name: str) -> Path:
        return self.folder / f"clock-{name}"

    # ---- Redis

    @property
    def replica(self) -> str:
        return next(each for each in self.redis if each != self.master)

    async def follow(self, name: str, master: str) -> None:
        await self.ask_redis(name, "REPLICAOF", "127.0.0.1", self.ports[master])

    async def promote(self, name: str) -> None:
        """Promote a replica, and redirect its callers in turn: two masters overlap briefly."""
        await self.ask_redis(name, "REPLICAOF", "NO", "ONE")
        self.master = name
        for caller in self.instances["dedup"]:
            link = self.links[f"{caller}>redis"]
            link.targets = (self.ports[name],)
            link.cut()
            await asyncio.sleep(0.2)

    def copy_redis(self) -> None:
        copy_files(self.folder / self.master, self.folder / f"{self.master}-copy")

    async def roll_redis_back(self) -> None:
        """Restart the master with the files of the copy, if there is one."""
        name = self.master
        copy = self.folder / f"{name}-copy"
        if not copy.exists():
            return
        await self.kill(name)
        await asyncio.to_thread(copy_files, copy, self.folder / name)
        await self.spawn(name)
        await self.ask_redis(name, "PING")
        await self.follow(self.replica, name)
