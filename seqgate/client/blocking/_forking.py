"""Forks of a process that has clients.

gRPC does not survive a fork: in the child its threads are gone and its locks may be held, so a new
channel would hang, and the descriptors by which they are woken are the parent's, too. So before a
fork this process lets go of gRPC:

    before the fork    each client closes its connections, and its loop stops where it is
                       what gRPC holds is collected: its last channel ends its threads
    in the parent      the loops go on, and the clients reconnect
    in the child       old clients refuse to be used; new ones start gRPC afresh

Channels that others in this process hold keep gRPC alive. Then a client in the child could only
hang, and is refused. See docs/decisions/a-fork-lets-go-of-grpc.md.
"""

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol
from weakref import WeakSet

from seqgate.errors import ClientForkedError

HANG_UP_TIMEOUT_S: Final = 5.0
"""How long a fork waits for clients to close their connections."""

_POLLER: Final = "(_poll_wrapper)"
"""How the name of the thread ends that grpc.aio has while it has channels."""

_log: Final = logging.getLogger("seqgate.client")


class Line(Protocol):
    """What has connections, used in its own loop.

    `begin` has the loop run a coroutine function; it returns False if the loop cannot, now.
    """

    async def hang_up(self) -> None: ...

    def call_again(self) -> None: ...

    def begin(self, function: Callable[[], Coroutine[Any, Any, None]]) -> bool: ...


class Interrupted:
    """A producer or consumer of the asyncio client, whose stream a fork interrupts. Its first task
    runs the stream, in `_run`."""

    _tasks: list[asyncio.Task[None]]
    _run: Callable[[], Coroutine[Any, Any, None]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._may_call = asyncio.Event()

    async def hang_up(self) -> bool:
        """End the stream, until `call_again`. Returns whether there was one."""
        if not self._tasks or self._tasks[0].done():
            return False
        running = self._tasks[0]
        self._may_call.clear()
        self._tasks[0] = asyncio.create_task(self._run_again(), name=running.get_name())
        running.cancel()
        await asyncio.wait([running])
        return True

    def call_again(self) -> None:
        self._may_call.set()

    async def _run_again(self) -> None:
        await self._may_call.wait()
        await self._run()


class _Pause:
    """The pause of one line's loop during a fork."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._has_stopped = threading.Event()
        self._may_go_on = threading.Event()
        self._is_wanted = line.begin(self._pause)

    def wait(self) -> bool:
        """Wait until the loop stands still. False: it does not."""
        return self._is_wanted and self._has_stopped.wait(HANG_UP_TIMEOUT_S)

    def end(self) -> None:
        self._may_go_on.set()

    async def _pause(self) -> None:
        try:
            await self._line.hang_up()
            self._has_stopped.set()
            self._may_go_on.wait()  # blocks the loop
        finally:
            self._line.call_again()


class _Forks:
    def __init__(self) -> None:
        self.lines: WeakSet[Line] = WeakSet()
        self.is_spoiled = False
        """Whether gRPC was in use when this process was forked."""
        self._lock = threading.Lock()  # from before a fork until after it
        self._pauses: list[_Pause] = []
        self._is_in_use = False

    def before(self) -> None:
        self._lock.acquire()
        self._pauses = [_Pause(line) for line in list(self.lines)]
        for pause in self._pauses:
            pause.wait()
        if self._pauses:
            gc.collect()  # calls and channels refer to each other
        self._is_in_use = any(each.name.endswith(_POLLER) for each in threading.enumerate())
        if self._is_in_use and self._pauses:
            _log.warning("gRPC is in use during a fork: the child cannot use Seqgate")

    def after_in_parent(self) -> None:
        for pause in self._pauses:
            pause.end()
        self._pauses = []
        self._lock.release()

    def after_in_child(self) -> None:
        self._lock = threading.Lock()
        self._pauses = []
        self.lines = WeakSet()
        self.is_spoiled = self.is_spoiled or self._is_in_use


_forks: Final = _Forks()

os.register_at_fork(
    before=_forks.before,
    after_in_parent=_forks.after_in_parent,
    after_in_child=_forks.after_in_child,
)


def check() -> None:
    """Raise ClientForkedError if gRPC cannot be used since this process was forked."""
    if _forks.is_spoiled:
        raise ClientForkedError(
            "gRPC was in use when this process was forked, and would hang here: in the parent,"
            " close asyncio clients and other gRPC channels before it forks"
        )


def add(line: Line) -> None:
    """Have a line hang up when this process is forked."""
    _forks.lines.add(line)
