"""Effects happen once: the outbox relay and the balances of the examples, killed at many points."""

import asyncio
import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from examples.databases import Execute, Transaction, open_database
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client import Batching, Message, Outgoing, connect
from seqgate.dev.child import Child, start_process, tell
from tests.integration.services import Services, pids_of
from tests.support.depth import some_of, times
from tests.support.postgres_server import PostgresServer, admin
from tests.support.waiting import WITHIN_S, eventually
from tools.stack import processes

ON_BOTH = pytest.mark.parametrize(
    "database", some_of(["postgresql", "sqlite"], every=2), indirect=True
)
ON_POSTGRESQL = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
ON_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)

SALES = "CREATE TABLE sale (id BIGSERIAL PRIMARY KEY, customer TEXT, item TEXT)"
OUTBOX = """CREATE TABLE outbox
    (id BIGSERIAL PRIMARY KEY, key TEXT, payload TEXT, number BIGINT, error TEXT)"""

_numbers = itertools.count(1)

Row = tuple[Any, ...]


@pytest.fixture
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return str(tmp_path / "shop.db")
    postgres: PostgresServer = request.getfixturevalue("postgres")
    name = f"effects_{next(_numbers)}"
    async with admin(postgres.url()) as connection:
        await connection.execute(f"CREATE DATABASE {name}")
        # A suspended process must not keep its locks.
        limit = "SET idle_in_transaction_session_timeout = '1s'"
        await connection.execute(f"ALTER DATABASE {name} {limit}")
    return postgres.url(name)


