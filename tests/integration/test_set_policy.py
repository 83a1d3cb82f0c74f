"""Policies set by calls: durable, effective at once on every replica, and above the policy file."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple

import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode, aio
from redis.asyncio import Redis

from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client import Client, connect
from seqgate.times import duration
from seqgate.types import TOPIC_NAME_BYTES_MAX
from tests.integration.refusals import check, refused, status_of_call
from tests.integration.services import (
    Services,
    running,
    second_dedup,
    serving,
    writes_held_up,
)
from tests.support.depth import times
from tests.support.publisher import publishing, single
from tests.support.waiting import eventually

STORED, DUPLICATE = ledger_pb2.RECEIPT_STATUS_STORED, ledger_pb2.RECEIPT_STATUS_DUPLICATE
DEFAULT, CLUSTER = pb.POLICY_SOURCE_DEFAULT, pb.POLICY_SOURCE_CLUSTER
NAMESPACE, TOPIC = pb.POLICY_SOURCE_NAMESPACE, pb.POLICY_SOURCE_TOPIC
REFUSE = pb.FULL_TOPIC_ACTION_REFUSE
INVALID, UNAVAILABLE = StatusCode.INVALID_ARGUMENT, StatusCode.UNAVAILABLE
ROUNDS = times(quick=15, full=200)

Private = Callable[..., AbstractAsyncContextManager[Services]]


class Replicas(NamedTuple):
    """A stack, and a second replica of its dedup service."""

    services: Services
    one: Any
    two: Any


@pytest.fixture(scope="module")
async def replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replicas]:
    async with (
        running(
            tmp_path_factory.mktemp("replicas"), SEQGATE_DEDUP_POLICY_INTERVAL_S="0.01"
        ) as services,
        second_dedup(services) as two,
    ):
        yield Replicas(services, services.dedup, two)


async def put(dedup: Any, values: pb.PolicyValues | None = None, **level: Any) -> None:
    await dedup.SetPolicy(pb.SetPolicyRequest(values=values, **level))


async def got(dedup: Any, **level: str) -> pb.PolicyValues:
    answer: pb.GetPolicyResponse = await dedup.GetPolicy(pb.GetPolicyRequest(**level))
    return answer.values


async def effective(dedup: Any, topic: str) -> pb.Policy:
    answer = await dedup.GetTopicStatus(pb.GetTopicStatusRequest(topic=topic))
    policy: pb.Policy = answer.policy
    return policy


async def deduplicates(dedup: Any, topic: str) -> bool:
    """Whether a writer is told that the topic deduplicates, by an admission without claims."""
    request = writer_pb2.AdmitRequest(topic=topic, writer=writer_pb2.Writer(epoch=1))
    return bool((await dedup.Admit(request)).verdicts.deduplicated)


def limit(number: int) -> pb.PolicyValues:
    return pb.PolicyValues(max_producers=number)


async def max_producers(dedup: Any, topic: str) -> tuple[int, int]:
    policy = await effective(dedup, topic)
    return policy.max_producers, policy.max_producers_source


@asynccontextmanager
async def file_of(services: Services, text: str) -> AsyncIterator[None]:
    """A policy file, from when it has been read; emptied afterwards."""
    probe = "public/policies/probe"

    async def write(text: str, number: int) -> None:
        services.stack.policy_file.write_text(
            f'{text}\n[topic."{probe}"]\nsnapshot_entries = {number}\n'
        )

        async def read() -> bool:
            return (await effective(services.dedup, probe)).snapshot_entries == number

        await eventually(read, "the policy file is read")

    await write(text, next(_numbers))
    yield
    await write("", next(_numbers))


_numbers = itertools.count(1)


# ---- immediate effect on all replicas


async def test_the_next_call_on_another_replica_applies_a_new_policy(
    replicas: Replicas, topic: str
) -> None:
    """Disabled and enabled, on either replica."""
    for each in range(ROUNDS):
        setting, other = replicas[1:] if each % 2 else reversed(replicas[1:])
        enabled = each % 3 == 0
        await put(setting, pb.PolicyValues(enabled=enabled), topic=topic)
        assert await deduplicates(other, topic) is enabled, f"round {each}"


async def test_the_next_call_applies_a_new_limit(replicas: Replicas, topic: str) -> None:
    """On the topic and on its namespace in turn, and as it applies to claims."""
    namespace = topic.replace("public/default/", "public/limits-").replace("[", "-")
    topic = f"{namespace}/t"
    for each in range(1, ROUNDS + 1):
        setting, other = replicas[1:] if each % 2 else reversed(replicas[1:])
        if each % 2:
            await put(setting, limit(each), topic=topic)
            assert await max_producers(other, topic) == (each, TOPIC)
        else:
            await put(setting, topic=topic)
            await put(setting, limit(each), namespace=namespace)
            assert await max_producers(other, topic) == (each, NAMESPACE)
    await put(replicas.one, pb.PolicyValues(max_producers=1, on_full=REFUSE), topic=topic)
    claims = [writer_pb2.Claims(producer_name=name, sequence_ids=[1]) for name in ("p", "q")]
    request = writer_pb2.AdmitRequest(topic=topic, writer=writer_pb2.Writer(epoch=1), claims=claims)
    with refused(StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_PRODUCERS"):
        await replicas.two.Admit(request)


async def test_an_open_stream_applies_a_new_policy_from_its_next_request(
    replicas: Replicas, topic: str
) -> None:
    stream = replicas.two.Exchange()
    request = writer_pb2.AdmitRequest(topic=topic, writer=writer_pb2.Writer(epoch=1))
    for each in range(ROUNDS):
        enabled = each % 2 == 1
        await put(replicas.one, pb.PolicyValues(enabled=enabled), topic=topic)
        await stream.write(writer_pb2.ExchangeRequest(request_id=each, admit=request))
        answer = await stream.read()
        assert answer.admit.verdicts.deduplicated is enabled, f"round {each}"
    await stream.done_writing()


async def test_concurrent_changes_on_replicas_converge(replicas: Replicas, topic: str) -> None:
    for each in range(times(quick=10, full=50)):
        numbers = [each * 10 + i + 1 for i in range(6)]
        await asyncio.gather(
            *(put(replicas[1 + i % 2], limit(n), topic=topic) for i, n in enumerate(numbers))
        )
        one, two, stored = await asyncio.gather(
            max_producers(replicas.one, topic),
            max_producers(replicas.two, topic),
            got(replicas.two, topic=topic),
        )
        assert one == two == (stored.max_producers, TOPIC)
        assert stored.max_producers in numbers


async def test_no_replica_misses_a_change_when_redis_loses_its_data(
    replicas: Replicas, topic: str
) -> None:
    async with Redis.from_url(replicas.services.stack.redis_url) as redis:
        for each in range(1, times(quick=10, full=50)):
            await put(replicas.one, limit(each), topic=topic)
            await redis.flushdb()
            assert await max_producers(replicas.two, topic) == (each, TOPIC)
            assert await max_producers(replicas.one, topic) == (each, TOPIC)


async def test_switching_by_calls_under_load_leaves_no_hole(replicas: Replicas, topic: str) -> None:
    """Set on the replica that the ledger does not call."""
    enough = asyncio.Event()
    services = replicas.services

    async def publish() -> int:
        async with publishing(services.ledger, topic, "p") as publisher:
            for each in itertools.count():
                if enough.is_set():
                    return each
                assert (await publisher.store(single(each, each))).status == STORED
        raise AssertionError

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(publish())
        for each in range(100):
            await put(replicas.two, pb.PolicyValues(enabled=each % 2 == 1), topic=topic)
        enough.set()
    count = task.result()
    assert await services.ids(topic) == list(range(count))
    async with publishing(services.ledger, topic, "p") as publisher:
        for each in range(count):
            assert (await publisher.store(single(each, each))).status == DUPLICATE, each


# ---- levels


async def test_a_call_wins_over_the_file_on_its_level_until_it_is_removed(
    replicas: Replicas, topic: str
) -> None:
    """The most specific level wins, value by value, and removing a value uncovers that of the next
    level."""
    services, one, two = replicas
    namespace = "public/covered"
    topic = topic.replace("public/default", namespace)
    file = f"""
        [cluster]
        max_producers = 10
        snapshot_entries = 11
        [namespace."{namespace}"]
        max_producers = 20
        [topic."{topic}"]
        max_producers = 30
    """
    async with file_of(services, file), second_dedup(services) as three:
        assert await max_producers(three, topic) == (30, TOPIC)
        await put(one, limit(25), namespace=namespace)
        assert await max_producers(three, topic) == (30, TOPIC), "the topic's own is nearer"
        await put(one, limit(35), topic=topic)
        assert await max_producers(three, topic) == (35, TOPIC)
        policy = await effective(three, topic)
        assert (policy.snapshot_entries, policy.snapshot_entries_source) == (11, CLUSTER)
        await put(two, pb.PolicyValues(snapshot_entries=0), topic=topic)
        policy = await effective(three, topic)
        assert (policy.snapshot_entries, policy.snapshot_entries_source) == (0, TOPIC)
        assert await max_producers(three, topic) == (30, TOPIC), "a call replaces the one before"
        await put(two, topic=topic)
    async with file_of(services, file.partition("[topic")[0]):
        assert await max_producers(one, topic) == (25, NAMESPACE)
        await put(two, pb.PolicyValues(), namespace=namespace)
        assert await max_producers(one, topic) == (20, NAMESPACE)
    assert await max_producers(one, topic) == (10_000, DEFAULT)


async def test_a_connecting_producer_gets_its_last_id_where_calls_enable_deduplication(
    replicas: Replicas, topic: str
) -> None:
    """By calls: the cluster's built-in policy, namespace, topic, and back again."""
    services, one, two = replicas
    namespace = "public/told"
    topic = topic.replace("public/default", namespace)
    async with publishing(services.ledger, topic, "p") as publisher:
        assert (await publisher.store(single(1, 9))).status == STORED
    on, off, nothing = (
        pb.PolicyValues(enabled=True),
        pb.PolicyValues(enabled=False),
        pb.PolicyValues(),
    )
    for level, values, expected in (
        ({"namespace": namespace}, off, False),
        ({"topic": topic}, on, True),
        ({"namespace": namespace}, nothing, True),
        ({"topic": topic}, off, False),
        ({"namespace": namespace}, on, False),
        ({"topic": topic}, nothing, True),
        ({"namespace": namespace}, nothing, True),
    ):
        await put(two, values, **level)
        async with publishing(services.ledger, topic, "p") as publisher:
            opened = publisher.opened
            last = opened.last_sequence_id if opened.HasField("last_sequence_id") else None
            assert last == (9 if expected else None)
        status = await one.GetTopicStatus(pb.GetTopicStatusRequest(topic=topic))
        assert status.policy.enabled is expected
        assert (status.state == pb.TOPIC_STATE_DISABLED) is not expected


