"""Calls to a service, with a time limit, and with its address in what went wrong."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from grpc import aio

from seqgate.api.cursor.v1 import cursor_pb2_grpc
from seqgate.api.dedup.v1 import dedup_pb2_grpc
from seqgate.api.dispatcher.v1 import dispatcher_pb2_grpc
from seqgate.api.filter.v1 import filter_pb2_grpc
from seqgate.api.ledger.v1 import ledger_pb2_grpc
from seqgate.cli._failure import InvalidSettings
from seqgate.cli._settings import Settings
from seqgate.client import Client, connect
from seqgate.client._channel import open_channel, translated
from seqgate.errors import InUseError, UnavailableError
from seqgate.owners import FollowingChannel

REDIRECTS_MAX: Final = 2
"""How often a request is sent on to the instance that is said to have a subscription."""


class Service:
    """One service: `stub` for streams, `call` for everything else."""

    def __init__(self, name: str, target: str, stub: Any, timeout_s: float) -> None:
        self.stub = stub
        self._name = name
        self._target = target
        self._timeout_s = timeout_s

    async def call(self, method: str, request: Any) -> Any:
        """The answer to a request.

        Raises:
            SeqgateError: the service refuses, or does not answer in time.
        """
        with reaching(self._name, self._target):
            return await translated(getattr(self.stub, method)(request, timeout=self._timeout_s))


async def pages(
    service: "Service | Dispatcher", method: str, request: Any, items: str
) -> AsyncIterator[Any]:
    """All that a list has, page by page; `items` is the field of a page."""
    while True:
        page = await service.call(method, request)
        for each in getattr(page, items):
            yield each
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def opener(settings: Settings) -> Callable[[str], aio.Channel]:
    """What opens a channel to an address, as the settings say."""

    def opened(target: str) -> aio.Channel:
        with usable_files():
            return open_channel(target, settings.security)

    return opened


def client(settings: Settings, dispatcher: str | None = None) -> Client:
    """A client of the services, as the settings say."""
    with usable_files():
        return connect(
            settings.ledger.value,
            dispatcher,
            tls=settings.security.tls,
            token=settings.security.token,
        )


@contextmanager
def usable_files() -> Iterator[None]:
    """Say that it is a file of the settings that cannot be used."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise InvalidSettings(str(error)) from error


@asynccontextmanager
async def ledger_service(settings: Settings) -> AsyncIterator[Service]:
    """The ledger service."""
    target = settings.ledger.value
    async with FollowingChannel(target, opener(settings)) as channel:
        stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        yield Service("ledger", target, stub, settings.timeout_s)


@asynccontextmanager
async def dedup_service(settings: Settings) -> AsyncIterator[Service]:
    """The dedup service."""
    target = settings.dedup.value
    async with opener(settings)(target) as channel:
        stub = dedup_pb2_grpc.DedupServiceStub(channel)
        yield Service("dedup", target, stub, settings.timeout_s)


@asynccontextmanager
async def cursor_service(settings: Settings) -> AsyncIterator[Service]:
    """The cursor service."""
    target = settings.cursor.value
    async with FollowingChannel(target, opener(settings)) as channel:
        stub = cursor_pb2_grpc.CursorServiceStub(channel)
        yield Service("cursor", target, stub, settings.timeout_s)


@asynccontextmanager
async def filter_service(settings: Settings) -> AsyncIterator[Service]:
    """The filter service."""
    target = settings.filter.value
    async with opener(settings)(target) as channel:
        stub = filter_pb2_grpc.FilterServiceStub(channel)
        yield Service("filter", target, stub, settings.timeout_s)


class Dispatcher:
    """The dispatcher service: a request goes to the instance that has the subscription."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def call(self, method: str, request: Any, *, timeout_s: float | None = None) -> Any:
        """The answer to a request, within so long; None: as is set.

        Raises:
            SeqgateError: the service refuses, or does not answer in time.
            InUseError: each instance that was asked named another one (reason NOT_OWNER).
        """
        target = self._settings.dispatcher.value
        for _ in range(REDIRECTS_MAX):
            try:
                return await self._ask(target, method, request, timeout_s)
            except InUseError as error:
                owner = error.details.get("owner", "")
                if error.reason != "NOT_OWNER" or not owner:
                    raise
                target = owner
        try:
            return await self._ask(target, method, request, timeout_s)
        except InUseError as error:
            if error.reason != "NOT_OWNER":
                raise
            raise InUseError(
                f"the subscription is changing owners: after {REDIRECTS_MAX} redirects the "
                f"dispatcher at {target} does not own it either",
                reason=error.reason,
                details=error.details,
                retry_after_s=error.retry_after_s,
            ) from error

    async def _ask(self, target: str, method: str, request: Any, timeout_s: float | None) -> Any:
        async with opener(self._settings)(target) as channel:
            stub = dispatcher_pb2_grpc.DispatcherServiceStub(channel)
            limit_s = self._settings.timeout_s if timeout_s is None else timeout_s
            service = Service("dispatcher", target, stub, limit_s)
            return await service.call(method, request)


@contextmanager
def reaching(name: str, target: str) -> Iterator[None]:
    """Say which service it is that does not answer."""
    try:
        yield
    except UnavailableError as error:
        if error.reason:  # it did answer: not now
            raise
        raise UnavailableError(
            f"the {name} service at {target} does not answer",
            reason="UNREACHABLE",
            details={"cause": " ".join(str(error).split())},
        ) from error
