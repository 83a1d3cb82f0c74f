"""How a cursor moves, case by case."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from seqgate.services.cursor.adapters.memory import MemoryCursorStore, MemoryHoles
from seqgate.services.cursor.core.cursor import (
    BEFORE_FIRST,
    NOTE_BYTES_MAX,
    NOTES_BYTES_PAGE,
    PROPERTIES_BYTES_MAX,
    PROPERTIES_MAX,
    AlreadyMarkDeleted,
    Attempts,
    BatchAck,
    Caller,
    CursorState,
    InvalidPosition,
    InvalidProperty,
    LeaseHeld,
    Range,
    RevisionConflict,
    Succession,
)
from seqgate.services.cursor.core.state import PAGE_ENTRIES, Attempted, Batch, Head, Lease
from seqgate.services.errors import DomainError, Fenced
from seqgate.types import Position, TopicName

TOPIC = TopicName.parse("a/b/c")
NOBODY = Caller()


def at(entry_id: int, ledger_id: int = 1) -> Position:
    return Position(ledger_id, entry_id)


def run(first: int, last: int | None = None, ledger_id: int = 1) -> Range:
    return Range(Position(ledger_id, first), first if last is None else last)


def cursor(mark_delete: Position | None = None, **more: Any) -> CursorState:
    return CursorState(Head(TOPIC, "n", 0, mark_delete, **more), MemoryHoles())


def acknowledge(
    state: CursorState, *given: Range | BatchAck, caller: Caller = NOBODY
) -> Position | None:
    state.acknowledge(
        [each for each in given if isinstance(each, Range)],
        [each for each in given if isinstance(each, BatchAck)],
        caller,
    )
    return state.head.mark_delete


def beyond(state: CursorState) -> list[Range | BatchAck]:
    ranges, batches, _ = state.acknowledged(None, 1_000)
    return [*ranges, *batches]


def picture(state: CursorState) -> Any:
    holes = state.holes
    assert isinstance(holes, MemoryHoles)
    kept = [dict(each.values) for each in (holes._pages, holes._batches, holes._attempts)]
    return replace(state.head), dict(holes.successions), kept


def refused(state: CursorState, error: type[DomainError], call: Callable[[], Any]) -> Any:
    """The refusal's details, after checking that nothing changed."""
    before = picture(state)
    with pytest.raises(error) as caught:
        call()
    assert picture(state) == before
    return caught.value.details


# Mark-delete.


@pytest.mark.parametrize(
    ("properties", "after"), [({"a": "4"}, {"a": "4"}), ({}, {}), ({"b": "1"}, {"b": "1"})]
)
@pytest.mark.parametrize("position", [at(3), at(4), at(0, ledger_id=2)])
def test_a_mark_delete_sets_position_and_properties_together(
    position: Position, properties: Mapping[str, str], after: Mapping[str, str]
) -> None:
    state = cursor()
    state.mark_delete(at(3), {"a": "1"}, NOBODY)
    state.mark_delete(position, properties, NOBODY)

    assert (state.head.mark_delete, state.head.mark_delete_properties) == (position, after)
    assert state.head.revision == 2


def test_acknowledgements_keep_the_properties() -> None:
    state = cursor()
    state.mark_delete(at(3), {"a": "1"}, NOBODY)

    assert acknowledge(state, run(4)) == at(4)
    assert state.head.mark_delete_properties == {"a": "1"}
    assert state.head.revision == 2
    acknowledge(state, run(9))
    assert state.head.revision == 2, "only a mark-delete position that moves is a new revision"


@pytest.mark.parametrize(
    ("position", "caller", "error"),
    [
        (at(4), NOBODY, AlreadyMarkDeleted),
        (at(9), NOBODY, None),
        (at(5), Caller(log_end=at(9)), None),
        (at(9), Caller(log_end=at(9)), None),
        (at(10), Caller(log_end=at(9)), InvalidPosition),
        (at(0, ledger_id=2), Caller(log_end=at(9)), InvalidPosition),
        (at(9), Caller(revision=7), None),
        (at(9), Caller(revision=6), RevisionConflict),
        (at(9), Caller(revision=8), RevisionConflict),
        (at(9), Caller(epoch=3), None),
        (at(9), Caller(epoch=2), Fenced),
        (at(9), Caller(epoch=4), Fenced),  # never granted
        (at(9, ledger_id=0), NOBODY, InvalidPosition),
        (at(9), Caller(successions=(Succession(at(9), at(10)),)), InvalidPosition),
        (at(9), Caller(successions=(Succession(at(9), at(0, ledger_id=2)),)), None),
    ],
)
def test_an_invalid_mark_delete_is_refused(
    position: Position, caller: Caller, error: type[DomainError] | None
) -> None:
    state = cursor(at(5), revision=7, lease=Lease("o", 3, 0))
    acknowledge(state, run(7), BatchAck(at(8), 2, (1,)))
    state.record_attempts([at(6), at(8)], NOBODY)

    def call() -> None:
        state.mark_delete(position, {"a": "1"}, caller)

    if error is None:
        call()
        assert (state.head.mark_delete, state.head.revision) == (position, 8)
    else:
        refused(state, error, call)


