"""Every value of an attribute of these metrics is provoked by a scenario. A new value needs a
scenario here."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from seqgate.services.cursors import CursorsUnavailable
from seqgate.services.dedup import snapshots as module
from seqgate.services.dedup.adapters.policy_file import PolicyFile
from seqgate.services.dedup.metrics import DedupMetrics
from seqgate.services.dedup.policies import DurablePolicies
from seqgate.services.dedup.service import Deduplication
from seqgate.services.dedup.snapshots import Snapshots, SnapshotTooLarge
from seqgate.services.deduplication import (
    NEVER,
    Applied,
    Behind,
    Changed,
    Claim,
    Confirmation,
    Disabled,
    Judged,
    ProducerClaims,
    ProducerVerdicts,
    Verdict,
    Writer,
)
from seqgate.services.dispatcher.core.effects import (
    FILTER_FAILED,
    UNJUDGED,
    AfterDeadLetter,
    DeadLetter,
    Judge,
    Record,
    SubscriptionType,
)
from seqgate.services.dispatcher.metrics import DispatcherMetrics
from seqgate.services.errors import StoreFull, StoreUnavailable
from seqgate.services.ledger.adapters.memory import MemoryLedgerStore
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.core import writer
from seqgate.services.ledger.core.entry import unit_of
from seqgate.services.ledger.core.receipt import Status
from seqgate.services.ledger.service import Ledger, Opened, Opening
from seqgate.services.runtime.cursors import MemoryCursors
from seqgate.telemetry import metrics as told
from seqgate.telemetry.metrics import Metric
from seqgate.types import Position, TopicName
from tests.support.deduplicator import FakeDeduplicator
from tests.support.entries import single
from tests.support.waiting import eventually
from tests.unit.test_metrics import Telling
from tests.unit.test_snapshots import Surprised, World
from tests.unit.test_subscription import A, B, C, Stage, filtered, stage

TOPIC = TopicName.parse("public/default/provoked")


@pytest.fixture
async def telling() -> AsyncIterator[Telling]:
    made = Telling()
    yield made
    await made.close()


async def value(telling: Telling, metric: Metric, **attributes: str) -> float:
    """The sum of a metric's values, or of a histogram's counts, with these attributes."""
    points = (await telling.collect()).get(metric.name, {})
    return sum(
        getattr(point, "count", 0) or getattr(point, "value", 0)
        for labels, point in points.items()
        if attributes.items() <= dict(labels).items()
    )


# ---- the ledger


class Scripted(FakeDeduplicator):
    """Gives each scripted answer once, and otherwise the usual one."""

    def __init__(self) -> None:
        super().__init__()
        self.next: list[Any] = []
        self.is_off = False

    async def admit(self, topic: TopicName, *args: Any) -> Judged | Behind | Changed | Disabled:
        usual = await super().admit(topic, *args)
        if self.is_off:
            return Disabled()
        claims = args[-1]
        if claims and self.next:
            answer = self.next.pop(0)
            if isinstance(answer, Verdict):
                ((_, given),) = claims
                return Judged(1, [ProducerVerdicts([answer] * len(given), NEVER, {})])
            assert isinstance(answer, Changed | Behind)
            return answer
        return usual

    async def rollback(
        self, topic: TopicName, writer: Writer, confirmation: Confirmation | None
    ) -> Applied | Behind | Disabled:
        return Disabled() if self.is_off else await super().rollback(topic, writer, confirmation)


class Written:
    """A ledger with metrics, a topic of it, and a producer's stream."""

    def __init__(self, telling: Telling, tasks: asyncio.TaskGroup) -> None:
        self.telling = telling
        self.store = MemoryLedgerStore()
        self.dedup = Scripted()
        self.failures: list[Exception] = []
        self.ledger = Ledger(
            LedgerConfig(auto_create=["*"]),
            self,
            self.dedup,
            MemoryCursors(),
            tasks,
            telling.metrics,
        )
        self.opened: Opened
        self._requests = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def append(self, *args: Any, **named: Any) -> None:
        if self.failures:
            raise self.failures.pop(0)
        await self.store.append(*args, **named)

    async def open(self) -> None:
        self.opened = await self.ledger.open(
            Opening(TOPIC, "p", initial_sequence_id=None, takeover=False, instance=b"")
        )

    async def send(self, sequence_id: int) -> Status:
        session = self.opened.session
        self._requests += 1
        unit = unit_of(session.number, self._requests, [single(sequence_id)], resume=True)
        self.opened.topic.submit(session, [unit])
        async with asyncio.timeout(5):
            news = await session.news()
        assert news is not None
        ((_, receipt),) = news.receipts
        return receipt.status

    async def value(self, metric: Metric, **attributes: str) -> float:
        return await value(self.telling, metric, **attributes)


