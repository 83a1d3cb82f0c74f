"""Calls to the services on a reader's behalf.

    request ──▶ reading_as(token) ──▶ page ──▶ Calls ──▶ hook ──▶ authorization: Bearer token

The token of the request being served is a context variable, which a hook of every channel reads
when a call begins. With credentials = token, a call without one fails here: nothing is ever asked
under the console's own name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from grpc import aio

from seqgate.channels import Call, Hook, channel_options, open_channel
from seqgate.client._calls import Calls
from seqgate.errors import AuthenticationError
from seqgate.services.console.config import ConsoleConfig
from seqgate.services.runtime.calls import client_calls
from seqgate.services.runtime.channels import CALLS_AT_ONCE, LimitedChannel
from seqgate.services.runtime.limiter import Limiter
from seqgate.services.runtime.metrics import OFF, Metrics
from seqgate.telemetry.calls import Tracing
from seqgate.tls import AUTHORIZATION

MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest gRPC message accepted, in bytes."""

KEEPALIVE_S: Final = 10.0
"""The interval between probes of an idle connection, in seconds."""

_TOKEN: Final[ContextVar[str]] = ContextVar("reader's token")


@contextmanager
def reading_as(token: str) -> Iterator[None]:
    """Send this token with every call that begins inside."""
    reset = _TOKEN.set(token)
    try:
        yield
    finally:
        _TOKEN.reset(reset)


def show_reader(call: Call) -> None:
    """A hook that adds the reader's token. Raises AuthenticationError if there is no reader."""
    token = _TOKEN.get("")
    if not token:
        raise AuthenticationError("sign in first", reason="MISSING_CREDENTIALS")
    call.metadata = (*call.metadata, (AUTHORIZATION, f"Bearer {token}"))


def calls_of(config: ConsoleConfig, metrics: Metrics = OFF) -> Calls:
    """Calls by the settings, measured by metrics. Channels open on first use.

    Raises:
        OSError, ValueError: a file cannot be used.
    """
    options = channel_options(
        keepalive_s=KEEPALIVE_S,
        keepalive_timeout_s=KEEPALIVE_S,
        message_bytes_max=MESSAGE_BYTES_MAX,
    )
    measured = [client_calls(metrics)] if metrics.is_on else []
    tokens = [show_reader] if config.credentials == "token" else []

    def opened(target: str) -> aio.Channel:
        hooks: list[Hook] = [Tracing(target), *measured, *tokens]
        channel = open_channel(target, options=options, hooks=hooks, tls=config.tls)
        return LimitedChannel(channel, Limiter(CALLS_AT_ONCE))

    return Calls(config.targets, opened, timeout_s=config.call_timeout_s)
