"""`seqgate dead-letter`."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from seqgate.client import AfterDeadLetter, Client, SubscriptionOptions, connect
from seqgate.dev.stack import Stack
from tests.cli.command_line import CommandLine
from tests.support.waiting import eventually


@pytest_asyncio.fixture
async def dead(stack: Stack, topic: str) -> AsyncIterator[str]:
    """A topic whose subscription `s` dead-lettered the first message of key k, and holds k."""
    options = SubscriptionOptions(max_redeliveries=0, after_dead_letter=AfterDeadLetter.HOLD)
    async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        await _publish(client, topic)
        async with client.consumer(topic, "s", name="crew", options=options) as consumer:
            refused = await consumer.receive()
            await consumer.nack(refused, delay_s=0, reason="no\nstock " * 7)

            async def is_held() -> bool:
                letters = [each async for each in client.admin().dead_letters(topic, "s")]
                return [each.waiting_entries for each in letters] == [1]

            await eventually(is_held)
            yield topic


async def _publish(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p") as producer:
        await producer.send(b"poison", key="k", properties={"a": "1"})
        await producer.send(b"next", key="k")


async def test_dead_letters_are_listed_and_shown(seqgate: CommandLine, dead: str) -> None:
    table = await seqgate("dead-letter", "ls", dead, "s")
    listed = await seqgate("dead-letter", "ls", dead, "s", "--key", "k", "-o", "json")
    none = await seqgate("dead-letter", "ls", dead, "s", "--key", "aw==", "--base64", "-o", "json")
    shown = await seqgate("dead-letter", "show", dead, "s", "1:0", "-o", "json")
    lines = await seqgate("dead-letter", "show", dead, "s", "1:0", "--in", f"{dead}-s-DLQ")

    assert table.rows[0][:3] == ["LETTER", "MESSAGE", "KEY"]
    assert table.rows[1][:3] == ["1:0", "1:0", "k"]
    (row,) = table.out.splitlines()[1:]
    assert "REDELIVERIES  1         no\\nstock no" in row
    assert row.split()[-2:] == ["1", "dead"]
    assert "…" in row
    (letter,) = listed.records
    assert none.records == listed.records  # aw== is k
    assert (letter["origin"], letter["key"], letter["properties"]) == ("1:0", "k", {"a": "1"})
    assert [each["consumer"] for each in letter["failures"]] == ["crew"]
    assert shown.record | letter == shown.record
    assert [each["payload"] for each in shown.record["messages"]] == ["poison"]
    assert [each["reason"] for each in letter["failures"]] == ["no\nstock " * 7]
    (line,) = (each for each in lines.out.splitlines() if "REFUSED at" in each)
    assert line.strip().endswith("by crew: " + ("no\\nstock " * 7).strip())


async def test_a_letter_is_redriven_once(seqgate: CommandLine, dead: str) -> None:
    again = ("dead-letter", "redrive", dead, "s", "1:0", "-o", "json")
    trial = await seqgate(*again, "--dry-run")
    made = await seqgate(*again, "--id", "monday")
    repeated = await seqgate(*again, "--id", "monday")
    refused = await seqgate(*again)

    assert (trial.record["redrive"], trial.record["letters"]) == (0, 1)
    assert (made.record["redrive"], made.record["repeated"]) == (1, False)
    assert (repeated.record["redrive"], repeated.record["repeated"]) == (1, True)
    assert refused.error["reason"] == "LETTER_NOT_REDRIVABLE"
    (letter,) = (await seqgate("dead-letter", "ls", dead, "s", "-o", "json")).records
    assert letter["redriven"]


async def test_a_missing_letter_is_not_found(seqgate: CommandLine, dead: str) -> None:
    missing = await seqgate("dead-letter", "show", dead, "s", "1:9", "-o", "json")
    assert missing.error["reason"] == "LETTER_NOT_FOUND"


# ---- redrives of many


async def test_all_letters_are_redriven_and_the_redrive_is_shown(
    seqgate: CommandLine, topic: str, stack: Stack
) -> None:
    many = ("dead-letter", "redrive", topic, "s", "--where", "properties['a'] == '1'")
    async with (
        connect(stack.address("ledger"), stack.address("dispatcher")) as client,
        client.producer(topic, name="p") as producer,
        client.consumer(topic, "s", options=SubscriptionOptions(max_redeliveries=0)) as consumer,
    ):
        await producer.send(b"poison", key="k", properties={"a": "1"})
        await consumer.nack(await consumer.receive(20), delay_s=0)

        async def is_dead() -> bool:
            return (await client.admin().subscription(topic, "s")).mark_delete == (1, 0)

        await eventually(is_dead)
        trial = await seqgate(*many, "--dry-run", "-o", "json")
        table = await seqgate(*many, "--dry-run")
        made = await seqgate(*many, "--rate", "9", "--id", "monday", "-o", "json")
        again = await seqgate(*many, "--rate", "9", "--id", "monday", "-o", "json")
        await consumer.ack(await consumer.receive(20))
        shown = await seqgate("redrive", "show", topic, "s", "1", "--wait", "-o", "json")
    assert (trial.record["total_entries"], trial.record["complete"]) == (1, True)
    (outcome,) = trial.record["outcomes"]
    assert (outcome["outcome"], outcome["entries"]) == ("REDRIVEN", 1)
    assert table.rows[-1] == ["redriven", "1", "1", "1", "1", "1"]
    assert (made.record["number"], again.record["number"]) == (1, 1)
    assert (shown.record["state"], shown.record["counts"]) == ("DONE", {"REDRIVEN": 1})
    assert shown.record["selection"]["expression"] == "properties['a'] == '1'"
    assert '"of_entries":1' in shown.err
    lines = await seqgate("redrive", "show", topic, "s", "1")
    assert "  where" in lines.out
    assert (await seqgate("redrive", "stop", topic, "s", "1", "-o", "json")).record["number"] == 1
    listed = await seqgate("redrive", "ls", topic, "s")
    assert listed.rows[1][:3] == ["1", f"{topic}-s-DLQ", "done"]


async def test_a_stretch_is_replayed(seqgate: CommandLine, dead: str) -> None:
    stretch = ("subscription", "replay", dead, "s", "--from", "1:0", "--to", "1:1", "-k", "k")
    trial = await seqgate(*stretch, "--dry-run", "-o", "json")
    made = await seqgate(*stretch, "-o", "json")
    new = await seqgate("subscription", "replay", dead, "new", "--create", "-o", "json")
    lines = await seqgate("redrive", "show", dead, "s", "1")

    assert [each["outcome"] for each in trial.record["outcomes"]] == ["REDRIVEN"]
    assert (made.record["number"], made.record["dead_letter_topic"]) == (1, None)
    assert made.record["selection"]["through"] == "1:0"
    assert (new.record["subscription"], new.record["total_entries"]) == ("new", 2)
    assert any("the topic" in line for line in lines.out.splitlines())


async def test_a_redrive_needs_letters_or_a_selection(seqgate: CommandLine, dead: str) -> None:
    for given in ([], ["1:0", "--all"], ["1:0", "--rate", "1"], ["--all", "--base64"]):
        refused = await seqgate("dead-letter", "redrive", dead, "s", *given, "-o", "json")
        assert refused.error["reason"] == "WRONG_USAGE", given


async def test_a_letter_is_mended_and_discarded_once(
    seqgate: CommandLine, dead: str, tmp_path: Path
) -> None:
    file = tmp_path / "payload"
    file.write_bytes(b"\x00cured")
    command = ("dead-letter", "mend", dead, "s", "1:0", "-o", "json", "--id", "monday")
    change = ("--file", str(file), "--put", "b=2", "--remove", "a")
    mended = await seqgate(*command, *change)
    repeated = await seqgate(*command, *change)
    again = await seqgate(*command[:-1], "tuesday", "--payload", "x")
    copy = mended.record["letter"]
    shown = await seqgate("dead-letter", "show", dead, "s", copy)
    original = await seqgate("dead-letter", "show", dead, "s", "1:0", "-o", "json")
    gone = await seqgate("dead-letter", "discard", dead, "s", copy, "--reason", "no use", "--yes")
    discarded = await seqgate("dead-letter", "ls", dead, "s", "-o", "json")
    log = await seqgate("dead-letter", "log", dead, "s")
    operations = await seqgate("dead-letter", "log", dead, "s", "-o", "json")

    assert (mended.record["operation"], mended.record["repeated"]) == (1, False)
    assert (repeated.record["letter"], repeated.record["repeated"]) == (copy, True)
    assert again.error["reason"] == "LETTER_NOT_MENDABLE"
    assert any("1:0 at" in line for line in shown.out.splitlines())
    assert any("cured" in line for line in shown.out.splitlines())
    assert (original.record["state"], original.record["successor"]) == ("MENDED", copy)
    assert gone.code == 0
    assert [each["state"] for each in discarded.records] == ["MENDED", "DISCARDED"]
    assert log.rows[1][:2] == ["2", "discard"]
    assert [each["action"] for each in operations.records] == ["DISCARD", "MEND"]
    assert operations.records[0]["reason"] == "no use"


async def test_a_mend_takes_one_payload_or_properties(seqgate: CommandLine) -> None:
    command = ("dead-letter", "mend", "orders", "s", "1:0")
    assert (await seqgate(*command)).code == 2
    assert (await seqgate(*command, "--payload", "x", "--file", "y")).code == 2
    assert (await seqgate(*command, "--file", "missing")).code == 2
