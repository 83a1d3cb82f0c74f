"""Counts the chunks that a reader skips.

A reader drops chunks for two kinds of reasons. Some never make a message, and are skipped for good.
Others were dropped only for now, and are read again with the last chunk of their message: a reader
that starts in the middle of a large message skips nothing.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from seqgate.cli._output import Output
from seqgate.client import Dropped, DropReason, Message

FINAL: Final = (
    DropReason.ABORTED,
    DropReason.RESTARTED,
    DropReason.DUPLICATE,
    DropReason.CORRUPT,
)
"""Reasons of chunks that never make a message."""

UNFINISHED_MAX: Final = 1_000
"""The most messages with dropped chunks to remember."""


class LeftOut:
    def __init__(self) -> None:
        self._for_good = Counter[DropReason]()
        self._unfinished: dict[tuple[str, int], Counter[DropReason]] = {}

    def add(self, dropped: Dropped) -> None:
        count = len(dropped.positions)
        if dropped.reason in FINAL:
            self._for_good[dropped.reason] += count
            return
        message = (dropped.producer, dropped.sequence_id)
        self._unfinished.setdefault(message, Counter())[dropped.reason] += count
        if len(self._unfinished) > UNFINISHED_MAX:  # the oldest is unlikely to be completed
            self._for_good += self._unfinished.pop(next(iter(self._unfinished)))

    def came(self, message: Message) -> None:
        """Uncount the chunks of a message that was read whole."""
        self._unfinished.pop((message.producer_name, message.sequence_id), None)

    @property
    def counts(self) -> Mapping[DropReason, int]:
        counts = sum(self._unfinished.values(), self._for_good)
        return {reason: counts[reason] for reason in DropReason if counts[reason]}


def tell_left_out(output: Output, left_out: LeftOut) -> None:
    """Report on standard error what was left out, if anything."""
    counts = {reason.name.lower(): count for reason, count in left_out.counts.items()}
    if not counts:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    output.note("CHUNKS_LEFT_OUT", f"chunks of incomplete messages were skipped: {reasons}", counts)