EVERYTHING = pb.PolicyValues(
    enabled=False,
    producer_inactivity_timeout=duration(0),
    max_producers=1,
    on_full=REFUSE,
    snapshot_entries=0,
    snapshot_interval=duration(0),
)


async def test_policies_are_returned_as_set(replicas: Replicas, topic: str) -> None:
    """0 is a value, and a level without values is returned empty."""
    levels: list[dict[str, Any]] = [{"topic": topic}, {"namespace": "public/given-back"}]
    for level in levels:
        assert await got(replicas.two, **level) == pb.PolicyValues()
        for values in (EVERYTHING, limit(3), pb.PolicyValues(enabled=True), pb.PolicyValues()):
            await put(replicas.one, values, **level)
            assert await got(replicas.two, **level) == values
        await put(replicas.one, limit(3), **level)
        await put(replicas.one, **level)
        assert await got(replicas.two, **level) == pb.PolicyValues()


async def test_a_deleted_topic_leaves_no_policy_and_a_forgotten_one_does(
    replicas: Replicas, topic: str
) -> None:
    await put(replicas.one, limit(3), topic=topic)
    for deleted, expected in ((False, limit(3)), (True, pb.PolicyValues())):
        request = writer_pb2.ForgetTopicRequest(topic=topic, incarnation=1, deleted=deleted)
        await replicas.two.ForgetTopic(request)
        assert await got(replicas.one, topic=topic) == expected
    assert await max_producers(replicas.one, topic) == (10_000, DEFAULT)


