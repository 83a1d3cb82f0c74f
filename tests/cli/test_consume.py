"""`seqgate consume`."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import pytest_asyncio

from seqgate.client import Chunking, Client, connect
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import Stack
from tests.cli.command_line import CommandLine, Ended


async def published(client: Client, topic: str, payloads: Sequence[bytes]) -> None:
    async with client.producer(topic, name="p") as producer:
        for payload in payloads:
            await producer.send(payload, key="k")


@pytest_asyncio.fixture
async def consuming(stack: Stack) -> AsyncIterator[Client]:
    """A client of the ledger and the dispatcher services."""
    async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        yield client


async def mark_delete(seqgate: CommandLine, topic: str) -> str | None:
    """The mark-delete position of the subscription `s`, from its cursor, which outlives
    everything."""
    ended = await seqgate("cursor", "show", topic, "s", "-o", "json")
    place: str | None = ended.record["mark_delete"]
    return place


async def test_messages_are_printed_like_read_and_acknowledged(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    await published(client, topic, [b"a", b"b", b"c", b"d"])
    consume = ("consume", topic, "s")

    table = await seqgate(*consume, "--from", "earliest", "--count", "2")
    between = await mark_delete(seqgate, topic)
    shown = await seqgate(*consume, "-n", "2", "-o", "json")
    read = await seqgate("read", topic, "-o", "json", "--from", "1:2")

    assert [row[0] for row in table.rows] == ["MESSAGE", "1:0:-1", "1:1:-1"]
    assert [row[2:] for row in table.rows[1:]] == [["p", "0", "k", "a"], ["p", "1", "k", "b"]]
    assert (between, await mark_delete(seqgate, topic)) == ("1:1", "1:3")
    more = {"attempts": 0, "missing_before": None}
    assert shown.records == [each | more for each in read.records]
    assert (table.err, shown.err) == ("", "")


async def test_consume_waits_for_messages_until_interrupted(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    """Acknowledgements are durable by then, and unwritten messages come next."""
    await published(client, topic, [b"before"])
    consume = ("consume", topic, "s", "--from", "earliest", "--name", "me")
    async with client.producer(topic, name="q") as producer:
        async with seqgate.running(*consume) as consuming:
            assert (await consuming.line()).startswith("MESSAGE")
            assert "before" in await consuming.line()
            await producer.send(b"meanwhile")
            assert "meanwhile" in await consuming.line()
            report = await seqgate("subscription", "report", topic, "s", "-o", "json")
            consuming.interrupt()
            ended = await consuming.ended()
        await producer.send(b"after")

    assert [each["consumer"] for each in report.record["consumers"]] == ["me"]
    assert (ended.code, ended.out, ended.err) == (130, "", "")
    assert await mark_delete(seqgate, topic) == "1:1"
    rest = await seqgate("consume", topic, "s", "-n", "1", "-o", "json")
    assert rest.record["payload"] == "after"


async def test_consumers_of_a_shared_subscription_share_its_messages(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    await published(client, topic, [b"a", b"b", b"c", b"d"])
    await seqgate("subscription", "create", topic, "s")
    consume = ("consume", topic, "s", "--type", "shared", "-n", "2", "-o", "json")

    one, other = await asyncio.gather(seqgate(*consume), seqgate(*consume))

    payloads = [each["payload"] for each in one.records + other.records]
    assert sorted(payloads) == ["a", "b", "c", "d"]
    assert await mark_delete(seqgate, topic) == "1:3"


async def test_a_type_that_differs_from_connected_consumers_is_refused(
    seqgate: CommandLine, client: Client, consuming: Client, topic: str
) -> None:
    await published(client, topic, [])
    async with consuming.consumer(topic, "s"):
        ended = await seqgate("consume", topic, "s", "--type", "exclusive", "-o", "json")
    assert (ended.code, ended.out) == (1, "")
    assert ended.error["reason"] == "SUBSCRIPTION_BUSY"


async def test_a_redelivered_message_has_its_attempts(
    seqgate: CommandLine, client: Client, consuming: Client, topic: str
) -> None:
    await published(client, topic, [b"a"])
    async with consuming.consumer(topic, "s") as consumer:
        await consumer.nack(await consumer.receive(), 0)
        await consumer.nack(await consumer.receive(), 0)
    ended = await seqgate("consume", topic, "s", "-n", "1", "-o", "json")
    assert (ended.record["payload"], ended.record["attempts"]) == ("a", 2)


async def test_a_large_message_is_received_and_acknowledged_whole(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    async with client.producer(topic, name="p", chunking=Chunking(1024)) as producer:
        await producer.send(b"a" * 5_000)
    ended = await seqgate("consume", topic, "s", "--from", "earliest", "-n", "1", "-o", "json")
    assert (ended.record["message_id"], len(ended.record["payload"])) == ("1:0:-1;1:4:-1", 5_000)
    assert await mark_delete(seqgate, topic) == "1:4"


async def test_consume_ends_quietly_when_its_output_closes(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    """Like `| head -1`: messages that could not be written are not acknowledged."""
    await published(client, topic, [b"x" * 100_000] * 20)
    receiving, giving = os.pipe()
    arguments = ("consume", topic, "s", "--from", "earliest", "-o", "json")
    async with seqgate.running(*arguments, stdout=giving) as consuming:
        os.close(giving)
        assert await asyncio.to_thread(os.read, receiving, 1)
        os.close(receiving)
        ended = await consuming.ended()

    assert (ended.code, ended.err) == (0, "")
    place = await mark_delete(seqgate, topic)
    assert place is None or int(place.removeprefix("1:")) < 10


async def test_a_missing_subscription_is_not_created_by_accident(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    await published(client, topic, [])
    ended = await seqgate("consume", topic, "s")
    assert ended.code == 1
    assert ended.err.startswith("seqgate: subscription not found (SUBSCRIPTION_NOT_FOUND)")


async def test_an_unreachable_dispatcher_exits_with_3(bare: CommandLine) -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    nobody = bare.with_(SEQGATE_DISPATCHER=address)
    for ended in await asyncio.gather(
        nobody("consume", "t", "s", "--timeout", "0.2", "-o", "json"),
        nobody("subscription", "ls", "t", "-o", "json"),
    ):
        assert (ended.code, ended.out) == (3, "")
        error = json.loads(ended.err)["error"]
        assert error["reason"] == "UNREACHABLE"
        assert error["message"] == f"the dispatcher service at {address} does not answer"


@pytest.mark.parametrize(
    ("arguments", "reason", "message"),
    [
        (["t"], "WRONG_USAGE", "Missing argument 'SUBSCRIPTION'."),
        (["t", "s", "-n", "0"], "WRONG_USAGE", "Invalid value for '--count'"),
        (["t", "s", "--type", "failover"], "WRONG_USAGE", "Invalid value for '--type'"),
        (
            ["t", "s", "--from", "9"],
            "WRONG_USAGE",
            "--from must be earliest, latest, a message id",
        ),
        (["t", ""], "INVALID_SUBSCRIPTION_NAME", "subscription name must be 1 to 255 bytes"),
    ],
)
def test_wrong_usage_exits_with_2(
    inside: Callable[..., Ended], arguments: list[str], reason: str, message: str
) -> None:
    ended = inside("consume", *arguments, "-o", "json")
    assert (ended.code, ended.out) == (2, "")
    assert ended.error["reason"] == reason
    assert ended.error["message"].startswith(message)
