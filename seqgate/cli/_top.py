"""`seqgate top`: shows the activity of all services, live."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from enum import StrEnum
from typing import Any, Final

from seqgate.cli._arguments import WILDCARDS, topic_pattern
from seqgate.cli._command import Run
from seqgate.cli._declared import argument, choice, flag, option
from seqgate.cli._failure import DONE, UNAVAILABLE
from seqgate.cli._output import Output
from seqgate.cli._top_screen import rows_of, screen, summary
from seqgate.client._frames import SORTS, Sample, Sampler, frame_of
from seqgate.errors import NotFoundError

INTERVAL_S: Final = 2.0
INTERVAL_MIN_S: Final = 0.1
INTERVAL_MAX_S: Final = 3_600.0
"""The default, the shortest and the longest interval between frames."""


EVERY: Final = "*"
"""The pattern of all topics."""


class Sort(StrEnum):
    NAME = "name"
    IN = "in"
    OUT = "out"
    DUPLICATES = "duplicates"
    LAG = "lag"
    BLOCKED = "blocked"


async def top(
    run: Run,
    pattern: str = argument(
        "PATTERN",
        "Topics to show: a name with the wildcards *, ? and [abc]; without a slash, a name in "
        "public/default, unless it begins with *.",
        default=EVERY,
        show_default=True,
    ),
    *,
    interval: float = option(
        "SECONDS",
        "Interval between frames.",
        default=INTERVAL_S,
        min=INTERVAL_MIN_S,
        max=INTERVAL_MAX_S,
    ),
    once: bool = flag("Print one frame, measured over one interval, and exit."),
    sort: Sort = choice("Sort order of topics, largest first.", default=Sort.NAME),
) -> int:
    """Monitor topics: rates in and out per second, verdicts, lag, and the reasons for waiting keys.

    On a terminal, frames replace each other; q quits and s changes the sort order. In JSON, a frame
    is one object. Unreachable services are listed and the rest is shown; with --once the exit code
    is then 3.

    Read-only: for a subscription that no dispatcher owns, only its lag is shown. Limited to 200
    topics with 100 subscriptions each.
    """
    is_name = not set(pattern) & set(WILDCARDS)
    pattern = topic_pattern(pattern)
    sampler = Sampler(run.services, pattern)
    if not (once or run.output.json) and sys.stdout.isatty():
        run.waits.end()  # frames list unreachable services
        await Live(sampler, interval, sort.value).run()
        return DONE
    before: Sample | None = None
    while True:
        now = await sampler.sample()
        is_wanted = is_name or (once and pattern != EVERY)
        if is_wanted and not now.topics and not now.away:
            what = "topic not found" if is_name else "no topic matches the pattern"
            raise NotFoundError(what, reason="TOPIC_NOT_FOUND", details={"topic": pattern})
        if before is not None or not once:
            _print(run.output, frame_of(now, before, sort.value))
        if before is not None and once:
            return UNAVAILABLE if now.away else DONE
        before = now
        with run.waits.on(f"the rates of an interval of {interval:g} s") if once else nullcontext():
            await asyncio.sleep(interval)


def _print(output: Output, frame: dict[str, Any]) -> None:
    if output.json:
        output.record(frame)
        return
    output.line("\n".join(summary(frame)))
    output.table(*rows_of(frame))
    output.line("")


class Live:
    """Frames on a terminal, each in place of the previous one."""

    def __init__(self, sampler: Sampler, interval_s: float, sort: str) -> None:
        self._sampler = sampler
        self._interval_s = interval_s
        self._sort = sort
        self._quit: Callable[[], object] = lambda: None
        self._samples: tuple[Sample | None, Sample | None] = (None, None)
        self._show: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Show frames until q is pressed."""
        from rich.console import Console  # slow to import, and useless to scripts
        from rich.live import Live as RichLive

        console = Console(highlight=False)
        with RichLive(console=console, screen=True, auto_refresh=False) as live:

            def show() -> None:
                before, now = self._samples
                if now is not None:
                    frame = frame_of(now, before, self._sort)
                    live.update(screen(frame, self._sort, console.size), refresh=True)

            self._show = show
            async with _keys(self._pressed), _resized(show):
                sampling = asyncio.create_task(self._sample())
                self._quit = sampling.cancel
                try:
                    await asyncio.wait({sampling})
                finally:
                    sampling.cancel()
                    await asyncio.wait({sampling})
                if not sampling.cancelled():
                    sampling.result()

    async def _sample(self) -> None:
        while True:
            self._samples = self._samples[1], await self._sampler.sample()
            self._show()
            await asyncio.sleep(self._interval_s)

    def _pressed(self, keys: bytes) -> None:
        for key in keys.decode(errors="replace"):
            if key in "qQ":
                self._quit()
            elif key in "sS":
                names = list(SORTS)
                self._sort = names[(names.index(self._sort) + 1) % len(names)]
                self._show()


@asynccontextmanager
async def _keys(pressed: Callable[[bytes], None]) -> AsyncIterator[None]:
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    loop = asyncio.get_running_loop()

    def read() -> None:
        keys = b""
        with suppress(OSError):
            keys = os.read(descriptor, 1024)
        if not keys:  # the terminal is gone
            loop.remove_reader(descriptor)
            keys = b"q"
        pressed(keys)

    with _unbuffered(descriptor):
        loop.add_reader(descriptor, read)
        try:
            yield
        finally:
            loop.remove_reader(descriptor)


@contextmanager
def _unbuffered(descriptor: int) -> Any:
    """Read keys without Enter and without echo; Ctrl-C still interrupts."""
    import termios
    import tty

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@asynccontextmanager
async def _resized(show: Callable[[], None]) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, show)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
