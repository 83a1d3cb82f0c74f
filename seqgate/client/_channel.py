"""Channels to the services, with the limits and the backoff that every call shares."""

from collections.abc import Awaitable
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

from grpc import aio

from seqgate import channels
from seqgate.client._status import error_of_call
from seqgate.telemetry.calls import Tracing
from seqgate.tls import TLS, BearerToken

T = TypeVar("T")

MESSAGE_BYTES_MAX: Final = 256 * 1024 * 1024
"""The largest gRPC message that a client accepts, in bytes; services have lower limits."""

CALL_TIMEOUT_S: Final = 30.0

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
"""The first and the longest wait before a client reconnects. Each wait doubles."""

OPTIONS: Final = channels.channel_options(
    keepalive_s=10, keepalive_timeout_s=5, message_bytes_max=MESSAGE_BYTES_MAX
)


@dataclass(frozen=True, slots=True)
class Security:
    tls: TLS | None = None
    token: BearerToken | None = None


PLAIN: Final = Security()


def open_channel(target: str, security: Security = PLAIN) -> aio.Channel:
    """A channel that reconnects quickly, and notices a dead peer within 15 seconds.

    Raises:
        OSError, ValueError: a file is unusable, or a token would leave this machine unencrypted.
    """
    return channels.open_channel(
        target,
        options=OPTIONS,
        hooks=[Tracing(target)],
        tls=security.tls,
        token=security.token,
    )


async def translated(call: Awaitable[T]) -> T:
    """Await a call's response. Raises SeqgateError if it fails."""
    try:
        return await call
    except aio.AioRpcError as error:
        raise error_of_call(error) from error


class Backoff:
    def __init__(self) -> None:
        self._random = Random()
        self._next_s = BACKOFF_FIRST_S

    def reset(self) -> None:
        self._next_s = BACKOFF_FIRST_S

    def next_s(self, at_least: float | None = None) -> float:
        """The wait before this attempt, at least `at_least`."""
        wait_s = max(self._next_s * (0.5 + self._random.random() / 2), at_least or 0.0)
        self._next_s = min(self._next_s * 2, BACKOFF_MAX_S)
        return wait_s
