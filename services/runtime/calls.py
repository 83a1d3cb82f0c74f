"""How long calls take, on both sides, by the RPC conventions of OpenTelemetry."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import grpc
from grpc import StatusCode, aio

from seqgate.telemetry.metrics import CLIENT_CALLS, SERVER_CALLS, SERVER_ERRORS
from services.runtime.metrics import Metrics, Recorder

GRPC: Final = "grpc"

Around = Callable[[str, Any], AbstractAsyncContextManager[None]]


def server_calls(metrics: Metrics) -> Around:
    """Goes around each call that a service is asked, outside of all else."""
    record = metrics.histogram(SERVER_CALLS)

    @asynccontextmanager
    async def around(method: str, context: Any) -> AsyncIterator[None]:
        began_s = time.monotonic()
        code = StatusCode.UNKNOWN
        try:
            yield
            code = _said(context, StatusCode.OK)
        except asyncio.CancelledError:
            code = StatusCode.CANCELLED
            raise
        except aio.AbortError:
            code = _said(context, StatusCode.UNKNOWN)
            raise
        finally:
            failed = (code.name,) if code.name in SERVER_ERRORS else ()
            took_s = time.monotonic() - began_s
            record(took_s, GRPC, method.removeprefix("/"), code.name, *failed)

    return around


def _said(context: Any, otherwise: StatusCode) -> StatusCode:
    """The code that a handler has set, as a status or as its number."""
    code = context.code()
    if not code:
        return otherwise
    return code if isinstance(code, StatusCode) else _CODES.get(code, otherwise)


_CODES: Final = {code.value[0]: code for code in StatusCode}


def measured_channel(channel: Any, metrics: Metrics) -> aio.Channel:
    """A channel whose calls are measured: it is used like the one that it stands before."""
    if not metrics.is_on:
        return channel  # type: ignore[no-any-return]
    measured: Any = MeasuredChannel(channel, metrics.histogram(CLIENT_CALLS))
    return measured  # type: ignore[no-any-return]


class MeasuredChannel:
    """See measured_channel. No interceptor: gRPC puts a queue between those and who writes to a
    stream."""

    def __init__(self, channel: Any, record: Recorder) -> None:
        self._channel = channel
        self._record = record

    def unary_unary(self, method: str, *more: Any, **named: Any) -> Callable[..., Any]:
        """See aio.Channel."""
        return self._measured(method, self._channel.unary_unary(method, *more, **named))

    def unary_stream(self, method: str, *more: Any, **named: Any) -> Callable[..., Any]:
        """See aio.Channel."""
        return self._measured(method, self._channel.unary_stream(method, *more, **named))

    def stream_unary(self, method: str, *more: Any, **named: Any) -> Callable[..., Any]:
        """See aio.Channel."""
        return self._measured(method, self._channel.stream_unary(method, *more, **named))

    def stream_stream(self, method: str, *more: Any, **named: Any) -> Callable[..., Any]:
        """See aio.Channel."""
        return self._measured(method, self._channel.stream_stream(method, *more, **named))

    def _measured(self, method: str, multi: Callable[..., Any]) -> Callable[..., Any]:
        name, record = method.removeprefix("/"), self._record

        def call(*request: Any, **how: Any) -> Any:
            began_s = time.monotonic()
            made = multi(*request, **how)

            def ended(done: Any) -> None:
                code = _at_once(done.code())
                failed = () if code is StatusCode.OK else (code.name,)
                record(time.monotonic() - began_s, GRPC, name, code.name, *failed)

            made.add_done_callback(ended)
            return made

        return call

    async def close(self, grace: float | None = None) -> None:
        """See aio.Channel."""
        await self._channel.close(grace)

    async def __aenter__(self) -> "MeasuredChannel":
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


def _at_once(asked: Coroutine[Any, Any, StatusCode]) -> StatusCode:
    """With what a call ended that is over: it says so without waiting."""
    try:
        asked.send(None)
    except StopIteration as answer:
        return answer.value  # type: ignore[no-any-return]
    except asyncio.CancelledError:
        return StatusCode.CANCELLED
    except (grpc.RpcError, asyncio.InvalidStateError):
        return StatusCode.UNKNOWN
    asked.close()
    return StatusCode.UNKNOWN
