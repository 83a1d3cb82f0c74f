"""Reads ranges of a log as Arrow batches of messages, without Spark.

A message belongs to the range that has its last entry. A batch is one entry, so no range cuts it. A
large message is returned by the range that has its last chunk, which reads earlier chunks again
from before its start; the ranges that have only these return nothing of it:

    log     A0  B0 | A1  A2  B1 | x
    range        1 |          2 | 3     range 2 returns A and B, and reads A0 and B0 again

The requested columns decide what the ledger sends:

    payload                           everything
    one of OPENED, but no payload     metadata, and the batches' payloads
    others                            metadata
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client._assembler import (
    Added,
    Assembled,
    Assembler,
    AssemblyLimits,
    DropReason,
    Headless,
)
from seqgate.client._codec import (
    Fields,
    corrupt,
    decode_fields,
    decode_large_fields,
    describe_fields,
    describe_large_fields,
    piece_of,
    position_of,
)
from seqgate.errors import MessageTooLargeError
from seqgate.message_id import MessageId
from seqgate.spark._columns import Range, asked, read_blocks, resumed, runs_of, to_position
from seqgate.spark._partitions import just_after, just_before, trimmed
from seqgate.times import TIME_MAX_MS
from seqgate.types import Position

BATCH_MESSAGES: Final = 8_192
BATCH_BYTES: Final = 8 * 1024 * 1024
"""The approximate size of an Arrow batch, in messages and in bytes of payload, whichever is reached
first. An entry's messages stay together."""

ASSEMBLY: Final = AssemblyLimits(expiry_ms=0)
"""A task's limits on incomplete large messages. One without room is read again when its last chunk
arrives."""

POSITIONS_MAX: Final = 10_000
"""The most entries that a call of ReadEntries names."""

_TIME: Final = pa.timestamp("us", tz="UTC")

MESSAGE_COLUMNS: Final[dict[str, pa.DataType]] = {
    "topic": pa.string(),
    "message_id": pa.string(),
    "ledger_id": pa.int64(),
    "entry_id": pa.int64(),
    "batch_index": pa.int32(),
    "append_time": _TIME,
    "publish_time": _TIME,
    "event_time": _TIME,
    "producer": pa.string(),
    "sequence_id": pa.int64(),
    "key": pa.string(),
    "has_bytes_key": pa.bool_(),
    "ordering_key": pa.binary(),
    "properties": pa.map_(pa.string(), pa.string()),
    "payload": pa.binary(),
}
"""A message's columns; see the package."""

GAP: Final = "gap"

GAP_COLUMN: Final[dict[str, pa.DataType]] = {GAP: pa.string()}
"""The column of reported gaps."""

OPENED: Final = frozenset({"event_time", "key", "has_bytes_key", "ordering_key", "properties"})
"""The columns, besides payload, that a batch has only inside."""


class Edges(NamedTuple):
    """The first and the last message to return; None: no limit. They matter inside of a batch."""

    first: MessageId | None = None
    last: MessageId | None = None

    def cut(self, messages: list[Fields]) -> list[Fields]:
        """Leave out messages of an entry beyond the edges."""
        first, last = self
        if first is not None and first.batch_index >= 0:
            messages = [each for each in messages if each.id >= first]
        if last is not None and last.batch_index >= 0:
            messages = [each for each in messages if each.id <= last]
        return messages


class Scan(NamedTuple):
    """What to read of each range.

    Attributes:
        schema: columns of MESSAGE_COLUMNS and GAP_COLUMN.
        timeout_s: how long the service may be silent or unreachable.
        fails_on_trimmed: whether trimmed entries are an error.
        reports_gaps: whether they are a row with a `gap`, which is then in the schema.
    """

    schema: pa.Schema
    edges: Edges
    timeout_s: float
    fails_on_trimmed: bool
    reports_gaps: bool

    @property
    def payloads(self) -> bool:
        return "payload" in self.schema.names

    @property
    def opens(self) -> bool:
        """Whether batches must be opened."""
        return self.payloads or not OPENED.isdisjoint(self.schema.names)


def message_batches(stub: LedgerServiceStub, wanted: Range, scan: Scan) -> Iterator[pa.RecordBatch]:
    """The messages of a range, in the order of the log.

    Raises:
        MessagesTrimmedError: entries were trimmed before they were read, and that is an error.
        CorruptMessageError, DataLossError: a message is damaged.
        MessageTooLargeError: a large message exceeds ASSEMBLY.
        SeqgateError: the service refuses, or is silent or unreachable for `timeout_s`.
    """
    reading = _Reading(stub, wanted, scan)
    gathered: list[Fields] = []
    size_bytes = 0
    for found in reading.each():
        if isinstance(found, ledger_pb2.EntriesTrimmed):
            first, last = position_of(found.first), position_of(found.last)
            if scan.fails_on_trimmed:
                raise trimmed(wanted.topic, first, last)
            if scan.reports_gaps:
                if gathered:
                    yield _record_batch(gathered, scan.schema)
                    gathered, size_bytes = [], 0
                yield _gap(wanted.topic, first, last, scan.schema)
            continue
        gathered += found
        size_bytes += sum(len(each.payload) for each in found)
        if len(gathered) >= BATCH_MESSAGES or size_bytes >= BATCH_BYTES:
            yield _record_batch(gathered, scan.schema)
            gathered, size_bytes = [], 0
    if gathered:
        yield _record_batch(gathered, scan.schema)


