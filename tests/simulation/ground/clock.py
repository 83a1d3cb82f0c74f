"""Clocks of simulated processes, and a `time` module that reads them."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.simulation.ground.loop import VirtualLoop

EPOCH_S: Final = 1_750_000_000.0
"""Wall time at the start of a run, on a correct clock: seconds since 1970."""


class Clock:
    """One process's clocks: a monotonic one, which may drift, and a wall clock, which may also
    jump. Both start correct."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._anchor = loop.now  # loop time at which the monotonic clock read `_monotonic`
        self._monotonic = loop.now
        self._rate = 1.0
        self._offset = EPOCH_S

    def monotonic(self) -> float:
        """Seconds, comparable within the process only."""
        return self._monotonic + (self._loop.now - self._anchor) * self._rate

    def time(self) -> float:
        """Seconds since 1970."""
        return self.monotonic() + self._offset

    def at(self, monotonic: float) -> float:
        """Convert a time of the monotonic clock to loop time."""
        return self._anchor + (monotonic - self._monotonic) / self._rate

    @property
    def ahead_s(self) -> float:
        """The wall clock's error, in seconds; negative if it is slow."""
        return self.time() - EPOCH_S - self._loop.now

    def begin_at(self, monotonic_s: float) -> None:
        """Set the monotonic clock, which a machine counts from its boot. Call this before the
        process starts. The wall clock is unaffected."""
        self._offset += self._monotonic - monotonic_s
        self._monotonic, self._anchor = monotonic_s, self._loop.now

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward, or back if negative. The monotonic clock is unaffected."""
        self._offset += seconds

    def drift(self, rate: float) -> None:
        """From now on, run both clocks at `rate` seconds per second."""
        self._monotonic = self.monotonic()
        self._anchor = self._loop.now
        self._rate = rate


_REAL: Final[dict[str, Callable[[], Any]]] = {
    "time": time.time,
    "time_ns": time.time_ns,
    "monotonic": time.monotonic,
    "monotonic_ns": time.monotonic_ns,
    "perf_counter": time.perf_counter,
}

OURS: Final = ("seqgate",)
"""Packages whose functions may have bound a clock as a default argument."""


@contextmanager
def virtual_clocks(loop: VirtualLoop) -> Iterator[None]:
    """Inside the context, `time` reads the current process's clocks."""

    def of_time() -> float:
        return loop.process.clock.time()

    def of_monotonic() -> float:
        return loop.process.clock.monotonic()

    virtual: dict[str, Callable[[], Any]] = {
        "time": of_time,
        "time_ns": lambda: int(of_time() * 1_000_000_000),
        "monotonic": of_monotonic,
        "monotonic_ns": lambda: int(of_monotonic() * 1_000_000_000),
        "perf_counter": of_monotonic,
    }
    replaced = {_REAL[name]: clock for name, clock in virtual.items()}
    with ExitStack() as stack:
        for name, clock in virtual.items():
            stack.callback(setattr, time, name, getattr(time, name))
            setattr(time, name, clock)
        for function in _functions_with_clocks(len(sys.modules)):
            stack.enter_context(_defaults(function, replaced))
        yield


@contextmanager
def _defaults(function: Any, replaced: dict[Callable[[], Any], Any]) -> Iterator[None]:
    positional, named = function.__defaults__, function.__kwdefaults__

    def instead(value: Any) -> Any:
        return replaced[value] if _is_clock(value) else value

    if positional:
        function.__defaults__ = tuple(map(instead, positional))
    if named:
        function.__kwdefaults__ = {name: instead(value) for name, value in named.items()}
    try:
        yield
    finally:
        function.__defaults__, function.__kwdefaults__ = positional, named


def _is_clock(value: Any) -> bool:
    return any(value is clock for clock in _REAL.values())


@functools.lru_cache(maxsize=1)
def _functions_with_clocks(modules: int) -> list[Any]:
    """Find our functions that have a clock as a default argument, bound at definition."""
    del modules  # the cache key: search again once more modules are loaded
    found = []
    for name, module in sys.modules.copy().items():
        if name.partition(".")[0] not in OURS or module is None:
            continue
        for value in list(vars(module).values()):
            held = list(vars(value).values()) if isinstance(value, type) else [value]
            for function in held:
                plain = getattr(function, "__func__", function)
                defaults = [
                    *(getattr(plain, "__defaults__", None) or ()),
                    *(getattr(plain, "__kwdefaults__", None) or {}).values(),
                ]
                if any(map(_is_clock, defaults)) and plain not in found:
                    found.append(plain)
    return found
