"""Which of a producer's messages are new.

A producer numbers its messages with increasing sequence ids. Each producer has two marks (PIP-6's
two maps):

    persisted   the highest id of the producer's last entry in the log
    pushed      every id up to here has been admitted, durable or not

so an id is in one of three zones:

      DUPLICATE        IN_FLIGHT          NEW
    ------------|------------------|-------------->
             persisted          pushed

IN_FLIGHT exists because the earlier copy may still fail to be written: answering DUPLICATE would
lose the message, answering NEW could store it twice. The caller waits and asks again.

A claim is a range, because a batch has the ids of all its messages. A claim that starts at or below
`persisted` and ends above it is PARTIAL: some of its messages are in the log, others are not, and
only the producer can split it.

A large message is claimed chunk by chunk, all under its one sequence id. A mark at such an id also
has the last chunk that it covers and the attempt at the message, since a restarted producer may
send the message again in other chunks. The id counts as persisted once the last chunk is.
(apache/pulsar#21027, completed.)

      id 8 is done      chunk 2 of id 9         the whole of id 9
    -----------------|------------------|----------------------------|------->

adapters/lua/admit.lua and confirm.lua compute the same functions inside Redis; tests/conformance
checks that the answers agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from seqgate.services import deduplication
from seqgate.services.deduplication import NEVER, Claim, Mark, Verdict, continues
from seqgate.types import SEQUENCE_ID_MAX, Chunk


class Admitted(NamedTuple):
    """The verdicts on one producer's claims. `aborts` has the attempts at large messages that NEW
    claims abort, by claim index."""

    marks: "Marks"
    verdicts: list[Verdict]
    aborts: dict[int, str]


@dataclass(frozen=True, slots=True)
class Marks:
    """One producer's marks. A mark with a chunk is inside the large message of its id, and covers
    its chunks through that one."""

    persisted: int = NEVER
    pushed: int = NEVER
    persisted_chunk: Chunk | None = None
    pushed_chunk: Chunk | None = None

    def __post_init__(self) -> None:
        assert NEVER <= self.persisted <= self.pushed <= SEQUENCE_ID_MAX

    @property
    def in_flight(self) -> bool:
        return self.pushed > self.persisted or self.pushed_chunk != self.persisted_chunk

    @property
    def decided(self) -> int:
        """The highest id of which nothing more is stored: up to it all are durable or overtaken."""
        return self.persisted - 1 if self.persisted_chunk else self.persisted


def admit(marks: Marks, claims: Sequence[Claim]) -> Admitted:
    """Judge one producer's claims in the order in which they were sent.

    The returned marks include the admitted claims. After the first claim that must wait, be split,
    or be sent again, no later claim of this producer is admitted, since it would overtake that
    claim and make it stale. (Rules N1 to N4 of Pulsar's MessageDeduplication, with PARTIAL for the
    batch that Pulsar drops whole, apache/pulsar#6273.)
    """
    verdicts: list[Verdict] = []
    aborts: dict[int, str] = {}
    held = False
    for index, claim in enumerate(claims):
        assert 0 <= claim.lowest <= claim.highest <= SEQUENCE_ID_MAX
        verdict = _judge(marks, claim)
        if held and verdict is not Verdict.DUPLICATE:
            verdict = Verdict.HELD
        elif verdict is Verdict.NEW:
            open_attempt, chunk = marks.pushed_chunk, claim.chunk
            if open_attempt and not (chunk and continues(open_attempt, chunk)):
                aborts[index] = open_attempt.uuid
            unfinished = None if chunk is None or chunk.is_last else chunk
            marks = replace(marks, pushed=claim.highest, pushed_chunk=unfinished)
        elif verdict is not Verdict.DUPLICATE:
            held = True
        verdicts.append(verdict)
    return Admitted(marks, verdicts, aborts)


def _judge(marks: Marks, claim: Claim) -> Verdict:
    if claim.chunk is not None:
        return _judge_chunk(marks, claim.lowest, claim.chunk)
    if claim.highest <= marks.decided:
        return Verdict.DUPLICATE
    # A message with only its first chunks stored may be sent again in one piece.
    anew = claim.lowest == marks.pushed and marks.pushed_chunk and not marks.in_flight
    if claim.lowest > marks.pushed or anew:
        return Verdict.NEW
    return Verdict.IN_FLIGHT if marks.in_flight else Verdict.PARTIAL


def _judge_chunk(marks: Marks, sequence_id: int, chunk: Chunk) -> Verdict:
    stored, reached = marks.persisted_chunk, marks.pushed_chunk
    if sequence_id <= marks.decided or (
        sequence_id == marks.persisted
        and stored
        and stored.layout == chunk.layout
        and stored.chunk_id >= chunk.chunk_id
    ):
        return Verdict.DUPLICATE
    if sequence_id > marks.pushed:
        return Verdict.CHUNK_GAP if chunk.chunk_id else Verdict.NEW
    if sequence_id < marks.pushed or reached is None:
        return Verdict.IN_FLIGHT
    if reached.layout == chunk.layout:
        if chunk.chunk_id <= reached.chunk_id:
            return Verdict.IN_FLIGHT
        return Verdict.NEW if continues(reached, chunk) else Verdict.CHUNK_GAP
    if marks.in_flight:
        return Verdict.IN_FLIGHT
    return Verdict.LAYOUT_CONFLICT if chunk.chunk_id else Verdict.NEW


def advance(marks: Marks, highest: int, chunk: Chunk | None = None) -> Marks:
    """Apply one entry of the log. The persisted mark follows the fold (`deduplication.advance`);
    the pushed mark stays while it is ahead."""
    before = Mark(marks.persisted, marks.persisted_chunk)
    stored = deduplication.advance(before, highest, chunk)
    if stored is before:
        return marks
    after = Marks(stored.highest, stored.highest, stored.chunk, stored.chunk)
    if marks.in_flight and _ahead(marks, after):
        return replace(after, pushed=marks.pushed, pushed_chunk=marks.pushed_chunk)
    return after


def _ahead(marks: Marks, after: Marks) -> bool:
    """Whether the pushed mark of `marks` is ahead of the persisted mark of `after`."""
    if marks.pushed != after.persisted:
        return marks.pushed > after.persisted
    reached, stored = marks.pushed_chunk, after.persisted_chunk
    if stored is None:
        return False
    return reached is None or reached.layout != stored.layout or reached.chunk_id > stored.chunk_id


def withdraw(marks: Marks, keep_through: int = NEVER) -> Marks:
    """Withdraw claims above `keep_through`: their ids are NEW again. The chunks of one message are
    kept or withdrawn together."""
    if marks.pushed <= keep_through:
        return marks
    kept = replace(marks, pushed=max(keep_through, marks.persisted), pushed_chunk=None)
    if keep_through >= marks.persisted and _ahead(kept, marks):
        return kept
    return replace(marks, pushed=marks.persisted, pushed_chunk=marks.persisted_chunk)