async def test_the_cursors_of_policies_are_of_a_system_topic_without_a_log(
    replicas: Replicas, topic: str
) -> None:
    namespace, _, name = topic.rpartition("/")
    namespace = namespace.replace("default", "kept")
    await put(replicas.one, limit(3), topic=f"{namespace}/{name}")
    await put(replicas.one, limit(4), namespace=namespace)
    place = f"{namespace}/__dedup_policies"
    request = cursor_pb2.ListCursorsRequest(topic=place)
    listed = await replicas.services.cursor.ListCursors(request)
    assert [each.name for each in listed.cursors] == ["@namespace", name]
    assert [each.HasField("mark_delete") for each in listed.cursors] == [False, False]
    topics = await replicas.services.topics(namespace)
    assert topics == []


# ---- durability


async def test_policies_survive_a_restart_of_every_process(private: Private, topic: str) -> None:
    """Every process is restarted, and Redis has lost all its data."""
    async with private() as services:
        await put(services.dedup, pb.PolicyValues(enabled=False), topic=topic)
        await put(services.dedup, limit(7), namespace="public/default")
        redis = services.stack.folder / "redis"
    for file in (each for each in redis.rglob("*") if each.is_file()):
        file.unlink()
    async with private() as services:
        policy = await effective(services.dedup, topic)
        assert (policy.enabled, policy.enabled_source) == (False, TOPIC)
        assert (policy.max_producers, policy.max_producers_source) == (7, NAMESPACE)


