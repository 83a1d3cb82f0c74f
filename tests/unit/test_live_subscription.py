"""A subscription that this instance owns: services/dispatcher/shell/live.py."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio

from seqgate.services.cursors import CursorsUnavailable
from seqgate.services.dispatcher.adapters.filters import GrpcFilters
from seqgate.services.dispatcher.adapters.memory import MemoryCursors
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.dispatcher.core.effects import FILTER_FAILED, Entry, Options, Persist
from seqgate.services.dispatcher.core.positions import runs_of
from seqgate.services.dispatcher.core.selectors import Placement
from seqgate.services.dispatcher.core.verdicts import WAITS
from seqgate.services.dispatcher.errors import SubscriptionBusy, TooManyConsumers
from seqgate.services.dispatcher.letters.graveyard import default_topic
from seqgate.services.dispatcher.ports import (
    Cursor,
    CursorsRefused,
    Ports,
    SubscriptionNotFound,
)
from seqgate.services.dispatcher.service import Dispatcher
from seqgate.services.dispatcher.shell import work
from seqgate.services.dispatcher.shell.live import Live
from seqgate.services.dispatcher.shell.session import Joining
from seqgate.services.errors import Draining, Fenced, ServiceBusy
from seqgate.services.runtime.tasks import end
from seqgate.types import Position, TopicName
from tests.support.waiting import eventually

TOPIC = TopicName.parse("test/live/topic")
DLQ = default_topic(TOPIC, "s")


class HeldUp(MemoryCursors):
    """Cursors whose answers can be held back."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()

    async def get(self, topic: TopicName, name: str) -> Cursor:
        self.asked.set()
        await self.answers.wait()
        return await super().get(topic, name)


async def test_a_consumer_connecting_while_the_lease_is_lost_is_refused() -> None:
    cursors = HeldUp()
    await cursors.create(TOPIC, "s", None, {})
    unused: Any = None
    async with aio.insecure_channel("127.0.0.1:1") as channel, asyncio.TaskGroup() as tasks:
        filters = GrpcFilters(channel, timeout_s=1)
        ports = Ports(unused, cursors, unused, filters, "me", lambda: 0)
        lease = await cursors.acquire(TOPIC, "s", "me", 60_000)
        live = Live(DispatcherConfig(), TOPIC, "s", lease.epoch, ports, tasks)
        await live.load()
        cursors.answers.clear()
        cursors.asked.clear()
        joining = Joining("c", Options(redeliveries_max=7), Placement.AUTO_SPLIT, DLQ, (), 1, 0)
        connecting = asyncio.create_task(live.subscribe(joining))
        await cursors.asked.wait()
        live.stop(Fenced("the lease on the subscription was lost"))
        cursors.answers.set()
        with pytest.raises(Fenced):
            await connecting
        assert not live.sessions
        await live.close(1)


class Refusing(MemoryCursors):
    """Cursors that refuse to persist, and count the attempts."""

    persists = 0

    async def persist(
        self, topic: TopicName, name: str, what: Persist, epoch: int
    ) -> Position | None:
        self.persists += 1
        raise CursorsRefused("refused", because="INVALID_POSITION")


async def test_a_permanently_refused_persist_makes_the_subscription_reopen() -> None:
    cursors = Refusing()
    await cursors.create(TOPIC, "s", None, {})
    unused: Any = None
    async with aio.insecure_channel("127.0.0.1:1") as channel, asyncio.TaskGroup() as tasks:
        filters = GrpcFilters(channel, timeout_s=1)
        ports = Ports(unused, cursors, unused, filters, "me", lambda: 0)
        dispatcher = Dispatcher(DispatcherConfig(), ports, tasks)
        live = await dispatcher.live(TOPIC, "s")
        live._performing.apply([Persist(1, runs_of([Position(1, 0)]), (), ())])
        await eventually(lambda: live.stopped is not None)
        assert isinstance(live.stopped, CursorsRefused)
        assert cursors.persists == 1
        anew = await dispatcher.live(TOPIC, "s")
        assert anew is not live
        assert anew.stopped is None
        assert anew.epoch > live.epoch
        await dispatcher.finish(1)


