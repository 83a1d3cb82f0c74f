"""The times of snapshots, and that a failure changes nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from seqgate.services.cursors import Cursor, CursorConflict, CursorsUnavailable
from seqgate.services.dedup import metrics as survey_module
from seqgate.services.dedup import snapshots as module
from seqgate.services.dedup.adapters.memory import MemoryStateStore
from seqgate.services.dedup.core.policy import EffectivePolicy, Source, Sourced
from seqgate.services.dedup.core.snapshot import decode
from seqgate.services.dedup.core.topic import Persisted, TopicState
from seqgate.services.dedup.metrics import DedupMetrics, Seen, Survey
from seqgate.services.dedup.service import Deduplication
from seqgate.services.dedup.snapshots import Snapshots, SnapshotTooLarge, Taken
from seqgate.services.deduplication import Behind, Confirmation, ProducerEntries, Writer
from seqgate.services.runtime.cursors import MemoryCursors, NoCursors
from seqgate.services.runtime.metrics import OFF
from seqgate.telemetry.metrics import OTHER as ALL_OTHERS
from seqgate.types import DEDUP_CURSOR, Position, TopicName
from tests.support.policies import FixedPolicies
from tests.support.waiting import eventually

TOPIC = TopicName.parse("test/snapshots/topic")


class World:
    """A service over stores in memory, and a writer with its own log."""

    def __init__(self, tasks: asyncio.TaskGroup, **policy: Any) -> None:
        self.now_ms = 1_000_000
        self.store = MemoryStateStore(lambda: self.now_ms)
        self.cursors = MemoryCursors()
        values = {"snapshot_entries": 10, "snapshot_interval_s": 0} | policy
        self.policies = FixedPolicies(
            EffectivePolicy(
                **{name: Sourced(value, Source.TOPIC) for name, value in values.items()}
            )
        )
        self.snapshots, self.dedup = self.replica(tasks)
        self.tail: Position | None = None

    def replica(self, tasks: asyncio.TaskGroup) -> tuple[Snapshots, Deduplication]:
        """Another replica of the service."""
        snapshots = Snapshots(self.store, self.cursors, self.policies, tasks)
        return snapshots, Deduplication(self.store, self.policies, snapshots)

    async def append(self, count: int, producer: str = "p", *, remaining: int = 0) -> None:
        """Append the next entries of ledger 1, each confirmed alone."""
        for _ in range(count):
            after = self.tail
            index = 0 if after is None else after.entry_id + 1
            self.tail = Position(1, index)
            entries = ProducerEntries(producer, (index,), self.now_ms)
            confirmation = Confirmation(after, self.tail, (entries,), 1, remaining)
            await self.dedup.confirm(TOPIC, Writer(1, 1, self.tail), confirmation)

    @property
    def mark(self) -> Position | None:
        cursor = self.cursors.cursors.get((TOPIC, DEDUP_CURSOR))
        return None if cursor is None else cursor.mark_delete

    @property
    def kept(self) -> dict[str, int]:
        """The ids in the snapshot."""
        cursor = self.cursors.cursors[TOPIC, DEDUP_CURSOR]
        snapshot = decode(cursor.mark_delete_properties, now_ms=0)
        return {each.producer: each.highest for each in snapshot.producers}

    async def marked(self, entry_id: int) -> None:
        """Wait for a snapshot at an entry."""
        await eventually(lambda: self.mark == (1, entry_id), f"a snapshot at {entry_id}")


Make = Callable[..., World]


@pytest_asyncio.fixture
async def make() -> AsyncIterator[Make]:
    made: list[World] = []
    async with asyncio.TaskGroup() as tasks:

        def maker(**policy: Any) -> World:
            made.append(World(tasks, **policy))
            made[-1].tasks = tasks  # type: ignore[attr-defined]
            return made[-1]

        yield maker
        for world in made:
            await world.snapshots.finish(1)


@asynccontextmanager
async def looking(world: World) -> AsyncIterator[None]:
    """Check the clock continuously."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(world.snapshots.by_time_forever(0.001))
        yield
        task.cancel()


async def test_a_snapshot_is_taken_after_the_configured_number_of_entries(make: Make) -> None:
    world = make()
    await world.append(9)
    assert world.mark is None
    await world.append(1, "q")
    await world.marked(9)
    assert world.kept == {"p": 8, "q": 9}


