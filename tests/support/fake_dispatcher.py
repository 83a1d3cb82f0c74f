"""A dispatcher for the client's tests: the real machine for one subscription, with a log and a
store in memory.

A Broker never waits: acknowledgements stay `pending` until `complete`, and the test sets the time.
A FakeDispatcher is a Broker behind a real gRPC server. It misbehaves on request: it cuts streams,
redirects consumers, and delays durability.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import google_crc32c
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc import aio
from grpc_status import rpc_status

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1 import dispatcher_pb2_grpc as pb_grpc
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._codec import (
    Compression,
    OutgoingMessage,
    encode_batch,
    encode_single,
)
from seqgate.keys import sticky_key
from seqgate.services.dispatcher.core.effects import (
    AfterDeadLetter,
    DeadLetter,
    Deliver,
    Delivery,
    Drain,
    Effect,
    Entry,
    ForgetKey,
    Options,
    Outcome,
    Persist,
    Read,
    Record,
    Revoke,
    Scan,
    SubscriptionType,
)
from seqgate.services.dispatcher.core.lane import Chunk
from seqgate.services.dispatcher.core.positions import Acknowledged
from seqgate.services.dispatcher.core.selectors import Ring
from seqgate.services.dispatcher.core.settling import Durable
from seqgate.services.dispatcher.core.subscription import Ack, Nack, Subscription
from seqgate.times import milliseconds, timestamp
from seqgate.types import Position
from tests.support.delivery_runs import each_settlement, in_runs

PRODUCER = "p"
EPOCH = 7

_KINDS = {
    pb.SUBSCRIPTION_TYPE_KEY_SHARED: SubscriptionType.KEY_SHARED,
    pb.SUBSCRIPTION_TYPE_SHARED: SubscriptionType.SHARED,
    pb.SUBSCRIPTION_TYPE_EXCLUSIVE: SubscriptionType.EXCLUSIVE,
}
_OUTCOMES = {
    Outcome.DONE: pb.SETTLE_OUTCOME_DONE,
    Outcome.STALE: pb.SETTLE_OUTCOME_STALE,
    Outcome.INVALID: pb.SETTLE_OUTCOME_INVALID,
}


class Stream:
    """A consumer's connection."""

    def __init__(self, subscribe: pb.Subscribe) -> None:
        self.subscribe = subscribe
        self.permits: list[int] = []
        self.outbox: asyncio.Queue[pb.ConsumeResponse | status_pb2.Status | None] = asyncio.Queue()

    def put(self, **response: Any) -> None:
        self.outbox.put_nowait(pb.ConsumeResponse(**response))


