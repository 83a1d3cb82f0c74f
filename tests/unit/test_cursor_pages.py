"""Sets of small numbers as ints, against sets."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.cursor.core import pages

numbers = st.sets(st.integers(0, 200))


def packed(members: set[int]) -> int:
    return sum(1 << each for each in members)


@given(numbers)
def test_the_union_of_the_runs_of_a_set_is_the_set(members: set[int]) -> None:
    runs = list(pages.runs(packed(members)))

    assert {each for first, last in runs for each in range(first, last + 1)} == members
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(runs))
    if runs:
        assert pages.union(runs) == packed(members)


def test_adjacent_runs_merge() -> None:
    assert pages.union([(0, 0), (1, 7), (8, 8), (63, 64)]) == packed({*range(9), 63, 64})


@given(numbers, st.integers(0, 210))
def test_consecutive_entries_are_counted(members: set[int], start: int) -> None:
    count = 0
    while start + count in members:
        count += 1
    assert pages.ones_from(packed(members), start) == count


def test_a_full_page_is_counted_as_one_run() -> None:
    assert pages.ones_from(pages.first(65_536), 1) == 65_535
    assert pages.first(0) == 0
