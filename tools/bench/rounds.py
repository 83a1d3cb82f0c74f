"""Rounds of calls that follow one another, with their time and the processor time meanwhile."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Final, NamedTuple

from tools.bench.machine import busy_s, cpu_s

ROUNDS: Final = 3
CALLS_MAX: Final = 200_000  # calls in a round
YIELD_CALLS: Final = 100
YIELD_S: Final = 0.001
"""After how many calls, or a call of how many seconds, other tasks run."""

CLIENT: Final = "client"  # this process, in figures of processor time
OTHERS: Final = "others"  # everything else on the machine: neighbours, and the kernel's work for us


class BenchError(Exception):
    """The benchmark did not measure what it meant to."""


class Round(NamedTuple):
    """Calls, how long they took together, how long each took (where known), and the processor time
    of each process meanwhile (where metered)."""

    calls: int
    elapsed_s: float
    latencies_s: Sequence[float] = ()
    cpu_s: Mapping[str, float] = {}

    @property
    def rate(self) -> float:
        return self.calls / self.elapsed_s


class Took(NamedTuple):
    """The result of a call that keeps time itself, to leave out its preparation."""

    seconds: float
    calls: int = 1


Call = Callable[[], Awaitable[object]]


class Meter:
    """Times a round, and the processor time of these processes meanwhile. Entered again, it adds
    up."""

    def __init__(
        self, pids: Mapping[str, int], ours: Callable[[], float] = time.process_time
    ) -> None:
        self._pids = pids
        self._ours = ours
        self._cpu_s: dict[str, float] = {}
        self.elapsed_s = 0.0

    def __enter__(self) -> None:
        self._before = self._now()
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.elapsed_s += time.perf_counter() - self._began
        for name, seconds in self._now().items():
            self._cpu_s[name] = self._cpu_s.get(name, 0.0) + seconds - self._before[name]

    def round(self, calls: int, latencies_s: Sequence[float] = ()) -> Round:
        return Round(calls, self.elapsed_s, latencies_s, self._cpu_s)

    def _now(self) -> dict[str, float]:
        known = {CLIENT: self._ours()}
        known |= {name: cpu_s(pid) for name, pid in self._pids.items()}
        return known | {OTHERS: busy_s() - sum(known.values())}


async def one_round(call: Call, seconds: float, meter: Meter | None = None) -> Round:
    """Call for `seconds`, at least once, one call at a time."""
    calls, latencies_s = 0, list[float]()
    with meter or nullcontext():
        until = time.perf_counter() + seconds
        while not calls or (time.perf_counter() < until and len(latencies_s) < CALLS_MAX):
            began = time.perf_counter()
            took = await call()
            if not isinstance(took, Took):
                took = Took(time.perf_counter() - began)
            calls += took.calls
            latencies_s.append(took.seconds)
            if len(latencies_s) % YIELD_CALLS == 0 or took.seconds > YIELD_S:
                await asyncio.sleep(0)  # the call may never wait, and signals must get through
    return meter.round(calls, latencies_s) if meter else Round(calls, sum(latencies_s), latencies_s)


async def in_turn(
    calls: Mapping[str, Call], seconds: float, pids: Mapping[str, Mapping[str, int]] | None = None
) -> dict[str, list[Round]]:
    """Rounds of each call by its name, after a call to warm up. The calls take turns: a disturbance
    of one disturbs the others too. `pids`: for each, whose processor time is metered."""
    for call in calls.values():
        await call()
    done: dict[str, list[Round]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            done[name].append(await one_round(call, seconds, Meter(pids[name]) if pids else None))
    return done


async def rounds_of(call: Call, seconds: float) -> list[Round]:
    """Rounds of one call, after a call to warm up."""
    return (await in_turn({"": call}, seconds))[""]
