"""Channels to other services.

A channel makes a limited number of unary calls at a time (limiter.py). A call that cannot be sent
in time fails with RESOURCE_EXHAUSTED, and nothing was done.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import structlog
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2

from seqgate.channels import Call, Hook, Method, OuterChannel, channel_options, open_channel
from seqgate.owners import FollowingChannel
from seqgate.services.runtime import deadline
from seqgate.services.runtime.calls import client_calls
from seqgate.services.runtime.config import CallerConfig
from seqgate.services.runtime.health import HEALTH, VERSION
from seqgate.services.runtime.limiter import Limiter, NotSent, Outcome
from seqgate.services.runtime.metrics import OFF, Metrics
from seqgate.services.runtime.windows import WINDOWS
from seqgate.status import decode_call
from seqgate.telemetry.calls import Tracing
from seqgate.tls import TLS

log = structlog.get_logger()

UNARY_TIMEOUT_S: Final = 5.0
"""The deadline of a unary call to a peer whose caller sets none."""

MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest message exchanged with a peer; peers have lower limits."""

CALLS_AT_ONCE: Final = 64
"""The most calls to a peer at a time, the exchanges on streams of dedup and filter included."""

LEASE: Final = "CursorLeaseService/RenewLease"
"""The end of the name of the method that must not wait behind others: a lease ends."""

HEALTH_CHECK: Final = "/grpc.health.v1.Health/"
"""The methods that are not limited: a busy peer must not look dead."""


def _pass_deadline(call: Call) -> None:
    if call.is_unary:
        call.timeout_s = deadline.remaining_s(
            UNARY_TIMEOUT_S if call.timeout_s is None else call.timeout_s
        )


def peer_channel(
    target: str,
    *,
    keepalive_s: float,
    as_caller: CallerConfig | None = None,
    metrics: Metrics = OFF,
    limiter: Limiter | None = None,
) -> aio.Channel:
    """A channel to a peer. Unary calls on it inherit the deadline of the call being served.

    Args:
        target: host:port, or dns:///name:port to balance over all addresses of the name.
        as_caller: the settings with the certificate and token files to use; None: no TLS, no token.
        metrics: measures the calls.
        limiter: shared with other calls to the peer; None: the channel's own.

    Raises:
        OSError, ValueError: a file cannot be used, or a token would be sent unencrypted to another
            machine.
    """
    hooks: list[Hook] = [Tracing(target), _pass_deadline]
    if metrics.is_on:
        hooks.append(client_calls(metrics))
    options = channel_options(
        keepalive_s=keepalive_s,
        keepalive_timeout_s=keepalive_s,
        message_bytes_max=MESSAGE_BYTES_MAX,
    )

    def on_change(error: str) -> None:
        if error:
            log.warning("TLS or token files rejected, keeping the previous ones", error=error)
        else:
            log.info("TLS and token files loaded", target=target)

    channel = open_channel(
        target,
        options=[*options, *WINDOWS],
        hooks=hooks,
        tls=None if as_caller is None else _tls(as_caller),
        token=None if as_caller is None else as_caller.peer_token_file,
        on_change=on_change,
    )
    return LimitedChannel(channel, limiter or Limiter(CALLS_AT_ONCE))


class LimitedChannel(OuterChannel):
    """A channel whose unary calls are limited: see the module. Such a call is a coroutine."""

    def __init__(self, channel: aio.Channel, limiter: Limiter) -> None:
        """Closing it closes `channel`."""
        self._channel = channel
        self._limiter = limiter

    def inner(self) -> aio.Channel:
        return self._channel

    def calling(self, method: Method) -> Callable[..., Any]:
        made = method.on(self._channel)
        if method.style != "unary_unary" or method.path.startswith(HEALTH_CHECK):
            return made
        is_urgent = method.path.endswith(LEASE)

        async def limited(request: Any, *, timeout: float | None = None, **how: Any) -> Any:
            limit_s = UNARY_TIMEOUT_S if timeout is None else timeout
            try:
                async with self._limiter.slot(limit_s, urgent=is_urgent) as slot:
                    is_short = deadline.remaining_s(limit_s) != limit_s
                    try:
                        return await made(request, timeout=limit_s, **how)
                    except aio.AioRpcError as error:
                        slot.outcome = _outcome(error, is_short=is_short)
                        raise
            except NotSent as why:
                none = aio.Metadata()
                code = StatusCode.RESOURCE_EXHAUSTED
                raise aio.AioRpcError(code, none, none, str(why)) from why

        return limited


_OVERLOAD: Final = frozenset({"", "SERVICE_BUSY", "STATE_UNAVAILABLE", "STORE_UNAVAILABLE"})
"""Reasons of a peer that is overloaded, or whose store does not answer; empty: it did not say."""


def _outcome(error: aio.AioRpcError, *, is_short: bool) -> Outcome:
    """What a failed call says about the peer. `is_short`: whether its time limit was below the
    usual one, since its caller's deadline was near."""
    match error.code():
        case StatusCode.DEADLINE_EXCEEDED:
            return Outcome.UNKNOWN if is_short else Outcome.FAILED
        case StatusCode.UNAVAILABLE | StatusCode.RESOURCE_EXHAUSTED:
            refusal = decode_call(error)
            if refusal.reason in _OVERLOAD and "larger than max" not in refusal.message:
                return Outcome.FAILED
    return Outcome.ANSWERED


def _tls(caller: CallerConfig) -> TLS | None:
    if caller.peer_ca_file is None:
        return None
    return TLS(caller.peer_ca_file, caller.peer_certificate_file, caller.peer_key_file)


def following_channel(
    target: str,
    *,
    keepalive_s: float,
    as_caller: CallerConfig | None = None,
    metrics: Metrics = OFF,
) -> FollowingChannel:
    """Like peer_channel, but each call goes to the instance of the peer that owns its topic."""
    opened = partial(peer_channel, keepalive_s=keepalive_s, as_caller=as_caller, metrics=metrics)
    return FollowingChannel(target, opened)


def health_check(
    channel: aio.Channel,
) -> aio.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]:
    """The method Check of grpc.health.v1.Health, typed: HealthStub declares no methods."""
    return channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )


async def list_health(channel: aio.Channel, timeout_s: float) -> tuple[str, dict[str, bool]]:
    """The version of a process, and for each name of its health whether it is serving.

    Raises:
        aio.AioRpcError: it did not answer.
    """
    call = channel.unary_unary(
        "/grpc.health.v1.Health/List",
        HEALTH.HealthListRequest.SerializeToString,
        HEALTH.HealthListResponse.FromString,
    )(HEALTH.HealthListRequest(), timeout=timeout_s)
    statuses = (await call).statuses
    version = dict(await call.trailing_metadata()).get(VERSION, "")
    serving = health_pb2.HealthCheckResponse.SERVING
    return str(version), {name: each.status == serving for name, each in statuses.items()}


async def check_health(channel: aio.Channel, service: str = "") -> None:
    """Return if the peer is serving.

    Raises:
        ConnectionError, aio.AioRpcError, TimeoutError: the peer is not serving, or did not answer.
    """
    async with asyncio.timeout(UNARY_TIMEOUT_S):
        reply = await health_check(channel)(health_pb2.HealthCheckRequest(service=service))
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise ConnectionError(f"{service or 'peer'} is not serving")
