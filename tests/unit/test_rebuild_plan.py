"""Entries that a rebuild reads must not be trimmed meanwhile."""

import pytest

from seqgate.api.common.v1.common_pb2 import Position as WirePosition
from seqgate.api.ledger.v1.ledger_pb2 import Topic
from seqgate.jobs.rebuild.loading import is_trimmed
from seqgate.jobs.rebuild.plan import TopicPlan
from seqgate.types import Position


def topic(first: tuple[int, int] | None) -> Topic:
    begins = None if first is None else WirePosition(ledger_id=first[0], entry_id=first[1])
    return Topic(name="a/b/c", first=begins, last=WirePosition(ledger_id=2, entry_id=9))


@pytest.mark.parametrize(
    ("first", "trimmed"),
    [((1, 0), False), ((1, 4), False), ((1, 5), True), ((2, 0), True), (None, True)],
)
def test_a_trim_of_planned_entries_is_noticed(
    first: tuple[int, int] | None, *, trimmed: bool
) -> None:
    plan = TopicPlan("a/b/c", 1, None, Position(2, 9), Position(1, 4), ())
    assert is_trimmed(plan, topic(first)) is trimmed