@asynccontextmanager
async def writing(telling: Telling) -> AsyncIterator[Written]:
    async with asyncio.TaskGroup() as tasks:
        written = Written(telling, tasks)
        yield written
        await written.ledger.finish(1)


async def take_over(it: Written) -> None:
    await it.open()


async def lose_entries(it: Written) -> None:
    await it.open()
    assert await it.send(1) is Status.STORED
    await it.opened.topic.quiet()
    it.dedup.confirmed.clear()
    assert await it.send(2) is Status.STORED


async def change(it: Written) -> None:
    await it.open()
    it.dedup.next = [Changed(0)]
    assert await it.send(1) is Status.STORED


async def do_not_answer(it: Written) -> None:
    await it.open()
    it.dedup.available = False
    sending = asyncio.create_task(it.send(1))

    async def told_() -> bool:
        return await it.value(told.RECOVERIES, cause="dedup_failed") == 1

    await eventually(told_)
    it.dedup.available = True
    await sending


async def switch_on(it: Written) -> None:
    it.dedup.is_off = True
    await it.open()
    assert await it.send(1) is Status.STORED
    it.dedup.is_off = False
    it.dedup.confirmed[TOPIC] = Position(1, 0)
    assert await it.send(2) is Status.STORED


async def fail_to_append(it: Written) -> None:
    await it.open()
    it.failures = [StoreFull("the store has no room")]
    assert await it.send(1) is Status.FAILED


async def lose_a_claim(it: Written) -> None:
    await it.open()
    it.dedup.next = [Verdict.IN_FLIGHT]
    assert await it.send(1) is Status.STORED


CAUSES: dict[str, Callable[[Written], Any]] = {
    "takeover": take_over,
    "behind": lose_entries,
    "changed": change,
    "dedup_failed": do_not_answer,
    "switched_on": switch_on,
    "append_failed": fail_to_append,
    "lost_claim": lose_a_claim,
}


