"""How logs are divided among the tasks of a job: by their size and by the cluster's cores."""

from collections.abc import Iterable, Iterator
from typing import Final

from seqgate.spark._columns import Range

TASKS_PER_CORE: Final = 2
"""So that a slow task does not leave the other cores idle for long."""

ENTRIES_PER_TASK_MAX: Final = 1_000_000
"""About a second's work: a task's progress shows, and its failure costs, no more."""

ENTRIES_PER_TASK_MIN: Final = 50_000
"""Smaller tasks only shift the cost to starting them."""


def entries_per_task(entries: int, cores: int) -> int:
    """The most entries of a task, for logs of so many entries on so many cores."""
    share = -(-entries // (cores * TASKS_PER_CORE))
    return min(max(share, ENTRIES_PER_TASK_MIN), ENTRIES_PER_TASK_MAX)


def joined(ranges: Iterable[Range], entries_max: int) -> Iterator[Range]:
    """Join successive ranges of a topic into ranges of at most so many entries; one that has more
    stays as it is."""
    current: Range | None = None
    for each in ranges:
        if current is not None and current.entries + each.entries <= entries_max:
            entries = current.entries + each.entries
            current = current._replace(through=each.through, entries=entries)
            continue
        if current is not None:
            yield current
        current = each
    if current is not None:
        yield current
