"""What goes wrong on the way, and when.

A plan is a list of faults by progress: the share of flights that is known to be stored. The seed
moves them about; their kinds stay, so that each run has all of them.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from enum import Enum
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from redis.asyncio import Redis

from tools.stack.stack import Stack


class Kind(Enum):
    """A fault, and how it is told."""

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
an attempt that was ended."""


def plan(random: Random) -> list[Fault]:
    """When each fault comes: one in each of as many equal parts of the way, somewhere in its
    middle."""
    width = 1 / (len(_ORDER) + 1)
    return [
        Fault(round((i + 0.5 + random.uniform(-0.3, 0.3)) * width, 4), kind)
        for i, kind in enumerate(_ORDER)
    ]


class Faults:
    """Makes them happen."""

    def __init__(
        self,
        stack: Stack,
        *,
        kill_airline: Callable[[], Awaitable[None]],
        kill_stations: Callable[[], Awaitable[None]],
    ) -> None:
        self._stack = stack
        self._kill_airline = kill_airline
        self._kill_stations = kill_stations
        self._files = stack.folder / "redis"
        self._copy = stack.folder / "redis-copy"

    async def happen(self, kind: Kind) -> None:
        """Make one happen; returns when everything runs again."""
        match kind:
            case Kind.KILL_AIRLINE:
                await self._kill_airline()
            case Kind.KILL_STATIONS:
                await self._kill_stations()
            case Kind.KILL_LEDGER:
                await self._kill("ledger")
            case Kind.KILL_DEDUP:
                await self._kill("dedup")
            case Kind.KILL_BOTH:
                await asyncio.gather(self._kill_airline(), self._kill("ledger"))
            case Kind.KILL_ALL:
                await self._kill("ledger", "dedup", "redis")
            case Kind.COPY_REDIS:
                await asyncio.to_thread(_copy, self._files, self._copy)
            case Kind.WIPE_REDIS:
                async with Redis.from_url(self._stack.redis_url) as redis:
                    await redis.flushall()
            case Kind.RESTORE_REDIS:
                await self._stack.kill("redis")
                await asyncio.to_thread(_copy, self._copy, self._files)
                await self._stack.run("redis")

    async def _kill(self, *names: str) -> None:
        for name in names:
            await self._stack.kill(name)
        for name in reversed(names):
            await self._stack.run(name)


def _copy(source: Path, target: Path) -> None:
    """Redis writes on meanwhile; it understands an append-only file whose end is cut off."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
