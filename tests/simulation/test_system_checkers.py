"""What the checkers of histories make of what they are told."""

import pytest

from seqgate.client import Dropped, DropReason, Incomplete
from seqgate.services.cursor.adapters.memory import MemoryHoles
from seqgate.services.cursor.core.cursor import CursorState
from seqgate.services.cursor.core.state import Head
from seqgate.services.dedup.core.sequence import Marks
from seqgate.services.dedup.core.topic import TopicState, Tracked
from seqgate.services.dispatcher.core.effects import Because
from seqgate.services.dispatcher.letters import graveyard
from seqgate.services.ledger.ports import LogState
from seqgate.types import Chunk, Position, TopicName
from tests.simulation.system.checkers import Checker
from tests.simulation.system.seen import Appended, Origin, Seen, Sent

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
    held = {f"{graveyard._KEY}digest": "{}"}
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


@pytest.mark.parametrize(
    ("kept_from", "has", "is_right"),
    [
        pytest.param(3, 7, True, id="told-of-what-was-trimmed-behind-it"),
        pytest.param(3, 5, True, id="told-of-it-by-a-trim-before"),
        pytest.param(2, 7, False, id="of-what-is-not-trimmed"),
        pytest.param(None, 5, False, id="of-what-never-was"),
        pytest.param(3, 6, False, id="of-what-is-not-there"),
    ],
)
def test_a_state_may_be_ahead_of_what_is_confirmed_by_what_was_trimmed(
    kept_from: int | None, has: int, *, is_right: bool
) -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    log = seen.log(TOPIC)
    for place, sequence_id in enumerate((3, 5, 7)):
        log.entries.append(
            Appended(Position(1, place), "p", (sequence_id,), (), None, append_ms=0, at_s=0.0)
        )
    log.kept_from = None if kept_from is None else Position(1, kept_from)
    state = TopicState(1, 1, Position(1, 0), producers={"p": Tracked(Marks(has, has), 0)})
    checker.folds.check(str(TOPIC), state, is_all=True)
    assert bool(seen.violations) != is_right


@pytest.mark.parametrize("goes_to", ["t/n/letters", "t/n/others", ""])
def test_a_letter_may_be_given_up_where_its_topic_may_refuse_its_producer(goes_to: str) -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    checker.terms.refusing.add("t/n/letters")
    seen.subscription(TOPIC, NAME).dead_letter_topic = goes_to
    seen.log(TOPIC).at[FIRST] = Appended(FIRST, "p", (0,), (1,), None, 0, 0.0)
    checker.cursors.passed(TOPIC, NAME, [FIRST], Because.LETTER_REFUSED)
    assert bool(seen.violations) == (goes_to != "t/n/letters")


@pytest.mark.parametrize(
    ("chunk_ids", "is_whole"),
    [
        ("0 1 2", True),
        ("0 1 1 2", True),
        ("0 1 2 2", True),
        ("0 1 0 1 2", True),
        ("0 1 2 0 1 2", True),
        ("0 2", False),
        ("1 2", False),
        ("0 1", False),
        ("0 1 2 0 2", False),
    ],
)
def test_a_message_is_stored_whose_chunks_are_there_in_order_some_of_them_twice(
    chunk_ids: str, is_whole: bool
) -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    sent = seen.sent[1] = Sent(1, str(TOPIC), "p", 0, None, "", 0.0, 9)
    log = seen.log(TOPIC)
    for entry_id, chunk_id in enumerate(chunk_ids.split()):
        at = Position(1, entry_id)
        log.at[at] = Appended(at, "p", (0,), (1,), Chunk("u", int(chunk_id), 3, 9), 0, 0.0)
        log.entries.append(log.at[at])
        log.attempts.setdefault(("p", "u"), []).append(at)
    checker.logs.answered(sent, 0, at, duplicate=False)
    assert bool(seen.violations) != is_whole


def test_who_deleted_a_cursor_need_not_live_to_say_so() -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    checker.cursors.created(TOPIC, NAME, None)
    checker.cursors.deleting(TOPIC, NAME)
    seen.subscription(TOPIC, NAME).done[FIRST, 0] = (1, 1)
    checker.cursors.created(TOPIC, NAME, None)
    assert not seen.subscription(TOPIC, NAME).done
    seen.subscription(TOPIC, NAME).done[FIRST, 0] = (3, 1)
    checker.cursors.deleted(TOPIC, NAME)  # it is said late
    assert seen.subscription(TOPIC, NAME).done


