"""One subscription, as a machine: something happened in, what to do next out.

    log ──read──▶ lanes: waiting ──▶ in flight ──ack──▶ persisting ──durable──▶ gone
                    ▲                  │
                    └──── returned ◀───┴─ nack, time-out, disconnect, hand-over

An entry is in exactly one of these places, or behind a lag (below), or not read yet.

Slots place, keys order (lane.py). Whoever owns a slot gets its keys' messages, unless a key is in
flight at somebody else, or one of its messages is being retried, or another rule withholds it: then
the key waits, alone, and its lane says why. Each rule is a line of `_withheld`.

What is parked is bounded, for each key and for each owner. Beyond the bound an entry is not kept:
the key, or the slot, has a lag from there on, everything of it is passed over when it is read, and
when there is room again the log is scanned from there. So reading ahead never stops for the sake of
somebody who is slow: it goes on while anybody has permits.

The shell's whole duty:

    for effect in subscription.<event>(...):
        start doing it; its outcome is an event
    tick(now_ms) when `next_timer_ms` has come

Effects for one consumer are carried out in their order. What may fail, the shell repeats until it
succeeds; when it cannot, this machine is dropped, and another one starts from what is durable.
"""

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, count
from typing import Final, NamedTuple

from seqgate.types import Position
from services.dispatcher.core.effects import (
    AfterDeadLetter,
    Assigned,
    DeadLetter,
    Deliver,
    Delivery,
    Drain,
    Effect,
    Entry,
    ForgetKey,
    Gap,
    KeyState,
    Kind,
    Options,
    Outcome,
    Persist,
    Read,
    Record,
    Revoke,
    Scan,
)
from services.dispatcher.core.lane import (
    Consumer,
    Flight,
    Lane,
    Large,
    Queue,
    Reason,
    Returned,
    Slot,
)
from services.dispatcher.core.positions import Acknowledged, Parked, Runs
from services.dispatcher.core.selectors import Selector, SlotRange, Snapshot, moves

TURN_ENTRIES: Final = 16
"""How many entries of a key are delivered before another key has its turn."""

SCAN_ENTRIES: Final = 1_000
"""How many entries one page of a scan has."""

GAPS_MAX: Final = 1_000
"""Of how many keys it is remembered that a message is missing; then the oldest is forgotten."""

TIMERS_SPARE: Final = 1_000
"""How many timers that nobody needs any more are kept before they are looked for."""

TOTALS: Final = (
    "delivered_entries",
    "delivered_messages",
    "acknowledged_entries",
    "refused",
    "timed_out",
    "lost_consumers",
    "returned",
    "drained",
    "dead_lettered",
    "stale",
    "scanned_entries",
)
"""What is counted since the machine began; dispatcher.proto says what each is."""

NO_ENTRY: Final = Position(0, -1)
"""Before every entry."""


class Item(NamedTuple):
    """A delivery that is acknowledged; of a batch, which of its messages (bits), 0: all."""

    delivery: int
    messages: int = 0


class Refused(NamedTuple):
    """A delivery that failed, by the word of its consumer, and how long it shall wait; None: as the
    options say."""

    delivery: int
    delay_ms: int | None = None


class Durable(NamedTuple):
    """What is known when a machine starts.

    Attributes:
        acknowledged: which entries are.
        partial: of batches, which messages are not acknowledged (bits).
        attempts: how often deliveries of entries failed.
        keys: those of which a message was dead-lettered.
    """

    acknowledged: Acknowledged
    partial: Mapping[Position, int] = {}
    attempts: Mapping[Position, int] = {}
    keys: Mapping[bytes, KeyState] = {}


class _Delayed(NamedTuple):
    """An entry that is to be delivered later, and does not hold its key."""

    lane: Lane
    parked: Parked


class _Timer(NamedTuple):
    """When to look at something again."""

    when_ms: int
    number: int
    subject: Lane | Consumer | _Delayed


@dataclass(slots=True)
class _Batch:
    """Acknowledgements that are made durable together."""

    number: int
    whole: dict[Position, Lane | None] = field(default_factory=dict)
    parts: dict[Position, tuple[Lane, int, int]] = field(default_factory=dict)
    successions: list[tuple[Position, Position]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.whole or self.parts)


@dataclass(slots=True)
class _Scanning:
    """A scan that is under way: for which slots and lanes it still keeps what it finds."""

    slots: set[Slot]
    lanes: set[Lane]


