"""Calls to the services of the settings."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

from grpc import ChannelConnectivity, aio

from seqgate.cli._failure import InvalidSettings
from seqgate.cli._settings import SERVICES, Settings
from seqgate.cli._waiting import Waits
from seqgate.client import Client, Consumer, Producer, Reader, connect
from seqgate.client._calls import Calls, addressed, reaching
from seqgate.client._channel import open_channel
from seqgate.client._status import cause_of

__all__ = ["Services", "client", "reaching", "trouble_of", "usable_files"]


_STATES: Final[Mapping[ChannelConnectivity, str]] = {
    ChannelConnectivity.CONNECTING: "there is no connection yet",
    ChannelConnectivity.TRANSIENT_FAILURE: "the connection failed, and is tried again",
    ChannelConnectivity.READY: "it is connected, and has not answered yet",
}


class Services(Calls):
    """Calls that say for which service they wait, if `waits` is given."""

    def __init__(self, settings: Settings, waits: Waits | None = None) -> None:
        def opened(target: str) -> aio.Channel:
            with usable_files():
                return open_channel(target, settings.security)

        addresses = {name: getattr(settings, name).value for name in SERVICES}
        super().__init__(addresses, opened, timeout_s=settings.timeout_s)
        self.settings: Final = settings
        self._waits = waits

    async def call(self, request: Any, *, timeout_s: float | None = None) -> Any:
        with self._waiting(request):
            return await super().call(request, timeout_s=timeout_s)

    async def responses(self, request: Any) -> list[Any]:
        with self._waiting(request):
            return await super().responses(request)

    def _waiting(self, request: Any) -> AbstractContextManager[None]:
        if self._waits is None:
            return nullcontext()
        name, _ = addressed(request)
        what = f"the {name} service at {self.target(name)} to answer"
        return self._waits.on(what, partial(self._because, name))

    async def _because(self, name: str) -> str:
        return _STATES.get(self.state(name), "")

    async def __aenter__(self) -> "Services":
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()


def client(settings: Settings, dispatcher: str | None = None) -> Client:
    with usable_files():
        return connect(
            settings.ledger.value,
            dispatcher,
            tls=settings.security.tls,
            token=settings.security.token,
        )


def trouble_of(connecting: Producer | Reader | Consumer) -> str:
    """Why it is not connected; empty: it is, or is about to be."""
    error = connecting.connection_error
    return "" if error is None else cause_of(error)


@contextmanager
def usable_files() -> Iterator[None]:
    """Say in errors that the files of the settings are unusable."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise InvalidSettings(str(error)) from error