def test_who_deleted_a_topic_need_not_live_to_say_so() -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    for incarnation, is_deleted in ((1, False), (1, False), (2, True)):
        seen.log(TOPIC).marks["p"] = 7
        checker.logs.at_ledger("deleting", (TOPIC,), {}, None)
        state = LogState(TOPIC, incarnation, 1, 0, None, None, 0, 0, 0)
        checker.logs.at_ledger("take", (TOPIC,), {}, state)
        assert ("p" not in seen.log(TOPIC).marks) == is_deleted


def test_a_letter_may_be_given_up_where_a_store_has_been_full() -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    checker.terms.has_been_full = True
    seen.log(TOPIC).at[FIRST] = Appended(FIRST, "p", (0,), (1,), None, 0, 0.0)
    checker.cursors.passed(TOPIC, NAME, [FIRST], Because.LETTER_REFUSED)
    assert not seen.violations


@pytest.mark.parametrize(
    ("is_made", "answered_s", "is_right"),
    [(False, 1.0, True), (True, None, True), (True, 3.0, True), (True, 1.0, False)],
    ids=["deleted", "moving", "moved-since", "moved-before"],
)
def test_who_asks_while_a_subscription_is_moved_may_be_told_what_was(
    is_made: bool, answered_s: float | None, is_right: bool
) -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    entry = Appended(FIRST, "p", (0,), (1,), None, 0, 0.0)
    seen.log(TOPIC).at[FIRST] = entry
    seen.subscription(TOPIC, NAME).is_made = is_made
    checker.administration.moves(str(TOPIC), NAME, None).answered_s = answered_s
    checker.administration.explained(str(TOPIC), NAME, FIRST, ["REASON_ACKNOWLEDGED"], asked_s=2.0)
    assert bool(seen.violations) != is_right


def large(seen: Seen, *entry_ids: int, of: int) -> None:
    """The first chunks of a large message, at these places in the log."""
    log = seen.log(TOPIC)
    for chunk_id, entry_id in enumerate(entry_ids):
        at = Position(1, entry_id)
        log.at[at] = Appended(at, "p", (0,), (1,), Chunk("u", chunk_id, of, 9), 0, 0.0)
        log.entries.append(log.at[at])
        log.attempts.setdefault(("p", "u"), []).append(at)
        log.last["p"] = log.at[at]
        seen.sent.setdefault(1, Sent(1, str(TOPIC), "p", 0, None, "", 0.0, 9))


@pytest.mark.parametrize(("begins_at", "is_right"), [(Position(1, 1), True), (FIRST, False)])
def test_a_chunk_may_be_passed_whose_message_began_before_its_subscription(
    begins_at: Position, is_right: bool
) -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    checker.cursors.created(TOPIC, NAME, begins_at)  # made before its entries were stored
    large(seen, 1, 2, of=3)
    checker.cursors.passed(TOPIC, NAME, [Position(1, 2)], Because.HEADLESS)
    assert bool(seen.violations) != is_right


@pytest.mark.parametrize(("taken_back_to", "is_right"), [(FIRST, True), (Position(1, 2), False)])
def test_a_cursor_that_is_taken_back_begins_there(taken_back_to: Position, is_right: bool) -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    checker.cursors.created(TOPIC, NAME, Position(1, 50))
    changed(checker, taken_back_to)
    large(seen, 1, 2, of=3)
    dropped = Dropped(DropReason.HEADLESS, "p", 0, "u", (Position(1, 2),))
    checker.deliveries.dropped(str(TOPIC), NAME, dropped, Incomplete.REFUSE)
    assert bool(seen.violations) != is_right


@pytest.mark.parametrize(("refused", "is_right"), [(3, True), (1, False)])
def test_letters_of_a_cursor_that_is_deleted_may_be_on_their_way(
    refused: int, is_right: bool
) -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    checker.terms.is_exact = True
    checker.cursors.created(TOPIC, NAME, None)
    subscription = seen.subscription(TOPIC, NAME)
    subscription.redeliveries_max = 2
    subscription.refused[FIRST] = refused
    checker.cursors.deleting(TOPIC, NAME)
    checker.cursors.deleted(TOPIC, NAME)
    large(seen, 0, of=2)
    origin = Origin(str(TOPIC), NAME, FIRST)
    checker.logs._check_failures(seen.subscription(TOPIC, NAME), origin)
    assert bool(seen.violations) != is_right
