"""Each call of the ledger to its store on PostgreSQL fails, once or until further notice, before it
takes effect or after: callers get a typed error or wait, and nothing is lost or stored twice."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import pytest_asyncio

from seqgate.services.errors import DomainError, Kind, StoreUnavailable
from seqgate.services.ledger.adapters.postgres import (
    PostgresLedgerStore,
    PostgresRegister,
    open_postgres_store,
)
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.core.entry import Entry, unit_of
from seqgate.services.ledger.core.receipt import Status
from seqgate.services.ledger.owners import SharedOwner
from seqgate.services.ledger.ports import LedgerStore, TopicNotFound
from seqgate.services.ledger.service import Ledger, Opening, ReadRange
from seqgate.services.runtime.cursors import MemoryCursors
from seqgate.services.runtime.postgres import Server
from seqgate.types import Position, TopicName
from tests.support.entries import large, single
from tests.support.postgres_server import PostgresServer, empty_database
from tests.support.remembering import RememberingDeduplicator
from tests.support.waiting import eventually

FAILING = TopicName.parse("public/default/failing")
TOPIC = TopicName.parse("public/default/calls")
OTHER = TopicName.parse("public/default/other")
CALLS = [
    name
    for name, _ in inspect.getmembers(LedgerStore, inspect.isfunction)
    if not name.startswith("_")
]
STEP_MAX_S = 30.0
"""Nothing takes longer, even on a busy machine."""

ATTEMPTS_MAX = 100
"""A call that works again makes a step succeed sooner."""


class Unsteady:
    """A store one of whose calls fails."""

    def __init__(self, store: LedgerStore, call: str, *, is_executed: bool) -> None:
        self._store = store
        self._call = call
        self._is_executed = is_executed
        self.failures = 0
        """How many of its next executions fail."""
        self.failed = 0
        self.executed = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        return self._failing(method) if name == self._call else method

    def _failing(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **named: Any) -> Any:
            fails = self.failures > 0
            self.failures -= fails
            self.failed += fails
            if fails and not self._is_executed:
                raise StoreUnavailable("refused", retry_after_s=0.1)
            answer = await method(*args, **named)
            self.executed += 1
            if fails:
                raise StoreUnavailable("the reply is lost", retry_after_s=0.1)
            return answer

        return call


class Story:
    """A topic's life, in steps that can be repeated. All of its steps together make every call of
    the store."""

    def __init__(self, ledger: Ledger, store: Any, dedup: RememberingDeduplicator) -> None:
        self._ledger = ledger
        self._store = store
        self._dedup = dedup
        self.topic = TOPIC
        self.read_ids: list[int] = []

    @property
    def steps(self) -> list[Callable[[], Awaitable[object]]]:
        return [
            self._create,
            self._publish,
            self._resend,
            self._read,
            self._look_up,
            self._list,
            self._trim,
            self._read_trimmed,
            self._renew,
            self._reserve,
            self._check,
            self._delete,
        ]

    async def _create(self) -> None:
        await self._ledger.create(self.topic)

    async def _publish(self) -> None:
        await self._store_all(*map(single, range(3)), *large(3, "uuid", 2))

    async def _resend(self) -> None:
        """After deduplication has lost everything."""
        self._dedup.states.clear()
        await self._store_all(single(2), *large(3, "uuid", 2), single(4))

    async def _store_all(self, *entries: Entry) -> None:
        """Publish, in order, until an entry is neither stored nor a duplicate."""
        opening = Opening(self.topic, "p", initial_sequence_id=None, takeover=True, instance=b"")
        opened = await self._ledger.open(opening)
        try:
            for entry in entries:
                unit = unit_of(opened.session.number, 1, [entry], resume=True)
                opened.topic.submit(opened.session, [unit])
                news = await opened.session.news()
                assert news is not None
                ((_, receipt),) = news.receipts
                if receipt.error is not None:
                    raise receipt.error
                assert receipt.status in (Status.STORED, Status.DUPLICATE, Status.STALE)
        finally:
            self._ledger.close(opened)

    async def _read(self) -> None:
        self.read_ids = [each.entry.lowest for each in await self._entries()]

    async def _entries(
        self, after: Position | None = None, through: Position | None = None
    ) -> list[Any]:
        what = ReadRange(after, through, follow=False, entries_max=0, payloads=True)
        async with self._ledger.readers.pages() as pages:
            found = self._ledger.read(self.topic, what, pages, asyncio.Event())
            return [each async for some in found if isinstance(some, list) for each in some]

    async def _look_up(self) -> None:
        log = await self._ledger.get(self.topic)
        if log.tail is None:
            return  # nothing could be stored
        async with self._ledger.readers.pages() as pages:
            stop = asyncio.Event()
            at = self._ledger.read_at(self.topic, [log.tail], pages, stop, payloads=True)
            assert [len(each) async for each in at] == [1]
        async with self._ledger.readers.pages() as pages:
            runs = self._ledger.columns(log, None, None, pages, stop, metadata=True)
            assert [each async for each in runs]
        assert await self._ledger.find_time(self.topic, 0) == log.first
        await self._ledger.find(self.topic, "p", 4, "")
        await self._store.goes_on(self.topic, "p", "uuid", log.tail)

    async def _list(self) -> None:
        await self._ledger.topics(prefix=str(self.topic), after="", limit=10)
        await self._ledger.ledgers(self.topic, after=0, limit=10)
        await self._ledger.trimmed_producers(self.topic, after="", limit=10)

    async def _trim(self) -> None:
        tail = (await self._ledger.get(self.topic)).tail
        if tail is not None:
            await self._ledger.trim(self.topic, tail)

    async def _read_trimmed(self) -> None:
        tail = (await self._ledger.get(self.topic)).tail
        if tail is not None:
            await self._entries(Position(0, 0), tail._replace(entry_id=0))

    async def _renew(self) -> None:
        await self._ledger.renew(self.topic, above=100)

    async def _reserve(self) -> None:
        await self._ledger.renew(OTHER, above=100)

    async def _check(self) -> None:
        await self._store.check()

    async def _delete(self) -> None:
        await self._ledger.delete(self.topic, force=True)


@pytest_asyncio.fixture
async def store(postgres: PostgresServer) -> AsyncIterator[PostgresLedgerStore]:
    url = await empty_database(postgres, "ledger_tests")
    async with open_postgres_store(Server(url, writers=4, readers=2), migrates=True) as opened:
        yield opened


@asynccontextmanager
async def told(store: PostgresLedgerStore, unsteady: Unsteady) -> AsyncIterator[Story]:
    """A story in a ledger service that shares its store, with its loops."""
    owner = SharedOwner(PostgresRegister(store.database, store.database), "one:1")
    dedup, failing = RememberingDeduplicator(), cast(LedgerStore, unsteady)
    config = LedgerConfig(open_timeout_s=1, retention_bytes=10**9, trim_interval_s=0.01)
    async with asyncio.TaskGroup() as tasks:
        ledger = Ledger(
            config,
            failing,
            dedup,
            MemoryCursors(),
            tasks,
            owner=owner,
        )
        loops = [
            tasks.create_task(ledger.share_forever()),
            tasks.create_task(ledger.sweep_forever(rest_s=0.01)),
            tasks.create_task(ledger.trim_forever()),
        ]
        yield Story(ledger, failing, dedup)
        for each in loops:
            each.cancel()
        await ledger.finish(1)


async def tried(step: Callable[[], Awaitable[object]]) -> DomainError | None:
    """Take a step. Returns the error with which it failed; a topic that is not there is none."""
    try:
        async with asyncio.timeout(STEP_MAX_S):
            await step()
    except TopicNotFound:  # not created yet, or deleted by a call whose reply was lost
        return None
    except DomainError as error:
        return error
    return None


def check(error: DomainError) -> None:
    """A caller knows what to do about an error: try again later."""
    assert error.kind is Kind.UNAVAILABLE, repr(error)
    assert error.retry_after_s, repr(error)


async def finished(story: Story, unsteady: Unsteady) -> None:
    """Take every step until it succeeds."""
    story.topic = TOPIC
    for step in story.steps:
        for _ in range(ATTEMPTS_MAX):
            error = await tried(step)
            if error is None:
                break
            check(error)
        else:
            raise AssertionError(f"{step.__name__} fails for ever")
    assert story.read_ids == [0, 1, 2, 3, 3, 4]
    await eventually(lambda: unsteady.executed > 0, "the call is made again")


@pytest.mark.parametrize("is_executed", [False, True], ids=["refused", "reply lost"])
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_fails_once_loses_and_doubles_nothing(
    store: PostgresLedgerStore, call: str, is_executed: bool
) -> None:
    unsteady = Unsteady(store, call, is_executed=is_executed)
    unsteady.failures = 1
    async with told(store, unsteady) as story:
        await finished(story, unsteady)
    assert unsteady.failed == 1


UNSEEN = {"leaving", "left", "retained_from"}
"""Calls that loops make, or make again: no caller waits for them."""


@pytest.mark.deep
@pytest.mark.parametrize("is_executed", [False, True], ids=["refused", "reply lost"])
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_keeps_failing_is_told_of_until_it_works_again(
    store: PostgresLedgerStore, call: str, is_executed: bool
) -> None:
    unsteady = Unsteady(store, call, is_executed=is_executed)
    unsteady.failures = 10**9
    async with told(store, unsteady) as story:
        story.topic = FAILING
        errors = [error for step in story.steps if (error := await tried(step)) is not None]
        await eventually(lambda: unsteady.failed > 0, "the call is made")
        for error in errors:
            check(error)
        if call not in UNSEEN:
            assert any(isinstance(each, StoreUnavailable) for each in errors), errors
        unsteady.failures = 0
        await finished(story, unsteady)
