"""Dashboards and alerts: existing names, a paragraph for each alert, rules that fire."""

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml

from seqgate.telemetry.metrics import CATALOGUE, Kind, Metric
from tests.deploy.manifests import K8S, SERVICES

PROMETHEUS = K8S / "components" / "prometheus"

OF_PROMETHEUS = {
    "up": {"instance", "pod"},
    "kube_deployment_spec_replicas": {"deployment"},
    "kube_deployment_status_replicas_available": {"deployment"},
    "kube_statefulset_replicas": {"statefulset"},
    "kube_statefulset_status_replicas_available": {"statefulset"},
}
"""The metrics of each target by Prometheus itself, and those of kube-state-metrics, with labels."""

OF_TARGETS = {"job", "instance", "le"}
"""Labels that every series may have."""

SUFFIXES = ("_bucket", "_count", "_sum")


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())
    return [rule for group in document["spec"]["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((PROMETHEUS / "dashboard.json").read_text())
    return read


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, without the row headings."""
    return [each for each in dashboard()["panels"] if each["type"] != "row"]


def expressions() -> list[str]:
    """Every expression of alerts and dashboard, as Prometheus receives it."""
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    filled = [re.sub(r"\$__rate_interval", "5m", each) for each in shown]
    return [*(rule["expr"] for rule in rules()), *filled]


def selectors(node: Any) -> Iterator[Any]:
    """The vector selectors in an expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    elif isinstance(node, promql_parser.MatrixSelector):
        yield node.vector_selector
    for name in ("expr", "lhs", "rhs", "param"):
        inner = getattr(node, name, None)
        if inner is not None and not isinstance(inner, str | float):
            yield from selectors(inner)
    for inner in getattr(node, "args", None) or ():
        yield from selectors(inner)


def metric_of(series: str) -> Metric:
    """The metric to which a series belongs."""
    for metric in CATALOGUE:
        names = {metric.prometheus}
        if metric.kind is Kind.HISTOGRAM:
            names = {metric.prometheus + suffix for suffix in SUFFIXES}
        if series in names:
            return metric
    raise AssertionError(f"no such metric: {series}")


@pytest.mark.parametrize("expression", expressions())
def test_expressions_name_existing_metrics_labels_and_values(expression: str) -> None:
    found = list(selectors(promql_parser.parse(expression)))
    assert found
    for selector in found:
        matchers = selector.matchers.matchers
        if selector.name in OF_PROMETHEUS:
            known = OF_PROMETHEUS[selector.name] | OF_TARGETS
            assert {each.name for each in matchers} <= known
            continue
        metric = metric_of(selector.name)
        values = {each.label: each.values for each in metric.attributes}
        for matcher in matchers:
            assert matcher.name in values.keys() | OF_TARGETS, f"{selector.name}: {matcher.name}"
            closed = values.get(matcher.name, ())
            if closed and "$" not in matcher.value and matcher.value:
                assert set(matcher.value.split("|")) <= set(closed), matcher.value


@pytest.mark.parametrize("expression", expressions())
def test_grouping_labels_exist(expression: str) -> None:
    for by in re.findall(r"\bby \(([^)]*)\)", expression):
        known = {*OF_TARGETS}
        for selector in selectors(promql_parser.parse(expression)):
            if selector.name not in OF_PROMETHEUS:
                known |= {each.label for each in metric_of(selector.name).attributes}
        assert {label.strip() for label in by.split(",")} <= known


def test_metrics_that_each_replica_reports_in_full_are_not_summed() -> None:
    shared = {metric.prometheus for metric in CATALOGUE if metric.is_shared}
    for expression in expressions():
        for added in re.findall(r"sum(?: by \([^)]*\))? ?\(([a-z_]+)", expression):
            assert added not in shared, expression


def test_alerts_watch_for_the_absence_of_every_service() -> None:
    (rule,) = (each for each in rules() if each["alert"] == "SeqgateServiceAbsent")
    pods = [
        matcher.value
        for selector in selectors(promql_parser.parse(rule["expr"]))
        for matcher in selector.matchers.matchers
        if matcher.name == "pod"
    ]
    assert sorted(pods) == sorted(f"seqgate-{service}-.*" for service in SERVICES)


def test_panels_do_not_overlap() -> None:
    everything = dashboard()["panels"]
    assert len({each["id"] for each in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + row)
            for column in range(place["w"])
            for row in range(place["h"])
        }
        assert max(column for column, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    variables = {each["name"] for each in dashboard()["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]+)\b", json.dumps(everything)))
    assert used == variables


def test_every_critical_metric_is_on_a_dashboard_or_in_an_alert() -> None:
    looked_at = {selector.name for each in expressions() for selector in selectors_of(each)}
    for needed in (
        *("seqgate_ledger_receipts_total", "seqgate_dedup_verdicts_total"),
        *("seqgate_dedup_snapshot_age_seconds", "seqgate_dedup_replay_distance"),
        *("seqgate_ledger_recovery_duration_seconds_bucket", "seqgate_dispatcher_keys"),
        *("seqgate_dispatcher_key_withheld_age_seconds", "seqgate_dispatcher_lag"),
        *("seqgate_dispatcher_parked_entries", "seqgate_cursor_holes"),
        *("seqgate_dispatcher_filter_failures_total", "seqgate_denials_total"),
        *("seqgate_busy_total", "seqgate_dedup_failures_total"),
    ):
        assert needed in looked_at


def selectors_of(expression: str) -> Iterator[Any]:
    return selectors(promql_parser.parse(expression))


def test_alerts_and_their_paragraphs_match() -> None:
    text = (K8S / "README.md").read_text()
    explained = re.findall(r"^### (Seqgate\w+)$", text, re.MULTILINE)
    assert explained == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"deploy/k8s/README.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in {"critical", "warning"}
        paragraph = text.partition(f"### {rule['alert']}\n")[2].partition("\n#")[0]
        assert len(paragraph.split()) >= 15, rule["alert"]
