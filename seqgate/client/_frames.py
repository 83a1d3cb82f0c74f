"""Samples of all services, and the frames that `seqgate top` and the console show.

    sample ──▶ counts ──┐
    sample ──▶ counts ──┴──▶ frame: rates, and the present state

Services count; a frame divides the difference of two samples by the time between them. A service
that is unreachable leaves its part empty, and gets no further request for the same sample.
Sampling is read-only: a report would make a dispatcher take a subscription that no instance owns,
so for those only the cursor is read.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from re import split
from typing import Any, Final

from seqgate.api.common.v1 import common_pb2
from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._calls import Calls
from seqgate.errors import SeqgateError
from seqgate.times import milliseconds

TOPICS_MAX: Final = 200
"""The most topics to sample, in the order of their names."""

SUBSCRIPTIONS_MAX: Final = 100
"""The most subscriptions per topic, in the order of their names."""

AT_A_TIME: Final = 16
"""The most topics with requests in progress."""

PAGE: Final = 1_000

VERDICTS: Final = ("new", "duplicate", "partial", "waiting")

SORTS: Final[Mapping[str, str]] = {
    "name": "topic",
    "in": "in_messages_s",
    "out": "out_messages_s",
    "duplicates": "duplicate_s",
    "lag": "lag",
    "blocked": "blocked_keys",
}
"""The sort orders of topics, and the field of each: the largest first."""


@dataclass(slots=True)
class Subscription:
    """A subscription. `report` is None if no instance owns it, or the owner is unreachable."""

    name: str
    owner: str
    lag: int | None
    acknowledged_entries: int = 0
    report: dispatcher_pb2.ReportResponse | None = None


@dataclass(slots=True)
class Topic:
    """A topic. `status` is None if deduplication is unreachable."""

    topic: ledger_pb2.Topic
    status: dedup_pb2.GetTopicStatusResponse | None = None
    subscriptions: list[Subscription] | None = None
    subscriptions_left_out: int = 0


@dataclass(slots=True)
class Sample:
    """The state of all services at a moment.

    Attributes:
        at_s: the moment, by a monotonic clock.
        time_ms: the same, since 1970 (UTC).
        away: the services that are unreachable or refuse, with the reason.
        left_out: the number of matching topics beyond the limit.
    """

    at_s: float
    time_ms: int
    topics: dict[str, Topic] = field(default_factory=dict)
    away: dict[str, SeqgateError] = field(default_factory=dict)
    left_out: int = 0


class Sampler:
    def __init__(self, services: Calls, pattern: str) -> None:
        self._pattern = pattern
        self._prefix = split(r"[*?\[]", pattern, maxsplit=1)[0]
        self._services = services

    async def sample(self) -> Sample:
        sample = Sample(time.monotonic(), time.time_ns() // 1_000_000)
        request = ledger_pb2.ListTopicsRequest(prefix=self._prefix, page_size=PAGE)
        topics = self._first(request, TOPICS_MAX, self._pattern)
        found, sample.left_out = await self._asked(sample, "ledger", topics) or ((), 0)
        at_a_time = asyncio.Semaphore(AT_A_TIME)

        async def look(topic: Topic) -> None:
            async with at_a_time:
                await self._look(sample, topic)

        for each in found:
            sample.topics[each.name] = Topic(each)
        await asyncio.gather(*(look(each) for each in sample.topics.values()))
        return sample

    async def _look(self, sample: Sample, topic: Topic) -> None:
        request = dedup_pb2.GetTopicStatusRequest(topic=topic.topic.name)
        topic.status = await self._asked(sample, "dedup", self._services.call(request))
        topic.subscriptions = await self._asked(
            sample, "dispatcher", self._subscriptions(sample, topic)
        )

    async def _subscriptions(self, sample: Sample, topic: Topic) -> list[Subscription]:
        request = dispatcher_pb2.ListSubscriptionsRequest(topic=topic.topic.name, page_size=PAGE)
        listed, topic.subscriptions_left_out = await self._first(request, SUBSCRIPTIONS_MAX, "*")
        found = []
        for each in listed:
            lag = await self._asked(sample, "ledger", self.lag(topic.topic, each))
            subscription = Subscription(each.name, each.owner, lag, each.acknowledged_entries)
            if each.owner:
                report = dispatcher_pb2.ReportRequest(
                    topic=each.topic, subscription=each.name, max_keys=1
                )
                subscription.report = await self._asked(
                    sample, "dispatcher", self._services.call(report)
                )
            found.append(subscription)
        return found

    async def _first(self, request: Any, most: int, pattern: str) -> tuple[list[Any], int]:
        """The first matching items of a list, by name, and the number of further ones."""
        found: list[Any] = []
        left_out = 0
        async for each in self._services.pages(request):
            if not fnmatchcase(each.name, pattern):
                continue
            if len(found) < most:
                found.append(each)
            else:
                left_out += 1
        return found, left_out

    async def lag(
        self, topic: ledger_pb2.Topic, of: dispatcher_pb2.Subscription | cursor_pb2.Cursor
    ) -> int:
        """The entries of a topic that a subscription or cursor has not acknowledged, about."""
        if not of.HasField("mark_delete"):
            return max(0, topic.entries - of.acknowledged_entries)
        if of.mark_delete.ledger_id == topic.last.ledger_id:
            after = topic.last.entry_id - of.mark_delete.entry_id
        else:
            after = await self._entries_after(topic.name, of.mark_delete)
        return max(0, min(after, topic.entries) - of.acknowledged_entries)

    async def _entries_after(self, topic: str, position: common_pb2.Position) -> int:
        request = ledger_pb2.ListLedgersRequest(topic=topic, page_size=PAGE)
        count = 0
        async for each in self._services.pages(request):
            if each.ledger_id > position.ledger_id:
                count += each.last_entry_id - each.first_entry_id + 1
            elif each.ledger_id == position.ledger_id:
                done = max(position.entry_id, each.first_entry_id - 1)
                count += max(0, each.last_entry_id - done)
        return count

    async def _asked(self, sample: Sample, service: str, question: Coroutine[Any, Any, Any]) -> Any:
        """The response; None: the service is unreachable, or already was in this sample."""
        if service in sample.away:
            question.close()
            return None
        try:
            return await question
        except SeqgateError as error:
            if error.reason not in _GONE:
                sample.away[_BEHIND.get(error.reason, service)] = error
            return None


_GONE: Final = frozenset({"TOPIC_NOT_FOUND", "SUBSCRIPTION_NOT_FOUND", "TOPIC_DELETED"})
"""Reasons that are not failures of a service: the subject was just deleted."""

_BEHIND: Final = {"CURSORS_UNAVAILABLE": "cursor", "STATE_UNAVAILABLE": "redis"}
"""The unreachable service, by the reason with which another one reports it."""


# ---- frames


def frame_of(now: Sample, before: Sample | None, sort: str) -> dict[str, Any]:
    """The state of a sample, and rates per second since the previous one.

    A rate is None at first, and after a service has lost its counts.
    """
    seconds = 0.0 if before is None else now.at_s - before.at_s
    earlier = {} if before is None else before.topics
    topics = [_topic_record(each, earlier.get(name), seconds) for name, each in now.topics.items()]
    by = SORTS[sort]
    if sort != "name":
        topics.sort(key=lambda each: -(_value(each, by) or 0))
    return {
        "time_ms": now.time_ms,
        "interval_s": round(seconds, 3) or None,
        "away": {
            service: {"reason": error.reason, "message": " ".join(str(error).split())}
            for service, error in sorted(now.away.items())
        },
        "topics": topics,
        "topics_left_out": now.left_out,
    }


def _value(record: Mapping[str, Any], name: str) -> float | None:
    if name == "duplicate_s":
        return None if record["verdicts_s"] is None else record["verdicts_s"]["duplicate"]
    found: float | None = record[name]
    return found


def _topic_record(now: Topic, before: Topic | None, seconds: float) -> dict[str, Any]:
    subscriptions = None
    if now.subscriptions is not None:
        earlier = {each.name: each for each in (before and before.subscriptions) or ()}
        subscriptions = [
            _subscription_record(each, earlier.get(each.name), seconds)
            for each in now.subscriptions
        ]
    status = now.status
    return {
        "topic": now.topic.name,
        "messages": now.topic.messages,
        "bytes": now.topic.bytes,
        "producers": now.topic.connected_producers,
        "in_messages_s": _incoming(now.topic, None if before is None else before.topic, seconds),
        "state": status and dedup_pb2.TopicState.Name(status.state).removeprefix("TOPIC_STATE_"),
        "entries_to_replay": status and status.entries_remaining,
        "verdicts_s": _verdicts(status, None if before is None else before.status, seconds),
        "out_messages_s": _total(subscriptions, "out_messages_s"),
        "lag": max((each["lag"] or 0 for each in subscriptions or ()), default=None),
        "blocked_keys": _total(subscriptions, "blocked_keys"),
        "subscriptions": subscriptions,
        "subscriptions_left_out": now.subscriptions_left_out,
    }


def _subscription_record(
    now: Subscription, before: Subscription | None, seconds: float
) -> dict[str, Any]:
    report, earlier = now.report, None if before is None else before.report
    if report is not None and earlier is not None and earlier.epoch != report.epoch:
        earlier = None  # another instance counts from 0

    def rate(name: str) -> float | None:
        if report is None or earlier is None:
            return None
        return _rate(getattr(report.totals, name), getattr(earlier.totals, name), seconds)

    return {
        "subscription": now.name,
        "owner": now.owner or None,
        "lag": now.lag,
        "consumers": report and len(report.consumers),
        "unacked_messages": report and report.unacked_messages,
        "out_messages_s": rate("delivered_messages"),
        "acknowledged_s": rate("acknowledged_entries"),
        "negative_acknowledgements_s": rate("negative_acknowledgements"),
        "blocked_keys": report and sum(each.keys for each in report.withheld),
        "blocked": report and [_withheld(each) for each in report.withheld],
    }


def _withheld(keys: dispatcher_pb2.WithheldKeys) -> dict[str, Any]:
    return {
        "reason": dispatcher_pb2.Reason.Name(keys.reason).removeprefix("REASON_"),
        "keys": keys.keys,
        "oldest_ms": milliseconds(keys.oldest) if keys.HasField("oldest") else None,
    }


def _incoming(
    now: ledger_pb2.Topic, before: ledger_pb2.Topic | None, seconds: float
) -> float | None:
    """Messages stored per second; entries if the log was trimmed meanwhile."""
    if before is None or before.incarnation != now.incarnation:
        return None
    if now.first == before.first or not before.entries:
        return _rate(now.messages, before.messages, seconds)
    if now.last.ledger_id != before.last.ledger_id:
        return None
    return _rate(now.last.entry_id, before.last.entry_id, seconds)


def _verdicts(
    now: dedup_pb2.GetTopicStatusResponse | None,
    before: dedup_pb2.GetTopicStatusResponse | None,
    seconds: float,
) -> dict[str, float] | None:
    if now is None or before is None:
        return None
    found = {
        each: _rate(
            getattr(now.counts, f"{each}_claims"), getattr(before.counts, f"{each}_claims"), seconds
        )
        for each in VERDICTS
    }
    some = {name: rate for name, rate in found.items() if rate is not None}
    return some if len(some) == len(found) else None  # it was forgotten meanwhile


def _rate(now: int, before: int, seconds: float) -> float | None:
    if now < before or seconds <= 0:
        return None
    return round((now - before) / seconds, 1)


def _total(records: Iterable[Mapping[str, Any]] | None, name: str) -> Any:
    """The sum of the known values; None: none is known."""
    known: Sequence[Any] = [each[name] for each in records or () if each[name] is not None]
    return round(sum(known), 1) if known else None
