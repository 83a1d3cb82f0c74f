"""Free TCP ports on loopback."""

import os
import random
import socket
import sys
from collections import deque
from contextlib import suppress
from typing import Final

PORTS: Final = range(10_240, 32_768)
"""Below Linux's ephemeral ports, from which a connection could take a port that is free now."""

RESERVED_MAX: Final = 100
"""The most ports that a process reserves, the newest ones: each costs a file descriptor."""

_choice: Final = random.SystemRandom()
_reserved: Final[deque[int]] = deque()


def free_ports(count: int) -> list[int]:
    """Different ports that are free now, and not given to another caller soon. A process that does
    not use this module may still take one."""
    ports: list[int] = []
    while len(ports) < count:
        port = _choice.choice(PORTS)
        if _is_free(port) and _reserve(port):
            ports.append(port)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as listener, suppress(OSError):
        listener.bind(("127.0.0.1", port))
        return True
    return False


def _reserve(port: int) -> bool:
    """Reserve a port by binding an abstract Unix socket of its name, which no other process can."""
    if sys.platform != "linux":
        return True
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0seqgate-port-{port}")
    except OSError:
        name.close()
        return False
    _reserved.append(name.detach())
    if len(_reserved) > RESERVED_MAX:
        os.close(_reserved.popleft())
    return True
