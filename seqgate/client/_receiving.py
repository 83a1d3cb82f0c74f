"""What a consumer was sent and owes an answer for: a machine without a socket.

    Deliveries ──▶ assembly ──▶ queue ──take──▶ handed out ──ack, nack──▶ asked ──Settled──▶ gone
                  (chunks)      │   ▲
                                ▼   │
                                aside

What is settled together is a unit: an entry, which may be a batch, or all chunks of a large
message. A unit is live until it is settled, refused, returned, or revoked; nothing of it is handed
out after that, and its tokens are refused here.

A unit is put aside while its key is busy (somebody works on an earlier message, and asked that the
key be held), or guarded: an earlier message of the key was refused or returned, and the service has
not answered yet. Until then it revokes what it had sent of the key; the rest goes on.

Permits follow from three counts:

    granted and not used  +  sent and not handed out  <=  what the queue holds

Chunks of an incomplete message are in neither count: their bytes are bounded by the assembly.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from operator import attrgetter
from typing import Any, Final, NamedTuple, cast

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._assembler import (
    Assembled,
    Assembler,
    AssemblyLimits,
    Dropped,
    DropReason,
    Headless,
    Piece,
)
from seqgate.client._codec import Message, checked_payload, decode_entry, decode_large
from seqgate.client._status import error_of_status
from seqgate.client._subscribing import Incomplete, RetryPolicy, position_of, sticky_key
from seqgate.errors import (
    InternalError,
    InvalidRequestError,
    SeqgateError,
    StaleTokenError,
    UnavailableError,
)
from seqgate.message_id import MessageId
from seqgate.types import Position

ITEMS_MAX: Final = 10_000
"""How many deliveries one request settles."""

ACKS_MAX: Final = 1_000
"""How many deliveries' acknowledgements are collected before they are sent."""

UNANSWERED_MAX: Final = 64
"""How many requests may be unanswered; then what would be sent is collected."""

EXPECTED_BYTES: Final = 64 * 1024
"""How large a message is thought to be before the first has come."""

_FINAL: Final = frozenset(
    (DropReason.ABORTED, DropReason.RESTARTED, DropReason.DUPLICATE, DropReason.CORRUPT)
)


class Token(NamedTuple):
    """Names a message of a delivery: the subscription's epoch, the delivery's number, and of a
    batch the message's index, or -1. It is good for one consumer, until the message is settled, or
    the delivery counts no more."""

    epoch: int
    delivery: int
    batch_index: int


class Gap(NamedTuple):
    """A message that is missing in a key because it went to the dead letter topic.

    Attributes:
        position: where it is in its topic.
        attempts: how often it was delivered.
    """

    position: Position
    attempts: int


@dataclass(frozen=True, slots=True)
class Received(Message):
    """A message as a consumer gets it.

    Attributes:
        attempts: how often it was delivered before, to anybody, and failed.
        gap: what is missing in its key before it; None: nothing is.
        token: what its acknowledgement names.
    """

    attempts: int = 0
    gap: Gap | None = None
    token: Token = Token(0, 0, -1)


class Resolved(NamedTuple):
    """What became of what somebody waits for; None: it is done."""

    waiter: Any
    error: SeqgateError | None


@dataclass(frozen=True, slots=True)
class ReceiverLimits:
    """How much a consumer takes before it is handed out.

    Attributes:
        messages: how many messages, 1 to 1,000,000. A batch that begins within comes whole.
        size_bytes: of how many bytes together permits are granted.
        ack_timeout_ms: after what time the service counts a delivery as failed; 0: never.
    """

    messages: int = 1_000
    size_bytes: int = 64 * 1024 * 1024
    ack_timeout_ms: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.messages <= 1_000_000:
            raise ValueError("a receiver queue holds 1 to 1,000,000 messages")
        if self.size_bytes < 1:
            raise ValueError("a receiver queue holds at least 1 byte")
        if self.ack_timeout_ms and not 100 <= self.ack_timeout_ms <= 86_400_000:
            raise ValueError("an acknowledgement's time-out is 0.1 to 86,400 s")


@dataclass(slots=True, eq=False)
class _Unit:
    """What is settled together.

    Attributes:
        deliveries: the numbers: one, or of a large message one for each chunk.
        first, last: where it begins and ends.
        source: its (last) entry; body: of a large message, all chunks end to end.
        unacked, asked: a bit for each message that is not acknowledged, and that is to be.
        waiting: how many messages are not handed out.
        messages: those that are not handed out, once they are decoded.
        damage: why it cannot be handed out.
        renewed_ms: when its time-out began anew.
    """

    deliveries: tuple[int, ...]
    first: Position
    last: Position
    key: bytes
    source: pb.Delivery
    body: bytes | None
    unacked: int
    waiting: int
    size_bytes: int
    renewed_ms: int
    asked: int = 0
    is_live: bool = True
    is_begun: bool = False
    messages: deque[Received] | None = None
    damage: SeqgateError | None = None
    tickets: "dict[int, _Ticket]" = field(default_factory=dict)


