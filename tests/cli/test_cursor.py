"""`seqgate cursor`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio

from seqgate.api.common.v1.common_pb2 import Position
from seqgate.api.cursor.v1 import cursor_pb2 as pb
from seqgate.api.internal.cursor.v1 import lease_pb2
from seqgate.client import Batching, Chunking, Client
from seqgate.dev.stack import Stack
from seqgate.times import duration
from tests.cli.command_line import CommandLine, Ended
from tests.cli.conftest import stored_around_a_moment
from tests.support.stubs import cursor_stub


@pytest_asyncio.fixture
async def cursors(stack: Stack) -> AsyncIterator[Any]:
    """A stub for the cursor service."""
    async with aio.insecure_channel(stack.address("cursor")) as channel:
        yield cursor_stub(channel)


def at(entry_id: int, ledger_id: int = 1) -> Position:
    return Position(ledger_id=ledger_id, entry_id=entry_id)


async def made(cursors: Any, topic: str, name: str = "c", **more: Any) -> None:
    await cursors.CreateCursor(pb.CreateCursorRequest(topic=topic, cursor=name, **more))


async def found(cursors: Any, topic: str, name: str = "c") -> pb.Cursor:
    answer = await cursors.GetCursor(pb.GetCursorRequest(topic=topic, cursor=name))
    cursor: pb.Cursor = answer.cursor
    return cursor


async def published(client: Client, topic: str, count: int, **options: Any) -> list[str]:
    """Publish, and return the messages' ids."""
    async with client.producer(topic, **options) as producer:
        receipts = [producer.send_nowait(b"message") for _ in range(count)]
        return [str((await receipt).message_id) for receipt in receipts]


# ---- ls, show, rm


async def test_cursors_are_listed(seqgate: CommandLine, cursors: Any, topic: str) -> None:
    await made(cursors, topic, "b", mark_delete=at(4))
    await made(cursors, topic, "a")
    await cursors.AcquireLease(
        lease_pb2.AcquireLeaseRequest(
            topic=topic, cursor="a", owner="me", duration=duration(60_000)
        )
    )

    table, listed, all_ = await asyncio.gather(
        seqgate("cursor", "ls", topic),
        seqgate("cursor", "ls", topic, "-o", "json"),
        seqgate("cursor", "ls", "-o", "json"),
    )

    assert table.rows == [
        ["TOPIC", "CURSOR", "MARK-DELETE", "BEYOND", "PARTIAL", "REVISION", "LEASE"],
        [topic, "a", "-", "0", "0", "0", "me"],
        [topic, "b", "1:4", "0", "0", "0", "-"],
    ]
    assert [each["cursor"] for each in listed.records] == ["a", "b"]
    assert listed.records == [each for each in all_.records if each["topic"] == topic]
    assert {**listed.records[1], "created_ms": 0} == {
        "topic": topic,
        "cursor": "b",
        "created_ms": 0,
        "mark_delete": "1:4",
        "mark_delete_properties": {},
        "properties": {},
        "revision": 0,
        "acknowledged_entries": 0,
        "partial_batches": 0,
        "lease": None,
    }


async def test_cursors_are_listed_across_pages(
    seqgate: CommandLine, cursors: Any, topic: str
) -> None:
    """More cursors than a page holds."""
    names = [f"{number:03}" for number in range(205)]
    await asyncio.gather(*(made(cursors, topic, name) for name in names))
    listed = await seqgate("cursor", "ls", topic, "-o", "json")
    assert [each["cursor"] for each in listed.records] == names


async def test_a_cursor_is_shown_with_its_holes(
    seqgate: CommandLine, cursors: Any, topic: str
) -> None:
    await made(cursors, topic, properties={"team": "billing"})
    names: dict[str, Any] = {"topic": topic, "cursor": "c"}
    await cursors.MarkDelete(
        pb.MarkDeleteRequest(position=at(4), properties={"a": "1", "b": "\n"}, **names)
    )
    ranges = [
        pb.PositionRange(first=at(first), last_entry_id=last) for first, last in ((6, 6), (8, 9))
    ]
    batches = [pb.BatchAcknowledgement(position=at(11), batch_size=5, indexes=[0, 2])]
    await cursors.Acknowledge(pb.AcknowledgeRequest(ranges=ranges, batches=batches, **names))

    table, shown = await asyncio.gather(
        seqgate("cursor", "show", topic, "c"), seqgate("cursor", "show", topic, "c", "-o", "json")
    )

    lines = [(row[0] or row[1], row[-1]) for row in table.rows]
    assert ("Mark-delete position", "1:4") in lines
    assert ("property", "a = 1") in lines
    assert ("property", "b = \\n") in lines
    assert ("Entries acknowledged beyond", "3") in lines
    assert [value for name, value in lines if name == "entries"] == ["1:6", "1:8 to 9"]
    assert ("batch", "1:11: 2 of 5 messages") in lines
    assert ("property", "team = billing") in lines
    assert ("Lease", "-") in lines
    record = shown.record
    assert record["mark_delete_properties"] == {"a": "1", "b": "\n"}
    assert record["properties"] == {"team": "billing"}
    assert record["ranges"] == [
        {"first": "1:6", "last_entry_id": 6},
        {"first": "1:8", "last_entry_id": 9},
    ]
    assert record["batches"] == [{"position": "1:11", "batch_size": 5, "indexes": [0, 2]}]
    assert (record["more"], record["acknowledged_entries"], record["revision"]) == (False, 3, 1)


