"""Dead letters of a subscription: the list, one letter, and its way back."""

import asyncio
import secrets
import time
from collections.abc import Iterable
from math import inf
from typing import Final
from urllib.parse import urlencode

from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.errors import NotFoundError, SeqgateError
from seqgate.services.console.alerts import Key, Letters
from seqgate.services.console.pages.answers import (
    cut,
    enum_name,
    known,
    open_entry,
    part,
    properties_shown,
    time_of,
)
from seqgate.services.console.pages.owners import check_owned
from seqgate.services.console.pages.query import key_of, key_query, position_of, subscription_of
from seqgate.services.console.pages.visit import Query, Values, Visit
from seqgate.services.console.payloads import key_text
from seqgate.services.console.searching import position_of as position_from
from seqgate.services.console.searching import to_wire
from seqgate.types import SEQUENCE_ID_MAX, Position

LETTERS_MAX: Final = 50
"""The most dead letters that a page lists, the oldest first."""

REASON_CHARACTERS_MAX: Final = 80
"""The most characters of a consumer's reason that a list shows."""

NEWEST: Final = 100
"""The most dead letters that are counted for the overview."""

UNDECIDED: Final = (
    dispatcher_pb2.DEAD_LETTER_STATE_DEAD,
    dispatcher_pb2.DEAD_LETTER_STATE_MENDING,
)
"""The states of letters that wait for somebody."""

COUNTED_S: Final = 15.0
"""The age at which they are counted again, in seconds."""


async def letters(visit: Visit) -> Values:
    """A page of a subscription's dead letters, the oldest first."""
    names = subscription_of(visit.query)
    await check_owned(visit, names)
    request = dispatcher_pb2.ListDeadLettersRequest(
        **names, page_size=LETTERS_MAX, page_token=visit.query.get("from", "")
    )
    if visit.query.get("key") or visit.query.get("key64"):
        request.key = key_of(visit.query)
    found = await visit.calls.call(request)
    return {
        **names,
        "key": key_text(request.key) if request.HasField("key") else None,
        "query": dict(visit.query),
        "letters": found.dead_letter_topic,
        "rows": [_letter_row(each) for each in found.letters],
        "next": found.next_page_token,
    }


async def letter(visit: Visit) -> Values:
    """A dead letter: why it is one, its failed deliveries, and what waits behind it."""
    names = subscription_of(visit.query)
    position = position_of(visit.query.get("position", ""))
    await check_owned(visit, names)
    listed = dispatcher_pb2.ListDeadLettersRequest(
        **names, page_size=1, page_token=_token_before(position)
    )
    whole = dispatcher_pb2.GetDeadLetterRequest(**names, position=to_wire(position))
    found, opened = await asyncio.gather(visit.calls.call(listed), part(visit.calls.call(whole)))
    if not found.letters or position_from(found.letters[0].position) != position:
        raise NotFoundError(f"{position} is no dead letter", reason="LETTER_NOT_FOUND")
    return {
        **names,
        "letters": found.dead_letter_topic,
        "row": _letter_row(found.letters[0]),
        "opened": opened,
        "payload": known(opened, lambda it: open_entry(it.entry, visit.query)),
    }


def _token_before(position: Position) -> str:
    """The token of the page that begins with a position: pages take fewer rights than letters
    with their payloads do."""
    if position.entry_id:
        return f"{position.ledger_id}:{position.entry_id - 1}"
    return f"{position.ledger_id - 1}:{SEQUENCE_ID_MAX}" if position.ledger_id else ""


