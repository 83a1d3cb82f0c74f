"""OpenTelemetry for the client and the services, and for applications with calls and messages of
their own.

    calls         spans for gRPC calls, on both sides, for asyncio and for threads
    propagation   a trace's context in a message's properties
    spans         for work other than calls
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
