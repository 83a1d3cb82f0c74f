"""Traces of retries, recoveries and snapshots."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.client import Producer, connect
from seqgate.telemetry import names
from tests.integration.services import Services, running
from tests.support.otlp import otel_variables, otlp_receiver
from tests.support.traced_application import application, below
from tests.support.waiting import eventually

TOPIC = "public/default/trouble"
SERVICES = ("cursor", "dedup", "ledger")


@asynccontextmanager
async def producing(services: Services) -> AsyncIterator[Producer]:
    async with (
        connect(services.stack.address("ledger")) as client,
        client.producer(TOPIC, name="p") as producer,
    ):
        yield producer


async def test_retried_publications_share_a_parent_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with otlp_receiver() as received:
        variables = otel_variables(received, SEQGATE_LEDGER_DRAIN_TIMEOUT_S="0.5")
        async with running(tmp_path / "stack", services=SERVICES, **variables) as services:
            stack = services.stack
            async with (
                application(received, monkeypatch),
                producing(services) as producer,
            ):
                await producer.send(b"first")
                await stack.kill("dedup")
                receipt = producer.send_nowait(b"second")
                await eventually(lambda: _waits_for_deduplication(services))
                await stack.terminate("ledger")
                await stack.run("dedup")
                await stack.run("ledger")
                await receipt
        (send,) = [
            each
            for each in received.named(f"send {TOPIC}")
            if each.attributes[names.SEQUENCE_ID] == 1
        ]
        before, after = sorted(
            (each for each in below(received, send) if each.name == f"publish {TOPIC}"),
            key=lambda span: span.start_ns,
        )
        assert before.failed
        assert before.attributes[names.ERROR_TYPE]
        assert not after.failed
        assert after.attributes[names.RECEIPT] == "STORED"
        assert before.resource["process.pid"] != after.resource["process.pid"]


def _waits_for_deduplication(services: Services) -> bool:
    return any(line["event"] == "deduplication failed" for line in services.log("ledger"))


async def test_a_recovery_is_a_trace(tmp_path: Path) -> None:
    async with otlp_receiver() as received:
        variables = otel_variables(received, SEQGATE_DEDUP_SNAPSHOT_CHECK_INTERVAL_S="3600")
        async with running(tmp_path / "stack", services=SERVICES, **variables) as services:
            stack = services.stack
            async with producing(services) as producer:
                await producer.send(b"first")
                await services.settled(TOPIC)
                async with Redis.from_url(stack.redis_url) as redis:
                    await redis.flushall()
                await producer.send(b"second")
        taken, lost = sorted(
            received.named(f"recover {TOPIC}"), key=lambda recovery: recovery.start_ns
        )
        assert (taken.parent_id, lost.parent_id) == ("", "")
        assert taken.attributes[names.CAUSE] == "takeover"
        assert lost.attributes[names.CAUSE] == "behind"
        steps = [each.name for each in received.trace(lost.trace_id)]
        for step in (f"replay {TOPIC}", f"rollback {TOPIC}"):
            assert step in steps
        served = {each.service for each in received.trace(lost.trace_id)}
        assert served == {"ledger", "dedup"}
        (replay,) = [each for each in below(received, lost) if each.name == f"replay {TOPIC}"]
        assert replay.attributes[names.ENTRIES] == 1


async def test_a_snapshot_is_a_child_of_its_request_or_a_trace_of_its_own(tmp_path: Path) -> None:
    async with otlp_receiver() as received:
        variables = otel_variables(received, SEQGATE_DEDUP_SNAPSHOT_CHECK_INTERVAL_S="3600")
        async with running(tmp_path / "stack", services=SERVICES, **variables) as services:
            async with producing(services) as producer:
                await producer.send(b"first")
            await services.settled(TOPIC)
            await services.dedup.TakeSnapshot(dedup_pb2.TakeSnapshotRequest(topic=TOPIC))
            async with producing(services) as producer:
                await producer.send(b"second")
            await services.settled(TOPIC)
        # The second one is taken when the service drains.
        asked, own = sorted(
            received.named(f"snapshot {TOPIC}"), key=lambda snapshot: snapshot.start_ns
        )
        (call,) = [
            each for each in received.trace(asked.trace_id) if each.span_id == asked.parent_id
        ]
        assert call.name.endswith("DedupService/TakeSnapshot")
        assert own.parent_id == ""
        for snapshot in (asked, own):
            assert snapshot.attributes[names.OUTCOME] == "taken"
            assert snapshot.attributes[names.PRODUCERS] == 1
            assert "cursor" in {each.service for each in received.trace(snapshot.trace_id)}


async def test_a_duplicate_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with otlp_receiver() as received:
        async with (
            running(
                tmp_path / "stack",
                services=("cursor", "dedup", "ledger"),
                **otel_variables(received),
            ) as services,
            application(received, monkeypatch),
            connect(services.stack.address("ledger")) as client,
            client.producer(TOPIC, name="p") as producer,
        ):
            for _ in range(2):
                await producer.send(b"once", sequence_id=7)
        publishes = sorted(received.named(f"publish {TOPIC}"), key=lambda span: span.start_ns)
        assert [span.attributes[names.RECEIPT] for span in publishes] == ["STORED", "DUPLICATE"]
        (admit,) = [span for span in below(received, publishes[1]) if span.name == f"admit {TOPIC}"]
        assert admit.attributes[names.VERDICTS + "duplicate"] == 1
        assert f"look_up {TOPIC}" in [span.name for span in below(received, publishes[1])]
