"""One subscription, as a machine: an event in, effects out.

    log ──read──▶ lanes: waiting ──▶ in flight ──ack──▶ persisting ──durable──▶ gone
                    ▲                  │
                    └──── returned ◀───┴─ nack, time-out, disconnect, hand-over

An entry is in exactly one of these places, or behind a lag, or not read yet. Each has its module:

    parking, lags        waiting entries, and those not kept for lack of room
    delays               delayed messages, and which of them are read again
    large                the chunks of large messages, and whether a message can be whole
    delivering           turns, and the rules that withhold a key
    flights              consumers, deliveries in flight and returned, owners of slots
    verdicts, judging    entries that wait for filters, and the effect of verdicts
    settling             entries being made durable, dead-lettered, or skipped
    lane, positions      the values that these share
    selectors            keys to slots, and slots to owners
    effects              the work of the shell, and the options of a subscription

Subscription combines them: each event updates its subject, wakes the keys that it affects, and ends
in `_effects`, which delivers all deliverable entries.

Parked entries are bounded, for each key and for each owner. Beyond the bound an entry is not kept:
its key or slot lags from there on, and the log is scanned from there when there is room again. So a
slow consumer never stops reading, which continues while any consumer has permits.

The shell's whole duty:

    for effect in subscription.<event>(...):
        start performing it; its outcome is an event
    tick(now_ms) when `next_timer_ms` has come

Effects for one consumer are performed in order. The shell retries a failed effect; if it cannot, it
drops this machine and starts another one from durable state.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from seqgate.services.dispatcher.core.delays import DelayedBytes
from seqgate.services.dispatcher.core.delivering import KEPT_BACK_MAX, Delivering
from seqgate.services.dispatcher.core.effects import (
    ACCEPT,
    AfterDeadLetter,
    Because,
    Effect,
    Entry,
    ForgetKey,
    Gap,
    Options,
    Outcome,
    Outgoing,
    Read,
    Scan,
    SubscriptionType,
)
from seqgate.services.dispatcher.core.flights import Flights, HandOver
from seqgate.services.dispatcher.core.judging import Judging
from seqgate.services.dispatcher.core.lane import (
    Chunk,
    Consumer,
    Flight,
    Lane,
    Reason,
    Slot,
    Timers,
)
from seqgate.services.dispatcher.core.large import LargeMessages
from seqgate.services.dispatcher.core.parking import Parking
from seqgate.services.dispatcher.core.selectors import Selector, SlotRange
from seqgate.services.dispatcher.core.settling import Durable, Settling
from seqgate.services.dispatcher.core.verdicts import Waits, oldest
from seqgate.types import Position

TOTALS: Final = (
    "delivered_entries",
    "delivered_messages",
    "acknowledged_entries",
    "negative_acknowledgements",
    "timed_out",
    "lost_consumers",
    "returned",
    "drained",
    "dead_lettered",
    "stale",
    "scanned_entries",
    "rejected_entries",
    "rescheduled",
    "passed_entries",
)
"""Counters since the machine started; dispatcher.proto describes each."""


class Ack(NamedTuple):
    """An acknowledged delivery; `messages`: of a batch, the acknowledged ones (bits), 0: all."""

    delivery: int
    messages: int = 0


class Nack(NamedTuple):
    """A negatively acknowledged delivery; `delay_ms` until its redelivery, None: the options'."""

    delivery: int
    delay_ms: int | None = None
    reason: str = ""


