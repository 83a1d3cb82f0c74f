"""Simulated processes.

A process is whose a handle is: it can be killed, stopped and continued, has signals, and clocks of
its own. What runs in it need not know.
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
"""After so many tasks, and twice as many as were left, it is looked which are done."""


class Process:
    """See the module.

    A process that comes back is another Process with the same name: it has the name's links and
    addresses, and no memory.

    Attributes:
        name: what links (network.py) and the trace know it by.
        host: where it listens; processes with one host reach each other as localhost.
        clock: its clocks.
        gate: takes the handles that must not run: a list while it is stopped or dead, else None.
        main: the task of `start`.
        failure: what the main coroutine raised.
        at_end: told when it dies or ends, in the order of their coming.
        at_pause: told when it stops, True, and when it goes on, False.
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
        """Whether it has neither ended nor been killed. A stopped one is alive."""
        return self._is_alive

    @property
    def is_stopped(self) -> bool:
        return self._is_alive and self.gate is not None

    # ---- running

    def __enter__(self) -> Process:
        """What is called within, is called in this process."""
        self._before.append(self.loop.process)
        self.loop.process = self
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.process = self._before.pop()

    def start(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        """Run the process's main coroutine: when it ends, the process does."""
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
        """A task was made in this process."""
        tasks = self._tasks
        tasks.append(ref(task))
        if len(tasks) > self._tasks_max:
            self._tasks = [ref(each) for each in self.tasks()]
            self._tasks_max = 2 * len(self._tasks) + TASKS_LOOKED_AT

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Its tasks that are not done, in the order of their making."""
        found = (each() for each in self._tasks)
        return [task for task in found if task is not None and not task.done()]

    def _main_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            self.failure = task.exception()
        self._end()

    async def ended(self) -> None:
        """Return when it has ended, or was killed."""
        if not self._is_alive:
            return
        if self._ended is None:
            with self.loop.world:
                self._ended = self.loop.create_future()
        await asyncio.shield(self._ended)

    # ---- signals

    def signal(self, number: int) -> None:
        """Send it a signal; one that it does not handle kills it."""
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
        """SIGKILL: nothing of it runs again, and no finally or except either. What it sent may
        still arrive; its connections are reset."""
        if self._is_alive:
            self.loop.trace("killed", self.name)
            self._end()

    async def die(self) -> NoReturn:
        """Kill the process whose code awaits this. It never returns."""
        self.kill()
        await self.loop.create_future()
        raise AssertionError("the dead do not return")

    def _end(self) -> None:
        if not self._is_alive:
            return
        self._is_alive = False
        held, self.gate = self.gate or [], self.graveyard
        self.graveyard += held
        # Whoever is collected while suspended runs its finally blocks: nobody of these may be.
        self.graveyard += self.tasks()
        self.loop.world.graveyard.append(self)
        for told in self.at_end:
            told()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def stop(self) -> None:
        """SIGSTOP: nothing of it runs until `cont`. Time goes on, and its timers become late."""
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
        """Forget what is left of it."""
        for each in self.graveyard:
            if isinstance(each, Process) and each is not self:
                each.bury()
        self.graveyard = []
        self.at_end = []
        self.at_pause = []
        self.signal_handlers = {}
        self.main = None
