"""Topics over several instances, as a test asks about them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from grpc import aio

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.cursor.v1.cursor_pb2_grpc import CursorServiceStub
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.api.placement.v1 import placement_pb2 as pb
from seqgate.api.placement.v1.placement_pb2_grpc import PlacementServiceStub
from seqgate.owners import FollowingChannel
from tests.integration.services import channel_to
from tools.stack.stack import Stack

_STUBS: dict[str, Any] = {"ledger": LedgerServiceStub, "cursor": CursorServiceStub}


@dataclass
class Instances:
    """The instances of a service of a stack, by the names of their processes."""

    stack: Stack
    service: str
    following: FollowingChannel
    channels: dict[str, aio.Channel]

    @property
    def names(self) -> list[str]:
        """The first one is the keeper."""
        return self.stack.instances[self.service]

    @property
    def anywhere(self) -> Any:
        """A stub that finds the instance that has a topic."""
        return _STUBS[self.service](self.following)

    def at(self, name: str) -> Any:
        """A stub for one instance."""
        return _STUBS[self.service](self.channels[name])

    def placement_at(self, name: str) -> Any:
        """The same, of the placement service."""
        return PlacementServiceStub(self.channels[name])

    def address(self, name: str) -> str:
        """Where an instance is."""
        return self.stack.address(name)

    async def where(self, topic: str) -> str:
        """Which instance has a topic, by the keeper's record."""
        stub: Any = PlacementServiceStub(self.channels[self.names[0]])
        record = (await stub.Locate(pb.LocateRequest(topic=topic))).placement
        return next(name for name in self.names if self.address(name) == record.owner)

    async def elsewhere(self, topic: str) -> str:
        """An instance that does not have it; not the keeper, if there is another."""
        here = await self.where(topic)
        return [name for name in self.names if name != here][-1]

    async def move(self, topic: str, to: str) -> bool:
        """Move a topic; whether this call did."""
        stub: Any = PlacementServiceStub(self.following)  # type: ignore[call-overload]
        request = pb.MoveTopicRequest(topic=topic, to=self.address(to))
        return bool((await stub.MoveTopic(request, timeout=30)).moved)

    async def holding(self, topic: str) -> list[str]:
        """Which instances have a topic in their stores."""
        found = []
        for name in self.names:
            stub = self.at(name)
            if self.service == "ledger":
                topics = ledger_pb2.ListTopicsRequest(prefix=topic, local=True)
                listed = [each.name for each in (await stub.ListTopics(topics)).topics]
            else:
                cursors = cursor_pb2.ListCursorsRequest(page_size=1_000, local=True)
                listed = [each.topic for each in (await stub.ListCursors(cursors)).cursors]
            found += [name] if topic in listed else []
        return found


@asynccontextmanager
async def instances_of(stack: Stack, service: str) -> AsyncIterator[Instances]:
    """Channels to all instances of a service."""
    channels = {name: channel_to(stack.address(name)) for name in stack.instances[service]}
    try:
        async with FollowingChannel(stack.target(service), channel_to) as following:
            yield Instances(stack, service, following, channels)
    finally:
        for channel in channels.values():
            await channel.close()
