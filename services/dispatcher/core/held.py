"""Which keys are held by a message that is to be delivered later, and is not remembered.

    key ──▶ digest, 8 bytes ──no room──▶ its slot: a bit

A key that only shares the digest, or the slot, of one that is held waits with it until the log was
read again: never too short, and as good as never too long.
"""

from array import array
from hashlib import blake2b
from typing import Final

HELD_KEYS_MAX: Final = 250_000
"""Of how many keys the digests are remembered, in 4 MiB; of what is beyond, the slots."""

TABLE_FIRST: Final = 64
"""How many places a table of digests has at first. At most half of them are taken."""


class Held:
    """See the module."""

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * TABLE_FIRST))
        self._digests = 0
        self._slots = 0  # a bit each

    def __bool__(self) -> bool:
        return bool(self._digests or self._slots)

    def has(self, key: bytes, slot: int) -> bool:
        """Whether a key is held, or taken to be."""
        if self._slots >> slot & 1:
            return True
        if not self._digests:
            return False
        digest = _digest(key)
        return self._table[self._place(self._table, digest)] == digest

    def add(self, key: bytes, slot: int) -> None:
        """A key of a slot is held."""
        digest = _digest(key)
        place = self._place(self._table, digest)
        if self._table[place] == digest:
            return
        if self._digests >= HELD_KEYS_MAX:
            self._slots |= 1 << slot
            return
        self._table[place] = digest
        self._digests += 1
        if self._digests * 2 > len(self._table):
            self._grow()

    def _grow(self) -> None:
        table = array("Q", bytes(16 * len(self._table)))
        for digest in self._table:
            if digest:
                table[self._place(table, digest)] = digest
        self._table = table

    def _place(self, table: "array[int]", digest: int) -> int:
        """Where a digest is, or would be."""
        mask = len(table) - 1
        place = digest & mask
        while table[place] not in (0, digest):
            place = (place + 1) & mask
        return place


def _digest(key: bytes) -> int:
    """Never 0, which stands for nothing."""
    return int.from_bytes(blake2b(key, digest_size=8).digest()) or 1
