"""What the cursor service says of itself in numbers; seqgate/telemetry/metrics.py says what each
means. All of it is in the store: a survey looks through that now and then."""

from collections import Counter
from contextlib import suppress
from typing import Final, NamedTuple

import structlog

from seqgate.services.cursor.core.holes import holes_of
from seqgate.services.cursor.core.state import Head
from seqgate.services.cursor.ports import CursorCorrupt, CursorNotFound, CursorStore
from seqgate.services.runtime.metrics import Metrics, Values
from seqgate.telemetry import metrics as told

log = structlog.get_logger()

PAGE: Final = 1_000
"""How many cursors are looked at at a time."""


class Seen(NamedTuple):
    """What there is of each topic, by its label."""

    cursors: Counter[str]
    leased: Counter[str]
    acknowledged: Counter[str]
    partial: Counter[str]
    holes: Counter[str]


def _nothing() -> Seen:
    return Seen(Counter(), Counter(), Counter(), Counter(), Counter())


class Survey:
    """Looks through all cursors, again and again."""

    def __init__(self, store: CursorStore, metrics: Metrics) -> None:
        self._store = store
        self._label = metrics.topics.of
        self._seen = _nothing()
        metrics.tell(told.CURSORS, lambda: _each(self._seen.cursors))
        metrics.tell(told.LEASED, lambda: _each(self._seen.leased))
        metrics.tell(told.AHEAD, lambda: _each(self._seen.acknowledged))
        metrics.tell(told.PARTIAL, lambda: _each(self._seen.partial))
        metrics.tell(told.HOLES, lambda: _each(self._seen.holes))

    async def look(self) -> None:
        """Look once.

        Raises:
            StoreUnavailable: what was seen before stays.
        """
        seen, after = _nothing(), ("", "")
        now_ms = self._store.now_ms()
        while heads := await self._store.cursors(None, after=after, limit=PAGE):
            for head in heads:
                await self._count(head, seen, now_ms)
            after = str(heads[-1].topic), heads[-1].name
        self._seen = seen

    async def _count(self, head: Head, seen: Seen, now_ms: int) -> None:
        label = self._label(head.topic)
        seen.cursors[label] += 1
        seen.leased[label] += head.lease is not None and head.lease.lasts(now_ms)
        seen.acknowledged[label] += head.acknowledged
        seen.partial[label] += head.partial
        if head.acknowledged:
            # One that was deleted meanwhile has none; of one that is damaged its user is told.
            with suppress(CursorNotFound, CursorCorrupt):
                seen.holes[label] += await self._store.look(
                    head.topic, head.name, holes_of, whole=False
                )


def _each(counts: Counter[str]) -> list[tuple[Values, float]]:
    return [((label,), counts[label]) for label in {told.OTHER: 0, **counts}]
