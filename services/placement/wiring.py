"""The places of a service, wired by hand."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from google.protobuf.descriptor import ServiceDescriptor
from grpc import aio

from seqgate.api.placement.v1 import placement_pb2_grpc
from services.placement.adapters.peers import GrpcKeeper, GrpcPeers
from services.placement.adapters.sqlite import (
    Remove,
    Rows,
    SqliteKeeper,
    SqliteShelf,
    make_tables,
)
from services.placement.config import PlacedConfig
from services.placement.guard import Guard, Guarding
from services.placement.service import Places
from services.placement.servicer import PlacementServicer
from services.runtime.channels import peer_channel
from services.runtime.metrics import OFF, Metrics
from services.runtime.sqlite import Connections
from services.runtime.tasks import end


class Placed(NamedTuple):
    """Where there are several instances: the places, and channels to the others."""

    places: Places
    others: Sequence[aio.Channel]

    def register(self, server: aio.Server) -> None:
        """Add the placement service."""
        servicer = PlacementServicer(self.places)
        placement_pb2_grpc.add_PlacementServiceServicer_to_server(servicer, server)

    def guard(
        self, servicer: object, service: ServiceDescriptor, guarding: Guarding, stub: Any
    ) -> Any:
        """What stands before a servicer. `stub` makes a stub of a channel."""
        return Guard(servicer, service, guarding, self.places, [stub(each) for each in self.others])


@asynccontextmanager
async def placed(
    config: PlacedConfig,
    connections: Connections,
    rows: Rows,
    remove: Remove,
    metrics: Metrics = OFF,
) -> AsyncIterator[Placed | None]:
    """The places of a service; None: it has one instance.

    Args:
        connections: to the service's store.
        rows: what the store does with a topic's rows.
        remove: removes those that are nobody's.
        metrics: of the service.
    """
    if not config.instances:
        yield None
        return
    await make_tables(connections, rows)
    await remove()
    async with AsyncExitStack() as stack:
        others: dict[str, aio.Channel] = {}
        for address in config.instances:
            if address != config.advertised:
                channel = peer_channel(
                    address, keepalive_s=config.keepalive_s, as_caller=config, metrics=metrics
                )
                others[address] = await stack.enter_async_context(channel)
        first = config.instances[0]
        is_keeper = first == config.advertised
        places = Places(
            config.advertised,
            config.instances,
            SqliteKeeper(connections, config.instances) if is_keeper else GrpcKeeper(others[first]),
            SqliteShelf(connections, rows, remove),
            GrpcPeers(others),
        )
        await places.start()
        yield Placed(places, list(others.values()))
        await places.finish()


@asynccontextmanager
async def settling(placed: Placed | None) -> AsyncIterator[None]:
    """Meanwhile, moves that were cut short are brought to their ends."""
    if placed is None:
        yield
        return
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(placed.places.settle_forever()),
            tasks.create_task(placed.places.announce()),
        ]
        try:
            yield
        finally:
            await end(*running)
