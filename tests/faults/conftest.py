"""Fixtures of the fault tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.small_disk import way_to_mount
from tests.faults.world import World
from tests.support.left_out import report_left_out

SMALL_DISK = "test_postgres_full_disk.py"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the test of a full disk where this user cannot mount one, and report it."""
    is_it = collection_path == Path(__file__).with_name(SMALL_DISK)
    if not is_it or way_to_mount() is not None:
        return None
    report_left_out(config, f"tests/faults/{SMALL_DISK}", "user namespaces, to mount a small disk")
    return True


@pytest_asyncio.fixture(scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """One stack for all tests of a module, each of which uses its own topics."""
    made = World(tmp_path_factory.mktemp("world"))
    async with made.stack:
        yield made
