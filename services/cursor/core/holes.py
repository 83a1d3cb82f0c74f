"""Counts a cursor's holes: unacknowledged entries between the mark-delete position and a later
acknowledged entry of the same ledger.

    mark-delete
    --------|  . . # # . #        # acknowledged: 3, holes: 3
"""

from seqgate.services.cursor.core.cursor import CursorState
from seqgate.services.cursor.core.state import PAGE_ENTRIES


def holes_of(state: CursorState) -> int:
    """The number of holes. A ledger without acknowledged entries has none."""
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
    """The bits from an index on, which may be negative."""
    return bits if place <= 0 else bits >> place << place
