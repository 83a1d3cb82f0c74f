"""Attempts to connect: the waits between them, what is logged, and what an error says of them.

A lost connection is logged at once, then every LOG_INTERVAL_S while it lasts, and once it is over.
"""

import asyncio
import logging
from random import Random
from typing import Final

from seqgate.client._status import forget_frames
from seqgate.errors import SeqgateError, UnavailableError

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
"""The first and the longest wait before a client reconnects. Each wait doubles."""

LOG_INTERVAL_S: Final = 30.0
"""How often a connection that stays lost is logged, in seconds."""

_log: Final = logging.getLogger("seqgate.client")


class Backoff:
    def __init__(self) -> None:
        self._random = Random()
        self._next_s = BACKOFF_FIRST_S

    def reset(self) -> None:
        self._next_s = BACKOFF_FIRST_S

    def next_s(self, at_least: float | None = None) -> float:
        """The wait before this attempt, at least `at_least`."""
        wait_s = max(self._next_s * (0.5 + self._random.random() / 2), self.spread(at_least or 0.0))
        self._next_s = min(self._next_s * 2, BACKOFF_MAX_S)
        return wait_s

    def spread(self, wait_s: float) -> float:
        """A wait that a service demands, or up to half more: it may have told many clients the
        same."""
        return wait_s * (1 + self._random.random() / 2)


class Reconnecting:
    """The attempts of one producer, consumer or reader.

    Attributes:
        last: why the last attempt failed, or the last connection was lost; None: none was.
        trouble: the same, while there is no connection; otherwise None.
    """

    def __init__(self, who: str) -> None:
        """`who` connects, as the log names it."""
        self.last: SeqgateError | None = None
        self.trouble: SeqgateError | None = None
        self._who = who
        self._backoff = Backoff()
        self._began_s = 0.0
        self._attempts = 0  # that failed since the last success
        self._logged_s: float | None = None

    def answered(self) -> None:
        """Record that a service answers; that may not last."""
        self.trouble = None

    def succeeded(self) -> None:
        self.answered()
        if self._logged_s is not None:
            _log.info("%s is connected again after %s", self._who, self._tried)
        self._backoff.reset()
        self._attempts = 0
        self._logged_s = None

    def failed(self, error: SeqgateError) -> float:
        """Record a failed attempt, or a lost connection. Returns how long to wait before the next
        attempt, in seconds: at least as long as the service asks."""
        now_s = _now_s()
        if not self._attempts:
            self._began_s = now_s
        self._attempts += 1
        forget_frames(error)
        self.last = self.trouble = error
        if self._logged_s is None or now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            # As text: a handler may keep what it is given, and an error keeps its frames.
            _log.warning("%s is not connected, and tries again: %s", self._who, str(error))
        return self._backoff.next_s(error.retry_after_s)

    def spread(self, wait_s: float) -> float:
        """How long to wait before a resend, in seconds: at least as long as the service demands."""
        return self._backoff.spread(wait_s)

    def pause_s(self) -> float:
        """How long to wait before the next attempt after an orderly end, in seconds."""
        return self._backoff.next_s()

    def given_up(self, asked: str, within_s: float) -> SeqgateError:
        """The error of a connection that was not made in time, by the address that was `asked`."""
        last = self.last
        if last is None:
            return UnavailableError(f"no answer from {asked} within {within_s:g} s")
        if not isinstance(last, UnavailableError):
            return last
        told = UnavailableError(
            f"no connection to {asked}: {last} ({self._tried})",
            reason=last.reason,
            details=last.details,
            retry_after_s=last.retry_after_s,
        )
        told.__cause__ = last
        return told

    @property
    def _tried(self) -> str:
        attempts = f"{self._attempts:,} attempt{'' if self._attempts == 1 else 's'}"
        return f"{attempts} in {_now_s() - self._began_s:.1f} s"


def _now_s() -> float:
    return asyncio.get_running_loop().time()
