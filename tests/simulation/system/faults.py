"""The faults of a history: one after the other, drawn from those that the history enables. Some
last for a while."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from random import Random
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.ground.network import uniform
from tests.simulation.system.stores import WELL_S
from tests.simulation.system.world import Unit

if TYPE_CHECKING:
    from tests.simulation.system.world import World

LASTS_S: Final = (0.05, 0.3, 1.0, 4.0)
"""Bounds of a fault's duration."""

RESTS: Final = 12
"""The approximate number of faults in a history."""

SMALLER_BYTES: Final = (1024, 1280)
"""The ledger's limits of a message after it shrinks."""

KILLED_FOR_S: Final = (0.01, 0.2, 1.5)
"""Bounds of a killed process's absence."""


class Faults:
    """Injects faults into a world."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._rng = Random(f"faults {world.swarm.seed}")
        ways: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "losses": self._losses,
            "delays": self._delays,
            "partitions": self._partition,
            "half-open": self._half_open,
            "store fails": self._store_fails,
            "store full": self._store_full,
            "store slow": self._store_slow,
            "redis loses all": self._redis_loses_all,
            "redis goes back": self._redis_goes_back,
            "redis loses one": self._redis_loses_one,
            "clocks": self._clock,
            "kills": self._kill,
            "stops": self._stop,
            "rolling restarts": self._rolling_restart,
            "instances leave": self._instance_leaves,
            "applications die": self._application_dies,
        }
        self._ways = [way for name, way in sorted(ways.items()) if world.swarm.fails(name)]
        if world.swarm.has("limits shrink"):
            self._ways.append(self._limit_shrinks)
        self._tasks: set[asyncio.Task[None]] = set()

    async def go_on(self) -> None:
        """Inject faults until cancelled."""
        if not self._ways:
            return
        rest_s = self._world.swarm.seconds / self._world.swarm.more.get("faults", RESTS)
        while True:
            await asyncio.sleep(self._rng.random() * 2 * rest_s)
            task = asyncio.create_task(self._rng.choice(self._ways)())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def end(self) -> None:
        """Undo all faults and restart what is down."""
        world = self._world
        for task in self._tasks:
            task.cancel()
        world.stores.calm()
        world.network.heal_all()
        for unit in [*world.services, *world.applications]:
            if unit.process is not None:
                unit.process.cont()
            if unit.is_wanted and not unit.is_alive:
                unit.start()

    def _happens(self, what: str) -> None:
        self._world.seen.counts[f"fault: {what}"] += 1
        self._world.seen.note(f"fault: {what}")

    async def _lasts(self) -> None:
        await asyncio.sleep(self._rng.random() * self._rng.choice(LASTS_S))

    def _service(self) -> Unit | None:
        alive = [each for each in self._world.services if each.is_alive]
        return self._rng.choice(alive) if alive else None

    def _pair(self) -> tuple[str, str]:
        """Two processes, at least one of them a service."""
        world = self._world
        one = self._rng.choice(world.services)
        other = self._rng.choice([each for each in [*world.services, *world.applications]
                                  if each is not one])  # fmt: skip
        return one.name, other.name

    # ---- the network

    async def _losses(self) -> None:
        one, other = self._pair()
        network = self._world.network
        if self._rng.random() < 0.5:
            self._happens(f"connection reset {one} {other}")
            network.reset(one, other)
            return
        link = network.link(one, other)
        way = self._rng.choice(["loss", "duplicates", "lost_replies"])
        self._happens(f"link {way} {one} {other}")
        setattr(link, way, self._rng.choice([0.02, 0.2]))
        try:
            await self._lasts()
        finally:
            setattr(link, way, 0.0)

    async def _delays(self) -> None:
        one, other = self._pair()
        delay_s = self._rng.choice([0.02, 0.2, 1.0])
        self._happens(f"slow link {one} {other}")
        link = self._world.network.link(one, other)
        usual = self._world.network.default.delay
        link.delay = uniform(0.0, delay_s)
        try:
            await self._lasts()
        finally:
            link.delay = usual

    async def _partition(self) -> None:
        one, other = self._pair()
        both = self._rng.random() < 0.7
        self._happens(f"partition {one} {other}")
        self._world.network.cut(one, other, both_ways=both)
        try:
            await self._lasts()
        finally:
            self._world.network.heal(one, other)

    async def _half_open(self) -> None:
        one, other = self._pair()
        self._happens(f"half open {one} {other}")
        self._world.network.half_open(one, other)

    # ---- stores

    def _trouble(self) -> str:
        return self._rng.choice(sorted(self._world.stores.troubles))

    async def _store_fails(self) -> None:
        name = self._trouble()
        trouble = self._world.stores.troubles[name]
        if self._rng.random() < 0.5:
            self._happens(f"{name} store fails once")
            trouble.fail_at = self._rng.randint(1, 20)
            return
        self._happens(f"{name} store fails")
        trouble.failing = self._rng.choice([0.1, 0.5, 1.0])
        try:
            await self._lasts()
        finally:
            trouble.failing = 0.0

    async def _store_full(self) -> None:
        name = self._rng.choice(["ledger", "cursor"])
        self._happens(f"{name} store full")
        self._world.stores.troubles[name].full = True
        self._world.checker.terms.has_been_full |= name == "ledger"
        try:
            await self._lasts()
        finally:
            self._world.stores.troubles[name].full = False

    async def _store_slow(self) -> None:
        name = self._trouble()
        self._happens(f"{name} store slow")
        self._world.stores.troubles[name].latency_s = self._rng.choice([0.1, 1.0, 3.0])
        try:
            await self._lasts()
        finally:
            self._world.stores.troubles[name].latency_s = WELL_S

    # ---- Redis

    async def _redis_loses_all(self) -> None:
        self._happens("redis loses all")
        self._world.stores.state.lose_all()

    async def _redis_goes_back(self) -> None:
        if not self._world.stores.state.go_back(self._rng) or self._rng.random() < 0.5:
            self._world.stores.state.copy()
            return
        self._happens("redis goes back")

    async def _redis_loses_one(self) -> None:
        if self._world.stores.state.lose_one(self._rng):
            self._happens("redis loses one")

    # ---- processes

    async def _clock(self) -> None:
        unit = self._service()
        if unit is not None and unit.process is not None:
            seconds = self._rng.choice([-3600.0, -60.0, -1.0, 1.0, 60.0, 3600.0])
            self._happens(f"clock of {unit.name} jumps {seconds}")
            unit.process.clock.jump(seconds)

    async def _kill(self) -> None:
        unit = self._service()
        if unit is None:
            return
        self._happens(f"kill {unit.name}")
        unit.kill()
        await self._comes_back(unit)

    async def _comes_back(self, unit: Unit) -> None:
        await asyncio.sleep(self._rng.random() * self._rng.choice(KILLED_FOR_S))
        if unit.is_wanted:
            unit.start()

    async def _stop(self) -> None:
        unit = self._service()
        if unit is None or unit.process is None:
            return
        self._happens(f"stop {unit.name}")
        process = unit.process
        process.stop()
        try:
            await self._lasts()
        finally:
            process.cont()

    async def _instance_leaves(self) -> None:
        """Kill one of several instances at some time, for good."""
        await asyncio.sleep(self._rng.random() * self._world.swarm.seconds)
        instances = self._world.swarm.instances
        several = [
            each for each in self._world.services if instances[each.name.rpartition("-")[0]] > 1
        ]
        if several and all(each.is_wanted for each in several):
            unit = self._rng.choice(several)
            self._happens(f"leave {unit.name}")
            unit.is_wanted = False
            unit.kill()

    async def _limit_shrinks(self) -> None:
        """Restart the ledger with a smaller limit of messages."""
        bytes_max = self._rng.choice(SMALLER_BYTES)
        self._world.limits["ledger"]["max_message_bytes"] = bytes_max
        checker = self._world.checker
        checker.terms.payload_bytes_max = min(checker.terms.payload_bytes_max, bytes_max)
        for unit in self._world.services:
            if unit.name.startswith("ledger"):
                self._happens(f"limit shrinks {unit.name}")
                unit.kill()
                await self._comes_back(unit)

    async def _rolling_restart(self) -> None:
        for unit in list(self._world.services):
            if unit.is_alive and unit.process is not None:
                self._happens(f"restart {unit.name}")
                process = unit.process
                process.signal(signal.SIGTERM)
                try:
                    async with asyncio.timeout(self._rng.choice([1.0, 30.0])):
                        await process.ended()
                except TimeoutError:
                    process.kill()
                await self._comes_back(unit)

    async def _application_dies(self) -> None:
        alive = [each for each in self._world.applications if each.is_alive]
        if not alive:
            return
        unit = self._rng.choice(alive)
        self._happens(f"kill {unit.name}")
        unit.kill()
        await self._comes_back(unit)
