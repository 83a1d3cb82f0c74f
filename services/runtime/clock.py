"""Clocks that do not go back or jump while the process lives.

Machines set their clocks: by a second when the time daemon starts, by an hour when an operator
mistakes the zone. A lease or an age must not end early, or never, because of that. Code that
compares such a clock with a time written by another process must bound the difference itself: the
clock starts at the machine's time at the start of this process.
"""

import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Milliseconds since 1970."""


class SteadyClock:
    """Milliseconds since 1970, from the machine's time at construction on, without jumps."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> int:
        return int((time.monotonic() + self._offset_s) * 1000)


class CautiousClock:
    """The earlier of the machine's clock and a steady one, in milliseconds since 1970, so that no
    age is overstated, whichever way the machine's clock was set."""

    def __init__(self) -> None:
        self._steady = SteadyClock()

    def __call__(self) -> int:
        return min(self._steady(), time.time_ns() // 1_000_000)
