"""The airlines' processes: started, killed, started again, until each has published all it has."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from random import Random
from typing import Final

from tools.demo.applications import Application
from tools.demo.journal import Counter, Journal

PROCESSES: Final = 4  # processes over which the carriers are spread


class Airlines:
    """All of them. See `airlines`."""

    def __init__(
        self, applications: list[Application], journals: list[Journal], flights: int, random: Random
    ) -> None:
        self._applications = applications
        self._journals = journals
        self._random = random
        self.flights = flights
        self.crashes = 0

    def total(self, counter: Counter) -> int:
        """A counter, over all carriers."""
        return sum(journal[counter] for journal in self._journals)

    async def publish(self) -> None:
        """Run the processes until every carrier has published everything.

        Raises:
            ApplicationFailed: one failed.
        """
        async with asyncio.TaskGroup() as tasks:
            for application in self._applications:
                tasks.create_task(application.run())

    async def kill_one(self) -> None:
        """SIGKILL one of the processes that still run, if any does."""
        running = [application for application in self._applications if application.runs]
        if running:
            await self._random.choice(running).end()
            self.crashes += 1


@asynccontextmanager
async def airlines(
    folder: Path, flights: Mapping[str, int], *, ledger: str, random: Random
) -> AsyncIterator[Airlines]:
    """The airlines, with their processes; `flights`: of each carrier."""

    def application(number: int, carriers: list[str]) -> Application:
        def arguments() -> list[object]:
            return [ledger, folder, random.random(), *carriers]

        return Application("tools.demo.airline", arguments, folder / f"airlines-{number}.log")

    applications = [application(*each) for each in enumerate(_spread(flights))]
    with ExitStack() as closed:
        journals = [closed.enter_context(closing(Journal(folder, each))) for each in flights]
        try:
            yield Airlines(applications, journals, sum(flights.values()), random)
        finally:
            for each in applications:
                await each.end()


def _spread(flights: Mapping[str, int]) -> list[list[str]]:
    """Carriers by process, so that each has about as many flights."""
    groups: list[list[str]] = [[] for _ in range(min(PROCESSES, len(flights)))]
    loads = [0] * len(groups)
    for carrier, count in sorted(flights.items(), key=lambda item: -item[1]):
        lightest = loads.index(min(loads))
        groups[lightest].append(carrier)
        loads[lightest] += count
    return groups
