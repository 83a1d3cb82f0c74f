"""Filters of subscriptions, by the dispatcher's API, with real processes: verdicts, changes,
outages, counts. Letters and numbers in names are those of the conformance scenarios, section K."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from grpc import StatusCode
from grpc.aio import AioRpcError

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.filter.v1 import filter_pb2
from seqgate.services.dispatcher.filtering.chains import CHANGES_MAX, STRETCHES_MAX
from seqgate.services.dispatcher.wire import parsing as limits
from seqgate.services.filter.core.chain import FILTERS_MAX
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
from tests.support.waiting import eventually

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
    """A subscription with filters."""

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
        """Entries that were processed, accepted, rejected, rescheduled, and failed."""
        for each in (await self.report()).filtering.filters:
            if (each.name, each.mode) == (name, mode):
                found = (each.processed, each.accepted, each.rejected, each.rescheduled)
                return tuple(count.entries for count in (*found, each.failed))
        return (0, 0, 0, 0, 0)

    async def is_judged(self) -> bool:
        """Whether the dispatcher reaches the filter service."""
        try:
            await self.analyze("true", entries_max=1)
        except AioRpcError as error:
            if error.code() is not UNAVAILABLE:
                raise
            return False
        return True

    async def reaches(self, entry_id: int) -> None:
        """Wait until all is acknowledged up to here."""

        async def there() -> bool:
            return await self.position() >= entry_id

        await eventually(there, f"all up to {entry_id} is acknowledged")


@pytest.fixture
def sub(services: Services, topic: str) -> Filtered:
    return Filtered(services, topic)


async def publish(
    services: Services, topic: str, *regions: str | None, key: str = "k", first: int = 0
) -> None:
    """A message from each region."""
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
    """Receive and acknowledge so many; their numbers."""
    some = await consumer.received(count)
    await consumer.acknowledge(*some)
    return numbers(some)


# ---- verdicts


async def test_k92_what_is_rejected_is_acknowledged_and_takes_no_permit(
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
    assert 0 < report.filtering.answer_max_ms <= report.filtering.answers_ms
    assert report.filtering.unanswered == 0


async def test_k90_without_filters_nobody_is_asked(services: Services, sub: Filtered) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "eu", "us")
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        assert await take(consumer, 2) == [0, 1]
    assert not (await sub.report()).HasField("filtering")
    assert await sub.filters() == pb.SubscriptionFilters()


async def test_k93_a_rejected_backlog_is_read_over(services: Services, sub: Filtered) -> None:
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
    assert report.filtering.answers <= 3  # verdicts are remembered


async def test_what_is_rejected_is_not_said_to_be_unread(others: Services, topic: str) -> None:
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


async def test_k91_the_first_filter_that_rejects_decides(services: Services, sub: Filtered) -> None:
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


async def test_k98_two_subscriptions_get_what_their_own_properties_say(
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


async def test_k98_filters_see_other_properties_at_once(services: Services, sub: Filtered) -> None:
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


async def test_k95_what_is_rescheduled_comes_later_and_k96_its_key_waits(
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
        assert (report.put_off_entries, report.totals.put_off) == (1, 1)
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


async def test_what_was_put_off_waits_its_time_whatever_else_changes(
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
        assert (await sub.report()).totals.put_off == 1
        await sub.update(remove=["late"], put={"late": "no"})
        assert await take(consumer, 1) == [0]


async def test_filters_see_the_last_of_many_properties_that_are_set_at_once(
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


async def test_what_comes_back_is_judged_again(services: Services, sub: Filtered) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "eu", "eu", "us")
    await sub.create()
    await sub.set(IN_EU)
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        first, second = await consumer.received(2)
        await sub.set(IN_US, version=2, start=EARLIEST)
        assert consumer.revoked == set()
        await consumer.refuse(first, delay_ms=0)  # and so the second comes back, too
        await sub.reaches(2)
        assert consumer.revoked == {second.delivery}
        assert await consumer.still() == 0
    assert await sub.counts() == (5, 2, 3, 0, 0)


# ---- changes


async def test_a_change_applies_from_its_position_on(services: Services, sub: Filtered) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *["eu", "us"] * 4)
    await sub.create()
    await sub.set(IN_EU)
    filters = await sub.set(IN_US, version=2, start=pb.Start(at=at(4)))
    assert [each.filters[0].version for each in filters.applied] == [1, 2]
    assert not filters.applied[0].HasField("start")
    assert filters.applied[1].start == at(4)
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        assert await take(consumer, 4) == [0, 2, 5, 7]
        await sub.reaches(7)
    assert [each.filters[0].version for each in (await sub.filters()).applied] == [2]


async def test_unless_told_otherwise_a_change_is_about_what_was_not_read(
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


async def test_what_waits_is_judged_anew_by_a_change_from_before(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "eu", "us", "eu", "us")
    await sub.create()
    async with consuming(services.dispatcher, topic, permits=1) as consumer:
        await consumer.received(1)
        await sub.set(IN_EU, start=pb.Start(after=at(0)))
        await consumer.permit(9)
        assert numbers(await consumer.received(1)) == [2]
        await sub.set(start=EARLIEST)
        assert await consumer.still() == 0


async def test_filters_outlast_whoever_has_the_subscription(
    tmp_path_factory: pytest.TempPathFactory, topic: str
) -> None:
    folder = tmp_path_factory.mktemp("outlast")
    async with running(folder, SEQGATE_DISPATCHER_LEASE_S="0.5") as services:
        sub = Filtered(services, topic)
        await publish(services, topic, *["eu", "us"] * 3)
        await sub.create(properties={"mine": "1"})
        await sub.set(IN_EU, policy=REJECT)
        changed = await sub.set(IN_US, version=2, start=pb.Start(at=at(2)))
        await services.stack.kill("dispatcher")
        await services.stack.run("dispatcher")
        await serving(services.stack.address("dispatcher"))

        async def mine() -> bool:
            async with asyncio.timeout(5):
                return await sub.filters() == changed

        await eventually(mine)
        assert (await sub.get()).properties == {"mine": "1"}
        assert changed.applied[0].policy == REJECT
        assert changed.applied[1].policy == PARK

        async def connected() -> bool:
            try:
                await sub.report()
            except Exception:  # the lease of the one before is not over
                return False
            return True

        await eventually(connected)
        async with consuming(services.dispatcher, topic, permits=9) as consumer:
            assert await take(consumer, 3) == [0, 3, 5]
            await sub.reaches(5)


async def test_every_change_is_noted(services: Services, sub: Filtered) -> None:
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
    assert await sub.set() == filters  # it is so already
    for version in range(CHANGES_MAX):
        filters = await sub.set(IN_EU, version=version)
    assert len(filters.changes) == CHANGES_MAX
    assert len(filters.applied) == 1
    assert await sub.filters() == filters


@pytest.mark.parametrize("is_changed", [False, True])
async def test_what_comes_before_filters_when_a_subscription_is_moved_back_is_filtered_all_the_same(
    services: Services, sub: Filtered, *, is_changed: bool
) -> None:
    """Whatever was written of the subscription since."""
    topic = sub.names["topic"]
    await publish(services, topic, "us", "eu", "us", "eu")
    await sub.create()
    await sub.set(IN_EU, start=pb.Start(at=at(2)))
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


# ---- what is refused


async def test_one_wrong_filter_refuses_all_and_says_where(
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


async def test_chains_that_cannot_be_change_nothing(services: Services, sub: Filtered) -> None:
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
    for start in (pb.Start(), pb.Start(after=at(7)), pb.Start(at=at(2**63))):
        with refused(INVALID, "INVALID_START"):
            await sub.set(IN_EU, start=start)
    assert await sub.filters() == pb.SubscriptionFilters()


async def test_properties_that_filters_cannot_take_are_refused(
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


async def test_more_chains_than_may_be_needed_are_refused(
    services: Services, sub: Filtered
) -> None:
    await publish(services, sub.names["topic"], *["eu"] * (STRETCHES_MAX + 1))
    await sub.create()
    for number in range(STRETCHES_MAX):
        await sub.set(IN_EU, version=number, start=pb.Start(at=at(number)))
    before = await sub.filters()
    assert len(before.applied) == STRETCHES_MAX
    with refused(EXHAUSTED, "TOO_MANY_FILTERS"):
        await sub.set(IN_EU, version=99, start=LATEST)
    assert await sub.filters() == before
    async with consuming(services.dispatcher, sub.names["topic"], permits=99) as consumer:
        await take(consumer, STRETCHES_MAX)
        await sub.reaches(STRETCHES_MAX - 1)
    assert len((await sub.set(IN_EU, version=99, start=LATEST)).applied) == 2


async def test_bounds_of_an_analysis(services: Services, sub: Filtered) -> None:
    await publish(services, sub.names["topic"], "eu")
    await sub.create()
    for bad in (
        {"entries_max": limits.ANALYZED_MAX + 1},
        {"seconds_max": limits.ANALYSIS_MAX_S + 1},
    ):
        with refused(INVALID, "INVALID_PAGE"):
            await sub.analyze(**bad)
    await sub.analyze(entries_max=limits.ANALYZED_MAX, seconds_max=limits.ANALYSIS_MAX_S)


# ---- failures


async def test_k100_a_filter_that_fails_parks_its_key_and_no_other(
    services: Services, sub: Filtered
) -> None:
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


async def test_a_filter_that_is_mended_judges_what_waits_because_it_failed(
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
async def test_k100_a_policy_says_what_a_failure_means(
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


async def test_of_a_batch_without_properties_nothing_is_known_so_it_is_delivered(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    await store(services, topic, batch(0, range(3), partition_key="k"))
    await sub.create()
    await sub.set(IN_EU)
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        assert await take(consumer, 1) == [0]


# ---- outages: a stack whose filter service comes and goes


@pytest_asyncio.fixture(scope="module")
async def others(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    async with running(
        tmp_path_factory.mktemp("outages"), SEQGATE_DISPATCHER_FILTER_TIMEOUT_S="0.3"
    ) as services:
        yield services


async def test_k101_parked_while_the_filter_service_is_away_and_in_order_when_it_is_back(
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
async def test_k101_a_policy_says_what_an_outage_means(
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


async def test_what_is_known_goes_on_without_the_filter_service(
    others: Services, topic: str
) -> None:
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


async def test_a_filter_service_that_stands_still_stops_nobody_else(
    others: Services, topic: str
) -> None:
    """Not subscriptions without filters, not acknowledgements, not what is judged already."""
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


async def test_a_filter_service_that_is_killed_costs_nothing(others: Services, topic: str) -> None:
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


async def test_k106_an_analysis_counts_the_backlog_and_changes_nothing(
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
    await sub.create(start=pb.Start(at=at(1)))
    before = await sub.get()
    found = await sub.analyze(IN_US)
    assert (found.backlog_entries, found.scanned_entries, found.scanned_messages) == (5, 5, 9)
    assert (found.first, found.last, found.blocks, found.complete) == (at(1), at(5), 1, True)
    shown = {
        filter_pb2.Verdict.Name(each.verdict)
        if each.HasField("verdict")
        else filter_pb2.FailureReason.Name(each.failure): each
        for each in found.verdicts
    }
    assert {name: (each.entries, each.messages) for name, each in shown.items()} == {
        "VERDICT_ACCEPT": (3, 7),
        "VERDICT_REJECT": (1, 1),
        "FAILURE_REASON_PROPERTY_ABSENT": (1, 1),
    }
    for each in found.verdicts:
        bounds = (each.estimated_entries_low, each.estimated_entries_high)
        assert (each.entries,) * 3 == (each.estimated_entries, *bounds)
        assert each.estimated_messages == each.messages
    assert (await sub.get()).mark_delete == before.mark_delete
    assert not (await sub.report()).HasField("filtering")
    assert await sub.filters() == pb.SubscriptionFilters()


async def test_an_analysis_tells_of_the_filters_that_are_applied(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, "eu", "us", "eu", "us")
    await sub.create()
    await sub.set(IN_EU)
    await sub.set("false", version=2, start=pb.Start(at=at(2)))
    found = await sub.analyze()
    assert {each.verdict: each.entries for each in found.verdicts} == {
        filter_pb2.VERDICT_ACCEPT: 1,
        filter_pb2.VERDICT_REJECT: 3,
    }
    assert all(not each.processed.entries for each in (await sub.report()).filtering.filters)


async def test_an_analysis_skips_what_is_acknowledged(services: Services, sub: Filtered) -> None:
    topic = sub.names["topic"]
    await publish(services, topic, *["eu"] * 6)
    async with consuming(services.dispatcher, topic, permits=9) as consumer:
        some = await consumer.received(6)
        await consumer.acknowledge(some[0], some[2], some[4])
        found = await sub.analyze("true")
        assert (found.backlog_entries, found.scanned_entries, found.complete) == (3, 3, True)
        assert (found.first, found.last) == (at(1), at(5))


async def test_filters_that_are_tried_are_checked_though_there_is_no_backlog(
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


async def test_of_a_large_backlog_a_part_is_looked_at_and_the_rest_estimated(
    services: Services, sub: Filtered
) -> None:
    topic = sub.names["topic"]
    count = 6_000
    await publish(services, topic, *["eu" if i % 4 else "us" for i in range(count)])
    await sub.create()
    found = await sub.analyze(IN_US, entries_max=1_000)
    assert (found.backlog_entries, found.scanned_entries, found.blocks) == (count, 1_000, 10)
    assert not found.complete
    accepted, rejected = found.verdicts
    assert accepted.entries + rejected.entries == 1_000
    for each, truth in ((accepted, count // 4), (rejected, count * 3 // 4)):
        assert each.estimated_entries_low <= truth <= each.estimated_entries_high
        assert each.estimated_entries_low < each.estimated_entries < each.estimated_entries_high
    assert found.last.entry_id - found.first.entry_id > count // 2


async def test_who_is_not_there_has_no_filters(services: Services, sub: Filtered) -> None:
    await publish(services, sub.names["topic"], "eu")
    for call in (sub.set(IN_EU), sub.filters(), sub.analyze()):
        with refused(NOT_FOUND, "SUBSCRIPTION_NOT_FOUND"):
            await call
