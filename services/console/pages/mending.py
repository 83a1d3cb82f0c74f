"""Changing what a dead letter is: another payload or other properties, or giving it up.

letter ──▶ form, with what was before beside it ──▶ a mended letter takes the letter's place
"""

import itertools
import secrets
from html import escape
from typing import Final
from urllib.parse import urlencode

from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.errors import InvalidRequestError
from seqgate.payloads import PayloadDamaged, unpack
from seqgate.services.console.pages.answers import enum_name, open_entry, properties_shown, time_of
from seqgate.services.console.pages.owners import check_owned
from seqgate.services.console.pages.query import position_of, subscription_of
from seqgate.services.console.pages.visit import Query, Values, Visit
from seqgate.services.console.payloads import check_size, editable, parsed
from seqgate.services.console.searching import position_of as position_from
from seqgate.services.console.searching import to_wire

FORM_BYTES_MAX: Final = 64 * 1024
"""The most bytes of a payload and its properties that a form has, as they are in the page."""

PROPERTIES_MAX: Final = 100
"""The most properties that a form has."""

LISTED_MAX: Final = 5
"""The most letters of an operation that are listed."""

SPARE_ROWS: Final = 3
"""The empty rows for further properties."""


async def mend(visit: Visit) -> Values:
    """A dead letter, and the form that changes it."""
    names = subscription_of(visit.query)
    await check_owned(visit, names)
    found = await _letter(visit, names)
    return _page(visit.query, names, found)


async def mended(visit: Visit, form: Query) -> str | Values:
    """Publish the changed letter. The form's request id makes it safe to send twice. What is wrong
    with the form is shown beside it."""
    names = subscription_of(visit.query)
    found = await _letter(visit, names)
    page = _page(visit.query, names, found)
    try:
        request = _request(names, found, form)
    except InvalidRequestError as error:
        return page | _given(form) | {"fault": str(error)}
    answer = await visit.calls.call(request)
    visit.memory.letters.clear()
    return f"/letter?{urlencode(names | {'position': str(position_from(answer.letter))})}"


async def discard(visit: Visit) -> Values:
    """Asks before a letter is given up."""
    names = subscription_of(visit.query)
    await check_owned(visit, names)
    return {
        **names,
        "position": position_of(visit.query.get("position", "")),
        "request_id": secrets.token_urlsafe(16),
    }


async def discarded(visit: Visit, form: Query) -> str:
    """Give a letter up."""
    names = subscription_of(visit.query)
    position = position_of(visit.query.get("position", ""))
    request = dispatcher_pb2.DiscardDeadLettersRequest(
        **names,
        positions=[to_wire(position)],
        reason=form.get("reason", "").strip(),
        request_id=form.get("request_id", ""),
    )
    await visit.calls.call(request)
    visit.memory.letters.clear()
    return f"/letter?{urlencode(names | {'position': str(position)})}"


async def _letter(visit: Visit, names: Values) -> dispatcher_pb2.GetDeadLetterResponse:
    position = position_of(visit.query.get("position", ""))
    request = dispatcher_pb2.GetDeadLetterRequest(**names, position=to_wire(position))
    found: dispatcher_pb2.GetDeadLetterResponse = await visit.calls.call(request)
    return found


def _page(query: Query, names: Values, found: dispatcher_pb2.GetDeadLetterResponse) -> Values:
    letter = found.letter
    properties = sorted(letter.properties.items())
    values: Values = {
        **names,
        "position": position_from(letter.position),
        "properties": properties_shown(letter.properties),
        "payload": open_entry(found.entry, query),
        "rows": [*properties, *[("", "")] * SPARE_ROWS],
        "request_id": secrets.token_urlsafe(16),
        "form_of": "",
        "text": "",
        "fault": "",
        "why_not": "",
    }
    try:
        form, text = editable(_payload(found), query.get("as", ""))
        size = sum(len(escape(each).encode()) for each in (text, *itertools.chain(*properties)))
        if size > FORM_BYTES_MAX or len(properties) > PROPERTIES_MAX:
            raise InvalidRequestError("it is too large for a form")
    except (InvalidRequestError, PayloadDamaged) as error:
        return values | {"why_not": str(error), "rows": []}
    return values | {"form_of": form, "text": text}


def _payload(found: dispatcher_pb2.GetDeadLetterResponse) -> bytes:
    """A letter's payload, if it can be mended. Raises InvalidRequestError, PayloadDamaged."""
    metadata = found.entry.metadata
    if metadata.HasField("num_messages_in_batch"):
        raise InvalidRequestError("a batch cannot be mended")
    if metadata.HasField("chunk_id"):
        raise InvalidRequestError("a large message cannot be mended")
    check_size(metadata)
    return unpack(metadata, found.entry.payload)


def _given(form: Query) -> Values:
    """What the form had, to show it again."""
    return {
        "form_of": form.get("as", ""),
        "text": form.get("payload", ""),
        "rows": _rows(form),
        "request_id": form.get("request_id", ""),
    }


def _rows(form: Query) -> list[tuple[str, str]]:
    """The names and values of the form's properties; those without a name are empty rows."""
    numbers = range(PROPERTIES_MAX + SPARE_ROWS)
    return [
        (form.get(f"name-{each}", ""), form.get(f"value-{each}", ""))
        for each in numbers
        if f"name-{each}" in form or f"value-{each}" in form
    ]


def _request(
    names: Values, found: dispatcher_pb2.GetDeadLetterResponse, form: Query
) -> dispatcher_pb2.MendDeadLetterRequest:
    """The changes alone: what stays as it was is left out."""
    request = dispatcher_pb2.MendDeadLetterRequest(
        **names,
        dead_letter_topic=found.dead_letter_topic,
        position=found.letter.position,
        request_id=form.get("request_id", ""),
    )
    before = _payload(found)
    after = parsed(form.get("as", ""), form.get("payload", ""), before)
    if after != before:
        request.payload = after
    properties = dict(each for each in _rows(form) if each[0])
    for name, value in properties.items():
        if found.letter.properties.get(name) != value:
            request.put[name] = value
    request.remove.extend(sorted(set(found.letter.properties) - properties.keys()))
    if not (request.HasField("payload") or request.put or request.remove):
        raise InvalidRequestError("nothing is changed")
    return request


async def operations(visit: Visit) -> Values:
    """The latest redrives, mends and discards of a subscription's letters, and who made them."""
    names = subscription_of(visit.query)
    await check_owned(visit, names)
    found = await visit.calls.call(dispatcher_pb2.ListLetterOperationsRequest(**names))
    return {**names, "rows": [_operation_row(each) for each in found.operations]}


def _operation_row(each: dispatcher_pb2.LetterOperation) -> Values:
    return {
        "number": each.number,
        "action": enum_name(dispatcher_pb2.LetterAction, each.action),
        "caller": each.caller,
        "time": time_of(each, "time"),
        "positions": [position_from(it) for it in each.positions[:LISTED_MAX]],
        "letters": each.letters,
        "reason": each.reason,
        "successor": position_from(each.successor) if each.HasField("successor") else None,
    }
