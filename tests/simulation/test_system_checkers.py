"""The verdicts of the checkers of histories."""

import pytest

from seqgate.client import Dropped, DropReason, Incomplete
from seqgate.services.cursor.adapters.memory import MemoryHoles
from seqgate.services.cursor.core.cursor import CursorState
from seqgate.services.cursor.core.state import Batch, Head
from seqgate.services.dedup.core.sequence import Marks
from seqgate.services.dedup.core.topic import TopicState, Tracked
from seqgate.services.dispatcher.core.effects import Because
from seqgate.services.dispatcher.letters import graveyard, returns
from seqgate.services.dispatcher.letters.returns import Return
from seqgate.services.ledger.ports import LogState
from seqgate.types import Chunk, Position, TopicName
from tests.simulation.system.checkers import Checker
from tests.simulation.system.seen import Appended, Origin, Seen, Sent

TOPIC, NAME = TopicName.parse("t/n/topic"), "s"
FIRST = Position(1, 0)
PAYLOAD_BYTES = 1_100


def changed(checker: Checker, mark_delete: Position | None, **properties: str) -> None:
    """Change the subscription's cursor to this state."""
    head = Head(TOPIC, NAME, 0, mark_delete, properties=properties)
    checker.cursors.changed(TOPIC, NAME, CursorState(head, MemoryHoles()))


