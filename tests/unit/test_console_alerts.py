"""What the console's overview alerts of, and that Prometheus has the same rules."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._frames import Sample, Subscription, Topic
from seqgate.services.console import alerts
from seqgate.services.console.alerts import Letters, alerts_of

RULES = Path(__file__).parents[2] / "deploy/k8s/components/prometheus/alerts.yaml"

TOPIC = "acme/shop/orders"
BILLING = (TOPIC, "billing")
NOW = datetime(2026, 5, 31, tzinfo=UTC)

CALM: dict[str, Any] = {
    "counts": dedup_pb2.Counts(evicted_producers=7),
    "policy": dedup_pb2.Policy(max_producers=10),
    "state": dedup_pb2.TOPIC_STATE_ACTIVE,
    "producers": 9,
    "entries_since_snapshot": 800_000,
}


def sample(
    status: dict[str, Any] | None = None, report: dict[str, Any] | None = None, **given: Any
) -> Sample:
    """A topic and its subscription: nothing to say, but for what is given."""
    told: dict[str, Any] = {"epoch": 1, "consumers": [{"name": "till-1"}], **(report or {})}
    shown = dispatcher_pb2.ReportResponse(**told)
    subscription: dict[str, Any] = {"name": "billing", "owner": "a:1", "lag": 3, "report": shown}
    topic = Topic(
        ledger_pb2.Topic(name=TOPIC),
        dedup_pb2.GetTopicStatusResponse(**CALM | (status or {})),
        [Subscription(**subscription | given)],
    )
    return Sample(0.0, int(NOW.timestamp() * 1000), {TOPIC: topic})


def withheld(reason: Any, keys: int, for_s: int) -> dict[str, Any]:
    found = dispatcher_pb2.WithheldKeys(reason=reason, keys=keys)
    found.oldest.FromDatetime(NOW - timedelta(seconds=for_s))
    return {"withheld": [found]}


def totals(refused: int, delivered: int) -> dict[str, Any]:
    counts = dispatcher_pb2.Totals(negative_acknowledgements=refused, delivered_entries=delivered)
    return {"totals": counts}


def outage() -> dispatcher_pb2.FilteringReport:
    found = dispatcher_pb2.FilteringReport(unanswered_because="refused")
    found.unanswered_since.FromDatetime(NOW)
    return found


@pytest.mark.parametrize(
    ("now", "what", "rule"),
    [
        (
            sample({"state": dedup_pb2.TOPIC_STATE_RECOVERING, "entries_remaining": 1_200}),
            "publishing waits: 1,200 entries left to replay",
            "SeqgateTopicsAlignForLong",
        ),
        (
            sample({"snapshot_error": "too large"}),
            "the last snapshot failed: too large",
            "SeqgateSnapshotsFail",
        ),
        (
            sample({"entries_since_snapshot": 800_001}),
            "800,001 entries follow the newest snapshot",
            "SeqgateReplayGetsLong",
        ),
        (
            sample({"producers": 10}),
            "10 producers, of 10 at most",
            "SeqgateProducersAlmostTooMany",
        ),
        (
            sample({"counts": dedup_pb2.Counts(evicted_producers=9)}),
            "2 producers forgotten to make room",
            "SeqgateProducersEvicted",
        ),
        (
            sample({"policy_file_error": "line 3"}),
            "the policy file is rejected: line 3",
            "SeqgatePoliciesUnreadable",
        ),
        (sample(report={"consumers": []}), "no consumer, and a backlog of 3 entries", ""),
        (
            sample(acknowledged_entries=1_000_001),
            "1,000,001 entries acknowledged behind some that are not",
            "SeqgateHolesMany",
        ),
        (
            sample(report=withheld(dispatcher_pb2.REASON_HELD, 1, 1)),
            "1 key held behind dead letters",
            "",
        ),
        (
            sample(report=withheld(dispatcher_pb2.REASON_RETRY_DELAY, 2, 601)),
            "2 keys withheld for long: retry delay",
            "SeqgateKeyWithheldForLong",
        ),
        (
            sample(report={"blocked_on_unacked": True, "unacked_messages": 9}),
            "at the limit of messages in flight: 9",
            "SeqgateUnackedLimit",
        ),
        (
            sample(report={"filtering": outage()}),
            "the filter service does not answer: refused",
            "SeqgateFilterServiceAway",
        ),
        (
            sample(report={"filter_failed_entries": 4}),
            "4 entries wait: a filter failed on them",
            "SeqgateFiltersFail",
        ),
        (
            sample(report=totals(refused=12, delivered=100)),
            "12 deliveries failed lately, of 100",
            "SeqgateRedeliveriesMany",
        ),
    ],
)
def test_what_wants_attention_is_said(now: Sample, what: str, rule: str) -> None:
    (found,) = alerts_of(now, sample(), (), {}, ())
    assert found.what.startswith(what)
    assert (found.topic, found.rule) == (TOPIC, rule)
    if rule:
        assert rule in prometheus()


def test_below_its_bounds_nothing_is_said() -> None:
    at_bounds = withheld(dispatcher_pb2.REASON_RETRY_DELAY, 2, 600) | totals(10, 100)
    now = sample(report=at_bounds, acknowledged_entries=1_000_000)
    ready = [{"service": "filter", "address": "a:1", "state": "READY"}]
    assert alerts_of(now, sample(), (), {BILLING: Letters(0, 5)}, ready) == []
    delayed = withheld(dispatcher_pb2.REASON_DELAYED, 2, 9_999)
    assert alerts_of(sample(report=delayed), None, (), {}, ()) == []


def test_the_worst_come_first() -> None:
    away = [{"service": "filter", "address": "a:1", "state": "NOT READY"}]
    letters = {BILLING: Letters(2, 5)}
    held = withheld(dispatcher_pb2.REASON_HELD, 2, 1)
    now = sample({"snapshot_error": "too large"}, held, lag=200_000)
    found = alerts_of(now, None, [BILLING], letters, away)
    assert [each.what for each in found] == [
        "filter at a:1 is not ready",
        "2 keys held behind dead letters",
        "the last snapshot failed: too large",
        "a backlog of 200,000 entries grows",
        "2 dead letters are neither redriven nor given up, of the newest 5",
    ]
    assert {each.rule for each in found if each.rule} <= prometheus().keys()


@pytest.mark.parametrize(
    ("rule", "bound"),
    [
        ("SeqgateKeyWithheldForLong", alerts.WITHHELD.total_seconds()),
        ("SeqgateLagGrows", alerts.LAG),
        ("SeqgateHolesMany", alerts.HOLES),
        ("SeqgateReplayGetsLong", alerts.REPLAY),
        ("SeqgateProducersAlmostTooMany", alerts.PRODUCERS),
        ("SeqgateRedeliveriesMany", alerts.REDELIVERIES),
    ],
)
def test_bounds_are_those_of_the_rules_for_prometheus(rule: str, bound: float) -> None:
    numbers = re.findall(r"[><] ([0-9.]+)", prometheus()[rule])
    assert bound in map(float, numbers)


def prometheus() -> dict[str, str]:
    groups = yaml.safe_load(RULES.read_text())["spec"]["groups"]
    return {each["alert"]: each["expr"] for group in groups for each in group["rules"]}
