"""Acknowledgements are made durable; where what was told of the log contradicts what it is now,
with what explains that."""

from dataclasses import replace
from typing import Final

from seqgate.types import Position, TopicName
from services.dispatcher.core.effects import Persist
from services.dispatcher.cursor.tenure import Tenure
from services.dispatcher.ports import CursorsRefused, Log

BEFORE_FIRST: Final = Position(0, 0)
"""Stands for the end of nothing: what follows it is the log's first entry."""


async def persist(tenure: Tenure, log: Log, topic: TopicName, what: Persist) -> Position | None:
    """Make acknowledgements durable. Returns the mark-delete position. May be repeated.

    What follows an entry may have been told before, when the log began earlier: a subscription that
    was moved back to before a trim tells otherwise. The log says where it begins now, and with that
    both are true.

    Raises:
        CursorsRefused: nothing of this can be made durable, however often it is told.
        CursorsUnavailable, Fenced, SubscriptionNotFound, CursorCorrupt, LedgerUnavailable.
    """
    try:
        return await tenure.persist(what)
    except CursorsRefused:
        first = (await log.ends(topic)).first if what.successions else None
        if first is None:
            raise
    told = replace(what, successions=((BEFORE_FIRST, first), *what.successions))
    return await tenure.persist(told)
