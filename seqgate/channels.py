"""Channels with hooks, for asyncio and for threads.

    channel = open_channel("ledger:7702", options=options, hooks=[Tracing("ledger:7702")])

A hook runs before each call, may change the call's metadata and timeout, and may return a function
to run at the call's end. Tracing, metrics, deadlines and tokens are hooks rather than gRPC's client
interceptors, which put a queue between a stream and its writer, and never end the span of a call
that is cancelled in them (grpc.aio 1.85).

gRPC reads a client's certificate only when a channel is made. A `RenewedChannel` makes a new
channel when the files change: later calls use the new certificate, on a connection of its own, and
calls under way end on the old one.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import grpc
from grpc import StatusCode, aio

from seqgate.tls import TLS, BearerToken, TokenSource, channel_credentials, is_loopback
from seqgate.watched import OnChange, Watched

_log: Final = logging.getLogger("seqgate.client")

Option = tuple[str, Any]


@dataclass(slots=True)
class Call:
    """A call about to begin. Hooks may change `timeout_s` and `metadata`.

    Attributes:
        method: package.Service/Method.
        is_unary: whether it has one request and one response.
        timeout_s: None: no limit.
    """

    method: str
    is_unary: bool
    timeout_s: float | None
    metadata: tuple[tuple[str, str | bytes], ...]


class End(NamedTuple):
    """How a call ended.

    Attributes:
        error: why the call could not begin; None: it began.
    """

    code: StatusCode
    details: str = ""
    error: BaseException | None = None


OnEnd = Callable[[End], None]

Hook = Callable[[Call], OnEnd | None]
"""Called before each call; returns a function to call at the call's end, or None."""


RESOLUTION_MIN_MS: Final = 500
"""A name whose address failed is asked for again at most this much later, in milliseconds. gRPC's
default is 30 seconds: so long callers would miss a pod that was replaced."""


def channel_options(
    *, keepalive_s: float, keepalive_timeout_s: float, message_bytes_max: int
) -> list[Option]:
    """Options for a channel that balances over all addresses of a name, reconnects quickly, asks
    for the addresses again when one failed, and notices a dead peer within the sum of both times.
    """
    timeout_ms = int(keepalive_timeout_s * 1000)
    return [
        ("grpc.lb_policy_name", "round_robin"),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 5_000),  # an attempt's deadline, not a wait
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.dns_min_time_between_resolutions_ms", RESOLUTION_MIN_MS),
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),  # otherwise a ping has a minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit: detect a silent connection
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
    ]


def open_channel(
    target: str,
    *,
    options: Sequence[Option],
    hooks: Sequence[Hook] = (),
    tls: TLS | None = None,
    token: BearerToken | None = None,
    on_change: OnChange | None = None,
) -> aio.Channel:
    """A channel for asyncio.

    Args:
        on_change: see Watched; None: logs a warning.

    Raises:
        OSError, ValueError: a file is unusable, or a token would leave this machine unencrypted.
    """
    on_change = on_change or _warn
    if token is not None:
        if tls is None and not is_loopback(target):
            raise ValueError(
                f"a token is not sent to {target} without TLS: it could be intercepted"
            )
        hooks = [*hooks, _showing(TokenSource(token, on_change))]
    if tls is None:
        return HookedChannel(aio.insecure_channel(target, options=options), hooks)
    if tls.server_name is not None:
        options = [*options, ("grpc.ssl_target_name_override", tls.server_name)]
    credentials = Watched(tls.files, partial(channel_credentials, tls), on_change)
    make = partial(aio.secure_channel, target, options=options)
    return RenewedChannel(make, credentials.get, hooks)


