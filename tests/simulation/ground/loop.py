"""An event loop whose time is a number.

When nothing is ready, time jumps to the next timer; when there is no timer either and the main
coroutine waits, that is a `Deadlock`. Nothing waits for the machine: no threads, no sockets, no
clocks. With one seed, everything happens in one order.

Each handle belongs to a `Process` (process.py): to the one that scheduled it, or, if it is the step
of a task or a callback of a future, to whoever made that. The loop keeps it, not a context
variable: services start tasks in empty contexts. What a process may not run, its gate takes.
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
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from tests.simulation.ground.chance import seeded_chance
from tests.simulation.ground.clock import virtual_clocks
from tests.simulation.ground.process import Process

T = TypeVar("T")

HANDLE_S: Final = 0.000_005
"""How long a handle takes, in virtual seconds: who is busy makes timers late, as in the world."""

LATE_S: Final = 0.000_000_001
"""By how much a timer is late at least: rounding must never make it early."""

COLLECT_HANDLES: Final = 50_000
"""After so many handles the garbage is collected: by count, since finalizers run then."""


BURIALS_MAX: Final = 6
"""How often what is left of a run is collected at most."""


class Deadlock(AssertionError):
    """Nothing is ready, no timer is set, and the main coroutine waits."""


class OutOfTime(AssertionError):
    """The main coroutine takes longer than it may, in virtual time."""


class Shuffle(Enum):
    """What the seed reorders of what is ready at a time."""

    NOTHING = "nothing"
    PROCESSES = "processes"
    """Which process goes first; within a process the order is asyncio's."""
    EVERYTHING = "everything"


class Handle:
    """What is to be run, and whose it is. Used like asyncio.Handle and TimerHandle."""

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
        """In the process's own time."""
        return self._when

    def __repr__(self) -> str:
        return f"<Handle {self._callback!r} of {self.process.name}>"


class _Owned:
    """A callback that a process has added to a future of another one."""

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
    """A callback of a future's, which belongs to whoever adds it. (Those of tasks that wait say
    so themselves.)"""
    process = future.get_loop().process
    if (
        process is future.process
        or future.process is None
        or isinstance(getattr(callback, "__self__", None), asyncio.Task)
    ):
        return callback
    return _Owned(callback, process)


class Future(asyncio.Future[Any]):
    """A future whose hash is a running number, so that sets of them have an order."""

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
    """A task, likewise; it runs in the process that made it, whoever wakes it."""

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
    """See the module. Made by `run`.

    Attributes:
        now: virtual seconds since the run began. `time()` is the current process's own.
        random: what is left to chance is asked here.
        process: whose callback is running.
        processes: all that were made, the dead too.
        world: the process of whoever runs the simulation. It is never killed or stopped.
        failures: what was raised where nobody takes it: in callbacks, in tasks nobody awaits.
        executor_s: how long work in an executor takes: a function of `random`.
        handles: how many were run.
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

    # ---- numbers, and what happened

    def next_number(self) -> int:
        """1, 2, ..."""
        self._numbers += 1
        return self._numbers

    def trace(self, *what: object) -> None:
        """Note that something happened: it goes into the digest, if anybody asks for one."""
        if not self.is_traced:
            return
        self._trace.update(f"{self.now:.9f} {self.process.name} {what}\n".encode())

    def digest(self) -> str:
        """What happened, in short: equal for equal runs."""
        whole = self._trace.copy()
        whole.update(f"{self.now:.9f} {self.handles} {self._numbers}".encode())
        return whole.hexdigest()

    # ---- scheduling

    def time(self) -> float:
        return self.process.clock.monotonic()

    def _owner(self, callback: Any, args: tuple[Any, ...]) -> Process:
        """Whose a callback is."""
        of = getattr(callback, "__self__", None)
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
        return of.process or self.process  # it may be just being made

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        of = getattr(callback, "__self__", None)  # most are steps of tasks
        process = (type(of) is Task and of.process) or self._owner(callback, args)
        handle = Handle(callback, args, copy_context() if context is None else context, process)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        if threading.get_ident() != self._thread:
            raise RuntimeError("there are no threads in a simulation: what starts one is replaced")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Any:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
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
        """Run something in a process, at a time of `now`."""
        handle = Handle(callback, args, process.context, process)
        self._push(at, handle)
        return handle

    def run_in(self, process: Process, callback: Callable[..., object], *args: Any) -> Handle:
        """Run something in a process as soon as can be."""
        handle = Handle(callback, args, process.context, process)
        self._ready.append(handle)
        return handle

    def _push(self, at: float, handle: Handle) -> None:
        if self._is_buried:
            return
        self._sequence += 1
        heappush(self._timers, (at, self._sequence, handle))

    def let_go(self, handles: list[Handle]) -> None:
        """What a gate took is ready again."""
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

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """At once, after a while: there are no threads."""
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
        """The future's result.

        Raises:
            Deadlock, OutOfTime: it will not come.
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
        """To the next timer: nothing is ready."""
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

    # ---- what else a loop has

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_buried

    def close(self) -> None:
        self.bury()

    get_debug = staticmethod(bool)
    """Never. Each future asks, so what answers is made of C."""

    def set_debug(self, enabled: bool) -> None:
        pass

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
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

    # ---- async generators, which have finalizers

    def _first_iteration(self, generator: Any) -> None:
        self._generators[generator] = self.process

    def _finalized(self, generator: Any) -> None:
        process = self._generators.pop(generator, self.world)
        if self._is_buried:
            return
        if not process.is_alive:
            process.graveyard.append(generator)  # no finally of the dead runs
            return
        with process:
            self.create_task(generator.aclose())

    # ---- the end

    def bury(self) -> None:
        """Nothing runs here any more; what is left is forgotten. Its finally blocks do run, since
        Python cannot do without, and reach nothing."""
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
            # Whoever is suspended in a finally comes back to life once, with all that it holds.
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
    """What a coroutine comes to in virtual time. Clocks are the processes', and chance is the
    seed's, while it runs.

    Args:
        main: makes the coroutine; the loop is running already.
        limit_s: how long it may take, in virtual seconds; None: for ever.
        tell_digest: is told the digest of what happened.

    Raises:
        Deadlock, OutOfTime: it does not end.
    """
    _keep_what_is_there()
    loop = VirtualLoop(seed, shuffle)
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
                return loop.run_until_complete(main())
            finally:
                if tell_digest is not None:
                    tell_digest(loop.digest())
                loop.bury()
        finally:
            if collected:
                gc.enable()


@contextmanager
def _without_registry() -> Iterator[None]:
    """Meanwhile asyncio does not keep a weak set of all tasks, which costs more than to make one:
    processes know theirs."""
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
    """What was loaded before the first run is looked through no more: collecting is most of what a
    short run costs otherwise."""
    gc.collect()
    gc.freeze()


def virtual_loop() -> VirtualLoop:
    """The running loop, which is one of these."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


async def passes(seconds: float) -> None:
    """Let so much virtual time pass. Nothing waits for the machine."""
    await asyncio.sleep(seconds)
