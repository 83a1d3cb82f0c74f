"""The overview: what wants attention, rates, verdicts, lag and withheld keys of all topics that a
prefix selects."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from seqgate.client._frames import Sample, Sampler, frame_of
from seqgate.services.console.alerts import LAG, Alert, Key, Letters, alerts_of
from seqgate.services.console.charts import line_chart
from seqgate.services.console.history import latest, levels, rates
from seqgate.services.console.pages.answers import verdict_counts
from seqgate.services.console.pages.cluster import checked_instances
from seqgate.services.console.pages.letters import newest_letters
from seqgate.services.console.pages.query import pattern_of
from seqgate.services.console.pages.visit import Values, Visit

WAITING_MAX: Final = 30
"""The most subscriptions with withheld keys that are listed, those with the most keys first."""

ALERTS_MAX: Final = 30
"""The most alerts that are listed."""

LAGS_MAX: Final = 100
"""The most subscriptions whose growth of lag is watched."""

LETTERS_OF_MAX: Final = 20
"""The most subscriptions whose dead letters are counted."""

COUNTS: Final = ("messages", "delivered", "new", "duplicate", "other", "lag", "withheld")
"""What is summed over topics."""


async def overview(visit: Visit) -> Values:
    prefix = visit.query.get("prefix", "")
    sample = await Sampler(visit.calls, pattern_of(prefix)).sample()
    denied = sample.away.get("ledger")
    if denied is not None and not sample.topics:
        raise denied
    before = visit.memory.exchange((visit.reader.name, prefix), sample)
    frame = frame_of(sample, before, "name")
    alerts = await _alerts(visit, prefix, sample, before)
    rows = [_totals(each) for each in sample.topics.values()]
    sums: dict[str, float] = {name: sum(each[name] for each in rows) for name in COUNTS}
    points = visit.memory.history.add((visit.reader.name, "overview", prefix), sample.at_s, sums)
    into, out = rates(points, "messages"), rates(points, "delivered")
    verdicts = {name: rates(points, name) for name in ("new", "duplicate", "other")}
    return {
        "frame": frame,
        "prefix": prefix,
        "alerts": alerts[:ALERTS_MAX],
        "alerts_in_all": len(alerts),
        "waiting": _waiting(frame),
        "tiles": [
            ("messages in", latest(into), "/s"),
            ("messages out", latest(out), "/s"),
            ("duplicates", latest(verdicts["duplicate"]), "/s"),
            ("lag, all subscriptions", sums["lag"], ""),
            ("withheld keys", sums["withheld"], ""),
        ],
        "charts": [
            line_chart("Messages", {"in": into, "out": out}, "per second"),
            line_chart("Verdicts", verdicts, "per second"),
            line_chart("Lag", {"entries": levels(points, "lag")}, "entries"),
            line_chart("Withheld keys", {"keys": levels(points, "withheld")}, "keys"),
        ],
    }


async def _alerts(visit: Visit, prefix: str, sample: Sample, before: Sample | None) -> list[Alert]:
    instances, letters = await asyncio.gather(checked_instances(visit), _dead(visit, sample))
    lags = {
        f"{name} {each.name}": each.lag or 0
        for name, topic in sample.topics.items()
        for each in topic.subscriptions or ()
        if (each.lag or 0) > LAG
    }
    key = (visit.reader.name, "lags", prefix)
    points = visit.memory.history.add(key, sample.at_s, dict([*lags.items()][:LAGS_MAX]))
    growing = [
        (topic, subscription)
        for topic, _, subscription in (each.partition(" ") for each in lags)
        if _grows(levels(points, f"{topic} {subscription}"))
    ]
    return alerts_of(sample, before, growing, letters, instances)


def _grows(levels: Sequence[tuple[float, float]]) -> bool:
    return len(levels) > 1 and levels[-1][1] > levels[0][1]


async def _dead(visit: Visit, sample: Sample) -> dict[Key, Letters]:
    """The newest dead letters of each subscription with an owner, as far as the reader may list
    them."""
    keys = {
        (name, each.name): each.report.options.dead_letter_topic or f"{name}-{each.name}-DLQ"
        for name, topic in sample.topics.items()
        for each in topic.subscriptions or ()
        if each.report is not None
    }
    wanted = [
        (key, sample.topics[letters].topic)
        for key, letters in keys.items()
        if letters in sample.topics and sample.topics[letters].topic.messages
    ][:LETTERS_OF_MAX]
    found = await asyncio.gather(*(newest_letters(visit, *each) for each in wanted))
    return {key: each for (key, _), each in zip(wanted, found, strict=True) if each is not None}


def _totals(topic: Any) -> dict[str, float]:
    reports = [each.report for each in topic.subscriptions or () if each.report is not None]
    counts = {"new": 0.0, "duplicate": 0.0, "other": 0.0}
    if topic.status is not None:
        counts |= verdict_counts(topic.status)
    return {
        "messages": topic.topic.messages,
        "delivered": sum(each.totals.delivered_messages for each in reports),
        "lag": sum(each.lag or 0 for each in topic.subscriptions or ()),
        "withheld": sum(keys.keys for each in reports for keys in each.withheld),
        **counts,
    }


def _waiting(frame: Values) -> list[Values]:
    """The subscriptions with withheld keys."""
    found = [
        {"topic": topic["topic"], **subscription}
        for topic in frame["topics"]
        for subscription in topic["subscriptions"] or ()
        if subscription["blocked_keys"]
    ]
    return sorted(found, key=lambda each: -each["blocked_keys"])[:WAITING_MAX]
