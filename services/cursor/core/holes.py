"""How many holes a cursor has: entries that are not acknowledged, beyond the mark-delete position
and before one of the same ledger that is.

    mark-delete
    --------|  . . # # . #        # acknowledged: 3, holes: 3
"""

from seqgate.services.cursor.core.cursor import CursorState
from seqgate.services.cursor.core.state import PAGE_ENTRIES


def holes_of(state: CursorState) -> int:
    """Count them. Of a ledger in which nothing is acknowledged there are none."""
    mark_delete = state.head.mark_delete
    begins = {} if mark_delete is None else {mark_delete.ledger_id: mark_delete.entry_id + 1}
    ends: dict[int, int] = {}
    acknowledged = 0
    for ledger_id, number, page in state.holes.pages(mark_delete):
        first = number * PAGE_ENTRIES
        bits = _from(page, begins.get(ledger_id, 0) - first)
        if bits:
            ends[ledger_id] = first + bits.bit_length()
            acknowledged += bits.bit_count()
    between = sum(end - begins.get(ledger_id, 0) for ledger_id, end in ends.items())
    return between - acknowledged


def _from(bits: int, place: int) -> int:
    """The bits from this place on, which may lie before them all."""
    return bits if place <= 0 else bits >> place << place