def test_an_epoch_is_fenced_when_there_was_no_lease() -> None:
    state = cursor()
    refused(state, Fenced, lambda: state.mark_delete(at(1), {}, Caller(epoch=0)))


def test_a_refusal_has_the_cursors_position() -> None:
    state = cursor(at(5))
    details = refused(state, AlreadyMarkDeleted, lambda: state.mark_delete(at(4), {}, NOBODY))
    assert details == {"mark_delete": at(5)}


def test_a_mark_delete_absorbs_adjacent_runs_and_forgets_covered_ones() -> None:
    state = cursor(at(0))
    acknowledge(
        state, run(2), run(5, 6), run(9), BatchAck(at(3), 3, (0,)), BatchAck(at(8), 2, (0,))
    )
    state.record_attempts([at(1), at(8)], NOBODY)

    state.mark_delete(at(4), {}, NOBODY)

    assert state.head.mark_delete == at(6)
    assert beyond(state) == [run(9), BatchAck(at(8), 2, (0,))]
    assert (state.head.acknowledged, state.head.partial) == (1, 1)
    assert [state.holes.attempts(at(each)) for each in (1, 8)] == [0, 1]


# Acknowledgements.


def test_entries_may_be_acknowledged_in_reverse() -> None:
    state = cursor()
    for entry, acknowledged in ((3, 1), (2, 2), (1, 3)):
        assert acknowledge(state, run(entry)) is None
        assert state.head.acknowledged == acknowledged
    assert acknowledge(state, run(2)) is None, "twice changes nothing"
    assert (state.head.acknowledged, state.head.revision) == (3, 0)

    assert acknowledge(state, run(0)) == at(3)
    assert (state.head.acknowledged, state.head.revision) == (0, 1)
    assert beyond(state) == []


def test_holes_stay_until_they_are_filled() -> None:
    state = cursor()
    acknowledge(state, run(7, 9), run(2), run(5))
    assert beyond(state) == [run(2), run(5), run(7, 9)]

    assert acknowledge(state, run(0, 19)) == at(19)
    assert beyond(state) == []
    assert acknowledge(state, run(3, 12)) == at(19), "a stale range is ignored"
    assert (state.head.acknowledged, state.head.revision) == (0, 1)


@pytest.mark.parametrize(
    ("given", "after", "left"),
    [
        ([run(6)], 6, []),
        ([run(0, 6)], 6, []),
        ([run(8), run(6)], 6, [run(8)]),
        ([run(7), run(6)], 7, []),
        ([run(8, 9), run(6, 8)], 9, []),
        ([run(7)], 5, [run(7)]),
        ([run(6, 10**12)], 10**12, []),  # needs no pages
        ([run(0, 10**12)], 10**12, []),
        ([run(PAGE_ENTRIES - 1, PAGE_ENTRIES)], 5, [run(PAGE_ENTRIES - 1, PAGE_ENTRIES)]),
        ([run(7, 2 * PAGE_ENTRIES), run(6)], 2 * PAGE_ENTRIES, []),
        ([run(7, PAGE_ENTRIES - 1), BatchAck(at(6), 1, (0,))], PAGE_ENTRIES - 1, []),
    ],
)
def test_an_adjacent_run_moves_the_cursor(
    given: list[Range | BatchAck], after: int, left: list[Range]
) -> None:
    state = cursor(at(5))
    assert acknowledge(state, *given) == at(after)
    assert beyond(state) == left
    assert state.head.acknowledged == sum(
        each.last_entry - each.first.entry_id + 1 for each in left
    )


@pytest.mark.parametrize(
    ("given", "caller", "error"),
    [
        ([run(6), run(8, 10)], Caller(log_end=at(9)), InvalidPosition),
        ([run(6), BatchAck(at(10), 2, (0,))], Caller(log_end=at(9)), InvalidPosition),
        ([run(6)], Caller(epoch=2), Fenced),
        ([run(6)], Caller(revision=1), RevisionConflict),
        ([run(6), run(9, 8)], NOBODY, InvalidPosition),
        ([run(6), BatchAck(at(8), 3, (0,))], NOBODY, InvalidPosition),  # the batch has two
        ([run(6), BatchAck(at(9), 2, (2,))], NOBODY, InvalidPosition),
        ([BatchAck(at(9), 2, (1,)), BatchAck(at(9), 3, (1,))], NOBODY, InvalidPosition),
    ],
)
def test_a_call_is_applied_whole_or_not_at_all(
    given: list[Range | BatchAck], caller: Caller, error: type[DomainError]
) -> None:
    state = cursor(at(5), revision=7, lease=Lease("o", 3, 0))
    acknowledge(state, BatchAck(at(8), 2, (1,)))
    refused(state, error, lambda: acknowledge(state, *given, caller=caller))


