"""PostgreSQL's disk is full: producers wait, nothing unstored is acknowledged, and the ledger goes
on by itself when there is room again."""

import pwd
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import asyncpg
import pytest

from seqgate.dev.postgres_server import NOBODY, in_namespace, not_root
from seqgate.dev.stack import Stack
from seqgate.services.ledger.adapters.postgres import open_postgres_store
from seqgate.services.runtime.postgres import Server
from tests.faults.small_disk import way_to_mount
from tests.faults.test_full_disk import MESSAGES, publish_until_full
from tests.support.application import Application
from tests.support.postgres_server import PostgresServer, admin, empty_database
from tests.support.waiting import eventually

TOPIC = "public/default/full-disk"

SIZE = "40m"
"""A database without tables takes 8 MB, and a segment of the write-ahead log 16 MB."""

ROOM_ROWS = 50
"""The room that is left for tables, in rows of 8 kB."""

MOUNT = 'mount -t tmpfs -o "size=$1,mode=700,uid=$3" disk "$2" && echo mounted && exec cat'


SPARE_SEGMENTS = """SELECT count(*) FROM pg_ls_waldir()
    WHERE name > pg_walfile_name(pg_current_wal_lsn()) AND length(name) = 24"""
"""The segments of the write-ahead log that were made in advance."""


class OnSmallDisk(PostgresServer):
    """A server with a small disk, a file system in memory that only it sees. It outlives the
    server, with a process of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "data")
        self.disk = folder / "disk"
        self.disk.mkdir()
        way = way_to_mount()
        assert way is not None
        self._has_user_namespace = bool(way)
        owner = 0 if way else pwd.getpwnam(NOBODY).pw_uid
        self._holder = subprocess.Popen(
            [
                "unshare",
                *way,
                "--mount",
                "--",
                "sh",
                "-c",
                MOUNT,
                "sh",
                SIZE,
                str(self.disk),
                str(owner),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"mounted\n"

    def inside(self, *command: str) -> list[str]:
        """A command that runs another one where the disk is seen."""
        target = ["--target", str(self._holder.pid), "--mount"]
        user = ["--user", "--preserve-credentials"] if self._has_user_namespace else []
        return ["nsenter", *target, *user, "--", *command]

    @property
    def command(self) -> list[str]:
        user = in_namespace() if self._has_user_namespace else not_root()
        return self.inside(*user, *super().command[len(not_root()) :])

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def close(self) -> None:
        self.stop()
        self._holder.communicate()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OnSmallDisk]:
    server = OnSmallDisk(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.close()


def stored(application: Application) -> int:
    return sum(not each.duplicate for each in application.history.acknowledged)


async def nearly_filled(server: OnSmallDisk) -> str:
    """The URL of a ledger's database on the disk, which the table `ballast` nearly fills."""
    url = server.url("small")
    async with admin(server.url()) as connection:
        await connection.execute(f"CREATE TABLESPACE small LOCATION '{server.disk}'")
        await connection.execute("CREATE DATABASE small TABLESPACE small")
        async with open_postgres_store(Server(url), migrates=True):
            pass  # its tables are made
        add = "INSERT INTO {} SELECT repeat('x', 7000) FROM generate_series(1, {})"
        for table in ("room", "ballast"):
            await connection.execute(f"CREATE TABLE {table} (filler text) TABLESPACE small")
            await connection.execute(f"ALTER TABLE {table} ALTER filler SET STORAGE PLAIN")
        await connection.execute(add.format("room", ROOM_ROWS))
        with suppress(asyncpg.DiskFullError):
            while True:
                await connection.execute(add.format("ballast", 1))
        await connection.execute("DROP TABLE room")
    return url


async def test_messages_that_await_disk_space_are_stored_once(
    tmp_path: Path, server: OnSmallDisk, seed: int
) -> None:
    url = await nearly_filled(server)
    services = ("cursor", "dedup", "ledger")
    async with Stack(tmp_path / "stack", services=services, postgres_url=url) as stack:
        application = Application(
            stack.target("ledger"), stack.address("dedup"), TOPIC, Random(seed)
        )
        pid = stack.pid("ledger")
        publishing = await publish_until_full(application, stack.log("ledger"), "STORE_FULL")
        told = len(application.history.acknowledged)
        assert not publishing.done()
        async with admin(server.url()) as connection:
            await connection.execute("DROP TABLE ballast")
        await publishing
        assert len(application.history.acknowledged) > told
        await application.publish(MESSAGES)
        await application.check_log()
        await application.check_state()
        assert stack.pid("ledger") == pid


async def test_a_server_that_ends_for_want_of_space_for_its_log_loses_nothing(
    tmp_path: Path, server: OnSmallDisk, seed: int
) -> None:
    """PostgreSQL ends itself when it cannot write its write-ahead log, and does not start again
    before there is room."""
    log, ballast = server.folder / "pg_wal", server.disk / "ballast"
    server.stop()
    move = f"mv {log} {server.disk}/ && ln -s {server.disk}/pg_wal {log}"
    fill = f"cat /dev/zero > {ballast} || true"
    subprocess.run(server.inside("sh", "-c", move), check=True)
    server.start()
    url = await empty_database(server, "full_log")
    services = ("cursor", "dedup", "ledger")
    async with Stack(tmp_path / "stack", services=services, postgres_url=url) as stack:
        application = Application(
            stack.target("ledger"), stack.address("dedup"), TOPIC, Random(seed)
        )
        await application.publish(MESSAGES)
        pid, told = stack.pid("ledger"), stored(application)
        subprocess.run(server.inside("sh", "-c", fill), check=True, stderr=subprocess.DEVNULL)
        with suppress(asyncpg.PostgresConnectionError):  # it may end itself this early
            async with admin(server.url()) as connection:
                while await connection.fetchval(SPARE_SEGMENTS):
                    await connection.execute("CREATE TABLE filler (); DROP TABLE filler")
                    await connection.execute("SELECT pg_switch_wal()")
                await connection.execute("SELECT pg_switch_wal()")
        publishing = await publish_until_full(application, stack.log("ledger"), "STORE_UNAVAILABLE")
        await eventually(lambda: server.has_ended)
        assert stored(application) == told
        assert not publishing.done()
        subprocess.run(server.inside("rm", str(ballast)), check=True)
        server.start()
        await publishing
        await application.publish(MESSAGES)
        await application.check_log()
        await application.check_state()
        assert stack.pid("ledger") == pid
