"""The kinds of Redis deployment: one server, a master behind Sentinels, and a cluster whose slots
move."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio.connection import Connection
from redis.exceptions import ConnectionError as NotConnected

from seqgate.dev.ports import free_ports
from seqgate.services.dedup.adapters.connect import connect_redis
from seqgate.services.dedup.adapters.keys import POLICIES, topic_key
from seqgate.services.dedup.adapters.redis import RedisStateStore
from seqgate.services.dedup.ports import StateUnavailable
from seqgate.services.deduplication import (
    Applied,
    Behind,
    Changed,
    Claim,
    Confirmation,
    Judged,
    ProducerClaims,
    Verdict,
    Writer,
)
from seqgate.services.errors import Fenced
from seqgate.types import Position, TopicName
from tests.support.redis_groups import (
    SLOTS,
    Cluster,
    Sentinels,
    command,
    info,
    slot_of,
    until,
)
from tests.support.redis_server import RedisServer, running_redis
from tests.support.waiting import eventually

TIMEOUT_S = 1.0
SPLIT_HISTORIES = 30
SPLIT_CALLS = 60
TOPIC = TopicName.parse("test/ways/topic")
END = Position(1, 0)
WRITER = Writer(1, 1, END)


@asynccontextmanager
async def store_at(url: str, *, timeout_s: float = TIMEOUT_S) -> AsyncIterator[RedisStateStore]:
    async with connect_redis(url, timeout_s=timeout_s, connections_max=8) as client:
        yield RedisStateStore(client)


@pytest.fixture(params=["redis", "sentinels", "cluster"])
def group(request: pytest.FixtureRequest) -> Iterator[RedisServer | Sentinels | Cluster]:
    """Each kind of deployment, flushed."""
    group: RedisServer | Sentinels | Cluster = request.getfixturevalue(request.param)
    group.flush()
    yield group
    group.flush()


@pytest_asyncio.fixture
async def store(group: RedisServer | Sentinels | Cluster) -> AsyncIterator[RedisStateStore]:
    async with store_at(group.url) as store:
        yield store


def serving(group: RedisServer | Sentinels | Cluster, key: str) -> RedisServer:
    """The server that holds a key."""
    if isinstance(group, Cluster):
        return group.owner(slot_of(key))
    return group.master if isinstance(group, Sentinels) else group


def topic_in(slots: range) -> TopicName:
    names = (TopicName.parse(f"test/ways/{number}") for number in range(SLOTS))
    return next(name for name in names if slot_of(topic_key(name)) in slots)


async def begin(store: RedisStateStore, topic: TopicName = TOPIC) -> int:
    """Create a topic with one entry; returns its revision."""
    applied = await store.rollback(topic, WRITER, Confirmation(None, END, (), 1), [])
    assert isinstance(applied, Applied)
    return applied.revision


async def admit(
    store: RedisStateStore, number: int, revision: int | None, topic: TopicName = TOPIC
) -> Judged | Behind | Changed:
    """The answer to one claim."""
    claims = [ProducerClaims("p", (Claim(number, number),))]
    writer = WRITER._replace(revision=revision)
    answer = await store.admit(topic, writer, None, claims, now_ms=1, max_producers=10)
    assert isinstance(answer, Judged | Behind | Changed)
    return answer


async def served(store: RedisStateStore, topic: TopicName = TOPIC) -> bool:
    """Whether a topic is served again; checks that every attempt ends in time."""
    async with asyncio.timeout(4 * TIMEOUT_S):
        try:
            await store.summary(topic)
        except StateUnavailable:
            return False
    return True


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def scripts_run(server: RedisServer) -> int:
    """The number of EVALSHA calls that a server has received."""
    return int(info(server, "commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])


async def test_every_topic_is_found(store: RedisStateStore) -> None:
    topics = {TopicName.parse(f"test/many/{number}") for number in range(60)}
    for topic in topics:
        await begin(store, topic)
    await store.policy_token()
    assert {topic async for topic in store.topics()} == topics


async def test_scripts_are_reloaded_into_a_server_that_lost_them(
    group: RedisServer | Sentinels | Cluster, store: RedisStateStore
) -> None:
    revision = await begin(store)
    command(serving(group, topic_key(TOPIC)), "SCRIPT", "FLUSH")
    answer = await admit(store, 7, revision)
    assert isinstance(answer, Judged)
    assert answer.producers[0].verdicts == [Verdict.NEW]
    assert answer.revision == revision + 1


@pytest.fixture
def lose_a_reply(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that makes the next reply, to any command, get lost with its connection."""
    orders: list[None] = []
    read = Connection.read_response

    async def read_and_lose(self: Connection, *args: Any, **options: Any) -> Any:
        reply = await read(self, *args, **options)
        if orders:
            orders.clear()
            await self.disconnect(nowait=True)
            raise NotConnected("lost")
        return reply

    monkeypatch.setattr(Connection, "read_response", read_and_lose)
    return lambda: orders.append(None)


