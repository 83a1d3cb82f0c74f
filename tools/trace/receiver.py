"""An OTLP receiver over gRPC on loopback, for demos and tests. It keeps what it receives."""

from __future__ import annotations  # grpc's classes are generic in its stubs only

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from grpc import aio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan

from tools.stack.handlers import handlers

Value = str | int | float | bool | list[Any]

KINDS = {0: "UNSPECIFIED", 1: "INTERNAL", 2: "SERVER", 3: "CLIENT", 4: "PRODUCER", 5: "CONSUMER"}


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    time_ns: int
    attributes: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Span:
    """A received span. Ids are in hexadecimal digits; times in nanoseconds since 1970.

    Attributes:
        service: the sender's service.name.
        resource: all attributes of the sender, service.name included.
        parent_id: empty for a root.
        links: (trace id, span id) of each.
        failed: whether its status is ERROR.
    """

    service: str
    resource: dict[str, Value]
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    links: list[tuple[str, str]]
    events: list[Event]
    failed: bool
    status: str


@dataclass(slots=True)
class Received:
    port: int = 0
    spans: list[Span] = field(default_factory=list)
    metrics: list[tuple[dict[str, Value], Metric]] = field(default_factory=list)
    """The sender's resource with each metric, in order of arrival."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, share: str) -> dict[str, str]:
        """Settings that make a process send spans of this share of traces, and no metrics."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": share,
        }

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def trace(self, trace_id: str) -> list[Span]:
        """The spans of a trace, by their start."""
        return sorted(
            (span for span in self.spans if span.trace_id == trace_id),
            key=lambda span: span.start_ns,
        )

    async def take_spans(self, request: Any, _context: object) -> Any:
        for of_resource in request.resource_spans:
            resource = attributes_of(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                self.spans.extend(_span(resource, each) for each in scope.spans)
        return trace_pb.ExportTraceServiceResponse()

    async def take_metrics(self, request: Any, _context: object) -> Any:
        for of_resource in request.resource_metrics:
            resource = attributes_of(of_resource.resource.attributes)
            for scope in of_resource.scope_metrics:
                self.metrics.extend((resource, metric) for metric in scope.metrics)
        return metrics_pb.ExportMetricsServiceResponse()


@asynccontextmanager
async def otlp_receiver() -> AsyncIterator[Received]:
    """A receiver on a free port of loopback."""
    received = Received()
    server = aio.server(options=[("grpc.max_receive_message_length", 64 * 1024 * 1024)])
    traces = trace_pb.DESCRIPTOR.services_by_name["TraceService"]
    metrics = metrics_pb.DESCRIPTOR.services_by_name["MetricsService"]
    server.add_generic_rpc_handlers(
        [
            handlers(traces, Export=received.take_spans),
            handlers(metrics, Export=received.take_metrics),
        ]
    )
    received.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield received
    finally:
        await server.stop(None)


def attributes_of(given: Iterable[KeyValue]) -> dict[str, Value]:
    return {each.key: _value(each.value) for each in given}


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return "" if kind is None else getattr(value, kind)


def _span(resource: dict[str, Value], span: WireSpan) -> Span:
    return Span(
        service=str(resource.get("service.name", "")),
        resource=resource,
        name=span.name,
        kind=KINDS[span.kind],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=attributes_of(span.attributes),
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        events=[
            Event(event.name, event.time_unix_nano, attributes_of(event.attributes))
            for event in span.events
        ],
        failed=span.status.code == 2,
        status=span.status.message,
    )
