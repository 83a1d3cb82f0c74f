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
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple, NoReturn, ParamSpec, cast

from grpc import aio

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from seqgate.client._arguments import (
    COUNT_MAX,
    binary,
    choice,
    each_of,
    flag,
    instance_or_none,
    key_of,
    member,
    moment,
    open_timeout,
    properties_of,
    real,
    timeout,
    whole,
)
from seqgate.client._arguments import sequence_id as sequence_id_of
from seqgate.client._batcher import Batcher, Batching, cut_by_key
from seqgate.client._chunking import Chunking, LargeMessage, chunks_of
from seqgate.client._codec import (
    Compression,
    OutgoingMessage,
    encode_batch,
    encode_single,
    seal_message,
    to_entry,
)
from seqgate.client._group import Group, Member
from seqgate.client._loops import of_one_loop
from seqgate.client._outbox import Outbox, Receipt, Resolved, pieces
from seqgate.client._reconnecting import Reconnecting
from seqgate.client._status import Asked, error_of_call
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
from seqgate.times import milliseconds_of
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


_ENTRY: Final = "INVALID_ENTRY"

_log: Final = logging.getLogger("seqgate.client")

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


P = ParamSpec("P")


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


@of_one_loop
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
        name = None if name is None else check_producer_name(name)
        batching = instance_or_none("batching", batching, Batching)
        chunking = instance_or_none("chunking", chunking, Chunking)
        if batching is not None and chunking is not None:
            raise InvalidRequestError("give batching or chunking, not both")
        self._stub = pb_grpc.LedgerServiceStub(channel)
        self._topic = topic
        self._name = name or ""
        self._initial_sequence_id = _initial_id(initial_sequence_id)
        self._takeover = flag("takeover", takeover)
        self._instance = uuid.uuid4().bytes
        self._batching = batching
        self._batcher = Batcher(batching)
        self._projection = batching.projection if batching is not None else None
        self._chunking = chunking
        self._compression = member("compression", compression, Compression)
        self._max_pending_messages = whole("max_pending_messages", max_pending_messages, 1)
        self._max_pending_bytes = whole(
            "max_pending_bytes", max_pending_bytes, 1, COUNT_MAX, "bytes"
        )
        self._send_timeout_s = timeout("send_timeout_s", send_timeout_s) or None
        self._open_timeout_s = open_timeout(open_timeout_s)
        self._refuses_conflicts = (
            choice("on_conflict", on_conflict, OnConflict) is OnConflict.REFUSE
        )

        self._spans = Publishing(str(topic), is_batching=batching is not None)
        self._outbox = Outbox(self._encode)
        self._open: dict[OutgoingMessage, None] = {}  # those without an outcome, in order
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
        self._asked = Asked("ledger", channel.owners.home)
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
    def connection_error(self) -> SeqgateError | None:
        """Why there is no connection: the error of the latest attempt, or the loss of the last one.
        None: it is connected, or the first attempt is under way."""
        return self._reconnecting.trouble

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
        """Publish a message, and return when it is durable. Its arguments are copied: they may
        change later.

        Waits while `max_pending_messages` or `max_pending_bytes` are pending. A large message
        counts once per chunk; one that exceeds the limit waits until nothing else is pending.
        Cancelling the call does not cancel the message.

        A message with a delivery time is an entry of its own. It is stored at once; the dispatcher
        service delivers it at that time, and readers get it immediately.

        Args:
            payload: bytes, a bytearray or a memoryview.
            key: text, or bytes.
            properties: at most 128, names and values text.
            sequence_id: a whole number, 0 to 2^63 - 1: see Producer.
            ordering_key: replaces `key` as the unit of order.
            event_time_ms: the application's time of the event, in milliseconds since 1970: a whole
                number, 0 to 2^64 - 1.
            deliver_at: the earliest delivery, with a time zone, 1970 or later. Excludes
                `deliver_after_s`.
            deliver_after_s: the earliest delivery, in seconds from now by this machine's clock, 0
                to 3,153,600,000: about a century.

        Raises:
            StaleSequenceIdError: a higher id was stored first; the message is not in the log.
            SequenceIdTrimmedError: it is unknown whether the message is in the log.
            SendTimeoutError: no receipt arrived in time. The message may be in the log: resending
                it with the same id is safe if the application assigns ids.
            MixedSequenceIdsError, InvalidRequestError, MessageTooLargeError: nothing was sent.
            ProducerClosedError, or the error that ended the producer.

        Errors carry the message's `sequence_id`, once one is assigned.
        """
        sequence_id = given_id(sequence_id)
        try:
            delivery = delivery_time(deliver_at, deliver_after_s)
            message = self._prepare(payload, key, properties, ordering_key, event_time_ms, delivery)
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
        checked = each_of("messages", messages, lambda _, each: self._checked_outgoing(each))
        group: Group[Receipt] = Group(len(checked))
        for (message, sequence_id), its in zip(checked, group.members(), strict=True):
            try:
                self._seal(message)  # not all at once: only pending messages have a budget
                await self._until_room(message)
                self._accept(message, sequence_id, its)
            except Exception as failure:
                error = failure if isinstance(failure, SeqgateError) else _unexpected(failure)
                if not its.done():
                    its.set_exception(
                        error if sequence_id is None else error.of_message(sequence_id)
                    )
        outcomes = await group.outcomes()
        if any(isinstance(each, SeqgateError) for each in outcomes):
            raise SendManyError(outcomes)
        return cast("list[Receipt]", outcomes)

    def _checked_outgoing(self, given: bytes | Outgoing) -> tuple[OutgoingMessage, int | None]:
        if not isinstance(given, Outgoing):
            return self._checked(given, None, None, None, None, None), None
        each, sequence_id = given, given_id(given.sequence_id)
        try:
            delivery = delivery_time(each.deliver_at, each.deliver_after_s)
            message = self._checked(
                each.payload,
                each.key,
                each.properties,
                each.ordering_key,
                each.event_time_ms,
                delivery,
            )
        except SeqgateError as error:
            raise_about(sequence_id, error)
        return message, sequence_id

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
        sequence_id = given_id(sequence_id)
        try:
            delivery = delivery_time(deliver_at, deliver_after_s)
            message = self._prepare(payload, key, properties, ordering_key, event_time_ms, delivery)
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
        delivery: "DeliveryTime | None",
    ) -> OutgoingMessage:
        message = self._checked(payload, key, properties, ordering_key, event_time_ms, delivery)
        self._seal(message)
        return message

    def _checked(
        self,
        payload: bytes,
        key: str | bytes | None,
        properties: Mapping[str, str] | None,
        ordering_key: bytes | None,
        event_time_ms: int | None,
        delivery: "DeliveryTime | None",
    ) -> OutgoingMessage:
        self._check_open()
        payload = binary("payload", payload, reason=_ENTRY)
        if key is not None:
            key = key_of("key", key, reason=_ENTRY)
        if ordering_key is not None:
            ordering_key = binary("ordering_key", ordering_key, reason=_ENTRY)
        if event_time_ms is not None:
            event_time_ms = whole(
                "event_time_ms", event_time_ms, 0, EVENT_TIME_MAX_MS, reason=_ENTRY
            )
        properties = properties_of("properties", properties, PROPERTIES_MAX, reason=_ENTRY)
        message = OutgoingMessage(0, payload, key, ordering_key, properties, event_time_ms)
        if delivery is not None:
            message.deliver_at_ms, message.is_delay = delivery
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
        """Number a message and collect it, or put it into the outbox. If it cannot be encoded, that
        raises before the message is counted or pending."""
        self._check_open()
        loop = asyncio.get_running_loop()
        message.sequence_id = self._number(sequence_id)
        message.done = done
        encoded: LargeMessage | list[pb.Entry] | None = None
        try:
            self._spans.begin(message, self._name, self._limits.max_message_bytes)
            if self._batching is None:
                encoded = self._encode_alone(message)
        except Exception as failure:
            self._end_spans(message, _unexpected(failure))
            raise
        try:
            self._explicit_ids = sequence_id is not None
            if sequence_id is None:
                self._next_sequence_id = message.sequence_id + 1
            self._open[message] = None
            self._pending_messages += message.chunks
            self._pending_bytes += message.size_bytes
            if encoded is not None:
                self._put(message, encoded, loop.time())
            elif self._batching is not None:
                self._collect(message, self._batching, loop)
        except Exception as surprise:
            raise self._fail(surprise) from surprise

    async def flush(self) -> None:
        """Send collected messages, and return when all messages so far have an outcome. Failures
        are raised only to those that await the messages."""
        self._contain(self._flush_batch)
        waiting = deque(self._open)
        while waiting:
            if waiting[0] not in self._open:
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
        self._tasks = []
        try:
            name = f"seqgate-producer {self._topic}"
            self._tasks.append(asyncio.create_task(self._run(), name=name))
            self._tasks.append(asyncio.create_task(self._contained(self._watch_timeouts)))
            async with asyncio.timeout(self._open_timeout_s):
                await asyncio.shield(self._opened)
        except TimeoutError:
            error = self._reconnecting.given_up(self._asked.address, self._open_timeout_s)
            await self._stop(error)
            raise error from None
        except BaseException:
            await self._stop(ProducerClosedError("the producer was not opened"))
            raise

    # ---- numbering and batching

    def _number(self, sequence_id: int | None) -> int:
        """The id of the next message, by the one that the application gave."""
        explicit = sequence_id is not None
        if self._explicit_ids is not None and self._explicit_ids != explicit:
            raise MixedSequenceIdsError(
                "give a sequence id with every message of a producer, or with none"
            )
        return sequence_id_of(self._next_sequence_id) if sequence_id is None else sequence_id

    def _encode_alone(self, message: OutgoingMessage) -> LargeMessage | list[pb.Entry]:
        """The entry of a message that is not batched, or its chunks."""
        if message.sealed is None:
            return [
                encode_single(
                    self._name, message, compression=self._compression, publish_time_ms=_now_ms()
                )
            ]
        metadata, body = message.sealed
        metadata.sequence_id = message.sequence_id
        chunk_bytes = self._chunk_bytes
        if len(body) > chunk_bytes:
            return LargeMessage(message, metadata, body, chunk_bytes)
        return [to_entry(metadata, body)]

    def _put(
        self, message: OutgoingMessage, encoded: LargeMessage | list[pb.Entry], now: float
    ) -> None:
        if isinstance(encoded, LargeMessage):
            self._outbox.add_large(encoded, now)
            self._wake.set()
        else:
            self._hand_over_entries([message], encoded, now)

    def _collect(
        self, message: OutgoingMessage, batching: Batching, loop: asyncio.AbstractEventLoop
    ) -> None:
        parcels = self._batcher.add(message)
        for messages in parcels:
            self._hand_over(messages)
        if not self._batcher.collecting:
            self._stop_linger()
        elif self._linger is None:
            self._linger = loop.call_later(batching.delay_s, self._contain, self._flush_batch)

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
        self._stop_linger()
        for messages in self._batcher.flush():
            self._hand_over(messages)

    def _stop_linger(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def _hand_over(self, messages: list[OutgoingMessage]) -> None:
        """Encode a batch, and put it into the outbox."""
        now = asyncio.get_running_loop().time()
        try:
            self._spans.begin_batch(messages, self._name)
            encoded = list(pieces(self._encode, messages, self._limits.max_message_bytes))
        except Exception as surprise:
            _log.exception("a batch of %s cannot be encoded", self._topic, exc_info=surprise)
            encoded = self._encode_each(messages)
        for some, entries in encoded:
            self._hand_over_entries(some, entries, now)

    def _encode_each(
        self, messages: list[OutgoingMessage]
    ) -> list[tuple[list[OutgoingMessage], list[pb.Entry]]]:
        """Encode the messages of a batch that cannot be encoded, each alone: only those at fault
        fail."""
        encoded = []
        for message in messages:
            try:
                encoded.append(([message], self._encode([message])))
            except Exception as surprise:
                self._resolve([Resolved(message, _unexpected(surprise))])
        return encoded

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

    @property
    def _chunk_bytes(self) -> int:
        """The chunk size; 0: do not cut."""
        chunking = self._chunking
        return 0 if chunking is None else chunking.size(self._limits.max_message_bytes)

    def _resolve(self, resolved: Sequence[Resolved]) -> None:
        """Tell the outcomes. The count comes first: a thread may send again once it is told."""
        is_open = self._open
        for message, outcome in resolved:
            if message in is_open:
                self._pending_messages -= message.chunks
                self._pending_bytes -= message.size_bytes
            done = message.done
            if isinstance(outcome, SeqgateError) and outcome.sequence_id is None:
                outcome = outcome.of_message(message.sequence_id)
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
            is_open.pop(message, None)  # last: whatever is here has no outcome yet
            if message.span is not None or message.batch is not None:
                self._end_spans(message, outcome)
        self._room.set()

    def _end_spans(self, message: OutgoingMessage, outcome: Receipt | SeqgateError) -> None:
        try:
            self._spans.end(message, outcome)
        except Exception:  # of the application's tracing: the outcome stands
            _log.exception("the span of a message of %s cannot be ended", self._topic)

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
        await self._contained(self._stay_connected)

    async def _stay_connected(self) -> None:
        while True:
            error: SeqgateError = UnavailableError("the service shut down")
            try:
                await self._stream()
            except SeqgateError as failure:
                error = failure
            if self._finishing or self._failure is not None:
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
            self._take_opened((await read(call, self._asked)).opened)
            self._reconnecting.succeeded()
            sending = asyncio.create_task(self._contained(self._send, call))
            try:
                await self._receive(call)
            finally:
                sending.cancel()
                await asyncio.wait([sending])
        except aio.AioRpcError as error:
            raise error_of_call(error, self._asked) from error
        except asyncio.InvalidStateError as error:  # grpc.aio: the stream has ended
            raise await ending(call, self._asked) from error
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
                    await asyncio.sleep(self._reconnecting.spread(wait_s))
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
            response = await read(call, self._asked)
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
            self._fail_pending(error)
            self._restart()

    def _restart(self) -> None:
        """Drop the stream: its messages must not arrive after their resends."""
        running = self._tasks[0]
        running.cancel()
        self._tasks[0] = asyncio.create_task(self._run(), name=running.get_name())

    def _end(self, error: SeqgateError) -> None:
        """Fail what is pending, and later calls. The first error stays."""
        failure = self._failure = self._failure or error
        if not self._opened.done():
            self._opened.set_exception(failure)
            self._opened.exception()
        self._stop_linger()
        self._fail_pending(failure)
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    def _fail_pending(self, error: SeqgateError) -> None:
        self._batcher.flush()
        self._outbox.fail_all(error)
        self._resolve([Resolved(message, error) for message in self._open])
        self._pending_messages = self._pending_bytes = 0

    async def _stop(self, error: SeqgateError) -> None:
        self._closing = True
        tasks, self._tasks = self._tasks, []
        try:
            self._contain(self._end, error)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    # ---- what nobody expects

    # Tasks and timers run in these, or an exception out of one would leave futures open for ever.

    async def _contained(
        self, work: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        try:
            await work(*args, **kwargs)
        except Exception as surprise:
            self._fail(surprise)

    def _contain(self, act: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            act(*args, **kwargs)
        except Exception as surprise:
            self._fail(surprise)

    def _fail(self, surprise: Exception) -> SeqgateError:
        """End the producer: its state may be wrong. Returns the error of later calls."""
        error = _unexpected(surprise)
        _log.error("a producer of %s failed", self._topic, exc_info=surprise)
        self._end(error)
        return error


def raise_about(sequence_id: int | None, error: SeqgateError) -> NoReturn:
    """Raise an error about a message, with its sequence id if it has one."""
    if sequence_id is None:
        raise error
    raise error.of_message(sequence_id) from error.__cause__


def given_id(sequence_id: int | None) -> int | None:
    return None if sequence_id is None else sequence_id_of(sequence_id)


def _initial_id(given: int | None) -> int | None:
    most, reason = SEQUENCE_ID_MAX - 1, "INVALID_SEQUENCE_ID"
    return None if given is None else whole("initial_sequence_id", given, 0, most, reason=reason)


def _unexpected(surprise: Exception) -> InternalError:
    error = InternalError(f"the producer failed: {surprise!r}")
    error.__cause__ = surprise
    return error


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


class DeliveryTime(NamedTuple):
    """The earliest delivery, in milliseconds since 1970. A delay is another time whenever the
    message is sent."""

    at_ms: int
    is_delay: bool


def delivery_time(
    deliver_at: datetime | None, deliver_after_s: float | None
) -> DeliveryTime | None:
    """The earliest delivery; None: immediately."""
    if deliver_at is None and deliver_after_s is None:
        return None
    if deliver_at is not None and deliver_after_s is not None:
        raise InvalidRequestError("give deliver_at or deliver_after_s, not both", reason=_ENTRY)
    if deliver_after_s is not None:
        after_s = real("deliver_after_s", deliver_after_s, 0, DELIVER_AFTER_MAX_S, reason=_ENTRY)
        return DeliveryTime(_now_ms() + math.ceil(after_s * 1_000), is_delay=True)
    try:
        since_ms = milliseconds_of(moment("deliver_at", deliver_at, reason=_ENTRY))
    except InvalidRequestError:
        raise
    except Exception:  # without a time zone, or the zone's own
        since_ms = -1
    if since_ms < 0:
        text = "deliver_at must have a time zone, and be in 1970 or later"
        raise InvalidRequestError(text, reason=_ENTRY)
    return DeliveryTime(int(since_ms), is_delay=False)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