async def test_a_script_is_not_rerun_when_its_reply_is_lost(
    group: RedisServer | Sentinels | Cluster,
    store: RedisStateStore,
    lose_a_reply: Callable[[], None],
) -> None:
    revision = await begin(store)
    await admit(store, 1, revision)
    server = serving(group, topic_key(TOPIC))
    ran = scripts_run(server)
    lose_a_reply()
    with pytest.raises(StateUnavailable):
        await admit(store, 2, revision + 1)
    assert scripts_run(server) == ran + 1
    assert await admit(store, 2, revision + 1) == Changed(revision + 2)


async def test_replicas_share_the_clock_of_redis(group: RedisServer | Sentinels | Cluster) -> None:
    async with store_at(group.url) as one, store_at(group.url) as other:
        assert abs(await one.now_ms() - await other.now_ms()) < 1_000 * TIMEOUT_S
        await one.check()


async def test_unreachable_servers_are_unavailable() -> None:
    hosts = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    tls = "?ssl_cert_reqs=none&ssl_check_hostname=false"
    for url in (
        *(f"redis+sentinel://{hosts}/name", f"redis+cluster://{hosts}"),
        *(f"rediss+sentinel://me:word@{hosts}/name{tls}", f"rediss+cluster://:word@{hosts}{tls}"),
        f"rediss://{hosts.partition(',')[0]}{tls}",
    ):
        async with store_at(url) as store:
            for attempt in (
                store.check(),
                store.policy_token(),
                store.summary(TOPIC),
                begin(store),
            ):
                with pytest.raises(StateUnavailable):
                    await attempt
            with pytest.raises(StateUnavailable):
                _ = [topic async for topic in store.topics()]


async def test_a_master_name_unknown_to_sentinels_is_unavailable(sentinels: Sentinels) -> None:
    async with store_at(sentinels.url.replace("/seqgate", "/other")) as store:
        with pytest.raises(StateUnavailable):
            await store.check()


async def test_a_silent_sentinel_takes_part_of_the_timeout(sentinels: Sentinels) -> None:
    """Even several silent ones do not use up a call's timeout."""
    with silent_port() as port:
        url = sentinels.url.replace("redis+sentinel://", f"redis+sentinel://127.0.0.1:{port},")
        async with store_at(url) as store, asyncio.timeout(TIMEOUT_S):
            await store.check()


async def test_a_silent_node_does_not_block_others(cluster: Cluster) -> None:
    with silent_port() as port:
        async with store_at(f"{cluster.url},127.0.0.1:{port}") as store:
            async with asyncio.timeout(TIMEOUT_S / 2):
                await store.check()


async def test_a_demoted_server_is_left(tmp_path: Path) -> None:
    """Another master may have the address by now."""
    with running_redis(tmp_path) as server:
        async with store_at(server.url) as store:
            revision = await begin(store)
            connections = info(server, "stats")["total_connections_received"]
            command(server, "REPLICAOF", "127.0.0.1", free_ports(1)[0])
            with pytest.raises(StateUnavailable):
                await admit(store, 1, revision)
            command(server, "REPLICAOF", "NO", "ONE")
            assert isinstance(await admit(store, 1, revision), Judged)
            by_this_test = 3
            made = info(server, "stats")["total_connections_received"] - connections
            assert made == by_this_test + 1


