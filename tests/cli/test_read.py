"""`seqgate read`."""

import asyncio
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from grpc import aio

from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import Batching, Chunking, Client
from seqgate.dev.stack import Stack
from tests.cli.command_line import CommandLine
from tests.cli.conftest import stored_around_a_moment
from tests.support.publisher import publishing, single


async def published(client: Client, topic: str, payloads: Sequence[bytes]) -> None:
    async with client.producer(topic, name="p", batching=Batching(messages_max=2)) as producer:
        await asyncio.gather(*[producer.send_nowait(payload) for payload in payloads])


async def test_a_message_is_printed_with_all_its_fields(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    async with client.producer(topic, name="p") as producer:
        await producer.send(
            "zwölf".encode(),
            key="k",
            ordering_key=b"\xff",
            properties={"a": "b"},
            event_time_ms=7,
            sequence_id=2**63 - 2,
        )
        await producer.send(b"\x00\xff", sequence_id=2**63 - 1)

    table, shown = await asyncio.gather(
        seqgate("read", topic), seqgate("read", topic, "-o", "json")
    )

    assert [row[0] for row in table.rows] == ["MESSAGE", "1:0:-1", "1:1:-1"]
    assert [row[2:] for row in table.rows[1:]] == [
        ["p", "9223372036854775806", "k", "zwölf"],
        ["p", "9223372036854775807", "-", "base64:AP8="],
    ]
    first, second = shown.records
    assert {**first, "publish_time_ms": 0, "append_time_ms": 0} == {
        "message_id": "1:0:-1",
        "producer": "p",
        "sequence_id": 9223372036854775806,
        "publish_time_ms": 0,
        "append_time_ms": 0,
        "event_time_ms": 7,
        "key": "k",
        "ordering_key_base64": "/w==",
        "properties": {"a": "b"},
        "payload": "zwölf",
    }
    assert second["payload_base64"] == "AP8="
    assert "payload" not in second


async def test_a_read_starts_at_the_given_position(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    await published(client, topic, [b"a", b"b", b"c", b"d", b"e"])

    async def payloads(*arguments: str) -> str:
        ended = await seqgate("read", topic, "-o", "json", *arguments)
        assert (ended.code, ended.err) == (0, "")
        return "".join(each["payload"] for each in ended.records)

    first, after, rest = await asyncio.gather(
        payloads("-n", "2"),
        payloads("--from", "1:1:-1:0", "--exclusive"),
        payloads("--from", "1:1", "-n", "9"),
    )

    assert (first, after, rest) == ("ab", "de", "cde")


async def test_read_follows_until_interrupted(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    async with client.producer(topic) as producer:
        await producer.send(b"before")
        async with seqgate.running("read", topic, "--follow") as reading:
            assert (await reading.line()).startswith("MESSAGE")
            assert "before" in await reading.line()
            await producer.send(b"after")
            assert "after" in await reading.line()
            reading.interrupt()
            ended = await reading.ended()

    assert (ended.code, ended.out, ended.err) == (130, "", "")


async def test_read_follows_up_to_the_requested_number_of_messages(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    async with client.producer(topic) as producer:
        await producer.send(b"before")
        arguments = ("read", topic, "-f", "-n", "2", "-o", "json")
        async with seqgate.running(*arguments) as reading:
            assert (await reading.record())["payload"] == "before"
            await producer.send(b"after")
            assert (await reading.record())["payload"] == "after"
            assert (await reading.ended()).code == 0


async def test_read_ends_quietly_when_its_output_closes(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    """As `| head -1` does, while the output exceeds a pipe's capacity."""
    await published(client, topic, [b"x" * 100_000] * 20)
    receiving, giving = os.pipe()
    async with seqgate.running("read", topic, "-o", "json", stdout=giving) as reading:
        os.close(giving)
        assert await asyncio.to_thread(os.read, receiving, 1)
        os.close(receiving)
        ended = await reading.ended()

    assert (ended.code, ended.err) == (0, "")


async def large_messages(client: Client, topic: str, *payloads: str) -> list[str]:
    """Publish messages in chunks of a kibibyte; their ids."""
    async with client.producer(topic, name="p", chunking=Chunking(1024)) as producer:
        receipts = [await producer.send(payload.encode()) for payload in payloads]
    return [str(receipt.message_id) for receipt in receipts]


async def test_a_large_message_is_read_once_and_found_by_its_id(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    payloads = ["a" * 3_000, "b" * 5_000, "c"]
    ids = await large_messages(client, topic, *payloads)
    assert ids == ["1:0:-1;1:2:-1", "1:3:-1;1:7:-1", "1:8:-1"]

    async def read(*arguments: str) -> list[tuple[str, str]]:
        ended = await seqgate("read", topic, "-o", "json", *arguments)
        assert (ended.code, ended.err) == (0, "")
        return [(each["message_id"], each["payload"]) for each in ended.records]

    everything = list(zip(ids, payloads, strict=True))
    table, whole, at, after, amid = await asyncio.gather(
        seqgate("read", topic),
        read(),
        read("--from", ids[1]),
        read("--from", ids[1], "--exclusive"),
        read("--from", "1:5"),  # the missing start of the second message is fetched
    )
    assert [row[0] for row in table.rows] == ["MESSAGE", *ids]
    assert table.err == ""
    assert whole == everything
    assert at == amid == everything[1:]
    assert after == everything[2:]


async def test_incomplete_chunks_are_reported_at_the_end(
    seqgate: CommandLine, stack: Stack, client: Client, topic: str
) -> None:
    async with (
        aio.insecure_channel(stack.address("ledger")) as channel,
        publishing(LedgerServiceStub(channel), topic, "p") as publisher,
    ):
        place: dict[str, Any] = {"uuid": "left", "num_chunks_from_msg": 3}
        for chunk_id in range(2):
            chunk = single(chunk_id + 1, 0, chunk_id=chunk_id, total_chunk_msg_size=3, **place)
            await publisher.store(chunk)
    await large_messages(client, topic, "a" * 2_000)

    table, shown = await asyncio.gather(
        seqgate("read", topic), seqgate("read", topic, "-o", "json", "-n", "1")
    )

    assert (table.code, len(table.rows)) == (0, 2)
    message = "chunks of incomplete messages were skipped: 2 aborted"
    assert table.err == f"seqgate: {message} (CHUNKS_LEFT_OUT)\n"
    assert (shown.code, shown.record["message_id"]) == (0, "1:2:-1;1:3:-1")
    assert json.loads(shown.err) == {
        "note": {"reason": "CHUNKS_LEFT_OUT", "message": message, "details": {"aborted": 2}}
    }


async def test_missing_messages_are_reported_on_standard_error(
    seqgate: CommandLine, client: Client, stack: Stack, topic: str
) -> None:
    async with aio.insecure_channel(stack.address("ledger")) as channel:
        stub: Any = LedgerServiceStub(channel)
        async with publishing(stub, topic, "p") as publisher:
            for number in range(3):
                await publisher.store(single(number, number, b"%d" % number))
            broken: dict[str, Any] = {"compression": 1, "uncompressed_size": 10}
            await publisher.store(single(3, 3, b"x", **broken))
            await publisher.store(single(4, 4, b"4"))
        assert (await seqgate("topic", "trim", topic, "1:2", "--yes")).code == 0

    arguments = ("read", topic, "--from", "1:0", "-o", "json")
    ends = await seqgate(*arguments)
    assert (ends.code, [each["payload"] for each in ends.records]) == (1, ["2"])
    assert json.loads(ends.err.splitlines()[-1])["error"]["reason"] == "CHECKSUM_MISMATCH"
    goes_on = await seqgate(*arguments, "--skip-damaged")
    assert (goes_on.code, [each["payload"] for each in goes_on.records]) == (0, ["2", "4"])
    notes = [json.loads(line)["note"] for line in goes_on.err.splitlines()]
    assert notes[0] == {
        "reason": "MESSAGES_TRIMMED",
        "message": "messages were trimmed before they were read: 1:0 to 1:1",
        "details": {"first": "1:0", "last": "1:1"},
    }
    assert notes[1]["reason"] == "CHECKSUM_MISMATCH"
    assert notes[1]["details"] == {"first": "1:3", "last": "1:3"}


async def test_a_stretch_is_read(seqgate: CommandLine, client: Client, topic: str) -> None:
    moment = await stored_around_a_moment(client, topic)

    async def read(*arguments: str) -> list[int]:
        ended = await seqgate("read", topic, "-o", "json", *arguments)
        assert (ended.code, ended.err) == (0, "")
        return [each["sequence_id"] for each in ended.records]

    assert await read("--from", moment) == [2, 3]
    assert await read("--to", moment) == [0, 1]
    assert await read("--from", moment, "--to", moment) == []
    just_now = datetime.now(UTC).isoformat()
    assert await read("--from", just_now) == []
    assert await read("--to", just_now) == [0, 1, 2, 3]
    assert await read("--from", "1:1", "--to", "1:2") == [1, 2]
    assert await read("--to", "earliest") == []
    assert await read("--to", "latest") == [0, 1, 2, 3]


async def test_a_stretch_ends_inside_a_batch(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    await published(client, topic, [b"a", b"b", b"c", b"d"])
    for to, last in (("1:1:-1:0", 2), ("1:1", 3)):
        ended = await seqgate("read", topic, "--from", "1:0:-1:1", "--to", to, "-o", "json")
        assert [each["sequence_id"] for each in ended.records] == [*range(1, last + 1)]


async def test_a_stretch_is_not_followed(seqgate: CommandLine, topic: str) -> None:
    ended = await seqgate("read", topic, "--follow", "--to", "latest", "-o", "json")
    assert (ended.code, ended.error["message"]) == (2, "--to and --follow are mutually exclusive")
