"""The parts that need OpenTelemetry's SDK. Import it only to export spans or metrics."""

import os

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter


def resource_of(service: str, version: str) -> Resource:
    """The resource of this process's spans and metrics. OTEL_SERVICE_NAME and
    OTEL_RESOURCE_ATTRIBUTES override its attributes."""
    said = Resource.create()
    resource = Resource({"service.version": version, "process.pid": os.getpid()}).merge(said)
    if str(said.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": service}))
    return resource


def span_exporter(kind: str) -> SpanExporter:
    """otlp, configured by OTEL_EXPORTER_OTLP_*; or console: JSON on standard output."""
    return ConsoleSpanExporter() if kind == "console" else OTLPSpanExporter()