class _What(Enum):
    """What somebody waits for."""

    ACKNOWLEDGED = auto()
    ACKNOWLEDGED_THROUGH = auto()
    REFUSED = auto()
    RETURNED = auto()
    RENEWED = auto()
    SOUGHT = auto()


@dataclass(slots=True, eq=False)
class _Ticket:
    """Something that was asked for, until all its answers are here: how many are left.

    Attributes:
        waiters: who is told.
        unit, bits: what is acknowledged.
        attempt: of chunks that go back.
        guarded: the key that is guarded until then.
    """

    what: _What
    left: int
    waiters: list[Any] = field(default_factory=list)
    unit: _Unit | None = None
    bits: int = 0
    attempt: tuple[str, str] | None = None
    guarded: bytes | None = None
    error: SeqgateError | None = None


@dataclass(slots=True)
class _Ack:
    """Messages of one delivery (bits) that are acknowledged, for these."""

    unit: _Unit
    bits: int = 0
    tickets: list[_Ticket] = field(default_factory=list)


class _Item(NamedTuple):
    """One delivery of a request that is to be sent."""

    delivery: int
    ticket: _Ticket
    delay_ms: int | None = None


class _Held(NamedTuple):
    """A chunk in the assembly."""

    delivery: int
    attempt: tuple[str, str]
    key: bytes