_Found = list[Fields] | ledger_pb2.EntriesTrimmed


class _Reading:
    """Reads one range."""

    def __init__(self, stub: LedgerServiceStub, wanted: Range, scan: Scan) -> None:
        self._stub = stub
        self._wanted = wanted
        self._topic = wanted.topic
        self._scan = scan
        self._assembler = Assembler(ASSEMBLY)

    def each(self) -> Iterator[_Found]:
        """The messages that end with each entry, and trimmed ranges."""
        opens = self._scan.opens and not self._scan.payloads
        for response in self._read(self._wanted, metadata_only=not self._scan.payloads):
            if response.HasField("trimmed"):
                yield response.trimmed
                continue
            entries = response.entries.entries
            batches = self._batches(entries) if opens else {}
            for stored in entries:
                if opens and stored.metadata.HasField("num_messages_in_batch"):
                    opened = batches.get(position_of(stored.position))
                    if opened is None:  # since the metadata was read
                        at = stored.position
                        yield ledger_pb2.EntriesTrimmed(first=at, last=at)
                        continue
                    messages = opened
                else:
                    messages = self._messages(stored)
                if messages:
                    yield self._scan.edges.cut(messages)

    def _read(self, wanted: Range, *, metadata_only: bool) -> Iterator[ledger_pb2.ReadResponse]:
        def open_stream(after: Position | None, timeout: float) -> Any:
            request = ledger_pb2.ReadRequest(
                topic=wanted.topic,
                through=to_position(wanted.through),
                metadata_only=metadata_only,
            )
            request.start.at.CopyFrom(to_position(just_after(after)))
            return self._stub.Read(request, timeout=timeout)

        return resumed(open_stream, _last_of, wanted, self._scan.timeout_s)

    def _batches(self, entries: Sequence[ledger_pb2.StoredEntry]) -> dict[Position, list[Fields]]:
        """Fetch and open the batches among entries."""
        positions = [
            position_of(each.position)
            for each in entries
            if each.metadata.HasField("num_messages_in_batch")
        ]
        return {
            position_of(stored.position): decode_fields(self._topic, stored)
            for stored in self._entries(positions)
        }

    def _entries(self, positions: Sequence[Position]) -> Iterator[ledger_pb2.StoredEntry]:
        """Entries with their payloads; trimmed ones are left out."""
        for first in range(0, len(positions), POSITIONS_MAX):
            some = positions[first : first + POSITIONS_MAX]
            for response in self._read_some(some):
                yield from response.entries.entries

    def _read_some(self, positions: Sequence[Position]) -> Iterator[ledger_pb2.ReadEntriesResponse]:
        def open_stream(after: Position | None, timeout: float) -> Any:
            left = [to_position(each) for each in positions if after is None or each > after]
            request = ledger_pb2.ReadEntriesRequest(topic=self._topic, positions=left)
            return self._stub.ReadEntries(request, timeout=timeout)

        wanted = Range(self._topic, None, positions[-1], len(positions))
        return resumed(open_stream, _last_of, wanted, self._scan.timeout_s)

    def _messages(self, stored: ledger_pb2.StoredEntry) -> list[Fields]:
        """The messages that end with an entry."""
        metadata = stored.metadata
        if stored.aborts:
            self._assembler.abort(metadata.producer_name, stored.aborts)
        if metadata.HasField("marker_type"):
            return []
        if metadata.num_chunks_from_msg > 1:
            return self._large(stored)
        decode = decode_fields if self._scan.payloads else describe_fields
        return decode(self._topic, stored)

    def _large(self, stored: ledger_pb2.StoredEntry) -> list[Fields]:
        """The large message that ends with a chunk."""
        is_last = stored.metadata.chunk_id == stored.metadata.num_chunks_from_msg - 1
        if not self._scan.payloads:
            chunks = self._chunks_before(stored) if is_last else []
            return [describe_large_fields(self._topic, stored, chunks[0])] if chunks else []
        added = self._assembler.add(piece_of(stored), now_ms=0)
        _raise_damage(added, stored)
        match added.outcome:
            case Assembled(_, _, _, body, positions):
                return [decode_large_fields(self._topic, stored, body, positions[0])]
            case Headless():
                return self._read_again(stored)
        return []

    def _read_again(self, last: ledger_pb2.StoredEntry) -> list[Fields]:
        """Read a large message whose first chunks are before the range, or had no room."""
        assembler = Assembler(ASSEMBLY)
        for stored in self._entries(self._chunks_before(last)):
            added = assembler.add(piece_of(stored), now_ms=0)
            _raise_damage(added, stored)
            if isinstance(added.outcome, Assembled):
                body, positions = added.outcome.body, added.outcome.positions
                return [decode_large_fields(self._topic, last, body, positions[0])]
        return []

    def _chunks_before(self, last: ledger_pb2.StoredEntry) -> list[Position]:
        """All chunks of the large message that ends with this one, in order; none: the log has not
        all of them."""
        metadata = last.metadata
        request = ledger_pb2.FindMessageRequest(
            topic=self._topic,
            producer_name=metadata.producer_name,
            sequence_id=metadata.sequence_id,
            uuid=metadata.uuid,
        )
        fate = asked(self._stub.FindMessage, request, self._scan.timeout_s).fate
        after: Position | None = None
        if fate.position == last.position:
            if not fate.HasField("first_chunk_position"):
                return []
            after = just_before(position_of(fate.first_chunk_position))
        # Otherwise, with deduplication off, it is stored again further on: search from the start.
        chunks: list[Position] = []
        wanted = Range(self._topic, after, position_of(last.position), 0)
        for run in runs_of(
            self._topic, read_blocks(self._stub, wanted, timeout_s=self._scan.timeout_s)
        ):
            known: dict[str, int] = {}
            numbers = run.producers(known)
            mine = known.get(metadata.producer_name)
            places = [
                (index, chunk)
                for index, chunk in run.chunks
                if numbers[index] == mine
                and chunk.layout
                == (
                    metadata.uuid,
                    metadata.num_chunks_from_msg,
                    metadata.total_chunk_msg_size,
                )
            ]
            ledgers, entries = run.ledger_id, run.entry_id
            for index, chunk in places:
                if chunk.chunk_id == 0:
                    chunks = []
                if chunk.chunk_id == len(chunks):
                    chunks.append(Position(int(ledgers[index]), int(entries[index])))
        return chunks if len(chunks) == metadata.num_chunks_from_msg else []


