"""Metrics of real services after known traffic, as scraped by Prometheus and as sent over OTLP.

Each test has its own labeled topic, so that other tests do not count. Metrics without a topic label
are compared by growth.
"""

import asyncio
import os
import resource
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import StatusCode
from grpc.aio import AioRpcError
from redis.asyncio import Redis

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import SERVICES
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.filter.config import FilterConfig
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.runtime.metrics import store_free, store_size
from seqgate.telemetry import metrics as told
from seqgate.telemetry.metrics import CATALOGUE, OTHER, Kind, Metric, of_service
from seqgate.times import duration
from tests.integration.refusals import refused
from tests.integration.services import Services, paused, pids_of, running, writes_held_up
from tests.integration.test_chunk_scenarios import attempt, chunk, statuses
from tests.integration.test_dispatcher_api import Sub, at, dies, dlq, store
from tests.integration.test_dispatcher_filters import (
    IN_EU,
    IN_US,
    IS_NUMBER,
    Filtered,
    publish,
    take,
)
from tests.integration.test_filter_api import of as in_region
from tests.integration.test_filter_api import streaming
from tests.integration.test_snapshots import load, state
from tests.support.otlp import Received, otel_variables, otlp_receiver
from tests.support.postgres_server import admin
from tests.support.publisher import batch, publishing, single
from tests.support.raw_consumer import EARLIEST, SHARED, consuming
from tests.support.scrape import TYPES, Scrape, family_name, scraped
from tests.support.waiting import eventually

STORED, DUPLICATE = ledger_pb2.RECEIPT_STATUS_STORED, ledger_pb2.RECEIPT_STATUS_DUPLICATE
STALE, REFUSED = ledger_pb2.RECEIPT_STATUS_STALE, ledger_pb2.RECEIPT_STATUS_REFUSED
CHUNK_GAP = ledger_pb2.RECEIPT_STATUS_CHUNK_GAP
LAYOUT_CONFLICT = ledger_pb2.RECEIPT_STATUS_LAYOUT_CONFLICT
PARTIAL, SKIPPED = ledger_pb2.RECEIPT_STATUS_PARTIAL, ledger_pb2.RECEIPT_STATUS_SKIPPED

KEY_PARKED_MAX = 10

POLICIES = """
[topic."metrics/told/evicting"]
max_producers = 2
on_full = "evict"
[topic."metrics/told/disabled"]
enabled = false
"""


class Told:
    """The metrics of a stack's services."""

    def __init__(self, services: Services, ports: Mapping[str, int]) -> None:
        self.services = services
        self.ports = ports

    async def scrape(self, service: str, **how: bool) -> Scrape:
        return await scraped(self.ports[service], **how)

    async def value(self, metric: Metric, **attributes: str) -> float:
        (service,) = metric.services
        return (await self.scrape(service)).value(metric, **attributes)

    async def scrapes(self) -> Mapping[str, Scrape]:
        return {service: await self.scrape(service) for service in SERVICES}

    async def says(self, metric: Metric, value: float, **attributes: str) -> None:
        """Wait until a metric has this value; values read are cached for a moment."""
        seen: list[float] = []

        async def so() -> bool:
            seen[:] = [await self.value(metric, **attributes)]
            return seen == [value]

        try:
            await eventually(so)
        except AssertionError:
            (service,) = metric.services
            family = (await self.scrape(service)).families[family_name(metric)]
            told_ = [each for each in family.samples if each.value]
            raise AssertionError(f"{attributes}: {seen}, not {value}: {told_}") from None


class Growth:
    """The growth of the services' metrics since it was created."""

    def __init__(self, tell: Told, before: Mapping[str, Scrape]) -> None:
        self._tell = tell
        self._before = before

    @classmethod
    async def of(cls, tell: Told) -> "Growth":
        return cls(tell, await tell.scrapes())

    def before(self, metric: Metric, **attributes: str) -> float:
        (service,) = metric.services
        return self._before[service].value(metric, **attributes)

    async def says(self, metric: Metric, value: float, **attributes: str) -> None:
        """Wait until a metric has grown by this."""
        await self._tell.says(metric, self.before(metric, **attributes) + value, **attributes)

    async def value(self, metric: Metric, **attributes: str) -> float:
        now = await self._tell.value(metric, **attributes)
        return now - self.before(metric, **attributes)

    async def sum(self, metric: Metric) -> float:
        """The growth of a histogram's sum."""
        (service,) = metric.services
        return (await self._tell.scrape(service)).sum(metric) - self._before[service].sum(metric)


@asynccontextmanager
async def telling(
    folder: Path, topics: str = '["metrics/told/*"]', **environment: str
) -> AsyncIterator[Told]:
    """A stack whose services each serve metrics on a port of their own."""
    ports = dict(zip(SERVICES, free_ports(len(SERVICES)), strict=True))
    for service, port in ports.items():
        prefix = f"SEQGATE_{service.upper()}_METRICS_"
        environment[prefix + "LISTEN"] = f"127.0.0.1:{port}"
        environment[prefix + "TOPICS"] = topics
        environment[prefix + "SURVEY_S"] = "0.1"
    environment["SEQGATE_DEDUP_SNAPSHOT_CHECK_INTERVAL_S"] = "3600"  # snapshots are counted
    environment["SEQGATE_DISPATCHER_KEY_PARKED_MAX"] = str(KEY_PARKED_MAX)
    async with running(folder, policies=POLICIES, **environment) as services:
        yield Told(services, ports)


@pytest_asyncio.fixture(scope="module")
async def tell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Told]:
    async with telling(tmp_path_factory.mktemp("telling") / "stack") as tell:
        yield tell


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return f"metrics/told/{request.node.name.removeprefix('test_')[:100]}"


# ---- publishing


async def test_receipts_and_verdicts_are_counted(tell: Told, topic: str) -> None:
    async with publishing(tell.services.ledger, topic, "p") as publisher:
        for number in range(5):
            assert (await publisher.store(single(number, number))).status == STORED
        assert (await publisher.store(batch(5, [5, 6, 7]))).status == STORED
        for number in (6, 7):
            assert (await publisher.store(single(number, 1))).status == DUPLICATE
        await publisher.send(batch(8, [7, 8]))
        await publisher.send(single(9, 9))
        assert (await publisher.receipt(8)).status == PARTIAL
        assert (await publisher.receipt(9)).status == SKIPPED
        await tell.says(told.PRODUCERS, 1, topic=topic)

    for status, count in {"STORED": 6, "DUPLICATE": 2, "PARTIAL": 1, "SKIPPED": 1}.items():
        await tell.says(told.RECEIPTS, count, topic=topic, status=status)
    await tell.says(told.RECEIPTS, 10, topic=topic)
    await tell.says(told.VERDICTS, 6, topic=topic, verdict="NEW")
    await tell.says(told.VERDICTS, 2, topic=topic, verdict="DUPLICATE")
    await tell.says(told.VERDICTS, 1, topic=topic, verdict="PARTIAL")
    await tell.says(told.APPENDED_ENTRIES, 6, topic=topic)
    await tell.says(told.APPENDED_MESSAGES, 8, topic=topic)
    assert await tell.value(told.APPENDED_SIZE, topic=topic) > 6
    await tell.says(told.PRODUCERS, 0, topic=topic)
    await tell.says(told.UNANSWERED, 0, topic=topic)