class Receiving:
    """See the module. Mutable, synchronous, one owner.

    After each call the owner sends `requests()`, tells those in `take_resolved()`, and reports
    `take_dropped()`.

    Args:
        topic: its full name.
        is_ordered: whether a key's messages come in order.
        is_one_key: whether the whole topic is one key.
    """

    def __init__(
        self,
        topic: str,
        *,
        is_ordered: bool,
        is_one_key: bool,
        limits: ReceiverLimits,
        assembly: AssemblyLimits,
        incomplete: Incomplete,
        retry: RetryPolicy | None,
    ) -> None:
        self.dropped: Final = Counter[DropReason]()
        """How many chunks were let go, by reason."""
        self.is_paused = False
        self.epoch = 0
        self._topic = topic
        self._is_ordered = is_ordered
        self._is_one_key = is_one_key
        self._limits = limits
        self._incomplete = incomplete
        self._retry = retry
        self._is_connected = False
        self._is_leaving = False
        self._next_request = 1

        self._units: dict[int, _Unit] = {}  # live ones, by each of their deliveries
        self._by_position: dict[Position, _Unit] = {}  # by their last entry
        self._queue: deque[_Unit] = deque()
        self._aside: dict[bytes, deque[_Unit]] = {}
        self._resumable: deque[bytes] = deque()  # keys with something aside that may go on
        self._busy: set[bytes] = set()
        self._guards: dict[bytes, dict[_Ticket, Position]] = {}
        self._buffered = 0
        self._buffered_bytes = 0
        self._outstanding = 0  # permits that are not used; a batch may make it negative
        self._expected_bytes = EXPECTED_BYTES

        self._assembler = Assembler(assembly)
        self._chunks: dict[Position, _Held] = {}
        self._held: dict[int, Position] = {}  # the same, by delivery
        self._returning: Counter[tuple[str, str]] = Counter()  # attempts, while chunks go back

        self._acks: dict[int, _Ack] = {}
        self._ack_now = False
        self._through: list[_Item] = []
        self._refusals: list[_Item] = []
        self._returns: list[_Item] = []
        self._renewals: list[_Item] = []
        self._seek: pb.Start | None = None
        self._seeking: _Ticket | None = None
        self._unanswered: dict[int, list[list[_Ticket]]] = {}
        self._resolved: list[Resolved] = []
        self._reports: list[Dropped] = []

    # ---- what it tells

    @property
    def buffered(self) -> int:
        """How many messages are here and not handed out."""
        return self._buffered

    @property
    def outstanding(self) -> int:
        """How many permits are granted and not used."""
        return self._outstanding

    @property
    def is_assembling(self) -> bool:
        """Whether chunks of incomplete messages are held."""
        return bool(self._chunks)

    @property
    def unacked(self) -> int:
        """How many deliveries are handed out and neither settled nor dead."""
        return sum(unit.is_begun for unit in self._by_position.values())

    @property
    def collected(self) -> int:
        """How many deliveries' acknowledgements are not sent yet."""
        return len(self._acks)

    @property
    def is_settled(self) -> bool:
        """Whether everything that was asked for is answered."""
        return self.is_sent and not self._unanswered

    @property
    def is_sent(self) -> bool:
        """Whether nothing is left to be sent, but for permits."""
        unsent = self._acks or self._through or self._refusals or self._returns or self._renewals
        return not (unsent or self._seek)

    def take_resolved(self) -> list[Resolved]:
        """What was answered since the last call."""
        resolved, self._resolved = self._resolved, []
        return resolved

    def take_dropped(self) -> list[Dropped]:
        """Which chunks were let go since the last call."""
        reports, self._reports = self._reports, []
        return reports

    # ---- the stream

    def subscribed(self, epoch: int) -> None:
        """A stream is open, and has sent nothing yet."""
        self.epoch = epoch
        self._is_connected = True
        self._is_leaving = False

    def disconnected(self) -> None:
        """The stream ended: its tokens are dead, and everything comes again on the next."""
        self._is_connected = False
        seeking = self._seeking
        tickets = dict.fromkeys(ticket for ack in self._acks.values() for ticket in ack.tickets)
        for items in (self._through, self._refusals, self._returns, self._renewals):
            tickets |= dict.fromkeys(item.ticket for item in items)
            items.clear()
        for request in self._unanswered.values():
            tickets |= dict.fromkeys(ticket for some in request for ticket in some)
        if seeking is not None:
            tickets[seeking] = None
        self._acks.clear()
        self._unanswered.clear()
        self._seek = self._seeking = None
        for ticket in tickets:
            error: SeqgateError = _stale("the stream ended before the answer came")
            if ticket is seeking:
                error = UnavailableError("the stream ended before the answer came")
            self._resolved += [Resolved(waiter, error) for waiter in ticket.waiters]
        self._forget_everything()

    def receive(self, response: pb.ConsumeResponse, now_ms: int) -> None:
        """The service said something."""
        match response.WhichOneof("response"):
            case "deliveries":
                if not self._is_leaving:
                    for delivery in response.deliveries.deliveries:
                        self._note_delivery(delivery, now_ms)
            case "settled":
                self._note_settled(response.settled)
            case "revoked":
                self._note_revoked(response.revoked.deliveries)
            case "moved":
                self._note_moved(response.moved.deliveries)
            case "sought":
                self._note_sought()

    def requests(self) -> list[pb.ConsumeRequest]:
        """What is to be sent now, in this order. Acknowledgements go before what follows them."""
        if not self._is_connected:
            return []
        out: list[pb.ConsumeRequest] = []
        follows = self._through or self._refusals or self._seek
        if self._ack_now or follows or len(self._acks) >= ACKS_MAX:
            self._send_acks(out)
        if not self._acks:
            self._send_through(out)
            self._send(self._refusals, out, self._refuse_request)
        self._send(self._returns, out, self._return_request)
        self._send(self._renewals, out, self._renew_request)
        if self._seek is not None and not (self._acks or self._through or self._refusals):
            self._send_seek(self._seek, out)
        permits = self._permits()
        if permits:
            self._outstanding += permits
            out.append(pb.ConsumeRequest(permit=pb.Permit(messages=permits)))
        return out

    # ---- what an application does

    def take(self, now_ms: int, *, hold: bool = False) -> Received | None:
        """The next message that may be handed out; None: there is none. With `hold`, nothing more
        of its key is handed out until `release`.

        Raises:
            CorruptMessageError: it is damaged; it was refused.
        """
        while (unit := self._head()) is not None:
            if unit.messages is None:
                self._decode(unit)
            assert unit.messages is not None
            if not unit.messages:
                self._count_waiting(unit, -unit.waiting)
                continue
            message = unit.messages.popleft()
            self._count_waiting(unit, -1)
            if unit.asked >> max(message.token.batch_index, 0) & 1:
                continue  # it was acknowledged by its id
            timeout_ms = self._limits.ack_timeout_ms
            if unit.is_begun and timeout_ms and (now_ms - unit.renewed_ms) * 3 >= timeout_ms:
                self._renew(unit, now_ms)
            unit.is_begun = True
            if hold:
                self._busy.add(unit.key)
            return message
        return None

    def key_of(self, message: Received) -> bytes | None:
        """The key that `take` held for a message; None: its delivery counts no more."""
        unit = self._unit(message.token)
        return None if unit is None else unit.key

    def release(self, key: bytes) -> None:
        """Nobody works on a message of this key any more."""
        self._busy.discard(key)
        self._resume(key)

    def acknowledge(self, token: Token, waiter: Any) -> None:
        """A message is done with."""
        unit = self._unit(token)
        if unit is None:
            self._resolved.append(Resolved(waiter, _stale()))
        else:
            self._ask(unit, 1 << max(token.batch_index, 0), waiter)

    def acknowledge_id(self, message_id: MessageId, waiter: Any) -> None:
        """A message is done with, or all of a batch, by its id."""
        unit = self._by_position.get(message_id.position)
        if unit is None:
            self._resolved.append(Resolved(waiter, _stale()))
            return
        bits = (1 << _messages_in(unit.source)) - 1
        if message_id.batch_index >= 0:
            bits &= 1 << message_id.batch_index
        if bits:
            self._ask(unit, bits, waiter)
        else:
            error = InvalidRequestError(
                "the batch has no such message", reason="INVALID_SETTLEMENT"
            )
            self._resolved.append(Resolved(waiter, error))

    def acknowledge_through(self, token: Token, waiter: Any) -> None:
        """A message and everything before it is done with."""
        unit = self._unit(token)
        if unit is None:
            self._resolved.append(Resolved(waiter, _stale()))
            return
        bits = (2 << max(token.batch_index, 0)) - 1
        ticket = _Ticket(_What.ACKNOWLEDGED_THROUGH, 1, [waiter], unit, bits)
        self._through.append(_Item(unit.deliveries[-1], ticket))

    def refuse(self, token: Token, delay_ms: int | None, waiter: Any) -> None:
        """A message could not be processed: its delivery ends here."""
        unit = self._unit(token)
        if unit is None or unit.asked >> max(token.batch_index, 0) & 1:
            self._resolved.append(Resolved(waiter, _stale()))
        else:
            self._refuse(unit, delay_ms, [waiter])

    def renew(self, token: Token, now_ms: int, waiter: Any) -> None:
        """A message needs more time."""
        unit = self._unit(token)
        if unit is None:
            self._resolved.append(Resolved(waiter, _stale()))
        else:
            self._renew(unit, now_ms).waiters.append(waiter)

    def seek(self, start: pb.Start, waiter: Any) -> None:
        """The subscription is to go on from elsewhere. Nothing is handed out until it does."""
        if self._seeking is not None or not self._is_connected:
            error = UnavailableError("the consumer is not connected, or is seeking already")
            self._resolved.append(Resolved(waiter, error))
            return
        # Two answers: that it was done, and from where on deliveries count.
        self._seeking = _Ticket(_What.SOUGHT, 2, [waiter])
        self._seek = start

    def flush(self) -> None:
        """Send the acknowledgements that are collected."""
        self._ack_now = True

    def leave(self) -> None:
        """Take no more, and hand out no more. Leave returns what is here: to give it back before
        would bring it again, for as long as there are permits."""
        self._is_leaving = True
        self._ack_now = True

    # ---- time

    def renew_waiting(self, now_ms: int) -> None:
        """Set the deadlines anew of what is not begun. Called at a third of the time-out."""
        for unit in self._by_position.values():
            if not unit.is_begun:
                self._renew(unit, now_ms)
        ticket = _Ticket(_What.RENEWED, len(self._held))
        self._renewals += [_Item(delivery, ticket) for delivery in self._held]

    def expire(self, now_ms: int) -> None:
        """Let go of messages that were incomplete for too long."""
        for dropped in self._assembler.expire(now_ms):
            self._note_dropped(dropped)

    # ---- deliveries

    def _note_delivery(self, delivery: pb.Delivery, now_ms: int) -> None:
        metadata = delivery.metadata
        messages = _messages_in(delivery)
        unacked = (1 << messages) - 1
        for index in delivery.acknowledged:
            unacked &= ~(1 << index)
        cost = unacked.bit_count()
        self._outstanding -= cost
        size = len(delivery.payload) // max(cost, 1)
        self._expected_bytes += (size - self._expected_bytes) // 8
        if delivery.aborts:
            aborted = self._assembler.abort(metadata.producer_name, delivery.aborts)
            if aborted is not None:
                self._note_dropped(aborted)
        if metadata.num_chunks_from_msg > 1:
            self._note_chunk(delivery, now_ms)
            return
        position = position_of(delivery.position)
        self._enqueue(
            _Unit(
                (delivery.delivery,),
                position,
                position,
                self._key(delivery),
                delivery,
                None,
                unacked,
                cost,
                len(delivery.payload),
                now_ms,
            )
        )

    def _enqueue(self, unit: _Unit) -> None:
        for delivery in unit.deliveries:
            self._units[delivery] = unit
        self._by_position[unit.last] = unit
        self._buffered += unit.waiting
        self._buffered_bytes += unit.size_bytes
        self._queue.append(unit)

    def _note_chunk(self, delivery: pb.Delivery, now_ms: int) -> None:
        position = position_of(delivery.position)
        attempt = (delivery.metadata.producer_name, delivery.metadata.uuid)
        held = _Held(delivery.delivery, attempt, self._key(delivery))
        if self._returning[attempt]:
            self._return_chunks({position: held}, attempt)
            return
        self._chunks[position] = held
        self._held[delivery.delivery] = position
        try:
            piece = _piece(delivery, position)
        except SeqgateError as damage:
            self._abandon(attempt, gone=(delivery.delivery,))
            unit = self._chunk_unit(delivery, b"", (delivery.delivery,), position, now_ms)
            unit.damage = damage
            self._enqueue(unit)
            return
        added = self._assembler.add(piece, now_ms)
        for dropped in added.dropped:
            self._note_dropped(dropped)
        match added.outcome:
            case Assembled(_, _, _, body, positions):
                numbers = tuple(self._let_go(each).delivery for each in positions)
                self._enqueue(self._chunk_unit(delivery, body, numbers, positions[0], now_ms))
            case Headless():
                lost = (piece.producer, piece.sequence_id, piece.uuid, (position,))
                self._note_dropped(Dropped(DropReason.HEADLESS, *lost))

    def _chunk_unit(
        self,
        last: pb.Delivery,
        body: bytes,
        deliveries: tuple[int, ...],
        first: Position,
        now_ms: int,
    ) -> _Unit:
        """The unit that all chunks make, of which this is the last."""
        position = position_of(last.position)
        key = self._key(last)
        return _Unit(deliveries, first, position, key, last, body, 1, 1, len(body), now_ms)

    def _let_go(self, position: Position) -> _Held:
        held = self._chunks.pop(position)
        del self._held[held.delivery]
        return held

    def _note_dropped(self, dropped: Dropped) -> None:
        """Chunks make no message here: settle them, as one."""
        held = [self._let_go(each) for each in dropped.positions if each in self._chunks]
        self.dropped[dropped.reason] += len(dropped.positions)
        self._reports.append(dropped)
        if not held:
            return
        if dropped.reason in _FINAL or self._incomplete is Incomplete.ACKNOWLEDGE:
            ticket = _Ticket(_What.RETURNED, len(held))
            for each in held:
                # Nothing of it is left here to be told of the answer.
                self._acks[each.delivery] = _Ack(_nothing(each.delivery), 1, [ticket])
        else:
            delay_ms = self._retry_delay_ms(0)
            ticket = _Ticket(_What.REFUSED, len(held))
            self._guard(held[0].key, min(dropped.positions), ticket)
            self._refusals += [_Item(each.delivery, ticket, delay_ms) for each in held]

    def _abandon(self, attempt: tuple[str, str], *, gone: Iterable[int]) -> None:
        """Forget the chunks of an attempt, and return those that are not gone already."""
        self._assembler.abort(*attempt)  # it is begun anew: this is no drop
        positions = [each for each, held in self._chunks.items() if held.attempt == attempt]
        dead = set(gone)
        held = {position: self._let_go(position) for position in positions}
        left = {position: each for position, each in held.items() if each.delivery not in dead}
        if left:
            self._return_chunks(left, attempt)

    def _return_chunks(self, chunks: dict[Position, _Held], attempt: tuple[str, str]) -> None:
        """Chunks go back. What comes of their attempt until that is answered goes back as well."""
        self._returning[attempt] += 1
        ticket = _Ticket(_What.RETURNED, len(chunks), attempt=attempt)
        first = min(chunks)
        self._guard(chunks[first].key, first, ticket)
        self._returns += [_Item(each.delivery, ticket) for each in chunks.values()]

    def _key(self, delivery: pb.Delivery) -> bytes:
        return b"" if self._is_one_key else sticky_key(delivery.metadata)

    # ---- the queue

    def _head(self) -> _Unit | None:
        """The first unit that may be handed out."""
        if self._seeking is not None or self._is_leaving:
            return None
        while self._resumable:
            lane = self._aside.get(self._resumable[0])
            while lane and not lane[0].waiting:
                lane.popleft()
            if lane and not self._is_withheld(lane[0]):
                return lane[0]
            key = self._resumable.popleft()
            if not lane:
                self._aside.pop(key, None)
        while self._queue:
            unit = self._queue[0]
            if not unit.waiting:
                self._queue.popleft()
            elif unit.key in self._aside or self._is_withheld(unit):
                self._queue.popleft()
                self._aside.setdefault(unit.key, deque()).append(unit)
            else:
                return unit
        return None

    def _is_withheld(self, unit: _Unit) -> bool:
        if unit.key in self._busy:
            return True
        guards = self._guards.get(unit.key)
        return guards is not None and unit.last > min(guards.values())

    def _resume(self, key: bytes) -> None:
        """Something does not withhold a key any more."""
        if key in self._aside:
            self._resumable.append(key)

    def _count_waiting(self, unit: _Unit, messages: int) -> None:
        if not unit.waiting:
            return
        unit.waiting += messages
        self._buffered += messages
        if not unit.waiting:
            self._buffered_bytes -= unit.size_bytes

    def _decode(self, unit: _Unit) -> None:
        """Make messages of a unit.

        Raises:
            CorruptMessageError: it cannot be done; the unit was refused.
        """
        source = unit.source
        stored = cast("ledger_pb2.StoredEntry", source)  # it has the same names for what is read
        gap = None
        if source.HasField("gap"):
            gap = Gap(position_of(source.gap.position), source.gap.attempts)
        try:
            if unit.damage is not None:
                raise unit.damage
            if unit.body is None:
                messages = list(decode_entry(self._topic, stored))
            else:
                messages = [decode_large(self._topic, stored, unit.body, unit.first)]
        except SeqgateError:
            self._refuse(unit, self._retry_delay_ms(source.attempts), [])
            raise
        epoch, number = self.epoch, unit.deliveries[-1]
        unit.messages = deque(
            _received(message, source.attempts, gap, epoch, number)
            for message in messages
            if unit.unacked >> max(message.id.batch_index, 0) & 1
        )
        unit.body = None

    def _retry_delay_ms(self, attempts: int) -> int | None:
        return None if self._retry is None else round(self._retry.delay_s(attempts) * 1000)

    # ---- settling

    def _unit(self, token: Token) -> _Unit | None:
        return self._units.get(token.delivery) if token.epoch == self.epoch else None

    def _ask(self, unit: _Unit, bits: int, waiter: Any) -> None:
        """Messages of a unit are acknowledged. What was asked for before is durable before."""
        newly = bits & unit.unacked & ~unit.asked
        if not newly:
            same = [ticket for ticket in unit.tickets.values() if ticket.bits & bits]
            if same:
                same[-1].waiters.append(waiter)
            else:
                self._resolved.append(Resolved(waiter, None))
            return
        unit.asked |= newly
        ticket = _Ticket(_What.ACKNOWLEDGED, len(unit.deliveries), [waiter], unit, newly)
        unit.tickets[newly] = ticket
        for delivery in unit.deliveries:
            ack = self._acks.get(delivery)
            if ack is None:
                ack = self._acks[delivery] = _Ack(unit)
            ack.bits |= newly
            ack.tickets.append(ticket)

    def _refuse(self, unit: _Unit, delay_ms: int | None, waiters: list[Any]) -> None:
        ticket = _Ticket(_What.REFUSED, len(unit.deliveries), waiters)
        self._refusals += [_Item(each, ticket, delay_ms) for each in unit.deliveries]
        self._guard(unit.key, unit.first, ticket)
        self._end(unit)

    def _return(self, unit: _Unit, *, gone: Sequence[int] = ()) -> None:
        """A unit goes back, but for deliveries that are gone already."""
        left = [each for each in unit.deliveries if each not in gone]
        if left:
            ticket = _Ticket(_What.RETURNED, len(left))
            self._returns += [_Item(each, ticket) for each in left]
            self._guard(unit.key, unit.first, ticket)
        self._end(unit)

    def _guard(self, key: bytes, first: Position, ticket: _Ticket) -> None:
        """What is behind `first` in a key is revoked by now, or soon: withhold it until then."""
        if self._is_ordered:
            ticket.guarded = key
            self._guards.setdefault(key, {})[ticket] = first

    def _renew(self, unit: _Unit, now_ms: int) -> _Ticket:
        unit.renewed_ms = now_ms
        ticket = _Ticket(_What.RENEWED, len(unit.deliveries), unit=unit)
        self._renewals += [_Item(each, ticket) for each in unit.deliveries]
        return ticket

    def _end(self, unit: _Unit) -> None:
        """A unit counts no more."""
        if not unit.is_live:
            return
        unit.is_live = False
        self._count_waiting(unit, -unit.waiting)
        for delivery in unit.deliveries:
            del self._units[delivery]
        if self._by_position.get(unit.last) is unit:
            del self._by_position[unit.last]

    # ---- what the service says

    def _note_revoked(self, deliveries: Sequence[int]) -> None:
        for delivery in deliveries:
            unit = self._units.get(delivery)
            if unit is not None:
                self._return(unit, gone=deliveries)
            elif delivery in self._held:
                self._abandon(self._chunks[self._held[delivery]].attempt, gone=deliveries)

    def _note_moved(self, deliveries: Sequence[int]) -> None:
        for delivery in deliveries:
            unit = self._units.get(delivery)
            if unit is not None and not unit.is_begun and not unit.asked:
                self._return(unit)
            elif delivery in self._held:
                self._abandon(self._chunks[self._held[delivery]].attempt, gone=())

    def _note_sought(self) -> None:
        self._forget_everything()
        self._refusals = [item for item in self._refusals if item.ticket.waiters]
        self._returns.clear()
        self._renewals = [item for item in self._renewals if item.ticket.waiters]
        if self._seeking is not None and self._seek is None:
            self._answer(self._seeking, None)

    def _forget_everything(self) -> None:
        for unit in self._by_position.values():
            unit.is_live = False
            unit.waiting = 0
        self._units.clear()
        self._by_position.clear()
        self._queue.clear()
        self._aside.clear()
        self._resumable.clear()
        self._guards.clear()
        self._buffered = self._buffered_bytes = self._outstanding = 0
        self._assembler.clear()
        self._chunks.clear()
        self._held.clear()
        self._returning.clear()

    def _note_settled(self, settled: pb.Settled) -> None:
        items = self._unanswered.pop(settled.request_id, None)
        if items is None:
            return
        refusal = error_of_status(settled.error) if settled.HasField("error") else None
        outcomes = settled.outcomes or [pb.OUTCOME_DONE] * len(items)
        for tickets, outcome in zip(items, outcomes, strict=True):
            error = refusal or _ERRORS[outcome]()
            for ticket in tickets:
                self._answer(ticket, error)

    def _answer(self, ticket: _Ticket, error: SeqgateError | None) -> None:
        if ticket.left <= 0:
            return
        ticket.error = ticket.error or error
        ticket.left -= 1
        if ticket is self._seeking and ticket.error is not None:
            ticket.left = 0
        if ticket.left > 0:
            return
        error, unit = ticket.error, ticket.unit
        if ticket.guarded is not None:
            self._lift_guard(ticket.guarded, ticket)
        match ticket.what:
            case _What.ACKNOWLEDGED:
                assert unit is not None
                self._note_acknowledged(unit, ticket)
            case _What.ACKNOWLEDGED_THROUGH if error is None:
                assert unit is not None
                self._note_acknowledged_through(unit, ticket.bits)
            case _What.RENEWED if unit is not None and isinstance(error, StaleTokenError):
                self._end(unit)
            case _What.RETURNED if ticket.attempt is not None:
                self._returning[ticket.attempt] -= 1
                self._returning = +self._returning
            case _What.SOUGHT:
                self._seeking = None
        self._resolved += [Resolved(waiter, error) for waiter in ticket.waiters]

    def _note_acknowledged(self, unit: _Unit, ticket: _Ticket) -> None:
        unit.tickets.pop(ticket.bits, None)
        if ticket.error is None:
            unit.unacked &= ~ticket.bits
            if not unit.unacked:
                self._end(unit)
        elif isinstance(ticket.error, StaleTokenError):
            self._end(unit)
        else:
            unit.asked &= ~ticket.bits

    def _note_acknowledged_through(self, last: _Unit, bits: int) -> None:
        for unit in list(self._by_position.values()):
            if unit.last < last.last:
                self._end(unit)
        last.asked |= bits
        last.unacked &= ~bits
        if not last.unacked:
            self._end(last)

    def _lift_guard(self, key: bytes, ticket: _Ticket) -> None:
        guards = self._guards.get(key)
        if guards is None or ticket not in guards:
            return
        del guards[ticket]
        if not guards:
            del self._guards[key]
        self._resume(key)

    # ---- what is sent

    @property
    def _has_room(self) -> bool:
        return len(self._unanswered) < UNANSWERED_MAX

    def _number(self, items: list[list[_Ticket]]) -> int:
        """The number of a request that is sent now, and who waits for its answer."""
        number = self._next_request
        self._next_request += 1
        self._unanswered[number] = items
        return number

    def _send_acks(self, out: list[pb.ConsumeRequest]) -> None:
        while self._acks and self._has_room:
            numbers = list(self._acks)[:ITEMS_MAX]
            acks = [(number, self._acks.pop(number)) for number in numbers]
            settlements = [
                pb.Settlement(
                    delivery=number,
                    indexes=() if ack.bits == ack.unit.unacked else _indexes(ack.bits),
                )
                for number, ack in acks
            ]
            request = pb.Acknowledge(
                request_id=self._number([ack.tickets for _, ack in acks]),
                epoch=self.epoch,
                settlements=settlements,
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
                epoch=self.epoch,
                settlement=pb.Settlement(
                    delivery=item.delivery, indexes=(bits.bit_length() - 1,) if is_batch else ()
                ),
            )
            out.append(pb.ConsumeRequest(acknowledge_through=request))

    def _send(
        self,
        items: list[_Item],
        out: list[pb.ConsumeRequest],
        make: "Callable[[int, list[_Item]], pb.ConsumeRequest]",
    ) -> None:
        while items and self._has_room:
            some = items[:ITEMS_MAX]
            del items[:ITEMS_MAX]
            out.append(make(self._number([[item.ticket] for item in some]), some))

    def _refuse_request(self, number: int, items: list[_Item]) -> pb.ConsumeRequest:
        refusals = [pb.Refusal(delivery=item.delivery, delay_ms=item.delay_ms) for item in items]
        request = pb.Refuse(request_id=number, epoch=self.epoch, refusals=refusals)
        return pb.ConsumeRequest(refuse=request)

    def _return_request(self, number: int, items: list[_Item]) -> pb.ConsumeRequest:
        deliveries = [item.delivery for item in items]
        request = pb.GiveBack(request_id=number, epoch=self.epoch, deliveries=deliveries)
        return pb.ConsumeRequest(give_back=request)

    def _renew_request(self, number: int, items: list[_Item]) -> pb.ConsumeRequest:
        deliveries = [item.delivery for item in items]
        request = pb.Renew(request_id=number, epoch=self.epoch, deliveries=deliveries)
        return pb.ConsumeRequest(renew=request)

    def _send_seek(self, start: pb.Start, out: list[pb.ConsumeRequest]) -> None:
        assert self._seeking is not None
        if self._has_room:
            self._seek = None
            request = pb.Seek(request_id=self._number([[self._seeking]]), start=start)
            out.append(pb.ConsumeRequest(seek=request))

    def _permits(self) -> int:
        """How many permits to grant now: half of what fits, or more, or none."""
        if self.is_paused or self._is_leaving or self._seeking is not None:
            return 0
        room_bytes = max(self._limits.size_bytes - self._buffered_bytes, 0)
        room = room_bytes // max(self._expected_bytes, 1)
        capacity = min(self._limits.messages, max(1, self._buffered + room))
        free = capacity - self._buffered - self._outstanding
        return free if free >= (capacity + 1) // 2 else 0


