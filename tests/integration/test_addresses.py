"""A service that moved to another address is found again soon: a pod that was replaced."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from grpc import aio

from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client._channel import open_channel
from seqgate.dev.ports import free_ports
from seqgate.services.runtime.channels import peer_channel
from tests.support.name_server import name_server
from tests.support.waiting import eventually
from tools.stack.handlers import handlers

SOON_S = 15.0
"""Half of what gRPC waits by default before it asks for a name again."""


@asynccontextmanager
async def ledger_at(address: str, port: int) -> AsyncIterator[aio.Server]:
    """A ledger with one topic, which is named like its address."""

    async def get_topic(request: pb.GetTopicRequest, context: object) -> pb.GetTopicResponse:
        return pb.GetTopicResponse(topic=pb.Topic(name=address))

    server = aio.server()
    service = pb.DESCRIPTOR.services_by_name["LedgerService"]
    server.add_generic_rpc_handlers([handlers(service, GetTopic=get_topic)])
    server.add_insecure_port(f"{address}:{port}")
    await server.start()
    try:
        yield server
    finally:
        await server.stop(None)


def as_a_service(target: str) -> aio.Channel:
    return peer_channel(target, keepalive_s=10)


@pytest.mark.parametrize("opened", [open_channel, as_a_service])
async def test_a_service_that_moved_is_found_again_soon(
    opened: Callable[[str], aio.Channel],
) -> None:
    """Its name was asked for a moment ago, and gRPC would not ask again for half a minute."""
    (port,) = free_ports(1)
    async with name_server("127.0.0.2") as names:
        channel = opened(f"dns://127.0.0.1:{names.port}/ledger.seqgate:{port}")
        stub = LedgerServiceStub(channel)

        async def seen() -> str:
            try:
                answer = await stub.GetTopic(pb.GetTopicRequest(topic="t"), timeout=1)
            except aio.AioRpcError as error:
                return error.code().name
            return str(answer.topic.name)

        async def answers(address: str) -> bool:
            return await seen() == address

        try:
            async with ledger_at("127.0.0.2", port):
                await eventually(lambda: answers("127.0.0.2"), "the first address answers")
            names.address = "127.0.0.3"
            async with ledger_at("127.0.0.3", port):
                await eventually(
                    lambda: answers("127.0.0.3"), "the new address answers", within_s=SOON_S
                )
        finally:
            await channel.close()
