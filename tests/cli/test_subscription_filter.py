"""`seqgate subscription filter`, and `analyze`."""

from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from seqgate.client import Client, connect
from seqgate.dev.stack import Stack
from tests.cli.command_line import CommandLine, Ended
from tests.support.waiting import eventually

EU, US = "properties.region == 'eu'", "properties.region == 'us'"


@pytest_asyncio.fixture
async def consuming(stack: Stack) -> AsyncIterator[Client]:
    """A client of the ledger and the dispatcher services."""
    async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        yield client


@pytest_asyncio.fixture
async def stored(client: Client, seqgate: CommandLine, topic: str) -> str:
    """A topic with six messages, from eu and us in turn, and a subscription s."""
    async with client.producer(topic, name="p") as producer:
        for number in range(6):
            region = ("eu", "us")[number % 2]
            await producer.send(b"message", key="k", properties={"region": region})
    await seqgate("subscription", "create", topic, "s")
    return topic


async def test_filters_are_set_and_shown_with_versions(seqgate: CommandLine, stored: str) -> None:
    names = (stored, "s")
    await seqgate("subscription", "filter", "set", *names, f"region={EU}", "all=true")
    again = await seqgate(
        *("subscription", "filter", "set", *names, f"region={US}", "all=true", "big:7=1 < 2"),
        *("--from", "1:4", "--on-failure", "reject", "-o", "json"),
    )
    table = await seqgate("subscription", "filter", "show", *names)

    record = again.record
    assert (record["topic"], record["subscription"], record["shadow"]) == (stored, "s", None)
    assert record["applied"] == [
        {
            "start": None,
            "on_failure": "PARK",
            "filters": [
                {"name": "region", "version": 1, "expression": EU},
                {"name": "all", "version": 1, "expression": "true"},
            ],
        },
        {
            "start": "1:4",
            "on_failure": "REJECT",
            "filters": [
                {"name": "region", "version": 2, "expression": US},
                {"name": "all", "version": 1, "expression": "true"},
                {"name": "big", "version": 7, "expression": "1 < 2"},
            ],
        },
    ]
    newest, oldest = record["changes"]
    assert (newest["mode"], newest["start"], newest["on_failure"]) == ("APPLIED", "1:4", "REJECT")
    assert newest["filters"][2] == {"name": "big", "version": 7}
    assert oldest["time_ms"] <= newest["time_ms"]
    assert table.rows[:4] == [
        ["MODE", "FROM", "ON FAILURE", "FILTER", "VERSION", "EXPRESSION"],
        ["applied", "the beginning", "park", "region", "1", EU],
        ["applied", "the beginning", "park", "all", "1", "true"],
        ["applied", "1:4", "reject", "region", "2", US],
    ]
    assert table.rows[6:8] == [[""], ["CHANGED", "MODE", "FROM", "ON FAILURE", "FILTERS", "BY"]]
    assert table.rows[8][1:-1] == ["applied", "1:4", "reject", "region:2, all:1, big:7"]
    assert table.rows[8][-1] == newest["caller"]
    assert newest["caller"].startswith("ipv4:127.0.0.1:")


async def test_a_shadow_chain_is_set_shown_counted_and_removed(
    seqgate: CommandLine, consuming: Client, stored: str
) -> None:
    names = (stored, "s")
    start = ("--from", "earliest")
    await seqgate("subscription", "filter", "set", *names, f"region={EU}")
    shadow = await seqgate(
        "subscription", "filter", "shadow", *names, f"region={US}", *start, "-o", "json"
    )
    assert shadow.record["shadow"]["filters"][0]["version"] == 2
    async with consuming.consumer(stored, "s") as consumer:
        for _ in range(3):
            await consumer.ack(await consumer.receive())
        report = ("subscription", "report", *names)

        async def counted() -> bool:
            filters = (await seqgate(*report, "-o", "json")).record["filtering"]["filters"]
            return len(filters) == 4 and filters[2]["processed"]["entries"] == 6

        await eventually(counted)
        record = (await seqgate(*report, "-o", "json")).record
        table = await seqgate(*report)

    filtering = record["filtering"]
    assert [(each["mode"], each["filter"], each["version"]) for each in filtering["filters"]] == [
        ("APPLIED", None, None),
        ("APPLIED", "region", 1),
        ("SHADOW", None, None),
        ("SHADOW", "region", 2),
    ]
    assert filtering["filters"][1]["accepted"] == {"entries": 3, "messages": 3}
    assert filtering["answers"] >= 1
    assert (filtering["unanswered"], filtering["unanswered_since_ms"]) == (0, None)
    assert record["totals"]["rejected_entries"] == 3
    assert record["unjudged_entries"] == record["filter_failed_entries"] == 0
    assert ["applied", "region", "1", "6", "3", "3", "0", "0", "-"] in table.rows
    assert ["shadow", "all", "-", "6", "3", "3", "0", "0", "-"] in table.rows

    gone = await seqgate("subscription", "filter", "shadow", *names, "--none", "-o", "json")
    assert gone.record["shadow"] is None
    assert len(gone.record["applied"]) == 1


