"""A change of filters whose dispatcher dies or is paused is applied once or not at all."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from grpc import StatusCode, aio

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.dev.ports import free_ports
from tests.faults.test_dispatcher import QUICK, dispatcher, is_stopped
from tests.faults.world import World
from tests.integration.services import channel_to, serving
from tests.support.crash_points import Order
from tests.support.publisher import publishing, single
from tests.support.raw_consumer import EARLIEST, consuming
from tests.support.waiting import eventually

REGIONS = ("eu", "us", "eu", "us")
EU, US, ASIA = "eu", "us", "asia"


@pytest.fixture(scope="module")
async def quick(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """A stack whose subscriptions change hands quickly."""
    world = World(tmp_path_factory.mktemp("filters"), **QUICK)
    async with world.stack:
        yield world


async def prepare(world: World, topic: str) -> None:
    """Publish a message from each region, and create a subscription."""
    async with (
        channel_to(world.stack.address("ledger")) as to_ledger,
        publishing(LedgerServiceStub(to_ledger), topic, "p") as publisher,
    ):
        for number, region in enumerate(REGIONS):
            properties = {"region": region}
            await publisher.store(single(number, number, partition_key="k", properties=properties))
    async with channel_to(world.stack.address("dispatcher")) as channel:
        stub: Any = DispatcherServiceStub(channel)
        await stub.CreateSubscription(
            pb.CreateSubscriptionRequest(topic=topic, subscription="s", start=EARLIEST)
        )


def change(topic: str, region: str, version: int, entry_id: int) -> pb.SetFiltersRequest:
    """Accept only this region, from an entry on."""
    expression = f"properties.region == '{region}'"
    filter_ = filter_pb2.Filter(name="region", version=version, expression=expression)
    request = pb.SetFiltersRequest(topic=topic, subscription="s", filters=[filter_])
    request.start.at.ledger_id, request.start.at.entry_id = 1, entry_id
    return request


async def versions(stub: Any, topic: str) -> tuple[list[int], list[int]]:
    """The versions of the filters in effect and of the recorded changes, newest first."""
    answer = await stub.GetFilters(pb.GetFiltersRequest(topic=topic, subscription="s"))
    return (
        [each.filters[0].version for each in answer.filters.applied],
        [each.filters[0].version for each in answer.filters.changes],
    )


async def set_when_it_may(stub: Any, request: pb.SetFiltersRequest) -> None:
    """Change filters once no other instance has the subscription."""

    async def is_set() -> bool:
        with suppress(aio.AioRpcError):
            await stub.SetFilters(request)
            return True
        return False

    await eventually(is_set, "the filters are set")


@pytest.mark.parametrize(
    ("point", "is_there"), [("set_properties.before", False), ("set_properties.after", True)]
)
async def test_a_filter_change_amid_a_crash_is_applied_or_not_and_can_be_repeated(
    quick: World, point: str, *, is_there: bool
) -> None:
    topic = f"public/default/dies-{point}"
    await prepare(quick, topic)
    stack = quick.stack
    async with channel_to(stack.address("dispatcher")) as channel:
        stub: Any = DispatcherServiceStub(channel)
        await set_when_it_may(stub, change(topic, EU, 1, 0))
        quick.order("dispatcher", Order(point))
        request = change(topic, US, 2, 2)
        with pytest.raises(aio.AioRpcError):
            await stub.SetFilters(request)
        assert await stack.ended("dispatcher") == -signal.SIGKILL
    await stack.run("dispatcher")
    await serving(stack.address("dispatcher"))
    async with channel_to(stack.address("dispatcher")) as channel:
        stub = DispatcherServiceStub(channel)
        expected = ([1, 2], [2, 1]) if is_there else ([1], [1])
        assert await versions(stub, topic) == expected
        await set_when_it_may(stub, request)
        assert await versions(stub, topic) == ([1, 2], [2, 1])
        async with consuming(stub, topic, permits=9) as consumer:
            got = await consumer.received(2)
            assert [each.position.entry_id for each in got] == [0, 3]
            assert await consumer.still() == 0


@pytest.mark.parametrize(
    ("point", "is_there"), [("set_properties.before", False), ("set_properties.after", True)]
)
async def test_a_paused_instance_does_not_change_its_successors_filters(
    quick: World, point: str, *, is_there: bool
) -> None:
    topic = f"public/default/still-{point}"
    await prepare(quick, topic)
    stack = quick.stack
    (port,) = free_ports(1)
    async with (
        channel_to(stack.address("dispatcher")) as to_zombie,
        channel_to(f"127.0.0.1:{port}") as to_other,
        dispatcher(stack, port),
    ):
        late: Any = DispatcherServiceStub(to_zombie)
        other: Any = DispatcherServiceStub(to_other)
        await set_when_it_may(late, change(topic, EU, 1, 0))
        zombie = quick.pid("dispatcher")
        quick.order("dispatcher", Order(point, number=signal.SIGSTOP))
        asked = asyncio.ensure_future(late.SetFilters(change(topic, US, 2, 1)))
        await eventually(lambda: is_stopped(zombie))
        try:
            await set_when_it_may(other, change(topic, ASIA, 3, 3))
        finally:
            os.kill(zombie, signal.SIGCONT)
        outcome: Any = (await asyncio.gather(asked, return_exceptions=True))[0]
        if not is_there:  # otherwise success is correct: the change was made in time
            assert isinstance(outcome, aio.AioRpcError)
            assert outcome.code() is StatusCode.ABORTED
        expected = ([1, 2, 3], [3, 2, 1]) if is_there else ([1, 3], [3, 1])
        assert await versions(other, topic) == expected
