"""Entries that were read and are not sent yet, as long as there is room for them."""

from collections import OrderedDict
from typing import Final

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.types import Position

OVERHEAD_BYTES: Final = 512
"""What an entry takes besides its bytes, about."""


class Caches:
    """How much all caches of the process keep together, and may.

    Attributes:
        size_bytes, bytes_max: that.
    """

    def __init__(self, bytes_max: int) -> None:
        self.size_bytes = 0
        self.bytes_max = bytes_max


class EntryCache:
    """At most so many bytes; the oldest go first. Whoever adds an entry when all caches together
    have too much makes room in its own."""

    def __init__(self, bytes_max: int, caches: Caches) -> None:
        self._bytes_max = bytes_max
        self._caches = caches
        self._bytes = 0
        self._entries: OrderedDict[Position, StoredEntry] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """How much there is, in bytes."""
        return self._bytes

    def __contains__(self, position: Position) -> bool:
        return position in self._entries

    def peek(self, position: Position) -> StoredEntry | None:
        """An entry, which stays; None: it is not kept."""
        return self._entries.get(position)

    def put(self, entry: StoredEntry) -> None:
        """Keep an entry."""
        position = Position(entry.position.ledger_id, entry.position.entry_id)
        self.take(position)  # it may be read more than once
        self._entries[position] = entry
        self._count(_size(entry))
        while self._entries and self._is_full:
            _, oldest = self._entries.popitem(last=False)
            self._count(-_size(oldest))

    @property
    def _is_full(self) -> bool:
        caches = self._caches
        return self._bytes > self._bytes_max or caches.size_bytes > caches.bytes_max

    def _count(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        self._caches.size_bytes += size_bytes

    def take(self, position: Position) -> StoredEntry | None:
        """An entry, which is not kept any longer; None: it was not."""
        entry = self._entries.pop(position, None)
        if entry is not None:
            self._count(-_size(entry))
        return entry

    def clear(self) -> None:
        """Keep nothing."""
        self._entries.clear()
        self._count(-self._bytes)


def _size(entry: StoredEntry) -> int:
    return entry.ByteSize() + OVERHEAD_BYTES