def open_blocking_channel(
    target: str,
    *,
    options: Sequence[Option],
    hooks: Sequence[Hook] = (),
    tls: TLS | None = None,
    token_file: Path | None = None,
) -> grpc.Channel:
    """A channel for threads. Its certificate is read once, its token for each call.

    Raises:
        OSError, ValueError: a file is unusable, or a token would be sent without TLS.
    """
    if tls is None:
        if token_file is not None:
            raise ValueError(f"a token is not sent to {target} without TLS")
        return HookedBlockingChannel(grpc.insecure_channel(target, options), hooks)
    if token_file is not None:
        hooks = [*hooks, _showing(TokenSource(token_file, _warn))]
    channel = grpc.secure_channel(target, channel_credentials(tls), options)
    return HookedBlockingChannel(channel, hooks)


def _warn(error: str) -> None:
    if error:
        _log.warning("TLS or token files rejected, keeping the previous ones: %s", error)


def _showing(token: TokenSource) -> Hook:
    def hook(call: Call) -> None:
        call.metadata = (*call.metadata, token.metadata())

    return hook


# ---- shared by asyncio and threads


class Method(NamedTuple):
    """A method that a stub requests from a channel."""

    style: str
    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, channel: aio.Channel | grpc.Channel) -> Callable[..., Any]:
        multi: Callable[..., Any] = getattr(channel, self.style)(
            self.path, *self.args, **self.kwargs
        )
        return multi


def _style(style: str) -> Callable[..., Any]:
    def method(self: "Methods", path: str, *args: Any, **kwargs: Any) -> Any:
        return self.calling(Method(style, path, args, kwargs))

    return method


class Methods(ABC):
    """A channel's methods, whose callables `calling` makes."""

    unary_unary = _style("unary_unary")
    unary_stream = _style("unary_stream")
    stream_unary = _style("stream_unary")
    stream_stream = _style("stream_stream")

    @abstractmethod
    def calling(self, method: Method) -> Callable[..., Any]:
        """The callable of a method."""


def _with_hooks(
    hooks: Sequence[Hook],
    method: Method,
    timeout_s: float | None,
    metadata: Any,
    start: Callable[[Call], Any],
) -> tuple[Any, OnEnd | None]:
    """Start a call. Returns the result of `start`, and the function to call at the end, if any."""
    call = Call(
        method.path.removeprefix("/"),
        method.style == "unary_unary",
        timeout_s,
        tuple(metadata or ()),
    )
    pending: list[OnEnd] = []

    def end(how: End) -> None:
        while pending:
            pending.pop()(how)

    try:
        for hook in hooks:
            on_end = hook(call)
            if on_end is not None:
                pending.append(on_end)
        return start(call), end if pending else None
    except BaseException as error:
        end(_failure(error))
        raise


def _failure(error: BaseException) -> End:
    if isinstance(error, grpc.Call):
        return End(error.code(), error.details() or "")
    return End(StatusCode.UNKNOWN, error=error)


# ---- for asyncio


class OuterChannel(Methods, aio.Channel):
    """A channel that makes its calls on others. `inner` serves everything except calls."""

    @abstractmethod
    def inner(self) -> aio.Channel:
        """The channel in use now."""

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002 - gRPC's
        return self.inner().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.inner().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.inner().channel_ready()

    async def close(self, grace: float | None = None) -> None:
        await self.inner().close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *rest: object) -> None:
        await self.close()


class HookedChannel(OuterChannel):
    """See the module."""

    def __init__(self, channel: aio.Channel, hooks: Sequence[Hook]) -> None:
        """Closing it closes `channel`. Hooks run in this order."""
        self._channel = channel
        self._hooks = hooks

    def inner(self) -> aio.Channel:
        return self._channel

    def calling(self, method: Method) -> Callable[..., Any]:
        made_on = self.inner()
        multi = method.on(made_on)

        def start(
            *request: Any, timeout: float | None = None, metadata: Any = None, **rest: Any
        ) -> Any:
            nonlocal made_on, multi
            channel = self.inner()
            if channel is not made_on:
                made_on, multi = channel, method.on(channel)
            started, end = _with_hooks(
                self._hooks,
                method,
                timeout,
                metadata,
                lambda call: multi(
                    *request, timeout=call.timeout_s, metadata=call.metadata, **rest
                ),
            )
            if end is not None:
                started.add_done_callback(lambda call: end(_end_of(call)))
            return started

        return start


