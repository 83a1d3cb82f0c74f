"""Lags: entries that were read and not kept, and the scan that reads them again.

    read ──no room──▶ lag ──room again──▶ scan, page by page ──▶ caught up, or a lag further on
                    (the first position
                     that was not kept)

A slot or key that lags keeps nothing from its lag on, so kept entries always precede the others,
and order is preserved. One scan runs at a time, from the lowest lag of the slots and keys that it
covers. When one of these runs out of room again, it lags from there on and is scanned for later;
the scan continues for the others.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from seqgate.services.dispatcher.core.effects import Options, Scan
from seqgate.services.dispatcher.core.lane import Lane, Queue, Reason, Slot
from seqgate.types import Position

SCAN_ENTRIES: Final = 1_000
"""Number of entries in a page of a scan."""


@dataclass(slots=True)
class _Scanning:
    """A running scan: the slots and lanes for which it still keeps entries."""

    slots: set[Slot]
    lanes: set[Lane]


class Lags:
    """See the module. `lanes` are the lagging keys; lagging slots are in their queues."""

    def __init__(self, options: Options) -> None:
        self.lanes: set[Lane] = set()
        self._key_parked_max = options.key_parked_max
        self._scanning: _Scanning | None = None
        self._candidates: set[Lane] = set()
        self._idle: dict[Queue, set[Lane]] = {}
        self._has_room = False

    @property
    def is_scanning(self) -> bool:
        return self._scanning is not None

    def fall_behind(self, subject: Slot | Lane, position: Position) -> None:
        """Let a slot or a key lag from a position on."""
        subject.lag = position
        if isinstance(subject, Lane):
            self.lanes.add(subject)
        else:
            subject.queue.lagging.add(subject)

    def lane_changed(self, lane: Lane) -> None:
        """Reconsider a lagging key, which may be able to catch up."""
        self._candidates.add(lane)

    def room_freed(self) -> None:
        """Reconsider all lagging keys."""
        self._has_room = True

    @property
    def is_wanted(self) -> bool:
        """Whether the running scan still keeps entries for a slot or lane."""
        return self._scanning is not None and bool(self._scanning.slots or self._scanning.lanes)

    def start(self, queues: Iterable[Queue]) -> Position | None:
        """Begin a scan for all slots and lanes that lag and have room again, or whose entries can
        be delivered at once. Returns its first position; None: there are none."""
        if not self.lanes and not any(queue.lagging for queue in queues):
            return None
        slots = set[Slot]()
        for queue in queues:
            if queue.lagging and (queue.is_half_empty or queue.takes_more):
                slots |= queue.lagging
        lanes = {lane for lane in self._candidates_for(queues) if self._may_catch_up(lane)}
        starts = [slot.lag for slot in slots if slot.lag is not None]
        starts += [lane.lag for lane in lanes if lane.lag is not None]
        if not starts:
            return None
        self._scanning = _Scanning(slots, lanes)
        return min(starts)

    def page(self, at: Position | None, after: Position | None = None) -> Scan:
        """A page of the scan, from `at` on, or, if that is None, after `after`."""
        return Scan(at, after, SCAN_ENTRIES)

    def start_for_others(self) -> None:
        """Begin a scan for a pass alone: no slot or lane needs it."""
        self._scanning = _Scanning(set(), set())

    def scans_for(self, slot: Slot, lane: Lane | None, position: Position) -> bool:
        """Whether the scan covers every lag that an entry is behind."""
        scan = self._scanning
        assert scan is not None
        if slot.is_behind(position) and slot not in scan.slots:
            return False
        return lane is None or not lane.is_behind(position) or lane in scan.lanes

    def give_up(self, slot: Slot, lane: Lane | None, position: Position) -> None:
        """Stop scanning for a slot or a lane that lags again, from this position on."""
        scan = self._scanning
        assert scan is not None
        if slot.lag == position:
            scan.slots.discard(slot)
        if lane is not None and lane.lag == position:
            scan.lanes.discard(lane)

    def end(self) -> tuple[set[Slot], set[Lane]]:
        """End the scan. Returns the slots and lanes that have caught up: they no longer lag."""
        scan, self._scanning = self._scanning, None
        assert scan is not None
        for slot in scan.slots:
            slot.lag = None
            slot.queue.lagging.discard(slot)
        for lane in scan.lanes:
            lane.lag = None
            self.lanes.discard(lane)
        self._has_room = True
        return scan.slots, scan.lanes

    def _candidates_for(self, queues: Iterable[Queue]) -> set[Lane]:
        """The lagging keys that may be able to catch up. One without other work is reconsidered
        when its owner takes more."""
        candidates = self._candidates
        if self._has_room:
            candidates = set(self.lanes)
            self._idle = {}
        for queue in queues if self._idle else ():
            if queue in self._idle and queue.takes_more:
                candidates |= self._idle.pop(queue)
        self._has_room = False
        self._candidates = set()
        for lane in candidates:
            if lane.reason is Reason.READY and not lane.parked:
                self._idle.setdefault(lane.slot.queue, set()).add(lane)
        return {lane for lane in candidates if lane.lag is not None}

    def _may_catch_up(self, lane: Lane) -> bool:
        if lane.parked > self._key_parked_max // 2:
            return False
        queue = lane.slot.queue
        if queue.is_half_empty:
            return True
        return lane.reason is Reason.READY and not lane.parked and queue.takes_more
