"""Processes of the benchmark besides the services: python -m tools.bench.worker MODULE

A worker calls MODULE.run with the arguments that are pickled on its standard input, and pickles the
result to its standard output. Clients run in workers, so that their processor time is told apart
from that of the services.
"""

import asyncio
import importlib
import os
import pickle
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tools.bench.figures import BenchError, Round
from tools.bench.machine import busy_s, cpu_s
from tools.stack.child import bound_to_us, tell

ROOT: Final = Path(__file__).resolve().parents[2]

WITHIN_S: Final = 600.0  # how long a worker may take, with all its rounds
CLIENT: Final = "client"  # the worker itself, in figures of processor time
OTHERS: Final = "others"  # everything else on the machine: neighbours, and the kernel's work for us


async def in_worker(
    module: str, *arguments: object, environment: Mapping[str, str] | None = None
) -> Any:
    """The result of the module's `run`, in a process of its own.

    Raises:
        BenchError: it failed, or took longer than WITHIN_S.
    """
    async with child("tools.bench.worker", module, environment=environment, stderr=PIPE) as process:
        try:
            async with asyncio.timeout(WITHIN_S):
                answer, trouble = await process.communicate(pickle.dumps(arguments))
        except TimeoutError:
            raise BenchError(f"{module} did not end within {WITHIN_S:.0f} s") from None
    if process.returncode:
        raise BenchError(f"{module} failed: {trouble.decode(errors='replace')}")
    return pickle.loads(answer)  # noqa: S301 - from our own child


@asynccontextmanager
async def child(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    stderr: int | None = None,
) -> AsyncIterator[Process]:
    """A process that runs the module, and is killed on the way out."""
    process = await asyncio.create_subprocess_exec(
        *bound_to_us([sys.executable, "-m", module, *arguments]),
        cwd=ROOT,
        stdin=PIPE,
        stdout=PIPE,
        stderr=stderr,
        env={**os.environ, **(environment or {})},
    )
    try:
        yield process
    finally:
        tell(process, signal.SIGKILL)
        await process.wait()


class Meter:
    """Times a round, and the processor time of these processes meanwhile. Entered again, it adds
    up."""

    def __init__(
        self, pids: Mapping[str, int], ours: Callable[[], float] = time.process_time
    ) -> None:
        self._pids = pids
        self._ours = ours
        self._cpu_s: dict[str, float] = {}
        self.elapsed_s = 0.0

    def __enter__(self) -> None:
        self._before = self._now()
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.elapsed_s += time.perf_counter() - self._began
        for name, seconds in self._now().items():
            self._cpu_s[name] = self._cpu_s.get(name, 0.0) + seconds - self._before[name]

    def round(self, calls: int, latencies_s: list[float] | None = None) -> Round:
        """The round, with so many calls."""
        return Round(calls, self.elapsed_s, latencies_s or [], self._cpu_s)

    def _now(self) -> dict[str, float]:
        known = {CLIENT: self._ours()}
        known |= {name: cpu_s(pid) for name, pid in self._pids.items()}
        return known | {OTHERS: busy_s() - sum(known.values())}


def main() -> None:
    run = importlib.import_module(sys.argv[1]).run
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # prints must not get into the answer
        answer.write(pickle.dumps(run(*pickle.load(sys.stdin.buffer))))  # noqa: S301 - our parent


if __name__ == "__main__":
    main()
