"""What is in flight: who is connected, what each has, and how much that is.

    taken ──launch──▶ flight, of a lane and of a consumer ──land──▶ settled, or returned

A flight is in its lane as long as it may be at somebody, and at its consumer as long as that one is
connected: what a consumer that is gone has acknowledged stays in the lane until that is durable.
What is unacknowledged is counted for each consumer and for all; who has too much gets nothing more
until half of it is settled.
"""

from itertools import count

from seqgate.types import Position
from services.dispatcher.core.effects import Options
from services.dispatcher.core.lane import Chunk, Consumer, Flight, Lane, Large, Reason
from services.dispatcher.core.parking import Parking
from services.dispatcher.core.timers import Timers


class Flights:
    """See the module.

    Attributes:
        consumers: who is connected; of a pool, who comes first is served first.
        unacked: how many messages are unacknowledged, as far as is durable.
        handed_over: since when keys drained that drain no more, for who wants to know; whoever
            reads it empties it.
        is_blocked: whether there are so many that none is delivered for the first time: as many as
            may be, or that many before, and still half of them.
    """

    def __init__(
        self, options: Options, parking: Parking, timers: Timers, first_delivery: int
    ) -> None:
        self.consumers: dict[int, Consumer] = {}
        self.unacked = 0
        self.handed_over: list[int] = []
        self.is_blocked = False
        self._options = options
        self._parking = parking
        self._timers = timers
        self._numbers = count(first_delivery)

    @property
    def next_delivery(self) -> int:
        """A number that is higher than that of any delivery so far."""
        return next(self._numbers)

    @property
    def takes_more(self) -> bool:
        """Whether anybody takes more than there is."""
        return any(
            each.has_room and (each.unfinished or not self.is_blocked)
            for each in self.consumers.values()
        )

    def add(self, consumer: Consumer) -> None:
        """Somebody connected."""
        self.consumers[consumer.id] = consumer
        consumer.queue.takers.append(consumer)

    def remove(self, number: int) -> list[Flight]:
        """Somebody is gone. Returns what is in flight there, but for what it has settled."""
        gone = self.consumers.pop(number)
        self._parking.owner_gone(gone)
        self._count_unacked(-gone.unacked)
        flights = [flight for flight in gone.flights.values() if not flight.is_settling]
        gone.timer_ms = None
        return flights

    def permit(self, consumer: Consumer, messages: int) -> None:
        """Somebody takes so many more. Where it has a large message in part and does not own the
        key, the rest may have waited for that."""
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
        """An entry is on its way to a consumer."""
        deadline_ms = now_ms + consumer.ack_timeout_ms if consumer.ack_timeout_ms else None
        flight = Flight(
            next(self._numbers),
            consumer.id,
            lane,
            position,
            messages,
            unacked,
            now_ms,
            deadline_ms,
        )
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
        """An entry is not in flight any more."""
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

    def settle_part(self, flight: Flight, bits: int) -> None:
        """Some of a batch's messages are acknowledged, durably."""
        consumer = self.consumers.get(flight.consumer)
        if consumer is not None:
            self._count(consumer, -(flight.unacked & bits).bit_count())
        flight.unacked &= ~bits

    # ---- time-outs

    def renew(self, consumer: Consumer, flight: Flight, now_ms: int) -> None:
        """A delivery times out later: after all others, since the time is the same for all."""
        if flight.deadline_ms is not None:
            flight.deadline_ms = now_ms + consumer.ack_timeout_ms
            consumer.flights[flight.delivery] = consumer.flights.pop(flight.delivery)

    def late(self, consumer: Consumer, now_ms: int) -> list[Flight]:
        """What has timed out, in the order of the log."""
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
        """Set the timer for what times out next."""
        for flight in consumer.flights.values():
            assert flight.deadline_ms is not None
            if flight.deadline_ms > now_ms:
                self._timers.look_at(consumer, flight.deadline_ms)
                return

    # ---- counts

    def _count_large(
        self, consumer: Consumer, flight: Flight, chunk: Chunk | None, chunks: int
    ) -> None:
        """One of a consumer's deliveries is in flight, or not any more; it may be a chunk."""
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