def _end_of(call: Any) -> End:
    try:
        return End(_now(call.code()), _now(call.details()) or "")
    except asyncio.CancelledError:
        return End(StatusCode.CANCELLED)
    except (grpc.RpcError, asyncio.InvalidStateError):
        return End(StatusCode.UNKNOWN)


def _now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as result:
        return result.value
    coroutine.close()
    raise asyncio.InvalidStateError


class _Generation:
    def __init__(self, channel: aio.Channel) -> None:
        self.channel = channel
        self.calls = 0


class RenewedChannel(HookedChannel):
    """See the module."""

    def __init__(
        self,
        make: Callable[[grpc.ChannelCredentials], aio.Channel],
        credentials: Callable[[], grpc.ChannelCredentials],
        hooks: Sequence[Hook],
    ) -> None:
        """`credentials` returns the same object until the files change."""
        self._make = make
        self._credentials = credentials
        self._made_with = credentials()
        self._generation = _Generation(make(self._made_with))
        self._old: set[_Generation] = set()
        self._closing: set[asyncio.Task[None]] = set()
        super().__init__(self._generation.channel, [*hooks, self._count])

    def inner(self) -> aio.Channel:
        credentials = self._credentials()
        if credentials is not self._made_with:
            old, self._made_with = self._generation, credentials
            self._generation = _Generation(self._make(credentials))
            self._old.add(old)
            self._close_unused(old)
        return self._generation.channel

    def _count(self, _: Call) -> OnEnd:
        generation = self._generation
        generation.calls += 1

        def ended(_: End) -> None:
            generation.calls -= 1
            self._close_unused(generation)

        return ended

    def _close_unused(self, generation: _Generation) -> None:
        if generation in self._old and generation.calls == 0:
            self._old.discard(generation)
            task = asyncio.ensure_future(generation.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self, grace: float | None = None) -> None:
        old, self._old = list(self._old), set()
        for generation in (self._generation, *old):
            await generation.channel.close(grace)
        if self._closing:
            await asyncio.wait(set(self._closing))


# ---- for threads


class OuterBlockingChannel(Methods, grpc.Channel):
    """A channel that makes its calls on others. `inner` serves everything except calls."""

    @abstractmethod
    def inner(self) -> grpc.Channel:
        """The channel in use now."""

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool = False,  # noqa: FBT001, FBT002 - gRPC's
    ) -> None:
        self.inner().subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        self.inner().unsubscribe(callback)

    def close(self) -> None:
        self.inner().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *rest: object) -> None:
        self.close()


class HookedBlockingChannel(OuterBlockingChannel):
    """See the module. A stream's hooks end in the thread that reads it, when it ends or is
    cancelled there: they are never called later."""

    def __init__(self, channel: grpc.Channel, hooks: Sequence[Hook]) -> None:
        """Closing it closes `channel`. Hooks run in this order."""
        self._channel = channel
        self._hooks = hooks

    def inner(self) -> grpc.Channel:
        return self._channel

    def calling(self, method: Method) -> Callable[..., Any]:
        multi = method.on(self._channel)
        is_stream = method.style.endswith("stream")

        def start(
            request: Any, timeout: float | None = None, metadata: Any = None, **rest: Any
        ) -> Any:
            started, end = _with_hooks(
                self._hooks,
                method,
                timeout,
                metadata,
                lambda call: multi(request, call.timeout_s, metadata=call.metadata, **rest),
            )
            if end is None:
                return started
            if is_stream:
                return _Responses(started, end)
            end(End(StatusCode.OK))
            return started

        return start


class _Responses:
    def __init__(self, call: Any, end: OnEnd) -> None:
        self._call = call
        self._end = end

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._call)
        except StopIteration:
            self._end(End(StatusCode.OK))
            raise
        except BaseException as error:
            self._end(_failure(error))
            raise

    def cancel(self) -> None:
        self._call.cancel()
        self._end(End(StatusCode.CANCELLED))
