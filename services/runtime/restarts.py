"""When a worker that ended is replaced, and when its supervisor gives up.

    ended before it listened    replaced after a pause; given up at the STARTS_MAX-th in a row
    ended soon after            replaced after a pause
    ended after STEADY_S        replaced after the shortest pause

The pause doubles with each start in a row that did not last.
"""

from typing import Final

STARTS_MAX: Final = 5
"""The most starts in a row of a worker that never listens."""

STEADY_S: Final = 60.0
"""A worker that listened for this long has no trouble with its start, in seconds."""

PAUSE_MIN_S: Final = 0.2
PAUSE_MAX_S: Final = 30.0
"""The bounds of the pause, in seconds. The shortest lets a signal to the whole process group reach
the supervisor before it replaces a worker that obeyed."""


class Restarts:
    """The starts of one worker in a row that did not last."""

    def __init__(self) -> None:
        self._brief = 0
        self._deaf = 0

    def ended(self, listened_s: float | None) -> float | None:
        """A worker ended that no one told to. Returns the pause before the next start, in seconds;
        None: give up.

        Args:
            listened_s: how long it listened, in seconds; None: not at all.
        """
        self._deaf = self._deaf + 1 if listened_s is None else 0
        if listened_s is not None and listened_s >= STEADY_S:
            self._brief = 0
        self._brief += 1
        if self._deaf >= STARTS_MAX:
            return None
        doublings = min(self._brief - 1, 16)  # far beyond PAUSE_MAX_S
        return min(PAUSE_MIN_S * float(2**doublings), PAUSE_MAX_S)
