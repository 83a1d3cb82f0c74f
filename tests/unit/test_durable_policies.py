"""Policies set by calls: the values in effect on each replica, and when."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from seqgate.services.cursors import Cursor, CursorsUnavailable
from seqgate.services.dedup import policies as module
from seqgate.services.dedup.adapters.memory import MemoryStateStore
from seqgate.services.dedup.adapters.policy_file import PolicyFile
from seqgate.services.dedup.core.policy import (
    NOTHING,
    InvalidPolicy,
    OnFull,
    Policies,
    Policy,
    Source,
    Sourced,
)
from seqgate.services.dedup.metrics import DedupMetrics
from seqgate.services.dedup.policies import NAMESPACE, PROPERTY, DurablePolicies, Level, new_token
from seqgate.services.dedup.ports import StateUnavailable
from seqgate.services.dedup.service import EVICTION_ROUNDS_MAX, Deduplication
from seqgate.services.dedup.snapshots import Snapshots
from seqgate.services.deduplication import (
    DISABLED,
    Claim,
    Judged,
    ProducerClaims,
    TooManyProducers,
    Writer,
)
from seqgate.services.runtime.cursors import MemoryCursors, NoCursors
from seqgate.types import TopicName

ORDERS = TopicName.parse("public/default/orders")
OTHER = TopicName.parse("public/default/other")
PLACE = TopicName.parse("public/default/__dedup_policies")
OF_ORDERS = Level.of_topic(ORDERS)
OF_NAMESPACE = Level.of_namespace("public/default")
HISTORIES = 300


class File:
    """A policy file with fixed contents."""

    error = "as the file says"

    def __init__(self, **cluster: object) -> None:
        self.policies = Policies.parse({"cluster": cluster})


class Cursors(MemoryCursors):
    """Cursors that count reads, and can delay them."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.before: Callable[[], Awaitable[None]] = nothing
        self.after: Callable[[], Awaitable[None]] = nothing

    async def get(self, topic: TopicName, name: str, *, whole: bool) -> Cursor | None:
        self.reads += 1
        await self.before()
        found = await super().get(topic, name, whole=whole)
        await self.after()
        return found

    async def put_property(self, topic: TopicName, name: str, key: str, value: str | None) -> None:
        await self.before()
        await super().put_property(topic, name, key, value)
        await self.after()


async def nothing() -> None:
    return


class Store(MemoryStateStore):
    """A state store that can be unavailable."""

    available = True
    loses_tokens = False
    asked = 0

    async def policy_token(self) -> str:
        self.asked += 1
        self._answer()
        return await super().policy_token()

    async def set_policy_token(self, token: str) -> None:
        self._answer()
        if not self.loses_tokens:
            await super().set_policy_token(token)

    def _answer(self) -> None:
        if not self.available:
            raise StateUnavailable("away", retry_after_s=1)


class World:
    """Replicas over one cursor service and one state store."""

    def __init__(self, **cluster: object) -> None:
        self.cursors = Cursors()
        self.store = Store()
        self.file = File(**cluster)
        self.one, self.two = self.replica(), self.replica()

    def replica(self) -> DurablePolicies:
        return DurablePolicies(self.file, self.cursors, self.store)


@pytest.fixture
def world() -> World:
    return World()


async def limit(policies: DurablePolicies, topic: TopicName = ORDERS) -> Sourced[int]:
    return (await policies.effective(topic)).max_producers


def at_most(limit: int) -> Policy:
    return Policy(max_producers=limit)


# ---- precedence


async def test_a_policy_set_on_one_replica_applies_to_all(world: World) -> None:
    assert await limit(world.two) == Sourced(10_000, Source.DEFAULT)
    for each in range(1, 200):
        setting, following = (world.one, world.two) if each % 2 else (world.two, world.one)
        level, source = (OF_ORDERS, Source.TOPIC) if each % 3 else (OF_NAMESPACE, Source.NAMESPACE)
        await setting.set(OF_NAMESPACE if source is Source.TOPIC else OF_ORDERS, NOTHING)
        await setting.set(level, at_most(each))
        assert await limit(following) == await limit(setting) == Sourced(each, source)
        assert await following.get(level) == at_most(each)


