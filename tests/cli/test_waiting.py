"""Commands that wait say for what, and end with 1 after --timeout."""

import asyncio
import json

from seqgate.client import Client, SubscriptionOptions, connect
from seqgate.dev.stack import Stack
from tests.cli.command_line import CommandLine
from tests.support.waiting import eventually


async def published(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p") as producer:
        await producer.send(b"a", key="k")


async def test_consume_says_that_no_message_is_left(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    await published(client, topic)
    async with seqgate.running(
        *("consume", topic, "s", "--from", "earliest", "-o", "json")
    ) as consuming:
        assert (await consuming.record())["payload"] == "a"
        note = json.loads(await consuming.wait_line())["note"]
        consuming.interrupt()
        assert (await consuming.ended()).code == 130
    assert note["reason"] == "WAITING"
    assert note["message"].startswith("waiting for messages of subscription s: ")


async def test_consume_says_which_filter_holds_a_message_back(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    await seqgate("topic", "create", topic)
    await seqgate("subscription", "create", topic, "s")
    set_ = ("subscription", "filter", "set", topic, "s")
    assert (await seqgate(*set_, 'kind=properties["kind"] == "x"')).code == 0
    await published(client, topic)
    async with seqgate.running("consume", topic, "s") as consuming:
        while "held back because a filter failed" not in (line := await consuming.wait_line()):
            pass
    assert "the oldest is 1:0: a filter failed on it" in line
    assert "kind (version 1) failed with PROPERTY_ABSENT" in line


async def test_a_wait_for_messages_ends_with_1_after_its_time_out(
    seqgate: CommandLine, client: Client, topic: str
) -> None:
    await published(client, topic)
    consume = ("consume", topic, "s", "--from", "earliest")
    follow = [("read", topic, "--follow"), ("topic", "tail", topic, "--follow")]
    for command in (consume, *follow):
        ended = await seqgate(*command, "--timeout", "3", "-o", "json")
        assert (ended.code, [each["payload"] for each in ended.records]) == (1, ["a"])
        assert ended.error["reason"] == "WAIT_TIMED_OUT"


async def test_a_wait_for_a_redrive_without_a_consumer_is_said_and_ends(
    seqgate: CommandLine, stack: Stack, topic: str
) -> None:
    options = SubscriptionOptions(max_redeliveries=0)
    async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        await published(client, topic)
        async with client.consumer(topic, "s", options=options) as consumer:
            await consumer.nack(await consumer.receive(), delay_s=0)

            async def is_dead() -> bool:
                return bool([each async for each in client.admin().dead_letters(topic, "s")])

            await eventually(is_dead)
    redrive = ("dead-letter", "redrive", topic, "s", "--all", "--wait")
    ended = await seqgate(*redrive, "--timeout", "3")
    assert (ended.code, ended.out) == (1, "")
    assert "waited 3 s for redrive 1 to end (--timeout)" in ended.err
    assert any("no consumer is connected" in each for each in ended.waits), ended.waits
    show = ("redrive", "show", topic, "s", "1")
    assert (await seqgate(*show, "--wait", "--timeout", "0.5")).code == 1
    assert (await seqgate(*show)).code == 0


async def test_publish_says_that_it_waits_for_input(seqgate: CommandLine, topic: str) -> None:
    async with seqgate.running("publish", topic, "-o", "json") as publishing:
        line = await publishing.wait_line()
        while "input from standard input" not in line:
            line = await publishing.wait_line()
        await publishing.write({"payload": "a"})
        assert (await publishing.record())["sequence_id"] == 0
        ended = await asyncio.wait_for(publishing.ended(), 60)
    assert ended.code == 0
