"""A store's mark of a producer equals deduplication's fold over its entries."""

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.dedup.core.sequence import Marks, advance
from seqgate.services.deduplication import Mark
from seqgate.services.ledger.core.entry import Entry
from seqgate.services.ledger.core.marks import folded, is_cut, last_mark, remembered
from seqgate.types import Position
from tests.support.entries import batch, chunk, large, marker, single

LARGE = st.builds(
    lambda sequence_id, uuid, first, last: large(sequence_id, uuid, 3)[first:last],
    st.integers(0, 4),
    st.sampled_from("ab"),
    st.integers(0, 2),
    st.integers(1, 3),
)
LOG = st.lists(
    LARGE
    | st.integers(0, 5).map(lambda each: [single(each)])
    | st.integers(0, 5).map(lambda each: [batch([each, each + 2])])
    | st.just([marker(9)]),
    max_size=8,
).map(lambda parts: [entry for part in parts for entry in part])
"""Logs of one producer, with deduplication on, off, or after the producer was forgotten."""


def served(marks: Marks, log: list[Entry]) -> Marks:
    """The marks that deduplication folds from a log."""
    messages = (each for each in log if not each.marker)
    return reduce(lambda now, each: advance(now, each.highest, each.chunk), messages, marks)


def as_mark(marks: Marks) -> Mark:
    return Mark(marks.persisted, marks.persisted_chunk)


@given(LOG)
def test_the_mark_equals_deduplications_fold(log: list[Entry]) -> None:
    marks = served(Marks(), log)
    assert folded(Mark(), log) == as_mark(marks)
    assert folded(Mark(), log).decided == marks.decided


@given(LOG, LOG)
def test_the_last_entries_determine_the_mark(before: list[Entry], log: list[Entry]) -> None:
    base = folded(Mark(), before)
    if base.chunk is None:
        assert last_mark(base, reversed(log)) == folded(base, log)


@given(LOG, st.lists(st.integers(0, 20), max_size=3))
def test_state_rebuilt_after_trims_equals_the_served_state(
    log: list[Entry], cuts: list[int]
) -> None:
    """Except if a message is cut that could otherwise be completed: it never is."""
    kept, start, cut = -1, 0, False
    for until in sorted(min(each, len(log)) for each in cuts):
        mark = folded(Mark(kept), log[start:until])
        kept, is_now_cut = remembered(mark, log[until:])
        cut, start = cut or is_now_cut, until
    rebuilt = served(Marks() if kept < 0 else Marks(kept, kept), log[start:])
    marks = served(Marks(), log)
    if cut:
        assert marks.persisted_chunk is not None
        assert (rebuilt.decided, rebuilt.persisted_chunk) == (marks.decided, None)
    else:
        assert rebuilt == marks


@given(LOG, st.integers(0, 20))
def test_rebuilt_state_is_ahead_only_amid_an_unfinished_message(
    log: list[Entry], until: int
) -> None:
    decided, _ = remembered(folded(Mark(), log[:until]), log[until:])
    base = Marks() if decided < 0 else Marks(decided, decided)
    for place in range(min(until, len(log)), len(log) + 1):
        rebuilt, marks = served(base, log[until:place]), served(Marks(), log[:place])
        if rebuilt.decided == marks.decided:
            continue
        assert marks.persisted_chunk is not None
        assert rebuilt.decided == marks.persisted
        later = [served(marks, log[place:end]) for end in range(place, len(log) + 1)]
        assert any(
            each.persisted_chunk is None or each.persisted != marks.persisted for each in later
        )


@given(LOG, st.integers(0, 20))
def test_every_cut_is_detected(log: list[Entry], until: int) -> None:
    placed = [(Position(1, place), entry) for place, entry in enumerate(log) if not entry.marker]
    mark = folded(Mark(), log)
    _, cut = remembered(folded(Mark(), log[:until]), log[until:])
    assert is_cut(mark, reversed(placed), Position(1, until)) or not cut


def test_a_foreign_chunk_does_not_hide_the_open_message() -> None:
    log = [chunk(5, "a", 0, 3), chunk(7, "b", 1, 2)]
    placed = [(Position(1, place), entry) for place, entry in enumerate(log)]
    mark = folded(Mark(), log)
    assert is_cut(mark, reversed(placed), Position(1, 1))
