"""Entries, the elements of a log, and units, the entries stored atomically."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from seqgate.types import Chunk, Position

METADATA_BYTES_MAX: Final = 128 * 1024
"""The largest metadata of an entry, in bytes."""


class Entry(NamedTuple):
    """One record: a message, a batch of messages, or a chunk of a large message.

    A batch has the ids of all its messages: the first is `lowest`, and each of `steps` is the
    distance to the next; empty `steps` mean consecutive ids. `messages` is None unless the entry is
    a batch, which may hold a single message.

    `aborts` is the uuid of an unfinished attempt at a large message by the same producer, which
    this entry ends: the chunks stored before never make a message.
    """

    producer: str
    lowest: int
    highest: int
    messages: int | None
    steps: tuple[int, ...]
    marker: bool
    metadata: bytes
    payload: bytes
    chunk: Chunk | None = None
    aborts: str = ""

    @property
    def size_bytes(self) -> int:
        """The bytes counted against windows and groups."""
        return len(self.metadata) + len(self.payload)

    @property
    def message_count(self) -> int:
        """The number of messages that the entry completes; a large one, with its last chunk."""
        if self.chunk is not None:
            return 1 if self.chunk.is_last else 0
        return 1 if self.messages is None else self.messages

    @property
    def unfinished(self) -> bool:
        """Whether the entry leaves its message incomplete."""
        return self.chunk is not None and not self.chunk.is_last

    @property
    def sequence_ids(self) -> Sequence[int]:
        if not self.steps:
            return range(self.lowest, self.highest + 1)
        return list(accumulate(self.steps, initial=self.lowest))


def places(entry: Entry) -> Iterator[tuple[int, int | None]]:
    """Each message's id and its index in the batch; None: no batch."""
    for index, sequence_id in enumerate(entry.sequence_ids):
        yield sequence_id, None if entry.messages is None else index


class StoredEntry(NamedTuple):
    """An entry and its position. The payload may be left out; `payload_bytes` is always set."""

    position: Position
    append_ms: int
    entry: Entry
    payload_bytes: int

    @property
    def size_bytes(self) -> int:
        """The size with the payload, even if that is left out."""
        return len(self.entry.metadata) + self.payload_bytes


class Unit(NamedTuple):
    """Entries stored atomically: a publication, or a run of publications. Their ids are claimed as
    one range.

    A publication is one entry, or those of one flush of a key-based batcher in the order of their
    highest ids. A run is publications of one entry each that follow one another on their stream,
    neither chunks nor markers, with rising ids and consecutive request ids. It is a shorter way to
    treat its publications alike, and is divided where one of them differs.

    Attributes:
        session: the stream that sent the unit.
        request_id: the publication's id on that stream, or that of a run's first publication.
        message_count: the messages counted against windows; a chunk counts as one.
        size_bytes: the bytes counted against windows and groups.
        publications: how many there are; more than one: a run.
    """

    session: int
    request_id: int
    producer: str
    lowest: int
    highest: int
    entries: tuple[Entry, ...]
    message_count: int
    size_bytes: int
    resume: bool = False
    publications: int = 1

    @property
    def marker(self) -> bool:
        """Whether it is a marker, an entry of the system that deduplication never judges."""
        return self.entries[0].marker

    @property
    def chunk(self) -> Chunk | None:
        return self.entries[0].chunk

    @property
    def request_ids(self) -> range:
        """The ids of its publications."""
        return range(self.request_id, self.request_id + self.publications)

    def divided(self) -> "list[Unit]":
        """A run's publications, one by one. Only the first has `resume`."""
        if self.publications == 1:
            return [self]
        ids = zip(self.request_ids, self.entries, strict=True)
        first, *others = [unit_of(self.session, each, [entry]) for each, entry in ids]
        return [first._replace(resume=self.resume), *others]


def unit_of(
    session: int, request_id: int, entries: Sequence[Entry], *, resume: bool = False
) -> Unit:
    """A publication."""
    if len(entries) == 1:
        (entry,) = entries
        messages = 1 if entry.chunk else entry.message_count
        ids = (entry.lowest, entry.highest)
        size_bytes = entry.size_bytes
        return Unit(
            session, request_id, entry.producer, *ids, (entry,), messages, size_bytes, resume
        )
    assert entries
    assert all(earlier.highest < later.highest for earlier, later in pairwise(entries))
    return Unit(
        session,
        request_id,
        entries[0].producer,
        min(entry.lowest for entry in entries),
        entries[-1].highest,
        tuple(entries),
        sum(entry.message_count for entry in entries),
        sum(entry.size_bytes for entry in entries),
        resume,
    )


def run_of(session: int, request_id: int, entries: Sequence[Entry], *, resume: bool) -> Unit:
    """A run of publications of one entry each: of `request_id`, of the one after it, and so on."""
    return Unit(
        session,
        request_id,
        entries[0].producer,
        entries[0].lowest,
        entries[-1].highest,
        tuple(entries),
        sum([1 if each.messages is None else each.messages for each in entries]),
        sum([len(each.metadata) + len(each.payload) for each in entries]),
        resume,
        len(entries),
    )
