"""Locks by key: services/runtime/locks.py."""

import asyncio

from seqgate.services.runtime.locks import Locks


async def test_a_woken_waiter_and_a_newcomer_do_not_share_a_key() -> None:
    locks: Locks[str] = Locks()
    holding = 0
    most = 0

    async def hold() -> None:
        nonlocal holding, most
        async with locks.of("key"):
            holding += 1
            most = max(most, holding)
            await asyncio.sleep(0)
            holding -= 1

    async def come_and_go() -> None:
        for _ in range(10):
            await hold()

    await asyncio.gather(*(come_and_go() for _ in range(5)))
    assert most == 1
    assert not locks._locks
    assert not locks._users


async def test_keys_do_not_block_one_another() -> None:
    locks: Locks[str] = Locks()
    async with locks.of("a"), asyncio.timeout(1), locks.of("b"):
        assert set(locks._locks) == {"a", "b"}
    assert not locks._locks
