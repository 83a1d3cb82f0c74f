"""What telemetry tests stand on: a real OTLP receiver, and the variables that send spans to it."""

from collections.abc import Mapping

from tools.trace.receiver import Received, otlp_receiver

__all__ = ["Received", "otlp_receiver", "otel_variables"]


def otel_variables(received: Received, **more: str) -> Mapping[str, str]:
    """A process's variables: everything is sampled, and sent to the receiver soon."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "50",  # milliseconds
        "OTEL_METRIC_EXPORT_INTERVAL": "200",  # milliseconds
        "OTEL_TRACES_SAMPLER": "parentbased_always_on",
        **more,
    }