class Broker:
    """One subscription, driven by its test.

    Attributes:
        requests: consumers' requests except Subscribe, in order.
        subscribed: the number of Subscribe requests.
        first: the first request of the last stream.
        done: durably acknowledged entries.
        dead: dead-lettered entries.
    """

    def __init__(self) -> None:
        self.requests: list[pb.ConsumeRequest] = []
        self.first = pb.ConsumeRequest()
        self.subscribed = 0
        self.streams: dict[int, Stream] = {}
        self.log: list[ledger_pb2.StoredEntry] = []
        self.done: set[Position] = set()
        self.dead: list[Position] = []
        self.failures: list[tuple[Position, int]] = []
        self.machine: Subscription | None = None
        self._start: common_pb2.Start | None = None
        self._numbers = count(1)
        self._sequence_ids = count()
        self._deliveries = 1
        self._reading: Read | None = None  # a Read that waits for entries
        self.pending: deque[tuple[Subscription, Persist]] = deque()
        self._waiting: deque[tuple[int, Stream, pb.Settled | None]] = deque()

    def now_ms(self) -> int:
        """The time in milliseconds."""
        return time.time_ns() // 1_000_000

    # ---- the log

    def publish(
        self,
        payload: bytes,
        key: str | None = None,
        *,
        now_ms: int | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> Position:
        """Store a message."""
        message = OutgoingMessage(next(self._sequence_ids), payload, key)
        message.properties = properties or {}
        entry = encode_single(
            PRODUCER, message, compression=Compression.NONE, publish_time_ms=self.now_ms()
        )
        return self.store(entry, now_ms)

    def publish_batch(self, payloads: Sequence[bytes], key: str) -> Position:
        """Store a batch."""
        messages = [OutgoingMessage(next(self._sequence_ids), each, key) for each in payloads]
        entry = encode_batch(
            PRODUCER,
            messages,
            compression=Compression.NONE,
            publish_time_ms=self.now_ms(),
            keyed=True,
        )
        return self.store(entry)

    def publish_large(
        self, body: bytes, key: str, chunk_bytes: int, only: Iterable[int] | None = None
    ) -> list[Position]:
        """Store a large message, or only some of its chunks."""
        entries = self.chunks(body, key, chunk_bytes)
        wanted = range(len(entries)) if only is None else only
        return [self.store(entries[chunk_id]) for chunk_id in wanted]

    def chunks(self, body: bytes, key: str, chunk_bytes: int) -> list[ledger_pb2.Entry]:
        """Make the chunks of a large message, without storing them."""
        chunks = [body[at : at + chunk_bytes] for at in range(0, len(body), chunk_bytes)]
        sequence_id, attempt = next(self._sequence_ids), str(uuid.uuid4())
        entries = []
        for chunk_id, payload in enumerate(chunks):
            metadata = entry_pb2.EntryMetadata(
                producer_name=PRODUCER,
                sequence_id=sequence_id,
                publish_time=self.now_ms(),
                partition_key=key,
                uuid=attempt,
                num_chunks_from_msg=len(chunks),
                total_chunk_msg_size=len(body),
                chunk_id=chunk_id,
                message_crc32c=google_crc32c.value(body),
            )
            entries.append(ledger_pb2.Entry(metadata=metadata, payload=payload))
        return entries

    def damage(self, position: Position) -> None:
        """Damage a stored payload."""
        self._stored(position).payload += b"?"

    def store(self, entry: ledger_pb2.Entry, now_ms: int | None = None) -> Position:
        """Append an entry."""
        position = Position(1, len(self.log))
        stored = ledger_pb2.StoredEntry(
            metadata=entry.metadata,
            payload=entry.payload,
            append_time=timestamp(self.now_ms() if now_ms is None else now_ms),
        )
        stored.position.ledger_id, stored.position.entry_id = position
        self.log.append(stored)
        if self._reading is not None:
            reading, self._reading = self._reading, None
            self._do([reading])
        return position

    def _stored(self, position: Position) -> ledger_pb2.StoredEntry:
        return self.log[position.entry_id]

    @property
    def mark_delete(self) -> Position | None:
        """The position up to which every entry is acknowledged."""
        mark = None
        for at in range(len(self.log)):
            if Position(1, at) not in self.done:
                break
            mark = Position(1, at)
        return mark

    # ---- faults

    def cut(self) -> None:
        """End all streams, like a crash of the service."""
        for stream in self.streams.values():
            stream.outbox.put_nowait(_status(code_pb2.UNAVAILABLE, "", {}))

    def drain(self) -> None:
        """Announce that the service is shutting down."""
        for stream in self.streams.values():
            stream.put(draining=common_pb2.Draining())

    def move(self, consumer: int, deliveries: Sequence[int]) -> None:
        """Tell a consumer that other consumers own the keys of these deliveries."""
        self.streams[consumer].put(moved=pb.Moved(deliveries=deliveries))

    # ---- the service

    def subscribe(self, subscribe: pb.Subscribe) -> int:
        """Connect a consumer. Returns the number of its stream."""
        self.subscribed += 1
        number = next(self._numbers)
        name = subscribe.consumer_name or f"consumer-{number}"
        stream = self.streams[number] = Stream(subscribe)
        if self.machine is None:
            self._begin(subscribe.options, subscribe.create_at)
        stream.put(
            subscribed=pb.Subscribed(
                consumer_name=name,
                consumer_id=number,
                epoch=EPOCH,
                ranges=[pb.KeyRange(first=1, last=65_535)],
                properties=subscribe.properties,
            )
        )
        self._do(self._join(number, name))
        return number

    def lose(self, number: int) -> None:
        """Disconnect a consumer."""
        if self.streams.pop(number, None) is not None:
            assert self.machine is not None
            self._do(self.machine.leave(number, now_ms=self.now_ms()))

    def _begin(self, options: pb.SubscriptionOptions, start: common_pb2.Start | None) -> None:
        most = options.max_redeliveries if options.HasField("max_redeliveries") else 16
        self._options = Options(
            kind=_KINDS[options.type],
            in_order=not options.allow_out_of_order_delivery,
            max_in_flight_per_key=options.max_in_flight_per_key,
            redeliveries_max=most,
            after_dead_letter=AfterDeadLetter[
                pb.AfterDeadLetter.Name(
                    options.after_dead_letter or pb.AFTER_DEAD_LETTER_CONTINUE
                ).rsplit("_", 1)[1]
            ],
            retry_first_ms=10,
            retry_max_ms=100,
        )
        if start is not None:
            mark = self._before(start)
            self.done = {Position(1, at) for at in range(-1 if mark is None else mark.entry_id + 1)}
        self._renew()

    def _renew(self) -> None:
        acknowledged = Acknowledged(self.mark_delete)
        for position in sorted(self.done):
            acknowledged.add(position)
        self._reading = None
        self.machine = Subscription(
            self._options,
            Ring(points=5),
            Durable(acknowledged),
            first_delivery=self._deliveries,
        )

    def _before(self, start: common_pb2.Start) -> Position | None:
        match start.WhichOneof("start"):
            case "at":
                at = start.at.entry_id
            case "latest":
                at = len(self.log)
            case "time":
                at = next(
                    (
                        at
                        for at, stored in enumerate(self.log)
                        if milliseconds(stored.append_time) >= milliseconds(start.time)
                    ),
                    len(self.log),
                )
            case _:
                at = 0
        return Position(1, at - 1) if at else None

    def _join(self, number: int, name: str) -> list[Effect]:
        assert self.machine is not None
        subscribe = self.streams[number].subscribe
        return self.machine.join(
            number,
            name=name,
            now_ms=self.now_ms(),
            ack_timeout_ms=milliseconds(subscribe.ack_timeout),
        )

    def handle(self, number: int, request: pb.ConsumeRequest) -> None:
        """Handle a consumer's request."""
        machine, now_ms, stream = self.machine, self.now_ms(), self.streams[number]
        assert machine is not None
        self.requests.append(request)
        match request.WhichOneof("request"):
            case "permit":
                stream.permits.append(request.permit.messages)
                self._do(machine.permit(number, request.permit.messages, now_ms))
            case "acknowledge":
                asked = request.acknowledge
                items = [_item(each) for each in each_settlement(asked)]
                effects, outcomes, persist = machine.acknowledge(number, items, now_ms)
                self._answer_when_durable(stream, asked.request_id, outcomes, persist)
                self._do(effects)
            case "acknowledge_cumulative":
                asked_through = request.acknowledge_cumulative
                settlement = asked_through.settlement
                bits = (2 << max(settlement.indexes)) - 1 if settlement.indexes else 0
                effects, outcome, persist = machine.acknowledge_cumulative(
                    number, Ack(settlement.delivery, bits), now_ms
                )
                self._answer_when_durable(stream, asked_through.request_id, [outcome], persist)
                self._do(effects)
            case "negative_acknowledge":
                refusals = [
                    Nack(
                        each.delivery,
                        milliseconds(each.delay) if each.HasField("delay") else None,
                        each.reason,
                    )
                    for each in request.negative_acknowledge.negative_acknowledgements
                ]
                effects, outcomes = machine.negative_acknowledge(number, refusals, now_ms)
                self._do(effects)
                self._answer(stream, request.negative_acknowledge.request_id, outcomes)
            case "give_back":
                effects, outcomes = machine.give_back(
                    number,
                    request.give_back.deliveries,
                    now_ms,
                    no_room=request.give_back.no_room,
                )
                taken_back = [each for each in effects if isinstance(each, Revoke)]
                self._do(taken_back)
                self._answer(stream, request.give_back.request_id, outcomes)
                self._do(each for each in effects if not isinstance(each, Revoke))
            case "renew":
                outcomes = machine.renew(number, request.renew.deliveries, now_ms)
                self._answer(stream, request.renew.request_id, outcomes)
            case "seek":
                self._seek(stream, request.seek)
            case "leave":
                del self.streams[number]
                persist = machine.durable_with
                self._do(machine.close(number, now_ms))
                if persist:
                    self._waiting.append((persist, stream, None))
                else:
                    stream.outbox.put_nowait(None)

    def _seek(self, stream: Stream, seek: pb.Seek) -> None:
        if seek.start.WhichOneof("start") == "at" and seek.start.at.entry_id > len(self.log):
            status = _status(code_pb2.INVALID_ARGUMENT, "INVALID_START", {})
            stream.put(settled=pb.Settled(request_id=seek.request_id, error=status))
            return
        assert self.machine is not None
        self._deliveries = self.machine.next_delivery
        mark = self._before(seek.start)
        self.done = {Position(1, at) for at in range(0 if mark is None else mark.entry_id + 1)}
        self._renew()
        for number, each in self.streams.items():
            each.put(sought=pb.Sought())
            self._do(self._join(number, each.subscribe.consumer_name or f"consumer-{number}"))
        self._answer(stream, seek.request_id, [])

    # ---- performing effects

    def _answer_when_durable(
        self, stream: Stream, request_id: int, outcomes: Sequence[Outcome], persist: int
    ) -> None:
        if persist:
            self._waiting.append((persist, stream, _settled(request_id, outcomes)))
        else:
            self._answer(stream, request_id, outcomes)

    def _answer(self, stream: Stream, request_id: int, outcomes: Sequence[Outcome]) -> None:
        stream.put(settled=_settled(request_id, outcomes))

    def _deliver(self, stream: Stream, deliveries: Iterable[pb.Delivery]) -> None:
        if stream.subscribe.delivery_runs:
            for each in in_runs(deliveries):
                stream.put(deliveries=each)
        else:
            stream.put(deliveries=pb.Deliveries(deliveries=deliveries))

    def _do(self, effects: Iterable[Effect]) -> None:
        machine = self.machine
        assert machine is not None
        for effect in effects:
            match effect:
                case Deliver(consumer, deliveries):
                    if consumer in self.streams:
                        self._deliver(self.streams[consumer], map(self._delivery, deliveries))
                case Revoke(consumer, numbers):
                    if consumer in self.streams:
                        self.streams[consumer].put(revoked=pb.Revoked(deliveries=numbers))
                case Drain(consumer, numbers):
                    self.move(consumer, numbers)
                case Read(after):
                    at = 0 if after is None else after.entry_id + 1
                    if at >= len(self.log):
                        self._reading = effect
                    else:
                        entries = [_entry(stored) for stored in self.log[at : at + 100]]
                        self._do(machine.read(entries, self.now_ms()))
                case Scan(at_position, after, limit):
                    first = at_position.entry_id if at_position is not None else 0
                    first = max(first, 0 if after is None else after.entry_id + 1)
                    entries = [_entry(stored) for stored in self.log[first : first + limit]]
                    self._do(machine.scanned(entries, self.now_ms()))
                case Persist():
                    self.pending.append((machine, effect))
                    self._note_pending()
                case Record(failed):
                    self.failures += [(each.position, each.attempts) for each in failed]
                    self._do(machine.recorded(self.now_ms()))
                case DeadLetter(position, key):
                    self.dead.append(position)
                    self._do(machine.dead_lettered(position, key, self.now_ms()))
                case ForgetKey():
                    pass
        self._set_timer()

    def _note_pending(self) -> None:
        """Called when a Persist becomes pending."""

    def complete(self) -> None:
        """Complete the oldest pending Persist."""
        machine, what = self.pending.popleft()
        if machine is self.machine:
            self.done.update(what.entries)
            for position, messages, bits in what.parts:
                left = machine.partial.get(position, (1 << messages) - 1) & ~bits
                if not left:
                    self.done.add(position)
            self._do(machine.persisted(self.mark_delete, self.now_ms()))
        while self._waiting and self._waiting[0][0] <= what.number:
            _, stream, settled = self._waiting.popleft()
            if settled is None:
                stream.outbox.put_nowait(None)
            else:
                stream.put(settled=settled)

    def _set_timer(self) -> None:
        """Called when the next timer may have changed."""

    def tick(self) -> None:
        """Perform what is due."""
        assert self.machine is not None
        self._do(self.machine.tick(self.now_ms()))

    def _delivery(self, delivery: Delivery) -> pb.Delivery:
        stored = self._stored(delivery.position)
        wire = pb.Delivery(
            delivery=delivery.delivery,
            position=stored.position,
            metadata=stored.metadata,
            payload=stored.payload,
            append_time=stored.append_time,
            attempts=delivery.attempts,
            aborts=stored.aborts,
        )
        messages = _entry(stored).messages
        wire.acknowledged.extend(
            index for index in range(messages) if not delivery.unacked >> index & 1
        )
        if delivery.gap is not None:
            wire.gap.attempts = delivery.gap.attempts
            wire.gap.position.ledger_id, wire.gap.position.entry_id = delivery.gap.position
        return wire


class FakeDispatcher(Broker, pb_grpc.DispatcherServiceServicer):
    """A Broker that listens on `address`.

    Attributes:
        owner: the address to redirect consumers to; None serves them here.
        durable: clear it to delay durability.
    """

    def __init__(self) -> None:
        super().__init__()
        self.address = ""
        self.owner: str | None = None
        self.durable = asyncio.Event()
        self.durable.set()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def Consume(self, requests: AsyncIterator[pb.ConsumeRequest], context: Any) -> Any:
        self.first = await anext(requests)
        subscribe = self.first.subscribe
        if self.owner is not None:
            details = {"owner": self.owner}
            refused = _status(code_pb2.FAILED_PRECONDITION, "NOT_OWNER", details)
            await context.abort_with_status(rpc_status.to_status(refused))
        number = self.subscribe(subscribe)
        stream = self.streams[number]
        reading = asyncio.create_task(self._take(number, requests))
        try:
            while (response := await stream.outbox.get()) is not None:
                if isinstance(response, status_pb2.Status):
                    await context.abort_with_status(rpc_status.to_status(response))
                yield response
        finally:
            reading.cancel()
            await asyncio.wait([reading])
            self.lose(number)

    async def _take(self, number: int, requests: AsyncIterator[pb.ConsumeRequest]) -> None:
        async for request in requests:
            self.handle(number, request)

    def _note_pending(self) -> None:
        task = asyncio.create_task(self._complete())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _complete(self) -> None:
        await self.durable.wait()
        self.complete()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when_ms = None if self.machine is None else self.machine.next_timer_ms
        if when_ms is not None:
            delay_s = max(0.0, (when_ms - self.now_ms()) / 1000) + 0.001
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.tick)

    async def close(self) -> None:
        """Complete pending work and stop the timer."""
        self.durable.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


