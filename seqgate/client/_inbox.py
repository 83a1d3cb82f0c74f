"""A consumer's unsettled deliveries: a machine without a socket.

    Deliveries ──▶ queue ──take──▶ handed out ──acknowledge, refuse──▶ requests
         ▲         │   ▲                                                   │
         │         ▼   │                                                   ▼
      permits      aside                               resolved ◀────── Settled

A *unit* is settled as a whole: an entry, which may be a batch, or all chunks of a large message.
`_chunk_deliveries.py` collects chunks; `_requests.py` holds requests about units until they are
answered; `_breaker.py` stops handing out messages while all of them fail.

Invariants:

    live      A unit is live until it is acknowledged durably, refused, given back or revoked, or
              until a seek or the end of the stream invalidates all. A dead unit is in no index:
              its remaining messages are not handed out, and its tokens are stale.
    order     A key's units are handed out in order of arrival. A unit is put aside while its key is
              locked (the application processes an earlier message), or guarded: an earlier message
              was refused or given back, and until the service answers, it may still revoke later
              deliveries of the key. Units put aside precede those in the queue, and while a key has
              any aside, all further ones are put aside.
    permits   granted and unused + buffered <= capacity, in messages. A batch that begins within it
              arrives whole. Chunks of incomplete messages are in neither count.
    waiters   Each waiter is resolved exactly once: by the answer, or when the stream ends.
"""

import secrets
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._assembler import AssemblyLimits, Dropped, DropReason
from seqgate.client._breaker import Brake, Breaker, BreakerState
from seqgate.client._chunk_deliveries import (
    Acknowledge,
    ChunkDeliveries,
    Complete,
    Damaged,
    Effect,
    GiveBack,
    Refuse,
)
from seqgate.client._codec import decode_fields, decode_large_fields, position_of
from seqgate.client._message import Gap, Received, Token
from seqgate.client._requests import Action, Requests, Ticket, Unit, indexes, no_such_message, stale
from seqgate.client._subscribing import Incomplete, RetryPolicy, reason_to_wire
from seqgate.errors import SeqgateError, StaleTokenError, UnavailableError
from seqgate.keys import sticky_key
from seqgate.message_id import MessageId, topic_of
from seqgate.types import Position

EXPECTED_BYTES: Final = 1024 * 1024
"""The assumed bytes of a message until the first one arrives, to bound the first permits."""

CONNECTION_BITS: Final = 32
"""The bits that count a consumer's connections, in Token.connection."""

# Token._make without a Python call per message.
_token: Final[Callable[[Iterable[Any]], Token]] = partial(tuple.__new__, Token)

Answer = tuple[Any, SeqgateError | None]
"""A waiter and its result: None for success."""


@dataclass(frozen=True, slots=True)
class ReceiverLimits:
    """How much a consumer buffers.

    Attributes:
        messages: the most messages, 1 to 1,000,000. A batch that begins within arrives whole.
        size_bytes: the bytes of messages to grant permits for.
        ack_timeout_ms: after how long the service counts a delivery as failed; 0: never.
    """

    messages: int = 1_000
    size_bytes: int = 64 * 1024 * 1024
    ack_timeout_ms: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.messages <= 1_000_000:
            raise ValueError("receiver_queue must be 1 to 1,000,000 messages")
        if self.size_bytes < 1:
            raise ValueError("receiver_queue_bytes must be at least 1")
        if self.ack_timeout_ms and not 100 <= self.ack_timeout_ms <= 86_400_000:
            raise ValueError("ack_timeout_s must be 0.1 to 86,400")


# ---- messages to be handed out


