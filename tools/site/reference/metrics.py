"""The page of metrics, from seqgate/telemetry/metrics.py."""

from typing import Final

from seqgate.telemetry import metrics
from seqgate.telemetry.metrics import Attribute, Metric
from tools.site.reference.tables import escaped

HEAD: Final = f"""\
# Metrics

Every service, and the console, serves these to Prometheus on `metrics_listen`, and exports them
over OTLP if `OTEL_*` variables ask for it. Each replica reports its own values: sum over them. Of a
metric marked shared, each replica reports the state that all share: take the maximum. A metric
marked optional may be missing, depending on use or settings.

The attribute `topic` has the topics that `metrics_topics` lists, at most {metrics.TOPICS_MAX};
all others count together under `{metrics.OTHER}`. A histogram's samples have `_bucket`, `_count`
and `_sum` after its name.
"""

TITLES: Final = {
    metrics.SERVICES: "Every service",
    metrics.PROCESSES: "Every service, and the console",
}


def page() -> str:
    parts = [HEAD]
    for services in sorted({each.services for each in metrics.CATALOGUE}, key=_order):
        title = TITLES.get(services) or ", ".join(services)
        parts.append(f"## {title[0].upper() + title[1:]}\n")
        parts += [_entry(each) for each in metrics.CATALOGUE if each.services == services]
    return "\n".join(parts)


def _order(services: tuple[str, ...]) -> tuple[int, list[int]]:
    return -len(services), [metrics.PROCESSES.index(each) for each in services]


def _entry(metric: Metric) -> str:
    facts = [metric.kind.value, f"unit: `{metric.unit}`"]
    facts += ["shared"] if metric.is_shared else []
    facts += ["optional"] if metric.is_optional else []
    labels = "".join(f"- {_label(each)}\n" for each in metric.attributes)
    return (
        f"### `{metric.prometheus}`\n\n{'; '.join(facts)}\n{{ .facts }}\n\n"
        f"{escaped(metric.description)}.\n\n{labels}"
    )


def _label(attribute: Attribute) -> str:
    values = ", ".join(f"`{each}`" for each in attribute.values)
    return f"`{attribute.label}`: {values}" if values else f"`{attribute.label}`"
