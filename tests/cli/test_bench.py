"""seqgate bench."""

from collections.abc import Callable

import pytest

from seqgate.cli._bench import HEADER, Seen
from tests.cli.command_line import CommandLine, Ended


@pytest.mark.parametrize("options", [(), ("--batch", "--producers", "3", "--keys", "7")])
async def test_an_installation_is_loaded_and_left_as_it_was(
    seqgate: CommandLine, options: tuple[str, ...]
) -> None:
    load = ("--messages", "500", "--rate", "5000")
    ended = await seqgate("bench", *load, *options, "-o", "json")
    assert ended.code == 0, ended
    found = ended.record
    for part in (found["published"], found["delivered"]):
        assert part["messages"] == 500
        assert part["per_s"] > 0
        assert 0 < part["p50_ms"] <= part["p99_ms"] <= part["max_ms"]
    assert [found[each] for each in ("failed", "lost", "doubled", "overtaken")] == [0, 0, 0, 0]
    assert (await seqgate("topic", "show", found["topic"])).code == 1


async def test_large_messages_wait_for_room_in_bytes(seqgate: CommandLine) -> None:
    load = ("--messages", "80", "--rate", "100000", "--size", "1048576", "--consumers", "0")
    ended = await seqgate("bench", *load, "-o", "json", patience_s=120.0)
    assert (ended.code, ended.record["published"]["messages"]) == (0, 80), ended


async def test_people_see_a_summary(seqgate: CommandLine) -> None:
    ended = await seqgate("bench", "--messages", "20", "--consumers", "0")
    rows = dict(row for row in ended.rows if len(row) == 2)
    assert (ended.code, rows["Published"], rows["Lost"]) == (0, "20 messages", "0")


async def test_publishing_ends_in_time(seqgate: CommandLine) -> None:
    ended = await seqgate("bench", "--seconds", "1", "--rate", "20", "-o", "json")
    assert ended.code == 0
    assert 1 <= ended.record["published"]["messages"] <= 22


async def test_interrupted_it_deletes_its_topic(seqgate: CommandLine) -> None:
    async with seqgate.running("bench", "--rate", "1", "-o", "json") as running:
        while not (await seqgate("topic", "ls", "bench-", "-o", "json")).records:
            pass
        running.interrupt()
        assert await running.exit_code() == 130
    assert (await seqgate("topic", "ls", "bench-", "-o", "json")).records == []


@pytest.mark.parametrize(
    "wrong",
    [
        ("--messages", "1000001"),
        ("--seconds", "601"),
        ("--rate", "100001"),
        ("--size", "23"),
        ("--size", "1048577"),
        ("--keys", "0"),
        ("--keys", "100001"),
        ("--producers", "17"),
        ("--consumers", "17"),
    ],
)
def test_the_load_has_bounds(inside: Callable[..., Ended], wrong: tuple[str, str]) -> None:
    ended = inside("bench", *wrong, "-o", "json")
    assert (ended.code, ended.error["reason"]) == (2, "WRONG_USAGE")


def test_broken_promises_are_found() -> None:
    seen = Seen(stored=4)
    for key, number in ((1, 0), (2, 0), (1, 0), (1, 3), (1, 1), (1, 1)):
        seen.take(HEADER.pack(5, key, number), 8)
    assert (seen.doubled, seen.overtaken) == (2, 2)
    assert seen.deliveries_ns == [3, 3, 3, 3]
    assert seen.is_broken
