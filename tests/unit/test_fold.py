"""Folding a log in parts gives the same as advancing over it entry by entry."""

from functools import reduce
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.dedup.core.fold import ChunkRun, Partial, folded
from seqgate.services.dedup.core.sequence import Marks, advance
from seqgate.types import SEQUENCE_ID_MAX, Chunk

Entry = tuple[int, Chunk | None]

IDS = st.sampled_from([0, 1, 2, 3, SEQUENCE_ID_MAX])
CHUNKS = st.builds(
    lambda uuid, chunk_id, num_chunks, size: Chunk(
        uuid, min(chunk_id, num_chunks - 1), num_chunks, size
    ),
    st.sampled_from("ab"),
    st.integers(0, 3),
    st.sampled_from([2, 4]),
    st.sampled_from([100, 101]),
)
ENTRY = st.tuples(IDS, st.none() | CHUNKS)
LARGE = st.builds(
    lambda sequence_id, uuid, num_chunks, first, last: [
        (sequence_id, Chunk(uuid, each, num_chunks, 100))
        for each in range(min(first, last), min(last + 1, num_chunks))
    ],
    IDS,
    st.sampled_from("ab"),
    st.sampled_from([3, 5]),
    st.integers(0, 2),
    st.integers(0, 5),
)
"""A part of one attempt: whole, cut off, or from its middle on."""

LOG = st.lists(LARGE | ENTRY.map(lambda entry: [entry]), max_size=12).map(
    lambda parts: [entry for part in parts for entry in part]
)
"""Logs of one producer: messages, batches, complete and aborted attempts, changing layouts, and ids
that go down because deduplication was off."""

MARKS = LOG.map(lambda log: sequential(Marks(), log))


def sequential(marks: Marks, log: list[Entry]) -> Marks:
    return reduce(lambda before, entry: advance(before, *entry), log, marks)


def parts_of(log: list[Entry]) -> list[Partial]:
    return [Partial.of(*entry, append_ms=each) for each, entry in enumerate(log, start=1)]


@given(MARKS, LOG)
def test_a_part_applied_is_every_entry_advanced(marks: Marks, log: list[Entry]) -> None:
    whole = folded(parts_of(log))
    assert whole.applied(marks) == sequential(marks, log)
    assert (whole.entries, whole.last_append_ms) == (len(log), len(log))


@given(MARKS, LOG, st.lists(st.integers(0, 60), max_size=4))
def test_folding_is_independent_of_the_cut(marks: Marks, log: list[Entry], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(log)) for cut in cuts), len(log)]
    parts = parts_of(log)
    ranges = [folded(parts[first:last]) for first, last in pairwise(edges)]
    assert folded(ranges) == folded(parts)
    assert reduce(lambda before, part: part.applied(before), ranges, marks) == sequential(
        marks, log
    )


@given(LOG, LOG, LOG)
def test_joining_folds_is_associative(
    first: list[Entry], second: list[Entry], third: list[Entry]
) -> None:
    a, b, c = (folded(parts_of(log)) for log in (first, second, third))
    assert a.then(b).then(c) == a.then(b.then(c))
    assert Partial().then(a) == a == a.then(Partial())


@given(MARKS, LOG, LOG)
def test_entries_covered_by_the_base_may_be_folded_again(
    marks: Marks, log: list[Entry], rest: list[Entry]
) -> None:
    covered = sequential(marks, log)
    part = folded(parts_of(log + rest))
    assert part.applied(covered) == sequential(covered, rest)


def test_a_part_without_a_beginning_keeps_runs_and_not_chunks() -> None:
    chunks = [Chunk("a", each, 10_000, 1_000_000) for each in range(1, 9_000)]
    whole = folded(Partial.of(7, chunk) for chunk in chunks)
    assert whole == Partial(None, (ChunkRun(7, 1, chunks[-1]),), 0, len(chunks))