async def test_refused_and_late_publications_are_counted(tell: Told, topic: str) -> None:
    ledger = tell.services.ledger
    async with publishing(ledger, topic, "p") as publisher:
        assert await statuses(publisher, chunk(2, 2), single(3, 6)) == [CHUNK_GAP, SKIPPED]
    async with publishing(ledger, topic, "q") as publisher:
        assert await statuses(publisher, *attempt()[:2]) == [STORED] * 2
        wrong = chunk(1, 1, uuid="b", resume=True)
        assert await statuses(publisher, wrong, single(9, 6)) == [LAYOUT_CONFLICT, SKIPPED]
    async with publishing(ledger, topic, "r") as publisher:
        between = [chunk(1, 0), single(2, 6), chunk(3, 1), chunk(4, 2)]
        assert await statuses(publisher, *between) == [STORED] * 2 + [STALE] * 2
        damaged = single(5, 7, b"x", payload_crc32c=1)
        assert await statuses(publisher, damaged) == [REFUSED]
    counts = {"CHUNK_GAP": 1, "LAYOUT_CONFLICT": 1, "SKIPPED": 2, "STALE": 2, "REFUSED": 1}
    for status, count in ({"STORED": 4, "FAILED": 0} | counts).items():
        await tell.says(told.RECEIPTS, count, topic=topic, status=status)
    for verdict in ("CHUNK_GAP", "LAYOUT_CONFLICT"):
        await tell.says(told.VERDICTS, 1, topic=topic, verdict=verdict)
    assert await tell.value(told.VERDICTS, topic=topic, verdict="HELD") >= 2  # the SKIPPED ones


async def test_reads_trims_and_sizes_are_reported(tell: Told, topic: str) -> None:
    services = tell.services
    growth = await Growth.of(tell)
    await store(services, topic, *(single(n, n, b"x" * 100) for n in range(10)))
    assert len(await services.read(topic)) == 10
    some = ledger_pb2.ReadEntriesRequest(topic=topic, positions=[at(1), at(3), at(99)])
    assert [len(each.entries.entries) async for each in services.ledger.ReadEntries(some)] == [2]
    await tell.says(told.READ_ENTRIES, 12, topic=topic)
    await services.ledger.TrimTopic(ledger_pb2.TrimTopicRequest(topic=topic, before=at(4)))
    await growth.says(told.TRIMMED_ENTRIES, 4)
    await tell.says(told.PRODUCERS_MAX, LedgerConfig().publish_streams_max)
    for service, size, free in (
        ("ledger", told.LEDGER_STORE_SIZE, told.LEDGER_STORE_FREE),
        ("cursor", told.CURSOR_STORE_SIZE, told.CURSOR_STORE_FREE),
    ):
        path = services.stack.folder / service / f"{service}.db"
        assert store_size(path) > 4_096

        async def as_on_disk(size: Metric = size, path: Path = path) -> bool:
            return await tell.value(size) == store_size(path)

        await eventually(as_on_disk)
        assert await tell.value(free) == pytest.approx(store_free(path, 0), rel=0.1)


async def test_the_sizes_of_tables_in_postgresql_are_reported(tmp_path: Path, topic: str) -> None:
    """Not their free space, which no query tells."""
    async with telling(tmp_path / "stack", store="postgres") as tell:
        services = tell.services
        before = await tell.value(told.LEDGER_STORE_SIZE)
        await store(services, topic, *(single(n, n, os.urandom(100_000)) for n in range(10)))

        async def all_tables() -> bool:
            async with admin(services.stack.postgres_url) as connection:
                expected = await connection.fetchval(_TABLES_BYTES)
            sizes = (told.LEDGER_STORE_SIZE, told.CURSOR_STORE_SIZE)
            return bool(sum([await tell.value(each) for each in sizes]) == expected)

        await eventually(all_tables, "the services report all tables between them")
        assert await tell.value(told.LEDGER_STORE_SIZE) - before >= 1_000_000
        for free in (told.LEDGER_STORE_FREE, told.CURSOR_STORE_FREE):
            assert (await tell.scrape(*free.services)).labels(free) == []


_TABLES_BYTES = """SELECT sum(pg_total_relation_size(tablename::text::regclass))::bigint
    FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'seqgate_layout'"""


async def test_groups_and_commits_are_measured(tell: Told, topic: str) -> None:
    before = await tell.scrape("ledger")
    async with publishing(tell.services.ledger, topic, "p") as publisher:
        await publisher.send(*(single(number, number) for number in range(20)))
        for number in range(20):
            assert (await publisher.receipt(number)).status == STORED
    await tell.says(told.APPENDED_ENTRIES, 20, topic=topic)
    after = await tell.scrape("ledger")

    assert after.sum(told.GROUP_ENTRIES) - before.sum(told.GROUP_ENTRIES) == 20
    groups = after.value(told.GROUP_ENTRIES) - before.value(told.GROUP_ENTRIES)
    assert 1 <= groups <= 20
    assert after.value(told.GROUP_SIZE) - before.value(told.GROUP_SIZE) == groups
    commits = [each.value(told.APPEND_DURATION, outcome="stored") for each in (before, after)]
    assert commits[1] - commits[0] == groups
    assert after.sum(told.APPEND_DURATION) > before.sum(told.APPEND_DURATION)


