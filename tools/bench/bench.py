"""What every group of measurements has: running services, time, and the limits found so far."""

import asyncio
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from tools.bench.measurement import BenchError, Limit, Measurement
from tools.bench.rounds import ROUNDS
from tools.bench.workload import Job, Outcome, Workload, outcomes_from_json
from tools.stack.child import bound_to_us, tell
from tools.stack.stack import Stack

ROOT: Final = Path(__file__).resolve().parents[2]

SECONDS: Final = 0.4
"""How long one round of a measurement takes, unless asked otherwise."""

LOAD_GRACE_S: Final = 120.0
"""How long the load process may take beyond the time it measures."""

STOP_TIMEOUT_S: Final = 5.0
"""How long a child may take to end when it is asked to."""

UNDEDUPLICATED: Final = "bench/off"
"""The namespace where policy switches deduplication off."""


class NullLedger(NamedTuple):
    """See tools.bench.null_ledger."""

    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class Bench:
    """See the module."""

    stack: Stack
    folder: Path
    null_ledger: NullLedger
    seconds: float
    _found: dict[str, Measurement] = field(default_factory=dict)

    def note(self, measurements: Sequence[Measurement]) -> None:
        """Have measurements serve as limits."""
        self._found.update((each.name, each) for each in measurements)

    def pid(self, service: str) -> int:
        """The id of a service's process."""
        pids = self.stack.endpoints["pids"]
        assert isinstance(pids, dict)
        return int(pids[service])

    def limit(self, name: str, *, each: float = 1) -> Limit:
        """A rate that was found, as a limit of something of which one such call does `each`."""
        return Limit(name, self._found[name].value * each)

    def scaled(self, number: int) -> int:
        """As much of something as there is time for: less where rounds are shorter than usual."""
        return math.ceil(number * min(1.0, self.seconds / SECONDS))

    async def load(
        self,
        workloads: Sequence[Workload],
        *,
        seconds: float | None = None,
        environment: Mapping[str, str] | None = None,
        others: Mapping[str, int] | None = None,
    ) -> Mapping[str, Outcome]:
        """Have a process of its own do these, in turn.

        Args:
            seconds: where a round takes another time than usual.
            environment: what the process is told besides.
            others: the ids of processes of other stacks that workloads name.
        """
        pids: dict[str, int] = {"null": self.null_ledger.pid}
        running = self.stack.endpoints["pids"]
        assert isinstance(running, dict)
        pids.update(running, **(others or {}))
        job = Job(list(workloads), ROUNDS, seconds or self.seconds, pids)
        answer = await converse("tools.bench.load", job.to_json(), LOAD_GRACE_S, environment)
        return outcomes_from_json(answer)


async def converse(
    module: str, given: str, within_s: float, environment: Mapping[str, str] | None = None
) -> str:
    """What a process that runs this module answers.

    Raises:
        BenchError: it failed, or did not end in time.
    """
    process = await asyncio.create_subprocess_exec(
        *bound_to_us([sys.executable, "-m", module]),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )
    try:
        async with asyncio.timeout(within_s):
            answer, trouble = await process.communicate(given.encode())
    except TimeoutError:
        raise BenchError(f"{module} did not end") from None
    finally:
        await _end(process)
    if process.returncode:
        raise BenchError(f"{module} failed: {trouble.decode(errors='replace')}")
    return answer.decode()


@asynccontextmanager
async def null_ledger() -> AsyncIterator[NullLedger]:
    """The ledger that only answers, in a process of its own; it ends with its standard input."""
    process = await asyncio.create_subprocess_exec(
        *bound_to_us([sys.executable, "-m", "tools.bench.null_ledger"]),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = (await process.stdout.readline()).decode().strip()
        if not port:
            raise BenchError("the null ledger did not start")
        yield NullLedger(f"127.0.0.1:{port}", process.pid)
        process.stdin.close()
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    tell(process, signal.SIGKILL)
    await process.wait()
