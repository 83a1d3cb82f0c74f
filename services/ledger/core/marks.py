"""How far has a producer come, by its entries in the log?

The last entry that decides is what counts, never the highest one: a producer that started over (it
was forgotten, or deduplication was off) is where it is now, not where it was before. Each step is
deduplication's fold (services/deduplication.py, `advance`). This module reads no more of a log than
decides, and computes what to remember of entries that are trimmed.

A store remembers one number of what was trimmed of a producer. That is enough:

    trimmed                        | left                      | remembered
    -------------------------------|---------------------------|-----------------------------------
    ... 9, 2                       |                           | 2: the last one decides
    ... chunks 0 and 1 of 5        | chunk 2, the last one     | 5: it is complete
    ... chunks 0 and 1 of 5        | 6                         | 5: nothing more is stored of it
    ... chunks 0 and 1 of 5        | chunk 2 of 4, or nothing  | 4: it is cut, and must start again
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from seqgate.services.deduplication import NEVER, Mark, advance
from seqgate.services.ledger.core.entry import Entry
from seqgate.types import Position

UNFINISHED_MAX: Final = 10_000
"""How many entries of messages that were never completed are passed over to find a whole one."""


def advanced(mark: Mark, entry: Entry) -> Mark:
    """The mark after one more entry of the producer. A marker is no message."""
    return mark if entry.marker else advance(mark, entry.highest, entry.chunk)


def decides(entry: Entry) -> bool:
    """Whether the mark after this entry is the same whatever was before."""
    return not entry.marker and (entry.chunk is None or entry.chunk.chunk_id == 0)


def folded(mark: Mark, entries: Iterable[Entry]) -> Mark:
    """The mark after entries of the producer, in their order."""
    for entry in entries:
        mark = advanced(mark, entry)
    return mark


class Remembered(NamedTuple):
    """What is kept of a producer when a part of its entries goes. `cut`: a large message that might
    still have been completed loses its first chunks, and must not be."""

    decided: int
    cut: bool = False


def remembered(mark: Mark, left: Iterable[Entry]) -> Remembered:
    """What to remember of entries that come to this mark, when these of the producer follow them.

    `left` is read no further than to what decides.
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
    """The mark after entries of the producer that are given from the last one back, onto what was
    before all of them. They are read no further than to the last one that decides."""
    back: list[Entry] = []
    for entry in newest_first:
        back.append(entry)
        if decides(entry):
            break
    return folded(mark, reversed(back))


def last_whole(mark: Mark, newest_first: Iterable[Entry]) -> int | None:
    """The id of the last message that is whole, of entries of the producer from the last one back,
    onto what was before all of them. None: there is none, or it lies too far back."""
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
