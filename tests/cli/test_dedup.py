"""`seqgate dedup`."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any, NamedTuple

import pytest_asyncio
from grpc import aio
from redis.asyncio import Redis

from seqgate.api.common.v1 import common_pb2
from seqgate.api.common.v1.common_pb2 import Position
from seqgate.api.cursor.v1.cursor_pb2 import DeleteCursorRequest
from seqgate.api.dedup.v1 import dedup_pb2 as pb
from seqgate.api.internal.dedup.v1 import writer_pb2
from seqgate.client import Batching, Chunking, Client, connect
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import Stack
from seqgate.types import DEDUP_CURSOR
from tests.cli.command_line import CommandLine
from tests.support.stubs import cursor_stub, dedup_stub
from tests.support.waiting import eventually


@pytest_asyncio.fixture
async def dedup(stack: Stack) -> AsyncIterator[Any]:
    """A stub for the dedup service."""
    async with aio.insecure_channel(stack.address("dedup")) as channel:
        yield dedup_stub(channel)


@pytest_asyncio.fixture
async def stored(client: Client, topic: str, dedup: Any) -> AsyncIterator[str]:
    """A topic in which producer `p` stored ids 3 and 5, and one with a long name stored 0."""
    async with client.producer(topic, name="p") as p, client.producer(topic, name="q" * 255) as q:
        await p.send(b"three", sequence_id=3)
        await p.send(b"five", sequence_id=5)
        await p.send(b"five", sequence_id=5)
        await q.send(b"zero")

        async def confirmed() -> bool:
            status = await dedup.GetTopicStatus(pb.GetTopicStatusRequest(topic=topic))
            return bool(status.confirmed == Position(ledger_id=1, entry_id=2))

        await eventually(confirmed)
        yield topic


async def test_status_shows_the_state_and_the_policy_of_a_topic(
    seqgate: CommandLine, stored: str
) -> None:
    table, shown = await asyncio.gather(
        seqgate("dedup", "status", stored), seqgate("dedup", "status", stored, "-o", "json")
    )

    fields = dict(table.rows)
    assert fields["Topic"] == stored
    assert fields["State"] == "active"
    assert fields["Deduplicates"] == "yes (set by: default)"
    assert fields["Snapshot after entries"] == "1000 (set by: default)"
    assert fields["Snapshot after seconds"] == "120 (set by: default)"
    assert fields["Confirmed up to"] == "1:2"
    assert fields["Producers"] == "2"
    record = shown.record
    assert (record["topic"], record["state"], record["epoch"]) == (stored, "ACTIVE", 1)
    assert (record["confirmed"], record["producers"]) == ("1:2", 2)
    assert record["counts"]["new_claims"] == 3
    assert record["counts"]["duplicate_claims"] >= 1
    assert record["policy_file_error"] is None


async def test_the_table_of_producers_is_not_truncated(seqgate: CommandLine, stored: str) -> None:
    """In a pipe, regardless of the terminal's width."""
    table = await seqgate("dedup", "producers", stored)

    assert table.rows[0] == ["PRODUCER", "PERSISTED", "PUSHED", "UNFINISHED", "LAST ACTIVE"]
    assert [row[:4] for row in table.rows[1:]] == [
        ["p", "5", "5", "-"],
        ["q" * 255, "0", "0", "-"],
    ]
    assert all(row[4].endswith("Z") for row in table.rows[1:])


async def test_a_large_message_is_shown_with_its_chunks(
    seqgate: CommandLine, client: Client, dedup: Any, topic: str
) -> None:
    """One stored in part, by a service with its own log; and a complete one."""
    chunks = {
        i: common_pb2.Chunk(uuid="u", chunk_id=i, num_chunks=3, total_bytes=9) for i in (0, 1)
    }
    entries = [
        writer_pb2.ProducerEntries(producer_name="p", highest_sequence_ids=[7, 7], chunks=chunks)
    ]
    end = Position(ledger_id=1, entry_id=1)
    confirmation = writer_pb2.Confirmation(through=end, producers=entries, entry_count=2)
    writer = writer_pb2.Writer(epoch=1, position=end)
    await dedup.Confirm(
        writer_pb2.ConfirmRequest(topic=topic, writer=writer, confirmation=confirmation)
    )
    async with client.producer(f"{topic}-whole", name="p", chunking=Chunking(2)) as producer:
        receipt = await producer.send(b"12345", sequence_id=0)

    table, listed, explained = await asyncio.gather(
        seqgate("dedup", "producers", topic),
        seqgate("dedup", "producers", topic, "-o", "json"),
        seqgate("dedup", "explain", f"{topic}-whole", "p", "0"),
    )

    assert table.rows[1][:4] == ["p", "6", "6", "7: 2 of 3 chunks"]
    assert listed.record["unfinished"] == {
        "sequence_id": 7,
        "uuid": "u",
        "chunks_stored": 2,
        "chunks": 3,
        "bytes": 9,
    }
    assert dict(explained.rows)["The log"] == f"holds it at {receipt.message_id}"


