"""`seqgate topic`."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from redis.asyncio import Redis

from seqgate.api.dedup.v1 import dedup_pb2
from seqgate.api.ledger.v1.ledger_pb2 import CreateTopicRequest
from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.client import Batching, Chunking, Client, connect
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import Stack
from seqgate.errors import SeqgateError
from tests.cli.command_line import CommandLine
from tests.support.fake_ledger import running_instance
from tests.support.stubs import dedup_stub
from tests.support.waiting import eventually


async def published(client: Client, topic: str, *payloads: str, **options: Any) -> list[str]:
    """Publish, and return the messages' ids."""
    async with client.producer(topic, **options) as producer:
        receipts = [producer.send_nowait(payload.encode()) for payload in payloads]
        return [str((await receipt).message_id) for receipt in receipts]


async def test_topics_are_listed_by_name(seqgate: CommandLine, client: Client, topic: str) -> None:
    await published(client, f"{topic}-b", "one", "two")
    await published(client, f"{topic}-a")

    table = await seqgate("topic", "ls", topic)

    assert table.rows[0] == ["TOPIC", "ENTRIES", "MESSAGES", "BYTES", "LAST"]
    assert table.rows[1] == [f"{topic}-a", "0", "0", "0", "-"]
    assert table.rows[2][:3] == [f"{topic}-b", "2", "2"]


async def test_a_prefix_without_a_slash_means_public_default(
    seqgate: CommandLine, client: Client
) -> None:
    await published(client, "ls-short", "one", "two")

    listed = await seqgate("topic", "ls", "ls-sh", "-o", "json")

    assert listed.record["created_ms"] > 1_700_000_000_000
    assert {**listed.record, "created_ms": 0, "bytes": 0} == {
        "topic": "public/default/ls-short",
        "ledger_id": 1,
        "created_ms": 0,
        "first": "1:0",
        "last": "1:1",
        "entries": 2,
        "messages": 2,
        "bytes": 0,
        "connected_producers": 0,
        "incarnation": 1,
        "entries_to_replay": 0,
    }


async def test_topics_are_listed_across_pages(
    seqgate: CommandLine, stack: Stack, topic: str
) -> None:
    """More topics than a page holds."""
    names = [f"{topic}-{number:04}" for number in range(1_001)]
    async with aio.insecure_channel(stack.address("ledger")) as channel:
        ledger: Any = LedgerServiceStub(channel)
        await asyncio.gather(*(ledger.CreateTopic(CreateTopicRequest(topic=n)) for n in names))

    listed = await seqgate("topic", "ls", topic, "-o", "json")

    assert [each["topic"] for each in listed.records] == names


