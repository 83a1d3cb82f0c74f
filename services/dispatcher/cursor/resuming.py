"""Moves a cursor that is ahead of its log back to the end of the log.

A cursor may have acknowledged entries that the log does not have yet: it was imported, or the log
was restored from an older copy. Entries stored there later would never be delivered. So everything
beyond the last entry is removed from the cursor before the log is read.
"""

from collections.abc import Mapping
from typing import Final

import structlog

from seqgate.services.dispatcher.core.effects import Persist
from seqgate.services.dispatcher.core.positions import Acknowledged, runs_of
from seqgate.services.dispatcher.cursor.tenure import Tenure
from seqgate.services.dispatcher.ports import Cursor, Part
from seqgate.types import Position, TopicName

log = structlog.get_logger()

BATCH_ENTRIES: Final = 1_000
"""Acknowledged entries per Persist when they are written again."""


def is_beyond(
    acknowledged: Acknowledged,
    left: Mapping[Position, int],
    attempts: Mapping[Position, int],
    last: Position | None,
) -> bool:
    """Whether a cursor has entries after the log's last one; None: the log never had any."""
    known = [*([acknowledged.highest] if acknowledged.highest else ()), *left, *attempts]
    return bool(known) and (last is None or max(known) > last)


async def move_back(
    tenure: Tenure, topic: TopicName, cursor: Cursor, last: Position | None
) -> None:
    """Remove everything after the log's last entry from a cursor; None: the log never had any.

    Raises:
        CursorsUnavailable, Fenced, SubscriptionNotFound: the cursor may be partly changed; repeat
            the call. Acknowledgements beyond the mark-delete position may be lost.
    """
    mark_delete = cursor.mark_delete
    if mark_delete is not None:
        mark_delete = None if last is None else min(mark_delete, last)
    log.error(
        "cursor beyond the end of the log, moved back",
        topic=str(topic),
        subscription=cursor.name,
        mark_delete=_text(cursor.mark_delete),
        last=_text(last),
        moved_to=_text(mark_delete),
    )
    entries: list[Position] = []
    parts: list[tuple[Position, int, int]] = []
    async for each in tenure.acknowledged():
        if isinstance(each, Part):
            parts.append((each.position, each.messages, each.acknowledged))
            continue
        ledger_id, first = each.first
        entries += [Position(ledger_id, at) for at in range(first, each.last_entry_id + 1)]
    attempts = [each async for each in tenure.attempts()]
    entries = [each for each in entries if last is not None and each <= last]
    await tenure.reset(mark_delete)
    for start in range(0, len(entries), BATCH_ENTRIES):
        some = runs_of(entries[start : start + BATCH_ENTRIES])
        await tenure.persist(Persist(0, some, (), ()))
    kept = tuple(each for each in parts if last is not None and each[0] <= last)
    if kept:
        await tenure.persist(Persist(0, (), kept, ()))
    counted = [each for each in attempts if last is not None and each.position <= last]
    if counted:
        await tenure.record(counted)


def _text(position: Position | None) -> str:
    return "" if position is None else f"{position.ledger_id}:{position.entry_id}"
