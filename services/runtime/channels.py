"""Channels to other services."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from seqgate.owners import FollowingChannel
from seqgate.telemetry import traced_channel
from seqgate.tls import TLS, secure_channel
from services.runtime import deadline
from services.runtime.calls import measured_channel
from services.runtime.config import CallerConfig
from services.runtime.metrics import OFF, Metrics
from services.runtime.windows import WINDOWS

log = structlog.get_logger()

UNARY_TIMEOUT_S: Final = 5.0
"""How long a unary call to a peer may take when its caller sets no deadline."""

MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest answer taken from a peer; peers bound what they send."""


class _PassDeadline(aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self,
        continuation: Callable[..., Any],
        client_call_details: aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        own = client_call_details.timeout
        details = aio.ClientCallDetails(
            method=client_call_details.method,
            timeout=deadline.remaining_s(UNARY_TIMEOUT_S if own is None else own),
            metadata=client_call_details.metadata,
            credentials=client_call_details.credentials,
            wait_for_ready=client_call_details.wait_for_ready,
        )
        return await continuation(details, request)


def open_peer(
    target: str, *, keepalive_s: float, as_caller: CallerConfig | None = None
) -> aio.Channel:
    """A channel to a peer: round-robin over the addresses of `target` (dns:///name:port), quick to
    connect again, and with the caller's deadline on every unary call. Whoever opens it closes it.

    Args:
        as_caller: names the certificate and the token to show; None: neither, and no TLS.

    Raises:
        OSError, ValueError: a file cannot be used, or a token would be sent in the clear.
    """
    options = [
        ("grpc.lb_policy_name", "round_robin"),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 5_000),  # how long connecting may take, not a wait
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_s * 1000)),
        # Or a ping is given a minute, whatever stands above.
        ("grpc.http2.ping_timeout_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no bound: or it stays silent
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        *WINDOWS,
    ]
    interceptors = [_PassDeadline()]
    tls = None if as_caller is None else _tls(as_caller)
    token = None if as_caller is None else as_caller.peer_token_file
    if tls is None and token is None:
        plain = aio.insecure_channel(target, options=options, interceptors=interceptors)
        return traced_channel(plain, target)

    def told(why: str) -> None:
        if why:
            log.warning("files for calls cannot be used: what was there before counts", error=why)
        else:
            log.info("files for calls read", target=target)

    secure = secure_channel(
        target, tls=tls, token=token, options=options, interceptors=interceptors, on_change=told
    )
    return traced_channel(secure, target)


def _tls(caller: CallerConfig) -> TLS | None:
    if caller.peer_ca_file is None:
        return None
    return TLS(caller.peer_ca_file, caller.peer_certificate_file, caller.peer_key_file)


@asynccontextmanager
async def peer_channel(
    target: str,
    *,
    keepalive_s: float,
    as_caller: CallerConfig | None = None,
    metrics: Metrics = OFF,
) -> AsyncIterator[aio.Channel]:
    """As open_peer; closed at the end. Its calls are told in `metrics`."""
    async with open_peer(target, keepalive_s=keepalive_s, as_caller=as_caller) as channel:
        yield measured_channel(channel, metrics)


@asynccontextmanager
async def following_channel(
    target: str,
    *,
    keepalive_s: float,
    as_caller: CallerConfig | None = None,
    metrics: Metrics = OFF,
) -> AsyncIterator[Any]:
    """Channels to the instances of a peer: each call goes to the one that has its topic."""

    def open_measured(address: str) -> aio.Channel:
        channel = open_peer(address, keepalive_s=keepalive_s, as_caller=as_caller)
        return measured_channel(channel, metrics)

    async with FollowingChannel(target, open_measured) as channel:
        yield channel


async def check_health(channel: aio.Channel | FollowingChannel, service: str = "") -> None:
    """Return if the peer says that it is serving; raise otherwise."""
    stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[arg-type]
    async with asyncio.timeout(UNARY_TIMEOUT_S):
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise ConnectionError(f"{service or 'peer'} is not serving")
