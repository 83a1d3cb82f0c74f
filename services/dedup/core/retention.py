"""Which producers may be forgotten.

A tracked producer costs memory. Two policies bound that: a producer inactive for longer than the
timeout is *purged*, and on a topic with more producers than its limit the least recently active are
*evicted*. A producer with claims in flight is never forgotten, nor is a connected one, since its
ledger's reports count as activity.

A forgotten producer starts without state: ids that it stored long ago would be NEW again. So ages
are never overestimated: a clock set forward makes all earlier activity look older, and timeouts are
extended by the same amount for as long as it matters.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from seqgate.services.dedup.core.topic import Tracked

JUMP_MIN_MS: Final = 1_000
"""The smallest advance against a steady clock that counts as set forward; smaller ones add up."""

JUMPS_MAX: Final = 100
"""The most separate jumps; beyond that the oldest two are merged, at the later time."""


class Jumps:
    """When, and by how much, this process saw the clock of activity set forward."""

    def __init__(self) -> None:
        self._offset_ms: int | None = None
        self._jumps: list[tuple[int, int]] = []

    def look(self, now_ms: int, steady_ms: int) -> bool:
        """Compare the clock with a steady one. Returns whether there was an earlier comparison."""
        offset_ms = now_ms - steady_ms
        before_ms, self._offset_ms = self._offset_ms, offset_ms
        if before_ms is None:
            return False
        if offset_ms - before_ms >= JUMP_MIN_MS:
            self._jumps.append((steady_ms, offset_ms - before_ms))
        elif offset_ms > before_ms:
            self._offset_ms = before_ms
        while len(self._jumps) > JUMPS_MAX:
            (_, first_ms), (at_ms, second_ms), *others = self._jumps
            self._jumps = [(at_ms, first_ms + second_ms), *others]
        return True

    def allowance_ms(self, age_ms: int, steady_ms: int) -> int:
        """By how much activity of at most this age may look too old."""
        return sum(far_ms for at_ms, far_ms in self._jumps if steady_ms - at_ms <= age_ms)


class Forgettable(NamedTuple):
    """Producers to drop, each with its last known activity, so that a later activity saves it."""

    purge: list[tuple[str, int]]
    evict: list[tuple[str, int]]


def forgettable(
    producers: Iterable[tuple[str, Tracked]], *, inactive_before_ms: int, keep_at_most: int
) -> Forgettable:
    """Choose producers to purge, and to evict so that at most `keep_at_most` are left: the least
    recently active first, ties by name."""
    everyone = list(producers)
    idle = sorted(
        (tracked.active_ms, name) for name, tracked in everyone if not tracked.marks.in_flight
    )
    purge = [(name, active_ms) for active_ms, name in idle if active_ms < inactive_before_ms]
    excess = max(0, len(everyone) - len(purge) - keep_at_most)
    evict = [(name, active_ms) for active_ms, name in idle[len(purge) :][:excess]]
    return Forgettable(purge, evict)
