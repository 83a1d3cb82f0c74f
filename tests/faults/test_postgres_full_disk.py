"""PostgreSQL's disk is full: producers wait, nothing unstored is acknowledged, and the ledger goes
on by itself when there is room again."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import asyncpg
import pytest

from seqgate.services.ledger.adapters.postgres import open_postgres_store
from seqgate.services.runtime.postgres import Server
from tests.faults.test_full_disk import MESSAGES, publish_until_full
from tests.support.application import Application
from tests.support.postgres_server import PostgresServer, admin
from tools.stack.postgres_server import in_namespace, not_root
from tools.stack.stack import Stack

TOPIC = "public/default/full-disk"

SIZE = "24m"
"""A database without tables takes 8 MB."""

ROOM_ROWS = 50
"""The room that is left, in rows of 8 kB."""

MOUNT = 'mount -t tmpfs -o "size=$1,mode=700" disk "$2" && shift 2 && exec "$@"'


class OnSmallDisk(PostgresServer):
    """A server with a small disk, a file system in memory that only it sees."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "data")
        self.disk = folder / "disk"
        self.disk.mkdir()

    @property
    def command(self) -> list[str]:
        root = ("unshare", "--user", "--map-root-user", "--mount", "--")
        mounting = ("sh", "-c", MOUNT, "sh", SIZE, str(self.disk))
        server = super().command[len(not_root()) :]
        return [*root, *mounting, *in_namespace(), *server]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OnSmallDisk]:
    server = OnSmallDisk(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.stop()


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
    settings = {"SEQGATE_LEDGER_POSTGRES_URL": url}
    services = ("cursor", "dedup", "ledger")
    async with Stack(tmp_path / "stack", services=services, environment=settings) as stack:
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
