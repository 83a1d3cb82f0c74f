"""Verdicts on messages and batches: the rules of Pulsar's MessageDeduplication, and Seqgate's
additions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.dedup.core.sequence import Marks, admit, advance, withdraw
from seqgate.services.deduplication import NEVER, Claim, Verdict
from seqgate.types import SEQUENCE_ID_MAX

NEW, IN_FLIGHT, DUPLICATE = Verdict.NEW, Verdict.IN_FLIGHT, Verdict.DUPLICATE
PARTIAL, HELD = Verdict.PARTIAL, Verdict.HELD


@pytest.mark.parametrize(
    ("sequence_id", "verdict"),
    [
        (3, DUPLICATE),
        (4, DUPLICATE),  # the persisted mark itself
        (5, IN_FLIGHT),
        (7, IN_FLIGHT),  # the pushed mark itself
        (8, NEW),
        (90, NEW),  # gaps are allowed
        (SEQUENCE_ID_MAX, NEW),
    ],
)
def test_an_id_is_judged_by_the_marks_of_its_producer(sequence_id: int, verdict: Verdict) -> None:
    _, verdicts, _ = admit(Marks(persisted=4, pushed=7), [Claim(sequence_id, sequence_id)])
    assert verdicts == [verdict]


# The worked batch cases: pushed, persisted, batch, verdict, pushed afterwards.
@pytest.mark.parametrize(
    ("pushed", "persisted", "batch", "verdict", "pushed_after"),
    [
        (0, 0, (1, 5), NEW, 5),
        (5, 0, (4, 8), IN_FLIGHT, 5),
        (5, 5, (4, 8), PARTIAL, 5),  # Pulsar drops 6 to 8, and reports success
        (5, 5, (5, 6), PARTIAL, 5),
        (5, 5, (6, 6), NEW, 6),
        (8, 5, (6, 8), IN_FLIGHT, 8),
        (8, 5, (4, 5), DUPLICATE, 8),
        (8, 5, (4, 6), IN_FLIGHT, 8),
        (8, 5, (4, 12), IN_FLIGHT, 8),
        (8, 8, (6, 8), DUPLICATE, 8),
        (8, 8, (10, 12), NEW, 12),
        (5, NEVER, (0, 0), IN_FLIGHT, 5),
        (NEVER, NEVER, (0, 0), NEW, 0),
    ],
)
def test_a_batch_is_judged_by_its_lowest_and_highest_id(
    pushed: int, persisted: int, batch: tuple[int, int], verdict: Verdict, pushed_after: int
) -> None:
    marks, verdicts, _ = admit(Marks(persisted, pushed), [Claim(*batch)])
    assert verdicts == [verdict]
    assert marks == Marks(persisted, pushed_after)


@pytest.mark.parametrize(
    ("claims", "verdicts"),
    [
        ([(0, 0), (1, 1), (5, 5)], [NEW, NEW, NEW]),
        ([(0, 0), (0, 0)], [NEW, IN_FLIGHT]),
        ([(10, 12), (9, 9)], [NEW, IN_FLIGHT]),
    ],
)
def test_claims_of_one_call_see_one_another(
    claims: list[tuple[int, int]], verdicts: list[Verdict]
) -> None:
    assert admit(Marks(), [Claim(*each) for each in claims])[1] == verdicts


def test_no_claim_overtakes_a_waiting_or_cut_one() -> None:
    marks, verdicts, _ = admit(Marks(5, 5), [Claim(4, 8), Claim(9, 9), Claim(3, 3), Claim(10, 10)])
    assert verdicts == [PARTIAL, HELD, DUPLICATE, HELD]
    assert marks == Marks(5, 5)


def test_a_withdrawn_id_is_new_again() -> None:
    marks, *_ = admit(Marks(6, 6), [Claim(7, 7)])
    assert admit(marks, [Claim(7, 7)])[1] == [IN_FLIGHT]
    marks = withdraw(marks)
    assert admit(marks, [Claim(6, 6), Claim(7, 7)])[1] == [DUPLICATE, NEW]


@pytest.mark.parametrize(("keep", "pushed"), [(NEVER, 4), (3, 4), (5, 5), (7, 7), (9, 7)])
def test_withdrawing_keeps_claims_still_in_flight(keep: int, pushed: int) -> None:
    assert withdraw(Marks(4, 7), keep) == Marks(4, pushed)


@pytest.mark.parametrize(
    ("before", "entry", "after"),
    [
        (Marks(), 0, Marks(0, 0)),
        (Marks(3, 9), 5, Marks(5, 9)),
        (Marks(3, 9), 9, Marks(9, 9)),
        (Marks(3, 9), 12, Marks(12, 12)),
        (Marks(9, 9), 2, Marks(2, 2)),  # written with deduplication off: ids start over
    ],
)
def test_the_last_entry_of_the_log_decides(before: Marks, entry: int, after: Marks) -> None:
    assert advance(before, entry) == after


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["admit", "store", "fail"]), st.integers(0, 20), st.integers(0, 5)
        ),
        max_size=60,
    )
)
def test_no_id_is_admitted_twice_unless_its_first_copy_failed(
    calls: list[tuple[str, int, int]],
) -> None:
    marks = Marks()
    open_claims: list[Claim] = []
    stored: list[int] = []
    for call, lowest, span in calls:
        match call:
            case "admit":
                claim = Claim(lowest, lowest + span)
                marks, (verdict,), _ = admit(marks, [claim])
                if verdict is NEW:
                    open_claims.append(claim)
            case "store" if open_claims:
                claim = open_claims.pop(0)
                stored += range(claim.lowest, claim.highest + 1)
                marks = advance(marks, claim.highest)
            case "fail":
                open_claims.clear()
                marks = withdraw(marks)
    assert len(stored) == len(set(stored))
    assert stored == sorted(stored)
