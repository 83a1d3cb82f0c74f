"""One message's journey, from the span that it is published in to its acknowledgement.

With `make demo TRACE=1`, the services send the demo the spans of one call in a thousand, and all
spans of one message, which a worker publishes, consumes and acknowledges in the end. Its journey is
printed as a tree; all spans are in trace.jsonl, one JSON object a line.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Final

from opentelemetry import trace

from seqgate.client import connect
from seqgate.dev.stack import Stack
from seqgate.telemetry import tracing
from tools.stack.worker import in_worker
from tools.trace.receiver import Received, otlp_receiver
from tools.trace.tree import journey, write_spans

TOPIC: Final = "public/default/journey"

FOLLOWED: Final = "0.001"  # the share of messages that are traced
TIMEOUT_S: Final = 60.0  # how long the message may take to arrive


class Following:
    """Spans of a stack's services; None: they are not traced."""

    def __init__(self, received: Received | None) -> None:
        self._received = received
        self._trace_id = ""
        self.environment = {} if received is None else received.environment(FOLLOWED)
        """The stack's settings."""

    async def travel(self, stack: Stack) -> None:
        """Send one message through the services.

        Raises:
            ChildFailed: it did not arrive.
        """
        if self._received is not None:
            addresses = [stack.target(each) for each in ("ledger", "dispatcher")]
            environment = {**self.environment, "OTEL_TRACES_SAMPLER": "parentbased_always_on"}
            self._trace_id = await in_worker(__name__, *addresses, environment=environment)

    def show(self, folder: Path) -> None:
        """Print the journey, and write all spans. Call it once the services have ended: then all
        spans have arrived."""
        if self._received is not None:
            write_spans(folder / "trace.jsonl", self._received.spans)
            print("one message's journey:")
            for line in journey(self._received.spans, self._trace_id):
                print(f"  {line}")
            print(f"spans: {folder / 'trace.jsonl'} ({len(self._received.spans):,})")


@asynccontextmanager
async def following(*, wanted: bool) -> AsyncIterator[Following]:
    """Receive spans, if wanted, while the context lasts."""
    async with otlp_receiver() if wanted else nullcontext() as received:
        yield Following(received)


def run(ledger: str, dispatcher: str) -> str:
    """Publish one message, consume it and acknowledge it. Returns its trace id."""
    with tracing("demo"):
        return asyncio.run(_travel(ledger, dispatcher))


async def _travel(ledger: str, dispatcher: str) -> str:
    tracer = trace.get_tracer("seqgate.demo")
    async with connect(ledger, dispatcher) as client:
        async with client.producer(TOPIC, name="traveller") as producer:
            with tracer.start_as_current_span("one message") as span:
                await producer.send(b"hello", key="k", sequence_id=1)
        async with client.consumer(TOPIC, "reader", start="earliest") as consumer:
            message = await consumer.receive(timeout_s=TIMEOUT_S)
            with consumer.processing(message):
                await consumer.ack(message)
    return f"{span.get_span_context().trace_id:032x}"
