"""The producer: connects the application's calls and the service's stream to the outbox.

    send() ──▶ Batcher.add ──▶ _encode ──▶ Outbox.add ──▶ Outbox.to_send ── _send ──▶ stream
    receipt ◀── _resolve ◀── Outbox.receive ◀── _receive ◀── stream

`_outbox.py` decides what to send and when; this module does the I/O and keeps time.
"""

import asyncio
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, NoReturn, cast

from grpc import aio

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from seqgate.client._batcher import Batcher, Batching, cut_by_key
from seqgate.client._chunking import Chunking, LargeMessage, chunks_of
from seqgate.client._codec import (
    Compression,
    OutgoingMessage,
    Sealed,
    encode_batch,
    encode_single,
    seal_message,
    to_entry,
)
from seqgate.client._group import Group, Member
from seqgate.client._outbox import Outbox, Receipt, Resolved, pieces
from seqgate.client._reconnecting import Reconnecting
from seqgate.client._status import error_of_call
from seqgate.client._streams import ending, read
from seqgate.client._tracing import PROPERTIES_MAX, Publishing, shared_context
from seqgate.errors import (
    ConflictError,
    FencedError,
    InternalError,
    InvalidRequestError,
    LimitExceededError,
    MessageTooLargeError,
    MixedSequenceIdsError,
    ProducerClosedError,
    ProducerQueueFullError,
    SendTimeoutError,
    SeqgateError,
    UnavailableError,
)
from seqgate.owners import NOT_OWNER, FollowingChannel
from seqgate.types import SEQUENCE_ID_MAX, TopicName, check_producer_name

REQUEST_BYTES_MAX: Final = 1024 * 1024
"""The target size of a request; a larger parcel is sent alone."""

EVENT_TIME_MAX_MS: Final = 2**64 - 1
"""The entry's field is a uint64: milliseconds since 1970."""

BATCH_SHARE: Final = 0.75
"""The share of the service's largest payload that a batch may fill: sizes are estimates."""

CLOSE_TIMEOUT_S: Final = 5.0
"""How long closing waits for the service to end the stream."""

DELIVER_AFTER_MAX_S: Final = 100 * 365 * 24 * 3600
"""The longest delivery delay, in seconds: about a century."""

_log: Final = logging.getLogger("seqgate.client")

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_RETRYABLE: Final = (UnavailableError, LimitExceededError)


class OnConflict(StrEnum):
    """What becomes of a message whose sequence id is stored with other content.

    REPORT: its receipt has `differs`. REFUSE: ConflictError, for this message alone.
    """

    REPORT = "report"
    REFUSE = "refuse"


@dataclass(slots=True)
class Outgoing:
    """A message to send; see Producer.send."""

    payload: bytes
    key: str | bytes | None = None
    properties: Mapping[str, str] | None = None
    sequence_id: int | None = None
    ordering_key: bytes | None = None
    event_time_ms: int | None = None
    deliver_at: datetime | None = None
    deliver_after_s: float | None = None


class SendManyError(SeqgateError):
    """Some messages of Producer.send_many failed.

    Attributes:
        outcomes: each message's receipt or error, in the order in which they were given.
    """

    def __init__(self, outcomes: Sequence[Receipt | SeqgateError]) -> None:
        failed = [each for each in outcomes if isinstance(each, SeqgateError)]
        first = failed[0]
        super().__init__(
            f"{len(failed):,} of {len(outcomes):,} messages failed; the first: {first}",
            reason=first.reason,
            details=first.details,
            retry_after_s=first.retry_after_s,
        )
        self.outcomes = list(outcomes)
        self.__cause__ = first


