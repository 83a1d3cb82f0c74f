"""A subscription that this instance has: services/dispatcher/live.py."""

import asyncio
from typing import Any

import pytest
from grpc import aio

from seqgate.types import TopicName
from services.dispatcher.adapters.filters import GrpcFilters
from services.dispatcher.adapters.memory import MemoryCursors
from services.dispatcher.config import DispatcherConfig
from services.dispatcher.core.effects import Options
from services.dispatcher.live import Live
from services.dispatcher.placement import Placement
from services.dispatcher.ports import Cursor, Ports
from services.dispatcher.session import Joining
from services.errors import Fenced

TOPIC = TopicName.parse("test/live/topic")


class HeldUp(MemoryCursors):
    """Cursors that answer when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()

    async def get(self, topic: TopicName, name: str) -> Cursor:
        self.asked.set()
        await self.answers.wait()
        return await super().get(topic, name)


async def test_who_connects_while_the_lease_is_lost_is_told() -> None:
    cursors = HeldUp()
    await cursors.create(TOPIC, "s", None, {})
    unused: Any = None
    async with aio.insecure_channel("127.0.0.1:1") as channel, asyncio.TaskGroup() as tasks:
        filters = GrpcFilters(channel, timeout_s=1)
        ports = Ports(unused, cursors, unused, filters, "me", lambda: 0)
        lease = await cursors.acquire(TOPIC, "s", "me", 60_000)
        live = Live(DispatcherConfig(), TOPIC, "s", lease.epoch, ports, tasks)
        await live.load()
        cursors.answers.clear()
        cursors.asked.clear()
        joining = Joining("c", Options(redeliveries_max=7), Placement.AUTO_SPLIT, None, (), 1, 0)
        connecting = asyncio.create_task(live.subscribe(joining))
        await cursors.asked.wait()
        live.stop(Fenced("the lease on the subscription was lost"))
        cursors.answers.set()
        with pytest.raises(Fenced):
            await connecting
        assert not live.sessions
        await live.close(1)
