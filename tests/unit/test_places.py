"""What an instance does with topics that are, were, or may be its own."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.errors import InvalidTopicName, ServiceBusy
from services.placement import servicer as servicer_module
from services.placement.adapters.memory import MemoryKeeper, MemoryShelf
from services.placement.core.placing import Placement, State
from services.placement.ports import (
    AlreadyHere,
    InvalidMove,
    Moving,
    NotOwner,
    PlacementUnavailable,
    TopicLost,
)
from services.placement.service import Places

OWN, OTHER = "a:1", "b:1"
TOPIC = "test/places/topic"


class World:
    """One instance, and the keeper."""

    def __init__(self) -> None:
        self.keeper = MemoryKeeper([OWN, OTHER])
        self.shelf = MemoryShelf()
        self.now = 0.0
        self.places = self.made()

    def made(self) -> Places:
        """The instance, as it starts."""
        nobody: Any = None
        return Places(OWN, [OWN, OTHER], self.keeper, self.shelf, nobody, clock=lambda: self.now)

    async def placed(self, owner: str) -> Placement:
        """A topic that was never moved."""
        return (await self.keeper.place(TOPIC, version=0, owner=owner, move=""))[0]

    async def came(self, move: str, version: int) -> None:
        """A topic was sent here as a whole."""
        staging = await self.places.receive(TOPIC, move, version, self.shelf.layout)
        await staging.add([("row", 1)])
        await self.places.received(staging, TOPIC, move, version)

    async def tidy(self) -> None:
        for each in list(self.places._staged.values()):
            await self.places._tidy(each)


async def test_what_is_here_is_known_without_the_keeper() -> None:
    world = World()
    await world.places.check(TOPIC, create=True)
    world.keeper.failure = PlacementUnavailable("away", retry_after_s=1)
    await world.places.check(TOPIC)
    with pytest.raises(PlacementUnavailable):
        await world.places.check(f"{TOPIC}-2")


async def test_where_another_topic_is_is_remembered_for_a_moment() -> None:
    world = World()
    await world.placed(OTHER)
    with pytest.raises(NotOwner) as refused:
        await world.places.check(TOPIC)
    assert refused.value.details == {"owner": OTHER}
    world.keeper.failure = PlacementUnavailable("away", retry_after_s=1)
    with pytest.raises(NotOwner):
        await world.places.check(TOPIC)
    world.now = 6.0
    with pytest.raises(PlacementUnavailable):
        await world.places.check(TOPIC)


async def test_a_topic_that_was_never_made_is_nowhere() -> None:
    world = World()
    await world.places.check(TOPIC)
    assert await world.places.locate(TOPIC) is None
    assert world.keeper.records == {}


async def test_topics_from_before_there_were_places_are_placed_where_they_are() -> None:
    world = World()
    world.shelf.topics[TOPIC] = [("row", 1)]
    await world.places.start()
    assert world.keeper.records[TOPIC] == Placement(TOPIC, OWN, 1, "")


async def test_what_came_is_kept_until_it_is_decided() -> None:
    world = World()
    await world.placed(OTHER)
    await world.came("m", 1)
    await world.tidy()
    assert [each.move for each in await world.shelf.staged()] == ["m"]
    assert TOPIC not in world.shelf.topics

    await world.keeper.place(TOPIC, version=1, owner=OWN, move="m")
    await world.tidy()
    assert world.shelf.topics[TOPIC] == [("row", 1)]
    assert await world.shelf.staged() == []


async def test_what_came_is_dropped_when_it_stays_where_it_was() -> None:
    world = World()
    await world.placed(OTHER)
    await world.came("m", 1)
    await world.keeper.place(TOPIC, version=1, owner=OTHER, move="")
    await world.tidy()
    assert await world.shelf.staged() == []
    assert TOPIC not in world.shelf.topics


async def test_what_came_is_seen_as_soon_as_somebody_asks_when_it_is_decided() -> None:
    world = World()
    await world.placed(OTHER)
    with pytest.raises(NotOwner):
        await world.places.check(TOPIC)  # so it is remembered to be there
    await world.came("m", 1)
    await world.keeper.place(TOPIC, version=1, owner=OWN, move="m")
    await world.places.check(TOPIC)
    assert world.shelf.topics[TOPIC] == [("row", 1)]


async def test_what_came_whole_outlasts_the_process() -> None:
    world = World()
    await world.placed(OTHER)
    await world.came("m", 1)
    await world.keeper.place(TOPIC, version=1, owner=OWN, move="m")
    world.places = world.made()
    await world.places.start()
    await world.places.check(TOPIC)
    assert world.shelf.topics[TOPIC] == [("row", 1)]


async def test_a_topic_that_should_have_come_and_did_not_is_lost() -> None:
    world = World()
    await world.placed(OTHER)
    await world.keeper.place(TOPIC, version=1, owner=OWN, move="m")
    with pytest.raises(TopicLost):
        await world.places.check(TOPIC)
    assert TOPIC not in world.shelf.topics


@pytest.mark.parametrize("version", [0, 1, 3])
async def test_what_is_sent_as_of_another_record_is_not_taken_in(version: int) -> None:
    world = World()
    await world.placed(OTHER)
    await world.keeper.place(TOPIC, version=1, owner=OTHER, move="")
    await world.came("m", 2)
    with pytest.raises(InvalidMove):
        await world.came("late", version)
    assert [each.move for each in await world.shelf.staged()] == ["m"]


async def test_what_is_here_is_not_taken_in() -> None:
    world = World()
    await world.places.check(TOPIC, create=True)
    with pytest.raises(AlreadyHere):
        await world.came("m", 1)


async def test_a_later_attempt_takes_the_place_of_an_earlier_one() -> None:
    world = World()
    await world.placed(OTHER)
    await world.came("m", 1)
    await world.keeper.place(TOPIC, version=1, owner=OTHER, move="")
    await world.came("n", 2)
    assert [each.move for each in await world.shelf.staged()] == ["n"]


async def test_a_topic_whose_seal_was_not_broken_is_not_written_after_a_start() -> None:
    world = World()
    await world.places.check(TOPIC, create=True)
    (held,) = await world.shelf.holdings()
    sealed = held._replace(state=State.SEALED, move="m", other=OTHER)
    await world.shelf.seal(sealed)
    world.places = world.made()
    await world.places.start()
    await world.places.check(TOPIC)  # it is read
    with pytest.raises(Moving):
        world.places.check_writable(TOPIC)
    settling = asyncio.create_task(world.places.settle_forever())
    while True:
        try:
            world.places.check_writable(TOPIC)
            break
        except Moving:
            await asyncio.sleep(0)
    settling.cancel()
    assert world.keeper.records[TOPIC] == Placement(TOPIC, OWN, 2, "")


async def test_what_was_read_of_a_topic_that_left_and_came_back_does_not_count() -> None:
    world = World()
    await world.places.check(TOPIC, create=True)
    stay = world.places.stay(TOPIC)
    await world.places.check_stayed(TOPIC, stay)
    (held,) = await world.shelf.holdings()
    await world.keeper.place(TOPIC, version=1, owner=OTHER, move="there")
    gone = held._replace(state=State.GONE, version=2, other=OTHER)
    await world.shelf.forget(gone)
    world.places = world.made()
    await world.places.start()
    with pytest.raises(NotOwner):
        await world.places.check_stayed(TOPIC, stay)
    await world.came("back", 2)
    await world.keeper.place(TOPIC, version=2, owner=OWN, move="back")
    with pytest.raises(Moving):
        await world.places.check_stayed(TOPIC, stay)
    await world.places.check_stayed(TOPIC, world.places.stay(TOPIC))


async def test_so_many_topics_are_taken_in_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_module, "RECEIVING_MAX", 2)
    servicer: Any = servicer_module.PlacementServicer(World().places)
    on = asyncio.Event()

    async def nothing() -> AsyncIterator[Any]:
        await on.wait()
        return
        yield

    asked = [asyncio.create_task(servicer.ReceiveTopic(nothing(), None)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ServiceBusy):
        await servicer.ReceiveTopic(nothing(), None)
    on.set()
    for each in asked:
        with pytest.raises(InvalidTopicName):
            await each
    with pytest.raises(InvalidTopicName):
        await servicer.ReceiveTopic(nothing(), None)
