"""What the checkers of histories make of what they are told."""

import pytest

from seqgate.types import Chunk, Position, TopicName
from services.cursor.adapters.memory import MemoryHoles
from services.cursor.core.cursor import CursorState
from services.cursor.core.state import Head
from services.dedup.core.sequence import Marks
from services.dedup.core.topic import TopicState, Tracked
from services.dispatcher import dead
from services.dispatcher.core.effects import Because
from tests.simulation.system.checkers import Checker
from tests.simulation.system.seen import Appended, Seen

TOPIC, NAME = TopicName.parse("t/n/topic"), "s"
FIRST = Position(1, 0)
PAYLOAD_BYTES = 1_100


def changed(checker: Checker, mark_delete: Position | None, **properties: str) -> None:
    """The subscription's cursor is this now."""
    head = Head(TOPIC, NAME, 0, mark_delete, properties=properties)
    checker.cursors.changed(TOPIC, NAME, CursorState(head, MemoryHoles()))


def test_a_key_is_remembered_for_as_long_as_its_cursor_says_so_wherever_that_moves() -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    subscription = seen.subscription(TOPIC, NAME)
    held = {f"{dead._KEY}digest": "{}"}
    changed(checker, FIRST, **held)
    assert subscription.remembers_keys
    changed(checker, None, **held)
    assert subscription.remembers_keys
    changed(checker, None, other="")
    assert not subscription.remembers_keys


@pytest.mark.parametrize("payload_bytes_max", [PAYLOAD_BYTES - 1, PAYLOAD_BYTES])
def test_a_letter_may_be_given_up_that_is_larger_than_a_ledger_took(payload_bytes_max: int) -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    checker.terms.payload_bytes_max = payload_bytes_max
    entry = Appended(FIRST, "p", (0,), (1,), None, 0, 0.0, payload_bytes=PAYLOAD_BYTES)
    seen.log(TOPIC).at[FIRST] = entry
    checker.cursors.passed(TOPIC, NAME, [FIRST], Because.LETTER_REFUSED)
    assert bool(seen.violations) == (payload_bytes_max >= PAYLOAD_BYTES)


@pytest.mark.parametrize(
    ("kept_from", "stored", "is_right"),
    [
        pytest.param(1, "24 24 24 24", True, id="cut-and-complete"),
        pytest.param(1, "24 24 24 25", True, id="cut-and-overtaken"),
        pytest.param(1, "24 24 24 7", True, id="cut-and-its-producer-started-over"),
        pytest.param(1, "24 24 24", False, id="cut-and-unfinished"),
        pytest.param(None, "24 24 24 24", False, id="not-trimmed"),
        pytest.param(0, "24 24 24 24", False, id="trimmed-up-to-it"),
    ],
)
def test_a_message_that_a_trim_cut_is_complete_before_its_last_chunk_if_that_is_left(
    kept_from: int | None, stored: str, *, is_right: bool
) -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    log = seen.log(TOPIC)
    for place, sequence_id in enumerate(map(int, stored.split())):
        chunk = Chunk("a", place, 4, 12) if sequence_id == 24 else None
        log.entries.append(
            Appended(Position(1, place), "p", (sequence_id,), (), chunk, append_ms=0, at_s=0.0)
        )
    log.kept_from = None if kept_from is None else Position(1, kept_from)
    state = TopicState(1, 1, Position(1, 2), producers={"p": Tracked(Marks(24, 24), 0)})
    checker.folds.check(str(TOPIC), state, is_all=True)
    assert bool(seen.violations) != is_right
