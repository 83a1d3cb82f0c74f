"""Waiting entries: the lanes of keys, their slots, and the queues of owners.

    entry ──read, scanned──▶ lane ──its turn──▶ taken
              │   ▲            ▲
            no room            └── put back, due
              ▼   │
              lag (lags.py)

Parked entries are bounded, for each key and for each owner; beyond the bound a key or slot lags.
Delayed messages have bounds of their own (delays.py). Slots and queues count their waiting entries.
A deliverable lane has a turn in its slot, and its slot in its queue; a withheld lane has neither,
and has a reason.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from heapq import heapify, heappop, heappush
from itertools import chain, takewhile

from seqgate.services.dispatcher.core.delays import NEVER_MS, DelayedBytes, Delays, Kept
from seqgate.services.dispatcher.core.effects import (
    ACCEPT,
    FILTER_FAILED,
    Entry,
    Options,
    Scan,
    SubscriptionType,
)
from seqgate.services.dispatcher.core.lags import Lags
from seqgate.services.dispatcher.core.lane import (
    Consumer,
    Lane,
    Queue,
    Rare,
    Reason,
    Returned,
    Slot,
    Timers,
)
from seqgate.services.dispatcher.core.positions import Parked, Runs
from seqgate.services.dispatcher.core.selectors import Selector
from seqgate.services.dispatcher.core.verdicts import Verdicts, Waits
from seqgate.types import Position


class Parking:
    """See the module. `pool` is the queue that all consumers share; None: each has its own."""

    def __init__(
        self,
        options: Options,
        selector: Selector,
        timers: Timers,
        totals: dict[str, int],
        delayed: DelayedBytes,
        waits: Waits,
    ) -> None:
        self.lanes: dict[bytes, Lane] = {}
        self.slots: dict[int, Slot] = {}
        self.withheld: dict[Reason, dict[Lane, None]] = {reason: {} for reason in Reason}
        self.delays = Delays(options, delayed)
        self.kept_back = 0
        self.lags = Lags(options)
        self.verdicts = Verdicts(options, timers, totals, waits)
        self._waits = waits
        self._options = options
        self._selector = selector
        self.timers = timers
        self._nobody = Queue(options.consumer_parked_max)
        self._owned: dict[int, Queue] = {}
        self._known: dict[Lane, set[Position]] = {}
        self.pool = None if options.kind is SubscriptionType.KEY_SHARED else self._nobody

    @property
    def parked(self) -> int:
        return sum(slot.parked for slot in self.slots.values())

    @property
    def delayed(self) -> int:
        """The number of entries that are delayed without holding their key, or postponed."""
        kept = 0 if self.delays.holds_keys else len(self.delays)
        return kept + len(self.delays.postponed)

    def is_for_later(self, position: Position, lane: Lane | None) -> bool:
        """Whether an entry is delayed without holding its key, or postponed."""
        is_kept = lane is not None and lane.rare is not None and position in lane.rare.later
        return is_kept or position in self.delays.postponed

    def is_held(self, key: bytes) -> bool:
        """Whether a postponed message holds a key."""
        return self.delays.is_held(key, self.slot_number(key), is_new=True)

    @property
    def lagging(self) -> int:
        return len(self.lags.lanes) + sum(len(queue.lagging) for queue in self.queues)

    # ---- owners

    @property
    def queues(self) -> set[Queue]:
        """All queues, including the one without an owner."""
        return {self._nobody, *self._owned.values()}

    def queue_for(self, owner: int) -> Queue:
        """Create the queue of a consumer that joins."""
        queue = self._owned[owner] = self.pool or Queue(self._options.consumer_parked_max)
        return queue

    def owner_gone(self, consumer: Consumer) -> None:
        """Remove the queue of a consumer that left. Its entries move with their slots."""
        del self._owned[consumer.id]
        consumer.queue.takers.remove(consumer)

    def slot_number(self, key: bytes) -> int:
        """The slot of a lane's key; in a pool all have the same."""
        return 1 if self.pool is not None else self._selector.slot(key)

    def slots_between(self, first: int, last: int) -> list[Slot]:
        """The slots with work among these; none in a pool, whose slot has no owner."""
        slots = self.slots
        if self.pool is not None:
            return []
        if len(slots) < last - first:
            return [slot for number, slot in slots.items() if first <= number <= last]
        return [slots[number] for number in range(first, last + 1) if number in slots]

    def hand_over(self, moved: Iterable[Slot]) -> None:
        """Move slots to the queues of their present owners."""
        changed: dict[Queue, None] = {}
        for slot in moved:
            old, new = slot.queue, self.queue_of(slot.number)
            changed.update({old: None, new: None})
            slot.queue = new
            for queue, sign in ((old, -1), (new, 1)):
                queue.parked += sign * slot.parked
                queue.returned += sign * slot.returned
            if slot.lag is not None:
                old.lagging.discard(slot)
                new.lagging.add(slot)
            if slot.queued:
                new.slots.append(slot)
        for queue in changed:
            queue.slots = type(queue.slots)(slot for slot in queue.slots if slot.queue is queue)
            self._check_returned(queue)
        self.lags.room_freed()

    def queue_of(self, slot: int) -> Queue:
        owner = self._selector.owner(slot)
        return self._nobody if owner is None else self._owned[owner]

    # ---- entries read from the log

    def keep_read(self, entry: Entry, key: bytes, now_ms: int) -> None:
        """Park an entry that was read, unless it is behind a lag, or there is no room."""
        lane = self.lanes.get(key)
        slot = self.slot_of(key) if lane is None else lane.slot
        if slot.lag is None and (lane is None or lane.lag is None):
            self._keep(entry, key, lane, slot, now_ms, is_new=True)
        self.drop_idle_slot(slot)

    def keep_scanned(self, entry: Entry, key: bytes, now_ms: int) -> None:
        """Park an entry that was read again if it lags, the scan covers it, and there is room."""
        position = entry.position
        lane = self.lanes.get(key)
        slot = self.slot_of(key) if lane is None else lane.slot
        is_behind = slot.is_behind(position) or (lane is not None and lane.is_behind(position))
        if position in self.delays.postponed:
            if is_behind or self.delays.is_passing:
                self._keep_postponed(entry, key, lane, slot, now_ms)
        elif not is_behind or self._knows(lane, position):
            pass  # kept already
        elif not self.lags.scans_for(slot, lane, position):
            pass  # behind a lag that the scan does not cover
        elif not self._keep(entry, key, lane, slot, now_ms, is_new=False):
            self.lags.give_up(slot, lane, position)
        self.drop_idle_slot(slot)

    def _keep_postponed(
        self, entry: Entry, key: bytes, lane: Lane | None, slot: Slot, now_ms: int
    ) -> None:
        """Park a postponed entry that was read again. Behind a lag it stays postponed, and the lag
        alone decides when it is read once more."""
        position = entry.position
        self.delays.visit(position)
        if not self.lags.scans_for(slot, lane, position):
            self.delays.postponed.add(position, NEVER_MS)
        elif not self._keep(entry, key, lane, slot, now_ms, is_new=False):
            self.delays.postponed.add(position, NEVER_MS)
            self.lags.give_up(slot, lane, position)

    def was_passed_over(self, key: bytes, position: Position) -> bool:
        """Whether an entry was read and not kept: it is behind a lag, or postponed."""
        if position in self.delays.postponed:
            return True
        lane = self.lanes.get(key)
        slot = self.slots.get(self.slot_number(key)) if lane is None else lane.slot
        of_lane = lane is not None and lane.is_behind(position)
        is_behind = of_lane or (slot is not None and slot.is_behind(position))
        return is_behind and not self._knows(lane, position)

    def _knows(self, lane: Lane | None, position: Position) -> bool:
        """Whether an entry is in a lane. It may be even behind the lag: a postponed entry that is
        due may begin a lag ahead of kept ones."""
        if lane is None:
            return False
        known = self._known.get(lane)
        if known is None:
            known = self._known[lane] = {*self.waiting(lane), *lane.flights}
            if lane.dead is not None:
                known.add(lane.dead)
        return position in known

    def keeps(self, key: bytes) -> bool:
        """Whether later entries of a key are kept, room permitting: neither the key nor its slot
        lags, and none of its entries is postponed."""
        lane, number = self.lanes.get(key), self.slot_number(key)
        slot = self.slots.get(number)
        lags = (slot is not None and slot.lag is not None) or (lane is not None and lane.lag)
        return not (lags or self.delays.is_held(key, number, is_new=True))

    def scans_for(self, key: bytes, position: Position) -> bool:
        """Whether a lagging or postponed entry is kept, if there is room."""
        lane, number = self.lanes.get(key), self.slot_number(key)
        slot = self.slots.get(number)
        if self.delays.is_held(key, number, is_new=False):
            return False
        if slot is None or not (slot.is_behind(position) or (lane and lane.is_behind(position))):
            return self.delays.is_passing
        return self.lags.scans_for(slot, lane, position)

    def start_scan(self, now_ms: int) -> Scan | None:
        """Scan for lags that have room again and for postponed entries that may be due; None: no
        need, or a scan is running."""
        if self.lags.is_scanning:
            return None
        start = self.lags.start(self.queues)
        if self.delays.wants_pass(now_ms):
            if start is None:
                self.lags.start_for_others()
            first = self.delays.begin_pass()
            start = first if start is None else min(start, first)
        return None if start is None else self.lags.page(start)

    def end_page(self, last: Position | None) -> Scan | None:
        """End a page of a scan, which reached `last`; None: the end. Returns the next page."""
        self._known = {}
        if last is not None:
            is_wanted = self.lags.is_wanted
            passing = self.delays.is_passing
            next_ = self.delays.next_page(last, is_whole=is_wanted) if passing else None
            if is_wanted:
                return self.lags.page(None, last)
            if next_ is not None:
                return self.lags.page(next_)
        if self.delays.is_passing:
            self.delays.end_pass()
        slots, lanes = self.lags.end()
        for slot in slots:
            self.drop_idle_slot(slot)
        for lane in lanes:
            self.drop_if_idle(lane)
        return None

    def gone(self, last: Position, found: Set[Position]) -> list[Position]:
        """Remove and return postponed entries, within a page of a scan, that the log no longer
        has."""
        return self.delays.gone(last, found) if self.delays.is_passing else []

    def slot_of(self, key: bytes) -> Slot:
        """The slot of a key without a lane, which may be new."""
        number = self.slot_number(key)
        slot = self.slots.get(number)
        if slot is None:
            slot = self.slots[number] = Slot(number, self.queue_of(number))
        return slot

    def _keep(
        self,
        entry: Entry,
        key: bytes,
        lane: Lane | None,
        slot: Slot,
        now_ms: int,
        *,
        is_new: bool,
    ) -> bool:
        """Park or postpone an entry (true), or let its key or slot lag from there on (false).

        An entry that can be delivered now needs no room. So while the owner takes more, only
        withheld keys lag, and no other key of the slot has to wait for them."""
        delays = self.delays
        if delays.is_held(key, slot.number, is_new=is_new):
            delays.postpone(entry.position, NEVER_MS)
            return True
        if entry.deliver_at_ms > now_ms and not delays.holds_keys:
            self._keep_later(entry, key, lane, slot, now_ms)
            return True
        if lane is not None and lane.parked >= self._options.key_parked_max:
            self._lag_behind(lane, entry.position)
        elif not slot.queue.is_full:
            self._park(entry, key, lane, slot, now_ms)
            return True
        elif slot.queue.takes_more:
            if lane is None or (lane.reason is Reason.READY and not lane.parked):
                self._park(entry, key, lane, slot, now_ms)
                return True
            self._lag_behind(lane, entry.position)
        elif lane is not None and lane.lag is not None:
            self._lag_behind(lane, entry.position)  # others of its slot are kept beyond it
        else:
            self.lags.fall_behind(slot, entry.position)
            for each in slot.lanes:
                self._wake_amid(each)
        return False

    def _lag_behind(self, lane: Lane, position: Position) -> None:
        self.lags.fall_behind(lane, position)
        self._wake_amid(lane)

    def _wake_amid(self, lane: Lane) -> None:
        """Wake a key whose next chunk may lag while a consumer has those before it."""
        if lane.rare and lane.rare.chunks and (lane.returned or lane.waiting):
            self.wake(lane)

    def _park(self, entry: Entry, key: bytes, lane: Lane | None, slot: Slot, now_ms: int) -> None:
        """Park an entry for which there is room. One that holds its key needs room among the
        delayed messages, too, or is postponed."""
        position, when_ms = entry.position, entry.deliver_at_ms
        is_later = when_ms > now_ms
        if is_later and not self.delays.takes(when_ms, position, key):
            self.delays.postpone(position, when_ms)
            self.delays.hold(key, slot.number)
            return
        lane = self._lane(entry, key, lane, slot, now_ms)
        self._count_parked(lane, 1)
        if when_ms and lane.waiting is not None and position < lane.waiting.last:
            self._push(lane, Returned(position, entry.messages))  # it was postponed
        else:
            if lane.waiting is None:
                lane.waiting = Runs()
            lane.waiting.append(position, entry.messages)
        if is_later:
            rare = lane.rare = lane.rare or Rare()
            rare.delays[position] = when_ms
            self._keep_delayed(Kept(when_ms, position, entry.messages, lane))
        self.wake(lane)

    def _keep_later(
        self, entry: Entry, key: bytes, lane: Lane | None, slot: Slot, now_ms: int
    ) -> None:
        """Keep a delayed entry that holds nothing; it does not count as parked."""
        position, when_ms = entry.position, entry.deliver_at_ms
        if not self.delays.takes(when_ms, position, key):
            self.delays.postpone(position, when_ms)
            return
        lane = self._lane(entry, key, lane, slot, now_ms)
        rare = lane.rare = lane.rare or Rare()
        rare.later[position] = when_ms
        self._keep_delayed(Kept(when_ms, position, entry.messages, lane))

    def add_lane(self, key: bytes, slot: Slot) -> Lane:
        lane = self.lanes[key] = Lane(key, slot)
        slot.lanes[lane] = None
        return lane

    def _lane(self, entry: Entry, key: bytes, lane: Lane | None, slot: Slot, now_ms: int) -> Lane:
        """The lane of a waiting entry, with the entry's state recorded in it."""
        if lane is None:
            lane = self.add_lane(key, slot)
        if entry.chunk is not None:
            rare = lane.rare = lane.rare or Rare()
            rare.chunks[entry.position] = entry.chunk
            rare.count_rest(entry.position, 1)
        if entry.verdict != ACCEPT:
            self._record_verdict(lane, entry, now_ms)
        return lane

    def _keep_delayed(self, kept: Kept) -> None:
        """Keep a delayed message, and postpone those due last for which there is no room."""
        self.delays.keep(kept)
        while (last := self.delays.excess()) is not None:
            self.delays.forget(last.when_ms, last.position)
            self._postpone(last)

    def _postpone(self, kept: Kept) -> None:
        """Postpone a kept message, and, if it holds its key, later entries of the key."""
        lane, position = kept.lane, kept.position
        self.delays.postpone(position, kept.when_ms)
        if self.delays.holds_keys:
            self.delays.hold(lane.key, lane.slot.number)
            following = [each.position for each in lane.waiting or () if each.position > position]
            for each in following:
                self.delays.postpone(each, NEVER_MS)
            self.discard(lane, {position, *following})
            self.wake(lane)
        else:
            assert lane.rare is not None
            del lane.rare.later[position]
            self._forget(lane, lane.rare, position)
        self.drop_all_idle([lane])

    def _forget(self, lane: Lane, rare: Rare, position: Position) -> None:
        """Forget an entry that is not counted as waiting."""
        rare.count_rest(position, -1)
        rare.forget(position)
        self.verdicts.forget(lane, position)

    def _record_verdict(self, lane: Lane, entry: Entry, now_ms: int) -> None:
        if entry.verdict > 0:
            until_ms = now_ms + min(entry.verdict, self._options.reschedule_max_ms)
            self.verdicts.record_rescheduled(lane, entry.position, until_ms)
        elif entry.verdict == FILTER_FAILED:
            self.verdicts.record_failed(lane, entry.position, now_ms)
        else:
            self.verdicts.record(lane, entry.position, entry.verdict)

    # ---- entries taken, and put back

    def take(self, lane: Lane, head: Parked | Returned) -> None:
        self._take_first(lane, head)
        if lane.rare is not None:
            lane.rare.count_rest(head.position, -1)
            self._forget_delay(lane.rare, head.position)
        if lane.undecided is not None:
            self.verdicts.forget(lane, head.position)
        self._count_parked(lane, -1)
        queue = lane.slot.queue
        if queue.parked == queue.parked_max // 2:
            self.lags.room_freed()
        if lane.lag is not None:
            self.lags.lane_changed(lane)

    def _take_first(self, lane: Lane, head: Parked | Returned) -> None:
        if isinstance(head, Returned):
            assert lane.returned is not None
            heappop(lane.returned)
            self._count_returned(lane, -1)
        else:
            assert lane.waiting is not None
            lane.waiting.drop_first()
            if not lane.waiting:
                lane.waiting = None

    def take_before(self, lane: Lane, end: Position, *, whole: Set[str]) -> Sequence[Position]:
        """Remove and return waiting entries of a key before this one: returned, delayed, postponed
        and new ones. Of large messages, only those that are `whole` before it."""
        taken = []
        chunks = {} if lane.rare is None else lane.rare.chunks
        due = (each.position for each in lane.waiting or ())
        back = (each.position for each in lane.returned or () if each.position < end)
        for position in sorted(chain(takewhile(lambda each: each < end, due), back)):
            chunk = chunks.get(position)
            if chunk is None or chunk.attempt in whole:
                taken.append(position)
        self.discard(lane, {*taken})
        if lane.rare is not None:
            for position in sorted(each for each in lane.rare.later if each < end):
                taken.append(position)
                self._forget_delay(lane.rare, position)
                self._forget(lane, lane.rare, position)
        taken += self.delays.take_before(end)
        return taken

    def discard(self, lane: Lane, positions: Set[Position]) -> None:
        queue = lane.slot.queue
        was_full = queue.parked > queue.parked_max // 2
        if lane.rare is not None and lane.rare.kept_back:
            self._discard_kept(lane, positions)
        gone = 0 if lane.waiting is None else lane.waiting.discard(positions)
        if not lane.waiting:
            lane.waiting = None
        left = [each for each in lane.returned or () if each.position not in positions]
        if lane.returned and len(left) < len(lane.returned):
            gone += len(lane.returned) - len(left)
            self._count_returned(lane, len(left) - len(lane.returned))
            heapify(left)
            lane.returned = left
        for position in positions:
            if lane.undecided is not None:
                gone += lane.undecided.aside.pop(position, None) is not None
                self.verdicts.forget(lane, position)
            if lane.rare is not None:
                self._forget_delay(lane.rare, position)
                lane.rare.count_rest(position, -1)
                lane.rare.forget(position)
        self._count_parked(lane, -gone)
        if was_full and queue.is_half_empty:
            self.lags.room_freed()
        if lane.lag is not None:
            self.lags.lane_changed(lane)

    # ---- kept-back chunks

    def keep_back(self, lane: Lane, position: Position, attempt: str, now_ms: int) -> None:
        """Keep back a chunk: it waits for the turn of its message's last, and holds nothing."""
        rare = lane.rare
        assert rare is not None
        rare.kept_back.setdefault(attempt, []).append(position)
        since_ms = self._waits.since_ms(position, now_ms)
        since_ms = min(since_ms, rare.kept_since_ms.get(attempt, since_ms))
        rare.kept_since_ms[attempt] = since_ms
        self.kept_back += 1
        self.timers.look_at(lane, since_ms + self._options.unfinished_max_ms)

    def bring_back(self, lane: Lane, attempt: str) -> None:
        """Make the kept-back chunks of a message wait ahead of its last one."""
        for position in self.take_kept(lane, attempt):
            self._push(lane, Returned(position, 1))
            self._count_parked(lane, 1)
            assert lane.rare is not None
            lane.rare.count_rest(position, 1)

    def take_kept(
        self,
        lane: Lane,
        attempt: str,
        *,
        start: Position | None = None,
        end: Position | None = None,
    ) -> Sequence[Position]:
        """Remove and return the kept-back chunks of a message, from one position through another:
        the same attempt may be stored more than once."""
        assert lane.rare is not None
        kept = lane.rare.kept_back.pop(attempt, [])
        positions = [
            each
            for each in kept
            if (start is None or each >= start) and (end is None or each <= end)
        ]
        if len(positions) < len(kept):
            lane.rare.kept_back[attempt] = [each for each in kept if each not in positions]
        else:
            lane.rare.kept_since_ms.pop(attempt, None)
        for position in positions:
            self._waits.over(position)
        self.kept_back -= len(positions)
        return positions

    def _discard_kept(self, lane: Lane, positions: Set[Position]) -> None:
        assert lane.rare is not None
        for attempt, kept in list(lane.rare.kept_back.items()):
            left = [each for each in kept if each not in positions]
            if len(left) < len(kept):
                self.kept_back -= len(kept) - len(left)
                lane.rare.kept_back[attempt] = left
                if not left:
                    self.take_kept(lane, attempt)
                for each in kept:
                    if each in positions:
                        lane.rare.count_rest(each, 1)  # since `discard` subtracts it

    def set_aside(self, lane: Lane, head: Parked | Returned) -> None:
        """Set aside the next entry of a key: it is undecided, waits, and holds nothing."""
        assert lane.undecided is not None
        self._take_first(lane, head)
        lane.undecided.aside[head.position] = head

    def accept(self, lane: Lane, position: Position) -> None:
        """Let a waiting entry be delivered."""
        assert lane.undecided is not None
        aside = lane.undecided.aside.pop(position, None)
        self.verdicts.forget(lane, position)
        if isinstance(aside, Returned):
            self._push(lane, aside)
        elif aside is not None:
            if lane.waiting is None:
                lane.waiting = Runs()
            lane.waiting.insert(*aside)

    def waiting(self, lane: Lane) -> Iterator[Position]:
        """The waiting entries of a key, in no particular order."""
        yield from (each.position for each in lane.waiting or ())
        yield from (each.position for each in lane.returned or ())
        if lane.rare is not None:
            yield from lane.rare.later
            for kept in lane.rare.kept_back.values():
                yield from kept
        if lane.undecided is not None:
            yield from lane.undecided.aside

    def put_back(self, lane: Lane, returned: Returned, *, is_return: bool = False) -> None:
        """Make an entry wait again after a delivery. A dead letter that came back (`is_return`) is
        not filtered again."""
        self._push(lane, returned)
        if lane.rare is not None:
            lane.rare.count_rest(returned.position, 1)
        if self.verdicts.is_filtered and not is_return:
            self.verdicts.back.append((lane, returned.position))
        self._count_parked(lane, 1)

    def bring_return(self, entry: Entry, key: bytes) -> bool:
        """Make a dead letter that comes back wait, in the order of the log; it is not filtered
        again. Returns false while earlier entries of its key may not be in memory."""
        lane, position = self.lanes.get(key), entry.position
        slot = self.slot_of(key) if lane is None else lane.slot
        if slot.is_behind(position) or (lane is not None and lane.is_behind(position)):
            return False
        lane = lane or self.add_lane(key, slot)
        self._push(lane, Returned(position, entry.messages))
        if entry.chunk is not None:
            rare = lane.rare = lane.rare or Rare()
            rare.chunks[position] = entry.chunk
            rare.count_rest(position, 1)
        self._count_parked(lane, 1)
        self.wake(lane)
        return True

    def due(self, now_ms: int) -> None:
        """Make delayed entries that are due wait for their turn. Those that hold their key have
        timers of their own."""
        for when_ms, position, messages, lane in self.delays.due(now_ms):
            if lane.rare is not None and lane.rare.later.pop(position, None) == when_ms:
                self._push(lane, Returned(position, messages))
                self._count_parked(lane, 1)
                self.wake(lane)

    def _forget_delay(self, rare: Rare, position: Position) -> None:
        when_ms = rare.later.pop(position, None) or rare.delays.get(position)
        if when_ms is not None:
            self.delays.forget(when_ms, position)

    def _push(self, lane: Lane, returned: Returned) -> None:
        if lane.returned is None:
            lane.returned = []
        heappush(lane.returned, returned)
        self._count_returned(lane, 1)

    def _count_parked(self, lane: Lane, entries: int) -> None:
        slot = lane.slot
        slot.parked += entries
        slot.queue.parked += entries

    def _count_returned(self, lane: Lane, entries: int) -> None:
        lane.slot.returned += entries
        lane.slot.queue.returned += entries
        self._check_returned(lane.slot.queue)

    def _check_returned(self, queue: Queue) -> None:
        limit = self._options.returned_max
        if limit and queue.returned >= limit:
            queue.is_choked = True
        elif queue.is_choked and queue.returned * 2 <= limit:
            queue.is_choked = False
            for lane in list(self.withheld[Reason.RETURNED_LIMIT]):
                if lane.slot.queue is queue:
                    self.wake(lane)

    # ---- turns

    def wake(self, lane: Lane) -> None:
        """Give a key a turn, if it has an entry to deliver, since something changed for it."""
        if lane.reason is not Reason.READY:
            self._release(lane)
        if lane.lag is not None:
            self.lags.lane_changed(lane)
        if lane.is_ready or not (lane.returned or lane.waiting):
            return
        slot = lane.slot
        slot.line_up(lane)
        if not slot.queued:
            slot.queued = True
            slot.queue.slots.append(slot)

    def wake_all(self, reason: Reason) -> None:
        """Wake the keys withheld for a reason that has ended."""
        for lane in list(self.withheld[reason]):
            self.wake(lane)

    def withhold(self, lane: Lane, reason: Reason, now_ms: int) -> None:
        """Withhold a key until it is woken."""
        if lane.reason is not reason:
            if lane.reason is not Reason.READY:
                self._release(lane)
            self.withheld[reason][lane] = None
            lane.reason = reason
            if lane.last_reason is not reason:  # else it was only checked again
                lane.last_reason = reason
                lane.since_ms = now_ms

    def _release(self, lane: Lane) -> None:
        del self.withheld[lane.reason][lane]
        lane.reason = Reason.READY

    def drop_if_idle(self, lane: Lane) -> None:
        if lane.is_idle and not lane.is_ready and self.lanes.get(lane.key) is lane:
            if lane.reason is not Reason.READY:
                self._release(lane)
            lane.timer_ms = None
            del self.lanes[lane.key]
            del lane.slot.lanes[lane]
            self.timers.trim()
            self.drop_idle_slot(lane.slot)

    def drop_all_idle(self, lanes: Collection[Lane]) -> None:
        """Forget idle keys at once, since the turn of an owner without permits may be far away."""
        slots = {lane.slot for lane in lanes if lane.is_ready and lane.is_idle}
        skipped = [lane for slot in slots for lane in slot.skip_idle()]
        for lane in chain(lanes, skipped):
            self.drop_if_idle(lane)

    def drop_idle_slot(self, slot: Slot) -> None:
        if not (slot.lanes or slot.lag or slot.queued):
            self.slots.pop(slot.number, None)
