"""Processes of simulations: killed, stopped, with their own clocks."""

import asyncio
import contextvars
import gc
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.simulation.ground import Process, passes, run, virtual_loop


async def for_ever(said: list[Any]) -> None:
    """Ticks, and records its unwinding."""

    async def numbers() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            said.append("generator")

    @asynccontextmanager
    async def held() -> AsyncIterator[None]:
        try:
            yield
        finally:
            said.append("context")

    try:
        async with held():
            async for _ in numbers():
                said.append("tick")
                await passes(1)
    except BaseException:
        said.append("except")
        raise
    finally:
        said.append("finally")


def test_a_killed_process_runs_nothing_not_even_finally() -> None:
    async def main() -> list[Any]:
        said: list[Any] = []
        process = Process("one")
        process.start(lambda: for_ever(said))
        await passes(2.5)
        process.kill()
        assert not process.is_alive
        await process.ended()
        gc.collect()
        await passes(10)
        gc.collect()
        return list(said)

    assert run(main, seed=1) == ["tick"] * 3


def test_a_process_that_kills_itself_gets_no_further() -> None:
    async def main() -> list[Any]:
        said: list[Any] = []
        process = Process("one")

        async def work() -> None:
            try:
                said.append("before")
                await process.die()
                said.append("after")  # type: ignore[unreachable]
            finally:
                said.append("finally")

        process.start(work)
        await process.ended()
        await passes(1)
        return list(said)

    assert run(main, seed=1) == ["before"]


def test_tasks_started_in_an_empty_context_belong_to_the_process() -> None:
    async def main() -> list[str]:
        said: list[str] = []
        process = Process("one")

        async def inner() -> None:
            said.append(virtual_loop().process.name)
            await asyncio.to_thread(lambda: said.append(virtual_loop().process.name))
            await passes(100)
            said.append("alive")

        async def work() -> None:
            loop = asyncio.get_running_loop()
            task = loop.create_task(inner(), context=contextvars.Context())
            loop.call_later(1, lambda: said.append(virtual_loop().process.name))
            await passes(1_000)
            await task

        process.start(work)
        await passes(2)
        process.kill()
        await passes(200)
        return said

    assert run(main, seed=1) == ["one"] * 3


def test_a_task_runs_in_its_process_when_another_wakes_it() -> None:
    async def main() -> list[str]:
        said: list[str] = []
        event = asyncio.Event()

        async def wait() -> None:
            await event.wait()
            said.append(virtual_loop().process.name)

        async def wake() -> None:
            event.set()
            await passes(1)

        waiting = Process("waiting").spawn(wait)
        await Process("waking").spawn(wake)
        await waiting
        said.append(virtual_loop().process.name)
        return said

    assert run(main, seed=1) == ["waiting", "world"]


def test_a_paused_process_is_late() -> None:
    async def main() -> list[float]:
        said: list[float] = []
        process = Process("one")

        async def tick() -> None:
            for _ in range(4):
                await passes(1)
                said.append(round(time.monotonic(), 2))

        process.start(tick)
        await passes(1.5)
        process.signal(signal.SIGSTOP)
        assert process.is_stopped
        assert process.is_alive
        await passes(5)
        process.signal(signal.SIGCONT)
        await process.ended()
        assert process.failure is None
        return said

    assert run(main, seed=1) == [1.0, 6.5, 7.5, 8.5]


def test_signals_are_per_process() -> None:
    async def main() -> None:
        async def serve() -> None:
            told = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
            await told.wait()
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

        one, two, deaf = Process("one"), Process("two"), Process("deaf")
        for each in (one, two):
            each.start(serve)
        deaf.start(lambda: for_ever([]))
        await passes(1)
        one.signal(signal.SIGTERM)
        await one.ended()
        assert two.is_alive
        deaf.signal(signal.SIGTERM)
        assert not deaf.is_alive

    run(main, seed=1)


def test_a_process_ends_with_its_main_coroutine() -> None:
    async def main() -> None:
        async def fail() -> None:
            await passes(1)
            raise ValueError("unforeseen")

        process = Process("one")
        process.start(fail)
        await process.ended()
        assert isinstance(process.failure, ValueError)

    run(main, seed=1)


def test_clocks_are_per_process() -> None:
    async def main() -> None:
        async def clocks() -> tuple[float, float]:
            return time.time(), time.monotonic()

        process = Process("one")
        process.clock.begin_at(1_000_000)
        wall_s, monotonic_s = await process.spawn(clocks)
        assert wall_s == pytest.approx(time.time(), abs=0.01)
        assert monotonic_s == pytest.approx(1_000_000, abs=0.01)
        process.clock.jump(-3_600)
        assert process.clock.ahead_s == pytest.approx(-3_600)
        process.clock.drift(1.5)
        await passes(100)
        later_s, later_monotonic_s = await process.spawn(clocks)
        assert later_monotonic_s - monotonic_s == pytest.approx(150, abs=0.01)
        assert later_s - wall_s == pytest.approx(150 - 3_600, abs=0.01)

        async def sleep() -> None:
            await passes(30)

        began = virtual_loop().now
        await process.spawn(sleep)
        assert virtual_loop().now - began == pytest.approx(20, abs=0.01)

    run(main, seed=1)
