"""Three PostgreSQL servers on loopback: a primary, and two standbys of which one must have a commit
before it is acknowledged. They can be killed, paused, promoted and brought back.

Each server names the other two in synchronous_standby_names, whatever its role, so a promoted
standby acknowledges nothing that only it has. An acknowledged commit is on the primary and on at
least one standby. After the primary is lost, it is on the standby that received the most, if all
that were standbys are asked.

A cluster keeps its data in one folder, across runs:

    postgres/  postgres-1/  postgres-2/   the servers' data
    NAME.log                              a server's output, appended
    primary                               the name of the primary
"""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any, Final, Self

import asyncpg

from seqgate.dev.child import Child, start_process, tail, tell
from seqgate.dev.ports import free_ports
from seqgate.dev.postgres_server import (
    USER,
    give_to_server,
    make_database_folder,
    postgres_binaries,
    postgres_command,
    postgres_url,
    run_as_server,
)
from tools.stack import processes

NAMES: Final = ("postgres", "postgres-1", "postgres-2")

DATABASE: Final = "seqgate"

PATIENCE_S: Final = 120.0
"""How long a server may take to reach a state: to answer, to catch up, to end."""

ASK_TIMEOUT_S: Final = 30.0
"""How long connecting to a server may take."""

POLL_S: Final = 0.05

SETTINGS: Final[Mapping[str, str]] = {
    "wal_keep_size": "512MB",
    "wal_retrieve_retry_interval": "200ms",
}

OWN_SETTINGS: Final = "postgresql.auto.conf"
"""A server's file of settings that differ between servers; ALTER SYSTEM changes it, too."""

IS_STANDBY: Final = "standby.signal"
"""The file that makes a server start as a standby."""


class ClusterError(Exception):
    """A server did not reach a state in time, or a step would lose acknowledged commits."""


