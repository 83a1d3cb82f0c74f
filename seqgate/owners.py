"""Channels that find a topic's instance by themselves.

Where a service has several instances, each topic is held by one of them, and the others answer
NOT_OWNER with its address. A channel of these is used like one of gRPC's: it asks the instance that
it knows of, goes on to the one that it is sent to, and remembers that one until it is away.

Only what nobody has answered yet is asked again elsewhere. A stream that has brought something
ends with what ended it, and its caller, who opens another one, is led to the right place then.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, Self

import grpc
from grpc import StatusCode, aio

from seqgate.status import decode_call

NOT_OWNER: Final = "NOT_OWNER"
"""The reason with which an instance refuses what another one has."""

FOLLOW_MAX: Final = 4
"""How often a call is sent on to another instance before it is refused."""

TOPICS_MAX: Final = 10_000
"""Of how many topics the instance is remembered."""

_AWAY: Final = frozenset(
    {StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED, StatusCode.CANCELLED}
)
"""How a call ends when an instance is away."""

Multi = Callable[..., Any]


class Owners:
    """Where topics are, as far as is known. Whatever is not, is asked for at `home`."""

    def __init__(self, home: str) -> None:
        self.home: Final = home
        self._owners: OrderedDict[str, str] = OrderedDict()

    def of(self, topic: str) -> str:
        """The address to ask about a topic."""
        owner = self._owners.get(topic)
        if owner is None:
            return self.home
        self._owners.move_to_end(topic)
        return owner

    def note(self, topic: str, address: str, error: grpc.RpcError) -> bool:
        """Note what a call at an address failed with; whether to ask again, somewhere else."""
        owner = owner_named(error)
        if owner and owner != address:
            self._owners[topic] = owner
            if len(self._owners) > TOPICS_MAX:
                self._owners.popitem(last=False)
            return True
        if owner or error.code() in _AWAY:
            self._owners.pop(topic, None)
        return False


def owner_named(error: grpc.RpcError) -> str:
    """The address that a refusal with NOT_OWNER names; empty for any other failure."""
    if error.code() is not StatusCode.FAILED_PRECONDITION:
        return ""
    refusal = decode_call(error)
    return refusal.details.get("owner", "") if refusal.reason == NOT_OWNER else ""


def topic_of(request: Any) -> str:
    """The topic that a request is about: its own, or that of the stream that it opens."""
    opening = getattr(request, "open", request)
    return str(getattr(opening, "topic", ""))


class FollowingChannel:
    """See the module. For asyncio; used like an aio.Channel, by stubs."""

    def __init__(self, target: str, open_channel: Callable[[str], aio.Channel]) -> None:
        """
        Args:
            target: where to ask about what is not known.
            open_channel: opens a channel to an address.
        """
        self.owners: Final = Owners(target)
        self._open = open_channel
        self._channels: dict[str, aio.Channel] = {}

    def at(self, address: str) -> aio.Channel:
        """The channel to an instance."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._open(address)
        return channel

    def unary_unary(self, method: str, *more: Any, **named: Any) -> Multi:
        """See aio.Channel; what it gives makes coroutines."""
        made = self._made("unary_unary", method, more, named)

        async def call(request: Any, *, timeout: float | None = None, **how: Any) -> Any:
            topic = topic_of(request)
            if not topic:
                return await made(self.owners.home)(request, timeout=timeout, **how)
            loop = asyncio.get_running_loop()
            end = None if timeout is None else loop.time() + timeout
            for left in reversed(range(FOLLOW_MAX + 1)):
                address = self.owners.of(topic)
                timeout = None if end is None else max(0.0, end - loop.time())
                try:
                    return await made(address)(request, timeout=timeout, **how)
                except aio.AioRpcError as error:
                    if not (self.owners.note(topic, address, error) and left):
                        raise
            raise AssertionError("unreachable")

        return call

    def unary_stream(self, method: str, *more: Any, **named: Any) -> Multi:
        """See aio.Channel."""
        made = self._made("unary_stream", method, more, named)

        def call(request: Any, **how: Any) -> FollowingCall:
            return FollowingCall(
                self.owners, topic_of(request), lambda address: made(address)(request, **how)
            )

        return call

    def stream_stream(self, method: str, *more: Any, **named: Any) -> Multi:
        """See aio.Channel. The call is made when the first request is written, which names the
        topic."""
        made = self._made("stream_stream", method, more, named)

        def call(**how: Any) -> FollowingCall:
            return FollowingCall(self.owners, None, lambda address: made(address)(**how))

        return call

    def stream_unary(self, method: str, *more: Any, **named: Any) -> Multi:
        """See aio.Channel; it follows nobody."""
        return self._made("stream_unary", method, more, named)(self.owners.home)

    def _made(self, kind: str, method: str, more: Any, named: Any) -> Callable[[str], Multi]:
        """What makes calls of a method at an address."""
        multis: dict[str, Multi] = {}

        def made(address: str) -> Multi:
            multi = multis.get(address)
            if multi is None:
                multi = getattr(self.at(address), kind)(method, *more, **named)
                multis[address] = multi
            return multi

        return made

    async def close(self, grace: float | None = None) -> None:
        """Close all channels."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *rest: object) -> None:
        await self.close()


class FollowingCall:
    """A stream, used like one of gRPC's. Until it brings something it can be made anew elsewhere,
    and only the first request is sent."""

    def __init__(self, owners: Owners, topic: str | None, make: Callable[[str], Any]) -> None:
        """
        Args:
            topic: which topic it is about; None: the first request that is written says so.
            make: makes the call at an address.
        """
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
        """Write a request."""
        if self._is_answered:
            await self._call.write(request)
            return
        self._early.append(request)
        if self._call is None:
            self._topic = topic_of(request)
            self._start()
            await self._send_first()

    async def done_writing(self) -> None:
        """Write nothing more."""
        self._is_done_writing = True
        if self._call is None:
            self._topic = ""
            self._start()
        elif not self._is_answered:
            return  # after what waits for the answer
        call: Any = self._call
        await call.done_writing()

    async def read(self) -> Any:
        """The next response; aio.EOF: there is none."""
        if self._is_answered:
            try:
                return await self._call.read()
            except aio.AioRpcError as error:
                self._note(error)
                raise
        for left in reversed(range(FOLLOW_MAX + 1)):
            call = self._call
            try:
                response = await call.read()
                if response is aio.EOF and await call.code() is not StatusCode.OK:
                    raise await _error(call)
            except aio.AioRpcError as error:
                if not (self._note(error) and left):
                    raise
                self._start()
                await self._send_first()
                continue
            self._is_answered = True
            await self._send_rest()
            return response
        raise AssertionError("unreachable")

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._responses()

    async def _responses(self) -> AsyncIterator[Any]:
        while (response := await self.read()) is not aio.EOF:
            yield response

    def cancel(self) -> bool:
        """End the call."""
        return self._call is not None and bool(self._call.cancel())

    def done(self) -> bool:
        """Whether it has ended."""
        return self._call is not None and bool(self._call.done())

    def code(self) -> Awaitable[StatusCode]:
        """How it ended."""
        code: Awaitable[StatusCode] = self._call.code()
        return code

    def details(self) -> Awaitable[str]:
        """What it said when it ended."""
        details: Awaitable[str] = self._call.details()
        return details

    def trailing_metadata(self) -> Awaitable[Any]:
        """What came with its end."""
        metadata: Awaitable[Any] = self._call.trailing_metadata()
        return metadata

    def _note(self, error: aio.AioRpcError) -> bool:
        return bool(self._topic) and self._owners.note(str(self._topic), self._address, error)

    async def _send_first(self) -> None:
        """Write the first request. Others wait for the answer to it: of a call that is refused
        while somebody writes to it, gRPC forgets why."""
        # If it has ended, who reads learns why.
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
    """With what a call has ended."""
    return aio.AioRpcError(
        await call.code(), aio.Metadata(), await call.trailing_metadata(), await call.details()
    )
