"""The token that tells replicas of changed policies, in every state store."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from seqgate.dev.ports import free_ports
from seqgate.services.dedup.adapters.connect import connect_redis
from seqgate.services.dedup.adapters.keys import POLICIES, topic_key
from seqgate.services.dedup.adapters.memory import MemoryStateStore
from seqgate.services.dedup.adapters.redis import RedisStateStore
from seqgate.services.dedup.ports import OUTDATED, StateStore, StateUnavailable
from seqgate.services.deduplication import Claim, Confirmation, Judged, ProducerClaims, Writer
from seqgate.types import Position, TopicName
from tests.support.redis_server import RedisServer

TOPIC = TopicName.parse("test/token/topic")


@pytest_asyncio.fixture
async def in_redis(redis: RedisServer) -> AsyncIterator[RedisStateStore]:
    async with connect_redis(redis.url, timeout_s=30, connections_max=64) as client:
        await client.flushdb()
        yield RedisStateStore(client)
        await client.flushdb()


@pytest_asyncio.fixture(params=["memory", "redis", "sentinels", "cluster"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[StateStore]:
    if request.param == "memory":
        yield MemoryStateStore()
        return
    group = request.getfixturevalue(request.param)
    group.flush()
    async with connect_redis(group.url, timeout_s=30, connections_max=64) as client:
        yield RedisStateStore(client)
    group.flush()


async def test_a_token_remains_until_it_is_replaced(store: StateStore) -> None:
    first = await store.policy_token()
    assert first
    assert await store.policy_token() == first
    await store.set_policy_token("0123456789abcdef")
    assert await store.policy_token() == "0123456789abcdef"


async def test_concurrent_creations_agree_on_one_token(store: StateStore) -> None:
    tokens = await asyncio.gather(*(store.policy_token() for _ in range(50)))
    assert set(tokens) == {await store.policy_token()}


async def test_a_token_belongs_to_no_topic(store: StateStore) -> None:
    await store.policy_token()
    assert [topic async for topic in store.topics()] == []
    end = Position(1, 0)
    await store.confirm(TOPIC, Writer(1, 1, end), Confirmation(None, end, (), 1))
    assert [topic async for topic in store.topics()] == [TOPIC]
    before = await store.policy_token()
    await store.forget_topic(TOPIC, None)
    assert await store.policy_token() == before


async def admitted(store: StateStore, policies: str | None) -> object:
    """The outcome of an Admit whose caller knows the policies by this token."""
    claims = [ProducerClaims("p", (Claim(1, 1),))]
    return await store.admit(
        TOPIC, Writer(1, 1, None), None, claims, now_ms=1, max_producers=9, policies=policies
    )


async def test_claims_are_judged_only_under_the_current_token(store: StateStore) -> None:
    first = await store.policy_token()
    assert isinstance(await admitted(store, first), Judged)
    summary = await store.summary(TOPIC)
    await store.set_policy_token("another")
    assert await admitted(store, first) == OUTDATED
    assert await store.summary(TOPIC) == summary
    assert isinstance(await admitted(store, "another"), Judged)
    assert isinstance(await admitted(store, None), Judged)


async def test_claims_are_not_judged_under_a_lost_token(
    in_redis: RedisStateStore, redis: RedisServer
) -> None:
    token = await in_redis.policy_token()
    with redis.client() as client:
        client.flushdb()
    assert await admitted(in_redis, token) == OUTDATED
    assert await in_redis.summary(TOPIC) is None


async def test_a_lost_token_does_not_recur(in_redis: RedisStateStore, redis: RedisServer) -> None:
    seen = {await in_redis.policy_token()}
    with redis.client() as client:
        for _ in range(20):
            client.flushdb()
            seen.add(await in_redis.policy_token())
    assert len(seen) == 21
    assert topic_key(TOPIC)[: len(POLICIES)] != POLICIES


async def test_without_redis_there_is_no_token() -> None:
    (port,) = free_ports(1)
    url = f"redis://127.0.0.1:{port}/0"
    async with connect_redis(url, timeout_s=1, connections_max=1) as client:
        with pytest.raises(StateUnavailable):
            await RedisStateStore(client).policy_token()
        with pytest.raises(StateUnavailable):
            await RedisStateStore(client).set_policy_token("token")
