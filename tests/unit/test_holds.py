"""The end of a hold of a producer's stream."""

import pytest

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.services.errors import DomainError, Fenced
from seqgate.services.ledger import servicer
from seqgate.services.ledger.servicer import InvalidPublication
from tests.simulation.defects import find


@pytest.mark.parametrize(
    ("resume", "error", "ends"),
    [
        (True, InvalidPublication("it has no entries"), True),
        (False, InvalidPublication("it has no entries"), False),
        (True, Fenced("it is for another epoch"), False),
    ],
)
def test_a_refused_publication_with_resume_on_this_stream_ends_a_hold(
    resume: bool, error: DomainError, ends: bool
) -> None:
    assert servicer._ends_hold(pb.Publication(resume=resume), error) is ends


@pytest.mark.deep
def test_a_hold_kept_after_a_refusal_with_resume_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    find("A17").apply(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_refused_publication_with_resume_on_this_stream_ends_a_hold(
            True, InvalidPublication("it has no entries"), True
        )