@asynccontextmanager
async def serving_fake() -> AsyncIterator[FakeDispatcher]:
    """A running FakeDispatcher."""
    server = aio.server()
    fake = FakeDispatcher()  # type: ignore[abstract]  # implements only the methods called
    pb_grpc.add_DispatcherServiceServicer_to_server(fake, server)
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(0)
        await fake.close()


def _entry(stored: ledger_pb2.StoredEntry) -> Entry:
    metadata = stored.metadata
    position = Position(stored.position.ledger_id, stored.position.entry_id)
    key = sticky_key(metadata)
    chunk = None
    if metadata.num_chunks_from_msg > 1:
        is_last = metadata.chunk_id == metadata.num_chunks_from_msg - 1
        chunk = Chunk(metadata.uuid, is_last, metadata.chunk_id)
    return Entry(position, key, metadata.num_messages_in_batch or 1, 0, chunk)


def _item(settlement: pb.Settlement) -> Ack:
    bits = 0
    for index in settlement.indexes:
        bits |= 1 << index
    return Ack(settlement.delivery, bits)


def _settled(request_id: int, outcomes: Sequence[Outcome]) -> pb.Settled:
    settled = pb.Settled(request_id=request_id)
    if any(outcome is not Outcome.DONE for outcome in outcomes):
        settled.outcomes.extend(_OUTCOMES[outcome] for outcome in outcomes)
    return settled


def _status(code: int, reason: str, details: dict[str, str]) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message=reason or "cut")
    if reason:
        info = error_details_pb2.ErrorInfo(reason=reason, domain="seqgate", metadata=details)
        packed = any_pb2.Any()
        packed.Pack(info)
        status.details.append(packed)
    return status