async def test_a_call_wins_over_the_file_on_the_cluster(world: World) -> None:
    world.file.policies = Policies.parse(
        {"cluster": {"max_producers": 5, "on_full": "refuse"}, "topic": {str(OTHER): {}}}
    )
    assert await limit(world.one) == Sourced(5, Source.CLUSTER)
    await world.one.set(OF_NAMESPACE, at_most(6))
    assert await limit(world.two) == Sourced(6, Source.NAMESPACE)
    assert await limit(world.two, OTHER) == Sourced(6, Source.NAMESPACE)
    await world.one.set(OF_ORDERS, at_most(7))
    assert await limit(world.two) == Sourced(7, Source.TOPIC)
    assert await limit(world.two, OTHER) == Sourced(6, Source.NAMESPACE)
    await world.one.set(OF_ORDERS, NOTHING)
    assert await limit(world.two) == Sourced(6, Source.NAMESPACE)
    await world.one.set(OF_NAMESPACE, NOTHING)
    assert await limit(world.two) == Sourced(5, Source.CLUSTER)
    assert world.cursors.cursors == {}, "nothing is left of what was removed"


async def test_a_changed_file_applies_at_once(world: World) -> None:
    await world.one.set(OF_NAMESPACE, at_most(6))
    assert await limit(world.one) == Sourced(6, Source.NAMESPACE)
    world.file.policies = Policies.parse({"topic": {str(ORDERS): {"max_producers": 9}}})
    assert await limit(world.one) == Sourced(9, Source.TOPIC)
    assert world.one.error == "as the file says"


async def test_a_policy_replaces_the_one_before_as_a_whole(world: World) -> None:
    await world.one.set(OF_ORDERS, Policy(enabled=False, snapshot_entries=3))
    await world.one.set(OF_ORDERS, Policy(snapshot_interval_s=7))
    assert await world.two.get(OF_ORDERS) == Policy(snapshot_interval_s=7)
    assert (await world.two.effective(ORDERS)).enabled == Sourced(value=True, source=Source.DEFAULT)


async def test_a_policy_does_not_affect_other_namespaces_and_topics(world: World) -> None:
    await world.one.set(OF_ORDERS, at_most(1))
    await world.one.set(OF_NAMESPACE, at_most(2))
    for name in ("public/default2/orders", "public2/default/orders"):
        assert (await limit(world.two, TopicName.parse(name))).source is Source.DEFAULT
    assert await limit(world.two, TopicName.parse("public/default/orders2")) == Sourced(
        2, Source.NAMESPACE
    )


async def test_policies_survive_replicas_and_the_state_store(world: World) -> None:
    await world.one.set(OF_ORDERS, at_most(4))
    world.store = Store()
    assert await limit(world.replica()) == Sourced(4, Source.TOPIC)
    assert world.cursors.cursors[PLACE, "orders"].properties == {PROPERTY: '{"max_producers": 4}'}


async def test_a_lost_token_makes_all_replicas_read_again(
    world: World,
) -> None:
    assert (await limit(world.two)).source is Source.DEFAULT
    await world.cursors.put_property(PLACE, "orders", PROPERTY, '{"max_producers": 4}')
    assert (await limit(world.two)).source is Source.DEFAULT
    await world.store.set_policy_token(new_token())
    assert await limit(world.two) == Sourced(4, Source.TOPIC)


async def test_policies_are_read_once_per_token(world: World) -> None:
    for _ in range(10):
        await limit(world.one)
        await limit(world.one, OTHER)
    assert world.cursors.reads == 3, "two topics, one namespace"
    await world.two.set(OF_ORDERS, at_most(1))
    for _ in range(10):
        await limit(world.one)
    assert world.cursors.reads == 5


