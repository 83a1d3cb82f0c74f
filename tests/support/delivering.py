"""Consumers and publishers that continue despite failures of the services."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

from grpc import aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.entry.v1 import entry_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import connect as connect_client
from seqgate.dev.stack import Stack
from seqgate.owners import FollowingChannel
from seqgate.types import Position
from tests.integration.services import channel_to
from tests.support.delivery_checkers import Deliveries, Token
from tests.support.delivery_runs import each_delivery
from tests.support.raw_consumer import RawConsumer, connect, subscribe
from tests.support.stubs import cursor_stub
from tests.support.waiting import eventually

KEYS = 25
CONSUMERS = 3
PERMITS = 8

LOAD = 10
"""Messages published at a time."""

PLACES = ("here", "there")
"""Values of the property `place`, used in turn."""


class Recording(RawConsumer):
    """A consumer that records its observations in a history."""

    def __init__(self, history: Deliveries, call: Any, subscribed: pb.Subscribed) -> None:
        self._history = history
        self._asked: dict[int, list[Token]] = {}
        super().__init__(call, subscribed)

    async def done_with(self, deliveries: Sequence[pb.Delivery]) -> None:
        """Request the acknowledgement of deliveries."""
        tokens = [Token(self.epoch, each.delivery) for each in deliveries]
        for token in tokens:
            self._history.asked(token)
        self._asked[self._requests + 1] = tokens
        await self.ask_acknowledge(*deliveries)

    def _take(self, response: pb.ConsumeResponse) -> None:
        for each in each_delivery(response.deliveries):
            token = Token(self.epoch, each.delivery)
            position = Position(each.position.ledger_id, each.position.entry_id)
            self._history.delivered(self._place, token, each.metadata.partition_key, position)
        if response.HasField("settled"):
            tokens = self._asked.pop(response.settled.request_id, [])
            outcomes = response.settled.outcomes or [pb.SETTLE_OUTCOME_DONE] * len(tokens)
            for token, outcome in zip(tokens, outcomes, strict=True):
                if outcome == pb.SETTLE_OUTCOME_DONE:
                    self._history.done(token)
        super()._take(response)

    @property
    def _place(self) -> str:
        return f"{self.name} ({self.epoch}, {self.subscribed.consumer_id})"


class Group:
    """Consumers of a subscription that reconnect whenever their stream ends. They acknowledge
    their deliveries in order, some after a short delay."""

    def __init__(
        self, topic: str, addresses: Sequence[str], random: Random, *, subscription: str = "s"
    ) -> None:
        self.topic = topic
        self.subscription = subscription
        self.addresses = list(addresses)
        self.history = Deliveries()
        self.connected: dict[str, Recording] = {}
        self._random = random
        self._channels: dict[str, Any] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all consumers inside the context."""
        tasks = [asyncio.create_task(self._keep(f"c{i}")) for i in range(CONSUMERS)]
        try:
            yield
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for consumer in self.connected.values():
                await consumer.crash()
            for channel in self._channels.values():
                await channel.close()

    async def given(self, count: int) -> None:
        """Wait for this many more deliveries."""
        end = len(self.history.given) + count
        await eventually(lambda: len(self.history.given) >= end, f"{count} more", within_s=30)

    async def crash_one(self) -> None:
        """Kill a connected consumer, if there is one."""
        if self.connected:
            await self._random.choice(list(self.connected.values())).crash()

    async def _keep(self, name: str) -> None:
        while True:
            address = self._random.choice(self.addresses)
            channel = self._channels.setdefault(address, channel_to(address))
            stub: Any = DispatcherServiceStub(channel)
            runs = self._random.random() < 0.5
            request = subscribe(self.topic, self.subscription, name=name, delivery_runs=runs)
            try:
                consumer = await connect(
                    stub, request, lambda *opened: Recording(self.history, *opened)
                )
            except aio.AioRpcError:
                await asyncio.sleep(0.02)
                continue
            assert isinstance(consumer, Recording)
            self.connected[name] = consumer
            await self._serve(consumer)
            await consumer.crash()

    async def _serve(self, consumer: Recording) -> None:
        await consumer.permit(PERMITS)
        while not consumer.has_ended:
            with suppress(AssertionError):  # the stream ended
                await consumer.until(lambda: consumer.waiting or consumer.draining.is_set())
            some = await consumer.received(consumer.waiting)
            for _ in range(self._random.randrange(3)):
                await asyncio.sleep(0)
            if some:
                await consumer.done_with(some)
                await consumer.permit(len(some))
            if consumer.draining.is_set():
                with suppress(aio.AioRpcError):
                    await consumer.leave()
                return


@asynccontextmanager
async def load(stack: Stack, topic: str) -> AsyncIterator[None]:
    """Publish to a topic inside the context, whatever happens to the ledger."""
    over = asyncio.Event()

    async def keep_publishing() -> None:
        async with (
            connect_client(stack.target("ledger")) as client,
            client.producer(topic, name="p", batching=None) as producer,
        ):
            i = 0
            while not over.is_set():
                some = [
                    producer.send_nowait(
                        b"x", key=f"k{i + n}", properties={"place": PLACES[n % len(PLACES)]}
                    )
                    for n in range(LOAD)
                ]
                i = (i + LOAD) % KEYS
                await asyncio.gather(*some)
                await asyncio.sleep(0.02)

    publishing = asyncio.create_task(keep_publishing())
    try:
        yield
        over.set()
        await publishing
    finally:
        publishing.cancel()
        await asyncio.wait([publishing])


def every(metadata: entry_pb2.EntryMetadata) -> bool:
    """Accept every message."""
    del metadata
    return True


def is_here(metadata: entry_pb2.EntryMetadata) -> bool:
    """Accept messages of the first place."""
    return metadata.properties["place"] == PLACES[0]


async def positions(
    stack: Stack, topic: str, wanted: Callable[[entry_pb2.EntryMetadata], bool] = every
) -> list[Position]:
    """The positions of a topic's accepted messages."""
    found: list[Position] = []
    async with FollowingChannel(stack.target("ledger"), channel_to) as channel:
        stub: Any = LedgerServiceStub(channel)
        request = ledger_pb2.ReadRequest(
            topic=topic, start=common_pb2.Start(earliest=common_pb2.Earliest()), metadata_only=True
        )
        async for response in stub.Read(request):
            found += (
                Position(each.position.ledger_id, each.position.entry_id)
                for each in response.entries.entries
                if wanted(each.metadata)
            )
    return found


async def all_acknowledged(stack: Stack, topic: str, subscription: str = "s") -> list[Position]:
    """Wait until a subscription has acknowledged everything. Returns the topic's positions."""
    published = await positions(stack, topic)
    async with FollowingChannel(stack.target("cursor"), channel_to) as channel:
        stub: Any = cursor_stub(channel)

        async def at_the_end() -> bool:
            request = cursor_pb2.GetCursorRequest(topic=topic, cursor=subscription)
            cursor = (await stub.GetCursor(request)).cursor
            return published[-1] == (cursor.mark_delete.ledger_id, cursor.mark_delete.entry_id)

        await eventually(at_the_end, "everything is acknowledged", within_s=40)
    return published
