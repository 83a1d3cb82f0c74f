"""Policies that change under load, and the producers forgotten under them."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.rpc import error_details_pb2
from grpc import StatusCode, aio
from redis.asyncio import Redis

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.api.ledger.v1 import ledger_pb2 as pb
from seqgate.client import connect
from seqgate.services.dedup.adapters.connect import connect_redis
from seqgate.services.dedup.adapters.keys import PREFIX, topic_key
from seqgate.services.dedup.adapters.memory import MemoryStateStore
from seqgate.services.dedup.adapters.redis import RedisStateStore
from seqgate.services.dedup.core.policy import EffectivePolicy, Policies
from seqgate.services.dedup.ports import StateStore
from seqgate.services.dedup.service import Deduplication, ProducerNotFound
from seqgate.services.dedup.snapshots import Snapshots
from seqgate.services.deduplication import (
    Claim,
    Confirmation,
    Judged,
    ProducerClaims,
    ProducerEntries,
    Verdict,
    Writer,
)
from seqgate.services.runtime.cursors import NoCursors
from seqgate.times import duration
from seqgate.types import Position, TopicName
from tests.integration.refusals import check
from tests.integration.services import Services, running
from tests.support.publisher import Publisher, publishing, single
from tests.support.redis_server import RedisServer
from tests.support.waiting import WITHIN_S, eventually

STORED, DUPLICATE = pb.RECEIPT_STATUS_STORED, pb.RECEIPT_STATUS_DUPLICATE
FAILED = pb.RECEIPT_STATUS_FAILED

CLUSTER = dedup_pb2.POLICY_SOURCE_CLUSTER
NAMESPACE = dedup_pb2.POLICY_SOURCE_NAMESPACE
TOPIC = dedup_pb2.POLICY_SOURCE_TOPIC
DEFAULT = dedup_pb2.POLICY_SOURCE_DEFAULT

_generation = itertools.count(1)


class Policed:
    """A stack whose policies a test sets."""

    def __init__(self, services: Services) -> None:
        self.services = services

    def write(self, text: str | bytes) -> None:
        """Replace the policy file atomically."""
        file = self.services.stack.policy_file
        scratch = file.with_suffix(".new")
        scratch.write_bytes(text if isinstance(text, bytes) else text.encode())
        scratch.replace(file)

    async def set(self, text: str) -> None:
        """Set policies, and return once the service applies them."""
        generation = next(_generation)
        self.write(f'{text}\n[topic."public/policies/generation"]\nmax_producers = {generation}\n')

        async def read() -> bool:
            status = await self.services.status("public/policies/generation")
            return status.policy.max_producers == generation

        await eventually(read, "the policies are read")


@pytest.fixture(scope="module")
async def module_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    async with running(
        tmp_path_factory.mktemp("policies"),
        SEQGATE_DEDUP_POLICY_INTERVAL_S="0.001",
        SEQGATE_DEDUP_PURGE_INTERVAL_S="86400",
    ) as services:
        yield services


@pytest.fixture
async def policed(module_stack: Services) -> AsyncIterator[Policed]:
    policed = Policed(module_stack)
    yield policed
    await policed.set("")


@pytest.fixture
def services(module_stack: Services, policed: Policed) -> Services:
    return module_stack


def off(topic: str) -> str:
    return f'[topic."{topic}"]\nenabled = false\n'


async def last_id(services: Services, topic: str, producer: str = "p") -> int | None:
    """The last id that a connecting producer gets."""
    async with publishing(services.ledger, topic, producer) as publisher:
        opened = publisher.opened
        return opened.last_sequence_id if opened.HasField("last_sequence_id") else None


@asynccontextmanager
async def redis_of(services: Services) -> AsyncIterator[Redis]:
    async with Redis.from_url(services.stack.redis_url) as redis:
        yield redis


# ---- levels


@pytest.fixture
def levels(topic: str) -> list[tuple[str, bool, int]]:
    """Policy files one after the other, and the topic's policy under each."""
    yes, no = "enabled = true\n", "enabled = false\n"
    at_cluster, at_namespace = "[cluster]\n", '[namespace."public/default"]\n'
    at_topic = f'[topic."{topic}"]\n'
    elsewhere = '[namespace."public/other"]\nenabled = false\n[topic."public/default/x"]\n' + no
    return [
        ("", True, DEFAULT),
        (at_cluster + no, False, CLUSTER),
        (at_cluster + no + at_namespace + yes, True, NAMESPACE),
        (at_cluster + no + at_namespace + yes + at_topic + no, False, TOPIC),
        (at_cluster + no + at_namespace + no + at_topic + yes, True, TOPIC),
        (at_cluster + no + at_topic + yes, True, TOPIC),
        (at_cluster + no + at_topic + "max_producers = 7\n", False, CLUSTER),
        (at_cluster + no + at_namespace + yes + at_topic + "max_producers = 7\n", True, NAMESPACE),
        (at_cluster + yes + at_namespace + no, False, NAMESPACE),
        (at_cluster + yes + elsewhere, True, CLUSTER),
        (at_namespace + no, False, NAMESPACE),
        (elsewhere, True, DEFAULT),
    ]


