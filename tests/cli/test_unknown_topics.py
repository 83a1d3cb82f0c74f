"""Unknown topics are errors that name them, whatever the command."""

import pytest

from tests.cli.command_line import CommandLine

TOPIC = [
    "topic show T",
    "topic tail T",
    "topic trim T 1:0",
    "topic rm T",
    "dedup status T",
    "dedup producers T",
    "dedup explain T p 1",
    "dedup snapshot T",
    "dedup policy show T",
    "dedup policy set T --max-producers 3",
    "dedup policy rm T",
    "cursor ls T",
    "cursor create T c",
    "cursor reset T c --to 2026-01-01",
    "subscription ls T",
    "subscription create T s",
    "read T",
    "top T --once",
    "subscription show T s",
    "subscription rm T s",
    "subscription reset T s --to latest",
    "subscription report T s",
    "subscription explain T s --key k",
    "subscription release-key T s k",
    "subscription set T s --put a=b",
    "subscription analyze T s",
    "subscription filter show T s",
    "consume T s -n 1",
]
"""Commands on a topic, or on a subscription of one."""

SUBSCRIPTION = [
    each for each in TOPIC if " T s" in each and not each.startswith("subscription create")
]


@pytest.mark.parametrize("command", TOPIC)
async def test_the_topic_is_named(seqgate: CommandLine, topic: str, command: str) -> None:
    arguments = [topic if each == "T" else each for each in command.split()]
    ended = await seqgate(*arguments, "-o", "json")
    assert (ended.code, ended.out) == (1, "")
    assert ended.error["reason"] == "TOPIC_NOT_FOUND"
    assert ended.error["details"]["topic"] == topic


async def test_the_subscription_is_named_if_its_topic_is_known(
    seqgate: CommandLine, topic: str
) -> None:
    await seqgate("topic", "create", topic)
    for command in SUBSCRIPTION:
        arguments = [topic if each == "T" else each for each in command.split()]
        ended = await seqgate(*arguments, "-o", "json")
        assert (ended.code, ended.out) == (1, "")
        assert ended.error["reason"] == "SUBSCRIPTION_NOT_FOUND", command
        names = {name: ended.error["details"].get(name) for name in ("topic", "subscription")}
        assert names == {"topic": topic, "subscription": "s"}


async def test_a_cursor_is_named(seqgate: CommandLine, topic: str) -> None:
    for command in ("show", "rm"):
        ended = await seqgate("cursor", command, topic, "c", "-o", "json")
        assert (ended.code, ended.error["reason"]) == (1, "CURSOR_NOT_FOUND")
        assert ended.error["details"] == {"topic": topic, "cursor": "c"}


async def test_a_log_of_an_applications_own_has_no_topic_in_the_ledger(
    seqgate: CommandLine, topic: str
) -> None:
    made = await seqgate("cursor", "create", topic, "c", "--own-log", "-o", "json")
    assert made.record["created"]
    assert (await seqgate("cursor", "ls", topic)).code == 0
    set_ = await seqgate("dedup", "policy", "set", topic, "--disabled", "--own-log")
    assert set_.code == 0
    removed = await seqgate("dedup", "policy", "rm", topic, "--own-log")
    assert removed.code == 0


async def test_without_a_ledger_no_topic_is_unknown(seqgate: CommandLine, topic: str) -> None:
    alone = seqgate.with_(SEQGATE_LEDGER="127.0.0.1:1")
    for command in (("dedup", "producers", topic), ("cursor", "ls", topic)):
        ended = await alone(*command)
        assert (ended.code, ended.err) == (0, "")
