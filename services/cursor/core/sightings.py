"""When is another's lease over? Judged by a counter that stood still, never by comparing clocks.

Each grant, renewal and release of a lease changes its cursor's `lease_number`. An observer, which
is a process with a steady clock of its own, notes when it first saw the present number. The lease
is over once the number has stood still for the lease's duration since then:

    owner       grant 7         renew 8           (dies)
    observer          7 seen         8 seen ------ duration ------> over

What an observer sees for the first time counts as just granted, also after its start: a lease may
last longer for it than it was granted for, and never ends earlier. Clocks of different machines may
be years apart.
"""

from collections import OrderedDict
from typing import Final, NamedTuple

from seqgate.services.cursor.core.state import Head, Lease

SIGHTINGS_MAX: Final = 100_000
"""The most leases that an observer remembers, about 400 bytes each. Of the others, the one that was
not used for the longest time is forgotten, and counts as just granted when it is seen again."""


class _Sighting(NamedTuple):
    epoch: int
    number: int
    since_ms: int


class Sightings:
    """What one observer has seen of leases. Times are by its own clock, in milliseconds; they are
    taken after the cursor was read."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], _Sighting] = OrderedDict()

    def judged(self, head: Head, now_ms: int, *, matters: bool) -> Lease | None:
        """The lease of a cursor as just read, with the time of its end by this observer's clock.
        One that does not matter never makes the observer forget another."""
        lease = head.lease
        if lease is None:
            return None
        key = str(head.topic), head.name
        seen = self._seen.get(key)
        if seen is None or not self._stands_still(seen, head, now_ms):
            seen = _Sighting(lease.epoch, head.lease_number, now_ms)
            if matters or key in self._seen or len(self._seen) < SIGHTINGS_MAX:
                self._note(key, seen)
        elif matters:
            self._seen.move_to_end(key)
        return lease._replace(expires_ms=seen.since_ms + lease.duration_ms)

    def changed(self, head: Head, now_ms: int) -> None:
        """Note a lease that this observer granted, renewed or ended, once that is durable."""
        key = str(head.topic), head.name
        seen = self._seen.get(key)
        if head.lease is None:
            return
        ours = _Sighting(head.lease.epoch, head.lease_number, now_ms)
        if seen is None or seen[:2] <= ours[:2]:
            self._note(key, ours)

    @staticmethod
    def _stands_still(seen: _Sighting, head: Head, now_ms: int) -> bool:
        """Whether the lease is the one that was seen, and the clock has not gone back since."""
        assert head.lease is not None
        is_same = seen[:2] == (head.lease.epoch, head.lease_number)
        return is_same and seen.since_ms <= now_ms

    def _note(self, key: tuple[str, str], sighting: _Sighting) -> None:
        self._seen[key] = sighting
        self._seen.move_to_end(key)
        if len(self._seen) > SIGHTINGS_MAX:
            self._seen.popitem(last=False)
