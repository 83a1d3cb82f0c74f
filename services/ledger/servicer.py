"""The wire of the ledger service: parse, call, translate the result."""

import asyncio
import base64
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import google_crc32c
from grpc import aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1 import ledger_pb2_grpc as pb_grpc
from seqgate.services.errors import (
    DomainError,
    Fenced,
    InvalidPage,
    InvalidProducerName,
    InvalidSequenceId,
    Kind,
)
from seqgate.services.ledger.core.columns import Columns
from seqgate.services.ledger.core.content import DIGEST_BYTES
from seqgate.services.ledger.core.entry import METADATA_BYTES_MAX, Entry, StoredEntry, Unit
from seqgate.services.ledger.core.receipt import (
    Fate,
    Found,
    Missing,
    Receipt,
    Status,
    Unfinished,
)
from seqgate.services.ledger.core.runs import Runs
from seqgate.services.ledger.live import Answered, News, Session
from seqgate.services.ledger.ports import LogState
from seqgate.services.ledger.readers import Pages
from seqgate.services.ledger.service import Ledger, Missed, Opened, Opening, ReadRange
from seqgate.services.runtime.cutting import until_cut
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.positions import to_position
from seqgate.services.runtime.refusal_log import in_stream
from seqgate.services.runtime.requests import (
    After,
    At,
    AtTime,
    Earliest,
    Latest,
    Start,
    check_start,
    read_limit,
    read_number,
    read_optional_position,
    read_position,
    read_producer,
    read_sequence_id,
    read_start,
    read_time_ms,
    read_topic,
)
from seqgate.times import timestamp
from seqgate.types import (
    SEQUENCE_ID_MAX,
    Chunk,
    InvalidChunkError,
    InvalidNameError,
    Position,
    TopicName,
    check_chunk,
    check_producer_name,
)

PROPERTIES_MAX: Final = 128
"""The most properties of an entry."""

BATCH_MESSAGES_MAX: Final = 10_000
"""The most messages of a batch."""

PUBLICATION_ENTRIES_MAX: Final = 1_000
"""The most entries of a publication."""

INSTANCE_BYTES_MAX: Final = 64
"""The longest Open.instance, in bytes."""

PAGE_DEFAULT: Final = 1_000
PAGE_MAX: Final = 10_000
"""The default and the largest page size of lists."""

_LEDGER_TOKEN: Final = re.compile(r"[0-9]{1,19}", re.ASCII)

POSITIONS_MAX: Final = 10_000
"""The most entries that one ReadEntries requests."""

RECEIPTS_MAX: Final = 10_000
"""The most receipts of one response."""

Context = aio.ServicerContext[Any, Any]


class NotOpened(DomainError):
    """A Publish stream does not start with Open, or sends a second one."""

    kind = Kind.INVALID
    reason = "NOT_OPENED"


class InvalidPublication(DomainError):
    """A publication is empty or too large, or reuses the request id of an unanswered one."""

    kind = Kind.INVALID
    reason = "INVALID_PUBLICATION"


class InvalidEntry(DomainError):
    """An entry's metadata is inconsistent or exceeds a limit."""

    kind = Kind.INVALID
    reason = "INVALID_ENTRY"


class EntryTooLarge(DomainError):
    """A payload, a message's chunks together, or an entry's metadata exceed a size limit."""

    kind = Kind.INVALID
    reason = "ENTRY_TOO_LARGE"


class ChecksumMismatch(DomainError):
    """A payload does not match the checksum in its metadata: it was damaged in transit."""

    kind = Kind.INVALID
    reason = "CHECKSUM_MISMATCH"


class InvalidRange(DomainError):
    """A read or trim lacks its start, or has a position out of range; or a read starts beyond the
    end of the log, whose last entry is in `last`."""

    kind = Kind.INVALID
    reason = "INVALID_RANGE"


class EntryLimits(NamedTuple):
    """The limits of the service: payload bytes of an entry and a large message; chunks."""

    message_bytes: int
    large_message_bytes: int
    chunks: int


