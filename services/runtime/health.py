"""Readiness, by the gRPC health protocol.

"" and each service's full name    ready: every dependency answers, and the service does not drain
"liveness"                         the process is alive, whatever its dependencies do
the dependencies' names            each answers: redis, sqlite, postgresql, ledger ...

List has them all, and the version of Seqgate in its trailing metadata.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

import structlog
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

log = structlog.get_logger()

Check = Callable[[], Awaitable[None]]
"""Returns if a dependency answers; raises otherwise."""

LIVENESS: Final = "liveness"

HEALTH: Final[Any] = health_pb2
"""Its type stubs lack List."""

VERSION: Final = "seqgate-version"
"""The metadata of List with the version of the answering process."""

WHY_MAX: Final = 500
"""The most characters logged of the reason that a dependency fails."""

RECHECK_S: Final = 0.1
"""The longest interval between checks while a dependency fails, in seconds."""

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


class Health(health_aio.HealthServicer):
    """The library's servicer, with List."""

    def __init__(self) -> None:
        super().__init__()
        self.statuses: dict[str, int] = {}

    async def set(self, service: str, status: Any) -> None:
        self.statuses[service] = status
        await super().set(service, status)

    async def List(self, _: Any, context: Any) -> Any:  # noqa: N802
        context.set_trailing_metadata(((VERSION, version("seqgate")),))
        return HEALTH.HealthListResponse(
            statuses={
                name: health_pb2.HealthCheckResponse(status=status)
                for name, status in self.statuses.items()
            }
        )


class Readiness:
    """Keeps a health servicer up to date with the service's dependencies."""

    def __init__(
        self, checks: Mapping[str, Check], services: Sequence[str], interval_s: float
    ) -> None:
        self.servicer = Health()
        self._checks = checks
        self._names = ["", *services]
        self._interval_s = interval_s
        self._failing: set[str] | None = None
        self._stopped = False

    async def watch(self) -> None:
        """Check the dependencies periodically, more often while one fails, until cancelled."""
        await self._tell(_NOT_SERVING)
        await self.servicer.set(LIVENESS, _SERVING)
        while True:
            whys = {name: await self._why_not(check) for name, check in self._checks.items()}
            failing = {name: why for name, why in whys.items() if why}
            if failing.keys() != self._failing and not self._stopped:
                self._failing = set(failing)
                self._log(failing)
                for name in self._checks:
                    await self.servicer.set(name, _NOT_SERVING if name in failing else _SERVING)
                await self._tell(_NOT_SERVING if failing else _SERVING)
            interval_s = min(self._interval_s, RECHECK_S) if failing else self._interval_s
            await asyncio.sleep(interval_s)

    async def stop(self) -> None:
        self._stopped = True
        await self._tell(_NOT_SERVING)

    async def _tell(self, status: int) -> None:
        for name in self._names:
            await self.servicer.set(name, status)

    def _log(self, failing: Mapping[str, str]) -> None:
        if failing:
            log.info("not ready", missing=sorted(failing), why=dict(sorted(failing.items())))
        else:
            log.info("ready", missing=[])

    async def _why_not(self, check: Check) -> str:
        """The reason that a dependency does not answer; empty: it does."""
        timeout_s = max(1.0, self._interval_s)
        try:
            async with asyncio.timeout(timeout_s):
                await check()
        except TimeoutError:
            return f"no answer within {timeout_s:g} s"
        except aio.AioRpcError as error:
            return f"{error.code().name}: {error.details() or ''}"[:WHY_MAX]
        except Exception as error:  # whatever the error, the dependency is unavailable
            return f"{type(error).__name__}: {error}"[:WHY_MAX]
        return ""
