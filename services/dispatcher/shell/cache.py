"""Entries that were read and are not sent yet, within a byte budget."""

from collections import OrderedDict
from typing import Final

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.entries import position_of
from seqgate.types import Position

OVERHEAD_BYTES: Final = 512
"""The approximate overhead of an entry."""


class Caches:
    """The total size of all caches of the process, and its limit."""

    def __init__(self, bytes_max: int) -> None:
        self.size_bytes = 0
        self.bytes_max = bytes_max


class EntryCache:
    """Evicts the oldest entries first. A cache that adds an entry while all caches together are
    over their limit evicts its own."""

    def __init__(self, bytes_max: int, caches: Caches) -> None:
        self._bytes_max = bytes_max
        self._caches = caches
        self._bytes = 0
        self._entries: OrderedDict[Position, tuple[StoredEntry, int]] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def __contains__(self, position: Position) -> bool:
        return position in self._entries

    def peek(self, position: Position) -> StoredEntry | None:
        """As `take`, but the entry stays cached."""
        cached = self._entries.get(position)
        return None if cached is None else cached[0]

    def put(self, entry: StoredEntry) -> None:
        position = position_of(entry)
        self.take(position)  # an entry may be read more than once
        size_bytes = entry.ByteSize() + OVERHEAD_BYTES
        self._entries[position] = (entry, size_bytes)
        self._count(size_bytes)
        while self._entries and self._is_full:
            _, (_, size_bytes) = self._entries.popitem(last=False)
            self._count(-size_bytes)

    @property
    def _is_full(self) -> bool:
        caches = self._caches
        return self._bytes > self._bytes_max or caches.size_bytes > caches.bytes_max

    def _count(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        self._caches.size_bytes += size_bytes

    def take(self, position: Position) -> StoredEntry | None:
        """Remove an entry and return it; None: it was not cached."""
        cached = self._entries.pop(position, None)
        if cached is None:
            return None
        entry, size_bytes = cached
        self._count(-size_bytes)
        return entry

    def clear(self) -> None:
        self._entries.clear()
        self._count(-self._bytes)
