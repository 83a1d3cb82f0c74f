"""All services, and the real command line."""

import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from seqgate.cli import main
from seqgate.client import Client, connect
from seqgate.dev.stack import Stack
from tests.cli.command_line import CommandLine, Ended
from tests.support.nursery import Nursery
from tests.support.waiting import eventually

_NUMBERS = count()


@pytest_asyncio.fixture(scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Every service, shared by all tests here: each has its own topic."""
    async with Stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
def inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """Runs a command in this process, for tests without services: starting a process is slow."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in list(os.environ):
        if name.startswith(("SEQGATE_", "XDG_")):
            monkeypatch.delenv(name)

    def run(*arguments: str, **variables: str) -> Ended:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["seqgate", *arguments])
            for name, value in variables.items():
                patch.setenv(name, value)
            code = main()
        captured = capsys.readouterr()
        return Ended.of(code, captured.out, captured.err)

    return run


@pytest.fixture
def bare(tmp_path: Path, nursery: Nursery) -> CommandLine:
    """The command line with an empty home, and without settings."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SEQGATE_", "XDG_"))
    }
    return CommandLine(nursery, {**inherited, "HOME": str(tmp_path), "COLUMNS": "40"})


@pytest.fixture
def seqgate(bare: CommandLine, stack: Stack) -> CommandLine:
    """The command line, with the services' addresses in its environment."""
    return bare.with_(
        SEQGATE_LEDGER=stack.address("ledger"),
        SEQGATE_DEDUP=stack.address("dedup"),
        SEQGATE_CURSOR=stack.address("cursor"),
        SEQGATE_DISPATCHER=stack.address("dispatcher"),
        SEQGATE_FILTER=stack.address("filter"),
    )


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    """A client of the ledger service."""
    async with connect(stack.address("ledger")) as client:
        yield client


async def stored_around_a_moment(client: Client, topic: str) -> str:
    """Publish two messages before a moment, and two from then on. Returns the moment."""
    async with client.producer(topic, name="p") as producer:
        for _ in range(2):
            await producer.send(b"before")
        await later()
        moment = datetime.now(UTC)
        await later()
        for _ in range(2):
            await producer.send(b"since")
    return moment.isoformat()


async def later() -> None:
    """Wait until the clock has moved on by two milliseconds, the grain of an entry's time."""
    now_ns = time.time_ns()
    await eventually(lambda: time.time_ns() > now_ns + 2_000_000, "the clock moves on")


@pytest.fixture
def topic() -> str:
    """A topic that no other test uses."""
    return f"cli/tests/topic-{next(_NUMBERS)}"
