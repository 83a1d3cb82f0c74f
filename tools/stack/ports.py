"""Free TCP ports on loopback."""

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on now. All are held until all are found; somebody else
    may still take one before it is used."""
    with ExitStack() as held:
        ports = []
        for _ in range(count):
            listener = held.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(int(listener.getsockname()[1]))
        return ports