async def test_a_topic_is_shown_with_its_deduplication(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    await published(client, topic, "one", "two", name="p")

    table, shown = await asyncio.gather(
        seqgate("topic", "show", topic), seqgate("topic", "show", topic, "-o", "json")
    )

    fields = dict(table.rows)
    assert fields["Topic"] == topic
    assert (fields["Last entry"], fields["Messages"]) == ("1:1", "2")
    assert fields["Deduplication"] == "active"
    assert shown.record["last"] == "1:1"
    assert shown.record["dedup"]["state"] == "ACTIVE"
    assert shown.record["dedup"]["producers"] == 1
    assert shown.record["dedup_error"] is None


async def test_a_topic_is_shown_without_the_dedup_service(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    await published(client, topic, "one")
    (port,) = free_ports(1)
    nobody = seqgate.with_(SEQGATE_DEDUP=f"127.0.0.1:{port}")

    shown = await nobody("topic", "show", topic, "-o", "json")

    assert shown.code == 0
    assert (shown.record["messages"], shown.record["dedup"]) == (1, None)
    assert shown.record["entries_to_replay"] is None
    assert shown.record["dedup_error"] == "UNREACHABLE"


async def test_a_topic_that_awaits_a_rebuild_shows_the_length_of_its_replay(
    bare: CommandLine, topic: str, tmp_path: Path
) -> None:
    settings = {
        "SEQGATE_LEDGER_INLINE_REPLAY_ENTRIES_MAX": "1",
        "SEQGATE_DEDUP_SNAPSHOT_CHECK_INTERVAL_S": "3600",  # a snapshot would shorten the replay
    }
    async with Stack(tmp_path / "stack", environment=settings) as stack:
        seqgate = bare.with_(
            SEQGATE_LEDGER=stack.address("ledger"), SEQGATE_DEDUP=stack.address("dedup")
        )
        async with connect(stack.address("ledger")) as client:
            await published(client, topic, "one", "two", "three")
            async with aio.insecure_channel(stack.address("dedup")) as channel:
                asked = dedup_pb2.GetTopicStatusRequest(topic=topic)

                async def is_confirmed() -> bool:  # confirming everything replays it
                    status = await dedup_stub(channel).GetTopicStatus(asked)
                    return bool(status.counts.confirmed_entries == 3)

                await eventually(is_confirmed)
            async with Redis.from_url(stack.redis_url) as redis:
                await redis.flushall()

            async def waits() -> bool:
                with pytest.raises(SeqgateError) as caught:
                    await published(client, topic, "four", open_timeout_s=1)
                return caught.value.reason == "RECOVERING"  # or the call timed out

            await eventually(waits)

        table, shown = await asyncio.gather(
            seqgate("topic", "show", topic), seqgate("topic", "show", topic, "-o", "json")
        )

    fields = dict(table.rows)
    assert (fields["Entries to be replayed"], fields["Deduplication"]) == ("3", "recovering")
    assert shown.record["entries_to_replay"] == 3


async def test_the_tail_is_the_last_messages(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    payloads = [*"abcdef", "\x1b[31m", "h" * 100]
    await published(client, topic, *payloads, name="p", batching=Batching(messages_max=4))

    table, shown = await asyncio.gather(
        seqgate("topic", "tail", topic, "-n", "2"),
        seqgate("topic", "tail", topic, "-n", "6", "-o", "json"),
    )

    assert table.rows[0] == ["MESSAGE", "APPENDED", "PRODUCER", "SEQUENCE", "KEY", "PAYLOAD"]
    assert [[*row[:1], *row[2:]] for row in table.rows[1:]] == [
        ["1:1:-1:2", "p", "6", "-", "\\x1b[31m"],
        ["1:1:-1:3", "p", "7", "-", f"{'h' * 80}… (100 bytes)"],
    ]
    assert [each["payload"] for each in shown.records] == payloads[2:]


async def test_a_tail_counts_messages_of_any_size(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    payloads = ["a" * 70_000, "b" * 1_000, "c" * 20_000, "d" * 5_000]
    ids = await published(client, topic, *payloads, chunking=Chunking(1024))

    for count in (1, 2, 3, 4, 5):
        ended = await seqgate("topic", "tail", topic, "-n", str(count), "-o", "json")
        assert (ended.code, ended.err) == (0, "")
        assert [each["message_id"] for each in ended.records] == ids[-count:]
        assert [each["payload"] for each in ended.records] == payloads[-count:]


async def test_a_topic_is_shown_by_its_owner(
    seqgate: CommandLine, stack: Stack, client: Client, topic: str
) -> None:
    async with client.producer(topic) as producer:
        await producer.send(b"one")
    async with running_instance() as elsewhere:
        elsewhere.owner = stack.address("ledger")
        led = seqgate.with_(SEQGATE_LEDGER=elsewhere.address)
        assert (await led("topic", "show", topic, "-o", "json")).record["topic"] == topic
        assert (await led("topic", "tail", topic, "-o", "json")).record["payload"] == "one"


async def test_an_empty_topic_has_an_empty_tail(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    await published(client, topic)
    ended = await seqgate("topic", "tail", topic)
    assert (ended.code, ended.out, ended.err) == (0, "", "")


@pytest.mark.parametrize("before", [[], ["one", "two"]])
async def test_a_following_tail_has_no_gap(
    seqgate: CommandLine, client: Client, topic: str, before: list[str]
) -> None:
    async with client.producer(topic) as producer:
        for payload in before:
            await producer.send(payload.encode())
        arguments = ("topic", "tail", topic, "-n", "1", "--follow", "-o", "json")
        async with seqgate.running(*arguments) as tail:
            if before:
                assert (await tail.record())["payload"] == "two"
            sending = [producer.send_nowait(payload) for payload in (b"three", b"four")]
            await asyncio.gather(*sending)
            if not before:
                # The tail starts before, between or after the two: it shows the last one, or both.
                first = (await tail.record())["payload"]
                assert first in ("three", "four")
                if first == "three":
                    assert (await tail.record())["payload"] == "four"
            else:
                assert (await tail.record())["payload"] == "three"
                assert (await tail.record())["payload"] == "four"
            tail.interrupt()
            ended = await tail.ended()

    assert (ended.code, ended.out, ended.err) == (130, "", "")


async def test_a_tail_spans_ledgers(
    seqgate: CommandLine, stack: Stack, client: Client, topic: str
) -> None:
    """Each writer starts a ledger; a restart of the service creates a new writer."""
    await published(client, topic, *"abcde")
    await stack.terminate("ledger")
    await stack.run("ledger")
    await published(client, topic, *"fg")

    ended = await seqgate("topic", "tail", topic, "-n", "4", "-o", "json")

    assert [each["payload"] for each in ended.records] == [*"defg"]
    assert [each["message_id"].split(":")[0] for each in ended.records] == ["1", "1", "2", "2"]
    assert json.loads(ended.out.splitlines()[0])["message_id"] == "1:3:-1"


async def test_a_trim_reports_its_removals_and_its_limit(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    ids = await published(client, topic, *"abcde")
    for cursor in ("slow", "as-slow"):
        created = await seqgate("cursor", "create", topic, cursor, "--from", ids[2])
        assert created.code == 0
    await seqgate("cursor", "create", topic, "quick", "--from", ids[4])

    trimmed = await seqgate("topic", "trim", topic, ids[3], "-o", "json", "--yes")
    assert trimmed.record == {
        "topic": topic,
        "removed_entries": 2,
        "first": "1:2",
        "held_back_by": ["as-slow", "slow"],
    }
    table = await seqgate("topic", "trim", topic, "1:4", "--yes")
    assert table.rows == [
        ["Topic", topic],
        ["Removed entries", "0"],
        ["First entry", "1:2"],
        ["Held back by", "as-slow"],
        ["Held back by", "slow"],
    ]
    for cursor in ("slow", "as-slow"):
        await seqgate("cursor", "rm", topic, cursor, "--yes")
    rest = await seqgate("topic", "trim", topic, "1:4", "-o", "json", "--yes")
    assert (rest.record["first"], rest.record["held_back_by"]) == ("1:4", [])
    tail = await seqgate("topic", "tail", topic, "-o", "json")
    assert [each["payload"] for each in tail.records] == ["e"]


async def test_a_trim_keeps_a_large_message_from_its_first_chunk_on(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    payloads = ["a", "b" * 5_000]
    ids = await published(client, topic, *payloads, chunking=Chunking(1024))
    trimmed = await seqgate("topic", "trim", topic, ids[1], "-o", "json", "--yes")
    assert (trimmed.record["removed_entries"], trimmed.record["first"]) == (1, "1:1")


@pytest.mark.parametrize("before", ["", "latest", "1", "1:x", "(-1,2,-1,-1)"])
async def test_a_trim_requires_a_position(seqgate: CommandLine, before: str) -> None:
    ended = await seqgate("topic", "trim", "t", "--", before)
    assert ended.code == 2
    assert "BEFORE" in ended.err


async def test_a_topic_is_created_once_and_removed(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    made = await seqgate("topic", "create", topic, "-o", "json")
    again = await seqgate("topic", "create", topic)
    assert made.record == {"topic": topic, "created": True}
    assert again.rows == [["Topic", topic], ["Created", "before; left unchanged"]]

    async with client.producer(topic, name="p"):
        busy = await seqgate("topic", "rm", topic, "-o", "json", "--yes")
    assert (busy.code, busy.error["reason"]) == (1, "TOPIC_IN_USE")
    removed = await seqgate("topic", "rm", topic, "-o", "json", "--yes")
    assert removed.record == {"topic": topic, "removed": True}


async def test_a_topic_in_use_is_removed_by_force(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    producer = client.producer(topic, name="p")
    await producer.open()
    assert (await seqgate("topic", "rm", topic, "--force", "--yes")).code == 0
    with pytest.raises(SeqgateError):
        await producer.send(b"x")