# ---- outages


async def test_without_the_cursor_service_known_topics_continue_and_others_wait(
    private: Private, topic: str
) -> None:
    known, new = topic, f"{topic}-new"
    async with private() as services:
        await put(services.dedup, limit(7), topic=known)
        async with publishing(services.ledger, known, "p") as publisher:
            assert (await publisher.store(single(1, 1))).status == STORED
            await services.ledger.CreateTopic(ledger_pb2.CreateTopicRequest(topic=new))
            await services.stack.terminate("cursor")
            assert (await publisher.store(single(2, 1))).status == DUPLICATE
            assert (await publisher.store(single(3, 2))).status == STORED
        assert await max_producers(services.dedup, known) == (7, TOPIC)
        with refused(UNAVAILABLE, "CURSORS_UNAVAILABLE"):
            await deduplicates(services.dedup, new)
        stream = services.dedup.Exchange()
        admit = writer_pb2.AdmitRequest(topic=new, writer=writer_pb2.Writer(epoch=1))
        await stream.write(writer_pb2.ExchangeRequest(request_id=1, admit=admit))
        assert (await stream.read()).error.code == UNAVAILABLE.value[0]
        await stream.done_writing()
        for call in (
            put(services.dedup, limit(8), topic=known),
            put(services.dedup, topic=known),
            got(services.dedup, topic=known),
        ):
            with refused(UNAVAILABLE, "CURSORS_UNAVAILABLE"):
                await call
        with refused(UNAVAILABLE, "CURSORS_UNAVAILABLE"):
            await max_producers(services.dedup, known)  # it may have been set
        async with connect(services.stack.address("ledger")) as client:
            waiting = asyncio.create_task(_send(client, new))

            def refused_it() -> bool:
                return any(
                    (line["event"], line.get("topic")) == ("deduplication failed", new)
                    for line in services.log("ledger")
                )

            await eventually(refused_it, "the log was refused")
            assert not waiting.done()
            await services.stack.run("cursor")
            await waiting

        async def back() -> bool:
            return await max_producers(services.dedup, known) == (7, TOPIC)

        await eventually(lambda: _answers(back), "the cursor service is reached again")
        assert await services.ids(new) == [0]


