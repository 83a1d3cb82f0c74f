"""Channels to other services."""

import asyncio
from functools import partial
from typing import Final

import structlog
from grpc import aio
from grpc_health.v1 import health_pb2

from seqgate.channels import Call, Hook, channel_options, open_channel
from seqgate.owners import FollowingChannel
from seqgate.services.runtime import deadline
from seqgate.services.runtime.calls import client_calls
from seqgate.services.runtime.config import CallerConfig
from seqgate.services.runtime.health import HEALTH, VERSION
from seqgate.services.runtime.metrics import OFF, Metrics
from seqgate.services.runtime.windows import WINDOWS
from seqgate.telemetry.calls import Tracing
from seqgate.tls import TLS

log = structlog.get_logger()

UNARY_TIMEOUT_S: Final = 5.0
"""The deadline of a unary call to a peer whose caller sets none."""

MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest message exchanged with a peer; peers have lower limits."""


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
) -> aio.Channel:
    """A channel to a peer. Unary calls on it inherit the deadline of the call being served.

    Args:
        target: host:port, or dns:///name:port to balance over all addresses of the name.
        as_caller: the settings with the certificate and token files to use; None: no TLS, no token.
        metrics: measures the calls.

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

    return open_channel(
        target,
        options=[*options, *WINDOWS],
        hooks=hooks,
        tls=None if as_caller is None else _tls(as_caller),
        token=None if as_caller is None else as_caller.peer_token_file,
        on_change=on_change,
    )


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
