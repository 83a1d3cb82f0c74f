"""The reported counts of each filter follow from the tallies of its chain."""

import pytest

from seqgate.services.dispatcher.filtering import tallies as limits
from seqgate.services.dispatcher.filtering.tallies import (
    ACCEPTED,
    REJECTED,
    RESCHEDULED,
    Row,
    Tallies,
)

AB = (("a", 1), ("b", 2))


def shown(row: Row) -> tuple[int, ...]:
    """Entries processed, accepted, rejected, rescheduled and failed."""
    tallies = (row.processed, row.accepted, row.rejected, row.rescheduled, row.failed_all)
    return tuple(each.entries for each in tallies)


def rows(tallies: Tallies) -> dict[tuple[bool, str, int], tuple[int, ...]]:
    return {(row.is_shadow, row.name, row.version): shown(row) for row in tallies.rows()}


def test_empty_tallies_report_nothing() -> None:
    assert Tallies().rows() == []


def test_an_entry_judged_by_a_later_filter_was_accepted_by_earlier_ones() -> None:
    tallies = Tallies()
    for place, said, entries in [
        (None, ACCEPTED, 10),
        (0, REJECTED, 1),
        (1, REJECTED, 2),
        (1, RESCHEDULED, 3),
        (1, "PROPERTY_ABSENT", 4),
        (None, "UNAVAILABLE", 5),
    ]:
        tallies.of(AB, place, said, is_shadow=False).add(entries, entries * 10)
    assert rows(tallies) == {
        (False, "", 0): (25, 10, 3, 3, 9),
        (False, "a", 1): (20, 19, 1, 0, 0),
        (False, "b", 2): (19, 10, 2, 3, 4),
    }
    every = tallies.rows()[0]
    assert {reason: each.messages for reason, each in every.failed.items()} == {
        "PROPERTY_ABSENT": 40,
        "UNAVAILABLE": 50,
    }
    assert every.processed.messages == 250


def test_versions_and_shadow_chains_are_counted_separately() -> None:
    tallies = Tallies()
    tallies.of((("a", 1),), None, ACCEPTED, is_shadow=False).add(1, 1)
    tallies.of((("a", 2),), 0, REJECTED, is_shadow=False).add(2, 2)
    tallies.of((("a", 2), ("c", 1)), None, ACCEPTED, is_shadow=False).add(4, 4)
    tallies.of((("a", 2),), 0, REJECTED, is_shadow=True).add(8, 8)
    assert rows(tallies) == {
        (False, "", 0): (7, 5, 2, 0, 0),
        (False, "a", 1): (1, 1, 0, 0, 0),
        (False, "a", 2): (6, 4, 2, 0, 0),
        (False, "c", 1): (4, 4, 0, 0, 0),
        (True, "", 0): (8, 0, 8, 0, 0),
        (True, "a", 2): (8, 0, 8, 0, 0),
    }


def test_only_the_sum_of_the_oldest_chains_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHAINS_MAX", 2)
    tallies = Tallies()
    for version in range(5):
        tallies.of((("a", version),), 0, REJECTED, is_shadow=False).add(1, 1)
        tallies.of((("a", version),), 0, "NOT_ASKED", is_shadow=False).add(1, 1)
    tallies.trim(())
    assert rows(tallies) == {
        (False, "", 0): (10, 0, 5, 0, 5),
        (False, "a", 3): (2, 0, 1, 0, 1),
        (False, "a", 4): (2, 0, 1, 0, 1),
    }


def test_a_chain_in_use_is_kept_at_any_age(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "CHAINS_MAX", 2)
    tallies = Tallies()
    old = tallies.of(AB, 0, REJECTED, is_shadow=False)
    for version in range(5):
        tallies.of((("c", version),), 0, REJECTED, is_shadow=True).add(1, 1)
        tallies.trim({(False, AB), (True, (("c", version),))})
    old.add(7, 7)
    assert rows(tallies) == {
        (False, "", 0): (7, 0, 7, 0, 0),
        (False, "a", 1): (7, 0, 7, 0, 0),
        (False, "b", 2): (0, 0, 0, 0, 0),
        (True, "", 0): (5, 0, 5, 0, 0),
        (True, "c", 3): (1, 0, 1, 0, 0),
        (True, "c", 4): (1, 0, 1, 0, 0),
    }