async def newest_letters(visit: Visit, of: Key, topic: ledger_pb2.Topic) -> Letters | None:
    """The newest letters of a subscription in its dead letter topic; None: not for this reader. An
    answer is used again for COUNTED_S, while no letter is added."""
    key = (visit.reader.name, *of)
    at_s, messages, found = visit.memory.letters.get(key, (-inf, 0, None))
    if messages == topic.messages and time.monotonic() - at_s < COUNTED_S:
        return found
    first = Position(topic.last.ledger_id, max(0, topic.last.entry_id - NEWEST + 1))
    name, subscription = of
    request = dispatcher_pb2.ListDeadLettersRequest(
        topic=name, subscription=subscription, page_size=NEWEST, page_token=_token_before(first)
    )
    answer = await part(visit.calls.call(request))
    if isinstance(answer, SeqgateError):
        return None
    dead = sum(each.state in UNDECIDED for each in answer.letters)
    found = Letters(dead, len(answer.letters))
    visit.memory.count(key, (time.monotonic(), topic.messages, found))
    return found


async def redrive(visit: Visit) -> Values:
    """What a redrive of a dead letter would do: its dry run."""
    request = _redrive(visit.query, secrets.token_urlsafe(16), dry_run=True)
    await visit.calls.call(request)
    return {
        **subscription_of(visit.query),
        "position": visit.query["position"],
        "request_id": request.request_id,
    }


async def redriven(visit: Visit, form: Query) -> str:
    """Take a dead letter back. The form's request id makes it safe to send twice."""
    await visit.calls.call(_redrive(visit.query, form.get("request_id", "")))
    visit.memory.letters.clear()
    names = subscription_of(visit.query) | {"position": visit.query["position"]}
    return f"/letter?{urlencode(names)}"


def _redrive(
    query: Query, request_id: str, *, dry_run: bool = False
) -> dispatcher_pb2.RedriveDeadLettersRequest:
    return dispatcher_pb2.RedriveDeadLettersRequest(
        **subscription_of(query),
        positions=[to_wire(position_of(query.get("position", "")))],
        request_id=request_id,
        dry_run=dry_run,
    )


def _letter_row(each: dispatcher_pb2.DeadLetter) -> Values:
    return {
        "position": position_from(each.position),
        "origin": position_from(each.origin),
        "key": key_text(each.key),
        "key_query": key_query(each.key),
        "producer": each.producer_name,
        "sequence_id": each.sequence_id,
        "properties": properties_shown(each.properties),
        "messages": each.num_messages,
        "bytes": each.payload_bytes,
        "chunks": each.num_chunks,
        "time": time_of(each, "time"),
        "reason": enum_name(dispatcher_pb2.DeadLetterReason, each.reason),
        "attempts": each.attempts,
        "failures": _failures(each.failures),
        "holds_key": each.holds_key,
        "waiting": each.waiting_entries,
        "lags": each.lags,
        "redriven": each.redriven,
        "state": enum_name(dispatcher_pb2.DeadLetterState, each.state),
        "successor": position_from(each.successor) if each.HasField("successor") else None,
        "mend": _mend(each.mend) if each.HasField("mend") else None,
        "lives": [_life(it) for it in each.lives],
        "redrives": each.redrives,
    }


def _failures(failures: Iterable[dispatcher_pb2.FailedDelivery]) -> list[Values]:
    return [
        {
            "how": enum_name(dispatcher_pb2.DeliveryFailure, each.failure),
            "time": time_of(each, "time"),
            "consumer": cut(each.consumer),
            "why": cut(each.reason),
            "short": cut(each.reason, REASON_CHARACTERS_MAX),
        }
        for each in failures
    ]


def _mend(each: dispatcher_pb2.DeadLetterMend) -> Values:
    return {
        "original": position_from(each.original),
        "caller": each.caller,
        "time": time_of(each, "time"),
    }


def _life(each: dispatcher_pb2.DeadLetterLife) -> Values:
    """A time between two redrives of a message."""
    return {
        "letter": position_from(each.letter),
        "time": time_of(each, "time"),
        "reason": enum_name(dispatcher_pb2.DeadLetterReason, each.reason),
        "attempts": each.attempts,
        "failures": _failures(each.failures),
    }