async def test_calls_are_measured_on_both_sides(tell: Told, topic: str) -> None:
    create = "seqgate.api.cursor.v1.CursorService/CreateCursor"
    get = "seqgate.api.cursor.v1.CursorService/GetCursor"
    publish_ = "seqgate.api.ledger.v1.LedgerService/Publish"
    unknown = "seqgate.api.ledger.v1.LedgerService/GetTopic"
    asked = ("ledger", "dispatcher", "cursor")
    before = {service: await tell.scrape(service) for service in asked}
    async with publishing(tell.services.ledger, topic, "p") as publisher:
        assert (await publisher.store(single(0, 0))).status == STORED
    await Sub(tell.services, topic).create()
    with pytest.raises(AioRpcError):
        await tell.services.ledger.GetTopic(ledger_pb2.GetTopicRequest(topic=f"{topic}-none"))
    with pytest.raises(AioRpcError):
        await Sub(tell.services, topic, "none").get()
    after = {service: await tell.scrape(service) for service in asked}

    def grew(service: str, metric: Metric, name: str, code: str) -> float:
        labels = {"rpc_method": name, "rpc_response_status_code": code}
        return after[service].value(metric, **labels) - before[service].value(metric, **labels)

    assert grew("ledger", told.SERVER_CALLS, publish_, "OK") == 1
    assert grew("ledger", told.SERVER_CALLS, unknown, "NOT_FOUND") == 1
    assert grew("dispatcher", told.CLIENT_CALLS, create, "OK") == 1
    assert grew("cursor", told.SERVER_CALLS, create, "OK") == 1
    asked_in_vain = grew("dispatcher", told.CLIENT_CALLS, get, "NOT_FOUND")
    assert 1 <= asked_in_vain <= grew("cursor", told.SERVER_CALLS, get, "NOT_FOUND")
    # A caller counts any refusal as an error; a service only its own failures.
    refused_ = {"rpc_method": get, "error_type": "NOT_FOUND"}
    assert after["dispatcher"].value(told.CLIENT_CALLS, **refused_) >= 1
    assert not after["cursor"].value(told.SERVER_CALLS, **refused_)
    for outcome, count in {"answered": 1, "failed": 0}.items():
        labels = {"operation": "admit", "outcome": outcome}
        grown = [each["ledger"].value(told.JUDGE_DURATION, **labels) for each in (before, after)]
        assert (grown[1] - grown[0] >= 1) is bool(count)
    for labels in after["ledger"].labels(told.SERVER_CALLS):
        assert labels["rpc_system_name"] == "grpc"
        failed = labels["rpc_response_status_code"] in told.SERVER_ERRORS
        assert bool(labels.get("error_type")) is failed


async def test_takeovers_and_lost_state_are_counted_as_recoveries(tell: Told, topic: str) -> None:
    takeovers = await tell.value(told.RECOVERIES, cause="takeover")
    behind = await tell.value(told.RECOVERIES, cause="behind")
    restores = await tell.value(told.RESTORES)
    replayed = await tell.value(told.REPLAYED)
    async with publishing(tell.services.ledger, topic, "p") as publisher:
        for number in range(3):
            await publisher.store(single(number, number))
        await tell.services.settled(topic)
        await tell.says(told.RECOVERIES, takeovers + 1, cause="takeover")
        async with Redis.from_url(tell.services.stack.redis_url) as redis:
            await redis.flushall()
        assert (await publisher.store(single(3, 3))).status == STORED
        await tell.services.settled(topic)
    await tell.says(told.RECOVERIES, behind + 1, cause="behind")
    ends = await tell.scrape("ledger")
    assert ends.value(told.RECOVERY_DURATION, cause="behind") >= 1
    await tell.says(told.REPLAYED, replayed + 3)
    assert await tell.value(told.RESTORES) > restores
    assert await tell.value(told.DEDUP_CALLS, operation="admit", outcome="behind") >= 1
    await tell.says(told.TOPICS, 0, state="aligning")
    await tell.says(told.LACKING, 0, topic=topic)
    assert await tell.value(told.TOPICS, state="live") >= 1


# ---- deduplication's state


async def test_snapshots_and_the_replay_distance_are_reported(tell: Told, topic: str) -> None:
    taken = await tell.value(told.SNAPSHOTS, outcome="taken")
    async with publishing(tell.services.ledger, topic, "p") as publisher:
        for number in range(4):
            await publisher.store(single(number, number))
    await tell.services.settled(topic)
    await tell.says(told.REPLAY_DISTANCE, 4, topic=topic)
    ages = [await tell.value(told.SNAPSHOT_AGE, topic=topic)]

    async def older() -> bool:
        ages.append(await tell.value(told.SNAPSHOT_AGE, topic=topic))
        return ages[-1] > max(0.3, ages[0])

    await eventually(older)
    await tell.services.dedup.TakeSnapshot(dedup_pb2.TakeSnapshotRequest(topic=topic))
    await tell.says(told.SNAPSHOTS, taken + 1, outcome="taken")
    await tell.says(told.REPLAY_DISTANCE, 0, topic=topic)
    await tell.says(told.SNAPSHOT_AGE, 0, topic=topic)
    assert (await tell.scrape("dedup")).value(told.SNAPSHOT_DURATION, outcome="taken") >= 1


async def test_lost_state_is_restored_from_a_snapshot_or_loaded(tell: Told, topic: str) -> None:
    services = tell.services
    async with publishing(services.ledger, topic, "p") as publisher:
        await publisher.store(single(0, 0))
        await services.settled(topic)
        growth = await Growth.of(tell)
        request = dedup_pb2.TakeSnapshotRequest(topic=topic)
        await services.dedup.TakeSnapshot(request)
        await publisher.store(single(1, 1))
        await services.settled(topic)
        async with Redis.from_url(services.stack.redis_url) as redis:
            await redis.flushall()
        assert (await publisher.store(single(2, 2))).status == STORED
        await services.settled(topic)
        await growth.says(told.RESTORES, 1, outcome="loaded")
        await growth.says(told.REPLAYED, 1)  # the entries beyond the snapshot
        await tell.says(told.DEDUP_TOPICS, 1)
    for _ in range(2):
        await load(services.dedup, state(f"{topic}-2", 5, p=9, q=7))
    await growth.says(told.LOADS, 1, outcome="loaded")
    await growth.says(told.LOADS, 1, outcome="kept")
    await tell.says(told.DEDUP_TOPICS, 2)
    await tell.says(told.TRACKED, 2, topic=f"{topic}-2")
    for outcome in ("nothing", "unavailable"):
        await growth.says(told.RESTORES, 0, outcome=outcome)
    # The requested one, and the one of the loaded state.
    await growth.says(told.SNAPSHOTS, 2, outcome="taken")
    await growth.says(told.SNAPSHOT_DURATION, 2, outcome="taken")
    await growth.says(told.SNAPSHOTS, 0, outcome="failed")
    request = dedup_pb2.TakeSnapshotRequest(topic=f"{topic}-none")
    await services.dedup.TakeSnapshot(request)
    await growth.says(told.SNAPSHOTS, 1, outcome="nothing")
    await growth.says(told.DEDUP_CALLS, 2, operation="admit", outcome="judged")
    await growth.says(told.DEDUP_CALLS, 1, operation="admit", outcome="behind")


