"""Reads the events of one entry from an audit topic, from the time of its append on.

A look-up reads metadata first, and fetches the pages whose properties say that they may be about
the entry. Both are bounded, and the result says what may be missing.
"""

from typing import Final, NamedTuple

from seqgate.api.ledger.v1.ledger_pb2 import StoredEntry
from seqgate.services.dispatcher.auditing.pages import PRODUCER, is_about, told
from seqgate.services.dispatcher.core.history import Event
from seqgate.services.dispatcher.entries import position_of
from seqgate.services.dispatcher.ports import Log, TopicNotFound
from seqgate.services.errors import DomainError
from seqgate.times import milliseconds
from seqgate.types import Position, TopicName

SCAN_ENTRIES: Final = 1_000
"""How many pages are looked at at a time."""

SCANNED_MAX: Final = 20_000
"""The most pages looked at for one entry."""

OPENED_MAX: Final = 500
"""The most pages opened for one entry."""

LATE_MS: Final = 120_000
"""How long after the time that is asked for an audit topic may begin and count as whole: twice the
time by which clocks may differ."""

FETCHED_BYTES: Final = 4 * 1024 * 1024
"""The bytes of pages that are fetched at a time."""


class Audited(NamedTuple):
    """What an audit topic says of an entry, and why events may be missing; empty: none are."""

    events: list[Event]
    missing: str


async def audited(
    log: Log, topic: TopicName, subscription: str, position: Position, *, since_ms: int
) -> Audited:
    """The events since a time, the oldest first."""
    events: list[Event] = []
    try:
        wanted, missing = await _wanted(log, topic, subscription, position, since_ms)
        lost = 0
        while wanted:
            fetched = await log.fetch_some(topic, wanted, bytes_max=FETCHED_BYTES)
            del wanted[: fetched.answered]
            for each in fetched.entries:
                found = told(each.payload, position)
                events += found.events
                lost += found.lost
        if lost:
            missing = f"{lost:,} events were dropped while the ledger did not take them"
    except TopicNotFound:
        missing = "the audit topic does not exist yet"
    except (DomainError, ValueError) as error:
        missing = f"the audit topic cannot be read: {error}"
    return Audited(sorted(events, key=lambda each: each.at_ms), missing)


async def _wanted(
    log: Log, topic: TopicName, subscription: str, position: Position, since_ms: int
) -> tuple[list[Position], str]:
    """The pages that may be about an entry, and why others may be missing."""
    wanted: list[Position] = []
    at = await log.find(topic, since_ms)
    after: Position | None = None
    missing, scanned = "", 0
    while at is not None:
        start = at if after is None else None
        entries = await log.scan(topic, start, after, SCAN_ENTRIES)
        if after is None and entries:
            missing = await _begins_late(log, topic, entries[0], since_ms)
        wanted += [
            position_of(each)
            for each in entries
            if _is_page(each) and is_about(each.metadata.properties, subscription, position)
        ]
        if not entries:
            break
        after = position_of(entries[-1])
        scanned += len(entries)
        if scanned >= SCANNED_MAX or len(wanted) > OPENED_MAX:
            return wanted[:OPENED_MAX], f"the audit topic was read up to {after}"
    return wanted, missing


async def _begins_late(log: Log, topic: TopicName, first: StoredEntry, since_ms: int) -> str:
    """A sentence, if the audit topic begins well after the time: it was trimmed, or the topic was
    not audited before."""
    if milliseconds(first.append_time) <= since_ms + LATE_MS:
        return ""
    if (await log.ends(topic)).first != position_of(first):
        return ""
    return f"the audit topic begins at {position_of(first)}, after the message"


def _is_page(entry: StoredEntry) -> bool:
    return entry.metadata.producer_name.startswith(PRODUCER)
