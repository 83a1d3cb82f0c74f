"""Reads GET /metrics as Prometheus does, by the names of the catalogue."""

import asyncio
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import Metric as Family
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from seqgate.telemetry.metrics import Kind, Metric

WAIT_S = 10.0
"""The deadline of a scrape."""

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

TYPES = {
    Kind.COUNTER: "counter",
    Kind.UP_DOWN: "gauge",
    Kind.GAUGE: "gauge",
    Kind.HISTOGRAM: "histogram",
}


@dataclass(frozen=True, slots=True)
class Scrape:
    """A service's answer to a scrape."""

    families: Mapping[str, Family]

    def value(self, metric: Metric, **attributes: str) -> float:
        """The sum of a metric's values with these labels; for a histogram, the number of recorded
        values."""
        return self._sum(metric, "_count" if metric.kind is Kind.HISTOGRAM else None, attributes)

    def sum(self, metric: Metric, **attributes: str) -> float:
        """The sum of a histogram's values."""
        return self._sum(metric, "_sum", attributes)

    def labels(self, metric: Metric) -> list[dict[str, str]]:
        """The label sets of a metric."""
        family = self.families.get(family_name(metric))
        return [] if family is None else [dict(sample.labels) for sample in family.samples]

    def _sum(self, metric: Metric, suffix: str | None, attributes: Mapping[str, str]) -> float:
        family = self.families.get(family_name(metric))
        if family is None:
            return 0.0
        name = metric.prometheus + (suffix or "")
        return sum(
            sample.value
            for sample in family.samples
            if sample.name == name and attributes.items() <= sample.labels.items()
        )


def family_name(metric: Metric) -> str:
    """The name of a metric's family: without a counter's _total."""
    return metric.prometheus.removesuffix("_total")


async def scraped(port: int, *, openmetrics: bool = False) -> Scrape:
    """Scrape a service, in the text format or as OpenMetrics."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics")
    if openmetrics:
        request.add_header("Accept", OPENMETRICS)

    def ask() -> tuple[str, str]:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.headers["Content-Type"], answer.read().decode()

    kind, text = await asyncio.to_thread(ask)
    assert kind.startswith("application/openmetrics-text") is openmetrics
    families = (parse_openmetrics if openmetrics else parse_text)(text)
    return Scrape({family.name: family for family in families})
