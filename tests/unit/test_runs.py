"""services/ledger/core/runs.py: a run is its publications."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.ledger.core.entry import Entry, Unit, unit_of
from seqgate.services.ledger.core.runs import RUN_BYTES_MAX, RUN_ENTRIES_MAX, Runs
from seqgate.services.ledger.core.writer import Limits
from tests.support.entries import batch, chunk, marker, single

LIMITS = Limits()


def cut(
    *publications: tuple[int, Sequence[Entry]],
    resume: Sequence[int] = (),
    limits: Limits = LIMITS,
) -> list[Unit]:
    runs = Runs(1, limits)
    for request_id, entries in publications:
        runs.add(request_id, entries, resume=request_id in resume)
    return runs.end()


def shapes(units: Sequence[Unit]) -> list[list[int]]:
    """The request ids of each unit."""
    return [list(each.request_ids) for each in units]


def test_single_entries_with_rising_ids_are_a_run() -> None:
    (run,) = cut((4, [single(1)]), (5, [single(7)]), (6, [batch([8, 9])]))
    assert (run.request_id, run.publications, run.lowest, run.highest) == (4, 3, 1, 9)
    assert (run.message_count, run.size_bytes) == (4, sum(each.size_bytes for each in run.entries))


def test_what_differs_is_a_unit_alone() -> None:
    alone = {
        2: [marker(2)],
        4: [chunk(4, "a", 0, 2)],
        6: [single(6), single(7)],
    }
    units = cut(*((each, alone.get(each, [single(each)])) for each in range(1, 9)))
    assert shapes(units) == [[1], [2], [3], [4], [5], [6], [7, 8]]


def test_a_gap_between_request_ids_ends_a_run() -> None:
    assert shapes(cut((1, [single(1)]), (2, [single(2)]), (4, [single(3)]))) == [[1, 2], [4]]


def test_ids_that_do_not_rise_end_a_run() -> None:
    ids = [1, 2, 2, 3, 1]
    units = cut(*((place, [single(each)]) for place, each in enumerate(ids)))
    assert shapes(units) == [[0, 1], [2, 3], [4]]


def test_a_resume_begins_a_run() -> None:
    units = cut(*((each, [single(each)]) for each in range(4)), resume=[0, 2])
    assert shapes(units) == [[0, 1], [2, 3]]
    assert [each.resume for each in units] == [True, True]
    assert [each.resume for unit in units for each in unit.divided()] == [True, False] * 2


def test_runs_are_bounded() -> None:
    few = cut(*((each, [single(each)]) for each in range(RUN_ENTRIES_MAX + 1)))
    assert [each.publications for each in few] == [RUN_ENTRIES_MAX, 1]
    half = b"x" * (RUN_BYTES_MAX // 2)
    large = cut(*((each, [single(each, payload=half)]) for each in range(3)))
    assert [each.publications for each in large] == [1, 1, 1]


def test_runs_keep_to_the_limits_of_a_group() -> None:
    four = [(each, [single(each, payload=b"x" * 600)]) for each in range(4)]
    assert shapes(cut(*four, limits=Limits(group_entries_max=3))) == [[0, 1, 2], [3]]
    assert shapes(cut(*four, limits=Limits(group_bytes_max=1_300))) == [[0, 1], [2, 3]]


ENTRIES = st.integers(0, 20).flatmap(
    lambda lowest: st.sampled_from(
        [
            [single(lowest)],
            [single(lowest)],
            [batch([lowest, lowest + 2])],
            [marker(lowest)],
            [chunk(lowest, "a", 0, 2)],
            [single(lowest), single(lowest + 1)],
        ]
    )
)


@given(st.lists(st.tuples(st.integers(0, 2), ENTRIES, st.booleans())))
def test_a_run_is_its_publications(given: list[tuple[int, list[Entry], bool]]) -> None:
    runs, expected, request_id = Runs(3, LIMITS), [], 0
    for distance, entries, resume in given:
        request_id += distance + 1
        runs.add(request_id, entries, resume=resume)
        expected.append(unit_of(3, request_id, entries, resume=resume))
    units = runs.end()
    assert [each for unit in units for each in unit.divided()] == expected
    for unit in units:
        parts = unit.divided()
        assert unit.size_bytes == sum(each.size_bytes for each in parts)
        assert unit.message_count == sum(each.message_count for each in parts)
        assert (unit.lowest, unit.highest) == (parts[0].lowest, parts[-1].highest)
