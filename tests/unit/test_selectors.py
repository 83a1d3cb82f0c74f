"""The owners of slots, against known vectors and random histories."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, groupby, pairwise
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from seqgate.services.dispatcher.core.selectors import (
    RING_SLOTS,
    SLOT_MAX,
    WEIGHT_MAX,
    AutoSplit,
    InvalidKeyRange,
    Move,
    NoSlotsLeft,
    RangeConflict,
    Ring,
    Selector,
    SlotRange,
    Snapshot,
    Sticky,
    moves,
    ring_points,
)

C1, C2, C3 = 1, 2, 3
WHOLE = SlotRange(0, SLOT_MAX)


def spans(*pairs: tuple[int, int]) -> tuple[SlotRange, ...]:
    return tuple(SlotRange(*each) for each in pairs)


def ring(*names: str, points: int = 100) -> Ring:
    """Consumers 1, 2, 3 and so on, which joined in this order."""
    made = Ring(points)
    for consumer, name in enumerate(names, start=1):
        made.add(consumer, name=name)
    return made


def owners(snapshot: Snapshot) -> dict[int, int]:
    """The owner of each slot that has one."""
    found: dict[int, int] = {}
    for (first, last), owner in snapshot:
        assert first <= last
        assert first > max(found, default=-1)
        found.update(dict.fromkeys(range(first, last + 1), owner))
    return found


def shares(selector: Selector) -> Counter[int]:
    """The number of slots of each consumer."""
    found: Counter[int] = Counter()
    for (first, last), owner in selector.snapshot():
        found[owner] += last - first + 1
    return found


def owner_of(selector: Selector, key: str) -> int | None:
    return selector.owner(selector.slot(key.encode()))


def changed(before: Snapshot, after: Snapshot) -> dict[int, tuple[int | None, int | None]]:
    """The slots in `moves`, each with its old and new owner."""
    found: dict[int, tuple[int | None, int | None]] = {}
    for (first, last), old, new in moves(before, after):
        assert first > max(found, default=-1)
        found.update(dict.fromkeys(range(first, last + 1), (old, new)))
    return found


# A ring, against Pulsar's tests and known vectors.


def test_three_points_each_give_the_ranges_of_pulsars_test() -> None:
    selector = ring("consumer1", "consumer2", "consumer3", points=3)

    assert selector.ranges(C1) == spans((14359, 18366), (29991, 39817), (52980, 60442))
    assert selector.ranges(C2) == spans((1, 6668), (39818, 52979), (60443, 63679), (65184, 65535))
    assert selector.ranges(C3) == spans((6669, 14358), (18367, 29990), (63680, 65183))


def test_a_consumer_has_the_expected_points() -> None:
    assert ring_points("c1", 0, 5) == [34662, 61273, 23534, 54464, 29173]


def test_three_consumers_have_299_points_since_two_of_300_collide() -> None:
    points = [set(ring_points(name, 0, 100)) for name in ("c1", "c2", "c3")]
    assert [len(points[0]), len(points[0] | points[1])] == [100, 200]
    assert len(points[0] | points[1] | points[2]) == 299


def test_three_consumers_own_the_expected_ranges() -> None:
    selector = ring("c1", "c2", "c3")

    assert shares(selector) == {C1: 20340, C2: 21396, C3: 23799}
    assert [owner_of(selector, f"key-{number}") for number in range(12)] == [
        C3, C2, C3, C2, C1, C2, C3, C2, C2, C2, C1, C1,
    ]  # fmt: skip
    of_others = ["0", "1", "2", "9", "10", "100", "slowKey", "anyKey", "order-12345"]
    assert [owner_of(selector, key) for key in of_others] == [
        C2, C2, C3, C2, C3, C2, C3, C2, C3,
    ]  # fmt: skip


def test_two_consumers_own_the_expected_ranges() -> None:
    selector = ring("c1", "c2")

    assert shares(selector) == {C1: 30966, C2: 34569}
    keys = [f"key-{number}" for number in range(8)]
    assert [owner_of(selector, key) for key in keys] == [C1, C2, C1, C2, C1, C2, C1, C2]
    assert owner_of(selector, "slowKey") == C2


def test_a_joining_consumer_takes_slots_only_for_itself() -> None:
    selector = ring("c1", "c2")
    before = selector.snapshot()
    selector.add(C3, name="c3")

    found = changed(before, selector.snapshot())
    assert len(found) == 23799
    assert {new for _, new in found.values()} == {C3}


def test_a_leaving_consumer_gives_up_only_its_slots_and_regains_them() -> None:
    selector = ring("c1", "c2", "c3")
    before = selector.snapshot()
    selector.remove(C2)

    found = changed(before, selector.snapshot())
    assert len(found) == 21396
    assert {old for old, _ in found.values()} == {C2}
    assert shares(selector) == {C1: 32020, C3: 33515}

    selector.add(C2, name="c2")
    assert selector.snapshot() == before


def test_another_order_of_joins_gives_16_slots_another_owner() -> None:
    one, other = Ring(), Ring()
    for consumer in (C1, C2, C3):
        one.add(consumer, name=f"c{consumer}")
    for consumer in (C3, C2, C1):
        other.add(consumer, name=f"c{consumer}")
    assert len(changed(one.snapshot(), other.snapshot())) == 16


def test_two_consumers_of_one_name_share_all_slots() -> None:
    selector = ring("w", "w")

    assert shares(selector) == {1: 32207, 2: 33328}
    assert sorted(owners(selector.snapshot())) == list(range(1, RING_SLOTS + 1))
    assert [owner_of(selector, f"key-{number}") for number in range(3)] == [1, 2, 1]


def test_equal_names_take_the_lowest_free_index() -> None:
    selector = ring("w", "w", "w", points=3)
    before = selector.snapshot()
    selector.remove(2)
    selector.remove(1)
    selector.add(1, name="w")
    selector.add(2, name="w")
    assert selector.snapshot() == before


@pytest.mark.parametrize(
    ("consumers", "least", "most"), [(2, 0.85, 1.15), (10, 0.91, 1.19), (100, 0.70, 1.23)]
)
def test_shares_on_a_ring_are_unequal_within_bounds(
    consumers: int, least: float, most: float
) -> None:
    selector = ring(*(f"consumer-{number}" for number in range(consumers)))
    mean = RING_SLOTS / consumers
    of_mean = [share / mean for share in shares(selector).values()]
    assert (round(min(of_mean), 2), round(max(of_mean), 2)) == (least, most)


def test_a_threefold_weight_gives_threefold_points() -> None:
    selector = ring("c1", "c2")
    before = selector.snapshot()
    selector.add(C3, name="c3", weight=3)

    assert ring_points("c3", 0, 300)[:100] == ring_points("c3", 0, 100)
    assert 0.5 < shares(selector)[C3] / RING_SLOTS < 0.7
    assert {new for _, new in changed(before, selector.snapshot()).values()} == {C3}
    selector.remove(C3)
    assert selector.snapshot() == before


def test_the_largest_weight_is_100() -> None:
    selector = Ring(points=2)
    selector.add(C1, name="c1", weight=WEIGHT_MAX)
    with pytest.raises(AssertionError):
        selector.add(C2, name="c2", weight=WEIGHT_MAX + 1)
    assert selector.snapshot() == ((SlotRange(1, SLOT_MAX), C1),)


def test_a_consumer_whose_points_all_collide_owns_nothing_until_the_others_leave() -> None:
    selector = Ring(points=40, size=3)
    selector.add(C1, name="c1")
    selector.add(C2, name="c2")
    selector.add(C3, name="c3")
    assert set(ring_points("c1", 0, 40, 3)) == set(ring_points("c2", 0, 40, 3)) == {1, 2, 3}

    assert selector.ranges(C2) == ()
    assert selector.ranges(C1) == spans((1, 3))
    selector.remove(C1)
    assert selector.ranges(C2) == spans((1, 3))
    assert selector.ranges(C3) == ()


def test_messages_without_a_key_reach_all_consumers() -> None:
    selector = ring("c1", "c2", "c3")
    keys = [f"p-{each}".encode() for each in range(300)]
    found = Counter(selector.owner(selector.slot(key)) for key in keys)
    assert set(found) == {C1, C2, C3}
    assert min(found.values()) > 50


# Ranges that are split.


def test_ranges_split_and_join_as_consumers_join_and_leave() -> None:
    selector = AutoSplit()
    a, b, c, d, e, f = range(1, 7)

    def table() -> dict[int, tuple[int, int]]:
        return {owner: (first, last) for (first, last), owner in selector.snapshot()}

    selector.add(a, name="A")
    assert table() == {a: (0, 65536)}
    selector.add(b, name="B")
    assert table() == {b: (0, 32768), a: (32769, 65536)}
    selector.add(c, name="C")
    assert table() == {c: (0, 16384), b: (16385, 32768), a: (32769, 65536)}
    selector.add(d, name="D")
    assert table()[d] == (32769, 49152)
    assert table()[a] == (49153, 65536)
    selector.add(e, name="E")
    assert table()[e] == (0, 8192)
    assert table()[c] == (8193, 16384)
    selector.remove(b)
    assert table()[d] == (16385, 49152)
    selector.remove(a)
    assert table()[d] == (16385, 65536)
    selector.add(f, name="F")
    assert table() == {
        e: (0, 8192),
        c: (8193, 16384),
        f: (16385, 40960),
        d: (40961, 65536),
    }


def test_four_consumers_of_64_slots_have_the_ranges_of_pulsars_test() -> None:
    selector = AutoSplit(size=64)
    for consumer in range(1, 5):
        selector.add(consumer, name="equal")
    assert [selector.ranges(consumer) for consumer in range(1, 5)] == [
        spans((49, 64)),
        spans((17, 32)),
        spans((0, 16)),
        spans((33, 48)),
    ]


def test_a_joining_consumer_gets_the_larger_half_of_an_odd_range() -> None:
    selector = AutoSplit(size=7)
    for consumer in range(1, 5):
        selector.add(consumer, name="equal")
    assert [selector.ranges(consumer) for consumer in range(1, 5)] == [
        spans((7, 7)),
        spans((3, 4)),
        spans((0, 2)),
        spans((5, 6)),
    ]


def test_a_consumer_without_a_free_slot_is_refused_alone() -> None:
    selector = AutoSplit(size=2)
    selector.add(C1, name="c1")
    selector.add(C2, name="c2")
    before = selector.snapshot()
    assert before == ((SlotRange(0, 1), C2), (SlotRange(2, 2), C1))

    with pytest.raises(NoSlotsLeft) as refused:
        selector.add(C3, name="c3")
    assert refused.value.details == {"consumers": 2}
    assert selector.snapshot() == before
    assert owner_of(selector, "key-0") == C2

    selector.remove(C2)
    selector.add(C3, name="c3")
    assert selector.ranges(C3) == spans((0, 1))


def test_a_key_with_hash_0_belongs_to_the_lowest_range() -> None:
    selector = AutoSplit()
    selector.add(C1, name="c1")
    selector.add(C2, name="c2")
    assert selector.slot(b"key-30884") == 1
    assert owner_of(selector, "key-30884") == C2


# Ranges that consumers name.


def sticky(*ranges: list[tuple[int, int]]) -> Sticky:
    """Consumers 1, 2, 3 and so on with these ranges."""
    made = Sticky()
    for consumer, each in enumerate(ranges, start=1):
        made.add(consumer, name=f"c{consumer}", ranges=spans(*each))
    return made


def test_a_key_goes_to_the_consumer_that_named_its_slot() -> None:
    selector = sticky([(0, 32767)], [(32768, 65535)])
    assert selector.slot(b"a") == 27058
    assert selector.slot(b"A") == 63438
    assert [owner_of(selector, "a"), owner_of(selector, "A")] == [C1, C2]
    assert [selector.owner(slot) for slot in (1, 32767, 32768, 65535)] == [C1, C1, C2, C2]


@pytest.mark.parametrize(
    ("ranges", "details"),
    [
        ([], {}),
        ([(5, 4)], {"first": 5, "last": 4}),
        ([(-1, 4)], {"first": -1, "last": 4}),
        ([(0, 65536)], {"first": 0, "last": 65536}),
        ([(65536, 65536)], {"first": 65536, "last": 65536}),
        ([(0, 9), (12, 11)], {"first": 12, "last": 11}),
        ([(0, 9), (5, 6)], {"slot": 5}),
        ([(20, 30), (10, 20)], {"slot": 20}),  # both include their ends
        ([(7, 7), (7, 7)], {"slot": 7}),
    ],
)
def test_invalid_ranges_are_refused(ranges: list[tuple[int, int]], details: dict[str, int]) -> None:
    selector = sticky([(40, 50)])
    before = selector.snapshot()
    with pytest.raises(InvalidKeyRange) as refused:
        selector.add(C2, name="c2", ranges=spans(*ranges))
    assert refused.value.field == "ranges"
    assert refused.value.details == details
    assert selector.snapshot() == before


@pytest.mark.parametrize(
    ("wanted", "consumer", "first", "last"),
    [
        ([(100, 199)], "c1", 100, 199),
        ([(150, 160)], "c1", 150, 160),
        ([(0, 100)], "c1", 100, 100),
        ([(199, 250)], "c1", 199, 199),
        ([(0, 65535)], "c1", 100, 199),
        ([(200, 299), (310, 400)], "c2", 310, 349),
        ([(349, 349)], "c2", 349, 349),
        ([(60000, 65535)], "c1", 65535, 65535),
    ],
)
def test_owned_slots_are_refused_with_their_owner(
    wanted: list[tuple[int, int]], consumer: str, first: int, last: int
) -> None:
    selector = sticky([(100, 199), (65535, 65535)], [(300, 349)])
    before = selector.snapshot()
    with pytest.raises(RangeConflict) as refused:
        selector.add(C3, name="c3", ranges=spans(*wanted))
    assert refused.value.details == {"consumer": consumer, "first": first, "last": last}
    assert selector.owner(first) == {"c1": C1, "c2": C2}[consumer]
    assert selector.snapshot() == before

    selector.remove(C1)
    selector.remove(C2)
    selector.add(C3, name="c3", ranges=spans(*wanted))
    assert selector.ranges(C3) == spans(*wanted)


def test_an_unnamed_range_has_no_owner() -> None:
    selector = sticky([(0, 9)], [(20, 29)])
    assert [selector.owner(slot) for slot in (9, 10, 19, 20, 30, 65535)] == [
        C1, None, None, C2, None, None,
    ]  # fmt: skip

    before = selector.snapshot()
    selector.add(C3, name="c3", ranges=spans((10, 19)))
    assert moves(before, selector.snapshot()) == (Move(SlotRange(10, 19), None, C3),)
    selector.remove(C1)
    assert selector.owner(9) is None
    assert selector.snapshot() == ((SlotRange(10, 19), C3), (SlotRange(20, 29), C2))


def test_adjacent_ranges_are_reported_as_one() -> None:
    selector = sticky([(30, 40), (10, 20), (21, 29), (42, 42)])
    assert selector.ranges(C1) == spans((10, 40), (42, 42))
    assert selector.ranges(C2) == ()


EDGES = [0, 1, 2, 3, 4, 100, 101, 65533, 65534, 65535]
"""The bounds of ranges. Slots between two of these, and near none, are all alike."""

PROBES = [0, 1, 2, 3, 4, 5, 99, 100, 101, 102, 65532, 65533, 65534, 65535]

edges = st.sampled_from(EDGES)


def probes(wanted: SlotRange) -> set[int]:
    return {slot for slot in PROBES if wanted.first <= slot <= wanted.last}


@given(
    st.lists(
        st.integers(0, 9) | st.lists(st.builds(SlotRange, edges, edges), max_size=3), max_size=15
    )
)
def test_named_ranges_are_owned_exactly(steps: list[int | list[SlotRange]]) -> None:
    selector = Sticky()
    held: dict[int, set[int]] = {}
    for consumer, step in enumerate(steps):
        if isinstance(step, int):
            if held:
                leaver = list(held)[step % len(held)]
                del held[leaver]
                selector.remove(leaver)
        else:
            slots = [slot for each in step for slot in probes(each)]
            refusal: type[Exception] | None = None
            if not step or not all(map(probes, step)) or len(slots) > len(set(slots)):
                refusal = InvalidKeyRange
            elif any(not each.isdisjoint(slots) for each in held.values()):
                refusal = RangeConflict
            if refusal is None:
                selector.add(consumer, name="c", ranges=step)
                held[consumer] = set(slots)
            else:
                before = selector.snapshot()
                with pytest.raises(refusal):
                    selector.add(consumer, name="c", ranges=step)
                assert selector.snapshot() == before
        expected = {slot: owner for owner, each in held.items() for slot in each}
        assert {slot: selector.owner(slot) for slot in PROBES} == {
            slot: expected.get(slot) for slot in PROBES
        }
        snapshot = selector.snapshot()
        assert {slot: owner for run, owner in snapshot for slot in probes(run)} == expected
        assert all(one.last < other.first for (one, _), (other, _) in pairwise(snapshot))


# Any history. Few slots, so that each one is checked and points collide.

RING_SIZE, SPLIT_SIZE = 60, 13

histories = st.lists(
    st.tuples(st.sampled_from("xyz"), st.integers(1, 3)) | st.integers(0, 9), max_size=25
)
"""A joining consumer, by name and weight, or the index of a leaving one."""

selectors = pytest.mark.parametrize(
    ("make", "slots"),
    [
        (lambda: Ring(points=4, size=RING_SIZE), range(1, RING_SIZE + 1)),
        (lambda: AutoSplit(SPLIT_SIZE), range(SPLIT_SIZE + 1)),
    ],
    ids=["ring", "auto_split"],
)


class History:
    """A selector, and its consumers in the order in which they joined."""

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.present: dict[int, tuple[str, int]] = {}
        self._next = count(1)

    def steps(
        self, history: list[tuple[str, int] | int]
    ) -> Iterator[tuple[Snapshot, int | None, int | None]]:
        """The snapshot before each step, and the consumer that joined or left."""
        for step in history:
            before = self.selector.snapshot()
            if isinstance(step, int):
                if self.present:
                    leaver = list(self.present)[step % len(self.present)]
                    del self.present[leaver]
                    self.selector.remove(leaver)
                    yield before, None, leaver
                continue
            joiner, (name, weight) = next(self._next), step
            try:
                self.selector.add(joiner, name=name, weight=weight)
            except NoSlotsLeft:
                assert self.selector.snapshot() == before
                continue
            self.present[joiner] = step
            yield before, joiner, None


@selectors
@given(history=histories)
def test_every_slot_has_one_owner_in_the_snapshot(
    make: Callable[[], Selector], slots: range, history: list[tuple[str, int] | int]
) -> None:
    world = History(make())
    for _ in world.steps(history):
        snapshot = world.selector.snapshot()
        expected = owners(snapshot)
        assert sorted(expected) == (list(slots) if world.present else [])
        assert [world.selector.owner(slot) for slot in slots] == [
            expected.get(slot) for slot in slots
        ]
        assert all(one != other for (_, one), (_, other) in pairwise(snapshot))
        for consumer in world.present:
            runs = world.selector.ranges(consumer)
            assert runs == tuple(run for run, owner in snapshot if owner == consumer)


@selectors
@given(history=histories)
def test_slots_move_only_to_joining_and_from_leaving_consumers(
    make: Callable[[], Selector], slots: range, history: list[tuple[str, int] | int]
) -> None:
    world = History(make())
    for before, joiner, leaver in world.steps(history):
        found = changed(before, world.selector.snapshot())
        if joiner is not None:
            assert {new for _, new in found.values()} <= {joiner}
        else:
            assert {old for old, _ in found.values()} == (
                {leaver} if leaver in owners(before).values() else set()
            )


@selectors
@given(history=histories)
def test_an_undone_join_changes_nothing(
    make: Callable[[], Selector], slots: range, history: list[tuple[str, int] | int]
) -> None:
    world = History(make())
    for before, joiner, _ in world.steps(history):
        if joiner is not None:
            after = world.selector.snapshot()
            name, weight = world.present[joiner]
            world.selector.remove(joiner)
            assert world.selector.snapshot() == before
            world.selector.add(joiner, name=name, weight=weight)
            assert world.selector.snapshot() == after


@given(histories)
def test_a_slot_belongs_to_the_first_holder_of_the_next_point(
    history: list[tuple[str, int] | int],
) -> None:
    world = History(Ring(points=4, size=RING_SIZE))
    indexes: dict[int, int] = {}
    for _, joiner, leaver in world.steps(history):
        if leaver is not None:
            del indexes[leaver]
        if joiner is not None:
            name, _ = world.present[joiner]
            used = {at for other, at in indexes.items() if world.present[other][0] == name}
            indexes[joiner] = min(set(range(len(used) + 1)) - used)
        points: dict[int, int] = {}
        for consumer, (name, weight) in world.present.items():
            for point in ring_points(name, indexes[consumer], 4 * weight, RING_SIZE):
                points.setdefault(point, consumer)
        for slot in range(1, RING_SIZE + 1):
            around = [*range(slot, RING_SIZE + 1), *range(1, slot)]
            assert world.selector.owner(slot) == next(
                (points[each] for each in around if each in points), None
            )


@given(
    st.lists(st.text(max_size=5), min_size=1, max_size=8, unique=True),
    st.randoms(use_true_random=False),
)
def test_without_collisions_the_order_of_joins_does_not_matter(
    names: list[str], random: Random
) -> None:
    points = [point for name in names for point in set(ring_points(name, 0, 5))]
    assume(len(set(points)) == len(points))
    selector, again = Ring(points=5), Ring(points=5)
    for consumer, name in enumerate(names):
        selector.add(consumer, name=name)
    before = selector.snapshot()

    leaver = random.randrange(len(names))
    selector.remove(leaver)
    selector.add(leaver, name=names[leaver])
    assert selector.snapshot() == before
    for consumer in random.sample(range(len(names)), len(names)):
        again.add(consumer, name=names[consumer])
    assert again.snapshot() == before


@given(histories)
def test_split_ranges_stay_contiguous_per_consumer(
    history: list[tuple[str, int] | int],
) -> None:
    world = History(AutoSplit(SPLIT_SIZE))
    for before, joiner, leaver in world.steps(history):
        after = world.selector.snapshot()
        assert sorted(owner for _, owner in after) == sorted(world.present)
        moved = moves(before, after)
        assert len(moved) <= 1
        if joiner is not None and before:
            # Only slots that a key can have, so without slot 0.
            widths = [last - max(first - 1, 0) for (first, last), _ in before]
            (given_up,) = moved
            at = widths.index(max(widths))
            assert (given_up.old, given_up.range.first) == (before[at][1], before[at][0].first)
            assert given_up.range.last == before[at][0].last - max(widths) // 2
        if leaver is not None and after:
            order = [owner for _, owner in before]
            at = order.index(leaver)
            heir = order[at + 1] if at + 1 < len(order) else order[at - 1]
            assert moved == (Move(before[at][0], leaver, heir),)


def snapshot_of(table: list[int | None]) -> Snapshot:
    found, start = [], 0
    for owner, run in groupby(table):
        end = start + len(list(run))
        if owner is not None:
            found.append((SlotRange(start, end - 1), owner))
        start = end
    return tuple(found)


tables = st.lists(st.none() | st.integers(1, 3), max_size=16)


@given(tables, tables)
def test_moves_are_the_differences_between_snapshots(
    before: list[int | None], after: list[int | None]
) -> None:
    length = max(len(before), len(after))
    before += [None] * (length - len(before))
    after += [None] * (length - len(after))

    found = moves(snapshot_of(before), snapshot_of(after))
    named = {
        slot: (old, new) for (first, last), old, new in found for slot in range(first, last + 1)
    }
    assert named == {
        slot: pair
        for slot, pair in enumerate(zip(before, after, strict=True))
        if pair[0] != pair[1]
    }
    assert all(
        one.range.last + 1 < other.range.first or one[1:] != other[1:]
        for one, other in pairwise(found)
    )
