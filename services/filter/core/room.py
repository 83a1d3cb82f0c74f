"""The memory budget for the chains of all streams, and the eviction of streams.

The chains of all streams share one budget; a single chain of any size fits alone. A stream without
room evicts others, the longest idle first. An evicted stream ends, and its caller sets its chains
again on a new one. So with more chains than fit, all callers are slow, and none waits forever.

From its first chain on, a stream keeps its room for KEPT_S, or for UNUSED_S while it has judged
nothing: streams that evicted one another at once would never judge anything.
"""

from collections.abc import Callable, Sequence
from typing import Final

KEPT_S: Final = 1.0
"""The shortest time for which a stream keeps its room, in seconds."""

UNUSED_S: Final = 10.0
"""The same for a stream that has judged nothing, in seconds."""


class ChainShare:
    """The share of one stream's chains.

    Attributes:
        used_s: when the stream last judged, or set its first chain.
        is_over: whether the stream was evicted: it ends.
    """

    __slots__ = ("_end", "_has_judged", "_since_s", "is_over", "size_bytes", "used_s")

    def __init__(self, end: Callable[[], object]) -> None:
        """`end` is called when the stream is evicted."""
        self.size_bytes = 0
        self.is_over = False
        self._end = end
        self._since_s = 0.0
        self.used_s = 0.0
        self._has_judged = False

    def begin(self, now_s: float) -> None:
        """Record the stream's first chain."""
        self._since_s = self.used_s = now_s
        self._has_judged = False

    def judged(self, now_s: float) -> None:
        self.used_s = now_s
        self._has_judged = True

    def may_end(self, now_s: float) -> bool:
        """Whether the stream may be evicted."""
        return now_s >= self._since_s + (KEPT_S if self._has_judged else UNUSED_S)

    def end(self) -> None:
        """Evict the stream."""
        self.is_over = True
        self._end()


class ChainRoom:
    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._used = 0
        self._shares: dict[ChainShare, None] = {}

    @property
    def used(self) -> int:
        """The size of all chains, in bytes."""
        return self._used

    def take(self, share: ChainShare, size_bytes: int, before: int, now_s: float) -> bool:
        """Take room for a chain of `size_bytes` in place of one of `before` bytes (0: none), and
        evict other streams if needed. False: there is no room now."""
        assert not share.is_over
        added = size_bytes - before
        missing = self._used + added - self.bytes_max
        if added > 0 and missing > 0:
            others = self._used - share.size_bytes
            is_only_one = share.size_bytes == before
            leaving = self._leaving(share, min(missing, others) if is_only_one else missing, now_s)
            if leaving is None:
                return False
            for each in leaving:
                self.give(each)
                each.end()
        if not share.size_bytes:
            share.begin(now_s)
        self._shares[share] = None
        share.size_bytes += added
        self._used += added
        return True

    def give(self, share: ChainShare) -> None:
        """Release the share: the stream has ended."""
        self._used -= share.size_bytes
        share.size_bytes = 0
        self._shares.pop(share, None)
        assert self._used >= 0

    def _leaving(
        self, share: ChainShare, missing: int, now_s: float
    ) -> Sequence[ChainShare] | None:
        """The streams to evict for `missing` bytes of room; None: too few may be evicted now."""
        leaving: list[ChainShare] = []
        others = [each for each in self._shares if each is not share and each.may_end(now_s)]
        for each in sorted(others, key=lambda each: each.used_s):
            if missing <= 0:
                break
            if each.size_bytes:
                leaving.append(each)
                missing -= each.size_bytes
        return leaving if missing <= 0 else None
