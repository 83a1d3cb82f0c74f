"""The airlines' processes: started, killed, started again, until each has published all it has."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Final, Self

from tools.demo.journal import Counter, Journal
from tools.stack.child import bound_to_us

PROCESSES: Final = 4
"""Over how many processes the carriers are spread."""


class AirlineFailed(Exception):
    """An airline's process ended with an error of its own."""


class Airlines:
    """All of them."""

    def __init__(
        self, folder: Path, flights: Mapping[str, int], *, ledger: str, random: Random
    ) -> None:
        """
        Args:
            folder: where the airlines keep their flights and journals.
            flights: how many flights each carrier has.
            ledger: the address to publish to.
            random: which process is killed.
        """
        self._folder = folder
        self._ledger = ledger
        self._flights = sum(flights.values())
        self._random = random
        self._crews = _spread(flights)
        self._journals = {carrier: Journal(folder, carrier) for carrier in flights}
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self.crashes = 0

    @property
    def flights(self) -> int:
        """How many flights there are to publish."""
        return self._flights

    def total(self, counter: Counter) -> int:
        """A counter, over all carriers."""
        return sum(journal[counter] for journal in self._journals.values())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._running.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
        for journal in self._journals.values():
            journal.close()

    async def publish(self) -> None:
        """Run the processes until every carrier has published everything.

        Raises:
            AirlineFailed: one ended otherwise than well, or by being killed.
        """
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self._crews)):
                tasks.create_task(self._keep_running(number))

    async def kill_one(self) -> None:
        """SIGKILL one of the processes that still run, if any does."""
        running = [process for process in self._running.values() if process.returncode is None]
        if running:
            self._random.choice(running).kill()
            self.crashes += 1

    async def _keep_running(self, number: int) -> None:
        log = self._folder / f"airlines-{number}.log"
        while True:
            process = await self._spawn(self._crews[number], log)
            self._running[number] = process
            status = await process.wait()
            if status == 0:
                return
            if status > 0:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise AirlineFailed(f"{', '.join(self._crews[number])} ended with {status}: {tail}")

    async def _spawn(self, crew: Sequence[str], log: Path) -> asyncio.subprocess.Process:
        seed = str(self._random.random())
        arguments = [self._ledger, str(self._folder), seed, *crew]
        with log.open("ab") as out:
            return await asyncio.create_subprocess_exec(
                *bound_to_us([sys.executable, "-m", "tools.demo.airline", *arguments]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )


def _spread(flights: Mapping[str, int]) -> list[list[str]]:
    """Carriers by process, so that each has about as many flights."""
    crews: list[list[str]] = [[] for _ in range(min(PROCESSES, len(flights)))]
    loads = [0] * len(crews)
    for carrier, count in sorted(flights.items(), key=lambda item: -item[1]):
        lightest = loads.index(min(loads))
        crews[lightest].append(carrier)
        loads[lightest] += count
    return crews
