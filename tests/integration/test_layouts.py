"""The layout of a PostgreSQL database: applied once, in order; shared by two versions of Seqgate
while an upgrade rolls through; refused by one that cannot use it."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path

import pytest
import pytest_asyncio

from seqgate.dev.ports import free_ports
from seqgate.services.errors import StoreUnavailable
from seqgate.services.ledger.adapters.postgres import MIGRATIONS, open_postgres_store
from seqgate.services.runtime.layouts import Step, missing, prepare, steps_in
from seqgate.services.runtime.postgres import PostgresDatabase, Server, open_postgres
from seqgate.types import TopicName
from tests.support.entries import single
from tests.support.postgres_server import PostgresServer, admin

FIRST = "-- usable from: 0.1.0\nCREATE TABLE first (a bigint)"
SECOND = "-- usable from: 0.1.0\nALTER TABLE first ADD COLUMN b bigint NOT NULL DEFAULT 7"
LATER = "-- usable from: 9.0\nDROP TABLE first"


@pytest_asyncio.fixture
async def url(postgres: PostgresServer) -> AsyncIterator[str]:
    """A database without tables."""
    async with admin(postgres.url()) as connection:
        await connection.execute("DROP DATABASE IF EXISTS layouts WITH (FORCE)")
        await connection.execute("CREATE DATABASE layouts")
    yield postgres.url("layouts")


@pytest_asyncio.fixture
async def database(url: str) -> AsyncIterator[PostgresDatabase]:
    async with open_postgres(Server(url)) as opened:
        yield opened


def folder_of(tmp_path: Path, *files: str) -> Path:
    tmp_path.mkdir(exist_ok=True)
    for number, text in enumerate(files, start=1):
        (tmp_path / f"{number:04}_step.sql").write_text(text)
    return tmp_path


async def test_steps_are_applied_once_and_in_order(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, FIRST, SECOND)
    applied = await prepare(database, "s", folder, migrates=True)
    assert [each.number for each in applied] == [1, 2]
    assert await prepare(database, "s", folder, migrates=True) == []
    await database.change("INSERT INTO first VALUES (1)")
    assert await database.change("SELECT a, b FROM first") == [(1, 7)]


async def test_processes_that_start_together_apply_each_step_once(url: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, FIRST, SECOND)

    async def start() -> None:
        async with open_postgres(Server(url)) as database:
            await prepare(database, "s", folder, migrates=True)

    await asyncio.gather(*(start() for _ in range(5)))
    async with admin(url) as connection:
        rows = await connection.fetch("SELECT number FROM seqgate_layout ORDER BY number")
    assert [each["number"] for each in rows] == [1, 2]


async def test_a_step_that_fails_changes_nothing(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    broken = "-- usable from: 0.1.0\nCREATE TABLE second (a bigint); SELECT no_function()"
    with pytest.raises(StoreUnavailable):
        await prepare(database, "s", folder_of(tmp_path, FIRST, broken), migrates=True)
    assert await database.change("SELECT to_regclass('second')") == [(None,)]
    (tmp_path / "0002_step.sql").write_text(SECOND)
    assert len(await prepare(database, "s", tmp_path, migrates=True)) == 1


async def test_missing_steps_are_refused_with_the_command_that_applies_them(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, FIRST)
    with pytest.raises(StoreUnavailable, match=r"seqgate\.services\.s --migrate"):
        await prepare(database, "s", folder, migrates=False)
    await prepare(database, "s", folder, migrates=True)
    assert await prepare(database, "s", folder, migrates=False) == []


async def test_an_older_version_uses_a_layout_that_names_it_and_refuses_others(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    newer = folder_of(tmp_path / "newer", FIRST, SECOND)
    older = folder_of(tmp_path / "older", FIRST)
    await prepare(database, "s", newer, migrates=True)
    assert await prepare(database, "s", older, migrates=True) == []
    newest = folder_of(tmp_path / "newest", FIRST, SECOND, LATER)
    await prepare(database, "s", newest, migrates=True, running="9.1")
    for folder in (older, newer):
        with pytest.raises(StoreUnavailable, match=r"asks for Seqgate 9\.0 or later"):
            await prepare(database, "s", folder, migrates=True)


def test_versions_compare_by_their_numbers() -> None:
    known = [Step(1, "one", "0.1.0")]
    later = [*known, Step(2, "two", "0.10")]
    assert missing(known, later, "0.10.0") == []
    assert missing(known, later, "0.11") == []
    with pytest.raises(StoreUnavailable):
        missing(known, later, "0.9.9")


async def test_two_versions_append_to_one_database_while_an_upgrade_rolls_through(
    url: str, tmp_path: Path
) -> None:
    """The next version adds a column and a table, which this one does not know."""
    files = [each.sql for each in steps_in(MIGRATIONS)]
    change = """-- usable from: 0.1.0
        ALTER TABLE topic ADD COLUMN label text NOT NULL DEFAULT '';
        ALTER TABLE block ADD COLUMN tier bigint;
        CREATE TABLE label (topic bigint)"""
    following = folder_of(tmp_path, *files, change)
    topics = [TopicName.parse(f"public/default/{name}") for name in ("one", "other")]
    async with open_postgres_store(Server(url), migrates=True) as this:
        states = [await this.take(topic, create=True) for topic in topics]
        await this.append(topics[0], states[0].ledger_id, None, [single(0)], 1)
        async with open_postgres(Server(url)) as database:
            await prepare(database, "ledger", following, migrates=True)
        tail = (await this.get(topics[0])).tail
        await this.append(topics[0], states[0].ledger_id, tail, [single(1)], 1)
        async with open_postgres_store(Server(url), migrates=False) as another:
            taken = await another.take(topics[1], create=False)
            await another.append(topics[1], taken.ledger_id, None, [single(0)], 1)
            for topic, count in zip(topics, (2, 1), strict=True):
                for store in (this, another):
                    assert (await store.get(topic)).entries == count


@pytest.mark.parametrize("service", ["ledger", "cursor"])
async def test_a_service_migrates_by_command(
    url: str, service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = f"SEQGATE_{service.upper()}"
    monkeypatch.setenv(f"{prefix}_POSTGRES_URL", url)
    monkeypatch.setenv(f"{prefix}_POSTGRES_MIGRATES", "false")
    monkeypatch.setenv(f"{prefix}_LISTEN", f"127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.chdir(tmp_path)
    refused = await run(service)
    assert refused.returncode == 1
    assert f"python -m seqgate.services.{service} --migrate" in refused.stderr
    assert "Traceback" not in refused.stderr
    # It serves nobody: an init container needs neither the service's certificate nor its rights.
    with monkeypatch.context() as patch:
        for name in ("TLS_CERTIFICATE", "TLS_KEY", "TLS_CLIENT_CA", "ACCESS"):
            patch.setenv(f"{prefix}_{name}_FILE", str(tmp_path / "missing"))
        migrated = await run(service, "--migrate")
    assert migrated.returncode == 0, migrated.stderr
    async with admin(url) as connection:
        applied = await connection.fetchval(
            "SELECT count(*) FROM seqgate_layout WHERE service = $1", service
        )
    assert applied > 0
    monkeypatch.delenv(f"{prefix}_POSTGRES_URL")
    without = await run(service, "--migrate")
    assert (without.returncode, "set postgres_url" in without.stderr) == (2, True)


async def run(service: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", f"seqgate.services.{service}", *arguments]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=100, check=False
    )


def test_the_layouts_are_usable_by_this_version() -> None:
    assert missing([], steps_in(MIGRATIONS), version("seqgate")) == []
