"""What waits to be handed out, and how much more may come.

    add ──▶ queue ──head──▶ handed out
            │   ▲
            ▼   │
            aside

A unit is put aside while its key is busy (somebody works on an earlier message, and asked that the
key be held), or guarded: an earlier message of the key was refused or returned, and the service has
not answered yet. Until then it revokes what it had sent of the key; the rest goes on. What is aside
comes before what is in the queue, and a key that has something aside gets everything put aside, so
a key's units stay in the order in which they came.

Permits follow from three counts:

    granted and not used  +  sent and not handed out  <=  what the queue holds

Chunks of an incomplete message are in neither count: their bytes are bounded by the assembly.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from seqgate.client._unit import Ticket, Unit
from seqgate.types import Position

EXPECTED_BYTES: Final = 1024 * 1024
"""How large a message is thought to be before the first has come: what was granted then comes,
however large it is."""


@dataclass(frozen=True, slots=True)
class ReceiverLimits:
    """How much a consumer takes before it is handed out.

    Attributes:
        messages: how many messages, 1 to 1,000,000. A batch that begins within comes whole.
        size_bytes: of how many bytes together permits are granted.
        ack_timeout_ms: after what time the service counts a delivery as failed; 0: never.
    """

    messages: int = 1_000
    size_bytes: int = 64 * 1024 * 1024
    ack_timeout_ms: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.messages <= 1_000_000:
            raise ValueError("a receiver queue holds 1 to 1,000,000 messages")
        if self.size_bytes < 1:
            raise ValueError("a receiver queue holds at least 1 byte")
        if self.ack_timeout_ms and not 100 <= self.ack_timeout_ms <= 86_400_000:
            raise ValueError("an acknowledgement's time-out is 0.1 to 86,400 s")


class ReceiverQueue:
    """See the module.

    Dead units leave lazily: they are passed over when they come first.

    Args:
        is_ordered: whether a key's messages come in order; otherwise nothing is guarded.
    """

    def __init__(self, *, is_ordered: bool) -> None:
        self.messages = 0
        """How many messages wait."""
        self.size_bytes = 0
        """How many bytes the units have together of which something waits."""
        self._is_ordered = is_ordered
        self._units: deque[Unit] = deque()
        self._aside: dict[bytes, deque[Unit]] = {}
        self._resumable: deque[bytes] = deque()  # keys with something aside that may go on
        self._busy: set[bytes] = set()
        self._guards: dict[bytes, dict[Ticket, Position]] = {}

    def add(self, unit: Unit) -> None:
        """A unit is here, and nothing of it is handed out."""
        self.messages += unit.waiting
        self.size_bytes += unit.size_bytes
        self._units.append(unit)

    def head(self) -> Unit | None:
        """The first unit that may be handed out."""
        while self._resumable:
            lane = self._aside.get(self._resumable[0])
            while lane and not lane[0].waiting:
                lane.popleft()
            if lane and not self._is_withheld(lane[0]):
                return lane[0]
            key = self._resumable.popleft()
            if not lane:
                self._aside.pop(key, None)
        while self._units:
            unit = self._units[0]
            if not unit.waiting:
                self._units.popleft()
            elif unit.key in self._aside or self._is_withheld(unit):
                self._units.popleft()
                self._aside.setdefault(unit.key, deque()).append(unit)
            else:
                return unit
        return None

    def note_taken(self, unit: Unit, messages: int = 1) -> None:
        """So many messages of a unit wait no more."""
        if not unit.waiting:
            return
        unit.waiting -= messages
        self.messages -= messages
        if not unit.waiting:
            self.size_bytes -= unit.size_bytes

    def drop(self, unit: Unit) -> None:
        """Nothing of a unit waits any more."""
        self.note_taken(unit, unit.waiting)

    def hold(self, key: bytes) -> None:
        """Somebody works on a message of this key."""
        self._busy.add(key)

    def release(self, key: bytes) -> None:
        """Nobody does any more."""
        self._busy.discard(key)
        self._resume(key)

    def guard(self, key: bytes, first: Position, ticket: Ticket) -> None:
        """What is behind `first` in a key is revoked by now, or soon: withhold it until the
        ticket's guard is lifted."""
        if self._is_ordered:
            ticket.guarded = key
            self._guards.setdefault(key, {})[ticket] = first

    def lift_guard(self, ticket: Ticket) -> None:
        """The service has answered: what it did not revoke by now counts."""
        key = ticket.guarded
        guards = None if key is None else self._guards.get(key)
        if key is None or guards is None or ticket not in guards:
            return
        del guards[ticket]
        if not guards:
            del self._guards[key]
        self._resume(key)

    def clear(self) -> None:
        """Forget all units, and what guards their keys. Keys that are held stay held."""
        self._units.clear()
        self._aside.clear()
        self._resumable.clear()
        self._guards.clear()
        self.messages = self.size_bytes = 0

    def _is_withheld(self, unit: Unit) -> bool:
        if unit.key in self._busy:
            return True
        guards = self._guards.get(unit.key)
        return guards is not None and unit.last > min(guards.values())

    def _resume(self, key: bytes) -> None:
        """Something does not withhold a key any more."""
        if key in self._aside:
            self._resumable.append(key)


class Permits:
    """How many messages the service may send, beside those that wait."""

    def __init__(self, limits: ReceiverLimits) -> None:
        self.outstanding = 0
        """How many are granted and not used; a batch may make it negative."""
        self._limits = limits
        self._expected_bytes = EXPECTED_BYTES
        self._has_come = False  # any message at all

    def use(self, messages: int, size_bytes: int) -> None:
        """A delivery has come: how many messages of it count, and how large it is."""
        self.outstanding -= messages
        if messages > 1:
            size_bytes //= messages
        if not self._has_come:
            self._has_come, self._expected_bytes = True, size_bytes
        less = self._expected_bytes + (size_bytes - self._expected_bytes) // 8
        self._expected_bytes = max(size_bytes, less)  # larger ones count at once

    def grant(self, queue: ReceiverQueue) -> int:
        """How many to grant now, beside what waits: half of what fits, or more, or none. They count
        as granted."""
        limits = self._limits
        room_bytes = max(limits.size_bytes - queue.size_bytes, 0)
        room = room_bytes // max(self._expected_bytes, 1)
        capacity = min(limits.messages, max(1, queue.messages + room))
        free = capacity - queue.messages - self.outstanding
        if free < (capacity + 1) // 2:
            return 0
        self.outstanding += free
        return free

    def clear(self) -> None:
        """None is granted."""
        self.outstanding = 0