async def test_the_most_specific_level_wins_and_its_removal_falls_back(
    policed: Policed, services: Services, topic: str, levels: list[tuple[str, bool, int]]
) -> None:
    for text, enabled, source in levels:
        await policed.set(text)
        policy = (await services.status(topic)).policy
        assert (policy.enabled, policy.enabled_source) == (enabled, source), text


async def test_a_connecting_producer_gets_its_last_id_where_policy_deduplicates(
    policed: Policed, services: Services, topic: str, levels: list[tuple[str, bool, int]]
) -> None:
    """As Pulsar's tests assert; also when nothing was published since the change."""
    async with publishing(services.ledger, topic, "p") as publisher:
        assert (await publisher.store(single(1, 9))).status == STORED
    for text, enabled, _ in levels:
        await policed.set(text)
        assert await last_id(services, topic) == (9 if enabled else None), text


async def test_a_producer_continues_its_ids_after_deduplication_is_enabled(
    policed: Policed, services: Services, topic: str
) -> None:
    """A producer that did not learn its last id would reuse it for a message that is then never
    stored, and yet answered as a duplicate."""
    await policed.set(off(topic))
    async with publishing(services.ledger, topic, "p") as publisher:
        for each in range(3):
            assert (await publisher.store(single(each, each))).status == STORED
    await policed.set("")
    async with publishing(services.ledger, topic, "p") as publisher:
        opened = publisher.opened
        first = opened.last_sequence_id + 1 if opened.HasField("last_sequence_id") else 0
        assert (await publisher.store(single(1, first, b"another"))).status == STORED
    assert await services.ids(topic) == [0, 1, 2, 3]


async def test_each_value_comes_from_its_own_level(
    policed: Policed, services: Services, topic: str
) -> None:
    await policed.set(
        f"""
        [cluster]
        on_full = "refuse"
        snapshot_entries = 7
        max_producers = 11
        producer_inactivity_timeout_minutes = 12
        [namespace."public/default"]
        max_producers = 21
        producer_inactivity_timeout_minutes = 0
        on_conflict = "refuse"
        [topic."{topic}"]
        max_producers = 31
        """
    )
    policy = (await services.status(topic)).policy
    assert policy == dedup_pb2.Policy(
        enabled=True,
        enabled_source=DEFAULT,
        producer_inactivity_timeout=duration(0),
        producer_inactivity_timeout_source=NAMESPACE,
        max_producers=31,
        max_producers_source=TOPIC,
        on_full=dedup_pb2.FULL_TOPIC_ACTION_REFUSE,
        on_full_source=CLUSTER,
        snapshot_entries=7,
        snapshot_entries_source=CLUSTER,
        snapshot_interval=duration(120_000),
        snapshot_interval_source=DEFAULT,
        on_conflict=dedup_pb2.CONFLICT_ACTION_REFUSE,
        on_conflict_source=NAMESPACE,
    )


async def test_no_level_makes_a_system_topic_deduplicate(
    policed: Policed, services: Services, topic: str
) -> None:
    tenant, namespace, name = topic.split("/")
    system = f"{tenant}/{namespace}/__{name}"
    yes = "enabled = true\n"
    await policed.set(
        f'[cluster]\n{yes}[namespace."public/default"]\n{yes}[topic."{system}"]\n{yes}'
    )
    policy = (await services.status(system)).policy
    assert not policy.enabled
    assert policy.enabled_source == dedup_pb2.POLICY_SOURCE_SYSTEM_TOPIC
    async with publishing(services.ledger, system, "p") as publisher:
        for request_id in range(2):
            assert (await publisher.store(single(request_id, 7))).status == STORED
    assert await services.producers(system) == {}


