"""An event loop in virtual time.

When nothing is ready, time jumps to the next timer; without a timer, a waiting main coroutine is a
`Deadlock`. Nothing depends on the machine: there are no threads, sockets or real clocks. One seed
gives one order of events.

Each handle belongs to a `Process` (process.py): the one that scheduled it or, for a step of a task
or a callback of a future, the one that made the task or future. The loop keeps the owner itself
rather than in a context variable, because services start tasks in empty contexts. Handles of a
stopped or dead process go to its gate.
"""

import asyncio
import functools
import gc
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from enum import Enum
from hashlib import blake2b
from heapq import heappop, heappush
from random import Random
from typing import Any, Final, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from tests.simulation.ground.chance import seeded_chance
from tests.simulation.ground.clock import virtual_clocks
from tests.simulation.ground.process import Process

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

HANDLE_S: Final = 0.000_005
"""Virtual time that each handle takes, so that load delays timers as on a real machine."""

LATE_S: Final = 0.000_000_001
"""The least lateness of a timer, so that rounding never fires one early."""

COLLECT_HANDLES: Final = 50_000
"""Handles between two garbage collections: counted, because finalizers run at a collection."""

BURIALS_MAX: Final = 6
"""The most collections of a finished run's remains."""


class Deadlock(AssertionError):
    """Nothing is ready, no timer is set, and the main coroutine still waits."""


class OutOfTime(AssertionError):
    """The main coroutine exceeded its limit of virtual time."""


class Shuffle(Enum):
    """Which handles ready at the same time the seed reorders."""

    NOTHING = "nothing"
    PROCESSES = "processes"
    """The order of processes; within a process, asyncio's order is kept."""
    EVERYTHING = "everything"


class Handle:
    """A scheduled callback and its process. Mimics asyncio.Handle and TimerHandle."""

    __slots__ = ("_args", "_callback", "_context", "_when", "process")

    def __init__(
        self,
        callback: Callable[..., object] | None,
        args: tuple[Any, ...],
        context: Context,
        process: Process,
        when: float = 0.0,
    ) -> None:
        self._callback = callback
        self._args = args
        self._context = context
        self._when = when
        self.process = process

    def cancel(self) -> None:
        self._callback = None
        self._args = ()

    def cancelled(self) -> bool:
        return self._callback is None

    def when(self) -> float:
        """The due time on the process's own clock."""
        return self._when

    def __repr__(self) -> str:
        return f"<Handle {self._callback!r} of {self.process.name}>"


class _Owned:
    """A callback added by one process to a future of another."""

    __slots__ = ("_callback", "process")

    def __init__(self, callback: Callable[..., object], process: Process) -> None:
        self._callback = callback
        self.process = process

    def __call__(self, *args: Any) -> None:
        self._callback(*args)

    def __eq__(self, other: object) -> bool:
        return self._callback == (other._callback if isinstance(other, _Owned) else other)

    def __hash__(self) -> int:
        return hash(self._callback)


def _owned(future: Any, callback: Any) -> Any:
    """Bind a future's callback to the process that adds it. (Wake-ups of waiting tasks carry their
    process already.)"""
    process = future.get_loop().process
    if (
        process is future.process
        or future.process is None
        or isinstance(getattr(callback, "__self__", None), asyncio.Task)
    ):
        return callback
    return _Owned(callback, process)


class Future(asyncio.Future[Any]):
    """A future hashed by a serial number, so that sets of futures iterate in a fixed order."""

    process: Any = None
    _number: int

    def add_done_callback(
        self, fn: Callable[..., object], /, *, context: Context | None = None
    ) -> None:
        super().add_done_callback(_owned(self, fn), context=context)

    def __hash__(self) -> int:
        try:
            return self._number
        except AttributeError:
            self._number = self.get_loop().next_number()  # type: ignore[attr-defined]
            return self._number