async def test_producers_are_listed_across_pages(
    seqgate: CommandLine, dedup: Any, topic: str
) -> None:
    """More producers than a page holds, of a service with its own log."""
    names = {f"p{number:04}" for number in range(3_000)}
    claims = [writer_pb2.Claims(producer_name=name, sequence_ids=[2**63 - 1]) for name in names]
    await dedup.Admit(
        writer_pb2.AdmitRequest(topic=topic, writer=writer_pb2.Writer(epoch=1), claims=claims)
    )

    listed = await seqgate("dedup", "producers", topic, "-o", "json")

    assert {each["producer"] for each in listed.records} == names
    first = listed.records[0]
    assert first["last_active_ms"] > 1_700_000_000_000
    assert {**first, "producer": "", "last_active_ms": 0} == {
        "producer": "",
        "persisted_sequence_id": None,
        "pushed_sequence_id": 9223372036854775807,
        "last_active_ms": 0,
        "unfinished": None,
    }


async def test_explain_prints_verdict_and_cause(seqgate: CommandLine, stored: str) -> None:
    new, again = await asyncio.gather(
        seqgate("dedup", "explain", stored, "p", "6", "-o", "json"),
        seqgate("dedup", "explain", stored, "p", "3", "-o", "json"),
    )

    assert new.record == {
        "topic": stored,
        "producer": "p",
        "sequence_id": 6,
        "verdict": "NEW",
        "explanation": "6 is above every admitted id (highest: 5).",
        "persisted_sequence_id": 5,
        "pushed_sequence_id": 5,
        "unfinished": None,
        "state": "ACTIVE",
        "fate": None,
        "message_id": None,
        "trace_id": None,
        "forgotten": False,
        "snapshot": new.record["snapshot"],
        "snapshot_unknown": False,
        "snapshot_covers_it": None,
        "sent_again": "It would be stored.",
    }
    assert (again.record["verdict"], again.record["fate"]) == ("DUPLICATE", "STORED")
    assert again.record["message_id"] == "1:0:-1"
    has_snapshot = again.record["snapshot"] is not None  # snapshots are taken by time
    assert again.record["snapshot_covers_it"] is has_snapshot
    assert again.record["sent_again"] == (
        "It would not be stored again: the receipt has its id, 1:0:-1."
    )


async def test_explain_prints_text(seqgate: CommandLine, stored: str) -> None:
    (port,) = free_ports(1)
    overtaken, alone = await asyncio.gather(
        seqgate("dedup", "explain", stored, "p", "4"),
        seqgate("dedup", "explain", stored, "p", "3", "--ledger", f"127.0.0.1:{port}"),
    )

    assert dict(overtaken.rows)["Verdict"] == "duplicate"
    assert dict(overtaken.rows)["The log"] == "does not hold it: a higher id was stored first"
    assert (alone.code, dict(alone.rows)["The log"]) == (0, "not known")


