"""The way from threads into the event loop of a client, and back.

    thread ── post ──▶ posted ── one wake-up for many ──▶ _take_over ──▶ the asyncio client
    thread ◀── a future that is set ── the asyncio client

Waking the loop's thread costs more than most of what it is woken for. What is posted while the loop
has yet to wake up joins it, so under load a hand-over carries many posts.

An exception may be raised between any two lines of a calling thread, by a signal's handler for
example, and ends that call alone. So a calling thread holds no lock, and nothing waits for its next
line:

    - What the loop does not own is a deque, and each step on it is one call into C.
    - A flag says what has happened, never what is about to: it is set after the wake-up.
    - What must follow a step is repeated in an `except BaseException` around it. There, the first
      call into C is always reached: signals are handled after a call, not before it.
"""

import asyncio
import logging
import os
import socket
import threading
from _thread import allocate_lock, start_new_thread
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures._base import FINISHED, RUNNING
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial, wraps
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar
from weakref import finalize

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
    """An event loop in a thread, and the way into it. Safe for threads, and for exceptions in them.
    It works from `start` on.

    Attributes:
        hand_overs: how often the loop took over what was posted.
    """

    def __init__(self, name: str) -> None:
        self.hand_overs = 0
        self._pid = os.getpid()
        self._posted: deque[Callable[[], object]] = deque()
        self._woken = -1  # the hand-over after which a thread last woke the loop
        self._is_closed = False  # `close` was called
        # The loop's thread alone sets these.
        self._round = 0  # counts hand-overs, once it is known which posts they include
        self._is_ending = False  # no coroutine begins any more
        self._is_over = False  # the loop runs no more
        self._running: dict[Future[Any], asyncio.Task[Any]] = {}
        self._ended = Outcome()
        self._loop: asyncio.AbstractEventLoop
        self._bells: _Bells
        self._wake: Callable[[bytes], object] = bytes  # until there is a loop
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        # A thread that is interrupted while it starts another may keep it from running: this one is
        # started by a third.
        start_new_thread(self._thread.start, ())

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
        """Have the loop call a function after all those posted before. It may be called twice if
        the loop ends meanwhile."""
        try:
            self._posted.append(act)
            # A hand-over that has not counted itself yet includes what is posted by now.
            hand_over = self.hand_overs
            if self._woken != hand_over:
                self._wake(b"\0")
                self._woken = hand_over
        except BlockingIOError:
            pass  # the socket is full of wake-ups
        except BaseException:
            self._wake(b"\0")
            raise
        if self._is_over:
            act()  # it finds everything closed, and tells who waits

    def bell(self, act: Callable[[], object]) -> Callable[[], None]:
        """A function that posts `act`, unless it is posted already and has not begun."""
        rung = -1

        def ring() -> None:
            nonlocal rung
            # What is posted in a round is called in a later one.
            at = self._round
            if rung != at or self._is_over:
                self.post(act)
                rung = at

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
        cancel = partial(self._cancel, done)
        try:
            self.post(partial(self._start, begin, copy_context(), done))
            return done.result()
        except CancelledError:
            raise ClosedError("the client was closed, or its process forked, meanwhile") from None
        except BaseException:
            if not done.done():
                self.post(cancel)
            raise
        finally:
            del done, cancel  # or an error would keep this frame, and this frame the error

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
            with suppress(TimeoutError):
                self._ended.result(STOP_TIMEOUT_S)
                self._thread.join(STOP_TIMEOUT_S)

    def forget(self, last: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """`close` without waiting: nobody has the client any more."""
        if os.getpid() == self._pid and not self._is_over:
            self.post(partial(self._begin_end, last))
            self._is_closed = True

    def begin(self, function: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Have the loop run a coroutine function. False: it cannot, or this is its thread."""
        if self.is_gone or self.is_here:
            return False
        self.post(partial(self._start, function, copy_context(), Outcome()))
        return True

    def begin_later(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`begin`, from any thread: for what the garbage collector calls."""
        if not self.is_gone:
            self.post(partial(self._start, function, Context(), Outcome()))

    # ---- in the loop's thread

    def _work(self) -> None:
        self._loop = loop = _Loop()
        asyncio.set_event_loop(loop)
        self._bells = _Bells()
        self._wake = self._bells.near.send
        loop.add_reader(self._bells.far, self._take_over)
        self._take_over()
        loop.run_forever()
        self._is_over = True  # first: what is posted from here on is called where it is posted
        self._call(len(self._posted))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        self._ended.set_result(None)

    def _take_over(self) -> None:
        with suppress(BlockingIOError):
            self._bells.far.recv(4096)
        self.hand_overs += 1  # first: what is posted from here on wakes the loop again
        posts = len(self._posted)
        self._round += 1
        self._call(posts)

    def _call(self, posts: int) -> None:
        for _ in range(posts):
            try:
                self._posted.popleft()()
            except Exception as error:  # a callback of the application's
                message = "a callback failed in the thread of a client"
                self._loop.call_exception_handler({"message": message, "exception": error})

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

    def _begin_end(self, last: Callable[[], Coroutine[Any, Any, object]]) -> None:
        if not self._is_ending:
            self._is_ending = self._is_closed = True
            self._last = self._loop.create_task(self._end(last))

    async def _end(self, last: Callable[[], Coroutine[Any, Any, object]]) -> None:
        try:
            await last()
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=STOP_TIMEOUT_S)
            self._loop.stop()


class _Bells:
    """Two connected sockets, closed with the portal: a late thread may ring until then."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.near.settimeout(0)
        self.far.settimeout(0)

    def __del__(self) -> None:
        self.near.close()
        self.far.close()


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

    One is made for each message, and few are waited for before they are done. Who waits says so,
    and then looks at the state; who sets the state then looks who waits: one of them sees the
    other. Only concurrent.futures.wait and its like take a lock, which their thread may keep when
    it is interrupted: the loop does not wait for it.
    """

    def __init__(self) -> None:
        self._state = RUNNING
        self._result = self._exception = None
        self._told: deque[Callable[[], object]] = deque()
        self._made: dict[None, threading.Condition] = {}
        self._waiters: list[Any] = []  # of concurrent.futures

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        return self._made.get(None) or self._made.setdefault(None, threading.Condition())

    def cancel(self) -> bool:
        return False

    def done(self) -> bool:
        return self._state == FINISHED

    def result(self, timeout: float | None = None) -> Any:
        if self._state == FINISHED and self._exception is None:
            return self._result
        try:
            if self.exception(timeout) is not None:
                raise self._exception  # type: ignore[misc]
            return self._result
        finally:
            del self  # or the error would keep this frame, and this frame the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._state != FINISHED:
            told = allocate_lock()
            told.acquire()
            self._tell_when_done(told.release)
            if not told.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
                raise TimeoutError
        return self._exception

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        self._tell_when_done(partial(fn, self))

    def set_result(self, result: Any) -> None:
        self._result, self._state = result, FINISHED
        if self._told or self._made:
            self._tell_all()

    def set_exception(self, exception: BaseException | None) -> None:
        self._exception, self._state = exception, FINISHED
        if self._told or self._made:
            self._tell_all()

    def _tell_when_done(self, tell: Callable[[], object]) -> None:
        self._told.append(tell)
        if self._state == FINISHED:
            self._tell()

    def _tell(self) -> None:
        while self._told:
            with suppress(IndexError):  # another thread tells
                tell = self._told.popleft()
                try:
                    tell()
                except Exception:
                    _log.exception("a callback of a future failed")

    def _tell_all(self) -> None:
        self._tell()
        if self._made:
            if self._condition.acquire(blocking=False):
                self._tell_waiters()
                self._condition.release()
            else:
                threading.Thread(target=self._wait_and_tell, daemon=True).start()

    def _wait_and_tell(self) -> None:
        with self._condition:
            self._tell_waiters()

    def _tell_waiters(self) -> None:
        """Tell each waiter of concurrent.futures, once."""
        for waiter in self._waiters:
            if self._exception is None:
                waiter.add_result(self)
            else:
                waiter.add_exception(self)


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


class Opened(Protocol):
    async def open(self) -> None: ...

    async def abandon(self) -> None: ...


def opening(portal: Portal, held: Opened) -> None:
    """Open a producer or consumer. An interrupt leaves it closed."""
    try:
        portal.run(held.open)
    except BaseException:
        portal.begin(held.abandon)
        raise


def close_when_dropped(
    held_by: object, portal: Portal, close: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Close something when the application has dropped what stands for it: an interrupt may have
    kept it from doing that itself."""
    finalize(held_by, portal.begin_later, close).atexit = False


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
