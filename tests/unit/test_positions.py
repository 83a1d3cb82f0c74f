"""Runs and Acknowledged against plain models, and their memory."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.dispatcher.core.positions import Acknowledged, Parked, Runs
from seqgate.types import Position

RUN_BYTES = 32
"""The size of a run (positions.py)."""

POSITIONS = st.builds(Position, st.integers(1, 3), st.integers(0, 9_000))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2)), max_size=300), st.data())
def test_runs_are_a_queue_of_positions(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    runs, model = Runs(), deque[Parked]()
    position = Position(1, 0)
    for gap, messages in steps:
        if gap == 2:
            position = Position(position.ledger_id + 1, 0)
        else:
            position = Position(position.ledger_id, position.entry_id + 1 + gap)
        runs.append(position, messages)
        model.append(Parked(position, messages))
        for _ in range(data.draw(st.integers(0, 2))):
            if model:
                assert runs.first() == model.popleft()
                runs.drop_first()
        assert len(runs) == len(model)
        assert list(runs) == list(model)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2)), max_size=100),
    st.sets(st.integers(0, 99)),
    st.integers(0, 30),
)
def test_runs_remove_entries_anywhere(
    steps: list[tuple[int, int]], gone: set[int], taken: int
) -> None:
    runs, position, model = Runs(), Position(1, 0), list[Parked]()
    for gap, messages in steps:
        position = Position(1, position.entry_id + 1 + gap)
        runs.append(position, messages)
        model.append(Parked(position, messages))
    for _ in range(min(taken, len(model))):
        runs.drop_first()
        del model[0]
    positions = {each.position for at, each in enumerate(model) if at in gone}
    assert runs.discard(positions) == len(positions)
    left = [each for each in model if each.position not in positions]
    assert list(runs) == left
    assert len(runs) == len(left)


@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(0, 40)), unique=True, max_size=60),
    st.integers(0, 60),
    st.data(),
)
def test_runs_insert_entries_in_order(
    places: list[tuple[int, int]], appended: int, data: st.DataObject
) -> None:
    """Also into those that remain after some were taken."""
    parked = [Parked(Position(*each), data.draw(st.integers(1, 2))) for each in places]
    runs, model = Runs(), sorted(parked[:appended])
    for each in model:
        runs.append(*each)
    for _ in range(data.draw(st.integers(0, len(model)))):
        runs.drop_first()
        del model[0]
    for each in parked[appended:]:
        runs.insert(*each)
        model = sorted([*model, each])
        assert list(runs) == model
        assert len(runs) == len(model)


def test_adjacent_entries_are_one_run() -> None:
    runs = Runs()
    for entry_id in range(100_000):
        runs.append(Position(1, entry_id), 1)

    assert runs.runs == 1
    assert len(runs) == 100_000


def test_a_run_takes_32_bytes_and_is_freed_when_taken() -> None:
    runs = Runs()
    for entry_id in range(0, 20_000, 2):
        runs.append(Position(1, entry_id), 1)
    assert runs.runs == 10_000
    assert len(runs._words) * runs._words.itemsize == 10_000 * RUN_BYTES

    for _ in range(9_900):
        runs.drop_first()

    assert runs.runs == 100
    assert len(runs._words) * runs._words.itemsize <= 2 * (100 + 64) * RUN_BYTES


@given(
    st.lists(st.tuples(POSITIONS, st.integers(0, 6_000)), max_size=20),
    st.none() | POSITIONS,
    st.lists(POSITIONS, max_size=20),
)
def test_added_entries_and_those_before_the_cursor_are_acknowledged(
    ranges: list[tuple[Position, int]], mark_delete: Position | None, others: list[Position]
) -> None:
    acknowledged = Acknowledged(None)
    for first, more in ranges:
        acknowledged.add_range(first, first.entry_id + more)
    if mark_delete is not None:
        acknowledged.advance(mark_delete)

    ends = [Position(ledger, entry + more) for (ledger, entry), more in ranges]
    beyond = [Position(ledger, entry + 1) for ledger, entry in ends]
    for each in (*others, *ends, *beyond, *(first for first, _ in ranges)):
        added = any(
            first <= each <= Position(first.ledger_id, first.entry_id + more)
            for first, more in ranges
        )
        before = mark_delete is not None and each <= mark_delete
        assert (each in acknowledged) == (added or before)


def test_the_mark_delete_position_does_not_go_back() -> None:
    acknowledged = Acknowledged(Position(2, 5))

    acknowledged.advance(Position(1, 9))

    assert acknowledged.mark_delete == Position(2, 5)


def test_an_entry_beyond_the_mark_delete_position_takes_a_bit() -> None:
    acknowledged = Acknowledged(Position(1, 0))
    for entry_id in range(2, 400_000, 2):
        acknowledged.add(Position(1, entry_id))

    kept = sum(bits.__sizeof__() for bits in acknowledged._chunks.values())
    assert kept < 400_000 / 8 * 1.5

    acknowledged.advance(Position(1, 399_998))
    assert len(acknowledged._chunks) <= 1


def test_a_full_range_takes_no_bits() -> None:
    acknowledged = Acknowledged(Position(1, 0))
    acknowledged.add_range(Position(1, 4096), 400 * 4096 - 1)

    assert sum(bits.__sizeof__() for bits in acknowledged._chunks.values()) < 400 * 50
    assert Position(1, 5_000) in acknowledged
    assert Position(1, 400 * 4096) not in acknowledged
