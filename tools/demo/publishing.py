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
from tools.demo.faults import Fault, Kind, happen, plan
from tools.demo.journal import Counter
from tools.demo.line import Standing
from tools.demo.screen import Screen
from tools.demo.stations import Stations
from tools.stack.stack import Stack

LOOK_INTERVAL_S: Final = 0.05


class Publishing:
    """See the module.

    Attributes:
        faults: how many things went wrong.
        crashes: the large messages that each crash interrupted.
    """

    def __init__(
        self, screen: Screen, stack: Stack, airlines: Airlines, stations: Stations
    ) -> None:
        self._screen = screen
        self._stack = stack
        self._airlines = airlines
        self._stations = stations
        self._step = screen.step("publishing", airlines.flights)
        self.faults = 0
        self.crashes: list[list[Standing]] = []

    async def run(self, random: Random) -> None:
        """Publish; returns when all of it is acknowledged."""
        async with asyncio.TaskGroup() as tasks:
            publishing = [
                tasks.create_task(each.publish()) for each in (self._airlines, self._stations)
            ]
            for fault in plan(random):
                await self._until(publishing, partial(self._is_time, fault))
                # State that is lost when everything is stored would not come back: publishing
                # brings it back.
                if self._stored == self._airlines.flights and not self._stations.publishing:
                    break
                await self._happen(fault.kind)
            self._stations.line.open()
            await self._until(publishing, lambda: False)
        self._step(self._airlines.flights)

    @property
    def _stored(self) -> int:
        return self._airlines.total(Counter.CHECKPOINT)

    async def _until(
        self, publishing: list[asyncio.Task[None]], enough: Callable[[], bool]
    ) -> None:
        """Show the progress, until it is enough or everything is published."""
        while not all(task.done() for task in publishing) and not enough():
            self._step(self._stored)
            await asyncio.wait(publishing, timeout=LOOK_INTERVAL_S)

    def _is_time(self, fault: Fault) -> bool:
        is_due = self._stored >= fault.at * self._airlines.flights
        return is_due and (self._stations.stand or not fault.kind.interrupts_stations)

    async def _happen(self, kind: Kind) -> None:
        standing = self._stations.line.standing if kind.interrupts_stations else []
        began = time.monotonic()
        await happen(kind, self._stack, self._airlines, self._stations)
        self.faults += 1
        where = f", inside {len(standing)} large messages" if standing else ""
        self._screen.tell(f"{kind.value}{where}: {time.monotonic() - began:.2f} s")
        if standing:
            self.crashes.append(standing)
            self._stations.line.release(standing)
