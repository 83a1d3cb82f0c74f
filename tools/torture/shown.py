"""Services' addresses, and callers' credentials: TLS, certificates and tokens, as files."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from grpc import aio

from seqgate.client import TLS, Client, connect
from seqgate.client._channel import Security, open_channel
from seqgate.owners import FollowingChannel

S = TypeVar("S")


class Shown(NamedTuple):
    """A caller's credentials; empty for none, which our own installation accepts.

    Attributes:
        ca: the authorities of the services' certificates, in PEM; turns on TLS.
        certificate, key: the caller's own, in PEM.
        token: a file with a bearer token.
    """

    ca: str = ""
    certificate: str = ""
    key: str = ""
    token: str = ""

    @property
    def security(self) -> Security:
        certificate, key = (Path(each) if each else None for each in (self.certificate, self.key))
        tls = TLS(Path(self.ca), certificate, key) if self.ca else None
        return Security(tls, Path(self.token) if self.token else None)

    def client(self, ledger: str, dispatcher: str | None = None) -> Client:
        security = self.security
        return connect(ledger, dispatcher, tls=security.tls, token=security.token)


NOTHING: Final = Shown()


class At(NamedTuple):
    """A service, any instance of it; its address is empty if unknown."""

    address: str
    shown: Shown = NOTHING


class Services(NamedTuple):
    """The services that the torture itself calls; the cursor service's address is optional."""

    ledger: At
    dispatcher: At
    cursor: At


@asynccontextmanager
async def asking(at: At, stub: Callable[[aio.Channel], S]) -> AsyncIterator[S]:
    """A stub of a service, whose calls follow redirects to the topic's owner."""
    opened = partial(open_channel, security=at.shown.security)
    async with FollowingChannel(at.address, opened) as channel:
        yield stub(channel)
