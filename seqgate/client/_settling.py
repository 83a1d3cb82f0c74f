"""What a consumer asks the service for, until it is answered.

    acknowledge, refuse, ... ──▶ collected ──requests──▶ unanswered ──Settled──▶ tickets

Acknowledgements are collected: they go out when there are many, when somebody says so (`flush`), or
when something follows that must not overtake them: an acknowledgement of everything before, a
refusal, a seek. The rest goes out at once. A request names up to ITEMS_MAX deliveries, and is
answered as a whole, with an outcome for each; while UNANSWERED_MAX of them are unanswered, what
would be sent is collected.

Every ticket that is given here comes out once: answered, or with all that are abandoned when the
stream ends. Only those that nobody waits for may be let go, when the subscription moves.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.client._status import error_of_status
from seqgate.client._unit import Ticket
from seqgate.errors import InternalError, InvalidRequestError, SeqgateError, StaleTokenError

ITEMS_MAX: Final = 10_000
"""How many deliveries one request settles."""

ACKS_MAX: Final = 1_000
"""How many deliveries' acknowledgements are collected before they are sent."""

UNANSWERED_MAX: Final = 64
"""How many requests may be unanswered; then what would be sent is collected."""


class _Item(NamedTuple):
    """One delivery of a request that is to be sent."""

    delivery: int
    ticket: Ticket
    delay_ms: int | None = None


