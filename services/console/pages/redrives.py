"""Redrives of many: dead letters that a selection names, or a stretch of a topic, which is
a replay.

form ──▶ estimate: what it would redrive, and why the rest is left out ──▶ start ──▶ redrives
"""

import secrets
from typing import Final
from urllib.parse import urlencode

from google.protobuf.duration_pb2 import Duration

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.errors import InvalidRequestError, SeqgateError
from seqgate.services.console.pages.answers import enum_name, part, time_of
from seqgate.services.console.pages.owners import check_owned
from seqgate.services.console.pages.query import (
    key_of,
    number_of,
    position_of,
    start_of,
    subscription_of,
    time_given,
)
from seqgate.services.console.pages.visit import Query, Values, Visit
from seqgate.services.console.payloads import key_text
from seqgate.services.console.searching import position_of as position_from
from seqgate.services.console.searching import start_message

ESTIMATE_S: Final = 8
"""The longest that an estimate looks at entries, in seconds; then it estimates the rest."""

RATE_MAX: Final = 10_000
"""The most messages a second that a redrive may be limited to."""

FIELDS: Final = (
    *("topic", "subscription", "key", "key64", "expression", "rate"),
    *("at", "time", "until_at", "until_time", "create"),
)
"""What a URL may say of a redrive."""


async def redrives(visit: Visit) -> Values:
    """The latest redrives and replays of a subscription, and how far they are."""
    names = subscription_of(visit.query)
    await check_owned(visit, names)
    found = await visit.calls.call(dispatcher_pb2.ListRedrivesRequest(**names))
    return {**names, "rows": [_redrive_row(each) for each in found.redrives]}


async def stopped(visit: Visit, form: Query) -> str:
    """Stop a redrive."""
    names = subscription_of(visit.query)
    number = number_of(form, "number") or 0
    await visit.calls.call(dispatcher_pb2.StopRedriveRequest(**names, number=number))
    return f"/redrives?{urlencode(names)}"


async def redrive_many(visit: Visit) -> Values:
    """What a redrive of the dead letters of a key, of an expression, or of all would do."""
    names = subscription_of(visit.query)
    await check_owned(visit, names)
    return await _estimated(visit, is_replay=False)


async def redrive_many_started(visit: Visit, form: Query) -> str:
    return await _started(visit, form, is_replay=False)


async def replay(visit: Visit) -> Values:
    """What a replay of a stretch of the topic would do; without a query for one, its form."""
    names = subscription_of(visit.query)
    if not visit.query.get("create"):
        await check_owned(visit, names)
    if not visit.query.get("estimate"):
        return {**names, "asked": {}, "estimate": None, "fault": "", "request_id": ""}
    return await _estimated(visit, is_replay=True)


async def replay_started(visit: Visit, form: Query) -> str:
    return await _started(visit, form, is_replay=True)


async def _estimated(visit: Visit, *, is_replay: bool) -> Values:
    """A fault in the query is shown beside its form."""
    names = subscription_of(visit.query)
    values: Values = {
        **names,
        "asked": {each: visit.query.get(each, "") for each in FIELDS},
        "estimate": None,
        "request_id": secrets.token_urlsafe(16),
        "fault": "",
    }
    try:
        request = dispatcher_pb2.EstimateRedriveRequest(
            **names,
            selection=_selection(visit.query, is_replay=is_replay),
            create_subscription=bool(is_replay and visit.query.get("create")),
            max_duration=Duration(seconds=ESTIMATE_S),
        )
        _rate(visit.query)
        found = await visit.calls.call(request, timeout_s=ESTIMATE_S + visit.config.call_timeout_s)
    except InvalidRequestError as error:
        return values | {"fault": str(error)}
    outcomes = {
        enum_name(dispatcher_pb2.RedriveOutcome, each.outcome): each for each in found.outcomes
    }
    running = await part(_running(visit, names))
    return values | {
        "estimate": found,
        "outcomes": outcomes,
        "redriven": outcomes.get("REDRIVEN"),
        "running": None if isinstance(running, SeqgateError) else running,
    }


async def _running(visit: Visit, names: Values) -> Values | None:
    """The redrive that runs: there is one at a time."""
    found = await visit.calls.call(dispatcher_pb2.ListRedrivesRequest(**names))
    rows = [_redrive_row(each) for each in found.redrives]
    return next((each for each in rows if each["state"] == "RUNNING"), None)


async def _started(visit: Visit, form: Query, *, is_replay: bool) -> str:
    """Start a redrive. The form's request id makes it safe to send twice."""
    names = subscription_of(visit.query)
    request = dispatcher_pb2.StartRedriveRequest(
        **names,
        selection=_selection(visit.query, is_replay=is_replay),
        letters_per_second=_rate(visit.query),
        request_id=form.get("request_id", ""),
        create_subscription=bool(is_replay and visit.query.get("create")),
    )
    await visit.calls.call(request)
    visit.memory.letters.clear()
    return f"/redrives?{urlencode(names)}"


def _selection(query: Query, *, is_replay: bool) -> dispatcher_pb2.RedriveSelection:
    selection = dispatcher_pb2.RedriveSelection(expression=query.get("expression", "").strip())
    if query.get("key") or query.get("key64"):
        selection.key = key_of(query)
    if is_replay:
        selection.stretch.start.CopyFrom(start_message(start_of(query)))
        at, moment = query.get("until_at", "").strip(), query.get("until_time", "").strip()
        if at or moment:
            end = position_of(at) if at else time_given(moment)
            selection.stretch.end.CopyFrom(start_message(end))
    return selection


def _rate(query: Query) -> int:
    rate = number_of(query, "rate") or 0
    if rate > RATE_MAX:
        raise InvalidRequestError(f"the rate is above {RATE_MAX:,}")
    return rate


def _redrive_row(each: dispatcher_pb2.Redrive) -> Values:
    selection = each.selection
    stretch = selection.stretch
    return {
        "number": each.number,
        "is_replay": selection.HasField("stretch"),
        "is_many": each.HasField("selection"),
        "key": key_text(selection.key) if selection.HasField("key") else None,
        "expression": selection.expression,
        "from": _place(stretch.start),
        "to": _place(stretch.end),
        "rate": each.letters_per_second,
        "state": enum_name(dispatcher_pb2.RedriveState, each.state),
        "failure": each.failure,
        "waits_for": each.waits_for,
        "started": time_of(each, "started"),
        "ended": time_of(each, "ended"),
        "read": each.scanned_entries,
        "total": each.total_entries,
        "redriven": sum(
            it.entries
            for it in each.counts
            if it.outcome == dispatcher_pb2.REDRIVE_OUTCOME_REDRIVEN
        ),
        "left_out": [
            (enum_name(dispatcher_pb2.RedriveOutcome, it.outcome), it.entries)
            for it in each.counts
            if it.outcome != dispatcher_pb2.REDRIVE_OUTCOME_REDRIVEN
        ],
        "returning": each.returning_entries,
        "caller": each.caller,
    }


def _place(place: common_pb2.Start) -> str:
    """The entry after which a stretch begins, or its last one, as its redrive resolved them."""
    kind = place.WhichOneof("start")
    return str(position_from(getattr(place, kind))) if kind in ("at", "after") else ""
