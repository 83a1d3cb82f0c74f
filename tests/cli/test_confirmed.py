"""Commands that give something up for good count it, and ask first."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from seqgate.client import Client
from tests.cli.command_line import CommandLine


async def some(seqgate: CommandLine, client: Client, topic: str) -> None:
    """Three messages, of which the subscription and the cursor have acknowledged one."""
    async with client.producer(topic, name="p") as producer:
        for _ in range(3):
            await producer.send(b"a")
    await seqgate("subscription", "create", topic, "s", "--from", "1:1")
    await seqgate("cursor", "create", topic, "c", "--from", "1:1")


@pytest.mark.parametrize(
    ("command", "lost"),
    [
        (("topic", "rm", "T"), "with 3 messages ("),
        (("topic", "trim", "T", "1:2"), "Of the 2 entries of "),
        (("subscription", "rm", "T", "s"), "acknowledged up to 1:0 with 2 entries still to come"),
        (("cursor", "rm", "T", "c"), "acknowledged up to 1:0 with 2 entries still to come"),
        (("cursor", "import", "T", "c", "FILE", "--replace"), "up to 1:0 with 2 entries still"),
        (("dead-letter", "discard", "T", "s", "1:0", "1:1"), "2 dead letters of s of "),
    ],
)
async def test_a_script_confirms_what_is_lost(
    seqgate: CommandLine,
    client: Client,
    topic: str,
    tmp_path: Path,
    command: Sequence[str],
    lost: str,
) -> None:
    await some(seqgate, client, topic)
    file = tmp_path / "info"
    await seqgate("cursor", "export", topic, "c", str(file))
    arguments = [{"T": topic, "FILE": str(file)}.get(each, each) for each in command]

    ended = await seqgate(*arguments, "-o", "json")

    assert (ended.code, ended.out) == (2, "")
    assert ended.error["reason"] == "CONFIRMATION_REQUIRED"
    assert lost in ended.error["message"]
    assert ended.error["message"].endswith("add --yes.")
    assert (await seqgate("topic", "show", topic, "-o", "json")).record["messages"] == 3
    assert (await seqgate("cursor", "show", topic, "c")).code == 0
    assert (await seqgate("subscription", "show", topic, "s")).code == 0


async def test_nothing_to_trim_is_not_asked_for(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    await some(seqgate, client, topic)
    assert (await seqgate("topic", "trim", topic, "1:0")).code == 0


async def test_a_cursor_is_exported_to_standard_output_and_imported_from_standard_input(
    seqgate: CommandLine, client: Client, topic: str, tmp_path: Path
) -> None:
    await some(seqgate, client, topic)
    file = tmp_path / "info"
    await seqgate("cursor", "export", topic, "c", str(file))
    written = tmp_path / "written"
    with written.open("wb") as out:
        to_output = ("cursor", "export", topic, "c", "-")
        async with seqgate.running(*to_output, stdout=out.fileno()) as exporting:
            assert (await exporting.ended()).code == 0
    assert written.read_bytes() == file.read_bytes() != b""
    read = await seqgate("cursor", "import", topic, "d", "-", stdin=file.read_bytes())
    assert (read.code, read.rows[2][-1]) == (0, "1:0")
