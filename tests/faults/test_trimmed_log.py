"""Trimmed ids stay known when Redis loses its state: none is stored again."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio
from redis.asyncio import Redis

from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2, ledger_pb2_grpc
from seqgate.client import Client, connect
from seqgate.dev.stack import Stack
from seqgate.errors import SequenceIdTrimmedError

TOPIC = "public/default/trimmed"
PRODUCERS = [f"p{number}" for number in range(7)]


SMALL_PAGES = """
import sys
from seqgate.services.ledger.core import writer
writer.REPLAY_PAGE_ENTRIES = 3
from seqgate.services.ledger.app import run
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.runtime.process import run_service
sys.exit(run_service(LedgerConfig, run))
"""
"""The ledger service, with replay pages smaller than the trimmed part."""


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    commands = {"ledger": [sys.executable, "-c", SMALL_PAGES]}
    async with Stack(tmp_path, commands=commands) as running:
        yield running


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with connect(stack.address("ledger")) as connected:
        yield connected


async def publish(client: Client, producer: str, sequence_id: int) -> bool:
    """Publish one message; returns whether it was a duplicate."""
    async with client.producer(TOPIC, name=producer) as opened:
        return (await opened.send(b"x", sequence_id=sequence_id)).duplicate


async def trim(stack: Stack, ledger_id: int, entry_id: int) -> None:
    async with aio.insecure_channel(stack.address("ledger")) as channel:
        stub: Any = ledger_pb2_grpc.LedgerServiceStub(channel)
        before = common_pb2.Position(ledger_id=ledger_id, entry_id=entry_id)
        await stub.TrimTopic(ledger_pb2.TrimTopicRequest(topic=TOPIC, before=before))


async def forget(stack: Stack) -> None:
    async with Redis.from_url(stack.redis_url) as redis:
        await redis.flushall()


@pytest.mark.parametrize("kept", [0, 3])
async def test_a_trimmed_id_is_not_stored_again_after_redis_lost_everything(
    stack: Stack, client: Client, kept: int
) -> None:
    for producer in PRODUCERS:
        assert not await publish(client, producer, 10)
    await trim(stack, 1, len(PRODUCERS) - kept)
    await forget(stack)
    for number, producer in enumerate(PRODUCERS):
        if number < len(PRODUCERS) - kept:
            with pytest.raises(SequenceIdTrimmedError):
                await publish(client, producer, 10)
        else:
            assert await publish(client, producer, 10)
        assert not await publish(client, producer, 11)


async def test_a_trimmed_id_is_not_stored_again_after_redis_went_back(
    stack: Stack, client: Client
) -> None:
    assert not await publish(client, "early", 10)
    async with Redis.from_url(stack.redis_url) as redis:
        (key,) = await redis.keys(f"*{TOPIC}*")
        older = await redis.dump(key)
        assert older is not None
        for producer in PRODUCERS:
            assert not await publish(client, producer, 10)
        await trim(stack, 1, 5)
        await redis.restore(key, 0, older, replace=True)
    for number, producer in enumerate(["early", *PRODUCERS]):
        if number < 5:
            with pytest.raises(SequenceIdTrimmedError):
                await publish(client, producer, 10)
        else:
            assert await publish(client, producer, 10)
