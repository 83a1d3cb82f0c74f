"""How a group of entries is written: one row a block, two blobs a row.

    entries    MessagePack: each entry's fields, its payload's size in place of its payload
    payloads   the payloads, end to end

so that replay, look-ups and readers of metadata never touch a payload. Each blob has a CRC-32C.
"""

from collections.abc import Sequence
from typing import NamedTuple

import google_crc32c
import msgpack

from seqgate.types import Chunk, Position
from services.ledger.core.entry import Entry, StoredEntry
from services.ledger.ports import EntryCorrupt


class Block(NamedTuple):
    """A row."""

    ledger_id: int
    first_entry: int
    last_entry: int
    append_ms: int
    entries: bytes
    entries_crc: int
    payloads: bytes | None
    payloads_crc: int


def encode_block(
    ledger_id: int, first_entry: int, append_ms: int, entries: Sequence[Entry]
) -> Block:
    """The block that holds these entries."""
    packed: bytes = msgpack.packb(
        [
            (
                entry.producer,
                entry.lowest,
                entry.highest,
                entry.messages,
                entry.steps,
                entry.marker,
                entry.metadata,
                len(entry.payload),
                entry.chunk,
                entry.aborts,
            )
            for entry in entries
        ]
    )
    payloads = b"".join(entry.payload for entry in entries)
    return Block(
        ledger_id,
        first_entry,
        first_entry + len(entries) - 1,
        append_ms,
        packed,
        google_crc32c.value(packed),
        payloads,
        google_crc32c.value(payloads),
    )


def decode_block(block: Block) -> list[StoredEntry]:
    """The entries of a block; without payloads, these are empty.

    Raises:
        EntryCorrupt: a blob is not what was written, so none of the entries can be read. What
            follows begins after the one that is named.
    """
    payloads = block.payloads
    if google_crc32c.value(block.entries) != block.entries_crc or (
        payloads is not None and google_crc32c.value(payloads) != block.payloads_crc
    ):
        raise EntryCorrupt(
            "a stored block does not match its checksum",
            ledger_id=block.ledger_id,
            entry_id=block.last_entry,
            first_entry_id=block.first_entry,
        )
    stored = []
    offset = 0
    for index, row in enumerate(msgpack.unpackb(block.entries, use_list=False)):
        *head, size, chunk, aborts = row
        payload = b"" if payloads is None else payloads[offset : offset + size]
        offset += size
        position = Position(block.ledger_id, block.first_entry + index)
        place = None if chunk is None else Chunk._make(chunk)
        entry = Entry._make((*head, payload, place, aborts))
        stored.append(StoredEntry(position, block.append_ms, entry, size))
    return stored
