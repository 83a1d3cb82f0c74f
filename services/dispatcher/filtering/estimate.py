"""Estimates the shares of a backlog from a sample of it.

    ledger 3 ─────────── ledger 7 ───────────────── the log, from mark-delete on
      ██        ██          ██        ██         ██ blocks of neighbours, one in each equal part,
                                                    at a random place in it

Every entry may be drawn, so shares in the blocks estimate shares in the backlog. Their error does
not follow from the number of sampled entries alone: neighbours are alike (a producer's run, an
airline's day), and a block of 100 equal entries is worth no more than one. The variance between
blocks gives the number of independent entries that they are worth (the design effect of a cluster
sample); for that number the interval is Wilson's, which holds for shares near 0 and 1 as well.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from seqgate.services.dispatcher.core.positions import Run
from seqgate.types import Position

BLOCK_ENTRIES: Final = 100
"""The number of entries in a block."""

CONFIDENCE_Z: Final = 1.96
"""The standard deviations of a normal distribution for 95 % confidence."""


class Block(NamedTuple):
    """The result of a block: the number of its entries, and of those counted as hits."""

    entries: int
    hits: int


class Estimate(NamedTuple):
    """An estimated number of entries, and its bounds at 95 % confidence."""

    about: int
    low: int
    high: int


def after(ledgers: Sequence[Run], mark_delete: Position | None) -> list[Run]:
    """The entries of a log after a position."""
    left = []
    for first, last_entry_id in ledgers:
        if mark_delete is not None and mark_delete >= first:
            if mark_delete >= (first.ledger_id, last_entry_id):
                continue
            left.append(Run(Position(first.ledger_id, mark_delete.entry_id + 1), last_entry_id))
        else:
            left.append(Run(first, last_entry_id))
    return left


def size(runs: Sequence[Run]) -> int:
    """The number of entries in runs."""
    return sum(last_entry_id - first.entry_id + 1 for first, last_entry_id in runs)


def starts(total: int, entries_max: int, lots: Sequence[float]) -> list[int]:
    """The starts of blocks, in entries from the first: adjacent blocks if the limit allows a full
    count, else one in each equal part, at the place given by its lot (0 to 1, one per block)."""
    if total <= entries_max:
        return list(range(0, total, BLOCK_ENTRIES))
    count = max(1, entries_max // BLOCK_ENTRIES)
    part = total / count
    room = max(0.0, part - BLOCK_ENTRIES)
    return [int(number * part + lots[number] * room) for number in range(count)]


def position_at(runs: Sequence[Run], number: int) -> Position:
    """The position of the entry with this index, from 0."""
    for first, last_entry_id in runs:
        here = last_entry_id - first.entry_id + 1
        if number < here:
            return Position(first.ledger_id, first.entry_id + number)
        number -= here
    raise IndexError(number)


def estimate(blocks: Sequence[Block], total: int, *, is_complete: bool) -> Estimate:
    """The estimated number of hits among `total` entries, from the results of some blocks."""
    looked_at = sum(block.entries for block in blocks)
    hits = sum(block.hits for block in blocks)
    if is_complete:
        return Estimate(hits, hits, hits)
    if looked_at == 0:
        return Estimate(0, 0, total)
    share = hits / looked_at
    low, high = wilson(share, _worth(blocks, share, looked_at))
    rest = max(0, total - looked_at)
    return Estimate(
        hits + round(rest * share), hits + math.floor(rest * low), hits + math.ceil(rest * high)
    )


def wilson(share: float, count: float) -> tuple[float, float]:
    """Wilson's interval for a share that was found in `count` independent entries."""
    z2 = CONFIDENCE_Z**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = CONFIDENCE_Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    half /= 1 + z2 / count
    return max(0.0, middle - half), min(1.0, middle + half)


def _worth(blocks: Sequence[Block], share: float, looked_at: int) -> float:
    """The number of independent entries that the blocks are worth: at least the number of blocks,
    and exactly that if each block is uniform."""
    count = len(blocks)
    if count < 2 or share in (0.0, 1.0):
        return count
    # The variance of a ratio, by how far each block is off.
    off = sum((block.hits - share * block.entries) ** 2 for block in blocks)
    variance = off * count / ((count - 1) * looked_at**2)
    if variance == 0.0:
        return looked_at
    # The rarer kind of block tells how well the variance is known: with hits, or with misses.
    hit = sum(block.hits > 0 for block in blocks)
    spared = sum(block.hits < block.entries for block in blocks)
    telling = min(hit, spared)
    if telling < 2:
        return count
    worth = share * (1 - share) / variance * (CONFIDENCE_Z / _student(telling - 1)) ** 2
    return min(float(looked_at), max(float(count), worth))


def _student(degrees: int) -> float:
    """CONFIDENCE_Z for a variance that was itself estimated from so many degrees of freedom
    (Student's t, by the first terms of its expansion)."""
    z = CONFIDENCE_Z
    first = (z**3 + z) / (4 * degrees)
    return z + first + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
