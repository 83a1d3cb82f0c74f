"""Every process is stopped, one after the other, and restarted under load: nothing is lost,
duplicated or reordered, and accepted calls are answered."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from grpc import StatusCode, aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.cursor.v1 import cursor_pb2
from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.filter.v1 import filter_pb2
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import connect
from seqgate.dev.stack import Stack
from seqgate.owners import FollowingChannel, owner_named
from tests.integration.refusals import status_of_call
from tests.integration.services import channel_to, log_lines
from tests.support.application import Application
from tests.support.delivering import Group, all_acknowledged, is_here, load, positions
from tests.support.delivery_checkers import check
from tests.support.depth import some_of
from tests.support.stubs import cursor_stub, dedup_stub
from tests.support.waiting import eventually

DRAIN_S = 5.0
GRACE_S = 5.0

ENVIRONMENT = {
    "SEQGATE_DISPATCHER_LEASE_S": "2",
    "SEQGATE_DISPATCHER_CALL_TIMEOUT_S": "1",
    **{
        f"SEQGATE_{service}_{name}": str(seconds)
        for service in ("LEDGER", "CURSOR", "DEDUP", "DISPATCHER", "FILTER")
        for name, seconds in (("DRAIN_TIMEOUT_S", DRAIN_S), ("STOP_GRACE_S", GRACE_S))
    },
}

CALLERS = 4
"""Concurrent callers."""


@pytest.fixture(scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two processes of each service."""
    folder: Path = tmp_path_factory.mktemp("rolling")
    async with Stack(folder, instances=2, replicas=2, environment=ENVIRONMENT) as stack:
        yield stack


