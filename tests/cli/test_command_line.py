"""Rules for every command: options, exit codes, outputs."""

import asyncio
import os
import pty
import re
from collections.abc import Callable
from importlib import metadata

import pytest

from seqgate.cli._failure import InvalidInput, exit_code, reason_of
from seqgate.cli._output import shown, time_shown
from seqgate.client import Client
from seqgate.dev.ports import free_ports
from seqgate.errors import (
    BY_REASON,
    FencedError,
    InUseError,
    SendTimeoutError,
    SeqgateError,
    UnavailableError,
)
from tests.cli.command_line import CommandLine, Ended


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (InvalidInput("x"), 2, "INVALID_INPUT"),
        (UnavailableError("x"), 3, "UNAVAILABLE"),
        (UnavailableError("x", reason="RECOVERING"), 3, "RECOVERING"),
        (SendTimeoutError("x"), 3, "SEND_TIMEOUT"),
        (InUseError("x"), 1, "IN_USE"),
        (FencedError("x", reason="PRODUCER_TAKEN_OVER"), 1, "PRODUCER_TAKEN_OVER"),
    ],
)
def test_an_error_has_an_exit_code_and_a_reason(
    error: SeqgateError, code: int, reason: str
) -> None:
    assert (exit_code(error), reason_of(error)) == (code, reason)


def test_a_refusal_is_not_reported_as_wrong_usage() -> None:
    assert {exit_code(kind("x")) for kind in BY_REASON.values()} == {1, 3}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        ("", "-"),
        (0, "0"),
        (True, "yes"),
        ("[red]é", "[red]é"),
        ("\x1b[31m\n\x9b", "\\x1b[31m\\n\\x9b"),
    ],
)
def test_a_table_shows_values_on_one_line(value: object, text: str) -> None:
    assert shown(value) == text


def test_times_are_utc_and_unrepresentable_ones_are_numbers() -> None:
    assert time_shown(1_700_000_000_123) == "2023-11-14T22:13:20.123Z"
    assert time_shown(2**63) == str(2**63)
    assert time_shown(None) is None


def test_version_is_printed(inside: Callable[..., Ended]) -> None:
    assert inside("--version") == Ended(0, f"seqgate {metadata.version('seqgate')}\n", "")


def test_help_is_printed_on_request_and_without_arguments(inside: Callable[..., Ended]) -> None:
    asked, nothing = inside("dedup", "--help"), inside("dedup")

    assert (asked.code, nothing.code) == (0, 2)
    assert "explain" in asked.out
    assert asked.out.strip() == nothing.err.strip()


@pytest.mark.parametrize(
    ("arguments", "reason", "message"),
    [
        (["topics"], "WRONG_USAGE", "No such command 'topics'. Did you mean 'topic', 'top'?"),
        (["read"], "WRONG_USAGE", "Missing argument 'TOPIC'."),
        (["topic", "ls", "--nope"], "WRONG_USAGE", "No such option: --nope"),
        (["read", "a b"], "INVALID_TOPIC_NAME", "topic must be tenant/namespace/name"),
        (["read", "t", "--from", "9"], "WRONG_USAGE", "--from must be earliest, latest, a message"),
        (["read", "t", "--exclusive"], "WRONG_USAGE", "--exclusive requires --from"),
        (["publish", "t", "--takeover"], "WRONG_USAGE", "--takeover requires --producer"),
        (["publish", "t", "--producer", "\n"], "INVALID_PRODUCER_NAME", "producer name must be"),
        (
            ["publish", "t", "--file", "missing.jsonl"],
            "INVALID_INPUT",
            "missing.jsonl: No such file",
        ),
        (["topic", "ls", "--ledger", "here"], "INVALID_SETTINGS", "'here' is not HOST:PORT"),
    ],
)
def test_wrong_usage_exits_with_2(
    inside: Callable[..., Ended], arguments: list[str], reason: str, message: str
) -> None:
    ended = inside(*arguments, "-o", "json")

    assert (ended.code, ended.out) == (2, "")
    assert ended.error["reason"] == reason
    assert ended.error["message"].startswith(message)


async def test_wrong_usage_points_to_the_help(bare: CommandLine) -> None:
    assert await bare("topic", "ls", "--nope") == Ended(
        2,
        "",
        "seqgate: No such option: --nope (WRONG_USAGE)\n  help: seqgate topic ls --help\n",
    )


async def test_an_unreachable_service_exits_with_3(bare: CommandLine) -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    nobody = bare.with_(SEQGATE_LEDGER=address, SEQGATE_DEDUP=address)

    for ended in await asyncio.gather(
        nobody("read", "t", "--follow", "-o", "json"),
        nobody("publish", "t", "--timeout", "0.1", "-o", "json"),
        nobody("dedup", "status", "t", "-o", "json"),
    ):
        assert (ended.code, ended.out) == (3, "")
        assert ended.error["reason"] == "UNREACHABLE"
        assert ended.error["message"].endswith(f"service at {address} does not answer")


async def test_a_silent_service_exits_with_3(bare: CommandLine) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        ended = await bare("topic", "ls", "--ledger", f"{host}:{port}", "--timeout", "0.2")

    assert ended.code == 3
    assert ended.err.startswith(f"seqgate: the ledger service at {host}:{port} does not answer (")


async def test_a_refusal_exits_with_1_and_is_printed_in_both_outputs(seqgate: CommandLine) -> None:
    said, reported = await asyncio.gather(
        seqgate("read", "nowhere"), seqgate("-o", "json", "read", "nowhere")
    )

    assert said == Ended(
        1,
        "",
        "seqgate: topic not found (TOPIC_NOT_FOUND)\n  topic: public/default/nowhere\n",
    )
    assert (reported.code, reported.out) == (1, "")
    assert reported.error == {
        "reason": "TOPIC_NOT_FOUND",
        "message": "topic not found",
        "details": {"topic": "public/default/nowhere"},
    }


async def test_an_option_may_stand_anywhere_and_the_last_one_wins(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    async with client.producer(topic):
        pass
    placed = await asyncio.gather(
        seqgate("-o", "json", "topic", "ls", topic),
        seqgate("-o", "table", "topic", "ls", topic, "-ojson"),
    )

    for ended in placed:
        assert ended.record["topic"] == topic


async def test_a_terminal_gets_a_table_that_fits_and_json_stays_plain(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    async with client.producer(topic, name="x" * 60) as producer:
        await producer.send(b"")
    controlling, terminal = pty.openpty()
    try:
        colourful = seqgate.with_(TERM="xterm")
        assert await colourful.on_terminal("dedup", "producers", topic, terminal=terminal) == 0
        table = os.read(controlling, 65_536).decode()
        arguments = ("dedup", "producers", topic, "-o", "json")
        assert await colourful.on_terminal(*arguments, terminal=terminal) == 0
        lines = os.read(controlling, 65_536).decode()
    finally:
        os.close(terminal)
        os.close(controlling)

    assert "\x1b[1m" in table
    assert table.count("x") == 60  # folded, not cut
    plain = re.sub(r"\x1b\[[0-9;]*m", "", table)
    assert max(len(line) for line in plain.splitlines()) <= 40
    assert "\x1b" not in lines
