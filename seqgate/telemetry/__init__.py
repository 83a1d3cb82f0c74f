"""OpenTelemetry for the client and the services, and for applications that trace their own calls
and messages.

    calls         spans for gRPC calls, on both sides, for asyncio and for threads
    propagation   trace contexts in message properties
    spans         spans for work other than calls
    setup         exporting a process's spans, by OTEL_*
    names         the names of spans, attributes and metrics
"""

from seqgate.telemetry.calls import (
    TracingServerInterceptor,
    traced_blocking_channel,
    traced_channel,
)
from seqgate.telemetry.propagation import extract, inject, trace_id_of
from seqgate.telemetry.setup import TelemetrySettingError, tracing

__all__ = [
    "traced_channel",
    "traced_blocking_channel",
    "TracingServerInterceptor",
    "inject",
    "extract",
    "trace_id_of",
    "tracing",
    "TelemetrySettingError",
]
