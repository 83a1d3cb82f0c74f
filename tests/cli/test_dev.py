"""seqgate dev: all services on one machine."""

import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from seqgate.dev.stack import CONSOLE, PORTS, SERVICES
from tests.cli.command_line import CommandLine, Running
from tests.support.depth import some_of
from tests.support.ports import consecutive_ports
from tests.support.waiting import eventually
from tools.stack.processes import is_alive

START_S = 120.0
"""The limit of the start of all processes, and of their end, on a busy machine."""

SEND = ("publish", "t", "hello", "--key", "alice", "--producer", "p", "--sequence-id", "1")


@asynccontextmanager
async def dev(bare: CommandLine, *arguments: str) -> AsyncIterator[tuple[Running, dict[str, Any]]]:
    """`seqgate dev`, ready, and what it says. All its processes are gone at the end."""
    async with bare.running("dev", "-o", "json", *arguments) as running:
        found = await running.record(patience_s=START_S)
        try:
            yield running, found
        finally:
            running.send(signal.SIGTERM)
            await running.exit_code(patience_s=START_S)
            pids = found["pids"].values()
            await eventually(lambda: not any(map(is_alive, pids)), "all processes have ended")


def calling(bare: CommandLine, found: Mapping[str, Any]) -> CommandLine:
    return bare.with_(**{f"SEQGATE_{name.upper()}": found[name] for name in SERVICES})


@pytest.mark.parametrize("store", some_of(["sqlite", "postgres"], every=2))
async def test_it_stops_on_request_and_goes_on_with_its_data(
    tmp_path: Path, bare: CommandLine, store: str
) -> None:
    data = tmp_path / "data"
    servers = ["redis", *(["postgres"] if store == "postgres" else [])]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[: 2 if store == "sqlite" else 3]:
        where = ("--data", str(data), "--port-base", "0", "--store", store)
        async with dev(bare, *where) as (running, found):
            assert found["pids"].keys() == {*SERVICES, CONSOLE, *servers}
            assert found.keys() == {
                *SERVICES,
                CONSOLE,
                *servers,
                "pids",
                "data",
                "data_is_kept",
                "logs",
            }
            assert (found["data"], found["data_is_kept"]) == (str(data), True)
            assert (Path(found["logs"]) / "ledger.log").stat().st_size > 0
            ended = await calling(bare, found)(*SEND, "-o", "json")
            assert ended.record["duplicate"] == (number is not signal.SIGTERM)
            running.send(number)
            assert await running.exit_code(patience_s=START_S) == 0
            assert (await running.ended()).err == ""


async def test_a_process_that_is_killed_is_started_again(bare: CommandLine) -> None:
    async with dev(bare, "--port-base", "0") as (running, found):
        seqgate = calling(bare, found)
        assert not found["data_is_kept"]
        assert Path(found["data"], "ledger", "ledger.db").exists()
        assert (await seqgate(*SEND)).code == 0
        for name in ("ledger", "redis"):
            os.kill(found["pids"][name], signal.SIGKILL)
            told = await running.error_line(patience_s=START_S)
            while "WAITING" in told:  # a busy machine is slow to start them
                told = await running.error_line(patience_s=START_S)
            assert f"{name} was killed by SIGKILL" in told
        ended = await seqgate(*SEND, "-o", "json")
        assert (ended.record["duplicate"], ended.err) == (True, "")
    assert not Path(found["data"]).exists(), "data without a folder goes at the end"


async def test_one_that_never_starts_ends_all(bare: CommandLine) -> None:
    wrong = bare.with_(SEQGATE_FILTER_MAX_MESSAGES="many")
    ended = await wrong("dev", "--port-base", "0", "-o", "json", patience_s=START_S)
    assert (ended.code, ended.out) == (1, "")
    assert ended.error["reason"] == "NOT_STARTED"
    assert "filter ended with 2" in ended.error["message"]


async def test_it_says_for_whom_it_waits_and_stops_at_once_meanwhile(
    tmp_path: Path, bare: CommandLine
) -> None:
    setpriv = tmp_path / "setpriv"  # starts the filter service as a process that serves nothing
    setpriv.write_text(HANGING.format(setpriv=shutil.which("setpriv")))
    setpriv.chmod(0o755)
    slow = bare.with_(PATH=f"{tmp_path}:{os.environ['PATH']}")
    async with slow.running("dev", "--port-base", "0", "-o", "json") as running:
        while True:
            note = json.loads(await running.wait_line(patience_s=START_S))["note"]
            assert note["reason"] == "WAITING"
            if note["message"].startswith("filter is alive and not ready yet"):
                break
        running.interrupt()
        assert await running.exit_code(patience_s=START_S) == 0


HANGING = """#!/bin/sh
case "$*" in *services.filter*) exec sleep 600;; esac
exec {setpriv} "$@"
"""


async def test_people_see_addresses_folders_and_first_commands(bare: CommandLine) -> None:
    async with bare.running("dev", "--port-base", "0") as running:
        lines = [await running.line(patience_s=START_S) for _ in range(16)]
        running.send(signal.SIGTERM)
        assert await running.exit_code(patience_s=START_S) == 0
    told = "".join(lines)
    assert "is running on this machine. Ctrl-C stops it." in lines[0]
    for name in (*SERVICES, "redis"):
        assert f"\n{name} " in told
    assert "(deleted when this ends; --data DIR keeps it)" in told
    assert "  export SEQGATE_LEDGER=127.0.0.1:" in told
    assert "  seqgate publish greetings hello --key alice\n" in told


async def test_it_has_its_folder_and_ports_until_it_is_killed_with_all_processes(
    tmp_path: Path, bare: CommandLine
) -> None:
    data, base = tmp_path / "data", consecutive_ports(len(PORTS))
    ports = ("--port-base", str(base))
    async with dev(bare, "--data", str(data), *ports) as (running, found):
        assert found["redis"] == f"redis://127.0.0.1:{base}/0"
        assert found["dedup"] == f"127.0.0.1:{base + 1}"
        assert found["ledger"] == f"127.0.0.1:{base + 2}"
        assert found["cursor"] == f"127.0.0.1:{base + 3}"
        assert found["dispatcher"] == f"127.0.0.1:{base + 4}"
        assert found["filter"] == f"127.0.0.1:{base + 5}"
        for arguments, named in (
            (("--data", str(data), "--port-base", "0"), f"the folder {data}"),
            (ports, f"port {base} for redis cannot be used"),
        ):
            ended = await bare("dev", *arguments, patience_s=START_S)
            assert (ended.code, ended.out) == (1, "")
            (line,) = ended.err.splitlines()
            assert named in line
        running.send(signal.SIGKILL)


@pytest.mark.parametrize("base", ["-1", "65530", "x"])
async def test_ports_are_checked(bare: CommandLine, base: str) -> None:
    ended = await bare("dev", "--port-base", base, "-o", "json")
    assert (ended.code, ended.error["reason"]) == (2, "WRONG_USAGE")
    assert "--port-base" in ended.error["message"]
