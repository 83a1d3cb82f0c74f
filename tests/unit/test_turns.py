"""Work of one key is done one after another, whoever gives up meanwhile."""

import asyncio

import pytest

from seqgate.services.errors import Fenced, ServiceBusy
from seqgate.services.runtime import waiting
from seqgate.services.runtime.turns import Turns


async def test_work_of_a_key_is_done_in_order_and_beside_that_of_others() -> None:
    turns = Turns[str]("steps")
    gates = {key: asyncio.Event() for key in "ab"}
    done: list[str] = []

    async def work(key: str, number: int) -> int:
        await gates[key].wait()
        done.append(f"{key}{number}")
        return number

    async def take(key: str, number: int) -> int:
        return await turns.take(key, lambda: work(key, number))

    tasks = [asyncio.create_task(take(key, number)) for number in range(3) for key in "ab"]
    gates["b"].set()
    assert await asyncio.gather(*tasks[1::2]) == [0, 1, 2]
    assert done == ["b0", "b1", "b2"]
    gates["a"].set()
    assert await asyncio.gather(*tasks[0::2]) == [0, 1, 2]
    assert done[3:] == ["a0", "a1", "a2"]


async def test_a_cancelled_caller_keeps_its_turn_and_a_refusal_ends_it() -> None:
    turns = Turns[str]("steps")
    gate, done = asyncio.Event(), list[int]()

    async def work(number: int) -> None:
        await gate.wait()
        done.append(number)
        if number == 1:
            raise Fenced("refused")

    tasks = [asyncio.create_task(turns.take("a", lambda i=i: work(i))) for i in range(3)]  # type: ignore[misc]
    await asyncio.sleep(0)
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    gate.set()
    with pytest.raises(Fenced):
        await tasks[1]
    await tasks[2]
    assert done == [0, 1, 2]


async def test_what_waits_is_bounded_and_finished_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "WAITING_MAX", 2)
    turns = Turns[str]("steps")
    gate, done = asyncio.Event(), list[int]()

    async def work() -> None:
        await gate.wait()
        done.append(1)

    tasks = [asyncio.create_task(turns.take("a", work)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ServiceBusy):
        await turns.take("b", work)
    gate.set()
    await turns.close(60)
    assert done == [1, 1]
    await asyncio.gather(*tasks)
    await turns.take("b", work)
