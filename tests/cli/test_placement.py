"""`seqgate topic where` and `move`, and those of `seqgate cursor`."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from seqgate.client import connect
from tests.cli.command_line import CommandLine
from tools.stack.stack import Stack


@pytest_asyncio.fixture(scope="module")
async def placed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two instances of the ledger and of the cursor service."""
    services = ("cursor", "dedup", "ledger")
    folder = tmp_path_factory.mktemp("placed")
    async with Stack(folder, services=services, instances=2) as running:
        yield running


@pytest.fixture
def commands(bare: CommandLine, placed: Stack) -> CommandLine:
    """The command line, told of the second instances only."""
    return bare.with_(
        COLUMNS="200",
        SEQGATE_LEDGER=placed.address("ledger-1"),
        SEQGATE_DEDUP=placed.address("dedup"),
        SEQGATE_CURSOR=placed.address("cursor-1"),
    )


async def made(stack: Stack, topic: str) -> None:
    async with connect(stack.address("ledger")) as client, client.producer(topic) as producer:
        await producer.send(b"one")


def elsewhere(stack: Stack, service: str, address: str) -> str:
    (other,) = {stack.address(each) for each in stack.instances[service]} - {address}
    return other


async def test_a_topic_is_shown_and_moved(commands: CommandLine, placed: Stack, topic: str) -> None:
    await made(placed, topic)
    where = await commands("topic", "where", topic, "-o", "json")
    assert (where.record["topic"], where.record["version"]) == (topic, 1)
    to = elsewhere(placed, "ledger", where.record["instance"])

    moved = await commands("topic", "move", topic, "--to", to, "-o", "json")

    assert moved.record == {"topic": topic, "instance": to, "version": 2, "moved": True}
    table = await commands("topic", "where", topic)
    assert table.rows == [["TOPIC", "INSTANCE", "VERSION"], [topic, to, "2"]]
    again = await commands("topic", "move", topic, "--to", to)
    assert again.rows[-1] == ["Moved", "no, it was there"]
    assert (await commands("topic", "tail", topic, "-o", "json")).record["payload"] == "one"


async def test_the_cursors_of_a_topic_are_shown_and_moved(
    commands: CommandLine, placed: Stack, topic: str
) -> None:
    await made(placed, topic)
    await commands("cursor", "create", topic, "c")
    where = await commands("cursor", "where", topic, "-o", "json")
    to = elsewhere(placed, "cursor", where.record["instance"])

    moved = await commands("cursor", "move", topic, "--to", to, "-o", "json")

    assert moved.record == {"topic": topic, "instance": to, "version": 2, "moved": True}
    shown = await commands("cursor", "show", topic, "c", "-o", "json")
    assert shown.record["cursor"] == "c"
    listed = await commands("cursor", "ls", "-o", "json")
    assert [each["cursor"] for each in listed.records if each["topic"] == topic] == ["c"]


@pytest.mark.parametrize(
    ("to", "reason"), [("127.0.0.1:1", "INVALID_INSTANCE"), (None, "TOPIC_NOT_PLACED")]
)
async def test_a_move_that_cannot_be_is_refused(
    commands: CommandLine, placed: Stack, topic: str, to: str | None, reason: str
) -> None:
    if to is not None:
        await made(placed, topic)
    address = to or placed.address("ledger")
    ended = await commands("topic", "move", topic, "--to", address, "-o", "json")
    assert (ended.code, ended.error["reason"]) == (1, reason)


async def test_where_there_is_one_instance_there_are_no_places(
    seqgate: CommandLine, topic: str
) -> None:
    ended = await seqgate("topic", "where", "-o", "json")
    assert (ended.code, ended.error["reason"]) == (1, "ONE_INSTANCE")