# ---- an invalid file


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(b"[cluster\n", id="no TOML"),
        pytest.param(b"[cluster]\nenabled = false # \xff\n", id="no UTF-8"),
        pytest.param(b"[galaxy]\nenabled = false\n", id="an unknown level"),
        pytest.param(b"[cluster]\nenable = false\n", id="an unknown value"),
        pytest.param(b'[cluster]\nenabled = "no"\n', id="a value of another type"),
        pytest.param(b"[cluster]\nmax_producers = 0\n", id="a value out of bounds"),
        pytest.param(b'[cluster]\non_full = "explode"\n', id="an unknown action"),
        pytest.param(b'[cluster]\non_conflict = "explode"\n', id="an unknown reaction"),
        pytest.param(b'[topic."a/b"]\nenabled = false\n', id="no topic"),
        pytest.param(b'[namespace."a/b/c"]\nenabled = false\n', id="no namespace"),
        pytest.param(b"cluster = 1\n", id="no table"),
        pytest.param(None, id="no file"),
    ],
)
async def test_a_broken_file_changes_nothing_and_is_visible(
    policed: Policed, services: Services, topic: str, broken: bytes | None
) -> None:
    await policed.set(f'[topic."{topic}"]\nmax_producers = 5\n')
    before = await services.status(topic)
    assert before.policy_file_error == ""
    if broken is None:
        services.stack.policy_file.unlink()
    else:
        policed.write(broken)

    async def noticed() -> bool:
        return (await services.status(topic)).policy_file_error != ""

    await eventually(noticed, "the mistake is visible")
    status = await services.status(topic)
    assert status.policy_file_error.startswith("policies.toml: ")
    assert status.policy == before.policy
    async with publishing(services.ledger, topic, "p") as publisher:
        assert (await publisher.store(single(1, 1))).status == STORED
        assert (await publisher.store(single(2, 1))).status == DUPLICATE
    await policed.set(off(topic))
    after = await services.status(topic)
    assert after.policy_file_error == ""
    assert not after.policy.enabled


# ---- disabling and enabling


async def test_with_deduplication_off_an_id_is_stored_each_time(
    policed: Policed, services: Services, topic: str
) -> None:
    await policed.set(off(topic))
    async with publishing(services.ledger, topic, "p") as publisher:
        assert not publisher.opened.HasField("last_sequence_id")
        for request_id in range(3):
            assert (await publisher.store(single(request_id, 7))).status == STORED
    assert await last_id(services, topic) is None
    assert await services.ids(topic) == [7, 7, 7]
    status = await services.status(topic)
    assert status.state == dedup_pb2.TOPIC_STATE_DISABLED


async def test_with_deduplication_off_an_initial_id_is_returned(
    policed: Policed, services: Services, topic: str
) -> None:
    await policed.set(off(topic))
    async with publishing(services.ledger, topic, "p", initial_sequence_id=41) as publisher:
        assert publisher.opened.last_sequence_id == 41


async def test_automatic_ids_continue_across_policy_changes(
    policed: Policed, services: Services, topic: str
) -> None:
    """On, off and on again, without other producers: the producer never uses an id twice, since the
    topic may deduplicate again at any time, and is not taken for another one when it reconnects."""
    async with connect(services.stack.address("ledger")) as client:
        async with client.producer(topic, name="p") as before:
            await asyncio.gather(*(before.send(b"on") for _ in range(3)))
        await policed.set(off(topic))
        async with client.producer(topic, name="p") as producer:
            assert (await producer.send(b"off")).sequence_id == 3
            await policed.set("")
            assert (await producer.send(b"on again")).sequence_id == 4
            await services.stack.kill("ledger")
            on_its_way = producer.send_nowait(b"away")
            await services.stack.run("ledger")
            assert (await on_its_way).sequence_id == 5
    assert await services.ids(topic) == [0, 1, 2, 3, 4, 5]


