"""The mark of a producer, computed from its entries in the log.

The last decisive entry determines the mark, never the highest one: a producer that started over (it
was forgotten, or deduplication was off) is at its new id, not its old one. Each step is
deduplication's fold (services/deduplication.py, `advance`). This module reads only the decisive
part of a log, and computes the number to remember of trimmed entries.

A store remembers one number for the trimmed entries of a producer. That is enough:

    trimmed                        | left                      | remembered
    -------------------------------|---------------------------|-----------------------------------
    ... 9, 2                       |                           | 2: the last one decides
    ... chunks 0 and 1 of 5        | chunk 2, the last one     | 5: it is complete
    ... chunks 0 and 1 of 5        | 6                         | 5: no more of it is stored
    ... chunks 0 and 1 of 5        | chunk 2 of 4, or nothing  | 4: it is cut, and must start over
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from seqgate.services.deduplication import NEVER, Mark, advance
from seqgate.services.ledger.core.entry import Entry
from seqgate.types import Position

UNFINISHED_MAX: Final = 10_000
"""Number of entries of incomplete messages that are skipped to find a complete one."""


def advanced(mark: Mark, entry: Entry) -> Mark:
    """The mark after one more entry of the producer. A marker is no message."""
    return mark if entry.marker else advance(mark, entry.highest, entry.chunk)


def decides(entry: Entry) -> bool:
    """Whether the mark after this entry is independent of earlier ones."""
    return not entry.marker and (entry.chunk is None or entry.chunk.chunk_id == 0)


def folded(mark: Mark, entries: Iterable[Entry]) -> Mark:
    """The mark after entries of the producer, in their order."""
    for entry in entries:
        mark = advanced(mark, entry)
    return mark


class Remembered(NamedTuple):
    """The number to remember of a producer when some of its entries are trimmed. `cut`: a large
    message that might still have been completed loses its first chunks, and must not be."""

    decided: int
    cut: bool = False


def remembered(mark: Mark, left: Iterable[Entry]) -> Remembered:
    """The number to remember of entries with this mark, when these of the producer follow them.

    `left` is read only up to the decisive entry.
    """
    if mark.chunk is None:
        return Remembered(mark.highest)
    now, same = mark, True
    for entry in left:
        now = advanced(now, entry)
        if now.highest != mark.highest or now.chunk is None:
            return Remembered(mark.highest)  # complete, or overtaken
        same = same and not decides(entry)
    return Remembered(mark.decided, cut=same)


def is_cut(mark: Mark, newest_first: Iterable[tuple[Position, Entry]], before: Position) -> bool:
    """Whether the message that this mark stands inside has entries before a position, earlier
    attempts at it included. The entries of the producer are read no further than to another one."""
    if mark.chunk is None:
        return False
    for position, entry in newest_first:
        if entry.highest == mark.highest and position < before:
            return True
        if entry.highest != mark.highest and decides(entry):
            return False
    return False


def last_mark(mark: Mark, newest_first: Iterable[Entry]) -> Mark:
    """The mark after entries of the producer, given from the last one back, on top of the mark
    before all of them. They are read only back to the last decisive one."""
    back: list[Entry] = []
    for entry in newest_first:
        back.append(entry)
        if decides(entry):
            break
    return folded(mark, reversed(back))


def last_whole(mark: Mark, newest_first: Iterable[Entry]) -> int | None:
    """The id of the last complete message of the producer, whose entries are given from the last
    one back, on top of the mark before all of them. None: there is none, or it is too far back."""
    for count, entry in enumerate(newest_first):
        if not (entry.marker or entry.unfinished):
            return entry.highest
        if count == UNFINISHED_MAX:
            return None
    return mark.highest if mark.highest > NEVER else None


def last_unfinished(newest_first: Iterable[Entry]) -> str:
    """The uuid of the attempt that the producer's newest entry left unfinished; empty: none."""
    for entry in newest_first:
        return entry.chunk.uuid if entry.chunk and not entry.chunk.is_last else ""
    return ""