def test_a_key_is_remembered_across_resets_while_its_cursor_holds_it() -> None:
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
def test_a_dead_letter_above_the_ledgers_limit_may_be_abandoned(payload_bytes_max: int) -> None:
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
        pytest.param(1, "24 24 24 7", True, id="cut-and-producer-restarted"),
        pytest.param(1, "24 24 24", False, id="cut-and-unfinished"),
        pytest.param(None, "24 24 24 24", False, id="not-trimmed"),
        pytest.param(0, "24 24 24 24", False, id="trimmed-up-to-it"),
    ],
)
def test_a_message_cut_by_a_trim_is_complete_if_its_last_chunk_remains(
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
        pytest.param(3, 7, True, id="reported-as-trimmed-after-it"),
        pytest.param(3, 5, True, id="reported-by-an-earlier-trim"),
        pytest.param(2, 7, False, id="not-trimmed-at-all"),
        pytest.param(None, 5, False, id="never-stored"),
        pytest.param(3, 6, False, id="missing"),
    ],
)
def test_a_state_may_be_ahead_of_the_confirmed_position_by_trimmed_entries(
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
def test_a_dead_letter_may_be_abandoned_when_its_topic_refuses_its_producer(goes_to: str) -> None:
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
def test_a_message_with_repeated_chunks_in_order_is_stored(chunk_ids: str, is_whole: bool) -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    sent = seen.sent[1] = Sent(1, str(TOPIC), "p", 0, None, "", 0.0, 9)
    log = seen.log(TOPIC)
    at = Position(1, 0)
    for entry_id, chunk_id in enumerate(chunk_ids.split()):
        at = Position(1, entry_id)
        log.at[at] = Appended(at, "p", (0,), (1,), Chunk("u", int(chunk_id), 3, 9), 0, 0.0)
        log.entries.append(log.at[at])
        log.attempts.setdefault(("p", "u"), []).append(at)
    checker.logs.answered(sent, 0, at, duplicate=False)
    assert bool(seen.violations) != is_whole


def test_a_recreated_cursor_proves_its_deletion() -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    checker.cursors.created(TOPIC, NAME, None)
    checker.cursors.deleting(TOPIC, NAME)
    seen.subscription(TOPIC, NAME).done[FIRST, 0] = (1, 1)
    checker.cursors.created(TOPIC, NAME, None)
    assert not seen.subscription(TOPIC, NAME).done
    seen.subscription(TOPIC, NAME).done[FIRST, 0] = (3, 1)
    checker.cursors.deleted(TOPIC, NAME)  # reported late
    assert seen.subscription(TOPIC, NAME).done


def test_a_recreated_topic_proves_its_deletion() -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    for incarnation, is_deleted in ((1, False), (1, False), (2, True)):
        seen.log(TOPIC).marks["p"] = 7
        checker.logs.at_ledger("deleting", (TOPIC,), {}, None)
        state = LogState(TOPIC, incarnation, 1, 0, None, None, 0, 0, 0)
        checker.logs.at_ledger("take", (TOPIC,), {}, state)
        assert ("p" not in seen.log(TOPIC).marks) == is_deleted


def test_a_topic_whose_cursors_are_to_be_removed_was_deleted() -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    subscription = seen.subscription(TOPIC, NAME)
    for is_deleting in (False, True):
        subscription.waiting = {FIRST: None}
        if is_deleting:
            checker.logs.at_ledger("deleting", (TOPIC,), {}, None)
        checker.logs.at_ledger("leaving", (), {}, [TOPIC])
        assert bool(subscription.waiting) != is_deleting


def test_a_dead_letter_may_be_abandoned_after_a_full_store() -> None:
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
def test_a_report_during_a_reset_may_show_the_state_before(
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
    """Store the first chunks of a large message at these entry ids."""
    log = seen.log(TOPIC)
    for chunk_id, entry_id in enumerate(entry_ids):
        at = Position(1, entry_id)
        log.at[at] = Appended(at, "p", (0,), (1,), Chunk("u", chunk_id, of, 9), 0, 0.0)
        log.entries.append(log.at[at])
        log.attempts.setdefault(("p", "u"), []).append(at)
        log.last["p"] = log.at[at]
        seen.sent.setdefault(1, Sent(1, str(TOPIC), "p", 0, None, "", 0.0, 9))


@pytest.mark.parametrize(("begins_at", "is_right"), [(Position(1, 1), True), (FIRST, False)])
def test_a_chunk_of_a_message_older_than_its_subscription_may_be_skipped(
    begins_at: Position, is_right: bool
) -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    checker.cursors.created(TOPIC, NAME, begins_at)  # made before its entries were stored
    large(seen, 1, 2, of=3)
    checker.cursors.passed(TOPIC, NAME, [Position(1, 2)], Because.HEADLESS)
    assert bool(seen.violations) != is_right


@pytest.mark.parametrize(("taken_back_to", "is_right"), [(FIRST, True), (Position(1, 2), False)])
def test_a_cursor_that_is_moved_back_starts_there(taken_back_to: Position, is_right: bool) -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    checker.cursors.created(TOPIC, NAME, Position(1, 50))
    changed(checker, taken_back_to)
    large(seen, 1, 2, of=3)
    dropped = Dropped(DropReason.HEADLESS, "p", 0, "u", (Position(1, 2),))
    checker.deliveries.dropped(str(TOPIC), NAME, dropped, Incomplete.REFUSE)
    assert bool(seen.violations) != is_right


@pytest.mark.parametrize("was_acknowledged", [False, True])
def test_a_reset_undoes_the_dead_letter_of_an_acknowledged_entry(was_acknowledged: bool) -> None:
    """A batch of which one message is acknowledged keeps it: the letter is not finished."""
    checker = Checker(seen := Seen(lambda: 0.0))
    entry = Appended(FIRST, "p", (0, 1), (1, 2), None, 0, 0.0)
    seen.log(TOPIC).entries.append(entry)
    seen.log(TOPIC).at[FIRST] = entry
    seen.sent[1], seen.sent[2] = (Sent(n, str(TOPIC), "p", n, None, "", 0.0, 9) for n in (1, 2))
    checker.cursors.created(TOPIC, NAME, None)
    seen.subscription(TOPIC, NAME).lettered.add((FIRST, 0))
    holes = MemoryHoles()
    holes.put_batch(FIRST, Batch(2, 0b01))
    before = Head(TOPIC, NAME, 0, FIRST if was_acknowledged else None, partial=1)
    checker.cursors.changed(TOPIC, NAME, CursorState(before, holes))
    checker.administration.moves(str(TOPIC), NAME, None)
    changed(checker, None)  # by the reset
    changed(checker, FIRST)
    assert bool(seen.violations) == was_acknowledged


@pytest.mark.parametrize(("refused", "is_right"), [(3, True), (1, False)])
def test_dead_letters_of_a_deleted_cursor_may_be_in_flight(refused: int, is_right: bool) -> None:
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


@pytest.mark.parametrize(
    ("from_start", "answered_s", "is_right"),
    [(True, None, True), (True, 2.0, True), (True, 0.5, False), (False, None, False)],
)
def test_filters_from_the_start_may_let_in_a_message_after_its_successor(
    from_start: bool, answered_s: float | None, is_right: bool
) -> None:
    now_s = 1.0
    checker = Checker(seen := Seen(lambda: now_s))
    subscription = seen.subscription(TOPIC, NAME)
    subscription.is_ordered = True
    for number, tag in enumerate(["red", "blue"]):
        seen.sent[number] = Sent(number, str(TOPIC), "p", number, "k", tag, 0.0, 9)
    checker.administration.filters(str(TOPIC), NAME, ["red"]).answered_s = 0.0
    checker.deliveries.delivered(str(TOPIC), NAME, "c", (1, 1), (Position(1, 1), 0), 1, 0)
    let_in = checker.administration.filters(str(TOPIC), NAME, [], from_start=from_start)
    let_in.answered_s = answered_s
    now_s = 2.0
    checker.deliveries.delivered(str(TOPIC), NAME, "c", (2, 1), (Position(1, 0), 0), 0, 0)
    assert bool(seen.violations) != is_right


@pytest.mark.parametrize(
    ("redrives", "asks", "violations"),
    [((1,), True, []), ((1,), False, ["SKIPPED"]), ((1, 1), True, ["REDRIVEN_TWICE"]),
     ((1, 2), True, [])],
)  # fmt: skip
def test_a_replayed_message_is_settled_once_by_each_number(
    redrives: tuple[int, ...], violations: list[str], *, asks: bool
) -> None:
    checker = Checker(seen := Seen(lambda: 0.0))
    log = seen.log(TOPIC)
    entry = Appended(FIRST, "p", (1,), (1,), None, 0, 0.0)
    log.entries.append(entry)
    log.at[FIRST] = entry
    subscription = seen.subscription(TOPIC, NAME)
    checker.deliveries.asks(str(TOPIC), NAME, [(FIRST, 0)], (1, 1))
    changed(checker, FIRST)
    assert FIRST in subscription.acknowledged
    for number in redrives:
        back = Return(TOPIC, FIRST, number, 1)
        changed(checker, FIRST, **{f"{returns._RETURN}1:0": back.to_text()})
        if asks:
            checker.deliveries.asks(str(TOPIC), NAME, [(FIRST, 0)], (1, 2))
        changed(checker, FIRST)
    assert [each.partition(":")[0] for each in seen.violations] == violations
