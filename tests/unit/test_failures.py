"""The failed deliveries that a subscription remembers, and their limits."""

import pytest

from seqgate.services.dispatcher.core.effects import FailedDelivery, How
from seqgate.services.dispatcher.core.settling import (
    FAILED_ENTRIES_MAX,
    FAILURES_MAX,
    REASONS_BYTES_MAX,
    Failures,
)
from seqgate.types import NACK_REASON_BYTES_MAX, Position

LONGEST = "r" * NACK_REASON_BYTES_MAX


def refused(at_ms: int, reason: str = LONGEST) -> FailedDelivery:
    return FailedDelivery(How.REFUSED, at_ms, "crew", reason)


def test_the_latest_failures_of_an_entry_are_remembered() -> None:
    failures, at = Failures(), Position(1, 0)
    for number in range(FAILURES_MAX + 3):
        failures.add(at, refused(number))
    assert failures.of(at) == tuple(refused(each) for each in range(3, FAILURES_MAX + 3))
    failures.forget(at)
    assert failures.of(at) == ()


@pytest.mark.parametrize(
    ("of_each", "reason", "most"),
    [(1, "", FAILED_ENTRIES_MAX), (8, LONGEST, REASONS_BYTES_MAX // (8 * len(LONGEST)))],
)
def test_the_entries_that_failed_first_are_forgotten_beyond_the_limits(
    of_each: int, reason: str, most: int
) -> None:
    failures = Failures()
    for entry in range(most + 5):
        for number in range(of_each):
            failures.add(Position(1, entry), refused(number, reason))
    kept = [entry for entry in range(most + 5) if failures.of(Position(1, entry))]
    assert kept == list(range(5, most + 5))
    assert {len(failures.of(Position(1, entry))) for entry in kept} == {of_each}


def test_the_room_of_forgotten_reasons_is_free_again() -> None:
    failures = Failures()
    wide = refused(1, "é" * (NACK_REASON_BYTES_MAX // 2))  # may take four bytes each in memory
    for _ in range(3):
        for number in range(1_000):
            failures.add(Position(1, number), wide)
        for number in range(1_000):
            failures.forget(Position(1, number))
    assert failures._reasons_bytes == 0
