"""The layers around every call, outermost first:

    logged      logs a sample of failed calls, and every call at debug level; probes of health
                pass none of these layers, and leave no line
    translated  turns refusals into statuses, and unexpected exceptions into INTERNAL
    drained     refuses new calls while the service shuts down; counts streams
    deadlined   drops a call whose deadline has passed before it begins; records the caller's
                deadline, for calls made on its behalf
    loaded      refuses calls beyond the limits (load.py)

and, with authentication, innermost:

    judged      authorizes the call (guard.py)

Each is an async context manager around the handler, whatever its style: unary, async generator, or
reading and writing on the context. One gRPC interceptor applies them all.
"""

from __future__ import annotations  # grpc's classes are generic in its stubs only

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
)
from contextvars import ContextVar
from typing import Any, Final, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio
from grpc._cython import cygrpc
from grpc_status import rpc_status
from opentelemetry.trace import get_current_span

from seqgate.services.errors import DomainError, Kind, MalformedRequest
from seqgate.services.runtime import deadline
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.guard import Guard
from seqgate.services.runtime.load import Load, size_of
from seqgate.services.runtime.refusal_log import Group, RefusalLog, during
from seqgate.services.runtime.silence import Spoken, spoken
from seqgate.services.runtime.status import INTERNAL, status_of
from seqgate.status import code_of
from seqgate.telemetry import names

log = structlog.get_logger()

Context = aio.ServicerContext[Any, Any]
Around = Callable[[str, Context], AbstractAsyncContextManager[None]]

OURS = "/seqgate.api."
"""The prefix of our own services' methods."""

HEALTH = "/grpc.health.v1.Health/"
"""The prefix of methods that need no rights: they reveal only whether a service is ready."""


def logged(refusals: RefusalLog) -> Around:

    @asynccontextmanager
    async def around(method: str, context: Context) -> AsyncIterator[None]:
        began = time.monotonic()
        peer = context.peer()  # grpc crashes if called after the call ended
        code = grpc.StatusCode.OK
        try:
            with during(refusals, method, peer):
                yield
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except aio.AbortError:
            code = context.code()
            raise
        finally:
            about: dict[str, Any] = {
                "code": code.name,
                "detail": context.details() or None,
                "seconds": round(time.monotonic() - began, 4),
                "peer": peer,
            }
            log.debug("call", method=method, **about)
            if code not in _QUIET and not _IS_USUAL.get():
                reason = structlog.contextvars.get_contextvars().get("reason", code.name)
                level = _LEVELS.get(code, logging.WARNING)
                refusals.record("refused", Group(reason, method), level=level, **about)

    return around


_IS_USUAL: ContextVar[bool] = ContextVar("is_usual", default=False)
"""Whether this call was refused with a usual answer (DomainError.is_usual)."""

_QUIET = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,  # `translated` logs it, with the traceback
    grpc.StatusCode.UNAUTHENTICATED,  # the guard logs these two, by caller
    grpc.StatusCode.PERMISSION_DENIED,
}

_LEVELS = {
    grpc.StatusCode.NOT_FOUND: logging.INFO,  # many callers ask just to find out
}


class GivenUp(DomainError):
    """The service cancelled work that the call waited for. Whether the request took effect is
    unknown."""

    kind = Kind.UNAVAILABLE
    reason = "GIVEN_UP"