# Batches.


def test_a_batch_is_acknowledged_message_by_message() -> None:
    state = cursor(at(5))
    for indexes, known in (
        ((2, 3, 4), (2, 3, 4)),
        ((3, 4, 5, 6, 7, 8), (2, 3, 4, 5, 6, 7, 8)),
        ((0,), (0, 2, 3, 4, 5, 6, 7, 8)),
        ((), (0, 2, 3, 4, 5, 6, 7, 8)),
    ):
        acknowledge(state, BatchAck(at(6), 10, indexes))
        assert beyond(state) == [BatchAck(at(6), 10, known)]
        assert (state.head.partial, state.head.acknowledged, state.head.revision) == (1, 0, 0)

    assert acknowledge(state, BatchAck(at(6), 10, (1, 9))) == at(6)
    assert beyond(state) == []
    assert (state.head.partial, state.head.acknowledged, state.head.revision) == (0, 0, 1)


@pytest.mark.parametrize(
    "step",
    [
        lambda state: acknowledge(state, run(7)),
        lambda state: acknowledge(state, run(6, 9)),
        lambda state: acknowledge(state, BatchAck(at(7), 3, (1,)), run(7)),
        lambda state: acknowledge(state, BatchAck(at(7), 3, (1, 2))),
        lambda state: state.mark_delete(at(7), {}, NOBODY),
        lambda state: state.mark_delete(at(0, ledger_id=2), {}, NOBODY),
        lambda state: state.reset(None, NOBODY),
        lambda state: state.reset(at(6), NOBODY),
    ],
)
def test_the_state_of_a_batch_ends_with(step: Callable[[CursorState], Any]) -> None:
    state = cursor(at(5))
    acknowledge(state, BatchAck(at(7), 3, (0,)))
    state.record_attempts([at(7)], NOBODY)

    step(state)

    assert state.holes.batch(at(7)) is None
    assert state.holes.attempts(at(7)) == 0
    assert state.head.partial == 0


@pytest.mark.parametrize("size", [3, 4])
def test_acknowledging_all_messages_acknowledges_the_batch(size: int) -> None:
    """Also for a caller that no longer knows the size of the batch."""
    state = cursor(at(5))
    acknowledge(state, BatchAck(at(7), 3, (0, 1, 2)))
    acknowledge(state, BatchAck(at(7), size, (0,)), BatchAck(at(3), size, (9,)))
    assert beyond(state) == [run(7)]


def test_a_batch_without_acknowledged_messages_is_not_stored() -> None:
    state = cursor(at(5))
    acknowledge(state, BatchAck(at(7), 3, ()))
    assert (state.holes.batch(at(7)), state.head.partial) == (None, 0)


# Ends of ledgers.

TO_2 = Succession(at(9), at(0, ledger_id=2))
TO_4 = Succession(at(0, ledger_id=2), at(5, ledger_id=4))


@pytest.mark.parametrize(
    ("said", "after"),
    [
        ((), at(9)),
        ((TO_4,), at(9)),
        ((TO_2,), at(0, ledger_id=2)),
        ((TO_2, TO_4), at(6, ledger_id=4)),
    ],
)
@pytest.mark.parametrize("when", ["first", "then", "last"])
def test_the_end_of_a_ledger_is_passed_once_it_is_known(
    said: tuple[Succession, ...], after: Position, when: str
) -> None:
    state, knows = cursor(at(5)), Caller(successions=said)
    acknowledge(state, run(0, ledger_id=2), caller=knows if when == "first" else NOBODY)
    acknowledge(state, run(5, 6, ledger_id=4), caller=knows if when == "first" else NOBODY)
    acknowledge(state, run(6, 9), caller=knows if when == "then" else NOBODY)
    acknowledge(state, caller=knows if when == "last" else NOBODY)

    assert state.head.mark_delete == after


def test_a_mark_delete_passes_a_ledgers_end_only_if_its_last_entry_is_acknowledged() -> None:
    state = cursor()
    state.mark_delete(at(9), {}, Caller(successions=(TO_2,)))
    assert state.head.mark_delete == at(9)
    assert acknowledge(state, run(0, 4, ledger_id=2)) == at(4, ledger_id=2)


def test_a_succession_is_ignored_when_its_ledger_has_later_entries() -> None:
    """A claim that ledger 1 ends with entry 9 is wrong if entry 10 is acknowledged: stopping is
    safe, skipping possible later entries is not."""
    state = cursor(at(8))
    acknowledge(state, run(10), caller=Caller(successions=(TO_2,)))
    acknowledge(state, run(0, ledger_id=2))
    assert acknowledge(state, run(9), run(1, ledger_id=2)) == at(10)
    assert beyond(state) == [run(0, 1, ledger_id=2)]