async def test_an_invalid_filter_is_refused_with_its_position(
    seqgate: CommandLine, stored: str
) -> None:
    ended = await seqgate(
        *("subscription", "filter", "set", stored, "s", "a=true", "b=1 ===", "-o", "json")
    )
    assert (ended.code, ended.error["reason"]) == (1, "INVALID_EXPRESSION")
    details = ended.error["details"]
    assert (details["filter"], details["version"], details["line"]) == ("b", "1", "1")


async def test_an_explanation_names_the_filter_that_failed(
    seqgate: CommandLine, consuming: Client, stored: str
) -> None:
    names = (stored, "s")
    await seqgate("subscription", "filter", "set", *names, "number=int(properties.region) > 0")
    explain = ("subscription", "explain", *names, "--id", "1:0")
    async with consuming.consumer(stored, "s"):

        async def parked() -> bool:
            found = await seqgate(*explain, "-o", "json")
            return [each["reason"] for each in found.record["reasons"]] == ["FILTER_FAILED"]

        await eventually(parked)
        found = await seqgate(*explain, "-o", "json")
        sentence = await seqgate(*explain)
    (reason,) = found.record["reasons"]
    assert (reason["filter"], reason["filter_version"]) == ("number", 1)
    assert sentence.out.startswith(
        "A filter failed on it: it waits until filters or properties change: "
        "number (version 1) failed with EVALUATION_FAILED: "
    )


async def test_an_analysis_counts_the_verdicts_on_the_backlog(
    seqgate: CommandLine, stored: str
) -> None:
    names = (stored, "s")
    await seqgate("subscription", "filter", "set", *names, f"region={EU}", "--from", "1:2")
    applied = await seqgate("subscription", "analyze", *names, "-o", "json")
    other = await seqgate("subscription", "analyze", *names, "none=int(properties.region) > 0")
    part = await seqgate(
        "subscription", "analyze", *names, f"region={EU}", "--entries", "2", "-o", "json"
    )

    record = applied.record
    assert (record["backlog_entries"], record["complete"]) == (6, True)
    assert (record["first"], record["last"], record["blocks"]) == ("1:0", "1:5", 1)
    assert [(each["verdict"], each["entries"]) for each in record["verdicts"]] == [
        ("ACCEPT", 4),
        ("REJECT", 2),
    ]
    assert other.rows[0] == ["Entries not acknowledged", "6"]
    assert other.rows[-1] == ["no verdict: evaluation failed", "6", "6", "6", "6", "6", "6"]
    assert (part.record["scanned_entries"], part.record["complete"]) == (2, False)
    for each in part.record["verdicts"]:
        assert each["estimated_entries_low"] <= 3 <= each["estimated_entries_high"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["filter", "set", "t", "s"], "give filters or --none"),
        (["filter", "set", "t", "s", "a=true", "--none"], "give filters or --none"),
        (["filter", "set", "t", "s", "true"], "a filter must be NAME=EXPR or NAME:VERSION=EXPR"),
        (["filter", "set", "t", "s", "=true"], "a filter must be NAME=EXPR or NAME:VERSION=EXPR"),
        (["filter", "set", "t", "s", "a="], "a filter must be NAME=EXPR or NAME:VERSION=EXPR"),
        (
            ["filter", "set", "t", "s", "a=true", "--from", "x"],
            "--from must be earliest, latest, a",
        ),
        (["filter", "shadow", "t", "s"], "give filters or --none"),
        (["analyze", "t", "s", "--entries", "0"], "Invalid value for '--entries'"),
        (["analyze", "t", "s", "--seconds", "121"], "Invalid value for '--seconds'"),
    ],
)
def test_wrong_usage_exits_with_2(
    inside: Callable[..., Ended], arguments: list[str], message: str
) -> None:
    ended = inside("subscription", *arguments, "-o", "json")
    assert (ended.code, ended.out, ended.error["reason"]) == (2, "", "WRONG_USAGE")
    assert ended.error["message"].startswith(message)


async def test_a_fixed_filter_judges_the_entries_that_it_parked(
    seqgate: CommandLine, stored: str, consuming: Client
) -> None:
    names = (stored, "s")
    await seqgate("subscription", "filter", "set", *names, "n=int(properties.region) > 0")
    async with consuming.consumer(stored, "s") as consumer:

        async def has_failed() -> bool:
            record = (await seqgate("subscription", "report", *names, "-o", "json")).record
            return bool(record["filter_failed_entries"])

        await eventually(has_failed)
        await seqgate("subscription", "filter", "set", *names, f"n={EU}")
        for _ in range(3):
            message = await consumer.receive(10)
            assert message.properties["region"] == "eu"
            await consumer.ack(message)
