"""Entries that were read and are not sent yet, within a byte budget."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.types import Position

OVERHEAD_BYTES: Final = 512
"""The approximate overhead of an entry."""


class Caches:
    """The total size of all caches of the process, and its limit."""

    def __init__(self, bytes_max: int) -> None:
        self.size_bytes = 0
        self.bytes_max = bytes_max


class Cached(NamedTuple):
    """An entry, and its size without overhead."""

    entry: StoredEntry
    size_bytes: int


# Cached._make without a Python call per entry.
_cached: Final[Callable[[Iterable[Any]], Cached]] = partial(tuple.__new__, Cached)


class EntryCache:
    """Evicts the oldest entries first. A cache that adds entries while all caches together are over
    their limit evicts its own."""

    def __init__(self, bytes_max: int, caches: Caches) -> None:
        self._bytes_max = bytes_max
        self._caches = caches
        self._bytes = 0
        self._entries: dict[Position, Cached] = {}
        self.get: Final[Callable[[Position], Cached | None]] = self._entries.get
        """The entry at a position, which stays cached; None: it is not cached."""

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def __contains__(self, position: Position) -> bool:
        return position in self._entries

    def put(self, read: Iterable[tuple[Position, StoredEntry]]) -> None:
        """Add entries as they were read, which may be more than once."""
        entries, added_bytes = self._entries, 0
        for position, entry in read:
            if position in entries:
                self.drop((position,))
            size_bytes = entry.ByteSize()
            entries[position] = _cached((entry, size_bytes))
            added_bytes += size_bytes + OVERHEAD_BYTES
        self._count(added_bytes)
        caches = self._caches
        over_bytes = max(self._bytes - self._bytes_max, caches.size_bytes - caches.bytes_max)
        if over_bytes > 0:
            self.drop(self._oldest(over_bytes))

    def _oldest(self, size_bytes: int) -> list[Position]:
        """The oldest entries that have so many bytes together, or all."""
        oldest = []
        for position, cached in self._entries.items():
            if size_bytes <= 0:
                break
            oldest.append(position)
            size_bytes -= cached.size_bytes + OVERHEAD_BYTES
        return oldest

    def _count(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        self._caches.size_bytes += size_bytes

    def drop(self, positions: Iterable[Position]) -> None:
        """Remove the entries at these positions, as far as they are cached."""
        dropped_bytes = 0
        for position in positions:
            cached = self._entries.pop(position, None)
            if cached is not None:
                dropped_bytes += cached.size_bytes + OVERHEAD_BYTES
        self._count(-dropped_bytes)

    def clear(self) -> None:
        self._entries.clear()
        self._count(-self._bytes)
