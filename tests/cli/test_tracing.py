"""Commands with OTEL_* set: one trace, starting at the command."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.cli.command_line import CommandLine, json_lines
from tests.support.otlp import Received, otel_variables, otlp_receiver
from tests.support.waiting import eventually


@pytest_asyncio.fixture
async def received() -> AsyncIterator[Received]:
    async with otlp_receiver() as received:
        yield received


async def test_publish_and_consume_are_traced_from_the_command(
    seqgate: CommandLine, topic: str, received: Received
) -> None:
    traced = seqgate.with_(**otel_variables(received))
    published = await traced(
        "publish", topic, "--input", "json", stdin=json_lines({"payload": "x"})
    )
    consumed = await traced("consume", topic, "s", "--from", "earliest", "-n", "1")
    assert (published.code, consumed.code, published.err, consumed.err) == (0, 0, "", "")

    await eventually(lambda: received.named("seqgate consume"))
    (publish,), (consume,) = received.named("seqgate publish"), received.named("seqgate consume")
    (send,), (process,) = received.named(f"send {topic}"), received.named(f"process {topic}")
    (ack,) = received.named(f"ack {topic}")
    assert (publish.service, publish.parent_id, publish.failed) == ("seqgate-cli", "", False)
    assert publish.attributes == {"process.exit.code": 0}
    assert (send.trace_id, send.parent_id) == (publish.trace_id, publish.span_id)
    assert (process.trace_id, process.parent_id) == (send.trace_id, send.span_id)
    assert process.links == [(send.trace_id, send.span_id)]
    assert (ack.trace_id, ack.parent_id) == (process.trace_id, process.span_id)
    for command, call in ((publish, "LedgerService/Publish"), (consume, "DispatcherService/Consu")):
        (of_call,) = [span for span in received.trace(command.trace_id) if call in span.name]
        assert (of_call.kind, of_call.parent_id) == ("CLIENT", command.span_id)


async def test_a_failed_command_records_the_cause_in_its_span(
    seqgate: CommandLine, topic: str, received: Received
) -> None:
    ended = await seqgate.with_(**otel_variables(received))("consume", topic, "s")
    assert ended.code == 1
    await eventually(lambda: received.named("seqgate consume"))
    (command,) = received.named("seqgate consume")
    assert command.failed
    assert command.attributes == {"error.type": "TOPIC_NOT_FOUND", "process.exit.code": 1}


async def test_an_unsupported_exporter_is_refused(bare: CommandLine) -> None:
    ended = await bare.with_(OTEL_TRACES_EXPORTER="jaeger")("context", "ls", "-o", "json")
    assert ended.code == 2
    assert ended.error["reason"] == "INVALID_SETTINGS"
    assert "OTEL_TRACES_EXPORTER" in ended.error["message"]
