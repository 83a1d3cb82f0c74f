"""Entries that wait for filters: their states and waiting times, and requests for verdicts.

    UNJUDGED ──Judge──▶ accepted, rejected, FILTER_FAILED, or rescheduled ──due──▶ UNJUDGED
       ▲                                     │
       └── returned, the chains changed ◀────┘

An accepted entry waits like any other without any state, so without filters this module is empty.
One Judge is pending at a time. It shares its entries evenly among the keys, each in the order of
the log, regardless of turns: a rejected entry needs no permit.

Some waits must end: those of entries at which filters failed, and of kept-back chunks. A new owner
would count them from its takeover, and with one takeover a day none would ever end. So the oldest
are durable, as text in the cursor's property WAITS:

    1:5@1700000000000 1:9@1700000360000        position @ milliseconds since 1970

Beyond WAITS_MAX, waits restart with each takeover until some of the older ones have ended.
"""

from collections.abc import Iterable, Mapping
from heapq import nsmallest
from typing import Final

from seqgate.services.dispatcher.core.effects import (
    FILTER_FAILED,
    UNJUDGED,
    Judge,
    Options,
    SubscriptionType,
)
from seqgate.services.dispatcher.core.lane import Lane, Reason, Timers, Undecided
from seqgate.types import Position

WAITS: Final = "seqgate.waits"

WAITS_MAX: Final = 64
"""Limit of durable waits: as many as a property has room for."""


class Waits:
    """The durable waits of one machine, and those that restarted."""

    def __init__(self, since_ms: Mapping[Position, int]) -> None:
        self._since_ms = dict(since_ms)
        self._anew: set[Position] = set()

    def since_ms(self, position: Position, now_ms: int) -> int:
        """When a waiting entry began to wait: `now_ms`, unless an earlier time is durable."""
        return min(now_ms, self._since_ms.get(position, now_ms))

    def failed_before(self, position: Position, *, is_chunk: bool) -> bool:
        """Whether filters failed, for this owner or an earlier one, at an entry that is judged once
        more. A chunk's durable wait is no evidence: it may have been kept back."""
        return position in self._anew or (not is_chunk and position in self._since_ms)

    def begin_anew(self, position: Position) -> None:
        """Restart the wait of an entry that may have no reason to wait any longer."""
        self._since_ms.pop(position, None)
        self._anew.add(position)

    def over(self, position: Position) -> None:
        """End the wait of an entry: a later wait starts over."""
        self._since_ms.pop(position, None)
        self._anew.discard(position)


def oldest(lanes: Iterable[Lane]) -> dict[Position, int]:
    """The start times of the oldest waits that must end, at most WAITS_MAX."""
    found: list[tuple[int, Position]] = []
    for lane in lanes:
        if lane.undecided is not None:
            found += [(since, position) for position, since in lane.undecided.failed_ms.items()]
        if lane.rare is not None:
            kept = lane.rare.kept_since_ms.items()
            found += [(since, min(lane.rare.kept_back[name])) for name, since in kept]
    return {position: since for since, position in nsmallest(WAITS_MAX, found)}


def to_text(since_ms: Mapping[Position, int]) -> str:
    return " ".join(
        f"{ledger_id}:{entry_id}@{since}" for (ledger_id, entry_id), since in since_ms.items()
    )


def from_text(text: str) -> dict[Position, int]:
    """Parse the property. Malformed items were not written here, and are ignored."""
    found = {}
    for each in text.split():
        place, _, since = each.partition("@")
        ledger_id, _, entry_id = place.partition(":")
        if all(part.isascii() and part.isdecimal() for part in (ledger_id, entry_id, since)):
            found[Position(int(ledger_id), int(entry_id))] = int(since)
    return found


JUDGE_ENTRIES: Final = 1_000
"""Approximate limit of entries in one Judge."""

UNJUDGED_MAX: Final = 10_000
"""Limit of unjudged entries at which reading stops: further ones could not be delivered."""

_RESCHEDULED: Final = 1
"""The state under which rescheduled entries are counted, regardless of their times."""


def reason_for(state: int) -> Reason:
    """Why an entry of this state is not delivered."""
    if state == UNJUDGED:
        return Reason.FILTERING
    return Reason.FILTER_FAILED if state == FILTER_FAILED else Reason.RESCHEDULED


