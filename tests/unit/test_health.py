"""A process that is not ready reports the missing dependency and the cause."""

import asyncio
from typing import Any

from grpc import StatusCode, aio
from structlog.testing import capture_logs

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
