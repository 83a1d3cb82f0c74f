"""The fold over columns: Python code runs per entry only for chunks and markers.

services/dedup/core/fold.py explains why only a producer's last decisive entry counts, and the
chunks after it.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seqgate.services.dedup.core.fold import ChunkRun, Partial
from seqgate.services.dedup.core.sequence import Marks
from seqgate.services.deduplication import NEVER
from seqgate.spark._columns import Run as Entries
from seqgate.types import Chunk

PARTIALS: Final = pa.schema(
    {
        "topic": pa.string(),
        "part": pa.int32(),
        "producer": pa.string(),
        "entries": pa.int64(),
        "last_append_ms": pa.int64(),
        "highest": pa.int64(),
        "inside": pa.string(),
        "skipped": pa.int64(),
        "failure": pa.string(),
    }
)
"""A producer's Partial in one part of a topic's log. `highest` is null without a decisive entry;
`inside` is JSON if large messages are unfinished. A row without a producer reports that the part
was read: the number of its entries, the number of those skipped, and the error, if any."""


class ProducerFold:
    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._highest = np.full(0, NEVER, np.int64)
        self._append_ms = np.zeros(0, np.int64)
        self._entries = np.zeros(0, np.int64)
        self._unfinished: dict[int, Partial] = {}
        self.count = 0

    def add(self, entries: Entries) -> None:
        producer = entries.producers(self._numbers)
        self._grow(len(self._numbers))
        highest = entries.highest
        chunks, markers = entries.chunks, entries.markers
        later = [each for each in chunks if each.chunk.chunk_id]

        stored = _but(markers, entries.count)
        self._append_ms[producer[stored]] = entries.append_ms[stored]
        self._entries += np.bincount(producer[stored], minlength=len(self._entries))
        self.count += entries.count

        # For a repeated index, the last assignment wins.
        last = np.full(len(self._highest), -1, np.int64)
        deciding = _but([*markers, *(place for place, _ in later)], entries.count)
        last[producer[deciding]] = np.arange(entries.count)[deciding]
        decided = np.flatnonzero(last >= 0)
        self._highest[decided] = highest[last[decided]]
        for number in [each for each in self._unfinished if last[each] >= 0]:
            del self._unfinished[number]

        for index, chunk in chunks:
            number = int(producer[index])
            part = Partial.of(int(highest[index]), chunk)
            if index == last[number]:
                self._unfinished[number] = part
            elif index > last[number]:  # a later chunk
                self._unfinished[number] = self._partial(number).then(part)

    def rows(self, topic: str, part: int) -> pa.RecordBatch:
        producers = np.flatnonzero(self._entries)
        highest = self._highest[producers]
        inside: pa.Array = pa.nulls(len(producers), pa.string())
        if self._unfinished:
            written = {number: _inside(each) for number, each in self._unfinished.items()}
            inside = pa.array([written.get(each) for each in producers.tolist()], pa.string())
        names = pa.array(list(self._numbers), pa.string()).take(pa.array(producers))
        count = len(producers)
        return pa.RecordBatch.from_arrays(
            [
                pa.repeat(topic, count),
                pa.repeat(pa.scalar(part, pa.int32()), count),
                names,
                pa.array(self._entries[producers]),
                pa.array(self._append_ms[producers]),
                pa.array(highest, mask=highest == NEVER),
                inside,
                pa.nulls(count, pa.int64()),
                pa.nulls(count, pa.string()),
            ],
            schema=PARTIALS,
        )

    def _partial(self, number: int) -> Partial:
        if number in self._unfinished:
            return self._unfinished[number]
        highest = int(self._highest[number])
        return Partial() if highest == NEVER else Partial(Marks(highest, highest))

    def _grow(self, size: int) -> None:
        more = size - len(self._highest)
        if more:
            self._highest = np.append(self._highest, np.full(more, NEVER, np.int64))
            self._append_ms = np.append(self._append_ms, np.zeros(more, np.int64))
            self._entries = np.append(self._entries, np.zeros(more, np.int64))


def tally(
    topic: str, part: int, entries: int, *, skipped: int = 0, failure: str | None = None
) -> pa.RecordBatch:
    """The row of PARTIALS that reports that a part was read, or its error."""
    row = dict.fromkeys(PARTIALS.names) | {
        "topic": topic,
        "part": part,
        "entries": entries,
        "skipped": skipped,
        "failure": failure,
    }
    return pa.RecordBatch.from_pylist([row], PARTIALS)


def partials(rows: pa.Table) -> Iterator[tuple[str, Partial]]:
    """The producers' parts, each producer's in log order."""
    rows = rows.sort_by("part")
    columns = ("producer", "highest", "inside", "last_append_ms", "entries")
    for producer, highest, inside, last_append_ms, entries in zip(
        *(rows.column(name).to_pylist() for name in columns), strict=True
    ):
        if producer is None:
            continue
        chunk, runs = _outside(inside)
        decided = None if highest is None else Marks(highest, highest, chunk, chunk)
        yield producer, Partial(decided, runs, last_append_ms, entries)


def _but(indexes: list[int], count: int) -> slice | npt.NDArray[np.bool_]:
    """A mask of `count` entries that excludes these."""
    if not indexes:
        return slice(None)
    selected = np.ones(count, np.bool_)
    selected[indexes] = False
    return selected


def _inside(partial: Partial) -> str | None:
    marks = partial.decided
    if marks is not None:
        chunk = marks.persisted_chunk
        return None if chunk is None else json.dumps({"chunk": chunk})
    return json.dumps({"runs": partial.runs})


def _outside(text: str | None) -> tuple[Chunk | None, tuple[ChunkRun, ...]]:
    if text is None:
        return None, ()
    inside: dict[str, Any] = json.loads(text)
    if "chunk" in inside:
        return Chunk._make(inside["chunk"]), ()
    runs = (ChunkRun(highest, first, Chunk._make(last)) for highest, first, last in inside["runs"])
    return None, tuple(runs)