class Task(asyncio.Task[Any]):
    """A task, hashed likewise. It runs in the process that made it, whichever process wakes it."""

    process: Any = None
    _number: int

    def add_done_callback(
        self, fn: Callable[..., object], /, *, context: Context | None = None
    ) -> None:
        super().add_done_callback(_owned(self, fn), context=context)

    def __hash__(self) -> int:
        try:
            return self._number
        except AttributeError:
            self._number = self.get_loop().next_number()  # type: ignore[attr-defined]
            return self._number


class VirtualLoop(asyncio.AbstractEventLoop):
    """The event loop of a simulation. `run` makes it.

    Attributes:
        now: virtual seconds since the run began; `time()` is the current process's own clock.
        random: the source of all choices of the simulation.
        process: the process whose callback is running.
        processes: all processes ever made, dead ones included.
        world: the process of the simulation itself; never killed or stopped.
        failures: unhandled exceptions, of callbacks and of tasks that nothing awaits.
        executor_s: the duration of work in an executor, drawn from `random`.
        handles: how many handles have run.
    """

    def __init__(self, seed: int, shuffle: Shuffle = Shuffle.NOTHING) -> None:
        self.now = 0.0
        self.seed: Final = seed
        self.random: Final = Random(seed)
        self.shuffle = shuffle
        self.failures: list[dict[str, Any]] = []
        self.executor_s: Callable[[Random], float] = lambda random: random.uniform(0, 0.001)
        self.handles = 0
        self.limit_s: float | None = None
        self.is_traced = True
        self._numbers = 0
        self._sequence = 0
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._collected_at = 0
        self._is_buried = False
        self._is_running = False
        self._thread = threading.get_ident()
        self._trace = blake2b(digest_size=16)
        self._task_factory: Any = None
        self._generators: WeakKeyDictionary[Any, Process] = WeakKeyDictionary()
        self._exception_handler: Callable[[Any, dict[str, Any]], object] | None = None
        self.processes: list[Process] = []
        self.world: Final = Process("world", loop=self)
        self.process: Process = self.world

    # ---- serial numbers and the trace

    def next_number(self) -> int:
        """The next serial number, from 1."""
        self._numbers += 1
        return self._numbers

    def trace(self, *what: object) -> None:
        """Add an event to the digest, if one was requested."""
        if not self.is_traced:
            return
        self._trace.update(f"{self.now:.9f} {self.process.name} {what}\n".encode())

    def digest(self) -> str:
        """A hash of the run's events: equal runs have equal digests."""
        whole = self._trace.copy()
        whole.update(f"{self.now:.9f} {self.handles} {self._numbers}".encode())
        return whole.hexdigest()

    # ---- scheduling

    def time(self) -> float:
        return self.process.clock.monotonic()

    def _owner(self, callback: Any, args: tuple[Any, ...]) -> Process:
        """The process that a callback belongs to."""
        of: Any = getattr(callback, "__self__", None)
        kind = type(of)
        if kind is not Task and kind is not Future:
            if type(callback) is _Owned:
                return callback.process
            if not args:
                return self.process
            of = args[0]
            kind = type(of)
            if kind is not Task and kind is not Future:
                return self.process
        process: Process | None = of.process
        return process or self.process  # None while the task is being made

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Any:
        of = getattr(callback, "__self__", None)  # most are steps of tasks
        process = (type(of) is Task and of.process) or self._owner(callback, args)
        handle = Handle(callback, args, copy_context() if context is None else context, process)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Any:
        if threading.get_ident() != self._thread:
            raise RuntimeError("there are no threads in a simulation: what starts one is replaced")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> Any:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> Any:
        process = self._owner(callback, args)
        handle = Handle(
            callback, args, copy_context() if context is None else context, process, when
        )
        self._push(self.process.clock.at(when), handle)
        return handle

    def schedule(
        self, at: float, process: Process, callback: Callable[..., object], *args: Any
    ) -> Handle:
        """Call something in a process, at a loop time."""
        handle = Handle(callback, args, process.context, process)
        self._push(at, handle)
        return handle

    def run_in(self, process: Process, callback: Callable[..., object], *args: Any) -> Handle:
        """Call something in a process in the next iteration."""
        handle = Handle(callback, args, process.context, process)
        self._ready.append(handle)
        return handle

    def _push(self, at: float, handle: Handle) -> None:
        if self._is_buried:
            return
        self._sequence += 1
        heappush(self._timers, (at, self._sequence, handle))

    def let_go(self, handles: list[Handle]) -> None:
        """Make the handles of a gate ready again."""
        self._ready.extend(handles)

    def create_future(self) -> Any:
        future = Future(loop=self)
        future.process = self.process
        return future

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> Any:
        if self._is_buried:
            coro.close()
            return self.create_future()
        if self._task_factory is not None:
            return self._task_factory(self, coro, context=context)
        task = Task(coro, loop=self, name=name, context=context)
        task.process = self.process
        self.process.has(task)
        return task

    def set_task_factory(self, factory: Any) -> None:
        self._task_factory = factory

    def get_task_factory(self) -> Any:
        return self._task_factory

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], Any], *args: *Ts) -> Any:
        """Run the work in this thread, after `executor_s`: there are no other threads."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self.executor_s(self.random), work)
        return future

    # ---- running

    def run_until_complete(self, future: Any) -> Any:
        """Run until the future is done, and return its result.

        Raises:
            Deadlock, OutOfTime: the future will not be done.
        """
        main = asyncio.ensure_future(future, loop=self)
        ready, timers = self._ready, self._timers
        shuffles = self.shuffle is not Shuffle.NOTHING
        self._is_running = True
        try:
            while not main.done():
                if not ready:
                    self._jump()
                now = self.now
                while timers and timers[0][0] <= now:
                    ready.append(heappop(timers)[2])
                count = len(ready)
                if shuffles and count > 1:
                    self._reorder()
                for _ in range(count):
                    handle = ready.popleft()
                    callback = handle._callback
                    if callback is None:
                        continue
                    process = handle.process
                    if process.gate is not None:
                        process.gate.append(handle)
                        continue
                    self.process = process
                    try:
                        handle._context.run(callback, *handle._args)
                    except (KeyboardInterrupt, SystemExit):
                        raise
                    except BaseException as error:
                        self.call_exception_handler(
                            {"message": "a callback failed", "exception": error, "handle": handle}
                        )
                self.process = self.world
                self.now += count * HANDLE_S
                self.handles += count
                if self.handles - self._collected_at >= COLLECT_HANDLES:
                    self._collected_at = self.handles
                    gc.collect()
        finally:
            self._is_running = False
            self.process = self.world
        return main.result()

    def _jump(self) -> None:
        """Advance time to the next timer, when nothing is ready."""
        timers = self._timers
        while timers and timers[0][2]._callback is None:
            heappop(timers)
        if not timers:
            tasks = [task for process in self.processes for task in process.tasks()]
            waiting = sorted(str(task.get_coro()) for task in tasks)
            raise Deadlock(
                f"at {self.now:.3f} s nothing is ready, and no timer is set: {waiting[:20]}"
            )
        self.now = max(self.now, timers[0][0] + LATE_S)
        if self.limit_s is not None and self.now > self.limit_s:
            raise OutOfTime(f"not done after {self.limit_s} s")

    def _reorder(self) -> None:
        ready = self._ready
        if self.shuffle is Shuffle.EVERYTHING:
            handles = list(ready)
            self.random.shuffle(handles)
        else:
            of: dict[Process, deque[Handle]] = {}
            turns = []
            for handle in ready:
                of.setdefault(handle.process, deque()).append(handle)
                turns.append(handle.process)
            if len(of) == 1:
                return
            self.random.shuffle(turns)
            handles = [of[process].popleft() for process in turns]
        ready.clear()
        ready.extend(handles)

    # ---- the rest of asyncio's interface

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_buried

    def close(self) -> None:
        self.bury()

    get_debug = staticmethod(bool)
    """False, from C code: every future asks."""

    def set_debug(self, enabled: bool) -> None:
        pass

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        process = self.process
        process.signal_handlers[sig] = lambda: callback(*args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self.process.signal_handlers.pop(sig, None) is not None

    def set_exception_handler(self, handler: Any) -> None:
        self._exception_handler = handler

    def get_exception_handler(self) -> Any:
        return self._exception_handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append({**context, "process": self.process.name, "at": self.now})

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._is_buried:
            return
        if self._exception_handler is not None:
            self._exception_handler(self, context)
        else:
            self.default_exception_handler(context)

    async def shutdown_asyncgens(self) -> None:
        pass

    async def shutdown_default_executor(self) -> None:
        pass

    def _timer_handle_cancelled(self, handle: Any) -> None:
        pass

    # ---- finalizers of async generators

    def _first_iteration(self, generator: Any) -> None:
        self._generators[generator] = self.process

    def _finalized(self, generator: Any) -> None:
        process = self._generators.pop(generator, self.world)
        if self._is_buried:
            return
        if not process.is_alive:
            process.graveyard.append(generator)  # a dead process runs no finally block
            return
        with process:
            self.create_task(generator.aclose())

    # ---- the end

    def bury(self) -> None:
        """Discard everything left of the run. Python runs the remaining finally blocks; they can
        schedule nothing."""
        self._is_buried = True
        self._ready = deque(maxlen=0)
        self._timers = []
        self._generators.clear()
        self.processes = []
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
            stack.callback(setattr, sys, "unraisablehook", hook)
            self.world.bury()
            # A task suspended in a finally block revives once, with all it references.
            for _ in range(BURIALS_MAX):
                if not gc.collect():
                    break


def run(
    main: Callable[[], Coroutine[Any, Any, T]],
    *,
    seed: int,
    shuffle: Shuffle = Shuffle.NOTHING,
    limit_s: float | None = None,
    tell_digest: Callable[[str], object] | None = None,
) -> T:
    """Run a coroutine in virtual time and return its result. Meanwhile clocks are the processes',
    and randomness comes from the seed.

    Args:
        main: makes the coroutine; called with the loop running.
        limit_s: the limit of virtual time, in seconds; None for no limit.
        tell_digest: called with the digest of the run.

    Raises:
        Deadlock, OutOfTime: the coroutine does not end.
    """
    _keep_what_is_there()
    loop = VirtualLoop(seed, shuffle)  # type: ignore[abstract]  # has no sockets and subprocesses
    loop.limit_s = limit_s
    loop.is_traced = tell_digest is not None
    outer = asyncio._get_running_loop()
    collected = gc.isenabled()
    with ExitStack() as stack:
        stack.callback(asyncio._set_running_loop, outer)
        asyncio._set_running_loop(loop)
        hooks = sys.get_asyncgen_hooks()
        stack.callback(sys.set_asyncgen_hooks, *hooks)
        sys.set_asyncgen_hooks(loop._first_iteration, loop._finalized)
        stack.enter_context(virtual_clocks(loop))
        stack.enter_context(seeded_chance(loop))
        stack.enter_context(_without_registry())
        gc.disable()
        try:
            try:
                result: T = loop.run_until_complete(main())
                return result
            finally:
                if tell_digest is not None:
                    tell_digest(loop.digest())
                loop.bury()
        finally:
            if collected:
                gc.enable()


@contextmanager
def _without_registry() -> Iterator[None]:
    """Suspend asyncio's weak set of all tasks, which costs more than making a task. Processes keep
    their own lists."""
    registry: Any = asyncio.tasks._all_tasks  # type: ignore[attr-defined]
    registry.add = _nothing
    try:
        yield
    finally:
        del registry.add


def _nothing(_: object) -> None:
    """Do nothing."""


@functools.lru_cache(maxsize=1)
def _keep_what_is_there() -> None:
    """Exempt all objects older than the first run from garbage collection, which otherwise
    dominates the cost of a short run."""
    gc.collect()
    gc.freeze()


def virtual_loop() -> VirtualLoop:
    """The running loop, as a VirtualLoop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


async def passes(seconds: float) -> None:
    """Sleep in virtual time, which takes no real time."""
    await asyncio.sleep(seconds)
