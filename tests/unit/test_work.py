"""Work that may fail is repeated until it succeeds."""

import asyncio
from contextlib import suppress
from itertools import pairwise

import pytest

from seqgate.services.dispatcher.ports import LedgerUnavailable, LetterRefused
from seqgate.services.dispatcher.shell import work as limits
from seqgate.services.dispatcher.shell.work import BACKOFF_FIRST_S, BACKOFF_MAX_S, Work
from seqgate.services.errors import DomainError, Fenced, ServiceBusy
from seqgate.services.runtime import deadline
from seqgate.services.runtime.budget import Budget
from seqgate.services.runtime.load import ASKED_BYTES, RETRY_AFTER_S
from seqgate.types import TopicName
from tests.simulation.ground import run, virtual_loop

LONGEST_S = 30.0


@pytest.mark.parametrize(
    ("error", "longest_s"),
    [
        (LedgerUnavailable("away", retry_after_s=LONGEST_S), BACKOFF_MAX_S),
        (LetterRefused("no", retry_after_s=LONGEST_S), LONGEST_S),
    ],
    ids=lambda each: getattr(each, "reason", None),
)
def test_failed_work_is_retried_with_growing_delays(error: DomainError, longest_s: float) -> None:
    tried_s: list[float] = []

    async def fail() -> None:
        tried_s.append(virtual_loop().time())
        if len(tried_s) < 15:
            raise error

    async def repeat() -> None:
        async with asyncio.TaskGroup() as tasks:
            work = Work(TopicName.parse("t/n/topic"), "s", tasks, lambda _: None)
            await work.repeated(fail)

    run(repeat, seed=0)
    waits_s = [after - before for before, after in pairwise(tried_s)]
    expected = [min(BACKOFF_FIRST_S * 2**each, longest_s) for each in range(14)]
    assert all(most / 2 <= wait_s <= most for wait_s, most in zip(waits_s, expected, strict=True))


def test_stopped_work_ends_although_a_cancellation_is_lost() -> None:
    async def stubborn(runs: asyncio.Event) -> None:
        runs.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def stop() -> None:
        async with asyncio.TaskGroup() as tasks:
            work = Work(TopicName.parse("t/n/topic"), "s", tasks, lambda _: None)
            runs = asyncio.Event()
            work.start(stubborn, runs)
            await runs.wait()
            work.stop(Fenced("lost"))

    run(stop, seed=0, limit_s=60)


def test_a_started_change_is_finished_beyond_its_callers_deadline() -> None:
    left_s: list[float | None] = []

    async def call_late() -> None:
        await asyncio.sleep(LONGEST_S)
        left_s.append(deadline.remaining_s(BACKOFF_MAX_S))

    async def ask() -> None:
        async with asyncio.TaskGroup() as tasks:
            work = Work(TopicName.parse("t/n/topic"), "s", tasks, lambda _: None)
            deadline.set_remaining_s(1.0)
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await work.finished(call_late)

    run(ask, seed=0)
    assert left_s == [BACKOFF_MAX_S]


MANY = 100


async def _begun(work: Work, over: asyncio.Event) -> int:
    """The number of changes accepted while none is finished and no caller waits for one."""
    refused: list[ServiceBusy] = []
    while not refused and work.changes < MANY:
        try:
            async with asyncio.timeout(0.1):
                await work.finished(over.wait)
        except TimeoutError:
            continue
        except ServiceBusy as refusal:
            refused.append(refusal)
    (last,) = refused
    by_count = work.changes == limits.WAITING_CHANGES_MAX
    limit = "WAITING_CHANGES_MAX" if by_count else "WAITING_CHANGES_BYTES_MAX"
    assert (last.retry_after_s, last.details) == (RETRY_AFTER_S, {"limit": limit})
    return work.changes


async def _changes(asked_bytes: int) -> int:
    """The number of changes accepted of two subscriptions with a shared budget; checks that the
    same number is accepted again afterwards."""
    async with asyncio.TaskGroup() as tasks:
        topic, asked = TopicName.parse("t/n/topic"), Budget(10)
        works = [Work(topic, name, tasks, lambda _: None, asked) for name in "ab"]
        ASKED_BYTES.set(asked_bytes)
        found = set()
        for _ in range(2):
            over = asyncio.Event()
            found.add(sum([await _begun(each, over) for each in works]))
            over.set()
            for each in works:
                await each.ended()
        assert asked.used == 0
        (most,) = found
        return most


@pytest.mark.parametrize(
    ("asked_bytes", "most"),
    [(0, 6), (1, 6), (3, 3), (5, 2), (11, 1)],
    ids=["by count", "by both", "by bytes", "to the last byte", "one above the limit alone"],
)
def test_waiting_changes_are_bounded_and_further_ones_refused(
    asked_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WAITING_CHANGES_MAX", 3)
    assert run(lambda: _changes(asked_bytes), seed=0) == most


def test_work_started_after_the_stop_ends_too() -> None:
    async def for_ever() -> None:
        await asyncio.Event().wait()

    async def stop() -> None:
        async with asyncio.TaskGroup() as tasks:
            work = Work(TopicName.parse("t/n/topic"), "s", tasks, lambda _: None)
            work.stop(Fenced("lost"))
            work.start(for_ever)

    run(stop, seed=0)
