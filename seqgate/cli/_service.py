"""Calls to the services of the settings."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from grpc import aio

from seqgate.cli._failure import InvalidSettings
from seqgate.cli._settings import SERVICES, Settings
from seqgate.client import Client, connect
from seqgate.client._calls import Calls, reaching
from seqgate.client._channel import open_channel

__all__ = ["Services", "client", "reaching", "usable_files"]


class Services(Calls):
    def __init__(self, settings: Settings) -> None:
        def opened(target: str) -> aio.Channel:
            with usable_files():
                return open_channel(target, settings.security)

        addresses = {name: getattr(settings, name).value for name in SERVICES}
        super().__init__(addresses, opened, timeout_s=settings.timeout_s)
        self.settings: Final = settings

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


@contextmanager
def usable_files() -> Iterator[None]:
    """Say in errors that the files of the settings are unusable."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise InvalidSettings(str(error)) from error