class LedgerServicer(pb_grpc.LedgerServiceServicer):
    """See ledger.proto."""

    def __init__(self, ledger: Ledger, drain: Drain, limits: EntryLimits) -> None:
        self._ledger = ledger
        self._drain = drain
        self._limits = limits

    # A coroutine that reads and writes on the context; grpc's stubs allow only generators.
    async def Publish(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.PublishRequest], context: Context
    ) -> None:
        first: Any = await context.read()
        opened = await self._ledger.open(_opening(first))
        runs = first.open.receipt_runs
        receiving = asyncio.create_task(self._receive(opened, context))
        try:
            async with until_cut() as opened.session.cut:
                await context.write(pb.PublishResponse(opened=self._to_opened(opened)))
                while (news := await opened.session.news()) is not None:
                    for response in _to_responses(news, runs=runs):
                        await context.write(response)
        finally:
            receiving.cancel()
            self._ledger.close(opened)

    # These three write to the context themselves, so that a stream can be ended while its reader is
    # not reading.
    async def Read(self, request: pb.ReadRequest, context: Context) -> None:  # type: ignore[override]
        await self._send(context, partial(self._read, request))

    async def ReadEntries(  # type: ignore[override]
        self, request: pb.ReadEntriesRequest, context: Context
    ) -> None:
        await self._send(context, partial(self._read_entries, request))

    async def ReadColumns(  # type: ignore[override]
        self, request: pb.ReadColumnsRequest, context: Context
    ) -> None:
        await self._send(context, partial(self._read_columns, request))

    async def _send(
        self, context: Context, responses: Callable[[Pages], AsyncGenerator[Any, None]]
    ) -> None:
        readers = self._ledger.readers
        readers.enter()
        # Not earlier: while the reader is slow, the status waits behind the responses.
        context.add_done_callback(lambda _: readers.leave())  # type: ignore[arg-type]
        async with readers.pages() as pages, aclosing(responses(pages)) as some:
            async for response in some:
                with pages.sending():
                    await context.write(response)

    async def _read(
        self, request: pb.ReadRequest, pages: Pages
    ) -> AsyncGenerator[pb.ReadResponse, None]:
        topic = read_topic(request.topic)
        log = await self._ledger.get(topic)
        what = await _range(self._ledger, request, log)
        yield pb.ReadResponse(
            started=pb.Started(first=to_position(log.first), last=to_position(log.tail))
        )
        draining = self._drain.event
        async for entries in self._ledger.read(topic, what, pages, draining):
            if isinstance(entries, Missed):
                first, last = to_position(entries.first), to_position(entries.last)
                yield pb.ReadResponse(trimmed=pb.EntriesTrimmed(first=first, last=last))
                continue
            yield pb.ReadResponse(entries=_to_stored(entries))
        if draining.is_set():
            yield pb.ReadResponse(draining=common_pb2.Draining())

    async def _read_entries(
        self, request: pb.ReadEntriesRequest, pages: Pages
    ) -> AsyncGenerator[pb.ReadEntriesResponse, None]:
        topic, positions = read_topic(request.topic), _positions(request.positions)
        payloads, draining = not request.metadata_only, self._drain.event
        read = self._ledger.read_at(topic, positions, pages, draining, payloads=payloads)
        async for entries in read:
            yield pb.ReadEntriesResponse(entries=_to_stored(entries))
        if draining.is_set():
            yield pb.ReadEntriesResponse(draining=common_pb2.Draining())

    async def _read_columns(
        self, request: pb.ReadColumnsRequest, pages: Pages
    ) -> AsyncGenerator[pb.ReadColumnsResponse, None]:
        topic = read_topic(request.topic)
        after = read_optional_position(request, "after", InvalidRange)
        through = read_optional_position(request, "through", InvalidRange)
        log = await self._ledger.get(topic)
        yield pb.ReadColumnsResponse(
            started=pb.Started(first=to_position(log.first), last=to_position(log.tail))
        )
        draining = self._drain.event
        metadata = request.metadata
        read = self._ledger.columns(log, after, through, pages, draining, metadata=metadata)
        async for runs in read:
            blocks = pb.EntryBlocks(blocks=map(_to_columns, runs))
            yield pb.ReadColumnsResponse(blocks=blocks)
        if draining.is_set():
            yield pb.ReadColumnsResponse(draining=common_pb2.Draining())

    async def ListLedgers(
        self, request: pb.ListLedgersRequest, context: Context
    ) -> pb.ListLedgersResponse:
        limit = read_limit(request.page_size, PAGE_DEFAULT, PAGE_MAX)
        ledgers = await self._ledger.ledgers(
            read_topic(request.topic), after=_ledger_token(request.page_token), limit=limit
        )
        return pb.ListLedgersResponse(
            ledgers=[
                pb.LedgerRange(ledger_id=ledger_id, first_entry_id=first, last_entry_id=last)
                for ledger_id, first, last in ledgers
            ],
            next_page_token=str(ledgers[-1].ledger_id) if len(ledgers) == limit else "",
        )

    async def ListTrimmedProducers(
        self, request: pb.ListTrimmedProducersRequest, context: Context
    ) -> pb.ListTrimmedProducersResponse:
        limit = read_limit(request.page_size, PAGE_DEFAULT, PAGE_MAX)
        trimmed = await self._ledger.trimmed_producers(
            read_topic(request.topic), after=_producer_token(request.page_token), limit=limit
        )
        return pb.ListTrimmedProducersResponse(
            producers=[
                pb.TrimmedProducer(producer_name=name, highest_sequence_id=highest)
                for name, highest in trimmed
            ],
            next_page_token=trimmed[-1][0] if len(trimmed) == limit else "",
        )

    async def CreateTopic(
        self, request: pb.CreateTopicRequest, context: Context
    ) -> pb.CreateTopicResponse:
        log, created = await self._ledger.create(read_topic(request.topic))
        return pb.CreateTopicResponse(created=created, topic=self._to_topic(log))

    async def GetTopic(self, request: pb.GetTopicRequest, context: Context) -> pb.GetTopicResponse:
        log = await self._ledger.get(read_topic(request.topic))
        return pb.GetTopicResponse(topic=self._to_topic(log))

    async def ListTopics(
        self, request: pb.ListTopicsRequest, context: Context
    ) -> pb.ListTopicsResponse:
        limit = read_limit(request.page_size, PAGE_DEFAULT, PAGE_MAX)
        logs = await self._ledger.topics(
            prefix=request.prefix, after=_page_token(request.page_token), limit=limit
        )
        return pb.ListTopicsResponse(
            topics=[self._to_topic(log) for log in logs],
            next_page_token=str(logs[-1].topic) if len(logs) == limit else "",
        )

    async def GetLastMessageId(
        self, request: pb.GetLastMessageIdRequest, context: Context
    ) -> pb.GetLastMessageIdResponse:
        log = await self._ledger.get(read_topic(request.topic))
        return pb.GetLastMessageIdResponse(last=to_position(log.tail))

    async def FindMessage(
        self, request: pb.FindMessageRequest, context: Context
    ) -> pb.FindMessageResponse:
        fate = await self._ledger.find(
            read_topic(request.topic),
            read_producer(request.producer_name),
            read_sequence_id("sequence_id", request.sequence_id),
            request.uuid,
        )
        return pb.FindMessageResponse(fate=_to_fate(fate))

    async def FindPosition(
        self, request: pb.FindPositionRequest, context: Context
    ) -> pb.FindPositionResponse:
        if not request.HasField("append_time"):
            raise InvalidRange("append_time is required", field="append_time")
        append_ms = read_time_ms("append_time", request.append_time, InvalidRange)
        position = await self._ledger.find_time(read_topic(request.topic), append_ms)
        return pb.FindPositionResponse(position=to_position(position))

    async def TrimTopic(
        self, request: pb.TrimTopicRequest, context: Context
    ) -> pb.TrimTopicResponse:
        if not request.HasField("before"):
            raise InvalidRange("before is required", field="before")
        before = read_position("before", request.before, InvalidRange)
        trimmed, held_back_by = await self._ledger.trim(read_topic(request.topic), before)
        return pb.TrimTopicResponse(
            removed_entries=trimmed.removed_entries,
            first=to_position(trimmed.first),
            held_back_by=held_back_by,
        )

    async def RenewTopic(
        self, request: pb.RenewTopicRequest, context: Context
    ) -> pb.RenewTopicResponse:
        if not 0 <= request.above < SEQUENCE_ID_MAX:
            raise InvalidRange("above must be from 0 to 2^63 - 2", field="above")
        log = await self._ledger.renew(read_topic(request.topic), above=request.above)
        return pb.RenewTopicResponse(topic=None if log is None else self._to_topic(log))

    async def DeleteTopic(
        self, request: pb.DeleteTopicRequest, context: Context
    ) -> pb.DeleteTopicResponse:
        await self._ledger.delete(read_topic(request.topic), force=request.force)
        return pb.DeleteTopicResponse()

    async def _receive(self, opened: Opened, context: Context) -> None:
        """Receive requests until the producer closes its side or breaks a rule."""
        session = opened.session
        try:
            while True:
                await self._ledger.unanswered.room()
                request = await context.read()
                if request is aio.EOF:
                    break
                if not request.HasField("publications"):
                    raise NotOpened("only the first request of a stream may be Open", field="open")
                units, resumes = self._units(opened, request.publications)
                opened.topic.submit(session, units)
                if resumes and not session.closing:
                    opened.topic.resume(session)
            session.finish()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            session.fail(error)

    def _units(self, opened: Opened, publications: pb.Publications) -> tuple[list[Unit], bool]:
        """The valid publications; invalid ones are answered at once. If an invalid publication ends
        a hold, the next valid one ends it; if none follows, the second value is true."""
        session = opened.session
        if not publications.publications:
            raise InvalidPublication("publications is empty", field="publications")
        _check_request_ids(session, [each.request_id for each in publications.publications])
        foreign = publications.ledger_id not in (0, opened.topic.ledger_id)
        runs = Runs(session.number, opened.topic.limits)
        traced = opened.topic.tracing.is_on
        resumes = False
        for publication in publications.publications:
            if session.closing:  # perhaps because the producer leaves receipts unread
                break
            try:
                if foreign:
                    raise Fenced("ledger_id names another epoch", epoch=opened.topic.ledger_id)
                entries = self._entries(session.producer, publication.entries)
            except DomainError as error:
                resumes = resumes or _ends_hold(publication, error)
                self._ledger.refuse(opened, publication.request_id, error)
                continue
            runs.add(
                publication.request_id,
                entries,
                resume=publication.resume or resumes,
                alone=traced and opened.topic.tracing.follows(entries),
            )
            resumes = False
        return runs.end(), resumes

    def _entries(self, producer: str, given: Sequence[pb.Entry]) -> list[Entry]:
        count = len(given)
        if count == 1:
            entry = given[0]
            return [self._plain_entry(producer, entry) or self._entry(producer, entry)]
        if not 1 <= count <= PUBLICATION_ENTRIES_MAX:
            raise InvalidPublication(
                f"a publication must have 1 to {PUBLICATION_ENTRIES_MAX:,} entries",
                field="publications.entries",
                count=count,
            )
        entries = [self._entry(producer, entry) for entry in given]
        _check_together(entries)
        if any(entry.chunk for entry in entries):
            raise InvalidPublication(
                "a chunk must be the only entry of its publication",
                field="publications.entries",
                count=count,
            )
        return entries

    def _plain_entry(self, producer: str, entry: pb.Entry) -> Entry | None:
        """The entry of one whole message, as `_entry` returns it; None: `_entry` must look at it.
        Most entries are plain, and this costs a third."""
        metadata, payload = entry.metadata, entry.payload
        has, sequence_id = metadata.HasField, metadata.sequence_id
        if (
            metadata.producer_name != producer
            or sequence_id > SEQUENCE_ID_MAX
            or len(payload) > self._limits.message_bytes
            or not has("sequence_id")
            or has("highest_sequence_id")
            or has("num_messages_in_batch")
            or has("marker_type")
            or has("uuid")
            or has("chunk_id")
            or has("num_chunks_from_msg")
            or has(_TOTAL)
            or (has(_CRC) and google_crc32c.value(payload) != metadata.payload_crc32c)
            or metadata.sequence_id_steps
            or len(metadata.properties) > PROPERTIES_MAX
            or metadata.partition_key_b64_encoded
            or metadata.deliver_at_time < 0
            or (metadata.compression and not has("uncompressed_size"))
            or len(metadata.content_digests) not in (0, DIGEST_BYTES)
        ):
            return None
        packed = metadata.SerializeToString()
        if len(packed) > METADATA_BYTES_MAX:
            return None
        fields = (producer, sequence_id, sequence_id, None, (), False, packed, payload, None, "")
        return _entry_of(fields)

    def _entry(self, producer: str, entry: pb.Entry) -> Entry:
        metadata, payload = entry.metadata, entry.payload
        if len(payload) > self._limits.message_bytes:
            raise EntryTooLarge(
                f"payload too large (limit {self._limits.message_bytes:,} bytes)",
                field="entries.payload",
                payload_bytes=len(payload),
                max_message_bytes=self._limits.message_bytes,
            )
        if metadata.producer_name != producer:
            raise InvalidEntry(
                "producer_name must be the producer of the stream",
                field="entries.metadata.producer_name",
            )
        lowest, highest, messages = _ids(metadata)
        chunk = _chunk(metadata, len(payload), self._limits)
        _check_fields(metadata)
        if metadata.HasField(_CRC) and google_crc32c.value(payload) != metadata.payload_crc32c:
            raise ChecksumMismatch(
                "payload does not match payload_crc32c", field="entries.metadata.payload_crc32c"
            )
        if len(metadata.content_digests) not in (0, DIGEST_BYTES * (messages or 1)):
            raise InvalidEntry(
                f"content_digests must have {DIGEST_BYTES} bytes a message, or none",
                field="entries.metadata.content_digests",
                messages=messages or 1,
            )
        packed = metadata.SerializeToString()
        if len(packed) > METADATA_BYTES_MAX:
            raise EntryTooLarge(
                f"metadata too large (limit {METADATA_BYTES_MAX:,} bytes)",
                field="entries.metadata",
                metadata_bytes=len(packed),
                metadata_bytes_max=METADATA_BYTES_MAX,
            )
        return Entry(
            producer,
            lowest,
            highest,
            messages,
            tuple(metadata.sequence_id_steps),
            metadata.HasField("marker_type"),
            packed,
            payload,
            chunk,
        )

    def _to_opened(self, opened: Opened) -> pb.Opened:
        last = opened.last_stored
        return pb.Opened(
            producer_name=opened.session.producer,
            last_sequence_id=opened.last_sequence_id,
            ledger_id=opened.topic.ledger_id,
            window_messages=opened.window.messages,
            window_bytes=opened.window.size_bytes,
            max_message_bytes=self._limits.message_bytes,
            max_large_message_bytes=self._limits.large_message_bytes,
            max_chunks=self._limits.chunks,
            last_stored=None
            if last is None
            else pb.LastStored(
                sequence_id=last.sequence_id,
                by_another=last.by_another,
                whole_sequence_id=last.whole,
            ),
        )

    def _to_topic(self, log: LogState) -> pb.Topic:
        return pb.Topic(
            name=str(log.topic),
            ledger_id=log.ledger_id,
            created=timestamp(log.created_ms),
            first=to_position(log.first),
            last=to_position(log.tail),
            entries=log.entries,
            messages=log.messages,
            bytes=log.size_bytes,
            connected_producers=self._ledger.connected(log.topic),
            incarnation=log.incarnation,
            entries_to_replay=self._ledger.entries_to_replay(log.topic),
        )


