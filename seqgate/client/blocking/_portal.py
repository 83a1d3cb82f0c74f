"""The way from threads into the event loop of a client, and back.

    thread ── post ──▶ posted ── one call_soon_threadsafe ──▶ _take_over ──▶ the asyncio client
    thread ◀── a future that is set ── the asyncio client

Waking the loop's thread costs more than most of what it is woken for. What is posted while a
hand-over is scheduled joins it, so under load a hand-over carries many posts.
"""

import asyncio
import logging
import os
import threading
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures._base import FINISHED, RUNNING
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial, wraps
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

from seqgate.client._status import forget_frames
from seqgate.errors import ClientForkedError, SeqgateError

_log: Final = logging.getLogger("seqgate.client")

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", covariant=True)

STOP_TIMEOUT_S: Final = 15.0
"""How long the loop's thread may take to end."""


class ClosedError(RuntimeError):
    """The client is closed, or was while it was called."""


class Portal:
    """An event loop in a thread, and the way into it. Safe for threads.

    Attributes:
        hand_overs: how often the loop was woken for posts.
    """

    def __init__(self, name: str) -> None:
        self.hand_overs = 0
        self._pid = os.getpid()
        self._posted: deque[Callable[[], object]] = deque()
        self._is_scheduled = False
        self._is_closed = False  # `close` was called
        self._is_ending = False  # no coroutine begins any more
        self._is_over = False  # the loop runs no more
        self._running: dict[Future[Any], asyncio.Task[Any]] = {}
        self._loop = _Loop()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def is_gone(self) -> bool:
        """Whether the client is closed, or the process is a fork of the one that made it."""
        return self._is_closed or os.getpid() != self._pid

    @property
    def is_here(self) -> bool:
        """Whether this is the loop's thread."""
        return threading.get_ident() == self._thread.ident

    def check(self) -> None:
        """Check that this thread may use the client, and block.

        Raises:
            ClientForkedError: the client is of the process that this one was forked from.
            RuntimeError: this thread runs an event loop.
        """
        if os.getpid() != self._pid:
            raise ClientForkedError(
                "the client was made before this process was forked: make one after the fork, in"
                " gunicorn's post_fork, Celery's worker_process_init, or on first use"
            )
        if _get_running_loop() is not None:
            raise RuntimeError(
                "seqgate.client.blocking would block the event loop that runs in this thread: use"
                " the asyncio client, seqgate.client, here"
            )

    def post(self, act: Callable[[], object]) -> None:
        """Have the loop call a function after all those posted before."""
        self._posted.append(act)
        if not self._is_scheduled:
            self._is_scheduled = True
            self.hand_overs += 1
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._take_over)
        if self._is_over:
            self._refuse()

    def bell(self, act: Callable[[], object]) -> Callable[[], None]:
        """A function that posts `act`, unless it is posted already and has not begun."""
        is_rung = False

        def begin() -> None:
            nonlocal is_rung
            is_rung = False
            act()

        def ring() -> None:
            nonlocal is_rung
            if not is_rung:
                is_rung = True
                self.post(begin)

        return ring

    def run(self, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a coroutine function in the loop, in this thread's context, and return its result. An
        interrupt cancels it.

        Raises:
            ClientForkedError, RuntimeError: see `check`; or the client is closed.
            Exception: what the function raises.
        """
        self.check()
        if self._is_closed:
            raise ClosedError("the client is closed")
        done: Future[R] = Outcome()
        begin = partial(function, *args, **kwargs)
        self.post(partial(self._start, begin, copy_context(), done))
        try:
            return done.result()
        except CancelledError:
            raise ClosedError("the client was closed, or its process forked, meanwhile") from None
        finally:
            if not done.done():
                self.post(partial(self._cancel, done))
            del done  # or an error would keep this frame, and this frame the error

    def call(self, function: Callable[[], R]) -> R:
        """Call a function in the loop, and return its result. Raises the same as `run`."""

        async def called() -> R:
            return function()

        return self.run(called)

    def look(self, function: Callable[[], R]) -> R:
        """`call` a function that only looks, also when the client is closed."""
        return function() if self._is_over and os.getpid() == self._pid else self.call(function)

    def close(self, last: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a last coroutine function, end what runs, and join the thread. Later calls return
        when that is done."""
        self.forget(last)
        if os.getpid() == self._pid and not self.is_here:
            self._thread.join(STOP_TIMEOUT_S)

    def forget(self, last: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """`close` without waiting: nobody has the client any more."""
        if not self.is_gone:
            self._is_closed = True
            self.post(lambda: self._loop.create_task(self._end(last)))

    def start(self, function: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Have the loop run a coroutine function. False: it cannot, or this is its thread."""
        if self.is_gone or self.is_here:
            return False
        self.post(partial(self._start, function, copy_context(), Outcome()))
        return True

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._is_over = True  # first: who posts from here on refuses it
        self._refuse()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _take_over(self) -> None:
        self._is_scheduled = False  # first: what is posted from here on schedules the next one
        for _ in range(len(self._posted)):
            try:
                self._posted.popleft()()
            except Exception as error:  # a callback of the application's
                message = "a callback failed in the thread of a client"
                self._loop.call_exception_handler({"message": message, "exception": error})

    def _refuse(self) -> None:
        """Call what the loop will not: it finds everything closed, and tells who waits."""
        with suppress(IndexError):
            while True:
                self._posted.popleft()()

    def _start(
        self,
        begin: Callable[[], Awaitable[R]],
        context: Context,
        done: "Future[R]",
    ) -> None:
        if self._is_ending:
            done.set_exception(CancelledError())
            return
        task = self._loop.create_task(_awaiting(begin), context=context)
        self._running[done] = task
        task.add_done_callback(partial(self._finish, done))

    def _finish(self, done: "Future[R]", task: "asyncio.Task[R]") -> None:
        del self._running[done]
        if task.cancelled():
            done.set_exception(CancelledError())
        elif (error := task.exception()) is not None:
            if isinstance(error, SeqgateError):
                forget_frames(error)
            done.set_exception(error)
        else:
            done.set_result(task.result())

    def _cancel(self, done: "Future[Any]") -> None:
        task = self._running.get(done)
        if task is not None:
            task.cancel()

    async def _end(self, last: Callable[[], Coroutine[Any, Any, object]]) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        try:
            await last()
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=STOP_TIMEOUT_S)
            self._loop.stop()


class _Loop(asyncio.SelectorEventLoop):
    """A loop that a fork leaves alone: closing it there would take the parent's descriptors out of
    the selector, which both have. There and at the interpreter's exit, nothing ends its tasks, and
    nothing is to be said about that."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()
        self.set_exception_handler(self._hear)

    def __del__(self) -> None:
        if os.getpid() == self._pid and not self.is_running():
            self.close()

    def _hear(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if os.getpid() != self._pid:
            return
        # gRPC wakes all loops of a process for each event; all but one find nothing to read.
        if not isinstance(context.get("exception"), BlockingIOError):
            loop.default_exception_handler(context)


class Outcome(Future[Any]):
    """A future that cannot be cancelled: what it stands for happens anyway.

    One is made for each message, and few are waited for before they are done. The condition of a
    Future takes most of its time, so here it is made when somebody waits. Who waits makes it and
    then looks at the state, and who sets the state then looks for it: one of them sees the other.
    """

    def __init__(self) -> None:
        self._made: dict[None, threading.Condition] = {}
        self._state = RUNNING
        self._result = self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        return self._made.get(None) or self._made.setdefault(None, threading.Condition())

    def done(self) -> bool:
        return self._state == FINISHED

    def result(self, timeout: float | None = None) -> Any:
        if self._state == FINISHED and self._exception is None:
            return self._result
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._exception if self._state == FINISHED else super().exception(timeout)

    def set_result(self, result: Any) -> None:
        self._result, self._state = result, FINISHED
        if self._made:
            self._tell()

    def set_exception(self, exception: BaseException | None) -> None:
        self._exception, self._state = exception, FINISHED
        if self._made:
            self._tell()

    def _tell(self) -> None:
        with self._condition:
            for waiter in self._waiters:
                if self._exception is None:
                    waiter.add_result(self)
                else:
                    waiter.add_exception(self)
            self._condition.notify_all()
        for callback in self._done_callbacks:
            try:
                callback(self)
            except Exception:
                _log.exception("a callback of a future failed")


async def _awaiting(begin: Callable[[], Awaitable[R]]) -> R:
    return await begin()


class Held(Generic[T]):
    """What blocks in front of an object of the asyncio client, which only the portal's loop uses.

    class Admin(Held[aio.Admin]):
        create_topic = crossing(aio.Admin.create_topic)
    """

    def __init__(self, portal: Portal, held: T, owner: object) -> None:
        """The owner lives as long as this."""
        self._portal = portal
        self._held = held
        self._owner = owner


def crossing(
    method: Callable[Concatenate[T, P], Awaitable[R]],
) -> Callable[Concatenate[Held[T], P], R]:
    """A method that blocks, from one of the asyncio client, with its name, arguments and errors."""
    name = method.__name__

    @wraps(method)
    def cross(self: Held[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        function: Callable[P, Awaitable[R]] = getattr(self._held, name)
        return self._portal.run(function, *args, **kwargs)

    return cross
