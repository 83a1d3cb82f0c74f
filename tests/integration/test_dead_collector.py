"""A collector that accepts no spans or metrics does not affect publishing and consuming."""

import asyncio
from pathlib import Path

from grpc import aio

from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.filter.v1.filter_pb2_grpc import FilterServiceStub
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import Stack
from seqgate.services.runtime import metrics
from seqgate.telemetry.setup import FLUSH_TIMEOUT_S
from tests.integration.services import log_lines
from tests.support.waiting import eventually

STOP_S = 30.0
"""The time that a process may need to end on a busy machine, besides its last exports."""


async def test_an_unreachable_collector_does_not_affect_services(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_METRIC_EXPORT_INTERVAL": "200",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    async with Stack(tmp_path, services=("filter",), environment=environment) as stack:
        async with aio.insecure_channel(stack.address("filter")) as channel:
            stub = FilterServiceStub(channel)

            async def was_told() -> bool:
                await stub.Compile(filter_pb2.CompileRequest(expression="true"))
                return any(
                    "Failed to export" in each["event"] for each in log_lines(stack, "filter")
                )

            await eventually(was_told, "a line says that nobody takes what is exported")
        began = asyncio.get_running_loop().time()
        assert await stack.terminate("filter") == 0
        took_s = asyncio.get_running_loop().time() - began
        assert took_s < FLUSH_TIMEOUT_S + metrics.FLUSH_TIMEOUT_S + STOP_S
        lines = log_lines(stack, "filter")
        assert lines[-1]["event"] == "stopped"