async def test_the_count_restarts_with_each_snapshot_and_survives_a_restart(
    make: Make,
) -> None:
    world = make()
    await world.append(10)
    await world.marked(9)
    await world.append(9)
    assert world.mark == (1, 9)
    world.snapshots, world.dedup = world.replica(world.tasks)  # type: ignore[attr-defined]
    await world.append(1)
    await world.marked(19)


async def test_a_replay_is_followed_by_one_snapshot(make: Make) -> None:
    world = make()
    await world.append(50, remaining=1)
    assert world.mark is None
    await world.append(1)
    await world.marked(50)


async def test_snapshots_are_taken_by_time_when_the_state_changed(make: Make) -> None:
    world = make(snapshot_entries=0, snapshot_interval_s=60)
    await world.append(3)
    async with looking(world):
        await world.marked(2)
        revision = world.cursors.cursors[TOPIC, DEDUP_CURSOR].revision
        await world.append(1)
        world.now_ms += 59_000
        assert world.mark == (1, 2)
        world.now_ms += 1_000
        await world.marked(3)
        world.now_ms += 600_000
    assert world.cursors.cursors[TOPIC, DEDUP_CURSOR].revision == revision + 1


async def test_a_clock_set_back_does_not_delay_a_snapshot(make: Make) -> None:
    world = make(snapshot_entries=0, snapshot_interval_s=60)
    await world.append(1)
    async with looking(world):
        await world.marked(0)
        world.now_ms -= 500_000
        await world.append(1)
        await world.marked(1)


async def test_interval_0_disables_snapshots_by_time(make: Make) -> None:
    world = make(snapshot_entries=0)
    await world.append(3)
    async with looking(world):
        for _ in range(20):
            await asyncio.sleep(0.001)
    assert world.mark is None


async def test_a_stopping_process_takes_final_snapshots(make: Make) -> None:
    world = make()
    await world.append(3)
    await world.snapshots.finish(1)
    assert world.mark == (1, 2)


async def test_forgotten_producers_leave_the_snapshot_too(make: Make) -> None:
    world = make(producer_inactivity_timeout_minutes=1)
    await world.append(5, "idle")
    world.now_ms += 70_000
    await world.append(5, "p")
    await world.marked(9)
    assert world.kept == {"idle": 4, "p": 9}
    await world.dedup.purge(world.now_ms)
    await eventually(lambda: world.kept == {"p": 9}, "a snapshot without it")
    assert world.mark == (1, 9)


async def test_a_clock_set_forward_forgets_no_producer_early(make: Make) -> None:
    world = make(producer_inactivity_timeout_minutes=1)
    steady_ms = 0
    world.dedup = Deduplication(
        world.store, world.policies, world.snapshots, steady_ms=lambda: steady_ms
    )
    await world.append(1, "idle")

    async def purged() -> None:
        """Wait for several checks of the clock and purges."""
        looks = 0
        now_ms = world.store.now_ms

        async def counted() -> int:
            nonlocal looks
            looks += 1
            return await now_ms()

        world.store.now_ms = counted  # type: ignore[method-assign]
        await eventually(lambda: looks > 5)
        world.store.now_ms = now_ms  # type: ignore[method-assign]

    async with asyncio.TaskGroup() as tasks:
        purging = tasks.create_task(world.dedup.purge_forever(0.001))
        await purged()
        world.now_ms += 7_200_000
        await purged()
        assert "idle" in world.store.states[TOPIC].producers
        for by_ms in (50_000, 10_000):
            world.now_ms += by_ms
            steady_ms += by_ms
            await purged()
        assert "idle" in world.store.states[TOPIC].producers
        world.now_ms += 1_000
        steady_ms += 1_000
        await eventually(lambda: "idle" not in world.store.states[TOPIC].producers)
        purging.cancel()


