"""Who owns what, and what happens when that changes.

    joins, leaves ──▶ selector ──▶ moved slots ──▶ queues of their new owners
                                        └──▶ keys in flight elsewhere: they drain

Every slot goes to the queue of whoever owns it now, and that is all there is to a hand-over: a key
that is in flight elsewhere drains by that very fact, and one that comes back drains no more.
"""

from collections.abc import Iterable
from itertools import chain

from seqgate.types import Position
from services.dispatcher.core.effects import Assigned, Drain, Options
from services.dispatcher.core.flights import Flights
from services.dispatcher.core.lane import Consumer, Reason, Slot
from services.dispatcher.core.outgoing import Outgoing
from services.dispatcher.core.parking import Parking
from services.dispatcher.core.selectors import Selector, SlotRange, Snapshot, moves
from services.dispatcher.core.timers import Timers

NO_ENTRY = Position(0, -1)
"""Before every entry."""


class HandOver:
    """See the module."""

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
        """Consumers changed. Who joined is told what it owns, and be it nothing."""
        before, self._placement = self._placement, self._selector.snapshot()
        consumers = self._flights.consumers
        told: dict[int, list[SlotRange]] = {each: [] for each in joined}
        moved: list[Slot] = []
        for (first, last), old, new in moves(before, self._placement):
            told.update((each, []) for each in (old, new) if each in consumers)
            moved += self._parking.slots_between(first, last)
        self._parking.hand_over(moved)
        self._note_draining(moved, now_ms)
        for run, owner in self._placement:
            if owner in told:
                told[owner].append(run)
        self._out.add(*(Assigned(consumer, tuple(ranges)) for consumer, ranges in told.items()))

    def _note_draining(self, moved: Iterable[Slot], now_ms: int) -> None:
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

    def note_joined_at(
        self, consumer: Consumer, read_position: Position | None, mark_delete: Position | None
    ) -> None:
        """By the classic rule, who joins waits until what was read before it is acknowledged."""
        classic = self._options.classic_join and self._options.orders_keys
        if classic and self._flights.consumers:
            consumer.joined_at = None if read_position == mark_delete else read_position

    def all_joined(self, mark_delete: Position | None) -> None:
        """Whoever waited for what was read before it joined, and need not any more, goes on."""
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
