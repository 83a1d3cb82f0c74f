"""`seqgate publish`."""

import asyncio
import base64
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from seqgate.cli import _lines, _publish
from seqgate.client import Client, Message
from seqgate.dev.stack import Stack
from tests.cli.command_line import CommandLine, Ended, json_lines
from tests.support.waiting import WITHIN_S

JSON = ("--input", "json")
WHOLE = ("--input", "whole")


async def stored(client: Client, topic: str) -> list[Message]:
    async with client.reader(topic, follow=False) as reader:
        return [message async for message in reader]


async def test_a_message_is_an_argument(seqgate: CommandLine, client: Client, topic: str) -> None:
    about = ("-k", "alice", "--property", "a=b", "--property", "c=d=e")
    sent = ("publish", topic, "zwölf", *about, "--producer", "p", "--sequence-id", "7")
    first = await seqgate(*sent, "-o", "json")
    again = await seqgate(*sent, "-o", "json", stdin=b"not read\n")
    assert (first.code, first.record) == (
        0,
        {"message_id": "1:0:-1", "sequence_id": 7, "duplicate": False},
    )
    assert again.record == first.record | {"duplicate": True}
    (message,) = await stored(client, topic)
    assert (message.payload, message.key) == ("zwölf".encode(), "alice")
    assert message.properties == {"a": "b", "c": "d=e"}


async def test_lines_are_payloads(seqgate: CommandLine, client: Client, topic: str) -> None:
    lines = b'one\n\n  two \n{"payload": "x"}\n\xff'
    ended = await seqgate("publish", topic, "--key", "k", "-o", "json", stdin=lines)
    assert (ended.code, len(ended.records)) == (0, 4)
    found = await stored(client, topic)
    payloads = [b"one", b"  two ", b'{"payload": "x"}', b"\xff"]
    assert [message.payload for message in found] == payloads
    assert {message.key for message in found} == {"k"}


@pytest.mark.parametrize("form", ["text", "json"])
async def test_a_file_that_is_published_again_stores_only_what_is_new(
    seqgate: CommandLine, client: Client, tmp_path: Path, topic: str, form: str
) -> None:
    """Also under another path to the same file, but not another file of its name."""
    file, other = tmp_path / "lines", tmp_path / "other" / "lines"
    other.parent.mkdir()
    (tmp_path / "link").symlink_to(file)

    def lines(count: int) -> bytes:
        if form == "json":
            return json_lines(*({"payload": str(number)} for number in range(count)))
        return b"".join(b"%d\n" % number for number in range(count))

    publish = ("publish", topic, "--input", form, "--file")
    file.write_bytes(lines(2))
    first = await seqgate(*publish, str(file), "-o", "json")
    file.write_bytes(lines(3))
    more = await seqgate(*publish, str(tmp_path / "link"), "-o", "json")
    other.write_bytes(lines(1))
    of_other = await seqgate(*publish, str(other), "-o", "json")

    assert [(each["sequence_id"], each["duplicate"]) for each in first.records] == [
        (1, False),
        (2, False),
    ]
    assert [each["duplicate"] for each in more.records] == [True, True, False]
    assert [each["duplicate"] for each in of_other.records] == [False]
    found = await stored(client, topic)
    assert [message.payload for message in found] == [b"0", b"1", b"2", b"0"]
    assert {message.producer_name[:11] for message in found} == {"file-lines-"}


async def test_a_line_that_changed_is_refused_alone_or_reported(
    seqgate: CommandLine, client: Client, tmp_path: Path, topic: str
) -> None:
    file = tmp_path / "lines"
    publish = ("publish", topic, "--file", str(file), "-o", "json")
    file.write_bytes(b"one\ntwo\n")
    assert (await seqgate(*publish)).code == 0
    file.write_bytes(b"one\n2\nthree\n")
    refused = await seqgate(*publish)
    assert refused.code == 1
    assert [each["duplicate"] for each in refused.records] == [True, False]
    assert (refused.error["reason"], refused.error["details"]["line"]) == ("CONFLICT", "2")
    reported = await seqgate(*publish, "--on-conflict", "report")
    assert reported.code == 0
    assert [each.get("differs") for each in reported.records] == [None, True, None]
    assert [message.payload for message in await stored(client, topic)] == [
        b"one",
        b"two",
        b"three",
    ]


