"""Converts the ledger's columns to Arrow's, without Spark.

Python code runs per entry only for markers, chunks and requested metadata: numbers go from the wire
to Arrow unchanged.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar, cast

import grpc
import grpc.experimental
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seqgate.api.common.v1 import common_pb2
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.channels import open_blocking_channel
from seqgate.client._channel import OPTIONS
from seqgate.client._reconnecting import Backoff
from seqgate.client._status import error_of_call
from seqgate.errors import SeqgateError, UnavailableError
from seqgate.owners import NOT_OWNER, FollowingBlockingChannel
from seqgate.telemetry.calls import Tracing
from seqgate.times import milliseconds
from seqgate.tls import of_environment
from seqgate.types import SEQUENCE_ID_MAX, Chunk, Position

T = TypeVar("T")
Integers = npt.NDArray[np.int64]

BATCH_ENTRIES: Final = 131_072
"""The approximate size of an Arrow batch, in entries."""

COLUMNS: Final[dict[str, pa.DataType]] = {
    "topic": pa.string(),
    "ledger_id": pa.int64(),
    "entry_id": pa.int64(),
    "append_time": pa.int64(),
    "producer": pa.string(),
    "sequence_id": pa.int64(),
    "highest_sequence_id": pa.int64(),
    "num_messages": pa.int32(),
    "payload_bytes": pa.int64(),
    "marker": pa.bool_(),
    "chunk_uuid": pa.string(),
    "chunk_id": pa.int32(),
    "num_chunks": pa.int32(),
    "total_bytes": pa.int32(),
    "aborts": pa.string(),
}
"""The columns that the log stores; see the package."""

METADATA_COLUMNS: Final[dict[str, pa.DataType]] = {
    "publish_time": pa.int64(),
    "event_time": pa.int64(),
    "partition_key": pa.string(),
    "compression": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
}
"""The columns that only an entry's metadata has."""


class Range(NamedTuple):
    """A range of a topic: its entries after one position (None: from the first) and through
    another, and their approximate number."""

    topic: str
    after: Position | None
    through: Position
    entries: int


@contextmanager
def connected(ledger: str) -> Iterator[LedgerServiceStub]:
    """A stub for the ledger service at HOST:PORT. Call it in the process that uses the stub: a
    channel does not survive a fork."""
    with open_channel(ledger) as channel:
        yield LedgerServiceStub(channel)


def open_channel(target: str) -> grpc.Channel:
    """A channel that notices a dead peer as fast as the client's, within 15 seconds, and finds the
    instance that owns a topic."""
    return FollowingBlockingChannel(target, _open_channel)


def _open_channel(target: str) -> grpc.Channel:
    """A channel to one address. Streams are read in the calling thread: a thread of their own would
    cost more than reading a topic of a few thousand entries. Each executor takes certificates and
    token from its environment (SEQGATE_CA_FILE, SEQGATE_CERTIFICATE_FILE, SEQGATE_KEY_FILE,
    SEQGATE_TOKEN_FILE)."""
    in_this_thread = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)
    tls, token_file = of_environment(os.environ)
    return open_blocking_channel(
        target,
        options=[*OPTIONS, in_this_thread],
        hooks=[Tracing(target, roots=False)],
        tls=tls,
        token_file=token_file,
    )


def asked(call: Callable[..., T], request: Any, timeout_s: float) -> T:
    """Call a method that is safe to repeat, and retry while the service is unreachable. Raises
    SeqgateError if it refuses, or is unreachable for `timeout_s` seconds."""
    backoff, deadline = Backoff(), time.monotonic() + timeout_s
    while True:
        try:
            return call(request, timeout=max(0.001, deadline - time.monotonic()))
        except (grpc.RpcError, UnavailableError) as error:
            failure = _failure(error)
            wait_s = backoff.next_s(failure.retry_after_s)
            late = time.monotonic() + wait_s >= deadline
            if late or not _may_retry(failure):
                raise failure from error
        time.sleep(wait_s)


