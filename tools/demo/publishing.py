"""Everything is published while things go wrong.

Four processes publish for the carriers, one for the weather stations; a killed process is restarted
until all its messages are stored. A fault comes at its share of stored flights. One that interrupts
the stations also waits until each of them is within a message.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from seqgate.dev.stack import Stack
from tools.demo.dataset import Originals
from tools.demo.publisher import Progress, keep_originals
from tools.demo.relay import Crashes, Relay
from tools.demo.report import Screen
from tools.stack.application import Application
from tools.stack.postgres_cluster import PostgresCluster
from tools.stack.redis_files import copy_files

PUBLISHER: Final = "tools.demo.publisher"
PROCESSES: Final = 4  # over which the carriers are spread

CHUNK_BYTES: Final = (4 * 1024, 2 * 1024, 5 * 1024, 3 * 1024)
"""Chunk sizes, from one start of the stations' process to the next: a month makes 12 to 33."""

POLL_S: Final = 0.05


async def publish(
    stack: Stack,
    cluster: PostgresCluster | None,
    folder: Path,
    carriers: Originals,
    airports: Originals,
    seed: int,
    screen: Screen,
) -> tuple[dict[str, Any], Crashes]:
    """Publish everything, and return the figures.

    Args:
        cluster: where logs and cursors are stored; None: in SQLite.
    """
    random = Random(seed)
    ledger = stack.target("ledger")
    async with Relay(ledger, random) as relay:
        sizes = cycle(CHUNK_BYTES)
        airlines = _Publishers("airline", ledger, folder, carriers, PROCESSES, random.random)
        stations = _Publishers("station", relay.address, folder, airports, 1, lambda: next(sizes))
        screen.tell(f"services are ready; {len(carriers)} carriers publish {airlines.messages:,}")
        publishing = _Publishing(stack, cluster, airlines, stations, relay, screen)
        return await publishing.run(random), publishing.crashes


class Kind(Enum):
    """A fault: its text on the screen, and the processes of the stack that are killed, in this
    order, and restarted in reverse."""

    KILL_AIRLINE = ("kill -9 of an airline's process",)
    KILL_STATIONS = ("kill -9 of the weather stations' process",)
    KILL_LEDGER = "kill -9 of the ledger", "ledger"
    KILL_DEDUP = "kill -9 of dedup", "dedup"
    KILL_BOTH = "kill -9 of the ledger and an airline", "ledger"
    KILL_ALL = "kill -9 of the ledger, dedup and Redis", "ledger", "dedup", "redis"
    COPY_REDIS = ("a copy of Redis's files is put aside",)
    WIPE_REDIS = ("Redis loses everything (FLUSHALL)",)
    KILL_PRIMARY = ("kill -9 of PostgreSQL's primary, and a standby takes over",)
    RESTORE_REDIS = "kill -9 of Redis, and back comes the older copy", "redis"

    def __init__(self, text: str, *killed: str) -> None:
        self.text = text
        self.killed = killed

    @property
    def interrupts_stations(self) -> bool:
        """Whether it crashes the weather stations, or a service that they publish to."""
        return self not in (Kind.KILL_AIRLINE, Kind.COPY_REDIS)


class Fault(NamedTuple):
    """What goes wrong, when this share of flights is known to be stored."""

    at: float
    kind: Kind


_ORDER: Final = (
    Kind.KILL_AIRLINE,
    Kind.KILL_STATIONS,
    Kind.KILL_DEDUP,
    Kind.COPY_REDIS,
    Kind.KILL_LEDGER,
    Kind.KILL_AIRLINE,
    Kind.WIPE_REDIS,
    Kind.KILL_STATIONS,
    Kind.KILL_BOTH,
    Kind.KILL_DEDUP,
    Kind.RESTORE_REDIS,
    Kind.KILL_AIRLINE,
    Kind.KILL_LEDGER,
    Kind.KILL_STATIONS,
    Kind.KILL_ALL,
    Kind.KILL_AIRLINE,
    Kind.KILL_LEDGER,
)
"""The stations are killed before anything that they publish to: a small demo ends early, and needs
an aborted attempt."""


def plan(random: Random, *, fails_over: bool = False) -> list[Fault]:
    """Place each fault near the middle of one of equal parts of the way. The seed moves them; their
    order stays, so that each run has all of them. With `fails_over`, a primary is killed early,
    since a small demo ends early."""
    early = _ORDER.index(Kind.KILL_LEDGER)
    order = (*_ORDER[:early], *([Kind.KILL_PRIMARY] * fails_over), *_ORDER[early:])
    width = 1 / (len(order) + 1)
    return [
        Fault(round((i + 0.5 + random.uniform(-0.3, 0.3)) * width, 4), kind)
        for i, kind in enumerate(order)
    ]


