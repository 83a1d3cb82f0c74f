"""grpc.aio's channels over the simulated network.

The classes of grpc.aio itself are kept: multicallables, calls, interceptors. Their foundation in
Cython and Core, `cygrpc.AioChannel` and its calls, is reimplemented here over streams (stream.py),
with the same behaviour.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from grpc import StatusCode, aio
from grpc._cython import cygrpc
from grpc.aio._channel import Channel

from tests.simulation.ground.network import CLIENT, Connection, Network
from tests.simulation.ground.process import Process
from tests.simulation.ground.stream import FRAME_BYTES, Stream

if TYPE_CHECKING:
    from tests.simulation.ground.loop import VirtualLoop

RECEIVE_BYTES_MAX: Final = 4 * 1024 * 1024
"""gRPC's default limit on received messages."""

CONNECT_TIMEOUT_S: Final = 20.0
BACKOFF_FIRST_S: Final = 1.0
BACKOFF_FACTOR: Final = 1.6
BACKOFF_JITTER: Final = 0.2
BACKOFF_MAX_S: Final = 120.0
RESOLVE_AGAIN_S: Final = 30.0
"""Core's defaults, used unless a channel's options override them."""

EOF: Final = aio.EOF

_OK: Final = StatusCode.OK.value[0]
_CANCELLED: Final = StatusCode.CANCELLED.value[0]
_DEADLINE_EXCEEDED: Final = StatusCode.DEADLINE_EXCEEDED.value[0]
_RESOURCE_EXHAUSTED: Final = StatusCode.RESOURCE_EXHAUSTED.value[0]
_INTERNAL: Final = StatusCode.INTERNAL.value[0]
_UNAVAILABLE: Final = StatusCode.UNAVAILABLE.value[0]

IDLE, CONNECTING, READY, TRANSIENT_FAILURE, SHUTDOWN = range(5)
"""A channel's states, numbered as in Core."""


def metadatum(key: str, value: str | bytes) -> Any:
    """A metadata pair as Cython returns it."""
    return cygrpc._Metadatum(key, value)


class SimChannel(Channel):
    """An aio.Channel that belongs to the process that makes it."""

    def __init__(
        self,
        network: Network,
        target: str,
        options: Sequence[tuple[str, Any]] | None,
        interceptors: Sequence[aio.ClientInterceptor] | None,
    ) -> None:
        self._unary_unary_interceptors: list[Any] = []
        self._unary_stream_interceptors: list[Any] = []
        self._stream_unary_interceptors: list[Any] = []
        self._stream_stream_interceptors: list[Any] = []
        for interceptor in interceptors or ():
            if isinstance(interceptor, aio.UnaryUnaryClientInterceptor):
                self._unary_unary_interceptors.append(interceptor)
            elif isinstance(interceptor, aio.UnaryStreamClientInterceptor):
                self._unary_stream_interceptors.append(interceptor)
            elif isinstance(interceptor, aio.StreamUnaryClientInterceptor):
                self._stream_unary_interceptors.append(interceptor)
            elif isinstance(interceptor, aio.StreamStreamClientInterceptor):
                self._stream_stream_interceptors.append(interceptor)
            else:
                raise ValueError(f"{interceptor!r} is no client's interceptor")
        self._loop = network.loop
        self._channel: Any = SimCore(network, target, dict(options or ()))
        self._active_calls: Any = _Calls()

    def _register_call(self, call: Any) -> None:
        self._active_calls.add(call)
        call.add_done_callback(self._active_calls.discard)


class _Calls:
    """A weak set in insertion order."""

    def __init__(self) -> None:
        self._calls: dict[int, ref[Any]] = {}

    def add(self, call: Any) -> None:
        key = id(call)
        self._calls[key] = ref(call, lambda _: self._calls.pop(key, None))

    def discard(self, call: Any) -> None:
        self._calls.pop(id(call), None)

    def __iter__(self) -> Any:
        return iter([call for each in list(self._calls.values()) if (call := each()) is not None])

    def clear(self) -> None:
        self._calls.clear()