async def test_explain_prints_trace_and_snapshot(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    """Of a single message, of each message in a batch, and of a large one."""
    traces = [f"{number:032x}" for number in range(1, 5)]
    given = [{"traceparent": f"00-{each}-00f067aa0ba902b7-01"} for each in traces]
    async with client.producer(topic, name="p") as producer:
        await producer.send(b"1", properties=given[0])
    async with client.producer(topic, name="b", batching=Batching(delay_s=0.05)) as producer:
        await asyncio.gather(*(producer.send(b"1", properties=each) for each in given[1:3]))
    async with client.producer(topic, name="l", chunking=Chunking(2)) as producer:
        await producer.send(b"12345", properties=given[3])
    await seqgate("dedup", "snapshot", topic)
    asked = [("p", "0"), ("b", "0"), ("b", "1"), ("l", "0")]
    records = await asyncio.gather(
        *(seqgate("dedup", "explain", topic, *each, "-o", "json") for each in asked)
    )
    shown = dict((await seqgate("dedup", "explain", topic, "b", "1")).rows)

    assert [each.record["trace_id"] for each in records] == traces
    assert [each.record["message_id"] for each in records][1:3] == ["1:1:-1:0", "1:1:-1:1"]
    assert all(each.record["snapshot_covers_it"] for each in records)
    assert records[0].record["snapshot"] == "1:4"
    assert shown["Trace"] == traces[2]
    assert shown["Snapshot"].startswith("covered by the one up to 1:4, taken 20")
    assert shown["If it is sent now"].startswith("It would not be stored again")


async def test_a_forgotten_producer_is_marked_as_forgotten(
    seqgate: CommandLine, client: Client, dedup: Any, topic: str
) -> None:
    values = pb.PolicyValues(max_producers=1, on_full=pb.FULL_TOPIC_ACTION_EVICT)
    await dedup.SetPolicy(pb.SetPolicyRequest(topic=topic, values=values))
    for name in ("p", "q"):
        async with client.producer(topic, name=name) as producer:
            await producer.send(b"0")

    async def forgotten() -> bool:
        listed = await dedup.ListProducers(pb.ListProducersRequest(topic=topic))
        return [each.name for each in listed.producers] == ["q"]

    await eventually(forgotten)
    of_p = (await seqgate("dedup", "explain", topic, "p", "0", "-o", "json")).record
    await dedup.SetPolicy(pb.SetPolicyRequest(topic=topic, values=pb.PolicyValues(enabled=False)))
    off = (await seqgate("dedup", "explain", topic, "p", "0", "-o", "json")).record

    assert (of_p["verdict"], of_p["fate"], of_p["forgotten"]) == ("NEW", "STORED", True)
    assert of_p["message_id"] == "1:0:-1"
    assert "its producer was forgotten" in of_p["sent_again"]
    assert (off["state"], off["forgotten"]) == ("DISABLED", False)
    assert "off by the topic's policy" in off["explanation"]


async def test_a_snapshot_is_taken(seqgate: CommandLine, stored: str) -> None:
    table = await seqgate("dedup", "snapshot", stored)
    shown = await seqgate("dedup", "snapshot", stored, "-o", "json")
    status = await seqgate("dedup", "status", stored, "-o", "json")

    assert table.rows == [["Topic", stored], ["Snapshot up to", "1:2"], ["Producers", "2"]]
    assert shown.record == {"topic": stored, "snapshot": "1:2", "producers": 2}
    assert status.record["snapshot"] == "1:2"


async def test_a_topic_without_state_has_no_snapshot_to_take(
    seqgate: CommandLine, topic: str
) -> None:
    await seqgate("topic", "create", topic)
    table, shown = await asyncio.gather(
        seqgate("dedup", "snapshot", topic), seqgate("dedup", "snapshot", topic, "-o", "json")
    )

    assert (table.code, shown.code) == (0, 0)
    assert table.rows == [["Topic", topic], ["Snapshot", "there is nothing to keep"]]
    assert shown.record == {"topic": topic, "snapshot": None, "producers": 0}


class Shown(NamedTuple):
    """What the commands say of a topic's state, of its snapshot and of a replay."""

    state: str
    snapshot: str | None
    snapshot_taken_ms: int | None
    snapshot_unknown: bool
    entries_to_replay: int | None


async def agreed(seqgate: CommandLine, topic: str) -> Shown:
    """What `dedup status` says, and `topic show` and `dedup explain`, too."""
    status, of_topic, explained = await asyncio.gather(
        seqgate("dedup", "status", topic, "-o", "json"),
        seqgate("topic", "show", topic, "-o", "json"),
        seqgate("dedup", "explain", topic, "p", "3", "-o", "json"),
    )
    found = Shown(*(status.record[each] for each in Shown._fields))
    also = of_topic.record["dedup"] | {"entries_to_replay": of_topic.record["entries_to_replay"]}
    assert Shown(*(also[each] for each in Shown._fields)) == found
    for each in ("snapshot", "snapshot_unknown"):
        assert explained.record[each] == status.record[each]
    return found


async def published_around_a_snapshot(seqgate: CommandLine, client: Client, topic: str) -> int:
    """Publish entries up to 1:9, take a snapshot, and publish two more. Returns when it was taken,
    in milliseconds."""

    async def taken() -> bool:
        of = (await seqgate("dedup", "snapshot", topic, "-o", "json")).record
        return bool(of["snapshot"] == "1:9")

    async def confirmed() -> bool:  # a confirmation after the loss replays already
        of = (await seqgate("dedup", "status", topic, "-o", "json")).record
        return bool(of["confirmed"] == "1:11")

    async with client.producer(topic, name="p", batching=None) as producer:
        for _ in range(10):
            await producer.send(b"x")
        await eventually(taken)
        for _ in range(2):
            await producer.send(b"x")
    await eventually(confirmed)
    return (await agreed(seqgate, topic)).snapshot_taken_ms or 0


async def test_a_snapshot_is_shown_after_redis_was_emptied(
    bare: CommandLine, topic: str, tmp_path: Path
) -> None:
    """By an instance that remembers it, by one that does not, and by one that cannot know."""
    settings = {"SEQGATE_DEDUP_SNAPSHOT_CHECK_INTERVAL_S": "3600"}
    async with (
        Stack(tmp_path / "stack", environment=settings) as stack,
        connect(stack.address("ledger")) as client,
    ):
        services = ("ledger", "dedup", "cursor")
        seqgate = bare.with_(
            **{f"SEQGATE_{each.upper()}": stack.address(each) for each in services}
        )
        taken_ms = await published_around_a_snapshot(seqgate, client, topic)
        async with Redis.from_url(stack.redis_url) as redis:
            await redis.flushall()

        lost = Shown("ABSENT", "1:9", taken_ms, False, 2)
        assert await agreed(seqgate, topic) == lost
        why = dict((await seqgate("dedup", "explain", topic, "p", "3")).rows)
        assert "the snapshot at 1:9 and the log after it" in why["Why"]
        assert why["Snapshot"].startswith("covered by the one up to 1:9, taken 20")
        assert await shown_to_people(seqgate, topic) == [("1:9", "2")] * 2

        await stack.terminate("dedup")
        await stack.run("dedup")
        assert await agreed(seqgate, topic) == lost

        stack.signal("cursor", SIGSTOP)
        assert await agreed(seqgate, topic) == Shown("ABSENT", None, None, True, None)
        unknown = "not known: the cursor service does not answer"
        assert (await shown_to_people(seqgate, topic))[0] == (unknown, unknown)
        stack.signal("cursor", SIGCONT)

        async with client.producer(topic, name="p", batching=None) as producer:
            await producer.send(b"x")
            assert await agreed(seqgate, topic) == Shown("ACTIVE", "1:9", taken_ms, False, 0)


async def shown_to_people(seqgate: CommandLine, topic: str) -> list[tuple[str, str]]:
    """The snapshot and the length of a replay in the tables of `dedup status` and `topic show`."""
    tables = [
        dict((await seqgate(*each, topic)).rows)
        for each in (("dedup", "status"), ("topic", "show"))
    ]
    return [(each["Snapshot up to"], each["Entries to be replayed"]) for each in tables]


async def test_a_snapshot_that_the_cursor_service_lost_is_not_shown(
    seqgate: CommandLine, stack: Stack, stored: str
) -> None:
    await seqgate("dedup", "snapshot", stored)
    async with aio.insecure_channel(stack.address("cursor")) as channel:
        await cursor_stub(channel).DeleteCursor(
            DeleteCursorRequest(topic=stored, cursor=DEDUP_CURSOR)
        )
    status, stat = await asyncio.gather(
        seqgate("dedup", "status", stored), seqgate("topic", "show", stored)
    )
    assert [dict(each.rows)["Snapshot up to"] for each in (status, stat)] == ["none"] * 2


async def test_policy_shows_the_level_of_each_value(
    seqgate: CommandLine, stack: Stack, dedup: Any, topic: str
) -> None:
    await seqgate("topic", "create", topic)
    before = stack.policy_file.read_text()
    stack.policy_file.write_text(
        f'[namespace."cli/tests"]\nmax_producers = 77\n[topic."{topic}"]\non_full = "refuse"\n'
    )
    try:

        async def seen() -> bool:
            status = await dedup.GetTopicStatus(pb.GetTopicStatusRequest(topic=topic))
            return bool(status.policy.max_producers == 77)

        await eventually(seen)
        table, shown = await asyncio.gather(
            seqgate("dedup", "policy", "show", topic),
            seqgate("dedup", "policy", "show", topic, "-o", "json"),
        )
    finally:
        stack.policy_file.write_text(before)

    assert table.rows == [
        ["POLICY", "VALUE", "SET BY"],
        ["enabled", "yes", "default"],
        ["producer_inactivity_timeout_minutes", "360", "default"],
        ["max_producers", "77", "namespace"],
        ["on_full", "refuse", "topic"],
        ["snapshot_entries", "1000", "default"],
        ["snapshot_interval_s", "120", "default"],
        ["on_conflict", "report", "default"],
    ]
    assert shown.record == {
        "topic": topic,
        "enabled": {"value": True, "source": "DEFAULT"},
        "producer_inactivity_timeout_minutes": {"value": 360, "source": "DEFAULT"},
        "max_producers": {"value": 77, "source": "NAMESPACE"},
        "on_full": {"value": "refuse", "source": "TOPIC"},
        "snapshot_entries": {"value": 1000, "source": "DEFAULT"},
        "snapshot_interval_s": {"value": 120, "source": "DEFAULT"},
        "on_conflict": {"value": "report", "source": "DEFAULT"},
    }