async def test_a_policy_that_many_topics_want_at_once_is_read_once(world: World) -> None:
    topics = [TopicName.parse(f"public/default/t{number}") for number in range(1_000)]
    world.cursors.before = partial(asyncio.sleep, 0)
    await asyncio.gather(*(limit(world.one, each) for each in topics))
    assert world.cursors.reads == len(topics) + 1


async def test_the_cache_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED_MAX", 3)
    topics = [TopicName.parse(f"public/default/t{i}") for i in range(10)]
    for topic in topics:
        await limit(world.one, topic)
    assert world.cursors.reads == 11, "the namespace is used all the time, and stays"
    await limit(world.one, topics[-1])
    assert world.cursors.reads == 11
    await limit(world.one, topics[0])
    assert world.cursors.reads == 12


# ---- interleavings


@pytest.mark.parametrize(
    ("nth", "level", "source"),
    [(1, OF_ORDERS, Source.TOPIC), (2, OF_NAMESPACE, Source.NAMESPACE)],
)
async def test_a_value_read_between_write_and_token_is_read_again(
    world: World, nth: int, level: Level, source: Source
) -> None:
    """A reader holds the old value during a whole SetPolicy."""
    read, go_on = asyncio.Event(), asyncio.Event()

    async def pause() -> None:
        if world.cursors.reads == nth:
            world.cursors.after = nothing
            read.set()
            await go_on.wait()

    world.cursors.after = pause
    reading = asyncio.create_task(limit(world.two))
    await read.wait()
    await world.one.set(level, at_most(4))
    assert await limit(world.two) == Sourced(4, source)
    go_on.set()
    assert (await reading).source is Source.DEFAULT, "it asked before"
    assert await limit(world.two) == Sourced(4, source)


async def test_an_unannounced_write_applies_at_the_next_full_read(world: World) -> None:
    assert (await limit(world.two)).source is Source.DEFAULT
    world.store.loses_tokens = True
    await world.one.set(OF_ORDERS, at_most(4))
    assert (await limit(world.two)).source is Source.DEFAULT
    await world.two.reread()
    assert await limit(world.two) == Sourced(4, Source.TOPIC)


async def test_policies_are_read_again_periodically(world: World) -> None:
    await limit(world.two)
    world.store.loses_tokens = True
    await world.one.set(OF_ORDERS, at_most(4))
    changed = asyncio.Event()

    async def note() -> None:
        if world.cursors.reads >= 12:
            changed.set()

    world.cursors.after = note
    world.cursors.available = False
    rereading = asyncio.create_task(world.two.reread_forever(0.0))
    while world.cursors.reads < 10:
        await asyncio.sleep(0)
    world.cursors.available = True
    await changed.wait()
    rereading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rereading
    assert await limit(world.two) == Sourced(4, Source.TOPIC)


def test_an_unexpected_error_in_the_policy_file_keeps_the_policies(tmp_path: Path) -> None:
    path = tmp_path / "policies.toml"
    path.write_text("[cluster]\nmax_producers = 5\n")
    file = PolicyFile(path, interval_s=0)
    before = file.policies
    path.write_text("deep = " + "[" * 100_000)
    assert file.error == "policies.toml: unexpected error, see the log"
    assert file.policies is before
    path.write_text("[cluster]\nmax_producers = 7\n")
    assert file.error == ""
    assert file.policies.effective(ORDERS).max_producers.value == 7


async def test_an_unreadable_policy_does_not_stop_the_reading_of_others(
    world: World,
) -> None:
    await world.one.set(OF_NAMESPACE, at_most(9))
    for topic in (OTHER, ORDERS):
        assert (await limit(world.two, topic)).value == 9
    world.store.loses_tokens = True
    await world.one.set(OF_ORDERS, at_most(4))
    other = Level.of_topic(OTHER)
    await world.cursors.put_property(PLACE, other.name, PROPERTY, "damaged")
    await world.two.reread()
    assert (await limit(world.two, ORDERS)).value == 4
    assert (await limit(world.two, OTHER)).value == 9, "as it was read before"
    with pytest.raises(CursorsUnavailable):
        await world.two.get(other)


