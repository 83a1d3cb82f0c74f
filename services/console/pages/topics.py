"""Topics, and a topic: its log, its deduplication, its producers and its subscriptions."""

import asyncio
import time
from typing import Final

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.services.console.charts import line_chart
from seqgate.services.console.history import rates
from seqgate.services.console.pages.answers import enum_name, known, part, verdict_counts
from seqgate.services.console.pages.query import topic_of
from seqgate.services.console.pages.visit import Values, Visit

TOPICS_MAX: Final = 100
"""The most topics that a page lists, by name; a prefix selects others."""

SUBSCRIPTIONS_MAX: Final = 100
"""The most subscriptions that a topic's page lists."""

PRODUCERS_MAX: Final = 100
"""The most producers that a topic's page lists."""


async def topics(visit: Visit) -> Values:
    """Topics, by prefix."""
    prefix = visit.query.get("prefix", "")
    page = await visit.calls.call(
        ledger_pb2.ListTopicsRequest(
            prefix=prefix, page_size=TOPICS_MAX, page_token=visit.query.get("after", "")
        )
    )
    return {"topics": page.topics, "prefix": prefix, "next": page.next_page_token}


async def topic(visit: Visit) -> Values:
    name = topic_of(visit.query)
    found = (await visit.calls.call(ledger_pb2.GetTopicRequest(topic=name))).topic
    requests = (
        dedup_pb2.GetTopicStatusRequest(topic=name),
        dedup_pb2.ListProducersRequest(
            topic=name, page_size=PRODUCERS_MAX, page_token=visit.query.get("after", "")
        ),
        dispatcher_pb2.ListSubscriptionsRequest(topic=name, page_size=SUBSCRIPTIONS_MAX),
    )
    status, producers, subscriptions = await asyncio.gather(
        *(part(visit.calls.call(each)) for each in requests)
    )
    values = {"messages": found.messages, **(known(status, verdict_counts) or {})}
    points = visit.memory.history.add((visit.reader.name, "topic", name), time.monotonic(), values)
    lines = {each: rates(points, each) for each in ("new", "duplicate", "other")}
    return {
        "topic": found,
        "status": status,
        "state": known(status, lambda it: enum_name(dedup_pb2.TopicState, it.state)),
        "sources": known(status, lambda it: _policy(it.policy)),
        "producers": producers,
        "subscriptions": subscriptions,
        "charts": [
            line_chart("Messages stored", {"in": rates(points, "messages")}, "per second"),
            line_chart("Verdicts", lines, "per second"),
        ],
    }


def _policy(policy: dedup_pb2.Policy) -> list[tuple[str, str, str]]:
    """(value's name, value, the level that set it)."""

    def source(name: str) -> str:
        return enum_name(dedup_pb2.PolicySource, getattr(policy, f"{name}_source")).lower()

    timeout_s = policy.producer_inactivity_timeout.seconds
    interval_s = policy.snapshot_interval.seconds
    values = {
        "enabled": "yes" if policy.enabled else "no",
        "producer_inactivity_timeout": f"{timeout_s:,} s" if timeout_s else "never",
        "max_producers": f"{policy.max_producers:,}",
        "on_full": enum_name(dedup_pb2.FullTopicAction, policy.on_full).lower(),
        "snapshot_entries": f"{policy.snapshot_entries:,}" if policy.snapshot_entries else "never",
        "snapshot_interval": f"{interval_s:,} s" if interval_s else "never",
        "on_conflict": enum_name(dedup_pb2.ConflictAction, policy.on_conflict).lower(),
    }
    return [(name.replace("_", " "), value, source(name)) for name, value in values.items()]
