"""The PostgreSQL servers that the stack and the tests start: they answer wherever they run, and
leave no process behind."""

import asyncio
import importlib.util
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from signal import SIGKILL

import asyncpg
import pytest

from seqgate.dev import postgres_server
from seqgate.dev.postgres_server import as_nobody, in_namespace, postgres_binaries, works
from tests.support.postgres_server import SETTINGS, PostgresServer, admin
from tests.support.waiting import eventually
from tools.stack.child import python_process
from tools.stack.postgres_cluster import NAMES, ClusterError, PostgresCluster
from tools.stack.processes import children, is_alive

LONG = "a-folder-whose-path-is-too-long-for-a-socket/" * 5


@pytest.fixture(params=[in_namespace, as_nobody], ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run servers in each way in which root can. Another user has one way."""
    if os.geteuid() == 0 and works(request.param()):
        monkeypatch.setattr(postgres_server, "not_root", request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for servers, removed after the test: each has some 50 MB."""
    made = tmp_path / LONG
    yield made / "servers"
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def server(folder: Path) -> Iterator[PostgresServer]:
    made = PostgresServer(folder)
    yield made
    made.kill()


def processes(server: PostgresServer) -> list[int]:
    assert server._process is not None
    pid = server._process.pid
    assert Path(f"/proc/{pid}/comm").read_text().strip() == "postgres"
    return [pid, *children(pid)]


def none_alive(pids: list[int]) -> bool:
    return not any(map(is_alive, pids))


@pytest.mark.usefixtures("way")
async def test_a_server_keeps_what_was_committed_and_leaves_no_process(
    server: PostgresServer,
) -> None:
    server.start()
    async with admin(server.url()) as connection:
        assert await connection.fetchval("SHOW server_encoding") == "UTF8"
        await connection.execute("CREATE TABLE kept (a int)")
    for end in (server.kill, server.stop):
        async with admin(server.url()):  # a client does not hold it up
            pids = processes(server)
            assert len(pids) > 1
            end()
        await eventually(partial(none_alive, pids))
        server.start()
        async with admin(server.url()) as connection:
            assert await connection.fetchval("SELECT count(*) FROM kept") == 0


NAMELESS = (
    "its binaries in .* cannot be run as nobody here: use another user, allow user namespaces"
)


@pytest.mark.usefixtures("way")
async def test_a_server_and_its_binaries_may_be_below_a_folder_of_mode_0700(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a checkout below root's own home. initdb asks access(), which ignores what a user's
    capabilities allow unless his process says otherwise."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    installed = postgres_binaries().parents[1]
    for each in (installed, installed.with_name(f"{installed.name}.libs")):
        if each.exists():
            shutil.copytree(each, closed / each.name, symlinks=True, copy_function=link)
    inside = closed / postgres_binaries().relative_to(installed.parent)
    monkeypatch.setattr(postgres_server, "postgres_binaries", lambda: inside)
    server = PostgresServer(closed / "servers")
    try:
        server.start()
        async with admin(server.url()) as connection:
            assert await connection.fetchval("SELECT true")
    finally:
        server.kill()
        shutil.rmtree(closed)


def link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)


def test_without_a_user_who_can_run_the_binaries_one_sentence_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(postgres_server, "works", lambda _: False)
    with pytest.raises(OSError, match=NAMELESS):
        postgres_server.not_root.__wrapped__()


STARTER = """
import subprocess, sys
from pathlib import Path
from seqgate.dev.postgres_server import postgres_command

server = subprocess.Popen(postgres_command(Path({folder!r}), {port}, {settings!r}))
print(server.pid, flush=True)
server.wait()
"""


async def test_a_server_does_not_outlive_the_process_that_started_it(
    server: PostgresServer, tmp_path: Path, root: Path
) -> None:
    server.start()
    server.stop()
    (tmp_path / "starter.py").write_text(
        STARTER.format(folder=str(server.folder), port=server.port, settings=dict(SETTINGS))
    )
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    async with python_process("starter", environment=environment) as starter:
        assert starter.stdout is not None
        pid = int(await starter.stdout.readline())
        await eventually(lambda: answers(server))
        pids = [pid, *children(pid)]
        starter.send_signal(SIGKILL)
        await starter.wait()
        await eventually(lambda: none_alive(pids))


async def answers(server: PostgresServer) -> bool:
    try:
        async with admin(server.url()) as connection:
            return bool(await connection.fetchval("SELECT true"))
    except (OSError, asyncpg.PostgresError):
        return False


def test_binaries_are_the_packages_or_the_systems_of_a_version_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> Path:
        return postgres_binaries.__wrapped__()

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(postgres_server, "DEBIAN", tmp_path / "debian")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(postgres_server, "PACKAGED", True)
    with pytest.raises(FileNotFoundError, match=r"pip install pgserver==0\.1\.4, or apt-"):
        found()
    monkeypatch.setattr(postgres_server, "PACKAGED", False)  # pip would install nothing
    with pytest.raises(FileNotFoundError, match="no PostgreSQL server: apt-get install"):
        found()
    on_path = binary(tmp_path / "path", says="postgres (PostgreSQL) 14.22")
    with pytest.raises(FileNotFoundError):
        found()
    binary(on_path, says="postgres (PostgreSQL) 18.1 (Debian 18.1-1)")
    assert found() == on_path
    binary(tmp_path / "debian" / "14" / "bin")
    assert found() == on_path
    for version in ("15", "17", "9"):
        binary(tmp_path / "debian" / version / "bin")
    assert found() == tmp_path / "debian" / "17" / "bin"


def binary(folder: Path, says: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "postgres").write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / "postgres").chmod(0o755)
    return folder


