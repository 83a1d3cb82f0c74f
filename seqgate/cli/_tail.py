"""Where do the last entries of a topic start?

Entries are numbered from 0 in each ledger, and how many a ledger has only its reader knows. But
how many entries follow a position is a count that never grows as the position moves on, so the
last position that is followed by enough of them is found by halving: first among the ledgers, then
inside one.

    ledger      3            4        6          start_of_last(6)
    entries     0 1 2 3 4    0 1      0 1 2        = 3:4
    followed    10 9 8 7 6   5 4      3 2 1
"""

from collections.abc import Awaitable, Callable, Sequence

from seqgate.types import Position

Following = Callable[[Position], Awaitable[Sequence[Position]]]
"""The first entries at or after a position and not after the last one: as many as are looked for,
or all that there are."""


async def start_of_last(
    count: int, *, first: Position, last: Position, entries: int, following: Following
) -> Position:
    """The position of the entry at which the last `count` entries start.

    Args:
        count: how many, at least 1; where there are fewer, the answer is the first entry.
        first, last, entries: what the topic says of itself.
        following: asks the log, for up to `count` entries.
    """
    if count >= entries:
        return first
    if last.entry_id + 1 >= count:
        return Position(last.ledger_id, last.entry_id + 1 - count)

    async def enough_after(position: Position) -> bool:
        return len(await following(position)) >= count

    low, high = first.ledger_id, last.ledger_id + 1
    while high - low > 1:
        middle = (low + high) // 2
        if await enough_after(Position(middle, 0)):
            low = middle
        else:
            high = middle
    ledger_id = low

    started = await following(Position(ledger_id, 0))
    if not started or started[0].ledger_id != ledger_id:
        return first  # trimmed meanwhile
    low, high = started[0].entry_id, started[0].entry_id + entries
    while high - low > 1:
        middle = (low + high) // 2
        if await enough_after(Position(ledger_id, middle)):
            low = middle
        else:
            high = middle
    return Position(ledger_id, low)
