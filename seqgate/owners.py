"""Channels that find the instance that owns a topic.

Each topic of a service with several instances is owned by one of them; the others answer NOT_OWNER
with its address. These channels follow such redirects, and remember an owner until it is
unreachable.

Only a call without an answer is repeated elsewhere. A stream that has answered ends with its error;
its caller opens another one, which finds the owner.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from threading import Lock
from typing import Any, Final

import grpc
from grpc import StatusCode, aio

from seqgate.channels import Method, OuterBlockingChannel, OuterChannel
from seqgate.status import decode_call

NOT_OWNER: Final = "NOT_OWNER"
"""The reason with which an instance refuses a topic that another one owns."""

FOLLOW_MAX: Final = 4
"""The most redirects that a call follows."""

TOPICS_MAX: Final = 10_000
"""The most topics whose owner is remembered."""

_UNREACHABLE: Final = frozenset(
    {StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED, StatusCode.CANCELLED}
)


class Owners:
    """The remembered owners of topics; calls about other topics go `home`. Safe for threads."""

    def __init__(self, home: str) -> None:
        self.home: Final = home
        self._owners: OrderedDict[str, str] = OrderedDict()
        self._lock = Lock()

    def of(self, topic: str) -> str:
        with self._lock:
            owner = self._owners.get(topic)
            if owner is None:
                return self.home
            self._owners.move_to_end(topic)
            return owner

    def learn(self, topic: str, address: str, error: grpc.RpcError) -> bool:
        """Learn from a failed call. True: call again, at the address that `of` now returns."""
        if not topic:
            return False
        owner = owner_named(error)
        with self._lock:
            if owner and owner != address:
                self._owners[topic] = owner
                if len(self._owners) > TOPICS_MAX:
                    self._owners.popitem(last=False)
                return True
            if owner or error.code() in _UNREACHABLE:
                self._owners.pop(topic, None)
            return False


def owner_named(error: grpc.RpcError) -> str:
    """The owner's address in a NOT_OWNER refusal; empty for any other failure."""
    if error.code() is not StatusCode.FAILED_PRECONDITION:
        return ""
    refusal = decode_call(error)
    return refusal.details.get("owner", "") if refusal.reason == NOT_OWNER else ""


def topic_of(request: Any) -> str:
    opening = getattr(request, "open", request)
    return str(getattr(opening, "topic", ""))


# ---- for asyncio


class FollowingChannel(OuterChannel):
    """See the module."""

    def __init__(self, target: str, open_channel: Callable[[str], aio.Channel]) -> None:
        """`target` is called about topics whose owner is not remembered."""
        self.owners: Final = Owners(target)
        self._open = open_channel
        self._channels: dict[str, aio.Channel] = {}
        self._made: dict[str, dict[str, Callable[..., Any]]] = {}  # by path and address

    def at(self, address: str) -> aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._open(address)
        return channel

    def inner(self) -> aio.Channel:
        return self.at(self.owners.home)

    def calling(self, method: Method) -> Callable[..., Any]:
        """See Methods. A unary call is a coroutine. A stream of requests begins with its first one,
        which names the topic. A stream of requests with one response is not redirected."""
        made = self._made.setdefault(method.path, {})

        def at(address: str) -> Callable[..., Any]:
            multi = made.get(address)
            if multi is None:
                multi = method.on(self.at(address))
                if address != self.owners.home:
                    multi = _at_once(multi)
                made[address] = multi
            return multi

        async def unary(request: Any, *, timeout: float | None = None, **how: Any) -> Any:
            topic, loop = topic_of(request), asyncio.get_running_loop()
            end = None if timeout is None else loop.time() + timeout
            for left in reversed(range(FOLLOW_MAX + 1)):
                address = self.owners.of(topic)
                timeout = None if end is None else max(0.0, end - loop.time())
                try:
                    return await at(address)(request, timeout=timeout, **how)
                except aio.AioRpcError as error:
                    if not (self.owners.learn(topic, address, error) and left):
                        raise
            raise AssertionError("unreachable")

        def from_unary(request: Any, **how: Any) -> FollowingCall:
            return FollowingCall(
                self.owners, topic_of(request), lambda address: at(address)(request, **how)
            )

        def from_stream(**how: Any) -> FollowingCall:
            return FollowingCall(self.owners, None, lambda address: at(address)(**how))

        match method.style:
            case "unary_unary":
                return unary
            case "unary_stream":
                return from_unary
            case "stream_stream":
                return from_stream
        return at(self.owners.home)

    async def close(self, grace: float | None = None) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(grace)

    async def hang_up(self) -> None:
        """Close the connections, and release what gRPC holds for them. Later calls open others."""
        for made in self._made.values():
            made.clear()
        await self.close()


def _at_once(multi: Callable[..., Any]) -> Callable[..., Any]:
    """Calls that do not wait for a connection: the next one goes home if the owner is gone."""

    def call(*request: Any, **how: Any) -> Any:
        how.pop("wait_for_ready", None)
        return multi(*request, **how)

    return call