@pytest.fixture
async def start(root: Path, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts an example: start("balances", argument, ...). Kills those that still run at the
    end."""
    started: list[Child] = []

    async def start(example: str, *arguments: str) -> Child:
        command = [sys.executable, str(root / "examples" / f"{example}.py"), *arguments]
        with (tmp_path / "examples.log").open("ab") as log:
            started.append(await start_process(command, log.fileno(), dict(os.environ)))
        return started[-1]

    yield start
    for each in started:
        await kill(each)


async def kill(process: Child) -> None:
    with suppress(ProcessLookupError):
        tell(process, signal.SIGKILL)
    async with asyncio.timeout(WITHIN_S):
        await process.wait()


@asynccontextmanager
async def paused(services: Services, service: str) -> AsyncIterator[None]:
    """A service that stands still."""
    pid = pids_of(services.stack)[service]
    processes.pause(pid)
    try:
        yield
    finally:
        processes.resume(pid)


async def rows(transaction: Transaction, query: str) -> list[Row]:
    async with transaction() as execute:
        return [tuple(row) for row in await execute(query)]


# ---- the outbox


class RolledBackError(Exception):
    """A sale that is not made."""


class Shop:
    """An application that sells, each time in a transaction with rows of the outbox."""

    def __init__(self, database: str, transaction: Transaction) -> None:
        self.database = database
        self.transaction = transaction
        self.is_server = database.startswith("postgresql")

    async def sell(self, customer: str, items: int) -> str:
        """Sell this many items in one transaction. Returns the last one."""
        async with self.transaction() as execute:
            return [await _sell(execute, customer) for _ in range(items)][-1]

    async def sell_much(self, random: Random, count: int) -> None:
        """Sell to several customers at once. Some transactions are rolled back. On a server, they
        commit in any order."""
        async with asyncio.TaskGroup() as tasks:
            for customer in ("ann", "bob", "eve"):
                tasks.create_task(self._sell_much(random, customer, count))

    async def _sell_much(self, random: Random, customer: str, count: int) -> None:
        async with open_database(self.database) as transaction:
            for _ in range(count):
                with suppress(RolledBackError):
                    async with transaction() as execute:
                        await _sell(execute, customer)
                        for _ in range(random.randint(0, 9) * self.is_server):
                            await execute("SELECT 1")  # SQLite would not let others begin
                        if random.random() < 0.2:
                            raise RolledBackError

    async def waiting(self) -> list[Row]:
        return await rows(self.transaction, "SELECT number, payload, error FROM outbox")

    async def is_empty(self) -> bool:
        return not await self.waiting()

    async def has_one_row(self) -> bool:
        return len(await self.waiting()) == 1

    async def has_numbered(self) -> bool:
        """Whether the relay has numbered rows that are not deleted yet."""
        return any(number is not None for number, *_ in await self.waiting())

    @asynccontextmanager
    async def undeletable(self) -> AsyncIterator[None]:
        """While no row of the outbox can be deleted."""
        async with open_database(self.database) as transaction, transaction() as execute:
            if self.is_server:
                await execute("LOCK TABLE outbox IN SHARE MODE")
            yield


async def _sell(execute: Execute, customer: str) -> str:
    item = f"{customer}-{next(_numbers)}"
    await execute("INSERT INTO sale (customer, item) VALUES ($1, $2)", customer, item)
    await execute("INSERT INTO outbox (key, payload) VALUES ($1, $2)", customer, item)
    return item


@asynccontextmanager
async def open_shop(database: str) -> AsyncIterator[Shop]:
    async with open_database(database, SALES, OUTBOX) as transaction:
        yield Shop(database, transaction)


async def log_of(services: Services, topic: str) -> list[Message]:
    async with connect(services.stack.address("ledger")) as client:
        reader = client.reader(topic, follow=False)
        return [message async for message in reader]


async def is_stored(services: Services, topic: str, payload: str) -> bool:
    known = {each.name for each in await services.topics(topic)}
    return topic in known and payload in texts(await log_of(services, topic))


def texts(log: list[Message]) -> list[str]:
    return [message.payload.decode() for message in log]


def by_key(messages: list[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, text in messages:
        found.setdefault(key, []).append(text)
    return found


@dataclass(frozen=True)
class Kills:
    """Rounds in which a shop sells and a relay is killed. `start` starts a relay."""

    services: Services
    shop: Shop
    topic: str
    start: Callable[[], Awaitable[Child]]
    random: Random

    async def at_any_point(self) -> None:
        """Killed while it starts, or later."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.shop.sell_much(self.random, 5))
            relay = await self.start()
            for _ in range(self.random.choice((0, 10, 100))):
                await self.shop.waiting()
            await kill(relay)

    async def without_receipts(self) -> None:
        """Killed when it has numbered rows, and the ledger does not answer."""
        relay = await self.start()
        await eventually(self.shop.is_empty)
        async with paused(self.services, "ledger"):
            await self.shop.sell_much(self.random, 5)
            await eventually(self.shop.has_numbered)
            await kill(relay)

    async def before_deletion(self) -> None:
        """Killed when the ledger has answered, and the rows are not deleted."""
        relay = await self.start()
        await eventually(self.shop.is_empty)
        async with AsyncExitStack() as undeletable:
            async with paused(self.services, "ledger"):
                last = await self.shop.sell("bob", 2)
                await eventually(self.shop.has_numbered)
                await undeletable.enter_async_context(self.shop.undeletable())
            await eventually(lambda: is_stored(self.services, self.topic, last))
            await kill(relay)
        assert await self.shop.has_numbered()

    async def superseded(self) -> None:
        """Another one takes over while it works."""
        first = await self.start()
        await self.shop.sell("eve", 1)
        await eventually(self.shop.is_empty)
        second = await self.start()
        while first.returncode is None:
            await self.shop.sell_much(self.random, 1)
            await asyncio.sleep(0)
        assert first.returncode == 0
        await kill(second)


@ON_BOTH
async def test_an_outbox_is_published_once_and_in_order_despite_kills(
    stoppable: Services, topic: str, database: str, start: Callable[..., Any], seed: int
) -> None:
    random = Random(seed)
    relay = partial(start, "outbox_relay", stoppable.stack.address("ledger"), topic, database)
    async with open_shop(database) as shop:
        kills = Kills(stoppable, shop, topic, relay, random)
        for _ in range(times(quick=1, full=20)):
            await kills.at_any_point()
            await kills.without_receipts()
            await kills.before_deletion()
            await kills.superseded()
        await shop.sell_much(random, 5)
        last = await relay()
        await eventually(shop.is_empty)
        sales = await rows(shop.transaction, "SELECT customer, item FROM sale ORDER BY id")
        log = await log_of(stoppable, topic)
        await kill(last)
    assert Counter(texts(log)) == Counter(item for _, item in sales)
    assert [message.sequence_id for message in log] == list(range(1, len(sales) + 1))
    assert by_key([(str(each.key), each.payload.decode()) for each in log]) == by_key(sales)
    if not shop.is_server:
        assert texts(log) == [item for _, item in sales]


@ON_POSTGRESQL
async def test_a_row_that_commits_after_a_later_one_is_published(
    stoppable: Services, topic: str, database: str, start: Callable[..., Any]
) -> None:
    async with open_shop(database) as shop, open_database(database) as other:
        await start("outbox_relay", stoppable.stack.address("ledger"), topic, database)
        async with other() as execute:
            await execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            first = await _sell(execute, "ann")
            second = await shop.sell("bob", 1)
            await eventually(lambda: is_stored(stoppable, topic, second))
        await eventually(shop.is_empty)
    log = await log_of(stoppable, topic)
    assert texts(log) == [second, first]
    assert [each.sequence_id for each in log] == [1, 2]


@ON_SQLITE
async def test_a_row_that_the_ledger_refuses_stops_no_other(
    stoppable: Services, topic: str, database: str, start: Callable[..., Any]
) -> None:
    async with open_shop(database) as shop:
        before = await shop.sell("ann", 1)
        refused = await shop.sell("k" * 200_000, 1)  # larger than an entry's metadata
        after = await shop.sell("ann", 1)
        await start("outbox_relay", stoppable.stack.address("ledger"), topic, database)
        await eventually(lambda: is_stored(stoppable, topic, after))
        later = await shop.sell("ann", 1)
        await eventually(lambda: is_stored(stoppable, topic, later))
        await eventually(shop.has_one_row)
        ((number, payload, error),) = await shop.waiting()
        assert (number, payload) == (None, refused)
        assert "metadata too large" in error
        await rows(shop.transaction, "UPDATE outbox SET key = 'k', error = NULL")
        await eventually(shop.is_empty)
    log = await log_of(stoppable, topic)
    assert texts(log) == [before, after, later, refused]
    assert [each.sequence_id for each in log] == [1, 3, 4, 5]


@ON_SQLITE
async def test_a_relay_with_an_older_database_than_its_topic_publishes_nothing(
    stoppable: Services, topic: str, database: str, start: Callable[..., Any]
) -> None:
    ledger = stoppable.stack.address("ledger")
    async with open_shop(database) as shop:
        relay = await start("outbox_relay", ledger, topic, database)
        first = await shop.sell("ann", 1)
        await eventually(shop.is_empty)
        await kill(relay)
    async with open_shop(f"{database}.restored") as shop:
        second = await shop.sell("ann", 1)
        relay = await start("outbox_relay", ledger, topic, f"{database}.restored")
        assert await relay.wait() == 1
        assert await shop.waiting() == [(None, second, None)]
    assert texts(await log_of(stoppable, topic)) == [first]


# ---- balances


ACCOUNTS = [f"account-{each}" for each in range(12)]


async def balances(transaction: Transaction) -> dict[str, int]:
    return dict(await rows(transaction, _BALANCES))


_BALANCES = "SELECT account, amount FROM balance"


class Bank:
    """Publishes payments, in every form that an entry can have."""

    def __init__(self, services: Services, topic: str, random: Random) -> None:
        self._services = services
        self._topic = topic
        self._random = random
        self.expected: Counter[str] = Counter()

    async def pay(self, count: int) -> None:
        forms = (None, Batching(by_key=True), Batching(messages_max=5))
        async with connect(self._services.stack.address("ledger")) as client:
            for form in forms:
                async with client.producer(self._topic, batching=form) as producer:
                    await producer.send_many([self._payment() for _ in range(count // len(forms))])

    def _payment(self) -> Outgoing:
        account, amount = self._random.choice(ACCOUNTS), self._random.randint(1, 100)
        self.expected[account] += amount
        delay_s = 0.5 if self._random.random() < 0.1 else None
        return Outgoing(b"%d" % amount, account, deliver_after_s=delay_s)

    async def is_acknowledged(self) -> bool:
        """Whether every payment is acknowledged, durably."""
        found = await self._services.dispatcher.GetSubscription(
            dispatcher_pb2.GetSubscriptionRequest(topic=self._topic, subscription="balances")
        )
        tail = await self._services.ledger.GetLastMessageId(
            ledger_pb2.GetLastMessageIdRequest(topic=self._topic)
        )
        return bool(found.subscription.mark_delete == tail.last)


@pytest.fixture
async def bank(
    stoppable: Services, topic: str, database: str, seed: int
) -> AsyncIterator[tuple[Bank, Transaction, tuple[str, ...]]]:
    """A bank with a few payments, its database, and the arguments of a consumer."""
    bank = Bank(stoppable, topic, Random(seed))
    ledger, dispatcher = (stoppable.stack.address(each) for each in ("ledger", "dispatcher"))
    await bank.pay(60)
    table = "CREATE TABLE balance (account TEXT PRIMARY KEY, amount BIGINT NOT NULL)"
    async with open_database(database, table) as transaction:
        yield bank, transaction, ("balances", ledger, dispatcher, topic, database)


@ON_BOTH
async def test_balances_have_each_payment_once_despite_kills_of_consumers(
    bank: tuple[Bank, Transaction, tuple[str, ...]], start: Callable[..., Any], seed: int
) -> None:
    payer, transaction, arguments = bank
    random = Random(seed)
    consumers = [await start(*arguments), await start(*arguments)]
    for _ in range(times(quick=4, full=40)):
        before = await balances(transaction)
        paying = asyncio.create_task(payer.pay(120))
        while await balances(transaction) == before:
            assert consumers[0].returncode is consumers[1].returncode is None
            await asyncio.sleep(0)
        for _ in range(random.randint(0, 20)):
            await balances(transaction)
        for place in random.sample((0, 1), random.randint(1, 2)):
            await kill(consumers[place])
            consumers[place] = await start(*arguments)
        await paying
    await eventually(payer.is_acknowledged)
    assert await balances(transaction) == payer.expected
    assert [each.returncode for each in consumers] == [None, None]


@ON_BOTH
async def test_a_payment_without_a_durable_acknowledgement_is_not_applied_again(
    stoppable: Services,
    bank: tuple[Bank, Transaction, tuple[str, ...]],
    start: Callable[..., Any],
) -> None:
    payer, transaction, arguments = bank
    first = await start(*arguments)
    await eventually(lambda: _are(transaction, payer.expected))
    await eventually(payer.is_acknowledged)
    before = payer.expected.copy()
    async with paused(stoppable, "cursor"):
        await payer.pay(60)
        while await _are(transaction, before):
            await asyncio.sleep(0)
        await kill(first)
    await start(*arguments)
    await start(*arguments)
    await eventually(payer.is_acknowledged)
    assert await balances(transaction) == payer.expected


async def _are(transaction: Transaction, expected: Counter[str]) -> bool:
    return await balances(transaction) == expected


@ON_POSTGRESQL  # a suspended process may keep all others from SQLite
async def test_a_consumer_that_wakes_up_late_applies_nothing_twice(
    bank: tuple[Bank, Transaction, tuple[str, ...]], start: Callable[..., Any]
) -> None:
    payer, transaction, arguments = bank
    first = await start(*arguments)
    await eventually(lambda: _are(transaction, payer.expected))
    await payer.pay(300)
    processes.pause(first.pid)
    await start(*arguments)
    await eventually(lambda: _are(transaction, payer.expected))
    processes.resume(first.pid)
    await payer.pay(60)
    await eventually(payer.is_acknowledged)
    assert await balances(transaction) == payer.expected
