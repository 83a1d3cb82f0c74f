"""Simulated processes.

The loop assigns every handle to a process. A process can be killed, stopped and continued, handles
signals, and has its own clocks. The code that runs in it needs no change.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import ref

from tests.simulation.ground.clock import Clock

if TYPE_CHECKING:
    from tests.simulation.ground.loop import Handle, VirtualLoop


TASKS_LOOKED_AT: Final = 256
"""Finished tasks are dropped once this many were added to twice those left the last time."""


class Process:
    """One simulated process.

    A restarted process is a new Process of the same name: it inherits the links and addresses of
    that name, and no memory.

    Attributes:
        name: its name in links (network.py) and in the trace.
        host: the host it listens on; processes of one host reach each other as localhost.
        clock: its clocks.
        gate: collects handles that must not run: a list while stopped or dead, else None.
        main: the task of `start`.
        failure: the exception that the main coroutine raised.
        at_end: callbacks for its death or end, called in the order of registration.
        at_pause: callbacks for a stop (True) and a continue (False).
    """

    def __init__(
        self, name: str, *, host: str | None = None, loop: VirtualLoop | None = None
    ) -> None:
        if loop is None:
            from tests.simulation.ground.loop import virtual_loop

            loop = virtual_loop()
        self.name: Final = name
        self.host: Final = host or name
        self.loop: Final = loop
        self.clock: Final = Clock(loop)
        self.context: Final = Context()
        self.gate: list[Handle] | None = None
        self.graveyard: list[Any] = []
        self.signal_handlers: dict[int, Callable[[], object]] = {}
        self.main: asyncio.Task[Any] | None = None
        self.failure: BaseException | None = None
        self.at_end: list[Callable[[], object]] = []
        self.at_pause: list[Callable[[bool], object]] = []
        self._is_alive = True
        self._ended: asyncio.Future[None] | None = None
        self._before: list[Process] = []
        self._tasks: list[ref[asyncio.Task[Any]]] = []
        self._tasks_max = TASKS_LOOKED_AT
        loop.processes.append(self)

    def __repr__(self) -> str:
        return f"<Process {self.name}>"

    @property
    def is_alive(self) -> bool:
        """True until it ends or is killed. A stopped process is alive."""
        return self._is_alive

    @property
    def is_stopped(self) -> bool:
        return self._is_alive and self.gate is not None

    # ---- running

    def __enter__(self) -> Process:
        """Attribute calls inside the context to this process."""
        self._before.append(self.loop.process)
        self.loop.process = self
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.process = self._before.pop()

    def start(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        """Run the process's main coroutine. The process ends with it."""
        assert self.main is None, f"{self.name} was started before"
        self.main = self.spawn(main)
        self.main.add_done_callback(self._main_done)
        return self.main

    def spawn(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        """Run a coroutine in this process."""
        with self:
            task: asyncio.Task[Any] = self.loop.create_task(work(), context=self.context.copy())
        return task

    def has(self, task: asyncio.Task[Any]) -> None:
        """Record a task made in this process."""
        tasks = self._tasks
        tasks.append(ref(task))
        if len(tasks) > self._tasks_max:
            self._tasks = [ref(each) for each in self.tasks()]
            self._tasks_max = 2 * len(self._tasks) + TASKS_LOOKED_AT

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Unfinished tasks, oldest first."""
        found = (each() for each in self._tasks)
        return [task for task in found if task is not None and not task.done()]

    def _main_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            self.failure = task.exception()
        self._end()

    async def ended(self) -> None:
        """Wait until it has ended or was killed."""
        if not self._is_alive:
            return
        if self._ended is None:
            with self.loop.world:
                self._ended = self.loop.create_future()
        await asyncio.shield(self._ended)

    # ---- signals

    def signal(self, number: int) -> None:
        """Deliver a signal. An unhandled one kills the process."""
        if not self._is_alive:
            return
        if number == signal.SIGKILL:
            self.kill()
        elif number == signal.SIGSTOP:
            self.stop()
        elif number == signal.SIGCONT:
            self.cont()
        elif (handler := self.signal_handlers.get(number)) is not None:
            self.loop.run_in(self, handler)
        else:
            self.kill()

    def kill(self) -> None:
        """SIGKILL: none of its code runs again, not even finally and except blocks. Bytes already
        sent may still arrive; its connections are reset."""
        if self._is_alive:
            self.loop.trace("killed", self.name)
            self._end()

    async def die(self) -> NoReturn:
        """Kill the process that awaits this. Never returns."""
        self.kill()
        await self.loop.create_future()
        raise AssertionError("the dead do not return")

    def _end(self) -> None:
        if not self._is_alive:
            return
        self._is_alive = False
        held, self.gate = self.gate or [], self.graveyard
        self.graveyard += held
        # Collecting a suspended task would run its finally blocks: keep them all alive.
        self.graveyard += self.tasks()
        self.loop.world.graveyard.append(self)
        for told in self.at_end:
            told()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def stop(self) -> None:
        """SIGSTOP: none of its code runs until `cont`. Time passes, so its timers fire late."""
        if self._is_alive and self.gate is None:
            self.gate = []
            for told in self.at_pause:
                told(True)

    def cont(self) -> None:
        """SIGCONT."""
        if self.is_stopped:
            held, self.gate = self.gate, None
            self.loop.let_go(held or [])
            for told in self.at_pause:
                told(False)

    def bury(self) -> None:
        """Release everything kept of it."""
        for each in self.graveyard:
            if isinstance(each, Process) and each is not self:
                each.bury()
        self.graveyard = []
        self.at_end = []
        self.at_pause = []
        self.signal_handlers = {}
        self.main = None