async def _send(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p") as producer:
        await producer.send(b"it waits", sequence_id=0)


async def _answers(question: Callable[[], Any]) -> bool:
    try:
        return bool(await question())
    except aio.AioRpcError as error:
        if error.code() is not UNAVAILABLE:
            raise
        return False


async def test_a_new_replica_refuses_until_it_reads_the_policies(
    private: Private, topic: str
) -> None:
    """It cannot know whether deduplication was disabled; publishing waits, and loses nothing."""
    async with private() as services:
        await put(services.dedup, pb.PolicyValues(enabled=False), topic=topic)
        await services.stack.terminate("cursor")
        await services.stack.terminate("dedup")
        await services.stack.run("dedup")
        with refused(UNAVAILABLE, "CURSORS_UNAVAILABLE"):
            await deduplicates(services.dedup, topic)
        system = topic.replace("default/", "default/__")
        assert not await deduplicates(services.dedup, system), "it never does, whatever is set"
        await services.stack.run("cursor")

        async def off() -> bool:
            return not await deduplicates(services.dedup, topic)

        await eventually(lambda: _answers(off), "the cursor service is reached")


async def test_without_a_cursor_service_the_file_applies_and_changes_are_refused(
    private: Private, topic: str
) -> None:
    """Where the file disables deduplication, no call waits for Redis either."""
    off = f'[topic."{topic}-off"]\nenabled = false\n[topic."{topic}"]\nmax_producers = 5\n'
    async with private(policies=off, SEQGATE_DEDUP_CURSOR_TARGET="") as services:
        assert await max_producers(services.dedup, topic) == (5, TOPIC)
        with refused(UNAVAILABLE, "CURSORS_UNAVAILABLE"):
            await put(services.dedup, limit(7), topic=topic)
        assert await got(services.dedup, topic=topic) == pb.PolicyValues()
        await services.stack.terminate("redis")
        assert not await deduplicates(services.dedup, f"{topic}-off")
        await services.stack.run("redis")


async def test_a_change_is_not_acknowledged_while_redis_refuses_its_token(
    private: Private, topic: str
) -> None:
    """A caller that gets UNAVAILABLE retries, and then the change applies."""
    async with private(SEQGATE_DEDUP_REDIS_TIMEOUT_S="0.2") as services:
        assert await max_producers(services.dedup, topic) == (10_000, DEFAULT)
        async with writes_held_up(services.stack):
            with refused(UNAVAILABLE, "STATE_UNAVAILABLE"):
                await put(services.dedup, limit(7), topic=topic)
        await put(services.dedup, limit(7), topic=topic)
        assert await max_producers(services.dedup, topic) == (7, TOPIC)


async def test_a_replica_that_dies_in_a_call_leaves_the_others_consistent(
    private: Private, topic: str
) -> None:
    """Killed after it wrote the property and before the token; the caller retries on another
    replica."""
    async with (
        private(SEQGATE_DEDUP_REDIS_TIMEOUT_S="30") as services,
        second_dedup(services) as two,
    ):
        assert await max_producers(two, topic) == (10_000, DEFAULT)
        assert await max_producers(services.dedup, topic) == (10_000, DEFAULT)
        async with writes_held_up(services.stack) as held_up:
            call = asyncio.create_task(put(services.dedup, limit(7), topic=topic))
            await eventually(held_up, "the token is being set")
            await services.stack.kill("dedup")
            with pytest.raises(aio.AioRpcError):
                await call
        await put(two, limit(7), topic=topic)
        assert await max_producers(two, topic) == (7, TOPIC)
        await services.stack.run("dedup")
        await serving(services.stack.address("dedup"))
        assert await max_producers(services.dedup, topic) == (7, TOPIC)


# ---- refusals


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("producer_inactivity_timeout", duration(525_601 * 60_000)),
        ("producer_inactivity_timeout", duration(59_999)),
        ("producer_inactivity_timeout", Duration(seconds=-60)),
        ("max_producers", 0),
        ("max_producers", 100_001),
        ("snapshot_entries", 1_000_001),
        ("snapshot_interval", duration(86_401_000)),
        ("snapshot_interval", duration(1_001)),
        ("on_full", 3),
        ("on_full", -1),
    ],
)
async def test_a_value_out_of_bounds_is_refused_and_changes_nothing(
    replicas: Replicas, topic: str, field: str, value: Any
) -> None:
    await put(replicas.one, limit(3), topic=topic)
    values = pb.PolicyValues(enabled=False, **{field: value})
    with pytest.raises(aio.AioRpcError) as caught:
        await put(replicas.one, values, topic=topic)
    status = status_of_call(caught.value)
    check(status, INVALID, "INVALID_POLICY")
    assert f"values.{field}".encode() in status.SerializeToString()
    with refused(INVALID, "INVALID_POLICY"):
        await put(replicas.one, values, namespace="public/refused")
    assert await got(replicas.two, topic=topic) == limit(3)
    assert await got(replicas.two, namespace="public/refused") == pb.PolicyValues()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("producer_inactivity_timeout", duration(525_600 * 60_000)),
        ("max_producers", 100_000),
        ("snapshot_entries", 1_000_000),
        ("snapshot_interval", duration(86_400_000)),
    ],
)
async def test_the_highest_values_are_accepted(
    replicas: Replicas, topic: str, field: str, value: Any
) -> None:
    values = pb.PolicyValues(**{field: value})
    await put(replicas.one, values, topic=topic)
    assert await got(replicas.two, topic=topic) == values
    assert getattr(await effective(replicas.two, topic), field) == value


