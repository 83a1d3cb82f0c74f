"""Large logs, read and streamed whole; the streaming queries are killed again and again."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import pyarrow as pa
import pytest
import pytest_asyncio
from pyspark.sql import SparkSession

from seqgate.client import Batching, Chunking, Client, connect
from tests.spark.conftest import World
from tests.spark.streaming_application import JOB
from tests.spark.test_messages import everything
from tests.support.depth import times
from tests.support.jobs import PATIENCE_S
from tests.support.waiting import eventually

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1_800)]

TOPICS = 4
MESSAGES = times(quick=200_000, full=200_000)
KILLS = 4
PATTERN = "whole/spark/*"
TARGET = "public/default/copied"

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


@asynccontextmanager
async def streaming(world: World, folder: Path, into: str = "") -> AsyncIterator[Process]:
    """The streaming query, killed with its JVM and workers at the end."""
    arguments = (world.services.stack.address("ledger"), PATTERN, str(folder), into)
    module = "tests.spark.streaming_application"
    application = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments), start_new_session=True
    )
    try:
        yield application
    finally:
        with suppress(ProcessLookupError):
            os.killpg(application.pid, signal.SIGKILL)
        await application.wait()


async def reached(application: Process, state: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until a query that goes on has reached a state."""

    async def there() -> bool:
        assert application.returncode is None, "it ended before it could be killed"
        found = state()
        return found if isinstance(found, bool) else await found

    await eventually(there, within_s=PATIENCE_S)


def committed(folder: Path) -> int:
    """The number of micro-batches that Spark knows to be complete."""
    commits = (folder / "checkpoint" / "commits").glob("*")
    return len([each for each in commits if each.name.isdigit()])


class Since(NamedTuple):
    """The progress of a stream since a moment."""

    world: World
    folder: Path
    files: set[str]
    entries: int
    epoch: int

    @classmethod
    async def now(cls, world: World, folder: Path) -> "Since":
        here = cls(world, folder, set(), 0, committed(folder))
        return here._replace(files=here.staged, entries=await here.stored())

    @property
    def staged(self) -> set[str]:
        return {each.name for each in (self.folder / JOB).glob("rows-*")}

    @property
    def manifest(self) -> Path:
        return self.folder / JOB / f"epoch-{self.epoch}.json"

    async def stored(self) -> int:
        """The number of entries in the target."""
        return sum(each.entries for each in await self.world.services.topics(TARGET))

    def is_staging(self) -> bool:
        return not self.staged <= self.files

    def has_decided(self) -> bool:
        return self.manifest.exists()

    async def is_sending(self) -> bool:
        return await self.stored() > self.entries

    def has_sent(self) -> bool:
        return self.manifest.exists() and bool(json.loads(self.manifest.read_text())["sent"])

    def has_committed(self) -> bool:
        return committed(self.folder) > self.epoch


async def test_a_stream_that_is_killed_writes_each_message_once(
    world: World, spark: SparkSession, logs: Rows, tmp_path: Path
) -> None:
    for _ in range(KILLS):
        before = await Since.now(world, tmp_path)
        async with streaming(world, tmp_path) as application:
            await reached(application, before.has_committed)
    async with streaming(world, tmp_path) as application:
        assert await application.wait() == 0

    table = spark.read.parquet(str(tmp_path / "rows")).toArrow()
    columns = ["topic", "ledger_id", "entry_id", "batch_index"]
    table = table.sort_by([(each, "ascending") for each in columns])
    assert rows_of(table) == logs


STAGES = (
    *(Since.is_staging, Since.has_decided, Since.is_sending),
    *(Since.has_sent, Since.has_committed),
)


async def test_a_stream_into_a_topic_killed_at_every_stage_stores_each_message_once(
    world: World, logs: Rows, tmp_path: Path
) -> None:
    for stage in STAGES:
        before = await Since.now(world, tmp_path)
        async with streaming(world, tmp_path, TARGET) as application:
            await reached(application, partial(stage, before))
    async with streaming(world, tmp_path, TARGET) as application:
        assert await application.wait() == 0

    async with connect(world.services.stack.address("ledger")) as client:
        stored = await everything(client, TARGET)
    assert Counter(each.payload for each in stored) == Counter(payload for _, _, payload in logs)
    ids = [each.sequence_id for each in stored]
    assert ids == sorted(set(ids))
