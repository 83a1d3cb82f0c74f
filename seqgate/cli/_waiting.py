"""Says on standard error what a command waits for, once that takes more than a second.

Whatever may wait does so in a context:

    with waits.on("the ledger service at 127.0.0.1:7702 to answer", because=refused):
        ...

Of the waits that last, the innermost is said, once. It is said again only with another reason, at
growing intervals. A thread looks at the waits: a call that blocks the event loop is a wait, too.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from seqgate.cli._output import Output
from seqgate.errors import SeqgateError

FIRST_S: Final = 1.0
"""A wait that lasts so long is said, in seconds."""

AGAIN_S: Final = 5.0
AGAIN_MAX_S: Final = 60.0
"""The first and the longest time between two looks at the reason of a wait, in seconds. Each time
doubles."""

REASON_S: Final = 0.5
"""How long a reason may take to be found. After that the wait is said without one."""

REASON: Final = "WAITING"
"""The reason of the notes that say a wait."""

Because = Callable[[], str | Coroutine[Any, Any, str]]
"""Why a wait lasts; empty: not known. A coroutine runs in the event loop."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    what: str
    because: Because | None
    began_s: float
    loop: asyncio.AbstractEventLoop | None

    def text(self) -> str:
        reason = " ".join(self._reason().split())
        return f"waiting for {self.what}" + (f": {reason}" if reason else "")

    def _reason(self) -> str:
        found = "" if self.because is None else self.because()
        if isinstance(found, str):
            return found
        if self.loop is None or self.loop.is_closed():
            found.close()
            return ""
        asked = asyncio.run_coroutine_threadsafe(found, self.loop)
        try:
            return asked.result(REASON_S)
        except (TimeoutError, CancelledError, SeqgateError):
            asked.cancel()
            return ""


class Waits:
    """The waits of a command. Contexts may be nested, and be in several tasks."""

    def __init__(self, output: Output, now_s: Callable[[], float] = time.monotonic) -> None:
        self._output = output
        self._now_s = now_s
        self._lock = threading.Lock()
        self._waits: list[_Wait] = []
        self._told: set[str] = set()
        self._latest: _Wait | None = None
        self._look_again_s = 0.0
        self._again_s = AGAIN_S
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_often, name="waits", daemon=True)

    @contextmanager
    def on(self, what: str, because: Because | None = None) -> Iterator[None]:
        """Wait for something: a noun, and what it is to do."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        wait = _Wait(what, because, self._now_s(), loop)
        with self._lock:
            self._waits.append(wait)
        try:
            yield
        finally:
            with self._lock:
                self._waits.remove(wait)

    @asynccontextmanager
    async def entering(
        self, what: str, entered: AbstractAsyncContextManager[T], because: Because | None = None
    ) -> AsyncIterator[T]:
        """Enter a context, such as a producer that connects. Only entering it is a wait."""
        async with AsyncExitStack() as stack:
            with self.on(what, because):
                inside = await stack.enter_async_context(entered)
            yield inside

    async def each(self, what: str, source: AsyncIterator[T]) -> AsyncIterator[T]:
        """The items of a source, for each of which the command waits."""
        while True:
            with self.on(what):
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    return
            yield item

    def look(self) -> float:
        """Say the innermost wait that lasts, if that is news. Returns the time until the next look,
        in seconds."""
        now_s = self._now_s()
        with self._lock:
            waits = list(self._waits)
        lasting = [each for each in waits if now_s - each.began_s >= FIRST_S]
        if not lasting:
            return min((each.began_s + FIRST_S - now_s for each in waits), default=FIRST_S)
        wait = lasting[-1]
        if self._latest is None or self._latest.what != wait.what:
            self._again_s = AGAIN_S
        elif now_s < self._look_again_s:
            return FIRST_S
        self._latest, self._look_again_s = wait, now_s + self._again_s
        self._again_s = min(2 * self._again_s, AGAIN_MAX_S)
        self._tell(wait, wait.text(), now_s)
        return FIRST_S

    def _tell(self, wait: _Wait, text: str, now_s: float) -> None:
        with self._lock:
            if text in self._told or wait not in self._waits or self._ended.is_set():
                return
            self._told.add(text)
        seconds = f"{now_s - wait.began_s:.1f}"
        self._output.note(REASON, text, {"for": wait.what, "seconds": seconds})

    def _look_often(self) -> None:
        wait_s = FIRST_S
        while not self._ended.wait(wait_s):
            wait_s = self.look()

    def end(self) -> None:
        """Say nothing more."""
        with self._lock:
            self._ended.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        self._thread.join()
