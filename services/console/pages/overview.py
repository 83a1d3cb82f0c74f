"""The overview: rates, verdicts, lag and withheld keys of all topics that a prefix selects."""

from typing import Any, Final

from seqgate.client._frames import Sampler, frame_of
from seqgate.services.console.charts import line_chart
from seqgate.services.console.history import latest, levels, rates
from seqgate.services.console.pages.answers import verdict_counts
from seqgate.services.console.pages.query import pattern_of
from seqgate.services.console.pages.visit import Values, Visit

WAITING_MAX: Final = 50
"""The most subscriptions with withheld keys that are listed, those with the most keys first."""

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
    rows = [_totals(each) for each in sample.topics.values()]
    sums: dict[str, float] = {name: sum(each[name] for each in rows) for name in COUNTS}
    points = visit.memory.history.add((visit.reader.name, "overview", prefix), sample.at_s, sums)
    into, out = rates(points, "messages"), rates(points, "delivered")
    verdicts = {name: rates(points, name) for name in ("new", "duplicate", "other")}
    return {
        "frame": frame,
        "prefix": prefix,
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
