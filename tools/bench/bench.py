"""What every group of measurements has: running services, time, and the limits found so far."""

import math
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from tools.bench.figures import Limit, Measurement, in_series
from tools.bench.load import Workload, figures
from tools.bench.logs import Logs, fill
from tools.bench.rounds import ROUNDS, BenchError, Round
from tools.stack.child import python_process
from tools.stack.stack import Stack
from tools.stack.worker import in_worker

SECONDS: Final = 0.4  # a round, unless asked otherwise
UNDEDUPLICATED: Final = "bench/off"  # the namespace where policy switches deduplication off


class NullLedger(NamedTuple):
    """See tools.bench.null_ledger."""

    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class Bench:
    stack: Stack
    folder: Path
    null: NullLedger
    seconds: float
    _found: dict[str, Measurement] = field(default_factory=dict)

    def note(self, measurements: Sequence[Measurement]) -> None:
        """Have measurements serve as limits."""
        self._found.update((each.name, each) for each in measurements)

    def pids(self, *processes: str) -> dict[str, int]:
        """Process ids by name; `null` is the null ledger's."""
        running: Any = self.stack.endpoints["pids"]
        return {name: self.null.pid if name == "null" else running[name] for name in processes}

    def limit(self, name: str, *, each: float = 1) -> Limit:
        """A rate that was found, as the limit of something of which one call does `each`."""
        return Limit(name, self._found[name].value * each)

    def series(self, name: str, *names: str) -> Limit:
        """The rate of doing these one after the other, as a limit."""
        return Limit(name, in_series(*(self._found[each].value for each in names)))

    def scaled(self, number: int) -> int:
        """Less of something where rounds are shorter than usual."""
        return math.ceil(number * min(1.0, self.seconds / SECONDS))

    async def load(
        self,
        workloads: Sequence[Workload],
        *,
        rounds: int = ROUNDS,
        seconds: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> dict[str, list[Round]]:
        """Have a client process do these in turn. Returns their rounds by name."""
        arguments = (list(workloads), rounds, seconds or self.seconds)
        done: dict[str, list[Round]] = await in_worker(
            "tools.bench.load", *arguments, environment=environment
        )
        return done

    async def compare(
        self, workloads: Sequence[Workload], *, paired: bool = False, **how: Any
    ) -> list[Measurement]:
        """What these workloads do a second, each beside its limits; `how`: see `load`."""
        rounds = await self.load(workloads, **how)
        return list(figures(workloads, rounds, paired=paired).values())

    @asynccontextmanager
    async def another(
        self, *, logs: Sequence[Logs] = (), policies: str = "", **services: Any
    ) -> AsyncIterator["Bench"]:
        """A bench with services and a folder of its own, for as long as it is used.

        Args:
            logs: what the ledger's store has at the start.
            policies: the policy file.
            services: how to start its stack.
        """
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            stack = Stack(Path(name), **services)
            stack.policy_file.write_text(policies)
            if logs:
                await fill(stack.store("ledger"), logs)
            async with stack:
                yield Bench(stack, stack.folder, self.null, self.seconds)


@asynccontextmanager
async def null_ledger() -> AsyncIterator[NullLedger]:
    """The services that only answer, in a process of their own."""
    async with python_process("tools.bench.null_ledger") as process:
        assert process.stdout is not None
        port = (await process.stdout.readline()).decode().strip()
        if not port:
            raise BenchError("the null ledger did not start")
        yield NullLedger(f"127.0.0.1:{port}", process.pid)
