"""A channel that finds a topic's instance by itself, for those who wait in threads.

What seqgate.owners is for asyncio, for the two kinds of calls that reading takes. Threads share it.
"""

import time
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any, Self

import grpc

from seqgate.owners import FOLLOW_MAX, Owners, topic_of


class FollowingChannel:
    """Used like a grpc.Channel, by stubs."""

    def __init__(self, target: str, open_channel: Callable[[str], grpc.Channel]) -> None:
        """
        Args:
            target: where to ask about what is not known.
            open_channel: opens a channel to an address.
        """
        self._owners = Owners(target)
        self._open = open_channel
        self._lock = Lock()
        self._channels: dict[str, grpc.Channel] = {}

    def unary_unary(self, method: str, *more: Any, **named: Any) -> Callable[..., Any]:
        """See grpc.Channel."""

        def call(request: Any, timeout: float | None = None, **how: Any) -> Any:
            topic = topic_of(request)
            end = None if timeout is None else time.monotonic() + timeout
            for left in reversed(range(FOLLOW_MAX + 1)):
                address = self._of(topic)
                multi: Any = self._at(address).unary_unary(method, *more, **named)
                timeout = None if end is None else max(0.0, end - time.monotonic())
                try:
                    return multi(request, timeout=timeout, **how)
                except grpc.RpcError as error:
                    if not (self._note(topic, address, error) and left):
                        raise
            raise AssertionError("unreachable")

        return call

    def unary_stream(self, method: str, *more: Any, **named: Any) -> Callable[..., Any]:
        """See grpc.Channel."""

        def call(request: Any, **how: Any) -> "FollowingCall":
            topic = topic_of(request)

            def make() -> tuple[str, Any]:
                address = self._of(topic)
                multi: Any = self._at(address).unary_stream(method, *more, **named)
                return address, multi(request, **how)

            return FollowingCall(make, lambda *failed: self._note(topic, *failed))

        return call

    def stream_unary(self, method: str, *more: Any, **named: Any) -> Any:
        """See grpc.Channel; it follows nobody."""
        return self._at(self._owners.home).stream_unary(method, *more, **named)

    def stream_stream(self, method: str, *more: Any, **named: Any) -> Any:
        """See grpc.Channel; it follows nobody."""
        return self._at(self._owners.home).stream_stream(method, *more, **named)

    def _of(self, topic: str) -> str:
        with self._lock:
            return self._owners.of(topic)

    def _note(self, topic: str, address: str, error: grpc.RpcError) -> bool:
        with self._lock:
            return bool(topic) and self._owners.note(topic, address, error)

    def _at(self, address: str) -> grpc.Channel:
        with self._lock:
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = self._open(address)
            return channel

    def close(self) -> None:
        """Close all channels."""
        with self._lock:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *rest: object) -> None:
        self.close()


class FollowingCall:
    """The responses to a call. Until the first one it can be made anew elsewhere."""

    def __init__(
        self,
        make: Callable[[], tuple[str, Any]],
        note: Callable[[str, grpc.RpcError], bool],
    ) -> None:
        self._make = make
        self._note = note
        self._follows_left = FOLLOW_MAX
        self._address, self._call = make()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            try:
                response = next(self._call)
            except grpc.RpcError as error:
                again = self._note(self._address, error)
                if not (again and self._follows_left):
                    raise
                self._follows_left -= 1
                self._address, self._call = self._make()
            else:
                self._follows_left = 0
                return response

    def cancel(self) -> None:
        """End the call."""
        self._call.cancel()