async def test_a_demoted_master_gives_no_verdict(sentinels: Sentinels) -> None:
    """Neither over an open connection, nor over a new one while Sentinels still name it."""
    sentinels.flush()
    old, new = sentinels.master, sentinels.replica
    async with store_at(sentinels.url) as store:
        revision = await begin(store)
        command(old, "REPLICAOF", "127.0.0.1", new.port)
        for _ in range(2):
            try:
                answer = await admit(store, 1, revision)
            except StateUnavailable:
                continue
            assert sentinels.master is new, answer
        await eventually(lambda: served(store), "a master is found")
    sentinels.settle()


async def test_a_planned_failover_is_followed(sentinels: Sentinels) -> None:
    sentinels.flush()
    async with store_at(sentinels.url) as store:
        await begin(store)
        await sentinels.fail_over()
        new = sentinels.master

        async def reached() -> bool:
            ran = scripts_run(new)
            with suppress(StateUnavailable):
                await store.rollback(TOPIC, WRITER, None, [])
            return scripts_run(new) > ran

        await eventually(reached, "it is found")
    sentinels.settle()


async def test_a_slot_moves_without_an_error(cluster: Cluster) -> None:
    """ASK and MOVED are followed, at each step and over many connections at once."""
    cluster.flush()
    topic = topic_in(range(SLOTS // 3, SLOTS))
    slot = slot_of(topic_key(topic))
    source = cluster.owner(slot)
    target = next(each for each in cluster.primaries[1:] if each is not source)
    async with store_at(cluster.url) as store, store_at(cluster.url) as other:
        await begin(store, topic)
        await asyncio.gather(*(each.summary(topic) for each in (store, other) for _ in range(8)))
        revision = (await begin(store, topic)) - 1
        number = 0
        for home in (target, source):
            for _ in cluster.move_slot(slot, home):
                for each in (store, other):
                    answers = [admit(each, number + i, None, topic) for i in range(8)]
                    judged = await asyncio.gather(*answers)
                    assert all(isinstance(answer, Judged) for answer in judged)
                    number += 8
        summary = await store.summary(topic)
        assert summary is not None
        assert summary.revision > revision
        assert {name async for name in other.topics()} == {topic}
        assert await store.policy_token() == await other.policy_token()


async def test_a_topic_created_while_its_slot_moves_is_in_one_place(cluster: Cluster) -> None:
    cluster.flush()
    topic = topic_in(range(SLOTS // 3, SLOTS))
    slot = slot_of(topic_key(topic))
    source = cluster.owner(slot)
    target = next(each for each in cluster.primaries[1:] if each is not source)
    async with store_at(cluster.url) as store:
        steps = cluster.move_slot(slot, target)
        assert [next(steps), next(steps)] == ["importing", "migrating"]
        await asyncio.gather(*(begin(store, topic) for _ in range(8)))
        assert command(source, "DBSIZE") == 0
        assert command(target, "DBSIZE") == 1
        assert list(steps) == ["migrated", "moved"]
        assert await served(store, topic)
        assert list(cluster.move_slot(slot, source))[-1] == "moved"


async def test_a_dead_primary_is_replaced(cluster: Cluster) -> None:
    """Topics of other slots continue, unless the cluster itself blocks them meanwhile."""
    cluster.flush()
    there, elsewhere = topic_in(range(SLOTS // 3)), topic_in(range(SLOTS // 3, SLOTS))
    async with store_at(cluster.url) as store:
        await begin(store, there)
        await begin(store, elsewhere)
        cluster.settle()
        old = cluster.owner(0)
        old.kill()
        with pytest.raises(StateUnavailable):
            await begin(store, there)
        await eventually(lambda: served(store, there), "there is another primary")
        assert cluster.owner(0) is not old
        assert isinstance(await admit(store, 1, None, there), Judged)
        assert {topic async for topic in store.topics()} == {there, elsewhere}
        old.start()
        cluster.settle()
        await begin(store, there)


async def test_a_manual_failover_of_a_primary_is_followed(cluster: Cluster) -> None:
    cluster.flush()
    topic = topic_in(range(SLOTS // 3))
    cluster.settle()
    new = next(each for each in cluster.servers if each not in cluster.owners())
    async with store_at(cluster.url) as store:
        revision = await begin(store, topic)
        command(new, "CLUSTER", "FAILOVER")
        until(lambda: cluster.owner(0) is new, "there is another primary")
        await eventually(lambda: served(store, topic), "it is found")
        assert isinstance(await admit(store, 1, revision, topic), Judged)
    cluster.settle()


async def test_a_cluster_is_ready_while_the_policies_slot_is_served(cluster: Cluster) -> None:
    """An unserved slot affects only its topics: if the service became unready, no topic would be
    served at all."""
    cluster.flush()
    here, elsewhere = topic_in(range(SLOTS // 2)), topic_in(range(SLOTS // 2, SLOTS))
    with ExitStack() as stack:
        for server in cluster.servers:
            command(server, "CONFIG", "SET", "cluster-require-full-coverage", "no")
            undo = ("CONFIG", "SET", "cluster-require-full-coverage", "yes")
            stack.callback(command, server, *undo)
        async with store_at(cluster.url) as store:
            await begin(store, here)
            await begin(store, elsewhere)
            with unserved(cluster, slot_of(topic_key(here))):
                with pytest.raises(StateUnavailable):
                    await begin(store, here)
                await begin(store, elsewhere)
                await store.check()
            await eventually(lambda: served(store, here), "the slot is served again")
            with unserved(cluster, slot_of(POLICIES)), pytest.raises(StateUnavailable):
                await store.check()
            await eventually(lambda: ready(store), "the policies' slot is served again")
    cluster.settle()


async def ready(store: RedisStateStore) -> bool:
    try:
        await store.check()
    except StateUnavailable:
        return False
    return True


@contextmanager
def unserved(cluster: Cluster, slot: int) -> Iterator[None]:
    """Remove a slot from its node while the block runs."""
    server = cluster.owner(slot)
    command(server, "CLUSTER", "DELSLOTS", slot)
    try:
        yield
    finally:
        command(server, "CLUSTER", "ADDSLOTS", slot)


@pytest.mark.parametrize("leaps", [True, False])
async def test_one_writer_meets_two_masters(redis: RedisServer, seed: int, leaps: bool) -> None:
    """A partitioned master still answers besides its successor, and a writer's calls go to either:
    claims admitted and not withdrawn are new on neither of them. Revisions that are mere counters
    could not distinguish the two, and would fail this test."""
    redis.flush()
    twice = 0
    async with connect_redis(redis.url, timeout_s=30, connections_max=1) as client:
        store = RedisStateStore(client) if leaps else RedisStateStore(client, leap=lambda: 0)
        for each in range(seed, seed + SPLIT_HISTORIES):
            masters = [TopicName.parse(f"test/split/{each}-{side}") for side in "ab"]
            await begin(store, masters[0])
            command(redis, "COPY", *map(topic_key, masters))
            twice += await meet_both(store, masters, Random(each))
            if twice:
                break
    redis.flush()
    assert (twice == 0) is leaps


async def meet_both(store: RedisStateStore, masters: list[TopicName], random: Random) -> int:
    """The number of claims that were admitted although they already were."""
    twice = 0
    epoch = 1
    revision: int | None = None  # not aligned
    claimed: set[int] = set()
    for _ in range(SPLIT_CALLS):
        topic = random.choice(masters)
        if random.random() < 0.1:
            epoch, revision, claimed = epoch + 1, None, set()  # a takeover
        writer = WRITER._replace(epoch=epoch, revision=revision)
        try:
            if revision is None:
                applied = await store.rollback(topic, writer, None, [])
                assert isinstance(applied, Applied)
                claimed.clear()
                revision = applied.revision
                continue
            number = random.randint(0, 3)
            claims = [ProducerClaims("p", (Claim(number, number),))]
            answer = await store.admit(topic, writer, None, claims, now_ms=1, max_producers=10)
        except Fenced:
            continue
        lost = random.random() < 0.1
        if lost or isinstance(answer, Changed):
            revision = None
            continue
        assert isinstance(answer, Judged)
        revision = answer.revision
        if answer.producers[0].verdicts == [Verdict.NEW]:
            twice += number in claimed
            claimed.add(number)
    return twice
