"""Picks the next key to deliver, its entry, and the consumer that gets it.

    queue ──▶ slot, in its turn ──▶ lane, in its turn ──▶ an entry ──▶ in flight
                                      └─ withheld, for a reason, until it is woken

The owner of a slot gets its keys' messages, unless a key is in flight at another consumer, one of
its messages is being retried, or another rule withholds it: then that key alone waits. Each rule is
a line of `_withheld`, and must wake the keys that it withheld when it ends.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from seqgate.services.dispatcher.core.effects import (
    AfterDeadLetter,
    Because,
    DeadLetter,
    Delivery,
    Entry,
    Gap,
    Options,
    Outgoing,
    Why,
)
from seqgate.services.dispatcher.core.flights import Flights
from seqgate.services.dispatcher.core.lane import Consumer, Gathering, Lane, Reason, Returned
from seqgate.services.dispatcher.core.large import LargeMessages
from seqgate.services.dispatcher.core.parking import Parking
from seqgate.services.dispatcher.core.positions import Parked
from seqgate.services.dispatcher.core.settling import Settling
from seqgate.services.dispatcher.core.verdicts import reason_for
from seqgate.types import Position

TURN_ENTRIES: Final = 16
"""Limit of entries of a key in one turn, and of turns of a consumer before another's."""

KEPT_BACK_MAX: Final = 20_000
"""Limit of kept-back chunks, some 400 bytes each; chunks returned beyond it count as failed."""


# Delivery._make without a Python call per entry.
_delivery: Final[Callable[[Iterable[Any]], Delivery]] = partial(tuple.__new__, Delivery)


