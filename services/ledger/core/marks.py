"""The mark of a producer, computed from its entries in the log.

The last decisive entry determines the mark, not the highest one: a producer that started over (it
was forgotten, or deduplication was off) continues from its new id. Each step is deduplication's
fold (services/deduplication.py, `advance`). This module decides how much of a log must be read, and
which number to remember of trimmed entries.

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
from seqgate.services.ledger.core.attempts import OpenAttempt, follow
from seqgate.services.ledger.core.entry import Entry
from seqgate.types import Position

UNFINISHED_MAX: Final = 10_000
"""The most entries of incomplete messages skipped in search of a complete one."""


def advanced(mark: Mark, entry: Entry) -> Mark:
    """The mark after one more entry of the producer. A marker does not change it."""
    return mark if entry.marker else advance(mark, entry.highest, entry.chunk)


def decides(entry: Entry) -> bool:
    """Whether the mark after this entry is independent of the entries before it."""
    return not entry.marker and (entry.chunk is None or entry.chunk.chunk_id == 0)


def folded(mark: Mark, entries: Iterable[Entry]) -> Mark:
    """The mark after these entries of the producer, in log order."""
    for entry in entries:
        mark = advanced(mark, entry)
    return mark


class Remembered(NamedTuple):
    """The number to remember of a producer's trimmed entries. `cut`: the trim removes the first
    chunks of a large message that could still be completed, and must not be any more."""

    decided: int
    cut: bool = False


def remembered(mark: Mark, left: Iterable[Entry]) -> Remembered:
    """The number to remember of trimmed entries with this mark, if the producer's entries `left`
    follow them. `left` is read only up to the decisive entry."""
    if mark.chunk is None:
        return Remembered(mark.highest)
    now, same = mark, True
    for entry in left:
        now = advanced(now, entry)
        if now.highest != mark.highest or now.chunk is None:
            return Remembered(mark.highest)  # complete or overtaken
        same = same and not decides(entry)
    return Remembered(mark.decided, cut=same)


def is_cut(mark: Mark, newest_first: Iterable[tuple[Position, Entry]], before: Position) -> bool:
    """Whether the unfinished message of this mark has entries before a position, earlier attempts
    included. Reads back only to an entry of another message."""
    if mark.chunk is None:
        return False
    for position, entry in newest_first:
        if entry.highest == mark.highest and position < before:
            return True
        if entry.highest != mark.highest and decides(entry):
            return False
    return False


def last_mark(mark: Mark, newest_first: Iterable[Entry]) -> Mark:
    """The mark after a producer's entries, given newest first, on top of the mark before all of
    them. Reads back only to the last decisive entry."""
    back: list[Entry] = []
    for entry in newest_first:
        back.append(entry)
        if decides(entry):
            break
    return folded(mark, reversed(back))


def last_whole(mark: Mark, newest_first: Iterable[Entry]) -> int | None:
    """The id of the producer's last complete message, from its entries given newest first, on top
    of the mark before all of them. None: there is none, or it is too far back."""
    for count, entry in enumerate(newest_first):
        if not (entry.marker or entry.unfinished):
            return entry.highest
        if count == UNFINISHED_MAX:
            return None
    return mark.highest if mark.highest > NEVER else None


def last_open(newest_first: Iterable[Entry]) -> OpenAttempt | None:
    """The attempt at a large message that a producer's newest entry leaves unfinished, from its
    entries given newest first. Reads back only to an entry that starts or completes a message."""
    back: list[Entry] = []
    for entry in newest_first:
        back.append(entry)
        if decides(entry) or not entry.unfinished:
            break
    open_attempt = None
    for entry in reversed(back):
        open_attempt = follow(open_attempt, entry.highest, entry.chunk)
    return open_attempt
