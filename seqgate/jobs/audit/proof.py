"""The rules for a producer's entries, in log order, and their violations:

    TWICE       a message is stored twice
    CHUNK_TWICE a chunk of an attempt at a large message is stored twice
    BACKWARDS   an id is at or below an earlier one
    STRAY       a chunk does not follow its predecessor

If ids only grow, nothing can be stored twice: the ids of an entry, from its lowest to its highest,
are above all earlier ones. There are two exceptions. The entries of one flush of a producer that
batches by key are adjacent, and their ranges may overlap, although they share no id: a batch with
gaps is compared with its neighbours id by id. And an incomplete large message may start over under
its id, as another attempt or in one piece.

Chunks before a producer's first other entry are not reported: their predecessors may be trimmed.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum, auto
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from seqgate.types import Position

Integers = npt.NDArray[np.int64]


class Kind(StrEnum):
    TWICE = auto()
    CHUNK_TWICE = auto()
    BACKWARDS = auto()
    STRAY = auto()


class Row(NamedTuple):
    """The identity of an entry that is not a marker; messages: of a batch."""

    position: Position
    lowest: int
    highest: int
    messages: int | None = None
    uuid: str | None = None
    chunk_id: int = 0
    num_chunks: int = 0

    @property
    def has_gaps(self) -> bool:
        """Whether it is a batch that lacks ids between its lowest and its highest."""
        return self.messages is not None and self.messages != self.highest + 1 - self.lowest


class Finding(NamedTuple):
    """A violation: an entry, the earlier entry that it collides with, the number of its ids that
    do, and the first of them."""

    kind: Kind
    sequence_id: int
    ids: int
    entry: Position
    earlier: Position
    uuid: str = ""
    chunk_id: int | None = None


Ids = Callable[[Row], Sequence[int]]
"""The ids of a batch with gaps, from its metadata."""

NOTHING: Final = -1


class Line:
    """The state of one producer: entries in log order in, violations out."""

    def __init__(self) -> None:
        self._done = NOTHING
        self._done_at = Position(0, 0)
        self._open: Row | None = None
        self._attempts: dict[tuple[str, int], Position] = {}
        self._attempts_at = NOTHING
        self._began = False

    def take(self, row: Row) -> Finding | None:
        """Add the next entry. Returns its violation, except for messages stored twice."""
        if row.uuid is None:
            finding = self._back(row)
            self._finish(row)
            return finding
        if row.lowest != self._attempts_at:
            self._attempts, self._attempts_at = {}, row.lowest
        key = (row.uuid, row.chunk_id)
        opened = self._open
        follows = opened is not None and _follows(opened, row)
        finding = None
        if key in self._attempts:
            finding = _finding(Kind.CHUNK_TWICE, row, self._attempts[key])
        elif row.chunk_id == 0:
            finding = self._back(row)
        elif not follows and self._began:
            earlier = self._done_at if opened is None else opened.position
            finding = _finding(Kind.STRAY, row, earlier)
        self._attempts.setdefault(key, row.position)
        if row.chunk_id == 0 or follows:
            self._begin(row)
        return finding

    def passed(self, last: Row) -> None:
        """Skip messages and batches whose ids only grow, through this one."""
        self._finish(last)

    def grows_with(self, lowest: int) -> bool:
        """Whether a message with this id is above all entries so far."""
        reached = self._done if self._open is None else max(self._done, self._open.lowest)
        return lowest > reached

    def _back(self, row: Row) -> Finding | None:
        decided, at = self._done, self._done_at
        if self._open is not None and self._open.lowest - 1 > decided:
            decided, at = self._open.lowest - 1, self._open.position
        return _finding(Kind.BACKWARDS, row, at) if row.lowest <= decided else None

    def _begin(self, row: Row) -> None:
        if row.chunk_id + 1 == row.num_chunks:
            self._finish(row)
            return
        self._began = True
        if self._open is not None and self._open.lowest < row.lowest:
            self._reach(self._open)
        self._open = row

    def _finish(self, row: Row) -> None:
        self._began = True
        if self._open is not None and self._open.lowest < row.lowest:
            self._reach(self._open)
        self._open = None
        self._reach(row)

    def _reach(self, row: Row) -> None:
        if row.highest > self._done:
            self._done, self._done_at = row.highest, row.position


def _follows(before: Row, row: Row) -> bool:
    return (before.lowest, before.uuid, before.num_chunks, before.chunk_id + 1) == (
        row.lowest,
        row.uuid,
        row.num_chunks,
        row.chunk_id,
    )


def _finding(kind: Kind, row: Row, earlier: Position) -> Finding:
    chunk_id = None if row.uuid is None else row.chunk_id
    return Finding(kind, row.lowest, 1, row.position, earlier, row.uuid or "", chunk_id)


def findings(rows: Sequence[Row], ids: Ids) -> list[Finding]:
    line = Line()
    first_sight = {row.position: each for row in rows if (each := line.take(row)) is not None}
    messages = _messages(rows)
    twice = {each.entry: each for each in _twice(messages, ids)}
    wrong = first_sight | twice
    for position in _side_by_side(messages):
        if position in wrong and wrong[position].kind is Kind.BACKWARDS:
            del wrong[position]
    return [wrong[position] for position in sorted(wrong)]


def _messages(rows: Sequence[Row]) -> list[Row]:
    """The entries that complete a message: of a large one, its last chunk."""
    messages: list[Row] = []
    opened: Row | None = None
    for row in rows:
        if row.uuid is None:
            messages.append(row)
            opened = None
        elif row.chunk_id == 0 or (opened is not None and _follows(opened, row)):
            opened = row
            if row.chunk_id + 1 == row.num_chunks:
                messages.append(row)
                opened = None
    return messages


def _twice(messages: Sequence[Row], ids: Ids) -> Iterator[Finding]:
    """Messages stored twice. Only entries with overlapping ranges are compared by id."""
    if not messages:
        return
    lowest = np.array([row.lowest for row in messages], np.int64)
    highest = np.array([row.highest for row in messages], np.int64)
    order = np.argsort(lowest, kind="stable")
    reach = np.maximum.accumulate(highest[order])
    alone = np.concatenate(([True], lowest[order][1:] > reach[:-1]))
    groups = np.split(order, np.flatnonzero(alone)[1:])
    for group in groups:
        if len(group) > 1:
            yield from _shared([messages[index] for index in sorted(group.tolist())], ids)


def _shared(messages: list[Row], ids: Ids) -> Iterator[Finding]:
    """Ids shared by several of these entries: reported for each entry but the first."""
    parts = [
        np.array(ids(row), np.int64)
        if row.has_gaps
        else np.arange(row.lowest, row.highest + 1, dtype=np.int64)
        for row in messages
    ]
    of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    all_ids: Integers = np.concatenate(parts)
    order = np.argsort(all_ids, kind="stable")  # the first entry of each id comes first
    sorted_ids, sorted_of = all_ids[order], of[order]
    again = np.flatnonzero(sorted_ids[1:] == sorted_ids[:-1]) + 1
    firsts = np.searchsorted(sorted_ids, sorted_ids[again])
    found: dict[int, Finding] = {}
    for index, first in zip(again.tolist(), firsts.tolist(), strict=True):
        number = int(sorted_of[index])
        before = found.get(number)
        if before is not None:
            found[number] = before._replace(ids=before.ids + 1)
            continue
        row, earlier = messages[number], messages[int(sorted_of[first])]
        finding = _finding(Kind.TWICE, row, earlier.position)
        found[number] = finding._replace(sequence_id=int(sorted_ids[index]), chunk_id=None)
    yield from found.values()


def _side_by_side(messages: Sequence[Row]) -> Iterator[Position]:
    """Entries whose ranges overlap only those of preceding adjacent entries: one flush."""
    below = NOTHING  # the highest id before the run of neighbours
    reach = NOTHING
    before: Row | None = None
    for row in messages:
        neighbours = (
            before is not None
            and before.position.ledger_id == row.position.ledger_id
            and before.position.entry_id + 1 == row.position.entry_id
            and before.highest < row.highest
        )
        if not neighbours:
            below = reach
        if neighbours and row.lowest > below:
            yield row.position
        reach = max(reach, row.highest)
        before = row
