"""Since when entries wait that must not wait for ever: those at which filters failed, and chunks
that are kept back.

Who takes a subscription over would count from then on, and with a take-over a day nothing would
ever end. So the oldest are made durable, as text in the cursor's property WAITS:

    1:5@1700000000000 1:9@1700000360000        position @ milliseconds since 1970

Of more than WAITS_MAX the others begin anew with each take-over, until some before them have ended.
"""

from collections.abc import Iterable, Mapping
from heapq import nsmallest
from typing import Final

from seqgate.types import Position
from services.dispatcher.core.lane import Lane

WAITS: Final = "seqgate.waits"

WAITS_MAX: Final = 64
"""Of how many entries it is durable: as many as a property has room for."""


class Waits:
    """What is durable of that, and what waits anew. Mutable; of one machine."""

    def __init__(self, since_ms: Mapping[Position, int]) -> None:
        self._since_ms = dict(since_ms)
        self._anew: set[Position] = set()

    def since_ms(self, position: Position, now_ms: int) -> int:
        """Since when an entry waits that is found to wait now."""
        return min(now_ms, self._since_ms.get(position, now_ms))

    def failed_before(self, position: Position, *, is_chunk: bool) -> bool:
        """Whether filters failed, here or elsewhere, at an entry that is being looked at once more.
        Of a chunk that waited elsewhere nobody knows whether that was why."""
        return position in self._anew or (not is_chunk and position in self._since_ms)

    def begin_anew(self, position: Position) -> None:
        """An entry that waits may have no reason to any more; if it has, its time begins anew."""
        self._since_ms.pop(position, None)
        self._anew.add(position)

    def over(self, position: Position) -> None:
        """An entry waits no more: when it does again, it begins anew."""
        self._since_ms.pop(position, None)
        self._anew.discard(position)


def oldest(lanes: Iterable[Lane]) -> dict[Position, int]:
    """Those that have waited longest, and since when."""
    found: list[tuple[int, Position]] = []
    for lane in lanes:
        if lane.undecided is not None:
            found += [(since, position) for position, since in lane.undecided.failed_ms.items()]
        if lane.rare is not None:
            kept = lane.rare.kept_since_ms.items()
            found += [(since, min(lane.rare.kept_back[name])) for name, since in kept]
    return {position: since for since, position in nsmallest(WAITS_MAX, found)}


def to_text(since_ms: Mapping[Position, int]) -> str:
    """What is kept in the property."""
    return " ".join(
        f"{ledger_id}:{entry_id}@{since}" for (ledger_id, entry_id), since in since_ms.items()
    )


def from_text(text: str) -> dict[Position, int]:
    """What the property says. What is not understood was not written here, and counts for
    nothing."""
    found = {}
    for each in text.split():
        place, _, since = each.partition("@")
        ledger_id, _, entry_id = place.partition(":")
        if all(part.isascii() and part.isdecimal() for part in (ledger_id, entry_id, since)):
            found[Position(int(ledger_id), int(entry_id))] = int(since)
    return found
