"""What is to be delivered later: what is due soonest is remembered, the rest is read again.

    for later ──▶ kept, by time ──due──▶ waits for its turn
                   │  ▲
      due last, no │  │ a pass: what is postponed is read again,
      room for all ▼  │ when it may be due, or half of what was kept is not kept any more
                 postponed

While something is postponed, nothing is kept anew that is due later than that, so a pass keeps what
is due soonest of all. With N messages and room for K there are about 2 N/K passes; each comes by
what is postponed only, and by none of a stretch of the log that is due later than what was
postponed anew.

Where a message that is to be delivered later holds its key, what follows it in the key is postponed
with it, and the pass comes by all of that.
"""

from bisect import bisect_left, insort
from collections.abc import Container
from typing import Final, NamedTuple

from seqgate.types import Position
from services.dispatcher.core.effects import Options
from services.dispatcher.core.held import Held
from services.dispatcher.core.lane import Lane
from services.dispatcher.core.postponed import NEVER_MS, Postponed

KEPT_BYTES: Final = 1_200
"""What a message takes that is kept, besides its key, which may be in nothing else."""

KEPT_LEAST: Final = 100
"""How many a subscription keeps, whatever others keep."""

_FIRST: Final = Position(0, 0)
"""No entry is before this."""


class DelayedBytes:
    """How much all subscriptions of the process keep of what is to be delivered later, and may.

    Attributes:
        size_bytes, bytes_max: that.
    """

    def __init__(self, bytes_max: int) -> None:
        self.size_bytes = 0
        self.bytes_max = bytes_max


class Kept(NamedTuple):
    """A message that is to be delivered at a time."""

    when_ms: int
    position: Position
    messages: int
    lane: Lane

    @property
    def size_bytes(self) -> int:
        """What it takes, about."""
        return KEPT_BYTES + len(self.lane.key)


