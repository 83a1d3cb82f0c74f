"""Fixtures of integration tests: real services, as child processes, over real gRPC."""

import itertools
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import StatusCode, aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.dev.stack import SERVICES, Stack
from tests.integration.services import Services, pids_of, running, serving
from tests.support.depth import is_deep
from tests.support.waiting import eventually

STOPPABLE = "public/default/stoppable"
"""The topic by which `stoppable` finds out whether its stack works again."""

_numbers = itertools.count(1)


ON_BOTH_STORES = frozenset({"test_cursor_api", "test_ledger_api"})
"""The modules whose tests run on both stores every day; the others do in test-deep."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests that share a stack on both stores."""
    if "services" not in metafunc.fixturenames or not _is_shared(metafunc):
        return
    both = is_deep() or metafunc.module.__name__.rpartition(".")[2] in ON_BOTH_STORES
    stores = ["sqlite", "postgres"] if both else ["sqlite"]
    metafunc.parametrize("services", stores, indirect=True, scope="session")


def _is_shared(metafunc: pytest.Metafunc) -> bool:
    """Whether a test's `services` are those of this file, on any store."""
    if any("services" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")):
        return False
    (made, *_) = reversed(metafunc._arg2fixturedefs["services"])
    return bool(made.baseid == str(Path(__file__).parent.relative_to(metafunc.config.rootpath)))


ON_SQLITE = pytest.mark.parametrize("services", ["sqlite"], indirect=True)
"""For tests of processes that take a topic from each other: on PostgreSQL one names the other."""


@pytest_asyncio.fixture(scope="session")
async def services(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Services]:
    """One stack and its stubs, shared by all tests that need no more than topics of their own."""
    settings = {
        # State compared before and after a refusal must not change when a minute passes.
        "SEQGATE_LEDGER_KEEP_INTERVAL_S": "3600",
        # A snapshot of each of the thousands of topics would cost more than some tests do.
        "SEQGATE_DEDUP_SNAPSHOT_CHECK_INTERVAL_S": "3600",
        # No other instance takes over from this dispatcher, and a busy machine may stall it for ten
        # seconds.
        "SEQGATE_DISPATCHER_LEASE_S": "600",
    }
    folder = tmp_path_factory.mktemp(f"stack-{request.param}")
    async with running(folder, store=request.param, **settings) as services:
        yield services


@pytest.fixture(scope="session")
def stack(services: Services) -> Stack:
    return services.stack


@pytest.fixture(scope="session")
def ledger(services: Services) -> Any:
    return services.ledger


@pytest.fixture(scope="session")
def dedup(services: Services) -> Any:
    return services.dedup


@pytest.fixture(scope="session")
def cursor(services: Services) -> Any:
    return services.cursor


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic that no other test uses."""
    test = re.sub(r"\W+", "-", request.node.name).strip("-")[:120]
    return f"public/default/{test}-{next(_numbers)}"


@pytest_asyncio.fixture(scope="session")
async def second_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    """The stack behind `stoppable`."""
    # A call that Redis holds up must outlast what a busy machine does meanwhile.
    settings = {"SEQGATE_DEDUP_REDIS_TIMEOUT_S": "30"}
    async with running(tmp_path_factory.mktemp("stoppable"), **settings) as services:
        await services.ledger.CreateTopic(ledger_pb2.CreateTopicRequest(topic=STOPPABLE))
        yield services


@pytest.fixture
async def stoppable(second_stack: Services) -> AsyncIterator[Services]:
    """One stack for all tests that stop parts of it: stopped parts are restarted for the next
    test."""
    yield second_stack
    stack = second_stack.stack
    for name in ("redis", *SERVICES):
        if name not in pids_of(stack):
            await stack.run(name)
    for service in SERVICES:
        await serving(stack.address(service))
    await eventually(lambda: _subscribes(second_stack), "the dispatcher subscribes again")


async def _subscribes(services: Services) -> bool:
    """Whether the dispatcher reaches the ledger and the cursor service. It may have stayed ready if
    both were away for less than its check interval, and still back off."""
    names: dict[str, Any] = {"topic": STOPPABLE, "subscription": f"s-{next(_numbers)}"}
    start = common_pb2.Start(earliest=common_pb2.Earliest())
    try:
        await services.dispatcher.CreateSubscription(
            dispatcher_pb2.CreateSubscriptionRequest(start=start, **names)
        )
        await services.dispatcher.DeleteSubscription(
            dispatcher_pb2.DeleteSubscriptionRequest(**names)
        )
    except aio.AioRpcError as error:
        if error.code() is not StatusCode.UNAVAILABLE:
            raise
        return False
    return True


@pytest.fixture
def private(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Services]]:
    """Makes a stack for this test alone:

    async with private(SEQGATE_LEDGER_AUTO_CREATE="[]", policies="...") as services: ...

    All stacks of one test use the same folder, so that a second stack continues from the first.
    """

    def make(**arguments: Any) -> AbstractAsyncContextManager[Services]:
        return running(tmp_path / "stack", **arguments)

    return make