def _ledger_token(token: str) -> int:
    if not token:
        return -1
    if not _LEDGER_TOKEN.fullmatch(token) or int(token) > SEQUENCE_ID_MAX:
        raise InvalidPage("invalid page_token", field="page_token")
    return int(token)


def _producer_token(token: str) -> str:
    try:
        return check_producer_name(token) if token else ""
    except InvalidNameError as error:
        raise InvalidPage("invalid page_token", field="page_token") from error


def _page_token(token: str) -> str:
    try:
        return str(TopicName.parse(token)) if token else ""
    except InvalidNameError as error:
        raise InvalidPage("invalid page_token", field="page_token") from error


def _positions(given: Any) -> list[Position]:
    if not 1 <= len(given) <= POSITIONS_MAX:
        raise InvalidRange(
            f"positions must have 1 to {POSITIONS_MAX:,} entries",
            field="positions",
            count=len(given),
        )
    positions = [read_position("positions", each, InvalidRange) for each in given]
    if any(earlier >= later for earlier, later in pairwise(positions)):
        raise InvalidRange("positions must be ascending", field="positions")
    return positions


def _opening(request: Any) -> Opening:
    if request is aio.EOF or not request.HasField("open"):
        raise NotOpened("the first request of a stream must be Open", field="open")
    given = request.open
    if len(given.instance) > INSTANCE_BYTES_MAX:
        raise InvalidProducerName(
            f"open.instance is too long (limit {INSTANCE_BYTES_MAX} bytes)", field="open.instance"
        )
    initial = given.initial_sequence_id if given.HasField("initial_sequence_id") else None
    if initial is not None:
        read_number("open.initial_sequence_id", initial, InvalidSequenceId, SEQUENCE_ID_MAX - 1)
    return Opening(
        topic=read_topic(given.topic),
        producer=read_producer(given.producer_name) if given.producer_name else "",
        initial_sequence_id=initial,
        takeover=given.takeover,
        instance=given.instance,
        refuses_conflicts=given.refuse_conflicts,
    )


