"""grpc.aio's server over the simulated network.

grpc.aio.Server is kept; cygrpc.AioServer below it, and the context passed to handlers, are
reimplemented with the same behaviour: the exceptions they raise, when handlers are cancelled, and
the state of an aborted call.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import Context, copy_context
from typing import Any, Final

import grpc
from grpc import StatusCode, aio
from grpc._cython import cygrpc
from grpc.aio._server import Server

from tests.simulation.ground.channel import RECEIVE_BYTES_MAX, metadatum
from tests.simulation.ground.network import CLIENT, SERVER, Connection, Network, Ordered
from tests.simulation.ground.stream import FRAME_BYTES, Stream

EOF: Final = aio.EOF

_OK: Final = StatusCode.OK.value[0]
_CANCELLED: Final = StatusCode.CANCELLED.value[0]
_UNKNOWN: Final = StatusCode.UNKNOWN.value[0]
_UNIMPLEMENTED: Final = StatusCode.UNIMPLEMENTED.value[0]
_RESOURCE_EXHAUSTED: Final = StatusCode.RESOURCE_EXHAUSTED.value[0]

_NUMBERS: Final = {code.value[0] for code in StatusCode}

USER_AGENT: Final = metadatum("user-agent", "grpc-python-asyncio/simulated")

_log: Final = logging.getLogger("grpc._cython.cygrpc")


class SimServer(Server):
    """An aio.Server that belongs to the process that makes it."""

    def __init__(
        self,
        network: Network,
        handlers: Sequence[grpc.GenericRpcHandler],
        interceptors: Sequence[Any],
        options: Sequence[tuple[str, Any]],
        maximum_concurrent_rpcs: int | None,
    ) -> None:
        self._loop = network.loop
        self._server: Any = SimServerCore(
            network, interceptors, dict(options), maximum_concurrent_rpcs
        )
        self._server.add_generic_rpc_handlers(handlers)

    def __del__(self) -> None:
        """Do nothing: the end of its process, not garbage collection, stops a server."""


class SimServerCore:
    """Replaces cygrpc.AioServer."""

    def __init__(
        self,
        network: Network,
        interceptors: Sequence[Any],
        options: Mapping[str, Any],
        rpcs_max: int | None,
    ) -> None:
        self.network: Final = network
        self.process: Final = network.loop.process
        self.options: Final = options
        self.receive_bytes_max = options.get("grpc.max_receive_message_length", RECEIVE_BYTES_MAX)
        self.send_bytes_max = options.get("grpc.max_send_message_length", -1)
        self.rpcs: dict[Rpc, None] = {}
        self.is_stopped = False
        self.loop: Final = network.loop
        self._interceptors = tuple(interceptors)
        self._generic: list[grpc.GenericRpcHandler] = []
        self._registered: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._rpcs_max = rpcs_max
        self._addresses: list[str] = []
        self._connections: dict[Connection, Any] = {}
        self._is_started = False
        self._is_stopping = False
        self._drained: Any = None
        self._context: Context = Context()

    # ---- the interface to grpc.aio

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._generic.extend(handlers)

    def add_registered_method_handlers(self, handlers: Mapping[str, Any]) -> None:
        self._registered.update(handlers)

    def add_insecure_port(self, address: bytes) -> int:
        return self.network.listen(address.decode(), self)

    def add_secure_port(self, address: bytes, credentials: Any) -> int:
        raise ValueError("the simulated network knows no TLS")

    async def start(self) -> None:
        self._is_started = True
        self._context = copy_context()

    def is_running(self) -> bool:
        return self._is_started and not self._is_stopping

    async def shutdown(self, grace: float | None) -> None:
        if not self._is_started or self.is_stopped:
            return
        if not self._is_stopping:
            self._is_stopping = True
            self.network.deafen(self)
            self._drained = self.loop.create_future()
            for connection in list(self._connections):
                self._go_away(connection)
                self._leave(connection)
            self._look_for_the_end()
        if grace is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._drained), grace)
            except TimeoutError:
                self._cancel_all()
        else:
            self._cancel_all()
        await asyncio.shield(self._drained)
        self.is_stopped = True

    async def wait_for_termination(self, timeout: float | None) -> bool:
        if self._drained is None:
            self._drained = self.loop.create_future()
        try:
            await asyncio.wait_for(asyncio.shield(self._drained), timeout)
        except TimeoutError:
            return True
        return False

    def _cancel_all(self) -> None:
        for connection in list(self._connections):
            self.closed(connection)
            connection.close(SERVER, "Socket closed")
        self._look_for_the_end()

    def _look_for_the_end(self) -> None:
        if (
            self._is_stopping
            and not self.rpcs
            and not self._connections
            and not self._drained.done()
        ):
            self._drained.set_result(None)

    # ---- connections

    def accept(self, connection: Connection) -> bool:
        """Implements Listener."""
        if not self._is_started or self._is_stopping:
            return False
        timer = None
        age_ms = self.options.get("grpc.max_connection_age_ms")
        if age_ms:
            jitter = 0.9 + 0.2 * self.network.random.random()
            timer = self.loop.schedule(
                self.loop.now + age_ms / 1000 * jitter, self.process, self._go_away, connection
            )
        self._connections[connection] = timer
        return True

    def closed(self, connection: Connection) -> None:
        """Implements Listener: cancels the connection's calls."""
        timer = self._connections.pop(connection, None)
        if timer is not None:
            timer.cancel()
        for rpc in [rpc for rpc in self.rpcs if rpc.stream.connection is connection]:
            rpc.cancelled_by_peer()
        self._look_for_the_end()

    def _go_away(self, connection: Connection) -> None:
        connection.is_going_away = True
        connection.transmit(SERVER, _Goaway(), 17, _going_away, connection)

    # ---- calls

    def requested(
        self,
        stream: Stream,
        method: str,
        metadata: tuple[Any, ...],
        left_s: float | None,
        first: bytes | None,
    ) -> None:
        """A request arrived."""
        rpc = Rpc(self, stream, method, metadata, left_s, first)
        if self._is_stopping:
            rpc.refuse("Server shutting down")
            return
        self.rpcs[rpc] = None
        stream.rpc = rpc
        exceeded = self._rpcs_max is not None and len(self.rpcs) > self._rpcs_max
        rpc.run(self._context.copy(), exceeded=exceeded)

    async def handler(self, method: str, metadata: tuple[Any, ...]) -> Any:
        """A method's handler, wrapped in the interceptors; None if the method is unknown."""
        details = _Details(method, metadata)
        if self._interceptors:
            return await _intercepted(iter(self._interceptors), self._look_up, details)
        return self._look_up(details)

    def _look_up(self, details: Any) -> Any:
        handler = self._registered.get(details.method)
        if handler is not None:
            return handler
        for each in self._generic:
            handler = each.service(details)
            if handler is not None:
                return handler
        return None

    def over(self, rpc: Rpc) -> None:
        """Remove a call that has ended on the wire."""
        if rpc in self.rpcs:
            del self.rpcs[rpc]
            if self._is_stopping:
                self._leave(rpc.stream.connection)
                self._look_for_the_end()

    def _leave(self, connection: Connection) -> None:
        """During a shutdown, close a connection after its last call."""
        if not any(rpc.stream.connection is connection for rpc in self.rpcs):
            timer = self._connections.pop(connection, None)
            if timer is not None:
                timer.cancel()
            connection.close(SERVER, "Socket closed", in_order=True)


