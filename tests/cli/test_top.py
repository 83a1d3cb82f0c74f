"""`seqgate top`, over all services."""

import asyncio
import fcntl
import os
import pty
import struct
import termios
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.api.dispatcher.v1.dispatcher_pb2_grpc import DispatcherServiceStub
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.cli._service import Services
from seqgate.cli._settings import resolve
from seqgate.cli._top_screen import rows_of, summary
from seqgate.client import Client, _frames, connect
from seqgate.client._frames import Sampler, frame_of
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import Stack
from tests.cli.command_line import PATIENCE_S, CommandLine
from tests.support.nursery import SEQGATE
from tests.support.waiting import eventually


class Terminal:
    """A command with a controlling terminal of its own."""

    def __init__(self, ours: int, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._ours = ours
        self._seen = bytearray()
        os.set_blocking(ours, False)

    def resize(self, columns: int, rows: int) -> None:
        """Change the size; the command gets SIGWINCH."""
        self._forget()
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        """Send keys to the command."""
        self._forget()
        os.write(self._ours, keys)

    def seen(self) -> str:
        """The output since the last resize or key press."""
        try:
            while block := os.read(self._ours, 65_536):
                self._seen += block
        except OSError:
            pass
        return self._seen.decode(errors="replace")

    def _forget(self) -> None:
        self.seen()
        self._seen.clear()

    async def shows(self, text: str) -> None:
        """Wait until the output contains this."""
        await eventually(lambda: text in self.seen(), text, within_s=PATIENCE_S)

    async def exit_code(self) -> int:
        """Wait until the command ends."""
        await eventually(lambda: (self.seen(), self.process.returncode is not None)[1])
        return await self.process.wait()


@asynccontextmanager
async def on_terminal(seqgate: CommandLine, *arguments: str) -> AsyncIterator[Terminal]:
    """Run a command on a terminal, and kill it at the end of the block."""
    ours, theirs = pty.openpty()
    environment = {**seqgate.environment, "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    process = await asyncio.create_subprocess_exec(
        *("setsid", "--ctty", SEQGATE, *arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=PIPE,
        env=environment,
    )
    os.close(theirs)
    terminal = Terminal(ours, process)
    terminal.resize(160, 30)
    try:
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        os.close(ours)


async def test_a_frame_has_rates_verdicts_lag_and_causes_of_blocked_keys(
    seqgate: CommandLine, stack: Stack, topic: str
) -> None:
    async with (
        connect(stack.address("ledger"), stack.address("dispatcher")) as client,
        client.producer(topic, name="p") as producer,
    ):
        await producer.send(b"0", key="k", sequence_id=0)
        async with client.consumer(topic, "s") as consumer:
            await consumer.nack(await consumer.receive(), 600)
            ask = ("top", topic, "--interval", "0.1", "-o", "json")
            async with seqgate.running(*ask) as running:
                first = await running.record()
                await producer.send(b"1", key="k", sequence_id=1)
                await producer.send(b"1", key="k", sequence_id=1)
                while True:
                    frame = await running.record()
                    (found,) = frame["topics"]
                    if found["verdicts_s"]["duplicate"]:
                        break
                running.interrupt()
                assert await running.exit_code() == 130
            table = await seqgate("top", topic, "--interval", "0.1", "--once")
    (nothing,) = first["topics"]
    assert (first["interval_s"], nothing["in_messages_s"], nothing["verdicts_s"]) == (None,) * 3
    assert found["topic"] == topic
    (subscription,) = found["subscriptions"]
    assert (subscription["subscription"], subscription["lag"]) == ("s", 2)
    assert subscription["blocked"][0]["reason"] == "RETRY_DELAY"
    assert (found["blocked_keys"], found["lag"], frame["away"]) == (1, 2, {})
    assert table.code == 0
    assert any("retry delay 1" in line for line in table.out.splitlines())


async def test_topics_and_subscriptions_shown_are_bounded_and_the_rest_is_counted(
    seqgate: CommandLine, stack: Stack, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (_frames.TOPICS_MAX, _frames.SUBSCRIPTIONS_MAX) == (200, 100)
    for limit in ("TOPICS_MAX", "SUBSCRIPTIONS_MAX", "PAGE"):
        monkeypatch.setattr(_frames, limit, 2)
    topics = [f"{topic}-{name}" for name in "abcde"]
    async with (
        aio.insecure_channel(stack.address("ledger")) as ledger,
        aio.insecure_channel(stack.address("dispatcher")) as dispatcher,
    ):
        ledgers: Any = LedgerServiceStub(ledger)
        for each in topics:
            await ledgers.CreateTopic(ledger_pb2.CreateTopicRequest(topic=each))
        dispatchers: Any = DispatcherServiceStub(dispatcher)
        for name in ("v", "w", "x", "y", "z"):
            await dispatchers.CreateSubscription(
                dispatcher_pb2.CreateSubscriptionRequest(
                    topic=topics[0],
                    subscription=name,
                    start=common_pb2.Start(earliest=common_pb2.Earliest()),
                )
            )
    async with Services(resolve(seqgate.environment)) as services:
        frame = frame_of(await Sampler(services, f"{topic}-*").sample(), None, "name")
    assert [each["topic"] for each in frame["topics"]] == topics[:2]
    assert frame["topics_left_out"] == 3
    first, second = frame["topics"]
    assert [each["subscription"] for each in first["subscriptions"]] == ["v", "w"]
    assert (first["subscriptions_left_out"], second["subscriptions_left_out"]) == (3, 0)
    assert any(line.startswith("3 more topics match") for line in summary(frame))
    assert [row[:2] for row in rows_of(frame)[1]][:4] == [
        [topics[0], ""],
        *(["", name] for name in ("v", "w", "3 more")),
    ]


async def test_top_works_while_services_are_unreachable(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    async with client.producer(topic, name="p") as producer:
        await producer.send(b"0")
    (port,) = free_ports(1)
    nowhere = f"127.0.0.1:{port}"
    ask = ("top", topic, "--once", "--interval", "0.1")
    found = await seqgate(*ask, "--dedup", nowhere, "-o", "json")
    shown = await seqgate(*ask, "--ledger", nowhere)
    assert (found.code, list(found.record["away"])) == (3, ["dedup"])
    assert found.record["away"]["dedup"]["reason"] == "UNREACHABLE"
    assert [each["topic"] for each in found.record["topics"]] == [topic]
    assert (shown.code, "ledger is unreachable" in shown.out) == (3, True)


@pytest.mark.parametrize(("key", "code"), [(b"q", 0), (b"\x03", 130)])
async def test_a_terminal_is_redrawn_until_interrupted(
    seqgate: CommandLine, topic: str, key: bytes, code: int
) -> None:
    async with on_terminal(seqgate, "top", topic, "--interval", "3600") as terminal:
        await terminal.shows("sorted by name")
        terminal.press(b"s")
        await terminal.shows("sorted by in")
        terminal.resize(120, 20)
        await terminal.shows("sorted by in")
        terminal.press(key)
        assert await terminal.exit_code() == code
        assert "\x1b[?1049l" in terminal.seen()  # the previous screen is restored


async def test_patterns_are_of_names_in_public_default_as_for_topic_ls(
    seqgate: CommandLine, topic: str
) -> None:
    for each in (topic, "patterned-one", "patterned-two"):
        await seqgate("topic", "create", each)
    top = ("top", "--once", "--interval", "0.1", "-o", "json")

    async def shown(pattern: str) -> list[str]:
        return [each["topic"] for each in (await seqgate(*top, pattern)).record["topics"]]

    assert await shown("patterned-*") == [
        "public/default/patterned-one",
        "public/default/patterned-two",
    ]
    assert await shown("patterned-tw?") == ["public/default/patterned-two"]
    assert await shown("*ed-one") == ["public/default/patterned-one"]
    assert topic in await shown("*")
    assert topic in await shown("cli/tests/*")
    ended = await seqgate(*top, "none-of-them-*")
    assert (ended.code, ended.error["reason"]) == (1, "TOPIC_NOT_FOUND")