class Producer:
    """Publishes to one topic, each message exactly once, in the order of the calls.

    Made by Client.producer, and used as an async context manager. Call its methods only from the
    event loop in which it was made.

    A sequence id identifies a message: the service stores a message only if its id is above all
    ids stored under this producer name. By default the producer assigns ids, starting after the
    last one that the service knows. An application may instead pass an id with every message; then
    it can safely resend messages whose outcome it does not know after a crash.
    """

    def __init__(
        self,
        channel: FollowingChannel,
        topic: TopicName,
        *,
        name: str | None,
        initial_sequence_id: int | None,
        takeover: bool,
        batching: Batching | None,
        chunking: Chunking | None,
        compression: Compression,
        max_pending_messages: int,
        max_pending_bytes: int,
        send_timeout_s: float | None,
        open_timeout_s: float,
        on_conflict: OnConflict | str = OnConflict.REPORT,
    ) -> None:
        _check_identity(name, initial_sequence_id)
        if max_pending_messages < 1:
            raise ValueError("max_pending_messages must be at least 1")
        if max_pending_bytes < 1:
            raise ValueError("max_pending_bytes must be at least 1")
        if batching is not None and chunking is not None:
            raise ValueError("give batching or chunking, not both")
        self._stub = pb_grpc.LedgerServiceStub(channel)
        self._topic = topic
        self._name = name or ""
        self._initial_sequence_id = initial_sequence_id
        self._takeover = takeover
        self._instance = uuid.uuid4().bytes
        self._batching = batching
        self._batcher = Batcher(batching)
        self._projection = batching.projection if batching is not None else None
        self._chunking = chunking
        self._compression = compression
        self._max_pending_messages = max_pending_messages
        self._max_pending_bytes = max_pending_bytes
        self._send_timeout_s = send_timeout_s
        self._open_timeout_s = open_timeout_s
        self._refuses_conflicts = OnConflict(on_conflict) is OnConflict.REFUSE

        self._spans = Publishing(str(topic), is_batching=batching is not None)
        self._outbox = Outbox(self._encode)
        self._pending_messages = 0
        self._pending_bytes = 0
        self._next_sequence_id = 0
        self._explicit_ids: bool | None = None
        self._last_sequence_id: int | None = None
        self._found_sequence_id: int | None = None
        self._has_stored = False
        self._conflicts = 0
        self._limits = pb.Opened()

        self._opened = asyncio.get_running_loop().create_future()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._linger: asyncio.TimerHandle | None = None
        self._closing = False
        self._connected = False
        self._finishing = False
        self._moving = False
        named = f"producer {name!r}" if name else "a producer"
        self._reconnecting = Reconnecting(f"{named} of {topic}")
        self._address = channel.owners.home
        self._failure: SeqgateError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # ---- the application

    @property
    def name(self) -> str:
        """The producer's name, assigned by the service if none was given."""
        return self._name

    @property
    def topic(self) -> str:
        """The topic's full name."""
        return str(self._topic)

    @property
    def last_sequence_id(self) -> int | None:
        """The highest sequence id known to be stored under this name, or the initial one if the
        service does not know the name. None: neither exists, or the topic does not deduplicate. A
        partly stored large message does not count."""
        return self._last_sequence_id

    @property
    def pending_messages(self) -> int:
        """The number of messages that await a receipt; a large one counts once per chunk."""
        return self._pending_messages

    @property
    def pending_bytes(self) -> int:
        """The bytes of pending messages: payloads, keys and properties, before compression."""
        return self._pending_bytes

    @property
    def conflicts(self) -> int:
        """The number of messages so far whose sequence id was stored before with other content."""
        return self._conflicts

    async def send(
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
        """Publish a message, and return when it is durable.

        Waits while `max_pending_messages` or `max_pending_bytes` are pending. A large message
        counts once per chunk; one that exceeds the limit waits until nothing else is pending.
        Cancelling the call does not cancel the message.

        A message with a delivery time is an entry of its own. It is stored at once; the dispatcher
        service delivers it at that time, and readers get it immediately.

        Args:
            key: text, or bytes.
            properties: at most 128, names and values text.
            sequence_id: see Producer.
            ordering_key: replaces `key` as the unit of order.
            event_time_ms: the application's time of the event, in milliseconds since 1970.
            deliver_at: the earliest delivery, with a time zone. Excludes `deliver_after_s`.
            deliver_after_s: the earliest delivery, in seconds from now by this machine's clock.

        Raises:
            StaleSequenceIdError: a higher id was stored first; the message is not in the log.
            SequenceIdTrimmedError: it is unknown whether the message is in the log.
            SendTimeoutError: no receipt arrived in time. The message may be in the log: resending
                it with the same id is safe if the application assigns ids.
            MixedSequenceIdsError, InvalidRequestError, MessageTooLargeError: nothing was sent.
            ProducerClosedError, or the error that ended the producer.

        Errors carry the message's `sequence_id`, once one is assigned.
        """
        try:
            deliver_at_ms = delivery_time_ms(deliver_at, deliver_after_s)
            message = self._prepare(
                payload, key, properties, ordering_key, event_time_ms, deliver_at_ms
            )
            await self._until_room(message)
            receipt: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
            self._accept(message, sequence_id, receipt)
        except SeqgateError as error:
            raise_about(sequence_id, error)
        return await receipt  # a cancelled call cancels the future, not the message

    async def send_many(self, messages: Iterable[bytes | Outgoing]) -> list[Receipt]:
        """Publish messages in this order, and return their receipts when all are durable. Costs
        less than as many calls of `send`. Other calls may send messages between them.

        Waits like `send` while too much is pending. Cancelling the call does not cancel the
        messages that were sent before.

        Raises:
            InvalidRequestError: one of them is invalid; none was sent.
            SendManyError: some failed; it has each one's receipt or error.
            ProducerClosedError, or the error that ended the producer: none was sent. Also without
                messages.
        """
        self._check_open()
        checked = [self._checked_outgoing(each) for each in messages]
        group: Group[Receipt] = Group(len(checked))
        for (message, sequence_id), member in zip(checked, group.members(), strict=True):
            try:
                self._seal(message)  # not all at once: only pending messages have a budget
                await self._until_room(message)
                self._accept(message, sequence_id, member)
            except SeqgateError as error:
                member.set_exception(
                    error if sequence_id is None else error.of_message(sequence_id)
                )
        outcomes = await group.outcomes()
        if any(isinstance(each, SeqgateError) for each in outcomes):
            raise SendManyError(outcomes)
        return cast("list[Receipt]", outcomes)

    def _checked_outgoing(self, given: bytes | Outgoing) -> tuple[OutgoingMessage, int | None]:
        if not isinstance(given, Outgoing):
            return self._checked(given, None, None, None, None, None), None
        each = given
        try:
            deliver_at_ms = delivery_time_ms(each.deliver_at, each.deliver_after_s)
            message = self._checked(
                each.payload,
                each.key,
                each.properties,
                each.ordering_key,
                each.event_time_ms,
                deliver_at_ms,
            )
        except SeqgateError as error:
            raise_about(each.sequence_id, error)
        return message, each.sequence_id

    def _must_wait(self, message: OutgoingMessage) -> bool:
        return bool(self._pending_messages) and not self._has_room(message) and not self._failure

    async def _until_room(self, message: OutgoingMessage) -> None:
        while self._must_wait(message):
            self._room.clear()
            await self._room.wait()

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
    ) -> "asyncio.Future[Receipt]":
        """Publish a message; the future is done when the message is durable or has failed. Raises
        the same as `send`, and ProducerQueueFullError where `send` would wait."""
        try:
            deliver_at_ms = delivery_time_ms(deliver_at, deliver_after_s)
            message = self._prepare(
                payload, key, properties, ordering_key, event_time_ms, deliver_at_ms
            )
            if not self._has_room(message):
                raise self._full()
            receipt: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
            self._accept(message, sequence_id, receipt)
        except SeqgateError as error:
            raise_about(sequence_id, error)
        return receipt

    def _prepare(
        self,
        payload: bytes,
        key: str | bytes | None,
        properties: Mapping[str, str] | None,
        ordering_key: bytes | None,
        event_time_ms: int | None,
        deliver_at_ms: int | None,
    ) -> OutgoingMessage:
        message = self._checked(
            payload, key, properties, ordering_key, event_time_ms, deliver_at_ms
        )
        self._seal(message)
        return message

    def _checked(
        self,
        payload: bytes,
        key: str | bytes | None,
        properties: Mapping[str, str] | None,
        ordering_key: bytes | None,
        event_time_ms: int | None,
        deliver_at_ms: int | None,
    ) -> OutgoingMessage:
        self._check_open()
        properties = dict(properties) if properties else {}
        _check(payload, key, properties, ordering_key, event_time_ms)
        message = OutgoingMessage(
            0, bytes(payload), key, ordering_key, properties, event_time_ms, deliver_at_ms
        )
        if self._projection is not None:
            message.shown = self._projection.of(properties)
        return message

    def _seal(self, message: OutgoingMessage) -> None:
        """Compress a message that may be cut into chunks, and count them."""
        if self._chunking is None:
            return
        message.sealed = seal_message(
            self._name, message, compression=self._compression, publish_time_ms=_now_ms()
        )
        message.chunks = self._chunks_of(message.sealed.body, self._chunking)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing or not self._tasks:
            raise ProducerClosedError("the producer is not open")

    def _chunks_of(self, body: bytes, chunking: Chunking) -> int:
        limits = self._limits
        count = chunks_of(len(body), chunking.size(limits.max_message_bytes))
        if count > 1 and (len(body) > limits.max_large_message_bytes or count > limits.max_chunks):
            raise MessageTooLargeError(
                f"message too large: {len(body):,} bytes in {count:,} chunks "
                f"(limit {limits.max_large_message_bytes:,} bytes in {limits.max_chunks:,} chunks)",
                details={
                    "max_large_message_bytes": str(limits.max_large_message_bytes),
                    "max_chunks": str(limits.max_chunks),
                },
            )
        return count

    def _has_room(self, message: OutgoingMessage) -> bool:
        if self._pending_messages + message.chunks > self._max_pending_messages:
            return False
        fits = self._pending_bytes + message.size_bytes <= self._max_pending_bytes
        return fits or not self._pending_messages  # a message alone always has room

    def _full(self) -> SeqgateError:
        return ProducerQueueFullError(
            f"too many pending messages or bytes (limits {self._max_pending_messages:,} and"
            f" {self._max_pending_bytes:,})"
        )

    def _accept(
        self,
        message: OutgoingMessage,
        sequence_id: int | None,
        done: "asyncio.Future[Receipt] | Member",
    ) -> None:
        self._check_open()
        loop = asyncio.get_running_loop()
        message.sequence_id = self._number(sequence_id)
        message.done = done
        self._pending_messages += message.chunks
        self._pending_bytes += message.size_bytes
        self._spans.begin(message, self._name, self._limits.max_message_bytes)
        if self._batching is None and message.sealed is None:
            self._hand_over_entries([message], [self._encode_single(message)], loop.time())
        else:
            self._hand_over(self._batcher.add(message))
        if self._batching is not None and self._batcher.collecting and self._linger is None:
            self._linger = loop.call_later(self._batching.delay_s, self._flush_batch)

    async def flush(self) -> None:
        """Send collected messages, and return when all messages so far have an outcome. Failures
        are raised only to those that await the messages."""
        self._flush_batch()
        waiting = deque(self._outbox.unresolved)
        while waiting:
            if waiting[0].resolved:
                waiting.popleft()
                continue
            self._room.clear()
            await self._room.wait()

    async def close(self) -> None:
        """Flush, and release the name. Messages not stored within the send timeout fail; without a
        timeout, wait until all are stored or refused."""
        try:
            if not self._closing:
                self._closing = True
                if self._failure is None:
                    await self.flush()
            if self._tasks and self._connected:
                self._finishing = True
                self._wake.set()
                await asyncio.wait(self._tasks[:1], timeout=CLOSE_TIMEOUT_S)
        finally:
            await self._stop(ProducerClosedError("the producer is closed"))

    async def __aenter__(self) -> "Producer":
        await self.open()
        return self

    async def __aexit__(self, exception: type[BaseException] | None, *rest: object) -> None:
        if exception is None:
            await self.close()
        else:
            await self._stop(
                ProducerClosedError("the producer was closed by an exception in its `async with`")
            )

    async def open(self) -> None:
        """Connect. Called by `async with`.

        Raises:
            InUseError: another producer uses the name, and `takeover` is False.
            NotFoundError: the topic does not exist, and policy does not create it.
            UnavailableError: no service answered within `open_timeout_s`.
        """
        self._tasks = [
            asyncio.create_task(self._run(), name=f"seqgate-producer {self._topic}"),
            asyncio.create_task(self._watch_timeouts()),
        ]
        try:
            async with asyncio.timeout(self._open_timeout_s):
                await asyncio.shield(self._opened)
        except TimeoutError:
            error = self._reconnecting.given_up(self._address, self._open_timeout_s)
            await self._stop(error)
            raise error from None
        except BaseException:
            await self._stop(ProducerClosedError("the producer was not opened"))
            raise

    # ---- numbering and batching

    def _number(self, sequence_id: int | None) -> int:
        explicit = sequence_id is not None
        if self._explicit_ids is not None and self._explicit_ids != explicit:
            raise MixedSequenceIdsError(
                "give a sequence id with every message of a producer, or with none"
            )
        if sequence_id is None:
            sequence_id = self._next_sequence_id
        if not 0 <= sequence_id <= SEQUENCE_ID_MAX:
            raise InvalidRequestError(
                "sequence_id must be 0 to 2^63 - 1", reason="INVALID_SEQUENCE_ID"
            )
        self._explicit_ids = explicit
        if not explicit:
            self._next_sequence_id = sequence_id + 1
        return sequence_id

    def _encode_single(self, message: OutgoingMessage) -> pb.Entry:
        return encode_single(
            self._name, message, compression=self._compression, publish_time_ms=_now_ms()
        )

    def _encode(self, messages: Sequence[OutgoingMessage]) -> list[pb.Entry]:
        publish_time_ms = _now_ms()
        context = shared_context(messages)

        def encode(some: Sequence[OutgoingMessage], *, keyed: bool) -> pb.Entry:
            if len(some) == 1 and some[0].shown is None:
                return encode_single(
                    self._name,
                    some[0],
                    compression=self._compression,
                    publish_time_ms=publish_time_ms,
                    context=context,
                )
            return encode_batch(
                self._name,
                some,
                compression=self._compression,
                publish_time_ms=publish_time_ms,
                keyed=keyed,
                context=context,
            )

        if self._batching is None or not self._batching.by_key:
            return [encode(messages, keyed=False)]
        return [encode(some, keyed=True) for some in cut_by_key(messages)]

    def _flush_batch(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        self._hand_over(self._batcher.flush())

    def _hand_over(self, parcels: list[list[OutgoingMessage]]) -> None:
        now = asyncio.get_running_loop().time()
        for messages in parcels:
            if messages[0].sealed is not None:
                self._hand_over_sealed(messages[0], messages[0].sealed, now)
                continue
            self._spans.begin_batch(messages, self._name)
            for some, entries in pieces(self._encode, messages, self._limits.max_message_bytes):
                self._hand_over_entries(some, entries, now)
        if parcels and self._linger is not None and not self._batcher.collecting:
            self._linger.cancel()
            self._linger = None

    def _hand_over_entries(
        self, messages: list[OutgoingMessage], entries: list[pb.Entry], now: float
    ) -> None:
        max_message_bytes = self._limits.max_message_bytes
        if max([len(entry.payload) for entry in entries]) <= max_message_bytes:
            self._outbox.add(messages, entries, now)
            self._wake.set()
            return
        size_bytes = max(len(entry.payload) for entry in entries)
        error = MessageTooLargeError(
            f"message too large: {size_bytes:,} bytes (limit {max_message_bytes:,})",
            details={"max_message_bytes": str(max_message_bytes)},
        )
        self._resolve([Resolved(message, error) for message in messages])

    def _hand_over_sealed(self, message: OutgoingMessage, sealed: Sealed, now: float) -> None:
        metadata, body = sealed
        metadata.sequence_id = message.sequence_id
        chunk_bytes = self._chunk_bytes
        if len(body) > chunk_bytes:
            self._outbox.add_large(LargeMessage(message, metadata, body, chunk_bytes), now)
        else:
            self._outbox.add([message], [to_entry(metadata, body)], now)
        self._wake.set()

    @property
    def _chunk_bytes(self) -> int:
        """The chunk size; 0: do not cut."""
        chunking = self._chunking
        return 0 if chunking is None else chunking.size(self._limits.max_message_bytes)

    def _resolve(self, resolved: Sequence[Resolved]) -> None:
        for message, outcome in resolved:
            message.resolved = True
            self._pending_messages -= message.chunks
            self._pending_bytes -= message.size_bytes
            done = message.done
            if isinstance(outcome, SeqgateError) and outcome.sequence_id is None:
                outcome = outcome.of_message(message.sequence_id)
            if message.span is not None or message.batch is not None:
                self._spans.end(message, outcome)
            if isinstance(outcome, Receipt):
                self._has_stored = True
                if outcome.differs:
                    self._conflicts_with(outcome.sequence_id)
                if self._last_sequence_id is None or outcome.sequence_id > self._last_sequence_id:
                    self._last_sequence_id = outcome.sequence_id
                if not done.done():
                    done.set_result(outcome)
            else:
                if isinstance(outcome, ConflictError):
                    self._conflicts_with(message.sequence_id)
                if not done.done():
                    done.set_exception(outcome)
                    done.exception()  # retrieved: not every future is awaited
        self._room.set()

    def _conflicts_with(self, sequence_id: int) -> None:
        """Count a conflict, and warn of the first."""
        self._conflicts += 1
        if self._conflicts == 1:
            _log.warning(
                "producer %r of %s: another message is stored under sequence id %d. Its numbers"
                " were used before under this name, and messages that differ are not stored: see"
                " Receipt.differs, Producer.conflicts and on_conflict",
                self._name,
                self._topic,
                sequence_id,
            )

    # ---- the stream

    async def _run(self) -> None:
        while True:
            error: SeqgateError = UnavailableError("the service shut down")
            try:
                await self._stream()
            except SeqgateError as failure:
                error = failure
            except Exception as surprise:
                self._end(InternalError(f"the producer failed: {surprise!r}"))
                raise
            if self._finishing:
                return
            if not self._may_retry(error):
                self._end(error)
                return
            await asyncio.sleep(self._reconnecting.failed(error))

    def _may_retry(self, error: SeqgateError) -> bool:
        if isinstance(error, FencedError):
            # Retry if another writer owns the topic, but not if another producer took the name.
            return error.reason != "PRODUCER_TAKEN_OVER"
        return isinstance(error, _RETRYABLE) or error.reason == NOT_OWNER

    async def _stream(self) -> None:
        """Run one stream until the service shuts down, or raise its error."""
        call = self._stub.Publish()
        self._moving = False
        try:
            await call.write(pb.PublishRequest(open=self._open_request()))
            self._take_opened((await read(call)).opened)
            self._reconnecting.succeeded()
            sending = asyncio.create_task(self._send(call))
            try:
                await self._receive(call)
            finally:
                sending.cancel()
                await asyncio.wait([sending])
        except aio.AioRpcError as error:
            raise error_of_call(error) from error
        except asyncio.InvalidStateError as error:  # grpc.aio: the stream has ended
            raise await ending(call) from error
        finally:
            self._connected = False
            call.cancel()

    def _open_request(self) -> pb.Open:
        return pb.Open(
            topic=str(self._topic),
            producer_name=self._name,
            initial_sequence_id=self._initial_sequence_id,
            takeover=self._takeover and not self._opened.done(),
            instance=self._instance,
            receipt_runs=True,
            refuse_conflicts=self._refuses_conflicts,
        )

    def _take_opened(self, opened: pb.Opened) -> None:
        self._limits = opened
        if self._batching is not None:
            self._batcher.bytes_max = min(
                self._batching.bytes_max, int(opened.max_message_bytes * BATCH_SHARE)
            )
        self._check_superseded(opened)
        self._connected = True
        self._outbox.opened(
            opened.window_messages,
            opened.window_bytes,
            self._chunk_bytes,
            opened.max_message_bytes,
        )
        self._wake.set()
        if not self._opened.done():
            self._name = opened.producer_name
            self._last_sequence_id = _known_to_be_stored(opened)
            self._found_sequence_id = _last_of(opened)
            if self._found_sequence_id is not None:
                self._next_sequence_id = self._found_sequence_id + 1
            self._opened.set_result(None)

    def _check_superseded(self, opened: pb.Opened) -> None:
        """Raise FencedError if another producer has published under this name since this one opened
        it: the service would take this producer's automatic ids for duplicates of the other's
        messages."""
        if not self._opened.done() or self._explicit_ids:
            return
        last = _last_of(opened)
        if last is not None and self._is_anothers(opened, last):
            raise FencedError(
                "another producer has published under this name",
                reason="PRODUCER_TAKEN_OVER",
                details={"last_sequence_id": str(last)},
            )

    def _is_anothers(self, opened: pb.Opened, last: int) -> bool:
        """Whether the last stored message under this name is another producer's, stored after this
        one opened the name. Comparing ids is only the fallback: the other producer may have used
        ids that this one has sent, so the ledger names the last entry's producer."""
        if opened.last_stored.HasField("by_another"):
            unchanged = not self._has_stored and last == self._found_sequence_id
            return opened.last_stored.by_another and not unchanged
        known = (self._outbox.highest_sent, self._found_sequence_id, self._last_sequence_id)
        return last > max(each for each in known if each is not None)

    async def _send(self, call: Any) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if (wait_s := self._outbox.resume_after_s) is not None:
                    await asyncio.sleep(wait_s)
                    self._outbox.resume()
                while not self._moving:
                    publications = self._outbox.to_send(REQUEST_BYTES_MAX)
                    if publications is None:
                        break
                    await call.write(pb.PublishRequest(publications=publications))
                if self._finishing:
                    await call.done_writing()
                    return
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return  # `_receive` reports the cause

    async def _receive(self, call: Any) -> None:
        while True:
            response = await read(call)
            match response.WhichOneof("response"):
                case "receipts":
                    for run in response.receipts.runs:
                        self._resolve(self._outbox.receive_run(run))
                    for receipt in response.receipts.receipts:
                        self._resolve(self._outbox.receive(receipt))
                    if self._outbox.waiting:
                        self._wake.set()
                case "draining":
                    self._moving = True
                case _:
                    pass  # taken over: the stream's status follows
            if self._moving and not self._outbox.outstanding:
                await call.done_writing()
                return

    # ---- endings

    async def _watch_timeouts(self) -> None:
        if self._send_timeout_s is None:
            return
        loop = asyncio.get_running_loop()
        while True:
            oldest = self._outbox.oldest_added_at
            waited_s = 0.0 if oldest is None else loop.time() - oldest
            wait_s = self._send_timeout_s - waited_s
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            # Fail all, as Pulsar does: a resend of one would be overtaken by later messages.
            cause = self._outbox.last_failure or self._reconnecting.last
            details = {"last_reason": cause.reason} if cause is not None and cause.reason else {}
            error = SendTimeoutError(
                "no receipt arrived in time; the message may be in the log", details=details
            )
            error.__cause__ = cause
            self._flush_into(error)
            self._restart()

    def _restart(self) -> None:
        """Drop the stream: its messages must not arrive after their resends."""
        running = self._tasks[0]
        running.cancel()
        self._tasks[0] = asyncio.create_task(self._run(), name=running.get_name())

    def _end(self, error: SeqgateError) -> None:
        self._failure = error
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()
        self._flush_into(error)

    def _flush_into(self, error: SeqgateError) -> None:
        collected = [message for parcel in self._batcher.flush() for message in parcel]
        self._resolve(self._outbox.fail_all(error))
        self._resolve([Resolved(message, error) for message in collected])

    async def _stop(self, error: SeqgateError) -> None:
        self._closing = True
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []
        self._failure = self._failure or error
        self._flush_into(self._failure)


def raise_about(sequence_id: int | None, error: SeqgateError) -> NoReturn:
    """Raise an error about a message, with its sequence id if it has one."""
    if sequence_id is None:
        raise error
    raise error.of_message(sequence_id) from error.__cause__


def _check_identity(name: str | None, initial_sequence_id: int | None) -> None:
    if name is not None:
        check_producer_name(name)
    if initial_sequence_id is not None and not 0 <= initial_sequence_id < SEQUENCE_ID_MAX:
        raise InvalidRequestError(
            "initial_sequence_id must be 0 to 2^63 - 2", reason="INVALID_SEQUENCE_ID"
        )


def _check(
    payload: object,
    key: object,
    properties: Mapping[str, str],
    ordering_key: object,
    event_time_ms: int | None,
) -> None:
    """Refuse a message that cannot be encoded, before it affects others."""
    if type(payload) is bytes and key is ordering_key is event_time_ms is None and not properties:
        return  # as most messages of a batch
    wrong = ""
    if not isinstance(payload, bytes | bytearray | memoryview):
        wrong = "payload must be bytes"
    elif key is not None and not isinstance(key, bytes) and not _is_text(key):
        wrong = "key must be text or bytes"
    elif ordering_key is not None and not isinstance(ordering_key, bytes):
        wrong = "ordering_key must be bytes"
    elif event_time_ms is not None and not 0 <= event_time_ms <= EVENT_TIME_MAX_MS:
        wrong = f"event_time_ms must be 0 to {EVENT_TIME_MAX_MS}"
    elif len(properties) > PROPERTIES_MAX or not all(
        _is_text(each) for item in properties.items() for each in item
    ):
        wrong = f"properties must be at most {PROPERTIES_MAX} texts by name"
    if wrong:
        raise InvalidRequestError(wrong, reason="INVALID_ENTRY")


def _last_of(opened: pb.Opened) -> int | None:
    """The id after which automatic ids continue; None: start with the first one. The two ids differ
    in a topic that does not deduplicate; both count, since deduplication may be enabled later."""
    ids = []
    if opened.HasField("last_stored"):
        ids.append(opened.last_stored.sequence_id)
    if opened.HasField("last_sequence_id"):
        ids.append(opened.last_sequence_id)
    return max(ids, default=None)


def _known_to_be_stored(opened: pb.Opened) -> int | None:
    """See Producer.last_sequence_id."""
    if not opened.HasField("last_sequence_id"):
        return None
    if not opened.HasField("last_stored"):
        return opened.last_sequence_id
    last = opened.last_stored
    return last.whole_sequence_id if last.HasField("whole_sequence_id") else None


def delivery_time_ms(deliver_at: datetime | None, deliver_after_s: float | None) -> int | None:
    """The earliest delivery, in milliseconds since 1970; None: immediately."""
    wrong = ""
    deliver_at_ms = None
    if deliver_at is not None and deliver_after_s is not None:
        wrong = "give deliver_at or deliver_after_s, not both"
    elif deliver_after_s is not None:
        if 0 <= deliver_after_s <= DELIVER_AFTER_MAX_S:
            deliver_at_ms = _now_ms() + math.ceil(deliver_after_s * 1_000)
        else:
            wrong = f"deliver_after_s must be 0 to {DELIVER_AFTER_MAX_S:,}"
    elif deliver_at is not None:
        if deliver_at.utcoffset() is None or deliver_at < _EPOCH:
            wrong = "deliver_at must have a time zone, and be in 1970 or later"
        else:
            deliver_at_ms = -((_EPOCH - deliver_at) // timedelta(milliseconds=1))
    if wrong:
        raise InvalidRequestError(wrong, reason="INVALID_ENTRY")
    return deliver_at_ms


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _is_text(value: object) -> bool:
    """Whether `value` is a str that UTF-8 can encode: one without lone surrogates."""
    if not isinstance(value, str):
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