class Slow(MemoryCursors):
    """Cursors that let other tasks run in every call."""

    async def acquire(self, *args: Any) -> Any:
        lease = await super().acquire(*args)
        await asyncio.sleep(0)
        return lease


@contextlib.asynccontextmanager
async def dispatching(cursors: MemoryCursors, **settings: Any) -> AsyncIterator[Dispatcher]:
    unused: Any = None
    async with aio.insecure_channel("127.0.0.1:1") as channel, asyncio.TaskGroup() as tasks:
        filters = GrpcFilters(channel, timeout_s=1)
        ports = Ports(unused, cursors, unused, filters, "me", lambda: 0)
        dispatcher = Dispatcher(DispatcherConfig(**settings), ports, tasks)
        yield dispatcher
        await dispatcher.finish(1)


async def test_open_subscriptions_are_bounded() -> None:
    cursors = Slow()
    for name in "abc":
        await cursors.create(TOPIC, name, None, {})
    async with dispatching(cursors, subscriptions_max=2) as dispatcher:
        taken = await asyncio.gather(
            *(dispatcher.live(TOPIC, name) for name in "abc"), return_exceptions=True
        )
        assert sum(isinstance(each, Live) for each in taken) == 2
        assert sum(isinstance(each, TooManyConsumers) for each in taken) == 1


async def test_a_lost_subscription_frees_its_slot() -> None:
    cursors = MemoryCursors()
    await cursors.create(TOPIC, "a", None, {})
    async with dispatching(cursors, subscriptions_max=1) as dispatcher:
        lost = await dispatcher.live(TOPIC, "a")
        lost.stop(Fenced("the lease on the subscription was lost"))
        assert await dispatcher.live(TOPIC, "a") is not lost


async def test_a_lease_runs_from_its_request_despite_a_late_answer() -> None:
    cursors = MemoryCursors()
    await cursors.create(TOPIC, "s", None, {})
    loop = asyncio.get_running_loop()
    unused: Any = None

    async def fails(*_: Any) -> None:
        raise CursorsUnavailable("nobody answers")

    cursors.renew = fails  # type: ignore[method-assign,assignment]
    async with aio.insecure_channel("127.0.0.1:1") as channel, asyncio.TaskGroup() as tasks:
        filters = GrpcFilters(channel, timeout_s=1)
        ports = Ports(unused, cursors, unused, filters, "me", lambda: 0)
        leased = await cursors.acquire(TOPIC, "s", "me", 60_000)
        config = DispatcherConfig(lease_s=3_600)
        late_s = loop.time() - 3_600
        live = Live(config, TOPIC, "s", leased.epoch, ports, tasks, leased_s=late_s)
        await eventually(lambda: live.stopped is not None)
        assert isinstance(live.stopped, Fenced)
        await live.close(1)


async def test_a_subscription_cut_off_while_closing_stops_renewing_its_lease() -> None:
    cursors = MemoryCursors()
    await cursors.create(TOPIC, "s", None, {})
    async with dispatching(cursors) as dispatcher:
        live = await dispatcher.live(TOPIC, "s")
        releasing = asyncio.Event()

        async def hangs(*_: Any) -> None:
            releasing.set()
            await asyncio.Event().wait()

        cursors.release = hangs  # type: ignore[method-assign,assignment]
        closing = asyncio.create_task(live.close(60))
        await releasing.wait()
        await end(closing)
        assert live.stopped is not None


async def test_a_drained_dispatcher_keeps_no_late_subscription() -> None:
    cursors = HeldUp()
    await cursors.create(TOPIC, "s", None, {})
    async with dispatching(cursors) as dispatcher:
        cursors.answers.clear()
        cursors.asked.clear()
        taking = asyncio.create_task(dispatcher.live(TOPIC, "s"))
        await cursors.asked.wait()
        await dispatcher.finish(1)
        cursors.answers.set()
        with pytest.raises(Draining):
            await taking