async def test_a_producer_opened_with_deduplication_off_does_not_claim_older_messages(
    policed: Policed, services: Services, topic: str
) -> None:
    """It gets no last id, and its first message is sent when the topic deduplicates."""
    async with connect(services.stack.address("ledger")) as client:
        async with client.producer(topic, name="p") as before:
            await before.send(b"older")
        await policed.set(off(topic))
        async with client.producer(topic, name="p") as producer:
            assert producer.last_sequence_id is None
            await policed.set("")
            assert not (await producer.send(b"new")).duplicate
    assert await services.ids(topic) == [0, 1]


async def test_ids_stored_with_deduplication_off_are_known_when_it_is_on_again(
    policed: Policed, services: Services, topic: str
) -> None:
    """Pulsar leaves a window here: entries that are in neither map."""
    async with publishing(services.ledger, topic, "p") as publisher:
        assert (await publisher.store(single(1, 1))).status == STORED
        await policed.set(off(topic))
        assert (await publisher.store(single(2, 2))).status == STORED
        assert (await publisher.store(single(3, 2))).status == STORED
        await policed.set("")
        assert (await publisher.store(single(4, 2))).status == DUPLICATE
        assert (await publisher.store(single(5, 1))).status == DUPLICATE
        assert (await publisher.store(single(6, 3))).status == STORED
    assert await services.ids(topic) == [1, 2, 2, 3]
    assert (await services.settled(topic)).state == dedup_pb2.TOPIC_STATE_ACTIVE


async def test_switching_under_constant_publishing_leaves_no_hole(
    policed: Policed, services: Services, topic: str
) -> None:
    """Two producers publish continuously, and others publish once only: an id of theirs that was
    admitted by mistake is not hidden by a higher one."""
    slow_switches, quick_switches, group = 8, 100, 20
    enough = asyncio.Event()
    await services.ledger.CreateTopic(pb.CreateTopicRequest(topic=topic))
    async with asyncio.TaskGroup() as tasks:
        steady = {
            name: tasks.create_task(publish_groups(services, topic, name, group, enough))
            for name in ("p", "q")
        }
        brief = {
            name: tasks.create_task(publish_once_each(services, topic, name, enough))
            for name in ("r", "s", "t")
        }
        for switch in range(slow_switches):
            await policed.set(off(topic) if switch % 2 == 0 else "")
            so_far = (await get_topic(services, topic)).entries

            async def goes_on(beyond: int = so_far + 2 * group) -> bool:
                return (await get_topic(services, topic)).entries > beyond

            await eventually(goes_on, "more is published")
        for switch in range(quick_switches):
            policed.write(off(topic) if switch % 2 == 0 else "")
            await asyncio.sleep(0.002)
        await policed.set("")
        enough.set()

    sent = {name: list(range(task.result())) for name, task in steady.items()}
    for name, task in brief.items():
        sent |= {f"{name}-{each}": [0] for each in range(task.result())}
    assert await ids_by_producer(services, topic) == sent, "all of it, once, in order"
    for some in batched(sorted(sent), 100):
        await asyncio.gather(*(resend(services, topic, name, sent[name]) for name in some))
    status = await services.settled(topic)
    assert status.state == dedup_pb2.TOPIC_STATE_ACTIVE
    assert await ids_by_producer(services, topic) == sent


async def publish_groups(
    services: Services, topic: str, name: str, group: int, enough: asyncio.Event
) -> int:
    """Publish groups of messages until it is enough. Returns the number of messages."""
    async with publishing(services.ledger, topic, name) as publisher:
        sequence_ids = itertools.count()
        while not enough.is_set():
            some = [next(sequence_ids) for _ in range(group)]
            await publisher.send(*(single(each, each) for each in some))
            for each in some:
                assert (await publisher.receipt(each)).status == STORED
        return next(sequence_ids)


async def publish_once_each(
    services: Services, topic: str, prefix: str, enough: asyncio.Event
) -> int:
    """Publish one message each of many producers, one after the other, until it is enough. Returns
    the number of producers."""
    for count in itertools.count():
        if enough.is_set():
            return count
        async with publishing(services.ledger, topic, f"{prefix}-{count}") as publisher:
            assert (await publisher.store(single(1, 0))).status == STORED
    raise AssertionError


async def resend(services: Services, topic: str, name: str, sent: list[int]) -> None:
    """Send a producer's messages again: all of them are duplicates."""
    async with publishing(services.ledger, topic, name) as publisher:
        assert publisher.opened.last_sequence_id == sent[-1]
        await publisher.send(*(single(each, each) for each in sent))
        for each in sent:
            assert (await publisher.receipt(each)).status == DUPLICATE, (name, each)