def _failure(error: grpc.RpcError | UnavailableError) -> SeqgateError:
    if isinstance(error, UnavailableError):
        return error
    return error_of_call(error)


def trimmed_between(
    stub: LedgerServiceStub, topic: str, start: Position, through: Position, timeout_s: float
) -> tuple[Position, Position] | None:
    """The first and last trimmed position within a range; None: none. Raises like `asked`."""

    def missed(request: ledger_pb2.ReadRequest, timeout: float) -> ledger_pb2.EntriesTrimmed | None:
        stream: Any = stub.Read(request, timeout=timeout)
        try:
            for response in stream:
                match response.WhichOneof("response"):
                    case "trimmed":
                        return cast("ledger_pb2.EntriesTrimmed", response.trimmed)
                    case "entries":
                        return None  # the log begins at or before the range
                    case "draining":
                        raise UnavailableError("the ledger is shutting down", reason="DRAINING")
            return None
        finally:
            stream.cancel()

    request = ledger_pb2.ReadRequest(
        topic=topic,
        start=common_pb2.Start(at=to_position(start)),
        through=to_position(through),
        max_entries=1,
        metadata_only=True,
    )
    found = asked(missed, request, timeout_s)
    if found is None:
        return None
    return (
        Position(found.first.ledger_id, found.first.entry_id),
        Position(found.last.ledger_id, found.last.entry_id),
    )


def read_blocks(
    stub: LedgerServiceStub, wanted: Range, *, timeout_s: float, metadata: bool = False
) -> Iterator[Sequence[ledger_pb2.EntryColumns]]:
    """The entries of a range, in order. If the stream breaks, or the service drains, a new one
    continues after the last entry. Raises SeqgateError if the service refuses, or is silent or
    unreachable for `timeout_s` seconds."""

    def open_stream(after: Position | None, timeout: float) -> Any:
        request = ledger_pb2.ReadColumnsRequest(
            topic=wanted.topic, through=to_position(wanted.through), metadata=metadata
        )
        if after is not None:
            request.after.CopyFrom(to_position(after))
        return stub.ReadColumns(request, timeout=timeout)

    def last_of(response: ledger_pb2.ReadColumnsResponse) -> Position | None:
        if response.WhichOneof("response") != "blocks":
            return None
        last = response.blocks.blocks[-1]
        return Position(last.ledger_id, last.first_entry_id + last.count - 1)

    for response in resumed(open_stream, last_of, wanted, timeout_s):
        yield response.blocks.blocks


def resumed(
    open_stream: Callable[[Position | None, float], Any],
    last_of: Callable[[Any], Position | None],
    wanted: Range,
    timeout_s: float,
) -> Iterator[Any]:
    """The responses of a stream over a range, as `read_blocks` resumes it.

    Args:
        open_stream: opens it after a position, with a time-out in seconds.
        last_of: the last position of a response; None: it has no entries and is left out.
    """
    after, backoff = wanted.after, Backoff()
    deadline = time.monotonic() + timeout_s
    while True:
        failure: SeqgateError = UnavailableError("the ledger is shutting down", reason="DRAINING")
        # The deadline ends even an active stream: the next one continues.
        stream = open_stream(after, max(0.001, deadline - time.monotonic()))
        try:
            for response in stream:
                last = last_of(response)
                if last is not None:
                    after = last
                    yield response
                    deadline = time.monotonic() + timeout_s
                    backoff.reset()
                elif response.HasField("draining"):
                    break
            else:
                return
        except grpc.RpcError as error:
            failure = error_of_call(error)
            if not _may_retry(failure):
                failure.details.setdefault("topic", wanted.topic)
                raise failure from error
        finally:
            stream.cancel()
        if after is not None and after >= wanted.through:
            return
        wait_s = backoff.next_s(failure.retry_after_s)
        if time.monotonic() + wait_s >= deadline:
            raise failure
        time.sleep(wait_s)


def _may_retry(failure: SeqgateError) -> bool:
    """Whether the service is unreachable, or the topic is moving to another instance."""
    return isinstance(failure, UnavailableError) or failure.reason == NOT_OWNER