def _ids(metadata: entry_pb2.EntryMetadata) -> tuple[int, int, int | None]:
    """The lowest and the highest id, and the number of messages if the entry is a batch."""
    if not metadata.HasField("sequence_id"):
        raise InvalidSequenceId("sequence_id is required", field="entries.metadata.sequence_id")
    lowest = read_sequence_id("entries.metadata.sequence_id", metadata.sequence_id)
    highest = lowest
    if metadata.HasField("highest_sequence_id"):
        highest = read_sequence_id(
            "entries.metadata.highest_sequence_id", metadata.highest_sequence_id
        )
    messages = (
        metadata.num_messages_in_batch if metadata.HasField("num_messages_in_batch") else None
    )
    if messages is not None and not 1 <= messages <= BATCH_MESSAGES_MAX:
        raise InvalidEntry(
            f"num_messages_in_batch must be 1 to {BATCH_MESSAGES_MAX:,}",
            field="entries.metadata.num_messages_in_batch",
            given=messages,
        )
    steps = metadata.sequence_id_steps
    span = sum(steps) if steps else (messages or 1) - 1
    if highest - lowest != span or (steps and (len(steps) + 1 != messages or min(steps) < 1)):
        raise InvalidEntry(
            "the sequence ids of a batch must lead from the lowest to the highest, one a message",
            field="entries.metadata.highest_sequence_id",
            sequence_id=lowest,
            highest_sequence_id=highest,
            messages=messages,
        )
    return lowest, highest, messages


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except ValueError:
        return False
    return True


