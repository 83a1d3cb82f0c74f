"""Durations of served and outgoing calls, by OpenTelemetry's conventions for RPC."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

from grpc import StatusCode, aio

from seqgate.channels import Call, End, Hook, OnEnd
from seqgate.services.runtime.metrics import Metrics
from seqgate.telemetry.calls import code_set
from seqgate.telemetry.metrics import CLIENT_CALLS, SERVER_CALLS, SERVER_ERRORS

GRPC: Final = "grpc"

Around = Callable[[str, Any], AbstractAsyncContextManager[None]]


def server_calls(metrics: Metrics) -> Around:
    """Measure each call to a service. Must be the outermost layer."""
    record = metrics.histogram(SERVER_CALLS)

    @asynccontextmanager
    async def around(method: str, context: Any) -> AsyncIterator[None]:
        began_s = time.monotonic()
        code = StatusCode.UNKNOWN
        try:
            yield
            code = code_set(context, StatusCode.OK)
        except asyncio.CancelledError:
            code = StatusCode.CANCELLED
            raise
        except aio.AbortError:
            code = code_set(context, StatusCode.UNKNOWN)
            raise
        finally:
            failed = (code.name,) if code.name in SERVER_ERRORS else ()
            took_s = time.monotonic() - began_s
            record(took_s, GRPC, method.removeprefix("/"), code.name, *failed)

    return around


def client_calls(metrics: Metrics) -> Hook:
    """Measure each call on a channel."""
    record = metrics.histogram(CLIENT_CALLS)

    def hook(call: Call) -> OnEnd:
        began_s = time.monotonic()

        def on_end(end: End) -> None:
            if end.error is None:
                failed = () if end.code is StatusCode.OK else (end.code.name,)
                record(time.monotonic() - began_s, GRPC, call.method, end.code.name, *failed)

        return on_end

    return hook