class Settling:
    """See the module. It belongs to one stream at a time: `begin`, `abandon`."""

    def __init__(self) -> None:
        self._epoch = 0
        self._next_request = 1
        self._acks: dict[int, list[Ticket]] = {}  # by delivery; their bits are disjoint
        self._ack_now = False
        self._through: list[_Item] = []
        self._refusals: list[_Item] = []
        self._returns: list[_Item] = []
        self._no_room: list[_Item] = []
        self._renewals: list[_Item] = []
        self._start: pb.Start | None = None  # where to seek to, until that is sent
        self._seeking: Ticket | None = None
        self._unanswered: dict[int, list[list[Ticket]]] = {}

    # ---- what it tells

    @property
    def collected(self) -> int:
        """How many deliveries' acknowledgements are not sent yet."""
        return len(self._acks)

    @property
    def is_seeking(self) -> bool:
        """Whether the subscription is to move, and has not."""
        return self._seeking is not None

    @property
    def is_sent(self) -> bool:
        """Whether nothing is left to be sent."""
        unsent = (self._acks, self._through, self._refusals, self._returns, self._no_room)
        return not (any(unsent) or self._renewals or self._start)

    @property
    def is_settled(self) -> bool:
        """Whether everything that was asked for is answered."""
        return self.is_sent and not self._unanswered

    # ---- what is asked for

    def acknowledge(self, deliveries: Iterable[int], ticket: Ticket) -> None:
        """Acknowledge the ticket's bits of a unit, which are in no other ticket here; or, without a
        unit, all of these deliveries."""
        for delivery in deliveries:
            tickets = self._acks.get(delivery)
            if tickets is None:
                self._acks[delivery] = [ticket]
            else:
                tickets.append(ticket)

    def acknowledge_through(self, delivery: int, ticket: Ticket) -> None:
        """Acknowledge everything before the ticket's unit, and its bits of that."""
        self._through.append(_Item(delivery, ticket))

    def refuse(self, deliveries: Iterable[int], ticket: Ticket, delay_ms: int | None) -> None:
        """End deliveries as failed."""
        self._refusals += [_Item(each, ticket, delay_ms) for each in deliveries]

    def give_back(
        self, deliveries: Iterable[int], ticket: Ticket, *, no_room: bool = False
    ) -> None:
        """End deliveries that have not failed; with `no_room`, chunks that come again when the
        others are done."""
        returns = self._no_room if no_room else self._returns
        returns += [_Item(each, ticket) for each in deliveries]

    def renew(self, deliveries: Iterable[int], ticket: Ticket) -> None:
        """Begin the time-outs of deliveries anew."""
        self._renewals += [_Item(each, ticket) for each in deliveries]

    def seek(self, start: pb.Start, ticket: Ticket) -> None:
        """Move the subscription. The answer comes after that of the subscription, which says from
        where on deliveries count: that may be of another one's seek."""
        assert self._seeking is None
        self._seeking = ticket
        self._start = start

    def flush(self) -> None:
        """Collect acknowledgements no more, until those that are here are sent."""
        self._ack_now = True

    # ---- the stream

    def begin(self, epoch: int) -> None:
        """A stream is open: tokens are of this epoch."""
        self._epoch = epoch

    def abandon(self) -> list[Ticket]:
        """The stream ended. Returns those that get no answer."""
        tickets = dict.fromkeys(ticket for some in self._acks.values() for ticket in some)
        lists = (self._through, self._refusals, self._returns, self._no_room, self._renewals)
        for items in lists:
            tickets |= dict.fromkeys(item.ticket for item in items)
            items.clear()
        for request in self._unanswered.values():
            tickets |= dict.fromkeys(ticket for some in request for ticket in some)
        if self._seeking is not None:
            tickets[self._seeking] = None
        self._acks.clear()
        self._unanswered.clear()
        self._start = self._seeking = None
        return [*tickets]

    def requests(self) -> list[pb.ConsumeRequest]:
        """What is to be sent now, in this order."""
        out: list[pb.ConsumeRequest] = []
        follows = self._through or self._refusals or self._start
        if self._ack_now or follows or len(self._acks) >= ACKS_MAX:
            self._send_acks(out)
        if not self._acks:
            self._send_through(out)
            self._send(self._refusals, out, self._refuse_request)
        self._send(self._returns, out, self._return_request)
        self._send(self._no_room, out, self._no_room_request)
        self._send(self._renewals, out, self._renew_request)
        if self._start is not None and not (self._acks or self._through or self._refusals):
            self._send_seek(self._start, out)
        return out

    def waiters(self, request_id: int) -> Iterator[Any]:
        """Who is told what a request is answered."""
        for tickets in self._unanswered.get(request_id, ()):
            for ticket in tickets:
                yield from ticket.waiters

    def note_settled(self, settled: pb.Settled) -> list[Ticket]:
        """A request is answered. Returns the tickets that have their last answer now."""
        items = self._unanswered.pop(settled.request_id, None)
        if items is None:
            return []
        if not settled.outcomes and not settled.HasField("error"):
            answered = [ticket for some in items for ticket in some if ticket.answer(None)]
        else:
            answered = _failed(settled, items)
        if self._seeking is not None and not self._seeking.left:
            self._seeking = None
        return answered

    def note_sought(self) -> None:
        """The subscription has moved, for this consumer or another one: what was sent before counts
        no more."""
        self._refusals = [item for item in self._refusals if item.ticket.waiters]
        self._returns.clear()
        self._no_room.clear()
        self._renewals = [item for item in self._renewals if item.ticket.waiters]

    # ---- requests

    @property
    def _has_room(self) -> bool:
        return len(self._unanswered) < UNANSWERED_MAX

    def _number(self, items: list[list[Ticket]]) -> int:
        """The number of a request that is sent now, and who waits for its answer."""
        number = self._next_request
        self._next_request += 1
        self._unanswered[number] = items
        return number

    def _send_acks(self, out: list[pb.ConsumeRequest]) -> None:
        while self._acks and self._has_room:
            acks, self._acks = self._acks, {}
            if len(acks) > ITEMS_MAX:
                items = [*acks.items()]
                acks, self._acks = dict(items[:ITEMS_MAX]), dict(items[ITEMS_MAX:])
            request = pb.Acknowledge(
                request_id=self._number([*acks.values()]),
                epoch=self._epoch,
                settlements=[_settlement(number, tickets) for number, tickets in acks.items()],
            )
            out.append(pb.ConsumeRequest(acknowledge=request))
        if not self._acks:
            self._ack_now = False

    def _send_through(self, out: list[pb.ConsumeRequest]) -> None:
        while self._through and self._has_room:
            item = self._through.pop(0)
            unit, bits = item.ticket.unit, item.ticket.bits
            assert unit is not None
            is_batch = unit.source.metadata.HasField("num_messages_in_batch")
            request = pb.AcknowledgeThrough(
                request_id=self._number([[item.ticket]]),
                epoch=self._epoch,
                settlement=pb.Settlement(
                    delivery=item.delivery, indexes=(bits.bit_length() - 1,) if is_batch else ()
                ),
            )
            out.append(pb.ConsumeRequest(acknowledge_through=request))

    def _send(
        self,
        items: list[_Item],
        out: list[pb.ConsumeRequest],
        make: Callable[[int, list[_Item]], pb.ConsumeRequest],
    ) -> None:
        while items and self._has_room:
            some = items[:ITEMS_MAX]
            del items[:ITEMS_MAX]
            out.append(make(self._number([[item.ticket] for item in some]), some))

    def _refuse_request(self, number: int, items: list[_Item]) -> pb.ConsumeRequest:
        refusals = [pb.Refusal(delivery=item.delivery, delay_ms=item.delay_ms) for item in items]
        request = pb.Refuse(request_id=number, epoch=self._epoch, refusals=refusals)
        return pb.ConsumeRequest(refuse=request)

    def _return_request(self, number: int, items: list[_Item]) -> pb.ConsumeRequest:
        deliveries = [item.delivery for item in items]
        request = pb.GiveBack(request_id=number, epoch=self._epoch, deliveries=deliveries)
        return pb.ConsumeRequest(give_back=request)

    def _no_room_request(self, number: int, items: list[_Item]) -> pb.ConsumeRequest:
        request = self._return_request(number, items)
        request.give_back.no_room = True
        return request

    def _renew_request(self, number: int, items: list[_Item]) -> pb.ConsumeRequest:
        deliveries = [item.delivery for item in items]
        request = pb.Renew(request_id=number, epoch=self._epoch, deliveries=deliveries)
        return pb.ConsumeRequest(renew=request)

    def _send_seek(self, start: pb.Start, out: list[pb.ConsumeRequest]) -> None:
        assert self._seeking is not None
        if self._has_room:
            self._start = None
            request = pb.Seek(request_id=self._number([[self._seeking]]), start=start)
            out.append(pb.ConsumeRequest(seek=request))