_TOTAL: Final = "total_chunk_msg_size"
_CRC: Final = "payload_crc32c"

# Entry._make without a Python call per entry.
_entry_of: Final[Callable[[Iterable[Any]], Entry]] = partial(tuple.__new__, Entry)


def _chunk(
    metadata: entry_pb2.EntryMetadata, payload_bytes: int, limits: EntryLimits
) -> Chunk | None:
    """The chunk that an entry holds; None: none, or the only chunk of its message."""
    has = metadata.HasField  # a hot path: called for every entry
    if not (has("uuid") or has("chunk_id") or has("num_chunks_from_msg") or has(_TOTAL)):
        return None
    if not (has("uuid") and has("chunk_id") and has("num_chunks_from_msg") and has(_TOTAL)):
        raise InvalidEntry(
            "a chunk needs uuid, chunk_id, num_chunks_from_msg and total_chunk_msg_size",
            field="entries.metadata.chunk_id",
        )
    chunk_id, num_chunks = metadata.chunk_id, metadata.num_chunks_from_msg
    total_bytes = metadata.total_chunk_msg_size
    if metadata.HasField("num_messages_in_batch") or metadata.HasField("marker_type"):
        raise InvalidEntry(
            "a chunk cannot be a batch or a marker", field="entries.metadata.chunk_id"
        )
    if total_bytes > limits.large_message_bytes or num_chunks > limits.chunks:
        raise EntryTooLarge(
            f"a large message is at most {limits.large_message_bytes:,} bytes in "
            f"{limits.chunks:,} chunks",
            field="entries.metadata.total_chunk_msg_size",
            total_chunk_msg_size=total_bytes,
            max_large_message_bytes=limits.large_message_bytes,
            num_chunks_from_msg=num_chunks,
            max_chunks=limits.chunks,
        )
    others = num_chunks - 1
    if num_chunks > 0 and not 0 < payload_bytes <= total_bytes - others:
        raise InvalidEntry(
            "total_chunk_msg_size leaves less than one byte for a chunk",
            field="entries.payload",
            payload_bytes=payload_bytes,
            total_chunk_msg_size=total_bytes,
        )
    if num_chunks == 1 and chunk_id == 0 and payload_bytes == total_bytes:
        return None
    try:
        return check_chunk(Chunk(metadata.uuid, chunk_id, num_chunks, total_bytes))
    except InvalidChunkError as error:
        raise InvalidEntry(str(error), field="entries.metadata.chunk_id") from error