async def test_a_file_may_have_any_name(seqgate: CommandLine, tmp_path: Path, topic: str) -> None:
    """Of bytes that are no text, too, and longer than a producer's name."""
    for name in (b"a\nb", b"\xff", b"\xc3\xa4" * 100):
        file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        file.write_bytes(b"line\n")
        ended = await seqgate("publish", topic, "--file", str(file), "-o", "json")
        assert (ended.code, len(ended.records)) == (0, 1), ended


async def test_a_files_lines_have_all_their_own_ids_or_none(
    seqgate: CommandLine, tmp_path: Path, topic: str
) -> None:
    file = tmp_path / "lines"
    file.write_bytes(json_lines({"payload": "a", "sequence_id": 9}, {"payload": "b"}))
    ended = await seqgate("publish", topic, *JSON, "--file", str(file), "-o", "json")
    assert (ended.code, [each["sequence_id"] for each in ended.records]) == (2, [9])
    assert ended.error["details"]["line"] == "2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "--file", "f"], "MESSAGE and --file are mutually exclusive"),
        (["m", *JSON], "MESSAGE and --input are mutually exclusive"),
        ([*JSON, "-k", "k"], "with --input json, keys and properties are in the lines"),
        (["--sequence-id", "1"], "--sequence-id requires MESSAGE or --input whole"),
        (["m", "--property", "a"], "--property must be NAME=VALUE"),
    ],
)
def test_what_is_published_is_said_once(
    inside: Callable[..., Ended], arguments: list[str], message: str
) -> None:
    ended = inside("publish", "t", *arguments, "-o", "json")
    assert (ended.code, ended.error["reason"]) == (2, "WRONG_USAGE")
    assert ended.error["message"] == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "MESSAGE is empty: to publish an empty payload, give --empty instead"),
        (["m", "--empty"], "--empty excludes MESSAGE, --file and --input"),
        (["--empty", *WHOLE], "--empty excludes MESSAGE, --file and --input"),
        (["-", "--file", "f"], "MESSAGE and --file are mutually exclusive"),
        (["m", "--key", ""], "--key is empty"),
        (["m", "--producer", "p", "--sequence-id", "x"], "Invalid value for '--sequence-id'"),
        (["m", "--sequence-id", "1"], "--sequence-id requires --producer: under a name that is"),
        ([*WHOLE, "--sequence-id", "1"], "--sequence-id requires --producer: under a name"),
        (["m", "--initial-sequence-id", "1"], "--initial-sequence-id requires --producer: under"),
    ],
)
def test_what_is_hardly_meant_is_refused(
    inside: Callable[..., Ended], arguments: list[str], message: str
) -> None:
    ended = inside("publish", "t", *arguments, "-o", "json")
    assert (ended.code, ended.out) == (2, "")
    assert ended.error["reason"] in ("WRONG_USAGE", "INVALID_PRODUCER_NAME")
    assert ended.error["message"].startswith(message)


async def test_a_dash_is_standard_input(seqgate: CommandLine, client: Client, topic: str) -> None:
    first = await seqgate("publish", topic, "-", stdin=b"real\n")
    whole = await seqgate("publish", topic, "-", *WHOLE, "--producer", "p", stdin=b"a\nb\n")
    file = await seqgate("publish", topic, "--file", "-", stdin=b"one\n")
    again = await seqgate("publish", topic, "--file", "-", stdin=b"other\n")
    assert [each.code for each in (first, whole, file, again)] == [0] * 4
    found = await stored(client, topic)
    assert [each.payload for each in found] == [b"real", b"a\nb\n", b"one", b"other"]