async def test_a_periodic_read_ends_at_a_new_token(world: World) -> None:
    await limit(world.two)

    async def set_meanwhile() -> None:
        world.cursors.after = nothing
        await world.one.set(OF_ORDERS, at_most(4))
        assert await limit(world.two) == Sourced(4, Source.TOPIC)

    world.cursors.after = set_meanwhile
    await world.two.reread()
    assert await limit(world.two) == Sourced(4, Source.TOPIC)


async def test_a_failed_change_can_be_retried(world: World) -> None:
    assert (await limit(world.two)).source is Source.DEFAULT
    world.store.available = False
    with pytest.raises(StateUnavailable):
        await world.one.set(OF_ORDERS, at_most(4))
    world.store.available = True
    assert (await limit(world.two)).source is Source.DEFAULT, "it may count, and does not yet"
    await world.one.set(OF_ORDERS, at_most(4))
    assert await limit(world.two) == Sourced(4, Source.TOPIC)


async def test_a_write_with_an_unknown_outcome_makes_all_replicas_read_again(world: World) -> None:
    assert (await limit(world.two)).source is Source.DEFAULT

    async def fail() -> None:
        world.cursors.after = nothing
        raise CursorsUnavailable("the answer was lost")

    world.cursors.after = fail
    with pytest.raises(CursorsUnavailable):
        await world.one.set(OF_ORDERS, at_most(4))
    assert await limit(world.two) == Sourced(4, Source.TOPIC)


async def test_a_cancelled_change_leaves_no_replica_outdated(world: World) -> None:
    assert (await limit(world.two)).source is Source.DEFAULT
    written = asyncio.Event()

    async def stall() -> None:
        world.cursors.after = nothing
        written.set()
        await asyncio.Event().wait()

    world.cursors.after = stall
    setting = asyncio.create_task(world.one.set(OF_ORDERS, at_most(4)))
    await written.wait()
    setting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await setting
    assert await limit(world.two) == Sourced(4, Source.TOPIC)


async def test_a_read_after_a_change_sees_it(seed: int) -> None:
    """Three replicas, two writers, and readers, in random order. Written numbers grow; a reader
    must see no value older than those written before its call."""
    for each in range(seed, seed + HISTORIES):
        await _play(Random(each), each)


async def _play(random: Random, seed: int) -> None:
    world = World()

    async def dawdle() -> None:
        for _ in range(random.randrange(6)):
            await asyncio.sleep(0)

    world.cursors.before = world.cursors.after = dawdle
    replicas = [world.replica() for _ in range(3)]
    setting = asyncio.Lock()  # so that the numbers grow in the order of the writes
    numbers = iter(range(1, 1_000))
    returned = 0

    async def set_some() -> None:
        nonlocal returned
        for _ in range(5):
            await dawdle()
            async with setting:
                number = next(numbers)
                if random.random() < 0.3:
                    await world.store.set_policy_token(new_token())  # the store lost its token
                await random.choice(replicas).set(OF_ORDERS, at_most(number))
                returned = number

    async def read_some() -> None:
        for _ in range(12):
            await dawdle()
            before = returned
            seen = await limit(random.choice(replicas))
            value = 0 if seen.source is Source.DEFAULT else seen.value
            assert value >= before, f"seed {seed}"

    async with asyncio.TaskGroup() as tasks:
        for work in (set_some, set_some, read_some, read_some, read_some):
            tasks.create_task(work())
    assert {await limit(each) for each in replicas} == {Sourced(returned, Source.TOPIC)}


# ---- outages