def _ends_hold(publication: pb.Publication, error: DomainError) -> bool:
    """Whether a refused publication ends a hold: not one for another epoch, and so for another
    stream."""
    return publication.resume and not isinstance(error, Fenced)


def _check_fields(metadata: entry_pb2.EntryMetadata) -> None:
    """Check the metadata of a message, except its ids and chunks.

    Raises:
        InvalidEntry: a field is invalid.
    """
    if len(metadata.properties) > PROPERTIES_MAX:
        raise InvalidEntry(
            f"too many properties (limit {PROPERTIES_MAX})",
            field="entries.metadata.properties",
            count=len(metadata.properties),
        )
    if metadata.partition_key_b64_encoded and not _is_base64(metadata.partition_key):
        raise InvalidEntry("partition_key must be base64", field="entries.metadata.partition_key")
    if metadata.deliver_at_time < 0:
        raise InvalidEntry(
            "deliver_at_time must not be negative",
            field="entries.metadata.deliver_at_time",
            given=metadata.deliver_at_time,
        )
    if metadata.compression and not metadata.HasField("uncompressed_size"):
        raise InvalidEntry(
            "uncompressed_size is required of a compressed entry",
            field="entries.metadata.uncompressed_size",
        )


def _check_together(entries: list[Entry]) -> None:
    if any(earlier.highest >= later.highest for earlier, later in pairwise(entries)):
        raise InvalidPublication(
            "entries must be in the order of their highest sequence ids",
            field="publications.entries",
        )
    if any(entry.marker for entry in entries):
        raise InvalidPublication(
            "a marker must be the only entry of its publication", field="publications.entries"
        )
    messages = sum(entry.message_count for entry in entries)
    if messages > BATCH_MESSAGES_MAX:
        raise InvalidPublication(
            f"too many messages in a publication (limit {BATCH_MESSAGES_MAX:,})",
            field="publications.entries",
            messages=messages,
        )
    if len({each for entry in entries for each in entry.sequence_ids}) < messages:
        raise InvalidPublication(
            "duplicate sequence id in a publication", field="publications.entries"
        )


