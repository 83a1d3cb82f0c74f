"""What goes wrong on the way, and when.

A plan is a list of faults by progress: the share of flights that is known to be stored. The seed
moves them about; their kinds stay, so that each run has all of them.
"""

import asyncio
import shutil
from enum import Enum
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from redis.asyncio import Redis

from tools.demo.airlines import Airlines
from tools.demo.stations import Stations
from tools.stack.stack import Stack


class Kind(Enum):
    """A fault, and its text on the screen."""

    KILL_AIRLINE = "kill -9 of an airline's process"
    KILL_STATIONS = "kill -9 of the weather stations' process"
    KILL_LEDGER = "kill -9 of the ledger"
    KILL_DEDUP = "kill -9 of dedup"
    KILL_BOTH = "kill -9 of the ledger and an airline"
    KILL_ALL = "kill -9 of the ledger, dedup and Redis"
    COPY_REDIS = "a copy of Redis's files is put aside"
    WIPE_REDIS = "Redis loses everything (FLUSHALL)"
    RESTORE_REDIS = "kill -9 of Redis, and back comes the older copy"

    @property
    def interrupts_stations(self) -> bool:
        """Whether it is a crash of the weather stations, or of what they publish to."""
        return self not in (Kind.KILL_AIRLINE, Kind.COPY_REDIS)


class Fault(NamedTuple):
    """A kind of fault, at a share of the flights."""

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

_SERVICES: Final = {
    Kind.KILL_LEDGER: ("ledger",),
    Kind.KILL_BOTH: ("ledger",),
    Kind.KILL_DEDUP: ("dedup",),
    Kind.KILL_ALL: ("ledger", "dedup", "redis"),
}
"""What is killed, in this order, and started again in the other one."""


def plan(random: Random) -> list[Fault]:
    """When each fault comes: one in each of as many equal parts of the way, somewhere in its
    middle."""
    width = 1 / (len(_ORDER) + 1)
    return [
        Fault(round((i + 0.5 + random.uniform(-0.3, 0.3)) * width, 4), kind)
        for i, kind in enumerate(_ORDER)
    ]


async def happen(kind: Kind, stack: Stack, airlines: Airlines, stations: Stations) -> None:
    """Make a fault happen; returns when everything runs again."""
    files, copy = stack.folder / "redis", stack.folder / "redis-copy"
    if kind in (Kind.KILL_AIRLINE, Kind.KILL_BOTH):
        await airlines.kill_one()
    if kind is Kind.KILL_STATIONS:
        await stations.kill()
    for name in _SERVICES.get(kind, ()):
        await stack.kill(name)
    for name in reversed(_SERVICES.get(kind, ())):
        await stack.run(name)
    if kind is Kind.COPY_REDIS:
        await asyncio.to_thread(_copy, files, copy)
    if kind is Kind.WIPE_REDIS:
        await forget(stack)
    if kind is Kind.RESTORE_REDIS:
        await stack.kill("redis")
        await asyncio.to_thread(_copy, copy, files)
        await stack.run("redis")


async def forget(stack: Stack) -> None:
    """Redis loses everything."""
    async with Redis.from_url(stack.redis_url) as redis:
        await redis.flushall()


def _copy(source: Path, target: Path) -> None:
    """Redis writes on meanwhile; it reads an append-only file whose end is cut off."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
