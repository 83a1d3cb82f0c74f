"""Places beyond the end of a topic are refused, and what a reset skips is counted and asked for."""

import asyncio
import os
import pty
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest

from seqgate.client import Batching, Client, SubscriptionType, connect
from seqgate.dev.stack import Stack
from tests.cli.command_line import PATIENCE_S, CommandLine

IN_AN_HOUR = (datetime.now(UTC) + timedelta(hours=1)).isoformat()

COMMANDS = [
    "read T --from P",
    "read T --to P",
    "subscription create T new --from P",
    "subscription reset T s --yes --to P",
    "subscription reset T s --dry-run --to P",
    "subscription replay T s --from P",
    "subscription replay T s --to P",
    "subscription replay T s --dry-run --from P",
    "cursor create T new --from P",
    "cursor reset T c --yes --to P",
]


@pytest.fixture
async def stored(seqgate: CommandLine, client: Client, topic: str) -> str:
    """A topic with six entries, a subscription s and a cursor c, both at 1:1."""
    async with client.producer(topic, name="p", batching=Batching(messages_max=2)) as producer:
        await asyncio.gather(*(producer.send(b"message") for _ in range(12)))
    await seqgate("subscription", "create", topic, "s", "--from", "1:2")
    await seqgate("cursor", "create", topic, "c", "--from", "1:2")
    return topic


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_place_beyond_the_end_is_refused_with_the_end(
    seqgate: CommandLine, stored: str, command: str
) -> None:
    for place in ("7:7", "1:7", IN_AN_HOUR, "9999-01-01"):
        arguments = [{"T": stored, "P": place}.get(each, each) for each in command.split()]
        ended = await seqgate(*arguments, "-o", "json")
        assert (ended.code, ended.out) == (1, ""), ended
        assert ended.error["reason"] == "INVALID_START"
        assert ended.error["details"]["last"] == "1:5"
        assert "latest" in ended.error["message"]
    for kind, name in (("subscription", "s"), ("cursor", "c")):
        shown = await seqgate(kind, "show", stored, name, "-o", "json")
        assert shown.record["mark_delete"] == "1:1"
    assert (await seqgate("subscription", "show", stored, "new")).code == 1


@pytest.mark.parametrize("place", ["latest", "1:6"])
async def test_the_end_itself_is_a_place(seqgate: CommandLine, stored: str, place: str) -> None:
    for command in ("read T --from P", "subscription create T at --from P"):
        arguments = [{"T": stored, "P": place}.get(each, each) for each in command.split()]
        assert (await seqgate(*arguments)).code == 0


KINDS = [("subscription", "s"), ("cursor", "c")]


@pytest.mark.parametrize(("kind", "name"), KINDS)
async def test_a_reset_that_skips_entries_counts_them_and_is_confirmed(
    seqgate: CommandLine, stored: str, kind: str, name: str
) -> None:
    reset = (kind, "reset", stored, name, "--to")
    told = await seqgate(*reset, "latest", "--dry-run", "-o", "json")
    assert told.record == {
        "topic": stored,
        kind: name,
        "mark_delete": "1:1",
        "moves_to": "1:5",
        "skipped_entries": 4,
        "repeated_entries": 0,
    }
    refused = await seqgate(*reset, "latest", "-o", "json")
    assert (refused.code, refused.out) == (2, "")
    assert refused.error["reason"] == "CONFIRMATION_REQUIRED"
    assert "4 unacknowledged entries" in refused.error["message"]
    assert "--yes" in refused.error["message"]
    assert (await seqgate(kind, "show", stored, name, "-o", "json")).record["mark_delete"] == "1:1"

    back = await seqgate(*reset, "1:1", "--dry-run", "-o", "json")
    assert (back.record["skipped_entries"], back.record["repeated_entries"]) == (0, 1)
    assert (await seqgate(*reset, "1:1", "-o", "json")).record["mark_delete"] == "1:0"
    moved = await seqgate(*reset, "latest", "--yes", "-o", "json")
    assert (moved.code, moved.record["mark_delete"]) == (0, "1:5")


async def test_entries_acknowledged_beyond_the_position_are_not_skipped(
    seqgate: CommandLine, stack: Stack, stored: str
) -> None:
    async with (
        connect(stack.address("ledger"), stack.address("dispatcher")) as client,
        client.consumer(stored, "s", type=SubscriptionType.SHARED) as consumer,
    ):
        messages = [await consumer.receive(timeout_s=PATIENCE_S) for _ in range(8)]
        for each in messages:
            if each.id.entry_id in (3, 5):
                await consumer.ack(each)
    for place, skipped, repeated in (("1:5", 2, 1), ("latest", 2, 0), ("1:1", 0, 3)):
        reset = ("subscription", "reset", stored, "s", "--to", place, "--dry-run", "-o", "json")
        told = (await seqgate(*reset)).record
        assert (told["skipped_entries"], told["repeated_entries"]) == (skipped, repeated), place


@pytest.mark.parametrize(("answer", "code", "mark_delete"), [(b"y\n", 0, "1:5"), (b"\n", 1, "1:1")])
async def test_a_terminal_is_asked(
    seqgate: CommandLine, stored: str, answer: bytes, code: int, mark_delete: str
) -> None:
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer)
        reset = ("subscription", "reset", stored, "s", "--to", "latest")
        assert await seqgate.on_terminal(*reset, terminal=theirs, keyboard=theirs) == code
    finally:
        with suppress(OSError):
            os.close(theirs)
        os.close(ours)
    shown = await seqgate("subscription", "show", stored, "s", "-o", "json")
    assert shown.record["mark_delete"] == mark_delete
