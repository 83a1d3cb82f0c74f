"""What a commit on PostgreSQL means when something fails: nothing is reported as durable that a
fail-over could remove, and nothing waits for ever."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from random import Random

import asyncpg
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from seqgate.services.errors import Fenced, StoreUnavailable
from seqgate.services.ledger.adapters.postgres import PostgresLedgerStore, open_postgres_store
from seqgate.services.runtime import postgres as limits
from seqgate.services.runtime.postgres import (
    PostgresDatabase,
    Server,
    addresses_of,
    numbered,
    open_postgres,
)
from seqgate.services.runtime.transactions import Transaction
from seqgate.types import Position, TopicName
from tests.support.entries import single
from tests.support.postgres_server import (
    PostgresServer,
    admin,
    empty_database,
    running_postgres,
)
from tests.support.waiting import eventually
from tools.stack.forwarder import Forwarder

TOPIC = TopicName.parse("public/default/faults")

WAITING_COMMITS = """SELECT pid FROM pg_stat_activity
    WHERE wait_event = 'SyncRep' AND application_name = 'seqgate'"""
WAITS_FOR_LOCK = """SELECT count(*) FROM pg_stat_activity
    WHERE wait_event_type = 'Lock' AND application_name = 'seqgate'"""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server of this module's own, since tests change its settings and kill it."""
    with running_postgres() as running:
        yield running


@pytest_asyncio.fixture
async def url(server: PostgresServer) -> AsyncIterator[str]:
    yield await empty_database(server, "faults")
    await configure(server)


@pytest_asyncio.fixture
async def store(url: str) -> AsyncIterator[PostgresLedgerStore]:
    async with open_postgres_store(Server(url, writers=4, readers=2), migrates=True) as opened:
        yield opened


async def configure(server: PostgresServer, **settings: str) -> None:
    """Set some settings of the running server, and no others."""
    async with admin(server.url()) as connection:
        await connection.execute("SET synchronous_commit = local")
        await connection.execute("ALTER SYSTEM RESET ALL")
        for name, value in settings.items():
            await connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        await connection.execute("SELECT pg_reload_conf()")
    expected = settings or {"synchronous_standby_names": ""}
    await eventually(lambda: _has(server, expected))


async def _has(server: PostgresServer, settings: Mapping[str, str]) -> bool:
    async with admin(server.url()) as connection:
        return all(
            [await connection.fetchval(f"SHOW {name}") == settings[name] for name in settings]
        )


async def waiting_commits(server: PostgresServer) -> list[int]:
    async with admin(server.url()) as connection:
        return [row["pid"] for row in await connection.fetch(WAITING_COMMITS)]


@asynccontextmanager
async def standby_gone(server: PostgresServer) -> AsyncIterator[None]:
    """Let every commit wait for a standby that is not there."""
    await configure(server, synchronous_standby_names="gone")
    try:
        yield
    finally:
        await configure(server)


@pytest.mark.parametrize("end", ["pg_cancel_backend", "pg_terminate_backend"])
async def test_a_commit_that_is_cancelled_while_it_waits_for_a_standby_is_not_a_success(
    server: PostgresServer, store: PostgresLedgerStore, end: str
) -> None:
    state = await store.take(TOPIC, create=True)
    async with standby_gone(server):
        appending = asyncio.create_task(store.append(TOPIC, state.ledger_id, None, [single(0)], 1))
        await eventually(lambda: waiting_commits(server))
        async with admin(server.url()) as connection:
            for pid in await waiting_commits(server):
                await connection.execute(f"SELECT {end}($1)", pid)
        with pytest.raises(StoreUnavailable):
            await appending
        # The trap: everybody sees it, though no standby has it.
        assert (await store.get(TOPIC)).tail == Position(state.ledger_id, 0)
    assert (await store.take(TOPIC, create=False)).tail == Position(state.ledger_id, 0)


async def test_a_write_that_is_cancelled_while_it_waits_for_a_standby_is_not_a_success(
    server: PostgresServer, store: PostgresLedgerStore
) -> None:
    state = await store.take(TOPIC, create=True)
    async with standby_gone(server):
        taking = asyncio.create_task(store.take(TOPIC, create=False))
        await eventually(lambda: waiting_commits(server))
        async with admin(server.url()) as connection:
            for pid in await waiting_commits(server):
                await connection.execute("SELECT pg_cancel_backend($1)", pid)
        with pytest.raises(StoreUnavailable):
            await taking
    again = await store.take(TOPIC, create=False)
    assert again.ledger_id > state.ledger_id + 1


