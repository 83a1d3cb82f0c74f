"""Logs are divided by their size and the cluster's; what is read must not be trimmed meanwhile."""

from collections.abc import Sequence

import pytest

from seqgate.api.common.v1.common_pb2 import Position as WirePosition
from seqgate.api.ledger.v1.ledger_pb2 import Topic
from seqgate.jobs.division import ENTRIES_PER_TASK_MAX, ENTRIES_PER_TASK_MIN, joined
from seqgate.jobs.rebuild.loading import is_trimmed
from seqgate.jobs.rebuild.plan import (
    TOPIC_COST_ENTRIES,
    TopicPlan,
    Wave,
    entries_per_wave,
    waves,
)
from seqgate.spark._partitions import Bounds, LedgerRange, ranges_of
from seqgate.types import Position


def topic(first: tuple[int, int] | None) -> Topic:
    begins = None if first is None else WirePosition(ledger_id=first[0], entry_id=first[1])
    return Topic(name="a/b/c", first=begins, last=WirePosition(ledger_id=2, entry_id=9))


@pytest.mark.parametrize(
    ("first", "trimmed"),
    [((1, 0), False), ((1, 4), False), ((1, 5), True), ((2, 0), True), (None, True)],
)
def test_a_trim_of_planned_entries_is_noticed(
    first: tuple[int, int] | None, *, trimmed: bool
) -> None:
    plan = TopicPlan("a/b/c", 1, None, Position(2, 9), Position(1, 4), ())
    assert is_trimmed(plan, topic(first)) is trimmed


def planned(number: int, entries: int) -> TopicPlan:
    """The plan of a topic of two ledgers."""
    name, half = f"a/b/{number}", entries // 2
    parts = ((1, half), (2, entries - half))
    ledgers = [LedgerRange(each, 0, count - 1) for each, count in parts if count]
    ranges = tuple(ranges_of(name, ledgers, Bounds(), ENTRIES_PER_TASK_MIN))
    return TopicPlan(name, 1, None, Position(2, max(0, entries - half - 1)), Position(0, 0), ranges)


M = 1_000_000


@pytest.mark.parametrize(
    ("sizes", "cores", "tasks"),
    [
        ([0], 2, 1),
        ([40_000], 16, 1),
        ([400_000], 2, 4),
        ([2 * M], 16, 40),  # one topic occupies the cluster
        ([100 * M], 4, 100),  # no task is too large
        ([100] * 500, 2, 4),  # small topics share tasks: each costs a call
        ([10 * M, *[1_000] * 200], 8, 17),
    ],
)
def test_tasks_follow_the_size_of_the_logs_and_the_cluster(
    sizes: Sequence[int], cores: int, tasks: int
) -> None:
    plans = [planned(number, entries) for number, entries in enumerate(sizes)]
    wave = Wave.divided(plans, cores)
    assert len(wave.tasks) == tasks
    for task in wave.tasks:
        read = sum(each.range.entries + TOPIC_COST_ENTRIES for each in task if each.range)
        assert len(task) == 1 or read <= ENTRIES_PER_TASK_MAX
        assert all(each.range.entries <= ENTRIES_PER_TASK_MAX for each in task if each.range)
    parts = [each for task in wave.tasks for each in task]
    for plan in plans:
        mine = [each for each in parts if each.topic == plan.topic]
        assert [each.number for each in mine] == list(range(len(mine)))
        ranges = [each.range for each in mine if each.range is not None]
        (of_wave,) = (each for each in wave.topics if each.topic == plan.topic)
        assert ranges == list(of_wave.ranges)
        assert of_wave.entries == plan.entries
        assert list(joined(ranges, plan.entries)) == list(joined(plan.ranges, plan.entries))


def test_waves_begin_with_small_topics_and_grow_with_the_cluster() -> None:
    plans = [planned(number, entries) for number, entries in enumerate((9 * M, 5 * M, 5 * M, 100))]
    gathered = [[each.entries for each in wave] for wave in waves(plans, entries_per_wave(2))]
    assert gathered == [[100, 5 * M], [5 * M], [9 * M]]
    assert len(waves(plans, entries_per_wave(1_000))) == 1
