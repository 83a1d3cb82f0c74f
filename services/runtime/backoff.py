"""The waits between the attempts of something that fails."""

from random import Random


class Backoff:
    """Waits that double, up to a longest one. Each is a random part of that, at least half: what
    failed at the same moment must not return at the same moment."""

    def __init__(self, first_s: float, longest_s: float, random: Random | None = None) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s
        self._random = random or Random()

    def next_s(self, longest_s: float | None = None) -> float:
        """The wait before the next attempt, in seconds. `longest_s` replaces the longest one, for
        the waits after this."""
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._longest_s if longest_s is None else longest_s)
        return self._random.uniform(wait_s / 2, wait_s)

    def reset(self) -> None:
        """Begin anew, after an attempt that succeeded."""
        self._next_s = self._first_s
