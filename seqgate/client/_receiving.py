"""What a consumer was sent and owes an answer for: a machine without a socket.

    Deliveries ──▶ held chunks ──▶ queue ──take──▶ handed out ──ack, nack──▶ settling ──▶ gone

What is settled together is a unit: an entry, which may be a batch, or all chunks of a large
message. Nothing of a unit is handed out once it is dead, and its tokens are refused here. The
machine is made of parts, and decides itself only which of them is concerned:

    _unit.py             what is settled together, and what was asked for
    _held_chunks.py      chunks of messages that are incomplete
    _receiver_queue.py   what waits, what of it may be handed out, and how much more may come
    _live_units.py       which units count, and how they end
    _settling.py         requests, and their answers
    _breaker.py          whether anything is handed out, where everything fails
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.client._assembler import AssemblyLimits, Dropped, DropReason
from seqgate.client._breaker import Brake, Breaker, BreakerState
from seqgate.client._held_chunks import Damaged, Effect, GoesBack, HeldChunks, LetGo, Whole
from seqgate.client._live_units import LiveUnits, Resolved
from seqgate.client._received import Received, Token
from seqgate.client._receiver_queue import Permits, ReceiverLimits, ReceiverQueue
from seqgate.client._settling import Settling, no_such_message, stale
from seqgate.client._subscribing import Incomplete, RetryPolicy, position_of
from seqgate.client._unit import Ticket, Unit, What, messages_in
from seqgate.errors import SeqgateError, UnavailableError
from seqgate.keys import sticky_key
from seqgate.message_id import MessageId

_FINAL: Final = frozenset(
    (DropReason.ABORTED, DropReason.RESTARTED, DropReason.DUPLICATE, DropReason.CORRUPT)
)

_COMES_AGAIN: Final = frozenset((DropReason.EVICTED, DropReason.EXPIRED))
"""Why chunks go back that have not failed: they come again when it is the turn of their message."""


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
        breaker: Breaker | None = None,
    ) -> None:
        self.is_paused = False
        self._topic = topic
        self._is_one_key = is_one_key
        self._ack_timeout_ms = limits.ack_timeout_ms
        self._incomplete = incomplete
        self._retry = retry
        self._epoch = 0
        self._is_connected = False
        self._is_leaving = False
        self._queue = ReceiverQueue(is_ordered=is_ordered)
        self._permits = Permits(limits)
        self._chunks = HeldChunks(assembly)
        self._settling = Settling()
        self._live = LiveUnits(self._queue, self._settling)
        self._brake = None if breaker is None else Brake(breaker)
        self._reports: list[Dropped] = []

    # ---- what it tells

    @property
    def buffered(self) -> int:
        """How many messages are here and not handed out."""
        return self._queue.messages

    @property
    def outstanding(self) -> int:
        """How many permits are granted and not used."""
        return self._permits.outstanding

    @property
    def unacked(self) -> int:
        """How many deliveries are handed out and neither settled nor dead."""
        return sum(unit.is_begun for unit in self._live)

    @property
    def dropped(self) -> Counter[DropReason]:
        """How many chunks were let go, by reason."""
        return self._chunks.dropped

    @property
    def collected(self) -> int:
        """How many deliveries' acknowledgements are not sent yet."""
        return self._settling.collected

    @property
    def is_settled(self) -> bool:
        """Whether everything that was asked for is answered."""
        return self._settling.is_settled

    @property
    def is_sent(self) -> bool:
        """Whether nothing is left to be sent, but for permits."""
        return self._settling.is_sent

    @property
    def breaker_state(self) -> BreakerState:
        """What the breaker does; CLOSED where there is none."""
        return BreakerState.CLOSED if self._brake is None else self._brake.state

    @property
    def due_ms(self) -> int | None:
        """When `advance` is to be called; None: not on account of time alone."""
        return None if self._brake is None else self._brake.due_ms

    def take_resolved(self) -> list[Resolved]:
        """What was answered since the last call."""
        return self._live.take_resolved()

    def take_dropped(self) -> list[Dropped]:
        """Which chunks were let go since the last call."""
        reports, self._reports = self._reports, []
        return reports

    # ---- the stream

    def subscribed(self, epoch: int) -> None:
        """A stream is open, and has sent nothing yet."""
        self._epoch = epoch
        self._settling.begin(epoch)
        self._live.begin(epoch)
        self._is_connected = True
        self._is_leaving = False

    def disconnected(self) -> None:
        """The stream ended: its tokens are dead, and everything comes again on the next."""
        self._is_connected = False
        self._live.abandon(self._settling.abandon())
        self._forget_everything()

    def receive(self, response: pb.ConsumeResponse, now_ms: int) -> None:
        """The service said something."""
        match response.WhichOneof("response"):
            case "deliveries":
                if not self._is_leaving:
                    for delivery in response.deliveries.deliveries:
                        self._note_delivery(delivery, now_ms)
            case "settled":
                self._conclude(self._settling.note_settled(response.settled))
            case "revoked":
                self._note_revoked(response.revoked.deliveries)
            case "moved":
                self._note_moved(response.moved.deliveries)
            case "sought":
                self._forget_everything()
                self._settling.note_sought()

    def requests(self) -> list[pb.ConsumeRequest]:
        """What is to be sent now, in this order. Acknowledgements go before what follows them."""
        if not self._is_connected:
            return []
        out = self._settling.requests()
        is_paused = self.is_paused or self.breaker_state is BreakerState.OPEN
        if not (is_paused or self._is_leaving or self._settling.is_seeking):
            permits = self._permits.grant(self._queue)
            if permits:
                out.append(pb.ConsumeRequest(permit=pb.Permit(messages=permits)))
        return out

    # ---- what an application does

    def take(self, now_ms: int, *, hold: bool = False) -> Received | None:
        """The next message that may be handed out; None: there is none. With `hold`, nothing more
        of its key is handed out until `release`.

        Raises:
            CorruptMessageError: it is damaged; it was refused.
        """
        if self._is_leaving or self._settling.is_seeking:
            return None
        brake = self._brake
        is_probe = brake is not None and brake.state is not BreakerState.CLOSED
        if brake is not None and is_probe and not brake.admits(now_ms, self._live.counts):
            return None
        queue = self._queue
        while (unit := queue.head()) is not None:
            messages = unit.messages
            if messages is None:
                messages = self._decode(unit)
            if not messages:
                queue.drop(unit)
                continue
            message = messages.pop()
            queue.note_taken(unit)
            if unit.asked & message.token.bit:
                continue  # it was acknowledged by its id
            timeout_ms = self._ack_timeout_ms
            if unit.is_begun and timeout_ms and (now_ms - unit.renewed_ms) * 3 >= timeout_ms:
                self._live.renew(unit, now_ms, [])
            unit.is_begun = True
            if hold:
                queue.hold(unit.key)
            if brake is not None and is_probe:
                brake.note_taken(message.token.delivery, message.token.bit, now_ms)
            return message
        return None

    def key_of(self, message: Received) -> bytes | None:
        """The key that `take` held for a message; None: its delivery counts no more."""
        unit = self._live.named(message.token)
        return None if unit is None else unit.key

    def release(self, key: bytes) -> None:
        """Nobody works on a message of this key any more."""
        self._queue.release(key)

    def acknowledge(self, token: Token, waiter: Any) -> None:
        """A message is done with."""
        unit = self._live.named(token)
        if unit is None:
            self._live.tell(waiter, stale())
        else:
            self._acknowledge(unit, token.bit, waiter)

    def acknowledge_id(self, message_id: MessageId, waiter: Any) -> None:
        """A message is done with, or all of a batch, by its id."""
        unit = self._live.at(message_id.position)
        if unit is None:
            self._live.tell(waiter, stale())
            return
        bits = unit.all_bits
        if message_id.batch_index >= 0:
            bits &= 1 << message_id.batch_index
        if bits:
            self._acknowledge(unit, bits, waiter)
        else:
            self._live.tell(waiter, no_such_message())

    def acknowledge_through(self, token: Token, waiter: Any) -> None:
        """A message and everything before it is done with."""
        unit = self._live.named(token)
        if unit is None:
            self._live.tell(waiter, stale())
            return
        bits = 2 * token.bit - 1
        ticket = Ticket(What.ACKNOWLEDGED_THROUGH, 1, [waiter], unit, bits)
        self._settling.acknowledge_through(token.delivery, ticket)
        if self._brake is not None:
            self._brake.note_done(token.delivery, token.bit)

    def _acknowledge(self, unit: Unit, bits: int, waiter: Any) -> None:
        is_new = self._live.acknowledge(unit, bits, waiter)
        if is_new and self._brake is not None:
            self._brake.note_done(unit.deliveries[-1], bits)

    def refuse(self, token: Token, delay_ms: int | None, now_ms: int, waiter: Any) -> None:
        """A message could not be processed: its delivery ends here."""
        unit = self._live.named(token)
        if unit is None or unit.asked & token.bit:
            self._live.tell(waiter, stale())
        else:
            self._live.refuse(unit, delay_ms, [waiter])
            if self._brake is not None:
                self._brake.note_failed(token.delivery, token.bit, now_ms)

    def renew(self, token: Token, now_ms: int, waiter: Any) -> None:
        """A message needs more time."""
        unit = self._live.named(token)
        if unit is None:
            self._live.tell(waiter, stale())
        else:
            self._live.renew(unit, now_ms, [waiter])

    def seek(self, start: pb.Start, waiter: Any) -> None:
        """The subscription is to go on from elsewhere. Nothing is handed out until it does."""
        if self._settling.is_seeking or not self._is_connected:
            error = UnavailableError("the consumer is not connected, or is seeking already")
            self._live.tell(waiter, error)
        else:
            self._settling.seek(start, Ticket(What.SOUGHT, 1, [waiter]))

    def waiters(self, request_id: int) -> Iterator[Any]:
        """Who is told what a request is answered that was sent."""
        return self._settling.waiters(request_id)

    def flush(self) -> None:
        """Send the acknowledgements that are collected."""
        self._settling.flush()

    def leave(self) -> None:
        """Take no more, and hand out no more. Leave returns what is here: to give it back before
        would bring it again, for as long as there are permits."""
        self._is_leaving = True
        self._settling.flush()

    # ---- time

    def renew_waiting(self, now_ms: int) -> None:
        """Set the deadlines anew of what is not begun. Called at a third of the time-out. What is
        begun is renewed as it goes on, so while nothing goes on, batches between two messages
        are."""
        is_braked = self.breaker_state is not BreakerState.CLOSED
        for unit in self._live:
            if not unit.is_begun or (is_braked and unit.is_between):
                self._live.renew(unit, now_ms, [])
        held = self._chunks.deliveries
        self._settling.renew(held, Ticket(What.RENEWED, len(held)))

    def expire(self, now_ms: int) -> None:
        """Let go of messages that were incomplete for too long."""
        self._settle_chunks(self._chunks.expire(now_ms))

    def advance(self, now_ms: int) -> None:
        """It is `due_ms`, or later."""
        if self._brake is not None:
            self._brake.advance(now_ms)

    # ---- deliveries

    def _note_delivery(self, delivery: pb.Delivery, now_ms: int) -> None:
        metadata = delivery.metadata
        messages = messages_in(delivery)
        unacked, cost = (1 << messages) - 1, messages
        if messages > 1:
            for index in delivery.acknowledged:
                unacked &= ~(1 << index)
            cost = unacked.bit_count()
        size_bytes = len(delivery.payload)
        self._permits.use(cost, size_bytes)
        if delivery.aborts:
            self._settle_chunks(self._chunks.abort(metadata.producer_name, delivery.aborts))
        if metadata.num_chunks_from_msg > 1:
            self._note_chunk(delivery, now_ms)
            return
        position = position_of(delivery.position)
        self._live.add(
            Unit(
                (delivery.delivery,),
                position,
                position,
                self._key(delivery),
                delivery,
                None,
                unacked,
                cost,
                size_bytes,
                now_ms,
            )
        )

    def _note_chunk(self, delivery: pb.Delivery, now_ms: int) -> None:
        last, key = position_of(delivery.position), self._key(delivery)
        effects = self._chunks.add(delivery, last, key, now_ms)
        self._settle_chunks(effects)
        for effect in effects:
            match effect:
                case Whole(deliveries, first, body):
                    unit = Unit(
                        deliveries, first, last, key, delivery, body, 1, 1, len(body), now_ms
                    )
                    self._live.add(unit)
                case Damaged(error):
                    number = (delivery.delivery,)
                    unit = Unit(number, last, last, key, delivery, b"", 1, 1, 0, now_ms)
                    unit.damage = error
                    self._live.add(unit)

    def _settle_chunks(self, effects: Iterable[Effect]) -> None:
        """Settle those that make no message here, each attempt as one."""
        for effect in effects:
            match effect:
                case LetGo():
                    self._reports.append(effect.dropped)
                    if effect.deliveries:
                        self._let_go(effect)
                case GoesBack():
                    self._give_back(effect)

    def _give_back(self, chunks: GoesBack) -> None:
        ticket = Ticket(What.RETURNED, len(chunks.deliveries), attempt=chunks.attempt)
        self._queue.guard(chunks.key, chunks.first, ticket)
        self._settling.give_back(chunks.deliveries, ticket, no_room=chunks.no_room)

    def _let_go(self, chunks: LetGo) -> None:
        count = len(chunks.deliveries)
        if chunks.dropped.reason in _FINAL or self._incomplete is Incomplete.ACKNOWLEDGE:
            # Nothing of it is left here to be told of the answer.
            self._settling.acknowledge(chunks.deliveries, Ticket(What.ACKNOWLEDGED, count))
        elif chunks.dropped.reason in _COMES_AGAIN:
            self._give_back(self._chunks.send_back(chunks))
        else:
            ticket = Ticket(What.REFUSED, count)
            self._queue.guard(chunks.key, chunks.first, ticket)
            self._settling.refuse(chunks.deliveries, ticket, self._retry_delay_ms(0))

    def _key(self, delivery: pb.Delivery) -> bytes:
        return b"" if self._is_one_key else sticky_key(delivery.metadata)

    def _decode(self, unit: Unit) -> list[Received]:
        """Make messages of a unit.

        Raises:
            CorruptMessageError: it cannot be done; the unit was refused.
        """
        try:
            return unit.decode(self._topic, self._epoch)
        except SeqgateError:
            self._live.refuse(unit, self._retry_delay_ms(unit.source.attempts), [])
            raise

    def _retry_delay_ms(self, attempts: int) -> int | None:
        return None if self._retry is None else round(self._retry.delay_s(attempts) * 1000)

    # ---- what the service says

    def _note_revoked(self, deliveries: Sequence[int]) -> None:
        gone = frozenset(deliveries)
        for delivery in deliveries:
            unit = self._live.get(delivery)
            if unit is not None:
                self._live.give_back(unit, gone=gone)
            else:
                self._settle_chunks(self._chunks.take_back(delivery, gone=gone))

    def _note_moved(self, deliveries: Sequence[int]) -> None:
        for delivery in deliveries:
            unit = self._live.get(delivery)
            if unit is None:
                self._settle_chunks(self._chunks.take_back(delivery))
            elif not unit.is_begun and not unit.asked:
                self._live.give_back(unit)

    def _forget_everything(self) -> None:
        self._live.forget()
        if self._brake is not None:
            self._brake.note_lost()
        self._permits.clear()
        self._chunks.clear()

    def _conclude(self, answered: Iterable[Ticket]) -> None:
        """These have their last answer."""
        self._live.conclude(answered)
        for ticket in answered:
            if ticket.attempt is not None:
                self._chunks.note_returned(ticket.attempt)
