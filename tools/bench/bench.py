"""What every group of measurements has: running services, time, and the limits found so far."""

import math
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from seqgate.dev.stack import Stack
from tools.bench.figures import Measurement, figures, in_series
from tools.bench.logs import Logs, fill
from tools.bench.rounds import ROUNDS, Case, Limit, Repeated, Round, take_turns
from tools.stack.worker import in_worker

SECONDS: Final = 0.4  # a round, unless asked otherwise


@dataclass(frozen=True, slots=True)
class Bench:
    """
    Attributes:
        null: the services that only answer, as a ledger: see tools.bench.null_ledger.
        seconds: how long a round takes.
        left_out: what was not measured, and why.
    """

    stack: Stack
    null: Stack
    seconds: float
    left_out: list[str] = field(default_factory=list)
    _found: dict[str, Measurement] = field(default_factory=dict)

    def note(self, measurements: Sequence[Measurement]) -> None:
        """Have measurements serve as limits."""
        self._found.update((each.name, each) for each in measurements)

    def address(self, service: str) -> str:
        return self.null.address("ledger") if service == "null" else self.stack.address(service)

    def pids(self, *processes: str) -> dict[str, int]:
        """Ids of processes of the stack, or of `null`, by name."""
        running = {name: self.stack.pid(name) for name in processes}
        running |= {"null": self.null.pid("ledger")} if "null" in processes else {}
        return {name: pid for name, pid in running.items() if pid is not None}

    def limit(self, name: str, *, each: float = 1) -> Limit:
        """A rate that was found, as the limit of something of which one call does `each`."""
        return Limit(name, self._found[name].value * each)

    def series(self, name: str, *names: str) -> Limit:
        """The rate of doing these one after the other, as a limit."""
        return Limit(name, in_series(*(self._found[each].value for each in names)))

    def scaled(self, number: int) -> int:
        """Less of something where rounds are shorter than usual."""
        return math.ceil(number * min(1.0, self.seconds / SECONDS))

    async def measure(
        self, cases: Sequence[Case], *, paired: bool = False, **how: Any
    ) -> list[Measurement]:
        """The figures of these in turn, each beside its limits; `how`: see `rounds`."""
        return figures(cases, await self.rounds(cases, **how), paired=paired)

    async def rounds(
        self,
        cases: Sequence[Case],
        *,
        rounds: int = ROUNDS,
        seconds: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> dict[str, list[Round]]:
        """Repeated calls run in this process; other cases travel to a client process, which has
        `environment` besides this one's."""
        work = (list(cases), rounds, seconds or self.seconds)
        if isinstance(cases[0], Repeated):
            return await take_turns(*work)
        done: dict[str, list[Round]] = await in_worker(
            "tools.bench.rounds", *work, environment=environment
        )
        return done

    @asynccontextmanager
    async def another(
        self, *, logs: Sequence[Logs] = (), policies: str = "", **services: Any
    ) -> AsyncIterator["Bench"]:
        """A bench with a stack and a folder of its own, for as long as it is used; `logs` are in
        the ledger's store at the start."""
        with tempfile.TemporaryDirectory(dir=self.stack.folder) as name:
            stack = Stack(Path(name), **services)
            stack.policy_file.write_text(policies)
            if logs:
                await fill(stack.store("ledger"), logs)
            async with stack:
                yield Bench(stack, self.null, self.seconds)