class _Subchannel:
    """A channel's connection to one address, or its attempts to connect."""

    def __init__(self, core: SimCore, address: str) -> None:
        self.address = address
        self.state = IDLE
        self.connection: Connection | None = None
        self.has_failed = False
        """It failed since it was last ready: attempts to reconnect count as TRANSIENT_FAILURE."""
        self._core = core
        self._dial: Any = None
        self._timer: Any = None
        self._backoff_s = core.backoff_first_s
        self._began_at = 0.0

    def connect(self) -> None:
        core = self._core
        self._timer = None
        self.state = CONNECTING
        self._began_at = core.network.loop.now
        self._dial = core.network.dial(
            core.process, self.address, core.options, core.connect_timeout_s, self._made, self._lost
        )

    def _made(self, connection: Connection) -> None:
        self._dial = None
        self.state = READY
        self.has_failed = False
        self._backoff_s = self._core.backoff_first_s
        self.connection = connection
        connection.ends[CLIENT].closed = self._closed
        self._core.changed()

    def _lost(self, reason: str) -> None:
        """The attempt to connect failed."""
        core = self._core
        self._dial = None
        self.state = TRANSIENT_FAILURE
        self.has_failed = True
        core.failure = f"failed to connect to all addresses; last error: {self.address}: {reason}"
        jitter = 1 + BACKOFF_JITTER * (2 * core.network.random.random() - 1)
        at = self._began_at + self._backoff_s * jitter
        self._backoff_s = min(self._backoff_s * BACKOFF_FACTOR, core.backoff_max_s)
        self._timer = core.network.loop.schedule(
            max(at, core.network.loop.now), core.process, self._again
        )
        core.resolve_again()
        core.changed()

    def _again(self) -> None:
        self.connect()
        self._core.changed()

    def _closed(self, connection: Connection, reason: str) -> None:
        """The connection closed: fail its calls."""
        if self.connection is connection:
            self.went_away()
        for stream in list(connection.streams):
            if stream.call is not None:
                stream.call.broken(reason)
        connection.streams.clear()
        self._core.leave(connection)

    def went_away(self) -> None:
        """Reconnect. Open calls stay on the old connection; new ones do not use it."""
        if self.connection is not None and self.connection.ends[CLIENT].is_open:
            self._core.leaving[self.connection] = None
        self.connection = None
        self.connect()
        self._core.resolve_again()
        self._core.changed()

    def end(self) -> None:
        """Close: the channel was closed, or no longer resolves to this address."""
        self.state = SHUTDOWN
        if self._dial is not None:
            self._dial.cancel()
        if self._timer is not None:
            self._timer.cancel()
        connection, self.connection = self.connection, None
        if connection is not None:
            self._core.leaving[connection] = None
            self._core.leave(connection)


