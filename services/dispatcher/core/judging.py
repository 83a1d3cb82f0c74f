"""Applies the verdicts of filters to entries.

    read, scanned ──▶ ACCEPT ──▶ waits, like any other
    returned ───┐     REJECT ──▶ acknowledged: no permit, no attempt, no delivery
                ▼     FILTER_FAILED   ──▶ waits until the filters are changed or retried
            UNJUDGED  n ms   ──▶ waits n ms, and is judged again
                      UNJUDGED ─▶ waits until it is judged

A waiting entry holds its key where keys are ordered, and nothing elsewhere. A redelivered entry is
judged again, unless it failed too often: then it is dead-lettered.

The chunks of a large message share the verdict of the first that is judged, while any of them is
known: a consumer gets all of them, or none.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from seqgate.services.dispatcher.core.effects import (
    ACCEPT,
    FILTER_FAILED,
    REJECT,
    UNJUDGED,
    Entry,
    Options,
)
from seqgate.services.dispatcher.core.lane import Chunk, Lane
from seqgate.services.dispatcher.core.large import LargeMessages
from seqgate.services.dispatcher.core.parking import Parking
from seqgate.services.dispatcher.core.settling import Settling
from seqgate.services.dispatcher.core.verdicts import Verdicts
from seqgate.types import Position

REJECTED_ATTEMPTS_MAX: Final = 1_000
"""Limit of attempts remembered as rejected until their last chunk is read; the oldest go first."""


class Judging:
    def __init__(
        self,
        options: Options,
        parking: Parking,
        settling: Settling,
        large: LargeMessages,
        totals: dict[str, int],
    ) -> None:
        self._options = options
        self._parking = parking
        self._verdicts: Verdicts = parking.verdicts
        self._settling = settling
        self._large = large
        self._totals = totals
        self._rejected: dict[str, None] = {}

    # ---- entries read from the log

    def as_read(self, entry: Entry, key: bytes, now_ms: int, *, keeps: bool) -> Entry | None:
        """Apply the verdict on an entry that was read. `keeps`: whether its key's entries are kept,
        room permitting. Returns the entry with the verdict that counts; None: it is rejected."""
        if entry.chunk is not None:
            if self._large.is_dead(entry.chunk):  # its letter has all chunks, or none
                return entry._replace(verdict=ACCEPT)
            if not keeps:
                return entry  # judged when the chunks before it are known
            entry = entry._replace(verdict=self._of_chunk(entry, entry.chunk, key, now_ms))
        if entry.verdict == ACCEPT:
            return entry
        if self.is_beyond(entry.position):
            return entry._replace(verdict=ACCEPT)
        if entry.verdict == REJECT:
            if entry.chunk is not None:
                self._record_rejected(entry.chunk)
            self._acknowledge_rejected(entry.position)
            return None
        if entry.verdict > 0 and not self._options.reschedules_max:
            return entry._replace(verdict=ACCEPT)
        return entry

    def _of_chunk(self, entry: Entry, chunk: Chunk, key: bytes, now_ms: int) -> int:
        if self.is_rejected(chunk):
            return REJECT
        lane = self._parking.lanes.get(key)
        if lane is None or (entry.verdict == ACCEPT and lane.undecided is None):
            return entry.verdict
        known = self._chunks(lane, chunk)
        states = {} if lane.undecided is None else lane.undecided.states
        for state in (states[each] for each in known if each in states):
            return state if state < 0 else max(1, state - now_ms)
        return ACCEPT if known else entry.verdict

    def _record_rejected(self, chunk: Chunk) -> None:
        self._rejected.pop(chunk.attempt, None)
        if not chunk.is_last:
            self._rejected[chunk.attempt] = None
            if len(self._rejected) > REJECTED_ATTEMPTS_MAX:
                del self._rejected[next(iter(self._rejected))]

    # ---- returned entries

    def judge_again(self) -> None:
        """Mark returned entries UNJUDGED."""
        back, self._verdicts.back = self._verdicts.back, []
        for lane, position in back:
            self._unjudge(lane, position)

    def _unjudge(self, lane: Lane, position: Position) -> None:
        """Mark a waiting entry UNJUDGED. Of a large message, mark all known chunks, or none while
        one is in flight. A dead letter that came back is not filtered again."""
        chunk = None if lane.rare is None else lane.rare.chunks.get(position)
        chunks = [position] if chunk is None else self._chunks(lane, chunk)
        if chunk is not None and self._large.is_dead(chunk):
            return
        if any(each in lane.flights for each in chunks) or position in self._settling.returned:
            return
        for each in chunks:
            if not self.is_beyond(each):
                self._verdicts.record(lane, each, UNJUDGED)

    def _chunks(self, lane: Lane, chunk: Chunk) -> list[Position]:
        """The known chunks of a large message, in the order of the log."""
        chunks = {} if lane.rare is None else lane.rare.chunks
        return sorted(each for each, other in chunks.items() if other.attempt == chunk.attempt)

    def is_rejected(self, chunk: Chunk) -> bool:
        """Whether the first chunks of a large message were rejected, as far as is known."""
        return chunk.attempt in self._rejected

    def is_beyond(self, position: Position) -> bool:
        """Whether an entry failed too often to be redelivered."""
        return self._settling.failed_beyond(self._options.redeliveries_max, position)

    # ---- verdicts

    def judged(self, verdicts: Mapping[Position, int], now_ms: int) -> None:
        """Apply the answer to Judge."""
        rejected: dict[Lane, set[Position]] = {}
        answered = self._verdicts.answered()
        for position, lane in answered.items():
            undecided, gone = lane.undecided, rejected.setdefault(lane, set())
            state = None if undecided is None else undecided.states.get(position)
            if state != UNJUDGED or position in gone:
                continue  # decided with another chunk of its message
            verdict = verdicts.get(position, UNJUDGED)
            shared = self._shared(lane, position)
            if verdict == REJECT:
                gone.update(shared)
            else:
                self._decide(lane, shared, verdict, now_ms)
        for lane, gone in rejected.items():
            if gone:
                self._reject(lane, gone)
            self._parking.wake(lane)
        self._parking.drop_all_idle(rejected)

    def _shared(self, lane: Lane, position: Position) -> list[Position]:
        """The entries that share an entry's verdict: itself, or its message's undecided chunks."""
        chunk = None if lane.rare is None else lane.rare.chunks.get(position)
        if chunk is None or lane.undecided is None:
            return [position]
        states = lane.undecided.states
        return [each for each in self._chunks(lane, chunk) if each in states]

    def _decide(self, lane: Lane, positions: Sequence[Position], verdict: int, now_ms: int) -> None:
        assert lane.undecided is not None
        times = 1 + max(lane.undecided.times.get(each, 0) for each in positions)
        until_ms = now_ms + min(verdict, self._options.reschedule_max_ms)
        for each in positions:
            if verdict == FILTER_FAILED:
                self._verdicts.record_failed(lane, each, now_ms)
            elif verdict == UNJUDGED:
                self._verdicts.record(lane, each, verdict)
            elif verdict > 0 and times <= self._options.reschedules_max:
                self._verdicts.record_rescheduled(lane, each, until_ms, times)
            else:
                self._parking.accept(lane, each)

    def _reject(self, lane: Lane, positions: set[Position]) -> None:
        """Acknowledge rejected entries. Later ones need not wait until that is durable: if it is
        lost, all of them are delivered again."""
        if lane.rare is not None:
            for position in sorted(positions):
                if (chunk := lane.rare.chunks.get(position)) is not None:
                    self._record_rejected(chunk)
        self._parking.discard(lane, positions)
        for position in sorted(positions):
            if lane.unresolved and position in lane.unresolved:
                lane.unresolved.remove(position)
            if not self._settling.is_settled(position):
                self._acknowledge_rejected(position)

    def _acknowledge_rejected(self, position: Position) -> None:
        self._totals["rejected_entries"] += 1
        self._settling.acknowledge_entry(position, None)

    def give_up(self, lane: Lane, positions: Sequence[Position]) -> None:
        """Dead-letter entries at which the filters have failed for too long."""
        for position in positions:
            self._settling.doomed.add(position)
            self._parking.accept(lane, position)

    def first_failed(self) -> Position | None:
        """The first waiting entry at which filters failed, even if judged once more; None: none."""
        failed = (
            position
            for lane in self._parking.lanes.values()
            if lane.undecided is not None
            for position in lane.undecided.states
            if self._verdicts.has_failed(lane, position)
        )
        return min(failed, default=None)

    # ---- when filters change

    def refilter(self, *, is_filtered: bool, start: Position | None) -> None:
        self._verdicts.is_filtered = is_filtered
        self._verdicts.ask_anew()
        for lane in list(self._parking.lanes.values()):
            undecided = lane.undecided
            for position in list(undecided.states) if undecided is not None else ():
                if is_filtered:
                    self._verdicts.judge_anew(lane, position)
                else:
                    self._parking.accept(lane, position)
            if is_filtered and start is not None:
                for position in self._parking.waiting(lane):
                    if position >= start:
                        self._unjudge(lane, position)
            if undecided is not None or lane.undecided is not None:
                self._parking.wake(lane)