async def test_a_failed_snapshot_keeps_the_previous_and_allows_the_next(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAILURE_REST_S", 0.001)
    world = make()
    await world.append(10)
    await world.marked(9)
    world.cursors.available = False
    await world.append(15)
    await eventually(lambda: world.snapshots.error(TOPIC), "a failure that is shown")
    assert world.mark == (1, 9)
    world.cursors.available = True
    await world.marked(24)
    await eventually(lambda: not world.snapshots.error(TOPIC), "the failure is over")


async def test_a_requested_snapshot_raises_when_it_fails(make: Make) -> None:
    world = make()
    await world.append(1)
    world.cursors.available = False
    with pytest.raises(CursorsUnavailable):
        await world.snapshots.take(TOPIC)


async def test_a_topic_takes_one_snapshot_at_a_time(make: Make) -> None:
    world = make()
    await world.append(1)
    under_way = most = 0
    attach = world.cursors.mark_delete

    async def counted(*arguments: Any, **named: Any) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        await attach(*arguments, **named)
        under_way -= 1

    world.cursors.mark_delete = counted  # type: ignore[method-assign]
    await asyncio.gather(*(world.snapshots.take(TOPIC) for _ in range(5)))
    assert most == 1


async def test_a_slow_replica_never_replaces_a_newer_snapshot(make: Make) -> None:
    world = make()
    await world.append(5)
    other, _ = world.replica(world.tasks)  # type: ignore[attr-defined]
    freeze = world.store.freeze
    once = [True]

    async def slow(topic: TopicName) -> Any:
        frozen = await freeze(topic)
        if once and world.mark is not None:
            once.clear()
            await world.append(1, "q")
            assert await world.snapshots.take(topic) == Taken(Position(1, 6), 2)
        return frozen

    await other.take(TOPIC)
    await world.append(1)
    world.store.freeze = slow  # type: ignore[method-assign]
    assert await other.take(TOPIC) == Taken(Position(1, 6), 2)
    assert world.mark == (1, 6)
    assert world.kept == {"p": 5, "q": 6}


async def test_a_state_that_went_back_does_not_replace_the_snapshot(make: Make) -> None:
    world = make()
    await world.append(10)
    await world.marked(9)
    world.store.states.clear()
    world.tail = None
    await world.append(3)
    assert await world.snapshots.take(TOPIC) == Taken(Position(1, 9), 1)
    assert world.mark == (1, 9)


async def test_a_state_too_large_is_refused_by_name(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SNAPSHOT_BYTES_MAX", 200)
    world = make()
    await world.append(1)
    await world.snapshots.take(TOPIC)
    await world.append(1, "q" * 200)
    with pytest.raises(SnapshotTooLarge):
        await world.snapshots.take(TOPIC)
    assert world.mark == (1, 0)


async def test_no_cursor_is_created_for_a_state_that_does_not_fit(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SNAPSHOT_BYTES_MAX", 100)
    world = make()
    await world.append(1, "q" * 200)
    for let_go in (False, True):
        with suppress(SnapshotTooLarge):
            assert await world.snapshots.take(TOPIC, let_go=let_go) is None
        assert not world.cursors.cursors
        assert world.snapshots.error(TOPIC) == "state too large for a snapshot (limit 100 bytes)"


async def test_a_cursor_is_created_at_its_first_snapshot(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies before it attaches properties leaves no cursor that limits trims."""
    world = make()
    await world.append(5)

    async def dies(*arguments: Any, **named: Any) -> None:
        raise CursorsUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(world.cursors, "mark_delete", dies)
        with pytest.raises(CursorsUnavailable):
            await world.snapshots.take(TOPIC)
    assert world.mark == (1, 4)
    assert await forgotten(world) == Behind(None)
    world.store.states.clear()
    world.tail = None
    await world.append(7)
    assert await world.snapshots.take(TOPIC) == Taken(Position(1, 6), 1)


async def test_a_snapshot_outgrown_by_its_state_is_dropped_before_a_trim(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SNAPSHOT_BYTES_MAX", 200)
    world = make()
    await world.append(1)
    await world.snapshots.take(TOPIC)
    await world.append(1, "q" * 200)
    assert await world.snapshots.take(TOPIC, let_go=True) is None
    assert world.mark == (1, 1)
    summary = await world.store.summary(TOPIC)
    assert summary is not None
    assert (summary.unsaved, summary.saved.taken_ms) == (2, 0)
    assert world.snapshots.error(TOPIC)
    # There is none: neither for another request, nor for a lost state.
    assert await world.snapshots.take(TOPIC, let_go=True) is None
    assert await forgotten(world) == Behind(None)
    # Once it fits again, a snapshot is attached.
    monkeypatch.setattr(module, "SNAPSHOT_BYTES_MAX", 10_000)
    world.store.states.clear()
    world.tail = None
    await world.append(3)
    assert await world.snapshots.take(TOPIC) == Taken(Position(1, 2), 1)
    assert not world.snapshots.error(TOPIC)


async def test_topics_without_state_or_deduplication_have_no_snapshot(make: Make) -> None:
    world = make()
    assert await world.snapshots.take(TOPIC) is None
    await world.dedup.rollback(TOPIC, Writer(1, 1, None), None, [])
    assert await world.snapshots.take(TOPIC) is None
    assert not world.cursors.cursors
    await world.append(1)
    policy = world.policies.policy
    world.policies.policy = replace(policy, enabled=Sourced(value=False, source=Source.TOPIC))
    assert await world.snapshots.take(TOPIC) is None
    assert not world.cursors.cursors


async def test_without_a_cursor_service_there_are_no_snapshots(make: Make) -> None:
    world = make()
    world.snapshots = Snapshots(
        world.store,
        NoCursors(),
        world.policies,
        world.tasks,  # type: ignore[attr-defined]
    )
    await world.append(1)
    assert await world.snapshots.take(TOPIC) is None
    writer = Writer(1, 1, world.tail)
    assert await world.snapshots.restore(TOPIC, writer, None) is None


# ---- recovery


async def forgotten(world: World) -> Behind:
    """The answer to a writer after Redis lost everything."""
    world.store.states.clear()
    outcome = await world.dedup.rollback(TOPIC, Writer(1, 2, world.tail), None, [])
    assert isinstance(outcome, Behind)
    return outcome


async def test_lost_state_is_restored_from_the_snapshot(make: Make) -> None:
    world = make()
    await world.append(10)
    await world.marked(9)
    await world.append(3)
    assert await forgotten(world) == Behind(Position(1, 9))
    assert world.store.states[TOPIC].frozen().producers == [Persisted("p", 9, None, 1_000_000)]


async def test_an_older_state_is_replaced_and_a_newer_one_kept(make: Make) -> None:
    world = make()
    await world.append(10)
    await world.marked(9)
    await world.append(3)
    writer = Writer(1, 2, world.tail)
    for at, expected in ((5, 9), (9, 9), (11, 11)):
        state, _ = TopicState.loaded_by(
            None, 1, Position(1, at), [], replacing=False, taken_ms=None
        )
        world.store.states[TOPIC] = state
        outcome = await world.dedup.rollback(TOPIC, writer, None, [])
        assert outcome == Behind(Position(1, expected))


async def damaged(world: World, **changes: Any) -> Behind:
    """The answer to a writer after the cursor was changed, and Redis lost everything."""
    await world.append(3)
    await world.snapshots.take(TOPIC)
    key = (TOPIC, DEDUP_CURSOR)
    world.cursors.cursors[key] = world.cursors.cursors[key]._replace(**changes)
    return await forgotten(world)


@pytest.mark.parametrize(
    "changes",
    [
        {"mark_delete_properties": {}},  # the cursor was reset
        {"mark_delete_properties": {"p": "what?"}},
        {"mark_delete": Position(1, 1)},  # or moved, and kept its properties
        {"mark_delete": Position(9, 9)},  # or it belongs to a lost log
        {"mark_delete": None},
    ],
)
async def test_a_manually_changed_cursor_is_no_snapshot(
    make: Make, changes: dict[str, Any]
) -> None:
    assert await damaged(make(), **changes) == Behind(None)


async def test_a_snapshot_of_another_incarnation_is_not_used(make: Make) -> None:
    world = make()
    await world.append(3)
    await world.snapshots.take(TOPIC)
    world.store.states.clear()
    outcome = await world.dedup.rollback(TOPIC, Writer(2, 5, Position(5, 0)), None, [])
    assert outcome == Behind(None)


async def test_without_an_answer_from_the_cursor_service_everything_is_replayed(make: Make) -> None:
    world = make()
    await world.append(3)
    await world.snapshots.take(TOPIC)
    world.cursors.available = False
    assert await forgotten(world) == Behind(None)


async def test_a_snapshot_left_by_pulsar_is_used(make: Make) -> None:
    world = make()
    world.cursors.cursors[TOPIC, DEDUP_CURSOR] = Cursor(
        DEDUP_CURSOR, Position(1, 4), {"p": "4"}, {}, 1
    )
    await world.append(9)
    assert await forgotten(world) == Behind(Position(1, 4))


async def test_a_snapshot_of_a_newer_incarnation_is_not_forgotten(make: Make) -> None:
    world = make()
    await world.append(3)
    await world.snapshots.take(TOPIC)
    await world.snapshots.forget(TOPIC, 0)
    assert world.mark == (1, 2)
    await world.snapshots.forget(TOPIC, 1)
    assert world.mark is None


async def test_a_loaded_state_is_limited_by_policy_to_the_most_recent_producers(
    make: Make,
) -> None:
    world = make(max_producers=2)
    producers = [
        Persisted(name, 1, None, active) for name, active in zip("abcd", (3, 9, 1, 7), strict=True)
    ]
    outcome = await world.dedup.load(TOPIC, 1, Position(1, 5), producers, replacing=False)
    assert outcome == (True, (1, 5), 2)
    await world.marked(5)
    assert world.kept == {"b": 1, "d": 1}
    again = await world.dedup.load(TOPIC, 1, Position(1, 5), [], replacing=False)
    assert again == (False, (1, 5), 0)


OTHER = TopicName.parse("test/snapshots/unreadable")


class Unreadable(FixedPolicies):
    """Policies of which one topic's cannot be read."""

    async def effective(self, topic: TopicName) -> EffectivePolicy:
        if topic == OTHER:
            raise CursorsUnavailable("the stored policy is unreadable: set it again")
        return await super().effective(topic)


async def with_one_unreadable(world: World) -> None:
    """Make the topic with the unreadable policy the first of two."""
    await world.append(5)
    state = world.store.states.pop(TOPIC)
    await world.store.load(OTHER, 1, Position(1, 0), [], replacing=False, taken_ms=None)
    world.store.states[TOPIC] = state
    policies = Unreadable(world.policies.policy)
    world.snapshots._policies = world.dedup._policies = policies


async def test_an_unreadable_policy_does_not_stop_the_purge_of_other_topics(
    make: Make,
) -> None:
    world = make(producer_inactivity_timeout_minutes=1)
    await with_one_unreadable(world)
    world.now_ms += 70_000
    await world.dedup.purge(world.now_ms)
    assert world.store.states[TOPIC].producers == {}


async def test_an_unreadable_policy_does_not_stop_snapshots_of_other_topics(
    make: Make,
) -> None:
    world = make(snapshot_interval_s=1)
    await with_one_unreadable(world)
    world.now_ms += 2_000
    async with looking(world):
        await world.marked(4)


async def test_a_snapshot_with_too_many_conflicts_is_taken_at_the_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(snapshot_entries=0)
    await world.append(5)

    async def conflicting(*_: Any, **__: Any) -> None:
        raise CursorConflict("another replica's")

    with monkeypatch.context() as patch:
        patch.setattr(world.cursors, "mark_delete", conflicting)
        with pytest.raises(CursorsUnavailable):
            await world.snapshots.take(TOPIC)
    await world.snapshots.finish(1)
    assert (world.mark, world.kept) == ((1, 4), {"p": 4})


# ---- unexpected errors


class Surprised(Exception):
    """An error that no code here raises."""


class Surprising(FixedPolicies):
    """Policies that fail unexpectedly for one topic."""

    async def effective(self, topic: TopicName) -> EffectivePolicy:
        if topic == OTHER:
            raise Surprised
        return await super().effective(topic)


async def with_a_surprise(world: World) -> DedupMetrics:
    """Make the topic with the unexpected error the first of two."""
    await with_one_unreadable(world)
    policies = Surprising(world.policies.policy)
    world.snapshots._policies = world.dedup._policies = policies
    world.dedup._metrics = world.snapshots._metrics
    return world.snapshots._metrics


async def test_an_unexpected_error_in_a_snapshot_is_counted_and_retried(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAILURE_REST_S", 0.001)
    world = make()

    async def surprised(_: TopicName) -> None:
        raise Surprised

    failures = world.snapshots._metrics.failures
    with monkeypatch.context() as patch:
        patch.setattr(world.store, "freeze", surprised)
        await world.append(10)
        await eventually(lambda: failures["snapshot"] > 1)
        assert world.snapshots.error(TOPIC) == module.UNFORESEEN
        with pytest.raises(Surprised):
            await world.snapshots.take(TOPIC)
    await world.marked(9)
    await eventually(lambda: not world.snapshots.error(TOPIC), "the failure is over")
    assert world.snapshots._metrics.snapshots["failed"] == failures["snapshot"] + 1


async def test_an_unexpected_error_in_a_final_snapshot_does_not_stop_the_others(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(snapshot_entries=0)
    await with_a_surprise(world)
    world.snapshots._unsaved[OTHER] = None
    world.snapshots._unsaved.move_to_end(OTHER, last=False)
    await world.snapshots.finish(1)
    assert world.mark == (1, 4)


async def test_an_unexpected_error_does_not_stop_snapshots_of_other_topics(make: Make) -> None:
    world = make(snapshot_interval_s=1)
    metrics = await with_a_surprise(world)
    world.now_ms += 2_000
    async with looking(world):
        await world.marked(4)
    assert metrics.failures["snapshot"] > 0


async def test_an_unexpected_error_does_not_stop_the_purge_of_other_topics(make: Make) -> None:
    world = make(producer_inactivity_timeout_minutes=1)
    metrics = await with_a_surprise(world)
    world.now_ms += 70_000
    await world.dedup.purge(world.now_ms)
    assert world.store.states[TOPIC].producers == {}
    assert metrics.failures == {"purge": 1}


async def test_the_survey_outlasts_unexpected_errors(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(snapshot_interval_s=1, snapshot_entries=0, producer_inactivity_timeout_minutes=1)
    await world.append(5)
    world.dedup._metrics = metrics = world.snapshots._metrics

    async def surprised() -> int:
        raise Surprised

    async with asyncio.TaskGroup() as tasks:
        with monkeypatch.context() as patch:
            patch.setattr(world.store, "now_ms", surprised)
            purging = tasks.create_task(world.dedup.purge_forever(0.001))
            looking_at_times = tasks.create_task(world.snapshots.by_time_forever(0.001))
            failures = metrics.failures
            await eventually(lambda: min(failures["purge"], failures["snapshot"]) > 1)
        world.now_ms += 2_000
        await world.marked(4)
        purging.cancel()
        looking_at_times.cancel()


# ---- many topics


async def test_remembered_topics_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOPICS_MAX", 3)
    world = make()
    world.cursors.available = False
    snapshots, policy = world.snapshots, world.policies.policy
    topics = [TopicName.parse(f"test/snapshots/{number}") for number in range(9)]
    for topic in topics:
        snapshots.confirmed(topic, policy, 10)
        with suppress(CursorsUnavailable):
            await snapshots.take(topic)
    assert list(snapshots._unsaved) == topics[-3:]
    assert [topic for topic in topics if snapshots.error(topic)] == topics[-3:]
    assert len(snapshots._taking) == len(snapshots._wanted) == 3


async def test_a_topic_beyond_the_limit_gets_its_snapshot_at_the_next_confirmation(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOPICS_MAX", 0)
    world = make()
    await world.append(10)
    assert not world.snapshots._taking
    monkeypatch.setattr(module, "TOPICS_MAX", 1)
    await world.append(1)
    await world.marked(10)


async def test_a_survey_remembers_labels_and_not_topics(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey_module, "UNSAVED_MAX", 2)
    world = make(max_producers=4)
    for number in range(5):
        topic = TopicName.parse(f"test/snapshots/{number}")
        entries = ProducerEntries("p", (1,), world.now_ms)
        confirmation = Confirmation(None, Position(1, 0), (entries,), 1, 0)
        await world.dedup.confirm(topic, Writer(1, 1, Position(1, 0)), confirmation)
    survey = Survey(world.store, world.policies, OFF)
    await survey.look()
    world.now_ms += 7_000
    await survey.look()
    assert survey.seen == {ALL_OTHERS: Seen(5, 5, 20, 0.25, 1, 7.0)}
    assert len(survey._unsaved_since_ms) == 2


async def test_concurrent_snapshot_reads_are_bounded(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READING_MAX", 2)
    world = make()
    get, on, reading, most = world.cursors.get, asyncio.Event(), 0, 0

    async def held(topic: TopicName, name: str, *, whole: bool) -> Cursor | None:
        nonlocal reading, most
        reading += whole
        most = max(most, reading)
        if whole:
            await on.wait()
        reading -= whole
        return await get(topic, name, whole=whole)

    monkeypatch.setattr(world.cursors, "get", held)
    topics = [TopicName.parse(f"test/snapshots/{number}") for number in range(5)]
    for topic in topics:
        await world.cursors.create(topic, DEDUP_CURSOR, Position(1, 0))  # without a snapshot
    asked = [asyncio.create_task(world.snapshots.standing(topic, None)) for topic in topics]
    await eventually(lambda: reading == 2, "two are read")
    on.set()
    assert await asyncio.gather(*asked) == [None] * 5
    assert most == 2


async def test_concurrent_snapshots_are_bounded(make: Make) -> None:
    world = make()
    freeze, on = world.store.freeze, asyncio.Event()
    taking: list[TopicName] = []

    async def held(topic: TopicName) -> Any:
        taking.append(topic)
        await on.wait()
        return await freeze(topic)

    world.store.freeze = held  # type: ignore[method-assign]
    topics = [TopicName.parse(f"test/snapshots/{number}") for number in range(9)]
    asked = [asyncio.create_task(world.snapshots.take(topic)) for topic in topics]
    await eventually(lambda: len(taking) == module.TAKING_MAX, "some are taken")
    await asyncio.sleep(0)
    assert len(taking) == module.TAKING_MAX
    on.set()
    await asyncio.gather(*asked)
    assert len(taking) == 9


# ---- what a status says of the newest one


async def test_a_status_has_the_snapshot_of_the_cursor_whatever_redis_recorded(make: Make) -> None:
    world = make()
    await world.append(2)
    await world.snapshots.take(TOPIC)
    rolled_back = deepcopy(world.store.states[TOPIC])
    await world.append(3)
    await world.snapshots.take(TOPIC)
    newest = await world.dedup.status(TOPIC)
    assert newest.snapshot is not None
    assert newest.snapshot.position == (1, 4)

    world.store.states[TOPIC] = rolled_back
    assert (await world.dedup.status(TOPIC)).snapshot == newest.snapshot
    world.store.states.clear()
    assert (await world.dedup.status(TOPIC)).snapshot == newest.snapshot
    await world.cursors.delete(TOPIC, DEDUP_CURSOR)
    world.store.states[TOPIC] = rolled_back
    lost = await world.dedup.status(TOPIC)
    assert (lost.snapshot, lost.snapshot_unknown, lost.unsaved) == (None, False, 2)


async def test_a_snapshot_that_no_recovery_would_load_is_none(make: Make) -> None:
    """That of an earlier incarnation, of a position that was moved by hand, and an unreadable
    one."""
    world = make()
    await world.append(2)
    await world.snapshots.take(TOPIC)
    cursor = world.cursors.cursors[TOPIC, DEDUP_CURSOR]
    moved = cursor._replace(mark_delete=Position(1, 9))
    unreadable = cursor._replace(mark_delete_properties={"p": "x"})
    world.store.states.clear()
    for useless in (moved, unreadable):
        world.cursors.cursors[TOPIC, DEDUP_CURSOR] = useless
        assert (await world.dedup.status(TOPIC)).snapshot is None

    world.cursors.cursors[TOPIC, DEDUP_CURSOR] = cursor
    assert (await world.dedup.status(TOPIC)).snapshot is not None
    await world.store.load(TOPIC, 2, Position(1, 0), [], replacing=False, taken_ms=None)
    assert (await world.dedup.status(TOPIC)).snapshot is None


async def test_a_snapshot_is_unknown_while_the_cursor_service_is_silent(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    world = make()
    await world.append(2)
    await world.snapshots.take(TOPIC)

    async def silent(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(world.cursors, "get", silent)
    status = await world.dedup.status(TOPIC)
    assert (status.snapshot, status.snapshot_unknown) == (None, True)
