"""Subscriptions, one of them, and why one of its keys or messages waits."""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._frames import Sampler, frame_of
from seqgate.errors import SeqgateError
from seqgate.services.console.charts import Chart, line_chart
from seqgate.services.console.history import Point, levels, rates
from seqgate.services.console.pages.answers import enum_name, key_row, known, part, time_of
from seqgate.services.console.pages.owners import check_owned
from seqgate.services.console.pages.query import (
    key_of,
    key_query,
    pattern_of,
    position_of,
    subscription_of,
)
from seqgate.services.console.pages.visit import Values, Visit
from seqgate.services.console.payloads import key_text
from seqgate.services.console.searching import position_of as position_from
from seqgate.services.console.searching import to_wire

SUBSCRIPTIONS_MAX: Final = 100
"""The most subscriptions that a page lists; a prefix selects others."""

CONSUMERS_MAX: Final = 50
"""The most consumers that a subscription's page lists, in the order in which they connected."""

KEYS_MAX: Final = 50
"""The most withheld keys that a subscription's page lists, the longest waiting first."""

DEAD: Final = (
    dispatcher_pb2.REASON_HELD,
    dispatcher_pb2.REASON_DEAD_LETTERING,
    dispatcher_pb2.REASON_DEAD_LETTERED,
)
"""Why a key has a dead letter."""

RANGES_MAX: Final = 6
"""The most ranges of slots shown of a consumer; the number of further ones is shown."""


async def subscriptions(visit: Visit) -> Values:
    """The subscriptions of all topics that a prefix selects."""
    prefix = visit.query.get("prefix", "")
    sample = await Sampler(visit.calls, pattern_of(prefix)).sample()
    denied = sample.away.get("ledger") or sample.away.get("dispatcher")
    if denied is not None and not any(each.subscriptions for each in sample.topics.values()):
        raise denied
    rows = [
        {"topic": topic["topic"], **subscription}
        for topic in frame_of(sample, None, "name")["topics"]
        for subscription in topic["subscriptions"] or ()
    ]
    return {"rows": rows[:SUBSCRIPTIONS_MAX], "in_all": len(rows), "prefix": prefix}


async def subscription(visit: Visit) -> Values:
    """A subscription: consumers, withheld keys, lag, filters."""
    names = subscription_of(visit.query)
    found = (await visit.calls.call(dispatcher_pb2.GetSubscriptionRequest(**names))).subscription
    report, lag, filters = await asyncio.gather(
        _report(visit, found),
        part(_lag(visit, found)),
        part(visit.calls.call(dispatcher_pb2.GetFiltersRequest(**names))),
    )
    values: dict[str, float] = {} if isinstance(lag, SeqgateError) else {"lag": lag}
    shown: Values = {"report": None, "report_error": None}
    if isinstance(report, SeqgateError):
        shown["report_error"] = report
    elif report is not None:
        values |= _levels(report)
        shown |= _reported(report)
    points = visit.memory.history.add(
        (visit.reader.name, "subscription", *names.values()), time.monotonic(), values
    )
    return {
        **names,
        **shown,
        "found": found,
        "lag": values.get("lag"),
        "filters": known(filters, lambda it: it.filters),
        "charts": _charts(points),
    }


async def _report(
    visit: Visit, of: dispatcher_pb2.Subscription
) -> dispatcher_pb2.ReportResponse | SeqgateError | None:
    """The owner's report; None: there is no owner, and a report would make an instance take it."""
    if not of.owner:
        return None
    request = dispatcher_pb2.ReportRequest(topic=of.topic, subscription=of.name, max_keys=KEYS_MAX)
    return await part(visit.calls.call(request))


async def _lag(visit: Visit, of: dispatcher_pb2.Subscription) -> int:
    topic = (await visit.calls.call(ledger_pb2.GetTopicRequest(topic=of.topic))).topic
    return await Sampler(visit.calls, of.topic).lag(topic, of)


