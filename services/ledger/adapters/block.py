"""The stored form of a group of entries: a block, one row with three blobs.

    entries    MessagePack: columns (see ledger.core.columns), and the batches' steps
    metadata   the size of each entry's metadata in 4 bytes, then all of it end to end
    payloads   the payloads, end to end

so that replays and look-ups never read a payload, and columns are returned as stored, at no cost
per entry. Each blob has a CRC-32C.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, compress, count, pairwise, repeat
from struct import Struct
from typing import Any, Final, NamedTuple

import google_crc32c
import msgpack

from seqgate.services.ledger.core.columns import (
    NUMBER_BYTES,
    Columns,
    ids,
    named,
    numbers,
    to_ids,
    to_numbers,
)
from seqgate.services.ledger.core.entry import Entry, StoredEntry
from seqgate.services.ledger.ports import EntryCorrupt
from seqgate.types import Chunk, Position

_NUMBER: Final = Struct("<I")
_ID: Final = Struct("<q")
_FIRST: Final = _NUMBER.pack(0)

# NamedTuple._make without a Python call per entry.
_position: Final[Callable[[Iterable[Any]], Position]] = partial(tuple.__new__, Position)
_entry: Final[Callable[[Iterable[Any]], Entry]] = partial(tuple.__new__, Entry)
_stored: Final[Callable[[Iterable[Any]], StoredEntry]] = partial(tuple.__new__, StoredEntry)


class Block(NamedTuple):
    """A row. Metadata and payloads are None if not read."""

    ledger_id: int
    first_entry: int
    last_entry: int
    append_ms: int
    entries_crc: int
    metadata_crc: int
    payloads_crc: int
    entries: bytes
    metadata: bytes | None
    payloads: bytes | None


def encode_block(
    ledger_id: int, first_entry: int, append_ms: int, entries: Sequence[Entry]
) -> Block:
    if len(entries) == 1:
        columns, metadata, payloads = _encode_one(*entries)
    else:
        columns, metadata, payloads = _encode_many(entries)
    packed: bytes = msgpack.packb(columns)
    crc = google_crc32c.value
    return Block(
        ledger_id,
        first_entry,
        first_entry + len(entries) - 1,
        append_ms,
        crc(packed),
        crc(metadata),
        crc(payloads),
        packed,
        metadata,
        payloads,
    )


def decode_block(block: Block) -> list[StoredEntry]:
    """The entries of a block. Metadata or payloads that were not read are empty.

    Raises:
        EntryCorrupt: a blob is damaged, so none of the entries can be read. The error names the
            last of them; the next block begins after it.
    """
    columns = _checked(block)
    if block.first_entry == block.last_entry:
        return [_decode_one(block, *columns)]
    return _decode_many(block, *columns)


def to_columns(block: Block) -> Columns:
    """A block as columns, with metadata if it was read.

    Raises:
        EntryCorrupt: as from decode_block.
    """
    *columns, chunks, aborts, _ = _checked(block)
    size = block.last_entry + 1 - block.first_entry
    run = (block.ledger_id, block.first_entry, size, block.append_ms)
    metadata = () if block.metadata is None else _metadata(block.metadata, size)
    return Columns._make((*run, *columns, _chunks(chunks) if chunks else chunks, aborts, metadata))


def _checked(block: Block) -> Any:
    crc = google_crc32c.value
    if (
        crc(block.entries) != block.entries_crc
        or (block.metadata is not None and crc(block.metadata) != block.metadata_crc)
        or (block.payloads is not None and crc(block.payloads) != block.payloads_crc)
    ):
        raise EntryCorrupt(
            "a stored block does not match its checksum",
            ledger_id=block.ledger_id,
            entry_id=block.last_entry,
            first_entry_id=block.first_entry,
        )
    return msgpack.unpackb(block.entries, strict_map_key=False)


def _encode_many(entries: Sequence[Entry]) -> tuple[tuple[object, ...], bytes, bytes]:
    size = len(entries)
    producers, lowest, highest, messages, steps, markers, metadata, payloads, chunks, aborts = zip(
        *entries, strict=True
    )
    columns = (
        *named(producers),
        ids(lowest),
        b"" if highest == lowest else ids(highest),
        b"" if messages.count(None) == size else numbers([each or 0 for each in messages]),
        numbers([*map(len, payloads)]),
        [*compress(count(), markers)],
        {} if chunks.count(None) == size else _by_place(chunks),
        _by_place(aborts) if any(aborts) else {},
        msgpack.packb(_by_place(steps)) if any(steps) else b"",
    )
    return columns, numbers([*map(len, metadata)]) + b"".join(metadata), b"".join(payloads)


# The blocks of a quiet topic hold one entry: these two halve the cost of the general code.


def _encode_one(entry: Entry) -> tuple[tuple[object, ...], bytes, bytes]:
    producer, lowest, highest, messages, steps, marker, metadata, payload, chunk, aborts = entry
    columns = (
        (producer,),
        _FIRST,
        _ID.pack(lowest),
        b"" if highest == lowest else _ID.pack(highest),
        b"" if messages is None else _NUMBER.pack(messages),
        _NUMBER.pack(len(payload)),
        (0,) if marker else (),
        {} if chunk is None else {0: chunk},
        {0: aborts} if aborts else {},
        msgpack.packb({0: steps}) if steps else b"",
    )
    return columns, _NUMBER.pack(len(metadata)) + metadata, payload


def _decode_many(
    block: Block,
    names: list[str],
    producer: bytes,
    low: bytes,
    high: bytes,
    counts: bytes,
    sizes: bytes,
    markers: list[int],
    chunks: dict[int, Any],
    aborts: dict[int, str],
    steps: bytes,
) -> list[StoredEntry]:
    size = block.last_entry + 1 - block.first_entry
    lowest = to_ids(low)
    payload_bytes = to_numbers(sizes)
    entries = zip(
        map(names.__getitem__, to_numbers(producer)) if len(names) > 1 else repeat(names[0], size),
        lowest,
        to_ids(high) if high else lowest,
        [each or None for each in to_numbers(counts)] if counts else repeat(None, size),
        _spread(_steps(steps), size, otherwise=()) if steps else repeat((), size),
        map(frozenset(markers).__contains__, range(size)),
        repeat(b"", size) if block.metadata is None else _metadata(block.metadata, size),
        repeat(b"", size) if block.payloads is None else _cut(block.payloads, 0, payload_bytes),
        _spread(_chunks(chunks), size, otherwise=None) if chunks else repeat(None, size),
        _spread(aborts, size, otherwise="") if aborts else repeat("", size),
        strict=True,
    )
    entry_ids = range(block.first_entry, block.first_entry + size)
    positions = zip(repeat(block.ledger_id, size), entry_ids, strict=True)
    stored = zip(
        map(_position, positions),
        repeat(block.append_ms, size),
        map(_entry, entries),
        payload_bytes,
        strict=True,
    )
    return [*map(_stored, stored)]


def _decode_one(
    block: Block,
    names: list[str],
    _: bytes,
    low: bytes,
    high: bytes,
    counts: bytes,
    sizes: bytes,
    markers: list[int],
    chunks: dict[int, Any],
    aborts: dict[int, str],
    steps: bytes,
) -> StoredEntry:
    (lowest,) = _ID.unpack(low)
    (payload_bytes,) = _NUMBER.unpack(sizes)
    entry = (
        names[0],
        lowest,
        _ID.unpack(high)[0] if high else lowest,
        _NUMBER.unpack(counts)[0] if counts else None,
        _steps(steps)[0] if steps else (),
        bool(markers),
        b"" if block.metadata is None else block.metadata[NUMBER_BYTES:],
        block.payloads or b"",
        Chunk._make(chunks[0]) if chunks else None,
        aborts[0] if aborts else "",
    )
    position = _position((block.ledger_id, block.first_entry))
    return _stored((position, block.append_ms, _entry(entry), payload_bytes))


def _steps(steps: bytes) -> dict[int, tuple[int, ...]]:
    unpacked: dict[int, tuple[int, ...]] = msgpack.unpackb(
        steps, strict_map_key=False, use_list=False
    )
    return unpacked


def _chunks(chunks: dict[int, Iterable[Any]]) -> dict[int, Chunk]:
    return {place: Chunk._make(each) for place, each in chunks.items()}


def _by_place(values: Iterable[Any]) -> dict[int, Any]:
    return {place: each for place, each in enumerate(values) if each}


def _spread(by_place: dict[int, Any], size: int, *, otherwise: object) -> Iterable[Any]:
    """One value per entry: its rare field, or `otherwise`."""
    return map(by_place.get, range(size), repeat(otherwise))


def _metadata(blob: bytes, size: int) -> list[bytes]:
    start = NUMBER_BYTES * size
    return _cut(blob, start, to_numbers(blob[:start]))


def _cut(blob: bytes, start: int, sizes: Iterable[int]) -> list[bytes]:
    return [blob[a:b] for a, b in pairwise(accumulate(sizes, initial=start))]