def test_a_succession_is_ignored_when_the_same_call_has_later_entries() -> None:
    state = cursor(at(8))
    acknowledge(state, run(10))
    first_of_2 = run(0, ledger_id=2)
    assert acknowledge(state, run(9), first_of_2, caller=Caller(successions=(TO_2,))) == at(10)
    assert beyond(state) == [first_of_2]


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ((Succession(at(9), at(1, ledger_id=2)),), (TO_2,)),
        ((Succession(at(9), at(0, ledger_id=3)),), (TO_2,)),
        ((TO_2, Succession(at(9), at(0, ledger_id=3))), ()),
        ((Succession(at(9), at(10)),), ()),
        ((Succession(at(0, ledger_id=2), at(9)),), ()),
    ],
)
def test_contradictory_successions_are_refused(
    said: tuple[Succession, ...], known: tuple[Succession, ...]
) -> None:
    state = cursor()
    acknowledge(state, caller=Caller(successions=known))
    refused(
        state,
        InvalidPosition,
        lambda: acknowledge(state, run(0), caller=Caller(None, None, None, said)),
    )


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "given in the same call"])
def test_a_succession_moves_forward_after_a_trim(is_known: bool) -> None:
    """A subscription was moved back, and the log has been trimmed since."""
    state = cursor(at(9))
    acknowledge(state, caller=Caller(successions=(TO_2,)))
    trimmed = Succession(BEFORE_FIRST, at(0, ledger_id=3))
    said = [Succession(at(9), at(0, ledger_id=3))]
    if is_known:
        acknowledge(state, caller=Caller(successions=(trimmed,)))
    else:
        said.append(trimmed)
    assert acknowledge(state, run(0, ledger_id=3), caller=Caller(successions=tuple(said))) == at(
        0, ledger_id=3
    )
    # A caller that does not know of the trim contradicts nothing; a start beyond the trim does.
    acknowledge(state, caller=Caller(successions=(TO_2,)))
    assert state.holes.next_after(at(9)) == at(0, ledger_id=3)
    beyond_it = Caller(successions=(Succession(at(9), at(0, ledger_id=4)),))
    refused(state, InvalidPosition, lambda: acknowledge(state, caller=beyond_it))


def test_the_first_entry_of_a_topic_is_1_0_until_it_is_trimmed() -> None:
    state = cursor()
    assert acknowledge(state, run(1), run(0, 2, ledger_id=3)) is None
    trimmed = Caller(successions=(Succession(BEFORE_FIRST, at(1, ledger_id=3)),))
    assert acknowledge(state, caller=trimmed) == at(2, ledger_id=3)
    assert (beyond(state), state.head.acknowledged) == ([], 0)


def test_a_further_trim_moves_the_start_of_the_log() -> None:
    state = cursor()
    for ledger_id in (3, 5, 4):  # the last one is outdated
        first = Succession(BEFORE_FIRST, at(0, ledger_id=ledger_id))
        acknowledge(state, caller=Caller(successions=(first,)))
    assert acknowledge(state, run(0, ledger_id=4)) is None
    assert acknowledge(state, run(0, ledger_id=5)) == at(0, ledger_id=5)


# Reset.


@pytest.mark.parametrize("position", [None, at(2), at(5), at(0, ledger_id=7)])
def test_a_reset_moves_to_the_given_position(position: Position | None) -> None:
    state = cursor(at(3), mark_delete_properties={"a": "1"}, properties={"b": "2"}, revision=4)
    acknowledge(state, run(6, 8), BatchAck(at(9), 2, (0,)))
    state.record_attempts([at(5)], NOBODY)

    state.reset(position, NOBODY)

    expected = cursor(position, properties={"b": "2"}, revision=5)
    assert picture(state) == picture(expected)


def test_a_reset_is_fenced() -> None:
    state = cursor(at(3), lease=Lease("o", 3, 0))
    refused(state, Fenced, lambda: state.reset(None, Caller(epoch=2)))


# Reading.


def test_pages_of_holes_may_be_cut_anywhere() -> None:
    state = cursor(at(5))
    long = run(20, 3 * PAGE_ENTRIES)
    other = run(0, ledger_id=2)
    batch = BatchAck(at(12), 3, (0, 2))
    acknowledge(state, run(10), run(14), long, other, batch)

    expected: list[Range | BatchAck] = [run(10), batch, run(14), long, other]
    for limit in range(1, 7):
        found: list[Range | BatchAck] = []
        after = None
        while True:
            ranges, batches, after = state.acknowledged(after, limit)
            found += sorted([*ranges, *batches])
            if after is None:
                break
        assert found == expected


@pytest.mark.parametrize(
    ("after", "first"),
    [
        (at(0), run(10, 12)),  # the mark-delete position is further
        (at(9), run(10, 12)),
        (at(10), run(11, 12)),
        (at(12), run(0, ledger_id=2)),
        (at(9, ledger_id=2), None),
    ],
)
def test_reading_begins_after_a_position(after: Position, first: Range | None) -> None:
    state = cursor(at(5))
    acknowledge(state, run(10, 12), run(0, ledger_id=2))
    assert state.acknowledged(after, 1).ranges == ([] if first is None else [first])


