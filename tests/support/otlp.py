"""A real OTLP receiver for telemetry tests, and the variables that send spans to it."""

from collections.abc import Mapping

from tools.trace.receiver import Received, otlp_receiver

__all__ = ["Received", "otlp_receiver", "otel_variables"]


def otel_variables(received: Received, **more: str) -> Mapping[str, str]:
    """Variables of a process that samples everything and exports quickly to the receiver."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "50",  # milliseconds
        "OTEL_METRIC_EXPORT_INTERVAL": "200",  # milliseconds
        "OTEL_TRACES_SAMPLER": "parentbased_always_on",
        **more,
    }
