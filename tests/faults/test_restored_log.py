"""A log that was replaced by an older copy of itself, beside a newer Redis and newer cursors: after
`seqgate admin renew`, what the copy lacks is published again, exactly once."""

import asyncio
import shutil
from pathlib import Path

import apsw
import pytest

from seqgate.client import Client, connect
from seqgate.dev.stack import Stack
from tests.cli.command_line import CommandLine
from tests.support.nursery import Nursery
from tests.support.waiting import eventually

TOPIC = "public/default/orders"
LOST = "public/default/made-since"

pytestmark = pytest.mark.timeout(300)


async def publish(client: Client, topic: str, numbers: range) -> list[bool]:
    """Publish these. Returns whether each was a duplicate."""
    async with client.producer(topic, name="p") as producer:
        return [
            (await producer.send(b"%d" % number, sequence_id=number)).duplicate
            for number in numbers
        ]


async def consume(client: Client, topic: str, count: int) -> list[bytes]:
    async with client.consumer(topic, "s") as consumer:
        taken = []
        for _ in range(count):
            message = await consumer.receive()
            taken.append(message.payload)
            await consumer.ack(message)
        return taken


async def read(client: Client, topic: str) -> list[bytes]:
    async with client.reader(topic, follow=False) as reader:
        return [message.payload async for message in reader]


async def test_what_a_restored_log_lacks_is_published_again(
    tmp_path: Path, nursery: Nursery
) -> None:
    async with Stack(tmp_path / "stack") as stack:
        seqgate = CommandLine(
            nursery,
            {
                f"SEQGATE_{each.upper()}": stack.address(each)
                for each in ("ledger", "dedup", "cursor", "dispatcher")
            },
        )
        async with connect(
            stack.address("ledger"), dispatcher=stack.address("dispatcher")
        ) as client:
            assert not any(await publish(client, TOPIC, range(20)))
            copy = tmp_path / "copy.db"
            apsw.Connection(str(stack.store("ledger"))).execute("VACUUM INTO ?", (str(copy),))
            assert not any(await publish(client, TOPIC, range(20, 40)))
            assert not any(await publish(client, LOST, range(5)))
            assert await consume(client, TOPIC, 30) == [b"%d" % each for each in range(30)]
            assert len(await consume(client, LOST, 5)) == 5

            await stack.terminate("dispatcher")  # it remembers entries that will be gone
            await stack.terminate("ledger")
            for each in stack.store("ledger").parent.glob("ledger.db*"):
                each.unlink()
            shutil.copy(copy, stack.store("ledger"))
            await stack.run("ledger")
            await stack.run("dispatcher")
            # Traffic goes on meanwhile: nothing is acknowledged that the log does not have.
            traffic = asyncio.create_task(publish(client, TOPIC, range(15, 50)))
            renewed = await seqgate("admin", "renew", "-o", "json")
            records = {each["topic"]: each for each in renewed.records}
            duplicates = await traffic
            assert records[TOPIC]["cursors_beyond"] == ["s"]
            assert records[LOST]["cursors_beyond"] == ["s"]
            assert records[LOST]["ledger_id"] is None
            assert duplicates == [True] * 5 + [False] * 30
            assert await read(client, TOPIC) == [b"%d" % each for each in range(50)]
            assert not any(await publish(client, LOST, range(5)))
            # What was published again is delivered again: it has ids that no cursor knows.
            assert await consume(client, TOPIC, 30) == [b"%d" % each for each in range(20, 50)]
            assert len(await consume(client, LOST, 5)) == 5
            again = await seqgate("admin", "renew", "-o", "json")
            assert {each["topic"]: each["cursors_beyond"] for each in again.records} == {
                TOPIC: [],
                LOST: [],
            }
            await eventually(lambda: publish(client, TOPIC, range(50, 51)))
