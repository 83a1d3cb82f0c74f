"""Which consumer owns a key: its hash, the hash's slot, and the three ways to divide slots.

    key ──▶ hash, 31 bits ──▶ slot on a ring      1 to 65535
                         └──▶ slot in ranges      0 to 65535, and never 0

Hashes and slots are Pulsar's, so that a key lands where it does in Pulsar. The two kinds of slots
differ by more than an offset: a key has one in each, and they are unrelated. Slot 0 is "no slot" in
Pulsar; a key that would land there lands on 1.

All selectors keep one table: the slots cut into runs, by the last slot of each, and its owner.

    runs' ends          14358        29990              65183
    slots   1 ├───────────┼────────────┼──────────────────┼────────┤ 65535
    owners          7           9               7              7

They differ in how they cut: a Ring at points derived from consumers' names, AutoSplit through the
middle of the widest run, and Sticky where the consumers ask for.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from itertools import chain, count, groupby, pairwise
from operator import itemgetter
from typing import Final, NamedTuple, Protocol

import mmh3

from seqgate.services.errors import DomainError, Kind

RING_SLOT_FIRST: Final = 1
"""The lowest slot of a ring."""

RING_SLOTS: Final = 65_535

RANGE_SLOTS: Final = 65_536
"""Number of slots divided into ranges, with slot 0, which no key has."""

SLOT_MAX: Final = 65_535
"""The highest slot, in a ring and in ranges."""

_HASH_BITS: Final = 0x7FFF_FFFF


def hash31(key: bytes) -> int:
    """MurmurHash3 (x86, 32 bits, seed 0) without its highest bit."""
    return mmh3.hash(key, 0, signed=False) & _HASH_BITS


def ring_slot(key: bytes, slots: int = RING_SLOTS) -> int:
    """A key's slot on a ring of `slots` slots: 1 to slots."""
    return RING_SLOT_FIRST + hash31(key) % slots


def range_slot(key: bytes, slots: int = RANGE_SLOTS) -> int:
    """A key's slot among `slots` slots divided into ranges: 1 to slots - 1. The lowest is never
    used."""
    return hash31(key) % slots or 1


RING_POINTS: Final = 100
"""Points on a ring of a consumer of weight 1 (Pulsar's default)."""

WEIGHT_MAX: Final = 100


class RangeConflict(DomainError):
    """The connected consumer `consumer` already owns the slots `first` to `last`."""

    kind = Kind.IN_USE
    reason = "RANGE_CONFLICT"


class InvalidKeyRange(DomainError):
    """A STICKY consumer names no slots, overlapping ones, or a range that is reversed or outside 0
    to 65,535."""

    kind = Kind.INVALID
    reason = "INVALID_KEY_RANGE"


class NoSlotsLeft(DomainError):
    """Every consumer is down to one slot, so none can be split for another."""

    kind = Kind.EXHAUSTED
    reason = "NO_SLOTS_LEFT"


class SlotRange(NamedTuple):
    """The slots from `first` to `last`, both included."""

    first: int
    last: int


Snapshot = tuple[tuple[SlotRange, int], ...]
"""Ranges and their owners, in the order of slots. Neighbours have different owners; slots without
an owner are left out."""


class Move(NamedTuple):
    """Slots that changed hands; None: they had no owner, or have none now."""

    range: SlotRange
    old: int | None
    new: int | None


class Selector(Protocol):
    """Divides slots among consumers, identified by numbers of the caller's choice."""

    def add(
        self, consumer: int, *, name: str, weight: int = 1, ranges: Sequence[SlotRange] = ()
    ) -> None:
        """Give slots to a new consumer, or raise and change nothing.

        Args:
            name: determines its points on a Ring. Several may have the same.
            weight: 1 to 100; its relative share on a Ring.
            ranges: the slots that it gets from Sticky, 0 to 65535.

        Raises:
            NoSlotsLeft: from AutoSplit, when no consumer has more than one slot.
            InvalidKeyRange, RangeConflict: from Sticky.
        """
        ...

    def remove(self, consumer: int) -> None: ...

    def slot(self, key: bytes) -> int: ...

    def owner(self, slot: int) -> int | None:
        """The owner of a slot that a key can have; None: none."""
        ...

    def ranges(self, consumer: int) -> tuple[SlotRange, ...]:
        """The ranges of a consumer, in order and not adjacent; there may be none. Walks through the
        whole table: use `snapshot` for all consumers."""
        ...

    def snapshot(self) -> Snapshot: ...


