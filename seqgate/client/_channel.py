"""Channels to the services, with the limits that every call shares."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final, TypeVar

from grpc import aio

from seqgate import channels
from seqgate.client._status import Asked, error_of_call
from seqgate.telemetry.calls import Tracing
from seqgate.tls import TLS, BearerToken

T = TypeVar("T")

MESSAGE_BYTES_MAX: Final = 256 * 1024 * 1024
"""The largest gRPC message that a client accepts, in bytes; services have lower limits."""

CALL_TIMEOUT_S: Final = 30.0

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


async def translated(call: Awaitable[T], asked: Asked | None = None) -> T:
    """Await the response of the service that was `asked`. Raises SeqgateError if the call fails."""
    try:
        return await call
    except aio.AioRpcError as error:
        raise error_of_call(error, asked) from error