async def test_without_deduplication_there_are_no_verdicts(tell: Told) -> None:
    topic, growth = "metrics/told/disabled", await Growth.of(tell)
    async with publishing(tell.services.ledger, topic, "p") as publisher:
        for _ in range(2):
            assert (await publisher.store(single(0, 0))).status == STORED
    await tell.says(told.RECEIPTS, 2, topic=topic)
    await tell.says(told.VERDICTS, 0, topic=topic)
    assert await growth.value(told.DEDUP_CALLS, outcome="disabled") >= 1


async def test_an_unreadable_policy_file_is_reported(tell: Told) -> None:
    await tell.says(told.POLICY_FAILING, 0)
    file = tell.services.stack.policy_file
    file.write_text("[topic")
    try:
        await tell.says(told.POLICY_FAILING, 1)
    finally:
        file.write_text(POLICIES)
    await tell.says(told.POLICY_FAILING, 0)


async def test_tracked_and_evicted_producers_are_counted(tell: Told) -> None:
    topic = "metrics/told/evicting"
    evicted = await tell.value(told.FORGOTTEN_PRODUCERS, cause="evicted")
    for producer in ("a", "b", "c"):
        async with publishing(tell.services.ledger, topic, producer) as publisher:
            assert (await publisher.store(single(0, 0))).status == STORED
    await tell.services.settled(topic)
    await tell.says(told.FORGOTTEN_PRODUCERS, evicted + 1, cause="evicted")
    await tell.says(told.TRACKED, 2, topic=topic)
    await tell.says(told.TRACKED_MAX, 2, topic=topic)
    await tell.says(told.TRACKED_SHARE, 1, topic=topic)
    assert await tell.value(told.DEDUP_CALLS, operation="admit", outcome="full") >= 1
    assert await tell.value(told.STATE_DURATION, operation="admit") >= 3


# ---- delivering


async def test_deliveries_and_redeliveries_are_counted_by_cause(tell: Told, topic: str) -> None:
    services = tell.services
    await store(services, topic, *(single(n, n, partition_key=f"k{n}") for n in range(5)))
    async with consuming(services.dispatcher, topic, permits=5) as consumer:
        some = await consumer.received(5)
        await consumer.negative_acknowledge(some[0], delay_ms=0)
        await consumer.give_back(some[1], some[2])
        await consumer.permit(3)
        again = await consumer.received(3)
        await consumer.acknowledge(*again)
        await tell.says(told.PERMITS, 0, topic=topic)
        await tell.says(told.CONSUMERS, 1, topic=topic, state="no_permits")
        await tell.says(told.UNACKED, 2, topic=topic)
        await tell.says(told.SUBSCRIPTIONS, 1, topic=topic, state="delivering")
    # The consumer crashed with two in flight.
    await tell.says(told.REDELIVERIES, 2, topic=topic, cause="lost_consumer")
    await tell.says(told.SUBSCRIPTIONS, 1, topic=topic, state="idle")
    async with consuming(services.dispatcher, topic, permits=2, ack_timeout_ms=1_000) as consumer:
        await consumer.received(2)
        await tell.says(told.REDELIVERIES, 2, topic=topic, cause="timed_out")
        await consumer.permit(20)
        await consumer.acknowledge(*(await consumer.received(2)))
    await tell.says(told.REDELIVERIES, 1, topic=topic, cause="negative_acknowledgement")
    await tell.says(told.REDELIVERIES, 2, topic=topic, cause="returned")
    await tell.says(told.REDELIVERIES, 0, topic=topic, cause="drained")
    await tell.says(told.DELIVERED_ENTRIES, 5 + 3 + 2 + 2, topic=topic)
    await tell.says(told.DELIVERED_MESSAGES, 12, topic=topic)
    await tell.says(told.ACKNOWLEDGED, 5, topic=topic)
    await tell.says(told.STALE, 0, topic=topic)


async def test_counters_outlast_seeks_and_subscriptions(tell: Told, topic: str) -> None:
    services, sub = tell.services, Sub(tell.services, topic)
    await store(services, topic, *(single(n, n) for n in range(3)))
    async with consuming(services.dispatcher, topic, permits=3) as consumer:
        await consumer.acknowledge(*(await consumer.received(3)))
        await tell.says(told.ACKNOWLEDGED, 3, topic=topic)
    await sub.reset(EARLIEST)
    async with consuming(services.dispatcher, topic, permits=3) as consumer:
        await consumer.acknowledge(*(await consumer.received(3)))
        await tell.says(told.ACKNOWLEDGED, 6, topic=topic)
    await sub.delete(force=True)
    await tell.says(told.SUBSCRIPTIONS, 0, topic=topic)
    await tell.says(told.ACKNOWLEDGED, 6, topic=topic)
    await tell.says(told.DELIVERED_ENTRIES, 6, topic=topic)


async def test_withheld_keys_are_counted_by_reason_with_the_oldest_age(
    tell: Told, topic: str
) -> None:
    services = tell.services
    some = [single(n, n, partition_key="ab"[n % 2]) for n in range(6)]
    await store(services, topic, *some)
    async with consuming(
        services.dispatcher, topic, permits=10, max_in_flight_per_key=1
    ) as consumer:
        first, second = await consumer.received(2)
        await tell.says(told.KEYS, 2, topic=topic, reason="IN_FLIGHT_LIMIT")
        await tell.says(told.KEYS, 2, topic=topic)
        await tell.says(told.PARKED, 4, topic=topic)
        assert await tell.value(told.PARKED_MAX, topic=topic) >= 4
        ages = [await tell.value(told.WITHHELD_AGE, topic=topic, reason="IN_FLIGHT_LIMIT")]

        async def older() -> bool:
            age_s = await tell.value(told.WITHHELD_AGE, topic=topic, reason="IN_FLIGHT_LIMIT")
            ages.append(age_s)
            return age_s > max(0.3, ages[0])

        await eventually(older)
        await consumer.acknowledge(first)
        await consumer.received(1)
        await consumer.negative_acknowledge(second, delay_ms=60_000)
        await tell.says(told.KEYS, 1, topic=topic, reason="RETRY_DELAY")
        await tell.says(told.KEYS, 1, topic=topic, reason="IN_FLIGHT_LIMIT")


async def test_moving_keys_are_handed_over(tell: Told, topic: str) -> None:
    before = await tell.value(told.HANDOVER_DURATION)
    moved = await _hand_over(tell, topic)
    await tell.says(told.HANDOVER_DURATION, before + moved)