def moves(before: Snapshot, after: Snapshot) -> tuple[Move, ...]:
    """The slots that changed owners, in order."""
    found = []
    owners: list[int | None] = [None, None]
    start = 0
    only_before, only_after = set(before).difference(after), set(after).difference(before)
    changes = sorted(chain(_changes(0, only_before), _changes(1, only_after)))
    for slot, at_once in groupby(changes, key=itemgetter(0)):
        old, new = owners
        if old != new:
            found.append(Move(SlotRange(start, slot - 1), old, new))
        for _, begins, side, owner in at_once:
            owners[side] = owner if begins else None
        start = slot
    return tuple(found)


def _changes(
    side: int, runs: Iterable[tuple[SlotRange, int]]
) -> Iterator[tuple[int, bool, int, int]]:
    """The slots at which the ranges of an owner end and start; an end comes before a start at the
    same slot."""
    for (first, last), owner in runs:
        yield first, True, side, owner
        yield last + 1, False, side, owner


class _Table:
    """The slots from `first` to `last`, cut into runs. Every slot is in one, and neighbours have
    different owners."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._ends = [last]
        self._owners: list[int | None] = [None]

    def owner(self, slot: int) -> int | None:
        return self._owners[bisect_left(self._ends, slot)]

    def ranges(self, consumer: int) -> tuple[SlotRange, ...]:
        return tuple(self._run(at) for at, owner in enumerate(self._owners) if owner == consumer)

    def snapshot(self) -> Snapshot:
        return tuple(
            (self._run(at), owner) for at, owner in enumerate(self._owners) if owner is not None
        )

    def _run(self, at: int) -> SlotRange:
        return SlotRange(self._ends[at - 1] + 1 if at else self._first, self._ends[at])

    def _cut(self, runs: Iterable[tuple[int, int | None]]) -> None:
        """Replace the runs: the end of each, in order, up to the last slot, and its owner. A run
        with the same end as the previous one is empty."""
        ends: list[int] = []
        owners: list[int | None] = []
        before = self._first - 1
        for end, owner in runs:
            if end == before:
                continue
            if owners and owners[-1] == owner:
                ends[-1] = end
            else:
                ends.append(end)
                owners.append(owner)
            before = end
        self._ends, self._owners = ends, owners


class Ring(_Table):
    """Consistent hashing: each consumer has `points` on a ring per unit of its weight, and owns the
    slots from the point before, excluded, to its own.

    A consumer that joins takes slots only for itself, and one that leaves gives up only its own; a
    returning consumer regains its slots, since its points follow from its name. A point of several
    consumers belongs to the one that joined first."""

    def __init__(self, points: int = RING_POINTS, size: int = RING_SLOTS) -> None:
        assert points >= 1
        assert 1 <= size <= RING_SLOTS
        super().__init__(RING_SLOT_FIRST, size)
        self._points, self._size = points, size
        self._members: dict[int, _Member] = {}  # in the order in which they joined
        self._is_placed = True

    def add(
        self, consumer: int, *, name: str, weight: int = 1, ranges: Sequence[SlotRange] = ()
    ) -> None:
        del ranges  # they follow from the points
        assert consumer not in self._members
        assert 1 <= weight <= WEIGHT_MAX

        taken = {each.name_index for each in self._members.values() if each.name == name}
        name_index = next(each for each in count() if each not in taken)
        points = ring_points(name, name_index, weight * self._points, self._size)
        self._members[consumer] = _Member(name, name_index, array("H", points))
        self._is_placed = False

    def remove(self, consumer: int) -> None:
        del self._members[consumer]
        self._is_placed = False

    def owner(self, slot: int) -> int | None:
        self._place()
        return super().owner(slot)

    def ranges(self, consumer: int) -> tuple[SlotRange, ...]:
        self._place()
        return super().ranges(consumer)

    def snapshot(self) -> Snapshot:
        self._place()
        return super().snapshot()

    def slot(self, key: bytes) -> int:
        return ring_slot(key, self._size)

    def _place(self) -> None:
        """Divide the slots, once for all joins and leaves since the last time."""
        if self._is_placed:
            return
        self._is_placed = True
        points: dict[int, int] = {}
        for consumer, member in reversed(self._members.items()):
            points.update(dict.fromkeys(member.points, consumer))
        runs = [(point, points[point]) for point in sorted(points)]
        first_owner = runs[0][1] if runs else None
        self._cut([*runs, (self._last, first_owner)])  # the ring closes


class _Member(NamedTuple):
    """A consumer on a ring. Its points take two bytes each: it may have 10,000."""

    name: str
    name_index: int
    points: "array[int]"


def ring_points(name: str, name_index: int, points: int, size: int = RING_SLOTS) -> list[int]:
    """A consumer's points on a ring; some may share a slot. `name_index` distinguishes consumers of
    one name: it is the lowest one free when they join."""
    return [ring_slot(f"{name}\0{name_index}\0{each}".encode(), size) for each in range(points)]


class AutoSplit(_Table):
    """Each consumer has one range of slots: one that joins gets the lower half of the widest range,
    and one that leaves gives its range to the next higher consumer, or, as the highest, to the next
    lower.

    A consumer that joins and leaves at once changes nothing; one that returns gets another range.
    The highest range ends at `size`, one above the highest slot that a key can have (as Pulsar
    reports it)."""

    def __init__(self, size: int = RANGE_SLOTS) -> None:
        assert size >= 2
        super().__init__(0, size)
        self._size = size

    def add(
        self, consumer: int, *, name: str, weight: int = 1, ranges: Sequence[SlotRange] = ()
    ) -> None:
        del name, ranges  # all consumers are alike
        assert consumer not in self._owners
        assert 1 <= weight <= WEIGHT_MAX

        if self._owners == [None]:
            self._owners = [consumer]
            return
        widths = [end - before for before, end in pairwise([0, *self._ends])]
        widest = max(widths)
        if widest <= 1:
            raise NoSlotsLeft("no slot left to split", consumers=len(widths))
        at = widths.index(widest)
        self._ends.insert(at, self._ends[at] - widest // 2)
        self._owners.insert(at, consumer)

    def remove(self, consumer: int) -> None:
        at = self._owners.index(consumer)
        if len(self._owners) == 1:
            self._owners = [None]
            return
        del self._owners[at]
        del self._ends[min(at, len(self._ends) - 2)]  # the highest end stays

    def slot(self, key: bytes) -> int:
        return range_slot(key, self._size)


class Sticky(_Table):
    """Each consumer owns the slots that it names when it joins; the others have no owner. A
    consumer may name several ranges; none may share a slot with another one, its own or a connected
    consumer's."""

    def __init__(self) -> None:
        super().__init__(0, SLOT_MAX)
        self._members: dict[int, tuple[str, list[SlotRange]]] = {}

    def add(
        self, consumer: int, *, name: str, weight: int = 1, ranges: Sequence[SlotRange] = ()
    ) -> None:
        assert consumer not in self._members
        assert 1 <= weight <= WEIGHT_MAX
        ranges = _checked(ranges)
        for each in ranges:
            self._refuse_conflict(each)

        self._members[consumer] = name, ranges
        self._place()

    def remove(self, consumer: int) -> None:
        del self._members[consumer]
        self._place()

    def slot(self, key: bytes) -> int:
        return range_slot(key)

    def _refuse_conflict(self, wanted: SlotRange) -> None:
        ends = self._ends
        for at in range(bisect_left(ends, wanted.first), bisect_left(ends, wanted.last) + 1):
            owner = self._owners[at]
            if owner is not None:
                raise RangeConflict(
                    "ranges overlap those of another consumer",
                    consumer=self._members[owner][0],
                    first=max(wanted.first, ends[at - 1] + 1 if at else 0),
                    last=min(wanted.last, ends[at]),
                )

    def _place(self) -> None:
        held = ((run, owner) for owner, (_, runs) in self._members.items() for run in runs)
        runs: list[tuple[int, int | None]] = []
        for (first, last), owner in sorted(held):
            runs += [(first - 1, None), (last, owner)]
        self._cut([*runs, (self._last, None)])


def _checked(ranges: Sequence[SlotRange]) -> list[SlotRange]:
    """Check the ranges that a consumer names, and sort them."""
    if not ranges:
        raise InvalidKeyRange("ranges is required for STICKY placement", field="ranges")
    for first, last in ranges:
        if not 0 <= first <= last <= SLOT_MAX:
            raise InvalidKeyRange(
                f"range must have 0 <= first <= last <= {SLOT_MAX}",
                field="ranges",
                first=first,
                last=last,
            )
    in_order = sorted(ranges)
    for before, after in pairwise(in_order):
        if after.first <= before.last:
            raise InvalidKeyRange("ranges overlap", field="ranges", slot=after.first)
    return in_order


class Placement(Enum):
    """How hash slots are assigned to consumers; dispatcher.proto describes each."""

    CONSISTENT_HASHING = auto()
    AUTO_SPLIT = auto()
    STICKY = auto()


def selector_of(placement: Placement) -> Selector:
    if placement is Placement.CONSISTENT_HASHING:
        return Ring()
    return AutoSplit() if placement is Placement.AUTO_SPLIT else Sticky()
