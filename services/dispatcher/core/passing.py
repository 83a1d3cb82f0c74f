"""What is acknowledged though nobody received it, because nobody can: never without a word.

A subscription stands still for nothing. What cannot be delivered, and cannot be dead-lettered
either, is passed: acknowledged, counted, and said, so that somebody can look for it in the log.
"""

from collections.abc import Sequence

from seqgate.types import Position
from services.dispatcher.core.effects import Because, Passed
from services.dispatcher.core.lane import Lane
from services.dispatcher.core.outgoing import Outgoing
from services.dispatcher.core.settling import Settling


class Passing:
    """See the module."""

    def __init__(self, settling: Settling, out: Outgoing, totals: dict[str, int]) -> None:
        self._settling = settling
        self._out = out
        self._totals = totals

    def pass_over(
        self, positions: Sequence[Position], because: Because, lane: Lane | None = None
    ) -> None:
        """Entries that do not wait, and are not in flight, are acknowledged; they were in this
        lane, if they were in any."""
        for position in positions:
            self._settling.settle_whole(position, lane)
        self.note(positions, because)

    def note(self, positions: Sequence[Position], because: Because) -> None:
        """These were acknowledged, and nobody received them."""
        self._totals["passed_entries"] += len(positions)
        if positions:
            self._out.add(Passed(tuple(positions), because))