async def ids_by_producer(services: Services, topic: str) -> dict[str, list[int]]:
    """The sequence ids in the log, in order."""
    stored: dict[str, list[int]] = {}
    for entry in await services.read(topic, metadata_only=True):
        metadata = entry.metadata
        stored.setdefault(metadata.producer_name, []).append(metadata.sequence_id)
    return stored


def batched(names: list[str], size: int) -> Iterator[list[str]]:
    for i in range(0, len(names), size):
        yield names[i : i + size]


async def get_topic(services: Services, topic: str) -> pb.Topic:
    answer: pb.GetTopicResponse = await services.ledger.GetTopic(pb.GetTopicRequest(topic=topic))
    return answer.topic


async def test_producers_of_a_topic_without_deduplication_leave_no_memory(
    policed: Policed, services: Services, topic: str
) -> None:
    await policed.set(off(topic))
    for each in range(30):
        async with publishing(services.ledger, topic, f"short-lived {each}") as publisher:
            assert (await publisher.store(single(1, 1))).status == STORED
    assert await services.producers(topic) == {}
    async with redis_of(services) as redis:
        assert await redis.exists(topic_key(TopicName.parse(topic))) == 0


async def test_state_is_dropped_with_deduplication_off_and_rebuilt_with_it_on(
    private: Any, topic: str
) -> None:
    """By the purge of a real service; the rebuilt state equals the log."""
    async with private(
        SEQGATE_DEDUP_POLICY_INTERVAL_S="0.02", SEQGATE_DEDUP_PURGE_INTERVAL_S="0.05"
    ) as services:
        policed = Policed(services)
        async with (
            publishing(services.ledger, topic, "p") as publisher,
            redis_of(services) as redis,
        ):
            assert (await publisher.store(single(1, 1))).status == STORED
            await services.settled(topic)
            await policed.set(off(topic))

            async def dropped() -> bool:
                return not await redis.keys(f"{PREFIX}{topic}*")

            await eventually(dropped, "the state is dropped")
            assert (await publisher.store(single(2, 2))).status == STORED
            await policed.set("")
            for sequence_id, status in ((1, DUPLICATE), (2, DUPLICATE), (3, STORED)):
                assert (await publisher.store(single(3, sequence_id))).status == status
        assert await services.ids(topic) == [1, 2, 3]


# ---- the number of producers


def capped(topic: str, limit: int, on_full: str) -> str:
    return f'[topic."{topic}"]\nmax_producers = {limit}\non_full = "{on_full}"\n'


