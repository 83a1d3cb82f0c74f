"""Replaces grpc.aio's channels and servers with simulated ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from grpc import aio

from tests.simulation.ground.channel import SimChannel
from tests.simulation.ground.network import Network
from tests.simulation.ground.server import SimServer


class Patch(Protocol):
    """pytest's monkeypatch, or an equivalent."""

    def setattr(self, target: Any, name: str, value: Any) -> object:
        """Replace an attribute."""


def install(patch: Patch, network: Network) -> None:
    """Make aio.insecure_channel and aio.server return simulated ones, in the current process."""

    def insecure_channel(
        target: str,
        options: Sequence[tuple[str, Any]] | None = None,
        compression: Any = None,
        interceptors: Sequence[aio.ClientInterceptor] | None = None,
    ) -> SimChannel:
        del compression
        return SimChannel(network, target, options, interceptors)

    def server(
        migration_thread_pool: Any = None,
        handlers: Sequence[Any] | None = None,
        interceptors: Sequence[Any] | None = None,
        options: Sequence[tuple[str, Any]] | None = None,
        maximum_concurrent_rpcs: int | None = None,
        compression: Any = None,
    ) -> SimServer:
        del migration_thread_pool, compression
        return SimServer(
            network, handlers or (), interceptors or (), options or (), maximum_concurrent_rpcs
        )

    patch.setattr(aio, "insecure_channel", insecure_channel)
    patch.setattr(aio, "server", server)


@contextmanager
def installed(network: Network) -> Iterator[Network]:
    """`install`, undone when the context ends."""
    with ExitStack() as stack:

        class Undone:
            def setattr(self, target: Any, name: str, value: Any) -> None:
                stack.callback(setattr, target, name, getattr(target, name))
                setattr(target, name, value)

        install(Undone(), network)
        yield network
