"""Draining, and a caller's deadline."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import pytest
from grpc import aio

from seqgate.services.errors import Draining
from seqgate.services.runtime import deadline
from seqgate.services.runtime.drain import Drain

SOON_S = 0.02
"""Long enough for anything that need not wait."""


class Wire:
    """The part of a stream's context used here: read() returns the caller's messages."""

    def __init__(self, sent: Iterable[Any] = ()) -> None:
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        for each in sent:
            self.sent.put_nowait(each)
        self.cancelled = 0

    async def read(self) -> Any:
        try:
            return await self.sent.get()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


# ---- Drain


async def test_a_drain_wakes_all_waiters() -> None:
    drain = Drain()
    waiting = [asyncio.create_task(drain.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any([drain.begun, *(each.done() for each in waiting)])

    drain.begin()
    drain.begin()  # the second call has no effect
    await asyncio.gather(*waiting)
    assert drain.begun
    assert drain.event.is_set()
    await drain.wait()  # also for a late waiter


async def test_the_start_and_the_end_of_a_drain_are_separate_events() -> None:
    drain = Drain()
    over = asyncio.create_task(drain.wait_over())
    drain.begin()
    await asyncio.sleep(0)
    assert not over.done()
    drain.cut()
    await over


async def test_new_work_is_refused_during_a_drain() -> None:
    drain = Drain()
    drain.check()
    drain.begin()
    with pytest.raises(Draining) as refusal:
        drain.check()
    assert refusal.value.retry_after_s is not None


async def test_a_drain_cuts_short_what_comes_before_a_stream_can_be_told() -> None:
    drain = Drain()
    async with drain.unless_begun():
        await asyncio.sleep(0)

    async def first_message() -> None:
        async with drain.unless_begun():
            await asyncio.Event().wait()

    waiting = [asyncio.create_task(first_message()) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # its caller is gone
    drain.begin()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in outcomes] == [asyncio.CancelledError, Draining]
    with pytest.raises(Draining):
        await first_message()


async def test_a_time_out_of_its_own_is_not_taken_for_a_drain() -> None:
    drain = Drain()

    async def times_out() -> None:
        async with drain.unless_begun():
            drain.begin()
            raise TimeoutError

    with pytest.raises(TimeoutError):
        await times_out()


async def test_a_drain_waits_for_the_last_stream() -> None:
    drain = Drain()
    assert await drain.emptied(SOON_S)  # there is none
    with drain.stream():
        with drain.stream():
            assert not await drain.emptied(SOON_S)
        assert not await drain.emptied(SOON_S)
        emptied = asyncio.create_task(drain.emptied(10))
        await asyncio.sleep(0)
        assert not emptied.done()
    assert await emptied
    assert await drain.emptied(SOON_S)


async def test_a_failed_stream_counts_as_ended() -> None:
    drain = Drain()
    with pytest.raises(ValueError, match="broken"), drain.stream():
        raise ValueError("broken")
    assert await drain.emptied(SOON_S)


async def test_a_stream_yields_requests_until_the_caller_is_done() -> None:
    wire = Wire([1, 2, aio.EOF, 3])
    assert [each async for each in Drain().requests(wire)] == [1, 2]
    assert wire.sent.qsize() == 1


async def test_a_stream_yields_nothing_after_a_drain_began() -> None:
    drain, wire = Drain(), Wire([1])
    requests = drain.requests(wire)
    assert await anext(requests) == 1
    waiting = asyncio.create_task(anext(requests, "the end"))
    await asyncio.sleep(0)
    assert not waiting.done()
    drain.begin()
    assert await waiting == "the end"
    assert wire.cancelled == 1  # the pending read of the ended stream


async def test_requests_received_before_a_drain_are_not_lost() -> None:
    drain, wire = Drain(), Wire()
    requests = drain.requests(wire)
    waiting = asyncio.create_task(anext(requests, "the end"))
    await asyncio.sleep(SOON_S)
    wire.sent.put_nowait(1)
    await asyncio.sleep(0)  # received by the read
    drain.begin()
    assert await waiting == 1
    assert await anext(requests, "the end") == "the end"


async def test_a_dropped_stream_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    drain, wire = Drain(), Wire([1])
    requests = drain.requests(wire)
    assert await anext(requests) == 1
    assert isinstance(requests, AsyncGenerator)
    await requests.aclose()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


# ---- deadlines


async def remaining_s(
    caller_s: float | None, at_most_s: float | None, *, later_s: float = 0.0
) -> float | None:
    """The remaining time of a call. Each call is a task, and its deadline ends with it."""

    async def call() -> float | None:
        deadline.set_remaining_s(caller_s)
        await asyncio.sleep(later_s)
        return deadline.remaining_s(at_most_s)

    return await asyncio.create_task(call())


@pytest.mark.parametrize(
    ("caller_s", "at_most_s", "least_s", "most_s"),
    [
        (None, None, None, None),
        (None, 5.0, 5.0, 5.0),
        (60.0, None, 30.0, 60.0),
        (60.0, 90.0, 30.0, 60.0),
        (90.0, 5.0, 5.0, 5.0),
        (0.0, 5.0, 0.0, 0.0),
        (-1.0, 5.0, 0.0, 0.0),  # already past
        (-1.0, None, 0.0, 0.0),
    ],
)
async def test_a_call_ends_at_its_callers_deadline(
    caller_s: float | None, at_most_s: float | None, least_s: float | None, most_s: float | None
) -> None:
    left_s = await remaining_s(caller_s, at_most_s)
    if least_s is None or most_s is None:
        assert left_s is None
    else:
        assert left_s is not None
        assert least_s <= left_s <= most_s


async def test_the_time_left_decreases() -> None:
    left_s = await remaining_s(60.0, None, later_s=SOON_S)
    assert left_s is not None
    assert left_s < 60.0


async def test_a_deadline_belongs_to_its_own_call() -> None:
    short_s, none_s = await asyncio.gather(remaining_s(5.0, 100.0), remaining_s(None, 100.0))
    assert short_s is not None
    assert short_s <= 5.0
    assert none_s == 100.0