def cluster_in(folder: Path) -> PostgresCluster:
    return PostgresCluster(folder, settings={"shared_buffers": "16MB"}, is_lasting=False)


async def test_a_promoted_standby_has_what_was_acknowledged(folder: Path) -> None:
    async with cluster_in(folder) as cluster:
        pids = [pid for name in NAMES if (pid := cluster.pid(name))]
        old = cluster.primary
        await cluster.ask(old, "CREATE TABLE kept (a int)")
        await cluster.ask(old, "INSERT INTO kept VALUES (1)")
        await cluster.kill(old)
        new = await cluster.promote()
        assert new != old
        assert await cluster.ask(new, "SELECT a FROM kept") == 1
        await cluster.ask(new, "INSERT INTO kept VALUES (2)")
        await cluster.caught_up()
        (standby,) = cluster.standbys
        assert await cluster.ask(standby, "SELECT pg_is_in_recovery()")
    assert len(pids) == len(NAMES)
    assert none_alive(pids)


@pytest.mark.deep
@pytest.mark.usefixtures("way")
async def test_a_cluster_loses_nothing_while_its_servers_die_stand_still_and_return(
    folder: Path,
) -> None:
    written: list[int] = []

    async def write(number: int) -> None:
        await cluster.ask(cluster.primary, "INSERT INTO kept VALUES ($1)", number)
        written.append(number)

    async def read() -> list[int]:
        kept = await cluster.ask(cluster.primary, "SELECT array_agg(a ORDER BY a) FROM kept")
        return list(kept)

    async with cluster_in(folder) as cluster:
        await cluster.ask(cluster.primary, "CREATE TABLE kept (a int)")
        for number in range(0, 40, 10):
            await write(number)
            # One standby is enough, and none is not.
            first, second = sorted(cluster.standbys)
            await cluster.pause(first)
            await write(number + 1)
            await cluster.kill(second)
            waiting = asyncio.create_task(write(number + 2))
            await eventually(lambda: commit_waits(cluster))
            with pytest.raises(ClusterError, match=f"{second} may have acknowledged commits"):
                await cluster.promote()
            cluster.resume(first)
            await waiting
            await cluster.start_again(second)
            await cluster.caught_up()

            zombie = cluster.primary
            await (cluster.kill(zombie) if number % 20 else cluster.pause(zombie))
            await cluster.promote()
            await write(number + 3)
            if number % 20:
                await cluster.start_again(zombie, {"synchronous_standby_names": ""})
            else:
                cluster.resume(zombie)
                await cluster.ask(zombie, "ALTER SYSTEM SET synchronous_standby_names = ''")
                await cluster.ask(zombie, "SELECT pg_reload_conf()")
            await cluster.ask(zombie, "INSERT INTO kept VALUES (-1)")
            await cluster.return_as_standby(zombie)
            await write(number + 4)
            assert await read() == written
            assert "pg_rewind" not in cluster.log_tail(zombie)
            await cluster.caught_up()
    async with cluster:
        assert await read() == written


async def commit_waits(cluster: PostgresCluster) -> bool:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    return bool(await cluster.ask(cluster.primary, waiting))


@pytest.mark.deep
async def test_a_standby_can_be_promoted_as_soon_as_it_follows_a_new_primary(folder: Path) -> None:
    async with cluster_in(folder) as cluster:
        for _ in range(8):
            async with admin(cluster.read_write_url) as connection:
                port = await connection.fetchval("SHOW port")
            assert int(port) == cluster.ports[cluster.primary]
            old = cluster.primary
            await cluster.kill(old)
            await cluster.promote()
            dead = cluster.primary
            await cluster.kill(dead)
            await cluster.promote()
            await asyncio.gather(*(cluster.return_as_standby(each) for each in (old, dead)))
