"""The services that are tortured: two of each on one store, two Redis servers, and a link from
every process to every one that it calls.

    applications ═▶ ledger ═▶ dedup ─▶ the Redis server that is the master now
        ║           ║ ▲        ║
        ║           ▼ ║        ▼
        ╚═▶ dispatcher ═▶ cursor, filter

A ═▶ is a link for each pair of processes. Applications have one for each home: it leads to one of
the two instances, and to the other one while nobody listens there.
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import Random
from signal import Signals
from types import TracebackType
from typing import Final, Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tools.stack.child import tell
from tools.stack.ports import free_ports
from tools.stack.stack import SERVICES, Stack
from tools.torture.clock import shift_clock
from tools.torture.limits import settings_of
from tools.torture.links import Link

CALLS: Final = (
    ("ledger", "dedup"),
    ("ledger", "cursor"),
    ("dedup", "cursor"),
    ("dispatcher", "ledger"),
    ("dispatcher", "cursor"),
    ("dispatcher", "filter"),
)
"""Who calls whom."""

REDIS: Final = ("redis", "redis-1")

POLICIES: Final = "[cluster]\nsnapshot_entries = 500\nsnapshot_interval_s = 5\n"

REDIS_PATIENCE_S: Final = 10.0
"""How long a Redis server may take to answer."""


class Installation:
    """See the module. `async with` starts it, and ends all of it."""

    def __init__(self, folder: Path, *, limits: str, seed: str, twins: bool = True) -> None:
        """
        Args:
            folder: where everything is kept.
            limits: one of limits.LIMITS.
            seed: decides which process has which.
            twins: whether there are two of each service.
        """
        count = 2 if twins else 1
        self.instances = {
            service: [service, *(f"{service}-{number}" for number in range(1, count))]
            for service in SERVICES
        }
        self.processes = [name for names in self.instances.values() for name in names]
        """The names of the services' processes."""
        self.master = REDIS[0]
        """The Redis server that counts."""
        self.links: dict[str, Link] = {}
        """By their names, `caller>callee`."""
        self._folder = folder
        self._limits = limits
        self._seed = seed
        ports = free_ports(len(self.processes) + len(REDIS))
        self._ports = dict(zip((*self.processes, *REDIS), ports, strict=True))
        self._count = count
        self._life = AsyncExitStack()
        self.stack: Stack

    # ---- where it is

    @property
    def ledgers(self) -> list[str]:
        """Where applications find the ledger, by home."""
        return [self.links[f"applications>{each}"].address for each in self.instances["ledger"]]

    @property
    def dispatchers(self) -> list[str]:
        """Where applications find the dispatcher: any of it."""
        links = [self.links[f"applications>{each}"] for each in self.instances["dispatcher"]]
        return [_all_of([link.address for link in links])] * len(links)

    def straight(self, service: str) -> str:
        """Where a service is, past the links."""
        return self.stack.target(service)

    # ---- life

    async def __aenter__(self) -> Self:
        try:
            for link in self._made_links():
                self.links[link.name] = await self._life.enter_async_context(link)
            self.stack = self._made_stack()
            self.stack.folder.mkdir(parents=True, exist_ok=True)
            self.stack.policy_file.write_text(POLICIES)
            for name in self.processes:
                self.set_clock(name, 0)
            await self._life.enter_async_context(self.stack)
            await self.follow(REDIS[1], REDIS[0])
        except BaseException:
            await self._life.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in (*self.processes, *REDIS):
            self.signal(name, Signals.SIGCONT)
        await self._life.aclose()

    def _made_links(self) -> list[Link]:
        ports = self._ports
        links = [
            Link(f"{caller}>{callee}", ports[callee])
            for who, whom in CALLS
            for caller in self.instances[who]
            for callee in self.instances[whom]
        ]
        links += [Link(f"{each}>redis", ports[self.master]) for each in self.instances["dedup"]]
        for service in ("ledger", "dispatcher"):
            for name in self.instances[service]:
                others = [ports[each] for each in self.instances[service] if each != name]
                # A dispatcher sends consumers on by its address: nobody answers in its place.
                backup = others if service == "ledger" else []
                links.append(Link(f"applications>{name}", ports[name], *backup))
        return links

    def _made_stack(self) -> Stack:
        random = Random(f"{self._seed}/limits")
        commands: dict[str, Sequence[str]] = {}
        for service, names in self.instances.items():
            for name in names:
                settings = {**settings_of(service, self._limits, random), **self._told(name)}
                commands[name] = [
                    "env",
                    *(f"{key}={value}" for key, value in settings.items()),
                    sys.executable,
                    "-m",
                    "tools.torture.clock",
                    str(self._clock(name)),
                    f"seqgate.services.{service}",
                ]
        return Stack(
            self._folder,
            commands=commands,
            ports=self._ports,
            instances=self._count,
            replicas=self._count,
            redis_servers=len(REDIS),
        )

    def _told(self, name: str) -> dict[str, str]:
        """Where one process finds the others: over its own links."""
        who = name.partition("-")[0]
        told = {}
        for service, callee in CALLS:
            if service == who:
                addresses = [
                    self.links[f"{name}>{each}"].address for each in self.instances[callee]
                ]
                told[f"{callee.upper()}_TARGET"] = _all_of(addresses)
        if who == "dedup":
            told["REDIS_URL"] = f"redis://{self.links[f'{name}>redis'].address}/0"
        if who == "dispatcher":
            told["ADVERTISE"] = self.links[f"applications>{name}"].address
        return {f"SEQGATE_{who.upper()}_{key}": value for key, value in told.items()}

    # ---- what faults do to it

    def pid(self, name: str) -> int | None:
        """A process's id; None: it does not run."""
        process = self.stack.process(name)
        return None if process is None or process.returncode is not None else process.pid

    def signal(self, name: str, number: Signals) -> None:
        """Send a signal to a process, if it runs."""
        process = self.stack.process(name)
        if process is not None:
            tell(process, number)

    def set_clock(self, name: str, seconds: float) -> None:
        """Set one process's clock, by so many seconds from the machine's."""
        shift_clock(self._clock(name), seconds)

    def _clock(self, name: str) -> Path:
        return self._folder.resolve() / f"clock-{name}"

    def store(self, service: str) -> Path:
        """The database that both of a service have."""
        return self.stack.folder / service / f"{service}.db"

    def log(self, name: str) -> Path:
        """What a process writes."""
        return self.stack.folder / "logs" / f"{name}.log"

    # ---- Redis

    @property
    def replica(self) -> str:
        """The Redis server that follows the master."""
        return next(each for each in REDIS if each != self.master)

    async def ask_redis(self, name: str, *words: str | int) -> object:
        """What a server answers, as soon as it does.

        Raises:
            TimeoutError: it does not.
        """
        async with asyncio.timeout(REDIS_PATIENCE_S):
            while True:
                try:
                    async with Redis(port=self._ports[name], socket_timeout=1) as redis:
                        return await redis.execute_command(*words)  # type: ignore[no-untyped-call]
                except RedisError:
                    await asyncio.sleep(0.05)

    async def follow(self, name: str, master: str) -> None:
        """Make one server a replica of another one."""
        await self.ask_redis(name, "REPLICAOF", "127.0.0.1", self._ports[master])

    async def promote(self, name: str) -> None:
        """Make a replica the master, and lead everybody there, one after the other: for a moment
        there may be two."""
        await self.ask_redis(name, "REPLICAOF", "NO", "ONE")
        self.master = name
        for caller in self.instances["dedup"]:
            link = self.links[f"{caller}>redis"]
            link.targets = (self._ports[name],)
            link.cut()
            await asyncio.sleep(0.2)

    def copy_redis(self) -> None:
        """Put a copy of the master's files aside. It writes on meanwhile, and understands an
        append-only file whose end is cut off."""
        _copy(self.stack.folder / self.master, self.stack.folder / f"{self.master}-copy")

    async def roll_redis_back(self) -> bool:
        """Have the master come back with the files that were put aside; whether there were any."""
        name = self.master
        copy = self.stack.folder / f"{name}-copy"
        if not copy.exists():
            return False
        await self.stack.kill(name)
        await asyncio.to_thread(_copy, copy, self.stack.folder / name)
        await self.stack.spawn(name)
        await self.ask_redis(name, "PING")
        await self.follow(self.replica, name)
        return True

    # ---- a file that all may read

    def write_endpoints(self) -> None:
        """For people: where everything is."""
        file = self.stack.folder / "endpoints.json"
        links = {name: link.address for name, link in self.links.items()}
        file.write_text(json.dumps({**self.stack.endpoints, "links": links}, indent=2) + "\n")


def _all_of(addresses: Sequence[str]) -> str:
    return addresses[0] if len(addresses) == 1 else "ipv4:" + ",".join(addresses)


def _copy(source: Path, target: Path) -> None:
    """All or nothing: a server that tidies its files up meanwhile leaves no copy."""
    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        shutil.copytree(source, scratch)
    except shutil.Error:
        shutil.rmtree(scratch, ignore_errors=True)
        return
    with suppress(FileNotFoundError):
        shutil.rmtree(target)
    scratch.rename(target)