async def test_without_the_cursor_service_known_policies_apply_and_others_are_refused(
    world: World,
) -> None:
    await world.one.set(OF_ORDERS, at_most(4))
    assert await limit(world.one) == Sourced(4, Source.TOPIC)
    world.cursors.available = False
    assert await limit(world.one) == Sourced(4, Source.TOPIC)
    for replica, topic in ((world.one, OTHER), (world.two, ORDERS)):
        with pytest.raises(CursorsUnavailable) as refusal:
            await limit(replica, topic)
        assert refusal.value.retry_after_s
    with pytest.raises(CursorsUnavailable):
        await world.one.get(OF_ORDERS)
    with pytest.raises(CursorsUnavailable):
        await world.one.reread()
    assert await limit(world.one) == Sourced(4, Source.TOPIC)
    world.cursors.available = True
    assert await limit(world.two) == Sourced(4, Source.TOPIC)


async def test_policies_of_an_older_token_are_not_used(world: World) -> None:
    await limit(world.one)
    world.cursors.available = False
    with pytest.raises(CursorsUnavailable):
        await world.two.set(OF_ORDERS, at_most(4))
    with pytest.raises(CursorsUnavailable):
        await limit(world.one)


async def test_without_the_state_store_policies_are_unavailable(world: World) -> None:
    await limit(world.one)
    world.store.available = False
    with pytest.raises(StateUnavailable):
        await limit(world.one)


async def test_without_a_cursor_service_only_the_file_applies() -> None:
    store = Store()
    policies = DurablePolicies(File(max_producers=5), NoCursors(), store)
    assert await limit(policies) == Sourced(5, Source.CLUSTER)
    assert store.asked == 0
    with pytest.raises(CursorsUnavailable, match="no cursor service: cursor_target is empty"):
        await policies.set(OF_ORDERS, at_most(4))
    assert await policies.get(OF_ORDERS) == NOTHING
    await policies.forget(ORDERS)
    await policies.set(OF_ORDERS, NOTHING)


async def test_a_system_topic_never_deduplicates_and_reads_no_policy(world: World) -> None:
    system = TopicName.parse("public/default/__changes")
    for policy in (Policy(enabled=True), NOTHING):
        with pytest.raises(InvalidPolicy) as refusal:
            await world.one.set(Level.of_topic(system), policy)
        assert refusal.value.field == "topic"
    world.cursors.available = world.store.available = False
    effective = await world.one.effective(system)
    assert effective.enabled == Sourced(value=False, source=Source.SYSTEM_TOPIC)
    await world.one.forget(system)


# ---- stored policies


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"max_producers"',
        '{"max_producers": 0}',
        '{"max_producers": "1"}',
        '{"enabled": 1}',
        '{"on_full": "explode"}',
        '{"on_full": []}',
    ],
)
async def test_an_unreadable_policy_is_refused_until_it_is_set_again(
    world: World, text: str
) -> None:
    await world.cursors.put_property(PLACE, "orders", PROPERTY, text)
    with pytest.raises(CursorsUnavailable, match="set it again"):
        await limit(world.one)
    assert (await limit(world.one, OTHER)).source is Source.DEFAULT
    await world.one.set(OF_ORDERS, at_most(4))
    assert await limit(world.one) == Sourced(4, Source.TOPIC)


async def test_values_of_a_newer_release_are_ignored(world: World) -> None:
    text = json.dumps({"max_producers": 3, "colour": "blue"})
    await world.cursors.put_property(PLACE, NAMESPACE, PROPERTY, text)
    assert await limit(world.one) == Sourced(3, Source.NAMESPACE)


async def test_a_cursor_without_the_property_sets_nothing(world: World) -> None:
    await world.cursors.put_property(PLACE, "orders", "somebody's", "own")
    assert (await limit(world.one)).source is Source.DEFAULT


@pytest.mark.parametrize(("longer_by", "kept"), [(0, True), (1, False)])
async def test_a_namespace_with_a_long_name_has_no_policies(
    world: World, longer_by: int, kept: bool
) -> None:
    """So none can have been set, and its topics are served."""
    namespace = "t/" + "n" * (255 - len("t/") - len("/__dedup_policies") + longer_by)
    topic = TopicName.parse(f"{namespace}/x")
    for level, field in (
        (Level.of_namespace(namespace), "namespace"),
        (Level.of_topic(topic), "topic"),
    ):
        if kept:
            await world.one.set(level, at_most(3))
        else:
            with pytest.raises(InvalidPolicy) as refusal:
                await world.one.set(level, at_most(3))
            assert refusal.value.field == field
        assert await world.one.get(level) == (at_most(3) if kept else NOTHING)
    assert (await limit(world.two, topic)).source is (Source.TOPIC if kept else Source.DEFAULT)


