"""Verdicts on the chunks of a producer's large messages. K1 to K12 number the rules in these
tables."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqgate.services.dedup.core.sequence import Marks, admit, advance, withdraw
from seqgate.services.deduplication import NEVER, Claim, Verdict
from seqgate.types import SEQUENCE_ID_MAX, Chunk

NEW, IN_FLIGHT, DUPLICATE = Verdict.NEW, Verdict.IN_FLIGHT, Verdict.DUPLICATE
PARTIAL, HELD = Verdict.PARTIAL, Verdict.HELD
CHUNK_GAP, LAYOUT_CONFLICT = Verdict.CHUNK_GAP, Verdict.LAYOUT_CONFLICT

A0, A1, A2, A3 = A = [Chunk("a", each, 4, 100) for each in range(4)]
B0, B1 = B = [Chunk("b", each, 2, 100) for each in range(2)]
CUT = [Chunk("a", each, 2, 100) for each in range(2)]  # the same uuid with a different layout
GROWN = [Chunk("a", each, 4, 101) for each in range(4)]


def durable(sequence_id: int, chunk: Chunk | None = None) -> Marks:
    """Marks of a producer whose last entry is durable, with nothing in flight."""
    return Marks(sequence_id, sequence_id, chunk, chunk)


def pushed(marks: Marks, sequence_id: int, chunk: Chunk | None = None) -> Marks:
    """The same marks, with this admitted since."""
    return replace(marks, pushed=sequence_id, pushed_chunk=chunk)


def one(sequence_id: int, chunk: Chunk | None = None) -> Claim:
    return Claim(sequence_id, sequence_id, chunk)


DONE, INSIDE = durable(5), durable(5, A1)
"""Message 5 is durable; chunks 0 and 1 of message 5 are."""


# The rule, the marks before, the claim, the verdict; and for NEW, `pushed` afterwards and the
# aborted attempt.
RULES: list[tuple[Any, ...]] = [
    ("K1", DONE, one(4, A0), DUPLICATE),
    ("K1", DONE, one(5, A0), DUPLICATE),
    ("K1", DONE, one(5, A3), DUPLICATE),
    ("K1", DONE, one(5, B1), DUPLICATE),  # stored, whatever its layout
    ("K1", INSIDE, one(4, A3), DUPLICATE),
    ("K1", pushed(DONE, 6, A0), one(5, A0), DUPLICATE),
    ("K1", INSIDE, one(4), DUPLICATE),
    ("K2", INSIDE, one(5, A0), DUPLICATE),
    ("K2", INSIDE, one(5, A1), DUPLICATE),
    ("K2", pushed(INSIDE, 5, A2), one(5, A1), DUPLICATE),
    ("K2", pushed(INSIDE, 5), one(5, A1), DUPLICATE),
    ("K2", pushed(INSIDE, 5, B0), one(5, A1), DUPLICATE),
    ("K2", pushed(INSIDE, 6), one(5, A1), DUPLICATE),
    ("K3", pushed(INSIDE, 5, A2), one(5, A2), IN_FLIGHT),
    ("K3", pushed(INSIDE, 5), one(5, A3), IN_FLIGHT),
    ("K3", pushed(INSIDE, 5), one(5, A2), IN_FLIGHT),
    ("K3", pushed(DONE, 6, A1), one(6, A0), IN_FLIGHT),
    ("K3", pushed(DONE, 6, A1), one(6, A1), IN_FLIGHT),
    ("K3", pushed(INSIDE, 5, B0), one(5, B0), IN_FLIGHT),
    ("K4", INSIDE, one(5, A2), NEW, (5, A2), ""),
    ("K4", pushed(INSIDE, 5, A2), one(5, A3), NEW, (5, None), ""),
    ("K4", pushed(DONE, 6, A0), one(6, A1), NEW, (6, A1), ""),
    ("K4", durable(5, B0), one(5, B1), NEW, (5, None), ""),
    ("K5", INSIDE, one(5, A3), CHUNK_GAP),
    ("K5", pushed(DONE, 6, A0), one(6, A2), CHUNK_GAP),
    ("K6", INSIDE, one(5, B0), NEW, (5, B0), "a"),
    ("K6", INSIDE, one(5, CUT[0]), NEW, (5, CUT[0]), "a"),
    ("K6", INSIDE, one(5, GROWN[0]), NEW, (5, GROWN[0]), "a"),
    ("K7", INSIDE, one(5, B1), LAYOUT_CONFLICT),
    ("K7", INSIDE, one(5, CUT[1]), LAYOUT_CONFLICT),
    ("K7", INSIDE, one(5, GROWN[1]), LAYOUT_CONFLICT),  # neither a stored chunk
    ("K7", INSIDE, one(5, GROWN[2]), LAYOUT_CONFLICT),  # nor the next one
    ("K7", pushed(INSIDE, 5, A2), one(5, B0), IN_FLIGHT),
    ("K7", pushed(INSIDE, 5, A2), one(5, B1), IN_FLIGHT),
    ("K7", pushed(INSIDE, 5), one(5, B0), IN_FLIGHT),
    ("K7", pushed(INSIDE, 5, B0), one(5, A2), IN_FLIGHT),
    ("K7", pushed(DONE, 6, A0), one(6, CUT[1]), IN_FLIGHT),
    ("K7", pushed(DONE, 6), one(6, A0), IN_FLIGHT),  # admitted as one entry
    ("K8", pushed(DONE, 8), one(7, A0), IN_FLIGHT),
    ("K8", pushed(DONE, 8, A0), one(7, A1), IN_FLIGHT),
    ("K8", pushed(DONE, 8, A0), one(7), IN_FLIGHT),
    ("K9", Marks(), one(0, A0), NEW, (0, A0), ""),
    ("K9", DONE, one(9, A0), NEW, (9, A0), ""),
    ("K9", DONE, one(SEQUENCE_ID_MAX, A0), NEW, (SEQUENCE_ID_MAX, A0), ""),
    ("K9", INSIDE, one(6, A0), NEW, (6, A0), "a"),
    ("K9", INSIDE, one(6), NEW, (6, None), "a"),
    ("K9", pushed(INSIDE, 5), one(6, B0), NEW, (6, B0), ""),  # complete, though not yet durable
    ("K9", pushed(DONE, 6, B0), one(7), NEW, (7, None), "b"),
    ("K10", Marks(), one(0, A1), CHUNK_GAP),
    ("K10", DONE, one(6, A1), CHUNK_GAP),
    ("K10", INSIDE, one(6, A2), CHUNK_GAP),  # continues another message's chunks
    ("K10", pushed(INSIDE, 5, A2), one(6, A3), CHUNK_GAP),
    ("K11", INSIDE, one(5), NEW, (5, None), "a"),
    ("K11", pushed(INSIDE, 5, A2), one(5), IN_FLIGHT),
    ("K11", pushed(INSIDE, 5), one(5), IN_FLIGHT),
    ("K11", pushed(DONE, 6, A0), one(6), IN_FLIGHT),
    ("K12", pushed(INSIDE, 6), one(5, A2), IN_FLIGHT),
    ("K12", pushed(INSIDE, 6, B0), one(5, A2), IN_FLIGHT),
    ("K12", pushed(INSIDE, 6), one(5, B0), IN_FLIGHT),
    ("K12", pushed(INSIDE, 6), one(5), IN_FLIGHT),
    ("K12", durable(6), one(5, A2), DUPLICATE),  # stale, by the log
]


@pytest.mark.parametrize(
    ("before", "claim", "verdict", "after", "ended"),
    [
        pytest.param(before, claim, verdict, *(rest or [None, ""]), id=f"{rule}-{place}")
        for place, (rule, before, claim, verdict, *rest) in enumerate(RULES)
    ],
)
def test_a_chunk_is_judged_by_its_rule(
    before: Marks,
    claim: Claim,
    verdict: Verdict,
    after: tuple[int, Chunk | None] | None,
    ended: str,
) -> None:
    marks, verdicts, aborts = admit(before, [claim])
    assert verdicts == [verdict]
    assert marks == (pushed(before, *after) if after else before)
    assert aborts == ({0: ended} if ended else {})


@pytest.mark.parametrize(
    ("batch", "verdict"),
    [
        ((3, 4), DUPLICATE),
        ((4, 5), PARTIAL),  # 4 is stored, 5 is not
        ((4, 7), PARTIAL),
        ((5, 7), NEW),  # replaces the attempt, like any other message 5
        ((6, 7), NEW),
    ],
)
def test_a_batch_is_judged_beside_an_unfinished_message(
    batch: tuple[int, int], verdict: Verdict
) -> None:
    marks, verdicts, aborts = admit(INSIDE, [Claim(*batch)])
    assert verdicts == [verdict]
    assert marks == (pushed(INSIDE, batch[1]) if verdict is NEW else INSIDE)
    assert aborts == ({0: "a"} if verdict is NEW else {})


@pytest.mark.parametrize("batch", [(4, 5), (4, 7), (5, 5), (5, 7)])
def test_a_batch_waits_for_the_chunks_that_are_in_flight(batch: tuple[int, int]) -> None:
    before = pushed(INSIDE, 5, A2)
    assert admit(before, [Claim(*batch)]) == (before, [IN_FLIGHT], {})


@pytest.mark.parametrize(
    ("before", "claims", "verdicts", "after", "aborts"),
    [
        (Marks(), [one(0, each) for each in A], [NEW] * 4, (0, None), {}),
        (Marks(), [one(0, A0), one(0, A0), one(0, A1)], [NEW, IN_FLIGHT, HELD], (0, A0), {}),
        (Marks(), [one(0, A0), one(0, B0), one(0, A1)], [NEW, IN_FLIGHT, HELD], (0, A0), {}),
        (Marks(), [one(0, A0), one(1), one(2, B0), one(3)], [NEW] * 4, (3, None), {1: "a", 3: "b"}),
        (Marks(), [one(0, A0), one(1), one(0, A1)], [NEW, NEW, IN_FLIGHT], (1, None), {1: "a"}),
        (INSIDE, [one(5, A1), one(5, A2), one(5, A3)], [DUPLICATE, NEW, NEW], (5, None), {}),
        (INSIDE, [one(5, B0), one(5, B1), one(6)], [NEW] * 3, (6, None), {0: "a"}),
        (DONE, [one(6, A1), one(6, A0), one(7)], [CHUNK_GAP, HELD, HELD], (5, None), {}),
        (INSIDE, [one(5, A3), one(5, A2), one(5, A1)], [CHUNK_GAP, HELD, DUPLICATE], (5, A1), {}),
        (INSIDE, [one(5, B1), one(5, B0), one(4)], [LAYOUT_CONFLICT, HELD, DUPLICATE], (5, A1), {}),
        (INSIDE, [one(5, B1), one(7, A1)], [LAYOUT_CONFLICT, HELD], (5, A1), {}),
        (INSIDE, [Claim(4, 5), one(5, A2)], [PARTIAL, HELD], (5, A1), {}),
    ],
)
def test_claims_of_one_call_see_one_another(
    before: Marks,
    claims: list[Claim],
    verdicts: list[Verdict],
    after: tuple[int, Chunk | None],
    aborts: dict[int, str],
) -> None:
    assert admit(before, claims) == (pushed(before, *after), verdicts, aborts)


@pytest.mark.parametrize("before", [Marks(), DONE, INSIDE, pushed(DONE, 6), pushed(DONE, 6, A0)])
@pytest.mark.parametrize("sequence_id", [4, 5, 6, 7])
def test_a_message_of_one_chunk_is_a_message(before: Marks, sequence_id: int) -> None:
    whole = Chunk("whole", 0, 1, 100)
    assert admit(before, [one(sequence_id, whole)]) == admit(before, [one(sequence_id)])
    assert advance(before, sequence_id, whole) == advance(before, sequence_id)


@pytest.mark.parametrize(
    ("marks", "decided"), [(Marks(), NEVER), (DONE, 5), (INSIDE, 4), (durable(0, A0), NEVER)]
)
def test_an_id_is_decided_with_the_last_chunk(marks: Marks, decided: int) -> None:
    assert marks.decided == decided
    assert not marks.in_flight


@pytest.mark.parametrize(
    "marks", [pushed(INSIDE, 5, A2), pushed(INSIDE, 5), pushed(INSIDE, 5, B0), pushed(DONE, 6, A0)]
)
def test_an_admitted_chunk_is_in_flight(marks: Marks) -> None:
    assert marks.in_flight


@pytest.mark.parametrize(
    ("before", "entry", "after"),
    [
        (Marks(), one(0, A0), durable(0, A0)),
        (DONE, one(8, A0), durable(8, A0)),
        (durable(5, A0), one(5, A1), durable(5, A1)),
        (durable(5, A2), one(5, A3), durable(5)),
        (durable(5, B0), one(5, B1), durable(5)),
        # another attempt, or another message, replaces it
        (INSIDE, one(5, B0), durable(5, B0)),
        (INSIDE, one(5, CUT[0]), durable(5, CUT[0])),
        (INSIDE, one(5), durable(5)),
        (INSIDE, one(6, A0), durable(6, A0)),
        (INSIDE, one(6), durable(6)),
        (DONE, one(2, A0), durable(2, A0)),  # written with deduplication off: ids start over
        # a chunk that continues nothing
        (Marks(), one(5, A1), Marks()),
        (DONE, one(5, A1), DONE),
        (DONE, one(6, A1), DONE),
        (DONE, one(6, B1), DONE),
        (INSIDE, one(5, A1), INSIDE),
        (INSIDE, one(5, A3), INSIDE),
        (INSIDE, one(5, CUT[1]), INSIDE),
        (durable(5, A0), one(5, GROWN[1]), durable(5, A0)),
        (INSIDE, one(6, A2), INSIDE),
        (INSIDE, one(4, A2), INSIDE),
        (pushed(INSIDE, 5, A2), one(5, A3), pushed(INSIDE, 5, A2)),
    ],
)
def test_the_last_entry_of_the_log_decides(before: Marks, entry: Claim, after: Marks) -> None:
    assert advance(before, entry.highest, entry.chunk) == after


@pytest.mark.parametrize(
    ("chunks", "after"),
    [
        ([A0, A0, A1, A1, A2, A3], durable(5)),
        ([A0, A1, A2, A3, A3, A1], durable(5)),
        ([A0, A1, A0, A2, A3], durable(5, A0)),  # sent again from the start, and not to the end
        ([A0, A1, A0, A1, A2, A3], durable(5)),
        ([A0, A1, B0, A2, B1], durable(5)),
        ([A0, A1, B0, A2, A3], durable(5, B0)),
        ([A1, A2, A3], Marks()),
    ],
)
def test_copies_stored_without_deduplication_are_folded(chunks: list[Chunk], after: Marks) -> None:
    marks = Marks()
    for chunk in chunks:
        marks = advance(marks, 5, chunk)
    assert marks == after


@pytest.mark.parametrize(
    ("in_flight", "entry"),
    [
        (pushed(DONE, 6, A1), one(6, A0)),
        (pushed(DONE, 6), one(6, A0)),
        (pushed(DONE, 7, B0), one(6, A0)),
        (pushed(INSIDE, 5), one(5, A2)),
        (pushed(INSIDE, 5, A3), one(5, A2)),
        (pushed(INSIDE, 5, B0), one(5, A2)),  # B0 is still in flight
        (pushed(INSIDE, 6), one(5, A2)),
    ],
)
def test_marks_in_flight_stay_ahead_of_durable_ones(in_flight: Marks, entry: Claim) -> None:
    alone = durable(entry.highest, entry.chunk)
    after = advance(in_flight, entry.highest, entry.chunk)
    assert after == pushed(alone, in_flight.pushed, in_flight.pushed_chunk)


@pytest.mark.parametrize(
    ("in_flight", "entry"),
    [
        (pushed(DONE, 6, A0), one(6, A0)),
        (pushed(INSIDE, 5), one(5, A2)._replace(chunk=None)),
        (pushed(INSIDE, 5, B0), one(5, B0)),
        (pushed(INSIDE, 5, B0), one(5)),
        (pushed(INSIDE, 5, A2), one(7, A0)),
        (pushed(INSIDE, 6), one(7, A0)),
    ],
)
def test_a_durable_chunk_is_no_longer_in_flight(in_flight: Marks, entry: Claim) -> None:
    after = advance(in_flight, entry.highest, entry.chunk)
    assert after == durable(entry.highest, entry.chunk)


@pytest.mark.parametrize(
    ("before", "keep", "after"),
    [
        (INSIDE, NEVER, INSIDE),
        (pushed(INSIDE, 5, A2), NEVER, INSIDE),
        (pushed(INSIDE, 5), NEVER, INSIDE),
        (pushed(INSIDE, 5, B0), NEVER, INSIDE),
        (pushed(INSIDE, 8, B0), NEVER, INSIDE),
        (pushed(DONE, 8, B0), NEVER, DONE),
        (pushed(DONE, 8, B0), 4, DONE),
        (pushed(DONE, 8, B0), 5, DONE),
        (pushed(INSIDE, 8, B0), 4, INSIDE),
        # the message to keep is the last: its chunks are kept as they are
        (pushed(INSIDE, 5, A2), 5, pushed(INSIDE, 5, A2)),
        (pushed(DONE, 8, B0), 8, pushed(DONE, 8, B0)),
        (pushed(DONE, 8, B0), 9, pushed(DONE, 8, B0)),
        # how many chunks of a message below the last are in flight is unknown: all are kept
        (pushed(INSIDE, 8, B0), 5, pushed(INSIDE, 5)),
        (pushed(DONE, 8, B0), 7, pushed(DONE, 7)),
        (pushed(INSIDE, 8), 7, pushed(INSIDE, 7)),
    ],
)
def test_withdrawing_keeps_or_drops_the_chunks_of_a_message_together(
    before: Marks, keep: int, after: Marks
) -> None:
    assert withdraw(before, keep) == after


def test_a_withdrawn_chunk_is_new_again() -> None:
    marks, *_ = admit(INSIDE, [one(5, A2), one(5, A3), one(6)])
    assert admit(withdraw(marks), [one(5, A2), one(5, A3)]).verdicts == [NEW, NEW]


# Few ids and attempts, so that they collide; 0 and 2 of the attempts have the same layout.
CHUNKS = [Chunk(str(n), each, 2 + n % 2, 60) for n in range(4) for each in range(2 + n % 2)]
CLAIMS = st.one_of(
    st.builds(one, st.integers(0, 4), st.sampled_from(CHUNKS)),
    st.builds(one, st.integers(0, 4)),
    st.builds(Claim, st.integers(0, 2), st.integers(2, 4), st.none()),
)


class Consumer:
    """Assembles messages from a log without duplicates."""

    def __init__(self) -> None:
        self.complete: list[int] = []
        self._begun: list[Chunk] = []

    def read(self, claim: Claim, ended: str) -> None:
        """Read an entry, and the attempt that it aborts."""
        lowest, highest, chunk = claim
        if ended:
            assert self._begun[0].uuid == ended
            self._begun = []
        if chunk is not None:
            self._begun.append(chunk)
            assert self._begun == [chunk._replace(chunk_id=n) for n in range(len(self._begun))]
            if not chunk.is_last:
                return
            self._begun = []
        assert not self._begun, "an attempt ends without a word"
        self.complete += range(lowest, highest + 1)


@given(calls=st.lists(st.one_of(CLAIMS, st.sampled_from(["store", "store", "fail"])), max_size=60))
def test_admitted_chunks_form_each_message_once(calls: list[Claim | str]) -> None:
    live = folded = Marks()
    let_through: list[tuple[Claim, str]] = []
    consumer = Consumer()
    for call in calls:
        match call:
            case Claim():
                live, (verdict,), aborts = admit(live, [call])
                if verdict is NEW:
                    let_through.append((call, aborts.get(0, "")))
            case "store" if let_through:
                claim, ended = let_through.pop(0)
                consumer.read(claim, ended)
                live = advance(live, claim.highest, claim.chunk)
                folded = advance(folded, claim.highest, claim.chunk)
            case "fail":
                let_through.clear()
                live = withdraw(live)
        assert withdraw(live) == folded
        assert live.in_flight == bool(let_through)
    assert all(earlier < later for earlier, later in pairwise(consumer.complete))