def _check_request_ids(session: Session, request_ids: Sequence[int]) -> None:
    """Check that no id of a request is in use, or given twice."""
    if len(set(request_ids)) == len(request_ids) and session.are_answered(request_ids):
        return
    seen: set[int] = set()
    for request_id in request_ids:
        if request_id in seen or not session.are_answered([request_id]):
            raise InvalidPublication(
                "request_id is in use by an unanswered publication",
                field="publications.request_id",
                request_id=request_id,
            )
        seen.add(request_id)


async def _range(ledger: Ledger, request: pb.ReadRequest, log: LogState) -> ReadRange:
    start = read_start(request.start, InvalidRange)
    check_start(start, log.tail, ledger.now_ms(), InvalidRange)
    return ReadRange(
        await _after(ledger, start, log),
        read_optional_position(request, "through", InvalidRange),
        follow=request.follow,
        entries_max=request.max_entries,
        payloads=not request.metadata_only,
    )


async def _after(ledger: Ledger, start: Start, log: LogState) -> Position | None:
    """The position after which a read starts; None: before the first entry."""
    match start:
        case Earliest():
            return None
        case Latest():
            return log.tail
        case At(position):
            return _before(position)
        case After(position):
            return position
        case AtTime(append_ms):
            found = await ledger.find_time(log.topic, append_ms)
            return log.tail if found is None else _before(found)


def _before(position: Position) -> Position | None:
    """The position just before another; no entry lies between them."""
    if position.entry_id > 0:
        return Position(position.ledger_id, position.entry_id - 1)
    return Position(position.ledger_id - 1, SEQUENCE_ID_MAX) if position.ledger_id else None


_TO_STATUS: Final = {
    Status.STORED: pb.RECEIPT_STATUS_STORED,
    Status.DUPLICATE: pb.RECEIPT_STATUS_DUPLICATE,
    Status.STALE: pb.RECEIPT_STATUS_STALE,
    Status.PARTIAL: pb.RECEIPT_STATUS_PARTIAL,
    Status.REFUSED: pb.RECEIPT_STATUS_REFUSED,
    Status.FAILED: pb.RECEIPT_STATUS_FAILED,
    Status.SKIPPED: pb.RECEIPT_STATUS_SKIPPED,
    Status.CHUNK_GAP: pb.RECEIPT_STATUS_CHUNK_GAP,
    Status.LAYOUT_CONFLICT: pb.RECEIPT_STATUS_LAYOUT_CONFLICT,
}

_TO_MISSING: Final = {Missing.STALE: pb.FATE_STALE, Missing.TRIMMED: pb.FATE_TRIMMED}


def _to_responses(news: News, *, runs: bool) -> list[pb.PublishResponse]:
    """The responses; `runs`: the producer understands ReceiptRun."""
    receipts = _to_receipts(news.receipts) if runs else _to_each_receipt(news.receipts)
    responses = [pb.PublishResponse(receipts=each) for each in receipts]
    if news.draining:
        responses.append(pb.PublishResponse(draining=common_pb2.Draining()))
    if news.taken_over:
        responses.append(pb.PublishResponse(taken_over=pb.TakenOver()))
    return responses


