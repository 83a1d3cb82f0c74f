"""A consumer's unanswered requests: the way back from `_inbox.py` to the service.

    add ──▶ collected ──to_send──▶ unanswered ──Settled──▶ tickets

A request names up to ITEMS_MAX deliveries; one answer has an outcome for each. A ticket covers a
unit, or chunks, and counts the answers: it is returned exactly once, by `settled` with the last of
them, or by `abandon`. Only tickets without waiters may be dropped, when the subscription moves.

Acknowledgements are collected until there are ACKS_MAX, `flush` is called, or a request follows
that must not overtake them: a cumulative acknowledgement, a refusal, a seek. All others are sent at
once, while fewer than UNANSWERED_MAX requests are unanswered.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from itertools import repeat
from typing import Any, Final

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._chunk_deliveries import Attempt
from seqgate.client._message import Gap, Received
from seqgate.client._status import error_of_status
from seqgate.errors import InternalError, InvalidRequestError, SeqgateError, StaleTokenError
from seqgate.times import duration
from seqgate.types import Position

ITEMS_MAX: Final = 10_000
"""The most deliveries that one request settles."""

ACKS_MAX: Final = 1_000
"""The most acknowledgements to collect, in deliveries, before they are sent."""

UNANSWERED_MAX: Final = 64
"""The most unanswered requests; further ones are collected."""


@dataclass(slots=True, eq=False)
class Unit:
    """The unit of settlement: an entry, or all chunks of a large message.

    Attributes:
        deliveries: the delivery's number, or one for each chunk.
        first, last: the positions of its first and last entry.
        source: its (last) entry.
        attempts, gap: as in Received.
        body: the chunks of a large message end to end, until they are decoded.
        unsettled: the bits of messages not durably acknowledged.
        waiting: the number of messages not handed out; 0 when the unit is dead.
        renewed_ms: when its time-out was last restarted.
        acked: the bits that the application acknowledged, answered or not.
        is_begun: whether any of its messages was handed out.
        messages: those not handed out, the first one last; None: not decoded yet.
        damage: why it cannot be decoded.
        acks: its unanswered acknowledgements.
    """

    deliveries: tuple[int, ...]
    first: Position
    last: Position
    key: bytes
    source: ledger_pb2.StoredEntry
    attempts: int
    gap: Gap | None
    body: bytes | None
    unsettled: int
    waiting: int
    size_bytes: int
    renewed_ms: int
    damage: SeqgateError | None = None
    acked: int = 0
    is_live: bool = True
    is_begun: bool = False
    messages: list[Received] | None = None
    acks: "list[Ticket]" = field(default_factory=list)

    @property
    def is_between(self) -> bool:
        """Whether messages of it wait, and all that were handed out are acknowledged."""
        if not self.waiting or self.messages is None:
            return False
        waiting = 0
        for message in self.messages:
            waiting |= message.token.bit
        return not self.unsettled & ~self.acked & ~waiting


class Action(IntEnum):
    """What a request does. Unsent requests go out in this order."""

    ACKNOWLEDGE = auto()
    ACKNOWLEDGE_CUMULATIVE = auto()
    NEGATIVE_ACKNOWLEDGE = auto()
    GIVE_BACK = auto()
    GIVE_BACK_NO_ROOM = auto()  # chunks that are redelivered when other messages are complete
    RENEW = auto()
    SEEK = auto()


_BEHIND_ACKS: Final = frozenset(
    (Action.ACKNOWLEDGE_CUMULATIVE, Action.NEGATIVE_ACKNOWLEDGE, Action.SEEK)
)

_ONE_BY_ONE: Final = frozenset((Action.ACKNOWLEDGE_CUMULATIVE, Action.SEEK))


@dataclass(slots=True, eq=False)
class Ticket:
    """A request for a unit, or for chunks.

    Attributes:
        left: the number of answers missing: one per delivery.
        unit, bits: the messages acknowledged or renewed.
        reason: why the messages are refused.
        attempt: the attempt whose chunks are given back.
        guarded: the key that is guarded until the last answer.
        error: the first error among the answers.
    """

    action: Action
    left: int = 1
    waiters: list[Any] = field(default_factory=list)
    unit: Unit | None = None
    bits: int = 0
    delay_ms: int | None = None
    reason: str = ""
    start: common_pb2.Start | None = None
    attempt: Attempt | None = None
    guarded: bytes | None = None
    error: SeqgateError | None = None

    def answer(self, error: SeqgateError | None) -> bool:
        """Count an answer. Returns whether it was the last one."""
        if self.left <= 0:
            return False
        self.left -= 1
        if error is not None:
            self.error = self.error or error
        return self.left == 0


Item = tuple[int, Ticket]
"""A delivery's number, and a ticket that covers it."""


