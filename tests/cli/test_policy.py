"""`seqgate dedup policy`."""

import asyncio
from collections.abc import Callable

import pytest

from tests.cli.command_line import CommandLine, Ended

NOTHING = {
    "enabled": None,
    "producer_inactivity_timeout_minutes": None,
    "max_producers": None,
    "on_full": None,
    "snapshot_entries": None,
    "snapshot_interval_s": None,
    "on_conflict": None,
}


async def test_a_policy_is_set_shown_and_removed(seqgate: CommandLine, topic: str) -> None:
    await seqgate("topic", "create", topic)
    said = await seqgate(
        *("dedup", "policy", "set", topic, "--disabled", "--max-producers", "5"),
        *("--on-full", "refuse", "--producer-inactivity-timeout-minutes", "0"),
        *("--snapshot-entries", "0", "--snapshot-interval-s", "86400", "--on-conflict", "refuse"),
    )
    table, shown = await asyncio.gather(
        seqgate("dedup", "policy", "show", topic),
        seqgate("dedup", "policy", "show", topic, "-o", "json"),
    )
    removed = await seqgate("dedup", "policy", "rm", topic)
    after = await seqgate("dedup", "policy", "show", topic)

    assert said.rows == [
        ["POLICY", "VALUE"],
        ["enabled", "no"],
        ["producer_inactivity_timeout_minutes", "0"],
        ["max_producers", "5"],
        ["on_full", "refuse"],
        ["snapshot_entries", "0"],
        ["snapshot_interval_s", "86400"],
        ["on_conflict", "refuse"],
    ]
    assert table.rows == [
        ["POLICY", "VALUE", "SET BY"],
        *([*row, "topic"] for row in said.rows[1:]),
    ]
    assert shown.record == {
        "topic": topic,
        "enabled": {"value": False, "source": "TOPIC"},
        "producer_inactivity_timeout_minutes": {"value": 0, "source": "TOPIC"},
        "max_producers": {"value": 5, "source": "TOPIC"},
        "on_full": {"value": "refuse", "source": "TOPIC"},
        "snapshot_entries": {"value": 0, "source": "TOPIC"},
        "snapshot_interval_s": {"value": 86400, "source": "TOPIC"},
        "on_conflict": {"value": "refuse", "source": "TOPIC"},
    }
    assert removed == Ended(0, "POLICY  VALUE\n", "")
    assert [row[2] for row in after.rows[1:]] == ["default"] * 7


async def test_a_namespace_has_a_policy_of_its_own(seqgate: CommandLine) -> None:
    await seqgate("topic", "create", "cli/policy/topic")
    namespace = ("--namespace", "cli/policy")
    said = await seqgate("dedup", "policy", "set", *namespace, "--enabled", "-o", "json")
    shown, topic = await asyncio.gather(
        seqgate("dedup", "policy", "show", "cli/policy", "-o", "json"),
        seqgate("dedup", "policy", "show", "cli/policy/topic", "-o", "json"),
    )
    again = await seqgate("dedup", "policy", "set", *namespace, "--max-producers", "3")
    removed = await seqgate("dedup", "policy", "rm", *namespace, "-o", "json")
    nothing = await seqgate("dedup", "policy", "show", "cli/policy")

    assert said.record == shown.record == {"namespace": "cli/policy", **NOTHING, "enabled": True}
    assert topic.record["enabled"] == {"value": True, "source": "NAMESPACE"}
    assert again.rows == [["POLICY", "VALUE"], ["max_producers", "3"]], "in place of all before"
    assert removed.record == {"namespace": "cli/policy", **NOTHING}
    assert nothing == Ended(0, "POLICY  VALUE\n", "")


async def test_removing_a_policy_twice_succeeds(seqgate: CommandLine, topic: str) -> None:
    await seqgate("topic", "create", topic)
    for _ in range(2):
        ended = await seqgate("dedup", "policy", "rm", topic, "-o", "json")
        assert (ended.code, ended.record) == (0, {"topic": topic, **NOTHING})


async def test_a_system_topic_is_refused_by_the_service(seqgate: CommandLine) -> None:
    ended = await seqgate("dedup", "policy", "set", "cli/tests/__t", "--enabled", "-o", "json")

    assert (ended.code, ended.error["reason"]) == (1, "INVALID_POLICY")


@pytest.mark.parametrize(
    ("arguments", "reason", "message"),
    [
        (["set"], "WRONG_USAGE", "no value given"),
        (["set", "t"], "WRONG_USAGE", "no value given"),
        (["set", "--enabled"], "WRONG_USAGE", "give either TOPIC or --namespace"),
        (["set", "t", "--namespace", "a/b", "--enabled"], "WRONG_USAGE", "give either TOPIC or"),
        (["set", "a b", "--enabled"], "INVALID_TOPIC_NAME", "topic must be"),
        (
            ["set", "--namespace", "a", "--enabled"],
            "INVALID_POLICY",
            "the namespace must be tenant/name",
        ),
        (
            ["set", "t", "--max-producers", "0"],
            "WRONG_USAGE",
            "Invalid value for '--max-producers'",
        ),
        (["set", "t", "--max-producers", "100001"], "WRONG_USAGE", "Invalid value for"),
        (["set", "t", "--on-full", "explode"], "WRONG_USAGE", "Invalid value for '--on-full'"),
        (
            ["set", "t", "--producer-inactivity-timeout-minutes", "525601"],
            "WRONG_USAGE",
            "Invalid value for",
        ),
        (["set", "t", "--snapshot-entries", "1000001"], "WRONG_USAGE", "Invalid value for"),
        (["set", "t", "--snapshot-interval-s", "-1"], "WRONG_USAGE", "Invalid value for"),
        (["rm"], "WRONG_USAGE", "give either TOPIC or --namespace"),
        (["rm", "--namespace", "a/b/c"], "INVALID_POLICY", "the namespace must be"),
        (["show"], "WRONG_USAGE", "Missing argument 'TOPIC_OR_NAMESPACE'."),
        (["show", "a/"], "INVALID_POLICY", "the namespace must be"),
        (["show", "a/b/c/d"], "INVALID_TOPIC_NAME", "topic must be"),
    ],
)
def test_wrong_usage_is_reported_before_any_call(
    inside: Callable[..., Ended], arguments: list[str], reason: str, message: str
) -> None:
    ended = inside("dedup", "policy", *arguments, "-o", "json")

    assert (ended.code, ended.out) == (2, "")
    assert ended.error["reason"] == reason
    assert ended.error["message"].startswith(message)


def test_help_lists_the_values_of_a_policy(inside: Callable[..., Ended]) -> None:
    ended = inside("dedup", "policy", "set", "--help")

    assert ended.code == 0
    for option in ("--namespace", "--enabled", "--disabled", "--on-full", "--snapshot-interval-s"):
        assert option in ended.out