async def test_a_producer_beyond_the_limit_is_refused_alone(
    policed: Policed, services: Services, topic: str
) -> None:
    """The policy refuses the producer. A raised limit admits it, and nothing is lost."""
    await policed.set(capped(topic, 3, "refuse"))
    for name in ("a", "b", "c"):
        async with publishing(services.ledger, topic, name) as publisher:
            assert (await publisher.store(single(1, 1))).status == STORED
    async with (
        publishing(services.ledger, topic, "d") as fourth,
        publishing(services.ledger, topic, "a") as first,
    ):
        receipt = await fourth.store(single(1, 1))
        assert receipt.status == FAILED
        details = check(receipt.error, StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_PRODUCERS")
        assert details == {"max_producers": "3"}
        assert retry_after_s(receipt) > 0
        assert (await fourth.store(single(2, 2))).status == pb.RECEIPT_STATUS_SKIPPED
        assert (await first.store(single(2, 2))).status == STORED

        status = await services.settled(topic)
        assert status.producers == status.policy.max_producers == 3
        assert status.counts.evicted_producers == 0
        assert (await services.producers(topic)).keys() == {"a", "b", "c"}

        await policed.set(capped(topic, 4, "refuse"))
        assert (await fourth.store(single(3, 1, resume=True))).status == STORED
        assert (await fourth.store(single(4, 2))).status == STORED
    assert await services.ids(topic, "d") == [1, 2]
    assert (await services.status(topic)).producers == 4


async def test_a_group_with_one_producer_too_many_is_judged_one_by_one(
    policed: Policed, services: Services, topic: str
) -> None:
    """Together they exceed the limit; the refusal must not affect known producers."""
    await policed.set(capped(topic, 3, "refuse"))
    names = ["a", "b", "c", "d", "e"]
    publishers: list[Publisher] = []
    async with asyncio.timeout(WITHIN_S):
        contexts = [publishing(services.ledger, topic, name) for name in names]
        try:
            publishers += [await context.__aenter__() for context in contexts]
            for known in publishers[:3]:
                assert (await known.store(single(0, 0))).status == STORED
            await asyncio.gather(*(each.send(single(1, 1)) for each in publishers))
            receipts = [await each.receipt(1) for each in publishers]
        finally:
            for context in contexts[: len(publishers)]:
                await context.__aexit__(None, None, None)
    assert [each.status for each in receipts] == [STORED] * 3 + [FAILED] * 2
    assert sorted(await services.ids(topic)) == [0, 0, 0, 1, 1, 1]


def retry_after_s(receipt: pb.Receipt) -> float:
    retry = error_details_pb2.RetryInfo()
    for detail in receipt.error.details:
        if detail.Unpack(retry):
            return float(retry.retry_delay.ToMicroseconds()) / 1e6
    return 0.0


async def test_a_producer_beyond_the_limit_evicts_the_least_active(
    policed: Policed, services: Services, topic: str
) -> None:
    """Of 15 producers the 10 most recently active are remembered."""
    await policed.set(capped(topic, 10, "evict"))
    names = [f"p{each:02d}" for each in range(15)]
    for name in names:
        async with publishing(services.ledger, topic, name) as publisher:
            assert (await publisher.store(single(1, 7))).status == STORED
        await services.settled(topic)
    status = await services.settled(topic)
    assert (status.producers, status.counts.evicted_producers) == (10, 5)
    assert (await services.producers(topic)).keys() == set(names[5:])
    for name in names[5:]:
        async with publishing(services.ledger, topic, name) as publisher:
            assert (await publisher.store(single(1, 7))).status == DUPLICATE
    # An evicted producer still gets its last id, from the log.
    for name in names[:5]:
        assert await last_id(services, topic, name) == 7
    assert (await services.status(topic)).producers == 10


async def test_a_producer_with_claims_in_flight_is_not_evicted(
    policed: Policed, services: Services, topic: str
) -> None:
    await policed.set(capped(topic, 2, "evict"))
    claim = writer_pb2.AdmitRequest(
        topic=topic,
        writer=writer_pb2.Writer(incarnation=1, epoch=1),
        claims=[
            writer_pb2.Claims(producer_name="a", sequence_ids=[1]),
            writer_pb2.Claims(producer_name="b", sequence_ids=[1]),
        ],
    )
    await services.dedup.Admit(claim)
    del claim.claims[:]
    claim.claims.add(producer_name="c", sequence_ids=[1])
    with pytest.raises(aio.AioRpcError, match="tracks its limit of 2 producers") as caught:
        await services.dedup.Admit(claim)
    assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
    assert (await services.producers(topic)).keys() == {"a", "b"}


# ---- the time that producers are remembered

MINUTE_MS = 60_000
BEGAN_MS = 1_700_000_000_000


class Fixed:
    """Policies fixed by a test."""

    error = ""

    def __init__(self, **cluster: object) -> None:
        self.policies = Policies.parse({"cluster": cluster})

    def known(self, topic: TopicName) -> None:
        return None

    async def effective(self, topic: TopicName) -> EffectivePolicy:
        return self.policies.effective(topic)

    async def forget(self, topic: TopicName) -> None:
        """Fixed policies have nothing to delete."""


Deduplicating = Callable[[StateStore, Fixed], Deduplication]


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, redis: RedisServer) -> AsyncIterator[StateStore]:
    """Both stores, with the test's time."""
    if request.param == "memory":
        yield MemoryStateStore(lambda: BEGAN_MS)
        return
    async with connect_redis(redis.url, timeout_s=30, connections_max=4) as client:
        store = RedisStateStore(client)
        store.now_ms = MemoryStateStore(lambda: BEGAN_MS).now_ms  # type: ignore[method-assign]
        yield store
        await client.flushdb()