async def test_many_holes_are_counted_and_the_first_are_listed(
    seqgate: CommandLine, cursors: Any, topic: str
) -> None:
    await made(cursors, topic)
    ranges = [
        pb.PositionRange(first=at(2 * each + 1), last_entry_id=2 * each + 1) for each in range(500)
    ]
    await cursors.Acknowledge(pb.AcknowledgeRequest(topic=topic, cursor="c", ranges=ranges))

    table, shown = await asyncio.gather(
        seqgate("cursor", "show", topic, "c"), seqgate("cursor", "show", topic, "c", "-o", "json")
    )

    assert table.out.count("  entries ") == 20
    assert "and more" in table.out
    assert (len(shown.record["ranges"]), shown.record["more"]) == (20, True)
    assert shown.record["acknowledged_entries"] == 500


async def test_a_removed_cursor_is_gone(seqgate: CommandLine, cursors: Any, topic: str) -> None:
    await made(cursors, topic)
    first = await seqgate("cursor", "rm", topic, "c", "--yes")
    again = await seqgate("cursor", "rm", topic, "c", "-o", "json", "--yes")
    assert first == Ended(0, "", "")
    assert (again.code, again.error["reason"]) == (1, "CURSOR_NOT_FOUND")


# ---- places


async def test_a_cursor_is_created_once(seqgate: CommandLine, topic: str) -> None:
    await seqgate("topic", "create", topic)
    table = await seqgate("cursor", "create", topic, "c")
    again = await seqgate("cursor", "create", topic, "c", "--from", "latest", "-o", "json")

    assert dict(table.rows) == {
        "Topic": topic,
        "Cursor": "c",
        "Mark-delete position": "-",
        "Revision": "0",
        "Created": "now",
    }
    assert (again.code, again.record["created"], again.record["mark_delete"]) == (0, False, None)


async def test_a_cursor_is_placed_before_the_given_message(
    seqgate: CommandLine, cursors: Any, client: Client, topic: str
) -> None:
    plain = await published(client, topic, 3)
    batched = await published(client, topic, 4, batching=Batching(messages_max=4))
    (large,) = await published(client, topic, 1, chunking=Chunking(2))
    last_plain = plain[-1].split(":")

    created = await seqgate("cursor", "create", topic, "c", "--from", plain[1], "-o", "json")
    in_batch = await seqgate("cursor", "reset", topic, "c", "--to", batched[2], "-y", "-o", "json")
    chunked = await seqgate("cursor", "reset", topic, "c", "--to", large, "-y", "-o", "json")
    latest = await seqgate("cursor", "reset", topic, "c", "--to", "latest", "-y", "-o", "json")
    earliest = await seqgate("cursor", "reset", topic, "c", "--to", "earliest", "-o", "json")

    assert created.record["mark_delete"] == "1:0"
    assert in_batch.record["mark_delete"] == f"1:{last_plain[1]}"
    first_chunk, last_chunk = (int(each.split(":")[1]) for each in large.split(";"))
    assert chunked.record["mark_delete"] == f"1:{first_chunk - 1}"
    assert latest.record["mark_delete"] == f"1:{last_chunk}"
    assert earliest.record["mark_delete"] is None
    assert (await found(cursors, topic)).revision == 4


async def test_the_place_before_a_ledgers_first_entry_is_in_the_previous_ledger(
    seqgate: CommandLine, stack: Stack, client: Client, topic: str
) -> None:
    """Each writer starts a ledger; a restart of the service creates a new writer."""
    for count in (3, 5):
        await published(client, topic, count)
        await stack.terminate("ledger")
        await stack.run("ledger")
    await published(client, topic, 1)

    places = {"1:0": None, "2:0": "1:2", "3:0": "2:4", "3:1": "3:0", "2:1": "2:0"}
    for place, mark_delete in places.items():
        ended = await seqgate(
            "cursor", "create", topic, f"at {place}", "--from", place, "-o", "json"
        )
        assert (ended.code, ended.record["mark_delete"]) == (0, mark_delete), place