async def test_a_key_kept_too_long_is_taken_away(tell: Told, topic: str) -> None:
    dispatcher = tell.services.dispatcher
    await store(tell.services, topic, *(single(n, n, partition_key=f"{n}") for n in range(20)))
    options: dict[str, Any] = {"permits": 20, "drain_deadline": duration(50)}
    async with consuming(dispatcher, topic, name="x", **options) as old:
        had = {each.delivery: each for each in await old.received(20)}
        async with consuming(dispatcher, topic, name="y", **options) as new:
            await old.until(lambda: old.moved and old.moved <= old.revoked)
            lost = [had[each] for each in old.moved]
            again = await new.received(len(lost))
            await tell.says(told.REDELIVERIES, len(lost), topic=topic, cause="drained")
            await tell.says(told.STALE, 0, topic=topic)
            await old.acknowledge(*lost)
            await tell.says(told.STALE, len(lost), topic=topic)
            await new.acknowledge(*again)
            await tell.says(told.PERMITS, 20 - len(lost), topic=topic)
            await tell.says(told.CONSUMERS, 1, topic=topic, state="ready")
            await tell.says(told.CONSUMERS, 1, topic=topic, state="no_permits")
    await tell.says(told.REDELIVERIES, 20 - len(lost), topic=topic, cause="lost_consumer")
    await tell.says(told.REDELIVERIES, 20, topic=topic)
    await tell.says(told.ACKNOWLEDGED, len(lost), topic=topic)


async def test_dead_letters_and_their_held_keys_are_counted(tell: Told, topic: str) -> None:
    services = tell.services
    keys = ("k", "k", "other")
    await store(services, topic, *(single(n, n, partition_key=k) for n, k in enumerate(keys)))
    options: dict[str, Any] = {
        "max_redeliveries": 1,
        "after_dead_letter": pb.AFTER_DEAD_LETTER_HOLD,
    }
    async with consuming(services.dispatcher, topic, permits=20, **options) as consumer:
        got = {each.position.entry_id: each for each in await consumer.received(3)}
        await consumer.acknowledge(got[2])
        await tell.says(told.DEAD_LETTERS, 0, topic=topic)
        await dies(consumer, got[0], 2)
        await tell.says(told.DEAD_LETTERS, 1, topic=topic)
        await tell.says(told.KEYS, 1, topic=topic, reason="HELD")
        await Sub(services, topic).release(b"k")
        await tell.says(told.KEYS, 0, topic=topic, reason="HELD")
        await dies(consumer, (await consumer.received(1))[0], 2)
        await tell.says(told.DEAD_LETTERS, 2, topic=topic)
    await tell.says(told.APPENDED_ENTRIES, 2, topic=dlq(topic))
    await tell.says(
        told.REDELIVERIES, 4, topic=topic, cause="negative_acknowledgement"
    )  # the last ones, too


async def test_limits_and_delays_withhold_messages(tell: Told, topic: str) -> None:
    services, growth, later_ms = tell.services, await Growth.of(tell), 4_000_000_000_000
    await store(
        services,
        topic,
        single(0, 0, partition_key="late", deliver_at_time=later_ms),
        *(single(n, n, b"x" * 10_000, partition_key=f"{n}") for n in range(1, 10)),
        batch(10, [10, 11, 12], partition_key="10"),
    )
    options: dict[str, Any] = {"permits": 20, "delay_holds_key": True}
    async with consuming(services.dispatcher, topic, max_unacked=4, **options) as consumer:
        some = await consumer.received(4)
        await tell.says(told.SUBSCRIPTIONS, 1, topic=topic, state="unacked_limit")
        await tell.says(told.KEYS, 6, topic=topic, reason="SUBSCRIPTION_LIMIT")
        await tell.says(told.KEYS, 1, topic=topic, reason="DELAYED")
        await tell.says(told.WAITING_ENTRIES, 0, topic=topic, cause="delayed")
        await tell.says(told.PERMITS, 16, topic=topic)
        await tell.says(told.KEYS, 4, topic=topic, reason="READY")
        # Five entries wait in memory, and perhaps the one that is not yet due.
        assert 50_000 < await growth.value(told.CACHE_SIZE) < 70_000
        await consumer.acknowledge(*some)
        for _ in range(5):
            await consumer.acknowledge(*(await consumer.received(1)))
        (whole,) = await consumer.received(1)
        await consumer.acknowledge(whole, indexes=[0, 2])
        await tell.says(told.PARTIAL, 1, topic=topic)
        await tell.says(told.SUBSCRIPTIONS, 1, topic=topic, state="delivering")
        await tell.says(told.UNACKED, 1, topic=topic)
        await tell.says(told.DELIVERED_MESSAGES, 12, topic=topic)
    async with consuming(services.dispatcher, topic, "t", max_unacked_per_consumer=2, permits=9):
        await tell.says(told.CONSUMERS, 1, topic=topic, state="unacked_limit")
        # Here a delayed message does not hold its key.
        await tell.says(told.WAITING_ENTRIES, 1, topic=topic, cause="delayed")
        found = await tell.scrape("dispatcher")
        subscriptions = found.value(told.SUBSCRIPTIONS)
        assert found.value(told.CACHE_MAX) == subscriptions * DispatcherConfig().cache_bytes_max
        assert 0 < found.value(told.HISTORY_SIZE) < found.value(told.HISTORY_MAX)
        assert found.value(told.AUDIT_EVENTS) == 0


async def test_entries_beyond_the_parking_limit_lag_and_are_read_again(
    tell: Told, topic: str
) -> None:
    services, count = tell.services, 3 * KEY_PARKED_MAX
    await store(services, topic, *(single(n, n, partition_key="k") for n in range(count)))
    async with consuming(
        services.dispatcher, topic, permits=99, max_in_flight_per_key=1
    ) as consumer:
        await tell.says(told.PARKED, KEY_PARKED_MAX, topic=topic)  # the first one never was
        await tell.says(told.LAGGING, 1, topic=topic)
        await tell.says(told.SCANNED, 0, topic=topic)
        for _ in range(count):
            await consumer.acknowledge(*(await consumer.received(1)))
        await tell.says(told.LAGGING, 0, topic=topic)
        await tell.says(told.PARKED, 0, topic=topic)
        # A third of the entries was parked at first, and was not read again.
        assert await tell.value(told.SCANNED, topic=topic) >= count - KEY_PARKED_MAX
    await tell.says(told.DELIVERED_ENTRIES, count, topic=topic)


