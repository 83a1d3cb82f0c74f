"""Large logs, read and streamed whole; the streaming query is killed again and again."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
import pytest_asyncio
from pyspark.sql import SparkSession

from seqgate.client import Batching, Chunking, Client, connect
from tests.spark.conftest import World
from tests.spark.test_messages import everything
from tests.support.depth import times
from tests.support.waiting import eventually

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1_800)]

TOPICS = 4
MESSAGES = times(quick=200_000, full=200_000)
KILLS = 4
PATTERN = "whole/spark/*"

Rows = list[tuple[str, str, bytes]]
"""Topic, id and payload of each message, in order."""


async def fill(client: Client, topic: str, random: Random, count: int) -> None:
    batching, chunking = Batching(messages_max=100), Chunking(2_000)
    async with (
        client.producer(topic, name="batch", batching=batching) as batch,
        client.producer(topic, name="single") as single,
        client.producer(topic, name="large", chunking=chunking) as large,
    ):
        for first in range(0, count, 1_000):
            some = [random.randbytes(random.randint(0, 120)) for _ in range(min(1_000, count))]
            await asyncio.gather(
                batch.send_many(some[:800]),
                single.send_many(some[800:-1]),
                large.send(some[-1] + random.randbytes(9_000) + str(first).encode()),
            )


@pytest_asyncio.fixture(scope="module")
async def logs(world: World, seed: int) -> Rows:
    """The rows of all topics, as a reader returns them."""
    names = [f"whole/spark/{each}" for each in range(TOPICS)]
    async with connect(world.services.stack.address("ledger")) as client:
        for number, name in enumerate(names):
            await fill(client, name, Random(seed + number), MESSAGES // TOPICS)
        read = [await everything(client, name) for name in names]
    return [(each.topic, str(each.id), each.payload) for log in read for each in log]


def rows_of(table: pa.Table) -> Rows:
    rows = zip(
        *(table[name].to_pylist() for name in ("topic", "message_id", "payload")), strict=True
    )
    return list(rows)


def test_a_large_log_is_read_whole(world: World, spark: SparkSession, logs: Rows) -> None:
    assert len(logs) == MESSAGES
    schema = "topic string, message_id string, payload binary"
    frame = world.messages(spark, PATTERN, schema, bytesPerPartition="2000000")
    assert rows_of(frame.toArrow()) == logs


async def test_a_stream_that_is_killed_writes_each_message_once(
    world: World, spark: SparkSession, logs: Rows, tmp_path: Path
) -> None:
    commits = tmp_path / "checkpoint" / "commits"
    arguments = (world.services.stack.address("ledger"), PATTERN, str(tmp_path))

    def committed() -> int:
        return len([each for each in commits.glob("*") if each.name.isdigit()])

    async def started() -> Any:
        module = "tests.spark.streaming_application"
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments), start_new_session=True
        )

    async def killed() -> None:
        before = committed()
        application = await started()
        await eventually(lambda: committed() > before or application.returncode, within_s=300)
        assert application.returncode is None, "it ended before it could be killed"
        os.killpg(application.pid, signal.SIGKILL)
        await application.wait()

    for _ in range(KILLS):
        await killed()
    application = await started()
    assert await application.wait() == 0

    table = spark.read.parquet(str(tmp_path / "rows")).toArrow()
    columns = ["topic", "ledger_id", "entry_id", "batch_index"]
    table = table.sort_by([(each, "ascending") for each in columns])
    assert rows_of(table) == logs
