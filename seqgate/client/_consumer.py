"""The consumer: a subscription's messages in, acknowledgements out, reconnections between.

What it does next is decided by `_receiving.py`; this is the stream around it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

from grpc import StatusCode, aio
from opentelemetry.trace import Span

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1 import dispatcher_pb2_grpc as pb_grpc
from seqgate.client._assembler import AssemblyLimits, Dropped, DropReason
from seqgate.client._breaker import Breaker, BreakerState
from seqgate.client._channel import Backoff
from seqgate.client._inbox import Inbox, ReceiverLimits
from seqgate.client._message import Received
from seqgate.client._status import error_of_call
from seqgate.client._subscribing import (
    Incomplete,
    KeyRange,
    Place,
    RetryPolicy,
    SubscriptionOptions,
    SubscriptionType,
    delay_to_wire,
    options_to_wire,
    ranges_to_wire,
    start_to_wire,
)
from seqgate.client._tracing import Consuming
from seqgate.errors import (
    ConsumerClosedError,
    FencedError,
    InternalError,
    InUseError,
    InvalidRequestError,
    LimitExceededError,
    SeqgateError,
    UnavailableError,
)
from seqgate.message_id import MessageId
from seqgate.telemetry.names import ACK, NACK
from seqgate.types import TopicName

ACK_DELAY_S: Final = 0.005
"""How long an acknowledgement waits for others to be sent with it."""

DRAIN_TIMEOUT_S: Final = 5.0
"""How long what is handed out may be settled on a stream whose service is shutting down."""

CLOSE_TIMEOUT_S: Final = 10.0
"""How long closing waits for what was acknowledged to be durable, unless told otherwise."""

KEEP_INTERVAL_S: Final = 10.0
"""How often incomplete large messages are looked at, at least."""

REDIRECTS_MAX: Final = 3
"""How often a consumer is sent on to another instance without a wait between."""

_RETRYABLE: Final = (UnavailableError, LimitExceededError, FencedError)


class Subscribing(NamedTuple):
    """How a consumer subscribes; Client.consumer says what it means."""

    topic: TopicName
    subscription: str
    type: SubscriptionType
    options: SubscriptionOptions
    name: str | None
    start: Place | None
    properties: Mapping[str, str]
    ranges: Sequence[KeyRange]
    weight: int


class Consumer:
    """Takes part in a subscription of one topic.

    Made by Client.consumer, and used as an async context manager and as an async iterator of
    Received. All methods belong to the event loop in which it was made. Many tasks may iterate over
    one consumer; each message goes to one of them.

    Every message is acknowledged (`ack`) or refused (`nack`). One that is neither comes again when
    its time-out is over, or when the consumer is closed or loses its connection. A message may be
    handed out more than once, to this consumer or to another one; what was acknowledged durably is
    not.

    Each delivery has a token that dies when the delivery counts no more. Where order is kept, that
    is also the case when an earlier message of its key is refused: the later ones come again after
    it. An acknowledgement with a dead token changes nothing, and raises StaleTokenError.

    When the connection breaks, the consumer connects again by itself, with growing waits, to
    whichever instance has the subscription. Everything that was not handed out is dropped, and
    comes again; what was handed out has a dead token. So has an acknowledgement that was under way:
    it may be durable or not, and if it is not, the message comes again.

    When message after message is refused, whatever their keys, the consumer hands out nothing for a
    while, and then tries one message at a time until one is acknowledged: see Breaker. `receive`
    waits meanwhile, and no more is taken from the service than was permitted before. What has
    arrived stays here, and its time-outs are renewed.
    """

    def __init__(
        self,
        channels: Callable[[str], aio.Channel],
        address: str,
        subscribing: Subscribing,
        *,
        limits: ReceiverLimits,
        assembly: AssemblyLimits,
        incomplete: Incomplete,
        retry: RetryPolicy | None,
        breaker: Breaker | None,
        on_dropped: Callable[[Dropped], None] | None,
        open_timeout_s: float,
    ) -> None:
        self._channels = channels
        self._home = self._address = address
        self._subscribing = subscribing
        self._first = _subscribe_request(subscribing, limits.ack_timeout_ms)
        self._limits = limits
        self._retry = retry
        self._on_dropped = on_dropped
        self._open_timeout_s = open_timeout_s
        out_of_order = subscribing.options.allow_out_of_order_delivery
        is_ordered = subscribing.type is not SubscriptionType.SHARED and not out_of_order
        self._inbox = Inbox(
            str(subscribing.topic),
            is_ordered=is_ordered,
            is_one_key=is_ordered and subscribing.type is SubscriptionType.EXCLUSIVE,
            limits=limits,
            assembly=assembly,
            incomplete=incomplete,
            retry=retry,
            breaker=breaker,
        )
        self._spans = Consuming(str(subscribing.topic), subscribing.subscription)
        self._subscribed = pb.Subscribed()
        self._loop = asyncio.get_running_loop()
        self._opened = self._loop.create_future()
        self._wake = asyncio.Event()  # there may be something to send
        self._changed = asyncio.Event()  # there may be something to take, or an end
        self._linger: asyncio.TimerHandle | None = None
        self._due: asyncio.TimerHandle | None = None
        self._due_ms: int | None = None
        self._redirects = 0
        self._lost_s: float | None = None
        self._leave = False
        self._is_moving = False
        self._is_connected = False
        self._is_closing = False
        self._last_error: SeqgateError | None = None
        self._failure: SeqgateError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # ---- what an application sees

    @property
    def topic(self) -> str:
        """The topic's full name."""
        return str(self._subscribing.topic)

    @property
    def subscription(self) -> str:
        """The subscription's name."""
        return self._subscribing.subscription

    @property
    def name(self) -> str:
        """The consumer's name, assigned by the service if none was given."""
        return self._subscribed.consumer_name or self._subscribing.name or ""

    @property
    def ranges(self) -> Sequence[KeyRange]:
        """The hash slots that the consumer owns, as far as it was told."""
        return [(each.first, each.last) for each in self._subscribed.ranges]

    @property
    def properties(self) -> Mapping[str, str]:
        """The subscription's properties when the consumer connected."""
        return dict(self._subscribed.properties)

    @property
    def is_connected(self) -> bool:
        """Whether it has a connection now."""
        return self._is_connected

    @property
    def buffered(self) -> int:
        """How many messages have arrived and are not handed out."""
        return self._inbox.buffered

    @property
    def dropped(self) -> Mapping[DropReason, int]:
        """How many chunks of large messages were let go, by reason."""
        return dict(self._inbox.dropped)

    @property
    def breaker_state(self) -> BreakerState:
        """What the breaker does now; CLOSED where there is none."""
        return self._inbox.breaker_state

    def __aiter__(self) -> "Consumer":
        return self

    async def __anext__(self) -> Received:
        """The next message; waits for it. The iteration ends when the consumer is closed. Raises
        what `receive` raises but for TimeoutError."""
        try:
            return await self._receive(lock=False)
        except ConsumerClosedError:
            raise StopAsyncIteration from None

    async def receive(self, timeout_s: float | None = None) -> Received:
        """The next message; waits for it. Cancelling the call loses nothing.

        Args:
            timeout_s: how long to wait, in seconds; None: for ever.

        Raises:
            TimeoutError: none came in time.
            CorruptMessageError: a message is damaged. It was refused, and comes again, or goes to
                the dead letter topic when that was often enough; call again to go on.
            ConsumerClosedError: the consumer is closed, or was not opened.
            SeqgateError: what ended the consumer; see `open`.
        """
        if timeout_s is None:
            return await self._receive(lock=False)
        async with asyncio.timeout(timeout_s):
            return await self._receive(lock=False)

    async def receive_and_hold(self) -> tuple[Received, bytes]:
        """The next message of a key that nobody holds, and the key, which is held now: no task gets
        another message of it until `release`. For who processes keys side by side; process_by_key
        does. Raises what `receive` raises."""
        message = await self._receive(lock=True)
        key = self._inbox.key_of(message)
        assert key is not None
        return message, key

    def release(self, key: bytes) -> None:
        """Hold a key no more."""
        self._inbox.unlock(key)
        self._changed.set()

    def processing(self, message: Received) -> AbstractContextManager[Span]:
        """What is done with a message, as a span: a child of the one that the message was published
        in, by the `traceparent` among its properties, and recorded if that one is; without one a
        root, about which the sampler decides. An exception that leaves the context is the span's
        failure. What is called within is below it, so acknowledge there:

            with consumer.processing(message):
                await store(message.payload)
                await consumer.ack(message)

        process_by_key does so for its handlers. Without OpenTelemetry's SDK it does nothing.
        """
        return self._spans.processing(message)

    async def ack(self, message: Received) -> None:
        """Acknowledge a message, and return when that is durable: it is not delivered again. A
        message of a batch is acknowledged alone, a large message with all its chunks.

        Raises:
            StaleTokenError: the delivery counts no more, or was settled before.
            ConsumerClosedError, and what ended the consumer.
        """
        await self.ack_nowait(message)

    def ack_nowait(self, message: Received) -> "asyncio.Future[None]":
        """Acknowledge a message; the future is done when that is durable, or has what `ack` raises.
        Acknowledgements are sent together: after 5 ms, or when there are 1,000."""
        future = self._future()
        self._spans.settling(ACK, message, future)
        self._inbox.acknowledge(message.token, future)
        self._perform()
        return future

    async def ack_id(self, message_id: MessageId) -> None:
        """Acknowledge a message of which only the id is at hand; of a batch that is named without
        an index, all of it. It must have been delivered to this consumer. Raises what `ack` raises,
        and InvalidRequestError when the batch has no such message."""
        future = self._future()
        self._spans.settling(ACK, None, future)
        self._inbox.acknowledge_id(message_id, future)
        self._perform()
        await future

    async def ack_through(self, message: Received) -> None:
        """Acknowledge a message and everything before it; of EXCLUSIVE subscriptions only. Returns
        when it is durable.

        Raises:
            InvalidRequestError: there may be other consumers (reason CUMULATIVE_ACK_REFUSED).
            StaleTokenError: the delivery counts no more, or was settled before.
            ConsumerClosedError, and what ended the consumer.
        """
        if self._subscribing.type is not SubscriptionType.EXCLUSIVE:
            raise InvalidRequestError(
                "only the one consumer of an EXCLUSIVE subscription may acknowledge all before",
                reason="CUMULATIVE_ACK_REFUSED",
            )
        future = self._future()
        self._spans.settling(ACK, message, future)
        self._inbox.acknowledge_through(message.token, future)
        self._perform()
        await future

    async def nack(self, message: Received, delay_s: float | None = None) -> None:
        """Refuse a message: it could not be processed, and is delivered again, or goes to the dead
        letter topic when that was often enough. Returns when the service has noted it.

        Acknowledgements that were asked for before are sent before. Where order is kept, later
        messages of the key count no more, and come again after this one. Of a batch, the whole
        delivery ends here, but for what is acknowledged of it; messages of it that are not handed
        out are dropped, and come again.

        Args:
            delay_s: how long it waits at least, in seconds, 0 to 86,400; None: as the consumer's
                RetryPolicy says, or, without one, the service: 1 s, doubling with each attempt up
                to 60 s.

        Raises:
            InvalidRequestError: the delay is out of its bounds.
            StaleTokenError: the delivery counts no more, or the message was acknowledged.
            ConsumerClosedError, and what ended the consumer.
        """
        await self.nack_nowait(message, delay_s)

    def nack_nowait(
        self, message: Received, delay_s: float | None = None
    ) -> "asyncio.Future[None]":
        """Refuse a message; the future is done when the service has noted it, or has what `nack`
        raises. An invalid delay is raised at once."""
        if delay_s is None and self._retry is not None:
            delay_s = self._retry.delay_s(message.attempts)
        delay_ms = None if delay_s is None else delay_to_wire(delay_s)
        future = self._future()
        self._spans.settling(NACK, message, future)
        self._inbox.refuse(message.token, delay_ms, self._now_ms(), future)
        self._perform()
        return future

    async def reconsume_later(self, message: Received, delay_s: float) -> None:
        """Have a message delivered again after a delay. It is `nack` with that delay: it counts as
        an attempt, and where order is kept, what follows in the key waits for it. (Pulsar
        publishes the message again, to another topic, and loses its place.)"""
        await self.nack(message, delay_s)

    async def extend(self, message: Received) -> None:
        """Have the whole of `ack_timeout_s` for a message again, from now on. Raises what `ack`
        raises. Without a time-out it only says whether the delivery still counts."""
        future = self._future()
        self._inbox.renew(message.token, self._now_ms(), future)
        self._perform()
        await future

    async def seek(self, place: Place) -> None:
        """Move the subscription, for all its consumers, and return when deliveries begin anew
        there. What this consumer has is dropped, and what it handed out has a dead token.

        Args:
            place: "earliest", "latest", a message's id, or a time: the first message that was
                stored then or later by the ledger's clock. A message in a batch brings its whole
                batch; a large message is read from its first chunk on, with what lies between.

        Raises:
            InvalidRequestError: there is no such place.
            UnavailableError: the consumer is not connected, or seeks already, or lost its
                connection before the answer came: it may have happened. Calling again is safe.
            ConsumerClosedError, and what ended the consumer.
        """
        start = start_to_wire(place)
        future = self._future()
        self._inbox.seek(start, future)
        self._perform()
        await future

    def pause(self) -> None:
        """Take no more messages from the service. What has arrived, and what was permitted before,
        is handed out."""
        self._inbox.is_paused = True

    def resume(self) -> None:
        """Take messages again."""
        self._inbox.is_paused = False
        self._wake.set()

    async def flush(self) -> None:
        """Return when everything that was acknowledged or refused so far has its answer."""
        self._inbox.flush()
        self._wake.set()
        while not self._inbox.is_answered and self._failure is None and self._tasks:
            self._changed.clear()
            await self._changed.wait()

    async def open(self) -> None:
        """Connect. Called by `async with`.

        Raises:
            NotFoundError: the topic, or the subscription, does not exist, and is not created.
            InUseError: the subscription's consumers want another type or other options, or it is
                EXCLUSIVE and has one, or another consumer has the ranges.
            InvalidRequestError: an option, the name, the weight, a range or the start is wrong.
            UnavailableError, LimitExceededError: no service took the consumer within
                `open_timeout_s`.
        """
        self._tasks = [
            asyncio.create_task(
                self._run(), name=f"seqgate-consumer {self.topic} {self.subscription}"
            ),
            asyncio.create_task(self._keep()),
        ]
        try:
            async with asyncio.timeout(self._open_timeout_s):
                await asyncio.shield(self._opened)
        except TimeoutError:
            error = self._last_error or UnavailableError("no dispatcher service answers")
            await self._stop(error)
            raise error from None
        except BaseException:
            await self._stop(ConsumerClosedError("the consumer was not opened"))
            raise

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Take no more, send what was acknowledged or refused, and say goodbye: what is not
        settled, handed out or not, goes to others, and does not count as failed. Returns when what
        was acknowledged is durable, after `timeout_s` seconds at most; then those who wait for it
        get StaleTokenError. Further calls, and those that wait for messages, raise
        ConsumerClosedError."""
        try:
            if self._is_connected and not self._is_closing and self._failure is None:
                self._is_closing = self._leave = True
                self._inbox.leave()
                self._perform()
                self._changed.set()
                await asyncio.wait(self._tasks[:1], timeout=timeout_s)
        finally:
            await self._stop(ConsumerClosedError("the consumer is closed"))

    async def __aenter__(self) -> "Consumer":
        await self.open()
        return self

    async def __aexit__(self, exception: type[BaseException] | None, *rest: object) -> None:
        await self.close()

    # ---- handing out

    async def _receive(self, *, lock: bool) -> Received:
        while True:
            self._check_open()
            message = self._take(lock=lock)
            if message is not None:
                return message
            self._changed.clear()
            await self._changed.wait()

    def _take(self, *, lock: bool) -> Received | None:
        try:
            message = self._inbox.take(self._now_ms(), lock=lock)
        except SeqgateError:
            self._perform()
            raise
        self._wake.set()
        if self._inbox.due_ms != self._due_ms:
            self._set_due(self._inbox.due_ms)
        return message

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closing or not self._tasks:
            raise ConsumerClosedError("the consumer is not open")

    def _future(self) -> "asyncio.Future[None]":
        self._check_open()
        return self._loop.create_future()

    def _perform(self) -> None:
        """Do what follows from a change of the inbox."""
        inbox = self._inbox
        for waiter, error in inbox.take_resolved():
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
                waiter.exception()  # whoever waits is told; nobody has to
        if self._linger is None and inbox.collected:
            self._linger = self._loop.call_later(ACK_DELAY_S, self._flush_acks)
        self._wake.set()
        if inbox.due_ms != self._due_ms:
            self._set_due(inbox.due_ms)
        for dropped in inbox.take_dropped():
            if self._on_dropped is not None:
                self._on_dropped(dropped)

    def _flush_acks(self) -> None:
        self._linger = None
        self._inbox.flush()
        self._wake.set()

    def _set_due(self, due_ms: int | None) -> None:
        """The breaker has changed: there may be something to take, or will be then."""
        if self._due is not None:
            self._due.cancel()
        self._due_ms = due_ms
        self._due = None
        if due_ms is not None:
            at_s = (due_ms + 1) / 1000  # not a moment before, in whole milliseconds
            self._due = self._loop.call_at(at_s, self._note_due)
        self._changed.set()

    def _note_due(self) -> None:
        self._due = None
        self._inbox.advance(self._now_ms())
        self._perform()
        self._changed.set()

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    # ---- the stream

    async def _run(self) -> None:
        backoff = Backoff()
        while True:
            error: SeqgateError = UnavailableError("the service moved away")
            try:
                await self._stream(backoff)
            except SeqgateError as failure:
                error = failure
            except Exception as surprise:
                self._end(InternalError(f"the consumer failed: {surprise!r}"))
                raise
            self._disconnect()
            if self._is_closing:
                return
            if self._lost_s is None:
                self._lost_s = self._loop.time()
            if not self._may_retry(error):
                self._end(error)
                return
            self._last_error = error
            if not self._is_redirected(error):
                await asyncio.sleep(backoff.next_s(error.retry_after_s))

    def _may_retry(self, error: SeqgateError) -> bool:
        if isinstance(error, _RETRYABLE) or error.reason == "NOT_OWNER":
            return True
        # A stream that broke may be taken for alive for a while, and keep its own place.
        if not isinstance(error, InUseError) or not self._opened.done() or self._lost_s is None:
            return False
        return self._loop.time() - self._lost_s < self._open_timeout_s

    def _is_redirected(self, error: SeqgateError) -> bool:
        """Whether to go on at once, to the instance that has the subscription. From anywhere else
        the way leads over the address that the client was given."""
        owner = error.details.get("owner", "") if error.reason == "NOT_OWNER" else ""
        is_news = bool(owner) and owner != self._address
        self._address = owner or self._home
        self._redirects = self._redirects + 1 if is_news else 0
        return is_news and self._redirects <= REDIRECTS_MAX

    async def _stream(self, backoff: Backoff) -> None:
        """One stream, from its beginning until the service moves away.

        Raises:
            SeqgateError: the stream ended with it.
        """
        stub = pb_grpc.DispatcherServiceStub(self._channels(self._address))
        call = stub.Consume()
        self._leave = self._is_closing
        self._is_moving = False
        try:
            await call.write(self._first)
            self._note_subscribed((await _read(call)).subscribed)
            backoff.reset()
            sending = asyncio.create_task(self._send(call))
            moving: asyncio.Task[None] | None = None
            try:
                while (response := await _read_or_end(call)) is not None:
                    if response.HasField("draining") and not self._is_moving:
                        self._is_moving = True
                        moving = asyncio.create_task(self._move_away())
                    self._note(response)
            finally:
                tasks = [each for each in (sending, moving) if each is not None]
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        except aio.AioRpcError as error:
            raise error_of_call(error) from error
        except asyncio.InvalidStateError as error:  # grpc.aio: the stream ended under our hands
            raise await _ending(call) from error
        finally:
            call.cancel()

    def _note_subscribed(self, subscribed: pb.Subscribed) -> None:
        self._subscribed = subscribed
        # Who comes back under its name gets its slots back.
        self._first.subscribe.consumer_name = subscribed.consumer_name
        # A subscription that is deleted is not made again behind its deleter's back.
        self._first.subscribe.ClearField("create_at")
        self._inbox.subscribed(subscribed.epoch)
        self._is_connected = True
        self._redirects = 0
        self._lost_s = None
        self._perform()
        self._changed.set()
        if not self._opened.done():
            self._opened.set_result(None)

    def _note(self, response: pb.ConsumeResponse) -> None:
        if response.HasField("assigned"):
            del self._subscribed.ranges[:]
            self._subscribed.ranges.extend(response.assigned.ranges)
            return
        self._inbox.receive(response, self._now_ms())
        self._perform()
        self._changed.set()

    async def _send(self, call: Any) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for request in self._inbox.requests():
                    if self._spans.are_settling:
                        self._spans.carry(request, self._inbox.waiters)
                    await call.write(request)
                if self._leave and self._inbox.is_sent:
                    await call.write(pb.ConsumeRequest(leave=pb.Leave()))
                    await call.done_writing()
                    return
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return  # the task that reads learns why

    async def _move_away(self) -> None:
        """The service is shutting down: hand out no more, and leave when what was handed out is
        settled, or when that takes too long."""
        inbox = self._inbox
        inbox.leave()
        self._perform()
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while inbox.unacked or not inbox.is_answered:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass  # what is not settled comes again, elsewhere
        self._leave = True
        self._wake.set()

    def _disconnect(self) -> None:
        self._is_connected = False
        self._inbox.disconnected()
        self._perform()
        self._changed.set()

    # ---- time, and endings

    async def _keep(self) -> None:
        """Renew what waits here, and let go of what stays incomplete."""
        timeout_s = self._limits.ack_timeout_ms / 1000
        interval_s = min(KEEP_INTERVAL_S, timeout_s / 3 if timeout_s else KEEP_INTERVAL_S)
        while True:
            await asyncio.sleep(interval_s)
            if timeout_s and self._is_connected:
                self._inbox.renew_waiting(self._now_ms())
            self._inbox.expire(self._now_ms())
            self._perform()

    def _end(self, error: SeqgateError) -> None:
        self._failure = error
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()
        self._changed.set()

    async def _stop(self, error: SeqgateError) -> None:
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []
        self._disconnect()
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._failure = self._failure or error
        self._changed.set()


def _subscribe_request(subscribing: Subscribing, ack_timeout_ms: int) -> pb.ConsumeRequest:
    start = subscribing.start
    try:
        return pb.ConsumeRequest(
            subscribe=pb.Subscribe(
                topic=str(subscribing.topic),
                subscription=subscribing.subscription,
                consumer_name=subscribing.name or "",
                options=options_to_wire(subscribing.type, subscribing.options),
                create_at=None if start is None else start_to_wire(start),
                properties=subscribing.properties,
                ranges=ranges_to_wire(subscribing.ranges),
                weight=subscribing.weight,
                ack_timeout_ms=ack_timeout_ms,
            )
        )
    except (ValueError, TypeError) as error:
        if isinstance(error, SeqgateError):
            raise
        raise InvalidRequestError(
            f"a consumer cannot subscribe so: {error}", reason="INVALID_CONSUMER"
        ) from error


async def _read_or_end(call: Any) -> pb.ConsumeResponse | None:
    """The next response; None where the service ended the stream in good order.

    Raises:
        SeqgateError: it ended with an error.
    """
    response = await call.read()
    if response is not aio.EOF:
        return response  # type: ignore[no-any-return]
    if await call.code() is StatusCode.OK:
        return None
    raise await _ending(call)


async def _read(call: Any) -> pb.ConsumeResponse:
    response = await _read_or_end(call)
    if response is None:
        raise UnavailableError("the service ended the stream")
    return response


async def _ending(call: Any) -> SeqgateError:
    """Why a stream ended."""
    code, details = await call.code(), await call.details()
    if code is StatusCode.OK:
        return UnavailableError("the service ended the stream")
    trailing = await call.trailing_metadata()
    return error_of_call(aio.AioRpcError(code, aio.Metadata(), trailing, details=details))
