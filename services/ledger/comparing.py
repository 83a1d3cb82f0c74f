"""Compares messages that are sent again with the stored ones, by the metadata of their entries.
No payload is read or opened."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
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


class Original(NamedTuple):
    """Where a message is stored: the entry, and its place in the batch, from 0."""

    position: Position
    place: int


class Resent(NamedTuple):
    """A unit that was not stored because of its ids, and the fates of its messages in the order of
    `repeated_ids`."""

    repeated: Repeated
    fates: Sequence[Fate]


async def comparisons(
    store: LedgerStore, topic: TopicName, resent: Sequence[Resent]
) -> list[list[Comparison | None]]:
    """Compare each message of some units with its original; None: it is not in the log.

    Raises:
        DomainError: as LedgerStore.read_at, but for EntryCorrupt: a damaged entry is not compared.
    """
    originals = [[_original(each.repeated, fate) for fate in each.fates] for each in resent]
    stored = await _stored_contents(store, topic, chain.from_iterable(originals))
    return [
        [
            None if original is None else _compared(given, stored.get(original))
            for given, original in zip(_given_contents(each.repeated), its, strict=True)
        ]
        for each, its in zip(resent, originals, strict=True)
    ]


def told(receipt: Receipt, found: Sequence[Comparison | None], *, refuses: bool) -> Receipt:
    """The receipt with what was found of its messages; with `refuses`, those that differ fail."""
    differs = tuple(i for i, each in enumerate(found) if each is Comparison.DIFFERS)
    unknown = tuple(i for i, each in enumerate(found) if each is Comparison.NOT_COMPARED)
    error = None
    if differs and refuses:
        error = Conflict(
            "another message is stored under this sequence id: use another producer name"
        )
    return receipt._replace(differs=differs, not_compared=unknown, error=error)


def _original(repeated: Repeated, fate: Fate) -> Original | None:
    """Where a message is, or the same chunk of an unfinished one."""
    chunk = repeated.unit.chunk
    match fate:
        case Found():
            return Original(fate.position, fate.batch_index or 0)
        case Unfinished(attempts) if chunk is not None:
            chunks = attempts.get(chunk.layout, ())
            return Original(chunks[chunk.chunk_id], 0) if chunk.chunk_id < len(chunks) else None
    return None


async def _stored_contents(
    store: LedgerStore, topic: TopicName, originals: Iterable[Original | None]
) -> dict[Original, Content]:
    """The contents of stored messages; those that were trimmed or are damaged are missing."""
    wanted: dict[Position, set[int]] = {}
    for each in originals:
        if each is not None:
            wanted.setdefault(each.position, set()).add(each.place)
    found: dict[Original, Content] = {}
    left = sorted(wanted)
    while left:
        try:
            page = await store.read_at(topic, left, bytes_max=METADATA_PAGE_BYTES, payloads=False)
        except EntryCorrupt as error:
            log.critical("entry damaged, not compared", topic=str(topic), **error.details)
            break
        if not page:
            break
        for stored in page:
            contents = _Contents(stored.entry, stored.payload_bytes)
            for place in wanted[stored.position]:
                found[Original(stored.position, place)] = contents.at(place)
        left = left[bisect_right(left, page[-1].position) :]
    return found


def _given_contents(repeated: Repeated) -> Iterator[Content]:
    """The contents of a unit's messages, in the order of `repeated_ids`."""
    where: dict[int, tuple[_Contents, int]] = {}
    for entry in repeated.unit.entries:
        contents = _Contents(entry, len(entry.payload))
        where |= {each: (contents, place or 0) for each, place in places(entry)}
    for sequence_id in repeated_ids(repeated):
        contents, place = where[sequence_id]
        yield contents.at(place)


def _compared(given: Content, stored: Content | None) -> Comparison:
    return Comparison.NOT_COMPARED if stored is None else compared(given, stored)


class _Contents:
    """The contents of an entry's messages."""

    def __init__(self, entry: Entry, payload_bytes: int) -> None:
        metadata = entry_pb2.EntryMetadata.FromString(entry.metadata)
        is_chunk = entry.chunk is not None
        if is_chunk:
            size_bytes, crc32c = metadata.total_chunk_msg_size, metadata.message_crc32c
            is_checked = metadata.HasField("message_crc32c")
        else:
            size_bytes, crc32c = payload_bytes, metadata.payload_crc32c
            is_checked = metadata.HasField("payload_crc32c")
        self._digests = metadata.content_digests
        self._first = Content(
            b"",
            0,
            entry.messages,
            metadata.compression,
            is_chunk,
            size_bytes,
            crc32c if is_checked else None,
        )

    def at(self, place: int) -> Content:
        """The content of the message at a place of the batch."""
        first = place * DIGEST_BYTES
        return self._first._replace(digest=self._digests[first : first + DIGEST_BYTES], place=place)