async def restart(stack: Stack, name: str) -> None:
    """Stop a process as an orchestrator does, and restart it."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await stack.terminate(name) == 0
    assert loop.time() - began < DRAIN_S + GRACE_S
    lines = log_lines(stack, name)
    assert lines[-1]["event"] == "stopped"
    assert not [
        each for each in lines if each["event"] == "streams cut at the end of drain_timeout_s"
    ]
    await stack.run(name)


async def only_what_is_here(stack: Stack, topic: str, subscription: str) -> None:
    """Create a subscription that accepts only messages whose property `place` is `here`."""
    async with channel_to(stack.address("dispatcher")) as channel:
        stub: Any = DispatcherServiceStub(channel)
        names: dict[str, Any] = {"topic": topic, "subscription": subscription}
        start = common_pb2.Start(earliest=common_pb2.Earliest())
        chain = [filter_pb2.Filter(name="here", version=1, expression="properties.place == 'here'")]
        await stub.CreateSubscription(
            dispatcher_pb2.CreateSubscriptionRequest(**names, start=start)
        )
        await stub.SetFilters(dispatcher_pb2.SetFiltersRequest(**names, filters=chain, start=start))


async def test_a_rolling_restart_under_load_loses_duplicates_and_reorders_nothing(
    stack: Stack, seed: int
) -> None:
    topic = "public/default/rolling"
    application = Application(
        stack.target("ledger"), stack.address("dedup"), f"{topic}-published", Random(seed)
    )
    dispatchers = [stack.address(each) for each in stack.instances["dispatcher"]]
    group = Group(topic, dispatchers, Random(seed))
    choosy = Group(topic, dispatchers, Random(seed), subscription="choosy")
    seen: list[int] = []

    async def read() -> None:
        async with connect(stack.target("ledger")) as client, client.reader(topic) as reader:
            async for message in reader:
                seen.append(message.sequence_id)  # noqa: PERF401 - others look meanwhile

    async def publish() -> None:
        while True:
            await application.publish(20)

    async with connect(stack.target("ledger")) as client, client.producer(topic):
        await only_what_is_here(stack, topic, "choosy")
    async with AsyncExitStack() as consuming:
        async with load(stack, topic):
            for each in (group, choosy):
                await consuming.enter_async_context(each.running())
                await each.given(20)
            reading, publishing = asyncio.create_task(read()), asyncio.create_task(publish())
            for name in reversed(stack.services):
                await restart(stack, name)
                before = len(seen)
                for each in (group, choosy):
                    await each.given(30)
                await eventually(lambda: len(seen) > before, "what is new is read")  # noqa: B023
                assert not publishing.done()
        published = await all_acknowledged(stack, topic)
        await all_acknowledged(stack, topic, "choosy")
        await eventually(lambda: len(seen) == len(published), "everything is read")
    check(group.history, published)
    wanted = await positions(stack, topic, is_here)
    check(choosy.history, wanted)
    assert {each.position for each in choosy.history.given.values()} == set(wanted)
    assert seen == list(range(len(published)))
    reading.cancel()
    publishing.cancel()
    await asyncio.wait([reading, publishing])
    # Messages whose stream was cut have no receipt, and are sent again.
    await application.publish(20)
    await application.check_log()
    await application.check_state()


@dataclass
class Calls:
    """Calls that each create something, and their outcomes."""

    made: list[str] = field(default_factory=list)
    refused: list[tuple[str, aio.AioRpcError]] = field(default_factory=list)

    @asynccontextmanager
    async def going_on(self, call: Callable[[str], Awaitable[object]]) -> AsyncIterator[None]:
        """Make calls for as long as the block runs."""
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for caller in range(CALLERS):
                tasks.create_task(self._keep(call, caller, over))
            try:
                yield
            finally:
                over.set()

    async def _keep(
        self, call: Callable[[str], Awaitable[object]], caller: int, over: asyncio.Event
    ) -> None:
        number = 0
        while not over.is_set():
            number += 1
            name = f"{caller}-{number}"
            try:
                await call(name)
            except aio.AioRpcError as error:
                self.refused.append((name, error))
                await asyncio.sleep(0.001)
            else:
                self.made.append(name)


def nobody_took_it(error: aio.AioRpcError) -> bool:
    """Whether a call was refused unprocessed: by a draining service, or because none was
    running."""
    if error.code() not in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED):
        return False
    return not error.trailing_metadata() or "DRAINING" in str(status_of_call(error))


@dataclass(frozen=True)
class Work:
    """Calls that each create something by a name, and the check for which names exist
    afterwards."""

    make: Callable[[str], Awaitable[object]]
    made: Callable[[Iterable[str]], Awaitable[set[str]]]


def of_ledger(stub: Any, elsewhere: Any, prefix: str) -> Work:
    """Calls that create topics."""

    async def make(name: str) -> None:
        await stub.CreateTopic(ledger_pb2.CreateTopicRequest(topic=f"{prefix}-{name}"))

    async def made(_: Iterable[str]) -> set[str]:
        request = ledger_pb2.ListTopicsRequest(prefix=f"{prefix}-", page_size=10_000)
        found = (await elsewhere.ListTopics(request)).topics
        return {each.name.removeprefix(f"{prefix}-") for each in found}

    return Work(make, made)


def of_cursor(stub: Any, elsewhere: Any, prefix: str) -> Work:
    """Calls that create cursors."""

    async def make(name: str) -> None:
        await stub.CreateCursor(
            cursor_pb2.CreateCursorRequest(topic=f"{prefix}-{name}", cursor="c")
        )

    async def made(_: Iterable[str]) -> set[str]:
        found = [each async for each in cursors(elsewhere)]
        return {each.topic.removeprefix(f"{prefix}-") for each in found if prefix in each.topic}

    return Work(make, made)


def of_dispatcher(stub: Any, elsewhere: Any, topic: str) -> Work:
    """Calls that create subscriptions."""
    start = common_pb2.Start(earliest=common_pb2.Earliest())

    async def make(name: str) -> None:
        await stub.CreateSubscription(
            dispatcher_pb2.CreateSubscriptionRequest(topic=topic, subscription=name, start=start)
        )

    async def made(_: Iterable[str]) -> set[str]:
        return {each.name async for each in cursors(elsewhere, topic)}

    return Work(make, made)


def of_dedup(stub: Any, elsewhere: Any, prefix: str) -> Work:
    """Calls that create state of topics."""
    writer = writer_pb2.Writer(incarnation=1, epoch=1)

    async def make(name: str) -> None:
        await stub.Admit(writer_pb2.AdmitRequest(topic=f"{prefix}-{name}", writer=writer))

    async def is_there(name: str) -> bool:
        request = dedup_pb2.GetTopicStatusRequest(topic=f"{prefix}-{name}")
        return bool((await elsewhere.GetTopicStatus(request)).epoch)

    async def made(names: Iterable[str]) -> set[str]:
        return {name for name in names if await is_there(name)}  # all at once would be too many

    return Work(make, made)


async def cursors(stub: Any, topic: str = "") -> AsyncIterator[Any]:
    request = cursor_pb2.ListCursorsRequest(topic=topic, page_size=1_000)
    while True:
        page = await stub.ListCursors(request)
        for each in page.cursors:
            yield each
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


WORKS: Any = {
    "ledger": (of_ledger, LedgerServiceStub, "ledger", LedgerServiceStub),
    "cursor": (of_cursor, cursor_stub, "cursor", cursor_stub),
    "dispatcher": (of_dispatcher, DispatcherServiceStub, "cursor", cursor_stub),
    "dedup": (of_dedup, dedup_stub, "dedup", dedup_stub),
}
"""The calls for each service, and the service that lists their results."""


@pytest.mark.parametrize(
    "name", some_of(["cursor-1", "cursor", "ledger-1", "ledger", "dispatcher", "dedup"], every=3)
)
async def test_accepted_calls_are_answered_during_a_restart(stack: Stack, name: str) -> None:
    """Each call creates something: a refused call created nothing, an answered one did."""
    calls = Calls()
    topic = f"public/default/accepted-{name}"
    async with (
        connect(stack.target("ledger")) as client,
        client.producer(topic) as producer,
    ):
        await producer.send(b"x")
    of_service, asked, elsewhere, told = WORKS[name.partition("-")[0]]
    async with (
        channel_to(stack.address(name)) as channel,
        FollowingChannel(stack.target(elsewhere), channel_to) as others,
    ):
        work = of_service(asked(channel), told(others), topic)
        async with calls.going_on(work.make):
            await eventually(lambda: len(calls.made) > 20)
            await restart(stack, name)
            count = len(calls.made)
            await eventually(lambda: len(calls.made) > count + 20)
        there = await work.made([*calls.made, *(what for what, _ in calls.refused)])
    assert set(calls.made) <= there
    lost = [
        (what, error)
        for what, error in calls.refused
        if what in there or not (owner_named(error) or nobody_took_it(error))
    ]
    assert not lost, lost[:3]
