"""A process that is not ready reports the missing dependency and the cause."""

import asyncio
from importlib.metadata import version
from typing import Any

from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2_grpc
from structlog.testing import capture_logs

from seqgate.services.runtime.channels import list_health
from seqgate.services.runtime.health import WHY_MAX, Readiness
from tests.support.waiting import eventually


async def test_unready_services_report_the_cause() -> None:
    failing: dict[str, Exception | None] = {
        "ledger": ValueError("will not send a token to ipv4:10.0.0.1:1 without TLS"),
        "dedup": aio.AioRpcError(
            StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), details="connection refused"
        ),
        "cursor": TimeoutError(),
        "filter": RuntimeError("x" * 10_000),
        "store": None,
    }

    def check(name: str) -> Any:
        async def ask() -> None:
            if (error := failing[name]) is not None:
                raise error

        return ask

    readiness = Readiness({name: check(name) for name in failing}, [], interval_s=0.001)
    with capture_logs() as logs:
        watching = asyncio.create_task(readiness.watch())
        await eventually(lambda: bool(logs), "it says what it lacks")
        for name in failing:
            failing[name] = None
        await eventually(lambda: len(logs) > 1, "it is ready")
        watching.cancel()
        await asyncio.wait([watching])

    told, ready = logs
    assert (told["event"], told["missing"]) == (
        "not ready",
        ["cursor", "dedup", "filter", "ledger"],
    )
    assert told["why"] == {
        "cursor": "no answer within 1 s",
        "dedup": "UNAVAILABLE: connection refused",
        "filter": ("RuntimeError: " + "x" * 10_000)[:WHY_MAX],
        "ledger": "ValueError: will not send a token to ipv4:10.0.0.1:1 without TLS",
    }
    assert (ready["event"], ready["missing"]) == ("ready", [])


async def test_health_lists_each_dependency_and_the_version() -> None:
    async def answers() -> None:
        return

    async def fails() -> None:
        raise RuntimeError("gone")

    readiness = Readiness({"redis": fails, "sqlite": answers}, ["a.Service"], interval_s=0.001)
    server = aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(readiness.servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    watching = asyncio.create_task(readiness.watch())
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def found() -> bool:
            told, serving = await list_health(channel, timeout_s=30)
            assert told == version("seqgate")
            return {name for name, is_serving in serving.items() if is_serving} == {
                "liveness",
                "sqlite",
            }

        await eventually(found, "what answers is serving, and nothing else")
    watching.cancel()
    await asyncio.wait([watching])
    await server.stop(None)


async def test_a_failing_dependency_is_checked_more_often_than_a_healthy_one() -> None:
    checks = 0

    async def check() -> None:
        nonlocal checks
        checks += 1
        if checks < 3:
            raise RuntimeError("not yet")

    readiness = Readiness({"ledger": check}, [], interval_s=3600)
    with capture_logs() as logs:
        watching = asyncio.create_task(readiness.watch())
        await eventually(lambda: len(logs) > 1, "it is ready")
        watching.cancel()
        await asyncio.wait([watching])
    assert [each["event"] for each in logs] == ["not ready", "ready"]
    assert checks == 3
