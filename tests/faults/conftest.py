"""Fixtures of the fault tests."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults.world import World


@pytest_asyncio.fixture(scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """One stack for all tests of a module, each of which uses its own topics."""
    made = World(tmp_path_factory.mktemp("world"))
    async with made.stack:
        yield made
