"""A time limit for the first message of a stream, since a silent stream takes one of streams_max
places. A shutdown does not wait for it either. After the first message, each method has its own
rules."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from seqgate.services.errors import DomainError, Kind
from seqgate.services.runtime.drain import Drain


class SilentStream(DomainError):
    """A stream sent no first message in time. Nothing was started."""

    kind = Kind.UNAVAILABLE
    reason = "SILENT_STREAM"


class Spoken:
    """A call's context with a time limit for the first message. All else is delegated."""

    def __init__(self, context: Any, drain: Drain, timeout_s: float) -> None:
        self._context = context
        self._drain = drain
        self._timeout_s = timeout_s
        self._has_spoken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """The next message.

        Raises:
            SilentStream: the first message did not arrive in time.
            Draining: the service shuts down before the first message.
        """
        if self._has_spoken:
            return await self._context.read()
        async with _in_time(self._timeout_s), self._drain.unless_begun():
            message = await self._context.read()
        self._has_spoken = True
        return message


async def spoken(
    messages: AsyncIterator[Any], drain: Drain, timeout_s: float
) -> AsyncIterator[Any]:
    """The messages of a stream, for a handler that iterates over them.

    Raises:
        SilentStream: the first message did not arrive in time.
        Draining: the service shuts down before the first message.
    """
    try:
        async with _in_time(timeout_s), drain.unless_begun():
            first = await anext(messages)
    except StopAsyncIteration:
        return
    yield first
    async for message in messages:
        yield message


@asynccontextmanager
async def _in_time(timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise SilentStream(
            f"no first message on the stream within {timeout_s:g} s (first_message_timeout_s)",
            retry_after_s=0.1,
        ) from error
