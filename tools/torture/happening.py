"""Injects the faults: each at its time, in its place, and undone at its end.

In one place faults happen one at a time; others wait. Each fault is recorded with its times.
"""

import asyncio
import resource
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from signal import Signals
from typing import Final, NamedTuple

from seqgate.dev.stack import STORES
from tools.stack.application import Application
from tools.stack.journal import Journal
from tools.stack.postgres_cluster import PostgresCluster
from tools.torture.faults import Fault, Kind, Where, plan
from tools.torture.installation import Installation
from tools.torture.links import Way

FULL_BYTES: Final = 96 * 1024
"""The bytes that a full disk still takes, so that a write fails halfway."""

WAIT_S: Final = 30.0
"""How long a fault waits for its place before it is skipped."""


class Happened(NamedTuple):
    """An injected fault; times in nanoseconds of the monotonic clock."""

    fault: Fault
    began_ns: int
    ended_ns: int


class Happening:
    """Injects the faults of a seed. `trimmed` is the topic to trim."""

    def __init__(
        self,
        installation: Installation,
        applications: Mapping[str, Application],
        trim: Callable[[str], Awaitable[None]],
        trimmed: str,
        journal: Journal,
        seed: str,
    ) -> None:
        self.happened: list[Happened] = []
        self.misbehaved: list[str] = []
        """Processes that ended with an unexpected status after SIGTERM."""
        self._there = installation
        self._applications = applications
        self._trim = trim
        self._trimmed = trimmed
        self._journal = journal
        self._seed = seed
        self._places: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def carry_out(self, seconds: float) -> None:
        """Inject faults for this long and undo all. Raises ExceptionGroup if that fails."""
        there = self._there
        places = {
            Where.SERVICE: there.services,
            Where.EVERYTHING: ["everything"],
            Where.APPLICATION: list(self._applications),
            Where.LINK: list(there.links),
            Where.REDIS: ["redis"],
            Where.STORE: [] if there.cluster else list(STORES),
            Where.POSTGRES: ["postgres"] if there.cluster else [],
            Where.TOPIC: [self._trimmed],
        }
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for fault in plan(self._seed, places, seconds):
                await asyncio.sleep(began_s + fault.at_s - loop.time())
                tasks.create_task(self._happen(fault))
        for name in (*there.services, *there.redis):
            if there.pid(name) is not None:
                await there.ready(name)
        for link in there.links.values():  # start with new connections
            link.go(Way.OPEN)
            link.cut()

    async def _happen(self, fault: Fault) -> None:
        lock = self._places[fault.place]
        try:
            async with asyncio.timeout(WAIT_S):
                await lock.acquire()
        except TimeoutError:
            return
        began_ns = time.monotonic_ns()
        self._journal.write("fault", kind=fault.kind.name, place=fault.place, lasts_s=fault.lasts_s)
        try:
            await self._do(fault)
        finally:
            lock.release()
            self._journal.write("over", kind=fault.kind.name, place=fault.place)
            self.happened.append(Happened(fault, began_ns, time.monotonic_ns()))

    async def _do(self, fault: Fault) -> None:
        there = self._there
        place = there.master if fault.kind.where is Where.REDIS else fault.place
        match fault.kind:
            case Kind.KILL | Kind.REDIS_KILL:
                await there.kill(place)
                await asyncio.sleep(fault.lasts_s)
                await there.spawn(place)
            case Kind.STOP | Kind.REDIS_STOP:
                await _stopped(partial(there.signal, place), fault.lasts_s)
            case Kind.RESTART:
                await self._restart(place, fault.lasts_s)
            case Kind.ROLL:
                for name in reversed(there.services):
                    async with self._places[name]:
                        await self._restart(name, 0)
            case Kind.KILL_APPLICATION:
                await self._applications[place].end()
                await asyncio.sleep(fault.lasts_s)
                await self._applications[place].start()
            case Kind.STOP_APPLICATION:
                await _stopped(self._applications[place].send, fault.lasts_s)
            case Kind.CUT:
                there.links[place].cut()
            case Kind.CLOSED | Kind.SLOW | Kind.SILENT | Kind.LOST:
                await self._broken(fault)
            case Kind.FULL:
                await self._full(place, fault.lasts_s)
            case Kind.CLOCK:
                there.set_clock(place, -fault.back_s)
                await asyncio.sleep(fault.lasts_s)
                there.set_clock(place, 0)
            case Kind.TRIM:
                await self._trim(place)
            case Kind.REDIS_EMPTY:
                await there.ask_redis(place, "FLUSHALL")
            case Kind.REDIS_COPY:
                await asyncio.to_thread(there.copy_redis)
            case Kind.REDIS_BACK:
                await there.roll_redis_back()
            case Kind.REDIS_FAILOVER:
                await self._fail_over(fault.lasts_s)
            case _:
                assert there.cluster is not None
                await _broken_postgres(there.cluster, fault)

    async def _fail_over(self, lag_s: float) -> None:
        """Suspend the replica, kill the master with the writes that the replica lacks, promote the
        replica, and restart the old master as its replica."""
        there = self._there
        old, new = there.master, there.replica
        there.signal(new, Signals.SIGSTOP)
        await asyncio.sleep(lag_s)
        await there.kill(old)
        there.signal(new, Signals.SIGCONT)
        await there.promote(new)
        await there.spawn(old)
        await there.follow(old, new)

    async def _restart(self, name: str, rest_s: float) -> None:
        status = await self._there.terminate(name)
        if status not in (None, 0, -Signals.SIGTERM):  # -SIGTERM: it was just starting
            self.misbehaved.append(f"{name} ended with {status} after SIGTERM")
        await asyncio.sleep(rest_s)
        await self._there.spawn(name)

    async def _broken(self, fault: Fault) -> None:
        link = self._there.links[fault.place]
        ways = {Kind.CLOSED: Way.CLOSED, Kind.SLOW: Way.SLOW}
        link.go(ways.get(fault.kind, Way.SILENT))
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            if fault.kind is Kind.LOST:
                link.cut()
            link.go(Way.OPEN)

    async def _full(self, service: str, seconds: float) -> None:
        """Limit the files of the processes on the service's store to slightly above the largest
        present size."""
        there = self._there
        names = there.instances[service]
        database = there.store(service)
        files = [database, database.with_name(f"{database.name}-wal"), *map(there.log, names)]
        size = max(file.stat().st_size for file in files if file.exists()) + FULL_BYTES
        try:
            for name in names:
                _bound_files(there.pid(name), size)
            await asyncio.sleep(seconds)
        finally:
            for name in names:
                _bound_files(there.pid(name), resource.RLIM_INFINITY)


