"""Topics are found by patterns and partitioned by arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.spark._partitions import Bounds, LedgerRange, matcher, ranges_of, shared
from seqgate.types import Position

LEDGERS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=5
)
"""The distance of each ledger's id from the previous one, its first entry, and its number of
entries."""

POSITIONS = st.builds(Position, st.integers(0, 16), st.integers(0, 12))


def ledgers_of(steps: list[tuple[int, int, int]]) -> list[LedgerRange]:
    ledgers: list[LedgerRange] = []
    ledger_id = 0
    for step, first, entries in steps:
        ledger_id += step
        ledgers.append(LedgerRange(ledger_id, first, first + entries - 1))
    return ledgers


@given(LEDGERS, POSITIONS, POSITIONS, st.integers(1, 7))
def test_ranges_cover_each_entry_once_within_their_limit(
    steps: list[tuple[int, int, int]], start: Position, through: Position, entries_max: int
) -> None:
    ledgers = ledgers_of(steps)
    entries = [
        Position(ledger_id, entry_id)
        for ledger_id, first, last in ledgers
        for entry_id in range(first, last + 1)
    ]
    ranges = list(ranges_of("t", ledgers, Bounds(start, through), entries_max))
    covered = [
        [each for each in entries if (part.after or Position(0, 0)) < each <= part.through]
        for part in ranges
    ]
    wanted = [each for each in entries if start <= each <= through]
    assert [each for part in covered for each in part] == wanted
    assert [len(part) for part in covered] == [part.entries for part in ranges]
    assert all(part.entries <= entries_max for part in ranges)


@given(LEDGERS, st.integers(1, 7))
def test_small_ranges_share_a_task(steps: list[tuple[int, int, int]], entries_max: int) -> None:
    ranges = [
        part for name in "abc" for part in ranges_of(name, ledgers_of(steps), Bounds(), entries_max)
    ]
    tasks = shared(ranges, entries_max)
    assert [part for task in tasks for part in task] == ranges
    assert all(sum(part.entries for part in task) <= entries_max for task in tasks)
    sums = [sum(part.entries for part in task) for task in tasks]
    firsts = [task[0].entries for task in tasks[1:]]
    assert all(s + first > entries_max for s, first in zip(sums[:-1], firsts, strict=True))


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*", "a/b/c", True),
        ("a/b/*", "a/b/c", True),
        ("a/b/*", "a/bb/c", False),
        ("a/b/c-?", "a/b/c-1", True),
        ("a/b/c-?", "a/b/c-12", False),
        ("a/b/c.?", "a/b/cx1", False),
        ("*/c", "a/b/c", True),
    ],
)
def test_topic_patterns_select_topics(pattern: str, name: str, matches: bool) -> None:
    assert bool(matcher(pattern).fullmatch(name)) is matches
