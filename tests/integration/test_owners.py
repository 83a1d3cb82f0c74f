"""Channels that follow NOT_OWNER to a topic's owner."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import connect
from seqgate.dev.ports import free_ports
from seqgate.owners import FOLLOW_MAX, FollowingBlockingChannel, FollowingChannel
from seqgate.spark._columns import Range, connected, read_blocks
from seqgate.types import Position
from tests.integration.refusals import refused
from tests.integration.services import Services, channel_to
from tests.support.fake_ledger import Instance, running_instance

TOPIC = "public/default/t"


@pytest.fixture
async def instances() -> AsyncIterator[list[Instance]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running_instance()) for _ in range(3)]


@pytest.fixture
async def channel(instances: list[Instance]) -> AsyncIterator[FollowingChannel]:
    async with FollowingChannel(instances[0].address, channel_to) as channel:
        yield channel


async def ask(channel: FollowingChannel) -> str:
    stub = LedgerServiceStub(channel)
    return str((await stub.GetTopic(pb.GetTopicRequest(topic=TOPIC), timeout=10)).topic.name)


async def read(channel: FollowingChannel) -> int:
    stub = LedgerServiceStub(channel)
    return len([each async for each in stub.Read(pb.ReadRequest(topic=TOPIC))])


def chain(*instances: Instance) -> None:
    """Each instance redirects to the next one; the last one owns the topic."""
    for here, there in pairwise(instances):
        here.owner = there.address
    instances[-1].owner = ""


async def test_a_call_follows_redirects_and_the_next_call_goes_to_the_owner(
    channel: FollowingChannel, instances: list[Instance]
) -> None:
    chain(*instances)
    assert await ask(channel) == instances[2].address
    assert await ask(channel) == instances[2].address
    assert await read(channel) == 2
    assert [each.calls for each in instances] == [1, 1, 3]


async def test_a_stream_follows_redirects_before_its_first_response(
    channel: FollowingChannel, instances: list[Instance]
) -> None:
    chain(*instances)
    assert await read(channel) == 2
    assert [each.calls for each in instances] == [1, 1, 1]


async def test_a_stream_is_not_redirected_after_its_first_response(
    channel: FollowingChannel, instances: list[Instance]
) -> None:
    chain(*instances[:2])
    instances[1].hands_over_to = "elsewhere:1"
    with refused(StatusCode.FAILED_PRECONDITION, "NOT_OWNER") as details:
        await read(channel)
    assert details == {"owner": "elsewhere:1"}
    assert channel.owners.of(TOPIC) == "elsewhere:1"  # for the next call


async def test_requests_written_before_the_first_response_reach_the_owner(
    channel: FollowingChannel, instances: list[Instance]
) -> None:
    chain(*instances)
    stub = LedgerServiceStub(channel)
    call: Any = stub.Publish()
    await call.write(pb.PublishRequest(open=pb.Open(topic=TOPIC)))
    for request_id in (1, 2):
        publications = pb.Publications(publications=[pb.Publication(request_id=request_id)])
        await call.write(pb.PublishRequest(publications=publications))
    assert (await call.read()).opened.producer_name == instances[2].address
    assert [(await call.read()).receipts.receipts[0].request_id for _ in range(2)] == [1, 2]
    publications = pb.Publications(publications=[pb.Publication(request_id=3)])
    await call.write(pb.PublishRequest(publications=publications))
    assert (await call.read()).receipts.receipts[0].request_id == 3
    await call.done_writing()
    assert await call.read() is aio.EOF
    assert await call.code() is StatusCode.OK
    assert [each.opened for each in instances] == [[TOPIC]] * 3


async def test_a_cycle_of_redirects_is_refused(
    channel: FollowingChannel, instances: list[Instance]
) -> None:
    first, second, _ = instances
    first.owner, second.owner = second.address, first.address
    for call in (ask, read):
        first.calls = second.calls = 0
        with refused(StatusCode.FAILED_PRECONDITION, "NOT_OWNER"):
            await call(channel)
        assert first.calls + second.calls == FOLLOW_MAX + 1


async def test_an_owner_that_names_itself_is_called_once(
    channel: FollowingChannel, instances: list[Instance]
) -> None:
    instances[0].owner = instances[0].address
    with refused(StatusCode.FAILED_PRECONDITION, "NOT_OWNER"):
        await ask(channel)
    assert instances[0].calls == 1


async def test_an_unreachable_owner_is_forgotten(
    channel: FollowingChannel, instances: list[Instance]
) -> None:
    chain(*instances[:2])
    await ask(channel)
    instances[1].is_draining = True
    with refused(StatusCode.UNAVAILABLE, "DRAINING"):
        await ask(channel)
    instances[1].is_draining = False
    chain(instances[0], instances[2])
    assert await ask(channel) == instances[2].address


async def test_a_call_that_waits_for_its_target_does_not_wait_for_an_owner_that_is_gone(
    channel: FollowingChannel, instances: list[Instance]
) -> None:
    (port,) = free_ports(1)
    chain(*instances[:2])
    instances[0].owner = f"127.0.0.1:{port}"
    request = pb.GetTopicRequest(topic=TOPIC)
    for _ in range(2):
        with pytest.raises(aio.AioRpcError) as raised:
            await LedgerServiceStub(channel).GetTopic(request, wait_for_ready=True)
        assert raised.value.code() is StatusCode.UNAVAILABLE
    assert instances[0].calls == 2  # it was forgotten


async def test_a_call_without_a_topic_goes_to_the_target(
    channel: FollowingChannel, instances: list[Instance]
) -> None:
    chain(*instances)
    await ask(channel)
    stub = LedgerServiceStub(channel)
    listed = await stub.ListTopics(pb.ListTopicsRequest())
    assert listed.topics[0].name == instances[0].address


async def test_blocking_calls_follow_redirects(instances: list[Instance]) -> None:
    chain(*instances)

    def work() -> tuple[str, int]:
        with FollowingBlockingChannel(instances[0].address, grpc.insecure_channel) as channel:
            stub = LedgerServiceStub(channel)
            responses = len(list(stub.Read(pb.ReadRequest(topic=TOPIC))))
            found = stub.GetTopic(pb.GetTopicRequest(topic=TOPIC), timeout=10).topic.name
            return found, responses

    assert await asyncio.to_thread(work) == (instances[2].address, 2)
    assert [each.calls for each in instances] == [1, 1, 2]


# ---- in front of a ledger service


async def test_a_client_follows_redirects_to_the_owner(
    services: Services, instances: list[Instance], topic: str
) -> None:
    instances[0].owner = services.stack.address("ledger")
    async with connect(instances[0].address) as client:
        async with client.producer(topic) as producer:
            await producer.send(b"one")
        async with client.reader(topic, follow=False) as reader:
            assert [each.payload async for each in reader] == [b"one"]
    assert instances[0].calls == 1


async def test_producers_and_readers_resume_at_the_owner_named_by_their_streams(
    services: Services, instances: list[Instance], topic: str
) -> None:
    publishing, reading, _ = instances
    publishing.hands_over_to = reading.hands_over_to = services.stack.address("ledger")
    async with connect(publishing.address) as client, client.producer(topic, name="p") as producer:
        await producer.send(b"one")
    async with connect(reading.address) as client, client.reader(topic, follow=False) as reader:
        assert [each.payload async for each in reader] == [b"one"]
    assert (publishing.opened, publishing.calls, reading.calls) == ([topic], 2, 2)


async def test_jobs_follow_redirects_to_the_owner(
    services: Services, instances: list[Instance], topic: str
) -> None:
    async with (
        connect(services.stack.address("ledger")) as client,
        client.producer(topic) as producer,
    ):
        for payload in (b"one", b"two"):
            await producer.send(payload)
    instances[0].owner = services.stack.address("ledger")

    def read() -> int:
        wanted = Range(topic, None, Position(9, 9), 2)
        with connected(instances[0].address) as stub:
            return sum(
                each.count for blocks in read_blocks(stub, wanted, timeout_s=10) for each in blocks
            )

    assert await asyncio.to_thread(read) == 2
    assert instances[0].calls == 1