def _last_of(response: Any) -> Position | None:
    """Of a response of Read or ReadEntries."""
    match response.WhichOneof("response"):
        case "entries":
            return position_of(response.entries.entries[-1].position)
        case "trimmed":
            return position_of(response.trimmed.last)
        case _:
            return None


def _raise_damage(added: Added, stored: ledger_pb2.StoredEntry) -> None:
    """Raise if this chunk's message is in the log but cannot be returned."""
    metadata = stored.metadata
    for dropped in added.dropped:
        if dropped.uuid != metadata.uuid:
            continue
        if dropped.reason is DropReason.CORRUPT:
            raise corrupt(stored, "the chunks do not match the size or checksum of their message")
        is_last = metadata.chunk_id == metadata.num_chunks_from_msg - 1
        if dropped.reason is DropReason.TOO_LARGE and is_last:
            raise MessageTooLargeError(
                f"a message of {metadata.total_chunk_msg_size:,} bytes in "
                f"{metadata.num_chunks_from_msg:,} chunks is too large to be read (limit "
                f"{ASSEMBLY.message_bytes_max:,} in {ASSEMBLY.chunks_max:,})",
                details={
                    "ledger_id": str(stored.position.ledger_id),
                    "entry_id": str(stored.position.entry_id),
                },
            )


_VALUES: Final[dict[str, Callable[[Fields], Any]]] = {
    "message_id": lambda each: str(each.id),
    "ledger_id": lambda each: each.id.ledger_id,
    "entry_id": lambda each: each.id.entry_id,
    "batch_index": lambda each: None if each.id.batch_index < 0 else each.id.batch_index,
    "append_time": lambda each: each.append_time_ms,
    "publish_time": lambda each: _time(each.publish_time_ms),
    "event_time": lambda each: _time(each.event_time_ms),
    "producer": lambda each: each.producer_name,
    "sequence_id": lambda each: each.sequence_id,
    "key": lambda each: each.key,
    "has_bytes_key": lambda each: each.has_bytes_key,
    "ordering_key": lambda each: each.ordering_key,
    "properties": lambda each: list(each.properties.items()),
    "payload": lambda each: each.payload,
}


def _time(time_ms: int | None) -> int | None:
    return time_ms if time_ms is not None and time_ms <= TIME_MAX_MS else None


def _record_batch(messages: Sequence[Fields], schema: pa.Schema) -> pa.RecordBatch:
    columns = []
    for field in schema:
        if field.name == "topic":
            topic = pa.scalar(messages[0].topic, pa.string())
            columns.append(pa.repeat(topic, len(messages)))
        elif field.name == GAP:
            columns.append(pa.nulls(len(messages), field.type))
        else:
            values = list(map(_VALUES[field.name], messages))
            columns.append(_array(values, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if kind == _TIME:
        return pa.array(values, pa.timestamp("ms", tz="UTC")).cast(_TIME)
    return pa.array(values, kind)


def _gap(topic: str, first: Position, last: Position, schema: pa.Schema) -> pa.RecordBatch:
    """A row that stands for trimmed entries, at the last of them."""
    values = {"topic": topic, "ledger_id": last.ledger_id, "entry_id": last.entry_id}
    values[GAP] = f"{first} to {last}"
    columns = [pa.array([values.get(field.name)], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