async def test_lag_and_holes_are_reported(tell: Told, topic: str) -> None:
    services = tell.services
    await store(services, topic, *(single(n, n) for n in range(6)))
    async with consuming(services.dispatcher, topic, permits=6, type=SHARED) as consumer:
        some = sorted(await consumer.received(6), key=lambda each: each.position.entry_id)
        await tell.says(told.LAG, 6, topic=topic)
        await consumer.acknowledge(some[0], some[2], some[4])
        await tell.says(told.LAG, 5, topic=topic)
        await tell.says(told.HOLES, 2, topic=topic)
        await tell.says(told.AHEAD, 2, topic=topic)
        assert await tell.value(told.CURSORS, topic=topic) >= 1
        await tell.says(told.LEASED, 1, topic=topic)
        await consumer.acknowledge(some[1], some[3], some[5])
        await tell.says(told.LAG, 0, topic=topic)
        await tell.says(told.HOLES, 0, topic=topic)


# ---- filters


async def test_filter_verdicts_failures_and_cache_hits_are_counted(tell: Told, topic: str) -> None:
    services = tell.services
    sub = Filtered(services, topic)
    await services.ledger.CreateTopic(ledger_pb2.CreateTopicRequest(topic=topic))
    await sub.create()
    await sub.set(IN_EU)
    growth = await Growth.of(tell)
    await publish(services, topic, "eu", "us", "eu", None, "us")
    async with consuming(services.dispatcher, topic, permits=10, type=SHARED) as consumer:
        await take(consumer, 2)
        await tell.says(told.FILTERED, 2, topic=topic, mode="applied", verdict="accepted")
        await tell.says(told.FILTERED, 2, topic=topic, mode="applied", verdict="rejected")
        await tell.says(told.FILTERED, 1, topic=topic, mode="applied", verdict="failed")
        await tell.says(told.WAITING_ENTRIES, 1, topic=topic, cause="filter_failed")
        assert await tell.value(told.NO_VERDICTS, mode="applied", reason="PROPERTY_ABSENT") >= 1
        await publish(services, topic, "eu", "us", first=5)
        await take(consumer, 1)
        await tell.says(told.FILTERED, 3, topic=topic, mode="applied", verdict="accepted")
        await tell.says(told.FILTERED, 3, topic=topic, mode="applied", verdict="rejected")
    # The dispatcher asks once for entries with the same properties: eu, us, and none.
    assert await growth.value(told.FILTER_VERDICTS, verdict="ACCEPT") == 1
    assert await growth.value(told.FILTER_VERDICTS, verdict="REJECT") == 1
    assert await growth.value(told.FILTER_VERDICTS, verdict="FAILED") == 1
    assert await growth.value(told.FILTER_FAILURES, reason="PROPERTY_ABSENT") == 1
    assert await growth.value(told.DECISIONS, source="evaluated") == 3
    assert await growth.value(told.DECISIONS, source="remembered") == 0
    assert await tell.value(told.CACHED, cache="programs") >= 1
    remembered = await growth.value(told.LOOKUPS, result="remembered")
    assert remembered + await growth.value(told.LOOKUPS, result="asked") == 7
    assert remembered >= 2  # at least those added later
    assert await tell.value(told.ANSWER_DURATION, outcome="answered") >= 1


async def test_each_entry_of_a_batch_counts_though_they_share_metadata(tell: Told) -> None:
    growth = await Growth.of(tell)
    async with streaming(tell.services.filter) as stream:
        await stream.set_chain("properties.region == 'counted'")  # of no other test
        await stream.judge(in_region("counted"), which=[0, 0, 0])
        invalid = filter_pb2.Batch(metadata=[in_region("refused")], which=[1])
        await stream.refuses("INVALID_BATCH", batch=invalid)
    assert await growth.value(told.FILTER_VERDICTS, verdict="ACCEPT") == 3
    assert await growth.value(told.DECISIONS, source="evaluated") == 1
    assert await growth.value(told.DECISIONS, source="remembered") == 2
    assert await growth.sum(told.BATCH_ENTRIES) == 3


async def test_equal_chains_of_subscriptions_share_verdicts(tell: Told, topic: str) -> None:
    services = tell.services
    await publish(services, topic, "1", "2", "3")
    growth = await Growth.of(tell)
    for name in ("one", "two"):
        sub = Filtered(services, topic, name)
        await sub.create()
        await sub.set(IS_NUMBER)
        async with consuming(services.dispatcher, topic, name, permits=9) as consumer:
            await take(consumer, 3)
    assert await growth.value(told.DECISIONS, source="evaluated") == 3
    assert await growth.value(told.DECISIONS, source="remembered") == 3
    assert await growth.value(told.FILTER_VERDICTS, verdict="ACCEPT") == 6
    assert await growth.sum(told.BATCH_ENTRIES) == 6
    assert await growth.value(told.COMPILATIONS, outcome="compiled") == 1


async def test_a_shadow_chain_is_reported_beside_the_applied_one(tell: Told, topic: str) -> None:
    services, sub = tell.services, Filtered(tell.services, topic)
    growth = await Growth.of(tell)
    await publish(services, topic, "eu", "us", None)
    await sub.create()
    await sub.set("!('region' in properties) || properties.region == 'eu'")
    await sub.set(IN_US, mode=pb.FILTER_MODE_SHADOW, start=EARLIEST)
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        await take(consumer, 2)
        for verdict in ("accepted", "rejected", "failed"):
            await tell.says(told.FILTERED, 1, topic=topic, mode="shadow", verdict=verdict)
        await tell.says(told.FILTERED, 2, topic=topic, mode="applied", verdict="accepted")
        await tell.says(told.FILTERED, 1, topic=topic, mode="applied", verdict="rejected")
        await tell.says(told.FILTERED, 0, topic=topic, mode="applied", verdict="failed")
        await growth.says(told.NO_VERDICTS, 1, mode="shadow", reason="PROPERTY_ABSENT")
        await growth.says(told.NO_VERDICTS, 0, mode="applied")
        await tell.says(told.LAG, 0, topic=topic)
    await sub.delete(force=True)
    await tell.says(told.FILTERED, 3, topic=topic, mode="shadow")


