"""Receipts for messages that this publication did not store."""

import pytest

from seqgate.services.ledger.core.entry import Entry, unit_of
from seqgate.services.ledger.core.receipt import (
    Fate,
    Found,
    Missing,
    Receipt,
    Repeated,
    Status,
    Unfinished,
    receipt_of,
    repeated_ids,
)
from seqgate.types import Position
from tests.support.entries import batch, chunk, large, single

HERE, THERE = Position(1, 1), Position(1, 2)
PLACES = tuple(Position(1, each) for each in range(3))
WHOLE = Found(PLACES[-1], None, PLACES, "a")
"""A large message, stored as attempt "a" of three chunks."""
STALE = Receipt(Status.STALE, None, (Missing.STALE,))


@pytest.mark.parametrize(
    ("entries", "first_new", "ids"),
    [
        ([single(7)], None, [7]),
        ([batch([4, 5, 6, 7, 8])], 6, [4, 5]),
        ([batch([1, 2]), batch([0, 3, 4])], None, [1, 2, 0, 3, 4]),
        ([batch([1, 2]), batch([0, 3, 4])], 3, [0, 1, 2]),
    ],
)
def test_fates_belong_to_the_given_ids(
    entries: list[Entry], first_new: int | None, ids: list[int]
) -> None:
    assert repeated_ids(Repeated(unit_of(1, 1, entries), first_new, 99)) == ids


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
        ([single(7)], [WHOLE], Status.DUPLICATE, False),  # it was cut
        ([batch([7])], [WHOLE], Status.DUPLICATE, False),
        ([batch([7, 8])], [WHOLE, Found(HERE, 0)], Status.DUPLICATE, False),
    ],
)
def test_success_is_reported_only_for_stored_messages(
    entries: list[Entry], fates: list[Fate], status: Status, compact: bool
) -> None:
    receipt = receipt_of(Repeated(unit_of(1, 1, entries), None, 99), fates)
    assert receipt.status is status
    assert receipt.position == (HERE if compact else None)
    assert list(receipt.fates) == ([] if compact else fates)


def attempt(uuid: str, chunks: int) -> Unfinished:
    """The stored chunks of an attempt with three chunks."""
    place = large(7, uuid, 3)[chunks - 1].chunk
    assert place is not None
    return Unfinished({place.layout: PLACES[:chunks]})


@pytest.mark.parametrize(
    ("entry", "fate", "finished", "receipt"),
    [
        # the same chunk is stored
        (chunk(7, "a", 0, 3), WHOLE, True, Receipt(Status.DUPLICATE, PLACES[0])),
        (chunk(7, "a", 2, 3), WHOLE, True, Receipt(Status.DUPLICATE, PLACES[2])),
        (chunk(7, "a", 0, 3), attempt("a", 2), False, Receipt(Status.DUPLICATE, PLACES[0])),
        (chunk(7, "a", 1, 3), attempt("a", 2), False, Receipt(Status.DUPLICATE, PLACES[1])),
        # the attempt continued during the look-up
        (chunk(7, "a", 0, 3), WHOLE, False, Receipt(Status.DUPLICATE, PLACES[0])),
        # the message is stored, with another layout
        (chunk(7, "b", 0, 3), WHOLE, True, Receipt(Status.DUPLICATE, None, (WHOLE,))),
        (chunk(7, "a", 1, 2), WHOLE, True, Receipt(Status.DUPLICATE, None, (WHOLE,))),
        (chunk(7, "a", 3, 4), WHOLE, True, Receipt(Status.DUPLICATE, None, (WHOLE,))),
        (
            chunk(7, "a", 0, 3),
            Found(HERE, 4),
            True,
            Receipt(Status.DUPLICATE, None, (Found(HERE, 4),)),
        ),
        # the message is not stored, and never will be
        (chunk(7, "a", 0, 3), attempt("a", 2), True, STALE),
        (chunk(7, "a", 2, 3), attempt("a", 2), True, STALE),
        (chunk(7, "a", 0, 3), Missing.STALE, True, STALE),
        # another attempt has replaced this one
        (chunk(7, "a", 0, 3), attempt("b", 1), False, STALE),
        (chunk(7, "a", 1, 2), attempt("a", 2), False, STALE),
        (
            chunk(7, "a", 0, 3),
            Missing.TRIMMED,
            True,
            Receipt(Status.STALE, None, (Missing.TRIMMED,)),
        ),
    ],
)
def test_a_chunk_gets_its_position_or_the_fate_of_its_message(
    entry: Entry, fate: Fate, finished: bool, receipt: Receipt
) -> None:
    decided = 7 if finished else 6
    assert receipt_of(Repeated(unit_of(1, 1, [entry]), None, decided), [fate]) == receipt


@pytest.mark.parametrize(("first_new", "status"), [(None, Status.STALE), (8, Status.PARTIAL)])
def test_an_incomplete_message_is_not_in_the_log(first_new: int | None, status: Status) -> None:
    unit = unit_of(1, 1, [batch([6, 7, 8])])
    fates: list[Fate] = [Found(HERE, 0), attempt("a", 2), *([] if first_new else [Found(HERE, 2)])]
    receipt = receipt_of(Repeated(unit, first_new, 7), fates)
    assert receipt.status is status
    assert receipt.fates == (fates[0], Missing.STALE, *fates[2:])


def test_a_partly_new_batch_names_its_first_new_message() -> None:
    receipt = receipt_of(
        Repeated(unit_of(1, 1, [batch([4, 5, 6])]), 6, 5), [Found(HERE, 0), Missing.STALE]
    )
    assert receipt.status is Status.PARTIAL
    assert receipt.first_new == 6