def _to_receipts(answered: Sequence[Answered]) -> Iterator[pb.Receipts]:
    """The receipts, those of a run in one if it was stored."""
    short: list[pb.ReceiptRun] = []
    others: list[Answered] = []
    for each in answered:
        request_ids, receipt = each
        if receipt.status is Status.STORED:
            position = to_position(receipt.position)
            first, count = request_ids.start, len(request_ids)
            short.append(pb.ReceiptRun(request_id=first, count=count, position=position))
        else:
            others.append(each)
    for i in range(0, len(short), RECEIPTS_MAX):
        yield pb.Receipts(runs=short[i : i + RECEIPTS_MAX])
    yield from _to_each_receipt(others)


def _to_each_receipt(answered: Sequence[Answered]) -> Iterator[pb.Receipts]:
    """The receipts, one for each publication."""
    receipts = [
        _to_receipt(request_id, receipt, place)
        for request_ids, receipt in answered
        for place, request_id in enumerate(request_ids)
    ]
    for i in range(0, len(receipts), RECEIPTS_MAX):
        yield pb.Receipts(receipts=receipts[i : i + RECEIPTS_MAX])


def _to_receipt(request_id: int, receipt: Receipt, place: int) -> pb.Receipt:
    """The receipt of the publication at this place of its run."""
    if receipt.status is Status.STORED and receipt.position is not None:
        first = receipt.position
        return pb.Receipt(
            request_id=request_id,
            status=pb.RECEIPT_STATUS_STORED,
            position=common_pb2.Position(
                ledger_id=first.ledger_id, entry_id=first.entry_id + place
            ),
        )
    return pb.Receipt(
        request_id=request_id,
        status=_TO_STATUS[receipt.status],
        position=to_position(receipt.position),
        fates=[_to_fate(fate) for fate in receipt.fates],
        first_new_sequence_id=receipt.first_new,
        error=None if receipt.error is None else in_stream(receipt.error),
        differs=receipt.differs,
        not_compared=receipt.not_compared,
    )


def _to_fate(fate: Fate) -> pb.MessageFate:
    if isinstance(fate, Found):
        return pb.MessageFate(
            fate=pb.FATE_STORED,
            position=to_position(fate.position),
            batch_index=fate.batch_index,
            first_chunk_position=to_position(fate.chunks[0]) if fate.chunks else None,
        )
    if isinstance(fate, Unfinished):
        return pb.MessageFate(fate=pb.FATE_STALE)
    return pb.MessageFate(fate=_TO_MISSING[fate])


def _to_columns(run: Columns) -> pb.EntryColumns:
    block = pb.EntryColumns(
        ledger_id=run.ledger_id,
        first_entry_id=run.first_entry,
        count=run.size,
        append_time=timestamp(run.append_ms),
        producers=run.producers,
        producer=run.producer,
        sequence_id=run.lowest,
        highest_sequence_id=run.highest,
        num_messages=run.messages,
        payload_bytes=run.payload_bytes,
        metadata=run.metadata,
    )
    # Rare, and costly to assign when empty in a run of one entry.
    if run.markers:
        block.markers.extend(run.markers)
    for place, chunk in run.chunks.items():
        block.chunks[place].MergeFrom(common_pb2.Chunk(**chunk._asdict()))
    if run.aborts:
        block.aborts.update(run.aborts)
    return block


def _to_stored(entries: Sequence[StoredEntry]) -> pb.StoredEntries:
    """Filled in place, and with what entries appended together share parsed from its encoding:
    constructors take three times as long."""
    wire = pb.StoredEntries()
    add = wire.entries.add
    shared: tuple[int, int] | None = None
    head = b""
    for (ledger_id, entry_id), append_ms, entry, payload_bytes in entries:
        if shared != (ledger_id, append_ms):
            shared = ledger_id, append_ms
            position = common_pb2.Position(ledger_id=ledger_id)
            head = pb.StoredEntry(
                position=position, append_time=timestamp(append_ms)
            ).SerializeToString()
        each = add()
        each.MergeFromString(head)
        each.position.entry_id = entry_id
        each.metadata.MergeFromString(entry.metadata)
        each.payload = entry.payload
        each.payload_bytes = payload_bytes
        if entry.aborts:
            each.aborts = entry.aborts
    return wire
