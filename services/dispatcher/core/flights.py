"""Connected consumers, their deliveries in flight, and how these are returned.

    taken ──launch──▶ flight, of a lane and of a consumer ──land──▶ settled, or returned
    joins, leaves ──▶ selector ──▶ moved slots ──▶ queues of their new owners
                                        └──▶ keys in flight elsewhere: they drain

A flight stays in its lane while a consumer may have it, and at its consumer while that one is
connected: an entry acknowledged by a consumer that left stays in the lane until the acknowledgement
is durable. Unacknowledged messages are counted per consumer and in total. At a consumer's limit its
deliveries pause, and at the subscription's limit all first deliveries, until half are settled.

A delivery that is refused, times out, is returned unprocessed or loses its consumer lands, and
waits ahead of entries that were not delivered yet. Where keys are ordered, later deliveries of its
key are revoked. Only a delivery that was being processed has failed; the others are returned.

A hand-over only moves a slot to the queue of its new owner: a key in flight elsewhere is thereby
draining, and a key that returns to its owner stops draining.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from seqgate.services.dispatcher.core.effects import Assigned, Drain, How, Options, Outgoing
from seqgate.services.dispatcher.core.lane import (
    Chunk,
    Consumer,
    Flight,
    Lane,
    Large,
    Reason,
    Returned,
    Slot,
    Timers,
)
from seqgate.services.dispatcher.core.parking import Parking
from seqgate.services.dispatcher.core.selectors import Selector, SlotRange, Snapshot, moves
from seqgate.services.dispatcher.core.settling import Settling
from seqgate.types import Position


class Flights:
    """See the module.

    Attributes:
        consumers: the connected ones; those of a pool are served in this order.
        unacked: the number of messages that are not durably acknowledged.
        handed_over: for each key that finished draining, when it began; the shell empties it.
        is_blocked: whether first deliveries pause, from the limit of `unacked` down to half of it.
    """

    def __init__(
        self,
        options: Options,
        parking: Parking,
        settling: Settling,
        timers: Timers,
        out: Outgoing,
        totals: dict[str, int],
        first_delivery: int,
    ) -> None:
        self.consumers: dict[int, Consumer] = {}
        self.unacked = 0
        self.handed_over: list[int] = []
        self.is_blocked = False
        self.next_delivery = first_delivery
        self._options = options
        self._parking = parking
        self._settling = settling
        self._timers = timers
        self._out = out
        self._totals = totals

    @property
    def takes_more(self) -> bool:
        """Whether any consumer has room for more deliveries."""
        return any(
            each.has_room and (each.unfinished or not self.is_blocked)
            for each in self.consumers.values()
        )

    def add(self, consumer: Consumer) -> None:
        self.consumers[consumer.id] = consumer
        consumer.queue.takers.append(consumer)

    def remove(self, number: int) -> list[Flight]:
        """Remove a consumer, and wake keys that waited for it. Returns its unsettled flights."""
        gone = self.consumers.pop(number)
        self._parking.owner_gone(gone)
        for each in gone.large.values():
            if each.lane.reason is Reason.DRAINING:
                self._parking.wake(each.lane)
        self._count_unacked(-gone.unacked)
        flights = [flight for flight in gone.flights.values() if not flight.is_settling]
        gone.timer_ms = None
        return flights

    def permit(self, consumer: Consumer, messages: int) -> None:
        """Add permits, and wake keys with the rest of a large message that the consumer began."""
        consumer.permits += messages
        if consumer.unfinished and consumer.has_room:
            for each in consumer.large.values():
                if each.lane.reason is Reason.DRAINING:
                    self._parking.wake(each.lane)

    def launch(
        self,
        lane: Lane,
        position: Position,
        messages: int,
        consumer: Consumer,
        *,
        unacked: int,
        now_ms: int,
    ) -> Flight:
        deadline_ms = now_ms + consumer.ack_timeout_ms if consumer.ack_timeout_ms else None
        flight = Flight(
            self.next_delivery,
            consumer.id,
            lane,
            position,
            messages,
            unacked,
            now_ms,
            deadline_ms,
        )
        self.next_delivery += 1
        if deadline_ms is not None:
            self._timers.look_at(consumer, deadline_ms)
        lane.holder = consumer.id
        lane.flights[position] = flight
        if lane.rare is not None:
            self._count_large(consumer, flight, lane.rare.chunks.get(position), 1)
        consumer.flights[flight.delivery] = flight
        cost = unacked.bit_count()
        consumer.permits -= cost
        self._count(consumer, cost)
        return flight

    def land(self, flight: Flight) -> None:
        """End a delivery, settled or not."""
        lane = flight.lane
        landed = lane.flights.pop(flight.position)
        assert landed is flight, "an entry waits before it is delivered again"
        if not lane.flights:
            if lane.draining_since_ms is not None:
                self.handed_over.append(lane.draining_since_ms)
            lane.holder = lane.draining_since_ms = None
        consumer = self.consumers.get(flight.consumer)
        if consumer is not None and consumer.flights.pop(flight.delivery, None) is not None:
            if lane.rare is not None:
                self._count_large(consumer, flight, lane.rare.chunks.get(flight.position), -1)
            self._count(consumer, -flight.unacked.bit_count())

    def acknowledge_part(self, flight: Flight, bits: int) -> None:
        """Count messages (bits) of a batch as durably acknowledged."""
        consumer = self.consumers.get(flight.consumer)
        if consumer is not None:
            self._count(consumer, -(flight.unacked & bits).bit_count())
        flight.unacked &= ~bits

    # ---- time-outs

    def renew(self, consumer: Consumer, flight: Flight, now_ms: int) -> None:
        """Restart a time-out. The delivery moves to the end: all time-outs have the same length."""
        if flight.deadline_ms is not None:
            flight.deadline_ms = now_ms + consumer.ack_timeout_ms
            consumer.flights[flight.delivery] = consumer.flights.pop(flight.delivery)

    def late(self, consumer: Consumer, now_ms: int) -> list[Flight]:
        """The deliveries that have timed out, in the order of the log."""
        late = []
        for flight in consumer.flights.values():
            assert flight.deadline_ms is not None
            if flight.deadline_ms > now_ms:
                break
            if not flight.is_settling:
                late.append(flight)
        late.sort(key=lambda flight: flight.position)
        return late

    def look_again(self, consumer: Consumer, now_ms: int) -> None:
        """Set the timer for the next time-out."""
        for flight in consumer.flights.values():
            assert flight.deadline_ms is not None
            if flight.deadline_ms > now_ms:
                self._timers.look_at(consumer, flight.deadline_ms)
                return

    # ---- counts

    def _count_large(
        self, consumer: Consumer, flight: Flight, chunk: Chunk | None, chunks: int
    ) -> None:
        """Count a delivery that begins (1) or ends (-1), if it is a chunk."""
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

    def _count(self, consumer: Consumer, messages: int) -> None:
        consumer.unacked += messages
        limit = self._options.consumer_unacked_max
        if limit and consumer.unacked >= limit:
            consumer.is_blocked = True
        elif consumer.unacked * 2 <= limit:
            consumer.is_blocked = False
        self._count_unacked(messages)

    def _count_unacked(self, messages: int) -> None:
        self.unacked += messages
        limit = self._options.unacked_max
        if limit and self.unacked >= limit:
            self.is_blocked = True
        elif self.is_blocked and self.unacked * 2 < limit:
            self.is_blocked = False
            self._parking.wake_all(Reason.SUBSCRIPTION_LIMIT)

    # ---- returned deliveries

    def _revoke(self, flight: Flight) -> bool:
        """Make a delivery stale; if it was not sent, return its permits. Returns whether it was."""
        was_sent = self._out.revoke(flight)
        if not was_sent:
            self.consumers[flight.consumer].permits += flight.unacked.bit_count()
        return was_sent

    def give_back(self, flight: Flight, not_before_ms: int = 0) -> None:
        """End a delivery and make its entry wait again."""
        self.land(flight)
        returned = Returned(flight.position, flight.messages, not_before_ms)
        is_return = flight.position in self._settling.returned
        self._parking.put_back(flight.lane, returned, is_return=is_return)

    def keep_back(self, flight: Flight, attempt: str, now_ms: int) -> None:
        """Keep back a chunk for which its consumer has no room besides other large messages."""
        lane = flight.lane
        self.land(flight)
        if lane.unresolved and flight.position in lane.unresolved:
            lane.unresolved.remove(flight.position)
        self._parking.keep_back(lane, flight.position, attempt, now_ms)

    def take_back_after(self, lane: Lane, position: Position) -> None:
        """Revoke a key's deliveries after a position, so that earlier entries come first."""
        for flight in list(lane.flights.values()):
            if flight.position > position and not flight.is_settling:
                self._totals["returned"] += self._revoke(flight)
                self.give_back(flight)

    def take_back_rest(self, lane: Lane, attempt: str, position: Position) -> Position | None:
        """Revoke later chunks of a large message. Returns where the last one is, if in flight."""
        last = None
        chunks = {} if lane.rare is None else lane.rare.chunks
        for flight in list(lane.flights.values()):
            chunk = chunks.get(flight.position)
            if chunk is None or chunk.attempt != attempt or flight.position <= position:
                continue
            if chunk.is_last:
                last = flight.position
            if not flight.is_settling:
                self._totals["returned"] += self._revoke(flight)
                self.give_back(flight)
        return last

    def take_back(self, lane: Lane, attempt: str, start: Position | None = None) -> bool:
        """Revoke the chunks of a large message, from a position on. Returns whether there were
        any."""
        chunks = {} if lane.rare is None else lane.rare.chunks
        taken = [
            flight
            for flight in lane.flights.values()
            if not flight.is_settling
            and flight.position in chunks
            and chunks[flight.position].attempt == attempt
            and (start is None or flight.position >= start)
        ]
        for flight in taken:
            self._totals["returned"] += self._revoke(flight)
            self.give_back(flight)
        return bool(taken)

    def fail(
        self,
        lane: Lane,
        flights: Sequence[tuple[Flight, int | None, str]],
        now_ms: int,
        how: How = How.REFUSED,
    ) -> None:
        """Return failed deliveries of a key, each with a delay in ms (None: the options' delay),
        and its consumer's reason."""
        for flight, delay_ms, reason in flights:
            consumer = self.consumers[flight.consumer].name
            if delay_ms is None:
                delay_ms = self._delay_ms(self._settling.attempts.get(flight.position, 0))
            self.give_back(flight, not_before_ms=now_ms + delay_ms)
            self._settling.record_failure(flight, how, consumer, now_ms, reason)
            if self._options.orders_keys:
                lane.record_unresolved(flight.position)
        if self._options.orders_keys:
            self.take_back_after(lane, min(flight.position for flight, _, _ in flights))
        self._parking.wake(lane)

    def _delay_ms(self, attempts: int) -> int:
        return min(self._options.retry_first_ms << min(attempts, 30), self._options.retry_max_ms)

    def lose(self, flights: Iterable[Flight], consumer: str, now_ms: int) -> None:
        """Land the deliveries of a crashed consumer. Those that it may have been processing count
        as failed: the first of each key where keys are ordered, and otherwise all."""
        lanes: dict[Lane, list[Flight]] = {}
        for flight in flights:
            lanes.setdefault(flight.lane, []).append(flight)
        for lane, lost in lanes.items():
            lost.sort(key=lambda flight: flight.position)
            for flight in lost:
                self.give_back(flight)
            for flight in lost[:1] if self._options.orders_keys else lost:
                self._settling.record_failure(flight, How.LOST, consumer, now_ms)
            self._totals["lost_consumers"] += len(lost)
            self._parking.wake(lane)

    def time_out(self, consumer: Consumer, now_ms: int) -> None:
        """Fail a consumer's deliveries that have timed out, and set its timer for the next."""
        consumer.timer_ms = None
        for flight in self.late(consumer, now_ms):
            if flight.delivery in consumer.flights:  # else an earlier one revoked it
                self._revoke(flight)
                self._totals["timed_out"] += 1
                self.fail(flight.lane, [(flight, 0, "")], now_ms, How.TIMED_OUT)
        self.look_again(consumer, now_ms)

    def drain_over(self, lane: Lane, now_ms: int) -> None:
        """Take a key from a consumer that no longer owns it, once the drain deadline has passed.
        Its entries have not failed: the consumer may be processing them."""
        since_ms, deadline_ms = lane.draining_since_ms, self._options.drain_deadline_ms
        if since_ms is None or not deadline_ms:
            return
        if now_ms < since_ms + deadline_ms:
            self._timers.look_at(lane, since_ms + deadline_ms)
            return
        flights = [flight for flight in lane.flights.values() if not flight.is_settling]
        flights.sort(key=lambda flight: flight.position)
        for flight in flights:
            self._revoke(flight)
            self.give_back(flight)
        self._totals["drained"] += len(flights)


