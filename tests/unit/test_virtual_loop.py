"""The loop of simulations: virtual time, and one run per seed."""

import asyncio
import os
import random
import secrets
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.simulation.ground import (
    EPOCH_S,
    Deadlock,
    OutOfTime,
    Process,
    Shuffle,
    passes,
    run,
    virtual_loop,
)

ROOT = Path(__file__).parents[2]


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await passes(86_400)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 3_600)
        return loop.time() - began

    began = time.monotonic()
    assert run(main, seed=1) == pytest.approx(90_000, abs=0.01)
    assert time.monotonic() - began < 60


def test_an_endless_wait_is_reported_as_a_deadlock() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(wait, seed=1)


def test_a_run_has_a_limit() -> None:
    async def tick() -> None:
        while True:
            await passes(1)

    with pytest.raises(OutOfTime):
        run(tick, seed=1, limit_s=100)


def test_a_busy_task_does_not_starve_timers() -> None:
    async def main() -> list[str]:
        said: list[str] = []
        asyncio.get_running_loop().call_later(0.001, said.append, "timer")
        while not said:
            await asyncio.sleep(0)
        return said

    assert run(main, seed=1) == ["timer"]


def test_tasks_in_a_set_have_an_order() -> None:
    async def main() -> list[str]:
        tasks = {asyncio.create_task(passes(1), name=str(n)) for n in range(100)}
        futures = {asyncio.get_running_loop().create_future() for _ in range(100)}
        order = [task.get_name() for task in tasks]
        done, _ = await asyncio.wait(tasks)
        assert len(futures) == 100
        return order + [task.get_name() for task in done]

    kept = [object() for _ in range(1000)]  # so that later objects have other addresses
    first = run(main, seed=1)
    del kept
    assert run(main, seed=1) == first


def test_the_time_module_tells_virtual_time() -> None:
    from seqgate.services.runtime.refusal_log import RefusalLog

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began_s, wall_s = time.monotonic(), time.time()
        assert wall_s == pytest.approx(EPOCH_S, abs=1)
        clock = RefusalLog.__init__.__defaults__[0]  # type: ignore[index]
        await passes(1_000)
        assert time.monotonic() - began_s == pytest.approx(1_000, abs=0.01)
        assert time.time() - wall_s == pytest.approx(1_000, abs=0.01)
        assert time.time_ns() // 1_000_000_000 == int(time.time())
        assert time.monotonic_ns() // 1_000_000_000 == int(loop.time())
        assert clock() == pytest.approx(time.monotonic())  # bound as a default argument

    real = time.time, time.monotonic, RefusalLog.__init__.__defaults__
    run(main, seed=1)
    assert (time.time, time.monotonic, RefusalLog.__init__.__defaults__) == real


def test_random_numbers_come_from_the_seed() -> None:
    async def main() -> list[object]:
        from seqgate.client._reconnecting import Backoff

        return [
            uuid.uuid4(),
            secrets.token_hex(16),
            secrets.randbelow(2**60),
            os.urandom(8),
            random.random(),
            random.Random().random(),
            [Backoff().next_s() for _ in range(3)],
            virtual_loop().random.random(),
        ]

    first = run(main, seed=1)
    assert run(main, seed=1) == first
    other = run(main, seed=2)
    assert all(one != two for one, two in zip(first, other, strict=True))
    assert uuid.uuid4() != uuid.uuid4()


@pytest.mark.parametrize("shuffle", Shuffle)
def test_the_seed_reorders_ready_callbacks(shuffle: Shuffle) -> None:
    async def main() -> list[str]:
        said: list[str] = []

        async def say(name: str) -> None:
            for number in range(5):
                said.append(f"{name}{number}")
                await asyncio.sleep(0)

        one, two = Process("one"), Process("two")
        tasks = [
            each.spawn(lambda name=name: say(name))  # type: ignore[misc]
            for each, name in ((one, "a"), (one, "b"), (two, "c"))
        ]
        await asyncio.gather(*tasks)
        return said

    runs = {tuple(run(main, seed=seed, shuffle=shuffle)) for seed in range(20)}
    assert run(main, seed=0, shuffle=shuffle) == run(main, seed=0, shuffle=shuffle)
    assert (len(runs) == 1) is (shuffle is Shuffle.NOTHING)
    if shuffle is not Shuffle.EVERYTHING:  # asyncio's order within a process
        ab = {tuple(each for each in said if each[0] in "ab") for said in runs}
        assert len(ab) == 1


def test_work_for_an_executor_takes_virtual_time_and_no_thread() -> None:
    async def main() -> float:
        began = time.monotonic()
        assert await asyncio.to_thread(lambda: 42) == 42
        with pytest.raises(ZeroDivisionError):
            await asyncio.get_running_loop().run_in_executor(None, lambda: 1 / 0)
        return time.monotonic() - began

    assert 0 < run(main, seed=1) < 0.1


def test_uncaught_exceptions_are_kept() -> None:
    async def main() -> None:
        def fail() -> None:
            raise ValueError("unforeseen")

        asyncio.get_running_loop().call_soon(fail)
        await passes(1)
        (failure,) = virtual_loop().failures
        assert isinstance(failure["exception"], ValueError)

    run(main, seed=1)


REPLAYED = """
import asyncio, uuid
from grpc import aio
import grpc
from tests.simulation.ground import Network, Process, installed, passes, run, virtual_loop

async def echo(request, context):
    await asyncio.sleep(virtual_loop().random.random())
    return request + uuid.uuid4().bytes

async def serve():
    server = aio.server()
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_registered_method_handlers("test.Service", handlers)
    server.add_insecure_port("[::]:7000")
    await server.start()
    await server.wait_for_termination()

async def ask(number):
    async with aio.insecure_channel("server:7000") as channel:
        for _ in range(20):
            try:
                method = channel.unary_unary("/test.Service/Echo")
                virtual_loop().trace(await method(b"%d" % number, timeout=0.5))
            except aio.AioRpcError as error:
                virtual_loop().trace(error.code())
                await passes(0.1)

async def main():
    network = Network(virtual_loop())
    network.default.loss = 0.05
    network.default.silent = 0.5
    with installed(network):
        Process("server").start(serve)
        await asyncio.gather(
            *(Process(f"client-{n}").start(lambda n=n: ask(n)) for n in range(5))
        )

run(main, seed=SEED, tell_digest=print)
"""


def test_a_seed_gives_the_same_run_in_another_interpreter() -> None:
    def digest(seed: int) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-c", REPLAYED.replace("SEED", str(seed))],
            env=environment,
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout

    assert len(digest(1)) > 10
    assert digest(1) == digest(1) != digest(2)
