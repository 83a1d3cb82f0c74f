"""A topic moves while whoever takes part dies, or is not answered, at any call that it makes.

Real Places over memories that outlast them. A source, a target and a keeper; a process that dies is
made again over what it had kept.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest

from services.errors import DomainError
from services.placement.adapters.memory import MemoryKeeper, MemoryShelf
from services.placement.core.placing import Holding, Placement
from services.placement.ports import PlacementUnavailable, Row
from services.placement.service import Places

INSTANCES = ("keeper:1", "a:1", "b:1")
TOPIC = "test/moves/topic"
CALLS_MAX = 40
"""More than a move makes."""

SHELF = ("seal", "hold", "show", "forget", "stage", "drop")
KEEPER = ("find", "place")
PEERS = ("send", "locate")


CALL_TURNS = 5
WRITE_TURNS_MAX = 40
"""How many turns of the loop a call takes at least, and a write at most: longer than some calls."""


async def turns(count: int) -> None:
    """Let others go on."""
    for _ in range(count):
        await asyncio.sleep(0)


class Died(Exception):
    """The process is gone."""


class Cut:
    """A port of which calls are cut off: before they are made, or before they are answered."""

    def __init__(self, inner: Any, process: "Process", verbs: Sequence[str]) -> None:
        self._inner = inner
        self._process = process
        self._verbs = verbs

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._verbs:
            return found

        async def call(*arguments: Any, **named: Any) -> Any:
            await turns(CALL_TURNS)
            self._process.reach("before")
            if name == "place":
                late = partial(found, *arguments, **named)
                self._process.reach("late", late)
            answer = await found(*arguments, **named)
            self._process.reach("after")
            return answer

        return call


class Peers:
    """The other instances, as they are now."""

    def __init__(self, world: "World") -> None:
        self._world = world

    async def send(
        self, to: str, holding: Holding, layout: int, rows: AsyncIterator[Sequence[Row]]
    ) -> None:
        target = self._target(to)
        topic, _, version, move, _ = holding
        try:
            staging = await target.receive(topic, move, version, layout)
            async for some in rows:
                await staging.add(some)
            await target.received(staging, topic, move, version)
        except Died as error:
            raise PlacementUnavailable("died", retry_after_s=0.1) from error

    async def locate(self, at: str, topic: str) -> Placement | None:
        try:
            return await self._target(at).locate(topic)
        except Died as error:
            raise PlacementUnavailable("died", retry_after_s=0.1) from error

    def _target(self, at: str) -> Places:
        process = self._world.processes[at]
        if process.is_dead:
            raise PlacementUnavailable("away", retry_after_s=0.1)
        return process.places


class Process:
    """An instance, and what outlasts it."""

    def __init__(self, world: "World", address: str) -> None:
        self._world = world
        self.address = address
        self.shelf = MemoryShelf()
        self.cut_at: tuple[int, str, bool] | None = None
        self.calls = 0
        self.is_dead = False
        self.places = self._made()

    def _made(self) -> Places:
        keeper: Any = Cut(self._world.keeper, self, KEEPER)
        shelf: Any = Cut(self.shelf, self, SHELF)
        peers: Any = Cut(Peers(self._world), self, PEERS)
        return Places(self.address, INSTANCES, keeper, shelf, peers)

    async def start(self) -> None:
        """Start it, or start it again."""
        self.is_dead = False
        self.places = self._made()
        await self.places.start()

    def reach(self, when: str, late: Callable[[], Awaitable[object]] | None = None) -> None:
        """A call is about to be made, or answered; or it is on its way for a long time."""
        if self.is_dead:
            raise Died
        if self.cut_at is None or self.cut_at[1] != when:
            return
        self.calls += 1
        number, _, kills = self.cut_at
        if self.calls <= number:
            return
        self.cut_at = None
        if late is not None:
            self._world.late.append(late)
        if kills:
            self.is_dead = True
            raise Died
        raise PlacementUnavailable("not answered", retry_after_s=0.1)


class World:
    """All of them, and somebody who writes."""

    def __init__(self) -> None:
        self.keeper = MemoryKeeper(INSTANCES)
        self.processes = {each: Process(self, each) for each in INSTANCES}
        self.written: list[Row] = []
        self.late: list[Callable[[], Awaitable[object]]] = []

    async def write(self) -> int:
        """Try to write at every instance; how many took it."""
        takers = 0
        for process in self.processes.values():
            places = process.places
            if process.is_dead:
                continue
            with suppress(DomainError, Died):
                await places.check(TOPIC, create=not self.written)
                with places.writing(TOPIC):
                    await turns(len(self.written) * 7 % WRITE_TURNS_MAX)
                    row = ("row", len(self.written))
                    process.shelf.topics.setdefault(TOPIC, []).append(row)
                    self.written.append(row)
                    takers += 1
        return takers

    async def settle(self) -> None:
        """Start again who is dead, and let everybody bring to its end what was begun. Then arrives
        what was on its way."""
        for process in self.processes.values():
            process.cut_at = None
            if process.is_dead:
                await process.start()
        for _ in range(3):
            await self.look()
        for late in self.late:
            await late()
        self.late.clear()
        for _ in range(3):
            await self.look()

    async def look(self) -> None:
        """What everybody does from time to time."""
        for process in self.processes.values():
            places = process.places
            for sealed in list(places._unsettled.values()):
                if sealed.topic not in places._moves:
                    await places._settle(sealed)
            for staged in list(places._staged.values()):
                with suppress(DomainError, Died):
                    await places._tidy(staged)

    async def look_for_arrivals(self) -> None:
        """What everybody does from time to time, while a move goes on."""
        for process in self.processes.values():
            for staged in list(process.places._staged.values()):
                with suppress(DomainError, Died):
                    await process.places._tidy(staged)

    def holders(self) -> list[str]:
        return [each.address for each in self.processes.values() if TOPIC in each.shelf.topics]


async def keep_writing(world: World, moving: "asyncio.Task[object]") -> None:
    """Write all the time, and never at two instances at once."""
    while not moving.done():
        assert await world.write() <= 1
        await asyncio.sleep(0)


async def run(
    who: str, number: int, when: str, *, kills: bool, source: str, target: str
) -> tuple[World, bool]:
    """A move of which a call is cut off; whether it was."""
    world = World()
    for process in world.processes.values():
        await process.start()
    await world.write()
    (first,) = world.holders()
    if first != source:
        await world.processes[first].places.move(TOPIC, source)
    for _ in range(3):
        assert await world.write() == 1
    world.processes[who].cut_at = (number, when, kills)
    moving = asyncio.create_task(world.processes[source].places.move(TOPIC, target))
    writing = asyncio.create_task(keep_writing(world, moving))
    while not moving.done():
        await world.look_for_arrivals()
        await asyncio.sleep(0)
    await writing
    with suppress(DomainError, Died):
        await moving
    was_cut = world.processes[who].cut_at is None
    assert await world.write() <= 1
    await world.settle()
    return world, was_cut


@pytest.mark.parametrize("kills", [True, False], ids=["dies", "not-answered"])
@pytest.mark.parametrize("when", ["before", "late", "after"])
@pytest.mark.parametrize("who", INSTANCES)
@pytest.mark.parametrize(
    ("source", "target"), [("a:1", "b:1"), ("keeper:1", "b:1"), ("a:1", "keeper:1")]
)
async def test_a_move_that_is_cut_off_anywhere_leaves_the_topic_in_one_place(
    who: str, when: str, kills: bool, source: str, target: str
) -> None:
    for number in range(CALLS_MAX):
        world, was_cut = await run(who, number, when, kills=kills, source=source, target=target)
        (holder,) = world.holders()
        assert holder in (source, target), number
        assert world.processes[holder].shelf.topics[TOPIC] == world.written, number
        assert await world.write() == 1
        # Running it again finishes it, and nothing is left of what was begun.
        here = world.processes[holder].places
        await here.move(TOPIC, target)
        await world.settle()
        assert world.holders() == [target]
        assert world.processes[target].shelf.topics[TOPIC] == world.written
        assert not any([await each.shelf.staged() for each in world.processes.values()])
        if not was_cut:
            return
    raise AssertionError("a move makes more calls than was thought")


async def test_topics_that_move_at_random_with_anything_cut_off(seed: int) -> None:
    random = Random(seed)
    world = World()
    for process in world.processes.values():
        await process.start()
    await world.write()
    for _ in range(200):
        who = random.choice(INSTANCES)
        world.processes[who].calls = 0
        cut = (
            random.randrange(12),
            random.choice(["before", "late", "after"]),
            random.random() < 0.5,
        )
        world.processes[who].cut_at = cut
        source = world.processes[random.choice(INSTANCES)]
        moving = asyncio.create_task(source.places.move(TOPIC, random.choice(INSTANCES)))
        while not moving.done():
            assert await world.write() <= 1
            await asyncio.sleep(0)
        with suppress(DomainError, Died):
            await moving
        await world.settle()
        (holder,) = world.holders()
        assert world.processes[holder].shelf.topics[TOPIC] == world.written
        assert await world.write() == 1
