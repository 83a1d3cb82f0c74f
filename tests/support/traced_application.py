"""An application that records, in a test's process, and how its spans are read."""

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
    """The client in this process records as an application's does, with a tracer of its own."""
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
        await asyncio.to_thread(provider.shutdown)  # the receiver is in this process's loop


def below(received: Received, span: Span) -> Iterator[Span]:
    """The spans right below one."""
    return (each for each in received.trace(span.trace_id) if each.parent_id == span.span_id)
