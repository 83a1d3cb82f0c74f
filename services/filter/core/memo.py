"""A bounded cache of decisions.

It has two generations: a decision in use is found in, or moved to, the young one; when that reaches
half of the limit it becomes the old one, and unused decisions of the old one are dropped. So a
look-up costs one or two look-ups of a dict, and no order is maintained.
"""

from typing import Final

from seqgate.services.filter.core.chain import Decision, Key, weight_of

KEY_BYTES: Final = 400
"""The memory of a cached decision, in bytes, besides the characters of its key."""


class Memo:
    def __init__(self, entries_max: int, bytes_max: int) -> None:
        """`bytes_max` limits the approximate memory of keys and decisions."""
        self._entries_half = entries_max // 2
        self._bytes_half = bytes_max // 2
        self.young: dict[Key, Decision] = {}
        """The young generation, where frequent callers may look first; replaced by `put`."""
        self._old: dict[Key, Decision] = {}
        self._young_bytes = 0
        self._old_bytes = 0

    def __len__(self) -> int:
        return len(self.young) + len(self._old)

    @property
    def size_bytes(self) -> int:
        """The approximate memory of the cached decisions."""
        return self._young_bytes + self._old_bytes

    def get(self, key: Key) -> Decision | None:
        decision = self.young.get(key)
        if decision is None:
            decision = self._old.get(key)
            if decision is not None:
                self.put(key, decision, weight_of(key))
        return decision

    def put(self, key: Key, decision: Decision, weight: int) -> None:
        """Cache a decision, unless it alone takes more than half of the memory, or fewer than two
        decisions may be cached."""
        size = KEY_BYTES + weight
        if size > self._bytes_half or not self._entries_half:
            return
        if len(self.young) >= self._entries_half or self._young_bytes + size > self._bytes_half:
            self._old, self.young = self.young, {}
            self._old_bytes, self._young_bytes = self._young_bytes, 0
        self.young[key] = decision
        self._young_bytes += size