class FollowingCall:
    """A stream with the interface of gRPC's. Until its first response it can be redirected, and
    only its first request is sent."""

    def __init__(self, owners: Owners, topic: str | None, make: Callable[[str], Any]) -> None:
        """`topic` is None if the first request names it. `make` starts the call at an address."""
        self._owners = owners
        self._topic = topic
        self._make = make
        self._early: list[Any] = []
        self._is_answered = False
        self._is_done_writing = False
        self._address = ""
        self._call: Any = None
        if topic is not None:
            self._start()

    def _start(self) -> None:
        assert self._topic is not None
        self._address = self._owners.of(self._topic)
        self._call = self._make(self._address)

    async def write(self, request: Any) -> None:
        if self._is_answered:
            await self._call.write(request)
            return
        self._early.append(request)
        if self._call is None:
            self._topic = topic_of(request)
            self._start()
            await self._send_first()

    async def done_writing(self) -> None:
        self._is_done_writing = True
        if self._call is None:
            self._topic = ""
            self._start()
        elif not self._is_answered:
            return  # sent after the requests that wait for the first response
        call: Any = self._call
        await call.done_writing()

    async def read(self) -> Any:
        """The next response; aio.EOF at the end."""
        if self._is_answered:
            try:
                return await self._call.read()
            except aio.AioRpcError as error:
                self._learn(error)
                raise
        for left in reversed(range(FOLLOW_MAX + 1)):
            call = self._call
            try:
                response = await call.read()
                if response is aio.EOF and await call.code() is not StatusCode.OK:
                    raise await _error(call)
            except aio.AioRpcError as error:
                if not (self._learn(error) and left):
                    raise
                self._start()
                await self._send_first()
                continue
            self._is_answered = True
            await self._send_rest()
            return response
        raise AssertionError("unreachable")

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (response := await self.read()) is not aio.EOF:
            yield response

    def cancel(self) -> bool:
        return self._call is not None and bool(self._call.cancel())

    def done(self) -> bool:
        return self._call is not None and bool(self._call.done())

    async def code(self) -> Any:
        return await self._call.code()

    async def details(self) -> Any:
        return await self._call.details()

    async def trailing_metadata(self) -> Any:
        return await self._call.trailing_metadata()

    def _learn(self, error: aio.AioRpcError) -> bool:
        return self._owners.learn(self._topic or "", self._address, error)

    async def _send_first(self) -> None:
        """Write the first request. The others wait for the first response: gRPC loses the status of
        a call that is refused during a write."""
        # If the call has ended, `read` raises its error.
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            for request in self._early[:1]:
                await self._call.write(request)

    async def _send_rest(self) -> None:
        rest, self._early = self._early[1:], []
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            for request in rest:
                await self._call.write(request)
            if self._is_done_writing and self._topic:
                await self._call.done_writing()


async def _error(call: Any) -> aio.AioRpcError:
    return aio.AioRpcError(
        await call.code(), aio.Metadata(), await call.trailing_metadata(), await call.details()
    )


# ---- for threads


class FollowingBlockingChannel(OuterBlockingChannel):
    """See the module. Only calls with one request are redirected. Safe for threads."""

    def __init__(self, target: str, open_channel: Callable[[str], grpc.Channel]) -> None:
        """`target` is called about topics whose owner is not remembered."""
        self._owners = Owners(target)
        self._open = open_channel
        self._lock = Lock()
        self._channels: dict[str, grpc.Channel] = {}

    def inner(self) -> grpc.Channel:
        return self._at(self._owners.home)

    def calling(self, method: Method) -> Callable[..., Any]:
        def unary(request: Any, timeout: float | None = None, **how: Any) -> Any:
            topic = topic_of(request)
            end = None if timeout is None else time.monotonic() + timeout
            for left in reversed(range(FOLLOW_MAX + 1)):
                address = self._owners.of(topic)
                timeout = None if end is None else max(0.0, end - time.monotonic())
                try:
                    return method.on(self._at(address))(request, timeout=timeout, **how)
                except grpc.RpcError as error:
                    if not (self._owners.learn(topic, address, error) and left):
                        raise
            raise AssertionError("unreachable")

        def stream(request: Any, **how: Any) -> FollowingResponses:
            return FollowingResponses(
                self._owners,
                topic_of(request),
                lambda address: method.on(self._at(address))(request, **how),
            )

        match method.style:
            case "unary_unary":
                return unary
            case "unary_stream":
                return stream
        return method.on(self.inner())

    def _at(self, address: str) -> grpc.Channel:
        with self._lock:
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = self._open(address)
            return channel

    def close(self) -> None:
        with self._lock:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()


class FollowingResponses:
    """A call's responses. Until the first one, the call can be redirected."""

    def __init__(self, owners: Owners, topic: str, make: Callable[[str], Any]) -> None:
        """`make` starts the call at an address."""
        self._owners = owners
        self._topic = topic
        self._make = make
        self._follows_left = FOLLOW_MAX
        self._start()

    def _start(self) -> None:
        self._address = self._owners.of(self._topic)
        self._call = self._make(self._address)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            try:
                response = next(self._call)
            except grpc.RpcError as error:
                again = self._owners.learn(self._topic, self._address, error)
                if not (again and self._follows_left):
                    raise
                self._follows_left -= 1
                self._start()
            else:
                self._follows_left = 0
                return response

    def cancel(self) -> None:
        self._call.cancel()
