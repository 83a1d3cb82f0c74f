"""The examples keep their promises."""

import asyncio
import os
import signal
import sqlite3
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import closing
from pathlib import Path

import pytest

from seqgate.client import Chunking, connect
from seqgate.dev.stack import Stack
from tests.support.waiting import eventually


def balances(database: Path) -> dict[str, int]:
    if not database.exists():
        return {}
    with closing(sqlite3.connect(database)) as connection:
        try:
            return dict(connection.execute("SELECT account, amount FROM balance"))
        except sqlite3.OperationalError:  # the database was only just created
            return {}


async def start(
    root: Path, stack: Stack, topic: str, database: Path, *more: str, stderr: int | None = None
) -> Process:
    example = str(root / "examples" / "exactly_once_effect.py")
    ledger = stack.address("ledger")
    return await asyncio.create_subprocess_exec(
        sys.executable,
        example,
        ledger,
        topic,
        str(database),
        *more,
        stdout=PIPE,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


async def output(process: Process) -> str:
    """The output of a process that succeeded."""
    async with asyncio.timeout(60):
        said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode().strip()


async def test_an_effect_happens_once_despite_kills_of_the_reader(
    stack: Stack, topic: str, tmp_path: Path, root: Path
) -> None:
    database = tmp_path / "balances.db"
    async with (
        connect(stack.address("ledger")) as client,
        client.producer(topic, name="bank", chunking=Chunking(chunk_bytes=2)) as producer,
    ):
        for at in range(20):
            await producer.send(b"1", key=f"account-{at % 2}")
        following = await start(root, stack, topic, database, "--follow")
        try:
            await eventually(lambda: balances(database) == {"account-0": 10, "account-1": 10})
            await producer.send(b"5000000", key="account-0")  # cut into chunks
            await eventually(lambda: balances(database)["account-0"] == 5_000_010)
        finally:
            following.send_signal(signal.SIGKILL)
            await following.communicate()
        await producer.send(b"1", key="account-1")
    assert await output(await start(root, stack, topic, database)) == "1 payments applied"
    assert await output(await start(root, stack, topic, database)) == "0 payments applied"
    assert balances(database) == {"account-0": 5_000_010, "account-1": 11}


@pytest.mark.parametrize(
    ("payload", "key"),
    [(b"9.99", "a"), (b"5", None), (b"9" * 20, "a"), (b"9" * 5000, "a")],
    ids=["fraction", "no-account", "too-much", "too-long"],
)
async def test_a_message_that_is_no_payment_ends_the_reader_with_one_sentence(
    stack: Stack, topic: str, tmp_path: Path, root: Path, payload: bytes, key: str | None
) -> None:
    database = tmp_path / "balances.db"
    async with connect(stack.address("ledger")) as client, client.producer(topic) as producer:
        await producer.send(b"1", key="a")
        await producer.send(payload, key=key)
    for _ in range(2):  # and again, without another effect
        process = await start(root, stack, topic, database, stderr=PIPE)
        async with asyncio.timeout(60):
            said, error = await process.communicate()
        assert (process.returncode, said) == (1, b"")
        assert error.decode().startswith(f"{topic} has a message that is no payment")
        assert error.count(b"\n") == 1
        assert balances(database) == {"a": 1}


async def test_a_topic_that_does_not_exist_ends_the_reader_with_one_sentence(
    stack: Stack, tmp_path: Path, root: Path
) -> None:
    process = await start(root, stack, "no/such/topic", tmp_path / "balances.db", stderr=PIPE)
    async with asyncio.timeout(60):
        _, error = await process.communicate()
    assert process.returncode == 1
    assert (error.startswith(b"no/such/topic: "), error.count(b"\n")) == (True, 1)
