"""What a receipt says of messages that were not stored now."""

import pytest

from seqgate.types import Position
from services.ledger.core.entry import Entry, unit_of
from services.ledger.core.receipt import (
    Fate,
    Found,
    Missing,
    Status,
    Unsettled,
    old_ids,
    settled,
)
from tests.support.entries import batch, single

HERE, THERE = Position(1, 1), Position(1, 2)


@pytest.mark.parametrize(
    ("entries", "first_new", "ids"),
    [
        ([single(7)], None, [7]),
        ([batch([4, 5, 6, 7, 8])], 6, [4, 5]),
        ([batch([1, 2]), batch([0, 3, 4])], None, [1, 2, 0, 3, 4]),
        ([batch([1, 2]), batch([0, 3, 4])], 3, [0, 1, 2]),
    ],
)
def test_fates_are_told_of_these_ids(
    entries: list[Entry], first_new: int | None, ids: list[int]
) -> None:
    assert old_ids(Unsettled(unit_of(1, 1, entries), first_new, 99)) == ids


@pytest.mark.parametrize(
    ("entries", "fates", "status", "compact"),
    [
        ([single(7)], [Found(HERE, None)], Status.DUPLICATE, True),
        ([single(7)], [Found(HERE, 0)], Status.DUPLICATE, False),  # it was in a batch
        ([batch([7])], [Found(HERE, 0)], Status.DUPLICATE, True),
        ([batch([7, 8])], [Found(HERE, 0), Found(HERE, 1)], Status.DUPLICATE, True),
        ([batch([7, 8])], [Found(HERE, 1), Found(HERE, 2)], Status.DUPLICATE, False),
        ([batch([7, 8])], [Found(HERE, None), Found(THERE, None)], Status.DUPLICATE, False),
        ([single(7), single(8)], [Found(HERE, 0), Found(HERE, 1)], Status.DUPLICATE, False),
        ([single(7)], [Missing.STALE], Status.STALE, False),
        ([batch([7, 8])], [Found(HERE, 0), Missing.STALE], Status.STALE, False),
        ([batch([7, 8])], [Found(HERE, 0), Missing.TRIMMED], Status.STALE, False),
    ],
)
def test_success_is_said_only_of_what_is_in_the_log(
    entries: list[Entry], fates: list[Fate], status: Status, compact: bool
) -> None:
    receipt = settled(Unsettled(unit_of(1, 1, entries), None, 99), fates)
    assert receipt.status is status
    assert receipt.position == (HERE if compact else None)
    assert list(receipt.fates) == ([] if compact else fates)


def test_a_batch_that_is_partly_new_names_where_to_go_on() -> None:
    receipt = settled(
        Unsettled(unit_of(1, 1, [batch([4, 5, 6])]), 6, 5), [Found(HERE, 0), Missing.STALE]
    )
    assert receipt.status is Status.PARTIAL
    assert receipt.first_new == 6