async def test_a_deleted_topic_leaves_no_policy(world: World) -> None:
    await world.one.set(OF_ORDERS, at_most(4))
    await world.one.set(OF_NAMESPACE, at_most(5))
    assert await limit(world.two) == Sourced(4, Source.TOPIC)
    await world.one.forget(ORDERS)
    assert await limit(world.two) == Sourced(5, Source.NAMESPACE)
    assert world.cursors.cursors.keys() == {(PLACE, NAMESPACE)}


async def test_created_and_deleted_topics_cause_no_reads(world: World) -> None:
    token = await world.store.policy_token()
    await world.one.forget(ORDERS)
    assert await world.store.policy_token() == token


# ---- claims, which are judged under a policy that is known


def deduplication(world: World, policies: DurablePolicies) -> Deduplication:
    metrics = DedupMetrics()
    snapshots = Snapshots(world.store, world.cursors, policies, asyncio.TaskGroup(), metrics)
    return Deduplication(world.store, policies, snapshots, metrics)


async def admitted(dedup: Deduplication, producer: str = "p") -> object:
    claims = [ProducerClaims(producer, (Claim(1, 1),))]
    return await dedup.admit(ORDERS, Writer(1, 1, None), None, claims)


async def test_a_claim_asks_for_the_token_only_once(world: World) -> None:
    dedup = deduplication(world, world.one)
    for _ in range(3):
        assert isinstance(await admitted(dedup), Judged)
    assert world.store.asked == 1


async def test_a_policy_set_elsewhere_applies_to_the_next_claim(world: World) -> None:
    dedup = deduplication(world, world.two)
    assert isinstance(await admitted(dedup), Judged)
    await world.one.set(OF_ORDERS, Policy(enabled=False))
    assert await admitted(dedup) == DISABLED
    await world.one.set(OF_ORDERS, Policy(enabled=True, max_producers=1, on_full=OnFull.REFUSE))
    assert isinstance(await admitted(dedup), Judged)
    with pytest.raises(TooManyProducers):
        await admitted(dedup, "another")
    await world.one.set(OF_ORDERS, at_most(2))
    assert isinstance(await admitted(dedup, "another"), Judged)


async def test_claims_are_judged_again_after_the_token_was_lost(world: World) -> None:
    dedup = deduplication(world, world.one)
    assert isinstance(await admitted(dedup), Judged)
    await world.store.set_policy_token(new_token())
    assert isinstance(await admitted(dedup), Judged)
    assert world.store.asked == 2


async def test_a_policy_that_claims_use_stays_cached(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CACHED_MAX", 3)
    dedup = deduplication(world, world.one)
    await admitted(dedup)
    for number in range(5):
        await limit(world.one, TopicName.parse(f"public/default/other-{number}"))
        asked = world.store.asked
        await admitted(dedup)
        assert world.store.asked == asked


async def test_a_lost_token_costs_no_eviction(world: World) -> None:
    dedup = deduplication(world, world.one)
    await world.one.set(OF_ORDERS, at_most(1))
    await admitted(dedup, "first")
    evict = dedup._make_room
    rounds = 0

    async def evict_in_vain(*args: Any, **more: Any) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == EVICTION_ROUNDS_MAX:
            await evict(*args, **more)

    dedup._make_room = evict_in_vain  # type: ignore[method-assign]
    await world.store.set_policy_token(new_token())
    with pytest.raises(TooManyProducers):
        await admitted(dedup, "second")
    assert rounds == EVICTION_ROUNDS_MAX
