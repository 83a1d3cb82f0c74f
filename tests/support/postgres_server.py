"""A real PostgreSQL server for a test process, and an empty database for a test."""

import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from signal import SIGINT

import asyncpg

from seqgate.dev.ports import free_ports
from seqgate.dev.postgres_server import (
    USER,
    is_ready,
    make_database_folder,
    postgres_command,
    postgres_url,
)
from seqgate.services.runtime.transactions import Transaction
from tools.stack import processes

SETTINGS: Mapping[str, str] = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_wal_size": "128MB",
    "log_min_messages": "fatal",
}
"""A test's data may be lost with its machine."""

WITHIN_S = 120.0


class PostgresServer:
    """A server that can be killed and restarted with its data."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        (self.port,) = free_ports(1)
        self.settings = {**SETTINGS, **(settings or {})}
        self.databases: set[str] = set()
        """Those that `empty_database` has created."""
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, database: str = "postgres") -> str:
        return postgres_url(self.port, database=database)

    @property
    def command(self) -> list[str]:
        return postgres_command(self.folder, self.port, self.settings)

    def start(self) -> None:
        """Start the server, and return when it answers."""
        make_database_folder(self.folder, is_lasting=False)
        with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until_s = time.monotonic() + WITHIN_S
        while not is_ready(self.port):
            assert self._process.poll() is None, "the server ended"
            assert time.monotonic() < until_s, "the server does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the server with its children: it does not start again while one of them lives."""
        if self._process is not None:
            if self._process.poll() is None:
                processes.kill(self._process.pid)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Stop the server, which closes its clients' connections."""
        if self._process is not None:
            if self._process.poll() is None:
                processes.resume(self._process.pid)
                self.signal(SIGINT)
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    with tempfile.TemporaryDirectory(prefix="seqgate-postgres-") as parent:
        server = PostgresServer(Path(parent, "data"))
        try:
            server.start()
            yield server
        finally:
            server.stop()


@asynccontextmanager
async def admin(url: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    """A connection of a test's own."""
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def empty_database(server: PostgresServer, name: str) -> str:
    """The URL of a database, created if it does not exist, whose tables are emptied. Its layout
    stays, since making it anew costs half a second."""
    if name not in server.databases:
        async with admin(server.url()) as connection:
            await connection.execute(f"CREATE DATABASE {name} OWNER {USER}")
        server.databases.add(name)
        return server.url(name)
    async with admin(server.url(name)) as connection:
        tables = await connection.fetch(_TABLES)
        # Cheaper than TRUNCATE, which makes new files.
        await connection.execute(";".join(f"DELETE FROM {each['tablename']}" for each in tables))
    return server.url(name)


def empty_tables(db: Transaction) -> None:
    """The same in a transaction of an open store, without a connection."""
    for (name,) in db.rows(_TABLES):
        db.change(f"DELETE FROM {name}")


_TABLES = """SELECT tablename FROM pg_tables
    WHERE schemaname = 'public' AND tablename <> 'seqgate_layout'"""
