"""The consumer for threads.

    stream ──▶ SharedInbox ◀── receive(), ack_nowait(), ... in the application's threads
                   │
                   └── the loop is woken for: permits, the first acknowledgement, refusals

There is no list of messages between the asyncio client and the application. Its threads take
messages from the inbox itself, under a lock, without waking the loop. Until then a message is
buffered there, so what holds of buffered messages in the asyncio client holds here: renewed
time-outs, revocations, the breaker, seeks, and that closing hands them back. See
docs/decisions/threads-take-from-the-inbox.md.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import wraps
from threading import Condition, RLock
from typing import Any, Final, cast

from opentelemetry.trace import Span

from seqgate.client import _arguments
from seqgate.client._assembler import DropReason
from seqgate.client._breaker import BreakerState
from seqgate.client._consumer import CLOSE_TIMEOUT_S, received
from seqgate.client._consumer import Consumer as AsyncioConsumer
from seqgate.client._inbox import Inbox
from seqgate.client._message import MANY_MESSAGES, Received
from seqgate.client._requests import ACKS_MAX
from seqgate.client._subscribing import KeyRange, delay_to_wire, reason_to_wire
from seqgate.client.blocking._forking import Interrupted
from seqgate.client.blocking._portal import Held, Outcome, Portal, crossing
from seqgate.errors import ConsumerClosedError, SeqgateError
from seqgate.telemetry.names import ACK, NACK

TAKEN_MAX: Final = 16
"""How many messages threads take before one looks whether the loop must be woken."""


class SharedInbox(Inbox):
    """An inbox whose owners take turns: each method and property of Inbox holds `lock`. What is
    defined here is for who has it."""

    take_now = Inbox.take
    acknowledge_now = Inbox.acknowledge

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.lock: Final = RLock()
        self._taken = 0
        super().__init__(*args, **kwargs)

    def has_taken(self) -> bool:
        """Whether to see if the loop must be woken. Permits may wait for some messages more, not
        for all."""
        self._taken += 1
        if self._taken < TAKEN_MAX and self._queue.messages:
            return self._brake is not None and self._brake.state is not BreakerState.CLOSED
        self._taken = 0
        return True

    def has_acknowledged(self) -> bool:
        """Whether to wake the loop, which will send acknowledgements soon anyway."""
        return bool(self._resolved) or len(self._requests.acks) >= ACKS_MAX


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def locked(self: SharedInbox, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked


for _name, _member in list(vars(Inbox).items()):
    if _name.startswith("_"):
        continue
    if isinstance(_member, property):
        assert _member.fget is not None
        setattr(SharedInbox, _name, property(_locked(_member.fget)))
    elif callable(_member):
        setattr(SharedInbox, _name, _locked(_member))


class _Changed(asyncio.Event):
    """Also tells threads."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def set(self) -> None:
        super().set()
        self._tell()