class Requests:
    """Collects tickets, sends them, and matches the answers, until the stream ends."""

    def __init__(self) -> None:
        self.epoch = 0
        self.seeking: Ticket | None = None
        self.acks: dict[int, Ticket] = {}
        """Unsent acknowledgements, by delivery."""
        self._is_flushing = False
        self._unsent: dict[Action, list[Item]] = {
            action: [] for action in Action if action is not Action.ACKNOWLEDGE
        }
        self._throughs = self._unsent[Action.ACKNOWLEDGE_CUMULATIVE]
        self._refusals = self._unsent[Action.NEGATIVE_ACKNOWLEDGE]
        self._seeks = self._unsent[Action.SEEK]
        self._next_id = 1
        self._unanswered: dict[int, list[Ticket]] = {}

    @property
    def is_sent(self) -> bool:
        return not self.acks and not any(self._unsent.values())

    @property
    def is_answered(self) -> bool:
        return not self._unanswered and self.is_sent

    def add(self, deliveries: Iterable[int], ticket: Ticket) -> None:
        if ticket.action is Action.ACKNOWLEDGE:
            for delivery in deliveries:
                self.acks[delivery] = ticket
        else:
            self._unsent[ticket.action] += [(delivery, ticket) for delivery in deliveries]

    def seek(self, ticket: Ticket) -> None:
        """Collect a seek. Its answer follows a Sought; others' seeks cause a Sought as well."""
        self.seeking = ticket
        self.add((0,), ticket)

    def flush(self) -> None:
        """Have the next `to_send` include the collected acknowledgements."""
        self._is_flushing = True

    def to_send(self) -> list[pb.ConsumeRequest]:
        out: list[pb.ConsumeRequest] = []
        is_due = self._is_flushing or len(self.acks) >= ACKS_MAX
        if is_due or self._throughs or self._refusals or self._seeks:
            self._send_acks(out)
        for action, items in self._unsent.items():
            if items and not self._must_wait(action):
                self._send(action, items, out)
        return out

    def waiters(self, request_id: int) -> Iterator[Any]:
        for ticket in self._unanswered.get(request_id, ()):
            yield from ticket.waiters

    def settled(self, settled: pb.Settled) -> list[Ticket]:
        """Take an answer. Returns the tickets for which it was the last one."""
        tickets = self._unanswered.get(settled.request_id)
        if tickets is None:
            return []
        errors: Iterable[SeqgateError | None] = repeat(None, len(tickets))
        if settled.outcomes or settled.HasField("error"):
            errors = _errors(settled, len(tickets))
        del self._unanswered[settled.request_id]
        pairs = zip(tickets, errors, strict=True)
        answered = [ticket for ticket, error in pairs if ticket.answer(error)]
        if self.seeking is not None and not self.seeking.left:
            self.seeking = None
        return answered

    def sought(self) -> None:
        """The subscription has moved, and earlier deliveries are invalid: drop unsent requests
        without waiters. The others are sent, and answered as stale."""
        for items in (self._refusals, self._unsent[Action.RENEW]):
            items[:] = [item for item in items if item[1].waiters]
        self._unsent[Action.GIVE_BACK].clear()
        self._unsent[Action.GIVE_BACK_NO_ROOM].clear()

    def abandon(self) -> list[Ticket]:
        """Forget everything: the stream ended. Returns the tickets that get no answer."""
        tickets = dict.fromkeys(self.acks.values())
        for items in self._unsent.values():
            tickets |= dict.fromkeys(ticket for _, ticket in items)
            items.clear()
        for unanswered in self._unanswered.values():
            tickets |= dict.fromkeys(unanswered)
        self.acks.clear()
        self._unanswered.clear()
        self.seeking = None
        return [*tickets]

    def _must_wait(self, action: Action) -> bool:
        """Whether requests that this action must not overtake are unsent."""
        if action not in _BEHIND_ACKS:
            return False
        return bool(self.acks) or (action is Action.SEEK and bool(self._throughs or self._refusals))

    @property
    def _has_room(self) -> bool:
        return len(self._unanswered) < UNANSWERED_MAX

    def _send_acks(self, out: list[pb.ConsumeRequest]) -> None:
        if self.acks and self._has_room:
            items = [*self.acks.items()]
            self._send(Action.ACKNOWLEDGE, items, out)
            self.acks = dict(items)
        if not self.acks:
            self._is_flushing = False

    def _send(self, action: Action, items: list[Item], out: list[pb.ConsumeRequest]) -> None:
        items_max = 1 if action in _ONE_BY_ONE else ITEMS_MAX
        while items and self._has_room:
            some = items[:items_max]
            del items[:items_max]
            if action is Action.ACKNOWLEDGE:
                some.sort(key=_place)
            out.append(_request(action, self._next_id, self.epoch, some))
            self._unanswered[self._next_id] = [ticket for _, ticket in some]
            self._next_id += 1


