"""The reader: a topic's messages in order, from any place, across reconnections."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from grpc import aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from seqgate.client._arguments import flag, message_id, whole
from seqgate.client._assembler import (
    Assembled,
    Assembler,
    AssemblyLimits,
    Dropped,
    DropReason,
    Headless,
    Piece,
)
from seqgate.client._channel import CALL_TIMEOUT_S, translated
from seqgate.client._codec import corrupt, decode_entry, decode_large, piece_of, position_of
from seqgate.client._loops import of_one_loop
from seqgate.client._message import MANY_MESSAGES, Message
from seqgate.client._reconnecting import Reconnecting
from seqgate.client._status import Asked, error_of_call
from seqgate.client._subscribing import Place, start_to_wire
from seqgate.client._tracing import Reading
from seqgate.errors import (
    CorruptMessageError,
    DataLossError,
    InUseError,
    LimitExceededError,
    MessagesTrimmedError,
    MessageTooLargeError,
    SeqgateError,
    UnavailableError,
)
from seqgate.message_id import LATEST_ID, ChunkMessageId, MessageId
from seqgate.owners import NOT_OWNER, FollowingChannel
from seqgate.telemetry.propagation import TRACEPARENT
from seqgate.times import milliseconds
from seqgate.types import Position, TopicName

EARLIEST: Final = "earliest"
LATEST: Final = "latest"


@dataclass(frozen=True, slots=True)
class Missed:
    """A range of a topic that a reader skips.

    Attributes:
        first, last: its first and last entry; the reader continues after it.
        error: MessagesTrimmedError, or the damage of the entries.
    """

    first: MessageId
    last: MessageId
    error: SeqgateError


Start = Place
"""Where a reader starts: at the topic's first message, after its last one, at a message, or at the
first message stored at this time or later, by the ledger's clock."""


