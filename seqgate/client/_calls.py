"""Unary calls to the services, with a time limit, and with the address in errors."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Final

from grpc import ChannelConnectivity, aio

from seqgate.api.cursor.v1.cursor_pb2_grpc import CursorServiceStub
from seqgate.api.dedup.v1.dedup_pb2_grpc import DedupServiceStub
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.filter.v1.filter_pb2_grpc import FilterServiceStub
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client._channel import translated
from seqgate.client._status import Asked, cause_of
from seqgate.errors import InUseError, UnavailableError
from seqgate.owners import FollowingChannel

PAGE: Final = 1_000
"""How many objects a listing asks for at once."""

REDIRECTS_MAX: Final = 2
"""The most redirects to follow for a request about a subscription."""

_STUBS: Final[Mapping[str, Any]] = {
    "ledger": LedgerServiceStub,
    "dedup": DedupServiceStub,
    "cursor": CursorServiceStub,
    "dispatcher": DispatcherServiceStub,
    "filter": FilterServiceStub,
}

_FOLLOWING: Final = ("ledger", "cursor")
"""The services whose instances each own topics."""


class Calls:
    """Stubs of the services. A channel is opened by the first call that needs it.

    The type of a request selects its service and its method: seqgate.api.ledger.v1.GetTopicRequest
    goes to GetTopic of the ledger service.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        open_channel: Callable[[str], aio.Channel],
        *,
        timeout_s: float,
        waits: bool = False,
    ) -> None:
        """
        Args:
            addresses: by the service's name.
            timeout_s: how long a call may take.
            waits: whether a call waits for a connection to its service, within that time; nothing
                is sent twice. False: it fails at once while the address refuses connections, or
                gRPC backs off from it.
        """
        self._addresses = addresses
        self._open_channel = open_channel
        self._timeout_s = timeout_s
        self._how: dict[str, bool] = {"wait_for_ready": True} if waits else {}
        self._channels = AsyncExitStack()
        self._stubs: dict[tuple[str, str], Any] = {}
        self._states: dict[tuple[str, str], Callable[[], ChannelConnectivity]] = {}

    async def close(self) -> None:
        """Close the channels. A later call opens another one."""
        self._stubs.clear()
        self._states.clear()
        await self._channels.aclose()

    async def call(self, request: Any, *, timeout_s: float | None = None) -> Any:
        """Send a request; `timeout_s` overrides the limit. Raises SeqgateError if the service
        refuses or times out, and InUseError (reason NOT_OWNER) if each dispatcher redirects to
        another one."""
        name, method = addressed(request)
        target, how = self.target(name), self._how
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        for left in reversed(range(REDIRECTS_MAX + 1)):
            try:
                with reaching(name, target):
                    stub = self.stub(name, target)
                    call = getattr(stub, method)(request, timeout=limit_s, **how)
                    return await translated(call, Asked(name, target))
            except InUseError as error:
                owner = error.details.get("owner", "")
                if name != "dispatcher" or error.reason != "NOT_OWNER" or not owner:
                    raise
                if not left:
                    raise InUseError(
                        f"the subscription is changing owners: after {REDIRECTS_MAX} redirects "
                        f"the dispatcher at {target} does not own it either",
                        reason=error.reason,
                        details=error.details,
                        retry_after_s=error.retry_after_s,
                    ) from error
                target, how = owner, {}  # if it is gone, another one may own it by the next call
        raise AssertionError("unreachable")

    async def pages(self, request: Any) -> AsyncIterator[Any]:
        while True:
            page = await self.call(request)
            (items,) = (field.name for field in page.DESCRIPTOR.fields if field.is_repeated)
            for each in getattr(page, items):
                yield each
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def responses(self, request: Any) -> list[Any]:
        """All responses of a stream. Raises SeqgateError like `call`, and if the service drains."""
        name, method = addressed(request)

        async def collected() -> list[Any]:
            stub = self.stub(name)
            call = getattr(stub, method)(request, timeout=self._timeout_s, **self._how)
            return [_not_draining(name, each) async for each in call]

        target = self.target(name)
        with reaching(name, target):
            return await translated(collected(), Asked(name, target))

    def target(self, name: str) -> str:
        """The address of a service. Raises ValueError if it was not given."""
        try:
            return self._addresses[name]
        except KeyError:
            raise ValueError(
                f"this call needs the {name} service: give its address to connect()"
            ) from None

    def stub(self, name: str, target: str | None = None) -> Any:
        """The stub of a service, at its own address or another one."""
        target = target or self.target(name)
        if (name, target) not in self._stubs:
            follows = name in _FOLLOWING
            channel = (
                FollowingChannel(target, self._open_channel)
                if follows
                else self._open_channel(target)
            )
            self._channels.push_async_callback(channel.close)
            self._states[name, target] = channel.get_state
            self._stubs[name, target] = _STUBS[name](channel)
        return self._stubs[name, target]

    def state(self, name: str) -> ChannelConnectivity:
        """The state of the connection to a service, at its own address."""
        state = self._states.get((name, self.target(name)))
        return ChannelConnectivity.IDLE if state is None else state()


def addressed(request: Any) -> tuple[str, str]:
    """The service and the method of a request."""
    service = request.DESCRIPTOR.full_name.split(".")[2]
    return service, request.DESCRIPTOR.name.removesuffix("Request")


def _not_draining(name: str, response: Any) -> Any:
    if response.HasField("draining"):
        raise UnavailableError(f"the {name} service is shutting down", reason="DRAINING")
    return response


@contextmanager
def reaching(name: str, target: str) -> Iterator[None]:
    """Name the service in errors of calls that it did not answer."""
    try:
        yield
    except UnavailableError as error:
        if error.reason:  # it did answer, with a refusal
            raise
        raise UnavailableError(
            f"the {name} service at {target} does not answer",
            reason="UNREACHABLE",
            details={"cause": cause_of(error)},
        ) from error
