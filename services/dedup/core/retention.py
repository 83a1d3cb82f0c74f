"""Which producers may be forgotten?

A producer costs memory for as long as it is remembered. Two policies bound that: a producer
without activity for longer than the timeout is *purged*, and where a topic tracks more than its
limit the least recently active are *evicted*. What is in flight is never forgotten, and neither is
a producer that a publish path has reported as connected, since that counts as activity.

A forgotten producer starts from nothing: ids that it stored long ago would be NEW again.
"""

from collections.abc import Iterable
from typing import NamedTuple

from services.dedup.core.topic import Tracked


class Forgettable(NamedTuple):
    """Producers to drop, each with the activity that was seen, so that a later one saves it."""

    purge: list[tuple[str, int]]
    evict: list[tuple[str, int]]


def forgettable(
    producers: Iterable[tuple[str, Tracked]], *, inactive_before_ms: int, keep_at_most: int
) -> Forgettable:
    """Choose who is purged, and who is evicted so that at most `keep_at_most` stay: the oldest
    first, names deciding between equals."""
    everyone = list(producers)
    idle = sorted(
        (tracked.active_ms, name) for name, tracked in everyone if not tracked.marks.in_flight
    )
    purge = [(name, active_ms) for active_ms, name in idle if active_ms < inactive_before_ms]
    excess = max(0, len(everyone) - len(purge) - keep_at_most)
    evict = [(name, active_ms) for active_ms, name in idle[len(purge) :][:excess]]
    return Forgettable(purge, evict)
