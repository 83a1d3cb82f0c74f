"""Services and commands that start instantly.

Starting Python and importing a service takes most of a second of processor time, and tests start
hundreds. The nursery is a process with one thread that has imported them all and opened no channel.
It runs each command in a fork of itself, a process like any other, with its own environment,
output, exit status and signals. No process outlives the tests.
"""

import asyncio
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from seqgate.dev.child import Child, start_process, tell

MODULES = (
    "seqgate.services.cursor",
    "seqgate.services.dedup",
    "seqgate.services.dispatcher",
    "seqgate.services.filter",
    "seqgate.services.ledger",
    "tests.support.crash_points",
    "tests.support.workload",
    "tools.torture.application",
    "tools.torture.clock",
)
"""Modules that it can run, as `python -m` does."""

SEQGATE = str(Path(sys.executable).with_name("seqgate"))
"""A script that it can run, too."""

IMPORTED = (
    "seqgate.cli._main",
    "seqgate.client",
    "seqgate.services.cursor.app",
    "seqgate.services.dedup.app",
    "seqgate.services.dispatcher.app",
    "seqgate.services.filter.app",
    "seqgate.services.ledger.app",
)

REQUEST_BYTES_MAX = 1024 * 1024
PR_SET_PDEATHSIG = 1


class Forked:
    """A process forked by the nursery."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._status.result() if self._status.done() else None

    async def wait(self) -> int:
        """Wait for the exit status."""
        return await asyncio.shield(self._status)

    def end(self, status: int) -> None:
        """Record the exit status."""
        self._status.set_result(status)


class Nursery:
    """The tests' side. Its first process starts the nursery."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._asked: deque[asyncio.Future[Forked]] = deque()
        self._running: dict[int, Forked] = {}

    async def start(
        self, command: Sequence[str], log: int, environment: Mapping[str, str]
    ) -> Child:
        """Run a command, as seqgate.dev.child.start_process does."""
        arguments, variables = _without_env(command)
        if arguments[:2] != [sys.executable, "-m"] or arguments[2] not in MODULES:
            return await start_process(command, log, environment)
        with Path(os.devnull).open("rb") as nothing:
            streams = (nothing.fileno(), log, log)
            return await self._ask(arguments[2:], {**environment, **variables}, streams)

    async def seqgate(
        self, arguments: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]
    ) -> Forked:
        """Run the command `seqgate`.

        Args:
            arguments: its arguments.
            environment: its complete environment.
            streams: descriptors of its standard input, output and error.
        """
        return await self._ask([SEQGATE, *arguments], environment, streams)

    async def _ask(
        self, command: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]
    ) -> Forked:
        channel = self._begun()
        request = {"command": command, "environment": dict(environment)}
        answered: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._asked.append(answered)
        socket.send_fds(channel, [json.dumps(request).encode()], streams)
        return await answered

    def close(self) -> None:
        """End the nursery and all its processes."""
        if self._socket is not None and self._process is not None:
            with suppress(RuntimeError):  # the loop may be closed
                asyncio.get_event_loop_policy().get_event_loop().remove_reader(self._socket)
            self._socket.close()
            self._process.wait(timeout=30)

    def _begun(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.support.nursery", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                )
            asyncio.get_running_loop().add_reader(self._socket, self._hear)
        return self._socket

    def _hear(self) -> None:
        assert self._socket is not None
        said = self._socket.recv(REQUEST_BYTES_MAX)
        if not said:
            raise RuntimeError("the nursery has ended")
        news = json.loads(said)
        if "started" in news:
            pid = news["started"]
            forked = self._running[pid] = Forked(pid)
            asked = self._asked.popleft()
            if asked.cancelled():
                tell(forked, signal.SIGKILL)
            else:
                asked.set_result(forked)
        else:
            self._running.pop(news["ended"]).end(news["status"])


def _without_env(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split a command into its arguments and the variables set by a leading `env`."""
    arguments, variables = list(command), {}
    if arguments[0] == "env":
        del arguments[0]
        while "=" in arguments[0]:
            name, _, value = arguments.pop(0).partition("=")
            variables[name] = value
    return arguments, variables


# ---- the nursery's side


def main() -> None:
    """Serve requests on the inherited socket until its other end is closed."""
    for module in IMPORTED:
        importlib.import_module(module)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lack the other threads"
    gc.collect()
    gc.freeze()
    channel = socket.socket(fileno=int(sys.argv[1]))
    wakes, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end it
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wakes, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is wakes or key.fd == wakes:
                    os.read(wakes, 4096)
                    _reap(channel)
                    continue
                said, fds, _, _ = socket.recv_fds(channel, REQUEST_BYTES_MAX, 3)
                if not said:
                    return
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    selector.close()
                    channel.close()
                    os.close(wakes)
                    os.close(wake)
                    _run(json.loads(said), fds)
                for each in fds:
                    os.close(each)
                channel.send(json.dumps({"started": pid}).encode())


def _reap(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        ended = {"ended": pid, "status": os.waitstatus_to_exitcode(status)}
        channel.send(json.dumps(ended).encode())


def _run(request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """Become the requested process."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(request["environment"])
        random.seed()
        command, *sys.argv[1:] = request["command"]
        if command == SEQGATE:
            sys.argv[0] = command
            runpy.run_path(command, run_name="__main__")
        else:
            runpy.run_module(command, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