class _Queue:
    """The waiting units, in order: see the module. Dead units are skipped at the head. Unless
    `is_ordered`, nothing is guarded."""

    def __init__(self, *, is_ordered: bool) -> None:
        self.messages = 0
        """The number of messages that wait."""
        self.size_bytes = 0
        """The bytes of units with a message that waits."""
        self._is_ordered = is_ordered
        self._units: deque[Unit] = deque()
        self._aside: dict[bytes, deque[Unit]] = {}
        # Keys with units aside that were unlocked or unguarded.
        self._resumable: deque[bytes] = deque()
        self._locked: set[bytes] = set()
        self._guards: dict[bytes, dict[Ticket, Position]] = {}

    def add(self, unit: Unit) -> None:
        self.messages += unit.waiting
        self.size_bytes += unit.size_bytes
        self._units.append(unit)

    def head(self) -> Unit | None:
        """The first unit that may be handed out."""
        while self._resumable:
            lane = self._aside.get(self._resumable[0])
            while lane and not lane[0].waiting:
                lane.popleft()
            if lane and not self._must_wait(lane[0]):
                return lane[0]
            key = self._resumable.popleft()
            if not lane:
                self._aside.pop(key, None)
        while self._units:
            unit = self._units[0]
            if not unit.waiting:
                self._units.popleft()
            elif unit.key in self._aside or self._must_wait(unit):
                self._units.popleft()
                self._aside.setdefault(unit.key, deque()).append(unit)
            else:
                return unit
        return None

    def take(self, unit: Unit, messages: int) -> None:
        """Take messages of a unit out of the count."""
        if messages:
            unit.waiting -= messages
            self.messages -= messages
            if not unit.waiting:
                self.size_bytes -= unit.size_bytes

    def put_back(self, unit: Unit) -> None:
        """Undo `take` for the last message that was taken of its key."""
        if not unit.waiting:
            self.size_bytes += unit.size_bytes
            line = self._aside.get(unit.key, self._units)
            if not line or line[0] is not unit:
                line.appendleft(unit)
        unit.waiting += 1
        self.messages += 1
        self._resume(unit.key)

    def lock(self, key: bytes) -> None:
        self._locked.add(key)

    def unlock(self, key: bytes) -> None:
        self._locked.discard(key)
        self._resume(key)

    def guard(self, key: bytes, first: Position, ticket: Ticket) -> None:
        """Hand out nothing after `first` in a key until the ticket is answered: the service may
        have revoked it already."""
        if self._is_ordered:
            ticket.guarded = key
            self._guards.setdefault(key, {})[ticket] = first

    def unguard(self, ticket: Ticket) -> None:
        """The ticket is answered: deliveries not revoked by now are valid."""
        key = ticket.guarded
        guards = None if key is None else self._guards.get(key)
        if key is None or guards is None or ticket not in guards:
            return
        del guards[ticket]
        if not guards:
            del self._guards[key]
        self._resume(key)

    def clear(self) -> None:
        """Forget all units and guards. Locked keys stay locked."""
        self._units.clear()
        self._aside.clear()
        self._resumable.clear()
        self._guards.clear()
        self.messages = self.size_bytes = 0

    def _must_wait(self, unit: Unit) -> bool:
        if unit.key in self._locked:
            return True
        guards = self._guards.get(unit.key)
        return guards is not None and unit.last > min(guards.values())

    def _resume(self, key: bytes) -> None:
        if key in self._aside:
            self._resumable.append(key)


class Permits:
    """How many messages the service may send in addition to those buffered."""

    def __init__(self, limits: ReceiverLimits) -> None:
        self.outstanding = 0
        """The permits granted and unused; a batch may make it negative."""
        self._limits = limits
        self._expected_bytes = EXPECTED_BYTES
        self._has_arrived = False  # any message at all

    def use(self, messages: int, size_bytes: int) -> None:
        """Charge a delivery of so many unacknowledged messages."""
        self.outstanding -= messages
        if messages > 1:
            size_bytes //= messages
        if not self._has_arrived:
            self._has_arrived, self._expected_bytes = True, size_bytes
        less = self._expected_bytes + (size_bytes - self._expected_bytes) // 8
        self._expected_bytes = max(size_bytes, less)  # larger sizes count immediately

    def grant(self, messages: int, size_bytes: int) -> int:
        """The permits to grant now: at least half the capacity, or none."""
        limits = self._limits
        room_bytes = max(limits.size_bytes - size_bytes, 0)
        room = room_bytes // max(self._expected_bytes, 1)
        capacity = min(limits.messages, max(1, messages + room))
        free = capacity - messages - self.outstanding
        if free < (capacity + 1) // 2:
            return 0
        self.outstanding += free
        return free

    def clear(self) -> None:
        self.outstanding = 0


