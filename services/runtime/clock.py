"""A clock that neither goes back nor jumps while the process lives.

Machines set their clocks: by a second when the daemon starts that keeps the time, by an hour when
somebody mistakes the zone. What lasts for a while (a lease, an age) must not end, or never end, for
that. Whoever compares with a time that another process wrote bounds the difference by a rule of its
own: this clock begins where the machine's stood when the process started.
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
    """The earlier of the machine's clock and a steady one, in milliseconds since 1970: by it
    nothing looks older than it does by either, whichever way the machine's clock was set."""

    def __init__(self) -> None:
        self._steady = SteadyClock()

    def __call__(self) -> int:
        return min(self._steady(), time.time_ns() // 1_000_000)