def _levels(report: dispatcher_pb2.ReportResponse) -> dict[str, float]:
    """What charts have of a report."""
    return {
        "delivered": report.totals.delivered_messages,
        "acknowledged": report.totals.acknowledged_entries,
        "unacked": report.unacked_messages,
        "withheld": sum(each.keys for each in report.withheld),
    }


def _reported(report: dispatcher_pb2.ReportResponse) -> Values:
    options = report.options
    return {
        "report": report,
        "type": enum_name(dispatcher_pb2.SubscriptionType, options.type),
        "after": enum_name(dispatcher_pb2.AfterDeadLetter, options.after_dead_letter),
        "consumers": [_consumer_row(each) for each in report.consumers[:CONSUMERS_MAX]],
        "withheld": [
            (enum_name(dispatcher_pb2.Reason, each.reason), each.keys, time_of(each, "oldest"))
            for each in report.withheld
        ],
        "keys": [key_row(each) for each in report.keys],
        "filter_rows": [_filter_row(each) for each in report.filtering.filters],
    }


def _charts(points: Sequence[Point]) -> list[Chart]:
    settled = {each: rates(points, each) for each in ("delivered", "acknowledged")}
    held = {"messages": levels(points, "unacked"), "withheld keys": levels(points, "withheld")}
    return [
        line_chart("Lag", {"entries": levels(points, "lag")}, "entries"),
        line_chart("Delivered, acknowledged", settled, "per second"),
        line_chart("In flight, withheld", held, ""),
    ]


def _consumer_row(each: dispatcher_pb2.ConsumerReport) -> Values:
    ranges = [f"{part.first} to {part.last}" for part in each.ranges[:RANGES_MAX]]
    more = len(each.ranges) - len(ranges)
    slots = sum(min(part.last, 65_535) - part.first + 1 for part in each.ranges)
    return {
        "name": each.name,
        "ranges": ", ".join(ranges) + (f" and {more:,} more" if more > 0 else ""),
        "slots": slots,
        "permits": each.permits,
        "unacked": each.unacked_messages,
        "is_blocked": each.blocked_on_unacked,
        "breaker_opened": time_of(each, "breaker_opened"),
        "draining": each.draining_keys,
        "parked": each.parked_entries,
        "oldest": time_of(each, "oldest_delivery"),
        "connected": time_of(each, "connected"),
    }


def _filter_row(each: dispatcher_pb2.FilterReport) -> Values:
    counts = ("processed", "accepted", "rejected", "rescheduled", "failed")
    return {
        "mode": enum_name(dispatcher_pb2.FilterMode, each.mode),
        "name": each.name,
        "version": each.version,
        **{name: getattr(each, name).messages for name in counts},
    }


async def why(visit: Visit) -> Values:
    """Why a key's messages, or one message, are not delivered."""
    names = subscription_of(visit.query)
    await check_owned(visit, names)
    request = dispatcher_pb2.ExplainRequest(**names)
    at = visit.query.get("position", "")
    if at:
        request.position.CopyFrom(to_wire(position_of(at)))
    else:
        request.key = key_of(visit.query)
    answer = await visit.calls.call(request)
    key = answer.key if answer.HasField("key") else (None if at else request.key)
    return {
        **names,
        "position": at,
        "key": None if key is None else key_text(key),
        "key_query": None if key is None else key_query(key),
        "reasons": [_reason(each) for each in answer.reasons],
        "is_dead": any(each.reason in DEAD for each in answer.reasons),
        "row": key_row(answer.key_report) if answer.HasField("key_report") else None,
    }


def _reason(each: dispatcher_pb2.Explanation) -> Values:
    return {
        "reason": enum_name(dispatcher_pb2.Reason, each.reason),
        "text": each.text,
        "consumer": each.consumer,
        "position": position_from(each.position) if each.HasField("position") else None,
        "since": time_of(each, "since"),
        "until": time_of(each, "until"),
        "letters": each.dead_letter_topic,
    }
