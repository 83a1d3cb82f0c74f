"""What every test may ask for."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Verbosity, settings

from tests.support.redis_server import RedisServer, running_redis

settings.register_profile(
    "default",
    deadline=None,
    print_blob=True,
    database=None,
    verbosity=Verbosity.normal,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("default")


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests that only need a database of their own topics."""
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def seed() -> int:
    """Where generated histories start: SEQGATE_TEST_SEED, or 0. A failure names the seed of the
    history that failed."""
    return int(os.environ.get("SEQGATE_TEST_SEED", "0"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).resolve().parents[1]


os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# A shell has what it runs in the background ignore interrupts, and processes pass that on.
signal.signal(signal.SIGINT, signal.default_int_handler)