class SimCore:
    """Replaces cygrpc.AioChannel."""

    def __init__(self, network: Network, target: str, options: Mapping[str, Any]) -> None:
        self.network: Final = network
        self.loop: Final[VirtualLoop] = network.loop
        self.process: Final[Process] = network.loop.process
        self.target: Final = target
        self.options: Final = options
        self.failure = "no address"
        self.connect_timeout_s = _seconds(
            options, "grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_S
        )
        self.backoff_first_s = _seconds(
            options, "grpc.initial_reconnect_backoff_ms", BACKOFF_FIRST_S
        )
        self.backoff_max_s = _seconds(options, "grpc.max_reconnect_backoff_ms", BACKOFF_MAX_S)
        self.receive_bytes_max = options.get("grpc.max_receive_message_length", RECEIVE_BYTES_MAX)
        self.send_bytes_max = options.get("grpc.max_send_message_length", -1)
        self.leaving: dict[Connection, None] = {}
        """Connections that finish their open calls and accept no new ones."""
        self._resolve_s = _seconds(
            options, "grpc.dns_min_time_between_resolutions_ms", RESOLVE_AGAIN_S
        )
        self._resolved_at = 0.0
        self._resolving: Any = None
        self._subchannels: dict[str, _Subchannel] = {}
        self._is_idle = True
        self._is_closing = False
        self._is_closed = False
        self._turn = 0
        self._queue: dict[SimCall, None] = {}
        self._watchers: list[tuple[int, Any]] = []

    # ---- the interface to grpc.aio

    def closed(self) -> bool:
        return self._is_closed

    def closing(self) -> None:
        self._is_closing = True

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for subchannel in self._subchannels.values():
            subchannel.end()
        for call in list(self._queue):
            call.failed(_UNAVAILABLE, "Channel closed")
        if self._resolving is not None:
            self._resolving.cancel()
        self._tell_watchers()

    def call(
        self,
        method: bytes,
        deadline: float | None,
        credentials: Any,
        wait_for_ready: bool | None,
        registered_call_handle: int = 0,
    ) -> SimCall:
        del credentials, registered_call_handle
        if self._is_closed:
            raise cygrpc.UsageError("Channel is closed.")
        if self._is_closing:
            raise cygrpc.UsageError("Channel is closing.")
        return SimCall(self, method.decode(), deadline, wait_for_ready=bool(wait_for_ready))

    def get_registered_call_handle(self, method: bytes) -> int:
        return 0

    def check_connectivity_state(self, try_to_connect: bool) -> int:
        if self._is_closed:
            return SHUTDOWN
        if try_to_connect:
            self._wake()
        return self.state

    async def watch_connectivity_state(self, last: int, deadline: float | None) -> bool:
        del deadline
        if self._is_closed:
            raise cygrpc.UsageError("Channel is closed.")
        if self.state != last:
            return True
        watcher = self.loop.create_future()
        self._watchers.append((last, watcher))
        await watcher
        return True

    # ---- connecting

    @property
    def state(self) -> int:
        """The channel's state, aggregated over its subchannels."""
        if self._is_closed:
            return SHUTDOWN
        if self._is_idle:
            return IDLE
        subchannels = self._subchannels.values()
        if any(each.state == READY for each in subchannels):
            return READY
        if any(not each.has_failed for each in subchannels):
            return CONNECTING
        return TRANSIENT_FAILURE

    def _wake(self) -> None:
        if self._is_idle and not self._is_closed:
            self._is_idle = False
            self._resolve()
            self.changed()

    def _resolve(self) -> None:
        self._resolving = None
        self._resolved_at = self.network.loop.now
        addresses = self.network.resolve(self.process, self.target)
        for address in [each for each in self._subchannels if each not in addresses]:
            self._subchannels.pop(address).end()
        for address in addresses:
            if address not in self._subchannels:
                subchannel = self._subchannels[address] = _Subchannel(self, address)
                subchannel.connect()
        if not addresses:
            self.failure = f"DNS resolution failed for {self.target}"

    def resolve_again(self) -> None:
        """Schedule a new resolution, no sooner than the minimum interval allows."""
        if self._resolving is None and not self._is_closed:
            at = max(self._resolved_at + self._resolve_s, self.network.loop.now)
            self._resolving = self.network.loop.schedule(at, self.process, self._resolved_again)

    def _resolved_again(self) -> None:
        self._resolve()
        self.changed()

    def changed(self) -> None:
        """Act on a subchannel's new state."""
        state = self.state
        if state == READY:
            for call in list(self._queue):
                self._queue.pop(call, None)
                call.attach(self._pick())
        elif state == TRANSIENT_FAILURE:
            for call in list(self._queue):
                if not call.waits_for_ready:
                    self._queue.pop(call, None)
                    call.failed(_UNAVAILABLE, self.failure)
        self._tell_watchers()

    def _tell_watchers(self) -> None:
        state = self.state
        for last, watcher in list(self._watchers):
            if state != last:
                self._watchers.remove((last, watcher))
                if not watcher.done():
                    watcher.set_result(None)

    def _pick(self) -> Connection:
        ready = [
            each.connection for each in self._subchannels.values() if each.connection is not None
        ]
        if self.options.get("grpc.lb_policy_name") != "round_robin":
            return ready[0]
        self._turn += 1
        return ready[self._turn % len(ready)]

    def begin(self, call: SimCall) -> None:
        """Start a call."""
        if self._is_closed:
            call.failed(_UNAVAILABLE, "Channel closed")
            return
        self._wake()
        state = self.state
        if state == READY:
            call.attach(self._pick())
        elif state == TRANSIENT_FAILURE and not call.waits_for_ready:
            call.failed(_UNAVAILABLE, self.failure)
        else:
            self._queue[call] = None

    def over(self, call: SimCall) -> None:
        """Remove an ended call."""
        self._queue.pop(call, None)
        if call.stream is not None:
            connection = call.stream.connection
            connection.streams.pop(call.stream, None)
            self.leave(connection)

    def leave(self, connection: Connection) -> None:
        """Close a connection that accepts no calls, once its last one has ended."""
        if connection in self.leaving and not connection.streams:
            del self.leaving[connection]
            connection.close(CLIENT, "Socket closed", in_order=True)

    def going_away(self, connection: Connection) -> None:
        """The server sent GOAWAY on a connection."""
        for subchannel in self._subchannels.values():
            if subchannel.connection is connection:
                subchannel.went_away()
        self.leave(connection)


