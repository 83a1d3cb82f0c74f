"""The client for threads: one asyncio client in one thread, and what it makes."""

import asyncio
import atexit
from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import iscoroutine
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from weakref import WeakSet, finalize

from grpc import aio

from seqgate.client._channel import Security
from seqgate.client._client import Client as AsyncioClient
from seqgate.client.blocking import _forking
from seqgate.client.blocking._admin import Admin
from seqgate.client.blocking._consumer import Consumer, SharedConsumer, SharedInbox
from seqgate.client.blocking._portal import Portal
from seqgate.client.blocking._producer import Producer, SharedProducer
from seqgate.client.blocking._reader import Reader, SharedReader
from seqgate.errors import ConsumerClosedError, ProducerClosedError, UnavailableError
from seqgate.tls import TLS, BearerToken

P = ParamSpec("P")
B = TypeVar("B", covariant=True)

Wrap = Callable[[Portal, Any, "Client"], B]
"""Makes what blocks in front of an object of the asyncio client."""

_clients: Final["WeakSet[Client]"] = WeakSet()


def connect(
    ledger: str,
    dispatcher: str | None = None,
    *,
    dedup: str | None = None,
    cursor: str | None = None,
    tls: TLS | None = None,
    token: BearerToken | None = None,
) -> "Client":
    """Return a client for threads of the ledger service at `ledger` and, for consumers, of the
    dispatcher service at `dispatcher`. It connects on first use. Arguments and errors are those of
    `seqgate.client.connect`.

    Raises:
        RuntimeError: this thread runs an event loop; use `seqgate.client.connect`.
        ClientForkedError: other gRPC channels were in use when this process was forked.
        OSError, ValueError: a file is unusable, or a token would be sent in plain text.
    """
    return Client(ledger, dispatcher, Security(tls, token), dedup=dedup, cursor=cursor)


class SharedClient(AsyncioClient):
    """The asyncio client, in the loop of a portal. A fork interrupts its connections."""

    _producer_class = SharedProducer
    _inbox_class = SharedInbox
    _consumer_class = SharedConsumer
    _reader_class = SharedReader

    def __init__(
        self,
        portal: Portal,
        ledger: str,
        dispatcher: str | None,
        security: Security,
        **services: str | None,
    ) -> None:
        self._portal = portal
        self._is_hung_up = False
        self.made: WeakSet[SharedProducer | SharedConsumer | SharedReader] = WeakSet()
        super().__init__(ledger, dispatcher, security, **services)

    def make(self, name: str, args: Any, kwargs: Any) -> Any:
        """Call one of the methods that make something."""
        made = getattr(self, name)(*args, **kwargs)
        if isinstance(made, SharedProducer | SharedConsumer | SharedReader):
            self.made.add(made)
        return made

    async def stop(self) -> None:
        """End all that it made, and close."""
        for each in list(self.made):
            match each:
                case SharedProducer():
                    await each.stop(ProducerClosedError("the client is closed"))
                case SharedConsumer():
                    await each.stop(ConsumerClosedError("the client is closed"))
                case SharedReader():
                    await each.close()
        await self.close()

    # ---- forks: see _forking.Line

    async def hang_up(self) -> None:
        self._is_hung_up = True
        for each in list(self.made):
            await each.hang_up()
        await self._hang_up()
        of_grpc = [each for each in asyncio.all_tasks() if not iscoroutine(each.get_coro())]
        if of_grpc:  # they have its calls until these have ended
            await asyncio.wait(of_grpc, timeout=_forking.HANG_UP_TIMEOUT_S)

    def call_again(self) -> None:
        self._is_hung_up = False
        for each in list(self.made):
            each.call_again()

    def begin(self, function: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        return self._portal.begin(function)

    def _open_channel(self, address: str) -> aio.Channel:
        if self._is_hung_up:
            raise UnavailableError("this process is being forked")
        return super()._open_channel(address)


def _making(
    make: Callable[Concatenate[AsyncioClient, P], object], wrap: "Wrap[B]"
) -> "Callable[Concatenate[Client, P], B]":
    """A method that makes something of the asyncio client, and what blocks in front of it."""
    name = make.__name__

    @wraps(make)
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> B:
        return self.wrapped(name, wrap, args, kwargs)

    return method


class Client:
    """Makes producers, readers and consumers for threads. A context manager; see connect.

    It has one thread, which runs the asyncio client. Callbacks such as `on_dropped` are called
    there, and must not block.
    """

    def __init__(
        self, ledger: str, dispatcher: str | None, security: Security, **services: str | None
    ) -> None:
        _forking.check()
        self._portal = portal = Portal(f"seqgate-client {ledger}")
        try:
            portal.start()
            self._held = held = portal.call(
                lambda: SharedClient(portal, ledger, dispatcher, security, **services)
            )
            _forking.add(held)
            _clients.add(self)
            finalize(self, portal.forget, held.stop).atexit = False
        except BaseException:
            portal.forget(_nothing)
            raise

    producer = _making(AsyncioClient.producer, Producer)
    reader = _making(AsyncioClient.reader, Reader)
    consumer = _making(AsyncioClient.consumer, Consumer)

    def admin(self) -> Admin:
        """The admin client of the services whose addresses the client has. A call may take 30
        seconds, and so long waits for a service that restarts: then it raises UnavailableError."""
        return Admin(self._portal, self._portal.call(self._held.admin), self)

    def wrapped(self, name: str, wrap: "Wrap[B]", args: Any, kwargs: Any) -> B:
        """What a method of the asyncio client makes, in what blocks in front of it."""
        return wrap(
            self._portal, self._portal.call(lambda: self._held.make(name, args, kwargs)), self
        )

    def close(self) -> None:
        """Close the connections, and join the client's thread. Close producers and consumers first.
        Calls under way in other threads raise. In a forked process it does nothing."""
        self._portal.close(self._held.stop)

    def __enter__(self) -> "Client":
        self._portal.check()
        return self

    def __exit__(self, *rest: object) -> None:
        self.close()


async def _nothing() -> None:
    """There is nothing to end."""


def _close_all() -> None:
    for client in list(_clients):
        client.close()


# Otherwise the interpreter would tear down running tasks, and gRPC's threads under them.
atexit.register(_close_all)
