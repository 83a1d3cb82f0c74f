"""The type of a channel that carries bytes."""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TypeVar, overload

from grpc import ChannelConnectivity, aio

Request = TypeVar("Request")
Response = TypeVar("Response")


class RawChannel(Protocol):
    """The part of `aio.Channel` that tests use: without a codec, messages are bytes."""

    async def close(self, grace: float | None = None) -> None: ...

    def get_state(self, try_to_connect: bool = False) -> ChannelConnectivity: ...

    async def wait_for_state_change(self, last_observed_state: ChannelConnectivity) -> None: ...

    async def channel_ready(self) -> None: ...

    @overload
    def unary_unary(self, method: str) -> aio.UnaryUnaryMultiCallable[bytes, bytes]: ...

    @overload
    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Request], bytes],
        response_deserializer: Callable[[bytes], Response],
    ) -> aio.UnaryUnaryMultiCallable[Request, Response]: ...

    def unary_stream(self, method: str) -> aio.UnaryStreamMultiCallable[bytes, bytes]: ...

    def stream_unary(self, method: str) -> aio.StreamUnaryMultiCallable[bytes, bytes]: ...

    def stream_stream(self, method: str) -> aio.StreamStreamMultiCallable[bytes, bytes]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None: ...


def raw(channel: RawChannel) -> RawChannel:
    """Type a channel as RawChannel, which every `aio.Channel` is."""
    return channel
