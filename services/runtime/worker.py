"""A worker's side of what it and its supervisor tell each other.

The two are ends of a socket pair; the worker's is its standard input.

    worker ──▶ supervisor    listening         it serves
                             metrics <port>    where it serves its metrics, on 127.0.0.1
                             failed <reason>   why it ends
    supervisor ──▶ worker    the end of the stream: drain and end

The supervisor closes its side when it stops, and the kernel does when it dies: a worker outlives
its supervisor by its drain at most.
"""

import asyncio
import os
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Final

ARGUMENT: Final = "--worker="

LISTENING: Final = "listening"
METRICS: Final = "metrics"
FAILED: Final = "failed"

REASON_MAX: Final = 1_000
"""The most characters of a reason that are told."""


class Worker:
    """This process, as one of several that a supervisor runs.

    Attributes:
        number: 1 and up, the same for the worker that replaces it.
    """

    def __init__(self, number: int, supervisor: socket.socket) -> None:
        self.number = number
        self._supervisor = supervisor

    def tell(self, what: str, detail: object = "") -> None:
        line = f"{what} {' '.join(str(detail).split())[:REASON_MAX]}".strip()
        with suppress(OSError):  # it died; this process is about to notice
            self._supervisor.sendall(f"{line}\n".encode())

    @contextmanager
    def watched(self, gone: Callable[[], None]) -> Iterator[None]:
        """Call `gone` in the event loop when the supervisor stops or dies."""
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(self._supervisor)
            gone()

        loop.add_reader(self._supervisor, ended)
        try:
            yield
        finally:
            loop.remove_reader(self._supervisor)


WORKER: ContextVar[Worker | None] = ContextVar("worker", default=None)
"""This process's part; None: it has no supervisor."""


def worker_of(arguments: Sequence[str]) -> tuple[Worker | None, Sequence[str]]:
    """The worker that the command line makes of this process, and the arguments left.

    Raises:
        ValueError: the process was not started by a supervisor.
    """
    given = [each for each in arguments if each.startswith(ARGUMENT)]
    if not given:
        return None, arguments
    number = given[0].removeprefix(ARGUMENT)
    if not number.isdecimal() or not stat.S_ISSOCK(os.fstat(0).st_mode):
        raise ValueError(f"{given[0]} is for the processes that `workers` starts")
    rest = [each for each in arguments if each not in given]
    return Worker(int(number), socket.socket(fileno=os.dup(0))), rest


def tell_supervisor(what: str, detail: object = "") -> None:
    """Tell this process's supervisor, if it has one."""
    worker = WORKER.get()
    if worker is not None:
        worker.tell(what, detail)
