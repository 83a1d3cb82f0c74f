"""Reads columns entry by entry, for comparison with stored entries."""

from collections.abc import Mapping, Sequence
from struct import iter_unpack
from typing import NamedTuple

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.services.ledger.core.columns import Columns
from seqgate.services.ledger.core.entry import StoredEntry
from seqgate.times import milliseconds
from seqgate.types import Chunk, Position


class Row(NamedTuple):
    """An entry according to columns."""

    position: Position
    append_ms: int
    producer: str
    lowest: int
    highest: int
    messages: int | None
    payload_bytes: int
    marker: bool
    chunk: Chunk | None
    aborts: str
    metadata: bytes


def row_of(stored: StoredEntry, *, metadata: bool = False) -> Row:
    """The expected row of a stored entry."""
    entry = stored.entry
    return Row(
        stored.position,
        stored.append_ms,
        entry.producer,
        entry.lowest,
        entry.highest,
        entry.messages,
        stored.payload_bytes,
        entry.marker,
        entry.chunk,
        entry.aborts,
        entry.metadata if metadata else b"",
    )


def rows_of(run: Columns) -> list[Row]:
    """The entries of a run of columns."""
    return _rows(
        (run.ledger_id, run.first_entry, run.size, run.append_ms),
        run.producers,
        (run.producer, run.lowest, run.highest, run.messages, run.payload_bytes),
        run.markers,
        run.chunks,
        run.aborts,
        run.metadata,
    )


def rows_on_the_wire(block: pb.EntryColumns) -> list[Row]:
    """The entries of a run of columns in its wire form."""
    return _rows(
        (block.ledger_id, block.first_entry_id, block.count, milliseconds(block.append_time)),
        block.producers,
        (
            block.producer,
            block.sequence_id,
            block.highest_sequence_id,
            block.num_messages,
            block.payload_bytes,
        ),
        block.markers,
        {
            place: Chunk(each.uuid, each.chunk_id, each.num_chunks, each.total_bytes)
            for place, each in block.chunks.items()
        },
        block.aborts,
        block.metadata,
    )


def _rows(
    run: tuple[int, int, int, int],
    producers: Sequence[str],
    columns: tuple[bytes, bytes, bytes, bytes, bytes],
    markers: Sequence[int],
    chunks: Mapping[int, Chunk],
    aborts: Mapping[int, str],
    metadata: Sequence[bytes],
) -> list[Row]:
    ledger_id, first_entry, size, append_ms = run
    producer, lowest, highest, messages, payload_bytes = columns
    assert size > 0
    assert len(set(producers)) == len(producers)
    assert highest != lowest, "a column that says nothing is left out"
    assert not messages or any(messages), "a column that says nothing is left out"
    assert {*markers, *chunks, *aborts} <= {*range(size)}
    return [
        Row(
            Position(ledger_id, first_entry + place),
            append_ms,
            producers[index],
            low,
            high,
            count or None,
            payload,
            place in markers,
            chunks.get(place),
            aborts.get(place, ""),
            meta,
        )
        for place, (index, low, high, count, payload, meta) in enumerate(
            zip(
                _column("<I", producer),
                _column("<q", lowest),
                _column("<q", highest or lowest),
                _column("<I", messages or bytes(4 * size)),
                _column("<I", payload_bytes),
                metadata or [b""] * size,
                strict=True,
            )
        )
    ]


def _column(form: str, column: bytes) -> list[int]:
    return [number for (number,) in iter_unpack(form, column)]
