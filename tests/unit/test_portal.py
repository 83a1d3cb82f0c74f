"""seqgate/client/blocking/_portal.py: threads and the loop of a client."""

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from seqgate.client.blocking._portal import Outcome, Portal
from seqgate.errors import NotFoundError
from tests.support.waiting import WITHIN_S

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


async def nothing() -> None: ...


@pytest.fixture
def portal() -> Iterator[Portal]:
    made = Portal("test")
    made.start()
    yield made
    made.close(nothing)


class Held:
    """Holds up a portal's loop."""

    def __init__(self, portal: Portal) -> None:
        self._go = threading.Event()
        begun = threading.Event()

        def hold() -> None:
            begun.set()
            assert self._go.wait(WITHIN_S)

        portal.post(hold)
        assert begun.wait(WITHIN_S)

    def end(self) -> None:
        self._go.set()


def test_a_coroutine_runs_in_the_loops_thread_and_returns_its_result(portal: Portal) -> None:
    async def sum_of(one: int, *, other: int) -> tuple[int, int]:
        await asyncio.sleep(0)
        return one + other, threading.get_ident()

    result, thread = portal.run(sum_of, 1, other=2)
    assert result == 3
    assert thread != threading.get_ident()


def test_a_coroutine_runs_in_the_callers_context(portal: Portal) -> None:
    """So the caller's span is the parent of the client's."""

    async def value() -> str:
        return VARIABLE.get()

    VARIABLE.set("ours")
    assert portal.run(value) == "ours"


def test_an_error_is_raised_where_the_call_was_made_without_the_loops_frames(
    portal: Portal,
) -> None:
    """The frames would keep the client's gRPC calls alive as long as the error."""

    async def fail() -> None:
        raise NotFoundError("none") from OSError("cause")

    with pytest.raises(NotFoundError, match="none") as raised:
        portal.run(fail)
    assert isinstance(raised.value.__cause__, OSError)
    assert "fail" not in [each.name for each in raised.traceback]


def test_posts_join_a_hand_over_that_is_scheduled(portal: Portal) -> None:
    held = Held(portal)
    before = portal.hand_overs
    calls: list[int] = []
    for number in range(1_000):
        portal.post(lambda number=number: calls.append(number))  # type: ignore[misc]
    held.end()

    async def seen() -> list[int]:
        return list(calls)

    assert portal.run(seen) == list(range(1_000))
    assert portal.hand_overs - before <= 2


def test_what_is_posted_from_many_threads_is_called_once_each(portal: Portal) -> None:
    calls: list[int] = []
    with ThreadPoolExecutor(8) as pool:
        for number in range(2_000):
            pool.submit(portal.post, lambda number=number: calls.append(number))  # type: ignore[misc]
    assert sorted(portal.call(lambda: list(calls))) == list(range(2_000))


def test_a_post_that_fails_is_logged_and_spares_the_others(
    portal: Portal, caplog: pytest.LogCaptureFixture
) -> None:
    held, calls = Held(portal), list[int]()
    portal.post(lambda: 1 / 0)
    portal.post(lambda: calls.append(1))
    held.end()
    assert portal.call(lambda: list(calls)) == [1]
    assert "a callback failed in the thread of a client" in caplog.text


def test_a_bell_that_rings_often_calls_once(portal: Portal) -> None:
    calls: list[int] = []
    ring = portal.bell(lambda: calls.append(1))
    held = Held(portal)
    for _ in range(100):
        ring()
    held.end()
    assert portal.call(lambda: len(calls)) == 1
    ring()
    assert portal.call(lambda: len(calls)) == 2


def test_calls_under_way_when_the_portal_is_closed_raise() -> None:
    portal = Portal("test")
    portal.start()
    begun = threading.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(portal.run, wait)
        assert begun.wait(WITHIN_S)
        portal.close(nothing)
        with pytest.raises(RuntimeError, match="the client was closed"):
            waiting.result(WITHIN_S)


def test_a_closed_portal_refuses_calls_and_has_no_thread() -> None:
    threads = threading.active_count()
    portal = Portal("test")
    portal.start()
    portal.call(lambda: None)
    assert threading.active_count() == threads + 1
    portal.close(nothing)
    portal.close(nothing)
    assert threading.active_count() == threads
    with pytest.raises(RuntimeError, match="the client is closed"):
        portal.run(nothing)
    called: list[int] = []
    portal.post(lambda: called.append(1))
    assert called, "what is posted too late is called at once, and finds everything closed"


def test_an_outcome_is_a_future_for_all_who_wait_before_or_after() -> None:
    told: list[object] = []
    outcomes = [Outcome() for _ in range(400)]
    for outcome in outcomes[::2]:
        outcome.add_done_callback(lambda each: told.append(each.exception() or each.result()))
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(outcome.result, WITHIN_S) for outcome in outcomes]
        for number, outcome in enumerate(outcomes):
            assert not outcome.cancel()
            if number % 5:
                outcome.set_result(number)
            else:
                outcome.set_exception(NotFoundError(str(number)))
        done, missing = wait(outcomes, WITHIN_S)
        failed = [each.exception(WITHIN_S) for each in waiting]
    assert (len(done), len(missing)) == (400, 0)
    assert [number for number, error in enumerate(failed) if error] == list(range(0, 400, 5))
    outcomes[1].add_done_callback(lambda each: told.append(each.result()))
    assert len(told) == 201
    assert told[-1] == 1
    with pytest.raises(NotFoundError, match="0"):
        outcomes[0].result()


def test_a_callback_that_fails_is_logged_and_spares_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outcome, told = Outcome(), list[Future[Any]]()
    outcome.add_done_callback(lambda _: 1 / 0)
    outcome.add_done_callback(told.append)
    outcome.set_result(None)
    assert told == [outcome]
    assert "a callback of a future failed" in caplog.text


def test_an_outcome_that_does_not_come_times_out() -> None:
    with pytest.raises(TimeoutError):
        Outcome().result(timeout=0)
    with pytest.raises(TimeoutError):
        Outcome().exception(timeout=0)


def test_an_outcome_that_comes_while_a_thread_begins_to_wait_is_seen() -> None:
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2_000):
            outcome = Outcome()
            waiting = pool.submit(outcome.result, WITHIN_S)
            outcome.set_result(1)
            assert waiting.result() == 1


async def test_the_loops_own_thread_and_other_loops_are_refused(portal: Portal) -> None:
    async def inside() -> None:
        with pytest.raises(RuntimeError, match=r"use the asyncio client, seqgate\.client"):
            portal.run(nothing)

    await asyncio.to_thread(portal.run, inside)
    await inside()
