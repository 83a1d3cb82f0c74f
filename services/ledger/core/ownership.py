"""Who of several instances on one store should write a topic.

Each instance counts its beats in the store, and watches the others' counters. Nobody compares
clocks: an instance is over when its counter stood still for LEASE_S on the observer's own monotonic
clock, or when its row is gone. This only says who should: writers fence each other by ledger_id.

While the store is away nobody can beat, and whoever reaches it first afterwards finds all others
still. So the time between two looks counts for LOOK_MAX_S at most.

Time is in seconds, by one monotonic clock, and is passed in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple

BEAT_S: Final = 1.0
"""The interval between beats."""

LEASE_S: Final = 5.0
"""How long a counter stands still before its instance counts as over."""

CONFIRM_S: Final = 3.5
"""How long a beat confirms its own instance: less than LEASE_S, by more than a beat takes."""

LOOK_MAX_S: Final = 2 * BEAT_S
"""The most that the time between two looks adds to how long a counter stood still."""

FORGET_S: Final = 60.0
"""How long an instance is over before its row is removed."""

STEADY_BEATS: Final = 5
"""The number of beats without a change of instances after which topics are spread."""

SLACK: Final = 8
"""An instance hands over what it owns beyond its share and one in this many topics more."""

HANDED_OVER_MAX: Final = 8
"""The most topics that an instance hands over with a beat."""


class Beat(NamedTuple):
    """An instance when the store was last looked at: `beats` changes with each of its beats;
    `topics` is the number that it owns."""

    instance: str
    address: str
    beats: int
    topics: int


class HandOver(NamedTuple):
    """So many topics are to be handed over to another instance."""

    topics: int
    successor: Beat


@dataclass(slots=True)
class _Seen:
    beats: int
    looked_s: float
    still_s: float = 0.0
    has_moved: bool = False


class Watch:
    """What one instance knows of the others."""

    def __init__(self, instance: str, address: str) -> None:
        self.instance: Final = instance
        self._address = address
        self._beats: dict[str, Beat] = {}
        self._seen: dict[str, _Seen] = {}
        self._confirmed_s: float | None = None
        self._steady_beats = 0

    def look(self, beats: Sequence[Beat], *, sent_s: float, now_s: float) -> None:
        """Note the answer to a beat that was sent at `sent_s`."""
        before = self._living()
        self._beats = {each.instance: each for each in beats}
        self._seen = {name: seen for name, seen in self._seen.items() if name in self._beats}
        for each in beats:
            seen = self._seen.get(each.instance)
            if seen is None or seen.beats != each.beats:
                # It beat at the latest now; it had not beaten again when it was asked for.
                self._seen[each.instance] = _Seen(each.beats, now_s, has_moved=seen is not None)
            elif sent_s > seen.looked_s:
                seen.still_s += min(sent_s - seen.looked_s, LOOK_MAX_S)
                seen.looked_s = sent_s
        if self.instance in self._beats:
            self._confirmed_s = max(sent_s, self._confirmed_s or sent_s)
        self._steady_beats = self._steady_beats + 1 if self._living() == before else 0

    def is_confirmed(self, now_s: float) -> bool:
        """Whether nobody can take this instance for over yet."""
        return self._confirmed_s is not None and now_s - self._confirmed_s < CONFIRM_S

    def knows(self, instance: str) -> bool:
        return instance in self._beats

    def address_of(self, instance: str) -> str | None:
        """The address of an instance that may be alive; None: it is over."""
        return None if self.is_over(instance) else self._beats[instance].address

    def is_over(self, instance: str) -> bool:
        """Whether an instance is gone, stood still, or was an earlier process in this one's place.
        One that is not known had no row when the store was last looked at."""
        if instance == self.instance:
            return False
        if instance not in self._beats or self._is_earlier(instance):
            return True
        return self._seen[instance].still_s >= LEASE_S

    def forgotten(self) -> list[str]:
        """Instances whose rows can be removed."""
        return [name for name in self._beats if self.is_over(name) and self._is_forgotten(name)]

    def is_first(self) -> bool:
        """Whether this is the first of the living by name: the one that does what one should do."""
        return self.instance == min(self._living(), default=self.instance)

    def surplus(self) -> HandOver | None:
        """What this instance owns beyond its share, if another one owns less than its own.

        Instances that look at the same time find different parts of the same plan: together they
        give nobody more than its share, so that no topic moves twice.
        """
        living = [self._beats[name] for name in sorted(self._living())]
        if not living or self._steady_beats < STEADY_BEATS:
            return None
        share = ceil(sum(each.topics for each in living) / len(living))
        givers = [each for each in living if each.topics > share + share // SLACK]
        takers = sorted((each for each in living if each.topics < share), key=_topics)
        mine = self._beats.get(self.instance)
        if mine is None or mine not in givers or not takers:
            return None
        turn, at = divmod(givers.index(mine), len(takers))
        takes = share - takers[at].topics
        sharing = len(givers[at :: len(takers)])
        count = min(
            mine.topics - share,
            takes // sharing + (turn < takes % sharing),
            HANDED_OVER_MAX,
        )
        return HandOver(count, takers[at]) if count else None

    def _is_earlier(self, instance: str) -> bool:
        """Whether this is an earlier process at this one's address. If its counter moves, it is
        another process, and both are told to callers by the same address."""
        return self._beats[instance].address == self._address and not self._seen[instance].has_moved

    def _is_forgotten(self, instance: str) -> bool:
        return self._is_earlier(instance) or self._seen[instance].still_s >= FORGET_S

    def _living(self) -> set[str]:
        return {name for name in self._beats if not self.is_over(name)}


def _topics(beat: Beat) -> int:
    return beat.topics