def test_a_run_does_not_span_ledgers() -> None:
    state = cursor()
    runs = [run(1, PAGE_ENTRIES - 1), run(PAGE_ENTRIES, ledger_id=2)]
    acknowledge(state, *runs)
    assert beyond(state) == runs


# Attempts.


def test_attempts_are_counted_until_the_entry_is_acknowledged() -> None:
    state = cursor(at(5))
    acknowledge(state, run(8))
    assert state.record_attempts([at(7), at(8), at(5), at(7)], NOBODY) == [1, 0, 0, 2]
    assert state.record_attempts([at(7)], NOBODY) == [3]
    assert state.head.revision == 0

    acknowledge(state, run(7))
    assert state.record_attempts([at(7)], NOBODY) == [0]
    refused(state, Fenced, lambda: state.record_attempts([at(6)], Caller(epoch=1)))


@pytest.mark.parametrize(
    ("before", "given", "after"),
    [
        (0, 1, 1),
        (0, 7, 7),
        (3, 4, 4),
        (3, 3, 3),
        (3, 2, 3),
        (3, 0, 3),
        (0, 0, 0),
        (1, 2**32 - 1, 2**32 - 1),
    ],
)
def test_explicit_attempts_are_a_lower_bound(before: int, given: int, after: int) -> None:
    state = cursor(at(5))
    for _ in range(before):
        state.record_attempts([at(7)], NOBODY)
    for _ in range(2):  # a retry counts nothing
        assert state.record_attempts([at(7), at(5)], NOBODY, [given, 9]) == [after, 0]
    assert state.attempts(None, 9) == Attempts([Attempted(at(7), after)] if after else [], None)


def test_an_entry_named_twice_has_its_highest_count() -> None:
    state = cursor()
    assert state.record_attempts([at(7), at(8), at(7)], NOBODY, [4, 1, 2]) == [4, 1, 4]


@pytest.mark.parametrize("given", [[1], [1, 2, 3]])
def test_attempts_are_given_for_each_position_or_for_none(given: list[int]) -> None:
    state = cursor()
    positions = [at(7), at(8)]
    refused(state, InvalidPosition, lambda: state.record_attempts(positions, NOBODY, given))


def test_a_note_is_replaced_unless_the_count_is_higher() -> None:
    state = cursor(at(5))
    places = [at(7), at(8), at(5)]
    state.record_attempts(places, NOBODY, [2, 1, 1], [b"two", b"one", b"gone"])
    state.record_attempts([at(7)], NOBODY, [1], [b"late"])
    state.record_attempts([at(8)], NOBODY, [2])
    assert state.attempts(None, 9).counts == [(at(7), 2, b"two"), (at(8), 2, b"one")]
    for note in (b"again", b""):
        state.record_attempts([at(7)], NOBODY, [2], [note])
        assert state.attempts(None, 1).counts == [(at(7), 2, note)]
    acknowledge(state, run(8))
    assert state.attempts(at(7), 9).counts == []


@pytest.mark.parametrize(
    ("attempts", "notes"),
    [([1, 1], [b""]), ([], [b"", b""]), ([1, 1], [b"", bytes(NOTE_BYTES_MAX + 1)])],
)
def test_a_note_is_short_and_beside_a_count(attempts: list[int], notes: list[bytes]) -> None:
    state = cursor()
    places = [at(7), at(8)]
    refused(state, InvalidPosition, lambda: state.record_attempts(places, NOBODY, attempts, notes))
    state.record_attempts(places, NOBODY, [1, 1], [b"", bytes(NOTE_BYTES_MAX)])


