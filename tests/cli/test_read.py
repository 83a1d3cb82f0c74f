"""`seqgate read`."""

import asyncio
import os
from collections.abc import Sequence

from seqgate.client import Batching, Client
from tests.cli.command_line import CommandLine


async def published(client: Client, topic: str, payloads: Sequence[bytes]) -> None:
    async with client.producer(topic, name="p", batching=Batching(messages_max=2)) as producer:
        await asyncio.gather(*[producer.send_nowait(payload) for payload in payloads])


async def test_a_message_is_read_with_all_it_carries(
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


async def test_places_to_read_from(seqgate: CommandLine, client: Client, topic: str) -> None:
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


async def test_following_goes_on_until_it_is_interrupted(
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


async def test_following_ends_after_as_many_messages_as_asked_for(
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


async def test_a_reader_that_leaves_ends_it_quietly(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    """As `| head -1` does, while more comes than a pipe holds."""
    await published(client, topic, [b"x" * 100_000] * 20)
    receiving, giving = os.pipe()
    async with seqgate.running("read", topic, "-o", "json", stdout=giving) as reading:
        os.close(giving)
        assert await asyncio.to_thread(os.read, receiving, 1)
        os.close(receiving)
        ended = await reading.ended()

    assert (ended.code, ended.err) == (0, "")
