"""What needs OpenTelemetry's SDK. Imported where spans or metrics are exported, nowhere else."""

import os

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter


def resource_of(service: str, version: str) -> Resource:
    """What every span and metric of this process says about it. OTEL_SERVICE_NAME and
    OTEL_RESOURCE_ATTRIBUTES come before what is said here."""
    said = Resource.create()
    resource = Resource({"service.version": version, "process.pid": os.getpid()}).merge(said)
    if str(said.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": service}))
    return resource


def span_exporter(kind: str) -> SpanExporter:
    """otlp: as OTEL_EXPORTER_OTLP_* say. console: JSON on standard output."""
    return ConsoleSpanExporter() if kind == "console" else OTLPSpanExporter()
