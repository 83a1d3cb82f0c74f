"""Which units count, and how they end.

    add ──▶ live ──refuse, give_back──▶ dead          the service is told
             │  ╲──forget─────────────▶ dead          it knows
             └──acknowledge──▶ asked ──Settled──▶ dead, when that was all of it

A unit that is dead is in no index, and nothing of it waits. Whoever waits for something is told
exactly once: `take_resolved`.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from seqgate.client._received import Token
from seqgate.client._receiver_queue import ReceiverQueue
from seqgate.client._settling import Settling, stale
from seqgate.client._unit import Ticket, Unit, What
from seqgate.errors import SeqgateError, StaleTokenError, UnavailableError
from seqgate.types import Position

Resolved = tuple[Any, SeqgateError | None]
"""Who waits for something, and what became of it; None: it is done."""


class LiveUnits:
    """See the module. It puts units into the queue and takes dead ones out of it, and asks what is
    to be asked about them."""

    def __init__(self, queue: ReceiverQueue, settling: Settling) -> None:
        self._queue = queue
        self._settling = settling
        self._epoch = 0
        self._units: dict[int, Unit] = {}  # by each of their deliveries
        self._by_position: dict[Position, Unit] = {}  # by their last entry
        self._resolved: list[Resolved] = []

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._by_position.values())

    def begin(self, epoch: int) -> None:
        """A stream is open: tokens are of this epoch."""
        self._epoch = epoch

    def add(self, unit: Unit) -> None:
        """A unit is here."""
        for delivery in unit.deliveries:
            self._units[delivery] = unit
        self._by_position[unit.last] = unit
        self._queue.add(unit)

    def get(self, delivery: int) -> Unit | None:
        """The unit that has a delivery."""
        return self._units.get(delivery)

    def counts(self, delivery: int) -> bool:
        """Whether a delivery is one of a unit that is live."""
        return delivery in self._units

    def named(self, token: Token) -> Unit | None:
        """The unit of a token; None: it counts no more."""
        return self._units.get(token.delivery) if token.epoch == self._epoch else None

    def at(self, position: Position) -> Unit | None:
        """The unit that ends there."""
        return self._by_position.get(position)

    def tell(self, waiter: Any, error: SeqgateError | None) -> None:
        """Somebody need not wait any more."""
        self._resolved.append((waiter, error))

    def take_resolved(self) -> list[Resolved]:
        """What was answered since the last call."""
        resolved, self._resolved = self._resolved, []
        return resolved

    # ---- what is asked about them

    def acknowledge(self, unit: Unit, bits: int, waiter: Any) -> bool:
        """Messages of a unit are done with. Returns whether that is new: who asks again waits for
        the same answer."""
        newly = bits & unit.unacked & ~unit.asked
        if not newly:
            same = [ticket for ticket in unit.tickets.values() if ticket.bits & bits]
            if same:
                same[-1].waiters.append(waiter)
            else:
                self.tell(waiter, None)
            return False
        unit.asked |= newly
        ticket = Ticket(What.ACKNOWLEDGED, len(unit.deliveries), [waiter], unit, newly)
        unit.tickets[newly] = ticket
        self._settling.acknowledge(unit.deliveries, ticket)
        return True

    def refuse(self, unit: Unit, delay_ms: int | None, waiters: list[Any]) -> None:
        """A unit failed."""
        ticket = Ticket(What.REFUSED, len(unit.deliveries), waiters)
        self._settling.refuse(unit.deliveries, ticket, delay_ms)
        self._queue.guard(unit.key, unit.first, ticket)
        self._end(unit)

    def give_back(self, unit: Unit, *, gone: Collection[int] = ()) -> None:
        """A unit goes back, but for deliveries that are gone already."""
        left = [each for each in unit.deliveries if each not in gone]
        if left:
            ticket = Ticket(What.RETURNED, len(left))
            self._settling.give_back(left, ticket)
            self._queue.guard(unit.key, unit.first, ticket)
        self._end(unit)

    def renew(self, unit: Unit, now_ms: int, waiters: list[Any]) -> None:
        """A unit needs more time."""
        unit.renewed_ms = now_ms
        ticket = Ticket(What.RENEWED, len(unit.deliveries), waiters, unit)
        self._settling.renew(unit.deliveries, ticket)

    # ---- how they end

    def conclude(self, answered: Iterable[Ticket]) -> None:
        """These have their last answer: do what follows for units, and tell who waits."""
        for ticket in answered:
            error = ticket.error
            if ticket.guarded is not None:
                self._queue.lift_guard(ticket)
            match ticket.what:
                case What.ACKNOWLEDGED:
                    self._note_acknowledged(ticket)
                case What.ACKNOWLEDGED_THROUGH if error is None:
                    self._note_acknowledged_through(ticket)
                case What.RENEWED if isinstance(error, StaleTokenError):
                    if ticket.unit is not None:
                        self._end(ticket.unit)
            self._resolved += [(waiter, error) for waiter in ticket.waiters]

    def abandon(self, tickets: Iterable[Ticket]) -> None:
        """These get no answer: the stream ended."""
        text = "the stream ended before the answer came"
        for ticket in tickets:
            is_seek = ticket.what is What.SOUGHT
            error = UnavailableError(text) if is_seek else stale(text)
            for waiter in ticket.waiters:
                self.tell(waiter, error)

    def forget(self) -> None:
        """The service counts none of them any more."""
        for unit in self._by_position.values():
            unit.is_live = False
            unit.waiting = 0
        self._units.clear()
        self._by_position.clear()
        self._queue.clear()

    def _note_acknowledged(self, ticket: Ticket) -> None:
        unit = ticket.unit
        if unit is None:
            return
        unit.tickets.pop(ticket.bits, None)
        if ticket.error is None:
            unit.unacked &= ~ticket.bits
            if not unit.unacked:
                self._end(unit)
        elif isinstance(ticket.error, StaleTokenError):
            self._end(unit)
        else:
            unit.asked &= ~ticket.bits

    def _note_acknowledged_through(self, ticket: Ticket) -> None:
        last = ticket.unit
        assert last is not None
        for unit in list(self._by_position.values()):
            if unit.last < last.last:
                self._end(unit)
        last.asked |= ticket.bits
        last.unacked &= ~ticket.bits
        if not last.unacked:
            self._end(last)

    def _end(self, unit: Unit) -> None:
        """A unit counts no more."""
        if not unit.is_live:
            return
        unit.is_live = False
        self._queue.drop(unit)
        for delivery in unit.deliveries:
            del self._units[delivery]
        if self._by_position.get(unit.last) is unit:
            del self._by_position[unit.last]
