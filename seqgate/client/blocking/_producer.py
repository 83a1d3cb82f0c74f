"""The producer for threads.

    send() ──▶ handed over ── one hand-over for many ──▶ pump ──▶ the asyncio producer

A thread checks its message, and compresses it if it may be large; the loop numbers and sends it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextvars import Context, copy_context
from datetime import datetime
from typing import Any, NamedTuple

from seqgate.client._arguments import listed
from seqgate.client._codec import OutgoingMessage
from seqgate.client._outbox import Receipt
from seqgate.client._producer import Outgoing, delivery_time, given_id, raise_about
from seqgate.client._producer import Producer as AsyncioProducer
from seqgate.client.blocking._forking import Interrupted
from seqgate.client.blocking._portal import (
    Held,
    Outcome,
    Portal,
    close_when_dropped,
    crossing,
    opening,
)
from seqgate.errors import ProducerClosedError, SeqgateError


class _Handed(NamedTuple):
    message: OutgoingMessage
    sequence_id: int | None
    done: Any  # a Future[Receipt], which has what the outbox asks of asyncio's
    context: Context


class SharedProducer(Interrupted, AsyncioProducer):
    """The asyncio producer, with a queue of messages that threads hand over. Their numbers and
    bytes count as pending from then on.

    Attributes:
        ring: has the loop call `pump`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ring: Callable[[], None] = lambda: None
        self._handed: deque[_Handed] = deque()
        # What threads handed over, and what the loop has taken of that. Threads count without a
        # lock: one may be counted that is interrupted before its message is in the queue, and one
        # addition may overwrite another. So the counts are made even when the queue is empty.
        self._given_messages = self._given_bytes = 0
        self._taken_messages = self._taken_bytes = 0
        self._waiting_for_room: asyncio.Task[None] | None = None

    # ---- from any thread

    @property
    def all_pending_messages(self) -> int:
        return self._pending_messages + max(0, self._given_messages - self._taken_messages)

    @property
    def all_pending_bytes(self) -> int:
        return self._pending_bytes + max(0, self._given_bytes - self._taken_bytes)

    def checked(
        self,
        payload: bytes,
        key: str | bytes | None,
        properties: Mapping[str, str] | None,
        sequence_id: int | None,
        ordering_key: bytes | None,
        event_time_ms: int | None,
        deliver_at: datetime | None,
        deliver_after_s: float | None,
    ) -> tuple[OutgoingMessage, int | None]:
        """A message to hand over, and its sequence id. Raises the same as `send_nowait`, full
        queues aside."""
        sequence_id = given_id(sequence_id)
        try:
            delivery = delivery_time(deliver_at, deliver_after_s)
            message = self._prepare(payload, key, properties, ordering_key, event_time_ms, delivery)
        except SeqgateError as error:
            raise_about(sequence_id, error)
        return message, sequence_id

    def hand_over(
        self, message: OutgoingMessage, sequence_id: int | None, *, must_fit: bool
    ) -> "Future[Receipt]":
        """Queue a message for `pump`. Raises ProducerQueueFullError if it `must_fit` and does
        not."""
        if must_fit and not self._fits(message):
            self.ring()
            raise_about(sequence_id, self._full())
        done = Outcome()
        handed = _Handed(message, sequence_id, done, copy_context())
        try:
            self._given_messages += message.chunks
            self._given_bytes += message.size_bytes
            self._handed.append(handed)
            self.ring()
        except BaseException:
            self.ring()
            raise
        return done

    def _fits(self, message: OutgoingMessage) -> bool:
        messages = self.all_pending_messages
        if messages + message.chunks > self._max_pending_messages:
            return False
        fits = self.all_pending_bytes + message.size_bytes <= self._max_pending_bytes
        return fits or not messages  # a message alone always has room

    # ---- in the loop

    def pump(self) -> None:
        """Send what was handed over, in that order, as far as there is room."""
        try:
            self._pump()
        except Exception as surprise:
            self._fail(surprise)
            self._pump()  # all that is left fails

    def _pump(self) -> None:
        if self._waiting_for_room is not None:
            return
        while self._handed:
            message, sequence_id, done, context = handed = self._handed[0]
            if self._must_wait(message):
                self._waiting_for_room = asyncio.create_task(self._pump_later(handed))
                return
            self._handed.popleft()
            try:
                context.run(self._accept, message, sequence_id, done)
            except Exception as error:
                if not done.done():
                    done.set_exception(_about(sequence_id, error))
            self._taken_messages += message.chunks
            self._taken_bytes += message.size_bytes
        self._taken_messages = self._given_messages
        self._taken_bytes = self._given_bytes

    async def _pump_later(self, handed: _Handed) -> None:
        try:
            await self._until_room(handed.message)
        finally:
            self._waiting_for_room = None
            self.pump()

    async def stop(self, error: SeqgateError) -> None:
        """End at once: what is pending fails with the error."""
        await self._stop(error)

    async def abandon(self) -> None:
        """`stop`, after a call of `open` that was interrupted."""
        await self._stop(ProducerClosedError("the producer was not opened"))

    async def flush(self) -> None:
        self.pump()
        await super().flush()

    async def _stop(self, error: SeqgateError) -> None:
        try:
            await super()._stop(error)
        finally:
            if self._waiting_for_room is not None:
                self._waiting_for_room.cancel()  # it pumps at its end: all that is left fails
            self.pump()