@of_one_loop
class Reader:
    """Reads one topic, message by message.

    Made by Client.reader, and used as an async iterator. It stores no position: store a message's
    id together with the result of its processing, and start there again (PIP-6's reader).

    A large message is returned once, at the position of its last chunk; its id names both ends.
    The reader fetches earlier chunks that it lacks because it started after them or had no room for
    them. Chunks that make no message are left out, counted, and passed to `on_dropped`.

    Missing messages are never skipped silently. At messages that were trimmed before they were
    read, or are damaged, the iteration raises until `skip` is called:

        while True:
            try:
                async for message in reader:
                    ...
                break
            except DataLossError:
                log.error("messages are missing: %s", reader.skip())

    With `on_missed`, trimmed messages are reported there and skipped.
    """

    def __init__(
        self,
        channel: FollowingChannel,
        topic: TopicName,
        *,
        start: Start,
        inclusive: bool,
        follow: bool,
        assembly: AssemblyLimits,
        on_dropped: Callable[[Dropped], None] | None,
        on_missed: Callable[[Missed], None] | None,
    ) -> None:
        self._stub = pb_grpc.LedgerServiceStub(channel)
        self._asked = Asked("ledger", channel.owners.home)
        self._topic = topic
        self._follow = follow
        self._call: Any = None
        self._is_following = False  # whether the call waits at the topic's end
        self._ends = 0  # how often a stream reached it
        self._reading: asyncio.Task[Any] | None = None
        self._arrived: deque[pb.StoredEntry | pb.EntriesTrimmed] = deque()
        self._buffer: deque[Message] = deque()
        self._reconnecting = Reconnecting(f"a reader of {topic}")
        self._missed: Missed | None = None  # the next range; its error is raised
        self._after: Position | None = None  # the last entry received
        self._at: Position | None = None  # the first entry to be received
        self._closed = False
        self._assembly = assembly
        self._assembler = Assembler(assembly)
        self._on_dropped = on_dropped
        self._unreported: deque[Dropped] = deque()
        self._on_missed = on_missed
        self._headless = 0
        self._spans = Reading(str(topic))
        self._arrived_ns = 0  # when the last entries arrived, in nanoseconds since 1970
        self._log_time_ms = 0
        self._set_start(_place_of(start), inclusive=flag("inclusive", inclusive))

    @property
    def topic(self) -> str:
        """The topic's full name."""
        return str(self._topic)

    @property
    def dropped(self) -> Mapping[DropReason, int]:
        """Chunks left out since the reader was made, by reason. EVICTED, EXPIRED and HEADLESS ones
        are fetched again when their message's last chunk arrives."""
        counts = Counter(self._assembler.counts)
        counts[DropReason.HEADLESS] += self._headless
        return +counts

    def __aiter__(self) -> "Reader":
        return self

    async def __anext__(self) -> Message:
        """The next message. At the topic's end, waits if the reader follows, and otherwise ends the
        iteration.

        Raises:
            NotFoundError: the topic does not exist.
            MessagesTrimmedError: messages were trimmed before they were read; not with `on_missed`.
            CorruptMessageError, DataLossError: one or more messages are damaged.
            MessageTooLargeError: a large message exceeds the reader's own limits.

        After any of these except NotFoundError, `skip` continues after the range in question.
        """
        called_ns = time.time_ns() if self._spans.is_on else 0
        if not await self._until_buffered():
            raise StopAsyncIteration
        return self._take(called_ns)

    async def read(self) -> Message | None:
        """The next message; None at the topic's end, if the reader does not follow."""
        return await anext(self, None)

    async def read_many(self, messages_max: int = MANY_MESSAGES) -> list[Message]:
        """Wait for a message, and return it with those that have arrived already, at most
        `messages_max`; nothing at the topic's end, if the reader does not follow. Raises the same
        as iterating."""
        messages_max = whole("messages_max", messages_max, 1)
        called_ns = time.time_ns() if self._spans.is_on else 0
        if not await self._until_buffered():
            return []
        while len(self._buffer) < messages_max and self._arrived and self._missed is None:
            left = len(self._arrived)
            await self._take_next()
            if len(self._arrived) == left:
                break  # the next call waits for it
        messages = list(islice(self._buffer, messages_max))
        for each in messages:
            self._record(each, called_ns)
        for _ in messages:
            self._buffer.popleft()
        return messages

    async def _until_buffered(self) -> bool:
        """Wait until the buffer has a message. False: the reader is closed, or at its end."""
        while not await self._is_ready(follow=self._follow):
            if self._closed or not self._follow:
                return False
        if not self._buffer:
            assert self._missed is not None
            raise self._missed.error
        return True

    async def _is_ready(self, *, follow: bool) -> bool:
        """Read until a message is buffered, or an error is pending. False: the reader is closed, or
        at the topic's end; with `follow` it waits there, unless another task has found the end."""
        ends = self._ends
        while not self._buffer and self._missed is None:
            if self._closed or self._ends != ends:
                return False
            if self._arrived:
                await self._take_next()
            else:
                await self._fill(follow=follow)
        return True

    def _take(self, called_ns: int) -> Message:
        self._record(self._buffer[0], called_ns)
        return self._buffer.popleft()

    def _record(self, message: Message, called_ns: int) -> None:
        """Record that a message was read. If that fails, the next call returns the message."""
        if self._spans.is_on and TRACEPARENT in message.properties:
            self._spans.record(message, max(called_ns, self._arrived_ns))

    def skip(self) -> Missed | None:
        """Continue after the range whose error the reader raises: trimmed messages, a damaged
        entry, or a damaged range that the service cannot read. Returns the range; None: no error is
        pending, and nothing changes."""
        missed, self._missed = self._missed, None
        if missed is None:
            return None
        if self._arrived:
            self._arrived.popleft()  # entries after the range have arrived too
        else:
            self._drop_call()
            self._after, self._at = missed.last.position, None
        return missed

    async def seek(self, start: Start, *, inclusive: bool = True) -> None:
        """Continue at another place: at a message, or after it. Raises InvalidRequestError if the
        place is none, and then goes on as before."""
        start, inclusive = _place_of(start), flag("inclusive", inclusive)
        self._drop_call()
        self._missed = None
        self._arrived.clear()
        self._buffer.clear()
        self._assembler.clear()
        self._set_start(start, inclusive=inclusive)

    @property
    def connection_error(self) -> SeqgateError | None:
        """Why there is no connection: the error of the latest attempt, or the loss of the last one.
        None: it is connected, or the first attempt is under way."""
        return self._reconnecting.trouble

    async def has_message_available(self) -> bool:
        """Whether `read` now returns a message, or raises, without waiting for one to be published.

        Reads ahead up to the topic's end, and buffers what it finds: chunks of an incomplete
        message are none. With start=LATEST, the first call fixes the place.

        Raises:
            NotFoundError: the topic does not exist.
            UnavailableError: the service did not answer.
        """
        is_idle = not (self._buffer or self._arrived or self._missed or self._closed)
        if is_idle and not await self._is_behind():
            return False  # without a stream
        was_open = self._call is not None  # and so ends where the topic ended then
        return await self._is_ready(follow=False) or (
            was_open and await self._is_ready(follow=False)
        )

    async def _is_behind(self) -> bool:
        """Whether the topic has entries after the last one received."""
        request = pb.GetLastMessageIdRequest(topic=str(self._topic))
        call = self._stub.GetLastMessageId(request, timeout=CALL_TIMEOUT_S)
        reply = await translated(call, self._asked)
        last = position_of(reply.last) if reply.HasField("last") else None
        if self._call is None:
            self._fix_latest(last)
        return last is not None and (self._after is None or last > self._after)

    async def close(self) -> None:
        """End the iteration and the stream."""
        self._closed = True
        self._drop_call()

    async def __aenter__(self) -> "Reader":
        return self

    async def __aexit__(self, *rest: object) -> None:
        await self.close()

    def _set_start(self, start: Start, *, inclusive: bool) -> None:
        self._start = start
        self._after = self._at = None
        self._floor: MessageId | None = None  # the first message to return
        if not isinstance(start, MessageId):
            return
        if start.ledger_id < 0:
            self._start = EARLIEST
        elif start.position == LATEST_ID.position:
            self._start = LATEST
        elif start.entry_id < 0:
            self._at = Position(start.ledger_id, 0)
        elif not inclusive and (start.batch_index < 0 or start.batch_index == start.batch_size - 1):
            self._after = start.position
        else:
            first = start.first_chunk if isinstance(start, ChunkMessageId) else start
            index = start.batch_index if inclusive else start.batch_index + 1
            self._at = Position(max(first.ledger_id, 0), max(first.entry_id, 0))
            self._floor = MessageId(*start.position, batch_index=index)

    async def _fill(self, *, follow: bool) -> None:
        """Wait for the next response, and process it."""
        try:
            response = await self._next_response(follow=follow)
        except _CallDropped:
            return
        except (UnavailableError, InUseError, LimitExceededError) as error:
            _check_retryable(error)
            self._drop_call()
            await asyncio.sleep(self._reconnecting.failed(error))
            return
        except DataLossError as error:
            self._missed = _damaged_stretch(error)
            if self._missed is None:
                raise
            return
        if response is None:
            self._drop_call()
            self._ends += 1
            return
        match response.WhichOneof("response"):
            case "started":
                self._reconnecting.answered()
                started = response.started
                self._fix_latest(position_of(started.last) if started.HasField("last") else None)
            case "draining":
                self._drop_call()
                await asyncio.sleep(self._reconnecting.pause_s())
            case "entries":
                self._reconnecting.succeeded()
                self._arrived.extend(response.entries.entries)
                if self._spans.is_on:
                    self._arrived_ns = time.time_ns()
                self._after = position_of(response.entries.entries[-1].position)
            case "trimmed":
                self._arrived.append(response.trimmed)
                last = response.trimmed.last
                self._after = position_of(last)

    async def _next_response(self, *, follow: bool) -> Any:
        """The next response; None at the end of the stream. A separate task reads it, so cancelling
        this call loses nothing: the next call gets the response. Without `follow`, a stream that
        follows is replaced by one that ends. Raises _CallDropped if the reader was closed or moved
        meanwhile, or its stream replaced."""
        if self._is_following and not follow:
            self._drop_call()
        if self._reading is None:
            if self._call is None:
                self._call = self._stub.Read(self._request(follow=follow))
                self._is_following = follow
            self._reading = asyncio.create_task(_read(self._call))
            self._reading.add_done_callback(_look)
        reading = self._reading
        await asyncio.wait([reading])
        if self._reading is not reading:
            raise _CallDropped
        self._reading = None
        if reading.cancelled():  # by the client, which is closed
            self._closed = True
            raise _CallDropped
        try:
            response = reading.result()
        except aio.AioRpcError as error:
            self._call = None
            raise error_of_call(error, self._asked) from error
        except BaseException:
            self._drop_call()  # what it was about to return would be missing
            raise
        return None if response is aio.EOF else response

    def _request(self, *, follow: bool) -> pb.ReadRequest:
        request = pb.ReadRequest(topic=str(self._topic), follow=follow)
        if self._after is not None:
            request.start.after.CopyFrom(_to_wire(self._after))
        elif self._at is not None:
            request.start.at.CopyFrom(_to_wire(self._at))
        else:
            request.start.CopyFrom(start_to_wire(self._start))
        return request

    def _fix_latest(self, last: Position | None) -> None:
        # "Latest" is one place: where the topic ended when the reader first connected.
        if self._start != LATEST or self._after is not None:
            return
        if last is None:
            self._start = EARLIEST
        self._after = last

    async def _take_next(self) -> None:
        """Process the first entry that arrived, and report what was dropped: once, also if the
        application fails then."""
        await self._take_first()
        while self._unreported and self._on_dropped is not None:
            self._on_dropped(self._unreported.popleft())

    async def _take_first(self) -> None:
        """Process the first entry that arrived. Cancellation loses nothing: the entry stays."""
        stored = self._arrived[0]
        if isinstance(stored, pb.EntriesTrimmed):
            self._take_trimmed(stored)
            return
        try:
            messages = await self._messages(stored)
        except (UnavailableError, InUseError, LimitExceededError) as error:
            _check_retryable(error)
            await asyncio.sleep(self._reconnecting.failed(error))
            return
        except (CorruptMessageError, MessageTooLargeError) as damage:
            if not self._is_next(stored):
                return
            if self._floor is None or position_of(stored.position) >= self._floor.position:
                where = MessageId(*position_of(stored.position))
                self._missed = Missed(where, where, damage)
                return
            messages = []  # it ends before the reader's start
        if not self._is_next(stored):
            return  # the reader was moved meanwhile
        self._arrived.popleft()
        if self._floor is not None:
            messages = [message for message in messages if message.id >= self._floor]
            if position_of(stored.position) > self._floor.position:
                self._floor = None
        self._buffer.extend(messages)

    def _take_trimmed(self, trimmed: pb.EntriesTrimmed) -> None:
        """Report messages that were trimmed before they were read, in their place."""
        first = MessageId(trimmed.first.ledger_id, trimmed.first.entry_id)
        last = MessageId(trimmed.last.ledger_id, trimmed.last.entry_id)
        where = {"first": _place(first), "last": _place(last)}
        text = "messages were trimmed before they were read: {first} to {last}"
        missed = Missed(first, last, MessagesTrimmedError(text.format(**where), details=where))
        if self._on_missed is None:
            self._missed = missed
            return
        self._arrived.popleft()
        self._on_missed(missed)

    def _is_next(self, stored: pb.StoredEntry) -> bool:
        return bool(self._arrived) and self._arrived[0] is stored

    async def _messages(self, stored: pb.StoredEntry) -> list[Message]:
        """The messages that end with this entry."""
        metadata = stored.metadata
        if stored.aborts:
            self._report(self._assembler.abort(metadata.producer_name, stored.aborts))
        if metadata.HasField("marker_type"):  # a marker of the service, not a message
            return []
        if metadata.num_chunks_from_msg < 2:
            return list(decode_entry(self.topic, stored))
        self._log_time_ms = max(self._log_time_ms, milliseconds(stored.append_time))
        added = self._assembler.add(piece_of(stored), self._log_time_ms)
        for dropped in added.dropped:
            self._report(dropped)
            _raise_damage(dropped, stored)
        match added.outcome:
            case Assembled(_, _, _, body, positions):
                return [decode_large(self.topic, stored, body, positions[0])]
            case Headless() as headless:
                return await self._fetch(stored, headless)
        return []

    async def _fetch(self, last: pb.StoredEntry, headless: Headless) -> list[Message]:
        """Read all chunks of a message of which only the last is here. Returns nothing if the log
        does not have all of them: it may have been trimmed, or the message never completed."""
        try:
            assembled = await self._read_again(last, headless.piece)
        except DataLossError as error:  # `skip` continues after the last chunk
            raise corrupt(last, "an earlier chunk of a large message is damaged") from error
        if assembled is not None:
            return [decode_large(self.topic, last, assembled.body, assembled.positions[0])]
        self._headless += 1
        self._report(headless.dropped)
        return []

    async def _read_again(self, last: pb.StoredEntry, piece: Piece) -> Assembled | None:
        request = pb.FindMessageRequest(
            topic=self.topic,
            producer_name=piece.producer,
            sequence_id=piece.sequence_id,
            uuid=piece.uuid,
        )
        call = self._stub.FindMessage(request, timeout=CALL_TIMEOUT_S)
        reply = await translated(call, self._asked)
        fate = reply.fate
        if fate.position != last.position or not fate.HasField("first_chunk_position"):
            return None
        async with aclosing(self._range(fate.first_chunk_position, last.position)) as entries:
            return await self._assemble(entries, piece)

    async def _assemble(
        self, entries: AsyncIterator[pb.StoredEntry], piece: Piece
    ) -> Assembled | None:
        assembler = Assembler(self._assembly)
        async for stored in entries:
            if (stored.metadata.producer_name, stored.metadata.uuid) != piece.attempt:
                continue
            added = assembler.add(piece_of(stored), now_ms=0)
            for dropped in added.dropped:
                _raise_damage(dropped, stored)
            if isinstance(added.outcome, Assembled):
                return added.outcome
        return None

    async def _range(
        self, first: common_pb2.Position, last: common_pb2.Position
    ) -> AsyncGenerator[pb.StoredEntry, None]:
        call = self._stub.Read(
            pb.ReadRequest(topic=self.topic, start=common_pb2.Start(at=first), through=last)
        )
        try:
            async for response in call:
                for stored in response.entries.entries:
                    yield stored
                if response.HasField("draining"):
                    raise UnavailableError("the service is shutting down", reason="DRAINING")
        except aio.AioRpcError as error:
            raise error_of_call(error, self._asked) from error
        finally:
            call.cancel()

    def _report(self, dropped: Dropped | None) -> None:
        if dropped is not None and self._on_dropped is not None:
            self._unreported.append(dropped)

    def _drop_call(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if self._call is not None:
            self._call.cancel()
            self._call = None
        self._is_following = False


def _place_of(start: Start) -> Start:
    start_to_wire(start)  # raises if it is none
    return message_id("start", start) if isinstance(start, MessageId) else start


class _CallDropped(Exception):
    """The stream was dropped while its response was awaited."""


def _look(reading: asyncio.Task[Any]) -> None:
    """Retrieve the exception of a task that nothing awaits, or asyncio logs it."""
    if not reading.cancelled():
        reading.exception()


async def _read(call: Any) -> Any:
    return await call.read()


_PASSING: Final = frozenset({NOT_OWNER, "SERVICE_BUSY", "TOO_MANY_STREAMS"})
"""Reasons to retry, besides UnavailableError."""


def _check_retryable(error: SeqgateError) -> None:
    """Raise the error unless a retry may succeed: the service is unavailable or busy, the topic has
    another owner, or all streams are taken."""
    if not isinstance(error, UnavailableError) and error.reason not in _PASSING:
        raise error


def _damaged_stretch(error: SeqgateError) -> Missed | None:
    """The unreadable range that the error's details name; None: they name none."""
    try:
        ledger_id, entry_id = (int(error.details[each]) for each in ("ledger_id", "entry_id"))
        first = int(error.details.get("first_entry_id", entry_id))
    except (KeyError, ValueError):
        return None
    return Missed(MessageId(ledger_id, first), MessageId(ledger_id, entry_id), error)


def _place(where: MessageId) -> str:
    return f"{where.ledger_id}:{where.entry_id}"


def _raise_damage(dropped: Dropped, stored: pb.StoredEntry) -> None:
    """Raise if this chunk's message is in the log but cannot be returned."""
    metadata = stored.metadata
    if dropped.uuid != metadata.uuid:
        return
    if dropped.reason is DropReason.CORRUPT:
        raise corrupt(stored, "the chunks do not match the size or checksum of their message")
    is_last = metadata.chunk_id == metadata.num_chunks_from_msg - 1
    if dropped.reason is DropReason.TOO_LARGE and is_last:
        raise MessageTooLargeError(
            "a large message exceeds this reader's limits",
            details={
                "ledger_id": str(stored.position.ledger_id),
                "entry_id": str(stored.position.entry_id),
                "total_chunk_msg_size": str(metadata.total_chunk_msg_size),
            },
        )


def _to_wire(position: Position) -> common_pb2.Position:
    return common_pb2.Position(ledger_id=position.ledger_id, entry_id=position.entry_id)
