"""The fold over many entries at once, for jobs that read logs in parts.

`advance` takes one entry at a time. With nothing in flight, most entries can be skipped: a plain
entry, or the first chunk of a large message, is decisive whatever came before; a later chunk
continues the one before it, or changes nothing. So only a producer's last decisive entry matters,
and the chunks after it:

      plain 7   chunk 0 of 8   chunk 1   plain 9   chunk 0 of 10   chunk 1   chunk 2
    ---------------------------------------------|---------------------------------->
                      changes nothing             decisive          continue it

A part of a log without a decisive entry consists of chunks that may continue an earlier part.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from seqgate.services.dedup.core.sequence import Marks, advance
from seqgate.types import Chunk


class ChunkRun(NamedTuple):
    """Consecutive chunks of one attempt, `first` through `last`, with no other entry of the
    producer between them; never chunk 0."""

    sequence_id: int
    first: int
    last: Chunk


@dataclass(frozen=True, slots=True)
class Partial:
    """The fold of one producer's entries in a part of a log.

    If the part has a decisive entry, `decided` are the marks at its end; otherwise `runs` are its
    chunks, in order. `last_append_ms` is the time of the last append; 0: there is none.
    """

    decided: Marks | None = None
    runs: tuple[ChunkRun, ...] = ()
    last_append_ms: int = 0
    entries: int = 0

    def __post_init__(self) -> None:
        assert self.decided is None or not (self.runs or self.decided.in_flight)

    @classmethod
    def of(cls, highest: int, chunk: Chunk | None = None, append_ms: int = 0) -> "Partial":
        """The fold of one entry, which must not be a marker."""
        if chunk is not None and chunk.chunk_id > 0:
            return cls(None, (ChunkRun(highest, chunk.chunk_id, chunk),), append_ms, 1)
        return cls(advance(Marks(), highest, chunk), (), append_ms, 1)

    def then(self, later: "Partial") -> "Partial":
        """The fold of this part and the next one. Associative."""
        decided, runs = self.decided, self.runs
        if later.decided is not None:
            decided, runs = later.decided, ()
        elif decided is not None:
            decided = _followed(decided, later.runs)
        else:
            runs = _joined(runs, later.runs)
        last_append_ms = max(self.last_append_ms, later.last_append_ms)
        return Partial(decided, runs, last_append_ms, self.entries + later.entries)

    def applied(self, marks: Marks) -> Marks:
        """The marks after this part: `advance` over all its entries.

        Args:
            marks: the marks before the part, with nothing in flight.
        """
        assert not marks.in_flight
        return _followed(marks, self.runs) if self.decided is None else self.decided


def folded(parts: Iterable[Partial]) -> Partial:
    whole = Partial()
    for part in parts:
        whole = whole.then(part)
    return whole


def _followed(marks: Marks, runs: Iterable[ChunkRun]) -> Marks:
    """The marks after these chunks. Chunks already covered change nothing; the rest continue."""
    for sequence_id, first, last in runs:
        stored = marks.persisted_chunk
        if stored is None or (marks.persisted, stored.layout) != (sequence_id, last.layout):
            continue
        if first - 1 <= stored.chunk_id < last.chunk_id:
            before = last._replace(chunk_id=last.chunk_id - 1)
            reached = replace(marks, persisted_chunk=before, pushed_chunk=before)
            marks = advance(reached, sequence_id, last)
    return marks


def _joined(runs: tuple[ChunkRun, ...], later: tuple[ChunkRun, ...]) -> tuple[ChunkRun, ...]:
    if runs and later:
        left, right = runs[-1], later[0]
        same = (left.sequence_id, left.last.layout) == (right.sequence_id, right.last.layout)
        if same and left.last.chunk_id + 1 == right.first:
            return (*runs[:-1], left._replace(last=right.last), *later[1:])
    return runs + later
