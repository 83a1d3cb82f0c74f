"""`seqgate filter`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from seqgate.client import Client
from seqgate.dev.ports import free_ports
from tests.cli.command_line import CommandLine, Ended, json_lines

IN_EU = "properties.region == 'eu'"


# ---- check


async def test_a_valid_expression_is_described(seqgate: CommandLine) -> None:
    text = "has(properties.a) && properties.b == subscription.c && sequence_id > 1"
    table, found = (
        await seqgate("filter", "check", text),
        await seqgate("filter", "check", text, "-o", "json"),
    )

    assert (table.code, found.code) == (0, 0)
    fields = dict(table.rows)
    assert fields["Type"] == "bool"
    assert fields["Reads"] == "properties, sequence_id, subscription"
    assert fields["Properties"] == "a, b"
    assert fields["Properties of the subscription"] == "c"
    assert fields["Cost at most"].endswith(" steps")
    record = found.record
    assert record["cost"] > 0
    assert {**record, "cost": 0} == {
        "valid": True,
        "type": "BOOL",
        "variables": ["properties", "sequence_id", "subscription"],
        "properties": ["a", "b"],
        "subscription": ["c"],
        "cost": 0,
        "iterations": 0,
    }


async def test_an_expression_that_reads_any_property_is_described(seqgate: CommandLine) -> None:
    text = "size(subscription) > 1 ? duration('1s') : duration('0s')"
    found = (await seqgate("filter", "check", text, "-o", "json")).record
    assert (found["type"], found["subscription"], found["properties"]) == ("DURATION", None, [])
    table = await seqgate("filter", "check", "properties.exists(k, k == 'a')")
    assert dict(table.rows)["Properties"] == "any"
    assert dict(table.rows)["Iterations at most"] == "128"


async def test_a_fault_is_marked_in_the_expression(seqgate: CommandLine) -> None:
    text = f"{IN_EU} &&\n  regio == 'é' || foo == 1"
    people, program = (
        await seqgate("filter", "check", text),
        await seqgate("filter", "check", text, "-o", "json"),
    )

    assert (people.code, program.code) == (1, 1)
    assert (people.err, program.err) == ("", "")
    first, line, caret, *_ = people.out.splitlines()
    assert first.startswith("line 2, column 3: undeclared reference to 'regio'")
    assert line == "    regio == 'é' || foo == 1"
    assert line[caret.index("^") :].startswith("regio")
    record = program.record
    assert record["valid"] is False
    assert [(each["line"], each["column"]) for each in record["faults"]] == [(2, 3), (2, 19)]
    assert [text[each["offset"] :][:3] for each in record["faults"]] == ["reg", "foo"]


# ---- test


async def test_entries_are_judged_line_by_line(seqgate: CommandLine) -> None:
    lines = json_lines({"properties": {"region": "eu"}}, {"properties": {"region": "us"}})
    ended = await seqgate("filter", "test", IN_EU, stdin=lines)

    assert ended.code == 0
    assert [line.split() for line in ended.out.splitlines()] == [
        ["LINE", "VERDICT", "WHY"],
        ["1", "accept"],
        ["2", "reject"],
    ]


async def test_an_entry_without_a_verdict_exits_with_1(seqgate: CommandLine) -> None:
    lines = b"\n" + json_lines({"key": "a"}, {"num_messages": 2}, {"properties": {"region": ""}})
    table = await seqgate("filter", "test", IN_EU, stdin=lines)
    found = await seqgate("filter", "test", IN_EU, "-o", "json", stdin=lines)

    assert (table.code, found.code) == (1, 1)
    assert 'Key not found in map : "region" (PROPERTY_ABSENT)' in table.out
    failed, *others = found.records
    assert (failed["line"], failed["verdict"], failed["reason"]) == (2, None, "PROPERTY_ABSENT")
    assert failed["message"]
    nothing = {"delay_ms": None, "reason": None, "message": None}
    assert others == [
        {"line": 3, "verdict": "ACCEPT", **nothing},
        {"line": 4, "verdict": "REJECT", **nothing},
    ]


async def test_a_delay_is_shown(seqgate: CommandLine) -> None:
    ended = await seqgate("filter", "test", "duration('1500ms')", stdin=b"{}")
    assert ended.out.splitlines()[1].split("  ")[-1] == "again after 1,500 ms"
    found = await seqgate("-o", "json", "filter", "test", "duration('1500ms')", stdin=b"{}")
    assert (found.record["verdict"], found.record["delay_ms"]) == ("RESCHEDULE", 1500)


async def test_the_output_of_read_can_be_tested(
    seqgate: CommandLine, client: Client, topic: str, tmp_path: Path
) -> None:
    async with client.producer(topic, name="p") as producer:
        for region in ("eu", "us", "eu"):
            await producer.send(b"\xff", key="k", properties={"region": region})
    entries = tmp_path / "entries.jsonl"
    entries.write_text((await seqgate("read", topic, "-o", "json")).out)

    text = f"topic == '{topic}' && producer == 'p' && key == 'k' && publish_time_ms > 0 && {IN_EU}"
    found = await seqgate("filter", "test", text, str(entries), "--topic", topic, "-o", "json")

    assert [each["verdict"] for each in found.records] == ["ACCEPT", "REJECT", "ACCEPT"]


async def test_many_entries_are_judged_in_order(seqgate: CommandLine) -> None:
    lines = json_lines(*({"sequence_id": number} for number in range(5_000)))
    found = await seqgate("filter", "test", "sequence_id % 3 == 0", "-o", "json", stdin=lines)
    assert [each["line"] for each in found.records] == list(range(1, 5_001))
    assert all((each["verdict"] == "ACCEPT") == (each["line"] % 3 == 1) for each in found.records)


async def test_verdicts_are_printed_as_entries_arrive(seqgate: CommandLine) -> None:
    async with seqgate.running("filter", "test", IN_EU, "-o", "json") as running:
        for region, verdict in (("eu", "ACCEPT"), ("us", "REJECT")):
            await running.write({"properties": {"region": region}})
            assert (await running.record())["verdict"] == verdict
        assert (await running.ended()).code == 0


async def test_properties_of_the_subscription_can_be_given(seqgate: CommandLine) -> None:
    ended = await seqgate(
        *("filter", "test", "subscription.a == 'b=c' && subscription.d == ''", "-o", "json"),
        *("--subscription-property", "a=b=c", "--subscription-property", "d="),
        stdin=b"{}",
    )
    assert ended.record["verdict"] == "ACCEPT"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[]", "line 1: not a JSON object"),
        (b"{", "line 1: not JSON"),
        (b'{"keys": "a"}', "line 1: unknown field 'keys', expected key, properties"),
        (b'{"properties": {"a": 1}}', "line 1: property 'a' must be a string"),
        (b'{"sequence_id": -1}', "line 1: sequence_id must be a number"),
        (b'{"num_messages": 10001}', "line 1: num_messages must be a number from 0 to 10000"),
    ],
)
async def test_an_invalid_line_exits_with_2(
    seqgate: CommandLine, line: bytes, message: str
) -> None:
    ended = await seqgate("filter", "test", "true", "-o", "json", stdin=line)
    assert (ended.code, ended.out) == (2, "")
    assert ended.error["reason"] == "INVALID_INPUT"
    assert ended.error["message"].startswith(message)


async def test_lines_before_an_invalid_one_are_judged(seqgate: CommandLine) -> None:
    ended = await seqgate("filter", "test", "true", "-o", "json", stdin=b"{}\n{}\nno\n{}\n")
    assert ended.code == 2
    assert [each["line"] for each in ended.records] == [1, 2]
    assert ended.error["message"].startswith("line 3: not JSON")


async def test_an_invalid_expression_is_refused(seqgate: CommandLine) -> None:
    for command in ("test", "explain"):
        ended = await seqgate("filter", command, "true &&\n nothing", "-o", "json", stdin=b"{}")
        assert (ended.code, ended.out) == (1, "")
        error = ended.error
        assert error["reason"] == "INVALID_EXPRESSION"
        assert (error["details"]["line"], error["details"]["column"]) == ("2", "2")


# ---- explain


async def test_an_entry_is_explained(seqgate: CommandLine) -> None:
    text = "has(properties.region) &&\n  properties.region in ['us']"
    entry = json.dumps({"properties": {"region": "eu"}}, indent=2).encode()
    table = await seqgate("filter", "explain", text, stdin=entry)
    found = await seqgate("filter", "explain", text, "-o", "json", stdin=entry)

    assert (table.code, found.code) == (0, 0)
    assert table.rows[0] == ["Verdict", "reject"]
    head, *parts = table.out.split("\n\n")[1].splitlines()
    assert head.split() == ["EXPRESSION", "TYPE", "VALUE"]
    assert parts[0].startswith("has(properties.region) && properties.region in ['us']  bool")
    assert parts[1].startswith("  has(properties.region)  ")
    record = found.record
    assert (record["verdict"], record["reason"]) == ("REJECT", None)
    assert record["steps"][0] == {
        "expression": text,
        "start": 0,
        "end": len(text),
        "depth": 0,
        "type": "bool",
        "value": "false",
        "failure": None,
    }
    assert '"eu"' in [each["value"] for each in record["steps"]]


async def test_a_failure_is_explained_and_exits_with_1(seqgate: CommandLine) -> None:
    table = await seqgate("filter", "explain", IN_EU, stdin=b"{}")
    found = await seqgate("filter", "explain", IN_EU, "-o", "json", stdin=b"{}")

    assert (table.code, found.code) == (1, 1)
    assert "fails: Key not found in map" in table.out
    assert found.record["reason"] == "PROPERTY_ABSENT"
    assert [each["value"] for each in found.record["steps"]][-1] == "{}"
    assert found.record["steps"][0]["failure"]


# ---- errors of all commands


async def test_an_unreachable_service_exits_with_3(bare: CommandLine) -> None:
    (port,) = free_ports(1)
    nowhere = bare.with_(SEQGATE_FILTER=f"127.0.0.1:{port}")
    for arguments in (("check", "true"), ("test", "true"), ("explain", "true")):
        ended = await nowhere("filter", *arguments, "-o", "json", "--timeout", "5", stdin=b"{}")
        assert (ended.code, ended.out) == (3, "")
        assert ended.error["reason"] == "UNREACHABLE"
        assert f"filter service at 127.0.0.1:{port}" in ended.error["message"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["filter", "check"], "WRONG_USAGE"),
        (["filter", "test", "true", "--subscription-property", "a"], "WRONG_USAGE"),
        (["filter", "test", "true", "--topic", "a b"], "INVALID_TOPIC_NAME"),
        (["filter", "test", "true", "missing.jsonl"], "INVALID_INPUT"),
        (["filter", "explain", "true", "--subscription-property", "=a"], "WRONG_USAGE"),
        (["filter", "check", "true", "--filter", "here"], "INVALID_SETTINGS"),
    ],
)
def test_wrong_usage_exits_with_2(
    inside: Callable[..., Ended], arguments: list[str], reason: str
) -> None:
    ended = inside(*arguments, "-o", "json")
    assert (ended.code, ended.out) == (2, "")
    assert ended.error["reason"] == reason
