"""The trap of synchronous replication, through a fail-over: a commit that is cancelled while it
waits for a standby is reported as a success, everybody sees it, and the standby that is promoted
does not have it. No ledger acknowledges it, and no answer tells of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import connect
from seqgate.dev.stack import Stack
from tests.integration.services import channel_to
from tests.support.postgres_server import admin
from tests.support.waiting import eventually
from tools.stack.postgres_cluster import PostgresCluster

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

TOPIC = "public/default/cancelled"
LEDGERS = ("ledger", "ledger-1")
ASK_TIMEOUT_S = 3.0
ROUNDS = 5

CANCEL = """SELECT pg_cancel_backend(pid) FROM pg_stat_activity
    WHERE wait_event = 'SyncRep' AND application_name = 'seqgate'"""
TAIL = "SELECT tail_ledger, tail_entry FROM topic WHERE name = $1"

Place = tuple[int, int]


def told_by(message: Message) -> Iterator[Place]:
    """The positions of entries in a response."""
    match message:
        case common_pb2.Position():
            yield message.ledger_id, message.entry_id
        case pb.LedgerRange():
            yield message.ledger_id, message.last_entry_id
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else [value]:
                yield from told_by(each)


async def asked(ledger: Any, doubtful: Place) -> list[Place]:
    """The positions in a ledger's answers to every call that reads; refusals tell of none."""
    position = common_pb2.Position(ledger_id=doubtful[0], entry_id=doubtful[1])
    earliest = common_pb2.Start(earliest=common_pb2.Earliest())
    at = common_pb2.Start(at=position)
    calls: list[Any] = [
        (ledger.GetTopic, pb.GetTopicRequest(topic=TOPIC)),
        (ledger.GetLastMessageId, pb.GetLastMessageIdRequest(topic=TOPIC)),
        (ledger.ListLedgers, pb.ListLedgersRequest(topic=TOPIC)),
        (ledger.ListTopics, pb.ListTopicsRequest()),
        (ledger.CreateTopic, pb.CreateTopicRequest(topic=TOPIC)),
        (
            ledger.FindMessage,
            pb.FindMessageRequest(topic=TOPIC, producer_name="p", sequence_id=1),
        ),
        (
            ledger.FindPosition,
            pb.FindPositionRequest(topic=TOPIC, append_time=Timestamp(seconds=1)),
        ),
        (ledger.ReadEntries, pb.ReadEntriesRequest(topic=TOPIC, positions=[position])),
        (ledger.Read, pb.ReadRequest(topic=TOPIC, start=earliest)),
        (ledger.Read, pb.ReadRequest(topic=TOPIC, start=at)),
    ]
    return [place for places in await asyncio.gather(*map(_places, calls)) for place in places]


async def _places(call: tuple[Any, Message]) -> list[Place]:
    return [place async for response in _answers(*call) for place in told_by(response)]


async def _answers(method: Any, request: Message) -> AsyncIterator[Message]:
    with suppress(aio.AioRpcError):
        call = method(request, timeout=ASK_TIMEOUT_S)
        if isinstance(call, Awaitable):
            yield await call
            return
        async for response in call:
            yield response


async def tail_in(cluster: PostgresCluster) -> Place:
    """The end of the log as everybody sees it on the primary."""
    async with admin(cluster.url(cluster.primary)) as connection:
        row = await connection.fetchrow(TAIL, TOPIC)
        assert row is not None
        return row["tail_ledger"], row["tail_entry"]


@asynccontextmanager
async def cancelling(cluster: PostgresCluster) -> AsyncIterator[None]:
    """Cancel every commit that waits for a standby."""

    async def cancel() -> bool:
        with suppress(OSError, asyncpg.PostgresError):
            await cluster.ask(cluster.primary, CANCEL)
        return False

    task = asyncio.create_task(eventually(cancel, within_s=600))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_nothing_tells_of_what_a_fail_over_removes(tmp_path: Path) -> None:
    async with PostgresCluster(tmp_path / "postgres", is_lasting=False) as cluster:
        url = cluster.url()
        services = ("cursor", "dedup", "ledger")
        async with (
            Stack(tmp_path / "stack", services=services, postgres_url=url, instances=2) as stack,
            connect(stack.target("ledger")) as client,
            channel_to(stack.address(LEDGERS[0])) as one,
            channel_to(stack.address(LEDGERS[1])) as other,
            client.producer(TOPIC, name="p", send_timeout_s=600) as producer,
        ):
            ledgers = [LedgerServiceStub(channel) for channel in (one, other)]
            await producer.send(b"0", sequence_id=0)
            stored = await tail_in(cluster)
            for name in list(cluster.standbys):
                await cluster.kill(name)
            sending = asyncio.create_task(producer.send(b"1", sequence_id=1))
            told: set[Place] = set()
            async with cancelling(cluster):

                async def is_visible() -> bool:
                    return await tail_in(cluster) > stored

                await eventually(is_visible, "a cancelled append is visible")
                for _ in range(ROUNDS):
                    for ledger in ledgers:
                        told |= {*await asked(ledger, await tail_in(cluster))}
            assert not sending.done(), "acknowledged without a standby"
            assert told <= {stored}, "told of what only the primary has"

            await cluster.kill(cluster.primary)
            for name in list(cluster.standbys):
                await cluster.start_again(name)
            await cluster.promote()
            assert await tail_in(cluster) == stored, "the fail-over removed nothing"
            sent = await sending
            assert not sent.duplicate
            async with client.reader(TOPIC, follow=False) as reader:
                found = [(each.payload, each.sequence_id) async for each in reader]
            assert found == [(b"0", 0), (b"1", 1)]
            again = await producer.send(b"1", sequence_id=1)
            assert again.duplicate
            assert again.message_id == sent.message_id
            after = {place for ledger in ledgers for place in await asked(ledger, stored)}
            assert after == {stored, await tail_in(cluster)}