# ---- the machine


class Inbox:
    """See the module. Mutable, synchronous, one owner.

    After each call the owner sends `requests()`, resolves `take_resolved()`, and reports
    `take_dropped()`. Times are milliseconds of one clock.

    Args:
        is_ordered: whether a key's messages come in order.
        is_one_key: whether the whole topic counts as one key.
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
        breaker: Breaker | None = None,
    ) -> None:
        self.is_paused = False
        self._topic = topic
        self._is_one_key = is_one_key
        self._ack_timeout_ms = limits.ack_timeout_ms
        self._retry = retry
        self._epoch = 0
        # Grows by one with each connection. The bits above are this consumer's, and no other's.
        self._connection = secrets.randbits(64) << CONNECTION_BITS
        self._is_connected = False
        self._is_leaving = False
        self._units: dict[int, Unit] = {}  # live units, by each of their deliveries
        self._by_position: dict[Position, Unit] = {}  # the same, by their last entry
        self._queue = _Queue(is_ordered=is_ordered)
        self._permits = Permits(limits)
        self._requests = Requests()
        self._chunks = ChunkDeliveries(assembly, incomplete)
        self._brake = None if breaker is None else Brake(breaker)
        self._told_pause_ms = 0  # the breaker's pause that the service was told
        self._resolved: list[Answer] = []

    @property
    def buffered(self) -> int:
        return self._queue.messages

    @property
    def outstanding(self) -> int:
        return self._permits.outstanding

    @property
    def unacked(self) -> int:
        """The number of live units of which a message was handed out."""
        return sum(unit.is_begun for unit in self._by_position.values())

    @property
    def dropped(self) -> Counter[DropReason]:
        return self._chunks.counts

    @property
    def collected(self) -> int:
        """The deliveries whose acknowledgements are not sent."""
        return len(self._requests.acks)

    @property
    def is_sent(self) -> bool:
        """Whether nothing is left to send, permits aside."""
        return self._requests.is_sent

    @property
    def is_answered(self) -> bool:
        """Whether nothing is unsent or unanswered, permits aside."""
        return self._requests.is_answered

    @property
    def breaker_state(self) -> BreakerState:
        return BreakerState.CLOSED if self._brake is None else self._brake.state

    @property
    def breaker_pause_ms(self) -> int:
        """How long the breaker pauses; 0: it is closed."""
        return 0 if self._brake is None else self._brake.pause_ms

    @property
    def due_ms(self) -> int | None:
        """When to call `advance`; None: no change is due."""
        return None if self._brake is None else self._brake.due_ms

    def take_resolved(self) -> list[Answer]:
        """The waiters resolved since the last call."""
        resolved, self._resolved = self._resolved, []
        return resolved

    def take_dropped(self) -> list[Dropped]:
        """The chunks dropped since the last call."""
        return self._chunks.take_dropped()

    # ---- the stream

    def tell_breaker(self, request: pb.ConsumeRequest, *, is_first: bool = False) -> None:
        """Add the breaker to a request, if the service was told something else on its stream."""
        told_ms = 0 if is_first else self._told_pause_ms
        self._told_pause_ms = pause_ms = self.breaker_pause_ms
        request.ClearField("breaker")
        if pause_ms != told_ms:
            request.breaker.open = pause_ms > 0
            request.breaker.pause.FromMilliseconds(pause_ms)

    def subscribed(self, epoch: int) -> None:
        """A stream is open, and has sent nothing yet."""
        self._epoch = self._requests.epoch = epoch
        self._connection += 1
        self._is_connected = True
        self._is_leaving = False

    def disconnected(self) -> None:
        """The stream ended: all tokens are stale, and the next stream redelivers everything."""
        self._is_connected = False
        text = "the connection was lost before the answer arrived"
        for ticket in self._requests.abandon():
            is_seek = ticket.action is Action.SEEK
            error = UnavailableError(text) if is_seek else stale(text)
            self._resolved += [(waiter, error) for waiter in ticket.waiters]
        self._forget_everything()

    def receive(self, response: pb.ConsumeResponse, now_ms: int) -> None:
        match response.WhichOneof("response"):
            case "deliveries":
                if not self._is_leaving:
                    self._take_deliveries(response.deliveries, now_ms)
            case "settled":
                tickets = self._requests.settled(response.settled)
                for ticket in tickets:  # first: whatever else fails, they have their answer
                    self._resolved += [(waiter, ticket.error) for waiter in ticket.waiters]
                for ticket in tickets:
                    self._conclude(ticket)
            case "revoked":
                self._revoked(response.revoked.deliveries)
            case "moved":
                self._moved(response.moved.deliveries)
            case "sought":
                self._forget_everything()
                self._requests.sought()

    def requests(self) -> list[pb.ConsumeRequest]:
        if not self._is_connected:
            return []
        out = self._requests.to_send()
        if self._may_grant:
            permits = self._permits.grant(self.buffered, self._queue.size_bytes)
            if permits:
                out.append(pb.ConsumeRequest(permit=pb.Permit(messages=permits)))
        if out and self._told_pause_ms != self.breaker_pause_ms:
            self.tell_breaker(out[0])
        return out

    def waiters(self, request_id: int) -> Iterator[Any]:
        return self._requests.waiters(request_id)

    # ---- the application

    def take(self, now_ms: int, *, lock: bool = False) -> Received | None:
        """The next message that may be handed out; None: none may. `lock` locks its key. Raises
        CorruptMessageError for a damaged message, which is then refused."""
        if self._is_leaving or self._requests.seeking is not None:
            return None
        brake = self._brake
        is_probe = brake is not None and brake.state is not BreakerState.CLOSED
        if brake is not None and is_probe and not brake.admits(now_ms, self._units.__contains__):
            return None
        queue = self._queue
        while (unit := queue.head()) is not None:
            messages = unit.messages
            if messages is None:
                messages = self._decode(unit)
            if not messages:
                queue.take(unit, unit.waiting)
                continue
            message = messages.pop()
            queue.take(unit, 1)
            if unit.acked & message.token.bit:
                continue  # acknowledged by its id
            timeout_ms = self._ack_timeout_ms
            if unit.is_begun and timeout_ms and (now_ms - unit.renewed_ms) * 3 >= timeout_ms:
                self._renew(unit, now_ms)
            unit.is_begun = True
            if lock:
                queue.lock(unit.key)
            if brake is not None and is_probe:
                brake.record_taken(message.token.delivery, message.token.bit, now_ms)
            return message
        return None

    def take_more(self, messages: list[Received], messages_max: int, now_ms: int) -> None:
        """Take messages until there are `messages_max`, or none may be handed out. Raises the same
        as `take`; what was taken before is in `messages`."""
        while len(messages) < messages_max:
            message = self.take(now_ms)
            if message is None:
                return
            messages.append(message)
            unit, left = self._units[message.token.delivery], messages_max - len(messages)
            if unit.messages and left and not unit.acked and self._brake is None:
                # The rest of a batch may follow at once.
                rest = unit.messages[-left:]
                del unit.messages[-left:]
                self._queue.take(unit, len(rest))
                messages += reversed(rest)

    def put_back(self, message: Received) -> None:
        """Undo `take`, for a message that the application did not get: it is the next one of its
        key. Put back the messages of a key in the reverse order."""
        unit = self._unit_of(message.token)
        if unit is None or unit.messages is None:
            return
        if not unit.unsettled & message.token.bit:
            return
        if any(each.token == message.token for each in unit.messages):
            return  # it was put back before
        unit.messages.append(message)
        self._queue.put_back(unit)
        unit.is_begun = unit.waiting < unit.unsettled.bit_count()
        if self._brake is not None:
            self._brake.forget_probe(message.token.delivery)

    def key_of(self, message: Received) -> bytes | None:
        """The key that `take` locked for a message; None: its token is stale."""
        unit = self._unit_of(message.token)
        return None if unit is None else unit.key

    def unlock(self, key: bytes) -> None:
        self._queue.unlock(key)

    def acknowledge(self, token: Token, waiter: Any) -> None:
        unit = self._unit_of(token)
        if unit is None:
            self._resolved.append((waiter, self._stale(token)))
        else:
            self._acknowledge(unit, token.bit, waiter)

    def check_own(self, tokens: Iterable[Token]) -> None:
        """Raise StaleTokenError if a token is not this consumer's, of whichever connection."""
        for connection in {token.connection for token in tokens}:
            if self._is_foreign(connection):
                raise _foreign()

    def parts(self, connection: int, delivery: int, bits: int) -> Iterable[int]:
        """Messages of a delivery (bits) that `acknowledge_part` takes together: all, unless the
        answer about some of them is on its way already."""
        unit = self._live(connection, delivery)
        if unit is None or not bits & unit.acked:
            return (bits,)
        return (1 << index for index in indexes(bits))

    def acknowledge_part(self, connection: int, delivery: int, bits: int, waiter: Any) -> None:
        """Acknowledge messages of a delivery, as `parts` divides them."""
        unit = self._live(connection, delivery)
        if unit is None:
            self._resolved.append((waiter, stale()))
        else:
            self._acknowledge(unit, bits, waiter)

    def acknowledge_id(self, message_id: MessageId, waiter: Any) -> None:
        """Acknowledge a message by its id, or a whole batch."""
        topic = topic_of(message_id)
        unit = self._by_position.get(message_id.position)
        if topic and topic != self._topic:
            text = f"the id is of a message of {topic}, and this consumer's topic is {self._topic}"
            self._resolved.append((waiter, stale(f"stale token: {text}")))
        elif unit is None:
            self._resolved.append((waiter, stale()))
        elif message_id.batch_index >= (messages := _messages_in(unit.source)):
            self._resolved.append((waiter, no_such_message()))
        else:
            index = message_id.batch_index
            self._acknowledge(unit, 1 << index if index >= 0 else (1 << messages) - 1, waiter)

    def acknowledge_cumulative(self, token: Token, waiter: Any) -> None:
        unit = self._unit_of(token)
        if unit is None:
            self._resolved.append((waiter, self._stale(token)))
            return
        action, bits = Action.ACKNOWLEDGE_CUMULATIVE, 2 * token.bit - 1
        ticket = Ticket(action, waiters=[waiter], unit=unit, bits=bits)
        self._requests.add((token.delivery,), ticket)
        if self._brake is not None:
            self._brake.record_acknowledged(token.delivery, token.bit)

    def negative_acknowledge(
        self, token: Token, delay_ms: int | None, now_ms: int, waiter: Any, reason: str = ""
    ) -> None:
        """Refuse a message: its unit is redelivered after the delay; None: by the policy."""
        unit = self._unit_of(token)
        if unit is None or unit.acked & token.bit:
            self._resolved.append((waiter, self._stale(token)))
        else:
            self._refuse(unit, [waiter], delay_ms, reason)
            if self._brake is not None:
                self._brake.record_refused(token.delivery, token.bit, now_ms)

    def renew(self, token: Token, now_ms: int, waiter: Any) -> None:
        unit = self._unit_of(token)
        if unit is None:
            self._resolved.append((waiter, self._stale(token)))
        else:
            self._renew(unit, now_ms, waiter)

    def seek(self, start: common_pb2.Start, waiter: Any) -> None:
        """Move the subscription. Nothing is handed out until the answer."""
        if self._requests.seeking is not None or not self._is_connected:
            text = "the consumer is not connected, or another seek is in progress"
            self._resolved.append((waiter, UnavailableError(text)))
        else:
            self._requests.seek(Ticket(Action.SEEK, waiters=[waiter], start=start))

    def flush(self) -> None:
        self._requests.flush()

    def leave(self) -> None:
        """Accept and hand out nothing more. Buffered messages are not given back: Leave returns
        them, and until then they would be redelivered here while there are permits."""
        self._is_leaving = True
        self._requests.flush()

    # ---- time

    def renew_waiting(self, now_ms: int) -> None:
        """Restart the time-outs of units not begun. Call it at a third of the time-out. A begun
        batch is renewed as its messages are taken, or here while the breaker prevents that."""
        is_braked = self.breaker_state is not BreakerState.CLOSED
        for unit in self._by_position.values():
            if not unit.is_begun or (is_braked and unit.is_between):
                self._renew(unit, now_ms)
        held = self._chunks.deliveries
        self._requests.add(held, Ticket(Action.RENEW, len(held)))

    def expire(self, now_ms: int) -> None:
        self._apply(self._chunks.expire(now_ms))

    def advance(self, now_ms: int) -> None:
        if self._brake is not None:
            self._brake.advance(now_ms)

    @property
    def _may_grant(self) -> bool:
        is_paused = self.is_paused or self.breaker_state is BreakerState.OPEN
        is_stopped = is_paused or self._is_leaving or not self._is_connected
        return not is_stopped and self._requests.seeking is None

    # ---- deliveries

    def _take_deliveries(self, deliveries: pb.Deliveries, now_ms: int) -> None:
        for delivery in deliveries.deliveries:
            gap = None
            if delivery.HasField("gap"):
                gap = Gap(position_of(delivery.gap.position), delivery.gap.attempts)
            entry = cast("ledger_pb2.StoredEntry", delivery)  # its fields have the same names
            self._delivered(
                delivery.delivery, entry, now_ms, delivery.attempts, gap, delivery.acknowledged
            )
        for run in deliveries.runs:
            for number, entry in enumerate(run.entries, run.first):
                self._delivered(number, entry, now_ms)

    def _delivered(
        self,
        number: int,
        entry: ledger_pb2.StoredEntry,
        now_ms: int,
        attempts: int = 0,
        gap: Gap | None = None,
        acknowledged: Iterable[int] = (),
    ) -> None:
        metadata = entry.metadata
        messages = _messages_in(entry)
        unsettled, cost = (1 << messages) - 1, messages
        if messages > 1:
            for index in acknowledged:
                unsettled &= ~(1 << index)
            cost = unsettled.bit_count()
        size_bytes = len(entry.payload)
        self._permits.use(cost, size_bytes)
        last = position_of(entry.position)
        if entry.aborts:
            self._apply(self._chunks.abort(metadata.producer_name, entry.aborts, last))
        key = b"" if self._is_one_key else sticky_key(metadata)
        about = (last, key, entry, attempts, gap)
        if metadata.num_chunks_from_msg <= 1:
            self._add(Unit((number,), last, *about, None, unsettled, cost, size_bytes, now_ms))
            return
        effects = self._chunks.add(number, entry, last, key, now_ms)
        self._apply(effects)
        for effect in effects:
            match effect:
                case Complete(numbers, first, body):
                    self._add(Unit(numbers, first, *about, body, 1, 1, len(body), now_ms))
                case Damaged(error):
                    self._add(Unit((number,), last, *about, b"", 1, 1, 0, now_ms, error))

    def _apply(self, effects: Iterable[Effect]) -> None:
        """Settle chunks that make no message here, those of an attempt together."""
        for effect in effects:
            match effect:
                case Acknowledge(numbers):  # no unit depends on it: the answer changes nothing
                    self._requests.add(numbers, Ticket(Action.ACKNOWLEDGE, len(numbers)))
                case Refuse(numbers, key, first, reason):
                    action, delay_ms = Action.NEGATIVE_ACKNOWLEDGE, self._retry_delay_ms(0)
                    ticket = Ticket(action, len(numbers), delay_ms=delay_ms, reason=reason)
                    self._queue.guard(key, first, ticket)
                    self._requests.add(numbers, ticket)
                case GiveBack(numbers, key, first, attempt, no_room):
                    action = Action.GIVE_BACK_NO_ROOM if no_room else Action.GIVE_BACK
                    ticket = Ticket(action, len(numbers), attempt=attempt)
                    self._queue.guard(key, first, ticket)
                    self._requests.add(numbers, ticket)

    def _decode(self, unit: Unit) -> list[Received]:
        """Decode the unacknowledged messages of a unit, the first one last. Raises
        CorruptMessageError if the unit is damaged; it is then refused."""
        stored = unit.source
        try:
            if unit.damage is not None:
                raise unit.damage
            if unit.body is None:
                messages = decode_fields(self._topic, stored)
            else:
                messages = [decode_large_fields(self._topic, stored, unit.body, unit.first)]
                unit.body = None
        except SeqgateError as damage:
            self._refuse(unit, [], reason=reason_to_wire(damage))
            raise
        number, attempts, gap = unit.deliveries[-1], unit.attempts, unit.gap
        if len(messages) == 1:
            (fields,) = messages
            token = _token((self._epoch, number, fields.id.batch_index, self._connection))
            unit.messages = [Received(*fields, attempts, gap, token)]
            return unit.messages
        unit.messages = []
        for fields in reversed(messages):
            token = _token((self._epoch, number, fields.id.batch_index, self._connection))
            if unit.unsettled & token.bit:
                unit.messages.append(Received(*fields, attempts, gap, token))
        return unit.messages

    def _retry_delay_ms(self, attempts: int) -> int | None:
        return None if self._retry is None else round(self._retry.delay_s(attempts) * 1000)

    # ---- revocations

    def _revoked(self, deliveries: Sequence[int]) -> None:
        gone = frozenset(deliveries)
        for delivery in deliveries:
            unit = self._units.get(delivery)
            if unit is not None:
                self._give_back(unit, gone=gone)
            else:
                self._apply(self._chunks.take_back(delivery, gone=gone))

    def _moved(self, deliveries: Sequence[int]) -> None:
        """Another consumer owns the keys of these deliveries: give back those not begun."""
        for delivery in deliveries:
            unit = self._units.get(delivery)
            if unit is None:
                self._apply(self._chunks.take_back(delivery))
            elif not unit.is_begun and not unit.acked:
                self._give_back(unit)

    def _forget_everything(self) -> None:
        for unit in self._by_position.values():
            unit.is_live = False
            unit.waiting = 0
        self._units.clear()
        self._by_position.clear()
        self._queue.clear()
        self._permits.clear()
        self._chunks.clear()
        if self._brake is not None:
            self._brake.forget_probes()

    # ---- units

    def _add(self, unit: Unit) -> None:
        for delivery in unit.deliveries:
            self._units[delivery] = unit
        self._by_position[unit.last] = unit
        self._queue.add(unit)

    def _unit_of(self, token: Token) -> Unit | None:
        """The live unit of a token; None: the token is stale."""
        return self._units.get(token.delivery) if token.connection == self._connection else None

    def _live(self, connection: int, delivery: int) -> Unit | None:
        return self._units.get(delivery) if connection == self._connection else None

    def _is_foreign(self, connection: int) -> bool:
        return connection >> CONNECTION_BITS != self._connection >> CONNECTION_BITS

    def _stale(self, token: Token) -> StaleTokenError:
        return _foreign() if self._is_foreign(token.connection) else stale()

    def _acknowledge(self, unit: Unit, bits: int, waiter: Any) -> None:
        """Acknowledge messages of a unit. A repeated acknowledgement waits for the same answer."""
        new = bits & unit.unsettled & ~unit.acked
        if not new:
            same = [ticket for ticket in unit.acks if ticket.bits & bits]
            if same:
                same[-1].waiters.append(waiter)
            else:
                self._resolved.append((waiter, None))
            return
        number = unit.deliveries[-1]
        ticket = self._requests.acks.get(number)  # of other messages of the batch
        if ticket is None:
            ticket = Ticket(Action.ACKNOWLEDGE, len(unit.deliveries), unit=unit)
            unit.acks.append(ticket)
            self._requests.add(unit.deliveries, ticket)
        unit.acked |= new
        ticket.bits |= new
        ticket.waiters.append(waiter)
        if self._brake is not None:
            self._brake.record_acknowledged(number, bits)

    def _refuse(
        self, unit: Unit, waiters: list[Any], delay_ms: int | None = None, reason: str = ""
    ) -> None:
        if delay_ms is None:
            delay_ms = self._retry_delay_ms(unit.attempts)
        action, count = Action.NEGATIVE_ACKNOWLEDGE, len(unit.deliveries)
        ticket = Ticket(action, count, waiters, delay_ms=delay_ms, reason=reason)
        self._requests.add(unit.deliveries, ticket)
        self._queue.guard(unit.key, unit.first, ticket)
        self._end(unit)

    def _give_back(self, unit: Unit, *, gone: Collection[int] = ()) -> None:
        """Give back a unit, except deliveries that are gone already."""
        left = [each for each in unit.deliveries if each not in gone]
        if left:
            ticket = Ticket(Action.GIVE_BACK, len(left))
            self._requests.add(left, ticket)
            self._queue.guard(unit.key, unit.first, ticket)
        self._end(unit)

    def _renew(self, unit: Unit, now_ms: int, *waiters: Any) -> None:
        unit.renewed_ms = now_ms
        ticket = Ticket(Action.RENEW, len(unit.deliveries), [*waiters], unit)
        self._requests.add(unit.deliveries, ticket)

    def _conclude(self, ticket: Ticket) -> None:
        """Act on the last answer to a ticket."""
        error = ticket.error
        if ticket.guarded is not None:
            self._queue.unguard(ticket)
        match ticket.action:
            case Action.ACKNOWLEDGE if ticket.unit is not None:
                self._acknowledged(ticket.unit, ticket)
            case Action.ACKNOWLEDGE_CUMULATIVE if ticket.unit is not None and error is None:
                self._acknowledged_through(ticket.unit, ticket.bits)
            case Action.RENEW if ticket.unit is not None and isinstance(error, StaleTokenError):
                self._end(ticket.unit)
        if ticket.attempt is not None:
            self._chunks.given_back(ticket.attempt)

    def _acknowledged(self, unit: Unit, ticket: Ticket) -> None:
        unit.acks.remove(ticket)
        if ticket.error is None:
            unit.unsettled &= ~ticket.bits
            if not unit.unsettled:
                self._end(unit)
        elif isinstance(ticket.error, StaleTokenError):
            self._end(unit)
        else:
            unit.acked &= ~ticket.bits

    def _acknowledged_through(self, last: Unit, bits: int) -> None:
        for unit in list(self._by_position.values()):
            if unit.last < last.last:
                self._end(unit)
        last.acked |= bits
        last.unsettled &= ~bits
        if not last.unsettled:
            self._end(last)

    def _end(self, unit: Unit) -> None:
        if not unit.is_live:
            return
        unit.is_live = False
        self._queue.take(unit, unit.waiting)
        for delivery in unit.deliveries:
            del self._units[delivery]
        if self._by_position.get(unit.last) is unit:
            del self._by_position[unit.last]


def _foreign() -> StaleTokenError:
    return stale("stale token: the message was received through another consumer")


def _messages_in(entry: ledger_pb2.StoredEntry) -> int:
    """The messages of an entry, acknowledged ones included."""
    metadata = entry.metadata
    return metadata.num_messages_in_batch if metadata.HasField("num_messages_in_batch") else 1