def _about(sequence_id: int | None, error: Exception) -> Exception:
    """An error about a message, with its sequence id if it has one."""
    if sequence_id is None or not isinstance(error, SeqgateError):
        return error
    return error.of_message(sequence_id)


class Producer(Held[SharedProducer]):
    """Publishes to one topic, each message exactly once: `seqgate.client.Producer` for threads.

    Made by Client.producer, and used as a context manager. Threads may share it: messages that they
    send at the same time share requests and, with Batching, batches. Messages of one thread keep
    the order of its calls.
    """

    def __init__(self, portal: Portal, held: SharedProducer, owner: object) -> None:
        super().__init__(portal, held, owner)
        held.ring = portal.bell(held.pump)
        close_when_dropped(self, portal, held.close)

    @property
    def name(self) -> str:
        """The producer's name, assigned by the service if none was given."""
        return self._held.name

    @property
    def topic(self) -> str:
        """The topic's full name."""
        return self._held.topic

    @property
    def last_sequence_id(self) -> int | None:
        """The highest sequence id known to be stored under this name: see the asyncio Producer."""
        return self._held.last_sequence_id

    @property
    def connection_error(self) -> SeqgateError | None:
        """Why there is no connection; None: it is connected, or the first attempt is under way."""
        return self._held.connection_error

    @property
    def conflicts(self) -> int:
        """The number of messages so far whose sequence id was stored before with other content."""
        return self._held.conflicts

    @property
    def pending_messages(self) -> int:
        """The number of messages that await a receipt; a large one counts once per chunk."""
        return self._held.all_pending_messages

    @property
    def pending_bytes(self) -> int:
        """The bytes of pending messages: payloads, keys and properties, before compression."""
        return self._held.all_pending_bytes

    def send(
        self,
        payload: bytes,
        *,
        key: str | bytes | None = None,
        properties: Mapping[str, str] | None = None,
        sequence_id: int | None = None,
        ordering_key: bytes | None = None,
        event_time_ms: int | None = None,
        deliver_at: datetime | None = None,
        deliver_after_s: float | None = None,
    ) -> Receipt:
        """Publish a message, and return when it is durable. See the asyncio Producer for arguments,
        errors, and when it waits. An interrupt does not cancel the message."""
        self._portal.check()
        held = self._held
        message, sequence_id = held.checked(
            payload,
            key,
            properties,
            sequence_id,
            ordering_key,
            event_time_ms,
            deliver_at,
            deliver_after_s,
        )
        done = held.hand_over(message, sequence_id, must_fit=False)
        try:
            return done.result()
        finally:
            del done  # or an error would keep this frame, and this frame the error

    def send_nowait(
        self,
        payload: bytes,
        *,
        key: str | bytes | None = None,
        properties: Mapping[str, str] | None = None,
        sequence_id: int | None = None,
        ordering_key: bytes | None = None,
        event_time_ms: int | None = None,
        deliver_at: datetime | None = None,
        deliver_after_s: float | None = None,
    ) -> "Future[Receipt]":
        """Publish a message; the future is done when the message is durable or has failed. It
        cannot be cancelled, and its callbacks run in the client's thread: they must not block.

        Raises the same as `send`, and ProducerQueueFullError where `send` would wait.
        MixedSequenceIdsError is the future's exception."""
        self._portal.check()
        held = self._held
        message, sequence_id = held.checked(
            payload,
            key,
            properties,
            sequence_id,
            ordering_key,
            event_time_ms,
            deliver_at,
            deliver_after_s,
        )
        return held.hand_over(message, sequence_id, must_fit=True)

    def send_many(self, messages: Iterable[bytes | Outgoing]) -> list[Receipt]:
        """Publish messages in this order, and return their receipts when all are durable: one
        hand-over for all. Raises the same as the asyncio Producer's."""
        self._portal.check()
        return self._portal.run(self._held.send_many, listed("messages", messages))

    flush = crossing(AsyncioProducer.flush)

    def open(self) -> None:
        """Connect. Called by `with`. Raises the same as the asyncio Producer's."""
        opening(self._portal, self._held)

    def close(self) -> None:
        """Flush, and release the name. Messages not stored within the send timeout fail; without a
        timeout, wait until all are stored or refused. In a forked process it does nothing."""
        if not self._portal.is_gone:
            self._portal.run(self._held.close)

    def __enter__(self) -> "Producer":
        self.open()
        return self

    def __exit__(self, exception: type[BaseException] | None, *rest: object) -> None:
        if not self._portal.is_gone:
            self._portal.run(self._held.__aexit__, exception, *rest)