class _Publishers:
    """Producers of one kind, spread over processes, each with another option at each start."""

    def __init__(
        self,
        kind: str,
        target: str,
        folder: Path,
        originals: Originals,
        processes: int,
        option: Callable[[], object],
    ) -> None:
        for name, own in originals.items():
            keep_originals(folder, name, own)
        self._progress = {name: Progress(folder, name) for name in originals}
        self._counts = {name: len(own) for name, own in originals.items()}
        self.messages = sum(self._counts.values())
        self.crashes = 0

        names = list(originals)

        def application(number: int) -> Application:
            own, log = names[number::processes], folder / f"{kind}-{number}.log"
            return Application(PUBLISHER, lambda: [kind, target, folder, option(), *own], log)

        self._applications = [application(each) for each in range(min(processes, len(names)))]

    async def run(self) -> None:
        """Run the processes until everything is published; they do not outlive this call."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for application in self._applications:
                    tasks.create_task(application.run())
        finally:
            for application in self._applications:
                await application.end()

    async def kill_one(self, random: Random) -> None:
        """SIGKILL one of the processes that still run, unless everything is published."""
        running = [each for each in self._applications if each.process and each.ended() is None]
        if running and self.unfinished():
            await random.choice(running).end()
            self.crashes += 1

    def read(self) -> dict[str, Progress]:
        return {name: each.read() for name, each in self._progress.items()}

    def stored(self) -> int:
        return sum(each.checkpoint for each in self.read().values())

    def unfinished(self) -> set[str]:
        return {name for name, each in self.read().items() if each.checkpoint < self._counts[name]}


@dataclass
class _Publishing:
    """Runs the publishers, and makes the planned faults happen."""

    stack: Stack
    cluster: PostgresCluster | None
    airlines: _Publishers
    stations: _Publishers
    relay: Relay
    screen: Screen
    faults: int = 0
    failovers: int = 0
    crashes: Crashes = field(default_factory=list)

    async def run(self, random: Random) -> dict[str, Any]:
        started = time.monotonic()
        step = self.screen.step("publishing", self.airlines.messages)
        async with asyncio.TaskGroup() as tasks:
            for publishers in (self.airlines, self.stations):
                tasks.create_task(publishers.run())
            for fault in plan(random, fails_over=self.cluster is not None):
                while not self._is_due(fault):
                    step(self.airlines.stored())
                    await asyncio.sleep(POLL_S)
                # State that is lost when everything is stored would not come back: publishing
                # brings it back.
                if not self._unfinished():
                    break
                await self._happen(fault.kind, random)
            self.relay.gate.open()
            while self._unfinished():
                step(self.airlines.stored())
                await asyncio.sleep(POLL_S)
        publish_s = time.monotonic() - started
        step(self.airlines.messages)
        messages, progress = self.airlines.messages, self.airlines.read().values()
        sent = sum(each.sent for each in progress)
        return {
            "flights": messages,
            "sent": sent,
            "resent": sent - messages,
            "duplicates": sum(each.duplicates for each in progress),
            "rewinds": sum(each.rewinds for each in progress),
            "faults": self.faults,
            "failovers": self.failovers,
            "airline_crashes": self.airlines.crashes,
            "station_crashes": self.stations.crashes,
            "publish_s": round(publish_s, 1),
            "messages_per_s": round(sent / publish_s),
        }

    def _unfinished(self) -> set[str]:
        return self.airlines.unfinished() | self.stations.unfinished()

    def _is_due(self, fault: Fault) -> bool:
        """Whether a fault's time has come, and every station that it is to interrupt is within a
        message. Once everything is stored, every fault is due."""
        if self.airlines.stored() < fault.at * self.airlines.messages:
            return False
        stalled = {attempt.producer for attempt in self.relay.stalled}
        return not fault.kind.interrupts_stations or self.stations.unfinished() <= stalled

    async def _happen(self, kind: Kind, random: Random) -> None:
        """Make a fault happen; returns when everything runs again."""
        stalled = self.relay.stalled if kind.interrupts_stations else []
        began, crashes = time.monotonic(), self.stations.crashes
        await self._break(kind, random)
        if self.stations.crashes > crashes:
            self.relay.drop_streams()
        self.faults += 1
        where = f", inside {len(stalled)} large messages" if stalled else ""
        self.screen.tell(f"{kind.text}{where}: {time.monotonic() - began:.2f} s")
        if stalled:
            self.crashes.append(stalled)
            self.relay.gate.release(attempt.uuid for attempt in stalled)

    async def _break(self, kind: Kind, random: Random) -> None:
        """Kill, wipe or restore what a fault is about, and restart the services."""
        files, copy = self.stack.folder / "redis", self.stack.folder / "redis-copy"
        if kind in (Kind.KILL_AIRLINE, Kind.KILL_BOTH):
            await self.airlines.kill_one(random)
        if kind is Kind.KILL_STATIONS:
            await self.stations.kill_one(random)
        for name in kind.killed:
            await self.stack.kill(name)
        if kind is Kind.COPY_REDIS:
            await asyncio.to_thread(copy_files, files, copy)
        if kind is Kind.KILL_PRIMARY:
            await self._fail_over()
        if kind is Kind.WIPE_REDIS:
            await self.stack.ask_redis("redis", "FLUSHALL")
        if kind is Kind.RESTORE_REDIS:
            await asyncio.to_thread(copy_files, copy, files)
        for name in reversed(kind.killed):
            await self.stack.run(name)

    async def _fail_over(self) -> None:
        """Kill the primary, promote the standby that received most, as a fail-over manager does,
        and let the killed one follow."""
        assert self.cluster is not None
        killed = self.cluster.primary
        await self.cluster.kill(killed)
        await self.cluster.promote()
        await self.cluster.return_as_standby(killed)
        self.failovers += 1
