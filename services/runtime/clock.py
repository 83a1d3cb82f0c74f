"""A clock that neither goes back nor jumps while the process lives.

Machines set their clocks: by a second when the time daemon starts, by an hour when an operator
mistakes the zone. A lease or an age must neither end early nor last for ever because of that. Code
that compares this clock with a time that another process wrote bounds the difference by a rule of
its own: this clock starts at the machine's time when the process started.
"""

import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Milliseconds since 1970."""


class SteadyClock:
    """Milliseconds since 1970 when the process started, and from then on without jumps."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> int:
        return int((time.monotonic() + self._offset_s) * 1000)


class CautiousClock:
    """The earlier of the machine's clock and a steady one, in milliseconds since 1970: no age by it
    exceeds the age by either, whichever way the machine's clock was set."""

    def __init__(self) -> None:
        self._steady = SteadyClock()

    def __call__(self) -> int:
        return min(self._steady(), time.time_ns() // 1_000_000)
