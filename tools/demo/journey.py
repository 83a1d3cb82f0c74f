"""One message's journey, from the span that it is published in to its acknowledgement.

`make demo TRACE=1` has the services of the demo send their spans to a receiver: one call in a
thousand, and everything that one message meets which is published, consumed and acknowledged in the
end, by a process of its own:

    python -m tools.demo.journey LEDGER DISPATCHER

which records what it does as OTEL_* say, and prints its trace id. Then its journey is printed as a
tree, and all spans are in trace.jsonl, one JSON object a line.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from opentelemetry import trace

from seqgate.client import connect
from seqgate.telemetry import tracing
from tools.demo.applications import ApplicationFailed
from tools.stack.stack import Stack
from tools.trace.receiver import Received, otlp_receiver
from tools.trace.tree import journey, write_spans

TOPIC: Final = "public/default/journey"

FOLLOWED: Final = "0.001"  # the share of messages that are traced
TIMEOUT_S: Final = 60.0  # how long the message may take to arrive


class Following:
    """Spans of a stack's services, if they are wanted."""

    def __init__(self, received: Received | None = None) -> None:
        self._received = received
        self._trace_id = ""

    @property
    def environment(self) -> Mapping[str, str]:
        """Settings of the services."""
        if self._received is None:
            return {}
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self._received.endpoint,
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": FOLLOWED,
        }

    async def travel(self, stack: Stack) -> None:
        """Send one message through the services.

        Raises:
            ApplicationFailed: it did not arrive.
        """
        if self._received is None:
            return
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tools.demo.journey"),
            *(stack.address("ledger"), stack.address("dispatcher")),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **self.environment, "OTEL_TRACES_SAMPLER": "parentbased_always_on"},
        )
        said, _ = await process.communicate()
        if process.returncode:
            raise ApplicationFailed(f"the traced message failed with {process.returncode}")
        self._trace_id = said.decode().strip()

    def show(self, folder: Path) -> None:
        """Print the journey, and write all spans. Once the services have ended: then they have sent
        what they have."""
        if self._received is None:
            return
        write_spans(folder / "trace.jsonl", self._received.spans)
        print("one message's journey:")
        for line in journey(self._received.spans, self._trace_id):
            print(f"  {line}")
        print(f"spans: {folder / 'trace.jsonl'} ({len(self._received.spans):,})")


@asynccontextmanager
async def following(*, wanted: bool) -> AsyncIterator[Following]:
    """A receiver, where it is wanted, while the context lasts."""
    if not wanted:
        yield Following()
        return
    async with otlp_receiver() as received:
        yield Following(received)


async def travel(ledger: str, dispatcher: str) -> str:
    """Publish one message, consume it and acknowledge it. Returns its trace id."""
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


def main() -> int:
    ledger, dispatcher = sys.argv[1:]
    with tracing("demo"):
        print(asyncio.run(travel(ledger, dispatcher)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
