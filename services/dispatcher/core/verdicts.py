"""What waits for the word of filters: which entries, and what is asked of the shell.

    UNJUDGED ──Judge──▶ accepted, rejected, PARK, or put off ──due──▶ UNJUDGED
       ▲                                     │
       └── came back, the chains changed ◀───┘

An entry that filters accepted waits like any other, and nothing is remembered of that; so where
there are no filters there is nothing here. One Judge is out at a time. It asks for as much of each
key as of any other, the first in the order of the log, whether it is the key's turn or not: what is
rejected goes away without a permit.
"""

from heapq import nsmallest
from typing import Final

from seqgate.types import Position
from services.dispatcher.core.effects import PARK, UNJUDGED, Judge, Kind, Options
from services.dispatcher.core.lane import Lane, Reason, Undecided
from services.dispatcher.core.timers import Timers
from services.dispatcher.core.waits import Waits

JUDGE_ENTRIES: Final = 1_000
"""About how many entries one Judge asks."""

UNJUDGED_MAX: Final = 10_000
"""How many entries may wait unjudged before reading stops: what is read then could not be delivered
either."""

_PUT_OFF: Final = 1
"""How those that were put off are counted, whatever their time."""


def reason_for(state: int) -> Reason:
    """Why an entry of this state is not delivered."""
    if state == UNJUDGED:
        return Reason.FILTERING
    return Reason.FILTER_FAILED if state == PARK else Reason.RESCHEDULED


class Verdicts:
    """See the module.

    Attributes:
        is_filtered: whether what comes back is judged again.
        back: what came back since the last event was over.
    """

    def __init__(
        self, options: Options, timers: Timers, totals: dict[str, int], waits: Waits
    ) -> None:
        self.is_filtered = False
        self.back: list[tuple[Lane, Position]] = []
        self._timers = timers
        self._totals = totals
        self._waits = waits
        self._failed_max_ms = options.filter_failed_max_ms
        self._waiting_max = options.consumer_parked_max if options.kind is Kind.SHARED else None
        self._to_ask: dict[Lane, None] = {}
        self._asked: dict[Position, Lane] | None = None
        self._counts = {UNJUDGED: 0, PARK: 0, _PUT_OFF: 0}

    @property
    def unjudged(self) -> int:
        """How many entries that wait are unjudged."""
        return self._counts[UNJUDGED]

    @property
    def failed(self) -> int:
        """At how many the filters failed."""
        return self._counts[PARK]

    @property
    def put_off(self) -> int:
        """How many were put off."""
        return self._counts[_PUT_OFF]

    @property
    def is_full(self) -> bool:
        """Whether so many entries wait that no more are to be read. Of a pool, where each is its
        own key, none of them would be passed over for want of room."""
        if self._counts[UNJUDGED] >= UNJUDGED_MAX:
            return True
        limit = self._waiting_max
        return limit is not None and sum(self._counts.values()) >= limit

    # ---- what waits

    def note(self, lane: Lane, position: Position, state: int) -> None:
        """An entry that waits is UNJUDGED, or its filters failed (PARK)."""
        undecided = lane.undecided
        if undecided is None:
            undecided = lane.undecided = Undecided()
        self._count(undecided.states.get(position), -1)
        self._count(state, 1)
        undecided.states[position] = state
        undecided.failed_ms.pop(position, None)
        if state == UNJUDGED:
            self._to_ask[lane] = None

    def note_failed(self, lane: Lane, position: Position, now_ms: int) -> None:
        """The filters failed at an entry that waits (PARK)."""
        before = None if lane.undecided is None else lane.undecided.failed_ms.get(position)
        self.note(lane, position, PARK)
        assert lane.undecided is not None
        since_ms = self._waits.since_ms(position, now_ms) if before is None else before
        lane.undecided.failed_ms[position] = since_ms
        self._timers.look_at(lane, since_ms + self._failed_max_ms)

    def has_failed(self, lane: Lane, position: Position) -> bool:
        """Whether an entry waits because filters failed at it, or is judged once more after
        that."""
        state = None if lane.undecided is None else lane.undecided.states.get(position)
        is_chunk = lane.rare is not None and position in lane.rare.chunks
        return state == PARK or (
            state == UNJUDGED and self._waits.failed_before(position, is_chunk=is_chunk)
        )

    def note_put_off(self, lane: Lane, position: Position, until_ms: int, times: int = 1) -> None:
        """An entry that waits is judged again then, and was put off so many times in a row."""
        self.note(lane, position, until_ms)
        assert lane.undecided is not None
        lane.undecided.times[position] = times
        self._waits.over(position)
        self._totals["put_off"] += 1
        self._timers.look_at(lane, until_ms)

    def note_anew(self, lane: Lane, position: Position) -> None:
        """An entry that waits is judged as if it had never been."""
        has_failed = self.has_failed(lane, position)
        self.note(lane, position, UNJUDGED)
        assert lane.undecided is not None
        lane.undecided.times.pop(position, None)
        if has_failed:
            self._waits.begin_anew(position)

    def note_due(self, lane: Lane, now_ms: int) -> list[Position]:
        """It is so late: what was put off until now is to be judged again. Returns at what filters
        failed so long ago that it waits for them no more."""
        undecided = lane.undecided
        later_ms = []
        given_up = []
        for position, since_ms in undecided.failed_ms.items() if undecided else ():
            if since_ms + self._failed_max_ms <= now_ms:
                given_up.append(position)
            else:
                later_ms.append(since_ms + self._failed_max_ms)
        for position, state in list(undecided.states.items()) if undecided else ():
            if 0 < state <= now_ms:
                self.note(lane, position, UNJUDGED)
            elif state > 0:
                later_ms.append(state)
        if later_ms:
            self._timers.look_at(lane, min(later_ms))
        return given_up

    def forget(self, lane: Lane, position: Position) -> None:
        """An entry is accepted, or does not wait any more."""
        undecided = lane.undecided
        state = None if undecided is None else undecided.states.pop(position, None)
        if undecided is None or state is None:
            return
        self._count(state, -1)
        undecided.times.pop(position, None)
        undecided.failed_ms.pop(position, None)
        self._waits.over(position)
        if not undecided.states:
            lane.undecided = None
            self._to_ask.pop(lane, None)

    def _count(self, state: int | None, entries: int) -> None:
        if state is not None:
            self._counts[min(state, _PUT_OFF)] += entries

    # ---- what is asked

    def ask(self) -> Judge | None:
        """What to ask next; None: nothing, or something is being asked."""
        if self._asked is not None or not self._to_ask:
            return None
        lanes, self._to_ask = self._to_ask, {}
        share = JUDGE_ENTRIES // len(lanes) or 1
        asked: dict[Position, Lane] = {}
        more = []
        for lane in lanes:
            if len(asked) >= JUDGE_ENTRIES:
                self._to_ask[lane] = None
                continue
            states = {} if lane.undecided is None else lane.undecided.states
            unjudged = [each for each, state in states.items() if state == UNJUDGED]
            asked.update((each, lane) for each in nsmallest(share, unjudged))
            if len(unjudged) > share:
                more.append(lane)
        self._to_ask.update(dict.fromkeys(more))  # after those that were not asked
        if not asked:
            return None
        self._asked = asked
        return Judge(tuple(asked))

    def answered(self) -> dict[Position, Lane]:
        """The answer is there. Returns to what, but for entries of which it counts no more."""
        asked, self._asked = self._asked, None
        assert asked is not None
        return asked

    def ask_anew(self) -> None:
        """Whatever the filters are being asked, what they say counts no more."""
        if self._asked is not None:
            self._asked = {}
