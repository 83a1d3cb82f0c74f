"""Jobs with OTEL_* set: one trace from the command to workers and services."""

from collections.abc import Callable
from pathlib import Path

import pytest

from seqgate.client import connect
from seqgate.dev.stack import Stack
from seqgate.telemetry import names
from tests.cli.command_line import CommandLine, Ended
from tests.support.jobs import PATIENCE_S, quick_spark
from tests.support.otlp import Received, otel_variables, otlp_receiver
from tools.trace.receiver import Span

pytestmark = pytest.mark.timeout(600)  # Spark starts slowly

TOPIC = "public/default/followed"
MESSAGES = 3

STATUS = "seqgate.api.dedup.v1.DedupService/GetTopicStatus"
LOAD = "seqgate.api.internal.dedup.v1.DedupWriterService/LoadState"
LIST = "seqgate.api.ledger.v1.LedgerService/GetTopic"
READ = "seqgate.api.ledger.v1.LedgerService/ReadColumns"


async def ran(
    folder: Path, bare: CommandLine, received: Received, command: tuple[str, ...]
) -> Ended:
    """Run a job over a topic, with services that record too."""
    variables = otel_variables(received)
    async with Stack(folder / "stack", environment=variables) as stack:
        async with (
            connect(stack.address("ledger")) as client,
            client.producer(TOPIC, name="p") as producer,
        ):
            for number in range(MESSAGES):
                await producer.send(b"message", sequence_id=number)
        services = ("ledger", "dedup", "cursor")
        addresses = {f"SEQGATE_{each.upper()}": stack.address(each) for each in services}
        seqgate = bare.with_(**variables, **addresses, **quick_spark(folder))
        return await seqgate(*command, TOPIC, patience_s=PATIENCE_S)


def one_below(received: Received, parent: Span, name: str) -> Span:
    """The only child with this name."""
    (found,) = [
        each
        for each in received.trace(parent.trace_id)
        if (each.parent_id, each.name) == (parent.span_id, name)
    ]
    return found


def call_below(received: Received, parent: Span, method: str, service: str) -> None:
    """Check that a span has this call as a child, and that the service recorded it too."""
    client = one_below(received, parent, method)
    server = one_below(received, client, method)
    assert (client.kind, client.service) == ("CLIENT", parent.service)
    assert (server.kind, server.service) == ("SERVER", service)


def started(received: Received, command: str, job: str) -> Span:
    """The span of a job's process, a child of the command's."""
    (root,) = received.named(command)
    process = one_below(received, root, job)
    assert (root.parent_id, root.service) == ("", "seqgate-cli")
    assert process.attributes == {names.PROCESS_EXIT_CODE: 0}
    assert not any(each.failed for each in (root, process))
    return process


def check_rebuild(received: Received) -> None:
    rebuild = started(received, "seqgate dedup rebuild", "rebuild")
    assert rebuild.service == "seqgate-rebuild"
    plan = one_below(received, rebuild, "plan")
    call_below(received, plan, STATUS, "dedup")
    fold = one_below(received, rebuild, "spark fold")
    assert fold.attributes == {
        names.TOPICS: 1,
        names.ENTRIES: MESSAGES,
        names.PARTITIONS: 1,
        names.PRODUCERS: 1,
    }
    read = one_below(received, fold, f"read {TOPIC}")
    load = one_below(received, fold, f"load {TOPIC}")
    for each in (read, load):
        assert each.service == "seqgate-spark"
        assert each.resource["process.pid"] != fold.resource["process.pid"]
    assert read.attributes == {names.TOPIC: TOPIC, names.ENTRIES: MESSAGES}
    assert load.attributes == {names.TOPIC: TOPIC, names.ENTRIES: MESSAGES, names.PRODUCERS: 1}
    call_below(received, read, READ, "ledger")
    call_below(received, load, LOAD, "dedup")


def check_audit(received: Received) -> None:
    audit = started(received, "seqgate topic audit", "audit")
    assert audit.service == "seqgate-audit"
    call_below(received, one_below(received, audit, "list"), LIST, "ledger")
    scan = one_below(received, audit, "spark scan")
    assert scan.attributes == {names.TOPICS: 1, names.ENTRIES: MESSAGES, names.PRODUCERS: 1}
    call_below(received, one_below(received, scan, "plan"), LIST, "ledger")
    read = one_below(received, scan, f"read {TOPIC}")
    assert (read.service, read.attributes[names.ENTRIES]) == ("seqgate-spark", MESSAGES)
    call_below(received, read, READ, "ledger")


@pytest.mark.parametrize(
    ("command", "check"),
    [
        (("dedup", "rebuild", "--replace", "--from-earliest"), check_rebuild),
        pytest.param(("topic", "audit"), check_audit, marks=pytest.mark.deep),
    ],
    ids=["rebuild", "audit"],
)
async def test_a_job_is_one_trace_from_the_command_to_the_calls_of_its_workers(
    bare: CommandLine,
    tmp_path: Path,
    command: tuple[str, ...],
    check: Callable[[Received], None],
) -> None:
    async with otlp_receiver() as received:
        ended = await ran(tmp_path, bare, received, command)
        assert ended.code == 0, ended.err
    check(received)


async def test_a_failed_job_records_the_cause_in_its_span(seqgate: CommandLine, topic: str) -> None:
    async with otlp_receiver() as received:
        traced = seqgate.with_(**otel_variables(received))
        ended = await traced("dedup", "rebuild", topic)
    assert ended.code == 1
    (rebuild,) = received.named("rebuild")
    assert rebuild.failed
    assert rebuild.attributes == {names.ERROR_TYPE: "TOPIC_NOT_FOUND", names.PROCESS_EXIT_CODE: 1}
    assert one_below(received, rebuild, "plan").failed
