"""Rounds of cases that take turns, with their time and the processor time meanwhile.

What disturbs the machine meanwhile disturbs all cases. Each round is bounded in time and in calls.
"""

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from seqgate.telemetry import tracing

ROUNDS: Final = 3
CALLS_MAX: Final = 200_000  # calls in a round
YIELD_CALLS: Final = 100  # calls after which other tasks run
YIELD_S: Final = 0.001  # a call after which they do, if it takes longer
TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")


class BenchError(Exception):
    """The benchmark did not measure what it meant to."""


def check(found: object, expected: object) -> None:
    if found != expected:
        raise BenchError(f"there is {found} where {expected} was expected")


class Limit(NamedTuple):
    """The most that a figure can reach, in its unit; of a latency, the least."""

    name: str
    value: float


class Round(NamedTuple):
    """Calls, how long all and each took, and the processor time of each process meanwhile."""

    calls: int
    elapsed_s: float
    latencies_s: Sequence[float] = ()
    cpu_s: Mapping[str, float] = {}

    @property
    def rate(self) -> float:
        return self.calls / self.elapsed_s


class Meter:
    """Times a round. If `pids` has any, meters the processor time meanwhile: of these processes, of
    this one, and of others, which are the neighbours and the kernel's work for us."""

    def __init__(
        self, pids: Mapping[str, int], ours: Callable[[], float] = time.process_time
    ) -> None:
        self._pids = pids
        self._ours = ours

    def __enter__(self) -> None:
        self._before = self._now()
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.elapsed_s = time.perf_counter() - self._began
        self.cpu_s = {name: now - self._before[name] for name, now in self._now().items()}

    def round(self, calls: int) -> Round:
        return Round(calls, self.elapsed_s, cpu_s=self.cpu_s)

    def _now(self) -> dict[str, float]:
        if not self._pids:
            return {}
        known = {"client": self._ours()}
        known |= {name: _cpu_s(pid) for name, pid in self._pids.items()}
        return known | {"others": _busy_s() - sum(known.values())}


@dataclass
class Case(ABC):
    """Something to measure, and the figures to make of its rounds.

    Attributes:
        units: what a call does, and how many of each; the rate of each is a figure.
        shares: the percentiles of a call's latency that are figures.
        limits: rates of calls, and names of earlier cases with the same figures.
        payload_bytes: of one message or entry.
        in_bytes: rates are in MB/s, too.
        pids: whose processor time is metered, beside the client's; none: no one's is.
        seconds: of a round; set when it runs.
    """

    name: str
    _: KW_ONLY
    units: Mapping[str, float] = field(default_factory=lambda: {"calls": 1})
    shares: Sequence[float] = ()
    limits: Sequence[Limit | str] = ()
    payload_bytes: int = 0
    in_bytes: bool = False
    pids: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0

    async def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Do what no round is to be charged with."""

    @abstractmethod
    async def round(self, meter: Meter) -> Round: ...


class Took(NamedTuple):
    """The result of a call that keeps time itself, to leave out its preparation."""

    seconds: float


Call = Callable[[], Awaitable[object]]


@dataclass
class Repeated(Case):
    """A call again and again, after one to warm up."""

    call: Call

    async def prepare(self) -> None:
        await self.call()

    async def round(self, meter: Meter) -> Round:
        return await one_round(self.call, self.seconds, meter)


async def one_round(call: Call, seconds: float, meter: Meter) -> Round:
    """Call for `seconds`, at least once, one call at a time."""
    latencies_s: list[float] = []
    with meter:
        until = time.perf_counter() + seconds
        while not latencies_s or (time.perf_counter() < until and len(latencies_s) < CALLS_MAX):
            began = time.perf_counter()
            result = await call()
            took_s = result.seconds if isinstance(result, Took) else time.perf_counter() - began
            latencies_s.append(took_s)
            if len(latencies_s) % YIELD_CALLS == 0 or took_s > YIELD_S:
                await asyncio.sleep(0)  # the call may never wait, and signals must get through
    # Processor time is metered of the whole round, and is held against all of its time.
    elapsed_s = meter.elapsed_s if meter.cpu_s else sum(latencies_s)
    return Round(len(latencies_s), elapsed_s, latencies_s, meter.cpu_s)


async def take_turns(cases: Sequence[Case], rounds: int, seconds: float) -> dict[str, list[Round]]:
    """The rounds of each case by its name."""
    done: dict[str, list[Round]] = {each.name: [] for each in cases}
    for each in cases:
        each.seconds = seconds
        await each.prepare()
    for number in range(rounds):
        # To and fro, so that none always has the same neighbours.
        for each in cases if number % 2 == 0 else reversed(cases):
            done[each.name].append(await each.round(Meter(each.pids)))
    return done


def run(cases: Sequence[Case], rounds: int, seconds: float) -> dict[str, list[Round]]:
    with tracing("bench"):
        return asyncio.run(take_turns(cases, rounds, seconds))


# ---- processor time


def family_cpu_s() -> float:
    """Processor seconds of this process and all that it started, ended ones included."""
    parents: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = _stat(stat)
        except OSError:
            continue  # it has ended
        member = int(stat.parent.name)
        parents.setdefault(int(fields[1]), []).append(member)
        ticks[member] = sum(map(int, fields[11:15]))  # its own, and of children that have ended
    family = [os.getpid()]
    for member in family:
        family += parents.get(member, [])
    return sum(ticks.get(member, 0) for member in family) / TICKS_A_SECOND


def _cpu_s(pid: int) -> float:
    """Processor seconds of a process and of all that its main thread started, ended ones included:
    a PostgreSQL server is a process for each connection."""
    seconds = sum(map(int, _stat(Path(f"/proc/{pid}/stat"))[11:15])) / TICKS_A_SECOND
    for child in _children(pid):
        with suppress(OSError):  # it has ended, and counts with its parent from now on
            seconds += _cpu_s(child)
    return seconds


def _children(pid: int) -> list[int]:
    """What a process's main thread started; nothing on a kernel without PROC_CHILDREN."""
    try:
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    except OSError:
        return []


def _stat(file: Path) -> list[str]:
    """The fields behind the name, which is in parentheses and may hold anything."""
    return file.read_text().rpartition(")")[2].split()


def _busy_s() -> float:
    """Processor seconds of the whole machine, what its host took from it included."""
    _, *ticks = Path("/proc/stat").read_text().splitlines()[0].split()
    user, nice, system, _idle, _waiting, *others = map(int, ticks[:8])
    return (user + nice + system + sum(others)) / TICKS_A_SECOND
