"""Ready, or not: asked over the standard gRPC health protocol.

""  and each service's full name   ready: every dependency answers and state is served
"liveness"                          the process is alive; it says nothing of dependencies
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import structlog
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

log = structlog.get_logger()

Check = Callable[[], Awaitable[None]]
"""Returns when a dependency answers; raises when it does not."""

LIVENESS: Final = "liveness"

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


class Readiness:
    """Keeps a health servicer in step with the dependencies."""

    def __init__(
        self, checks: Mapping[str, Check], services: Sequence[str], interval_s: float
    ) -> None:
        self.servicer = health_aio.HealthServicer()
        self._checks = checks
        self._names = ["", *services]
        self._interval_s = interval_s
        self._failing: set[str] | None = None
        self._stopped = False

    async def watch(self) -> None:
        """Ask the dependencies again and again, for as long as the task lives."""
        await self._tell(_NOT_SERVING)
        await self.servicer.set(LIVENESS, _SERVING)
        while True:
            failing = {
                name for name, check in self._checks.items() if not await self._answers(check)
            }
            if failing != self._failing and not self._stopped:
                self._failing = failing
                log.info("ready" if not failing else "not ready", missing=sorted(failing))
                await self._tell(_NOT_SERVING if failing else _SERVING)
            await asyncio.sleep(self._interval_s)

    async def stop(self) -> None:
        """Say, for good, that this process takes no more work."""
        self._stopped = True
        await self._tell(_NOT_SERVING)

    async def _tell(self, status: int) -> None:
        for name in self._names:
            await self.servicer.set(name, status)

    async def _answers(self, check: Check) -> bool:
        try:
            async with asyncio.timeout(max(1.0, self._interval_s)):
                await check()
        except Exception as error:  # whatever it is, the dependency is not there
            log.debug("dependency does not answer", error=repr(error))
            return False
        return True