class Subscription:
    """See the module. Mutable and synchronous, with one owner: it runs for every message.

    Its parts and properties are for reading only.
    """

    def __init__(
        self,
        options: Options,
        selector: Selector,
        durable: Durable,
        *,
        first_delivery: int = 1,
        is_filtered: bool = False,
        delayed: DelayedBytes | None = None,
    ) -> None:
        """`is_filtered`: whether filters judge unacknowledged entries. `delayed`: the memory budget
        for delayed messages that all subscriptions share; None: not shared."""
        self.options = options
        self.selector = selector
        self.totals = dict.fromkeys(TOTALS, 0)
        self.out = out = Outgoing()
        self.timers = timers = Timers(self._timed_max)
        delayed = delayed or DelayedBytes(options.delayed_bytes_max)
        waits = Waits(durable.waits)
        self.parking = parking = Parking(options, selector, timers, self.totals, delayed, waits)
        self.settling = settling = Settling(options, durable, out, self.totals)
        self.flights = flights = Flights(
            options, parking, settling, timers, out, self.totals, first_delivery
        )
        self.gaps = settling.gaps
        self.large = large = LargeMessages(settling, durable.large_letters)
        self.judging = Judging(options, parking, settling, large, self.totals)
        self.handover = HandOver(options, selector, parking, flights, timers, out)
        self.delivering = Delivering(options, parking, flights, settling, large, out)

        self.consumers = flights.consumers
        self.lanes = parking.lanes
        self.withheld = parking.withheld
        self.acknowledged = settling.acknowledged
        self.partial = settling.partial
        self.attempts = settling.attempts
        self.keys = self.gaps.keys
        self.verdicts = parking.verdicts
        self.verdicts.is_filtered = is_filtered
        self.read_position = self.acknowledged.mark_delete
        self._returns: dict[Position, Entry] = {}
        self._brought: set[Position] = set()
        self._is_reading = False
        self._scanned_to = self.read_position
        self._to_scan: Scan | None = None
        self._now_ms = 0

    @property
    def next_timer_ms(self) -> int | None:
        """When to call `tick`; None: no timer is set."""
        times = (self.timers.next_ms, self.parking.delays.next_ms(self._now_ms))
        return min((each for each in times if each is not None), default=None)

    @property
    def waits(self) -> dict[Position, int]:
        """The start times of the oldest waits that must end, which the shell makes durable."""
        if not (self.verdicts.failed or self.parking.kept_back):
            return {}
        return oldest(self.lanes.values())

    @property
    def unacked(self) -> int:
        return self.flights.unacked

    @property
    def is_blocked(self) -> bool:
        """Whether first deliveries pause at the limit of unacknowledged messages."""
        return self.flights.is_blocked

    @property
    def parked(self) -> int:
        return self.parking.parked

    @property
    def lagging(self) -> int:
        return self.parking.lagging

    @property
    def delayed(self) -> int:
        return self.parking.delayed

    @property
    def unjudged(self) -> int:
        return self.verdicts.unjudged

    @property
    def filter_failed(self) -> int:
        return self.verdicts.failed

    @property
    def rescheduled(self) -> int:
        return self.verdicts.rescheduled

    @property
    def is_waiting_for_filters(self) -> bool:
        """Whether reading stopped because too many entries wait for filters."""
        return self.verdicts.is_full

    @property
    def next_delivery(self) -> int:
        return self.flights.next_delivery

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to make durable."""
        return self.settling.is_idle

    @property
    def durable_with(self) -> int:
        """The number of the Persist after which everything acknowledged so far is durable; 0: it
        already is."""
        return self.settling.durable_with

    def slot_of(self, key: bytes) -> Slot | None:
        """The slot of a key; None: it has no work."""
        return self.parking.slots.get(self.parking.slot_number(key))

    def owner_of(self, slot: Slot) -> int | None:
        """The owner of a slot; None: it has none, or consumers share a pool."""
        return None if self.parking.pool is not None else self.selector.owner(slot.number)

    def key_of(self, entry: Entry) -> bytes:
        """The lane key of an entry, which must be a message: its own key for KEY_SHARED; one for
        all entries where a whole topic is ordered; and one for each entry, or large message, where
        nothing is."""
        assert entry.key is not None
        if self.options.kind is SubscriptionType.KEY_SHARED:
            return entry.key
        if self.options.orders_keys:
            return b""
        if entry.chunk is not None:
            return entry.chunk.attempt.encode()
        return b"%d:%d" % entry.position

    def lane_key(self, key: bytes) -> bytes:
        """The lane key of a message's key; where a whole topic is ordered all have the same."""
        return key if self.options.kind is SubscriptionType.KEY_SHARED else b""

    def verdict_of(self, lane: Lane, position: Position) -> int:
        """The state of a waiting entry: ACCEPT, UNJUDGED, FILTER_FAILED, or its rescheduled
        time."""
        return ACCEPT if lane.undecided is None else lane.undecided.states.get(position, ACCEPT)

    def retry_at_ms(self, lane: Lane) -> int | None:
        """When a withheld key is checked again; None: on an event, not at a time."""
        if lane.reason is Reason.RETRY_DELAY and lane.returned:
            return lane.returned[0].not_before_ms
        if lane.reason is Reason.DELAYED and lane.rare and lane.next_position:
            return lane.rare.delays.get(lane.next_position)
        if lane.reason is Reason.RESCHEDULED and lane.next_position:
            return self.verdict_of(lane, lane.next_position)
        if lane.reason is Reason.DRAINING and lane.draining_since_ms is not None:
            deadline_ms = self.options.drain_deadline_ms
            return lane.draining_since_ms + deadline_ms if deadline_ms else None
        return None

    def end(self) -> None:
        """Return the memory budget's share. The machine must not be used afterwards."""
        self.parking.delays.clear()

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
        """Connect a consumer. Raises the errors of `admit`."""
        self.admit(consumer, name=name, weight=weight, ranges=ranges, ack_timeout_ms=ack_timeout_ms)
        return self.assign(consumer, now_ms=now_ms)

    def admit(
        self,
        consumer: int,
        *,
        name: str,
        weight: int = 1,
        ranges: Sequence[SlotRange] = (),
        ack_timeout_ms: int = 0,
    ) -> None:
        """Connect a consumer. `assign` must be called next, once for all that connect together:
        reassigning slots for each of a thousand takes a minute.

        Raises:
            InvalidKeyRange, RangeConflict, NoSlotsLeft: the selector rejects it; nothing changed.
        """
        self.selector.add(consumer, name=name, weight=weight, ranges=ranges)
        queue = self.parking.queue_for(consumer)
        joined = Consumer(consumer, name, queue, weight, ack_timeout_ms)
        self.handover.record_joined_at(joined, self.read_position, self.acknowledged.mark_delete)
        self.flights.add(joined)

    def assign(self, *consumers: int, now_ms: int) -> list[Effect]:
        """Assign slots to admitted consumers."""
        self.handover.reassign(now_ms, joined=consumers)
        return self._effects(now_ms)

    def leave(self, *consumers: int, now_ms: int) -> list[Effect]:
        """Remove consumers that disconnected without Leave: their deliveries go to others, and
        those that they may have been processing count as failed. Slots are reassigned once for all
        of them. Consumers removed before are ignored."""
        for consumer in consumers:
            if consumer in self.consumers:
                name = self.consumers[consumer].name
                self.flights.lose(self._remove(consumer), name, now_ms)
        return self._reassigned(now_ms)

    def close(self, consumer: int, now_ms: int) -> list[Effect]:
        """Remove a consumer that leaves: none of its deliveries counts as failed."""
        for flight in self._remove(consumer):
            self.flights.give_back(flight)
            self.totals["returned"] += 1
            self.parking.wake(flight.lane)
        return self._reassigned(now_ms)

    def permit(self, consumer: int, messages: int, now_ms: int) -> list[Effect]:
        known = self.consumers.get(consumer)
        if known is not None:
            self.flights.permit(known, messages)
        return self._effects(now_ms)

    def _remove(self, consumer: int) -> list[Flight]:
        self.selector.remove(consumer)
        return self.flights.remove(consumer)

    def _reassigned(self, now_ms: int) -> list[Effect]:
        self.handover.reassign(now_ms)
        if len(self.consumers) == 1:
            self.handover.all_joined(self.acknowledged.mark_delete)
        return self._effects(now_ms)

    # ---- the log

    def read(self, entries: Sequence[Entry], now_ms: int) -> list[Effect]:
        """Process the next entries of the log, in order."""
        self._is_reading = False
        waits_for_nobody = self.delivering.may_pass and not self._returns
        passed: list[Position] = []
        for entry in entries:
            before = self.read_position
            if before is None or before.ledger_id != entry.position.ledger_id:
                self.settling.record_succession(before, entry.position)
            self.read_position = entry.position
            if entry.aborts:
                self._abort(entry.aborts, entry.position)
            if entry.chunk is not None and self.large.begins_again(entry.chunk, entry.position):
                self._abort(entry.chunk.attempt, entry.position)
            if entry.position in self.acknowledged:
                continue
            if entry.key is None:
                self.settling.acknowledge_entry(entry.position, None)
                continue
            key = self.key_of(entry)
            if entry.chunk is not None:
                if self._is_useless(entry, entry.chunk):
                    passed.append(entry.position)
                    self._pass_kept(entry.chunk, key)
                    continue
                self.large.record_read(entry.chunk, entry.position, key)
            if entry.verdict or entry.chunk is not None:
                keeps = self.parking.keeps(key)
                counted = self.judging.as_read(entry, key, now_ms, keeps=keeps)
                if counted is None:
                    continue
                entry = counted
            elif waits_for_nobody and self.delivering.passes(entry, key, now_ms):
                continue
            self.parking.keep_read(entry, key, now_ms)
        self.settling.pass_over(passed, Because.HEADLESS)
        self._bring_returns()
        return self._effects(now_ms)

    def redrive(
        self, entries: Sequence[Entry], now_ms: int, partial: Mapping[Position, int] = {}
    ) -> list[Effect]:
        """Deliver acknowledged entries once more: dead letters that come back. Each waits in its
        key in the order of the log. Those that wait already, or are in flight, are ignored.
        `partial`: of batches, the messages left to deliver (bits)."""
        for entry in entries:
            assert entry.position in self.acknowledged
            if entry.position not in self._brought:
                self._brought.add(entry.position)
                self.settling.returned.add(entry.position)
                if entry.position in partial:
                    self.partial[entry.position] = partial[entry.position]
                self._returns[entry.position] = entry
        self._bring_returns()
        return self._effects(now_ms)

    def is_bringing(self, positions: Iterable[Position]) -> bool:
        """Whether one of these comes back as a dead letter, or its acknowledgement as one is on its
        way to disk."""
        return not self._brought.isdisjoint(positions)

    def _bring_returns(self) -> None:
        """Let dead letters that come back wait in their keys, unless entries before them are not
        read yet: those of a key come first, in the order of the log."""
        read = self.read_position
        for position, entry in sorted(self._returns.items()):
            if read is None or position > read:
                return
            key = self.key_of(entry)
            if self.parking.bring_return(entry, key):
                if entry.chunk is not None:
                    self.large.record_return(entry.chunk)
                    self.large.record_read(entry.chunk, position, key)
                del self._returns[position]

    def _is_useless(self, entry: Entry, chunk: Chunk) -> bool:
        """Whether to skip a chunk, since its large message cannot be delivered. A chunk of a
        rejected message is rejected instead, and one that failed too often follows the first to the
        dead letter topic."""
        if self.judging.is_rejected(chunk) or self.judging.is_beyond(entry.position):
            return False
        return self.large.is_headless(chunk, entry.position)

    def _pass_kept(self, chunk: Chunk, key: bytes) -> None:
        """If a skipped chunk is the last of its message, skip the chunks kept back for it, too."""
        lane = self.lanes.get(key)
        if chunk.is_last and lane is not None and lane.rare is not None:
            kept = self.parking.take_kept(lane, chunk.attempt)
            for position in kept:
                self.verdicts.forget(lane, position)
            self.settling.pass_over(kept, Because.HEADLESS, lane)

    def _abort(self, name: str, position: Position) -> None:
        """Take back the chunks of an aborted attempt, kept back or in flight: they belong to no
        message. A consumer that has some would wait for the rest, and may not see the abort."""
        attempt = self.large.record_abort(name, position)
        lane = None if attempt is None else self.lanes.get(attempt.key)
        if lane is None or lane.rare is None:
            return
        assert attempt is not None
        if name in lane.rare.kept_back:
            self._drop_kept(lane, name, start=attempt.first)
        if self.flights.take_back(lane, name, attempt.first):
            self.parking.wake(lane)

    def _drop_kept(
        self, lane: Lane, name: str, *, start: Position | None = None, end: Position | None = None
    ) -> None:
        assert lane.rare is not None
        for position in self.parking.take_kept(lane, name, start=start, end=end):
            self.verdicts.forget(lane, position)
            self.settling.acknowledge_entry(position, lane)

    def scanned(self, entries: Sequence[Entry], now_ms: int) -> list[Effect]:
        """Process a page of entries read before, in the order of the log, as of any time since Scan
        was issued: entries read meanwhile may be missing. It may be shorter than requested; an
        empty page means that none of the entries read before Scan are left."""
        end = self.read_position
        assert end is not None
        self.totals["scanned_entries"] += len(entries)
        passed: list[Position] = []
        for entry in entries:
            known = entry.position > end or self.settling.is_settled(entry.position)
            if known or entry.key is None:
                continue
            key = self.key_of(entry)
            if entry.chunk is not None and self._is_useless(entry, entry.chunk):
                if self.parking.was_passed_over(key, entry.position):
                    self.parking.delays.drop(entry.position)
                    passed.append(entry.position)
                    self._pass_kept(entry.chunk, key)
                continue
            self._keep_scanned(entry, key, now_ms)
        self.settling.pass_over(passed, Because.HEADLESS)
        reached = self._reached(entries)
        if reached is not None:
            found = {entry.position for entry in entries}
            self.settling.pass_over(self.parking.gone(reached, found), Because.GONE)
        last = None if reached is None or reached >= end else reached
        self._to_scan = self.parking.end_page(last)
        self._bring_returns()
        return self._effects(now_ms)

    def _reached(self, entries: Sequence[Entry]) -> Position | None:
        """The position up to which a page of a scan is complete."""
        return entries[-1].position if entries else self._scanned_to

    def _scan(self, now_ms: int) -> None:
        """Request a page of the entries read so far, if one is needed."""
        self._to_scan = self._to_scan or self.parking.start_scan(now_ms)
        if self._to_scan is not None:
            self._scanned_to = self.read_position
            self.out.add(self._to_scan)
            self._to_scan = None

    def _keep_scanned(self, entry: Entry, key: bytes, now_ms: int) -> None:
        counted: Entry | None = entry
        if entry.verdict or entry.chunk is not None:
            if not self.parking.was_passed_over(key, entry.position):
                return
            keeps = self.parking.scans_for(key, entry.position)
            counted = self.judging.as_read(entry, key, now_ms, keeps=keeps)
        if counted is None:
            self.parking.delays.drop(entry.position)
        else:
            self.parking.keep_scanned(counted, key, now_ms)

    # ---- filters

    def judged(self, verdicts: Mapping[Position, int], now_ms: int) -> list[Effect]:
        """Apply the verdicts that Judge requested. Entries left out, or UNJUDGED, are requested
        again at once."""
        self.judging.judged(verdicts, now_ms)
        return self._effects(now_ms)

    def refilter(
        self, now_ms: int, *, is_filtered: bool, start: Position | None = None
    ) -> list[Effect]:
        """Apply changed or removed filters, or retry them. Entries that failed or are rescheduled
        are judged again; so are, from `start` on, all other waiting entries. A pending Judge is
        repeated."""
        self.judging.refilter(is_filtered=is_filtered, start=start)
        return self._effects(now_ms)

    # ---- settlements

    def acknowledge(
        self, consumer: int, items: Iterable[Ack], now_ms: int, *, whole: Iterable[int] = ()
    ) -> tuple[list[Effect], list[Outcome], int]:
        """Acknowledge deliveries: `items`, and those in `whole` with all their messages. Also
        returns the outcome of each, and the number of the Persist after which they are durable; 0:
        they already are."""
        known = self.consumers.get(consumer)
        flights = {} if known is None else known.flights
        outcomes = []
        for item in items:
            flight = flights.get(item.delivery)
            if flight is None:
                outcomes.append(Outcome.STALE)
            elif item.messages >> flight.messages:
                outcomes.append(Outcome.INVALID)
            else:
                self.settling.acknowledge(flight, item.messages or (1 << flight.messages) - 1)
                outcomes.append(Outcome.DONE)
        for flight in map(flights.get, whole):
            if flight is None:
                outcomes.append(Outcome.STALE)
            else:
                self.settling.acknowledge_whole(flight)
                outcomes.append(Outcome.DONE)
        number = self.durable_with
        self._count_stale(outcomes)
        return self._effects(now_ms), outcomes, number

    def acknowledge_cumulative(
        self, consumer: int, item: Ack, now_ms: int
    ) -> tuple[list[Effect], Outcome, int]:
        """Acknowledge a delivery and all entries before it. Of a batch, `item.messages` are the
        messages up to the given one. EXCLUSIVE only."""
        assert self.options.kind is SubscriptionType.EXCLUSIVE
        known = self.consumers.get(consumer)
        last = None if known is None else known.flights.get(item.delivery)
        if known is None or last is None:
            return self._effects(now_ms), Outcome.STALE, self.durable_with
        if item.messages >> last.messages:
            return self._effects(now_ms), Outcome.INVALID, self.durable_with
        whole = self._whole_before(last)
        for flight in known.flights.values():
            chunk = _chunk_of(flight)
            if flight.position < last.position and (chunk is None or chunk.attempt in whole):
                self.settling.acknowledge(flight, (1 << flight.messages) - 1)
        for position in self.parking.take_before(last.lane, last.position, whole=whole):
            self.settling.acknowledge_entry(position, last.lane)
        self.settling.acknowledge(last, item.messages or (1 << last.messages) - 1)
        number = self.durable_with
        return self._effects(now_ms), Outcome.DONE, number

    def _whole_before(self, last: Flight) -> set[str]:
        """The large messages that end at or before a delivery of an ordered topic. An unfinished
        one comes later: its position is that of its last chunk."""
        chunks = {position: _chunk_of(flight) for position, flight in last.lane.flights.items()}
        return {
            chunk.attempt
            for position, chunk in chunks.items()
            if chunk is not None and chunk.is_last and position <= last.position
        }

    def gone(self, consumer: int, deliveries: Iterable[int], now_ms: int) -> list[Effect]:
        """Skip deliveries whose entries the log no longer has, instead of sending them, and return
        their permits."""
        known = self.consumers.get(consumer)
        passed: list[Position] = []
        for delivery in deliveries:
            flight = None if known is None else known.flights.get(delivery)
            if known is not None and flight is not None:
                passed.append(flight.position)
                self.settling.acknowledge(flight, flight.unacked)
                self.flights.permit(known, flight.unacked.bit_count())
        self.settling.record_passed(passed, Because.GONE)
        return self._effects(now_ms)

    def negative_acknowledge(
        self, consumer: int, items: Iterable[Nack], now_ms: int
    ) -> tuple[list[Effect], list[Outcome]]:
        """Negatively acknowledge deliveries. Where keys are ordered, later deliveries of their keys
        are revoked."""
        known = self.consumers.get(consumer)
        outcomes = []
        failed: dict[Lane, list[tuple[Flight, int | None, str]]] = {}
        for item in items:
            flight = None if known is None else known.flights.get(item.delivery)
            if flight is None or flight.is_settling:
                outcomes.append(Outcome.STALE)
                continue
            outcomes.append(Outcome.DONE)
            of_lane = failed.setdefault(flight.lane, [])
            if all(flight is not other for other, _, _ in of_lane):
                of_lane.append((flight, item.delay_ms, item.reason))
        for lane, flights in failed.items():
            self.totals["negative_acknowledgements"] += len(flights)
            self.flights.fail(lane, flights, now_ms)
        self._count_stale(outcomes)
        return self._effects(now_ms), outcomes

    def give_back(
        self, consumer: int, deliveries: Iterable[int], now_ms: int, *, no_room: bool = False
    ) -> tuple[list[Effect], list[Outcome]]:
        """Return unprocessed deliveries without counting an attempt. With a chunk the rest of its
        message is revoked, and later deliveries of its key. With `no_room`, a consumer returns
        chunks that it has no room for besides other large messages: they are kept back."""
        known = self.consumers.get(consumer)
        outcomes = []
        lanes: dict[Lane, list[Position]] = {}
        rests: dict[tuple[Lane, str], Position] = {}
        for delivery in deliveries:
            flight = None if known is None else known.flights.get(delivery)
            if flight is None or flight.is_settling:
                outcomes.append(Outcome.STALE)
                continue
            outcomes.append(Outcome.DONE)
            lane = flight.lane
            if no_room and self._kept_back(flight, now_ms):
                self.parking.wake(lane)
                self.parking.drop_if_idle(lane)
                continue
            places = lanes.setdefault(lane, [])
            if (chunk := _chunk_of(flight)) is None or chunk.is_last:
                places.append(flight.position)
            else:
                rests[lane, chunk.attempt] = flight.position
            self.flights.give_back(flight)
        for (lane, attempt), position in rests.items():
            last = self.flights.take_back_rest(lane, attempt, position)
            lanes[lane] += [] if last is None else [last]
        for lane, places in lanes.items():
            if self.options.orders_keys and places:
                self.flights.take_back_after(lane, min(places))
            self.parking.wake(lane)
        self.totals["returned"] += outcomes.count(Outcome.DONE)
        self._count_stale(outcomes)
        return self._effects(now_ms), outcomes

    def _kept_back(self, flight: Flight, now_ms: int) -> bool:
        """Keep back a chunk that its consumer has no room for; beyond KEPT_BACK_MAX it fails
        instead. Returns false for a last chunk, and for an entry that is not a chunk."""
        chunk, lane = _chunk_of(flight), flight.lane
        if chunk is None or chunk.is_last:
            return False
        if self.large.is_over(chunk.attempt, flight.position):
            self.settling.acknowledge(flight, 1)
        elif self.parking.kept_back >= KEPT_BACK_MAX:
            self.flights.fail(lane, [(flight, None, "")], now_ms)
        else:
            self.flights.keep_back(flight, chunk.attempt, now_ms)
        return True

    def renew(self, consumer: int, deliveries: Iterable[int], now_ms: int) -> list[Outcome]:
        """Restart the time-outs of deliveries."""
        known = self.consumers.get(consumer)
        outcomes = []
        for delivery in deliveries:
            flight = None if known is None else known.flights.get(delivery)
            if known is None or flight is None:
                outcomes.append(Outcome.STALE)
                continue
            self.flights.renew(known, flight, now_ms)
            outcomes.append(Outcome.DONE)
        return outcomes

    def _count_stale(self, outcomes: Sequence[Outcome]) -> None:
        self.totals["stale"] += outcomes.count(Outcome.STALE)

    # ---- durable effects

    def persisted(self, mark_delete: Position | None, now_ms: int) -> list[Effect]:
        """Complete a Persist; the cursor is at `mark_delete`."""
        returned = self.settling.returned and set(self.settling.returned)
        batch = self.settling.persisted()
        self._brought.difference_update(batch.whole)
        self.totals["acknowledged_entries"] += len(batch.whole)
        for position, in_lane in batch.whole.items():
            if in_lane is not None:
                self._end(position, in_lane, is_return=position in returned)
        for position, (lane, messages, bits) in batch.parts.items():
            if not self.settling.reduce(position, messages, bits):
                self.totals["acknowledged_entries"] += 1
                self.settling.done(position)
                self._brought.discard(position)
                self._end(position, lane, is_return=position in returned)
                continue
            flight = lane.flights.get(position)
            if flight is not None:
                self.flights.acknowledge_part(flight, bits)
        if mark_delete is not None:
            self.acknowledged.advance(mark_delete)
            self.handover.all_joined(self.acknowledged.mark_delete)
        return self._effects(now_ms)

    def recorded(self, now_ms: int) -> list[Effect]:
        """Complete a Record."""
        for lane in self.settling.recorded():
            self.parking.wake(lane)
            self.parking.drop_if_idle(lane)  # failed deliveries may be settled meanwhile
        return self._effects(now_ms)

    def dead_lettered(
        self, position: Position, key: bytes, now_ms: int, because: Because | None = None
    ) -> list[Effect]:
        """Complete a DeadLetter: the letter is durable; or it is given up for a reason, and the
        entry is skipped."""
        lane = self.lanes[key]
        assert lane.dead == position
        lane.dead = None
        self.settling.returned.discard(position)
        if because is None:
            self.totals["dead_lettered"] += 1
            self.settling.acknowledge_entry(position, lane)
        else:
            self.settling.pass_over([position], because, lane)
        if self.options.orders_keys:
            lane.record_unresolved(position)
        if self.options.kind is SubscriptionType.SHARED or lane.is_released:
            lane.is_released = False
            self.out.add(ForgetKey(key))
        else:
            self.out.add(self.gaps.add(key, Gap(position, self.attempts.get(position, 0))))
        self.parking.wake(lane)
        self.parking.drop_if_idle(lane)
        return self._effects(now_ms)

    def release_key(self, key: bytes, now_ms: int) -> list[Effect]:
        """Release a key that is held, or whose messages are all dead-lettered. `key` is that of a
        message, not of a lane."""
        key = self.lane_key(key)
        lane, forgotten = self.lanes.get(key), self.gaps.forget(key)
        self.out.add(forgotten)
        if lane is not None:
            lane.is_released |= forgotten is not None and lane.dead is not None
            self.parking.wake(lane)
        return self._effects(now_ms)

    def held_by(self, letter: Position, key: bytes) -> bytes | None:
        """The lane key that resumes if a dead letter is discarded; None: none does. `key` is that
        of the message."""
        key = self.lane_key(key)
        lane = self.lanes.get(key)
        if lane is not None and lane.dead is not None:  # then it is held behind that one, too
            return None
        return key if self.gaps.holds_behind(key, letter) else None

    def discarded(self, letters: Iterable[tuple[Position, bytes]], now_ms: int) -> list[Effect]:
        """Resume the keys that were held by dead letters that are discarded, durably."""
        for letter, key in letters:
            held = self.held_by(letter, key)
            if held is not None:
                self.out.add(self.gaps.forget(held))
                if (lane := self.lanes.get(held)) is not None:
                    self.parking.wake(lane)
        return self._effects(now_ms)

    def held_behind(self, position: Position) -> bytes | None:
        """The lane key that is held behind a dead letter that came back, and resumes once it is
        acknowledged; None: there is none, or it is dead-lettered again."""
        if position not in self.settling.returned:
            return None
        for key, state in self.keys.items():
            if state.gap.position == position and self.gaps.holds_behind(key, position):
                return key
        return None

    def _end(self, position: Position, lane: Lane, *, is_return: bool) -> None:
        """End what a durably acknowledged entry held up in its key. `is_return`: it is a dead
        letter that came back, and is acknowledged by its consumer."""
        flight = lane.flights.get(position)
        if flight is not None:
            self.flights.land(flight)
        if lane.rare is not None:
            self._end_chunk(lane, lane.rare.chunks.get(position), position)
            lane.rare.forget(position)
        if lane.unresolved and position in lane.unresolved:
            lane.unresolved.remove(position)
        if self.keys and self.gaps.is_beyond(lane.key, position, AfterDeadLetter.CONTINUE):
            self.out.add(self.gaps.forget(lane.key))
        if is_return and self.gaps.holds_behind(lane.key, position):
            self.out.add(self.gaps.forget(lane.key))
        self.parking.wake(lane)
        if not lane.flights:
            self.parking.drop_if_idle(lane)

    def _end_chunk(self, lane: Lane, chunk: Chunk | None, position: Position) -> None:
        """Once the last chunk of a message is durably acknowledged, drop its kept-back chunks: they
        are no longer needed."""
        if chunk is None or not chunk.is_last or lane.rare is None:
            return
        self.large.record_done(chunk.attempt, position)
        if chunk.attempt in lane.rare.kept_back:
            self._drop_kept(lane, chunk.attempt, end=position)

    # ---- time

    def tick(self, now_ms: int) -> list[Effect]:
        """Handle the timers that are due."""
        self.parking.due(now_ms)
        for subject in self.timers.due(now_ms):
            match subject:
                case Consumer():
                    self.flights.time_out(subject, now_ms)
                case Lane():
                    subject.timer_ms = None
                    self.flights.drain_over(subject, now_ms)
                    self.judging.give_up(subject, self.verdicts.take_due(subject, now_ms))
                    self._give_up_unfinished(subject, now_ms)
                    self.parking.wake(subject)
        return self._effects(now_ms)

    def _give_up_unfinished(self, lane: Lane, now_ms: int) -> None:
        """Dead-letter chunks that have been kept back for too long."""
        since_ms = {} if lane.rare is None else lane.rare.kept_since_ms
        for name, since in list(since_ms.items()):
            if since + self.options.unfinished_max_ms > now_ms:
                self.timers.look_at(lane, since + self.options.unfinished_max_ms)
            elif not self.large.is_finished(name):
                assert lane.rare is not None
                self.large.record_dead(name, lane.rare.kept_back[name][0], lane.key)
                self.parking.bring_back(lane, name)

    def _timed_max(self) -> int:
        """The number of timers that may be needed: one for each lane and consumer."""
        return len(self.lanes) + len(self.consumers)

    # ---- effects

    def _effects(self, now_ms: int) -> list[Effect]:
        """Deliver all deliverable entries, and collect the effects."""
        if self.verdicts.back:
            self.judging.judge_again()
        self.delivering.serve(now_ms)
        sent = self.out.flush()
        for consumer, deliveries in sent.items():
            self.totals["delivered_entries"] += len(deliveries)
            self.totals["delivered_messages"] += sum(
                delivery.unacked.bit_count() for delivery in deliveries
            )
            if self.parking.pool is not None:  # a consumer that got nothing comes first next time
                self.consumers[consumer] = self.consumers.pop(consumer)
        self.out.add(self.settling.persist(), self.settling.record(), self.verdicts.ask())
        self._now_ms = now_ms
        if not self.settling.is_full:
            self._scan(now_ms)
            self._read()
        return self.out.take()

    def _read(self) -> None:
        if not self._is_reading and self.flights.takes_more and not self.verdicts.is_full:
            self._is_reading = True
            self.out.add(Read(self.read_position))


def _chunk_of(flight: Flight) -> Chunk | None:
    """The chunk of a delivery; None: it is no chunk."""
    rare = flight.lane.rare
    return None if rare is None else rare.chunks.get(flight.position)
