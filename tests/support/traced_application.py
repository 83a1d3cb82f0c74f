"""An application in the test's process that records spans."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Tracer

from seqgate.client import _tracing
from seqgate.telemetry import calls
from tools.trace.receiver import Received, Span

APPLICATION = "application"
"""Its service.name."""


@asynccontextmanager
async def application(received: Received, patch: pytest.MonkeyPatch) -> AsyncIterator[Tracer]:
    """Have this process's client record spans with its own tracer, as an application does."""
    provider = TracerProvider(
        sampler=ParentBased(ALWAYS_ON),
        resource=Resource.create({"service.name": APPLICATION}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(received.endpoint, insecure=True)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    patch.setattr(_tracing, "_TRACER", tracer)
    patch.setattr(calls, "_TRACER", tracer)
    try:
        yield tracer
    finally:
        await asyncio.to_thread(provider.shutdown)  # the receiver runs in this process's loop


def below(received: Received, span: Span) -> Iterator[Span]:
    """The children of a span."""
    return (each for each in received.trace(span.trace_id) if each.parent_id == span.span_id)
