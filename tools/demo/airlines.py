"""The airlines' processes: started, killed, started again, until each has published all it has."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Final, Self

from tools.demo.application import Application
from tools.demo.journal import Counter, Journal

PROCESSES: Final = 4
"""Over how many processes the carriers are spread."""


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
        self._applications = [
            self._application(number, crew) for number, crew in enumerate(_spread(flights))
        ]
        self._journals = {carrier: Journal(folder, carrier) for carrier in flights}
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
        for application in self._applications:
            await application.kill()
        for journal in self._journals.values():
            journal.close()

    async def publish(self) -> None:
        """Run the processes until every carrier has published everything.

        Raises:
            ApplicationFailed: one ended otherwise than well, or by being killed.
        """
        async with asyncio.TaskGroup() as tasks:
            for application in self._applications:
                tasks.create_task(application.run())

    async def kill_one(self) -> None:
        """SIGKILL one of the processes that still run, if any does."""
        running = [application for application in self._applications if application.runs]
        if running:
            await self._random.choice(running).kill()
            self.crashes += 1

    def _application(self, number: int, crew: Sequence[str]) -> Application:
        def arguments() -> Sequence[str]:
            return [self._ledger, str(self._folder), str(self._random.random()), *crew]

        log = self._folder / f"airlines-{number}.log"
        return Application("tools.demo.airline", arguments, log)


def _spread(flights: Mapping[str, int]) -> list[list[str]]:
    """Carriers by process, so that each has about as many flights."""
    crews: list[list[str]] = [[] for _ in range(min(PROCESSES, len(flights)))]
    loads = [0] * len(crews)
    for carrier, count in sorted(flights.items(), key=lambda item: -item[1]):
        lightest = loads.index(min(loads))
        crews[lightest].append(carrier)
        loads[lightest] += count
    return crews
