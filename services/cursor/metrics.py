"""The cursor service's metrics; seqgate/telemetry/metrics.py describes each. All of them come from
the store, which is surveyed periodically."""

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
"""The number of cursors read at a time."""


class Seen(NamedTuple):
    """The result of a survey: counts by topic label."""

    cursors: Counter[str]
    leased: Counter[str]
    acknowledged: Counter[str]
    partial: Counter[str]
    holes: Counter[str]


def _nothing() -> Seen:
    return Seen(Counter(), Counter(), Counter(), Counter(), Counter())


class Survey:
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
        """Survey once.

        Raises:
            StoreUnavailable: the previous result remains.
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
            # A cursor deleted meanwhile has no holes; a damaged one is reported to its users.
            with suppress(CursorNotFound, CursorCorrupt):
                seen.holes[label] += await self._store.look(
                    head.topic, head.name, holes_of, whole=False
                )


def _each(counts: Counter[str]) -> list[tuple[Values, float]]:
    return [((label,), counts[label]) for label in {told.OTHER: 0, **counts}]