def _stale(text: str = "the delivery counts no more, or is settled already") -> StaleTokenError:
    return StaleTokenError(text)


_ERRORS: Final[dict[int, Callable[[], SeqgateError | None]]] = {
    pb.OUTCOME_UNSPECIFIED: lambda: InternalError("the service gave no outcome"),
    pb.OUTCOME_DONE: lambda: None,
    pb.OUTCOME_STALE: _stale,
    pb.OUTCOME_INVALID: lambda: InvalidRequestError(
        "the batch has no such message", reason="INVALID_SETTLEMENT"
    ),
}


def _messages_in(delivery: pb.Delivery) -> int:
    metadata = delivery.metadata
    return metadata.num_messages_in_batch if metadata.HasField("num_messages_in_batch") else 1


def _indexes(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _nothing(delivery: int) -> _Unit:
    """A unit for chunks that are settled and make no message."""
    nowhere = Position(0, 0)
    return _Unit((delivery,), nowhere, nowhere, b"", pb.Delivery(), None, 1, 0, 0, 0, is_live=False)


_FIELDS: Final = attrgetter(*(each.name for each in fields(Message)))


def _received(
    message: Message, attempts: int, gap: Gap | None, epoch: int, delivery: int
) -> Received:
    token = Token(epoch, delivery, message.id.batch_index)
    return Received(*(*_FIELDS(message), attempts, gap, token))


def _piece(delivery: pb.Delivery, position: Position) -> Piece:
    """A chunk, as the assembler takes it.

    Raises:
        CorruptMessageError: it is not what was published.
    """
    metadata = delivery.metadata
    payload = checked_payload(cast("ledger_pb2.StoredEntry", delivery))
    return Piece(
        position,
        metadata.producer_name,
        metadata.sequence_id,
        metadata.uuid,
        metadata.chunk_id,
        metadata.num_chunks_from_msg,
        metadata.total_chunk_msg_size,
        metadata.message_crc32c if metadata.HasField("message_crc32c") else None,
        payload,
    )