@pytest.fixture
async def deduplicating() -> AsyncIterator[Deduplicating]:
    """Makes the service, without a wire and without cursors."""
    async with asyncio.TaskGroup() as tasks:

        def make(store: StateStore, policies: Fixed) -> Deduplication:
            return Deduplication(store, policies, Snapshots(store, NoCursors(), policies, tasks))

        yield make


@pytest.fixture
def name(topic: str) -> TopicName:
    return TopicName.parse(topic)


async def store_one(deduplication: Deduplication, topic: TopicName, *producers: str) -> None:
    """Each producer stores id 5 at the beginning."""
    position = Position(1, 0)
    outcome = await deduplication.confirm(
        topic,
        Writer(1, 1, position),
        Confirmation(
            None, position, tuple(ProducerEntries(each, (5,), BEGAN_MS) for each in producers), 1
        ),
    )
    assert outcome


async def verdict(deduplication: Deduplication, topic: TopicName, producer: str) -> Verdict:
    """The verdict on id 5, sent again."""
    claim = ProducerClaims(producer, (Claim(5, 5),))
    outcome = await deduplication.admit(topic, Writer(1, 1, Position(1, 0)), None, [claim])
    assert isinstance(outcome, Judged)
    return outcome.producers[0].verdicts[0]


async def test_an_inactive_producer_is_forgotten_and_a_connected_one_is_not(
    store: StateStore, name: TopicName, deduplicating: Deduplicating
) -> None:
    """The timeout is 1 minute, p has been gone for 70 s, q is connected."""
    deduplication = deduplicating(store, Fixed(producer_inactivity_timeout_minutes=1))
    await store_one(deduplication, name, "p", "q")
    await store.keep(name, ["q"], BEGAN_MS + 65_000)
    await deduplication.purge(BEGAN_MS + 70_000)
    status = await deduplication.status(name)
    assert status.summary is not None
    assert (status.summary.producers, status.summary.counts.purged) == (1, 1)
    assert status.summary.confirmed == Position(1, 0), "what is confirmed stays confirmed"
    with pytest.raises(ProducerNotFound):
        await deduplication.producer(name, "p")
    assert await verdict(deduplication, name, "q") is Verdict.DUPLICATE
    assert await verdict(deduplication, name, "p") is Verdict.NEW


@pytest.mark.parametrize(("after_ms", "forgotten"), [(MINUTE_MS, False), (MINUTE_MS + 1, True)])
async def test_a_producer_is_remembered_for_the_policys_timeout(
    store: StateStore, name: TopicName, deduplicating: Deduplicating, after_ms: int, forgotten: bool
) -> None:
    deduplication = deduplicating(store, Fixed(producer_inactivity_timeout_minutes=1))
    await store_one(deduplication, name, "p")
    await deduplication.purge(BEGAN_MS + after_ms)
    expected = Verdict.NEW if forgotten else Verdict.DUPLICATE
    assert await verdict(deduplication, name, "p") is expected


async def test_a_producer_that_returns_in_time_is_remembered(
    store: StateStore, name: TopicName, deduplicating: Deduplicating
) -> None:
    deduplication = deduplicating(store, Fixed(producer_inactivity_timeout_minutes=1))
    await store_one(deduplication, name, "p")
    for minute in range(1, 5):
        now_ms = BEGAN_MS + minute * 50_000
        await store.keep(name, ["p"], now_ms)
        await deduplication.purge(now_ms + 5_000)
    assert await verdict(deduplication, name, "p") is Verdict.DUPLICATE
    status = await deduplication.status(name)
    assert status.summary is not None
    assert status.summary.counts.purged == 0


@pytest.mark.parametrize(
    ("only_due", "age_s", "kept"),
    [(False, 1, True), (True, 9, False), (True, 11, True), (True, 50, True)],
)
async def test_a_connecting_producer_is_marked_as_alive_when_due(
    store: StateStore,
    name: TopicName,
    deduplicating: Deduplicating,
    only_due: bool,
    age_s: int,
    kept: bool,
) -> None:
    """The timeout is a minute, so reports are due every 20 s."""
    deduplication = deduplicating(store, Fixed(producer_inactivity_timeout_minutes=1))
    active_ms = await store.now_ms() - age_s * 1_000
    position = Position(1, 0)
    stored = ProducerEntries("p", (5,), active_ms)
    await deduplication.confirm(
        name, Writer(1, 1, position), Confirmation(None, position, (stored,), 1)
    )
    assert await deduplication.keep(name, ["p", "nobody"], only_due=only_due) == 20
    tracked = await deduplication.producer(name, "p")
    assert (tracked.active_ms > active_ms) is kept


