"""The sample of a backlog, and the estimate of the rest."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.dispatcher.core.positions import Run
from seqgate.services.dispatcher.filtering.estimate import (
    BLOCK_ENTRIES,
    Block,
    after,
    estimate,
    position_at,
    size,
    starts,
    wilson,
)
from seqgate.types import Position


def run(ledger_id: int, first: int, last: int) -> Run:
    return Run(Position(ledger_id, first), last)


LEDGERS = [run(1, 10, 19), run(3, 0, 4), run(4, 0, 99)]

AFTER = [
    (None, LEDGERS),
    (Position(1, 3), LEDGERS),
    (Position(1, 10), [run(1, 11, 19), *LEDGERS[1:]]),
    (Position(1, 19), LEDGERS[1:]),
    (Position(2, 7), LEDGERS[1:]),
    (Position(3, 3), [run(3, 4, 4), LEDGERS[2]]),
    (Position(4, 99), []),
    (Position(5, 0), []),
]


@pytest.mark.parametrize(("mark_delete", "left"), AFTER, ids=str)
def test_entries_after_a_position_are_found(mark_delete: Position | None, left: list[Run]) -> None:
    assert after(LEDGERS, mark_delete) == left


def test_entries_are_counted_over_ledgers() -> None:
    assert size(LEDGERS) == 115
    expected = [
        Position(each.first.ledger_id, entry_id)
        for each in LEDGERS
        for entry_id in range(each.first.entry_id, each.last_entry_id + 1)
    ]
    assert [position_at(LEDGERS, number) for number in range(115)] == expected
    with pytest.raises(IndexError):
        position_at(LEDGERS, 115)


@given(st.integers(0, 100_000), st.integers(1, 20_000), st.randoms(use_true_random=False))
def test_blocks_are_spread_evenly_without_overlap(
    total: int, entries_max: int, lots: random.Random
) -> None:
    drawn = [lots.random() for _ in range(entries_max // BLOCK_ENTRIES + 1)]
    begins = starts(total, entries_max, drawn)
    if total <= entries_max:
        assert begins == list(range(0, total, BLOCK_ENTRIES))
        return
    length = min(BLOCK_ENTRIES, entries_max)
    assert len(begins) == max(1, entries_max // BLOCK_ENTRIES)
    assert all(one + length <= other for one, other in pairwise(begins))
    assert begins[0] >= 0
    assert begins[-1] + length <= total
    part = total / len(begins)
    for number, each in enumerate(begins):
        assert math.floor(number * part) <= each
        assert each + length <= math.ceil((number + 1) * part)


def test_a_complete_count_is_exact() -> None:
    blocks = [Block(250, 3), Block(100, 0)]
    assert estimate(blocks, 350, is_complete=True) == (3, 3, 3)
    assert estimate([], 0, is_complete=True) == (0, 0, 0)


def test_an_estimate_without_samples_spans_everything() -> None:
    assert estimate([], 1_000, is_complete=False) == (0, 0, 1_000)


def test_representative_blocks_count_as_their_entries() -> None:
    about, low, high = estimate([Block(250, 125)] * 40, 1_000_000, is_complete=False)
    assert about == 500_000
    assert (low, high) == (490_299, 509_701)


def test_uniform_blocks_count_as_one_entry_each() -> None:
    blocks = [Block(250, 250), Block(250, 0)] * 20
    about, low, high = estimate(blocks, 1_000_000, is_complete=False)
    assert about == 500_000
    assert 145_000 < about - low < 155_000
    assert 145_000 < high - about < 155_000


@pytest.mark.parametrize("hits", [0, 250])
def test_a_unanimous_sample_still_has_an_interval(hits: int) -> None:
    about, low, high = estimate([Block(250, hits)] * 40, 1_000_000, is_complete=False)
    assert about == hits * 4_000
    assert 80_000 < high - low < 100_000


def test_wilsons_interval_matches_published_values() -> None:
    low, high = wilson(0.1, 100)
    assert (round(low, 4), round(high, 4)) == (0.0552, 0.1744)
    assert wilson(0.0, 10)[0] == 0.0
    assert wilson(1.0, 10)[1] == 1.0


@pytest.mark.parametrize("run_length", [1, 100, 5_000])
@pytest.mark.parametrize("share", [0.02, 0.4])
def test_the_interval_covers_the_truth_as_often_as_promised(
    share: float, run_length: int, seed: int
) -> None:
    """Of a backlog with runs of equal entries."""
    lots = np.random.default_rng(seed)
    total, entries_max, missed, tries = 200_000, 10_000, 0, 200
    for _ in range(tries):
        hits = np.repeat(lots.random(total // run_length) < share, run_length)
        drawn = lots.random(entries_max // BLOCK_ENTRIES + 1).tolist()
        blocks = [
            Block(BLOCK_ENTRIES, int(hits[begin : begin + BLOCK_ENTRIES].sum()))
            for begin in starts(total, entries_max, drawn)
        ]
        _, low, high = estimate(blocks, total, is_complete=False)
        missed += not low <= hits.sum() <= high
    assert missed <= tries * 0.08, missed