def _seconds(options: Mapping[str, Any], name: str, otherwise: float) -> float:
    value = options.get(name)
    return otherwise if value is None else value / 1000


class SimCall:
    """Replaces cygrpc's call, on the client's side."""

    def __init__(
        self, core: SimCore, method: str, deadline: float | None, *, wait_for_ready: bool
    ) -> None:
        self.stream: Stream | None = None
        self.waits_for_ready = wait_for_ready
        self._core = core
        self._loop = core.loop
        self._method = method
        self._deadline = deadline
        self._timer: Any = None
        self._initial_metadata: Any = None
        self._status: Any = None
        self._is_locally_cancelled = False
        self._done_callbacks: list[Callable[[], object]] = []
        self._waiters: list[Any] = []
        """Futures that wait for any change; each waiter checks its condition again."""
        self._inbox: deque[tuple[bytes, int]] = deque()
        self._reader: Any = None
        self._writer: Any = None
        self._final: Any = None
        self._half_closed = False
        self._is_unary = False
        self._metadata: tuple[Any, ...] = ()
        self._first: bytes | None = None
        self._response: bytes | None = None

    def __repr__(self) -> str:
        return f"<SimCall {self._method}>"

    # ---- the interface to grpc.aio

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        if self._status is not None:
            callback()
        else:
            self._done_callbacks.append(callback)

    def time_remaining(self) -> float | None:
        if self._deadline is None:
            return None
        return max(0, self._deadline - time.time())

    def cancel(self, details: str) -> None:
        self._is_locally_cancelled = True
        self._end(_CANCELLED, details, None, tell=True)

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self._status is not None and self._status.code() == _CANCELLED

    def is_ok(self) -> bool:
        return self._status is not None and self._status.code() == _OK

    def is_locally_cancelled(self) -> bool:
        return self._is_locally_cancelled

    def set_internal_error(self, error: str) -> None:
        self._set_status(
            cygrpc.AioRpcStatus(_INTERNAL, "Internal error from Core", (), error),
        )

    async def status(self) -> Any:
        while self._status is None:
            await self._change()
        return self._status

    async def initial_metadata(self) -> Any:
        while self._initial_metadata is None:
            await self._change()
        return self._initial_metadata

    async def unary_unary(
        self, request: bytes, metadata: tuple[Any, ...], context: Any = None
    ) -> bytes | None:
        self._is_unary = True
        self._begin(metadata, request)
        await self.status()
        return self._response

    async def initiate_unary_stream(
        self, request: bytes, metadata: tuple[Any, ...], context: Any = None
    ) -> None:
        self._begin(metadata, request)
        await self.initial_metadata()

    async def stream_unary(
        self, metadata: tuple[Any, ...], observer: Callable[[], object], context: Any = None
    ) -> bytes | None:
        self._is_unary = True
        await self._begin_stream(metadata, observer)
        await self.status()
        return self._response

    async def initiate_stream_stream(
        self, metadata: tuple[Any, ...], observer: Callable[[], object], context: Any = None
    ) -> None:
        await self._begin_stream(metadata, observer)

    async def _begin_stream(
        self, metadata: tuple[Any, ...], observer: Callable[[], object]
    ) -> None:
        self._begin(metadata, None)
        while self.stream is None and self._status is None:
            await self._change()
        if self._status is None:
            await asyncio.sleep(0)
        observer()
        await self.initial_metadata()

    async def receive_serialized_message(self) -> Any:
        if self._inbox:
            message, end = self._inbox.popleft()
            assert self.stream is not None
            self.stream.down.consumed(end)
            self._look_for_the_end()
            await asyncio.sleep(0)
            return message
        if self._status is not None or self._reader is not None or self._final is not None:
            await asyncio.sleep(0)
            return EOF
        self._reader = self._loop.create_future()
        if self.stream is not None:
            self.stream.down.awaited()
        return await self._reader

    async def send_serialized_message(self, message: bytes) -> None:
        if (
            self._status is not None
            or self._final is not None
            or self._writer is not None
            or self._half_closed
            or self.stream is None
        ):
            await asyncio.sleep(0)
            raise cygrpc.ExecuteBatchError("Failed grpc_call_start_batch")
        if 0 <= self._core.send_bytes_max < len(message):
            self._end(
                _RESOURCE_EXHAUSTED,
                f"CLIENT: Sent message larger than max ({len(message)} vs. "
                f"{self._core.send_bytes_max})",
                None,
                tell=True,
            )
            raise cygrpc.ExecuteBatchError("Failed execute_batch")
        if self.stream.up.message(message, self._written):
            await asyncio.sleep(0)
            return
        self._writer = self._loop.create_future()
        await self._writer

    async def send_receive_close(self) -> None:
        self._half_closed = True
        if self._status is None and self._final is None and self.stream is not None:
            self.stream.up.frame(FRAME_BYTES, _half_closed, self.stream)
        await asyncio.sleep(0)

    # ---- starting

    def _begin(self, metadata: tuple[Any, ...], first: bytes | None) -> None:
        if self._status is not None:
            return
        self._metadata, self._first = metadata, first
        core = self._core
        if first is not None and 0 <= core.send_bytes_max < len(first):
            self.failed(
                _RESOURCE_EXHAUSTED,
                f"CLIENT: Sent message larger than max ({len(first)} vs. {core.send_bytes_max})",
            )
            return
        if self._deadline is not None:
            left_s = self._deadline - time.time()
            self._timer = self._loop.call_later(max(left_s, 0), self._too_late)
        core.begin(self)

    def attach(self, connection: Connection) -> None:
        """Start the call on a connection."""
        if self._status is not None:
            return
        stream = self.stream = Stream(connection, self)
        connection.streams[stream] = None
        stream.down.receive = self._message
        stream.down.is_awaited = self._reader is not None
        left_s = None if self._deadline is None else self._deadline - time.time()
        size = FRAME_BYTES + (0 if self._first is None else len(self._first))
        request = self._method, self._metadata, left_s, self._first
        link = connection.links[CLIENT]
        stream.up.frame(size, _requested, stream, *request)
        if link.duplicates and self._is_unary and self._first is not None:
            network = connection.network
            if network.random.random() < link.duplicates:
                network.counts["duplicates"] += 1
                at = network.loop.now + link.repeated(network.random)
                network.loop.schedule(at, self._core.process, _repeated, connection, request)
        self._first = None
        self._changed()

    # ---- received frames

    def initial(self, metadata: tuple[Any, ...]) -> None:
        """The server's initial metadata."""
        if self._status is None and self._initial_metadata is None:
            self._initial_metadata = metadata
            self._changed()

    def _message(self, message: bytes, end: int) -> None:
        if self._status is not None:
            return
        if 0 <= self._core.receive_bytes_max < len(message):
            self._too_large(message)
        elif self._reader is not None and not self._inbox:
            reader, self._reader = self._reader, None
            assert self.stream is not None
            self.stream.down.consumed(end)
            if not reader.done():
                reader.set_result(message)
        else:
            self._inbox.append((message, end))

    def final(
        self,
        initial: tuple[Any, ...] | None,
        message: bytes | None,
        code: int,
        details: str,
        trailing: tuple[Any, ...],
    ) -> None:
        """The server's status, with the response of a unary call."""
        if self._status is not None:
            return
        if message is not None and code == _OK:
            if 0 <= self._core.receive_bytes_max < len(message):
                self._too_large(message)
                return
            self._response = message
        if initial is not None:
            self.initial(initial)
        self._final = code, details, trailing
        self._fail_writer()
        self._look_for_the_end()

    def _look_for_the_end(self) -> None:
        if self._final is not None and not self._inbox and self._status is None:
            code, details, trailing = self._final
            self._end(code, details, trailing)

    def broken(self, reason: str) -> None:
        """The connection closed."""
        self.failed(_UNAVAILABLE, reason)

    def failed(self, code: int, details: str) -> None:
        """End the call with an error that is not the server's."""
        if self._status is None:
            self._end(code, details, ())

    def _too_large(self, message: bytes) -> None:
        self._end(
            _RESOURCE_EXHAUSTED,
            f"CLIENT: Received message larger than max ({len(message)} vs. "
            f"{self._core.receive_bytes_max})",
            (),
            tell=True,
        )

    def _too_late(self) -> None:
        self._timer = None
        if self._status is None:
            self._end(_DEADLINE_EXCEEDED, "Deadline Exceeded", (), tell=True)

    # ---- ending

    def _end(self, code: int, details: str, trailing: Any, *, tell: bool = False) -> None:
        stream = self.stream
        if stream is not None:
            stream.up.drop()
            if tell:
                stream.up.frame(FRAME_BYTES, _cancelled, stream)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._inbox.clear()
        self._fail_writer()
        self._set_status(cygrpc.AioRpcStatus(code, details, trailing, details or None))
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(EOF)
        self._core.over(self)

    def _set_status(self, status: Any) -> None:
        self._status = status
        if self._initial_metadata is None:
            self._initial_metadata = ()
        self._changed()
        callbacks, self._done_callbacks = self._done_callbacks, []
        for callback in callbacks:
            callback()

    def _written(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None and not writer.done():
            writer.set_result(None)

    def _fail_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None and not writer.done():
            writer.set_exception(cygrpc.ExecuteBatchError("Failed execute_batch"))

    def _change(self) -> Any:
        future = self._loop.create_future()
        self._waiters.append(future)
        return future

    def _changed(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _repeated(connection: Connection, request: tuple[Any, ...]) -> None:
    """Send a request a second time, as a proxy may. The answer is discarded."""
    ghost = Stream(connection, None)
    ghost.up.frame(FRAME_BYTES, _requested, ghost, *request)


# ---- received by the server


def _requested(
    stream: Stream,
    method: str,
    metadata: tuple[Any, ...],
    left_s: float | None,
    first: bytes | None,
) -> None:
    server: Any = stream.connection.server
    server.requested(stream, method, metadata, left_s, first)


def _half_closed(stream: Stream) -> None:
    if stream.rpc is not None:
        stream.rpc.half_closed()


def _cancelled(stream: Stream) -> None:
    if stream.rpc is not None:
        stream.rpc.cancelled_by_peer()