class Subscription:
    """See the module. Mutable, synchronous, one owner: it is asked for every message."""

    def __init__(
        self, options: Options, selector: Selector, durable: Durable, *, first_delivery: int = 1
    ) -> None:
        self.options = options
        self.selector = selector
        self.acknowledged = durable.acknowledged
        self.partial = dict(durable.partial)
        self.attempts = dict(durable.attempts)
        self.keys = dict(durable.keys)
        self.consumers: dict[int, Consumer] = {}
        self.lanes: dict[bytes, Lane] = {}
        self.withheld: dict[Reason, dict[Lane, None]] = {reason: {} for reason in Reason}
        self.read_position = self.acknowledged.mark_delete
        self.unacked = 0
        self.is_blocked = False
        self.delayed = 0
        self.totals = dict.fromkeys(TOTALS, 0)

        self._placement: Snapshot = selector.snapshot()
        self._slots: dict[int, Slot] = {}
        self._nobody = Queue(options.consumer_parked_max)
        self._pool = None if options.kind is Kind.KEY_SHARED else self._nobody
        self._deliveries = count(first_delivery)
        self._timers: list[_Timer] = []
        self._timer_numbers = count()
        self._out: list[Effect] = []
        self._outgoing: dict[int, list[Delivery]] = {}
        self._revoked: dict[int, list[int]] = {}

        self._is_reading = False
        self._scanning: _Scanning | None = None
        self._lagging: set[Lane] = set()
        self._candidates: set[Lane] = set()
        self._idle: dict[Queue, set[Lane]] = {}
        self._has_room = False
        self._batch = _Batch(1)
        self._persisting: _Batch | None = None
        self._to_record: dict[Position, Lane] = {}
        self._recording: dict[Position, Lane] | None = None

    @property
    def next_timer_ms(self) -> int | None:
        """When to call `tick`; None: there is no need."""
        return self._timers[0].when_ms if self._timers else None

    @property
    def parked(self) -> int:
        """How many entries are remembered to wait."""
        return sum(slot.parked for slot in self._slots.values())

    @property
    def lagging(self) -> int:
        """How many slots and keys have entries that were read and not kept."""
        return len(self._lagging) + sum(len(queue.lagging) for queue in self._queues())

    def slot_of(self, key: bytes) -> Slot | None:
        """The slot of a lane's key; None: it has no work."""
        is_placed = self.options.kind is Kind.KEY_SHARED
        return self._slots.get(self.selector.slot(key) if is_placed else 1)

    def owner_of(self, slot: Slot) -> int | None:
        """Who owns a slot; None: nobody, or there is a pool."""
        return None if self._pool is not None else self.selector.owner(slot.number)

    def retry_at_ms(self, lane: Lane) -> int | None:
        """When a key that is withheld is looked at again; None: when something happens."""
        if lane.reason is Reason.RETRY_DELAY:
            return lane.returned[0].not_before_ms
        if lane.reason is Reason.DELAYED and lane.next_position is not None:
            return lane.delays.get(lane.next_position)
        if lane.reason is Reason.DRAINING and lane.draining_since_ms is not None:
            deadline_ms = self.options.drain_deadline_ms
            return lane.draining_since_ms + deadline_ms if deadline_ms else None
        return None

    @property
    def next_delivery(self) -> int:
        """A number that is higher than that of any delivery so far."""
        return next(self._deliveries)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to make durable."""
        return not (self._batch or self._persisting or self._to_record or self._recording)

    # ---- consumers

    def join(
        self,
        consumer: int,
        *,
        name: str,
        now_ms: int,
        weight: int = 1,
        ranges: Sequence[SlotRange] = (),
        ack_timeout_ms: int = 0,
    ) -> list[Effect]:
        """Somebody connected.

        Raises:
            InvalidKeyRange, RangeConflict, NoSlotsLeft: the selector has no place for it; nothing
                changed.
        """
        queue = self._pool or Queue(self.options.consumer_parked_max)
        self.selector.add(consumer, name=name, weight=weight, ranges=ranges)
        joined = Consumer(consumer, name, queue, weight, ack_timeout_ms)
        mark_delete = self.acknowledged.mark_delete
        if self._joins_as_before and self.consumers and self.read_position != mark_delete:
            joined.joined_at = self.read_position
        self.consumers[consumer] = joined
        self._reassign(now_ms, joined=consumer)
        return self._effects(now_ms)

    def leave(self, consumer: int, now_ms: int) -> list[Effect]:
        """Somebody disconnected without a word: what it had in flight goes to others, and whatever
        it may have been working on counts as failed. Where keys come in order, that is the first
        message of each."""
        lanes: dict[Lane, list[Flight]] = {}
        for flight in self._remove(consumer):
            lanes.setdefault(flight.lane, []).append(flight)
        for lane, flights in lanes.items():
            flights.sort(key=lambda flight: flight.position)
            failed = flights[:1] if self.options.orders_keys else flights
            for flight in flights:
                self._give_back(flight)
            for flight in failed:
                self._note_failure(flight)
            self.totals["lost_consumers"] += len(flights)
            self._wake(lane, now_ms)
        self._reassign(now_ms)
        if len(self.consumers) == 1:
            self._all_joined(now_ms)
        return self._effects(now_ms)

    def close(self, consumer: int, now_ms: int) -> list[Effect]:
        """Somebody says goodbye: nothing of what it had in flight counts as failed."""
        for flight in self._remove(consumer):
            self._give_back(flight)
            self.totals["returned"] += 1
            self._wake(flight.lane, now_ms)
        self._reassign(now_ms)
        if len(self.consumers) == 1:
            self._all_joined(now_ms)
        return self._effects(now_ms)

    def permit(self, consumer: int, messages: int, now_ms: int) -> list[Effect]:
        """Somebody takes so many more messages."""
        known = self.consumers.get(consumer)
        if known is not None:
            known.permits += messages
        return self._effects(now_ms)

    def _remove(self, consumer: int) -> list[Flight]:
        """Returns what is in flight at a consumer that is gone, but for what it has settled."""
        gone = self.consumers.pop(consumer)
        self.selector.remove(consumer)
        self._count_unacked(-gone.unacked)
        flights = [flight for flight in gone.flights.values() if not flight.is_settling]
        gone.flights = {}
        return flights

    @property
    def _joins_as_before(self) -> bool:
        return self.options.classic_join and self.options.orders_keys and self._pool is None

    def _reassign(self, now_ms: int, joined: int | None = None) -> None:
        """Consumers changed. Every slot goes to the queue of whoever owns it now. That is all there
        is to a hand-over: a key that is in flight elsewhere drains by that very fact."""
        before, self._placement = self._placement, self.selector.snapshot()
        told: dict[int, list[SlotRange]] = {} if joined is None else {joined: []}
        moved: list[Slot] = []
        for (first, last), old, new in moves(before, self._placement):
            told.update((each, []) for each in (old, new) if each in self.consumers)
            if self._pool is None:
                moved += self._slots_between(first, last)
        self._hand_over(moved)
        self._note_draining(moved, now_ms)
        for run, owner in self._placement:
            if owner in told:
                told[owner].append(run)
        self._out += [Assigned(consumer, tuple(ranges)) for consumer, ranges in told.items()]

    def _slots_between(self, first: int, last: int) -> list[Slot]:
        slots = self._slots
        if len(slots) < last - first:
            return [slot for number, slot in slots.items() if first <= number <= last]
        return [slots[number] for number in range(first, last + 1) if number in slots]

    def _hand_over(self, moved: Iterable[Slot]) -> None:
        changed: dict[Queue, None] = {}
        for slot in moved:
            old, new = slot.queue, self._queue_of(slot.number)
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
        self._has_room = True

    def _note_draining(self, moved: Iterable[Slot], now_ms: int) -> None:
        wanted: dict[int, list[int]] = {}
        for lane in chain.from_iterable(slot.lanes for slot in moved):
            if lane.reason is not Reason.READY:
                self._wake(lane, now_ms)
            holder = None if lane.holder is None else self.consumers.get(lane.holder)
            if holder is None or not self.options.orders_keys:
                continue
            if lane.slot.queue is holder.queue:
                lane.draining_since_ms = None
            elif lane.draining_since_ms is None:
                lane.draining_since_ms = now_ms
                if self.options.drain_deadline_ms:
                    self._set_lane_timer(lane, now_ms + self.options.drain_deadline_ms)
                flights = lane.flights.values()
                open_ = [flight.delivery for flight in flights if not flight.is_settling]
                wanted.setdefault(holder.id, []).extend(open_)
        self._out += [Drain(each, tuple(some)) for each, some in wanted.items() if some]

    def _queue_of(self, slot: int) -> Queue:
        if self._pool is not None:
            return self._pool
        owner = self.selector.owner(slot)
        return self._nobody if owner is None else self.consumers[owner].queue

    def _all_joined(self, now_ms: int) -> None:
        """Whoever waited for what was read before it joined, and need not any more, goes on."""
        mark_delete = self.acknowledged.mark_delete or NO_ENTRY
        changed = False
        for consumer in self.consumers.values():
            joined_at = consumer.joined_at
            if joined_at is not None and (mark_delete >= joined_at or len(self.consumers) == 1):
                consumer.joined_at = None
                changed = True
        if changed:
            for lane in list(self.withheld[Reason.JOINING]):
                self._wake(lane, now_ms)

    # ---- the log

    def read(self, entries: Sequence[Entry], now_ms: int) -> list[Effect]:
        """What follows in the log, in its order."""
        self._is_reading = False
        for entry in entries:
            before = self.read_position
            if before is None or before.ledger_id != entry.position.ledger_id:
                self._note_succession(before, entry.position)
            self.read_position = entry.position
            if entry.position in self.acknowledged:
                continue
            if entry.key is None:
                self._batch.whole[entry.position] = None
                continue
            self._keep_read(entry, self.key_of(entry), now_ms)
        return self._effects(now_ms)

    def scanned(self, entries: Sequence[Entry], now_ms: int) -> list[Effect]:
        """A page of what was read before, in the order of the log."""
        scan = self._scanning
        assert scan is not None
        end = self.read_position or NO_ENTRY
        self.totals["scanned_entries"] += len(entries)
        for entry in entries:
            known = entry.position > end or entry.position in self.acknowledged
            if not known and entry.key is not None:
                self._keep_scanned(scan, entry, self.key_of(entry), now_ms)
        if len(entries) < SCAN_ENTRIES or entries[-1].position >= end:
            for slot in scan.slots:
                slot.lag = None
                slot.queue.lagging.discard(slot)
                self._drop_idle_slot(slot)
            for lane in scan.lanes:
                lane.lag = None
                self._lagging.discard(lane)
                self._drop_if_idle(lane)
            self._scanning = None
        elif scan.slots or scan.lanes:
            self._out.append(Scan(None, entries[-1].position, SCAN_ENTRIES))
        else:
            self._scanning = None
        if self._scanning is None:
            self._has_room = True
        return self._effects(now_ms)

    def _note_succession(self, before: Position | None, position: Position) -> None:
        if before is None and position.entry_id == 0 and position.ledger_id == 1:
            return
        self._batch.successions.append((before or Position(0, 0), position))

    def key_of(self, entry: Entry) -> bytes:
        """The key of the lane that an entry is in, which must be of a message: of KEY_SHARED its
        own; where a whole topic comes in order all entries have one, and where nothing does each
        has one of its own."""
        assert entry.key is not None
        if self.options.kind is Kind.KEY_SHARED:
            return entry.key
        if self.options.orders_keys:
            return b""
        if entry.chunk is not None:
            return entry.chunk.attempt.encode()
        return b"%d:%d" % entry.position

    def _slot(self, key: bytes) -> Slot:
        number = self.selector.slot(key) if self.options.kind is Kind.KEY_SHARED else 1
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = Slot(number, self._queue_of(number))
        return slot

    def _keep_read(self, entry: Entry, key: bytes, now_ms: int) -> None:
        lane = self.lanes.get(key)
        slot = self._slot(key) if lane is None else lane.slot
        if slot.lag is None and (lane is None or lane.lag is None):
            self._keep(entry, key, lane, slot, now_ms)

    def _keep_scanned(self, scan: _Scanning, entry: Entry, key: bytes, now_ms: int) -> None:
        lane = self.lanes.get(key)
        slot = self._slot(key) if lane is None else lane.slot
        of_slot = slot.lag is not None and entry.position >= slot.lag
        of_lane = lane is not None and lane.lag is not None and entry.position >= lane.lag
        if not (of_slot or of_lane):
            self._drop_idle_slot(slot)  # it is kept already
        elif (of_slot and slot not in scan.slots) or (of_lane and lane not in scan.lanes):
            pass  # it is behind something that is not scanned for
        elif not self._keep(entry, key, lane, slot, now_ms):
            scan.slots -= {slot} if slot.lag == entry.position else set()
            scan.lanes -= {lane} if lane is not None and lane.lag == entry.position else set()

    def _keep(self, entry: Entry, key: bytes, lane: Lane | None, slot: Slot, now_ms: int) -> bool:
        """Remember that an entry waits, or that its key or its slot has a lag from there on.
        Returns whether it is the former.

        What can be delivered now needs no room. So where the owner takes more, only keys that are
        withheld have a lag, and no other key of the slot has to wait for theirs."""
        if lane is not None and lane.parked >= self.options.key_parked_max:
            self._lag_behind(lane, entry.position, now_ms)
        elif not slot.queue.is_full:
            self._park(entry, key, lane, slot, now_ms)
            return True
        elif self._takes_more(slot.queue):
            if lane is None or (lane.reason is Reason.READY and not lane.parked):
                self._park(entry, key, lane, slot, now_ms)
                return True
            self._lag_behind(lane, entry.position, now_ms)
        elif lane is not None and lane.lag is not None:
            self._lag_behind(lane, entry.position, now_ms)  # others of its slot are kept beyond it
        else:
            slot.lag = entry.position
            slot.queue.lagging.add(slot)
            for each in slot.lanes:
                self._wake_amid(each, now_ms)
        return False

    def _count_rest(self, lane: Lane, position: Position, chunks: int) -> None:
        """One of a key's entries waits, or does not any more; it may be a chunk."""
        chunk = lane.chunks.get(position)
        if chunk is None:
            return
        rest = lane.rests.get(chunk.attempt, 0) + chunks
        if rest:
            lane.rests[chunk.attempt] = rest
        else:
            del lane.rests[chunk.attempt]

    def _count_large(self, consumer: Consumer, flight: Flight, chunks: int) -> None:
        """One of a consumer's deliveries is in flight, or not any more; it may be a chunk."""
        chunk = flight.lane.chunks.get(flight.position)
        if chunk is None:
            return
        large = consumer.large.get(chunk.attempt)
        if large is None:
            large = consumer.large[chunk.attempt] = Large(flight.lane)
        elif large.is_unfinished:
            consumer.unfinished -= 1
        large.in_flight += chunks
        if chunk.is_last:
            large.has_last = chunks > 0
        if not large.in_flight:
            del consumer.large[chunk.attempt]
        elif large.is_unfinished:
            consumer.unfinished += 1

    def _lag_behind(self, lane: Lane, position: Position, now_ms: int) -> None:
        lane.lag = position
        self._lagging.add(lane)
        self._wake_amid(lane, now_ms)

    def _wake_amid(self, lane: Lane, now_ms: int) -> None:
        """The next chunk of what a consumer has in part may have been passed over."""
        if lane.chunks and (lane.returned or lane.waiting):
            self._wake(lane, now_ms)

    def _takes_more(self, queue: Queue) -> bool:
        """Whether somebody who has this queue has room."""
        return any(each.queue is queue and each.has_room for each in self.consumers.values())

    def _park(self, entry: Entry, key: bytes, lane: Lane | None, slot: Slot, now_ms: int) -> None:
        if lane is None:
            lane = self.lanes[key] = Lane(key, slot)
            slot.lanes[lane] = None
        if entry.chunk is not None:
            lane.chunks[entry.position] = entry.chunk
            self._count_rest(lane, entry.position, 1)
        self._count_parked(lane, 1)
        if entry.deliver_at_ms > now_ms:
            if not (self.options.orders_keys and self.options.delay_holds_key):
                lane.later.add(entry.position)
                self.delayed += 1
                later = _Delayed(lane, Parked(entry.position, entry.messages))
                self._set_timer(entry.deliver_at_ms, later)
                return
            lane.delays[entry.position] = entry.deliver_at_ms
        if lane.waiting is None:
            lane.waiting = Runs()
        lane.waiting.append(entry.position, entry.messages)
        self._wake(lane, now_ms)

    def _start_scan(self) -> None:
        """Begin to scan, for all who lag and have room again, or can have it delivered at once."""
        queues = self._queues()
        if not self._lagging and not any(queue.lagging for queue in queues):
            return
        slots = set[Slot]()
        for queue in queues:
            if queue.lagging and (queue.is_half_empty or self._takes_more(queue)):
                slots |= queue.lagging
        lanes = {lane for lane in self._candidates_for(queues) if self._may_catch_up(lane)}
        starts = [slot.lag for slot in slots if slot.lag is not None]
        starts += [lane.lag for lane in lanes if lane.lag is not None]
        if starts:
            self._scanning = _Scanning(slots, lanes)
            self._out.append(Scan(min(starts), None, SCAN_ENTRIES))

    def _candidates_for(self, queues: Iterable[Queue]) -> set[Lane]:
        """The keys with a lag for which something changed. One that has nothing else to do comes
        back when its owner takes more."""
        candidates = self._candidates
        if self._has_room:
            candidates = set(self._lagging)
            self._idle = {}
        for queue in queues if self._idle else ():
            if queue in self._idle and self._takes_more(queue):
                candidates |= self._idle.pop(queue)
        self._has_room = False
        self._candidates = set()
        for lane in candidates:
            if lane.reason is Reason.READY and not lane.parked:
                self._idle.setdefault(lane.slot.queue, set()).add(lane)
        return {lane for lane in candidates if lane.lag is not None}

    def _may_catch_up(self, lane: Lane) -> bool:
        if lane.parked > self.options.key_parked_max // 2:
            return False
        queue = lane.slot.queue
        if queue.is_half_empty:
            return True
        return lane.reason is Reason.READY and not lane.parked and self._takes_more(queue)

    def _queues(self) -> set[Queue]:
        return {self._nobody, *(consumer.queue for consumer in self.consumers.values())}

    # ---- settling

    def acknowledge(
        self, consumer: int, items: Iterable[Item], now_ms: int
    ) -> tuple[list[Effect], list[Outcome], int]:
        """Somebody is done with deliveries. Also returns what became of each item, and the number
        of the Persist with which those that count are durable; 0: they are."""
        known = self.consumers.get(consumer)
        outcomes = []
        for item in items:
            flight = None if known is None else known.flights.get(item.delivery)
            if flight is None:
                outcomes.append(Outcome.STALE)
            elif item.messages >> flight.messages:
                outcomes.append(Outcome.INVALID)
            else:
                self._settle(flight, item.messages or (1 << flight.messages) - 1)
                outcomes.append(Outcome.DONE)
        number = self.durable_with
        self._count_stale(outcomes)
        return self._effects(now_ms), outcomes, number

    def acknowledge_through(
        self, consumer: int, item: Item, now_ms: int
    ) -> tuple[list[Effect], Outcome, int]:
        """Somebody is done with a delivery and all entries before it. Of a batch, `item.messages`
        are the messages up to the one that is meant. Only where there is one consumer."""
        assert self.options.kind is Kind.EXCLUSIVE
        known = self.consumers.get(consumer)
        last = None if known is None else known.flights.get(item.delivery)
        if known is None or last is None:
            return self._effects(now_ms), Outcome.STALE, self.durable_with
        if item.messages >> last.messages:
            return self._effects(now_ms), Outcome.INVALID, self.durable_with
        for flight in known.flights.values():
            if flight.position < last.position:
                self._settle(flight, (1 << flight.messages) - 1)
        self._settle_waiting(last.lane, last.position)
        self._settle(last, item.messages or (1 << last.messages) - 1)
        number = self.durable_with
        return self._effects(now_ms), Outcome.DONE, number

    def _settle_waiting(self, lane: Lane, end: Position) -> None:
        """What waits in a key before this entry is acknowledged. It was delivered before, or is to
        be delivered later: whatever else waits comes after what is in flight."""
        while lane.returned and lane.returned[0].position < end:
            self._batch.whole[lane.returned[0].position] = lane
            self._unpark(lane, is_returned=True)
        for position in sorted(each for each in lane.later if each < end):
            lane.later.remove(position)
            self.delayed -= 1
            self._batch.whole[position] = lane
            self._count_rest(lane, position, -1)
            lane.chunks.pop(position, None)
            self._count_parked(lane, -1)

    def refuse(
        self, consumer: int, items: Iterable[Refused], now_ms: int
    ) -> tuple[list[Effect], list[Outcome]]:
        """Somebody failed to process deliveries. Later deliveries of their keys are taken back,
        where keys come in order."""
        known = self.consumers.get(consumer)
        outcomes = []
        failed: dict[Lane, list[tuple[Flight, int | None]]] = {}
        for item in items:
            flight = None if known is None else known.flights.get(item.delivery)
            if flight is None or flight.is_settling:
                outcomes.append(Outcome.STALE)
                continue
            outcomes.append(Outcome.DONE)
            of_lane = failed.setdefault(flight.lane, [])
            if all(flight is not other for other, _ in of_lane):
                of_lane.append((flight, item.delay_ms))
        for lane, flights in failed.items():
            self.totals["refused"] += len(flights)
            self._fail(lane, flights, now_ms)
        self._count_stale(outcomes)
        return self._effects(now_ms), outcomes

    def give_back(
        self, consumer: int, deliveries: Iterable[int], now_ms: int
    ) -> tuple[list[Effect], list[Outcome]]:
        """Somebody returns what it has not begun to process: no attempt is counted."""
        known = self.consumers.get(consumer)
        outcomes = []
        lanes: dict[Lane, Position] = {}
        for delivery in deliveries:
            flight = None if known is None else known.flights.get(delivery)
            if flight is None or flight.is_settling:
                outcomes.append(Outcome.STALE)
                continue
            outcomes.append(Outcome.DONE)
            lane = flight.lane
            lanes[lane] = min(flight.position, lanes.get(lane, flight.position))
            self._give_back(flight)
        for lane, first in lanes.items():
            if self.options.orders_keys:
                self._take_back_after(lane, first)
            self._wake(lane, now_ms)
        self.totals["returned"] += outcomes.count(Outcome.DONE)
        self._count_stale(outcomes)
        return self._effects(now_ms), outcomes

    def renew(self, consumer: int, deliveries: Iterable[int], now_ms: int) -> list[Outcome]:
        """Somebody needs more time: the whole of its time-out, from now on."""
        known = self.consumers.get(consumer)
        outcomes = []
        for delivery in deliveries:
            flight = None if known is None else known.flights.get(delivery)
            if known is None or flight is None:
                outcomes.append(Outcome.STALE)
                continue
            if flight.deadline_ms is not None:
                flight.deadline_ms = now_ms + known.ack_timeout_ms
                known.flights[delivery] = known.flights.pop(delivery)
            outcomes.append(Outcome.DONE)
        return outcomes

    def _count_stale(self, outcomes: Sequence[Outcome]) -> None:
        self.totals["stale"] += outcomes.count(Outcome.STALE)

    @property
    def durable_with(self) -> int:
        """The number of the Persist with which everything is durable that was acknowledged so far;
        0: it is."""
        if self._batch:
            return self._batch.number
        return 0 if self._persisting is None else self._persisting.number

    def _settle(self, flight: Flight, messages: int) -> None:
        """Messages of a delivery (bits) are acknowledged; it counts when it is durable."""
        newly = messages & flight.unacked & ~flight.asked
        if not newly:
            return
        flight.asked |= newly
        if flight.is_settling:
            self._batch.parts.pop(flight.position, None)
            self._batch.whole[flight.position] = flight.lane
        else:
            self._batch.parts[flight.position] = (flight.lane, flight.messages, flight.asked)

    def _fail(self, lane: Lane, flights: Sequence[tuple[Flight, int | None]], now_ms: int) -> None:
        for flight, delay_ms in flights:
            attempts = self.attempts.get(flight.position, 0)
            if delay_ms is None:
                doubled = self.options.retry_first_ms << min(attempts, 30)
                delay_ms = min(doubled, self.options.retry_max_ms)
            self._give_back(flight, not_before_ms=now_ms + delay_ms)
            self._note_failure(flight)
            if self.options.orders_keys and flight.position not in lane.unresolved:
                insort(lane.unresolved, flight.position)
        if self.options.orders_keys:
            self._take_back_after(lane, min(flight.position for flight, _ in flights))
        self._wake(lane, now_ms)

    def _note_failure(self, flight: Flight) -> None:
        position, lane = flight.position, flight.lane
        self.attempts[position] = self.attempts.get(position, 0) + 1
        if self._to_record.get(position) is None:
            lane.recording += 1
        self._to_record[position] = lane

    def _take_back_after(self, lane: Lane, position: Position) -> None:
        """Later deliveries of a key count no more: what is before them comes first."""
        for flight in list(lane.flights.values()):
            if flight.position > position and not flight.is_settling:
                self._revoked.setdefault(flight.consumer, []).append(flight.delivery)
                self.totals["returned"] += 1
                self._give_back(flight)

    def _give_back(self, flight: Flight, not_before_ms: int = 0) -> None:
        """An entry is not in flight any more, and waits again."""
        lane = flight.lane
        self._land(flight)
        heappush(lane.returned, Returned(flight.position, flight.messages, not_before_ms))
        if lane.chunks:
            self._count_rest(lane, flight.position, 1)
        self._count_parked(lane, 1)
        self._count_returned(lane, 1)

    def _land(self, flight: Flight) -> None:
        lane = flight.lane
        if lane.flights.get(flight.position) is flight:
            del lane.flights[flight.position]
        if not lane.flights:
            lane.holder = lane.draining_since_ms = None
        consumer = self.consumers.get(flight.consumer)
        if consumer is not None and consumer.flights.pop(flight.delivery, None) is not None:
            if lane.chunks:
                self._count_large(consumer, flight, -1)
            self._count_consumer_unacked(consumer, -flight.unacked.bit_count())

    def _count_consumer_unacked(self, consumer: Consumer, messages: int) -> None:
        consumer.unacked += messages
        limit = self.options.consumer_unacked_max
        if limit and consumer.unacked >= limit:
            consumer.is_blocked = True
        elif consumer.unacked * 2 <= limit:
            consumer.is_blocked = False
        self._count_unacked(messages)

    def _count_unacked(self, messages: int) -> None:
        self.unacked += messages
        limit = self.options.unacked_max
        if limit and self.unacked >= limit:
            self.is_blocked = True
        elif self.is_blocked and self.unacked * 2 < limit:
            self.is_blocked = False
            for lane in list(self.withheld[Reason.SUBSCRIPTION_LIMIT]):
                self._wake(lane, lane.since_ms)

    # ---- what is durable now

    def persisted(self, mark_delete: Position | None, now_ms: int) -> list[Effect]:
        """What Persist said is durable, and the cursor is here."""
        batch, self._persisting = self._persisting, None
        assert batch is not None
        for position, lane in batch.whole.items():
            self._done(position, lane, now_ms)
        for position, (lane, messages, bits) in batch.parts.items():
            left = self.partial.get(position, (1 << messages) - 1) & ~bits
            if not left:
                self._done(position, lane, now_ms)
                continue
            self.partial[position] = left
            flight = lane.flights.get(position)
            if flight is not None:
                consumer = self.consumers.get(flight.consumer)
                if consumer is not None:
                    newly = (flight.unacked & bits).bit_count()
                    self._count_consumer_unacked(consumer, -newly)
                flight.unacked &= left
                flight.asked &= left
        if mark_delete is not None:
            self.acknowledged.advance(mark_delete)
            self._all_joined(now_ms)
        return self._effects(now_ms)

    def recorded(self, now_ms: int) -> list[Effect]:
        """What Record said is durable."""
        recording, self._recording = self._recording, None
        assert recording is not None
        for lane in recording.values():
            lane.recording -= 1
            self._wake(lane, now_ms)
        return self._effects(now_ms)

    def dead_lettered(self, position: Position, key: bytes, now_ms: int) -> list[Effect]:
        """What DeadLetter said is durable."""
        lane = self.lanes[key]
        assert lane.dead == position
        lane.dead = None
        self.totals["dead_lettered"] += 1
        self._batch.whole[position] = lane
        if self.options.orders_keys and position not in lane.unresolved:
            insort(lane.unresolved, position)
        if self.options.kind is Kind.SHARED or lane.is_released:
            lane.is_released = False
            self._out.append(ForgetKey(key))
        else:
            after = self._after_dead_letter(key)
            self.keys.pop(key, None)
            self.keys[key] = KeyState(after, Gap(position, self.attempts.get(position, 0)))
            self._forget_old_gaps()
        self._wake(lane, now_ms)
        self._drop_if_idle(lane)
        return self._effects(now_ms)

    def _after_dead_letter(self, key: bytes) -> AfterDeadLetter:
        if self.options.kind is Kind.SHARED:
            return AfterDeadLetter.CONTINUE
        before = self.keys.get(key)
        return self.options.after_dead_letter if before is None else before.after

    def release_key(self, key: bytes, now_ms: int) -> list[Effect]:
        """Somebody lets a key go on that is held, or whose messages all go to the dead letter
        topic."""
        lane, held = self.lanes.get(key), self.keys.pop(key, None)
        if held is not None:
            self._out.append(ForgetKey(key))
        if lane is not None:
            lane.is_released = held is not None and lane.dead is not None
            self._wake(lane, now_ms)
        return self._effects(now_ms)

    def _forget_old_gaps(self) -> None:
        if len(self.keys) <= GAPS_MAX:
            return
        for key, state in self.keys.items():
            if state.after is AfterDeadLetter.CONTINUE:
                del self.keys[key]
                self._out.append(ForgetKey(key))
                return

    def _done(self, position: Position, lane: Lane | None, now_ms: int) -> None:
        self.totals["acknowledged_entries"] += 1
        self.acknowledged.add(position)
        self.partial.pop(position, None)
        self.attempts.pop(position, None)
        if lane is None:
            return
        flight = lane.flights.get(position)
        if flight is not None:
            self._land(flight)
        elif lane.chunks:
            self._count_rest(lane, position, -1)
        lane.chunks.pop(position, None)
        lane.delays.pop(position, None)
        if position in lane.unresolved:
            lane.unresolved.remove(position)
        if self.keys and self._is_beyond_gap(lane, position, AfterDeadLetter.CONTINUE):
            del self.keys[lane.key]
            self._out.append(ForgetKey(lane.key))
        self._wake(lane, now_ms)
        self._drop_if_idle(lane)

    # ---- time

    def tick(self, now_ms: int) -> list[Effect]:
        """It is so late."""
        while self._timers and self._timers[0].when_ms <= now_ms:
            timer = heappop(self._timers)
            subject = timer.subject
            if isinstance(subject, _Delayed):
                self._due(subject, now_ms)
            elif isinstance(subject, Consumer):
                self._time_out(subject, now_ms)
            elif subject.timer_ms == timer.when_ms:
                subject.timer_ms = None
                self._drain_over(subject, now_ms)
                self._wake(subject, now_ms)
        return self._effects(now_ms)

    def _set_timer(self, when_ms: int, subject: Lane | Consumer | _Delayed) -> None:
        timers = self._timers
        if len(timers) > TIMERS_SPARE + 2 * self._timed_max:
            timers[:] = filter(self._is_needed, timers)
            heapify(timers)
        heappush(timers, _Timer(when_ms, next(self._timer_numbers), subject))

    def _set_lane_timer(self, lane: Lane, when_ms: int) -> None:
        if lane.timer_ms is None or when_ms < lane.timer_ms:
            lane.timer_ms = when_ms
            self._set_timer(when_ms, lane)

    @property
    def _timed_max(self) -> int:
        """How many timers may be needed: one for each that one may be for."""
        return len(self.lanes) + len(self.consumers) + self.delayed

    def _is_needed(self, timer: _Timer) -> bool:
        subject = timer.subject
        if isinstance(subject, _Delayed):
            return subject.parked.position in subject.lane.later
        if isinstance(subject, Consumer):
            return subject.id in self.consumers
        return subject.timer_ms == timer.when_ms and self.lanes.get(subject.key) is subject

    def _due(self, delayed: _Delayed, now_ms: int) -> None:
        lane = delayed.lane
        if delayed.parked.position not in lane.later:
            return
        lane.later.remove(delayed.parked.position)
        self.delayed -= 1
        heappush(lane.returned, Returned(*delayed.parked))
        self._count_returned(lane, 1)
        self._wake(lane, now_ms)

    def _time_out(self, consumer: Consumer, now_ms: int) -> None:
        """The first deliveries of a consumer may count as failed. They time out in their order: the
        time is the same for all, and what is renewed comes after all others."""
        consumer.is_timed = False
        late = []
        for flight in consumer.flights.values():
            assert flight.deadline_ms is not None
            if flight.deadline_ms > now_ms:
                break
            if not flight.is_settling:
                late.append(flight)
        late.sort(key=lambda flight: flight.position)
        for flight in late:
            if flight.delivery in consumer.flights:  # none before it took it back
                self._revoked.setdefault(consumer.id, []).append(flight.delivery)
                self.totals["timed_out"] += 1
                self._fail(flight.lane, [(flight, 0)], now_ms)
        self._set_time_out(consumer, now_ms)

    def _set_time_out(self, consumer: Consumer, now_ms: int) -> None:
        for flight in consumer.flights.values():
            assert flight.deadline_ms is not None
            if flight.deadline_ms > now_ms:
                consumer.is_timed = True
                self._set_timer(flight.deadline_ms, consumer)
                return

    def _drain_over(self, lane: Lane, now_ms: int) -> None:
        """A consumer that does not own a key any more had its time to acknowledge it."""
        since, deadline_ms = lane.draining_since_ms, self.options.drain_deadline_ms
        if since is None or not deadline_ms:
            return
        if now_ms < since + deadline_ms:
            self._set_lane_timer(lane, since + deadline_ms)
            return
        flights = [flight for flight in lane.flights.values() if not flight.is_settling]
        flights.sort(key=lambda flight: flight.position)
        for flight in flights:
            self._revoked.setdefault(flight.consumer, []).append(flight.delivery)
            self._give_back(flight)
        self.totals["drained"] += len(flights)
        for flight in flights[:1]:
            self._note_failure(flight)

    # ---- delivering

    def _wake(self, lane: Lane, now_ms: int) -> None:
        """Something changed for a key: look at it again."""
        self._set_reason(lane, Reason.READY, now_ms)
        if lane.lag is not None:
            self._candidates.add(lane)
        if lane.is_ready or not (lane.returned or lane.waiting):
            return
        lane.is_ready = True
        slot = lane.slot
        slot.ready.append(lane)
        if not slot.queued:
            slot.queued = True
            slot.queue.slots.append(slot)

    def _set_reason(self, lane: Lane, reason: Reason, now_ms: int) -> None:
        if lane.reason is reason:
            return
        if lane.reason is not Reason.READY:
            del self.withheld[lane.reason][lane]
        if reason is not Reason.READY:
            self.withheld[reason][lane] = None
        lane.reason = reason
        lane.since_ms = now_ms

    def _effects(self, now_ms: int) -> list[Effect]:
        """Deliver what can be, and say what is to be done."""
        unserved = list(self.consumers.values())
        while unserved:  # of a pool, everybody has a turn before anybody has another
            unserved = [each for each in unserved if self._serve(each, now_ms)]
        for consumer, revoked in self._revoked.items():
            if consumer in self.consumers:
                self._out.append(Revoke(consumer, tuple(revoked)))
        for consumer, deliveries in self._outgoing.items():
            self._out.append(Deliver(consumer, tuple(deliveries)))
            self.totals["delivered_entries"] += len(deliveries)
            self.totals["delivered_messages"] += sum(
                delivery.unacked.bit_count() for delivery in deliveries
            )
        if self._pool is not None:  # who got nothing comes first next time
            for consumer in self._outgoing:
                self.consumers[consumer] = self.consumers.pop(consumer)
        self._revoked = {}
        self._outgoing = {}
        if self._persisting is None and self._batch:
            self._persist()
        if self._recording is None and self._to_record:
            self._recording, self._to_record = self._to_record, {}
            record = tuple((each, self.attempts.get(each, 0)) for each in self._recording)
            self._out.append(Record(record))
        if self._scanning is None:
            self._start_scan()
        if not self._is_reading and self._wants_more:
            self._is_reading = True
            self._out.append(Read(self.read_position))
        effects, self._out = self._out, []
        return effects

    @property
    def _wants_more(self) -> bool:
        return any(
            each.has_room and (each.unfinished or not self.is_blocked)
            for each in self.consumers.values()
        )

    def _persist(self) -> None:
        batch = self._persisting = self._batch
        self._batch = _Batch(batch.number + 1)
        parts = tuple((each, size, bits) for each, (_, size, bits) in batch.parts.items())
        self._out.append(Persist(batch.number, tuple(batch.whole), parts, tuple(batch.successions)))

    def _serve(self, consumer: Consumer, now_ms: int) -> bool:
        """Deliver to a consumer what is ready for it; of a pool's, one turn. Returns whether there
        may be more."""
        slots = consumer.queue.slots
        turns = TURN_ENTRIES
        while slots and consumer.has_room:
            if self._pool is not None and not turns:
                return True
            turns -= 1
            slot = slots.popleft()
            if slot.ready:
                lane = slot.ready.popleft()
                lane.is_ready = False
                self._offer(lane, consumer, now_ms)
            if slot.ready:
                slots.append(slot)
            else:
                slot.queued = False
                self._drop_idle_slot(slot)
        return False

    def _offer(self, lane: Lane, consumer: Consumer, now_ms: int) -> None:
        """Deliver some of a key, until it is to be withheld."""
        for _ in range(TURN_ENTRIES):
            if not (lane.returned or lane.waiting):
                self._set_reason(lane, Reason.READY, now_ms)
                self._drop_if_idle(lane)
                return
            waiting = lane.waiting.first() if lane.waiting else None
            returned = lane.returned[0] if lane.returned else None
            hurries = lane.slot.queue.is_choked and not self.options.orders_keys
            is_returned = returned is not None and (
                waiting is None or hurries or returned.position < waiting.position
            )
            head = returned if is_returned else waiting
            assert head is not None
            if head.position in self.acknowledged:
                self._unpark(lane, is_returned=is_returned)
                lane.chunks.pop(head.position, None)
                continue
            target = consumer
            if lane.chunks and lane.holder is not None:
                holder = self.consumers.get(lane.holder, consumer)
                target = holder if lane.is_amid_message(holder) else consumer
            if target is consumer and not consumer.has_room:
                break
            reason = self._withheld(lane, head, target, now_ms)
            if reason is not None:
                self._set_reason(lane, reason, now_ms)
                return
            if (self.attempts or self.keys) and self._is_dead(lane, head.position):
                self._dead_letter(lane, head.position, is_returned=is_returned, now_ms=now_ms)
                return
            self._unpark(lane, is_returned=is_returned)
            self._deliver(lane, head.position, head.messages, target, now_ms)
        self._wake(lane, now_ms)

    def _withheld(
        self, lane: Lane, head: Parked | Returned, consumer: Consumer, now_ms: int
    ) -> Reason | None:
        """Why the next entry of a key may not be delivered; None: it may."""
        options, position = self.options, head.position
        is_amid = bool(lane.chunks) and lane.is_amid_message(consumer)
        if lane.recording:
            return Reason.RECORDING
        if lane.dead is not None:
            return Reason.DEAD_LETTERING
        if self.keys and self._is_beyond_gap(lane, position, AfterDeadLetter.HOLD):
            return Reason.HELD
        if options.orders_keys:
            if lane.unresolved and lane.unresolved[0] < position and not is_amid:
                return Reason.RETRY
            if lane.holder is not None and lane.holder != consumer.id:
                return Reason.DRAINING
        if lane.delays and lane.delays.get(position, 0) > now_ms:
            self._set_lane_timer(lane, lane.delays[position])
            return Reason.DELAYED
        if isinstance(head, Returned):
            if head.not_before_ms > now_ms:
                self._set_lane_timer(lane, head.not_before_ms)
                return Reason.RETRY_DELAY
        elif self.is_blocked and not consumer.unfinished:
            return Reason.SUBSCRIPTION_LIMIT
        elif lane.slot.queue.is_choked and not lane.returned and not is_amid:
            return Reason.RETURNED_LIMIT
        limit = options.max_in_flight_per_key
        if limit and len(lane.flights) >= limit and not is_amid:
            return Reason.IN_FLIGHT_LIMIT
        if consumer.joined_at is not None and position > consumer.joined_at and not is_amid:
            return Reason.JOINING
        return None

    def _is_dead(self, lane: Lane, position: Position) -> bool:
        if self.keys and self._is_beyond_gap(lane, position, AfterDeadLetter.TAIL):
            return True
        limit = self.options.redeliveries_max
        return limit is not None and self.attempts.get(position, 0) > limit

    def _is_beyond_gap(self, lane: Lane, position: Position, after: AfterDeadLetter) -> bool:
        """Whether a message of this key was dead-lettered before this one, and this becomes of what
        follows."""
        state = self.keys.get(lane.key)
        return state is not None and state.after is after and state.gap.position < position

    def _dead_letter(
        self, lane: Lane, position: Position, *, is_returned: bool, now_ms: int
    ) -> None:
        self._unpark(lane, is_returned=is_returned)
        lane.chunks.pop(position, None)
        lane.dead = position
        attempts, after = self.attempts.get(position, 0), self._after_dead_letter(lane.key)
        self._out.append(DeadLetter(position, lane.key, attempts, after))
        self._set_reason(lane, Reason.DEAD_LETTERING, now_ms)

    def _unpark(self, lane: Lane, *, is_returned: bool) -> None:
        """The next entry of a key does not wait any more."""
        if is_returned:
            position = heappop(lane.returned).position
            self._count_returned(lane, -1)
        else:
            assert lane.waiting is not None
            position = lane.waiting.take().position
            if not lane.waiting:
                lane.waiting = None
        if lane.chunks:
            self._count_rest(lane, position, -1)
        self._count_parked(lane, -1)
        queue = lane.slot.queue
        if queue.parked == queue.parked_max // 2:
            self._has_room = True
        if lane.lag is not None:
            self._candidates.add(lane)

    def _count_parked(self, lane: Lane, entries: int) -> None:
        lane.slot.parked += entries
        lane.slot.queue.parked += entries

    def _count_returned(self, lane: Lane, entries: int) -> None:
        lane.slot.returned += entries
        lane.slot.queue.returned += entries
        self._check_returned(lane.slot.queue)

    def _check_returned(self, queue: Queue) -> None:
        limit = self.options.returned_max
        if limit and queue.returned >= limit:
            queue.is_choked = True
        elif queue.is_choked and queue.returned * 2 <= limit:
            queue.is_choked = False
            for lane in list(self.withheld[Reason.RETURNED_LIMIT]):
                if lane.slot.queue is queue:
                    self._wake(lane, lane.since_ms)

    def _deliver(
        self, lane: Lane, position: Position, messages: int, consumer: Consumer, now_ms: int
    ) -> None:
        unacked = (1 << messages) - 1
        if self.partial:
            unacked = self.partial.get(position, unacked)
        attempts = self.attempts.get(position, 0) if self.attempts else 0
        deadline_ms = now_ms + consumer.ack_timeout_ms if consumer.ack_timeout_ms else None
        delivery = next(self._deliveries)
        flight = Flight(
            delivery, consumer.id, lane, position, messages, unacked, now_ms, attempts, deadline_ms
        )
        if deadline_ms is not None and not consumer.is_timed:
            consumer.is_timed = True
            self._set_timer(deadline_ms, consumer)
        lane.holder = consumer.id
        lane.flights[position] = flight
        if lane.chunks:
            self._count_large(consumer, flight, 1)
        consumer.flights[delivery] = flight
        cost = unacked.bit_count()
        consumer.permits -= cost
        self._count_consumer_unacked(consumer, cost)
        state = self.keys.get(lane.key) if self.keys else None
        self._outgoing.setdefault(consumer.id, []).append(
            Delivery(
                delivery,
                position,
                unacked,
                attempts,
                deadline_ms,
                None if state is None else state.gap,
            )
        )

    def _drop_if_idle(self, lane: Lane) -> None:
        if lane.is_idle and not lane.is_ready and self.lanes.get(lane.key) is lane:
            self._set_reason(lane, Reason.READY, 0)
            del self.lanes[lane.key]
            del lane.slot.lanes[lane]
            self._drop_idle_slot(lane.slot)

    def _drop_idle_slot(self, slot: Slot) -> None:
        if not (slot.lanes or slot.lag or slot.queued):
            self._slots.pop(slot.number, None)