def test_notes_bound_a_page_of_attempts() -> None:
    state = cursor()
    fitting = -(-NOTES_BYTES_PAGE // NOTE_BYTES_MAX)
    places = [at(each) for each in range(1, fitting + 2)]
    notes = [bytes(NOTE_BYTES_MAX)] * len(places)
    state.record_attempts(places, NOBODY, [1] * len(places), notes)
    counts, after = state.attempts(None, len(places))
    assert ([each.position for each in counts], after) == (places[:fitting], places[-2])
    assert len(state.attempts(after, len(places)).counts) == 1


def test_counts_of_attempts_saturate() -> None:
    state = cursor()
    state.record_attempts([at(7)], NOBODY, [2**32 - 2])
    assert state.record_attempts([at(7), at(7)], NOBODY) == [2**32 - 1, 2**32 - 1]


def test_attempts_are_read_in_pages() -> None:
    state = cursor(at(1))
    places = [at(2), at(4), at(3, 2), at(0, 5)]
    state.record_attempts(reversed(places), NOBODY, [4, 3, 2, 1])
    state.record_attempts([at(3)], NOBODY)
    acknowledge(state, run(3))
    counts = [Attempted(place, number) for number, place in enumerate(places, start=1)]
    assert state.attempts(None, 4) == Attempts(counts, None)
    assert state.attempts(None, 3) == Attempts(counts[:3], at(3, 2))
    assert state.attempts(at(3, 2), 3) == Attempts(counts[3:], None)
    assert state.attempts(at(2), 1) == Attempts(counts[1:2], at(4))
    assert state.attempts(at(0, 5), 1) == Attempts([], None)


# Properties of the cursor.


@pytest.mark.parametrize(
    ("put", "remove", "clear", "after"),
    [
        ({"a": "2"}, [], False, {"a": "2", "b": "1", "#seqgate.internal.x": "1"}),
        ({}, ["a", "unknown"], False, {"b": "1", "#seqgate.internal.x": "1"}),
        ({}, [], True, {"#seqgate.internal.x": "1"}),
        ({"c": "1"}, [], True, {"c": "1", "#seqgate.internal.x": "1"}),
        ({}, ["#seqgate.internal.x"], True, {}),
        ({"#seqgate.internal.x": "2"}, ["a", "b"], False, {"#seqgate.internal.x": "2"}),
        ({"a": "2"}, ["a"], True, {"a": "2", "#seqgate.internal.x": "1"}),
    ],
)
def test_properties_are_put_removed_and_cleared(
    put: dict[str, str], remove: list[str], clear: bool, after: dict[str, str]
) -> None:
    state = cursor(at(5), properties={"a": "1", "b": "1", "#seqgate.internal.x": "1"}, revision=7)
    refused(
        state,
        RevisionConflict,
        lambda: state.update_properties(put, remove, Caller(revision=6), clear=clear),
    )
    state.update_properties(put, remove, Caller(revision=7), clear=clear)
    assert (state.head.properties, state.head.revision) == (after, 8)

    state.mark_delete(at(6), {}, NOBODY)
    acknowledge(state, run(7))
    assert state.head.properties == after


def test_the_number_of_properties_is_bounded_across_steps() -> None:
    many = {str(each): "" for each in range(PROPERTIES_MAX)}
    state = cursor(properties=many)
    refused(
        state, InvalidProperty, lambda: state.update_properties({"a": ""}, [], NOBODY, clear=False)
    )
    state.update_properties({"a": ""}, ["0"], NOBODY, clear=False)
    assert len(state.head.properties) == PROPERTIES_MAX


def test_the_size_of_properties_is_bounded_across_steps() -> None:
    half = "x" * (PROPERTIES_BYTES_MAX // 2 - 1)
    state = cursor(properties={"a": half, "b": half})
    for more in ({"c": ""}, {"a": half + "x"}, {"b": half[1:] + "é"}):
        refused(
            state,
            InvalidProperty,
            partial(state.update_properties, more, [], NOBODY, clear=False),
        )
    state.update_properties({"c": half}, ["a"], NOBODY, clear=False)
    assert state.head.properties.keys() == {"b", "c"}


@pytest.mark.parametrize(
    "many",
    [
        {str(each): "" for each in range(PROPERTIES_MAX + 9)},
        {"a": "x" * PROPERTIES_BYTES_MAX, "b": "", "c": ""},
    ],
    ids=["many", "large"],
)
def test_properties_above_the_bounds_may_shrink(many: dict[str, str]) -> None:
    state = cursor(properties=many)
    last = list(many)[-1]
    state.update_properties({}, [last], NOBODY, clear=False)
    assert last not in state.head.properties


# Leases.


@pytest.mark.parametrize(
    ("owner", "now_ms", "after"),
    [
        ("a", 1_000, Lease("a", 3, 2_000, 1_000)),
        ("a", 1_500, Lease("a", 3, 2_500, 1_000)),
        ("a", 1_999, Lease("a", 3, 2_999, 1_000)),
        ("a", 2_000, Lease("a", 5, 3_000, 1_000)),  # the end of the lease is exclusive
        ("b", 2_000, Lease("b", 5, 3_000, 1_000)),
        ("b", 9_000, Lease("b", 5, 10_000, 1_000)),
        ("b", 1_999, 1),
        ("b", 1_000, 1_000),
        ("a", 10, Lease("a", 3, 2_000, 1_990)),  # the clock went back: nothing is lost
        ("b", 10, 1_990),  # nor given away
    ],
)
def test_a_lease_is_acquired_by_its_owner_or_after_its_end(
    owner: str, now_ms: int, after: Lease | int
) -> None:
    state = cursor(at(5), revision=7, lease=Lease("a", 3, 2_000))
    if isinstance(after, int):
        details = refused(state, LeaseHeld, lambda: state.acquire_lease(owner, now_ms, 1_000))
        assert details == {"owner": "a", "remaining_ms": after}
    else:
        assert state.acquire_lease(owner, now_ms, 1_000) == after == state.head.lease
        assert state.head.revision == 7


def test_the_first_lease_has_the_first_epoch() -> None:
    assert cursor().acquire_lease("a", 5, 100) == Lease("a", 1, 105, 100)


@pytest.mark.parametrize(
    ("lease", "owner", "epoch", "now_ms", "expires_ms"),
    [
        (Lease("a", 3, 2_000), "a", 3, 1_500, 2_500),
        (Lease("a", 3, 2_000), "a", 3, 9_000, 10_000),  # expired, but not taken
        (Lease("a", 3, 2_000), "a", 3, 10, 2_000),  # the clock went back
        (Lease("a", 3, 2_000), "a", 2, 1_500, None),
        (Lease("a", 3, 2_000), "a", 4, 1_500, None),
        (Lease("a", 3, 2_000), "b", 3, 1_500, None),
        (None, "a", 0, 1_500, None),
    ],
)
def test_only_the_current_owner_and_epoch_renew_a_lease(
    lease: Lease | None, owner: str, epoch: int, now_ms: int, expires_ms: int | None
) -> None:
    state = cursor(lease=lease)
    if expires_ms is None:
        refused(state, Fenced, lambda: state.renew_lease(owner, epoch, now_ms, 1_000))
    else:
        assert state.renew_lease(owner, epoch, now_ms, 1_000) == Lease(
            owner, epoch, expires_ms, expires_ms - now_ms
        )


@pytest.mark.parametrize(
    ("lease", "owner", "epoch", "after"),
    [
        (Lease("a", 3, 2_000, 1_000), "a", 3, Lease("a", 4, 2_500, 1_000)),
        (Lease("a", 3, 2_000, 1_000), "a", 2, Lease("a", 3, 2_500, 1_000)),  # requested again
        (Lease("a", 3, 2_000, 1_000), "a", 1, None),
        (Lease("a", 3, 2_000, 1_000), "b", 2, None),
        (Lease("a", 3, 2_000, 1_000), "b", 3, None),
        (None, "a", 0, None),
    ],
)
def test_a_renewal_with_the_next_epoch_is_idempotent(
    lease: Lease | None, owner: str, epoch: int, after: Lease | None
) -> None:
    state = cursor(lease=lease)

    def renew() -> Lease:
        return state.renew_lease(owner, epoch, 1_500, 1_000, next_epoch=True)

    if after is None:
        refused(state, Fenced, renew)
    else:
        assert renew() == after == state.head.lease


def test_a_released_lease_is_free_and_its_epoch_is_spent() -> None:
    state = cursor()
    state.acquire_lease("a", 0, 1_000)
    for now_ms in (10, 20):
        state.release_lease(1, now_ms)
        assert state.head.lease == Lease("a", 1, 10, 0)
    state.mark_delete(at(1), {}, Caller(epoch=1))  # not taken since

    assert state.acquire_lease("b", 20, 1_000) == Lease("b", 3, 1_020, 1_000)
    refused(state, Fenced, lambda: state.release_lease(1, 30))
    refused(state, Fenced, lambda: state.renew_lease("a", 1, 30, 1_000))
    refused(state, Fenced, lambda: state.mark_delete(at(2), {}, Caller(epoch=1)))


@pytest.mark.parametrize("next_epoch", [False, True])
@pytest.mark.parametrize("owner", ["a", "b"])
def test_a_late_renewal_of_a_released_lease_is_fenced(owner: str, next_epoch: bool) -> None:
    """Otherwise its owner, which releases a lease to get a new epoch, acquires the same one: its
    new deliveries would have the tokens of its old ones."""
    state = cursor()
    state.acquire_lease("a", 0, 1_000)
    state.release_lease(1, 10)
    refused(state, Fenced, lambda: state.renew_lease("a", 1, 20, 1_000, next_epoch=next_epoch))
    assert state.acquire_lease(owner, 20, 1_000).epoch == 3


def test_a_repeated_step_to_a_released_epoch_is_fenced() -> None:
    state = cursor()
    state.acquire_lease("a", 0, 1_000)
    state.renew_lease("a", 1, 10, 1_000, next_epoch=True)
    state.release_lease(2, 20)
    refused(state, Fenced, lambda: state.renew_lease("a", 1, 30, 1_000, next_epoch=True))
    assert state.acquire_lease("a", 30, 1_000).epoch == 4


@pytest.mark.parametrize("epoch", [None, 3])
def test_a_reset_by_another_caller_ends_the_lease(epoch: int | None) -> None:
    state = cursor(at(5), lease=Lease("a", 3, 2_000))
    state.reset(at(1), Caller(epoch=epoch))
    if epoch is not None:
        state.mark_delete(at(6), {}, Caller(epoch=3))
        return
    for own in (3, 4):
        refused(state, Fenced, partial(state.mark_delete, at(6), {}, Caller(epoch=own)))
    assert state.head.mark_delete == at(1)
    assert state.acquire_lease("b", 1_000, 1_000).owner == "b"


@pytest.mark.parametrize("owner", ["a", "b"])
@pytest.mark.parametrize("behind_ms", [1, 5_000])
def test_a_released_lease_has_expired_even_by_a_slow_clock(owner: str, behind_ms: int) -> None:
    state = cursor()
    state.acquire_lease("a", 9_000, 1_000)
    state.release_lease(1, 9_500)
    assert state.acquire_lease(owner, 9_500 - behind_ms, 1_000).epoch == 3


# Many holes.


def test_no_call_iterates_over_a_million_holes() -> None:
    """Every second entry: no call may iterate over all holes."""
    count = 2 * 16 * PAGE_ENTRIES  # entries; half of them are acknowledged
    state = cursor()
    for number in range(count // PAGE_ENTRIES):
        state.holes.put_page(1, number, int("10" * (PAGE_ENTRIES // 2), 2))
    state.head.acknowledged = count // 2
    began = time.process_time()

    ranges = [run(each) for each in range(count + 1, count + 20_001, 2)]
    assert acknowledge(state, *ranges) is None
    assert state.head.acknowledged == count // 2 + 10_000

    page = state.acknowledged(at(1_000_001), 10_000)
    assert page.ranges == [run(each) for each in range(1_000_003, 1_020_003, 2)]

    for entry in range(0, 1_000, 2):
        assert acknowledge(state, run(entry)) == at(entry + 1)
    state.mark_delete(at(1_000_000), {}, NOBODY)
    assert state.head.mark_delete == at(1_000_001)
    assert state.head.acknowledged == (count + 20_000 - 1_000_002) // 2

    acknowledge(state, *[run(each) for each in range(1_000_004, 1_020_004, 2)])
    acknowledge(state, run(1_020_004, count + 20_000))
    assert acknowledge(state, run(1_000_002)) == at(count + 20_000)
    assert (state.head.acknowledged, beyond(state)) == (0, [])
    assert time.process_time() - began < 2, "a tenth of that is usual"


# The memory store: a step is applied as a whole or not at all.


async def test_a_step_that_fails_halfway_changes_nothing() -> None:
    store = MemoryCursorStore()
    await store.create(TOPIC, "n", mark_delete=None, properties={})

    def half(state: CursorState, now_ms: int) -> None:
        state.acknowledge([run(1)], [], Caller(successions=(TO_2,)))
        state.holes.put_batch(at(3), Batch(2, 1))
        raise Fenced("now")

    with pytest.raises(Fenced):
        await store.change(TOPIC, "n", half)
    head, created = await store.create(TOPIC, "n", mark_delete=at(1), properties={})
    assert (head, created) == (Head(TOPIC, "n", 0), False)
    assert await store.look(TOPIC, "n", beyond) == []
    assert await store.look(TOPIC, "n", lambda state: state.holes.next_after(at(9))) is None


async def test_cursors_of_a_topic_share_its_successions() -> None:
    store = MemoryCursorStore()
    for name in "ab":
        await store.create(TOPIC, name, mark_delete=at(5), properties={})
    await store.change(
        TOPIC, "a", lambda state, _: acknowledge(state, caller=Caller(successions=(TO_2,)))
    )
    moved = await store.change(
        TOPIC, "b", lambda state, _: acknowledge(state, run(6, 9), run(0, ledger_id=2))
    )
    assert moved == at(0, ledger_id=2)


# Imported batches: Pulsar's records do not have their sizes.


def imported(waiting: set[int], size: int = 64) -> CursorState:
    """A cursor with a batch of which these messages are unacknowledged."""
    state = cursor(at(0))
    indexes = tuple(sorted(set(range(size)) - waiting))
    acknowledge(state, BatchAck(at(5), size, indexes, is_guess=True))
    return state


@pytest.mark.parametrize("size", [4, 10, 64, 100])
def test_a_guessed_batch_size_is_corrected(size: int) -> None:
    state = imported({1, 3})
    acknowledge(state, BatchAck(at(5), size, (1,)))
    assert state.holes.batch(at(5)) == Batch(size, (1 << size) - 1 & ~(1 << 3))
    assert state.head.partial == 1
    refused(state, InvalidPosition, lambda: acknowledge(state, BatchAck(at(5), size + 1, (3,))))
    acknowledge(state, BatchAck(at(5), size, (3,)))
    assert (beyond(state), state.head.partial) == ([run(5)], 0)
    assert state.holes.batch(at(5)) is None


def test_a_batch_size_that_contradicts_its_acknowledgements_is_refused() -> None:
    state = imported({1, 3})
    details = refused(state, InvalidPosition, lambda: acknowledge(state, BatchAck(at(5), 3, (1,))))
    assert details["size"] == 64


def test_a_batch_acknowledged_by_a_guessed_size_leaves_nothing_behind() -> None:
    state = imported({0, 1, 2})
    acknowledge(state, BatchAck(at(5), 3, ()))
    assert (state.holes.batch(at(5)), state.head.partial) == (None, 0)
    acknowledge(state, BatchAck(at(5), 3, (1,)))
    assert (state.holes.batch(at(5)), state.head.partial) == (Batch(3, 0b10), 1)
