"""Following a message through OpenTelemetry: what the client and the services do, for whoever has
calls and messages of their own to follow.

    calls         spans for gRPC calls, on both sides
    blocking      the same for who calls from threads
    propagation   a trace's context in a message's properties
    spans         for what is done beyond calls
    setup         where a process's spans go, by OTEL_*
    names         what everything is called
"""

from seqgate.telemetry.calls import TracingServerInterceptor, traced_channel
from seqgate.telemetry.propagation import extract, inject, trace_id_of
from seqgate.telemetry.setup import TelemetrySettingError, tracing

__all__ = [
    "traced_channel",
    "TracingServerInterceptor",
    "inject",
    "extract",
    "trace_id_of",
    "tracing",
    "TelemetrySettingError",
]