def _is_cancelled() -> bool:
    """Whether gRPC cancelled this call, since the caller disconnected or the deadline passed. If
    not, a CancelledError comes from the handler itself: grpc.aio would send no status, and the
    caller would wait for ever."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def translated(refusals: RefusalLog) -> Around:
    @asynccontextmanager
    async def around(method: str, context: Context) -> AsyncIterator[None]:
        try:
            yield
        except DomainError as refusal:
            refusals.record_busy(refusal)
            structlog.contextvars.bind_contextvars(reason=refusal.reason)  # for `logged`
            _IS_USUAL.set(refusal.is_usual)  # likewise
            get_current_span().set_attribute(names.REASON, refusal.reason)
            status = status_of(refusal)
            await _abort(context, code_of(status), rpc_status.to_status(status))
        except aio.AbortError:
            raise
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            group = Group(GivenUp.reason, method, "")
            refusals.record("unexpected", group, level=logging.ERROR, exc_info=error)
            status = status_of(GivenUp("what the call waited for was cancelled"))
            await _abort(context, code_of(status), rpc_status.to_status(status))
        except cygrpc.ExecuteBatchError as error:
            raise _gone() from error
        except Exception as error:
            group = Group("INTERNAL", method, type(error).__name__)
            refusals.record("unexpected", group, level=logging.ERROR, exc_info=error)
            await _abort(context, grpc.StatusCode.INTERNAL, rpc_status.to_status(INTERNAL))

    return around


def _gone() -> asyncio.CancelledError:
    """The exception for a handler that cannot send because its caller disconnected; gRPC is about
    to cancel it. A response above the size limit ends differently: see `_bounded`."""
    return asyncio.CancelledError("caller disconnected")


async def _abort(context: Context, code: grpc.StatusCode, status: grpc.Status) -> None:
    context.set_code(code)
    context.set_details(status.details)
    try:
        await context.abort_with_status(status)
    except cygrpc.ExecuteBatchError as error:
        raise _gone() from error


def drained(drain: Drain) -> Around:
    """Refuse calls during the drain, and count open streams."""

    @asynccontextmanager
    async def around(method: str, context: Context) -> AsyncIterator[None]:
        drain.check()
        yield

    return around


@asynccontextmanager
async def deadlined(method: str, context: Context) -> AsyncIterator[None]:
    remaining_s: float | None = context.time_remaining()  # its stub omits None
    if remaining_s is not None and remaining_s <= 0:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed in the queue")
    deadline.set_remaining_s(remaining_s)
    yield


MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
"""The default size limit of a message, in bytes."""

FIRST_MESSAGE_TIMEOUT_S: Final = 30.0
"""The default time limit for the first message of a stream, in seconds."""


class Interceptor(aio.ServerInterceptor):
    """Applies `arounds` to every method of our services, the first one outermost. With a guard,
    only the health service receives unauthorized calls."""

    def __init__(
        self,
        arounds: Sequence[Around],
        drain: Drain,
        guard: Guard | None = None,
        load: Load | None = None,
        first_message_timeout_s: float = FIRST_MESSAGE_TIMEOUT_S,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        self._arounds = arounds
        self._drain = drain
        self._guard = guard
        self._load = load or Load()
        self._first_message_timeout_s = first_message_timeout_s
        self._message_bytes_max = message_bytes_max

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not self._is_ours(method):
            return handler
        return self._wrapped(handler, method)

    def _is_ours(self, method: str) -> bool:
        if self._guard is not None:
            return not method.startswith(HEALTH)
        return method.startswith(OURS)

    def _wrapped(self, handler: Any, method: str) -> grpc.RpcMethodHandler[Any, Any]:
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        behaviour = next(filter(None, (getattr(handler, kind) for kind in kinds)))
        make = _MAKERS[bool(handler.request_streaming), bool(handler.response_streaming)]

        async def writing(request: Any, context: Context) -> None:
            # Not a generator: grpc.aio abandons generators when a call is cancelled, so their
            # clean-up would wait for the garbage collector.
            async with self._around(method, context, stream=True) as stack:
                stack.enter_context(self._loaded(handler, request, context))
                request, context = self._judged(method, handler, request, context)
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        await context.write(response)

        async def returning(request: Any, context: Context) -> Any:
            stream = bool(handler.response_streaming)
            async with self._around(method, context, stream=stream) as stack:
                stack.enter_context(self._loaded(handler, request, context))
                request, judged = self._judged(method, handler, request, context)
                reply: Any = await behaviour(request, judged)
                if self._guard is not None:
                    reply = judged.shown(reply)  # type: ignore[attr-defined]
                if not handler.response_streaming:
                    let_go: Any = self._load.answered(size_of(reply))
                    context.add_done_callback(let_go)
                return reply

        serialize = handler.response_serializer
        if handler.response_streaming:
            serialize = _bounded(serialize, self._message_bytes_max)
        return make(
            writing if inspect.isasyncgenfunction(behaviour) else returning,
            request_deserializer=_lenient(handler.request_deserializer),
            response_serializer=serialize,
        )

    def _judged(
        self, method: str, handler: Any, request: Any, context: Context
    ) -> tuple[Any, Context]:
        """The authorized request, and a context that authorizes the messages of a stream."""
        if handler.request_streaming:
            timeout_s = self._first_message_timeout_s
            context = Spoken(context, self._drain, timeout_s)  # type: ignore[assignment]
            request = spoken(request, self._drain, timeout_s)
        if self._guard is None:
            return request, context
        seen: Any = self._guard.begin(method, context)
        if handler.request_streaming:
            return seen.judging(request), seen
        seen.judge(request)
        return request, seen

    @asynccontextmanager
    async def _around(
        self, method: str, context: Context, *, stream: bool
    ) -> AsyncIterator[AsyncExitStack]:
        async with AsyncExitStack() as stack:
            for around in self._arounds:
                await stack.enter_async_context(around(method, context))
            if stream:
                stack.enter_context(self._drain.stream())
            yield stack

    def _loaded(self, handler: Any, request: Any, context: Context) -> AbstractContextManager[None]:
        size_bytes, host = 0 if handler.request_streaming else size_of(request), _host(context)
        if handler.request_streaming or handler.response_streaming:
            return self._load.stream(size_bytes, host)
        return self._load.call(size_bytes, host)


def _host(context: Context) -> str:
    """The caller's host, equal for all of its connections."""
    return context.peer().rpartition(":")[0]


class _Malformed:
    """Stands for a message that does not decode: any access raises MalformedRequest. gRPC decodes
    outside the handler, and would answer with the text of the exception."""

    def __getattr__(self, name: str) -> NoReturn:
        raise MalformedRequest("request does not decode as the method's message")


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def lenient(serialized: bytes) -> Any:
        try:
            return deserialize(serialized)
        except DecodeError:
            return _Malformed()

    return lenient


class ResponseTooLarge(Exception):
    """A handler's response exceeds the size limit of a message."""


def _bounded(serialize: Callable[[Any], bytes], bytes_max: int) -> Callable[[Any], bytes]:
    """Raise ResponseTooLarge for a stream's response above the limit, which is a bug of ours: gRPC
    would fail the call and report it as over, as if the caller had disconnected. (A unary response
    then fails with RESOURCE_EXHAUSTED, which callers that read pages handle.)"""

    def bounded(response: Any) -> bytes:
        serialized = serialize(response)
        if len(serialized) > bytes_max:
            raise ResponseTooLarge(
                f"response of {len(serialized)} bytes exceeds the limit of {bytes_max}"
            )
        return serialized

    return bounded


_MAKERS: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
