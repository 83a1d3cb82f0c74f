"""The chunks that a read left out."""

import pytest

from seqgate.cli import _left_out
from seqgate.cli._left_out import LeftOut
from seqgate.client import Dropped, DropReason, Message, MessageId
from seqgate.types import Position

ABORTED, EVICTED, HEADLESS = DropReason.ABORTED, DropReason.EVICTED, DropReason.HEADLESS


def dropped(reason: DropReason, sequence_id: int, count: int = 1) -> Dropped:
    return Dropped(reason, "p", sequence_id, "uuid", (Position(1, 0),) * count)


def message(sequence_id: int, producer: str = "p") -> Message:
    return Message("a/b/c", MessageId(1, 0), b"", producer, sequence_id, 0, 0)


def test_skipped_chunks_are_counted_by_reason() -> None:
    left_out = LeftOut()
    assert left_out.counts == {}
    for each in (dropped(HEADLESS, 1), dropped(ABORTED, 2, 3), dropped(HEADLESS, 3, 2)):
        left_out.add(each)
    assert left_out.counts == {ABORTED: 3, HEADLESS: 3}


def test_a_message_completed_later_is_not_counted_as_skipped() -> None:
    """A reader that starts in the middle of a message fetches the earlier chunks."""
    left_out = LeftOut()
    left_out.add(dropped(HEADLESS, 1))
    left_out.add(dropped(EVICTED, 1, 4))
    left_out.came(message(2))
    left_out.came(message(1, "another"))
    assert left_out.counts == {EVICTED: 4, HEADLESS: 1}
    left_out.came(message(1))
    assert left_out.counts == {}


def test_an_abandoned_attempt_is_counted_although_the_next_succeeds() -> None:
    left_out = LeftOut()
    left_out.add(dropped(ABORTED, 1, 2))
    left_out.came(message(1))
    assert left_out.counts == {ABORTED: 2}


def test_remembered_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_left_out, "UNFINISHED_MAX", 2)
    left_out = LeftOut()
    for sequence_id in (1, 2, 3):
        left_out.add(dropped(HEADLESS, sequence_id))
    assert left_out.counts == {HEADLESS: 3}
    for sequence_id in (1, 2, 3):
        left_out.came(message(sequence_id))
    assert left_out.counts == {HEADLESS: 1}
