"""The rows that the sink takes: their columns, their limits, and a digest of them, without Spark.

The digest is the sum of the rows' hashes, so it depends on the rows, and not on their order or on
their division into partitions: Spark may shuffle the same rows differently when it runs a plan
again.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from seqgate.client import Outgoing
from seqgate.errors import InvalidRequestError

TYPES: Final[Mapping[str, Mapping[str, pa.DataType]]] = {
    "payload": {"binary": pa.binary(), "string": pa.binary()},
    "key": {"string": pa.string(), "binary": pa.binary()},
    "ordering_key": {"binary": pa.binary()},
    "properties": {"map<string,string>": pa.map_(pa.string(), pa.string())},
    "event_time": {"bigint": pa.int64(), "timestamp": pa.int64()},
}
"""The columns of a write, with Spark's types that each may have, and how it is then staged: payload
in bytes, and event_time in milliseconds since 1970."""

SLICE_BYTES: Final = 8 * 1024 * 1024
"""The approximate size of what is in memory at a time, of a staged file."""

PROPERTIES_MAX: Final = 128
METADATA_BYTES_MAX: Final = 120 * 1024
"""The most properties of a row, and the most bytes of its keys and properties: the ledger's limit
is 128 KiB, with the producer's name and the trace."""

MODULUS: Final = 1 << 128


class InvalidRowError(InvalidRequestError):
    """A row cannot be a message. Nothing was sent."""

    default_reason = "INVALID_ROW"


def wrong_column(columns: Sequence[tuple[str, str]]) -> str:
    """What is wrong with a DataFrame's columns, each a name and Spark's type, in a sentence; "":
    nothing."""
    names = [name for name, _ in columns]
    if len(set(names)) < len(names):
        return f"columns must differ in name, not {', '.join(names)}"
    for name, given in columns:
        if name not in TYPES:
            return f"unknown column {name}, expected {', '.join(TYPES)}"
        if given not in TYPES[name]:
            return f"column {name} must be {' or '.join(TYPES[name])}, not {given}"
    return "" if "payload" in names else "column payload is required"


def staged_schema(columns: Sequence[tuple[str, str]]) -> pa.Schema:
    """The columns as they are staged, none of which is wrong."""
    return pa.schema([(name, TYPES[name][given]) for name, given in columns])


def staged(batch: pa.RecordBatch, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """A batch as it is staged, in slices. Raises InvalidRowError."""
    columns = []
    for field, column in zip(schema, batch.columns, strict=True):
        if pa.types.is_timestamp(column.type):
            column = pc.divide(pc.cast(column, pa.int64()), 1_000)  # of microseconds
        columns.append(pc.cast(column, field.type))
    whole = pa.record_batch(columns, schema=schema)
    if whole.column("payload").null_count:
        raise InvalidRowError("payload is null: every row needs one, of 0 bytes or more")
    if "event_time" in schema.names and pc.any(pc.less(whole.column("event_time"), 0)).as_py():
        raise InvalidRowError("event_time is before 1970")
    yield from _slices(whole)


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.nbytes <= SLICE_BYTES or batch.num_rows <= 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _slices(batch.slice(0, half))
    yield from _slices(batch.slice(half))


Row = tuple[bytes, Any, bytes | None, list[tuple[str, str]] | None, int | None]
"""A row's values, in the order of TYPES."""


def rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    names = batch.schema.names
    nothing = [None] * batch.num_rows
    return zip(
        *(batch.column(each).to_pylist() if each in names else nothing for each in TYPES),
        strict=True,
    )


def measured(batch: pa.RecordBatch) -> tuple[int, int]:
    """The digest of a batch's rows, and the bytes of the largest one. Raises InvalidRowError."""
    total, largest = 0, 0
    for payload, *others in rows_of(batch):
        key, ordering_key, properties, _ = others
        size_bytes = _metadata_bytes(key, ordering_key, properties)
        if properties:
            others[2] = sorted(properties)
        row = hashlib.blake2b(len(payload).to_bytes(8), digest_size=16)
        row.update(payload)
        row.update(repr(others).encode("utf-8", "surrogatepass"))
        total += int.from_bytes(row.digest())
        largest = max(largest, len(payload) + size_bytes)
    return total % MODULUS, largest


def _metadata_bytes(
    key: Any, ordering_key: bytes | None, properties: Sequence[tuple[str, str]] | None
) -> int:
    size_bytes = len(key.encode() if isinstance(key, str) else key or b"") + len(
        ordering_key or b""
    )
    if properties:
        if len(properties) > PROPERTIES_MAX:
            raise InvalidRowError(f"properties has {len(properties)} (limit {PROPERTIES_MAX})")
        if any(value is None for _, value in properties):
            raise InvalidRowError("properties has a null: each needs a text")
        size_bytes += sum(len(name.encode()) + len(value.encode()) for name, value in properties)
    if size_bytes > METADATA_BYTES_MAX:
        raise InvalidRowError(
            f"key, ordering_key and properties take {size_bytes:,} bytes "
            f"(limit {METADATA_BYTES_MAX:,})"
        )
    return size_bytes


def message_of(row: Row, sequence_id: int) -> Outgoing:
    payload, key, ordering_key, properties, event_time_ms = row
    return Outgoing(payload, key, dict(properties or ()), sequence_id, ordering_key, event_time_ms)
