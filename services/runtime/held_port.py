"""A port that one supervisor holds and its workers share.

The sockets here are bound and never listen, so the kernel sends them no connections. They are bound
as the only ones of their port: another process on it, supervisor or not, is an error on either
side. Then they allow others to bind beside them with SO_REUSEPORT, which the kernel grants to
processes of the same user alone: the workers. Held this way, a port that the kernel picked
(port 0) stays the workers' own while they are replaced.
"""

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104 - gRPC takes either for both

Address = tuple[socket.AddressFamily, str]


@contextmanager
def held_port(listen: str) -> Iterator[str]:
    """Hold host:port while the context lasts, whose value is the address with the port in use.

    Raises:
        OSError: the address is in use, or is none of this machine.
    """
    host, _, number = listen.rpartition(":")
    with ExitStack() as held:
        try:
            port = _hold(held, _addresses(host.strip("[]")), int(number))
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {listen}: {error.strerror}") from error
        yield f"{host}:{port}"


def _hold(held: ExitStack, addresses: Sequence[Address], port: int) -> int:
    """Bind each address that exists; the first names the port if that is 0."""
    refused: OSError | None = None
    sockets = 0
    for family, host in addresses:
        try:
            bound = _bound(family, host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            refused = error  # like gRPC: `localhost` may have an address that this machine lacks
            continue
        held.enter_context(bound)
        sockets += 1
        port = bound.getsockname()[1]
        if host in WILDCARDS:
            break  # of both families, if there are two
    if not sockets:
        assert refused is not None
        raise refused
    return port


def _addresses(host: str) -> Sequence[Address]:
    if host in WILDCARDS:
        return [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")]  # noqa: S104
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((each[0], str(each[4][0])) for each in found))


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    bound = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        # Connections of a predecessor that are still closing do not count.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except BaseException:
        bound.close()
        raise
    return bound