class PostgresCluster:
    """The servers, by their names, NAMES. An async context manager: starts all, and stops them."""

    def __init__(
        self,
        folder: Path,
        *,
        settings: Mapping[str, str] | None = None,
        ports: Mapping[str, int] | None = None,
        is_lasting: bool = True,
    ) -> None:
        """
        Args:
            folder: the folder of data and logs; created if missing.
            settings: settings of all servers. full_page_writes stays on: pg_rewind needs it.
            ports: ports to listen on, by name; free ones by default.
            is_lasting: whether data is flushed to the disk.
        """
        self.folder = folder.resolve()
        self.ports = dict(zip(NAMES, free_ports(len(NAMES)), strict=True)) | dict(ports or {})
        self._settings = {
            **SETTINGS,
            "fsync": "on" if is_lasting else "off",
            **(settings or {}),
        }
        self._sync = [] if is_lasting else ["--no-sync"]
        self._is_lasting = is_lasting
        self._processes: dict[str, Child] = {}
        self._primary = NAMES[0]
        self.standbys: set[str] = set()
        """The standbys of the primary. A killed one still is one, since it may have a commit that
        the others lack."""

    # ---- addresses

    @property
    def primary(self) -> str:
        """The name of the primary: the server promoted last."""
        return self._primary

    def url(self, *names: str, database: str = DATABASE) -> str:
        """The URL of a database on some of the servers; on all by default, in a fixed order. It
        does not say which of them is the primary."""
        return postgres_url(*(self.ports[each] for each in names or NAMES), database=database)

    @property
    def read_write_url(self) -> str:
        """A URL with which a driver picks the first server that accepts writes. While a zombie
        runs, that may be the zombie."""
        return f"{self.url()}?target_session_attrs=read-write"

    def log_tail(self, name: str) -> str:
        return tail(self._log(name))

    def pid(self, name: str) -> int | None:
        """The process id of a server; None if it is not running."""
        process = self._processes.get(name)
        return None if process is None or process.returncode is not None else process.pid

    # ---- life

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start all servers, and return when both standbys have what the primary has.

        Raises:
            ClusterError: a server ended, or was not ready in time.
            FileNotFoundError: no PostgreSQL is installed.
            OSError: a folder could not be made.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            self._primary = self._primary_file.read_text().strip()
        await asyncio.to_thread(
            make_database_folder, self._data(self.primary), is_lasting=self._is_lasting
        )
        await self._run(self.primary, {})
        others = [each for each in NAMES if each != self.primary]
        await asyncio.gather(*(self.return_as_standby(each) for each in others))
        if not await self.ask(
            self.primary, "SELECT count(*) FROM pg_database WHERE datname = $1", DATABASE
        ):
            await self.ask(self.primary, f"CREATE DATABASE {DATABASE} OWNER {USER}")
        self._primary_file.write_text(self.primary)
        await self.caught_up()

    async def stop(self) -> None:
        """Stop all servers, paused ones, too. The primary first, so that standbys get the rest."""
        for name in self._processes:
            self.resume(name)
        for name in sorted(self._processes, key=lambda each: each != self.primary):
            await self.stop_server(name)

    async def stop_server(self, name: str) -> None:
        """Stop one server, which closes its clients' connections; kill it if it does not stop in
        time."""
        process = self._processes.get(name)
        if process is None:
            return
        self.resume(name)
        tell(process, Signals.SIGINT)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await process.wait()
        except TimeoutError:
            await self.kill(name)
        finally:
            if process.returncode is not None:
                self._processes.pop(name, None)

    # ---- failures

    async def kill(self, name: str) -> None:
        """Kill a server and all its children with SIGKILL. They are gone on return."""
        process = self._processes[name]
        if process.returncode is None:
            await asyncio.to_thread(processes.kill, process.pid)
        await process.wait()
        del self._processes[name]

    async def pause(self, name: str) -> None:
        """Stop a server and all its children with SIGSTOP. They stand still on return."""
        if (pid := self.pid(name)) is not None:
            await asyncio.to_thread(processes.pause, pid)

    def resume(self, name: str) -> None:
        """Let a paused server go on."""
        if (pid := self.pid(name)) is not None:
            processes.resume(pid)

    # ---- roles

    async def promote(self, *, loses: bool = False) -> str:
        """Make the standby that received the most the primary, and the other one its standby. The
        old primary, unless it is dead, is left alone: a zombie, whose standbys are gone.

        Args:
            loses: promote even if a standby does not run: acknowledged commits that only it and the
                old primary have are lost.

        Returns:
            The name of the new primary.

        Raises:
            ClusterError: a standby does not run.
        """
        running = [each for each in sorted(self.standbys) if self.pid(each) is not None]
        if not running or (not loses and set(running) != self.standbys):
            missing = sorted(self.standbys - set(running))
            raise ClusterError(
                f"{', '.join(missing) or 'every standby'} may have acknowledged commits that no "
                "running standby has: start it again first"
            )
        # What an old primary still sends must not arrive after the comparison.
        await asyncio.gather(*(self._follow(each, None) for each in running))
        received = {each: await self._received(each) for each in running}
        chosen = max(running, key=lambda each: received[each])
        if not await self.ask(chosen, f"SELECT pg_promote(true, {PATIENCE_S:.0f})"):
            raise ClusterError(f"{chosen} was not promoted: {self.log_tail(chosen)}")
        self._primary = chosen
        self._primary_file.write_text(chosen)
        self.standbys.discard(chosen)
        others = [each for each in running if each != chosen]
        await asyncio.gather(*(self._follow(each, chosen) for each in others))
        return chosen

    async def start_again(self, name: str, settings: Mapping[str, str] | None = None) -> None:
        """Start a server that was killed or stopped, in the role that it had: an old primary is a
        zombie. It commits only with a standby, and so never, unless `settings` has an empty
        synchronous_standby_names."""
        await self._run(name, settings or {})

    async def return_as_standby(self, name: str) -> None:
        """Make a server a standby of the primary, whatever it was. What it has and the primary has
        not is undone, by pg_rewind, or else a new base backup. It has what the primary has on
        return."""
        assert name != self.primary
        await self.stop_server(name)
        if not (self._data(name) / "PG_VERSION").exists() or not await self._rewind(name):
            await self._back_up(name)
        self._write(name, OWN_SETTINGS, self._own_settings(name, follows=self.primary))
        self._write(name, IS_STANDBY, "")
        await self._run(name, {})
        self.standbys.add(name)
        await self._join(name)

    async def caught_up(self) -> None:
        """Wait until all running standbys have flushed what the primary has written by now."""
        running = [each for each in self.standbys if self.pid(each) is not None]
        await asyncio.gather(*(self._join(each) for each in running))

    async def ask(self, name: str, sql: str, *values: object) -> Any:
        """Run one statement on one server, in the database postgres. Returns the first value of the
        first row."""
        async with asyncio.timeout(PATIENCE_S):
            connection = await asyncpg.connect(
                self.url(name, database="postgres"), timeout=ASK_TIMEOUT_S
            )
            try:
                return await connection.fetchval(sql, *values)
            finally:
                connection.terminate()

    # ---- parts

    @property
    def _primary_file(self) -> Path:
        return self.folder / "primary"

    def _data(self, name: str) -> Path:
        return self.folder / name

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    async def _run(self, name: str, settings: Mapping[str, str]) -> None:
        """Start a server, and return when it answers."""
        assert self.pid(name) is None
        if not (self._data(name) / IS_STANDBY).exists():
            self._write(name, OWN_SETTINGS, self._own_settings(name, follows=None))
        command = postgres_command(
            self._data(name), self.ports[name], {**self._settings, **settings}
        )
        with self._log(name).open("ab") as log:
            process = await start_process(command, log.fileno(), os.environ)
        self._processes[name] = process

        async def answers() -> bool:
            if process.returncode is not None:
                del self._processes[name]
                raise ClusterError(f"{name} ended with {process.returncode}: {self.log_tail(name)}")
            with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                return bool(await self.ask(name, "SELECT true"))
            return False

        await self._until(answers, f"{name} answers")

    async def _rewind(self, name: str) -> bool:
        # pg_rewind takes the primary's timeline from its last checkpoint.
        await self.ask(self.primary, "CHECKPOINT")
        source = f"--source-server={self._conninfo(self.primary)} dbname=postgres"
        target = f"--target-pgdata={self._data(name)}"
        command = [str(postgres_binaries() / "pg_rewind"), target, source, *self._sync]
        try:
            await asyncio.to_thread(run_as_server, command)
        except OSError as error:
            with self._log(name).open("a") as log:
                log.write(f"{error}\n")
            return False
        return True

    async def _back_up(self, name: str) -> None:
        data = self._data(name)
        await asyncio.to_thread(shutil.rmtree, data, ignore_errors=True)
        data.mkdir()
        give_to_server(data)
        source = ["--dbname", self._conninfo(self.primary), "--pgdata", str(data)]
        how = ["--wal-method", "stream", "--checkpoint", "fast", *self._sync]
        command = [str(postgres_binaries() / "pg_basebackup"), *source, *how]
        await asyncio.to_thread(run_as_server, command)

    async def _follow(self, name: str, primary: str | None) -> None:
        """Let a standby follow another server, or none."""
        source = "" if primary is None else self._conninfo(primary, application=name)
        await self.ask(name, f"ALTER SYSTEM SET primary_conninfo = '{source}'")
        await self.ask(name, "SELECT pg_reload_conf()")
        if primary is None:
            await self._until(partial(self._is_cut, name), f"{name} follows nobody")
        else:
            await self._join(name)

    async def _join(self, name: str) -> None:
        """Wait until a standby has what the primary has. Until it has the log from the beginning of
        the new timeline's segment, PostgreSQL panics when it is promoted."""
        await self._until(partial(self._streams, name), f"{name} streams")
        written = await self.ask(self.primary, "SELECT pg_current_wal_lsn()::text")
        await self._until(partial(self._has, name, written), f"{name} caught up")

    async def _is_cut(self, name: str) -> bool:
        """Whether a standby receives nothing, and does not try to."""
        setting = "SELECT current_setting('primary_conninfo') = ''"
        receivers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'walreceiver'"
        return bool(await self.ask(name, setting)) and not await self.ask(name, receivers)

    async def _received(self, name: str) -> tuple[int, int]:
        """The end of what a standby has on its disk, and of what it has of the timeline that it
        followed last, in bytes."""
        ends = await self.ask(
            name,
            """SELECT ARRAY[pg_wal_lsn_diff(GREATEST(received, replayed), '0/0')::bigint,
                    COALESCE(pg_wal_lsn_diff(received, '0/0'), 0)::bigint]
                FROM pg_last_wal_receive_lsn() received, pg_last_wal_replay_lsn() replayed""",
        )
        end, followed = ends
        return end, followed

    async def _streams(self, name: str) -> bool:
        """Whether a standby and the primary agree that they are connected."""
        receives = "SELECT count(*) FROM pg_stat_wal_receiver WHERE sender_port = $1"
        sends = """SELECT count(*) FROM pg_stat_replication
            WHERE application_name = $1 AND state = 'streaming'"""
        is_connected = await self.ask(name, receives, self.ports[self.primary])
        return bool(is_connected and await self.ask(self.primary, sends, name))

    async def _has(self, name: str, written: str) -> bool:
        """Whether the primary knows that a standby has flushed a place."""
        flushed = """SELECT count(*) FROM pg_stat_replication
            WHERE application_name = $1 AND flush_lsn >= $2::text::pg_lsn"""
        return bool(await self.ask(self.primary, flushed, name, written))

    def _own_settings(self, name: str, *, follows: str | None) -> str:
        others = ", ".join(f'"{each}"' for each in NAMES if each != name)
        # pg_rewind needs hints in the log, and reads of it in a server's file only.
        lines = ["wal_log_hints = on", f"synchronous_standby_names = 'ANY 1 ({others})'"]
        if follows is not None:
            lines.append(f"primary_conninfo = '{self._conninfo(follows, application=name)}'")
        return "".join(f"{each}\n" for each in lines)

    def _conninfo(self, name: str, *, application: str = "seqgate-cluster") -> str:
        words = {"host": "127.0.0.1", "port": self.ports[name], "user": USER}
        return " ".join(
            f"{key}={value}" for key, value in {**words, "application_name": application}.items()
        )

    def _write(self, name: str, file: str, text: str) -> None:
        """Write a file of a server's folder, and let it belong to the folder's owner."""
        path = self._data(name) / file
        path.write_text(text)
        owner = self._data(name).stat()
        os.chown(path, owner.st_uid, owner.st_gid)

    async def _until(self, state: Callable[[], Awaitable[object] | object], what: str) -> None:
        """Wait for a state. Raises ClusterError if it does not come in time."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    seen = state()
                    if isinstance(seen, Awaitable):
                        seen = await seen
                    if seen:
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ClusterError(f"not within {PATIENCE_S:.0f} s: {what}") from None
