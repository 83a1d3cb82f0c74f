"""The consumer for threads.

                   in the loop                        in the application's threads
    stream ──▶ SharedInbox ── fetch ──▶ shelf ── receive()
                    ▲                                   │
                    └── perform ◀── left ◀── ack_nowait(), unlock()

The loop alone uses the inbox. For threads it puts some messages on a shelf, from which each takes
one in a single call into C; only when the shelf is empty is the loop woken. A message on the shelf
is still buffered: whatever changes what may be handed out (a refusal, a revocation, a seek, the
end) first puts it back into the inbox. See docs/decisions/threads-take-from-a-shelf.md.

What threads leave for the loop is done when it next looks: it is woken for the first
acknowledgement, and looks again before it sends acknowledgements.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from contextvars import copy_context
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple, TypeVar, cast

from opentelemetry.trace import Span

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.client import _arguments
from seqgate.client._assembler import DropReason
from seqgate.client._breaker import BreakerState
from seqgate.client._consumer import CLOSE_TIMEOUT_S, nothing
from seqgate.client._consumer import Consumer as AsyncioConsumer
from seqgate.client._inbox import Inbox, ReceiverLimits
from seqgate.client._message import MANY_MESSAGES, Received, Token, token_of
from seqgate.client._requests import ACKS_MAX
from seqgate.client._subscribing import KeyRange, delay_to_wire, reason_to_wire
from seqgate.client.blocking._forking import Interrupted
from seqgate.client.blocking._portal import (
    ClosedError,
    Held,
    Outcome,
    Portal,
    close_when_dropped,
    crossing,
    opening,
)
from seqgate.errors import ConsumerClosedError, SeqgateError
from seqgate.message_id import MessageId
from seqgate.telemetry.names import ACK, NACK

T = TypeVar("T")

SHELF_MESSAGES: Final = 100
SHELF_BYTES: Final = 1024 * 1024
"""About how much the loop puts on a shelf at once, and at most a quarter of the receiver queue."""


class Shelved(NamedTuple):
    """A message on a shelf, and its key if `fetch` locked it."""

    message: Received
    key: bytes | None = None


class SharedInbox(Inbox):
    """An inbox from which the loop puts messages on shelves, for threads.

    Attributes:
        shelf: messages of unlocked keys, the first one left.
        locked: messages whose keys were locked for who takes them.
        left: what threads left for the loop.
    """

    def __init__(self, *args: Any, limits: ReceiverLimits, **kwargs: Any) -> None:
        self.shelf: Final[deque[Shelved]] = deque()
        self.locked: Final[deque[Shelved]] = deque()
        self.left: Final[deque[Callable[[], object]]] = deque()
        self._shelf_messages = min(SHELF_MESSAGES, max(1, limits.messages // 4))
        super().__init__(*args, limits=limits, **kwargs)

    @property
    def buffered(self) -> int:
        return super().buffered + len(self.shelf) + len(self.locked)

    def fill(self, now_ms: int, *, lock: bool, messages: int) -> None:
        """Put messages on a shelf, until it has so many. Raises the same as `take`."""
        shelf = self.locked if lock else self.shelf
        messages = messages or self._shelf_messages
        size_bytes = 0
        while len(shelf) < messages and (size_bytes < SHELF_BYTES or not shelf):
            message = self.take(now_ms, lock=lock)
            if message is None:
                return
            size_bytes += len(message.payload)
            shelf.append(Shelved(message, self.key_of(message) if lock else None))

    def withdraw(self) -> None:
        """Put back what is on the shelves."""
        self.do_what_is_left()
        for shelf in (self.locked, self.shelf):
            with suppress(IndexError):
                while True:
                    message, key = shelf.pop()
                    self.put_back(message)
                    if key is not None:
                        self.unlock(key)

    def do_what_is_left(self) -> None:
        with suppress(IndexError):
            while True:
                act = self.left.popleft()
                act()

    # ---- what changes what may be handed out, or is about what was

    def receive(self, response: pb.ConsumeResponse, now_ms: int) -> None:
        if not (response.HasField("deliveries") or _is_plain(response)):
            self.withdraw()
        super().receive(response, now_ms)

    def disconnected(self) -> None:
        self.withdraw()
        super().disconnected()

    def acknowledge_id(self, message_id: MessageId, waiter: Any) -> None:
        self.withdraw()
        super().acknowledge_id(message_id, waiter)

    def acknowledge_cumulative(self, token: Token, waiter: Any) -> None:
        self.withdraw()
        super().acknowledge_cumulative(token, waiter)

    def negative_acknowledge(
        self, token: Token, delay_ms: int | None, now_ms: int, waiter: Any, reason: str = ""
    ) -> None:
        self.withdraw()
        super().negative_acknowledge(token, delay_ms, now_ms, waiter, reason)

    def seek(self, start: common_pb2.Start, waiter: Any) -> None:
        self.withdraw()
        super().seek(start, waiter)

    def flush(self) -> None:
        self.do_what_is_left()
        super().flush()

    def leave(self) -> None:
        self.withdraw()
        super().leave()

    def renew_waiting(self, now_ms: int) -> None:
        self.withdraw()
        super().renew_waiting(now_ms)

    def expire(self, now_ms: int) -> None:
        self.do_what_is_left()
        super().expire(now_ms)


def _is_plain(response: pb.ConsumeResponse) -> bool:
    """Whether a response says that all went well."""
    settled = response.settled
    return response.HasField("settled") and not (settled.outcomes or settled.HasField("error"))


class SharedConsumer(Interrupted, AsyncioConsumer):
    """The asyncio consumer, whose messages threads take and settle.

    Attributes:
        inbox: threads use no more of it than its queues.
        waiting: how many calls of `fetch` wait.
    """

    _inbox: SharedInbox

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inbox = self._inbox
        self.waiting = 0

    # ---- from any thread

    def check_open(self) -> None:
        self._check_open()

    def must_look(self) -> bool:
        """Whether to wake the loop for what is left: it does not look soon by itself, or something
        waits for it."""
        if self._linger is None or self.waiting or len(self._inbox.left) >= ACKS_MAX:
            return True
        return self._inbox.breaker_state is not BreakerState.CLOSED

    def settling(self, message: Received, done: "Future[None]") -> Callable[[], object]:
        """Acknowledges a message, in the loop."""
        act = partial(self._settle, message, token_of(message), done)
        return partial(copy_context().run, act) if self._spans.is_on else act

    def span_of(self, message: Received) -> AbstractContextManager[Span]:
        return self._spans.processing(message)

    # ---- in the loop

    async def fetch(
        self, *, lock: bool = False, messages: int = 0, timeout_s: float | None = None
    ) -> None:
        """Wait until messages are on a shelf, and add others up to a number. Raises the same as
        `receive`."""
        async with asyncio.timeout(timeout_s):
            self.waiting += 1
            try:
                while not self._fill(lock=lock, messages=messages):
                    self._changed.clear()
                    await self._changed.wait()
            finally:
                self.waiting -= 1
        if self.waiting:
            self._changed.set()  # there may be enough for others

    def refuse(self, message: Received, delay_ms: int | None, reason: str) -> "Future[None]":
        token = token_of(message)
        self._check_open()
        done: Future[None] = Outcome()
        self._spans.settling(NACK, message, cast("Any", done))
        refuse = self._inbox.negative_acknowledge
        self._act(refuse, token, delay_ms, self._now_ms(), done, reason)
        return done

    def perform(self) -> None:
        """Do what is left."""
        self._in_time(self._do_what_is_left)

    def _do_what_is_left(self) -> None:
        self._inbox.do_what_is_left()
        self._perform()

    async def put_back_first(self, message: Received) -> None:
        self._act(self._inbox.withdraw)
        self.put_back(message)

    def take_back(self) -> None:
        """A thread was interrupted, and put what it had taken back on the shelf."""
        self._in_time(self._withdraw)

    def _withdraw(self) -> None:
        self._inbox.withdraw()
        self._perform()
        self._changed.set()

    async def ack_many(self, messages: Iterable[Received]) -> None:
        self.perform()
        await super().ack_many(messages)

    async def hang_up(self) -> bool:
        """End the stream, until `call_again`: what it delivered is delivered again."""
        was_streaming = await super().hang_up()
        if was_streaming:
            self._tasks[0].add_done_callback(self._look)
            self._disconnect()
        return was_streaming

    async def stop(self, error: SeqgateError) -> None:
        """End at once: what is unanswered fails, and later calls raise the error."""
        await self._stop(error)

    async def abandon(self) -> None:
        """`stop`, after a call of `open` that was interrupted."""
        await self._stop(ConsumerClosedError("the consumer was not opened"))

    def _fill(self, *, lock: bool, messages: int) -> bool:
        """Whether a shelf has messages, now that it is filled."""
        self.perform()
        inbox = self._inbox
        shelf = inbox.locked if lock else inbox.shelf
        if not shelf:
            self._check_open()
            if self._postponed is not None:
                error, self._postponed = self._postponed, None
                raise error
        elif not messages:
            return True
        try:
            if self._postponed is None:
                inbox.fill(self._now_ms(), lock=lock, messages=messages)
        except SeqgateError as error:
            self._act(nothing)
            if not shelf:
                raise
            self._postponed = error
        except Exception as surprise:
            raise self._fail(surprise) from surprise
        self._taken()
        return bool(shelf)

    def _settle(self, message: Received, token: Token, done: "Future[None]") -> None:
        try:
            self._spans.settling(ACK, message, cast("Any", done))
            self._inbox.acknowledge(token, done)
        except Exception as surprise:
            error = self._fail(surprise)
            if not done.done():  # it is all that its caller has
                done.set_exception(error)

    def _flush_acks(self) -> None:
        super()._flush_acks()
        self._perform()


class Consumer(Held[SharedConsumer]):
    """Receives a subscription's messages from one topic: `seqgate.client.Consumer` for threads.

    Made by Client.consumer, and used as a context manager and as an iterator of Received. Threads
    may share it: each message goes to one of them.

    A thread takes a message from what the client has buffered without waking the client's thread.
    Until it is taken, the client renews its time-out, and closing hands it back.
    """

    def __init__(self, portal: Portal, held: SharedConsumer, owner: object) -> None:
        super().__init__(portal, held, owner)
        self._inbox = held.inbox
        self._ring = portal.bell(held.perform)
        close_when_dropped(self, portal, held.close)

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
    def connection_error(self) -> SeqgateError | None:
        """Why there is no connection; None: it is connected, or the first attempt is under way."""
        return self._held.connection_error

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
        return self._take(self._inbox.shelf, limit_s).message

    def receive_many(
        self, messages_max: int = MANY_MESSAGES, timeout_s: float | None = None
    ) -> list[Received]:
        """Wait for a message, and return it with those that have arrived already, at most
        `messages_max`. An interrupt loses no message. Raises the same as `receive`; an error about
        a later message is raised by the next call."""
        messages_max = _arguments.whole("messages_max", messages_max, 1)
        limit_s = _arguments.timeout("timeout_s", timeout_s)
        self._portal.check()
        shelf, claim = self._inbox.shelf, list[Shelved]()
        try:
            while not claim:
                self._fetch(limit_s, messages=messages_max)
                with suppress(IndexError):  # one call into C
                    claim.extend(map(deque.popleft, repeat(shelf, messages_max)))
            return [each.message for each in claim]
        except BaseException:
            shelf.extendleft(claim[::-1])
            self._take_back(claim)
            raise

    def receive_and_lock(self) -> tuple[Received, bytes]:
        """Wait for the next message of an unlocked key, and lock its key: no thread gets another
        message of the key until `unlock`. Returns the message and the key."""
        return self._take(self._inbox.locked, None)  # type: ignore[return-value]  # has a key

    def put_back(self, message: Received) -> None:
        """Give back a message as if it had not been received: see the asyncio Consumer."""
        self._portal.check()
        self._run(partial(self._held.put_back_first, message))

    def unlock(self, key: bytes) -> None:
        """Unlock a key: its next message can be received."""
        key = _arguments.binary("key", key)
        self._portal.check()
        self._leave(partial(self._held.unlock, key))

    def _take(self, shelf: deque[Shelved], timeout_s: float | None) -> Shelved:
        """Take the first message of a shelf, and wait for one if there is none."""
        self._portal.check()
        until_s = None
        claim = list[Shelved]()
        try:
            while True:
                try:
                    claim.extend(map(deque.popleft, (shelf,)))  # one call into C
                    return claim[0]
                except IndexError:
                    if claim:  # of a signal's handler
                        raise
                if timeout_s is not None:
                    now_s = time.monotonic()
                    until_s = now_s + timeout_s if until_s is None else until_s
                    timeout_s = until_s - now_s
                self._fetch(timeout_s, lock=shelf is self._inbox.locked)
        except BaseException:
            shelf.extendleft(claim)
            self._take_back(claim)
            raise

    def _take_back(self, claim: list[Shelved]) -> None:
        """Before it is taken from the shelf again, the loop sees whether it is still valid."""
        if claim:
            self._portal.post(self._held.take_back)

    def _fetch(self, timeout_s: float | None, *, lock: bool = False, messages: int = 0) -> None:
        self._run(partial(self._held.fetch, lock=lock, messages=messages, timeout_s=timeout_s))

    def _run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run a function of the asyncio consumer. When the client is closed, so is the consumer."""
        try:
            return self._portal.run(function)
        except ClosedError:
            self._held.check_open()
            raise

    def _leave(self, act: Callable[[], object]) -> None:
        """Leave something for the loop."""
        try:
            self._inbox.left.append(act)
            if self._held.must_look():
                self._ring()
        except BaseException:
            self._portal.post(self._held.perform)
            raise

    def processing(self, message: Received) -> AbstractContextManager[Span]:
        """A span around the processing of a message: see the asyncio Consumer."""
        token_of(message)
        return self._held.span_of(message)

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
        must not block. Acknowledgements are sent together: after 5 ms, or when there are 1,000.
        What is no message raises InvalidRequestError at once."""
        token_of(message)
        self._portal.check()
        self._held.check_open()
        done: Future[None] = Outcome()
        self._leave(self._held.settling(message, done))
        return done

    def ack_many(self, messages: Iterable[Received]) -> None:
        """Acknowledge messages, and return when that is durable for all of them: one hand-over for
        all. Raises the first error that `ack` would raise for one, once all have an outcome. If one
        is no message, or another consumer received it, it acknowledges none, and raises at once."""
        self._portal.check()
        self._run(partial(self._held.ack_many, _arguments.listed("messages", messages)))

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
        exception that `nack` raises. An invalid message, delay or reason raises at once."""
        token_of(message)
        self._portal.check()
        delay_ms = None if delay_s is None else delay_to_wire(delay_s)
        why = reason_to_wire(reason)
        held = self._held
        try:
            return self._portal.call(partial(held.refuse, message, delay_ms, why))
        except ClosedError:
            held.check_open()
            raise

    def reconsume_later(self, message: Received, delay_s: float) -> None:
        """`nack` with a delay."""
        self.nack(message, delay_s)

    ack_id = crossing(SharedConsumer.ack_id)
    ack_through = crossing(SharedConsumer.ack_through)
    extend = crossing(SharedConsumer.extend)
    seek = crossing(SharedConsumer.seek)
    flush = crossing(SharedConsumer.flush)

    def open(self) -> None:
        """Connect. Called by `with`. Raises the same as the asyncio Consumer's."""
        opening(self._portal, self._held)

    def pause(self) -> None:
        """Grant the service no more permits. Messages that are buffered or already permitted can
        still be received."""
        self._portal.call(self._held.pause)

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
