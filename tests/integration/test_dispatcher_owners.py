"""Two instances of the dispatcher over one cursor service: a subscription has one owner, and a
previous owner is fenced."""

import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from grpc import StatusCode, aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.dev.child import Child, tell
from seqgate.dev.ports import free_ports
from seqgate.times import milliseconds
from tests.integration.refusals import check, refused, status_of_call
from tests.integration.services import (
    Services,
    channel_to,
    is_bad,
    log_lines,
    paused,
    running,
    serving,
)
from tests.support.publisher import publishing, single
from tests.support.raw_consumer import EARLIEST, RawConsumer, connect, consuming, subscribe
from tests.support.waiting import eventually

IN_USE, ABORTED = StatusCode.FAILED_PRECONDITION, StatusCode.ABORTED
UNAVAILABLE = StatusCode.UNAVAILABLE

LEASE_S = 2.0
LONG_LEASE = {"SEQGATE_DISPATCHER_LEASE_S": "600"}


@pytest.fixture(scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    """A stack whose own dispatcher gets no calls."""
    async with running(
        tmp_path_factory.mktemp("owners"),
        SEQGATE_DISPATCHER_LEASE_S=str(LEASE_S),
        SEQGATE_DISPATCHER_DRAIN_TIMEOUT_S="5",
    ) as services:
        yield services


@dataclass
class Instance:
    """A dispatcher process."""

    stub: Any
    address: str
    process: Child
    log: str

    def tell(self, number: int) -> None:
        os.kill(self.process.pid, number)


@asynccontextmanager
async def instance(services: Services, **environment: str) -> AsyncIterator[Instance]:
    """Another dispatcher; killed at the end if it still runs."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    stack = services.stack
    name = f"dispatcher-{port}"
    with (stack.folder / "logs" / f"{name}.log").open("ab") as log:
        process = await stack.start_process(
            [sys.executable, "-m", "seqgate.services.dispatcher"],
            log.fileno(),
            {
                **os.environ,
                **stack.settings,
                "SEQGATE_DISPATCHER_LISTEN": address,
                **environment,
            },
        )
    try:
        await serving(address)
        async with channel_to(address) as channel:
            yield Instance(DispatcherServiceStub(channel), address, process, name)
    finally:
        tell(process, signal.SIGKILL)
        await process.wait()
    assert [each for each in log_lines(stack, name) if is_bad(each)] == []


async def publish(services: Services, topic: str, *keys: str, first: int = 0) -> None:
    async with publishing(services.ledger, topic, "p") as publisher:
        await publisher.send(
            *(single(i, i, b"x", partition_key=key) for i, key in enumerate(keys, first))
        )
        for i in range(first, first + len(keys)):
            assert (await publisher.receipt(i)).status == ledger_pb2.RECEIPT_STATUS_STORED


async def owner(services: Services, topic: str) -> str:
    request = pb.GetSubscriptionRequest(topic=topic, subscription="s")
    found = await services.dispatcher.GetSubscription(request)
    return str(found.subscription.owner)


async def beyond(services: Services, topic: str) -> tuple[int, list[int]]:
    """The mark-delete position, and the acknowledged entries beyond it."""
    names: dict[str, Any] = {"topic": topic, "cursor": "s"}
    cursor = (await services.cursor.GetCursor(cursor_pb2.GetCursorRequest(**names))).cursor
    page = await services.cursor.ListAcknowledged(cursor_pb2.ListAcknowledgedRequest(**names))
    found: list[int] = []
    for each in page.ranges:
        found += range(each.first.entry_id, each.last_entry_id + 1)
    return (cursor.mark_delete.entry_id if cursor.HasField("mark_delete") else -1), found


async def takes_over(stub: Any, topic: str, **more: Any) -> RawConsumer:
    """A stream, opened once no other instance has the subscription."""
    found: list[RawConsumer] = []

    async def connected() -> bool:
        try:
            found.append(await connect(stub, subscribe(topic, **more)))
        except aio.AioRpcError as error:
            check(status_of_call(error), IN_USE, "NOT_OWNER")
        return bool(found)

    await eventually(connected)
    return found[0]


async def history(stub: Any, topic: str, entry_id: int = 0) -> pb.GetMessageHistoryResponse:
    """What an instance knows of an entry."""
    position = common_pb2.Position(ledger_id=1, entry_id=entry_id)
    request = pb.GetMessageHistoryRequest(topic=topic, subscription="s", position=position)
    found: pb.GetMessageHistoryResponse = await stub.GetMessageHistory(request)
    return found


def kinds(found: pb.GetMessageHistoryResponse) -> list[str]:
    names = map(pb.MessageEventKind.Name, (each.kind for each in found.events))
    return [each.removeprefix("MESSAGE_EVENT_KIND_") for each in names]


async def ended_with(consumer: RawConsumer, code: StatusCode, reason: str) -> None:
    error = await consumer.ended()
    assert error is not None
    check(status_of_call(error), code, reason)


def numbers(deliveries: list[pb.Delivery]) -> list[int]:
    return [each.position.entry_id for each in deliveries]


async def test_an_instance_redirects_to_the_owner_of_a_subscription(
    services: Services, topic: str
) -> None:
    await publish(services, topic, "k")
    names: dict[str, Any] = {"topic": topic, "subscription": "s"}
    async with (
        instance(services) as one,
        instance(services) as other,
        consuming(one.stub, topic) as consumer,
    ):
        for method, request in {
            "DeleteSubscription": pb.DeleteSubscriptionRequest(**names, force=True),
            "ResetSubscription": pb.ResetSubscriptionRequest(**names, start=EARLIEST),
            "UpdateSubscriptionProperties": pb.UpdateSubscriptionPropertiesRequest(
                **names, put={"a": "1"}
            ),
            "ReleaseKey": pb.ReleaseKeyRequest(**names),
            "ListDeadLetters": pb.ListDeadLettersRequest(**names),
            "GetDeadLetter": pb.GetDeadLetterRequest(
                **names, position=common_pb2.Position(ledger_id=1)
            ),
            "RedriveDeadLetters": pb.RedriveDeadLettersRequest(
                **names, positions=[common_pb2.Position(ledger_id=1)], request_id="r"
            ),
            "StartRedrive": pb.StartRedriveRequest(**names, request_id="r"),
            "EstimateRedrive": pb.EstimateRedriveRequest(**names),
            "GetRedrive": pb.GetRedriveRequest(**names),
            "ListRedrives": pb.ListRedrivesRequest(**names),
            "StopRedrive": pb.StopRedriveRequest(**names),
            "SetFilters": pb.SetFiltersRequest(**names),
            "AnalyzeBacklog": pb.AnalyzeBacklogRequest(**names),
            "Report": pb.ReportRequest(**names),
            "Explain": pb.ExplainRequest(**names, key=b"k"),
            "GetMessageHistory": pb.GetMessageHistoryRequest(**names),
        }.items():
            with refused(IN_USE, "NOT_OWNER") as details:
                await getattr(other.stub, method)(request)
            assert details == {"owner": one.address}, method
        with refused(IN_USE, "NOT_OWNER") as details:
            await connect(other.stub, subscribe(topic))
        assert details == {"owner": one.address}
        found = await other.stub.GetSubscription(pb.GetSubscriptionRequest(**names))
        assert found.subscription.owner == one.address
        assert not found.subscription.properties
        assert not consumer.has_ended


async def test_a_subscription_is_taken_over_after_its_owner_crashes(
    services: Services, topic: str
) -> None:
    await publish(services, topic, *"aab")
    async with instance(services) as one, instance(services) as other:
        async with consuming(one.stub, topic, permits=9) as consumer:
            had = {each.position.entry_id: each for each in await consumer.received(3)}
            await consumer.acknowledge(had[1])
            one.tell(signal.SIGKILL)
            error = await consumer.ended()
            assert error is not None
            assert error.code() is UNAVAILABLE
        again = await takes_over(other.stub, topic)
        assert again.epoch > consumer.epoch
        await again.permit(9)
        assert sorted(numbers(await again.received(2))) == [0, 2]
        stale = pb.Acknowledge(
            epoch=consumer.epoch, settlements=[pb.Settlement(delivery=had[0].delivery)]
        )
        settled = await again.settled(await again.ask("acknowledge", stale))
        assert list(settled.outcomes) == [pb.SETTLE_OUTCOME_STALE]
        assert await again.still() == 0
        await again.crash()


async def test_a_history_begins_anew_with_its_owner_unless_its_topic_is_audited(
    services: Services, topic: str
) -> None:
    audited = topic.replace("default", "audited")
    settings = {"SEQGATE_DISPATCHER_AUDIT_TOPICS": '["public/audited/*"]'}
    for each in (topic, audited):
        await publish(services, each, "k")
    async with instance(services, **settings) as one, instance(services, **settings) as other:
        for each in (topic, audited):
            async with consuming(one.stub, each, name="first", permits=1) as consumer:
                (had,) = await consumer.received(1)
                await consumer.negative_acknowledge(had, delay_ms=0)
                await consumer.leave()
        known = await history(one.stub, topic)
        assert kinds(known) == ["TAKEN", "DELIVERED", "FAILED"]
        assert (known.audit_topic, known.audit_missing) == ("", "")

        one.tell(signal.SIGTERM)
        await one.process.wait()
        for each in (topic, audited):
            consumer = await takes_over(other.stub, each, name="second")
            await consumer.permit(1)
            (had,) = await consumer.received(1)
            await consumer.acknowledge(had)
            await consumer.crash()
        anew, whole = await history(other.stub, topic), await history(other.stub, audited)
        assert kinds(anew) == ["TAKEN", "DELIVERED", "ACKNOWLEDGED"]
        assert anew.complete_since == anew.events[0].time
        assert milliseconds(anew.complete_since) > milliseconds(known.events[-1].time)
        assert anew.events[0].target == other.address
        assert kinds(whole) == [*kinds(known), *kinds(anew)]
        assert [each.consumer for each in whole.events if each.consumer] == [
            *("first", "first", "second", "second")
        ]
        assert (whole.audit_topic, whole.audit_missing) == (f"{audited}-AUDIT", "")
        assert milliseconds(whole.complete_since) < milliseconds(whole.events[0].time)

        pages = await services.read(f"{audited}-AUDIT")
        told = [json.loads(each.payload) for each in pages]
        assert {each["instance"] for each in told} <= {one.address, other.address}
        assert {each["subscription"] for each in told} == {"s"}
        assert sum(each["lost"] for each in told) == 0


async def test_an_audit_topic_that_is_away_holds_up_no_delivery(
    services: Services, topic: str
) -> None:
    settings = {"SEQGATE_DISPATCHER_AUDIT_TOPICS": '["*/*/*"]'}
    await publish(services, topic, *"ab")
    async with instance(services, **settings) as one:
        async with consuming(one.stub, topic, permits=2) as consumer:
            first, second = await consumer.received(2)
            with paused(services.stack, "ledger"):
                assert not (await consumer.acknowledge(first, second)).outcomes

        async def is_published() -> bool:
            if not await services.topics(f"{topic}-AUDIT"):
                return False
            found = [json.loads(each.payload) for each in await services.read(f"{topic}-AUDIT")]
            return any(e["event"] == "ACKNOWLEDGED" for page in found for e in page["events"])

        await eventually(is_published, "the acknowledgement is in the audit topic")
        assert kinds(await history(one.stub, topic, 1)) == ["TAKEN", "DELIVERED", "ACKNOWLEDGED"]


async def test_a_history_within_a_small_budget_says_since_when_it_is_complete(
    services: Services, topic: str
) -> None:
    await publish(services, topic, *"k" * 40)
    async with (
        instance(services, SEQGATE_DISPATCHER_HISTORY_BYTES_MAX="2000") as one,
        consuming(one.stub, topic, permits=1) as consumer,
    ):
        for _ in range(40):
            await consumer.acknowledge(*await consumer.received(1))
            await consumer.permit(1)
        first, last = [await history(one.stub, topic, each) for each in (0, 39)]
    assert kinds(first) == []
    assert kinds(last) == ["DELIVERED", "ACKNOWLEDGED"]
    assert milliseconds(first.complete_since) <= milliseconds(last.events[0].time)
    assert first.epoch == consumer.epoch


async def test_without_a_budget_nothing_is_remembered(services: Services, topic: str) -> None:
    settings = {
        "SEQGATE_DISPATCHER_HISTORY_BYTES_MAX": "0",
        "SEQGATE_DISPATCHER_AUDIT_TOPICS": '["public/audited/*"]',
    }
    audited = topic.replace("default", "audited")
    for each in (topic, audited):
        await publish(services, each, "k")
    async with instance(services, **settings) as one:
        for each in (topic, audited):
            async with consuming(one.stub, each, permits=1) as consumer:
                await consumer.acknowledge(*await consumer.received(1))
        none = await history(one.stub, topic)
        assert not none.events
        assert not none.HasField("complete_since")

        async def is_published() -> bool:
            return kinds(await history(one.stub, audited)) == ["TAKEN", "DELIVERED", "ACKNOWLEDGED"]

        await eventually(is_published)


async def test_an_owner_restarted_at_once_has_another_epoch(services: Services, topic: str) -> None:
    await publish(services, topic, "k")
    (port,) = free_ports(1)
    address = {"SEQGATE_DISPATCHER_ADVERTISE": f"127.0.0.1:{port}", **LONG_LEASE}
    epochs = []
    for _ in range(2):
        async with (
            instance(services, **address) as one,
            consuming(one.stub, topic, permits=1) as consumer,
        ):
            await consumer.received(1)
            epochs.append(consumer.epoch)
            one.tell(signal.SIGKILL)
            await consumer.ended()
    assert epochs[0] < epochs[1]


async def test_an_owner_paused_beyond_its_lease_is_fenced(services: Services, topic: str) -> None:
    await publish(services, topic, *"abcde")
    async with instance(services) as zombie, instance(services) as other:
        async with consuming(zombie.stub, topic, permits=9) as late:
            old = {each.position.entry_id: each for each in await late.received(5)}
            zombie.tell(signal.SIGSTOP)
            asked = [await late.ask_acknowledge(old[3]), await late.ask_acknowledge(old[0])]
            await late.permit(9)
            current = await takes_over(other.stub, topic)
            await current.permit(9)
            new = {each.position.entry_id: each for each in await current.received(5)}
            assert not (await current.acknowledge(new[0], new[1])).outcomes
            zombie.tell(signal.SIGCONT)
            await ended_with(late, ABORTED, "FENCED")
            assert not any(late.has_settled(each) for each in asked)
            assert await beyond(services, topic) == (1, [])
            with refused(IN_USE, "NOT_OWNER") as details:
                await connect(zombie.stub, subscribe(topic))
            assert details == {"owner": other.address}
        assert not (await current.acknowledge(new[2], new[3], new[4])).outcomes
        assert await beyond(services, topic) == (4, [])
        assert await current.still() == 0
        await current.crash()


async def test_a_pause_shorter_than_the_lease_changes_nothing(
    services: Services, topic: str
) -> None:
    await publish(services, topic, *"abc")
    async with (
        instance(services, **LONG_LEASE) as one,
        consuming(one.stub, topic, permits=9) as consumer,
    ):
        some = await consumer.received(3)
        one.tell(signal.SIGSTOP)
        request = await consumer.ask_acknowledge(*some)
        one.tell(signal.SIGCONT)
        assert not (await consumer.settled(request)).outcomes
        assert await beyond(services, topic) == (2, [])


async def test_a_stopping_owner_lets_consumers_settle_and_releases_the_lease(
    services: Services, topic: str
) -> None:
    await publish(services, topic, *"abcd")
    async with instance(services, **LONG_LEASE) as one, instance(services, **LONG_LEASE) as other:
        async with consuming(one.stub, topic, permits=9) as consumer:
            some = await consumer.received(4)
            one.tell(signal.SIGTERM)
            await consumer.draining.wait()
            with refused(UNAVAILABLE, "DRAINING"):
                await connect(one.stub, subscribe(topic))
            request = await consumer.ask_acknowledge(*some[:3])
            await consumer.leave()
            assert not (await consumer.settled(request)).outcomes
        assert await one.process.wait() == 0
        assert await owner(services, topic) == ""
        async with consuming(other.stub, topic, permits=9) as again:
            assert again.epoch > consumer.epoch
            (last,) = await again.received(1)
            assert (last.position, last.attempts) == (some[3].position, 0)


async def test_consumers_cut_off_by_a_drain_have_no_failed_messages(
    services: Services, topic: str
) -> None:
    await publish(services, topic, *"abcd")
    hurry = {**LONG_LEASE, "SEQGATE_DISPATCHER_DRAIN_TIMEOUT_S": "0.05"}
    async with instance(services, **hurry) as one, instance(services, **LONG_LEASE) as other:
        async with consuming(one.stub, topic, permits=9) as consumer:
            some = await consumer.received(4)
            await consumer.acknowledge(some[0])
            one.tell(signal.SIGTERM)
            await ended_with(consumer, UNAVAILABLE, "DRAINING")
            assert consumer.draining.is_set()
        assert await one.process.wait() == 0
        async with consuming(other.stub, topic, permits=9) as again:
            assert [each.attempts for each in await again.received(3)] == [0, 0, 0]


async def test_an_idle_subscription_is_released(services: Services, topic: str) -> None:
    await publish(services, topic, "k")
    idle = {**LONG_LEASE, "SEQGATE_DISPATCHER_IDLE_TIMEOUT_S": "0.05"}

    async def let_go() -> bool:
        return not await owner(services, topic)

    async with instance(services, **idle) as one, instance(services, **LONG_LEASE) as other:
        async with consuming(one.stub, topic, permits=1) as consumer:
            await consumer.received(1)
            began_s = time.monotonic()

            async def over_a_second() -> bool:  # the check for idleness has that interval
                return time.monotonic() - began_s > 1.2

            await eventually(over_a_second)
            assert await owner(services, topic) == one.address
        await eventually(let_go)
        async with consuming(other.stub, topic, permits=1) as consumer:
            assert (await consumer.received(1))[0].attempts == 1
        # `other` has a longer idle time, and keeps the subscription.
        with refused(IN_USE, "NOT_OWNER"):
            await one.stub.Report(pb.ReportRequest(topic=topic, subscription="s"))


async def test_a_crashed_owners_lease_expires(services: Services, topic: str) -> None:
    await publish(services, topic, "k")
    async with instance(services) as one:
        async with consuming(one.stub, topic):
            assert await owner(services, topic) == one.address
            one.tell(signal.SIGKILL)

        async def nobodys() -> bool:
            return not await owner(services, topic)

        await eventually(nobodys)


async def test_consumers_follow_a_subscription_through_a_rolling_restart(
    services: Services, topic: str
) -> None:
    """Each instance in turn drains, and another one continues without duplicates."""
    await publish(services, topic, *"abcabcabc")
    seen: list[int] = []
    for _ in range(3):
        async with (
            instance(services, **LONG_LEASE) as one,
            consuming(one.stub, topic, permits=3) as consumer,
        ):
            some = await consumer.received(3)
            seen += numbers(some)
            await consumer.acknowledge(*some)
            one.tell(signal.SIGTERM)
            await consumer.draining.wait()
            await consumer.leave()
            assert await one.process.wait() == 0
    assert sorted(seen) == [*range(9)]
    assert await beyond(services, topic) == (8, [])