async def test_lines_of_a_pipe_are_no_duplicates_of_an_earlier_input(
    seqgate: CommandLine, client: Client, tmp_path: Path, topic: str
) -> None:
    """Its path stays, but not its content: only the lines of a regular file have numbers."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for line in (b"one\n", b"two\n"):
        publishing = asyncio.create_task(seqgate("publish", topic, "--file", str(pipe)))
        await asyncio.to_thread(pipe.write_bytes, line)
        assert (await publishing).rows[1][1:] == ["1", "1", "0", "0"]
    assert [each.payload for each in await stored(client, topic)] == [b"one", b"two"]


async def test_an_empty_payload_is_published_on_request_only(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    accident = await seqgate("publish", topic, *WHOLE, "-o", "json")
    assert (accident.code, accident.error["reason"]) == (2, "INVALID_INPUT")
    assert accident.error["message"].endswith("to publish an empty payload, give --empty")
    assert (await seqgate("publish", topic, "--empty")).code == 0
    assert [each.payload for each in await stored(client, topic)] == [b""]


async def test_every_line_gets_a_receipt(seqgate: CommandLine, client: Client, topic: str) -> None:
    lines = json_lines(
        {"payload": "zwölf", "key": "k", "properties": {"a": "b"}, "event_time_ms": 7},
        {"payload_base64": base64.b64encode(b"\x00\xff").decode(), "ordering_key": "o"},
        {"payload": ""},
    )

    ended = await seqgate("publish", topic, *JSON, "-o", "json", stdin=lines)

    assert (ended.code, ended.err) == (0, "")
    assert ended.records == [
        {"message_id": f"1:{number}:-1", "sequence_id": number, "duplicate": False}
        for number in range(3)
    ]
    first, second, third = await stored(client, topic)
    assert (first.payload, first.key, first.properties) == ("zwölf".encode(), "k", {"a": "b"})
    assert first.event_time_ms == 7
    assert (second.payload, second.ordering_key) == (b"\x00\xff", b"o")
    assert third.payload == b""


async def test_text_output_is_a_summary(seqgate: CommandLine, tmp_path: Path, topic: str) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(json_lines(*({"payload": "x", "sequence_id": n} for n in (1, 2, 2, 0))))
    arguments = ("publish", topic, *JSON, "--file", str(file), "--producer", "p")

    first = await seqgate(*arguments)
    again = await seqgate(*arguments, "-o", "json")

    assert first.code == 1
    assert first.rows == [
        ["PRODUCER", "SENT", "STORED", "DUPLICATES", "FAILED"],
        ["p", "4", "2", "1", "1"],
    ]
    assert first.err == (
        "seqgate: line 4: the message is not in the log: its producer has stored a higher"
        " sequence id (sequence id 0) (STALE)\n"
        "  sequence_id: 0\n"
        "  line: 4\n"
    )
    assert again.code == 1
    assert again.records == [
        {"message_id": "1:0:-1", "sequence_id": 1, "duplicate": True},
        {"message_id": "1:1:-1", "sequence_id": 2, "duplicate": True},
        {"message_id": "1:1:-1", "sequence_id": 2, "duplicate": True},
    ]
    assert again.error["reason"] == "STALE"
    assert again.error["details"] == {"line": "4", "sequence_id": "0"}


async def test_lines_are_batched_compressed_and_numbered(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    lines = json_lines(*({"payload": "x" * 100} for _ in range(50)))
    options = ("--batch", "--compression", "zstd", "--initial-sequence-id", "9")

    ended = await seqgate(
        "publish", topic, *JSON, "--producer", "p", *options, "-o", "json", stdin=lines
    )

    assert ended.code == 0
    assert [each["sequence_id"] for each in ended.records] == list(range(10, 60))
    messages = await stored(client, topic)
    assert [str(message.id) for message in messages] == [
        each["message_id"] for each in ended.records
    ]
    assert max(message.id.batch_index for message in messages) > 0
    assert {message.payload for message in messages} == {b"x" * 100}


async def test_batches_are_cut_by_their_filter_properties(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    pairs = [("eu", "1"), ("eu", "1"), ("us", "1"), ("us", "2")]
    lines = json_lines(
        *({"payload": str(n), "properties": {"a": a, "b": b}} for n, (a, b) in enumerate(pairs))
    )
    options = ("--batch", "--filter-property", "a", "--filter-property", "b")

    ended = await seqgate("publish", topic, *JSON, *options, "-o", "json", stdin=lines)

    assert (ended.code, ended.err) == (0, "")
    messages = await stored(client, topic)
    assert [(each.properties["a"], each.properties["b"]) for each in messages] == pairs
    assert all(each.id.batch_index >= 0 for each in messages)
    assert len({each.id.position for each in messages[1:]}) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--filter-property", "a"], "--filter-property requires --batch"),
        (
            ["--batch", "--filter-property", ""],
            "--filter-property: a filter property's name must be",
        ),
        (["--batch", "--filter-property", "x" * 256], "--filter-property: a filter property's"),
    ],
)
def test_invalid_filter_properties_are_refused(
    inside: Callable[..., Ended], options: list[str], message: str
) -> None:
    ended = inside("publish", "t", *options, "-o", "json")

    assert (ended.code, ended.out) == (2, "")
    assert ended.error["reason"] == "WRONG_USAGE"
    assert ended.error["message"].startswith(message)


async def test_an_invalid_line_ends_publishing_after_earlier_receipts(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    lines = (
        b'{"payload": "a", "sequence_id": 1}\n\n{"payload": "a", "sequence_id": 1}\n'
        b'{"payload": "without an id"}\n'
        b'{"payload": "never", "sequence_id": 9}\n'
    )

    ended = await seqgate("publish", topic, *JSON, "-o", "json", stdin=lines)

    assert ended.code == 2
    assert [each["duplicate"] for each in ended.records] == [False, True]
    assert ended.error == {
        "reason": "MIXED_SEQUENCE_IDS",
        "message": "line 4: give a sequence id with every message of a producer, or with none",
        "details": {"line": "4", "sent": "2", "stored": "1", "duplicates": "1", "failed": "0"},
    }
    assert [each.payload for each in await stored(client, topic)] == [b"a"]


async def test_an_invalid_line_is_reported_as_text(seqgate: CommandLine, topic: str) -> None:
    ended = await seqgate(
        "publish", topic, *JSON, "--producer", "p", stdin=b'{"payload": "a"}\npayload'
    )

    assert ended.code == 2
    assert ended.rows[1] == ["p", "1", "1", "0", "0"]
    assert ended.err.splitlines()[0] == (
        "seqgate: line 2: not JSON: Expecting value (column 1) (INVALID_INPUT)"
    )
    assert "  stored: 1" in ended.err.splitlines()


@pytest.mark.parametrize(
    ("options", "size_bytes"),
    [
        (["--batch"], 6_000_000),  # no batch is cut
        (["--chunk-bytes", "1024"], 10_000 * 1024 + 1),  # more chunks than allowed
    ],
)
async def test_a_refused_message_does_not_affect_others(
    seqgate: CommandLine, client: Client, topic: str, options: list[str], size_bytes: int
) -> None:
    lines = json_lines({"payload": "a"}, {"payload": "x" * size_bytes}, {"payload": "b"})

    ended = await seqgate("publish", topic, *JSON, "-o", "json", *options, stdin=lines)

    assert ended.code == 1
    assert (ended.error["reason"], ended.error["details"]["line"]) == ("ENTRY_TOO_LARGE", "2")
    assert ended.error["message"].startswith("line 2: message too large")
    assert len(ended.records) == 2
    assert [each.payload for each in await stored(client, topic)] == [b"a", b"b"]


async def test_a_large_message_is_chunked_at_the_services_limit(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    """Users of a shell need not know the limit of an entry."""
    payloads = ["a", "x" * 6_000_000, "b"]

    ended = await seqgate(
        "publish",
        topic,
        *JSON,
        "-o",
        "json",
        stdin=json_lines(*({"payload": each} for each in payloads)),
    )

    assert (ended.code, ended.err) == (0, "")
    assert [each["message_id"] for each in ended.records] == ["1:0:-1", "1:1:-1;1:2:-1", "1:3:-1"]
    assert [each.payload.decode() for each in await stored(client, topic)] == payloads


async def test_chunks_have_the_requested_size(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    """Also beyond the limit of pending messages."""
    line = {"payload": "x" * 9_000_000, "sequence_id": 7}
    arguments = ("publish", topic, *JSON, "--producer", "p", "--chunk-bytes", "1024", "-o", "json")

    first = await seqgate(*arguments, stdin=json_lines(line))
    again = await seqgate(*arguments, stdin=json_lines(line))

    receipt = {"message_id": "1:0:-1;1:8789:-1", "sequence_id": 7, "duplicate": False}
    assert (first.code, first.record) == (0, receipt)
    assert (again.code, again.record) == (0, receipt | {"duplicate": True})
    assert [len(each.payload) for each in await stored(client, topic)] == [9_000_000]


async def test_a_file_can_be_one_message(
    seqgate: CommandLine, client: Client, tmp_path: Path, topic: str
) -> None:
    file = tmp_path / "report.pdf"
    file.write_bytes(bytes(range(256)) * 25_000 + b"\n\n")

    of_file = await seqgate("publish", topic, "--file", str(file), *WHOLE, "-o", "json")
    of_pipe = await seqgate("publish", topic, *WHOLE, "--producer", "p", stdin=b"a\nb\n")

    assert (of_file.code, of_file.record["message_id"]) == (0, "1:0:-1;1:1:-1")
    assert (of_pipe.code, of_pipe.rows[1]) == (0, ["p", "1", "1", "0", "0"])
    messages = await stored(client, topic)
    assert [each.payload for each in messages] == [file.read_bytes(), b"a\nb\n"]


async def test_a_refusal_of_a_file_names_no_line(seqgate: CommandLine, topic: str) -> None:
    arguments = ("publish", topic, *WHOLE, "--chunk-bytes", "1024", "-o", "json")

    ended = await seqgate(*arguments, stdin=bytes(10_000 * 1024 + 1))

    assert (ended.code, ended.out) == (1, "")
    assert ended.error["reason"] == "ENTRY_TOO_LARGE"
    assert ended.error["message"].startswith("message too large")
    assert ended.error["details"] == {"max_large_message_bytes": "268435456", "max_chunks": "10000"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "--chunk-bytes", "0"], "--batch and --chunk-bytes are mutually exclusive"),
        (["--batch", "--chunk-bytes", "2048"], "--batch and --chunk-bytes are mutually exclusive"),
        (["--chunk-bytes", "1023"], "--chunk-bytes must be 0 or at least 1,024"),
        (["--chunk-bytes", "-1"], "Invalid value for '--chunk-bytes'"),
        (["--chunk-bytes", "1MB"], "Invalid value for '--chunk-bytes'"),
    ],
)
def test_invalid_chunking_and_batching_options_are_refused(
    inside: Callable[..., Ended], options: list[str], message: str
) -> None:
    ended = inside("publish", "t", *options, "-o", "json")

    assert (ended.code, ended.out) == (2, "")
    assert ended.error["reason"] == "WRONG_USAGE"
    assert ended.error["message"].startswith(message)


async def test_lines_are_published_as_they_arrive(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    async with seqgate.running("publish", topic, *JSON, "-o", "json") as publishing:
        for number in range(3):
            await publishing.write({"payload": f"{number}"})
            assert (await publishing.record())["sequence_id"] == number
            assert len(await stored(client, topic)) == number + 1
        assert (await publishing.ended()).code == 0


async def test_more_lines_than_the_pending_limit_are_published(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    lines = b'{"payload": "x"}\n' * 12_000

    ended = await seqgate("publish", topic, *JSON, "--batch", "--producer", "p", stdin=lines)

    assert (ended.code, ended.rows[1]) == (0, ["p", "12000", "12000", "0", "0"])
    assert [each.sequence_id for each in await stored(client, topic)] == list(range(12_000))


async def test_pending_messages_and_bytes_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_publish, "PENDING_MAX", 3)
    monkeypatch.setattr(_publish, "PENDING_BYTES_MAX", 100)

    async def waits(room: _publish.Room, size_bytes: int) -> bool:
        taking = asyncio.create_task(room.take(size_bytes))
        await asyncio.sleep(0)
        waiting = not taking.done()
        taking.cancel()
        return waiting

    room = _publish.Room()
    await room.take(1_000)  # one message is always admitted
    assert await waits(room, 1)
    room.give_back(1_000)
    await room.take(50)
    await room.take(50)
    assert await waits(room, 1)
    assert not await waits(room, 0)
    assert await waits(room, 0)  # the fourth message


def test_an_interrupt_ends_the_wait_for_a_pipes_writer(
    inside: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def opening(path: str) -> None:
        signal.raise_signal(signal.SIGINT)
        opened.append(path)

    monkeypatch.setattr(_lines, "FileIO", opening)
    ended = inside("publish", "t", "--file", "pipe")
    assert (ended.code, opened) == (130, [])


async def test_a_producer_name_in_use_is_refused_and_can_be_taken_over(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    arguments = ("publish", topic, *JSON, "--producer", "p", "-o", "json")
    line = {"payload": "x"}
    async with seqgate.running(*arguments) as first:
        await first.write(line)
        await first.record()

        refused = await seqgate(*arguments, stdin=json_lines(line))
        assert (refused.code, refused.out) == (1, "")
        assert refused.error["reason"] == "PRODUCER_BUSY"

        taken = await seqgate(*arguments, "--takeover", stdin=json_lines(line))
        assert (taken.code, taken.record["sequence_id"]) == (0, 1)

        await first.write(line)
        ended = await first.ended()

    assert ended.code == 1
    assert {each["reason"] for each in ended.errors} == {"PRODUCER_TAKEN_OVER"}
    # The line may be sent before the producer learns that it has lost its name.
    details = ended.errors[-1]["details"]
    assert (details["sent"], details["stored"]) in {("1", "1"), ("2", "1")}
    assert [each.sequence_id for each in await stored(client, topic)] == [0, 1]


async def test_nothing_is_sent_after_a_message_that_timed_out(
    seqgate: CommandLine, stack: Stack, client: Client, topic: str
) -> None:
    """Otherwise later messages would overtake it, and make it stale forever."""
    arguments = ("publish", topic, *JSON, "--producer", "p", "--timeout", "1", "-o", "json")
    async with seqgate.running(*arguments) as publishing:
        await publishing.write({"payload": "before"})
        await publishing.record()
        await stack.terminate("dedup")
        try:
            await publishing.write({"payload": "late"})
            assert await publishing.exit_code() == 3  # with its input still open
        finally:
            await stack.run("dedup")
        ended = await publishing.ended()

    assert ended.errors[0]["message"] == (
        "line 2: no receipt arrived in time; the message may be in the log (sequence id 1)"
    )
    assert ended.errors[0]["details"]["sequence_id"] == "1"
    assert {each["reason"] for each in ended.errors} == {"SEND_TIMEOUT"}
    assert ended.errors[-1]["details"]["failed"] == "1"
    assert [each.payload for each in await stored(client, topic)] == [b"before"]


async def test_publish_ends_quietly_when_its_output_closes(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    receiving, giving = os.pipe()
    async with seqgate.running("publish", topic, *JSON, "-o", "json", stdout=giving) as publishing:
        os.close(giving)
        await publishing.write({"payload": "a"})
        assert await asyncio.to_thread(os.read, receiving, 1_000)
        os.close(receiving)
        await publishing.write({"payload": "b"})
        assert await publishing.exit_code() == 1  # more input may have followed
        ended = await publishing.ended()

    assert ended.err == ""
    assert [each.payload for each in await stored(client, topic)] == [b"a", b"b"]


async def test_publish_fails_when_receipts_cannot_be_written(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    async with seqgate.running("publish", topic, *JSON, "-o", "json", stdout=full) as publishing:
        os.close(full)
        await publishing.write({"payload": "a"})
        assert await publishing.exit_code() == 1
        ended = await publishing.ended()

    assert ended.error["reason"] == "OUTPUT_FAILED"
    assert ended.error["message"] == "writing failed: No space left on device"
    assert ended.error["details"]["stored"] == "1"
    assert [each.payload for each in await stored(client, topic)] == [b"a"]


async def test_an_interrupt_exits_with_130_and_reports_the_sent_messages(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    async with seqgate.running("publish", topic, *JSON, "--producer", "p") as publishing:
        await publishing.write({"payload": "a"})
        async with client.producer(topic):  # creates the topic unless it exists
            pass
        async with client.reader(topic) as reader, asyncio.timeout(WITHIN_S):
            await anext(reader)
        publishing.interrupt()
        ended = await publishing.ended()

    assert (ended.code, ended.err) == (130, "")
    assert ended.rows[1][:2] == ["p", "1"]


async def test_a_long_input_shows_its_progress(seqgate: CommandLine, topic: str) -> None:
    async with seqgate.running("publish", topic, "-o", "json") as publishing:
        await publishing.write("a", "b")
        shown = json.loads(await publishing.error_line())["progress"]
        assert (shown["command"], shown["messages"], shown["done"]) == ("publish", 2, False)
        ended = await publishing.ended()
    assert ended.code == 0
    assert json.loads(ended.err)["progress"]["done"]