class SharedConsumer(Interrupted, AsyncioConsumer):
    """The asyncio consumer, whose messages threads take and settle. `ring` has the loop call
    `perform`."""

    _inbox: SharedInbox

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ring: Callable[[], None] = lambda: None
        self.lock = self._inbox.lock
        self.turn = Condition(self.lock)
        self._waiting = 0  # threads
        self._changed = _Changed(self._tell)

    def perform(self) -> None:
        """Do what changes of the inbox ask for, in the loop."""
        self._perform()

    # ---- from any thread, which has the lock

    def wait(self, timeout_s: float | None, *, lock: bool = False) -> Received:
        """The next message; see `receive`."""
        until_s = None
        while (message := self._next(lock=lock)) is None:
            left_s = None
            if timeout_s is not None:
                now_s = time.monotonic()
                until_s = now_s + timeout_s if until_s is None else until_s
                left_s = until_s - now_s
                if left_s <= 0:
                    raise TimeoutError
            self._wait(left_s)
        return message

    def take_more(self, messages: list[Received], messages_max: int) -> None:
        """Add what else may be handed out; see `receive_many`."""
        try:
            self._inbox.take_more(messages, messages_max, self._now_ms())
        except SeqgateError as error:
            self._postponed = error
        self.ring()

    def key_of(self, message: Received) -> bytes:
        key = self._inbox.key_of(message)
        assert key is not None
        return key

    def unlock_key(self, key: bytes) -> None:
        self._inbox.unlock(key)
        self.turn.notify()

    def acknowledge(self, message: Received) -> "Future[None]":
        self._check_open()
        inbox = self._inbox
        future: Future[None] = Outcome()
        if self._spans.is_on:
            self._spans.settling(ACK, message, cast("Any", future))  # it asks for no more than this
        inbox.acknowledge_now(message.token, future)
        # A linger that has begun ends with a flush, and that includes this.
        if self._linger is None or inbox.has_acknowledged():
            self.ring()
        return future

    def refuse(self, message: Received, delay_ms: int | None, reason: str) -> "Future[None]":
        self._check_open()
        future: Future[None] = Outcome()
        self._spans.settling(NACK, message, cast("Any", future))
        self._inbox.negative_acknowledge(message.token, delay_ms, self._now_ms(), future, reason)
        self.ring()
        return future

    def _next(self, *, lock: bool) -> Received | None:
        self._check_open()
        if self._postponed is not None:
            error, self._postponed = self._postponed, None
            raise error
        inbox = self._inbox
        try:
            message = inbox.take_now(self._now_ms(), lock=lock)
        except SeqgateError:
            self.ring()
            raise
        if inbox.has_taken() and (inbox.is_due or inbox.due_ms != self._due_ms):
            self.ring()
        return message

    def _wait(self, timeout_s: float | None) -> None:
        self._waiting += 1
        try:
            self.turn.wait(timeout_s)
        except BaseException:
            self.turn.notify()  # if this thread was told of a message, it does not take it
            raise
        finally:
            self._waiting -= 1

    # ---- in the loop

    async def hang_up(self) -> bool:
        """End the stream, until `call_again`: what it delivered is delivered again."""
        was_streaming = await super().hang_up()
        if was_streaming:
            self._disconnect()
        return was_streaming

    async def stop(self, error: SeqgateError) -> None:
        """End at once: what is unanswered fails, and later calls raise the error."""
        await self._stop(error)

    def _tell(self) -> None:
        """Wake threads: all at the end, otherwise no more than there are messages."""
        with self.turn:
            if self._waiting:
                is_over = self._failure is not None or self._is_closing or not self._tasks
                self.turn.notify(self._waiting if is_over else self._inbox.buffered)


