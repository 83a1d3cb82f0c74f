"""An idle installation that is probed exports no span and writes no line."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import StatusCode

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.dev.stack import SERVICES
from seqgate.telemetry import metrics as told
from tests.integration.refusals import refused
from tests.integration.services import Services, health, running
from tests.support.otlp import Received, otel_variables, otlp_receiver
from tests.support.waiting import eventually
from tools.trace.receiver import Span

ROUNDS = 5
"""The rounds of readiness checks that an installation is watched for."""

PROBES = 50

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
METADATA = (("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),)
STATUS_CODE = "rpc.response.status_code"
CHECK = "grpc.health.v1.Health/Check"
GET_CURSOR = "seqgate.api.cursor.v1.CursorService/GetCursor"


@dataclass(frozen=True, slots=True)
class Probed:
    services: Services
    received: Received

    def rounds(self) -> int:
        """The readiness checks that the services which depend on others have made of each."""
        counts: dict[object, int] = {}
        for resource, metric in self.received.metrics:
            if metric.name != told.CLIENT_CALLS.name:
                continue
            for point in metric.histogram.data_points:
                labels = {each.key: each.value.string_value for each in point.attributes}
                if (labels["rpc.method"], labels[STATUS_CODE]) == (CHECK, "OK"):
                    counts[resource["service.name"]] = point.count
        return min(counts.get("ledger", 0), counts.get("dispatcher", 0) // 2)

    def lines(self) -> list[dict[str, Any]]:
        return [line for service in SERVICES for line in self.services.log(service)]


@pytest_asyncio.fixture(params=["sqlite", "postgres"])
async def probed(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Probed]:
    """Services that check their dependencies often, and log all they can."""
    often = {f"SEQGATE_{each.upper()}_HEALTH_INTERVAL_S": "0.05" for each in SERVICES}
    loud = {f"SEQGATE_{each.upper()}_LOG_LEVEL": "debug" for each in SERVICES}
    async with (
        otlp_receiver() as received,
        running(
            tmp_path / "stack",
            store=request.param,
            **often,
            **loud,
            **otel_variables(received),
        ) as services,
    ):
        yield Probed(services, received)


async def test_an_idle_installation_under_probes_exports_no_span_and_no_line(
    probed: Probed, topic: str
) -> None:
    stack = probed.services.stack
    before, rounds = probed.lines(), probed.rounds()
    for service in SERVICES:
        states = [await health(stack.address(service)) for _ in range(PROBES)]
        assert set(states) == {"SERVING"}
    await eventually(lambda: probed.rounds() >= rounds + ROUNDS, "readiness was checked")
    assert probed.lines() == before

    # Spans are exported in order, so these follow whatever came before them.
    services = probed.services
    requests = {
        "ledger": (services.ledger.CreateTopic, ledger_pb2.CreateTopicRequest(topic=topic)),
        "dedup": (services.dedup.ListProducers, dedup_pb2.ListProducersRequest(topic=topic)),
        "cursor": (services.cursor.ListCursors, cursor_pb2.ListCursorsRequest(topic=topic)),
        "dispatcher": (
            services.dispatcher.ListSubscriptions,
            dispatcher_pb2.ListSubscriptionsRequest(topic=topic),
        ),
        "filter": (services.filter.Compile, filter_pb2.CompileRequest(expression="true")),
    }
    for method, request in requests.values():
        await method(request, metadata=METADATA)
    ours = probed.received.trace
    await eventually(lambda: {each.service for each in ours(TRACE)} == set(SERVICES), "all came")
    assert [each for each in probed.received.spans if each.trace_id != TRACE] == []


async def test_a_cursor_that_does_not_exist_yet_is_no_news(probed: Probed, topic: str) -> None:
    """Neither for a service that asks, nor for the one that answers."""
    services = probed.services
    request = dedup_pb2.GetTopicStatusRequest(topic=topic)
    await services.dedup.GetTopicStatus(request, metadata=METADATA)
    with refused(StatusCode.NOT_FOUND, "CURSOR_NOT_FOUND"):
        await services.cursor.GetCursor(cursor_pb2.GetCursorRequest(topic=topic, cursor="none"))

    def asked() -> list[Span]:
        return [each for each in probed.received.trace(TRACE) if each.name == GET_CURSOR]

    await eventually(lambda: {each.kind for each in asked()} == {"CLIENT", "SERVER"})
    for each in asked():
        assert each.attributes[STATUS_CODE] == "NOT_FOUND"
        assert not each.failed

    def of_cursor() -> list[dict[str, Any]]:
        return [each for each in services.log("cursor") if each.get("code") == "NOT_FOUND"]

    await eventually(lambda: len(of_cursor()) >= 2, "both calls are logged")
    assert {(each["event"], each["level"], each["reason"]) for each in of_cursor()} == {
        ("call", "debug", "CURSOR_NOT_FOUND")
    }
    loud = {each["event"] for each in services.log("dedup") if each["level"] != "debug"}
    assert loud <= {"listening", "not ready", "ready"}