async def test_an_append_goes_on_when_its_caller_is_cancelled(
    server: PostgresServer, store: PostgresLedgerStore
) -> None:
    state = await store.take(TOPIC, create=True)
    async with standby_gone(server):
        appending = asyncio.create_task(store.append(TOPIC, state.ledger_id, None, [single(0)], 1))
        await eventually(lambda: waiting_commits(server))
        appending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await appending
        assert await waiting_commits(server)
        assert (await store.get(TOPIC)).tail is None
    await eventually(lambda: stored(store, state.ledger_id))


async def stored(store: PostgresLedgerStore, ledger_id: int) -> bool:
    return (await store.get(TOPIC)).tail == Position(ledger_id, 0)


async def test_an_append_that_takes_too_long_is_given_up_with_its_connection(
    server: PostgresServer, store: PostgresLedgerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outcome is unknown, and its commit goes on."""
    state = await store.take(TOPIC, create=True)
    async with standby_gone(server):
        monkeypatch.setattr(limits, "SUSPECT_AFTER_S", 0.2)
        monkeypatch.setattr(limits, "STATEMENT_MAX_S", 0.4)
        with pytest.raises(StoreUnavailable):
            await store.append(TOPIC, state.ledger_id, None, [single(0)], 1)
        monkeypatch.undo()
        assert await waiting_commits(server)
        assert (await store.get(TOPIC)).tail is None
    await eventually(lambda: stored(store, state.ledger_id))


async def test_a_store_that_closes_gives_up_what_waits(
    server: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CLOSE_MAX_S", 0.1)
    async with (
        asyncio.timeout(limits.STATEMENT_MAX_S),
        open_postgres_store(Server(url), migrates=True) as store,
        standby_gone(server),
    ):
        taking = asyncio.create_task(store.take(TOPIC, create=True))
        await eventually(lambda: waiting_commits(server))
        await store.database.close()
        with pytest.raises(StoreUnavailable):
            await taking


async def test_a_silent_server_among_several_delays_nobody_for_long(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was lost with its machine does not refuse connections."""
    monkeypatch.setattr(limits, "CONNECT_MAX_S", 600.0)
    monkeypatch.setattr(limits, "OTHERS_MAX_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        both = url.replace("@", f"@127.0.0.1:{silent.getsockname()[1]},")
        async with asyncio.timeout(limits.OPEN_MAX_S), open_postgres(Server(both)) as database:
            assert await database.read(lambda db: db.rows("SELECT 1"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("synchronous_commit", "off"),
        ("synchronous_commit", "local"),
        ("synchronous_commit", "remote_write"),
        ("client_min_messages", "error"),
    ],
)
async def test_a_server_whose_commits_say_too_little_is_refused(
    server: PostgresServer, url: str, name: str, value: str
) -> None:
    await configure(server, **{name: value})
    with pytest.raises(StoreUnavailable, match=f"{name} is {value}"):
        async with open_postgres(Server(url)):
            raise AssertionError


async def test_a_changed_configuration_does_not_weaken_open_connections(
    server: PostgresServer, url: str
) -> None:
    async with open_postgres(Server(url, writers=1)) as database:
        assert await setting(database) == "on"
        await configure(server, synchronous_commit="off")
        assert await setting(database) == "on"


async def setting(database: PostgresDatabase) -> str:
    ((value,),) = await database.change("SHOW synchronous_commit")
    return str(value)


async def test_a_primary_without_a_synchronous_standby_is_warned_about_or_refused(
    server: PostgresServer, url: str
) -> None:
    with capture_logs() as logs:
        async with open_postgres(Server(url)) as database:
            await database.write(lambda db: db.rows("SELECT 1"))
    assert [each["log_level"] for each in logs if "standby" in each["event"]] == ["warning"]
    with pytest.raises(StoreUnavailable, match="synchronous_standby_names"):
        async with open_postgres(Server(url, needs_standby=True)):
            raise AssertionError
    await configure(server, synchronous_standby_names="gone")
    async with open_postgres(Server(url, needs_standby=True)) as database:
        assert await database.read(lambda db: db.rows("SELECT 1"))


async def test_a_store_works_again_after_its_server_was_killed(
    server: PostgresServer, store: PostgresLedgerStore
) -> None:
    state = await store.take(TOPIC, create=True)
    await store.append(TOPIC, state.ledger_id, None, [single(0)], 1)
    server.kill()
    with pytest.raises(StoreUnavailable):
        await store.append(TOPIC, state.ledger_id, Position(state.ledger_id, 0), [single(1)], 1)
    with pytest.raises(StoreUnavailable):
        await store.check()
    server.start()
    await eventually(lambda: answers(store))
    tail = (await store.take(TOPIC, create=False)).tail
    assert tail in (Position(state.ledger_id, 0), Position(state.ledger_id, 1))


async def test_a_server_that_is_killed_while_a_store_opens_delays_it(
    server: PostgresServer, url: str
) -> None:
    async with open_postgres_store(Server(url), migrates=True):
        pass
    locking = await asyncpg.connect(url)
    await locking.execute("BEGIN; LOCK TABLE seqgate_layout")

    async def opens() -> bool:
        async with open_postgres_store(Server(url), migrates=True) as store:
            return await answers(store)

    async def waits() -> bool:
        async with admin(server.url()) as connection:
            return bool(await connection.fetchval(WAITS_FOR_LOCK))

    opening = asyncio.create_task(opens())
    await eventually(waits, "it is connected, and looks at the layout")
    server.kill()
    locking.terminate()
    server.start()
    assert await opening


async def answers(store: PostgresLedgerStore) -> bool:
    try:
        await store.check()
    except StoreUnavailable:
        return False
    return True


async def test_connections_closed_while_idle_are_replaced(
    server: PostgresServer, store: PostgresLedgerStore
) -> None:
    """As a pooler does. What had not begun is run on another connection."""
    await store.create(TOPIC)
    for _ in range(3):
        await asyncio.gather(*(store.create(TOPIC) for _ in range(4)), store.get(TOPIC))
        async with admin(server.url()) as connection:
            await connection.execute(
                """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                    WHERE application_name = 'seqgate'"""
            )
    await asyncio.gather(*(store.create(TOPIC) for _ in range(4)), store.get(TOPIC))


async def test_deadlocks_are_resolved_by_running_again(server: PostgresServer, url: str) -> None:
    await configure(server, deadlock_timeout="10ms")
    async with open_postgres(Server(url)) as database:
        await database.change("DROP TABLE IF EXISTS scratch")
        await database.change("CREATE TABLE scratch (id bigint PRIMARY KEY, count bigint)")
        await database.change("INSERT INTO scratch VALUES (1, 0), (2, 0)")

        def step(seed: int) -> Callable[[Transaction], None]:
            ids = [1, 2]
            Random(seed).shuffle(ids)

            def work(db: Transaction) -> None:
                for each in ids:
                    ((count,),) = db.rows(
                        f"SELECT count FROM scratch WHERE id = ?{db.for_update}", each
                    )
                    db.change("UPDATE scratch SET count = ? WHERE id = ?", count + 1, each)

            return work

        await asyncio.gather(*(database.write(step(seed)) for seed in range(12)))
        assert await database.change("SELECT count FROM scratch") == [(12,), (12,)]
        await database.change("DROP TABLE scratch")


@asynccontextmanager
async def conflicting(url: str, code: str, times: int) -> AsyncIterator[None]:
    """Let the next changes of topics fail with this error. A sequence counts them, since it is not
    rolled back."""
    async with admin(url) as connection:
        await connection.execute(
            f"""CREATE SEQUENCE conflicts;
            CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF nextval('conflicts') <= {times} THEN
                    RAISE EXCEPTION 'another transaction was first' USING ERRCODE = '{code}';
                END IF;
                RETURN NEW;
            END $$;
            CREATE TRIGGER conflict BEFORE UPDATE ON topic FOR EACH ROW
                EXECUTE FUNCTION conflict()"""
        )
        try:
            yield
        finally:
            await connection.execute(
                "DROP TRIGGER conflict ON topic; DROP FUNCTION conflict; DROP SEQUENCE conflicts"
            )


@pytest.mark.parametrize("code", ["40001", "40P01"], ids=["not serializable", "deadlock"])
async def test_conflicts_are_run_again_and_reported_if_they_do_not_end(
    url: str, store: PostgresLedgerStore, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """They did nothing, so running again stores nothing twice."""
    monkeypatch.setattr(limits, "RUN_AGAIN_S", 0.001)
    await store.create(TOPIC)
    async with conflicting(url, code, limits.RUNS_MAX - 1):
        assert (await store.take(TOPIC, create=False)).ledger_id == 1
    async with conflicting(url, code, limits.RUNS_MAX - 1):
        await store.append(TOPIC, 1, None, [single(0)], 1)
    async with conflicting(url, code, 10**6):
        for change in (
            store.take(TOPIC, create=False),
            store.append(TOPIC, 1, Position(1, 0), [single(1)], 1),
        ):
            with pytest.raises(StoreUnavailable, match="too many conflicts") as caught:
                await change
            assert caught.value.retry_after_s
    await store.append(TOPIC, 1, Position(1, 0), [single(1)], 1)
    log = await store.get(TOPIC)
    assert (log.ledger_id, log.tail, log.entries) == (1, Position(1, 1), 2)


async def test_a_pooler_that_closes_idle_connections_costs_at_most_an_unknown_outcome(
    server: PostgresServer, url: str
) -> None:
    async with Forwarder(server.port) as pooler:
        through = url.replace(f":{server.port}/", f":{pooler.port}/")
        async with open_postgres_store(Server(through, writers=2), migrates=True) as store:
            state = await store.take(TOPIC, create=True)
            acknowledged: list[int] = []
            for number in range(20):
                assert pooler.cut()
                if is_seen := number % 2 == 0:
                    await eventually(partial(all_closed, store))
                try:
                    await store.append(TOPIC, state.ledger_id, state.tail, [single(number)], 1)
                except StoreUnavailable:
                    assert not is_seen, "nothing had been sent"
                else:
                    acknowledged.append(number)
                state = await store.take(TOPIC, create=False)
            found = await store.read(TOPIC, None, entries_max=100, bytes_max=10**9, payloads=False)
    ids = [each.entry.lowest for each in found]
    assert ids == sorted(set(ids))
    assert {*acknowledged} <= {*ids}


def all_closed(store: PostgresLedgerStore) -> bool:
    lanes = (store.database._writers, store.database._readers)
    return all(each.raw.is_closed() for lane in lanes for each in lane._idle)


async def test_a_process_that_stands_still_does_not_hold_its_locks(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_SET", limits._SET.replace("= 5000", "= 200"))
    async with open_postgres_store(Server(url), migrates=True) as store:
        await store.create(TOPIC)
        async with admin(url) as standing:
            await standing.execute("SET idle_in_transaction_session_timeout = 200")
            await standing.execute("BEGIN")
            await standing.fetch("SELECT id FROM topic FOR UPDATE")
            assert (await store.take(TOPIC, create=False)).ledger_id == 1


async def test_two_stores_on_one_database_create_a_topic_once(url: str) -> None:
    async with (
        open_postgres_store(Server(url), migrates=True) as one,
        open_postgres_store(Server(url), migrates=True) as other,
    ):
        for _ in range(10):
            created = await asyncio.gather(*(each.create(TOPIC) for each in (one, other) * 4))
            assert [was_created for _, was_created in created].count(True) == 1
            before = await one.take(TOPIC, create=False)
            await asyncio.gather(other.delete(TOPIC), one.take(TOPIC, create=True))
            after = await other.take(TOPIC, create=True)
            assert after.ledger_id > before.ledger_id
            await one.delete(TOPIC)


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
async def test_two_stores_that_append_fence_each_other(
    server: PostgresServer, url: str, isolation: str
) -> None:
    """Whatever a server's default: it refuses more of what runs at the same time."""
    await configure(server, default_transaction_isolation=isolation)
    async with (
        open_postgres_store(Server(url), migrates=True) as one,
        open_postgres_store(Server(url), migrates=True) as other,
    ):
        acknowledged: list[int] = []

        async def write(store: PostgresLedgerStore, first: int) -> None:
            for number in range(first, first + 200, 20):
                state = await store.take(TOPIC, create=True)
                tail = state.tail
                for each in range(number, number + 20):
                    try:
                        await store.append(TOPIC, state.ledger_id, tail, [single(each)], 1)
                    except Fenced:
                        break
                    acknowledged.append(each)
                    same = tail is not None and tail.ledger_id == state.ledger_id
                    tail = Position(state.ledger_id, tail.entry_id + 1 if same and tail else 0)

        await asyncio.gather(write(one, 0), write(other, 1_000))
        found = await one.read(TOPIC, None, entries_max=1_000, bytes_max=10**9, payloads=False)
        stored = [each.entry.lowest for each in found]
        # A reply may come later than those of the other store's next appends.
        assert sorted(stored) == sorted(acknowledged)
        for first in (0, 1_000):
            own = [each for each in stored if first <= each < first + 1_000]
            assert own == [each for each in acknowledged if first <= each < first + 1_000]


def test_values_are_numbered() -> None:
    assert numbered("SELECT ? WHERE a = ? AND b = ?") == "SELECT $1 WHERE a = $2 AND b = $3"
    assert numbered("SELECT ?2 WHERE a = ?1 AND b = ?2") == "SELECT $2 WHERE a = $1 AND b = $2"


def test_the_servers_of_a_url() -> None:
    assert addresses_of("postgresql://u:p@one:1,two:2/db?sslmode=require") == [
        ("one", 1),
        ("two", 2),
    ]
    assert addresses_of("postgresql://[::1]:5432,host/db") == [("::1", 5432), ("host", None)]
    assert addresses_of("postgres:///db?host=/run/postgresql") == [(None, None)]
    for wrong in ("mysql://host/db", "host:1", "postgresql://a:b:c/db"):
        with pytest.raises(ValueError, match="postgresql://"):
            addresses_of(wrong)