async def test_rescheduled_and_failed_entries_are_counted_as_waiting(
    tell: Told, topic: str
) -> None:
    services, sub = tell.services, Filtered(tell.services, topic)
    growth = await Growth.of(tell)
    for number, region in enumerate(("later", "never", "x", "eu")):
        await publish(services, topic, region, key=region, first=number)
    await sub.create()
    chain = (
        "properties.region == 'never' ? duration('25h') : duration('0s')",
        "properties.region == 'x' ? int(properties.region) > 0 : true",
        "properties.region == 'later' ? duration('3600s') : duration('0s')",
    )
    await sub.set(*chain)
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        await take(consumer, 1)
        await tell.says(told.FILTERED, 1, topic=topic, mode="applied", verdict="rescheduled")
        await tell.says(told.FILTERED, 2, topic=topic, mode="applied", verdict="failed")
        await tell.says(told.WAITING_ENTRIES, 1, topic=topic, cause="rescheduled")
        await tell.says(told.WAITING_ENTRIES, 2, topic=topic, cause="filter_failed")
        await tell.says(told.KEYS, 1, topic=topic, reason="RESCHEDULED")
        await tell.says(told.KEYS, 2, topic=topic, reason="FILTER_FAILED")
    for reason in ("EVALUATION_FAILED", "INVALID_DELAY"):
        await growth.says(told.NO_VERDICTS, 1, mode="applied", reason=reason)
        await growth.says(told.FILTER_FAILURES, 1, reason=reason)
    await growth.says(told.FILTER_VERDICTS, 1, verdict="RESCHEDULE")
    await growth.says(told.FILTER_VERDICTS, 2, verdict="FAILED")
    await growth.says(told.COMPILATIONS, 3, outcome="compiled")
    with refused(StatusCode.INVALID_ARGUMENT, "INVALID_EXPRESSION"):
        await sub.set(*chain, "no such thing", version=2)
    await growth.says(told.COMPILATIONS, 1, outcome="refused")
    # A request also counts its chain's filters, unless they have just been compiled.
    assert await growth.value(told.COMPILATIONS, outcome="remembered") >= 3
    limits = FilterConfig()
    for cache, items, items_max, bytes_max in (
        ("decisions", 4, limits.decisions_max, limits.decision_bytes_max),
        ("programs", 3, limits.programs_max, limits.program_bytes_max),
    ):
        await growth.says(told.CACHED, items, cache=cache)
        assert await growth.value(told.CACHED_SIZE, cache=cache) > 0
        await tell.says(told.CACHED_MAX, items_max, cache=cache)
        await tell.says(told.CACHED_SIZE_MAX, bytes_max, cache=cache)
    batches = await growth.value(told.BATCH_ENTRIES)
    assert 1 <= batches <= 4
    await growth.says(told.BATCH_DURATION, batches)


async def test_an_unresponsive_filter_service_is_counted_as_an_outage(
    tell: Told, topic: str
) -> None:
    services, growth = tell.services, await Growth.of(tell)
    await publish(services, topic, "eu")
    subs = {name: Filtered(services, topic, name) for name in ("parks", "accepts")}
    for sub in subs.values():
        await sub.create()
    await subs["parks"].set(IN_EU)
    await subs["accepts"].set(IN_EU, policy=pb.FAILURE_POLICY_ACCEPT)
    async with (
        consuming(services.dispatcher, topic, "parks", permits=9) as parks,
        consuming(services.dispatcher, topic, "accepts", permits=9) as accepts,
    ):
        await take(parks, 1)
        await take(accepts, 1)
        with paused(services.stack, "filter"):
            await publish(services, topic, "another", first=1)
            await take(accepts, 1)
            # An evaluation that parks its entry is counted, and again when it has a verdict.
            await growth.says(told.NO_VERDICTS, 2, mode="applied", reason="UNAVAILABLE")
            await tell.says(told.FILTERED, 2, topic=topic, verdict="failed")
            await tell.says(told.WAITING_ENTRIES, 1, topic=topic, cause="unjudged")
            await tell.says(told.KEYS, 1, topic=topic, reason="FILTERING")
            await tell.says(told.OUTAGES, 2)
            assert await growth.value(told.ANSWER_DURATION, outcome="failed") >= 2
        await tell.says(told.FILTERED, 1, topic=topic, verdict="rejected")
        await tell.says(told.WAITING_ENTRIES, 0, topic=topic, cause="unjudged")


# ---- processes


EARLY_S = 0.01
"""How early a timer of the event loop may fire."""


async def test_a_process_reports_its_resources(tell: Told, topic: str) -> None:
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for service in SERVICES:
        process = Process(pids_of(tell.services.stack)[service])
        before = process.used()
        found = await tell.scrape(service)
        after = process.used()
        for mode in told.CPU_MODE.values:
            assert before[mode] <= found.value(told.CPU_TIME, cpu_mode=mode) <= after[mode]
        assert found.value(told.MEMORY) == pytest.approx(after["memory"], rel=0.1)
        assert found.value(told.OPEN_FILES) == pytest.approx(after["files"], abs=5)
        assert found.value(told.OPEN_FILES_MAX) == files_max
        uptime_s = found.value(told.UPTIME)
        assert 0 < uptime_s < process.age_s
        # Once a second, plus the lag. A timer may fire a moment early, which is no lag.
        ticks = found.value(told.LOOP_LAG)
        ticked_s = ticks + found.sum(told.LOOP_LAG)
        assert -0.1 - ticks * EARLY_S < uptime_s - ticked_s < 3
    await store(tell.services, topic, single(0, 0))
    streams = Metric(*told.STREAMS._replace(services=("dispatcher",)))
    await tell.says(streams, 0)
    async with consuming(tell.services.dispatcher, topic):
        await tell.says(streams, 1)
        async with consuming(tell.services.dispatcher, topic, "t"):
            await tell.says(streams, 2)
    await tell.says(streams, 0)


