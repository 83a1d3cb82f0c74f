"""Entries without their payloads, as columns, for jobs that read whole logs.

A run of entries of one ledger becomes one string of little-endian numbers per field; rare fields
are kept by the index of their entry:

    producers   ["p", "q"]              messages       u32, 0: no batch; empty: none is one
    producer    u32, one of them        payload_bytes  u32
    lowest      i64                     markers        [3]
    highest     i64; empty: as lowest   chunks         {5: Chunk(...)}, aborts {5: "uuid"}

so that a store with blocks of this form returns them unchanged, at no cost per entry. A run has one
form only: defaults are always left out, and producers are in the order of their appearance.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from struct import pack, unpack
from typing import Final, NamedTuple

from seqgate.services.ledger.core.entry import StoredEntry
from seqgate.types import Chunk, Position

NUMBER_BYTES: Final = 4
"""The width of every column but the ids, in bytes."""

ID_BYTES: Final = 8
"""The width of the columns of ids, in bytes."""

_SPARSE_BYTES: Final = 16
"""The approximate bytes of a rare field, besides its texts."""


class Columns(NamedTuple):
    """Consecutive entries that were appended together. `metadata` is empty unless requested."""

    ledger_id: int
    first_entry: int
    size: int
    append_ms: int
    producers: Sequence[str]
    producer: bytes
    lowest: bytes
    highest: bytes
    messages: bytes
    payload_bytes: bytes
    markers: Sequence[int]
    chunks: Mapping[int, Chunk]
    aborts: Mapping[int, str]
    metadata: Sequence[bytes] = ()

    @property
    def last(self) -> Position:
        return Position(self.ledger_id, self.first_entry + self.size - 1)

    @property
    def size_bytes(self) -> int:
        """The approximate size on the wire, in bytes."""
        return (
            sum(map(len, self.producers))
            + sum(map(len, self[5:10]))
            + _SPARSE_BYTES * (len(self.markers) + len(self.chunks) + len(self.aborts))
            + sum(len(chunk.uuid) for chunk in self.chunks.values())
            + sum(map(len, self.aborts.values()))
            + sum(map(len, self.metadata))
        )


def numbers(values: Collection[int]) -> bytes:
    """Encode numbers below 2^32 as a column."""
    return pack(f"<{len(values)}I", *values)


def ids(values: Collection[int]) -> bytes:
    return pack(f"<{len(values)}q", *values)


def to_numbers(column: bytes) -> tuple[int, ...]:
    return unpack(f"<{len(column) // NUMBER_BYTES}I", column)


def to_ids(column: bytes) -> tuple[int, ...]:
    return unpack(f"<{len(column) // ID_BYTES}q", column)


def named(producers: Sequence[str]) -> tuple[tuple[str, ...], bytes]:
    """The distinct names in order of appearance, and the column of their indexes."""
    names = tuple(dict.fromkeys(producers))
    if len(names) == 1:
        return names, bytes(NUMBER_BYTES * len(producers))
    place = {name: index for index, name in enumerate(names)}
    return names, numbers([*map(place.__getitem__, producers)])


def columns_of(stored: Sequence[StoredEntry], *, metadata: bool) -> Columns:
    """The columns of a run: consecutive entries of one ledger, appended together."""
    entries = [each.entry for each in stored]
    producers, producer = named([entry.producer for entry in entries])
    lowest = ids([entry.lowest for entry in entries])
    highest = ids([entry.highest for entry in entries])
    batches = any(entry.messages is not None for entry in entries)
    return Columns(
        *stored[0].position,
        len(stored),
        stored[0].append_ms,
        producers,
        producer,
        lowest,
        b"" if highest == lowest else highest,
        numbers([entry.messages or 0 for entry in entries]) if batches else b"",
        numbers([each.payload_bytes for each in stored]),
        [place for place, entry in enumerate(entries) if entry.marker],
        {place: entry.chunk for place, entry in enumerate(entries) if entry.chunk is not None},
        {place: entry.aborts for place, entry in enumerate(entries) if entry.aborts},
        [entry.metadata for entry in entries] if metadata else (),
    )


def clip(columns: Columns, first_entry: int, last_entry: int) -> Columns:
    """The part of a run from one entry through another; the run must have at least one of them."""
    start = max(first_entry - columns.first_entry, 0)
    stop = min(last_entry + 1 - columns.first_entry, columns.size)
    assert start < stop
    if stop - start == columns.size:
        return columns
    few = slice(NUMBER_BYTES * start, NUMBER_BYTES * stop)
    some = slice(ID_BYTES * start, ID_BYTES * stop)
    left = to_numbers(columns.producer[few])
    producers, producer = named([columns.producers[index] for index in left])
    lowest, highest, messages = columns.lowest[some], columns.highest[some], columns.messages[few]
    return Columns(
        columns.ledger_id,
        columns.first_entry + start,
        stop - start,
        columns.append_ms,
        producers,
        producer,
        lowest,
        b"" if highest == lowest else highest,
        messages if any(messages) else b"",
        columns.payload_bytes[few],
        [place - start for place in columns.markers if start <= place < stop],
        {place - start: each for place, each in columns.chunks.items() if start <= place < stop},
        {place - start: each for place, each in columns.aborts.items() if start <= place < stop},
        columns.metadata[start:stop],
    )


def parts(columns: Columns, bytes_max: int) -> Iterator[Columns]:
    """Split a run into parts of at most `bytes_max`; one entry always fits."""
    if columns.size == 1 or columns.size_bytes <= bytes_max:
        yield columns
        return
    middle = columns.first_entry + columns.size // 2
    yield from parts(clip(columns, columns.first_entry, middle - 1), bytes_max)
    yield from parts(clip(columns, middle, columns.last.entry_id), bytes_max)
