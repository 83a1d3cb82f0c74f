"""`seqgate message life`."""

import pytest

from seqgate.client import SubscriptionOptions, connect
from seqgate.dev.stack import Stack
from seqgate.telemetry.propagation import TRACEPARENT
from tests.cli.command_line import CommandLine
from tests.support.waiting import eventually

TRACE = "0af7651916cd43dd8448eb211c80319c"


async def test_a_life_is_a_timeline_for_people_and_json_for_programs(
    seqgate: CommandLine, stack: Stack, topic: str
) -> None:
    options = SubscriptionOptions(max_redeliveries=0)
    async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        async with client.producer(topic, name="p") as producer:
            traced = {TRACEPARENT: f"00-{TRACE}-b7ad6b7169203331-01"}
            await producer.send(b"poison", key="k", sequence_id=7, properties=traced)
        async with client.consumer(topic, "s", name="crew", options=options) as consumer:
            await consumer.nack(await consumer.receive(), delay_s=0, reason="no stock")

            async def is_dead() -> bool:
                return bool([each async for each in client.admin().dead_letters(topic, "s")])

            await eventually(is_dead)
    (letter,) = (await seqgate("dead-letter", "ls", topic, "s", "-o", "json")).records
    await seqgate("dead-letter", "redrive", topic, "s", letter["position"])

    shown = await seqgate("message", "life", topic, "p", "7")
    as_json = await seqgate("message", "life", topic, "p", "7", "-o", "json")
    by_id = await seqgate("message", "life", topic, "--id", "1:0", "-o", "json")
    since = ("--since", "2020-01-01T00:00:00Z", "-o", "json")
    by_trace = await seqgate("message", "life", topic, "--trace", TRACE, *since)

    assert by_id.record == by_trace.record == as_json.record
    record = as_json.record
    assert (record["fate"], record["verdict"], record["trace_id"]) == ("STORED", "DUPLICATE", TRACE)
    assert (record["message"]["payload"], record["unknown"]) == ("poison", {})
    (life,) = record["subscriptions"]
    events = [each for each in life["events"] if each["event"] != "TAKEN"]
    assert [each["event"] for each in events] == [
        *("DELIVERED", "FAILED", "DEAD_LETTERED", "REDRIVEN")
    ]
    assert events[1] == {
        "event": "FAILED",
        "time_ms": events[1]["time_ms"],
        "consumer": "crew",
        "failure": "REFUSED",
        "attempts": 1,
        "text": "no stock",
    }
    assert (life["redrive"], life["audit_topic"], life["unknown"]) == (1, None, None)
    assert [each["position"] for each in life["letters"]] == [letter["position"]]
    assert life["complete_since_ms"] <= events[0]["time_ms"]
    assert life["reasons"]

    lines = [line.partition("Z  ")[2] or line for line in shown.out.splitlines()]
    assert "Subscription s" in lines
    for sentence in (
        "delivered to crew",
        "delivery failed, the 1st: refused by crew: no stock",
        f"dead letter {events[2]['number']} in {topic}-s-DLQ: REDELIVERIES",
        "taken back by redrive 1",
    ):
        assert sentence in lines
    assert any(line.split("  ")[0] == "On its way back" for line in lines)


@pytest.mark.parametrize(
    "named",
    [
        (),
        ("p",),
        ("p", "7", "--id", "1:0"),
        ("--id", "1:0", "--trace", TRACE),
        ("--trace", TRACE, "--since", "latest"),
    ],
)
async def test_a_message_is_named_in_one_way(bare: CommandLine, named: tuple[str, ...]) -> None:
    ended = await bare("message", "life", "t", *named, "-o", "json")
    assert (ended.code, ended.error["reason"]) == (2, "WRONG_USAGE")


@pytest.mark.parametrize(
    ("named", "because"),
    [
        (("nobody", "1"), "this producer is unknown"),
        (("p", "9"), "its producer's last stored sequence id is 7"),
        (("p", "3"), "a higher sequence id of its producer was stored first"),
        (("--id", "9:0"), "the topic has no such message yet"),
        (("--trace", TRACE), "no message of the trace among 1 entries"),
    ],
)
async def test_a_message_that_is_not_in_the_log_is_not_found(
    seqgate: CommandLine, stack: Stack, topic: str, named: tuple[str, ...], because: str
) -> None:
    async with (
        connect(stack.address("ledger")) as client,
        client.producer(topic, name="p") as producer,
    ):
        await producer.send(b"a", sequence_id=7)
    ended = await seqgate("message", "life", topic, *named, "-o", "json")
    assert (ended.code, ended.out) == (1, "")
    assert ended.error["reason"] == "MESSAGE_NOT_FOUND"
    assert ended.error["message"].startswith(f"not in the log: {because}")
    assert ended.error["details"]["topic"] == topic


async def test_an_entry_that_is_not_in_the_log_is_not_explained(
    seqgate: CommandLine, topic: str
) -> None:
    await seqgate("topic", "create", topic)
    await seqgate("subscription", "create", topic, "s")
    ended = await seqgate("subscription", "explain", topic, "s", "--id", "9:0", "-o", "json")
    assert (ended.code, ended.out, ended.error["reason"]) == (1, "", "MESSAGE_NOT_FOUND")
