"""The channel to a service, and what every call on it shares."""

import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, TypeVar

from grpc import aio

from seqgate.client._status import error_of_call
from seqgate.telemetry import traced_channel
from seqgate.tls import TLS, BearerToken, secure_channel

T = TypeVar("T")

_log: Final = logging.getLogger("seqgate.client")

MESSAGE_BYTES_MAX: Final = 256 * 1024 * 1024
"""The largest gRPC message that is taken from a service; services bound what they send."""

CALL_TIMEOUT_S: Final = 30.0
"""How long a unary call may take."""

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
"""How long a client waits before it connects again, doubling from the first to the longest."""

OPTIONS: Final[Sequence[tuple[str, Any]]] = (
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # how long connecting may take, not a wait
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # or a ping is given a minute, whatever stands above
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # no bound: or a silent connection stays silent
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)


@dataclass(frozen=True, slots=True)
class Security:
    """How a client connects, and shows who it is."""

    tls: TLS | None = None
    token: BearerToken | None = None


PLAIN: Final = Security()
"""Without either."""


def open_channel(target: str, security: Security = PLAIN) -> aio.Channel:
    """A channel that is quick to connect again, and notices a dead peer within 15 seconds.

    Raises:
        OSError, ValueError: a file cannot be used, or a token would be sent to another machine
            without TLS.
    """
    tls, token = security.tls, security.token
    if tls is None and token is None:
        return traced_channel(aio.insecure_channel(target, options=list(OPTIONS)), target)
    secure = secure_channel(target, tls=tls, token=token, options=list(OPTIONS), on_change=_told)
    return traced_channel(secure, target)


def _told(why: str) -> None:
    if why:
        _log.warning("new files cannot be used, those from before count on: %s", why)


async def translated(call: Awaitable[T]) -> T:
    """The call's answer, or its failure as an exception of ours."""
    try:
        return await call
    except aio.AioRpcError as error:
        raise error_of_call(error) from error


class Backoff:
    """Growing, jittered waits."""

    def __init__(self) -> None:
        self._random = Random()
        self._next_s = BACKOFF_FIRST_S

    def reset(self) -> None:
        """Start again from the shortest."""
        self._next_s = BACKOFF_FIRST_S

    def next_s(self, at_least: float | None = None) -> float:
        """How long to wait now."""
        wait_s = max(self._next_s * (0.5 + self._random.random() / 2), at_least or 0.0)
        self._next_s = min(self._next_s * 2, BACKOFF_MAX_S)
        return wait_s