def _request(
    action: Action, request_id: int, epoch: int, items: Sequence[Item]
) -> pb.ConsumeRequest:
    match action:
        case Action.ACKNOWLEDGE:
            acks = pb.Acknowledge(request_id=request_id, epoch=epoch)
            _fill(acks, items)
            return pb.ConsumeRequest(acknowledge=acks)
        case Action.ACKNOWLEDGE_CUMULATIVE:
            ((delivery, ticket),) = items
            assert ticket.unit is not None
            is_batch = ticket.unit.source.metadata.HasField("num_messages_in_batch")
            indexes = (ticket.bits.bit_length() - 1,) if is_batch else ()
            through = pb.AcknowledgeCumulative(
                request_id=request_id,
                epoch=epoch,
                settlement=pb.Settlement(delivery=delivery, indexes=indexes),
            )
            return pb.ConsumeRequest(acknowledge_cumulative=through)
        case Action.NEGATIVE_ACKNOWLEDGE:
            refusals = [
                pb.NegativeAcknowledgement(
                    delivery=delivery,
                    delay=None if ticket.delay_ms is None else duration(ticket.delay_ms),
                    reason=ticket.reason,
                )
                for delivery, ticket in items
            ]
            refuse = pb.NegativeAcknowledge(
                request_id=request_id, epoch=epoch, negative_acknowledgements=refusals
            )
            return pb.ConsumeRequest(negative_acknowledge=refuse)
        case Action.GIVE_BACK | Action.GIVE_BACK_NO_ROOM:
            give_back = pb.GiveBack(
                request_id=request_id,
                epoch=epoch,
                deliveries=[delivery for delivery, _ in items],
                no_room=action is Action.GIVE_BACK_NO_ROOM,
            )
            return pb.ConsumeRequest(give_back=give_back)
        case Action.RENEW:
            deliveries = [delivery for delivery, _ in items]
            renew = pb.Renew(request_id=request_id, epoch=epoch, deliveries=deliveries)
            return pb.ConsumeRequest(renew=renew)
        case Action.SEEK:
            ((_, ticket),) = items
            return pb.ConsumeRequest(seek=pb.Seek(request_id=request_id, start=ticket.start))


def _place(item: Item) -> tuple[bool, int]:
    """Where an acknowledgement stands among others: parts of batches, then runs of deliveries."""
    delivery, ticket = item
    unit = ticket.unit
    return unit is None or ticket.bits == unit.unsettled, delivery


def _fill(acks: pb.Acknowledge, items: Sequence[Item]) -> None:
    """Name deliveries, which are in the order of `_place`."""
    following, run = -1, None
    for item in items:
        is_whole, delivery = _place(item)
        if not is_whole:
            acks.settlements.add(delivery=delivery, indexes=indexes(item[1].bits))
        elif run is not None and delivery == following:
            run.count += 1
        else:
            run = acks.runs.add(first=delivery, count=1)
        following = delivery + 1


def indexes(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def stale(
    text: str = "stale token: the delivery is settled already, or was taken back",
) -> StaleTokenError:
    return StaleTokenError(text)


def no_such_message() -> InvalidRequestError:
    return InvalidRequestError(
        "the batch has no message with this index", reason="INVALID_SETTLEMENT"
    )


def _unknown() -> InternalError:
    return InternalError("the service returned an outcome that this client does not know")


_ERRORS: Final[dict[int, Callable[[], SeqgateError | None]]] = {
    pb.SETTLE_OUTCOME_DONE: lambda: None,
    pb.SETTLE_OUTCOME_STALE: stale,
    pb.SETTLE_OUTCOME_INVALID: no_such_message,
}


def _errors(settled: pb.Settled, count: int) -> list[SeqgateError | None]:
    """The outcome of each item of a request that was not done completely."""
    if settled.HasField("error"):
        return [error_of_status(settled.error)] * count
    if len(settled.outcomes) != count:
        text = f"the service returned {len(settled.outcomes)} outcomes for {count} deliveries"
        return [InternalError(text)] * count
    return [_ERRORS.get(outcome, _unknown)() for outcome in settled.outcomes]
