"""Doing one thing again and again for a while, several times over."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

ROUNDS: Final = 3
"""How many rounds each measurement has."""

CALLS_MAX: Final = 200_000
"""How many calls a round has at most."""


class Round(NamedTuple):
    """What was done in one round: how many times, in how long, and how long each took (where that
    was asked for)."""

    calls: int
    elapsed_s: float
    latencies_s: list[float]

    @property
    def rate(self) -> float:
        """How many a second."""
        return self.calls / self.elapsed_s


async def rounds_of(call: Callable[[], Awaitable[object]], seconds: float) -> list[Round]:
    """Call, one call at a time, for so many seconds a round. What only the first call pays is not
    counted."""
    await call()
    return [await one_round(call, seconds) for _ in range(ROUNDS)]


async def one_round(call: Callable[[], Awaitable[object]], seconds: float) -> Round:
    """Call, one call at a time, for so many seconds."""
    await asyncio.sleep(0)  # what is called may never wait, and a signal is to be heard
    latencies_s: list[float] = []
    began = now = time.perf_counter()
    while now < began + seconds and len(latencies_s) < CALLS_MAX:
        await call()
        ended = time.perf_counter()
        latencies_s.append(ended - now)
        now = ended
    return Round(len(latencies_s), now - began, latencies_s)