async def test_without_a_timeout_no_reports_are_due(
    store: StateStore, name: TopicName, deduplicating: Deduplicating
) -> None:
    deduplication = deduplicating(store, Fixed(producer_inactivity_timeout_minutes=0))
    assert await deduplication.keep(name, ["p"]) == 0


async def test_a_claim_marks_its_producer_as_active(
    store: StateStore, name: TopicName, deduplicating: Deduplicating
) -> None:
    deduplication = deduplicating(store, Fixed(producer_inactivity_timeout_minutes=1))
    await store_one(deduplication, name, "p")
    claim = ProducerClaims("p", (Claim(5, 5),))
    await store.admit(
        name,
        Writer(1, 1, Position(1, 0)),
        None,
        [claim],
        now_ms=BEGAN_MS + 100_000,
        max_producers=10,
    )
    await deduplication.purge(BEGAN_MS + 150_000)
    assert (await deduplication.producer(name, "p")).marks.persisted == 5


async def test_a_timeout_of_zero_forgets_no_producer(
    store: StateStore, name: TopicName, deduplicating: Deduplicating
) -> None:
    deduplication = deduplicating(store, Fixed(producer_inactivity_timeout_minutes=0))
    await store_one(deduplication, name, "p")
    await deduplication.purge(BEGAN_MS + 10 * 365 * 24 * 60 * MINUTE_MS)
    assert await verdict(deduplication, name, "p") is Verdict.DUPLICATE


async def test_producers_with_claims_in_flight_are_not_forgotten(
    store: StateStore, name: TopicName, deduplicating: Deduplicating
) -> None:
    """Otherwise a copy of the claim would be admitted."""
    deduplication = deduplicating(store, Fixed(producer_inactivity_timeout_minutes=1))
    writer = Writer(1, 1, None)
    claim = ProducerClaims("p", (Claim(5, 5),))
    await store.admit(name, writer, None, [claim], now_ms=BEGAN_MS, max_producers=10)
    await deduplication.purge(BEGAN_MS + 10 * MINUTE_MS)
    outcome = await deduplication.admit(name, writer, None, [claim])
    assert isinstance(outcome, Judged)
    assert outcome.producers[0].verdicts == [Verdict.IN_FLIGHT]
    await deduplication.rollback(name, writer, None, [])
    await deduplication.purge(BEGAN_MS + 20 * MINUTE_MS)
    with pytest.raises(ProducerNotFound):
        await deduplication.producer(name, "p")


async def test_a_lowered_limit_evicts_the_least_active(
    store: StateStore, name: TopicName, deduplicating: Deduplicating
) -> None:
    """By the purge."""
    deduplication = deduplicating(store, Fixed(max_producers=2))
    producers = ["a", "b", "c", "d", "e"]
    await store_one(deduplication, name, *producers)
    for each, producer in enumerate(reversed(producers)):
        await store.keep(name, [producer], BEGAN_MS + 1 + each)
    await deduplication.purge(BEGAN_MS + 10)
    status = await deduplication.status(name)
    assert status.summary is not None
    assert (status.summary.producers, status.summary.counts.evicted) == (2, 3)
    page = await store.producers(name, size=10, token="")
    assert {each for each, _ in page.producers} == {"a", "b"}


async def test_the_purge_drops_topics_that_no_longer_deduplicate(
    store: StateStore, name: TopicName, deduplicating: Deduplicating
) -> None:
    policies = Fixed()
    deduplication = deduplicating(store, policies)
    await store_one(deduplication, name, "p")
    policies.policies = Policies.parse({"topic": {str(name): {"enabled": False}}})
    await deduplication.purge(BEGAN_MS)
    assert (await deduplication.status(name)).summary is None


async def test_calls_beyond_the_redis_connections_wait(redis: RedisServer) -> None:
    async with connect_redis(redis.url, timeout_s=30, connections_max=1) as client:
        store = RedisStateStore(client)
        tokens = await asyncio.gather(*(store.policy_token() for _ in range(300)))
        assert len(set(tokens)) == 1
        assert len(await client.client_list()) == 1
