"""`seqgate subscription`."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import aio
from grpc_status import rpc_status

from seqgate.api.internal.cursor.v1 import lease_pb2
from seqgate.client import AfterDeadLetter, Batching, Client, SubscriptionOptions, connect
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import Stack
from seqgate.services.dispatcher.ports import NotOwner
from seqgate.services.runtime.status import status_of
from seqgate.times import duration
from tests.cli.command_line import CommandLine, Ended
from tests.support.stubs import cursor_stub
from tests.support.waiting import eventually


@pytest_asyncio.fixture
async def consuming(stack: Stack) -> AsyncIterator[Client]:
    """A client of the ledger and the dispatcher services."""
    async with connect(stack.address("ledger"), stack.address("dispatcher")) as client:
        yield client


@pytest_asyncio.fixture
async def stored(client: Client, topic: str) -> str:
    """A topic with six messages, of keys k0 and k1 in turn."""
    async with client.producer(topic, name="p") as producer:
        for number in range(6):
            await producer.send(b"message", key=f"k{number % 2}")
    return topic


@asynccontextmanager
async def sending_on(owner: Callable[[], str]) -> AsyncIterator[str]:
    """A dispatcher service that redirects to the owner; yields its address."""

    async def refuse(_request: object, context: Any) -> None:
        error = NotOwner("another instance has the subscription", owner=owner())
        await context.abort_with_status(rpc_status.to_status(status_of(error)))

    handler = grpc.method_handlers_generic_handler(
        "seqgate.api.dispatcher.v1.DispatcherService",
        {"GetSubscription": grpc.unary_unary_rpc_method_handler(refuse)},
    )
    server = aio.server()
    server.add_generic_rpc_handlers([handler])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


# ---- create, list, show, set, delete


async def test_a_subscription_is_created_once(seqgate: CommandLine, stored: str) -> None:
    create = ("subscription", "create", stored, "s")
    table = await seqgate(*create, "--property", "team=billing", "--property", "a=b=c")
    again = await seqgate(*create, "--from", "latest", "-o", "json")

    lines = [(row[0] or row[1], row[-1]) for row in table.rows if len(row) > 1]
    assert [each for each in lines if each[0] != "Since"] == [
        ("Topic", stored),
        ("Subscription", "s"),
        ("Mark-delete position", "-"),
        ("Entries acknowledged beyond", "0"),
        ("Properties", "2"),
        ("property", "a = b=c"),
        ("property", "team = billing"),
        ("Owner", "-"),
        ("Created", "now"),
    ]
    assert again.record.pop("created_ms") > 0
    assert {**again.record, "created_ms": 0} == {
        "topic": stored,
        "subscription": "s",
        "created_ms": 0,
        "mark_delete": None,
        "acknowledged_entries": 0,
        "properties": {"a": "b=c", "team": "billing"},
        "owner": None,
        "created": False,
    }


async def test_a_subscription_starts_at_the_given_position(
    seqgate: CommandLine, client: Client, stored: str
) -> None:
    before_ms = time.time_ns() // 1_000_000
    async with client.producer(stored, name="q", batching=Batching(messages_max=2)) as producer:
        await asyncio.gather(producer.send_nowait(b"a"), producer.send_nowait(b"b"))
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(before_ms / 1000))
    places = {
        "earliest": None,
        "latest": "1:6",
        "1:3": "1:2",
        "1:6:-1:1": "1:5",  # in a batch: all of it is delivered next
        f"{moment}.{before_ms % 1000:03}Z": "1:5",
        "1970-01-02": None,
        datetime.now(timezone(timedelta(hours=1))).isoformat(): "1:6",
    }

    async def created(number: int, place: str) -> Ended:
        name = f"s{number}"
        return await seqgate("subscription", "create", stored, name, "--from", place, "-o", "json")

    ended = await asyncio.gather(*(created(*each) for each in enumerate(places)))
    assert [each.record["mark_delete"] for each in ended] == list(places.values())


async def test_subscriptions_are_listed_by_name(seqgate: CommandLine, stored: str) -> None:
    await seqgate("subscription", "create", stored, "b", "--from", "1:4")
    await seqgate("subscription", "create", stored, "a", "--property", "x=y")

    table, listed, shown = await asyncio.gather(
        seqgate("subscription", "ls", stored),
        seqgate("subscription", "ls", stored, "-o", "json"),
        seqgate("subscription", "show", stored, "b", "-o", "json"),
    )

    assert table.rows == [
        ["SUBSCRIPTION", "MARK-DELETE", "BEYOND", "PROPERTIES", "OWNER"],
        ["a", "-", "0", "1", "-"],
        ["b", "1:3", "0", "0", "-"],
    ]
    assert [each["subscription"] for each in listed.records] == ["a", "b"]
    assert listed.records[1] == shown.record


async def test_properties_are_put_and_removed(seqgate: CommandLine, stored: str) -> None:
    await seqgate("subscription", "create", stored, "s", "--property", "a=1", "--property", "b=2")
    changed = await seqgate(
        *("subscription", "set", stored, "s", "--put", "c=3", "--put", "a="),
        *("--remove", "b", "--remove", "never", "-o", "json"),
    )
    assert changed.record["properties"] == {"a": "", "c": "3"}


async def test_a_deleted_subscription_is_gone(seqgate: CommandLine, stored: str) -> None:
    await seqgate("subscription", "create", stored, "s")
    first = await seqgate("subscription", "rm", stored, "s", "--yes")
    again = await seqgate("subscription", "rm", stored, "s", "-o", "json", "--yes")
    assert first == Ended(0, "", "")
    assert (again.code, again.error["reason"]) == (1, "SUBSCRIPTION_NOT_FOUND")


async def test_a_subscription_in_use_is_deleted_by_force(
    seqgate: CommandLine, consuming: Client, stored: str
) -> None:
    consumer = consuming.consumer(stored, "s")
    await consumer.open()
    refused = await seqgate("subscription", "rm", stored, "s", "-o", "json", "--yes")
    forced = await seqgate("subscription", "rm", stored, "s", "--force", "-o", "json", "--yes")
    await consumer.close()

    assert (refused.code, refused.error["reason"]) == (1, "SUBSCRIPTION_BUSY")
    assert forced.record == {"topic": stored, "subscription": "s", "removed": True}


async def test_a_subscription_is_moved_back(seqgate: CommandLine, stored: str) -> None:
    await seqgate("subscription", "create", stored, "s", "--from", "latest")
    moved = await seqgate("subscription", "reset", stored, "s", "--to", "1:2", "-o", "json")
    beyond = await seqgate("subscription", "reset", stored, "s", "--to", "earliest", "-o", "json")
    assert (moved.record["mark_delete"], beyond.record["mark_delete"]) == ("1:1", None)


# ---- report, explain, release-key


async def test_a_report_lists_consumers_and_blocked_keys(
    seqgate: CommandLine, consuming: Client, stored: str
) -> None:
    async with consuming.consumer(stored, "s", name="c1") as consumer:
        while (message := await consumer.receive()).key != "k0":
            pass
        await consumer.nack(message, 600)

        table, shown = await asyncio.gather(
            seqgate("subscription", "report", stored, "s"),
            seqgate("subscription", "report", stored, "s", "-o", "json"),
        )

    lines = [(row[0] or row[1], row[-1]) for row in table.rows if len(row) > 1]
    assert ("Type", "key shared") in lines
    assert ("Unacknowledged messages", "3") in lines
    assert ("withheld, retry delay", "1") in lines
    assert ("Negative acknowledgements", "1") in lines
    at = table.rows.index(
        [
            *["CONSUMER", "SLOTS", "PERMITS", "UNACKED", "DRAINING KEYS", "PARKED", "BREAKER"],
            "OLDEST DELIVERY",
        ]
    )
    consumer_row, gap, headings, key_row = table.rows[at + 1 :]
    assert consumer_row[:2] == ["c1", "1 to 65535"]
    assert consumer_row[3:7] == ["3", "0", "3", "-"]
    assert consumer_row[7].endswith(" s")
    assert gap == [""]
    assert headings[:4] == ["KEY", "REASON", "HOLDER", "OWNER"]
    assert (key_row[:4], key_row[5:]) == (["k0", "retry delay", "-", "c1"], ["1:0", "1", "0", "3"])

    record = shown.record
    assert (record["topic"], record["subscription"]) == (stored, "s")
    assert record["epoch"] >= 1
    assert record["options"]["type"] == "KEY_SHARED"
    assert record["options"]["max_unacked"] == 200_000
    (withheld,) = record["withheld"]
    assert (withheld["reason"], withheld["keys"]) == ("RETRY_DELAY", 1)
    (reported,) = record["consumers"]
    assert reported["ranges"] == [{"first": 1, "last": 65535}]
    assert (reported["consumer"], reported["unacked_messages"]) == ("c1", 3)
    (key,) = record["keys"]
    assert (key["key"], key["reason"], key["owner"]) == ("k0", "RETRY_DELAY", "c1")
    assert key["next_retry_ms"] > key["since_ms"]
    assert record["totals"]["negative_acknowledgements"] == 1


async def test_a_report_without_consumers_has_headings_only(
    seqgate: CommandLine, stored: str
) -> None:
    await seqgate("subscription", "create", stored, "s")
    table, shown = await asyncio.gather(
        seqgate("subscription", "report", stored, "s"),
        seqgate("subscription", "report", stored, "s", "-o", "json"),
    )
    assert [row[0] for row in table.rows][-3:] == ["CONSUMER", "", "KEY"]
    assert (shown.record["consumers"], shown.record["keys"]) == ([], [])


async def test_an_explanation_starts_with_the_nearest_cause(
    seqgate: CommandLine, consuming: Client, stored: str
) -> None:
    async with consuming.consumer(stored, "s", name="c1") as consumer:
        while (message := await consumer.receive()).key != "k0":
            pass
        await consumer.nack(message, 600)
        explain = ("subscription", "explain", stored, "s")
        encoded = base64.b64encode(b"k0").decode()

        sentences, of_key, by_base64, flying, absent = await asyncio.gather(
            seqgate(*explain, "--id", "1:2"),
            seqgate(*explain, "--key", "k0", "-o", "json"),
            seqgate(*explain, "--key-base64", encoded, "-o", "json"),
            seqgate(*explain, "--id", "1:1", "-o", "json"),
            seqgate(*explain, "--id", "7:7"),
        )

    first, second, gap, *fields = sentences.out.splitlines()
    assert first == "An earlier message of its key comes first (1:0)."
    assert second.startswith("A delivery failed, and its delay is not over (1:0, for ")
    assert second.endswith("Z).")
    assert gap == ""
    assert [line.split() for line in fields[:3]] == [
        ["Key", "k0"],
        ["Slot", "30776"],
        ["Owner", "c1"],
    ]
    assert of_key.record == by_base64.record
    assert (of_key.record["key"], of_key.record["id"]) == ("k0", None)
    (reason,) = of_key.record["reasons"]
    assert (reason["reason"], reason["consumer"], reason["position"]) == (
        "RETRY_DELAY",
        "c1",
        "1:0",
    )
    assert of_key.record["key_report"]["parked_entries"] == 3
    assert [each["reason"] for each in flying.record["reasons"]] == ["IN_FLIGHT"]
    assert (absent.code, absent.out) == (1, "")
    assert absent.err.startswith(
        "seqgate: not in the log: there is no entry 7:7 (MESSAGE_NOT_FOUND)"
    )


async def test_an_explanation_has_the_trace_and_the_dead_letter(
    seqgate: CommandLine, consuming: Client, topic: str
) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    given = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    async with consuming.producer(topic, name="p") as producer:
        await producer.send(b"0", key="a", properties=given)
        await producer.send(b"1", key="b", properties=given)
    explain = ("subscription", "explain", topic, "s")
    options = SubscriptionOptions(max_redeliveries=0)
    async with consuming.consumer(topic, "s", options=options) as consumer:
        messages = {message.key: message for message in [await consumer.receive() for _ in "ab"]}
        flying = await seqgate(*explain, "--key", "b", "-o", "json")
        sentences = await seqgate(*explain, "--id", "1:1")
        await consumer.nack(messages["a"], 0)

        async def buried() -> bool:
            found = await seqgate(*explain, "--id", "1:0", "-o", "json")
            reasons = [each["reason"] for each in found.record["reasons"]]
            return reasons == ["ACKNOWLEDGED", "DEAD_LETTERED"]

        await eventually(buried)
        dead = await seqgate(*explain, "--id", "1:0", "-o", "json")
        free = await seqgate(*explain, "--key", "a", "-o", "json")

    assert (flying.record["message_id"], flying.record["trace_id"]) == ("1:1", trace)
    assert f"The trace of 1:1 is {trace}." in sentences.out.splitlines()
    assert dead.record["reasons"][1]["dead_letter_topic"] == f"{topic}-s-DLQ"
    assert dead.record["trace_id"] == trace
    assert [each["reason"] for each in free.record["reasons"]] == ["UNREAD"]
    assert (free.record["message_id"], free.record["trace_id"]) == (None, None)


async def test_a_held_key_is_released(seqgate: CommandLine, consuming: Client, stored: str) -> None:
    options = SubscriptionOptions(max_redeliveries=0, after_dead_letter=AfterDeadLetter.HOLD)
    release = ("subscription", "release-key", stored, "s")
    async with consuming.consumer(stored, "s", options=options) as consumer:
        early = await seqgate(*release, "k0", "-o", "json")
        while (message := await consumer.receive()).key != "k0":
            pass
        await consumer.nack(message, 0)

        async def held() -> bool:
            report = await seqgate("subscription", "report", stored, "s", "-o", "json")
            return [each["reason"] for each in report.record["withheld"]] == ["HELD"]

        await eventually(held)
        released = await seqgate(*release, "azA=", "--base64", "-o", "json")
        while (message := await consumer.receive(20)).key != "k0":
            pass

    assert (early.code, early.error["reason"]) == (1, "KEY_NOT_HELD")
    assert released.record == {
        "topic": stored,
        "subscription": "s",
        "key": "k0",
        "released": True,
    }
    assert message.id.position == (1, 2)


# ---- ownership


async def test_a_request_is_redirected_to_the_owner_of_the_subscription(
    seqgate: CommandLine, stack: Stack, stored: str
) -> None:
    await seqgate("subscription", "create", stored, "s")
    async with sending_on(lambda: stack.address("dispatcher")) as address:
        show = ("subscription", "show", stored, "s", "-o", "json")
        ended = await seqgate(*show, "--dispatcher", address)
    assert (ended.code, ended.record["subscription"]) == (0, "s")


async def test_a_redirect_loop_ends_after_three_calls(seqgate: CommandLine, stored: str) -> None:
    asked = []
    addresses: list[str] = []

    def owner() -> str:
        asked.append(1)
        return addresses[0]

    async with sending_on(owner) as address:
        addresses.append(address)
        show = ("subscription", "show", stored, "s", "-o", "json")
        ended = await seqgate(*show, "--dispatcher", address)
    assert (ended.code, ended.error["reason"], len(asked)) == (1, "NOT_OWNER", 3)
    assert ended.error["details"]["owner"] == address
    assert ended.error["message"].startswith("the subscription is changing owners")


async def test_an_unreachable_owner_is_named(
    seqgate: CommandLine, stack: Stack, stored: str
) -> None:
    (port,) = free_ports(1)
    owner = f"127.0.0.1:{port}"
    await seqgate("subscription", "create", stored, "s")
    async with aio.insecure_channel(stack.address("cursor")) as channel:
        cursors: Any = cursor_stub(channel)
        await cursors.AcquireLease(
            lease_pb2.AcquireLeaseRequest(
                topic=stored, cursor="s", owner=owner, duration=duration(600_000)
            )
        )
    report = await seqgate("subscription", "report", stored, "s", "-o", "json")
    shown = await seqgate("subscription", "show", stored, "s", "-o", "json")
    assert (report.code, report.error["reason"]) == (3, "UNREACHABLE")
    assert report.error["message"] == f"the dispatcher service at {owner} does not answer"
    assert shown.record["owner"] == owner


# ---- usage


@pytest.mark.parametrize(
    ("arguments", "reason", "message"),
    [
        (
            ["create", "t", "s", "--from", "first"],
            "WRONG_USAGE",
            "--from must be earliest, latest, a",
        ),
        (["create", "t", "s", "--from", "1969-12-31"], "WRONG_USAGE", "--from must be earliest"),
        (["create", "t", "s", "--from=-1:-1"], "WRONG_USAGE", "--from must be earliest"),
        (["create", "t", "s", "--property", "a"], "WRONG_USAGE", "--property must be NAME=VALUE"),
        (["create", "t", "s", "--property", "=a"], "WRONG_USAGE", "--property must be NAME=VALUE"),
        (["reset", "t", "s"], "WRONG_USAGE", "Missing option '--to'"),
        (["reset", "t", "s", "--to", "9"], "WRONG_USAGE", "--to must be earliest"),
        (["set", "t", "s"], "WRONG_USAGE", "give --put or --remove"),
        (["explain", "t", "s"], "WRONG_USAGE", "give one of --key"),
        (["explain", "t", "s", "--key", "a", "--id", "1:0"], "WRONG_USAGE", "give one of --key"),
        (["explain", "t", "s", "--key-base64", "?"], "WRONG_USAGE", "--key-base64 is not base64"),
        (["explain", "t", "s", "--id", "9"], "WRONG_USAGE", "--id must be a message id"),
        (["release-key", "t", "s", "?", "--base64"], "WRONG_USAGE", "KEY is not base64"),
        (["report", "t", "s", "--keys", "1001"], "WRONG_USAGE", "Invalid value for '--keys'"),
        (["show", "a b", "s"], "INVALID_TOPIC_NAME", "topic must be tenant/namespace/name"),
        (["show", "t", "\n"], "INVALID_SUBSCRIPTION_NAME", "subscription name must be 1 to"),
        (["ls", "t", "--dispatcher", "x"], "INVALID_SETTINGS", "'x' is not HOST:PORT (--disp"),
    ],
)
def test_wrong_usage_exits_with_2(
    inside: Callable[..., Ended], arguments: list[str], reason: str, message: str
) -> None:
    ended = inside("subscription", *arguments, "-o", "json")
    assert (ended.code, ended.out) == (2, "")
    assert ended.error["reason"] == reason
    assert ended.error["message"].startswith(message)