async def _broken_postgres(cluster: PostgresCluster, fault: Fault) -> None:
    primary = cluster.primary
    match fault.kind:
        case Kind.POSTGRES_KILL:
            await cluster.kill(primary)
            await asyncio.sleep(fault.lasts_s)
            await cluster.start_again(primary)
        case Kind.POSTGRES_RESTART:
            await cluster.stop_server(primary)
            await asyncio.sleep(fault.lasts_s)
            await cluster.start_again(primary)
        case Kind.POSTGRES_STOP:
            await _paused(cluster, [primary], fault.lasts_s)
        case Kind.POSTGRES_ALONE:  # commits wait
            await _paused(cluster, sorted(cluster.standbys), fault.lasts_s)
        case Kind.POSTGRES_FAILOVER:
            await cluster.kill(primary)
            await asyncio.sleep(fault.lasts_s)
            await cluster.promote()
            await cluster.return_as_standby(primary)
        case Kind.POSTGRES_ZOMBIE:
            await cluster.pause(primary)
            await cluster.promote()
            cluster.resume(primary)
            await asyncio.sleep(fault.lasts_s)
            await cluster.return_as_standby(primary)


async def _paused(cluster: PostgresCluster, names: Sequence[str], seconds: float) -> None:
    try:
        for name in names:
            await cluster.pause(name)
        await asyncio.sleep(seconds)
    finally:
        for name in names:
            cluster.resume(name)


async def _stopped(signal: Callable[[Signals], None], seconds: float) -> None:
    signal(Signals.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        signal(Signals.SIGCONT)


def _bound_files(pid: int | None, size_bytes: int) -> None:
    """Limit the file sizes of a process. A process started later has no limit."""
    if pid is None:
        return
    try:
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        bound = size_bytes if most == resource.RLIM_INFINITY else min(size_bytes, most)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (bound, most))
    except ProcessLookupError:
        return