class Process:
    """A process as Linux reports it."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")

    def used(self) -> dict[str, float]:
        """Seconds of processor time by mode, bytes of memory, and open files."""
        fields = self._fields()
        user, system = (float(each) / os.sysconf("SC_CLK_TCK") for each in fields[11:13])
        pages = int((self._folder / "statm").read_text().split()[1])
        return {
            "user": user,
            "system": system,
            "memory": pages * resource.getpagesize(),
            "files": len(list((self._folder / "fd").iterdir())),
        }

    @property
    def age_s(self) -> float:
        began_s = int(self._fields()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s

    def _fields(self) -> list[str]:
        return (self._folder / "stat").read_text().rpartition(")")[2].split()


# ---- topics


async def test_unlabeled_topics_are_counted_together(tell: Told) -> None:
    before = await tell.value(told.APPENDED_ENTRIES, topic=OTHER)
    for name in ("one", "two"):
        await store(tell.services, f"metrics/untold/{name}", single(0, 0), single(1, 1))
    await tell.says(told.APPENDED_ENTRIES, before + 4, topic=OTHER)
    for service in SERVICES:
        found = await tell.scrape(service)
        for metric in of_service(service):
            for labels in found.labels(metric):
                assert labels.get("topic", OTHER) == OTHER or labels["topic"].startswith(
                    "metrics/told/"
                )


# ---- a scrape as a whole


@pytest.mark.parametrize("openmetrics", [False, True])
@pytest.mark.parametrize("service", SERVICES)
async def test_scraped_metrics_are_in_the_catalogue(
    tell: Told, service: str, openmetrics: bool
) -> None:
    found = await tell.scrape(service, openmetrics=openmetrics)
    known = {family_name(metric): metric for metric in of_service(service)}
    assert set(found.families) <= {*known, "target", "target_info"}
    for name, metric in known.items():
        family = found.families.get(name)
        if family is None:
            continue
        assert family.type == TYPES[metric.kind], name
        assert family.documentation == metric.description
        if openmetrics:
            assert family.unit == {"s": "seconds", "By": "bytes"}.get(metric.unit, "")
        attributes = {each.label: each for each in metric.attributes}
        seen: dict[str, set[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label == "le":
                    continue
                seen.setdefault(label, set()).add(value)
                closed = attributes[label].values
                assert not closed or value in closed or (label, value) == ("error_type", "")
        for label, values in seen.items():
            assert len(values) <= attributes[label].values_max + 1


async def test_every_metric_of_the_catalogue_is_reported(tell: Told, topic: str) -> None:
    services = tell.services
    await publish(services, topic, *["eu"] * 20, key="a")
    await services.dedup.TakeSnapshot(dedup_pb2.TakeSnapshotRequest(topic=topic))
    sub = Filtered(services, topic)
    await sub.create()
    await sub.set(IN_EU)
    async with consuming(services.dispatcher, topic, permits=20) as consumer:
        await take(consumer, 20)
    await _hand_over(tell, f"{topic}-2")
    missing = {each.name for each in CATALOGUE if each.services != ("console",)}
    missing.discard(told.DENIALS.name)

    async def are_reported() -> bool:  # the event loop's lag is so once a second
        for service in SERVICES:
            families = (await tell.scrape(service)).families
            missing.difference_update(
                each.name for each in of_service(service) if family_name(each) in families
            )
        return not missing

    await eventually(are_reported, "every metric is reported")


async def _hand_over(tell: Told, topic: str) -> int:
    """Move keys from one consumer to another; returns their number."""
    dispatcher = tell.services.dispatcher
    messages = [single(n, n, partition_key=f"key-{n % 20}") for n in range(40)]
    await store(tell.services, topic, *messages[:20])
    async with consuming(dispatcher, topic, name="a", permits=20) as first:
        held = await first.received(20)
        await store(tell.services, topic, *messages[20:])
        async with consuming(dispatcher, topic, name="b", permits=20):
            await first.until(lambda: first.moved, "keys that move")
            await tell.says(told.KEYS, len(first.moved), topic=topic, reason="DRAINING")
            await first.acknowledge(*held)
            await tell.says(told.KEYS, 0, topic=topic, reason="DRAINING")
    return len(first.moved)


async def test_concurrent_scrapes_are_complete(tell: Told) -> None:
    names = {family_name(metric) for metric in (told.RECEIPTS, told.CPU_TIME, told.TOPICS)}
    for found in await asyncio.gather(*(tell.scrape("ledger") for _ in range(8))):
        assert names <= found.families.keys()


# ---- a store that does not answer


async def test_a_topic_recovers_while_redis_does_not_answer(tmp_path: Path, topic: str) -> None:
    """On a stack of its own: surveys pause for long after one that waited for Redis."""
    async with telling(tmp_path / "stack", SEQGATE_DEDUP_REDIS_TIMEOUT_S="0.5") as tell:
        growth = await Growth.of(tell)
        async with publishing(tell.services.ledger, topic, "p") as publisher:
            assert (await publisher.store(single(0, 0))).status == STORED
            await tell.services.settled(topic)
            async with writes_held_up(tell.services.stack):
                await publisher.send(single(1, 1), batch(2, [2, 3]))
                await tell.says(told.UNANSWERED, 3, topic=topic)
                await growth.says(told.RECOVERIES, 1, cause="dedup_failed")
                await tell.says(told.TOPICS, 1, state="aligning")
            for request in (1, 2):
                assert (await publisher.receipt(request)).status == STORED
            await tell.says(told.UNANSWERED, 0, topic=topic)
            await tell.says(told.TOPICS, 0, state="aligning")
        await growth.says(told.RECOVERY_DURATION, 1, cause="dedup_failed")
        assert await growth.value(told.JUDGE_DURATION, outcome="failed") >= 1
        assert await growth.value(told.DEDUP_CALLS, outcome="failed") >= 1


# ---- over OTLP


async def test_otlp_metrics_are_in_the_catalogue_and_agree_with_scrapes(
    tmp_path: Path,
) -> None:
    topic = "metrics/told/otlp"
    async with otlp_receiver() as received:

        def has_pushed(status: str, answers: int) -> bool:
            return _pushed(received, told.RECEIPTS, topic=topic, status=status) == answers

        variables = otel_variables(received, OTEL_RESOURCE_ATTRIBUTES="deployment.name=here")
        async with telling(tmp_path / "stack", **variables) as tell:
            async with publishing(tell.services.ledger, topic, "p") as publisher:
                for number in (0, 1, 1):
                    await publisher.store(single(number, number))
            for status, answers in (("STORED", 2), ("DUPLICATE", 1)):
                await eventually(partial(has_pushed, status, answers))
            await eventually(lambda: services_of(received) == set(SERVICES))
        assert _pushed(received, told.PRODUCERS, topic=topic) == 0  # including the final export
    by_name = {metric.name: metric for metric in CATALOGUE}
    kinds = {
        Kind.COUNTER: "sum",
        Kind.UP_DOWN: "sum",
        Kind.GAUGE: "gauge",
        Kind.HISTOGRAM: "histogram",
    }
    for of, pushed in received.metrics:
        metric = by_name[pushed.name]
        assert of["service.name"] in metric.services
        assert of["deployment.name"] == "here"
        assert (pushed.unit, pushed.description) == (metric.unit, metric.description)
        assert pushed.WhichOneof("data") == kinds[metric.kind]
        if metric.kind in (Kind.COUNTER, Kind.UP_DOWN):
            assert pushed.sum.is_monotonic is (metric.kind is Kind.COUNTER)
        for point in getattr(pushed, kinds[metric.kind]).data_points:
            names = [attribute.name for attribute in metric.attributes]
            assert {each.key for each in point.attributes} <= set(names)
            if metric.kind is Kind.HISTOGRAM:
                assert tuple(point.explicit_bounds) == metric.bounds


def services_of(received: Received) -> set[Any]:
    return {resource["service.name"] for resource, _ in received.metrics}


def _pushed(received: Received, metric: Metric, **attributes: str) -> float | None:
    """The newest value of a point received over OTLP."""
    for _, pushed in reversed(received.metrics):
        if pushed.name != metric.name:
            continue
        for point in pushed.sum.data_points:
            if {each.key: each.value.string_value for each in point.attributes} == attributes:
                return point.as_int or point.as_double
    return None
