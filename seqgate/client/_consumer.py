"""The consumer: connects the application's calls and the service's stream to the inbox.

    stream ── _stream ──▶ Inbox.receive ──▶ Inbox.take ──▶ receive()         deliveries
    stream ◀── _send ── Inbox.requests ◀── Inbox.acknowledge, ... ◀── ack(), ...   settlements

`_inbox.py` decides; this module does the I/O, keeps time and wakes tasks. Call `_perform` after
every change of the inbox.

Whatever fails that must not, in a task, a timer, the inbox or a callback, ends the consumer: see
`_fail`. What waits for it then fails as well, and the service delivers its messages again.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

from grpc import aio
from opentelemetry.trace import Span

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1 import dispatcher_pb2_grpc as pb_grpc
from seqgate.client import _arguments
from seqgate.client._assembler import Dropped, DropReason
from seqgate.client._breaker import BreakerState
from seqgate.client._group import Group
from seqgate.client._inbox import Inbox
from seqgate.client._loops import of_one_loop
from seqgate.client._message import MANY_MESSAGES, Received, Token, token_of
from seqgate.client._reconnecting import Reconnecting
from seqgate.client._status import Asked, error_of_call
from seqgate.client._streams import ending, read, read_or_end
from seqgate.client._subscribing import (
    KeyRange,
    Place,
    Subscribing,
    SubscriptionType,
    delay_to_wire,
    reason_to_wire,
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

ACK_DELAY_S: Final = 0.005
"""How long an acknowledgement waits to share a request with others."""

DRAIN_TIMEOUT_S: Final = 5.0
"""How long messages can still be settled with a service that is shutting down."""

CLOSE_TIMEOUT_S: Final = 10.0
"""How long closing waits for acknowledgements to become durable, by default."""

KEEP_INTERVAL_S: Final = 10.0
"""The longest interval at which incomplete large messages are checked for expiry."""

REDIRECTS_MAX: Final = 3
"""The most consecutive redirects to follow without a delay."""

T = TypeVar("T")

_log: Final = logging.getLogger("seqgate.client")

_RETRYABLE: Final = (UnavailableError, LimitExceededError, FencedError)


@of_one_loop
class Consumer:
    """Receives a subscription's messages from one topic.

    Made by Client.consumer, and used as an async context manager and as an async iterator of
    Received. Call its methods only from the event loop in which it was made. Many tasks may iterate
    over one consumer; each message goes to one of them.

    Acknowledge (`ack`) or refuse (`nack`) every message. Any other message is redelivered when its
    time-out expires, or when the consumer is closed or loses its connection. Delivery is at least
    once: a message may be redelivered, to this or another consumer, until its acknowledgement is
    durable.

    Each delivery has a token, which becomes stale when the delivery is settled, revoked or timed
    out. In an ordered subscription, refusing a message also revokes later messages of its key,
    which are redelivered after it. Acknowledging with a stale token changes nothing and raises
    StaleTokenError. So does acknowledging or refusing a message that another consumer received,
    whatever its topic, subscription, client or process. A copied or unpickled message stands for
    its original.

    When the connection breaks, the consumer reconnects with exponential backoff, to the instance
    that owns the subscription. Buffered messages are dropped and redelivered; tokens of messages
    already received are stale. The result of an acknowledgement in flight is unknown: if it is not
    durable, the message is redelivered.

    When all recent messages were refused, whatever their keys, the breaker pauses the consumer, and
    then lets it try one message at a time until one is acknowledged: see Breaker. Meanwhile
    `receive` waits, no permits are granted, and the time-outs of buffered messages are renewed.
    """

    def __init__(
        self,
        channels: Callable[[str], aio.Channel],
        address: str,
        subscribing: Subscribing,
        inbox: Inbox,
        *,
        on_dropped: Callable[[Dropped], None] | None,
        open_timeout_s: float,
    ) -> None:
        self._channels = channels
        self._home = self._address = address
        self._subscribing = subscribing
        self._first = subscribing.request()
        self._inbox = inbox
        self._on_dropped = on_dropped
        self._open_timeout_s = open_timeout_s
        self._spans = Consuming(str(subscribing.topic), subscribing.subscription)
        self._subscribed = pb.Subscribed()
        self._loop = asyncio.get_running_loop()
        self._opened = self._loop.create_future()
        self._wake = asyncio.Event()  # wakes the task that sends
        self._changed = asyncio.Event()  # wakes tasks that wait for messages, answers or the end
        self._linger: asyncio.TimerHandle | None = None
        self._due: asyncio.TimerHandle | None = None
        self._due_ms: int | None = None
        self._logged_pause_ms = 0
        self._postponed: SeqgateError | None = None  # of a message behind those of receive_many
        self._redirects = 0
        self._lost_s: float | None = None
        self._leave = False
        self._is_moving = False
        self._is_connected = False
        self._is_closing = False
        self._reconnecting = Reconnecting(
            f"a consumer of {subscribing.subscription!r} of {subscribing.topic}"
        )
        self._failure: SeqgateError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # ---- the application

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
        """The hash slots that the service last assigned to the consumer."""
        return [(each.first, each.last) for each in self._subscribed.ranges]

    @property
    def properties(self) -> Mapping[str, str]:
        """The subscription's properties, when the consumer last connected."""
        return dict(self._subscribed.properties)

    @property
    def is_connected(self) -> bool:
        """Whether the consumer has a stream to the service."""
        return self._is_connected

    @property
    def connection_error(self) -> SeqgateError | None:
        """Why there is no connection: the error of the latest attempt, or the loss of the last one.
        None: it is connected, or the first attempt is under way."""
        return self._reconnecting.trouble

    @property
    def buffered(self) -> int:
        """The number of messages that arrived and were not received by the application yet."""
        return self._inbox.buffered

    @property
    def dropped(self) -> Mapping[DropReason, int]:
        """Chunks of large messages that were dropped, by reason."""
        return dict(self._inbox.dropped)

    @property
    def breaker_state(self) -> BreakerState:
        """The breaker's state; CLOSED without one."""
        return self._inbox.breaker_state

    def __aiter__(self) -> "Consumer":
        return self

    async def __anext__(self) -> Received:
        """The next message. The iteration ends when the consumer is closed. Raises the same as
        `receive` without a time-out."""
        try:
            return await self._receive(lock=False)
        except ConsumerClosedError:
            raise StopAsyncIteration from None

    async def receive(self, timeout_s: float | None = None) -> Received:
        """Wait for the next message. Cancelling the call loses no message.

        Args:
            timeout_s: how long to wait, in seconds, 0 or more; None: no limit.

        Raises:
            InvalidRequestError: the time-out is negative, or no number.
            TimeoutError: no message arrived in time.
            CorruptMessageError: a message is damaged. The consumer has refused it: it is
                redelivered, or moved to the dead letter topic. Call again to continue.
            ConsumerClosedError: the consumer is closed, or was not opened.
            SeqgateError: the error that ended the consumer; see `open`.
        """
        limit_s = _arguments.timeout("timeout_s", timeout_s)
        if limit_s is None:
            return await self._receive(lock=False)
        async with asyncio.timeout(limit_s):
            return await self._receive(lock=False)

    async def receive_many(
        self, messages_max: int = MANY_MESSAGES, timeout_s: float | None = None
    ) -> list[Received]:
        """Wait for a message, and return it with those that have arrived already, at most
        `messages_max`. Cancelling the call loses no message. Raises the same as `receive`; an error
        about a later message is raised by the next call."""
        messages_max = _arguments.whole("messages_max", messages_max, 1)
        messages = [await self.receive(timeout_s)]
        try:
            self._inbox.take_more(messages, messages_max, self._now_ms())
        except SeqgateError as error:
            self._act(nothing)
            self._postponed = error
        except Exception as surprise:
            raise self._fail(surprise) from surprise
        self._taken()
        return messages

    async def receive_and_lock(self) -> tuple[Received, bytes]:
        """Wait for the next message of an unlocked key, and lock its key: no task gets another
        message of the key until `unlock`. Returns the message and the key. For concurrent
        processing in key order, as in process_by_key. Raises the same as `receive`."""
        message = await self._receive(lock=True)
        key = self._inbox.key_of(message)
        assert key is not None
        return message, key

    def put_back(self, message: Received) -> None:
        """Give back a message as if it had not been received: it is the next one of its key that
        this consumer receives, and has not failed. Later messages of its key must not have been
        received. A message that is settled, or whose token is stale, is left alone."""
        token_of(message)
        self._act(self._inbox.put_back, message)
        self._changed.set()

    def unlock(self, key: bytes) -> None:
        """Unlock a key: its next message can be received."""
        self._act(self._inbox.unlock, _arguments.binary("key", key))
        self._changed.set()

    def processing(self, message: Received) -> AbstractContextManager[Span]:
        """A span around the processing of a message. It is a child of the span that published the
        message, by the `traceparent` among the message's properties, and sampled like that one;
        without one it is a root. An exception that leaves the context is recorded as the span's
        failure. Acknowledge inside, so that the acknowledgement's span is a child:

            with consumer.processing(message):
                await store(message.payload)
                await consumer.ack(message)

        process_by_key does this for its handlers. Without OpenTelemetry's SDK it does nothing.
        """
        token_of(message)
        return self._spans.processing(message)

    async def ack(self, message: Received) -> None:
        """Acknowledge a message, and return when that is durable: it is never redelivered. A
        message of a batch is acknowledged alone, a large message with all its chunks.

        Raises:
            StaleTokenError: the delivery is settled already, was revoked, or timed out.
            ConsumerClosedError, or the error that ended the consumer.
        """
        await self.ack_nowait(message)

    async def ack_many(self, messages: Iterable[Received]) -> None:
        """Acknowledge messages, and return when that is durable for all of them. Raises the first
        error that `ack` would raise for one, once all have an outcome. If one is no message, or
        another consumer received it, it acknowledges none, and raises at once."""
        messages = _arguments.listed("messages", messages)
        tokens = [token_of(each) for each in messages]
        self._check_open()
        self._inbox.check_own(tokens)
        if self._spans.is_on:
            futures = [self.ack_nowait(each) for each in messages]
            for outcome in await asyncio.gather(*futures, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
            return
        await self._act(self._acknowledge_all, tokens).results()

    def _acknowledge_all(self, tokens: Iterable[Token]) -> Group[None]:
        together: dict[tuple[int, int], int] = {}
        for token in tokens:
            at = (token.connection, token.delivery)
            together[at] = together.get(at, 0) | token.bit
        some = [
            (*at, part) for at, bits in together.items() for part in self._inbox.parts(*at, bits)
        ]
        group: Group[None] = Group(len(some))
        for part, member in zip(some, group.members(), strict=True):
            self._inbox.acknowledge_part(*part, member)
        return group

    def ack_nowait(self, message: Received) -> "asyncio.Future[None]":
        """Acknowledge a message; the future is done when that is durable, or has the exception that
        `ack` raises. Acknowledgements are sent together: after 5 ms, or when there are 1,000. What
        is no message raises InvalidRequestError at once."""
        token = token_of(message)
        future = self._future()
        self._spans.settling(ACK, message, future)
        self._act(self._inbox.acknowledge, token, future)
        return future

    async def ack_id(self, message_id: MessageId) -> None:
        """Acknowledge a message by its id, or a whole batch by an id without an index. It must have
        been delivered to this consumer. An id that was stored as a text or as bytes names a place
        in this consumer's topic; that of a message of another topic is stale. Raises the same as
        `ack`, and InvalidRequestError if the batch has no message with this index."""
        message_id = _arguments.message_id("message_id", message_id, reason="INVALID_SETTLEMENT")
        future = self._future()
        self._spans.settling(ACK, None, future)
        self._act(self._inbox.acknowledge_id, message_id, future)
        await future

    async def ack_through(self, message: Received) -> None:
        """Acknowledge a message and all before it, and return when that is durable. EXCLUSIVE
        subscriptions only.

        Raises:
            InvalidRequestError: the subscription is not EXCLUSIVE (reason CUMULATIVE_ACK_REFUSED).
            StaleTokenError: the delivery is settled already, was revoked, or timed out.
            ConsumerClosedError, or the error that ended the consumer.
        """
        token = token_of(message)
        if self._subscribing.type is not SubscriptionType.EXCLUSIVE:
            raise InvalidRequestError(
                "ack_through needs an EXCLUSIVE subscription: other consumers share this one",
                reason="CUMULATIVE_ACK_REFUSED",
            )
        future = self._future()
        self._spans.settling(ACK, message, future)
        self._act(self._inbox.acknowledge_cumulative, token, future)
        await future

    async def nack(
        self,
        message: Received,
        delay_s: float | None = None,
        *,
        reason: str | BaseException = "",
    ) -> None:
        """Refuse a message that could not be processed: it is redelivered, or moved to the dead
        letter topic if no redeliveries are left. Returns when the service has recorded it.

        Earlier acknowledgements are sent first. In an ordered subscription, later messages of the
        key are revoked, and redelivered after this one. Refusing a message of a batch ends the
        delivery of the whole batch: its messages not received yet are dropped, and all but the
        acknowledged ones are redelivered.

        Args:
            delay_s: the least delay before redelivery, in seconds, 0 to 86,400; None: by the
                consumer's RetryPolicy or, without one, the service's: 1 s, doubling with each
                attempt up to 60 s.
            reason: why, for those who read the message's life or its dead letter: at most 256
                bytes of UTF-8; or an exception, whose type and message are cut to fit.

        Raises:
            InvalidRequestError: the delay or the reason is out of its bounds.
            StaleTokenError: the delivery is settled already, was revoked, or timed out; or the
                message was acknowledged.
            ConsumerClosedError, or the error that ended the consumer.
        """
        await self.nack_nowait(message, delay_s, reason=reason)

    def nack_nowait(
        self,
        message: Received,
        delay_s: float | None = None,
        *,
        reason: str | BaseException = "",
    ) -> "asyncio.Future[None]":
        """Refuse a message; the future is done when the service has recorded it, or has the
        exception that `nack` raises. An invalid message, delay or reason raises at once."""
        token = token_of(message)
        delay_ms = None if delay_s is None else delay_to_wire(delay_s)
        why = reason_to_wire(reason)
        future = self._future()
        self._spans.settling(NACK, message, future)
        self._act(self._inbox.negative_acknowledge, token, delay_ms, self._now_ms(), future, why)
        return future

    async def reconsume_later(self, message: Received, delay_s: float) -> None:
        """`nack` with a delay. It counts as an attempt, and in an ordered subscription, later
        messages of the key wait for this one. (Pulsar publishes the message again, to another
        topic, and loses its place.)"""
        await self.nack(message, delay_s)

    async def extend(self, message: Received) -> None:
        """Restart a message's `ack_timeout_s`; without a time-out, only check its token. Raises the
        same as `ack`."""
        token = token_of(message)
        future = self._future()
        self._act(self._inbox.renew, token, self._now_ms(), future)
        await future

    async def seek(self, place: Place) -> None:
        """Move the subscription, for all its consumers, and return when deliveries start from the
        new place. Buffered messages are dropped; tokens of messages already received are stale.

        Args:
            place: "earliest", "latest", a message's id, or a time: the first message that was
                stored then or later by the ledger's clock. The id of a message in a batch selects
                the whole batch, the id of a large message its first chunk.

        Raises:
            InvalidRequestError: the place is invalid.
            UnavailableError: the consumer is not connected, another seek is in progress, or the
                connection was lost before the answer: the subscription may have moved. Calling
                again is safe.
            ConsumerClosedError, or the error that ended the consumer.
        """
        start = start_to_wire(place)
        future = self._future()
        self._act(self._inbox.seek, start, future)
        await future

    def pause(self) -> None:
        """Grant the service no more permits. Messages that are buffered or already permitted can
        still be received."""
        self._inbox.is_paused = True

    def resume(self) -> None:
        """Grant permits again."""
        self._inbox.is_paused = False
        self._wake.set()

    async def flush(self) -> None:
        """Return when all acknowledgements and refusals so far are answered."""
        self._act(self._inbox.flush)
        while not self._inbox.is_answered and self._failure is None and self._tasks:
            self._changed.clear()
            await self._changed.wait()

    async def open(self) -> None:
        """Connect. Called by `async with`.

        Raises:
            NotFoundError: the topic does not exist; or the subscription does not, and no start is
                given.
            InUseError: connected consumers have another type or other options; or the subscription
                is EXCLUSIVE and has a consumer; or another consumer has the ranges.
            InvalidRequestError: an option, the name, the weight, a range or the start is invalid.
            UnavailableError, LimitExceededError: no service accepted the consumer within
                `open_timeout_s`.
        """
        name = f"seqgate-consumer {self.topic} {self.subscription}"
        self._tasks = [self._start(self._run(), name), self._start(self._keep())]
        try:
            async with asyncio.timeout(self._open_timeout_s):
                await asyncio.shield(self._opened)
        except TimeoutError:
            error = self._reconnecting.given_up(self._home, self._open_timeout_s)
            await self._stop(error)
            raise error from None
        except BaseException:
            await self._stop(ConsumerClosedError("the consumer was not opened"))
            raise

    async def close(self, timeout_s: float | None = CLOSE_TIMEOUT_S) -> None:
        """Send pending acknowledgements and refusals, and leave the subscription. Unsettled
        messages go to other consumers, and do not count as failed. Returns when acknowledgements
        are durable, or after `timeout_s` seconds; unanswered ones then raise StaleTokenError. Later
        calls, and pending receives, raise ConsumerClosedError. None: no limit."""
        timeout_s = _arguments.timeout("timeout_s", timeout_s)
        try:
            if self._is_connected and not self._is_closing and self._failure is None:
                self._is_closing = self._leave = True
                self._act(self._inbox.leave)
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
            if self._postponed is not None:
                error, self._postponed = self._postponed, None
                raise error
            message = self._take(lock=lock)
            if message is not None:
                return message
            self._changed.clear()
            await self._changed.wait()

    def _take(self, *, lock: bool) -> Received | None:
        try:
            message = self._inbox.take(self._now_ms(), lock=lock)
        except SeqgateError:
            self._act(nothing)
            raise
        except Exception as surprise:
            raise self._fail(surprise) from surprise
        self._taken()
        return message

    def _taken(self) -> None:
        """Messages were taken: more may be permitted."""
        self._wake.set()
        if self._inbox.due_ms != self._due_ms:
            self._set_due(self._inbox.due_ms)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closing or not self._tasks:
            raise ConsumerClosedError("the consumer is not open")

    def _future(self) -> "asyncio.Future[None]":
        self._check_open()
        return self._loop.create_future()

    def _act(self, change: Callable[..., T], *about: Any) -> T:
        """Change the inbox, and carry out what follows, for the application."""
        try:
            result = change(*about)
            self._perform()
        except Exception as surprise:
            error = self._fail(surprise)
            for each in about:
                if isinstance(each, asyncio.Future):
                    _answer(each, error)
            raise error from surprise
        return result

    def _perform(self) -> None:
        """Carry out a change of the inbox: answer waiters, set timers, wake the sender."""
        inbox = self._inbox
        self._resolve()
        if self._linger is None and inbox.collected:
            self._linger = self._loop.call_later(ACK_DELAY_S, self._in_time, self._flush_acks)
        self._wake.set()
        if inbox.due_ms != self._due_ms:
            self._set_due(inbox.due_ms)
        if inbox.breaker_pause_ms != self._logged_pause_ms:
            self._log_breaker(inbox.breaker_pause_ms)
        for dropped in inbox.take_dropped():
            if self._on_dropped is not None:
                self._on_dropped(dropped)

    def _log_breaker(self, pause_ms: int) -> None:
        self._logged_pause_ms = pause_ms
        what = f"consumer {self.name!r} of subscription {self.subscription!r} of {self.topic}"
        if not pause_ms:
            _log.warning("%s goes on: a message was acknowledged, the breaker is closed", what)
            return
        _log.warning(
            "%s hands out nothing for %g s, then one message at a time: the breaker is open, since"
            " the last messages were refused, whatever their keys. To change when it opens, or to"
            " have none, give breaker= to Client.consumer",
            what,
            pause_ms / 1000,
        )

    def _resolve(self) -> None:
        for waiter, error in self._inbox.take_resolved():
            _answer(waiter, error)

    def _in_time(self, act: Callable[[], None]) -> None:
        """Do what a timer was set for."""
        try:
            act()
        except Exception as surprise:
            self._fail(surprise)

    def _flush_acks(self) -> None:
        self._linger = None
        self._inbox.flush()
        self._wake.set()

    def _set_due(self, due_ms: int | None) -> None:
        """The breaker changed: wake receivers now, and at its next change."""
        if self._due is not None:
            self._due.cancel()
        self._due_ms = due_ms
        self._due = None
        if due_ms is not None:
            at_s = (due_ms + 1) / 1000  # `_now_ms` rounds down: never wake early
            self._due = self._loop.call_at(at_s, self._in_time, self._advance)
        self._changed.set()

    def _advance(self) -> None:
        self._due = None
        self._inbox.advance(self._now_ms())
        self._perform()
        self._changed.set()

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    # ---- the stream

    async def _run(self) -> None:
        while True:
            error: SeqgateError = UnavailableError("the service shut down")
            try:
                await self._stream()
            except SeqgateError as failure:
                error = failure
            self._disconnect()
            if self._is_closing:
                return
            if self._lost_s is None:
                self._lost_s = self._loop.time()
            if not self._may_retry(error):
                self._end(error)
                return
            if not self._is_redirected(error):
                await asyncio.sleep(self._reconnecting.failed(error))

    def _may_retry(self, error: SeqgateError) -> bool:
        if isinstance(error, _RETRYABLE) or error.reason == "NOT_OWNER":
            return True
        # For a while the service may take a broken stream for alive, and its place for in use.
        if not isinstance(error, InUseError) or not self._opened.done() or self._lost_s is None:
            return False
        return self._loop.time() - self._lost_s < self._open_timeout_s

    def _is_redirected(self, error: SeqgateError) -> bool:
        """Whether to reconnect immediately, to the owner that the error names. Otherwise the next
        attempt uses the address that the application gave."""
        owner = error.details.get("owner", "") if error.reason == "NOT_OWNER" else ""
        is_news = bool(owner) and owner != self._address
        self._address = owner or self._home
        self._redirects = self._redirects + 1 if is_news else 0
        return is_news and self._redirects <= REDIRECTS_MAX

    async def _stream(self) -> None:
        """Run one stream until the service shuts down, or raise its error."""
        asked = Asked("dispatcher", self._address)
        stub = pb_grpc.DispatcherServiceStub(self._channels(self._address))
        call = stub.Consume()
        self._leave = self._is_closing
        self._is_moving = False
        try:
            self._inbox.tell_breaker(self._first, is_first=True)
            await call.write(self._first)
            self._take_subscribed((await read(call, asked)).subscribed)
            self._reconnecting.succeeded()
            sending = self._start(self._send(call))
            moving: asyncio.Task[None] | None = None
            try:
                while (response := await read_or_end(call, asked)) is not None:
                    if response.HasField("draining") and not self._is_moving:
                        self._is_moving = True
                        moving = self._start(self._move_away())
                    self._take_response(response)
            finally:
                tasks = [each for each in (sending, moving) if each is not None]
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        except aio.AioRpcError as error:
            raise error_of_call(error, asked) from error
        except asyncio.InvalidStateError as error:
            if not call.done():
                raise
            raise await ending(call, asked) from error  # grpc.aio: the stream has ended
        finally:
            call.cancel()

    def _take_subscribed(self, subscribed: pb.Subscribed) -> None:
        self._subscribed = subscribed
        # Reconnecting under the same name returns the same slots.
        self._first.subscribe.consumer_name = subscribed.consumer_name
        # A reconnect must not recreate a subscription that was deleted.
        self._first.subscribe.ClearField("create_at")
        self._inbox.subscribed(subscribed.epoch)
        self._is_connected = True
        self._redirects = 0
        self._lost_s = None
        self._perform()
        self._changed.set()
        if not self._opened.done():
            self._opened.set_result(None)

    def _take_response(self, response: pb.ConsumeResponse) -> None:
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
            return  # `_stream` reports the cause

    async def _move_away(self) -> None:
        """The service is shutting down: hand out nothing more, and leave when every message that
        was handed out is settled, or after DRAIN_TIMEOUT_S."""
        inbox = self._inbox
        inbox.leave()
        self._perform()
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while inbox.unacked or not inbox.is_answered:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass  # the rest is redelivered by another instance
        self._leave = True
        self._wake.set()

    def _disconnect(self) -> None:
        self._is_connected = False
        self._inbox.disconnected()
        self._perform()
        self._changed.set()

    # ---- time, and endings

    async def _keep(self) -> None:
        """Renew the time-outs of buffered messages, and expire incomplete large ones."""
        timeout_s = self._subscribing.ack_timeout_ms / 1000
        interval_s = min(KEEP_INTERVAL_S, timeout_s / 3 if timeout_s else KEEP_INTERVAL_S)
        while True:
            await asyncio.sleep(interval_s)
            if timeout_s and self._is_connected:
                self._inbox.renew_waiting(self._now_ms())
            self._inbox.expire(self._now_ms())
            self._perform()

    def _start(
        self, work: Coroutine[Any, Any, None], name: str | None = None
    ) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._look)
        return task

    def _look(self, task: "asyncio.Task[None]") -> None:
        """A task of the consumer has ended."""
        if task.cancelled():
            if task in self._tasks and self._failure is None:
                self._give_up(ConsumerClosedError("the consumer's task was cancelled"))
        elif (surprise := task.exception()) is not None:
            self._fail(surprise)

    def _fail(self, surprise: BaseException) -> SeqgateError:
        """End the consumer because of what must not fail. Returns the error of later calls."""
        _log.error(
            "the consumer of %r of %s failed", self.subscription, self.topic, exc_info=surprise
        )
        error = InternalError(f"the consumer failed: {reason_to_wire(surprise)}")
        error.__cause__ = surprise
        return self._give_up(error)

    def _give_up(self, error: SeqgateError) -> SeqgateError:
        """End the consumer, also while one of its tasks runs. Returns the error of later calls."""
        for task in self._tasks:
            task.cancel()
        try:
            self._release()
        finally:
            ended_with = self._end(error)
        return ended_with

    def _end(self, error: SeqgateError) -> SeqgateError:
        """Later calls raise the error, unless they raise another one already. Returns theirs."""
        self._failure = self._failure or error
        if not self._opened.done():
            self._opened.set_exception(self._failure)
            self._opened.exception()
        self._changed.set()
        return self._failure

    def _release(self) -> None:
        """Fail all that waits for an answer, and stop the timers."""
        self._is_connected = False
        for timer in (self._linger, self._due):
            if timer is not None:
                timer.cancel()
        self._linger = self._due = None
        self._inbox.disconnected()
        self._resolve()

    async def _stop(self, error: SeqgateError) -> None:
        self._is_closing = True
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            try:
                self._release()
            except Exception as surprise:
                self._fail(surprise)
            finally:
                self._end(error)


def nothing() -> None:
    """For `_act`, after a change of the inbox."""


def _answer(waiter: Any, error: SeqgateError | None) -> None:
    if waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)
        waiter.exception()  # retrieved: not every waiter is awaited
