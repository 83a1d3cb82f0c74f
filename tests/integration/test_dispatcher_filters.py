"""Filters of subscriptions, by the dispatcher's API, with real processes: verdicts, changes,
outages, counts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from grpc import StatusCode
from grpc.aio import AioRpcError

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.filter.v1 import filter_pb2
from seqgate.services.dispatcher.filtering.chains import CHANGES_MAX, STRETCHES_MAX
from seqgate.services.dispatcher.wire import parsing as limits
from seqgate.services.filter.core.chain import FILTERS_MAX
from seqgate.times import duration
from tests.integration.refusals import refused
from tests.integration.services import Services, paused, running, serving
from tests.integration.test_dispatcher_api import Sub, at, numbers, store
from tests.support.publisher import batch, single
from tests.support.raw_consumer import (
    EARLIEST,
    EXCLUSIVE,
    KEY_SHARED,
    LATEST,
    SHARED,
    RawConsumer,
    consuming,
)
from tests.support.waiting import WITHIN_S, eventually

INVALID, EXHAUSTED = StatusCode.INVALID_ARGUMENT, StatusCode.RESOURCE_EXHAUSTED
NOT_FOUND, UNAVAILABLE = StatusCode.NOT_FOUND, StatusCode.UNAVAILABLE

PARK, ACCEPT, REJECT = (
    pb.FAILURE_POLICY_PARK,
    pb.FAILURE_POLICY_ACCEPT,
    pb.FAILURE_POLICY_REJECT,
)
SHADOW = pb.FILTER_MODE_SHADOW

IN_EU = "properties.region == 'eu'"
IN_US = "properties.region == 'us'"
IS_NUMBER = "int(properties.region) >= 0"


def chain_of(*expressions: str, version: int = 1) -> list[filter_pb2.Filter]:
    return [
        filter_pb2.Filter(name=f"f{index}", version=version, expression=each)
        for index, each in enumerate(expressions)
    ]


class Filtered(Sub):
    async def set(self, *expressions: str, version: int = 1, **more: Any) -> pb.SubscriptionFilters:
        request = pb.SetFiltersRequest(
            **self.names, **{"filters": chain_of(*expressions, version=version), **more}
        )
        answer: pb.SetFiltersResponse = await self.stub.SetFilters(request)
        return answer.filters

    async def filters(self) -> pb.SubscriptionFilters:
        answer: pb.GetFiltersResponse = await self.stub.GetFilters(
            pb.GetFiltersRequest(**self.names)
        )
        return answer.filters

    async def analyze(self, *expressions: str, **more: Any) -> pb.AnalyzeBacklogResponse:
        request = pb.AnalyzeBacklogRequest(**self.names, filters=chain_of(*expressions), **more)
        answer: pb.AnalyzeBacklogResponse = await self.stub.AnalyzeBacklog(request)
        return answer

    async def counts(
        self, name: str = "", *, mode: int = pb.FILTER_MODE_APPLIED
    ) -> tuple[int, ...]:
        """Counts of processed, accepted, rejected, rescheduled and failed entries."""
        for each in (await self.report()).filtering.filters:
            if (each.name, each.mode) == (name, mode):
                found = (each.processed, each.accepted, each.rejected, each.rescheduled)
                return tuple(count.entries for count in (*found, each.failed))
        return (0, 0, 0, 0, 0)

    async def is_judged(self) -> bool:
        """Whether the dispatcher reaches the filter service."""
        try:
            await self.analyze("true", max_entries=1)
        except AioRpcError as error:
            if error.code() is not UNAVAILABLE:
                raise
            return False
        return True

    async def reaches(self, entry_id: int) -> None:
        """Wait until the mark-delete position is at this entry."""

        async def there() -> bool:
            return await self.position() >= entry_id

        await eventually(there, f"all up to {entry_id} is acknowledged")


@pytest.fixture
def sub(services: Services, topic: str) -> Filtered:
    return Filtered(services, topic)


async def publish(
    services: Services, topic: str, *regions: str | None, key: str = "k", first: int = 0
) -> None:
    """Publish a message from each region."""
    publications = [
        single(
            number,
            number,
            str(number).encode(),
            partition_key=key,
            properties={} if region is None else {"region": region},
        )
        for number, region in enumerate(regions, first)
    ]
    await store(services, topic, *publications)


async def take(consumer: RawConsumer, count: int) -> list[int]:
    """Receive and acknowledge this many; their numbers."""
    some = await consumer.received(count)
    await consumer.acknowledge(*some)
    return numbers(some)


# ---- verdicts


async def test_rejected_entries_are_acknowledged_and_take_no_permit(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    await store(
        services,
        topic,
        single(0, 0, partition_key="a", properties={"region": "us"}),
        single(1, 1, partition_key="a", properties={"region": "eu"}),
        batch(2, range(2, 7), partition_key="b", properties={"region": "us"}),
        batch(3, range(7, 9), partition_key="b", properties={"region": "eu"}),
        single(4, 9, partition_key="a", properties={"region": "us"}),
    )
    await sub.create()
    await sub.set(IN_EU)
    async with consuming(services.dispatcher, topic, permits=3) as consumer:
        assert await take(consumer, 2) == [1, 3]
        await sub.reaches(4)
        assert await consumer.still() == 0
    report = await sub.report()
    assert (report.totals.delivered_entries, report.totals.delivered_messages) == (2, 3)
    assert report.totals.rejected_entries == 3
    assert report.unacked_messages == 0
    (every, mine) = report.filtering.filters
    assert (every.name, mine.name, mine.version) == ("", "f0", 1)
    for each in (every, mine):
        assert each.processed == pb.FilterCount(entries=5, messages=10)
        assert each.accepted == pb.FilterCount(entries=2, messages=3)
        assert each.rejected == pb.FilterCount(entries=3, messages=7)
        assert (each.rescheduled.entries, each.failed.entries) == (0, 0)
    assert 0 < report.filtering.answers <= 3
    longest = report.filtering.max_answer_duration.ToNanoseconds()
    assert 0 < longest <= report.filtering.answers_duration.ToNanoseconds()
    assert report.filtering.unanswered == 0


async def test_without_filters_the_filter_service_is_not_called(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "eu", "us")
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        assert await take(consumer, 2) == [0, 1]
    assert not (await sub.report()).HasField("filtering")
    assert await sub.filters() == pb.SubscriptionFilters()


async def test_a_rejected_backlog_is_skipped(services: Services, sub: Filtered) -> None:
    topic = sub.names["topic"]
    count = 3_000
    await publish(services, topic, *["us"] * count, "eu", "us")
    await sub.create()
    await sub.set(IN_EU)
    async with consuming(services.dispatcher, topic, permits=1) as consumer:
        assert await take(consumer, 1) == [count]
        await sub.reaches(count)
        await consumer.permit(1)
        await sub.reaches(count + 1)
    report = await sub.report()
    assert report.totals.delivered_messages == 1
    assert report.filtering.answers <= 3  # verdicts are cached


async def test_a_rejected_entry_is_explained_as_rejected(others: Services, topic: str) -> None:
    sub = Filtered(others, topic)
    await publish(others, topic, "eu")
    await sub.create()
    await sub.set(IN_EU)
    async with consuming(others.dispatcher, topic, permits=9) as consumer:
        assert await take(consumer, 1) == [0]
        with paused(others.stack, "cursor"):
            await publish(others, topic, "us", first=1)

            async def is_settling() -> bool:
                return await sub.why(at(1)) == ["SETTLING", "REJECTED"]

            await eventually(is_settling)
        await sub.reaches(1)
    assert await sub.why(at(0)) == ["ACKNOWLEDGED"]
    said, because = (await sub.explain(at(1))).reasons
    assert said.reason == pb.REASON_ACKNOWLEDGED
    assert (because.reason, because.filter, because.filter_version) == (pb.REASON_REJECTED, "f0", 1)
    assert because.text == "its filter f0 (version 1) rejects it"


async def test_the_first_filter_that_rejects_decides(services: Services, sub: Filtered) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "eu", "us", "asia")
    await sub.create()
    await sub.set("properties.region != 'us'", "properties.region != 'eu'", version=7)
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        assert await take(consumer, 1) == [2]
        await sub.reaches(2)
    assert await sub.counts("f0") == (3, 2, 1, 0, 0)
    assert await sub.counts("f1") == (2, 1, 1, 0, 0)
    assert await sub.counts() == (3, 1, 2, 0, 0)


@pytest.mark.parametrize("kind", [KEY_SHARED, SHARED, EXCLUSIVE])
async def test_every_type_of_subscription_is_filtered(
    services: Services, sub: Filtered, kind: Any
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "us", "eu", "us", "eu")
    await sub.create()
    await sub.set(IN_EU)
    async with consuming(services.dispatcher, topic, permits=9, type=kind) as consumer:
        assert sorted(await take(consumer, 2)) == [1, 3]
        await sub.reaches(3)


async def test_subscriptions_are_filtered_by_their_own_properties(
    services: Services, topic: str
) -> None:
    await publish(services, topic, "eu", "us", "eu", "us")
    for region, expected in (("eu", [0, 2]), ("us", [1, 3])):
        sub = Filtered(services, topic, region)
        await sub.create(properties={"region": region, "other": "x"})
        await sub.set("properties.region == subscription.region")
        async with consuming(services.dispatcher, topic, region, permits=9) as consumer:
            assert await take(consumer, 2) == expected
            await sub.reaches(3)


async def test_changed_properties_take_effect_at_once(services: Services, sub: Filtered) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "eu", "us")
    await sub.create()
    await sub.set("properties.region == subscription.region")
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        await sub.waits_for("k", "FILTER_FAILED")
        (reason,) = (await sub.explain(at(0))).reasons
        assert "PROPERTY_ABSENT" in reason.text
        assert (reason.filter, reason.filter_version) == ("f0", 1)
        assert reason.HasField("since")
        updated = await sub.update(put={"region": "us"})
        assert updated.properties == {"region": "us"}
        assert await take(consumer, 1) == [1]
        await publish(services, topic, "us", "eu", first=2)
        assert await take(consumer, 1) == [2]
        await sub.update(put={"region": "eu"})
        await publish(services, topic, "us", "eu", first=4)
        assert await take(consumer, 1) == [5]
        await sub.reaches(5)


async def test_a_rescheduled_entry_is_delivered_later_and_its_key_waits(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "later", "eu")
    await publish(services, topic, "eu", key="other", first=2)
    await sub.create()
    await sub.set("properties.region == 'later' ? duration('3600s') : duration('0s')")
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        assert await take(consumer, 1) == [2]
        await sub.waits_for("k", "RESCHEDULED")
        (reason,) = (await sub.explain(at(0))).reasons
        assert reason.HasField("until")
        assert await sub.why(at(1)) == ["IN_ORDER", "RESCHEDULED"]
        report = await sub.report()
        assert (report.rescheduled_entries, report.totals.rescheduled) == (1, 1)
        assert await consumer.still() == 0
        await sub.set(
            "properties.region == 'later' ? duration('0.05s') : duration('0s')",
            version=2,
            start=EARLIEST,
        )

        async def often() -> bool:
            return (await sub.counts())[3] > 4

        await eventually(often)
        assert await consumer.still() == 0
        await sub.set(start=EARLIEST)
        assert await take(consumer, 2) == [0, 1]
    assert (await sub.report()).failed_entries == 0


async def test_a_rescheduled_entry_keeps_its_time_across_unrelated_changes(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "later")
    await sub.create()
    await sub.set("subscription['late'] == 'yes' ? duration('3600s') : duration('0s')")
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        await sub.waits_for("k", "FILTER_FAILED")
        await sub.update(put={"late": "yes"})
        await sub.waits_for("k", "RESCHEDULED")
        (before,) = (await sub.explain(at(0))).reasons
        await sub.set(IN_US, mode=SHADOW, start=EARLIEST)
        await sub.update(put={"other": "x"}, remove=["another"])
        await sub.set(mode=SHADOW)
        (after,) = (await sub.explain(at(0))).reasons
        assert (after.reason, after.until) == (before.reason, before.until)
        assert (await sub.report()).totals.rescheduled == 1
        await sub.update(remove=["late"], put={"late": "no"})
        assert await take(consumer, 1) == [0]


async def test_filters_see_the_last_of_concurrent_property_updates(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "none", key="other")
    await sub.create()
    await sub.set("properties.region == subscription.region")
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        regions = [f"r{number}" for number in range(20)]
        await asyncio.gather(*(sub.update(put={"region": each}) for each in regions))
        last = (await sub.get()).properties["region"]
        await publish(services, topic, *regions, first=1)
        assert await take(consumer, 1) == [1 + regions.index(last)]
        await sub.reaches(20)


async def test_redelivered_entries_are_judged_again(services: Services, sub: Filtered) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "eu", "eu", "us")
    await sub.create()
    await sub.set(IN_EU)
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        first, second = await consumer.received(2)
        await sub.set(IN_US, version=2, start=EARLIEST)
        assert consumer.revoked == set()
        await consumer.negative_acknowledge(first, delay_ms=0)  # which also revokes the second
        await sub.reaches(2)
        assert consumer.revoked == {second.delivery}
        assert await consumer.still() == 0
    assert await sub.counts() == (5, 2, 3, 0, 0)


# ---- changes


async def test_a_filter_change_applies_from_its_position_on(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *["eu", "us"] * 4)
    await sub.create()
    await sub.set(IN_EU)
    filters = await sub.set(IN_US, version=2, start=common_pb2.Start(at=at(4)))
    assert [each.filters[0].version for each in filters.applied] == [1, 2]
    assert not filters.applied[0].HasField("start")
    assert filters.applied[1].start == at(4)
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        assert await take(consumer, 4) == [0, 2, 5, 7]
        await sub.reaches(7)
    assert [each.filters[0].version for each in (await sub.filters()).applied] == [2]


async def test_a_filter_change_applies_to_unread_entries_by_default(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "eu", "us")
    await sub.create()
    async with consuming(services.dispatcher, topic, permits=1) as consumer:
        await consumer.received(1)

        async def is_read() -> bool:
            return (await sub.report()).read_position == at(1)

        await eventually(is_read)
        filters = await sub.set(IN_EU)
        assert filters.applied[-1].start == at(2)
        await publish(services, topic, "us", "eu", first=2)
        await consumer.permit(9)
        assert numbers(await consumer.received(2)) == [1, 3]


async def test_a_filter_change_with_an_earlier_start_judges_waiting_entries_again(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "eu", "us", "eu", "us")
    await sub.create()
    async with consuming(services.dispatcher, topic, permits=1) as consumer:
        await consumer.received(1)
        await sub.set(IN_EU, start=common_pb2.Start(after=at(0)))
        await consumer.permit(9)
        assert numbers(await consumer.received(1)) == [2]
        await sub.set(start=EARLIEST)
        assert await consumer.still() == 0


async def test_filters_survive_a_change_of_owner(
    tmp_path_factory: pytest.TempPathFactory, topic: str
) -> None:
    folder = tmp_path_factory.mktemp("outlast")
    async with running(folder, SEQGATE_DISPATCHER_LEASE_S="2") as services:
        sub = Filtered(services, topic)
        await publish(services, topic, *["eu", "us"] * 3)
        await sub.create(properties={"mine": "1"})
        await sub.set(IN_EU, policy=REJECT)
        changed = await sub.set(IN_US, version=2, start=common_pb2.Start(at=at(2)))
        await services.stack.kill("dispatcher")
        await services.stack.run("dispatcher")
        await serving(services.stack.address("dispatcher"))

        async def mine() -> bool:
            async with asyncio.timeout(WITHIN_S):
                return await sub.filters() == changed

        await eventually(mine)
        assert (await sub.get()).properties == {"mine": "1"}
        assert changed.applied[0].policy == REJECT
        assert changed.applied[1].policy == PARK

        async def connected() -> bool:
            try:
                await sub.report()
            except Exception:  # the previous lease has not expired
                return False
            return True

        await eventually(connected)
        async with consuming(services.dispatcher, topic, permits=9) as consumer:
            assert await take(consumer, 3) == [0, 3, 5]
            await sub.reaches(5)


async def test_every_filter_change_is_recorded(services: Services, sub: Filtered) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "eu")
    await sub.create()
    await sub.set(IN_EU, IN_US, policy=ACCEPT)
    await sub.set(IN_US, mode=SHADOW, version=4, start=LATEST)
    filters = await sub.set()
    assert [each.mode for each in filters.changes] == [
        pb.FILTER_MODE_APPLIED,
        SHADOW,
        pb.FILTER_MODE_APPLIED,
    ]
    assert filters.applied == []
    none, shadow, first = filters.changes
    assert [(each.name, each.version, each.expression) for each in first.filters] == [
        ("f0", 1, ""),
        ("f1", 1, ""),
    ]
    assert (first.policy, list(none.filters)) == (ACCEPT, [])
    assert shadow.start == at(1)
    assert first.epoch == (await sub.report()).epoch
    assert first.caller.startswith("ipv4:127.0.0.1:")
    assert first.time.ToMilliseconds() <= none.time.ToMilliseconds()
    said = [line for line in services.log("dispatcher") if line["event"] == "filters changed"]
    mine = [line for line in said if line["topic"] == topic]
    assert [line["filters"] for line in mine] == [["f0 1", "f1 1"], ["f0 4"], []]
    assert [line["caller"] for line in mine] == [first.caller] * 3
    assert await sub.set() == filters  # unchanged
    for version in range(CHANGES_MAX):
        filters = await sub.set(IN_EU, version=version)
    assert len(filters.changes) == CHANGES_MAX
    assert len(filters.applied) == 1
    assert await sub.filters() == filters


@pytest.mark.parametrize("is_changed", [False, True])
async def test_a_reset_before_the_first_chain_still_filters(
    services: Services, sub: Filtered, *, is_changed: bool
) -> None:
    """Whatever has been persisted of the subscription since."""
    topic = sub.names["topic"]
    await publish(services, topic, "us", "eu", "us", "eu")
    await sub.create()
    await sub.set(IN_EU, start=common_pb2.Start(at=at(2)))
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        await consumer.acknowledge(*await consumer.received(3))
        await sub.reaches(3)
        if is_changed:
            await sub.set(IN_EU, mode=SHADOW)
        await sub.reset(EARLIEST)
        consumer.deliveries.clear()
        await consumer.permit(9)
        await consumer.until(lambda: len(consumer.deliveries) >= 2)
        assert numbers(consumer.deliveries) == [1, 3]


async def test_a_shadow_chain_is_counted_and_changes_nothing(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "eu", "us", None)
    await sub.create()
    await sub.set("!('region' in properties) || properties.region == 'eu'")
    await sub.set(IN_US, mode=SHADOW, start=EARLIEST)
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        assert await take(consumer, 2) == [0, 2]
        await sub.reaches(2)

        async def counted() -> bool:
            return await sub.counts(mode=SHADOW) == (3, 1, 1, 0, 1)

        await eventually(counted)
        assert await sub.counts() == (3, 2, 1, 0, 0)
        await sub.set(mode=SHADOW)
        assert not (await sub.filters()).HasField("shadow")
        await publish(services, topic, "eu", first=3)
        assert await take(consumer, 1) == [3]
        assert await sub.counts(mode=SHADOW) == (3, 1, 1, 0, 1)
        assert await sub.counts() == (4, 3, 1, 0, 0)


# ---- refusals


async def test_one_invalid_filter_refuses_the_chain_with_its_position(
    services: Services, sub: Filtered
) -> None:
    await publish(services, sub.names["topic"], "eu")
    await sub.create()
    before = await sub.set(IN_EU)
    with refused(INVALID, "INVALID_EXPRESSION") as details:
        await sub.set("true", "properties.region ==\n  7", version=3)
    assert (details["filter"], details["version"], details["line"]) == ("f1", "3", "1")
    assert details["column"]
    with refused(INVALID, "INVALID_EXPRESSION"):
        await sub.set("'text'", mode=SHADOW)
    with refused(INVALID, "INVALID_EXPRESSION"):
        await sub.analyze("no such thing")
    with refused(INVALID, "INVALID_CHAIN") as details:
        await sub.set(IN_US)
    assert (details["filter"], details["version"]) == ("f0", "1")
    assert await sub.filters() == before


async def test_invalid_chains_change_nothing(services: Services, sub: Filtered) -> None:
    await publish(services, sub.names["topic"], "eu")
    await sub.create()
    bad: list[dict[str, Any]] = [
        {"filters": chain_of(*["true"] * (FILTERS_MAX + 1))},
        {"filters": [*chain_of("true"), *chain_of("false")]},
        {"filters": [filter_pb2.Filter(expression="true")]},
        {"filters": [filter_pb2.Filter(name="a\nb", expression="true")]},
        {"policy": 9},
        {"mode": 9},
    ]
    for each in bad:
        with refused(INVALID, "INVALID_CHAIN"):
            await sub.set(IN_EU, **each)
    for start in (
        common_pb2.Start(),
        common_pb2.Start(after=at(7)),
        common_pb2.Start(at=at(2**63)),
    ):
        with refused(INVALID, "INVALID_START"):
            await sub.set(IN_EU, start=start)
    assert await sub.filters() == pb.SubscriptionFilters()


async def test_properties_above_the_filters_limit_are_refused(
    services: Services, sub: Filtered
) -> None:
    await publish(services, sub.names["topic"], "eu")
    await sub.create()
    await sub.set("subscription.all(name, name != 'x')")
    large = {str(number): "x" * 4_000 for number in range(20)}
    with refused(INVALID, "INVALID_CHAIN"):
        await sub.update(put=large)
    assert (await sub.get()).properties == {}
    await sub.set()
    assert (await sub.update(put=large)).properties == large
    with refused(INVALID, "INVALID_CHAIN"):
        await sub.set("subscription.all(name, name != 'x')")
    await sub.set("subscription['1'] != ''")


async def test_chains_beyond_the_limit_are_refused(services: Services, sub: Filtered) -> None:
    await publish(services, sub.names["topic"], *["eu"] * (STRETCHES_MAX + 1))
    await sub.create()
    for number in range(STRETCHES_MAX):
        await sub.set(IN_EU, version=number, start=common_pb2.Start(at=at(number)))
    before = await sub.filters()
    assert len(before.applied) == STRETCHES_MAX
    with refused(EXHAUSTED, "TOO_MANY_FILTERS"):
        await sub.set(IN_EU, version=99, start=LATEST)
    assert await sub.filters() == before
    async with consuming(services.dispatcher, sub.names["topic"], permits=99) as consumer:
        await take(consumer, STRETCHES_MAX)
        await sub.reaches(STRETCHES_MAX - 1)
    assert len((await sub.set(IN_EU, version=99, start=LATEST)).applied) == 2


async def test_analyses_are_bounded(services: Services, sub: Filtered) -> None:
    await publish(services, sub.names["topic"], "eu")
    await sub.create()
    for bad in (
        {"max_entries": limits.ANALYZED_MAX + 1},
        {"max_duration": duration(limits.ANALYSIS_MAX_S * 1000 + 1)},
        {"max_duration": duration(0)},
    ):
        with refused(INVALID, "INVALID_PAGE"):
            await sub.analyze(**bad)
    await sub.analyze(
        max_entries=limits.ANALYZED_MAX, max_duration=duration(limits.ANALYSIS_MAX_S * 1000)
    )


# ---- failures


async def test_a_failing_filter_parks_only_the_key(services: Services, sub: Filtered) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "1", "x", "2")
    await publish(services, topic, "3", key="other", first=3)
    await sub.create()
    await sub.set("true", IS_NUMBER, version=5)
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        assert sorted(await take(consumer, 2)) == [0, 3]
        await sub.waits_for("k", "FILTER_FAILED")
        assert await sub.why(at(2)) == ["IN_ORDER", "FILTER_FAILED"]
        (reason,) = (await sub.explain(at(1))).reasons
        assert (reason.filter, reason.filter_version, reason.position) == ("f1", 5, at(1))
        assert "EVALUATION_FAILED" in reason.text
        report = await sub.report()
        assert report.filter_failed_entries == 1
        (withheld,) = report.withheld
        assert (withheld.reason, withheld.keys) == (pb.REASON_FILTER_FAILED, 1)
        (failure,) = report.filtering.filters[0].failures
        assert (failure.reason, failure.count.entries) == ("EVALUATION_FAILED", 1)
        assert await sub.counts("f1") == (4, 3, 0, 0, 1)
        await sub.set("true", start=EARLIEST)
        assert await take(consumer, 2) == [1, 2]
        await sub.reaches(3)


async def test_a_fixed_filter_judges_the_entries_that_it_parked(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "1", "x", "2")
    await sub.create()
    await sub.set(IS_NUMBER, version=1)
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        assert await take(consumer, 1) == [0]
        await sub.waits_for("k", "FILTER_FAILED")
        await sub.set("true", version=2)
        assert await take(consumer, 2) == [1, 2]
        await sub.reaches(2)


@pytest.mark.parametrize(("policy", "expected"), [(ACCEPT, [0, 1, 2]), (REJECT, [0, 2])])
async def test_the_failure_policy_decides_on_failures(
    services: Services, sub: Filtered, policy: Any, expected: Sequence[int]
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "1", "x", "2")
    await sub.create()
    await sub.set(IS_NUMBER, policy=policy)
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        assert await take(consumer, len(expected)) == expected
        await sub.reaches(2)
    assert await sub.counts() == (3, 2, 0, 0, 1)


async def test_a_batch_without_properties_is_delivered(services: Services, sub: Filtered) -> None:
    topic = sub.names["topic"]
    await store(services, topic, batch(0, range(3), partition_key="k"))
    await sub.create()
    await sub.set(IN_EU)
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        assert await take(consumer, 1) == [0]


# ---- outages: a stack whose filter service stops and restarts


@pytest_asyncio.fixture(scope="module")
async def others(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    async with running(
        tmp_path_factory.mktemp("outages"), SEQGATE_DISPATCHER_FILTER_TIMEOUT_S="0.3"
    ) as services:
        yield services


async def test_keys_are_parked_during_an_outage_and_resume_in_order(
    others: Services, topic: str
) -> None:
    sub = Filtered(others, topic)
    regions = [f"{'eu' if number % 3 else 'us'}-{number}" for number in range(1_500)]
    await publish(others, topic, *regions)
    await sub.create()
    await sub.set("properties.region.startsWith('eu')")
    await others.stack.terminate("filter")
    try:
        async with consuming(others.dispatcher, topic, permits=5_000) as consumer:
            await sub.waits_for("k", "FILTERING")
            (reason,) = (await sub.explain(at(0))).reasons
            assert "does not answer" in reason.text
            assert reason.HasField("since")
            report = await sub.report()
            assert report.unjudged_entries > 0
            assert report.filtering.HasField("unanswered_since")
            assert report.filtering.unanswered > 0
            assert await consumer.still() == 0
            with refused(UNAVAILABLE, "FILTERS_UNAVAILABLE"):
                await sub.set(IN_EU)
            with refused(UNAVAILABLE, "FILTERS_UNAVAILABLE"):
                await sub.analyze()
            await others.stack.run("filter")
            assert await take(consumer, 1_000) == [i for i in range(1_500) if i % 3]
            await sub.reaches(1_499)
            report = await sub.report()
            assert (report.unjudged_entries, report.totals.rejected_entries) == (0, 500)
            assert not report.filtering.HasField("unanswered_since")
    finally:
        if "filter" not in others.stack.endpoints["pids"]:  # type: ignore[operator]
            await others.stack.run("filter")
        await eventually(sub.is_judged, "filters answer again")


@pytest.mark.parametrize(("policy", "expected"), [(ACCEPT, [0, 1]), (REJECT, [])])
async def test_the_outage_policy_decides_on_outages(
    others: Services, topic: str, policy: Any, expected: list[int]
) -> None:
    sub = Filtered(others, topic)
    await publish(others, topic, "eu", "us")
    await sub.create()
    await sub.set(IN_EU, policy=policy)
    await others.stack.terminate("filter")
    try:
        async with consuming(others.dispatcher, topic, permits=9) as consumer:
            assert await take(consumer, len(expected)) == expected
            await sub.reaches(1)
        (every, _) = (await sub.report()).filtering.filters
        (failure,) = every.failures
        assert (failure.reason, failure.count.entries) == ("UNAVAILABLE", 2)
    finally:
        await others.stack.run("filter")
        await eventually(sub.is_judged, "filters answer again")


async def test_cached_verdicts_apply_during_an_outage(others: Services, topic: str) -> None:
    sub = Filtered(others, topic)
    await publish(others, topic, "eu", "us")
    await sub.create()
    await sub.set(IN_EU)
    async with consuming(others.dispatcher, topic, permits=9) as consumer:
        assert await take(consumer, 1) == [0]
        await others.stack.terminate("filter")
        try:
            await publish(others, topic, "us", "eu", first=2)
            assert await take(consumer, 1) == [3]
            await sub.reaches(3)
        finally:
            await others.stack.run("filter")
            await eventually(sub.is_judged, "filters answer again")


async def test_a_paused_filter_service_blocks_only_unjudged_entries(
    others: Services, topic: str
) -> None:
    """Subscriptions without filters, acknowledgements, and entries with cached verdicts
    continue."""
    sub = Filtered(others, topic)
    await publish(others, topic, "eu", "eu", "us")
    await sub.create()
    await sub.set(IN_EU)
    async with (
        consuming(others.dispatcher, topic, permits=9) as consumer,
        consuming(others.dispatcher, topic, "plain", permits=99) as plain,
    ):
        one, other = await consumer.received(2)
        assert await take(plain, 3) == [0, 1, 2]
        with paused(others.stack, "filter"):
            await publish(others, topic, *[f"eu-{number}" for number in range(20)], first=3)
            assert await take(plain, 20) == list(range(3, 23))
            await consumer.acknowledge(one, other)
            await sub.reaches(2)
            await publish(others, topic, "eu", key="judged", first=23)
            assert numbers(await consumer.received(1)) == [23]
            assert await sub.why(at(3)) == ["FILTERING"]
        await sub.reaches(22)
        assert await consumer.still() == 0


async def test_a_killed_filter_service_loses_nothing(others: Services, topic: str) -> None:
    sub = Filtered(others, topic)
    await sub_of_many(others, sub)
    async with consuming(others.dispatcher, topic, permits=5_000) as consumer:
        await consumer.received(100)
        await others.stack.kill("filter")
        await others.stack.run("filter")
        await consumer.until(lambda: len(consumer.deliveries) == 1_000, "all that is accepted")
        found = numbers(consumer.deliveries)
        assert found == [number for number in range(2_000) if number % 2]


async def sub_of_many(services: Services, sub: Filtered) -> None:
    await publish(services, sub.names["topic"], *[str(number) for number in range(2_000)])
    await sub.create()
    await sub.set("int(properties.region) % 2 == 1")


# ---- the backlog


async def test_an_analysis_counts_the_backlog_and_changes_nothing(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "eu", "us", "eu", "us")
    await store(
        services,
        topic,
        batch(4, range(4, 9), partition_key="k", properties={"region": "us"}),
        single(5, 9, partition_key="k"),
    )
    await sub.create(start=common_pb2.Start(at=at(1)))
    before = await sub.get()
    found = await sub.analyze(IN_US)
    assert (found.backlog_entries, found.scanned_entries, found.scanned_messages) == (5, 5, 9)
    assert (found.first, found.last, found.blocks, found.complete) == (at(1), at(5), 1, True)
    shown = {
        filter_pb2.FilterVerdict.Name(each.verdict)
        if each.HasField("verdict")
        else filter_pb2.FailureReason.Name(each.failure): each
        for each in found.verdicts
    }
    assert {name: (each.entries, each.messages) for name, each in shown.items()} == {
        "FILTER_VERDICT_ACCEPT": (3, 7),
        "FILTER_VERDICT_REJECT": (1, 1),
        "FAILURE_REASON_PROPERTY_ABSENT": (1, 1),
    }
    for each in found.verdicts:
        bounds = (each.estimated_entries_low, each.estimated_entries_high)
        assert (each.entries,) * 3 == (each.estimated_entries, *bounds)
        assert each.estimated_messages == each.messages
    assert (await sub.get()).mark_delete == before.mark_delete
    assert not (await sub.report()).HasField("filtering")
    assert await sub.filters() == pb.SubscriptionFilters()


async def test_an_analysis_reports_the_applied_filters(services: Services, sub: Filtered) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "eu", "us", "eu", "us")
    await sub.create()
    await sub.set(IN_EU)
    await sub.set("false", version=2, start=common_pb2.Start(at=at(2)))
    found = await sub.analyze()
    assert {each.verdict: each.entries for each in found.verdicts} == {
        filter_pb2.FILTER_VERDICT_ACCEPT: 1,
        filter_pb2.FILTER_VERDICT_REJECT: 3,
    }
    assert all(not each.processed.entries for each in (await sub.report()).filtering.filters)


async def test_an_analysis_skips_acknowledged_entries(services: Services, sub: Filtered) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *["eu"] * 6)
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        some = await consumer.received(6)
        await consumer.acknowledge(some[0], some[2], some[4])
        found = await sub.analyze("true")
        assert (found.backlog_entries, found.scanned_entries, found.complete) == (3, 3, True)
        assert (found.first, found.last) == (at(1), at(5))


async def test_an_analysis_without_backlog_still_checks_its_filters(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "eu")
    async with consuming(services.dispatcher, topic, permits=1) as consumer:
        assert await take(consumer, 1) == [0]
        await sub.reaches(0)
    with refused(INVALID, "INVALID_EXPRESSION"):
        await sub.analyze("no such thing")
    found = await sub.analyze("true")
    assert (found.backlog_entries, found.complete) == (0, True)


async def test_an_analysis_samples_a_large_backlog_and_estimates_the_rest(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    count = 6_000
    await publish(services, topic, *["eu" if i % 4 else "us" for i in range(count)])
    await sub.create()
    found = await sub.analyze(IN_US, max_entries=1_000)
    assert (found.backlog_entries, found.scanned_entries, found.blocks) == (count, 1_000, 10)
    assert not found.complete
    accepted, rejected = found.verdicts
    assert accepted.entries + rejected.entries == 1_000
    for each, truth in ((accepted, count // 4), (rejected, count * 3 // 4)):
        assert each.estimated_entries_low <= truth <= each.estimated_entries_high
        assert each.estimated_entries_low < each.estimated_entries < each.estimated_entries_high
    assert found.last.entry_id - found.first.entry_id > count // 2


async def test_filters_of_a_missing_subscription_are_not_found(
    services: Services, sub: Filtered
) -> None:
    await publish(services, sub.names["topic"], "eu")
    for call in (sub.set(IN_EU), sub.filters(), sub.analyze()):
        with refused(NOT_FOUND, "SUBSCRIPTION_NOT_FOUND"):
            await call
