"""Ports for programs that take consecutive ones."""

import socket

from seqgate.dev.ports import free_ports


def consecutive_ports(count: int) -> int:
    """The first of this many consecutive free ports."""
    for first in free_ports(400):
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise AssertionError("no ports")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