NO_ENTRY = Position(0, -1)
"""A position before every entry."""


class HandOver:
    """Changes of the owners of slots, and the notices to their old and new owners."""

    def __init__(
        self,
        options: Options,
        selector: Selector,
        parking: Parking,
        flights: Flights,
        timers: Timers,
        out: Outgoing,
    ) -> None:
        self._options = options
        self._selector = selector
        self._parking = parking
        self._flights = flights
        self._timers = timers
        self._out = out
        self._placement: Snapshot = selector.snapshot()

    def reassign(self, now_ms: int, joined: Iterable[int] = ()) -> None:
        """Move slots to their new owners, and tell joined and affected consumers their slots."""
        before, self._placement = self._placement, self._selector.snapshot()
        consumers = self._flights.consumers
        told: dict[int, list[SlotRange]] = {each: [] for each in joined}
        moved: list[Slot] = []
        for (first, last), old, new in moves(before, self._placement):
            told.update((each, []) for each in (old, new) if each in consumers)
            moved += self._parking.slots_between(first, last)
        self._parking.hand_over(moved)
        self._start_draining(moved, now_ms)
        for run, owner in self._placement:
            if owner in told:
                told[owner].append(run)
        self._out.add(*(Assigned(consumer, tuple(ranges)) for consumer, ranges in told.items()))

    def _start_draining(self, moved: Iterable[Slot], now_ms: int) -> None:
        wanted: dict[int, list[int]] = {}
        for lane in chain.from_iterable(slot.lanes for slot in moved):
            if lane.reason is not Reason.READY:
                self._parking.wake(lane)
            holder = None if lane.holder is None else self._flights.consumers.get(lane.holder)
            if holder is None or not self._options.orders_keys:
                continue
            if lane.slot.queue is holder.queue:
                lane.draining_since_ms = None
            elif lane.draining_since_ms is None:
                lane.draining_since_ms = now_ms
                if self._options.drain_deadline_ms:
                    self._timers.look_at(lane, now_ms + self._options.drain_deadline_ms)
                flights = lane.flights.values()
                open_ = [flight.delivery for flight in flights if not flight.is_settling]
                wanted.setdefault(holder.id, []).extend(open_)
        self._out.add(*(Drain(each, tuple(some)) for each, some in wanted.items() if some))

    # ---- the classic rule

    def record_joined_at(
        self, consumer: Consumer, read_position: Position | None, mark_delete: Position | None
    ) -> None:
        """Under the classic rule, let a consumer wait for entries read before it joined."""
        classic = self._options.classic_join and self._options.orders_keys
        if classic and self._flights.consumers:
            consumer.joined_at = None if read_position == mark_delete else read_position

    def all_joined(self, mark_delete: Position | None) -> None:
        """Resume consumers that are alone, or whose earlier entries are all acknowledged."""
        consumers = self._flights.consumers
        reached = mark_delete or NO_ENTRY
        changed = False
        for consumer in consumers.values():
            joined_at = consumer.joined_at
            if joined_at is not None and (reached >= joined_at or len(consumers) == 1):
                consumer.joined_at = None
                changed = True
        if changed:
            self._parking.wake_all(Reason.JOINING)
