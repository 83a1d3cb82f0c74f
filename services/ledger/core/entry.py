"""Entries, the elements of a log, and units of them."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from seqgate.types import Chunk, Position

METADATA_BYTES_MAX: Final = 128 * 1024
"""The largest metadata of an entry, in bytes."""


class Entry(NamedTuple):
    """One record: a message, a batch of messages, or a chunk of a large message.

    A batch names the ids of all its messages: from `lowest` on, each `steps` above the one before;
    no steps means that they are consecutive. `messages` is None for a message that is no batch,
    which is not the same as a batch of one.

    `aborts` names an attempt at a large message of the same producer that this entry ends: the
    chunks of it that lie before will never make a message.
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
        """What it counts against windows and groups."""
        return len(self.metadata) + len(self.payload)

    @property
    def message_count(self) -> int:
        """How many messages it makes complete: a large one is with its last chunk."""
        if self.chunk is not None:
            return 1 if self.chunk.is_last else 0
        return 1 if self.messages is None else self.messages

    @property
    def unfinished(self) -> bool:
        """Whether its message is still incomplete with it."""
        return self.chunk is not None and not self.chunk.is_last

    @property
    def sequence_ids(self) -> Sequence[int]:
        """The ids of its messages, in order."""
        if not self.steps:
            return range(self.lowest, self.highest + 1)
        return list(accumulate(self.steps, initial=self.lowest))


def places(entry: Entry) -> Iterator[tuple[int, int | None]]:
    """Each message's id, and its index in the batch or None."""
    for index, sequence_id in enumerate(entry.sequence_ids):
        yield sequence_id, None if entry.messages is None else index


class StoredEntry(NamedTuple):
    """An entry where it is. Its payload may be left out, its size never."""

    position: Position
    append_ms: int
    entry: Entry
    payload_bytes: int

    @property
    def size_bytes(self) -> int:
        """Its size, including its payload."""
        return len(self.entry.metadata) + self.payload_bytes


class Unit(NamedTuple):
    """Entries that are stored atomically: one, or those of one flush of a producer that batches by
    key, in the order of their highest ids. Their ids are claimed as one range.

    `session` is the stream that sent it, and `request_id` its id on that stream.
    """

    session: int
    request_id: int
    producer: str
    lowest: int
    highest: int
    entries: tuple[Entry, ...]
    resume: bool = False

    @property
    def marker(self) -> bool:
        """Whether it is a system's own entry, which is never judged."""
        return self.entries[0].marker

    @property
    def chunk(self) -> Chunk | None:
        """Which chunk of a large message it is, if it is one."""
        return self.entries[0].chunk

    @property
    def message_count(self) -> int:
        """How many messages it counts for against windows; a chunk is one."""
        return 1 if self.chunk else sum(entry.message_count for entry in self.entries)

    @property
    def size_bytes(self) -> int:
        """What it counts against windows and groups."""
        return sum(entry.size_bytes for entry in self.entries)


def unit_of(
    session: int, request_id: int, entries: Sequence[Entry], *, resume: bool = False
) -> Unit:
    """The unit that these entries make."""
    if len(entries) == 1:
        (entry,) = entries
        ids = (entry.lowest, entry.highest)
        return Unit(session, request_id, entry.producer, *ids, (entry,), resume)
    assert entries
    assert all(earlier.highest < later.highest for earlier, later in pairwise(entries))
    return Unit(
        session,
        request_id,
        entries[0].producer,
        min(entry.lowest for entry in entries),
        entries[-1].highest,
        tuple(entries),
        resume,
    )
