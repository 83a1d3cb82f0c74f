"""The reader: a topic's messages in order, from any place, across reconnections."""

import asyncio
from collections import deque
from typing import Any, Final, Literal

from grpc import aio

from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from seqgate.client._channel import CALL_TIMEOUT_S, Backoff, translated
from seqgate.client._codec import Message, decode_entry
from seqgate.client._status import error_of_call
from seqgate.errors import CorruptMessageError, UnavailableError
from seqgate.types import MessageId, Position, TopicName

EARLIEST: Final = "earliest"
LATEST: Final = "latest"

Start = MessageId | Literal["earliest", "latest"]
"""Where a reader starts: at the first message that the topic still has, after the last one, or at a
message."""


class Reader:
    """Reads one topic, message by message.

    Made by Client.reader, and used as an async iterator. It keeps no position but in memory: store
    a message's id together with what came of the message, and start there again (PIP-6's reader).
    """

    def __init__(
        self, channel: aio.Channel, topic: TopicName, *, start: Start, inclusive: bool, follow: bool
    ) -> None:
        self._stub: Any = pb_grpc.LedgerServiceStub(channel)
        self._topic = topic
        self._follow = follow
        self._call: Any = None
        self._reading: asyncio.Task[Any] | None = None
        self._buffer: deque[Message] = deque()
        self._backoff = Backoff()
        self._damage: CorruptMessageError | None = None
        self._closed = False
        self._set_start(start, inclusive=inclusive)

    @property
    def topic(self) -> str:
        """The topic's full name."""
        return str(self._topic)

    def __aiter__(self) -> "Reader":
        return self

    async def __anext__(self) -> Message:
        """The next message; waits for it when the reader follows, and ends the iteration where the
        topic ends otherwise.

        Raises:
            NotFoundError: there is no such topic.
            CorruptMessageError, DataLossError: a message is damaged. Seek past it to go on.
        """
        while not self._buffer:
            if self._damage is not None:
                raise self._damage
            if self._closed or not await self._fill():
                raise StopAsyncIteration
        return self._buffer.popleft()

    async def read(self) -> Message | None:
        """The next message, or None where the topic ends and the reader does not follow."""
        return await anext(self, None)

    async def seek(self, start: Start, *, inclusive: bool = True) -> None:
        """Go on from another place: at a message, or after it."""
        self._drop_call()
        self._damage = None
        self._buffer.clear()
        self._set_start(start, inclusive=inclusive)

    async def has_message_available(self) -> bool:
        """Whether the topic has a message that was not read yet."""
        if self._buffer:
            return True
        request = pb.LastMessageIdRequest(topic=str(self._topic))
        reply = await translated(self._stub.LastMessageId(request, timeout=CALL_TIMEOUT_S))
        if not reply.HasField("last"):
            return False
        last = Position(reply.last.ledger_id, reply.last.entry_id)
        if self._after is None and self._at is None:
            return self._start == EARLIEST
        return (self._at is not None and last >= self._at.position) or (
            self._after is not None and last > self._after
        )

    async def close(self) -> None:
        """End the reading."""
        self._closed = True
        self._drop_call()

    async def __aenter__(self) -> "Reader":
        return self

    async def __aexit__(self, *rest: object) -> None:
        await self.close()

    def _set_start(self, start: Start, *, inclusive: bool) -> None:
        self._start = start
        self._after: Position | None = None  # the last entry received
        self._at: MessageId | None = None  # where to start inside the first entry
        self._inclusive = inclusive
        if isinstance(start, MessageId):
            if start.batch_index < 0 and not inclusive:
                self._after = start.position
            else:
                self._at = start

    async def _fill(self) -> bool:
        """Wait for what comes next, and put messages of it into the buffer; False where the topic
        ends."""
        try:
            response = await self._next_response()
        except _Dropped:
            return True
        except UnavailableError as error:
            self._drop_call()
            await asyncio.sleep(self._backoff.next_s(error.retry_after_s))
            return True
        if response is None:
            self._drop_call()
            return False
        match response.WhichOneof("response"):
            case "started":
                self._note_started(response.started)
            case "draining":
                self._drop_call()
                await asyncio.sleep(self._backoff.next_s())
            case "entries":
                self._backoff.reset()
                try:
                    for stored in response.entries.entries:
                        self._take(stored)
                except CorruptMessageError as damage:  # once what comes before it is read
                    self._damage = damage
                    self._drop_call()
        return True

    async def _next_response(self) -> Any:
        """The next response; None at the end of the stream. A task of its own waits for it: if who
        waits here is cancelled, the stream goes on, and what arrives is there for the next.

        Raises:
            _Dropped: meanwhile the reader was closed, or told to go on from elsewhere.
        """
        if self._reading is None:
            if self._call is None:
                self._call = self._stub.Read(self._request())
            self._reading = asyncio.create_task(_read(self._call))
            self._reading.add_done_callback(_look)
        reading = self._reading
        await asyncio.wait([reading])
        if self._reading is not reading:
            raise _Dropped
        self._reading = None
        try:
            response = reading.result()
        except aio.AioRpcError as error:
            self._call = None
            raise error_of_call(error) from error
        return None if response is aio.EOF else response

    def _request(self) -> pb.ReadRequest:
        request = pb.ReadRequest(topic=str(self._topic), follow=self._follow)
        if self._after is not None:
            request.after.CopyFrom(_to_wire(self._after))
        elif self._at is not None:
            request.at.CopyFrom(_to_wire(self._at.position))
        elif self._start == EARLIEST:
            request.earliest.SetInParent()
        else:
            request.latest.SetInParent()
        return request

    def _note_started(self, started: pb.Started) -> None:
        # "Latest" is one place: where the topic ended when the reader first connected.
        if self._start == LATEST and self._after is None and started.HasField("last"):
            self._after = Position(started.last.ledger_id, started.last.entry_id)
        elif self._start == LATEST and self._after is None:
            self._start = EARLIEST

    def _take(self, stored: pb.StoredEntry) -> None:
        position = Position(stored.position.ledger_id, stored.position.entry_id)
        if stored.metadata.HasField("marker_type"):  # a system's own, not a message
            self._after, self._at = position, None
            return
        messages = list(decode_entry(str(self._topic), stored))
        at = self._at
        if at is not None and at.position == position:
            first = at.batch_index if self._inclusive else at.batch_index + 1
            messages = [each for each in messages if each.id.batch_index >= first]
        self._buffer.extend(messages)
        self._after, self._at = position, None

    def _drop_call(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if self._call is not None:
            self._call.cancel()
            self._call = None


class _Dropped(Exception):
    """The stream that was waited for is of no use any more."""


def _look(reading: asyncio.Task[Any]) -> None:
    """An exception that nobody waits for any more is no surprise."""
    if not reading.cancelled():
        reading.exception()


async def _read(call: Any) -> Any:
    return await call.read()


def _to_wire(position: Position) -> entry_pb2.Position:
    return entry_pb2.Position(ledger_id=position.ledger_id, entry_id=position.entry_id)
