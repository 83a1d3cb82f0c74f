"""Everything is published while things go wrong.

A fault comes when so many flights are stored as the plan says. If it touches what the weather
stations do, it also waits until each of them is in the middle of a message.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final

from tools.demo.airlines import Airlines
from tools.demo.faults import Faults, Kind, plan
from tools.demo.journal import Counter
from tools.demo.line import Standing
from tools.demo.screen import Screen
from tools.demo.stations import Stations

LOOK_INTERVAL_S: Final = 0.05
"""How often progress is looked at."""


class Publishing:
    """See the module.

    Attributes:
        faults: how many things went wrong.
        crashes: the large messages in whose middle something crashed, for each time.
    """

    def __init__(
        self, screen: Screen, airlines: Airlines, stations: Stations, faults: Faults
    ) -> None:
        self._screen = screen
        self._airlines = airlines
        self._stations = stations
        self._faults = faults
        self._step = screen.step("publishing", airlines.flights)
        self.faults = 0
        self.crashes: list[list[Standing]] = []

    async def run(self, random: Random) -> None:
        """Publish; returns when all of it is acknowledged."""
        publishing = asyncio.create_task(self._publish())
        try:
            for fault in plan(random):
                due = fault.at * self._airlines.flights
                await self._until(publishing, partial(self._is_time, fault.kind, due))
                if publishing.done() or self._all_is_stored():
                    break
                await self._happen(fault.kind)
            self._stations.finish()
            await self._until(publishing, lambda: False)
            await publishing
        finally:
            publishing.cancel()
            await asyncio.wait([publishing])
        self._step.at(self._airlines.flights)

    async def _publish(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._airlines.publish())
            tasks.create_task(self._stations.publish())

    async def _until(self, publishing: asyncio.Task[None], enough: Callable[[], bool]) -> None:
        """Show the progress, until it is enough or everything is published."""
        while not publishing.done() and not enough():
            self._step.at(self._airlines.total(Counter.CHECKPOINT))
            await asyncio.wait([publishing], timeout=LOOK_INTERVAL_S)

    def _is_time(self, kind: Kind, due: float) -> bool:
        """Whether so many flights are stored, and, if it matters to them, all weather stations are
        in the middle of a message."""
        stored = self._airlines.total(Counter.CHECKPOINT)
        return stored >= due and (self._stations.stand or not kind.interrupts_stations)

    def _all_is_stored(self) -> bool:
        """Whether nothing is left that could come after a fault. Deduplication state that is lost
        comes back when somebody publishes."""
        stored = self._airlines.total(Counter.CHECKPOINT)
        return stored == self._airlines.flights and self._stations.finished

    async def _happen(self, kind: Kind) -> None:
        standing = self._stations.standing if kind.interrupts_stations else []
        began = time.monotonic()
        await self._faults.happen(kind)
        self.faults += 1
        where = f", inside {len(standing)} large messages" if standing else ""
        self._screen.tell(f"{kind.value}{where}: {time.monotonic() - began:.2f} s")
        if standing:
            self.crashes.append(standing)
            self._stations.go_on(standing)