class SlowToDelete(MemoryCursors):
    """Cursors whose deletion can be held back."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def delete(self, topic: TopicName, name: str) -> None:
        self.asked.set()
        await self.goes_on.wait()
        await super().delete(topic, name)


async def test_no_consumer_connects_to_a_subscription_under_deletion() -> None:
    cursors = SlowToDelete()
    await cursors.create(TOPIC, "s", None, {})
    joining = Joining("c", Options(), Placement.AUTO_SPLIT, DLQ, (), 1, 0)
    async with dispatching(cursors) as dispatcher:
        live = await dispatcher.live(TOPIC, "s")
        deleting = asyncio.create_task(dispatcher.delete(TOPIC, "s", force=False))
        await cursors.asked.wait()
        connecting = asyncio.create_task(live.subscribe(joining))
        for _ in range(5):  # as far as it gets
            await asyncio.sleep(0)
        assert not live.sessions
        cursors.goes_on.set()
        await deleting
        with pytest.raises(SubscriptionNotFound):
            await connecting


async def test_a_subscription_lost_meanwhile_is_not_deleted() -> None:
    cursors = MemoryCursors()
    await cursors.create(TOPIC, "s", None, {})
    async with dispatching(cursors) as dispatcher:
        live = await dispatcher.live(TOPIC, "s")
        async with live.changing:
            deleting = asyncio.create_task(dispatcher.delete(TOPIC, "s", force=False))
            await asyncio.sleep(0)
            live.stop(Fenced("the lease on the subscription was lost"))
        with pytest.raises(Fenced):
            await deleting
        await cursors.get(TOPIC, "s")  # SubscriptionNotFound if it were deleted


async def test_consumers_whose_streams_end_together_leave_together() -> None:
    cursors = MemoryCursors()
    await cursors.create(TOPIC, "s", None, {})
    async with dispatching(cursors) as dispatcher:
        live = await dispatcher.live(TOPIC, "s")
        options = Options(redeliveries_max=7)
        sessions = [
            await live.subscribe(
                Joining(name, options, Placement.CONSISTENT_HASHING, DLQ, (), 1, 0)
            )
            for name in ("a", "b", "c", "d")
        ]
        before = live.assignment_revision
        for session in sessions[1:]:
            live.leave(session)
        assert set(live.sessions) == {sessions[0].consumer}
        await eventually(lambda: set(live.machine.consumers) == {sessions[0].consumer})
        assert live.assignment_revision == before + 1, "the one that is left is told once"
        live.leave(sessions[0])
        joined = await live.subscribe(sessions[0].joining)
        assert set(live.machine.consumers) == {joined.consumer}, "who left before is not there"


def joining_as(name: str) -> Joining:
    options = Options(redeliveries_max=7)
    return Joining(name, options, Placement.CONSISTENT_HASHING, DLQ, (), 1, 0)


async def test_consumers_that_connect_together_cause_one_assignment_each() -> None:
    cursors = MemoryCursors()
    await cursors.create(TOPIC, "s", None, {})
    async with dispatching(cursors) as dispatcher:
        live = await dispatcher.live(TOPIC, "s")
        names = [f"c{each}" for each in range(50)]
        sessions = await asyncio.gather(*(live.subscribe(joining_as(each)) for each in names))
        assert [each.joining.name for each in sessions] == names
        assert set(live.machine.consumers) == set(live.sessions) == {s.consumer for s in sessions}
        assert live.assignment_revision == len(names)


async def test_consumers_that_connect_together_are_refused_individually() -> None:
    cursors = MemoryCursors()
    await cursors.create(TOPIC, "s", None, {})
    other = joining_as("other")._replace(options=Options(redeliveries_max=8))
    async with dispatching(cursors) as dispatcher:
        live = await dispatcher.live(TOPIC, "s")
        first, refused, last = await asyncio.gather(
            *(live.subscribe(each) for each in (joining_as("a"), other, joining_as("b"))),
            return_exceptions=True,
        )
        assert isinstance(refused, SubscriptionBusy)
        assert {*live.sessions.values()} == {first, last}


async def test_a_consumer_cancelled_during_a_joint_connect_is_removed() -> None:
    cursors = MemoryCursors()
    await cursors.create(TOPIC, "s", None, {})
    async with dispatching(cursors) as dispatcher:
        live = await dispatcher.live(TOPIC, "s")
        async with live.changing:
            tasks = [asyncio.create_task(live.subscribe(joining_as(each))) for each in "abc"]
            await asyncio.sleep(0)
        while not live.sessions:
            await asyncio.sleep(0)
        assert len(live.sessions) == len(tasks)
        assert not tasks[2].done()
        tasks[2].cancel()
        await asyncio.wait(tasks)
        assert tasks[2].cancelled()
        stay = {tasks[0].result().consumer, tasks[1].result().consumer}
        await eventually(lambda: set(live.machine.consumers) == set(live.sessions) == stay)


# ---- waiting times of entries


async def test_the_waiting_time_of_entries_is_durable_across_owners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.cursor.waiting.KEEP_S", 0.001)
    cursors = MemoryCursors()
    await cursors.create(TOPIC, "s", None, {})

    async def written() -> str:
        return (await cursors.get(TOPIC, "s")).properties.get(WAITS, "")

    async with dispatching(cursors) as dispatcher:
        live = await dispatcher.live(TOPIC, "s")
        entry = Entry(Position(1, 0), b"key", verdict=FILTER_FAILED)
        live._performing.apply(live.machine.read([entry], 5))

        async def is_written() -> bool:
            return await written() == "1:0@5"

        await eventually(is_written)
        assert (await cursors.get(TOPIC, "s")).own == {}, "nobody else sees it"
    async with dispatching(cursors) as dispatcher:
        live = await dispatcher.live(TOPIC, "s")
        live._performing.apply(live.machine.read([entry], 7))
        assert live.machine.waits == {Position(1, 0): 5}
        live._performing.apply(live.machine.refilter(7, is_filtered=False))

        async def is_over() -> bool:
            return not await written()

        await eventually(is_over)


async def test_a_released_subscription_persists_the_waiting_time_of_entries() -> None:
    """Also if it was owned for less than the interval of periodic writes."""
    cursors = MemoryCursors()
    await cursors.create(TOPIC, "s", None, {})
    async with dispatching(cursors) as dispatcher:
        live = await dispatcher.live(TOPIC, "s")
        entry = Entry(Position(1, 0), b"key", verdict=FILTER_FAILED)
        live._performing.apply(live.machine.read([entry], 5))
    assert (await cursors.get(TOPIC, "s")).properties == {WAITS: "1:0@5"}


async def test_a_failed_write_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seqgate.services.dispatcher.cursor.waiting.KEEP_S", 0.001)
    cursors = MemoryCursors()
    await cursors.create(TOPIC, "s", None, {})
    write, tries = cursors.set_properties, 0

    async def fails(*args: Any, **named: Any) -> Cursor:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise CursorsUnavailable("away", retry_after_s=0.1)
        return await write(*args, **named)

    cursors.set_properties = fails  # type: ignore[method-assign]
    async with dispatching(cursors) as dispatcher:
        live = await dispatcher.live(TOPIC, "s")
        entry = Entry(Position(1, 0), b"key", verdict=FILTER_FAILED)
        live._performing.apply(live.machine.read([entry], 5))
        await eventually(lambda: tries == 3)
        assert live.stopped is None


async def test_abandoned_changes_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(work, "WAITING_CHANGES_MAX", 2)
    cursors = HeldUp()
    await cursors.create(TOPIC, "s", None, {})
    async with dispatching(cursors) as dispatcher:

        async def change(value: str) -> None:
            await dispatcher.set_properties(TOPIC, "s", {f"p{value}": value}, [], caller="")

        live = await dispatcher.live(TOPIC, "s")
        cursors.answers.clear()
        for each in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await change(str(each))
        with pytest.raises(ServiceBusy):
            await asyncio.wait_for(change("2"), 1)
        cursors.answers.set()
        await eventually(lambda: live.changes == 0)
        await change("3")
        assert (await cursors.get(TOPIC, "s")).own == {"p0": "0", "p1": "1", "p3": "3"}