class Delivering:
    def __init__(
        self,
        options: Options,
        parking: Parking,
        flights: Flights,
        settling: Settling,
        large: LargeMessages,
        out: Outgoing,
    ) -> None:
        self._options = options
        self._orders_keys = options.orders_keys
        self._parking = parking
        self._flights = flights
        self._settling = settling
        self._gaps = settling.gaps
        self._timers = parking.timers
        self._out = out
        self._large = large

    # ---- entries that wait for nobody

    @property
    def may_pass(self) -> bool:
        """Whether entries may be delivered as they are read: no entry failed or is dead-lettered,
        and so may withhold others. Reading changes none of this."""
        settling = self._settling
        return not (settling.attempts or settling.doomed or self._gaps.keys)

    def passes(self, entry: Entry, key: bytes, now_ms: int) -> bool:
        """Deliver an accepted entry, which is not a chunk, as it is read, if none of its key waits
        and its consumer has room: parking it and taking it again would do the same, and is half of
        an entry's price. Returns whether it was delivered."""
        parking = self._parking
        lane = parking.lanes.get(key)
        slot = parking.slot_of(key) if lane is None else lane.slot
        queue = slot.queue
        if queue.slots or queue.is_choked or slot.lag is not None or len(queue.takers) != 1:
            return False
        (consumer,) = queue.takers
        if (
            consumer.permits <= 0
            or consumer.is_blocked
            or consumer.gathering is not None
            or consumer.joined_at is not None
            or self._flights.is_blocked
            or entry.deliver_at_ms > now_ms
            or parking.delays.postponed
        ):
            return False
        if lane is None:
            lane = parking.add_lane(key, slot)
        elif (
            not lane.is_free
            or (lane.holder is not None and lane.holder != consumer.id)
            or 0 < self._options.max_in_flight_per_key <= len(lane.flights)
        ):
            return False
        self._deliver(lane, entry.position, entry.messages, consumer, now_ms)
        return True

    # ---- entries that wait

    def serve(self, now_ms: int) -> None:
        """Deliver all deliverable entries."""
        unserved = list(self._flights.consumers.values())
        while unserved:  # in a pool, each consumer has a turn before any has another
            unserved = [each for each in unserved if self._serve(each, now_ms)]

    def _serve(self, consumer: Consumer, now_ms: int) -> bool:
        """Serve a consumer for TURN_ENTRIES turns at most. Returns whether there may be more."""
        slots = consumer.queue.slots
        turns = TURN_ENTRIES
        while consumer.has_room:
            if consumer.gathering is not None:
                self._offer(consumer.gathering.lane, consumer, now_ms)
                continue
            if not slots:
                return False
            if not turns:
                return True
            turns -= 1
            slot = slots.popleft()
            lane = slot.take_turn()
            if lane is not None:
                self._offer(lane, consumer, now_ms)
            if slot.ready:
                slots.append(slot)
            else:
                slot.queued = False
                self._parking.drop_idle_slot(slot)
        return False

    def _offer(self, lane: Lane, consumer: Consumer, now_ms: int) -> None:
        """Deliver up to TURN_ENTRIES entries of a key, until a rule withholds it."""
        parking = self._parking
        for _ in range(TURN_ENTRIES):
            head = lane.head(hurries=lane.slot.queue.is_choked and not self._orders_keys)
            if head is None:
                consumer.gathering = None
                if not lane.flights:
                    parking.drop_if_idle(lane)
                return
            if self._skip_undeliverable(lane, head.position):
                parking.take(lane, head)
                continue
            if lane.rare is not None and (lane.rare.kept_back or consumer.gathering is not None):
                reason = self._gather(lane, head, consumer, now_ms)
                if reason is Reason.READY:
                    continue
                if reason is not None:
                    self._withhold(lane, consumer, reason, now_ms)
                    return
            target = self._target(lane, consumer)
            if target is None:
                self._withhold(lane, consumer, Reason.DRAINING, now_ms)
                return
            if target is consumer and not consumer.has_room:
                break
            reason = self._withheld(lane, head, target, now_ms)
            if reason is not None:
                self._withhold(lane, consumer, reason, now_ms)
                return
            if self._may_be_dead(lane) and self._is_dead(lane, head.position):
                if self._take_back(lane, head.position):
                    continue
                parking.take(lane, head)
                consumer.gathering = None
                self._dead_letter(lane, head, now_ms)
                return
            if lane.undecided is not None and head.position in lane.undecided.states:
                if self._orders_keys:
                    reason = reason_for(lane.undecided.states[head.position])
                    self._withhold(lane, consumer, reason, now_ms)
                    return
                consumer.gathering = None
                parking.set_aside(lane, head)
                continue
            parking.take(lane, head)
            self._deliver(lane, head.position, head.messages, target, now_ms)
            if consumer.gathering is not None and self._is_last(lane, head.position):
                consumer.gathering = None
        if consumer.gathering is None or not consumer.has_room:  # else `_serve` continues with it
            parking.wake(lane)

    def _skip_undeliverable(self, lane: Lane, position: Position) -> bool:
        """Acknowledge a chunk of an aborted attempt, and skip a useless one. Returns whether the
        entry needs no delivery: it was one of these, or was acknowledged while it waited."""
        if self._settling.is_over(position):
            return True
        if self._is_over(lane, position):
            self._settling.acknowledge_entry(position, lane)
            return True
        if self._is_useless(lane, position):
            self._settling.pass_over([position], Because.HEADLESS, lane)
            return True
        return False

    def _withhold(self, lane: Lane, consumer: Consumer, reason: Reason, now_ms: int) -> None:
        consumer.gathering = None
        self._parking.withhold(lane, reason, now_ms)

    def _target(self, lane: Lane, owner: Consumer) -> Consumer | None:
        """The consumer of a key's next entry: the owner, or the one that has the first chunks of
        its large message. None: the latter has no permits; its next permit wakes the key."""
        if lane.rare is None or lane.holder is None:
            return owner
        holder = self._flights.consumers.get(lane.holder, owner)
        if holder is owner or not lane.is_amid_message(holder):
            return owner
        return holder if holder.has_room else None

    def _is_over(self, lane: Lane, position: Position) -> bool:
        """Whether an entry is a chunk of an aborted attempt: it is part of no message."""
        chunk = None if lane.rare is None else lane.rare.chunks.get(position)
        return chunk is not None and self._large.is_over(chunk.attempt, position)

    def _is_useless(self, lane: Lane, position: Position) -> bool:
        """Whether an entry is a chunk whose first one was acknowledged meanwhile. A chunk that
        failed too often is not: it follows the first to the dead letter topic."""
        chunk = None if lane.rare is None else lane.rare.chunks.get(position)
        if chunk is None or not self._large.is_headless(chunk, position):
            return False
        return not self._settling.failed_beyond(self._options.redeliveries_max, position)

    def _is_last(self, lane: Lane, position: Position) -> bool:
        chunk = None if lane.rare is None else lane.rare.chunks.get(position)
        return chunk is None or chunk.is_last

    def _gather(
        self, lane: Lane, head: Parked | Returned, consumer: Consumer, now_ms: int
    ) -> Reason | None:
        """Keep back the next entry of a key, a chunk (READY), unless its message is being
        delivered. With the last chunk, begin to deliver the whole message ahead of everything else
        (READY), once none of it is in flight (until then, the reason). None: deliver the entry like
        any other."""
        rare, parking = lane.rare, self._parking
        assert rare is not None
        chunk = rare.chunks.get(head.position)
        if chunk is None or consumer.gathering == (lane, chunk.attempt):
            return None
        if self._large.is_dead(chunk):  # its chunks are not kept back
            return None
        chunks = (rare.chunks.get(position) for position in lane.flights)
        in_flight = any(each is not None and each.attempt == chunk.attempt for each in chunks)
        if chunk.attempt not in rare.kept_back and (in_flight or chunk.is_last):
            return None
        if chunk.is_last:
            if in_flight:
                return Reason.RETRY
            parking.bring_back(lane, chunk.attempt)
            consumer.gathering = Gathering(lane, chunk.attempt)
            return Reason.READY
        is_undecided = lane.undecided is not None and head.position in lane.undecided.states
        if is_undecided or parking.kept_back >= KEPT_BACK_MAX:
            return None
        parking.take(lane, head)
        parking.keep_back(lane, head.position, chunk.attempt, now_ms)
        return Reason.READY

    def _withheld(
        self, lane: Lane, head: Parked | Returned, consumer: Consumer, now_ms: int
    ) -> Reason | None:
        """Why the next entry of a key may not be delivered; None: it may."""
        options, position, rare = self._options, head.position, lane.rare
        is_amid = rare is not None and lane.is_amid_message(consumer)
        if lane.recording:
            return Reason.RECORDING
        if lane.dead is not None:
            return Reason.DEAD_LETTERING
        if (
            self._gaps.keys
            and self._gaps.is_beyond(lane.key, position, AfterDeadLetter.HOLD)
            and not self._is_rest_of_letter(lane, position)
        ):
            return Reason.HELD
        if self._orders_keys:
            if lane.unresolved and not is_amid and lane.is_behind_unresolved(position):
                return Reason.RETRY
            if lane.holder is not None and lane.holder != consumer.id:
                return Reason.DRAINING
        if rare is not None and rare.delays.get(position, 0) > now_ms:
            self._timers.look_at(lane, rare.delays[position])
            return Reason.DELAYED
        if isinstance(head, Returned):
            if head.not_before_ms > now_ms:
                self._timers.look_at(lane, head.not_before_ms)
                return Reason.RETRY_DELAY
        elif self._flights.is_blocked and not consumer.unfinished:
            return Reason.SUBSCRIPTION_LIMIT
        elif lane.slot.queue.is_choked and not lane.returned and not is_amid:
            return Reason.RETURNED_LIMIT
        limit = options.max_in_flight_per_key
        if limit and len(lane.flights) >= limit and not is_amid:
            return Reason.IN_FLIGHT_LIMIT
        if consumer.joined_at is not None and position > consumer.joined_at and not is_amid:
            return Reason.JOINING
        return None

    def _is_rest_of_letter(self, lane: Lane, position: Position) -> bool:
        """Whether a chunk follows the first of its message to the dead letter topic, or back, even
        though that one holds the key: else the message would stay incomplete until the key is
        released."""
        chunks = {} if lane.rare is None else lane.rare.chunks
        chunk = chunks.get(position)
        if chunk is None or not chunk.number:
            return False
        gap = self._gaps.gap(lane.key)
        if position in self._settling.returned and gap is not None:
            held = chunks.get(gap.position)  # a later one, after a release in between
            is_of_gap = held is not None and held.attempt == chunk.attempt
            if is_of_gap or self._large.is_rest_of(chunk, gap.position):
                return True
        redeliveries_max = self._options.redeliveries_max
        return self._large.is_dead(chunk) or self._settling.failed_beyond(
            redeliveries_max, position
        )

    def _may_be_dead(self, lane: Lane) -> bool:
        settling = self._settling
        known = settling.attempts or settling.doomed or self._gaps.keys
        return bool(known) or lane.rare is not None

    def _is_dead(self, lane: Lane, position: Position) -> bool:
        if self._gaps.keys and self._gaps.is_beyond(lane.key, position, AfterDeadLetter.TAIL):
            return True
        chunk = None if lane.rare is None else lane.rare.chunks.get(position)
        if chunk is not None and self._large.is_dead(chunk):
            return True
        return self._settling.failed_beyond(self._options.redeliveries_max, position)

    def _why_dead(self, lane: Lane, position: Position) -> Why:
        """Why an entry `_is_dead`."""
        limit = self._options.redeliveries_max
        if limit is not None and self._settling.attempts.get(position, 0) > limit:
            return Why.REDELIVERIES
        if self._gaps.is_beyond(lane.key, position, AfterDeadLetter.TAIL):
            return Why.TAIL
        is_chunk = lane.rare is not None and position in lane.rare.chunks
        return Why.LARGE_MESSAGE if is_chunk else Why.GIVEN_UP

    def _take_back(self, lane: Lane, position: Position) -> bool:
        """Dead-letter all of a chunk's message: revoke its chunks in flight, since the rest will
        not follow, and bring back its kept-back ones. Returns whether there were any."""
        chunk = None if lane.rare is None else lane.rare.chunks.get(position)
        if chunk is None:
            return False
        assert lane.rare is not None
        self._large.record_dead(chunk.attempt, position, lane.key)
        is_kept = chunk.attempt in lane.rare.kept_back
        if is_kept:
            self._parking.bring_back(lane, chunk.attempt)
        return self._flights.take_back(lane, chunk.attempt) or is_kept

    def _dead_letter(self, lane: Lane, head: Parked | Returned, now_ms: int) -> None:
        position, messages = head.position, head.messages
        why, large = self._why_dead(lane, position), None
        if lane.rare is not None:
            chunk = lane.rare.chunks.get(position)
            large = None if chunk is None else self._large.letter_of(chunk)
            lane.rare.forget(position)
        if large is not None:
            self._gaps.record_chunk(position, large.first)
        lane.dead = position
        attempts, after = self._settling.attempts.get(position, 0), self._gaps.after(lane.key)
        failures = self._settling.failures(position)
        state = self._gaps.with_gap(lane.key, Gap(position, attempts))
        acknowledged = (1 << messages) - 1 & ~self._settling.left(position, messages)
        about = (attempts, after, why, failures, acknowledged, state, large)
        self._out.add(DeadLetter(position, lane.key, *about))
        self._parking.withhold(lane, Reason.DEAD_LETTERING, now_ms)

    def _deliver(
        self, lane: Lane, position: Position, messages: int, consumer: Consumer, now_ms: int
    ) -> None:
        settling = self._settling
        lane.last_reason = Reason.READY
        unacked = settling.left(position, messages)
        attempts = settling.attempts.get(position, 0) if settling.attempts else 0
        flight = self._flights.launch(
            lane, position, messages, consumer, unacked=unacked, now_ms=now_ms
        )
        gap = self._gaps.gap(lane.key) if self._gaps.keys else None
        number, deadline_ms = flight.delivery, flight.deadline_ms
        about = (number, position, messages, unacked, attempts, deadline_ms, gap)
        self._out.deliver(consumer.id, _delivery(about))
