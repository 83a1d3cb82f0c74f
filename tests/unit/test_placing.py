"""Where topics go, and what became of moves: services/placement/core/placing.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.placement.core.placing import (
    Holding,
    Item,
    Outcome,
    Page,
    Placement,
    State,
    fewest,
    merged,
    outcome,
)

SEALED = Holding("t", State.SEALED, 5, "m", "b")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (None, Outcome.UNDECIDED),
        (Placement("t", "a", 5, ""), Outcome.UNDECIDED),
        (Placement("t", "a", 4, ""), Outcome.UNDECIDED),  # the keeper came back with older records
        (Placement("t", "b", 6, "m"), Outcome.MOVED),
        (Placement("t", "a", 6, ""), Outcome.STAYED),
        (Placement("t", "c", 7, "n"), Outcome.MOVED),  # and moved on from there
    ],
)
def test_what_became_of_a_move_is_what_the_record_says(
    record: Placement | None, expected: Outcome
) -> None:
    assert outcome(SEALED, record, "a") is expected


def test_the_fewest_of_several_is_the_first() -> None:
    assert fewest(["a", "b", "c"], {"a": 1}) == "b"
    assert fewest(["a", "b", "c"], {"a": 1, "b": 1, "c": 1}) == "a"
    assert fewest(["a", "b"], {"gone": 0, "a": 3, "b": 2}) == "b"


def page(names: list[str], limit: int) -> Page[str]:
    """What an instance lists that has these."""
    items = [Item((name,), name, len(name)) for name in sorted(names)]
    return Page(items[:limit], len(items) > limit)


@given(
    st.lists(st.lists(st.text("abc", min_size=1, max_size=4), unique=True), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 12),
)
def test_pages_of_all_together_list_everything_in_order(
    instances: list[list[str]], limit: int, bytes_max: int
) -> None:
    everything = sorted({name for names in instances for name in names})
    found: list[str] = []
    while True:
        after = found[-1] if found else ""
        pages = [page([name for name in names if name > after], limit) for names in instances]
        values, more = merged(pages, limit=limit, bytes_max=bytes_max)
        assert len(values) <= limit
        assert len(values) <= 1 or sum(map(len, values)) <= bytes_max
        found += values
        if not more:
            break
        assert values
    assert found == everything