def to_position(position: Position) -> common_pb2.Position:
    return common_pb2.Position(ledger_id=position.ledger_id, entry_id=position.entry_id)


class Place(NamedTuple):
    """A chunk: its index in the run, and its place in its message."""

    place: int
    chunk: Chunk


class Run:
    """Consecutive blocks of one topic, as one. Columns are made on request."""

    def __init__(self, topic: str, blocks: Sequence[ledger_pb2.EntryColumns]) -> None:
        self.topic = topic
        self._blocks = blocks
        self._counts = np.fromiter((block.count for block in blocks), np.int64, len(blocks))
        self._starts = np.cumsum(self._counts) - self._counts
        self.count = int(self._counts.sum())

    @property
    def ledger_id(self) -> Integers:
        return self._repeated([block.ledger_id for block in self._blocks])

    @property
    def entry_id(self) -> Integers:
        firsts = [block.first_entry_id for block in self._blocks]
        return np.arange(self.count) + self._repeated(np.array(firsts) - self._starts)

    @property
    def append_ms(self) -> Integers:
        return self._repeated([milliseconds(block.append_time) for block in self._blocks])

    @property
    def sequence_id(self) -> Integers:
        """The lowest of each entry."""
        return self._ids([block.sequence_id for block in self._blocks])

    @property
    def highest(self) -> Integers:
        """The highest sequence id of each entry."""
        return self._ids([block.highest_sequence_id or block.sequence_id for block in self._blocks])

    @property
    def num_messages(self) -> npt.NDArray[np.int32]:
        """Of each entry; 0: not a batch."""
        parts = [block.num_messages or bytes(4 * block.count) for block in self._blocks]
        return np.frombuffer(_joined(parts), np.dtype("<i4"))

    @property
    def payload_bytes(self) -> npt.NDArray[np.uint32]:
        parts = [block.payload_bytes for block in self._blocks]
        return np.frombuffer(_joined(parts), np.dtype("<u4"))

    def producers(self, known: dict[str, int]) -> npt.NDArray[np.int32]:
        """The number of each entry's producer; new ones are added to `known`."""
        numbers = []
        for block in self._blocks:
            of_name = [known.setdefault(name, len(known)) for name in block.producers]
            numbers.append(np.array(of_name, np.int32)[np.frombuffer(block.producer, "<u4")])
        return np.concatenate(numbers)

    @property
    def markers(self) -> list[int]:
        return [
            start + index
            for start, block in self._each()
            if block.markers
            for index in block.markers
        ]

    @property
    def chunks(self) -> list[Place]:
        return [
            Place(start + index, Chunk(each.uuid, each.chunk_id, each.num_chunks, each.total_bytes))
            for start, block in self._each()
            if block.chunks
            for index, each in sorted(block.chunks.items())
        ]

    @property
    def aborts(self) -> list[tuple[int, str]]:
        """The indexes of entries that end an attempt, with its uuid."""
        return [
            (start + index, uuid)
            for start, block in self._each()
            if block.aborts
            for index, uuid in block.aborts.items()
        ]

    @property
    def metadata(self) -> list[entry_pb2.EntryMetadata]:
        """Of each entry, if it was read."""
        return [
            entry_pb2.EntryMetadata.FromString(each)
            for block in self._blocks
            for each in block.metadata
        ]

    def _each(self) -> Iterator[tuple[int, ledger_pb2.EntryColumns]]:
        return zip(self._starts.tolist(), self._blocks, strict=True)

    def _repeated(self, values: Any) -> Integers:
        return np.repeat(np.asarray(values, np.int64), self._counts)

    def _ids(self, parts: list[bytes]) -> Integers:
        return np.frombuffer(_joined(parts), np.dtype("<i8"))


def _joined(parts: list[bytes]) -> bytes:
    return parts[0] if len(parts) == 1 else b"".join(parts)


