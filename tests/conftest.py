"""Fixtures for every test."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, Verbosity, settings
from xdist.scheduler import LoadFileScheduling

from seqgate.dev.stack import Stack
from tests.support.depth import is_deep, times
from tests.support.nursery import Nursery
from tests.support.postgres_server import PostgresServer, running_postgres
from tests.support.redis_groups import Cluster, Sentinels, running
from tests.support.redis_server import RedisServer, running_redis

SPARK = "tests/spark/"

settings.register_profile(
    "default",
    max_examples=times(quick=40, full=100),
    deadline=None,
    print_blob=True,
    database=None,
    verbosity=Verbosity.normal,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("default")

# A traceback in colour takes a second to format.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        ),
    ]
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out deep tests unless requested. Tests with the longest time-outs run first and unit
    tests last: short ones fill the end, when workers run idle."""
    if not is_deep():
        left_out = [item for item in items if item.get_closest_marker("deep") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

    def rank(item: pytest.Item) -> tuple[float, bool]:
        marker = item.get_closest_marker("timeout")
        timeout_s = float(marker.args[0]) if marker is not None else 0.0
        return -timeout_s, "unit" in item.path.parts

    items.sort(key=rank)


class ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist is untyped
    """The tests of a file share a worker, and what it started; all tests with Spark share a JVM."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return SPARK if file.startswith(SPARK) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    """With `--dist loadfile`, distribute tests by file."""
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="module", autouse=True)
def long_lived() -> None:
    """Exempt what earlier modules left, and the thousands of collected tests, from garbage
    collection. Simulations collect it once a history."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nursery() -> Iterator[Nursery]:
    """Starts services of stacks, and commands, without Python's start-up time."""
    made = Nursery()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stack, "start_process", staticmethod(made.start))
        yield made
    made.close()


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests that need no more than keys of their own topics."""
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One server for all tests that need no more than databases of their own."""
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sentinels]:
    """A master behind Sentinels. A test that kills a server restarts it and calls `settle`."""
    with running(Sentinels(tmp_path_factory.mktemp("sentinels"))) as group:
        yield group


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose first primary has a replica. A test that kills a server restarts it and calls
    `settle`."""
    with running(Cluster(tmp_path_factory.mktemp("cluster"), replicas=1)) as group:
        yield group


@pytest.fixture(scope="session")
def seed() -> int:
    """The first seed of generated histories: SEQGATE_TEST_SEED, or 0. A failure names its history's
    seed."""
    return int(os.environ.get("SEQGATE_TEST_SEED", "0"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).resolve().parents[1]


os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# Shells make background commands ignore interrupts, which child processes inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