@pytest.mark.parametrize("cause", told.CAUSE.values)
async def test_recoveries_are_counted_by_cause(
    telling: Telling, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BACKOFF_MAX_S", 0.001)
    async with writing(telling) as it:
        await CAUSES[cause](it)

        async def over() -> bool:
            return await it.value(told.RECOVERY_DURATION, cause=cause) == 1

        await eventually(over)
        assert await it.value(told.RECOVERIES, cause=cause) == 1
        others = [each for each in told.CAUSE.values if each not in (cause, "takeover")]
        assert [await it.value(told.RECOVERIES, cause=each) for each in others] == [0] * len(others)
        it.ledger.close(it.opened)


@pytest.mark.parametrize("error", [StoreFull("no room"), StoreUnavailable("it does not answer")])
async def test_failed_publications_are_counted_as_failed(
    telling: Telling, error: Exception
) -> None:
    async with writing(telling) as it:
        await it.open()
        assert await it.send(1) is Status.STORED
        it.failures = [error]
        assert await it.send(2) is Status.FAILED
        assert await it.value(told.RECEIPTS, status="FAILED") == 1
        assert await it.value(told.RECEIPTS, status="STORED") == 1
        assert await it.value(told.APPEND_DURATION, outcome="failed") == 1
        assert await it.value(told.APPEND_DURATION, outcome="stored") == 1
        it.ledger.close(it.opened)


# ---- deduplication


async def test_an_id_claimed_twice_by_one_writer_is_in_flight(telling: Telling) -> None:
    async with asyncio.TaskGroup() as tasks:
        world = World(tasks)
        metrics = DedupMetrics(telling.metrics)
        world.dedup._metrics = metrics
        claims = [ProducerClaims("p", (Claim(7, 7),))]
        for _ in range(2):
            await world.dedup.admit(TOPIC, Writer(1, 1, None), None, claims)
        await world.dedup.admit(TOPIC, Writer(1, 1, None, revision=99), None, claims)
        assert await value(telling, told.VERDICTS, verdict="NEW") == 1
        assert await value(telling, told.VERDICTS, verdict="IN_FLIGHT") == 1
        assert await value(telling, told.DEDUP_CALLS, operation="admit", outcome="changed") == 1
        await world.snapshots.finish(1)


async def test_inactive_producers_are_counted_as_forgotten(telling: Telling) -> None:
    async with asyncio.TaskGroup() as tasks:
        world = World(tasks, producer_inactivity_timeout_minutes=1)
        world.dedup._metrics = DedupMetrics(telling.metrics)
        await world.append(1, "idle")
        world.now_ms += 70_000
        await world.dedup.purge(world.now_ms)
        assert await value(telling, told.FORGOTTEN_PRODUCERS, cause="inactive") == 1
        assert await value(telling, told.FORGOTTEN_PRODUCERS, cause="evicted") == 0
        await world.snapshots.finish(1)


async def test_failed_snapshots_and_unanswered_restores(
    telling: Telling, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.TaskGroup() as tasks:
        world = World(tasks, snapshot_entries=0)
        metrics = DedupMetrics(telling.metrics)
        snapshots = Snapshots(world.store, world.cursors, world.policies, tasks, metrics)
        topic = TopicName.parse("test/snapshots/topic")
        assert await snapshots.take(topic) is None
        await world.append(3)

        async def fails(*_: Any, **__: Any) -> None:
            raise CursorsUnavailable("nobody answers")

        with monkeypatch.context() as patch:
            patch.setattr(module, "SNAPSHOT_BYTES_MAX", 1)
            with pytest.raises(SnapshotTooLarge):
                await snapshots.take(topic)
        with monkeypatch.context() as patch:
            patch.setattr(world.cursors, "get", fails)
            with pytest.raises(CursorsUnavailable):
                await snapshots.take(topic)
            assert await snapshots.restore(topic, Writer(1, 1, Position(1, 9)), None) is None
        assert await snapshots.take(topic) is not None
        for outcome in told.SNAPSHOT_OUTCOME.values:
            assert await value(telling, told.SNAPSHOTS, outcome=outcome) == 1, outcome
            assert await value(telling, told.SNAPSHOT_DURATION, outcome=outcome) == 1, outcome
        assert await value(telling, told.RESTORES, outcome="unavailable") == 1
        await world.snapshots.finish(1)


@pytest.mark.parametrize("work", told.WORK.values)
async def test_unexpected_errors_are_counted_by_task(telling: Telling, work: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        world = World(tasks)
        await world.append(3)
        metrics = DedupMetrics(telling.metrics)
        policies = DurablePolicies(PolicyFile(None), world.cursors, world.store, metrics)
        await policies.effective(TOPIC)
        snapshots = Snapshots(world.store, world.cursors, policies, tasks, metrics)
        dedup = Deduplication(world.store, policies, snapshots, metrics)
        works = {
            "snapshot": lambda: snapshots.by_time_forever(0.001),
            "purge": lambda: dedup.purge_forever(0.001),
            "policies": lambda: policies.reread_forever(0.001),
        }

        async def surprised(*_: Any, **__: Any) -> None:
            raise Surprised

        world.store.now_ms = world.cursors.get = surprised  # type: ignore[assignment]
        working = tasks.create_task(works[work]())

        async def twice() -> bool:
            return await value(telling, told.DEDUP_FAILURES, work=work) > 1

        await eventually(twice)
        working.cancel()
        await asyncio.wait([working])
        assert await value(telling, told.DEDUP_FAILURES) == await value(
            telling, told.DEDUP_FAILURES, work=work
        )


# ---- the dispatcher


def tell(telling: Telling, it: Stage) -> None:
    """Register a subscription with this machine."""
    filtering = SimpleNamespace(tallies=SimpleNamespace(rows=list), lookups={}, outage=None)
    live: Any = SimpleNamespace(
        topic=TOPIC,
        machine=it.sub,
        totals=it.sub.totals,
        stopped=None,
        filtering=filtering,
        cache_bytes=0,
        cache_bytes_max=0,
    )
    DispatcherMetrics(telling.metrics, lambda: it.now_ms + 2_000).begin(live)


def ready() -> Stage:
    it = stage(permits=0)
    it.publish(A)
    return it


def draining() -> Stage:
    it = stage()
    it.publish(B)
    it.connect(2, 100)
    it.publish(B)
    return it


def in_flight_limit() -> Stage:
    it = stage(max_in_flight_per_key=1)
    it.publish(A, A)
    return it


def retry_delay() -> Stage:
    it = stage()
    it.publish(A)
    it.negative_acknowledge(1, 0, delay_ms=100)
    return it


def retry() -> Stage:
    it = stage()
    it.publish(A, A)
    it.negative_acknowledge(1, 0)
    return it


def recording() -> Stage:
    it = stage(redeliveries_max=3)
    it.holds = (Record,)
    it.publish(A, A)
    it.negative_acknowledge(1, 0)
    return it


def delayed() -> Stage:
    it = stage(delay_holds_key=True)
    it.publish(A, deliver_at_ms=100)
    return it


def dead_lettering() -> Stage:
    it = stage(redeliveries_max=0)
    it.holds = (DeadLetter,)
    it.publish(A, A)
    it.negative_acknowledge(1, 0)
    return it


def held() -> Stage:
    it = stage(redeliveries_max=0, after_dead_letter=AfterDeadLetter.HOLD)
    it.publish(A, A)
    it.negative_acknowledge(1, 0)
    return it


def joining() -> Stage:
    it = stage(classic_join=True)
    it.publish(A)
    it.connect(2, 100)
    it.publish(B)
    return it


def subscription_limit() -> Stage:
    it = stage(unacked_max=1)
    it.publish(A, B)
    return it


def returned_limit() -> Stage:
    it = stage(returned_max=1)
    it.publish(C)
    it.negative_acknowledge(1, 0, delay_ms=100)
    it.publish(A)
    return it


def filtering() -> Stage:
    it = filtered()
    it.holds = (Judge,)
    it.publish(A, verdict=UNJUDGED)
    return it


def filter_failed() -> Stage:
    it = filtered()
    it.publish(A, verdict=FILTER_FAILED)
    return it


def rescheduled() -> Stage:
    it = filtered()
    it.publish(A, verdict=100)
    return it


REASONS: dict[str, Callable[[], Stage]] = {
    "READY": ready,
    "DRAINING": draining,
    "IN_FLIGHT_LIMIT": in_flight_limit,
    "RETRY_DELAY": retry_delay,
    "RETRY": retry,
    "RECORDING": recording,
    "DELAYED": delayed,
    "DEAD_LETTERING": dead_lettering,
    "HELD": held,
    "JOINING": joining,
    "SUBSCRIPTION_LIMIT": subscription_limit,
    "RETURNED_LIMIT": returned_limit,
    "FILTERING": filtering,
    "FILTER_FAILED": filter_failed,
    "RESCHEDULED": rescheduled,
}


@pytest.mark.parametrize("reason", told.KEY_REASON.values)
async def test_withheld_keys_are_counted_by_reason(telling: Telling, reason: str) -> None:
    tell(telling, REASONS[reason]())
    assert await value(telling, told.KEYS, reason=reason) == 1
    if reason in told.WITHHELD_REASON.values:
        assert await value(telling, told.WITHHELD_AGE, reason=reason) == 2


def idle() -> Stage:
    return Stage()


def unacked_limit() -> Stage:
    it = stage(unacked_max=1)
    it.publish(A)
    return it


def waiting_for_filters() -> Stage:
    it = filtered(kind=SubscriptionType.SHARED, consumer_parked_max=2)
    it.publish(A, verdict=FILTER_FAILED)
    it.publish(A, verdict=100)
    return it


STATES: dict[str, Callable[[], Stage]] = {
    "delivering": stage,
    "idle": idle,
    "unacked_limit": unacked_limit,
    "waiting_for_filters": waiting_for_filters,
}


@pytest.mark.parametrize("state", told.SUBSCRIPTION_STATE.values)
async def test_subscriptions_are_counted_by_state(telling: Telling, state: str) -> None:
    tell(telling, STATES[state]())
    told_: Sequence[float] = [
        await value(telling, told.SUBSCRIPTIONS, state=each)
        for each in told.SUBSCRIPTION_STATE.values
    ]
    assert told_ == [float(each == state) for each in told.SUBSCRIPTION_STATE.values]
