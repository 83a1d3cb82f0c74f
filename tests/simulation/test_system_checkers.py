"""What the checkers of histories make of what they are told."""

import pytest

from seqgate.types import Position, TopicName
from services.cursor.adapters.memory import MemoryHoles
from services.cursor.core.cursor import CursorState
from services.cursor.core.state import Head
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
