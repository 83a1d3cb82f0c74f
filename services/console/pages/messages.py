"""Messages of a topic: a page of its log or a search through it, and one entry."""

from typing import Final

from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.errors import InvalidRequestError, NotFoundError
from seqgate.services.console import searching
from seqgate.services.console.pages.answers import (
    entry_row,
    enum_name,
    known,
    open_whole,
    part,
    properties_shown,
)
from seqgate.services.console.pages.query import key_of, number_of, position_of, start_of, topic_of
from seqgate.services.console.pages.topics import SUBSCRIPTIONS_MAX
from seqgate.services.console.pages.visit import Query, Values, Visit
from seqgate.services.console.searching import Found, Search
from seqgate.types import Position

LIMITS: Final = {
    "entries": searching.SCAN_ENTRIES_MAX,
    "seconds": searching.SCAN_S,
    "judged": searching.EXPRESSION_ENTRIES_MAX,
    "rows": searching.ROWS_MAX,
}


async def messages(visit: Visit) -> Values:
    """A page of a topic's log, or a search through it."""
    name = topic_of(visit.query)
    topic = (await visit.calls.call(ledger_pb2.GetTopicRequest(topic=name))).topic
    last = searching.position_of(topic.last) if topic.HasField("last") else None
    wanted = _search(name, visit.query)
    if last is not None and wanted.start is None and not wanted.is_narrow:
        end = Position(last.ledger_id, last.entry_id + 1)
        start = await searching.steps_back(visit.calls, name, end, searching.ROWS_MAX)
        wanted = wanted._replace(start=start)
    fault = ""
    found = Found()
    try:
        found = await searching.search(visit.calls, wanted)
    except InvalidRequestError as error:
        fault = str(error)
    return {
        "topic": topic,
        "wanted": wanted,
        "query": dict(visit.query),
        "rows": [entry_row(each) for each in found.entries],
        "found": found,
        "fault": fault,
        "older": await _older(visit, topic, wanted, found),
        "further": _further(found, last),
        "fate": await _fate(visit, wanted),
        "limits": LIMITS,
    }


def _search(topic: str, query: Query) -> Search:
    has_key = query.get("key") or query.get("key64")
    return Search(
        topic=topic,
        start=start_of(query),
        key=key_of(query) if has_key else None,
        producer=query.get("producer", ""),
        sequence_id=number_of(query, "sequence_id"),
        expression=query.get("expression", "").strip(),
    )


async def _older(
    visit: Visit, topic: ledger_pb2.Topic, wanted: Search, found: Found
) -> Position | None:
    """Where the page before this one begins; None: this is the first, or a search."""
    if wanted.is_narrow or not found.entries:
        return None
    first = searching.position_of(found.entries[0].position)
    if first <= searching.position_of(topic.first):
        return None
    return await searching.steps_back(visit.calls, topic.name, first, searching.ROWS_MAX)


def _further(found: Found, last: Position | None) -> Position | None:
    """Where the next page begins; None: this one reached the end of the log."""
    if not found.stopped_by or found.last is None or found.last == last:
        return None
    return Position(found.last.ledger_id, found.last.entry_id + 1)


async def _fate(visit: Visit, wanted: Search) -> Values | None:
    """What became of the message that is searched by producer and sequence id."""
    if not wanted.producer or wanted.sequence_id is None:
        return None
    request = ledger_pb2.FindMessageRequest(
        topic=wanted.topic, producer_name=wanted.producer, sequence_id=wanted.sequence_id
    )
    return known(await part(visit.calls.call(request)), lambda it: _fate_row(it.fate))


def _fate_row(fate: ledger_pb2.MessageFate) -> Values:
    return {
        "fate": enum_name(ledger_pb2.Fate, fate.fate),
        "position": searching.position_of(fate.position) if fate.HasField("position") else None,
        "index": fate.batch_index if fate.HasField("batch_index") else None,
    }


async def message(visit: Visit) -> Values:
    """An entry, its messages, and a payload as JSON, text or hex."""
    name = topic_of(visit.query)
    at = position_of(visit.query.get("position", ""))
    entry = await searching.entry_at(visit.calls, name, at)
    if entry is None:
        raise NotFoundError(f"{name} has no entry {at}", reason="NO_ENTRY")
    subscriptions = await part(
        visit.calls.call(
            dispatcher_pb2.ListSubscriptionsRequest(topic=name, page_size=SUBSCRIPTIONS_MAX)
        )
    )
    return {
        "topic": name,
        "row": entry_row(entry),
        "properties": properties_shown(entry.metadata.properties),
        "payload": await open_whole(visit, name, entry),
        "subscriptions": subscriptions,
    }
