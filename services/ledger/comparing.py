"""Compares messages that are sent again with the stored ones, by the metadata of their entries.
No payload is read or opened."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

import structlog

from seqgate.api.entry.v1 import entry_pb2
from seqgate.services.errors import DomainError, Kind
from seqgate.services.ledger.core.content import DIGEST_BYTES, Comparison, Content, compared
from seqgate.services.ledger.core.entry import Entry, places
from seqgate.services.ledger.core.receipt import (
    Fate,
    Found,
    Receipt,
    Repeated,
    Unfinished,
    repeated_ids,
)
from seqgate.services.ledger.ports import EntryCorrupt, LedgerStore
from seqgate.types import Position, TopicName

log = structlog.get_logger()

METADATA_PAGE_BYTES: Final = 8 * 1024 * 1024
"""The most metadata of stored entries in memory at a time, in bytes, for each look-up."""


class Conflict(DomainError):
    """Another message is stored under this sequence id, and conflicts are refused."""

    kind = Kind.INVALID
    reason = "CONFLICT"


class Resent(NamedTuple):
    """A unit that was not stored because of its ids, and the fates of its messages in the order of
    `repeated_ids`."""

    repeated: Repeated
    fates: Sequence[Fate]


Outcomes = list[Comparison | None]
"""What was found of a unit's messages, in the order of `repeated_ids`; None: not in the log."""


async def comparisons(
    store: LedgerStore, topic: TopicName, resent: Sequence[Resent]
) -> list[Outcomes]:
    """Compare each message of some units with its original, if that is in the log.

    Raises:
        DomainError: as LedgerStore.read_at, but for EntryCorrupt: a damaged entry is not compared.
    """
    asked: dict[Position, list[_Asked]] = {}
    found = [_asked(each, asked) for each in resent]
    left = sorted(asked)
    while left:
        try:
            page = await store.read_at(topic, left, bytes_max=METADATA_PAGE_BYTES, payloads=False)
        except EntryCorrupt as error:
            log.critical("entry damaged, not compared", topic=str(topic), **error.details)
            break
        if not page:  # the rest was trimmed
            break
        for stored in page:
            original = _Contents(stored.entry, stored.payload_bytes)
            for each in asked[stored.position]:
                each.found[each.place] = _compared(
                    each.given, each.given_index, original, each.original_index
                )
        left = left[bisect_right(left, page[-1].position) :]
    return found


def told(receipt: Receipt, found: Outcomes, *, refuses: bool) -> Receipt:
    """The receipt with what was found of its messages; with `refuses`, those that differ fail."""
    if Comparison.DIFFERS not in found and Comparison.NOT_COMPARED not in found:
        return receipt
    differs = tuple(i for i, each in enumerate(found) if each is Comparison.DIFFERS)
    unknown = tuple(i for i, each in enumerate(found) if each is Comparison.NOT_COMPARED)
    error = None
    if differs and refuses:
        error = Conflict(
            "another message is stored under this sequence id: use another producer name"
        )
    return receipt._replace(differs=differs, not_compared=unknown, error=error)


class _Contents:
    """The contents of an entry's messages."""

    __slots__ = ("_entry", "_metadata", "_payload_bytes", "digests")

    def __init__(self, entry: Entry, payload_bytes: int) -> None:
        self._entry = entry
        self._metadata = entry_pb2.EntryMetadata.FromString(entry.metadata)
        self._payload_bytes = payload_bytes
        self.digests = self._metadata.content_digests

    def at(self, index: int) -> Content:
        """The content of the message at an index of the batch."""
        metadata, first = self._metadata, index * DIGEST_BYTES
        is_chunk = self._entry.chunk is not None
        if is_chunk:
            size_bytes, crc32c = metadata.total_chunk_msg_size, metadata.message_crc32c
            is_checked = metadata.HasField("message_crc32c")
        else:
            size_bytes, crc32c = self._payload_bytes, metadata.payload_crc32c
            is_checked = metadata.HasField("payload_crc32c")
        return Content(
            self.digests[first : first + DIGEST_BYTES],
            index,
            self._entry.messages,
            metadata.compression,
            is_chunk,
            size_bytes,
            crc32c if is_checked else None,
        )


class _Asked(NamedTuple):
    """A message to compare: where it was sent, and where it is stored; and the place of its outcome
    in `found`."""

    given: _Contents
    given_index: int
    original_index: int
    found: Outcomes
    place: int


def _asked(resent: Resent, asked: dict[Position, list[_Asked]]) -> Outcomes:
    """Add a unit's messages that are in the log to `asked`, by the position of their originals.
    Returns what will be found: until then, they are not compared."""
    repeated, fates = resent
    given: dict[int, tuple[_Contents, int]] = {}
    for entry in repeated.unit.entries:
        contents = _Contents(entry, len(entry.payload))
        for sequence_id, index in places(entry):
            given[sequence_id] = contents, index or 0
    found: Outcomes = []
    for place, (sequence_id, fate) in enumerate(zip(repeated_ids(repeated), fates, strict=True)):
        position, original_index = _original(repeated, fate)
        if position is None:
            found.append(None)
            continue
        found.append(Comparison.NOT_COMPARED)
        message = _Asked(*given[sequence_id], original_index, found, place)
        asked.setdefault(position, []).append(message)
    return found


def _original(repeated: Repeated, fate: Fate) -> tuple[Position | None, int]:
    """Where a message is, or the same chunk of an unfinished one, and its index in the batch."""
    if isinstance(fate, Found):
        return fate.position, fate.batch_index or 0
    chunk = repeated.unit.chunk
    if isinstance(fate, Unfinished) and chunk is not None:
        chunks = fate.attempts.get(chunk.layout, ())
        if chunk.chunk_id < len(chunks):
            return chunks[chunk.chunk_id], 0
    return None, 0


def _compared(given: _Contents, index: int, stored: _Contents, stored_index: int) -> Comparison:
    if given.digests and given.digests == stored.digests and index == stored_index:
        return Comparison.SAME  # as nearly all
    return compared(given.at(index), stored.at(stored_index))
