"""What comes back: it was refused, timed out, was returned unprocessed, or its consumer is gone.

    in flight ──▶ land ──▶ returned, of its lane ──▶ delivered again, before what was not yet

Where keys come in order, what failed comes first: later deliveries of its key are taken back, and
count no more. Of these only what was being worked on has failed; the rest just returns.
"""

from collections.abc import Iterable, Sequence

from seqgate.types import Position
from services.dispatcher.core.effects import Options
from services.dispatcher.core.flights import Flights
from services.dispatcher.core.lane import Consumer, Flight, Lane, Returned
from services.dispatcher.core.outgoing import Outgoing
from services.dispatcher.core.parking import Parking
from services.dispatcher.core.settling import Settling
from services.dispatcher.core.timers import Timers


class Returning:
    """See the module."""

    def __init__(
        self,
        options: Options,
        parking: Parking,
        flights: Flights,
        settling: Settling,
        timers: Timers,
        out: Outgoing,
        totals: dict[str, int],
    ) -> None:
        self._options = options
        self._parking = parking
        self._flights = flights
        self._settling = settling
        self._timers = timers
        self._out = out
        self._totals = totals

    def give_back(self, flight: Flight, not_before_ms: int = 0) -> None:
        """An entry is not in flight any more, and waits again."""
        self._flights.land(flight)
        returned = Returned(flight.position, flight.messages, not_before_ms)
        self._parking.put_back(flight.lane, returned)

    def keep_back(self, flight: Flight, attempt: str, now_ms: int) -> None:
        """A chunk is not in flight any more: its consumer has no room for it beside other large
        messages. These go on; it waits for the turn of the last chunk, where its message is."""
        lane = flight.lane
        self._flights.land(flight)
        if lane.unresolved and flight.position in lane.unresolved:
            lane.unresolved.remove(flight.position)
        self._parking.keep_back(lane, flight.position, attempt, now_ms)

    def take_back_after(self, lane: Lane, position: Position) -> None:
        """Later deliveries of a key count no more: what is before them comes first."""
        for flight in list(lane.flights.values()):
            if flight.position > position and not flight.is_settling:
                self._out.revoke(flight)
                self._totals["returned"] += 1
                self.give_back(flight)

    def take_back_rest(self, lane: Lane, attempt: str, position: Position) -> Position | None:
        """Later chunks of a large message count no more, either. Returns where the last of them is,
        if it was delivered."""
        last = None
        chunks = {} if lane.rare is None else lane.rare.chunks
        for flight in list(lane.flights.values()):
            chunk = chunks.get(flight.position)
            if chunk is None or chunk.attempt != attempt or flight.position <= position:
                continue
            if chunk.is_last:
                last = flight.position
            if not flight.is_settling:
                self._out.revoke(flight)
                self._totals["returned"] += 1
                self.give_back(flight)
        return last

    def take_back(self, lane: Lane, attempt: str) -> bool:
        """What is in flight of a large message counts no more. Returns whether anything was."""
        chunks = {} if lane.rare is None else lane.rare.chunks
        taken = [
            flight
            for flight in lane.flights.values()
            if not flight.is_settling
            and flight.position in chunks
            and chunks[flight.position].attempt == attempt
        ]
        for flight in taken:
            self._out.revoke(flight)
            self.give_back(flight)
        self._totals["returned"] += len(taken)
        return bool(taken)

    def fail(self, lane: Lane, flights: Sequence[tuple[Flight, int | None]], now_ms: int) -> None:
        """Deliveries of a key failed, and wait for so long, or, None, as long as the options
        say."""
        for flight, delay_ms in flights:
            if delay_ms is None:
                delay_ms = self._delay_ms(self._settling.attempts.get(flight.position, 0))
            self.give_back(flight, not_before_ms=now_ms + delay_ms)
            self._settling.note_failure(flight)
            if self._options.orders_keys:
                lane.note_unresolved(flight.position)
        if self._options.orders_keys:
            self.take_back_after(lane, min(flight.position for flight, _ in flights))
        self._parking.wake(lane)

    def _delay_ms(self, attempts: int) -> int:
        return min(self._options.retry_first_ms << min(attempts, 30), self._options.retry_max_ms)

    def lose(self, flights: Iterable[Flight]) -> None:
        """A consumer died, and this was in flight there: whatever it may have been working on
        counts as failed. Where keys come in order, that is the first message of each."""
        lanes: dict[Lane, list[Flight]] = {}
        for flight in flights:
            lanes.setdefault(flight.lane, []).append(flight)
        for lane, lost in lanes.items():
            lost.sort(key=lambda flight: flight.position)
            for flight in lost:
                self.give_back(flight)
            for flight in lost[:1] if self._options.orders_keys else lost:
                self._settling.note_failure(flight)
            self._totals["lost_consumers"] += len(lost)
            self._parking.wake(lane)

    def time_out(self, consumer: Consumer, now_ms: int) -> None:
        """The first deliveries of a consumer may have timed out."""
        consumer.timer_ms = None
        for flight in self._flights.late(consumer, now_ms):
            if flight.delivery in consumer.flights:  # none before it took it back
                self._out.revoke(flight)
                self._totals["timed_out"] += 1
                self.fail(flight.lane, [(flight, 0)], now_ms)
        self._flights.look_again(consumer, now_ms)

    def drain_over(self, lane: Lane, now_ms: int) -> None:
        """A consumer that does not own a key any more may have had its time to acknowledge it. What
        is taken from it has not failed: it may have been processed well all the while."""
        since_ms, deadline_ms = lane.draining_since_ms, self._options.drain_deadline_ms
        if since_ms is None or not deadline_ms:
            return
        if now_ms < since_ms + deadline_ms:
            self._timers.look_at(lane, since_ms + deadline_ms)
            return
        flights = [flight for flight in lane.flights.values() if not flight.is_settling]
        flights.sort(key=lambda flight: flight.position)
        for flight in flights:
            self._out.revoke(flight)
            self.give_back(flight)
        self._totals["drained"] += len(flights)
