"""What wants attention now, by the rules of deploy/k8s/components/prometheus/alerts.yaml.

    sample of all services, and the one before it ──▶ alerts_of ──▶ alerts, the worst first

An Alert with a `rule` has that rule's condition; Prometheus also waits for it to last. The others
have no metric: those of single keys, letters and subscriptions, which no metric names.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.client._frames import Sample, Subscription, Topic
from seqgate.times import moment, moment_of

WITHHELD: Final = timedelta(seconds=600)
"""SeqgateKeyWithheldForLong."""

LAG: Final = 100_000
"""SeqgateLagGrows."""

HOLES: Final = 1_000_000
"""SeqgateHolesMany."""

REPLAY: Final = 800_000
"""SeqgateReplayGetsLong."""

PRODUCERS: Final = 0.9
"""SeqgateProducersAlmostTooMany."""

REDELIVERIES: Final = 0.1
"""SeqgateRedeliveriesMany."""

EXPECTED: Final = (dispatcher_pb2.REASON_DELAYED, dispatcher_pb2.REASON_HELD)
"""Why keys may be withheld for long: the first is wanted, the second has its own alert."""


class Alert(NamedTuple):
    """Something that wants attention.

    Attributes:
        page: where to look, as the path of a page.
        since: None: unknown.
        rule: the rule for Prometheus that is the same; empty: none is.
        is_bad: whether messages wait or services fail already.
    """

    what: str
    page: str
    topic: str = ""
    subscription: str = ""
    since: datetime | None = None
    rule: str = ""
    is_bad: bool = False


class Letters(NamedTuple):
    """The newest dead letters of a subscription: how many wait for a decision, of how many."""

    dead: int
    read: int


Key = tuple[str, str]
"""A topic and a subscription."""


def alerts_of(
    now: Sample,
    before: Sample | None,
    growing: Collection[Key],
    letters: Mapping[Key, Letters],
    instances: Sequence[Mapping[str, Any]],
) -> list[Alert]:
    """All alerts, the worst first.

    Args:
        growing: the subscriptions whose lag grows.
        instances: with `service`, `address` and `state`.
    """
    found = [*_of_instances(instances)]
    for name, topic in now.topics.items():
        earlier = None if before is None else before.topics.get(name)
        found += [each._replace(topic=name) for each in _of_topic(topic, earlier)]
        known = {each.name: each for each in (earlier and earlier.subscriptions) or ()}
        for each in topic.subscriptions or ():
            key = (name, each.name)
            alerts = [
                *_of_subscription(each, is_growing=key in growing),
                *_of_report(each, known.get(each.name), now.time_ms),
                *_of_letters(letters.get(key)),
            ]
            found += [alert._replace(topic=name, subscription=each.name) for alert in alerts]
    return sorted(found, key=lambda each: not each.is_bad)


def _of_instances(instances: Sequence[Mapping[str, Any]]) -> Iterator[Alert]:
    for each in instances:
        if each["state"] != "READY":
            state = each["state"].replace("_", " ").lower()
            what = f"{each['service']} at {each['address']} is {state}"
            yield Alert(what, "/cluster", rule="SeqgateProcessAway", is_bad=True)


def _of_topic(topic: Topic, before: Topic | None) -> Iterator[Alert]:
    status = topic.status
    if status is None:
        return
    page = "/topic"
    if status.state == dedup_pb2.TOPIC_STATE_RECOVERING:
        what = f"publishing waits: {status.entries_remaining:,} entries left to replay"
        yield Alert(what, page, rule="SeqgateTopicsAlignForLong", is_bad=True)
    if status.snapshot_error:
        what = f"the last snapshot failed: {status.snapshot_error}"
        yield Alert(what, page, rule="SeqgateSnapshotsFail")
    if status.entries_since_snapshot > REPLAY:
        what = f"{status.entries_since_snapshot:,} entries follow the newest snapshot"
        yield Alert(what, page, rule="SeqgateReplayGetsLong")
    if status.producers > PRODUCERS * status.policy.max_producers > 0:
        what = f"{status.producers:,} producers, of {status.policy.max_producers:,} at most"
        yield Alert(what, page, rule="SeqgateProducersAlmostTooMany")
    if before is not None and before.status is not None:
        evicted = status.counts.evicted_producers - before.status.counts.evicted_producers
        if evicted > 0:
            what = f"{evicted:,} producers forgotten to make room"
            yield Alert(what, page, rule="SeqgateProducersEvicted")
    if status.policy_file_error:
        what = f"the policy file is rejected: {status.policy_file_error}"
        yield Alert(what, page, rule="SeqgatePoliciesUnreadable")


def _of_subscription(each: Subscription, *, is_growing: bool) -> Iterator[Alert]:
    page = "/subscription"
    if each.lag and not (each.report and each.report.consumers):
        yield Alert(f"no consumer, and a backlog of {_some(each.lag, 'entry', 'entries')}", page)
    if is_growing:
        yield Alert(f"a backlog of {each.lag:,} entries grows", page, rule="SeqgateLagGrows")
    if each.acknowledged_entries > HOLES:
        what = f"{each.acknowledged_entries:,} entries acknowledged behind some that are not"
        yield Alert(what, page, rule="SeqgateHolesMany")


def _of_report(each: Subscription, before: Subscription | None, now_ms: int) -> Iterator[Alert]:
    report = each.report
    if report is None:
        return
    page = "/subscription"
    oldest = moment(now_ms) - WITHHELD
    for it in report.withheld:
        since = moment_of(it.oldest)
        if it.reason == dispatcher_pb2.REASON_HELD:
            yield Alert(
                f"{_some(it.keys, 'key', 'keys')} held behind dead letters",
                "/letters",
                since=since,
                is_bad=True,
            )
        elif it.reason not in EXPECTED and since < oldest:
            reason = dispatcher_pb2.Reason.Name(it.reason).removeprefix("REASON_")
            reason = reason.replace("_", " ").lower()
            what = f"{_some(it.keys, 'key', 'keys')} withheld for long: {reason}"
            yield Alert(what, page, since=since, rule="SeqgateKeyWithheldForLong")
    if report.blocked_on_unacked:
        what = f"at the limit of messages in flight: {report.unacked_messages:,}"
        yield Alert(what, page, rule="SeqgateUnackedLimit", is_bad=True)
    if report.filtering.HasField("unanswered_since"):
        what = f"the filter service does not answer: {report.filtering.unanswered_because}"
        since = moment_of(report.filtering.unanswered_since)
        yield Alert(what, page, since=since, rule="SeqgateFilterServiceAway", is_bad=True)
    if report.filter_failed_entries:
        what = f"{report.filter_failed_entries:,} entries wait: a filter failed on them"
        yield Alert(what, page, rule="SeqgateFiltersFail", is_bad=True)
    if before is not None and before.report is not None and before.report.epoch == report.epoch:
        yield from _of_totals(report.totals, before.report.totals)


def _of_totals(now: dispatcher_pb2.Totals, before: dispatcher_pb2.Totals) -> Iterator[Alert]:
    refused = now.negative_acknowledgements + now.timed_out
    refused -= before.negative_acknowledgements + before.timed_out
    delivered = now.delivered_entries - before.delivered_entries
    if delivered > 0 and refused > REDELIVERIES * delivered:
        what = f"{refused:,} deliveries failed lately, of {delivered:,}"
        yield Alert(what, "/subscription", rule="SeqgateRedeliveriesMany")


def _of_letters(letters: Letters | None) -> Iterator[Alert]:
    if letters is not None and letters.dead:
        what = (
            _some(letters.dead, "dead letter is", "dead letters are")
            + " neither redriven nor given up"
        )
        if letters.dead < letters.read:
            what += f", of the newest {letters.read:,}"
        yield Alert(what, "/letters", rule="SeqgateDeadLetters")


def _some(count: int, one: str, several: str) -> str:
    return f"1 {one}" if count == 1 else f"{count:,} {several}"