async def test_a_cursor_is_placed_at_a_time(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    moment = await stored_around_a_moment(client, topic)
    at_it = await seqgate("cursor", "create", topic, "at", "--from", moment, "-o", "json")
    assert at_it.record["mark_delete"] == "1:1"
    reset = ("cursor", "reset", topic, "at", "-o", "json", "--to")
    just_now = datetime.now(UTC).isoformat()
    assert (await seqgate(*reset, just_now, "--yes")).record["mark_delete"] == "1:3"
    assert (await seqgate(*reset, "1970-01-01")).record["mark_delete"] is None


async def test_the_latest_of_an_empty_topic_is_its_start(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    await published(client, topic, 0)
    ended = await seqgate("cursor", "create", topic, "c", "--from", "latest", "-o", "json")
    assert (ended.code, ended.record["mark_delete"]) == (0, None)


async def test_the_latest_of_a_topic_that_does_not_exist_is_refused(
    seqgate: CommandLine, topic: str
) -> None:
    ended = await seqgate("cursor", "create", topic, "c", "--from", "latest", "-o", "json")
    assert (ended.code, ended.error["reason"]) == (1, "TOPIC_NOT_FOUND")


@pytest.mark.parametrize(
    ("arguments", "reason", "message"),
    [
        (
            ["create", "t", "c", "--from", "first"],
            "WRONG_USAGE",
            "--from must be earliest, latest, a message",
        ),
        (
            ["create", "t", "c", "--from", "1:-1"],
            "WRONG_USAGE",
            "--from must be earliest, latest, a message",
        ),
        (
            ["reset", "t", "c", "--to", "9"],
            "WRONG_USAGE",
            "--to must be earliest, latest",
        ),
        (["reset", "t", "c"], "WRONG_USAGE", "Missing option '--to'"),
        (["show", "a b", "c"], "INVALID_TOPIC_NAME", "topic must be tenant/namespace/name"),
        (["rm", "t", "\n"], "INVALID_CURSOR_NAME", "name must be 1 to 255 bytes"),
        (["import", "t", "c", "missing"], "INVALID_INPUT", "missing: No such file"),
        (["import", "t", "c", "/dev/null", "/"], "INVALID_INPUT", "/: Is a directory"),
        (["ls", "--cursor", "here"], "INVALID_SETTINGS", "'here' is not HOST:PORT (--cursor)"),
    ],
)
def test_wrong_usage_exits_with_2(
    inside: Callable[..., Ended], arguments: list[str], reason: str, message: str
) -> None:
    ended = inside("cursor", *arguments, "-o", "json")
    assert (ended.code, ended.out) == (2, "")
    assert ended.error["reason"] == reason
    assert ended.error["message"].startswith(message)


# ---- import, export


async def test_a_cursor_is_exported_to_a_file_and_imported(
    seqgate: CommandLine, cursors: Any, topic: str, tmp_path: Path
) -> None:
    await made(cursors, topic, mark_delete=at(4), properties={"team": "billing"})
    file = str(tmp_path / "cursor.info")

    exported = await seqgate("cursor", "export", topic, "c", file)
    imported = await seqgate("cursor", "import", topic, "d", file, "-o", "json")
    again = await seqgate("cursor", "import", topic, "d", file, "-o", "json")
    replaced = await seqgate("cursor", "import", topic, "d", file, "--replace", "--yes")

    assert exported == Ended(0, "", "")
    assert imported.record["mark_delete"] == "1:4"
    assert imported.record["properties"] == {"team": "billing"}
    assert (again.code, again.error["reason"]) == (1, "CURSOR_EXISTS")
    assert (replaced.code, dict(replaced.rows)["Mark-delete position"]) == (0, "1:4")


async def test_a_cursor_is_imported_with_its_cursor_ledgers_entry(
    seqgate: CommandLine, topic: str, tmp_path: Path
) -> None:
    """Bytes as Pulsar writes them: the ledger's entry is the newer one."""
    info, position = tmp_path / "info", tmp_path / "position"
    info.write_bytes(bytes([0x08, 12, 0x10, 3, 0x18, 7]))
    position.write_bytes(bytes([0x08, 3, 0x10, 9]))
    ended = await seqgate("cursor", "import", topic, "c", str(info), str(position), "-o", "json")
    assert (ended.code, ended.record["mark_delete"]) == (0, "3:9")


async def test_an_invalid_record_is_refused(
    seqgate: CommandLine, topic: str, tmp_path: Path
) -> None:
    file = tmp_path / "info"
    file.write_bytes(b"\xff\xff")
    ended = await seqgate("cursor", "import", topic, "c", str(file), "-o", "json")
    assert (ended.code, ended.error["reason"]) == (1, "INVALID_MANAGED_CURSOR")


async def test_an_unwritable_file_is_named(
    seqgate: CommandLine, cursors: Any, topic: str, tmp_path: Path
) -> None:
    await made(cursors, topic)
    ended = await seqgate("cursor", "export", topic, "c", str(tmp_path), "-o", "json")
    assert (ended.code, ended.error["reason"]) == (1, "OUTPUT_FAILED")
    assert str(tmp_path) in ended.error["message"]
