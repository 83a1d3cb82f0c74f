"""Commands show the largest and the smallest values that may be stored."""

import pytest
from grpc import aio

from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.dev.stack import Stack
from seqgate.times import TIME_MAX_MS
from seqgate.types import SEQUENCE_ID_MAX
from tests.cli.command_line import CommandLine
from tests.support.extremes import FIELDS, FIRST_ID, store_extremes


@pytest.fixture
async def extreme(stack: Stack, topic: str) -> str:
    async with aio.insecure_channel(stack.address("ledger")) as channel:
        await store_extremes(LedgerServiceStub(channel), topic)
    return topic


async def test_messages_are_printed_whatever_their_times_are(
    seqgate: CommandLine, extreme: str
) -> None:
    read = (await seqgate("read", extreme, "-o", "json")).records
    assert [each["sequence_id"] for each in read] == list(range(FIRST_ID, SEQUENCE_ID_MAX + 1))
    for each, fields in zip(read, FIELDS.values(), strict=True):
        assert each["publish_time_ms"] == fields["publish_time"]
        assert each["event_time_ms"] == fields["event_time"]
    assert len((await seqgate("topic", "tail", extreme)).rows) == len(FIELDS) + 1


async def test_a_delayed_message_is_explained_and_its_life_told_at_every_time(
    seqgate: CommandLine, extreme: str
) -> None:
    await seqgate("subscription", "create", extreme, "s")
    consuming = ("consume", extreme, "s", "--type", "shared", "-n", "1")
    await seqgate(*consuming)
    for number, fields in enumerate(FIELDS.values()):
        where = ("message", "life", extreme, "--id", f"1:{number}")
        assert "Published" in (await seqgate(*where)).out
        life = (await seqgate(*where, "-o", "json")).record
        assert life["message"]["publish_time_ms"] == fields["publish_time"]
        (subscription,) = life["subscriptions"]
        if number:
            until_ms = min(fields["deliver_at_time"], TIME_MAX_MS)
            assert subscription["reasons"][0]["until_ms"] in (None, until_ms)
