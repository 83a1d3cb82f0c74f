"""Entries that were read and are not sent yet, as long as there is room for them."""

from collections import OrderedDict
from typing import Final

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.types import Position

OVERHEAD_BYTES: Final = 512
"""What an entry takes besides its payload, about."""


class EntryCache:
    """At most so many bytes; the oldest go first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
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
        self._bytes += _size(entry)
        while self._bytes > self._bytes_max:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= _size(oldest)

    def take(self, position: Position) -> StoredEntry | None:
        """An entry, which is not kept any longer; None: it was not."""
        entry = self._entries.pop(position, None)
        if entry is not None:
            self._bytes -= _size(entry)
        return entry

    def clear(self) -> None:
        """Keep nothing."""
        self._entries.clear()
        self._bytes = 0


def _size(entry: StoredEntry) -> int:
    return len(entry.payload) + OVERHEAD_BYTES
