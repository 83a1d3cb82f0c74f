"""The alert rules, evaluated by promtool: each fires in its scenario, and not below."""

import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.deploy.manifests import SERVICES
from tests.deploy.test_observability import rules

MINUTES = 60
"""The length of each story, at one sample per minute."""

FAST = f"0+60x{MINUTES}"
"""One per second."""

NEVER = f"0x{MINUTES}"


def always(value: float) -> str:
    return f"{value}x{MINUTES}"


class Story(NamedTuple):
    """Series with values at which the alert fires, with values at which it does not, and the labels
    of the firing alert."""

    bad: dict[str, str]
    good: dict[str, str]
    labels: dict[str, str]


def buckets(
    name: str, beyond: str, *bounds: str, labels: str = ""
) -> tuple[dict[str, str], dict[str, str]]:
    """A histogram whose values are all above the bound `beyond`, and one whose values are all
    below."""
    series = [f'{name}_bucket{{{labels}le="{bound}"}}' for bound in (*bounds, "+Inf")]
    above = [NEVER if float(bound) <= float(beyond) else FAST for bound in (*bounds, "inf")]
    return dict(zip(series, above, strict=True)), dict.fromkeys(series, FAST)


def value(series: str, bad: float, good: float, **labels: str) -> Story:
    """A gauge that is too high, or normal."""
    return Story({series: always(bad)}, {series: always(good)}, labels)


def counted(series: str, bad: str = FAST, good: str = NEVER, **labels: str) -> Story:
    """A counter that increases, or does not."""
    return Story({series: bad}, {series: good}, labels)


def share(part: str, whole: str, **labels: str) -> Story:
    """A share of one half, or of a thousandth."""
    return Story({part: FAST, whole: FAST}, {part: f"0+0.06x{MINUTES}", whole: FAST}, labels)


def room(service: str) -> Story:
    free = f'seqgate_{service}_store_free_bytes{{instance="a"}}'
    size = f'seqgate_{service}_store_size_bytes{{instance="a"}}'
    return Story(
        {free: always(5), size: always(95)},
        {free: always(50), size: always(50)},
        {"instance": "a"},
    )


FAILED = 'seqgate_dedup_snapshots_total{outcome="failed"}'
TAKEN = 'seqgate_dedup_snapshots_total{outcome="taken"}'
TOPICS = "seqgate_ledger_topics"
TOPIC = {"topic": "a"}

EVERY = {
    f'up{{job="seqgate/seqgate",pod="seqgate-{service}-0"}}': always(1) for service in SERVICES
}
"""A pod of each service that answers."""