class _Goaway(Ordered):
    """The order of a GOAWAY frame, which waits for no earlier frame."""


def _going_away(connection: Connection) -> None:
    """The client received GOAWAY."""
    connection.is_going_away = True
    subchannel = getattr(connection.ends[CLIENT].closed, "__self__", None)
    if subchannel is not None:
        subchannel._core.going_away(connection)


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str, invocation_metadata: tuple[Any, ...]) -> None:
        self.method = method
        self.invocation_metadata = invocation_metadata


async def _intercepted(interceptors: Any, look_up: Callable[[Any], Any], details: Any) -> Any:
    interceptor = next(interceptors, None)
    if interceptor is None:
        return look_up(details)
    continuation = functools.partial(_intercepted, interceptors, look_up)
    return await interceptor.intercept_service(continuation, details)


class Rpc:
    """A call at the server."""

    def __init__(
        self,
        server: SimServerCore,
        stream: Stream,
        method: str,
        metadata: tuple[Any, ...],
        left_s: float | None,
        first: bytes | None,
    ) -> None:
        self.server = server
        self.stream = stream
        self.method = method
        self.metadata = (*(metadatum(*each) for each in metadata), USER_AGENT)
        self.deadline = None if left_s is None else time.time() + left_s
        self.abort_error: BaseException | None = None
        self.code = _OK
        self.code_given: Any = None
        self.details = ""
        self.trailing: tuple[Any, ...] = ()
        self.metadata_sent = False
        self.status_sent = False
        self.callbacks: list[Callable[[], object]] = []
        self.is_over = False
        """It has ended on the wire: answered or cancelled."""
        self._task: Any = None
        self._inbox: deque[tuple[bytes, int]] = deque()
        self._has_begun = False
        self._is_half_closed = False
        self._is_reading = False
        self._reader: Any = None
        self._writer: Any = None
        self._timer: Any = None
        stream.up.receive = self._message
        if first is not None:
            self._is_half_closed = True
            self._message(first, 0)
        if left_s is not None and not self.is_over:
            self._timer = server.loop.call_later(max(left_s, 0), self.cancelled_by_peer)

    def run(self, context: Context, *, exceeded: bool) -> None:
        """Run the handler in a task of its own."""
        self._task = self.server.loop.create_task(self._run(exceeded=exceeded), context=context)
        self._task.add_done_callback(self._done)

    def refuse(self, why: str) -> None:
        """Reject the call as UNAVAILABLE, without a handler."""
        self._final(None, StatusCode.UNAVAILABLE.value[0], why, ())
        self._off()

    # ---- received frames

    def _message(self, message: bytes, end: int) -> None:
        if self.is_over:
            return
        if 0 <= self.server.receive_bytes_max < len(message):
            self._too_large(len(message))
            return
        if self._is_reading and not self._inbox:
            self._is_reading = False
            self.stream.up.consumed(end)
            reader, self._reader = self._reader, None
            if reader is not None and not reader.done():
                reader.set_result(message)
            return  # without a waiting reader the message is lost, as in Core
        self._inbox.append((message, end))

    def _too_large(self, size: int) -> None:
        self._final(
            None,
            _RESOURCE_EXHAUSTED,
            f"SERVER: Received message larger than max ({size} vs. "
            f"{self.server.receive_bytes_max})",
            (),
        )
        self.cancelled_by_peer()

    def half_closed(self) -> None:
        """The client sends no more messages."""
        self._is_half_closed = True
        self._end_reading()

    def _end_reading(self) -> None:
        if self._is_reading and not self._inbox:
            self._is_reading = False
            reader, self._reader = self._reader, None
            if reader is not None and not reader.done():
                reader.set_result(None)

    def cancelled_by_peer(self) -> None:
        """Cancel: by the client, on a broken connection, or at the deadline."""
        if self.is_over:
            return
        was_answered = self.status_sent
        self._off()
        self._inbox.clear()
        self._is_half_closed = True
        self._end_reading()
        writer, self._writer = self._writer, None
        if writer is not None and not writer.done():
            writer.set_exception(cygrpc.ExecuteBatchError("Failed execute_batch"))
        if not was_answered:
            self._cancel_handler()

    def _cancel_handler(self) -> None:
        if self._task is None or self._task.done():
            return
        if self._has_begun:
            self._task.cancel()
        else:  # Core starts every accepted handler before it cancels it
            self.server.loop.run_in(self.server.process, self._cancel_handler)

    def _off(self) -> None:
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.stream.down.drop()
        self.stream.rpc = None
        self.server.over(self)

    # ---- the interface to handlers

    def check(self) -> None:
        """Raise if the handler can no longer use the call."""
        if self.abort_error is not None:
            raise self.abort_error
        if self.status_sent:
            raise cygrpc.UsageError("RPC already finished.")
        if self.server.is_stopped:
            raise cygrpc._ServerStoppedError("Server already stopped.")

    async def read(self) -> bytes | None:
        """The next message; None at the end of the stream."""
        if self._inbox:
            message, end = self._inbox.popleft()
            self.stream.up.consumed(end)
            await asyncio.sleep(0)
            return message
        if self._is_half_closed or self._is_reading:
            await asyncio.sleep(0)
            return None
        self._is_reading = True
        reader = self._reader = self.server.loop.create_future()
        self.stream.up.awaited()
        return await reader  # type: ignore[no-any-return]

    async def write(self, message: bytes) -> None:
        """Send a message.

        Raises:
            ExecuteBatchError: the call has ended.
        """
        if self.is_over or self._writer is not None:
            await asyncio.sleep(0)
            raise cygrpc.ExecuteBatchError("Failed execute_batch")
        if 0 <= self.server.send_bytes_max < len(message):
            self._final(
                None,
                _RESOURCE_EXHAUSTED,
                f"SERVER: Sent message larger than max ({len(message)} vs. "
                f"{self.server.send_bytes_max})",
                (),
            )
            self.cancelled_by_peer()
            raise cygrpc.ExecuteBatchError("Failed execute_batch")
        await self.send_initial(())
        if self.stream.down.message(message, self._written):
            await asyncio.sleep(0)
            return
        self._writer = self.server.loop.create_future()
        await self._writer

    def _written(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None and not writer.done():
            writer.set_result(None)

    async def send_initial(self, metadata: tuple[Any, ...]) -> None:
        """Send the initial metadata, once."""
        if not self.metadata_sent:
            self.metadata_sent = True
            if self.stream.call is not None and not self.is_over:
                self.stream.down.frame(FRAME_BYTES, self.stream.call.initial, metadata)

    async def answer(self, message: bytes | None) -> None:
        """Send the status, with the response of a unary call."""
        self.status_sent = True
        if self.is_over:
            await asyncio.sleep(0)
            raise cygrpc.ExecuteBatchError("Failed execute_batch")
        if message is not None and 0 <= self.server.send_bytes_max < len(message):
            details = (
                f"SERVER: Sent message larger than max ({len(message)} vs. "
                f"{self.server.send_bytes_max})"
            )
            self._final(None, _RESOURCE_EXHAUSTED, details, ())
        else:
            self._final(message, self.code, self.details, self.trailing)
        await self._flush()

    async def abort(self, code: int, details: str, trailing: tuple[Any, ...]) -> None:
        """Send an error status."""
        self.status_sent = True
        if self.is_over:
            await asyncio.sleep(0)
            raise cygrpc.ExecuteBatchError("Failed execute_batch")
        self._final(None, code, details, trailing)
        await self._flush()

    async def _flush(self) -> None:
        """Wait until the status is sent, after all earlier messages."""
        if not self.stream.down.flushed(self._written):
            self._writer = self.server.loop.create_future()
            await self._writer
        self._off()
        await asyncio.sleep(0)

    def _final(
        self, message: bytes | None, code: int, details: str, trailing: tuple[Any, ...]
    ) -> None:
        connection, call = self.stream.connection, self.stream.call
        if call is None:
            return
        initial = None if self.metadata_sent else ()
        self.metadata_sent = True
        link = connection.links[SERVER]
        if (
            message is not None
            and link.lost_replies
            and connection.network.random.random() < link.lost_replies
        ):
            connection.network.counts["lost replies"] += 1
            connection.break_()
            return
        size = FRAME_BYTES + len(details) + (0 if message is None else len(message))
        self.stream.down.frame(size, call.final, initial, message, code, details, trailing)

    # ---- running the handler

    async def _run(self, *, exceeded: bool) -> None:
        self._has_begun = True
        try:
            try:
                await self._handle(exceeded=exceeded)
            except aio.AbortError as error:
                if self.abort_error is not error:
                    raise AssertionError("Abort error has been replaced!") from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except asyncio.CancelledError:
            _log.debug("RPC cancelled for servicer method [%s]", self.method)
        except cygrpc._ServerStoppedError:
            _log.warning("Aborting method [%s] due to server stop.", self.method)
        except cygrpc.ExecuteBatchError:
            if not self.is_over:
                _log.exception("a batch failed in [%s]", self.method)
        except Exception as error:
            _log.exception("Unexpected [%s] raised by [%s]", type(error).__name__, self.method)
            if not self.status_sent and not self.server.is_stopped:
                code = _UNKNOWN if self.code == _OK else self.code
                try:
                    await self.abort(code, f"Unexpected {type(error)}: {error}", self.trailing)
                except cygrpc.ExecuteBatchError:
                    _log.debug("Failed sending error status from server")

    async def _handle(self, *, exceeded: bool) -> None:
        handler = await self.server.handler(self.method, self.metadata)
        if handler is None:
            await self.abort(_UNIMPLEMENTED, "Method not found!", ())
            return
        if exceeded:
            await self.abort(_RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", ())
            return
        context = SimContext(self, handler.request_deserializer, handler.response_serializer)
        request: Any
        if handler.request_streaming:
            request = _Requests(context)
        else:
            raw = await self.read()
            if raw is None:
                return
            deserialize = handler.request_deserializer
            request = raw if deserialize is None else deserialize(raw)
        if handler.response_streaming:
            await self._stream_responses(
                handler.stream_stream or handler.unary_stream, request, context
            )
        else:
            await self._respond(
                handler.stream_unary or handler.unary_unary, request, context, handler
            )

    async def _respond(self, behaviour: Any, request: Any, context: Any, handler: Any) -> None:
        response = behaviour(request, context)
        if inspect.isawaitable(response):
            response = await response
        self.check()
        message = b""
        if self.code == _OK:
            serialize = handler.response_serializer
            message = response if serialize is None else serialize(response)
        await self.answer(message)

    async def _stream_responses(self, behaviour: Any, request: Any, context: Any) -> None:
        if inspect.iscoroutinefunction(behaviour):
            await behaviour(request, context)
        else:
            assert inspect.isasyncgenfunction(behaviour), "handlers are asynchronous"
            async for response in behaviour(request, context):
                self.check()
                await context.write(response)
        self.check()
        await self.answer(None)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            _log.error("[%s] failed: %r", self.method, task.exception())
        try:
            for callback in self.callbacks:
                callback()
        except Exception:
            _log.exception("Error in callback for method [%s]", self.method)
        # A handler that cancels itself sends no status, and its caller keeps waiting, as in Core.


class _Requests:
    """A request stream as an iterator, for handlers that iterate."""

    def __init__(self, context: SimContext) -> None:
        self._context = context
        self._messages: AsyncIterator[Any] | None = None

    async def _each(self) -> AsyncIterator[Any]:
        while (message := await self._context.read()) is not EOF:
            yield message

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._messages is None:
            self._messages = self._each()
        return self._messages

    async def __anext__(self) -> Any:
        return await self.__aiter__().__anext__()


class SimContext:
    """Replaces cygrpc's ServicerContext."""

    def __init__(self, rpc: Rpc, deserialize: Any, serialize: Any) -> None:
        self._rpc = rpc
        self._deserialize = deserialize
        self._serialize = serialize

    async def read(self) -> Any:
        self._rpc.check()
        message = await self._rpc.read()
        self._rpc.check()
        if message is None:
            return EOF
        return message if self._deserialize is None else self._deserialize(message)

    async def write(self, message: Any) -> None:
        self._rpc.check()
        await self._rpc.write(message if self._serialize is None else self._serialize(message))

    async def send_initial_metadata(self, metadata: Any) -> None:
        self._rpc.check()
        if self._rpc.metadata_sent:
            raise cygrpc.UsageError("Send initial metadata failed: already sent")
        await self._rpc.send_initial(tuple(metadatum(*each) for each in metadata))
        await asyncio.sleep(0)

    async def abort(self, code: StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        rpc = self._rpc
        if rpc.abort_error is not None:
            raise cygrpc.UsageError("Abort already called!")
        rpc.abort_error = aio.AbortError("Locally aborted.")
        trailing = tuple(metadatum(*each) for each in trailing_metadata)
        if trailing or not rpc.trailing:
            rpc.trailing = trailing
        if details or not rpc.details:
            rpc.details = details
        rpc.code, rpc.code_given = _number(code), code
        await rpc.abort(rpc.code, rpc.details, rpc.trailing)
        raise rpc.abort_error

    async def abort_with_status(self, status: grpc.Status) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata)

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._rpc.trailing = tuple(metadatum(*each) for each in metadata)

    def trailing_metadata(self) -> Any:
        return self._rpc.trailing

    def invocation_metadata(self) -> Any:
        return self._rpc.metadata

    def set_code(self, code: Any) -> None:
        self._rpc.code, self._rpc.code_given = _number(code), code

    def code(self) -> Any:
        return self._rpc.code_given

    def set_details(self, details: str) -> None:
        self._rpc.details = details

    def details(self) -> str:
        return self._rpc.details

    def set_compression(self, compression: Any) -> None:
        if self._rpc.metadata_sent:
            raise RuntimeError(
                "Compression setting must be specified before sending initial metadata"
            )

    def disable_next_message_compression(self) -> None:
        """Do nothing: no message is compressed."""

    def peer(self) -> str:
        connection = self._rpc.stream.connection
        host = connection.ends[CLIENT].process.host
        return f"ipv4:{connection.network.ip(host)}:{connection.port}"

    def peer_identities(self) -> Any:
        return None

    def peer_identity_key(self) -> Any:
        return None

    def auth_context(self) -> dict[str, Any]:
        return {}

    def time_remaining(self) -> float | None:
        deadline = self._rpc.deadline
        return None if deadline is None else max(deadline - time.time(), 0)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._rpc.callbacks.append(functools.partial(callback, self))

    def done(self) -> bool:
        return self._rpc.status_sent

    def cancelled(self) -> bool:
        return self._rpc.code == _CANCELLED


def _number(code: Any) -> int:
    """A status code's number on the wire; UNKNOWN for a number that gRPC does not define."""
    if isinstance(code, StatusCode):
        return code.value[0]
    return code if code in _NUMBERS else _UNKNOWN
