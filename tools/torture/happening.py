"""Faults, carried out: each at its time, in its place, and made good when it is over.

In one place one thing happens at a time; what comes meanwhile waits. Whatever happens is written
down, with when it began and ended.
"""

import asyncio
import resource
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from signal import Signals
from typing import Final, NamedTuple, Protocol

from tools.torture.faults import OF_REDIS, Fault, Kind
from tools.torture.installation import Installation
from tools.torture.journal import Journal
from tools.torture.links import Way

FULL_BYTES: Final = 96 * 1024
"""How much more may be written when a disk is full: it happens in the middle of something."""

WAIT_S: Final = 30.0
"""How long a fault waits for its place; then it is left out."""


class Applications(Protocol):
    """What faults do to applications."""

    async def kill(self, name: str) -> None:
        """SIGKILL one."""
        ...

    async def start(self, name: str) -> None:
        """Start it again."""
        ...

    def signal(self, name: str, number: Signals) -> None:
        """Send one a signal."""
        ...


class Happened(NamedTuple):
    """A fault that was carried out; times in nanoseconds of the monotonic clock."""

    fault: Fault
    began_ns: int
    ended_ns: int


class Happening:
    """Carries out a plan."""

    def __init__(
        self,
        installation: Installation,
        applications: Applications,
        trim: Callable[[str], Awaitable[None]],
        journal: Journal,
        seed: str,
    ) -> None:
        self.happened: list[Happened] = []
        self.down: set[str] = set()
        """Processes that we ended, and that are not back."""
        self.misbehaved: list[str] = []
        """Processes that did not end as they were told to."""
        self._there = installation
        self._applications = applications
        self._trim = trim
        self._journal = journal
        self._random = Random(f"{seed}/happening")
        self._places: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def carry_out(self, faults: Sequence[Fault]) -> None:
        """Everything, at its time; returns when all of it is made good.

        Raises:
            ExceptionGroup: something could not be made good.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                await asyncio.sleep(began_s + fault.at_s - loop.time())
                tasks.create_task(self._happen(fault))

    async def _happen(self, fault: Fault) -> None:
        place = "redis" if fault.kind in OF_REDIS else fault.place
        lock = self._places[place]
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
        there, place = self._there, fault.place
        match fault.kind:
            case Kind.KILL:
                with self._away(place):
                    await there.stack.kill(place)
                    await asyncio.sleep(fault.lasts_s)
                    await there.stack.spawn(place)
            case Kind.STOP:
                await self._stopped(lambda number: there.signal(place, number), fault.lasts_s)
            case Kind.RESTART:
                await self._restart(place, fault.lasts_s)
            case Kind.ROLL:
                for name in reversed(there.processes):
                    async with self._places[name]:
                        await self._restart(name, 0)
            case Kind.KILL_APPLICATION:
                await self._applications.kill(place)
                await asyncio.sleep(fault.lasts_s)
                await self._applications.start(place)
            case Kind.STOP_APPLICATION:
                await self._stopped(
                    lambda number: self._applications.signal(place, number), fault.lasts_s
                )
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
            case _:
                await self._redis(fault)

    async def _redis(self, fault: Fault) -> None:
        there = self._there
        name = there.master
        match fault.kind:
            case Kind.REDIS_KILL:
                with self._away(name):
                    await there.stack.kill(name)
                    await asyncio.sleep(fault.lasts_s)
                    await there.stack.spawn(name)
            case Kind.REDIS_STOP:
                await self._stopped(lambda number: there.signal(name, number), fault.lasts_s)
            case Kind.REDIS_EMPTY:
                await there.ask_redis(name, "FLUSHALL")
            case Kind.REDIS_COPY:
                await asyncio.to_thread(there.copy_redis)
            case Kind.REDIS_BACK:
                with self._away(name):
                    await there.roll_redis_back()
            case _:
                await self._fail_over(fault.lasts_s)

    async def _fail_over(self, lag_s: float) -> None:
        """The replica stands still, the master dies with what the replica lacks, and comes back as
        a replica."""
        there = self._there
        old, new = there.master, there.replica
        with self._away(old):
            there.signal(new, Signals.SIGSTOP)
            await asyncio.sleep(lag_s)
            await there.stack.kill(old)
            there.signal(new, Signals.SIGCONT)
            await there.promote(new)
            await there.stack.spawn(old)
            await there.follow(old, new)

    @contextmanager
    def _away(self, name: str) -> "Iterator[None]":
        """A process is down meanwhile because we want it so."""
        self.down.add(name)
        try:
            yield
        finally:
            self.down.discard(name)

    async def _restart(self, name: str, rest_s: float) -> None:
        with self._away(name):
            status = await self._there.stack.terminate(name)
            if status not in (None, 0, -Signals.SIGTERM):  # the last one: it had just begun
                self.misbehaved.append(f"{name} ended with {status} after SIGTERM")
            await asyncio.sleep(rest_s)
            await self._there.stack.spawn(name)

    async def _stopped(self, signal: Callable[[Signals], None], seconds: float) -> None:
        signal(Signals.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            signal(Signals.SIGCONT)

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
        """The kernel lets nobody who has the service's store make a file any larger than it will
        be soon."""
        there = self._there
        names = [*there.instances[service]]
        database = there.store(service)
        files = [database, *(database.with_name(f"{database.name}{end}") for end in ("-wal",))]
        files += [there.log(name) for name in names]
        size = max(file.stat().st_size for file in files if file.exists()) + FULL_BYTES
        try:
            for name in names:
                _bound_files(there.pid(name), size)
            await asyncio.sleep(seconds)
        finally:
            for name in names:
                _bound_files(there.pid(name), resource.RLIM_INFINITY)


def _bound_files(pid: int | None, size_bytes: int) -> None:
    """Let a process make no file larger than this; whoever was started meanwhile has no bound."""
    if pid is None:
        return
    try:
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        bound = size_bytes if most == resource.RLIM_INFINITY else min(size_bytes, most)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (bound, most))
    except ProcessLookupError:
        return