class Consumer(Held[SharedConsumer]):
    """Receives a subscription's messages from one topic: `seqgate.client.Consumer` for threads.

    Made by Client.consumer, and used as a context manager and as an iterator of Received. Threads
    may share it: each message goes to one of them.

    A thread takes a message from what the client has buffered without waking the client's thread.
    Until it is taken, the client renews its time-out, and closing hands it back.
    """

    def __init__(self, portal: Portal, held: SharedConsumer, owner: object) -> None:
        super().__init__(portal, held, owner)
        held.ring = portal.bell(held.perform)

    @property
    def topic(self) -> str:
        """The topic's full name."""
        return self._held.topic

    @property
    def subscription(self) -> str:
        """The subscription's name."""
        return self._held.subscription

    @property
    def name(self) -> str:
        """The consumer's name, assigned by the service if none was given."""
        return self._held.name

    @property
    def ranges(self) -> Sequence[KeyRange]:
        """The hash slots that the service last assigned to the consumer."""
        return self._portal.look(lambda: self._held.ranges)

    @property
    def properties(self) -> Mapping[str, str]:
        """The subscription's properties, when the consumer last connected."""
        return self._portal.look(lambda: self._held.properties)

    @property
    def is_connected(self) -> bool:
        """Whether the consumer has a stream to the service."""
        return self._held.is_connected

    @property
    def buffered(self) -> int:
        """The number of messages that arrived and were not received by the application yet."""
        return self._held.buffered

    @property
    def dropped(self) -> Mapping[DropReason, int]:
        """Chunks of large messages that were dropped, by reason."""
        return self._portal.look(lambda: self._held.dropped)

    @property
    def breaker_state(self) -> BreakerState:
        """The breaker's state; CLOSED without one."""
        return self._held.breaker_state

    def __iter__(self) -> "Consumer":
        return self

    def __next__(self) -> Received:
        """The next message. The iteration ends when the consumer is closed. Raises the same as
        `receive` without a time-out."""
        try:
            return self.receive()
        except ConsumerClosedError:
            raise StopIteration from None

    def receive(self, timeout_s: float | None = None) -> Received:
        """Wait for the next message. An interrupt loses no message.

        Args:
            timeout_s: how long to wait, in seconds, 0 or more; None: no limit.

        Raises:
            InvalidRequestError: the time-out is negative, or no number.
            TimeoutError: no message arrived in time.
            CorruptMessageError, ConsumerClosedError, SeqgateError: see the asyncio Consumer.
        """
        limit_s = _arguments.timeout("timeout_s", timeout_s)
        self._portal.check()
        held = self._held
        with held.lock:
            return held.wait(limit_s)

    def receive_many(
        self, messages_max: int = MANY_MESSAGES, timeout_s: float | None = None
    ) -> list[Received]:
        """Wait for a message, and return it with those that have arrived already, at most
        `messages_max`. An interrupt loses no message. Raises the same as `receive`; an error about
        a later message is raised by the next call."""
        messages_max = _arguments.whole("messages_max", messages_max, 1)
        limit_s = _arguments.timeout("timeout_s", timeout_s)
        self._portal.check()
        held = self._held
        with held.turn:
            messages = [held.wait(limit_s)]
            held.take_more(messages, messages_max)
            return messages

    def receive_and_lock(self) -> tuple[Received, bytes]:
        """Wait for the next message of an unlocked key, and lock its key: no thread gets another
        message of the key until `unlock`. Returns the message and the key."""
        self._portal.check()
        held = self._held
        with held.turn:
            message = held.wait(None, lock=True)
            return message, held.key_of(message)

    def unlock(self, key: bytes) -> None:
        """Unlock a key: its next message can be received."""
        key = _arguments.binary("key", key)
        self._portal.check()
        with self._held.turn:
            self._held.unlock_key(key)

    def processing(self, message: Received) -> AbstractContextManager[Span]:
        """A span around the processing of a message: see the asyncio Consumer."""
        return self._held.processing(received(message))

    def ack(self, message: Received) -> None:
        """Acknowledge a message, and return when that is durable: it is never redelivered. A
        message of a batch is acknowledged alone, a large message with all its chunks.

        It waits 5 ms for others to share a request: to acknowledge many, use `ack_many` or
        `ack_nowait`. Raises the same as the asyncio Consumer's."""
        done = self.ack_nowait(message)
        try:
            done.result()
        finally:
            del done  # or an error would keep this frame, and this frame the error

    def ack_nowait(self, message: Received) -> "Future[None]":
        """Acknowledge a message; the future is done when that is durable, or has the exception that
        `ack` raises. It cannot be cancelled, and its callbacks run in the client's thread: they
        must not block. Acknowledgements are sent together: after 5 ms, or when there are 1,000."""
        if type(message) is not Received:
            received(message)
        self._portal.check()
        with self._held.lock:
            return self._held.acknowledge(message)

    def ack_many(self, messages: Iterable[Received]) -> None:
        """Acknowledge messages, and return when that is durable for all of them: one hand-over for
        all. Raises the first error that `ack` would raise for one, once all have an outcome."""
        self._portal.check()
        self._portal.run(self._held.ack_many, _arguments.listed("messages", messages))

    def nack(
        self,
        message: Received,
        delay_s: float | None = None,
        *,
        reason: str | BaseException = "",
    ) -> None:
        """Refuse a message that could not be processed, and return when the service has recorded
        it: see the asyncio Consumer."""
        done = self.nack_nowait(message, delay_s, reason=reason)
        try:
            done.result()
        finally:
            del done  # as in `ack`

    def nack_nowait(
        self,
        message: Received,
        delay_s: float | None = None,
        *,
        reason: str | BaseException = "",
    ) -> "Future[None]":
        """Refuse a message; the future is done when the service has recorded it, or has the
        exception that `nack` raises. An invalid delay or reason raises at once."""
        received(message)
        self._portal.check()
        delay_ms = None if delay_s is None else delay_to_wire(delay_s)
        why = reason_to_wire(reason)
        with self._held.turn:
            return self._held.refuse(message, delay_ms, why)

    def reconsume_later(self, message: Received, delay_s: float) -> None:
        """`nack` with a delay."""
        self.nack(message, delay_s)

    ack_id = crossing(SharedConsumer.ack_id)
    ack_through = crossing(SharedConsumer.ack_through)
    extend = crossing(SharedConsumer.extend)
    seek = crossing(SharedConsumer.seek)
    flush = crossing(SharedConsumer.flush)
    open = crossing(SharedConsumer.open)

    def pause(self) -> None:
        """Grant the service no more permits. Messages that are buffered or already permitted can
        still be received."""
        self._portal.check()
        self._held.pause()

    def resume(self) -> None:
        """Grant permits again."""
        self._portal.call(self._held.resume)

    def close(self, timeout_s: float | None = CLOSE_TIMEOUT_S) -> None:
        """Send pending acknowledgements and refusals, and leave the subscription: see the asyncio
        Consumer. In a forked process it does nothing."""
        _arguments.timeout("timeout_s", timeout_s)
        if not self._portal.is_gone:
            self._portal.run(self._held.close, timeout_s)

    def __enter__(self) -> "Consumer":
        self.open()
        return self

    def __exit__(self, *rest: object) -> None:
        self.close()
