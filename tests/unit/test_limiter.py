"""Calls beyond what a dependency serves wait in order, and are dropped when nobody waits."""

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from seqgate.services.runtime import deadline, limiter
from seqgate.services.runtime.backoff import Backoff
from seqgate.services.runtime.limiter import (
    AT_ONCE_MIN,
    PAUSE_MAX_S,
    SLOW_SHARE,
    URGENT_AT_ONCE,
    Concurrency,
    Limiter,
    NotSent,
    Outcome,
)
from tests.simulation.ground import run, virtual_loop

LIMIT_S = 1.0
MOST = 16
OUTAGE_S = 15.0


class Dependency:
    """Serves `rate` calls per second, one after the other. A call that is not answered within
    LIMIT_S fails, and is served all the same, for nobody."""

    def __init__(self, rate: float, **how: Any) -> None:
        self.rate = rate
        self.is_up = True
        self.limiter = Limiter(MOST, random=Random(1), **how)
        self.asked = self.failed = 0
        self.under_way_max = 0
        self.order: list[int] = []
        self._free_s = 0.0

    async def call(self, number: int = 0, *, urgent: bool = False) -> None:
        """Call it once. Raises TimeoutError if it does not answer in time."""
        async with self.limiter.slot(LIMIT_S, urgent=urgent) as slot:
            self.asked += 1
            self.order.append(number)
            self.under_way_max = max(self.under_way_max, self.limiter.under_way)
            try:
                async with asyncio.timeout(LIMIT_S):
                    await self._serve()
            except (TimeoutError, ConnectionError):
                self.failed += 1
                slot.outcome = Outcome.FAILED
                raise

    async def _serve(self) -> None:
        if not self.is_up:
            raise ConnectionError
        now_s = virtual_loop().time()
        self._free_s = max(now_s, self._free_s) + 1 / self.rate
        await asyncio.sleep(self._free_s - now_s)

    async def until_answered(self, number: int) -> None:
        backoff = Backoff(0.05, 1.0, Random(number))
        while True:
            try:
                return await self.call(number)
            except (TimeoutError, ConnectionError, NotSent):
                await asyncio.sleep(backoff.next_s())


def virtually(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test in virtual time."""

    def ran() -> None:
        run(test, seed=1)

    ran.__doc__ = test.__doc__
    return ran


@pytest.mark.parametrize(("rate", "callers"), [(1_000, 5_000), (100, 1_000), (20, 1_000), (6, 200)])
def test_however_slow_it_is_all_are_served_and_the_failures_end(rate: float, callers: int) -> None:
    async def burst() -> None:
        dependency = Dependency(rate)
        async with asyncio.TaskGroup() as tasks:
            for number in range(callers):
                tasks.create_task(dependency.until_answered(number))
        assert virtual_loop().time() < 1.5 * callers / rate + 30  # grows with the work alone
        assert dependency.failed <= 3 * MOST  # at the start
        assert dependency.asked <= callers + dependency.failed
        assert dependency.under_way_max <= MOST

    run(burst, seed=1)


@virtually
async def test_calls_are_served_in_order_and_urgent_ones_first() -> None:
    dependency = Dependency(100)
    async with asyncio.TaskGroup() as tasks:
        for number in range(100):
            tasks.create_task(dependency.call(number))
        await asyncio.sleep(0)
        for number in range(1_000, 1_000 + URGENT_AT_ONCE):
            tasks.create_task(dependency.call(number, urgent=True))
    urgent = [place for place, number in enumerate(dependency.order) if number >= 1_000]
    assert max(urgent) <= MOST + URGENT_AT_ONCE
    others = [each for each in dependency.order if each < 1_000]
    assert others == sorted(others)


@virtually
async def test_a_dependency_that_is_away_is_asked_rarely_and_serves_all_when_it_is_back() -> None:
    dependency = Dependency(500)
    dependency.is_up = False
    async with asyncio.TaskGroup() as tasks:
        for number in range(200):
            tasks.create_task(dependency.until_answered(number))
        await asyncio.sleep(OUTAGE_S)
        before = dependency.asked
        await asyncio.sleep(OUTAGE_S)
        assert dependency.asked - before < OUTAGE_S * 2 * AT_ONCE_MIN / (PAUSE_MAX_S / 2)
        dependency.is_up = True
        before_s = virtual_loop().time()
    assert virtual_loop().time() - before_s < 10


@virtually
async def test_what_nobody_waits_for_is_not_sent() -> None:
    dependency = Dependency(10)

    async def with_deadline() -> None:
        deadline.set_remaining_s(0.5)
        await dependency.call(1)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(2 * MOST):
            tasks.create_task(dependency.until_answered(0))
        await asyncio.sleep(0)
        late = [asyncio.create_task(with_deadline()) for _ in range(100)]
        cancelled = [asyncio.create_task(dependency.call(2)) for _ in range(100)]
        await asyncio.sleep(0)
        for each in cancelled:
            each.cancel()
        ends = await asyncio.gather(*late, *cancelled, return_exceptions=True)
    assert all(isinstance(each, NotSent) and not each.is_silent for each in ends[:100])
    assert set(dependency.order) == {0}
    assert dependency.limiter.waiting == dependency.limiter.under_way == 0


@virtually
async def test_a_wait_ends_when_the_dependency_answers_nobody() -> None:
    dependency = Dependency(0.01)
    ends = await asyncio.gather(
        *(dependency.call(each) for each in range(10 * MOST)), return_exceptions=True
    )
    assert virtual_loop().time() < 3 * LIMIT_S
    silent = [each for each in ends if isinstance(each, NotSent)]
    assert silent
    assert all(each.is_silent for each in silent)
    assert all(isinstance(each, NotSent | TimeoutError) for each in ends)


@virtually
async def test_what_waits_is_bounded() -> None:
    dependency = Dependency(1_000)
    before, limiter.WAITING_MAX = limiter.WAITING_MAX, 100  # type: ignore[misc]
    try:
        ends = await asyncio.gather(
            *(dependency.call(each) for each in range(200)), return_exceptions=True
        )
    finally:
        limiter.WAITING_MAX = before  # type: ignore[misc]
    assert [each for each in ends if each is not None] == ends[MOST + 100 :]
    assert all(isinstance(each, NotSent) for each in ends[MOST + 100 :])


def test_one_refused_call_does_not_slow_the_others_for_long() -> None:
    concurrency = Concurrency(64)
    together = [concurrency.begin() for _ in range(64)]
    assert [concurrency.slowed(each) for each in together].count(True) == 1
    assert concurrency.at_once == 32
    for _ in range(sum(range(32, 64))):
        concurrency.answered()
    assert concurrency.at_once == 64


def test_the_pauses_of_many_are_spread_over_at_least_half_of_their_length() -> None:
    waits = [Backoff(1.0, 8.0, Random(seed)) for seed in range(1_000)]
    for longest_s in (1.0, 2.0, 4.0, 8.0, 8.0):
        drawn = sorted(each.next_s() for each in waits)
        assert longest_s / 2 <= drawn[0] < 0.55 * longest_s
        assert 0.95 * longest_s < drawn[-1] <= longest_s
    waits[0].reset()
    assert waits[0].next_s() <= 1.0
    assert 0 < SLOW_SHARE < 1
