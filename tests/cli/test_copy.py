"""`seqgate admin copy`: a stopped installation's stores move from SQLite to PostgreSQL."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import apsw
import pytest

from seqgate.jobs.copy import copying
from seqgate.jobs.copy.__main__ import LOGS, main
from seqgate.jobs.copy.copying import CopyError, open_source
from seqgate.services.ledger.adapters.postgres import open_postgres_store
from seqgate.services.ledger.adapters.sqlite import open_sqlite_store
from seqgate.services.ledger.ports import LedgerStore
from seqgate.services.runtime.postgres import Server
from seqgate.types import Position, TopicName
from tests.support.entries import batch, large, marker, single
from tests.support.postgres_server import PostgresServer, admin, empty_database

TOPICS = [TopicName.parse(f"public/default/moving-{number}") for number in range(3)]
DELETED = TopicName.parse("public/default/deleted")


async def fill_logs(path: Path) -> None:
    """Logs with whole and trimmed entries, a large message that is not whole, and a deletion."""
    random = Random(1)
    async with open_sqlite_store(path) as store:
        for topic in TOPICS:
            for _ in range(3):
                state = await store.take(topic, create=True)
                tail = state.tail
                for number in range(20):
                    entries = random.choice(
                        [
                            [single(number)],
                            [batch([number, number + 1], "ü"), marker(1)],
                            list(large(number, "u", 3)[:2]),
                        ]
                    )
                    await store.append(
                        topic, state.ledger_id, tail, entries, number, instances={"p": b"\0i"}
                    )
                    tail = (await store.get(topic)).tail
            await store.trim(topic, Position(1, 7))
        await store.take(DELETED, create=True)
        await store.delete(DELETED, leaves_cursors=True)


async def seen(store: LedgerStore) -> list[object]:
    """All that callers can see of a store."""
    topics = await store.topics(prefix="", after="", limit=100)
    found: list[object] = [
        [each if each.topic in TOPICS else each._replace(created_ms=0) for each in topics],
        await store.leaving(after="", limit=100),
    ]
    for topic in TOPICS:
        read = await store.read(topic, None, entries_max=10_000, bytes_max=10**9, payloads=True)
        found += [
            read,
            await store.trimmed_producers(topic, limit=100),
            await store.trimmed_through(topic),
            await store.newest(topic, "p"),
            await store.find(topic, "p", range(25)),
        ]
    return found


@pytest.fixture
async def target(postgres: PostgresServer) -> str:
    url = await empty_database(postgres, "copied")
    async with admin(url) as connection:
        await connection.execute("DROP TABLE IF EXISTS seqgate_copy")
    return url


@pytest.fixture
async def logs(tmp_path: Path) -> Path:
    await fill_logs(tmp_path / "ledger.db")
    return tmp_path / "ledger.db"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        status = main([*arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def printed_rows(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


async def in_thread(
    function: Callable[..., tuple[int, str, str]], *arguments: str
) -> tuple[int, str, str]:
    return await asyncio.to_thread(function, *arguments)


async def test_a_copied_log_is_the_same(
    logs: Path, target: str, run: Callable[..., tuple[int, str, str]]
) -> None:
    command = ("--from", f"sqlite:{logs}", "--to", target, "--json")
    status, printed, _ = await in_thread(run, *command)
    assert status == 0
    rows = {each["table"]: each for each in printed_rows(printed)}
    assert all(each["copied"] == each["rows"] for each in rows.values())
    assert rows["topic"]["rows"] == len(TOPICS)
    async with (
        open_sqlite_store(logs) as before,
        open_postgres_store(Server(target), migrates=False) as after,
    ):
        assert await seen(before) == await seen(after)
        # Both go on alike.
        for topic in [*TOPICS, DELETED]:
            states = [await store.take(topic, create=True) for store in (before, after)]
            assert states[0]._replace(created_ms=0) == states[1]._replace(created_ms=0)
            for store in (before, after):
                await store.append(topic, states[0].ledger_id, states[0].tail, [single(99)], 9)
        assert await seen(before) == await seen(after)


async def test_an_interrupted_copy_is_continued(
    logs: Path,
    target: str,
    run: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ("--from", f"sqlite:{logs}", "--to", target, "--json")
    monkeypatch.setattr(copying, "ROWS_MAX", 7)
    shown = 0

    def stop(table: str, rows: int) -> None:
        nonlocal shown
        shown += not table.endswith("compared")
        if shown % 3 == 2 and not table.endswith("compared"):
            raise OSError("interrupted")

    monkeypatch.setattr("seqgate.jobs.copy.__main__.progress", lambda _: stop)
    runs = 1
    while (await in_thread(run, *command))[0] == 3:
        runs += 1
    assert runs > 5
    async with (
        open_sqlite_store(logs) as before,
        open_postgres_store(Server(target), migrates=False) as after,
    ):
        assert await seen(before) == await seen(after)


async def test_what_differs_is_named(
    logs: Path, target: str, run: Callable[..., tuple[int, str, str]]
) -> None:
    command = ("--from", f"sqlite:{logs}", "--to", target)
    assert (await in_thread(run, *command))[0] == 0
    async with admin(target) as connection:
        await connection.execute("UPDATE block SET payloads = 'x' WHERE id = 15")
    status, _, errors = await in_thread(run, *command)
    assert (status, errors) == (1, "both ends differ in the table block, at id 15\n")


async def test_a_target_with_other_data_is_refused(
    logs: Path, target: str, run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    async with open_postgres_store(Server(target), migrates=True) as store:
        await store.create(TOPICS[0])
    status, _, errors = await in_thread(run, "--from", f"sqlite:{logs}", "--to", target)
    assert status == 1
    assert "holds other data" in errors
    async with admin(target) as connection:
        await connection.execute("DELETE FROM topic")
    assert (await in_thread(run, "--from", f"sqlite:{logs}", "--to", target))[0] == 0
    other = tmp_path / "other.db"
    async with open_sqlite_store(other):
        pass
    status, _, errors = await in_thread(run, "--from", f"sqlite:{other}", "--to", target)
    assert status == 1
    assert f"is a copy of sqlite:{logs}" in errors


async def test_a_store_in_use_is_refused(logs: Path) -> None:
    writer = apsw.Connection(str(logs))
    writer.execute("BEGIN IMMEDIATE")
    with pytest.raises(CopyError, match="in use"):
        open_source(logs, [LOGS])
    writer.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "nowhere.db", "--to", "postgresql://h/d"), "must be sqlite:PATH"),
        (("--from", "sqlite:nowhere.db", "--to", "mysql://h/d"), "must be postgresql://"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CopyError, match="does not exist"):
        open_source(tmp_path / "nowhere.db", [LOGS])
    other = tmp_path / "other.db"
    apsw.Connection(str(other)).execute("CREATE TABLE t (a)")
    with pytest.raises(CopyError, match="no store of Seqgate's"):
        open_source(other, [LOGS])
    (tmp_path / "text").write_text("no database" * 1_000)
    with pytest.raises(CopyError, match="cannot be read"):
        open_source(tmp_path / "text", [LOGS])