STORIES = {
    "SeqgateProcessAway": value('up{job="seqgate/seqgate"}', 0, 1, job="seqgate/seqgate"),
    "SeqgatePodsMissing": Story(
        {
            'kube_deployment_spec_replicas{deployment="seqgate-dedup"}': always(2),
            'kube_deployment_status_replicas_available{deployment="seqgate-dedup"}': always(1),
        },
        {
            'kube_statefulset_replicas{statefulset="seqgate-ledger"}': always(1),
            'kube_statefulset_status_replicas_available{statefulset="seqgate-ledger"}': always(1),
        },
        {"deployment": "seqgate-dedup", "workload": "seqgate-dedup"},
    ),
    "SeqgateServiceAbsent": Story(
        {name: each for name, each in EVERY.items() if "ledger" not in name}, EVERY, {}
    ),
    "SeqgateTopicsWaitForRebuild": value(f'{TOPICS}{{state="waiting_for_rebuild"}}', 1, 0),
    "SeqgateTopicsAlignForLong": value(f'{TOPICS}{{state="aligning"}}', 1, 0),
    "SeqgateTopicsFail": counted('seqgate_ledger_topic_failures_total{topic="a"}', **TOPIC),
    "SeqgateSubscriptionsFail": counted(
        'seqgate_dispatcher_subscription_failures_total{topic="a"}', **TOPIC
    ),
    "SeqgateDedupFails": counted('seqgate_dedup_failures_total{work="snapshot"}', work="snapshot"),
    "SeqgatePublishingFails": share(
        'seqgate_ledger_receipts_total{status="FAILED"}',
        'seqgate_ledger_receipts_total{status="STORED"}',
    ),
    "SeqgateCommitsSlow": Story(
        *buckets("seqgate_ledger_append_duration_seconds", "0.5", "0.1", "0.5", "1"), {}
    ),
    "SeqgateLedgerStoreFillsUp": room("ledger"),
    "SeqgateCursorStoreFillsUp": room("cursor"),
    "SeqgateRedisSlow": Story(
        *buckets("seqgate_dedup_store_duration_seconds", "0.1", "0.05", "0.1", "0.25"), {}
    ),
    "SeqgateSnapshotsFail": Story({FAILED: FAST, TAKEN: NEVER}, {FAILED: FAST, TAKEN: FAST}, {}),
    "SeqgateReplayGetsLong": value(
        'seqgate_dedup_replay_distance{topic="a"}', 800_001, 800_000, **TOPIC
    ),
    "SeqgateProducersAlmostTooMany": value(
        'seqgate_dedup_producers_utilization{topic="a"}', 0.95, 0.9, **TOPIC
    ),
    "SeqgateProducersEvicted": counted('seqgate_dedup_producers_forgotten_total{cause="evicted"}'),
    "SeqgatePoliciesUnreadable": value("seqgate_dedup_policy_failing", 1, 0),
    "SeqgateKeyWithheldForLong": value(
        'seqgate_dispatcher_key_withheld_age_seconds{topic="a",reason="DRAINING"}',
        601,
        600,
        topic="a",
        reason="DRAINING",
    ),
    "SeqgateLagGrows": Story(
        {'seqgate_dispatcher_lag{topic="a"}': f"100001+100x{MINUTES}"},
        {'seqgate_dispatcher_lag{topic="a"}': f"200000-100x{MINUTES}"},
        TOPIC,
    ),
    "SeqgateRedeliveriesMany": share(
        'seqgate_dispatcher_redeliveries_total{cause="negative_acknowledgement"}',
        "seqgate_dispatcher_delivered_entries_total",
    ),
    "SeqgateDeadLetters": counted('seqgate_dispatcher_dead_letters_total{topic="a"}', **TOPIC),
    "SeqgateUnackedLimit": value(
        'seqgate_dispatcher_subscriptions{topic="a",state="unacked_limit"}', 1, 0, **TOPIC
    ),
    "SeqgateFilterServiceAway": value("seqgate_dispatcher_filter_outages", 1, 0),
    "SeqgateFiltersFail": counted(
        'seqgate_dispatcher_filter_failures_total{mode="applied",reason="PROPERTY_ABSENT"}',
        reason="PROPERTY_ABSENT",
    ),
    "SeqgateAuditEventsDropped": Story(
        {'seqgate_dispatcher_audit_events_total{instance="a",outcome="dropped"}': FAST},
        {
            'seqgate_dispatcher_audit_events_total{instance="a",outcome="dropped"}': NEVER,
            'seqgate_dispatcher_audit_events_total{instance="a",outcome="published"}': FAST,
        },
        {"instance": "a"},
    ),
    "SeqgateHolesMany": value('seqgate_cursor_holes{topic="a"}', 1_000_001, 1_000_000, **TOPIC),
    "SeqgateServerErrors": counted(
        'rpc_server_call_duration_seconds_count{rpc_method="m",error_type="INTERNAL"}',
        rpc_method="m",
    ),
    "SeqgateEventLoopLate": Story(
        *buckets(
            "seqgate_process_event_loop_lag_seconds",
            *("0.25", "0.1", "0.25", "0.5"),
            labels='instance="a",',
        ),
        {"instance": "a"},
    ),
    "SeqgateFilesAlmostTooMany": Story(
        {
            'process_unix_file_descriptor_count{instance="a"}': always(81),
            'seqgate_process_file_descriptor_limit{instance="a"}': always(100),
        },
        {
            'process_unix_file_descriptor_count{instance="a"}': always(80),
            'seqgate_process_file_descriptor_limit{instance="a"}': always(100),
        },
        {"instance": "a"},
    ),
    "SeqgateServiceBusy": counted(
        'seqgate_busy_total{instance="a",limit="calls_max"}',
        f"0+120x{MINUTES}",
        f"0+30x{MINUTES}",
        instance="a",
        limit="calls_max",
    ),
    "SeqgateDenialsMany": counted(
        'seqgate_denials_total{reason="TOKEN_EXPIRED"}',
        f"0+120x{MINUTES}",
        f"0+30x{MINUTES}",
        reason="TOKEN_EXPIRED",
    ),
}


def test_every_alert_has_a_scenario() -> None:
    assert list(STORIES) == [rule["alert"] for rule in rules()]


def test_alerts_fire_in_their_scenarios_and_not_below(tmp_path: Path) -> None:
    tests = [
        told(rule, series, fires=fires)
        for rule in rules()
        for series, fires in (
            (STORIES[rule["alert"]].bad, True),
            (STORIES[rule["alert"]].good, False),
        )
    ]
    groups = [{"name": "seqgate", "rules": rules()}]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(document))
    command = ["promtool", "test", "rules", str(tmp_path / "tests.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def told(rule: dict[str, Any], series: dict[str, str], *, fires: bool) -> dict[str, Any]:
    """A test for promtool."""
    expected = {
        "exp_labels": {**rule["labels"], **STORIES[rule["alert"]].labels},
        "exp_annotations": rule["annotations"],
    }
    asked = {
        "eval_time": f"{MINUTES}m",
        "alertname": rule["alert"],
        "exp_alerts": [expected] if fires else [],
    }
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": each} for name, each in series.items()],
        "alert_rule_test": [asked],
    }