class Delays:
    """See the module.

    Attributes:
        holds_keys: whether a message that is to be delivered later holds its key.
        postponed: what was read and is not kept.
        is_passing: whether a pass is under way.
    """

    def __init__(self, options: Options, together: DelayedBytes) -> None:
        self.holds_keys = options.orders_keys and options.delay_holds_key
        self.postponed = Postponed()
        self.is_passing = False
        self._together = together
        self._kept_max = options.delayed_max
        self._bytes_max = options.delayed_bytes_max
        self._kept: list[Kept] = []
        self._bytes = 0
        self._horizon_ms = NEVER_MS
        self._most = 0
        self._held = self._held_anew = Held()
        self._page_start = _FIRST

    def __len__(self) -> int:
        return len(self._kept)

    # ---- what is kept

    def takes(self, when_ms: int, position: Position, key: bytes) -> bool:
        """Whether a message is kept: there is room, or it is due before one that is."""
        if self.postponed and when_ms >= self._horizon_ms:
            return False
        if self._has_room(KEPT_BYTES + len(key)):
            return True
        return (when_ms, position) < self._kept[-1][:2]

    def keep(self, kept: Kept) -> None:
        """One more is."""
        insort(self._kept, kept, key=_order)
        self._count(kept.size_bytes)

    def forget(self, when_ms: int, position: Position) -> None:
        """A message is not kept any more, if it was."""
        at = bisect_left(self._kept, (when_ms, position), key=_order)
        if at < len(self._kept) and self._kept[at].position == position:
            self._count(-self._kept.pop(at).size_bytes)

    def excess(self) -> Kept | None:
        """What is due last, if more is kept than may be. It is to be postponed."""
        is_over = len(self._kept) > 1 and not self._has_room(0, 0)
        return self._kept[-1] if is_over else None

    def due(self, now_ms: int) -> list[Kept]:
        """What is due is not kept any more."""
        end = bisect_left(self._kept, now_ms + 1, key=_when)
        due, self._kept[:end] = self._kept[:end], []
        self._count(-sum(each.size_bytes for each in due))
        return due

    def clear(self) -> None:
        """Keep nothing: others have the room."""
        self._kept.clear()
        self._count(-self._bytes)

    def _has_room(self, size_bytes: int, entries: int = 1) -> bool:
        kept, together = len(self._kept) + entries, self._together
        if kept <= 1:
            return True
        if kept > self._kept_max or self._bytes + size_bytes > self._bytes_max:
            return False
        return kept <= KEPT_LEAST or together.size_bytes + size_bytes <= together.bytes_max

    def _count(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        self._together.size_bytes += size_bytes

    # ---- what is postponed

    def postpone(self, position: Position, when_ms: int) -> None:
        """A message is not kept: it is read again."""
        if not (self.postponed or self.is_passing):
            self._forget_pass()
        self.postponed.add(position, when_ms)
        self._horizon_ms = min(self._horizon_ms, when_ms)
        self._most = max(self._most, len(self._kept))

    def drop(self, position: Position) -> None:
        """An entry is not postponed any more, if it was: nobody will have it. What it held can go,
        which a pass finds out."""
        if position in self.postponed:
            self.postponed.discard(position)
            if self.holds_keys:
                self._horizon_ms = 0

    def hold(self, key: bytes, slot: int) -> None:
        """What follows in a key waits for what is postponed of it."""
        self._held_anew.add(key, slot)

    def is_held(self, key: bytes, slot: int, *, is_new: bool) -> bool:
        """Whether something before an entry is postponed in its key. What is not new is read
        again: what the pass has not come by yet is behind it."""
        if not (self.holds_keys and self.postponed):
            return False
        return self._held_anew.has(key, slot) or (is_new and self._held.has(key, slot))

    def take_before(self, end: Position) -> list[Position]:
        """What is postponed before an entry is not any more. Returns it."""
        taken = [each for each in self.postponed.between(_FIRST, end) if each < end]
        for each in taken:
            self.postponed.discard(each)
        return taken

    def _forget_pass(self) -> None:
        self._horizon_ms, self._most = NEVER_MS, 0
        self._held = self._held_anew = Held()

    # ---- the pass

    def next_ms(self, now_ms: int) -> int | None:
        """When something is due, or there is to be a pass, if there is not to be one now; None:
        never."""
        due_ms = self._kept[0].when_ms if self._kept else NEVER_MS
        if self.postponed and not self.is_passing and self._horizon_ms > now_ms:
            due_ms = min(due_ms, self._horizon_ms)
        return None if due_ms == NEVER_MS else due_ms

    def wants_pass(self, now_ms: int) -> bool:
        """Whether what is postponed may be due, or there is room for half of it that there was."""
        if self.is_passing or not self.postponed:
            return False
        kept = len(self._kept)
        return self._horizon_ms <= now_ms or (kept < self._most and kept * 2 <= self._most)

    def begin_pass(self) -> Position:
        """What is postponed is read again, from there on."""
        first = self.postponed.first(_FIRST)
        assert first is not None
        self._page_start, self.is_passing = first, True
        self._horizon_ms, self._most = NEVER_MS, 0
        self._held_anew = Held()
        return first

    def next_page(self, last: Position, *, is_whole: bool) -> Position | None:
        """Where the pass goes on after what was read of it; None: it is over. `is_whole` says
        whether everything that follows is read, for others."""
        start = Position(last[0], last[1] + 1)
        before_ms = NEVER_MS + 1 if self.holds_keys else self._horizon_ms
        next_ = self.postponed.first(start, before_ms)
        self._page_start = start if is_whole or next_ is None else next_
        return next_

    def visit(self, position: Position) -> None:
        """An entry that was postponed is read again: it is not, unless it is anew."""
        if self.is_passing:
            self.postponed.visit(position)
        else:
            self.postponed.discard(position)

    def gone(self, last: Position, found: Container[Position]) -> list[Position]:
        """A page of the pass ends there. Returns what the log has no more, and is not postponed any
        more."""
        gone = [
            each for each in self.postponed.between(self._page_start, last) if each not in found
        ]
        for each in gone:
            self.postponed.discard(each)
        return gone

    def end_pass(self) -> None:
        """The pass came by whatever may be kept."""
        self.is_passing = False
        self.postponed.end_pass()
        self._horizon_ms = self.postponed.soonest_ms
        self._most = len(self._kept)
        self._held = self._held_anew


def _order(kept: Kept) -> tuple[int, Position]:
    return kept.when_ms, kept.position


def _when(kept: Kept) -> int:
    return kept.when_ms