class Verdicts:
    """See the module. `back`: entries that the current event returned, to be judged again if
    `is_filtered`."""

    def __init__(
        self, options: Options, timers: Timers, totals: dict[str, int], waits: Waits
    ) -> None:
        self.is_filtered = False
        self.back: list[tuple[Lane, Position]] = []
        self._timers = timers
        self._totals = totals
        self._waits = waits
        self._failed_max_ms = options.filter_failed_max_ms
        self._waiting_max = (
            options.consumer_parked_max if options.kind is SubscriptionType.SHARED else None
        )
        self._to_ask: dict[Lane, None] = {}
        self._pending: dict[Position, Lane] | None = None
        self._counts = {UNJUDGED: 0, FILTER_FAILED: 0, _RESCHEDULED: 0}

    @property
    def unjudged(self) -> int:
        return self._counts[UNJUDGED]

    @property
    def failed(self) -> int:
        return self._counts[FILTER_FAILED]

    @property
    def rescheduled(self) -> int:
        return self._counts[_RESCHEDULED]

    @property
    def is_full(self) -> bool:
        """Whether reading stops, since too many entries wait. In a pool, where each entry is its
        own key, none of them would lag for lack of room."""
        if self._counts[UNJUDGED] >= UNJUDGED_MAX:
            return True
        limit = self._waiting_max
        return limit is not None and sum(self._counts.values()) >= limit

    # ---- waiting entries

    def record(self, lane: Lane, position: Position, state: int) -> None:
        """Set the state of a waiting entry."""
        undecided = lane.undecided
        if undecided is None:
            undecided = lane.undecided = Undecided()
        self._count(undecided.states.get(position), -1)
        self._count(state, 1)
        undecided.states[position] = state
        undecided.failed_ms.pop(position, None)
        if state == UNJUDGED:
            self._to_ask[lane] = None

    def record_failed(self, lane: Lane, position: Position, now_ms: int) -> None:
        """Record that filters failed at a waiting entry."""
        before = None if lane.undecided is None else lane.undecided.failed_ms.get(position)
        self.record(lane, position, FILTER_FAILED)
        assert lane.undecided is not None
        since_ms = self._waits.since_ms(position, now_ms) if before is None else before
        lane.undecided.failed_ms[position] = since_ms
        self._timers.look_at(lane, since_ms + self._failed_max_ms)

    def has_failed(self, lane: Lane, position: Position) -> bool:
        """Whether filters failed at a waiting entry, even if it is judged once more."""
        state = None if lane.undecided is None else lane.undecided.states.get(position)
        is_chunk = lane.rare is not None and position in lane.rare.chunks
        return state == FILTER_FAILED or (
            state == UNJUDGED and self._waits.failed_before(position, is_chunk=is_chunk)
        )

    def record_rescheduled(
        self, lane: Lane, position: Position, until_ms: int, times: int = 1
    ) -> None:
        """Reschedule a waiting entry, for the `times`-th time in a row."""
        self.record(lane, position, until_ms)
        assert lane.undecided is not None
        lane.undecided.times[position] = times
        self._waits.over(position)
        self._totals["rescheduled"] += 1
        self._timers.look_at(lane, until_ms)

    def judge_anew(self, lane: Lane, position: Position) -> None:
        """Judge a waiting entry as if for the first time."""
        has_failed = self.has_failed(lane, position)
        self.record(lane, position, UNJUDGED)
        assert lane.undecided is not None
        lane.undecided.times.pop(position, None)
        if has_failed:
            self._waits.begin_anew(position)

    def take_due(self, lane: Lane, now_ms: int) -> list[Position]:
        """Make rescheduled entries that are due UNJUDGED again. Returns entries at which filters
        failed too long ago to wait any longer."""
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
                self.record(lane, position, UNJUDGED)
            elif state > 0:
                later_ms.append(state)
        if later_ms:
            self._timers.look_at(lane, min(later_ms))
        return given_up

    def forget(self, lane: Lane, position: Position) -> None:
        """Forget an entry that is accepted or no longer waits."""
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
            self._counts[min(state, _RESCHEDULED)] += entries

    # ---- requested verdicts

    def ask(self) -> Judge | None:
        """The next request; None: there is none, or one is pending."""
        if self._pending is not None or not self._to_ask:
            return None
        lanes, self._to_ask = self._to_ask, {}
        share = JUDGE_ENTRIES // len(lanes) or 1
        pending: dict[Position, Lane] = {}
        more = []
        for lane in lanes:
            if len(pending) >= JUDGE_ENTRIES:
                self._to_ask[lane] = None
                continue
            states = {} if lane.undecided is None else lane.undecided.states
            unjudged = [each for each, state in states.items() if state == UNJUDGED]
            pending.update((each, lane) for each in nsmallest(share, unjudged))
            if len(unjudged) > share:
                more.append(lane)
        self._to_ask.update(dict.fromkeys(more))  # after the lanes left out
        if not pending:
            return None
        self._pending = pending
        return Judge(tuple(pending))

    def answered(self) -> dict[Position, Lane]:
        """End the pending request. Returns its entries, without those whose answer is stale."""
        pending, self._pending = self._pending, None
        assert pending is not None
        return pending

    def ask_anew(self) -> None:
        """Make the pending verdicts stale."""
        if self._pending is not None:
            self._pending = {}