def runs_of(
    topic: str,
    blocks: Iterator[Sequence[ledger_pb2.EntryColumns]],
    entries: int = BATCH_ENTRIES,
) -> Iterator[Run]:
    """Gather blocks into runs of about so many entries. If reading fails, the blocks before come
    first, then its SeqgateError."""
    gathered: list[ledger_pb2.EntryColumns] = []
    count = 0
    failure: SeqgateError | None = None
    try:
        for group in blocks:
            for block in group:
                gathered.append(block)
                count += block.count
                if count >= entries:
                    yield Run(topic, gathered)
                    gathered, count = [], 0
    except SeqgateError as error:
        failure = error
    if gathered:
        yield Run(topic, gathered)
    if failure is not None:
        raise failure


def record_batch(run: Run, schema: pa.Schema) -> pa.RecordBatch:
    """Convert a run to the columns of a schema, each of COLUMNS or METADATA_COLUMNS; texts may be
    dictionaries."""
    metadata = run.metadata if METADATA_COLUMNS.keys() & set(schema.names) else []
    chunks = run.chunks if set(schema.names) & _OF_CHUNKS.keys() else []
    columns = []
    for field in schema:
        column = _column(field.name, run, metadata, chunks)
        columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


_OF_CHUNKS: Final = {
    "chunk_uuid": "uuid",
    "chunk_id": "chunk_id",
    "num_chunks": "num_chunks",
    "total_bytes": "total_bytes",
}
_COMPRESSIONS: Final = ("NONE", "LZ4", "ZLIB", "ZSTD")


def _column(
    name: str, run: Run, metadata: list[entry_pb2.EntryMetadata], chunks: list[Place]
) -> pa.Array:
    match name:
        case "topic":
            zeros = np.zeros(run.count, np.int32)
            return pa.DictionaryArray.from_arrays(zeros, pa.array([run.topic], pa.string()))
        case "producer":
            known: dict[str, int] = {}
            numbers = run.producers(known)
            return pa.DictionaryArray.from_arrays(numbers, pa.array(list(known), pa.string()))
        case "ledger_id":
            return pa.array(run.ledger_id)
        case "entry_id":
            return pa.array(run.entry_id)
        case "append_time":
            return pa.array(run.append_ms)
        case "sequence_id":
            return pa.array(run.sequence_id)
        case "highest_sequence_id":
            return pa.array(run.highest)
        case "num_messages":
            messages = run.num_messages
            return pa.array(messages, mask=messages == 0)
        case "payload_bytes":
            return pa.array(run.payload_bytes.astype(np.int64))
        case "marker":
            markers = np.zeros(run.count, np.bool_)
            markers[run.markers] = True
            return pa.array(markers)
        case "aborts":
            return _sparse(run.count, run.aborts, COLUMNS[name])
        case "publish_time":
            return pa.array([_time(each, "publish_time") for each in metadata], pa.int64())
        case "event_time":
            return pa.array([_time(each, "event_time") for each in metadata], pa.int64())
        case "partition_key":
            keys = [
                each.partition_key if each.HasField("partition_key") else None for each in metadata
            ]
            return pa.array(keys, pa.string())
        case "compression":
            kinds = np.fromiter((each.compression for each in metadata), np.int32, run.count)
            return pa.DictionaryArray.from_arrays(kinds, pa.array(_COMPRESSIONS, pa.string()))
        case "properties":
            of_each = [list(each.properties.items()) for each in metadata]
            return pa.array(of_each, METADATA_COLUMNS[name])
        case _:
            attribute = _OF_CHUNKS[name]
            of_chunks = [(index, getattr(chunk, attribute)) for index, chunk in chunks]
            return _sparse(run.count, of_chunks, COLUMNS[name])


def _sparse(count: int, values: list[tuple[int, Any]], kind: pa.DataType) -> pa.Array:
    if not values:
        return pa.nulls(count, kind)
    column: list[Any] = [None] * count
    for index, value in values:
        column[index] = value
    return pa.array(column, kind)


def _time(metadata: entry_pb2.EntryMetadata, name: str) -> int | None:
    if not metadata.HasField(name):  # type: ignore[arg-type]
        return None
    value: int = getattr(metadata, name)
    return value if value <= SEQUENCE_ID_MAX else None
