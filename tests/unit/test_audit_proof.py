"""Every violation in a log is found, and correct logs pass."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.jobs.audit.proof import Kind, Line, Row, findings
from seqgate.types import Position

GAPS = {(1, 3): [1, 3], (2, 4): [2, 4], (1, 4): [1, 4]}


def rows(*entries: tuple[object, ...], apart: int = 1) -> list[Row]:
    """Entries by their ids: (lowest, highest, messages), or a chunk (id, uuid, chunk_id, of)."""
    found = []
    for index, entry in enumerate(entries):
        position = Position(1, index * apart)
        match entry:
            case (int(lowest), str(uuid), int(chunk_id), int(num_chunks)):
                found.append(Row(position, lowest, lowest, None, uuid, chunk_id, num_chunks))
            case (int(lowest), int(highest), int(messages)):
                found.append(Row(position, lowest, highest, messages))
            case (int(lowest),):
                found.append(Row(position, lowest, lowest))
    return found


def ids(row: Row) -> list[int]:
    return GAPS[row.lowest, row.highest]


def kinds(found: list[Row]) -> list[tuple[str, int]]:
    return [(each.kind, each.entry.entry_id) for each in findings(found, ids)]


@pytest.mark.parametrize(
    ("entries", "wrong"),
    [
        ([(1,), (2,), (7,)], []),
        ([(1,), (2, 5, 4), (6,)], []),
        ([(1,), (1,)], [(Kind.TWICE, 1)]),
        ([(2,), (1,)], [(Kind.BACKWARDS, 1)]),
        ([(2,), (1,), (1,)], [(Kind.BACKWARDS, 1), (Kind.TWICE, 2)]),
        ([(1, 5, 5), (4, 8, 5)], [(Kind.TWICE, 1)]),
        ([(1, 3, 2), (2, 4, 2)], []),  # one flush by key
        ([(1, 3, 2), (2,)], [(Kind.BACKWARDS, 1)]),
        ([(1, 3, 2), (3,)], [(Kind.TWICE, 1)]),
        ([(2,), (1, 3, 2)], []),
        ([(1,), (2,), (1, 4, 2)], [(Kind.TWICE, 2)]),
        ([(5, "a", 0, 2), (5, "a", 1, 2), (6,)], []),
        ([(5, "a", 0, 2), (5, "a", 1, 2), (5,)], [(Kind.TWICE, 2)]),
        ([(5, "a", 0, 2), (5, "b", 0, 2), (5, "b", 1, 2)], []),  # attempt a was aborted
        ([(5, "a", 0, 2), (5,), (6,)], []),  # published as one entry
        ([(5, "a", 0, 2), (6,)], []),
        ([(5, "a", 0, 2), (6,), (5, "a", 1, 2)], [(Kind.STRAY, 2)]),
        ([(5, "a", 0, 3), (5, "a", 0, 3)], [(Kind.CHUNK_TWICE, 1)]),
        ([(5, "a", 0, 3), (5, "a", 1, 3), (5, "a", 1, 3)], [(Kind.CHUNK_TWICE, 2)]),
        ([(5, "a", 0, 3), (5, "b", 0, 3), (5, "a", 0, 3)], [(Kind.CHUNK_TWICE, 2)]),
        ([(5, "a", 0, 3), (5, "a", 2, 3)], [(Kind.STRAY, 1)]),
        ([(5, "a", 1, 2), (6,)], []),  # its beginning may be trimmed
        (
            [(5, "a", 0, 2), (5, "a", 1, 2), (5, "b", 0, 2), (5, "b", 1, 2)],
            [(Kind.BACKWARDS, 2), (Kind.TWICE, 3)],
        ),
        ([(5,), (4, "a", 0, 2)], [(Kind.BACKWARDS, 1)]),
    ],
)
def test_anomalies_are_named(
    entries: list[tuple[object, ...]], wrong: list[tuple[str, int]]
) -> None:
    assert kinds(rows(*entries)) == wrong


def test_overlapping_batches_that_are_not_adjacent_go_backwards() -> None:
    found = findings(rows((1, 3, 2), (2, 4, 2), apart=2), ids)
    assert [each.kind for each in found] == [Kind.BACKWARDS]


def test_a_finding_counts_its_ids_and_names_their_first_position() -> None:
    (found,) = findings(rows((1, 5, 5), (9,), (4, 12, 9)), ids)
    assert (found.sequence_id, found.ids) == (4, 3)
    assert (found.earlier, found.entry) == (Position(1, 0), Position(1, 2))


@given(st.integers(0, 10_000))
def test_duplicate_ids_are_always_found(seed: int) -> None:
    random = Random(seed)
    entries = []
    for _ in range(30):
        lowest = random.randint(0, 60)
        entries.append((lowest, lowest + (messages := random.randint(1, 4)) - 1, messages))
    found = {
        each.entry.entry_id
        for each in findings(rows(*entries, apart=1), ids)
        if each.kind is Kind.TWICE
    }
    seen: set[int] = set()
    twice = set()
    for index, (lowest, highest, _) in enumerate(entries):
        numbers = set(range(lowest, highest + 1))
        if numbers & seen:
            twice.add(index)
        seen |= numbers
    assert found == twice


@given(st.integers(0, 10_000))
def test_the_quick_check_misses_no_anomaly_of_the_full_one(seed: int) -> None:
    random = Random(seed)
    entries: list[tuple[object, ...]] = []
    for _ in range(12):
        sequence_id = random.randint(0, 4)
        chunk = (sequence_id, random.choice("ab"), random.randint(0, 2), 3)
        entries.append(random.choice([chunk, (sequence_id,)]))
    line = Line()
    sights = [line.take(row) for row in rows(*entries)]
    if findings(rows(*entries), ids):
        assert any(sights)