LONG = "t/" + "n" * (TOPIC_NAME_BYTES_MAX - len("t/") - len("/__dedup_policies"))


@pytest.mark.parametrize(
    ("level", "reason"),
    [
        ({}, "INVALID_POLICY"),
        ({"namespace": ""}, "INVALID_POLICY"),
        ({"namespace": "public"}, "INVALID_POLICY"),
        ({"namespace": "public/default/t"}, "INVALID_POLICY"),
        ({"namespace": "public/@namespace"}, "INVALID_POLICY"),
        ({"namespace": "public/default\x00"}, "INVALID_POLICY"),
        ({"topic": ""}, "INVALID_TOPIC_NAME"),
        ({"topic": "public/default"}, "INVALID_TOPIC_NAME"),
        ({"topic": "public/default/@namespace"}, "INVALID_TOPIC_NAME"),
    ],
)
async def test_an_invalid_level_is_refused(
    replicas: Replicas, level: dict[str, str], reason: str
) -> None:
    for call in (put(replicas.one, limit(3), **level), got(replicas.one, **level)):
        with refused(INVALID, reason):
            await call


async def test_a_namespace_with_a_long_name_has_no_policies_and_is_served(
    replicas: Replicas,
) -> None:
    await put(replicas.one, limit(3), namespace=LONG)
    assert await max_producers(replicas.two, f"{LONG}/t") == (3, NAMESPACE)
    for level in ({"namespace": f"{LONG}n"}, {"topic": f"{LONG}n/t"}):
        with refused(INVALID, "INVALID_POLICY"):
            await put(replicas.one, limit(3), **level)
        assert await got(replicas.one, **level) == pb.PolicyValues()
    assert await max_producers(replicas.two, f"{LONG}n/t") == (10_000, DEFAULT)


async def test_a_system_topic_takes_no_policy(replicas: Replicas, topic: str) -> None:
    """It never deduplicates, regardless of the levels above."""
    namespace = "public/systems"
    system = f"{namespace}/__changes"
    for values in (pb.PolicyValues(enabled=True), pb.PolicyValues()):
        with refused(INVALID, "INVALID_POLICY"):
            await put(replicas.one, values, topic=system)
    await put(replicas.one, pb.PolicyValues(enabled=True), namespace=namespace)
    policy = await effective(replicas.two, system)
    assert (policy.enabled, policy.enabled_source) == (False, pb.POLICY_SOURCE_SYSTEM_TOPIC)
    assert await got(replicas.one, topic=system) == pb.PolicyValues()