def stale(text: str = "the delivery counts no more, or is settled already") -> StaleTokenError:
    """What whoever settles something gets that counts no more."""
    return StaleTokenError(text)


def no_such_message() -> InvalidRequestError:
    """What whoever names a message gets that its batch does not have."""
    return InvalidRequestError("the batch has no such message", reason="INVALID_SETTLEMENT")


_ERRORS: Final[dict[int, Callable[[], SeqgateError | None]]] = {
    pb.OUTCOME_UNSPECIFIED: lambda: InternalError("the service gave no outcome"),
    pb.OUTCOME_DONE: lambda: None,
    pb.OUTCOME_STALE: stale,
    pb.OUTCOME_INVALID: no_such_message,
}


def _failed(settled: pb.Settled, items: list[list[Ticket]]) -> list[Ticket]:
    """A request is answered of which not everything was done: the tickets that have their last
    answer now."""
    refusal = error_of_status(settled.error) if settled.HasField("error") else None
    outcomes = settled.outcomes or [pb.OUTCOME_DONE] * len(items)
    answered = []
    for tickets, outcome in zip(items, outcomes, strict=True):
        error = refusal or _ERRORS[outcome]()
        answered += [ticket for ticket in tickets if ticket.answer(error)]
    return answered


def _settlement(delivery: int, tickets: list[Ticket]) -> pb.Settlement:
    """What these tickets acknowledge of a delivery: all that is left of it, or some messages."""
    bits = 0
    for ticket in tickets:
        bits |= ticket.bits
    unit = tickets[0].unit
    if unit is None or bits == unit.unacked:
        return pb.Settlement(delivery=delivery)
    return pb.Settlement(delivery=delivery, indexes=_indexes(bits))


def _indexes(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
