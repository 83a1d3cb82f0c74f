"""The sink: each row is stored once, whatever is killed and started again."""

import asyncio
import json
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, create_subprocess_exec
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import pytest_asyncio
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit

from seqgate.client import Message, connect
from seqgate.errors import MessageTooLargeError
from seqgate.spark._rows import SLICE_BYTES, measured, staged
from seqgate.spark._sink import SeqgateWriter, WriteOptions
from seqgate.spark._staging import StagedRowsLostError
from tests.integration.services import Services, running
from tests.spark.sink_process import PAYLOAD_BYTES
from tests.support.depth import some_of, times
from tests.support.jobs import PATIENCE_S, WORKERS, Rebuild, quick_spark
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(600)  # Spark starts slowly

POLICIES = """
[namespace."public/plain"]
enabled = false

[namespace."public/forgetful"]
max_producers = 1
"""


@dataclass(frozen=True)
class Sink:
    """Writes with a staging folder, and what the topics have then."""

    services: Services
    staging: Path

    @property
    def ledger(self) -> str:
        return self.services.stack.address("ledger")

    def options(self, topic: str, job: str = "job", **options: str) -> dict[str, str]:
        given = {"ledger": self.ledger, "topic": topic, "job": job, "staging": str(self.staging)}
        return {name: value for name, value in (given | options).items() if value}

    def save(self, rows: DataFrame, topic: str, job: str = "job", **options: str) -> None:
        given = self.options(topic, job, **options)
        rows.write.format("seqgate").options(**given).mode("append").save()

    async def stored(self, topic: str) -> list[Message]:
        async with connect(self.ledger) as client, client.reader(topic, follow=False) as reader:
            return [message async for message in reader]

    async def entries(self, topic: str) -> int:
        """The number of entries; 0: the topic does not exist either."""
        found = [each for each in await self.services.topics(topic) if each.name == topic]
        return len(await self.services.ids(topic)) if found else 0

    def manifest(self, job: str = "job", epoch: int = 0) -> Path:
        return self.staging / job / f"epoch-{epoch}.json"

    def files(self, job: str = "job") -> list[Path]:
        return list((self.staging / job).glob("rows-*"))


@pytest_asyncio.fixture(scope="module")
async def sink_services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    async with running(tmp_path_factory.mktemp("sink"), policies=POLICIES) as services:
        yield services


@pytest.fixture
def sink(sink_services: Services, tmp_path: Path) -> Sink:
    return Sink(sink_services, tmp_path / "staging")


def sink_rows(spark: SparkSession, count: int, partitions: int = 3) -> DataFrame:
    """The same rows as sink_process's."""
    return spark.range(0, count, 1, partitions).selectExpr(
        f"lpad(cast(id as string), {PAYLOAD_BYTES}, '0') as payload",
        "concat('key-', cast(id % 7 as string)) as key",
    )


async def assert_once(sink: Sink, topic: str, count: int, job: str = "job") -> None:
    messages = await sink.stored(topic)
    assert sorted(int(each.payload) for each in messages) == list(range(count))
    by_id = sorted(messages, key=lambda each: each.sequence_id)
    assert [each.sequence_id for each in by_id] == list(range(count))
    assert {each.producer_name for each in messages} == {job}


async def test_all_columns_arrive_in_the_order_of_the_rows(sink: Sink, spark: SparkSession) -> None:
    rows = spark.sql("""
        select encode(concat('p', id), 'utf-8') as payload,
               if(id % 2 = 0, concat('key ü', id), null) as key,
               if(id % 3 = 0, cast('order' as binary), null) as ordering_key,
               if(id % 5 = 0, null, map('a', cast(id as string), 'b', '')) as properties,
               if(id % 7 = 0, null, timestamp_millis(1700000000000 + id)) as event_time
        from range(0, 100, 1, 4)
    """)
    sink.save(rows, "columns")
    messages = sorted(await sink.stored("public/default/columns"), key=lambda m: m.sequence_id)
    assert [each.payload for each in messages] == [b"p%d" % n for n in range(100)]
    for n, each in enumerate(messages):
        assert each.sequence_id == n
        assert each.key == (None if n % 2 else f"key ü{n}")
        assert each.ordering_key == (None if n % 3 else b"order")
        assert each.properties == ({} if n % 5 == 0 else {"a": str(n), "b": ""})
        assert each.event_time_ms == (None if n % 7 == 0 else 1_700_000_000_000 + n)


@pytest.mark.parametrize(
    ("options", "columns", "complaint"),
    some_of(
        [
            ({"job": ""}, "'a' as payload", "option job is required: an id of your choice"),
            ({"job": "a/b"}, "'a' as payload", "option job must be 1 to 200 letters"),
            ({"staging": ""}, "'a' as payload", "option staging is required"),
            ({"staging": "s3://bucket"}, "'a' as payload", "absolute path of a folder"),
            ({"topic": ""}, "'a' as payload", "option topic is required"),
            ({"topic": "a/b"}, "'a' as payload", "option topic"),
            ({"resume": "yes"}, "'a' as payload", "true or false"),
            ({}, "'a' as value", "unknown column value, expected payload"),
            ({}, "'a' as key", "column payload is required"),
            ({}, "1 as payload", "column payload must be binary or string"),
            ({}, "'a' as payload, 1 as event_time", "column event_time must be bigint"),
            ({}, "'a' as payload, 'a' as PAYLOAD", "unknown column PAYLOAD"),
            ({}, "cast(null as string) as payload", "InvalidRowError: payload is null"),
            ({}, "'a' as payload, -1L as event_time", "before 1970"),
            ({}, "'a' as payload, map('a', cast(null as string)) as properties", "has a null"),
            ({}, "'a' as payload, repeat('k', 200000) as key", "take 200,000 bytes"),
        ],
        every=4,
    ),
)
async def test_what_cannot_be_written_is_refused_before_anything_is_sent(
    sink: Sink, spark: SparkSession, options: dict[str, str], columns: str, complaint: str
) -> None:
    rows = spark.sql(f"select {columns}")
    with pytest.raises(PySparkException, match=complaint):
        sink.save(rows, **{"topic": "refused", **options})
    assert not await sink.services.topics("public/default/refused")


def test_a_log_is_not_overwritten(sink: Sink, spark: SparkSession) -> None:
    writer = sink_rows(spark, 1).write.format("seqgate").options(**sink.options("over"))
    with pytest.raises(PySparkException, match="only appended to"):
        writer.mode("overwrite").save()


async def test_the_same_rows_again_are_stored_once_however_they_are_divided(
    sink: Sink, spark: SparkSession
) -> None:
    sink.save(sink_rows(spark, 500), "again")
    sink.save(sink_rows(spark, 500, partitions=2).repartition(3), "again")
    await assert_once(sink, "public/default/again", 500)
    assert sink.files() == []


async def test_other_rows_under_the_same_id_fail_unless_the_staged_ones_are_wanted(
    sink: Sink, spark: SparkSession
) -> None:
    sink.save(sink_rows(spark, 50), "other")
    for rows in (sink_rows(spark, 51), sink_rows(spark, 50).withColumn("key", lit("other"))):
        with pytest.raises(PySparkException, match=r"OtherRowsError.*50 rows for public/default"):
            sink.save(rows, "other")
    with pytest.raises(PySparkException, match="OtherRowsError"):
        sink.save(sink_rows(spark, 50), "elsewhere")
    sink.save(sink_rows(spark, 51), "other", resume="true")
    await assert_once(sink, "public/default/other", 50)
    sink.save(sink_rows(spark, 0), "other", job="empty")
    sink.save(sink_rows(spark, 0), "other", job="empty")
    await assert_once(sink, "public/default/other", 50)


async def test_without_its_staging_folder_a_job_that_began_is_refused(
    sink: Sink, spark: SparkSession, tmp_path: Path
) -> None:
    sink.save(sink_rows(spark, 50), "lost")
    emptied = replace(sink, staging=tmp_path / "emptied")
    with pytest.raises(PySparkException, match=r"StagingLostError.* up to id 49"):
        emptied.save(sink_rows(spark, 50), "lost")
    await assert_once(sink, "public/default/lost", 50)


async def test_a_topic_that_does_not_deduplicate_is_refused(
    sink: Sink, spark: SparkSession
) -> None:
    for _ in range(2):
        with pytest.raises(PySparkException, match=r"does not deduplicate"):
            sink.save(sink_rows(spark, 50), "public/plain/topic")
    await assert_once(sink, "public/plain/topic", 1)


async def test_rows_larger_than_an_entry_are_cut_into_chunks(
    sink: Sink, spark: SparkSession
) -> None:
    sink.save(spark.sql("select repeat('a', 6000000) as payload union all select 'b'"), "large")
    found = {len(each.payload) for each in await sink.stored("public/default/large")}
    assert found == {6_000_000, 1}


def test_rows_are_staged_in_slices_of_a_bounded_size() -> None:
    schema = pa.schema([("payload", pa.binary())])
    batch = pa.record_batch([pa.array([bytes(1_000_000)] * 40, pa.binary())], schema=schema)
    slices = list(staged(batch, schema))
    assert sum(each.num_rows for each in slices) == 40
    assert all(each.nbytes <= SLICE_BYTES for each in slices)
    assert sum(measured(each)[0] for each in slices) % 2**128 == measured(batch)[0]


# ---- kills


def dying(spark: SparkSession, count: int, marker: Path, at: int) -> DataFrame:
    """The rows, whose third task kills its worker at its row `at`: once."""

    def die_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in range(0, batch.num_rows, 50):
                part = batch.slice(row, 50)
                if int(part.column(0)[0].as_py()) >= at and not marker.exists():
                    marker.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield part

    rows = sink_rows(spark, count)
    return rows.mapInArrow(die_once, rows.schema)


@pytest.mark.parametrize("at", some_of([600, 750], every=2))
async def test_a_worker_killed_while_staging_leaves_nothing_sent_and_nothing_twice(
    sink: Sink, spark: SparkSession, tmp_path: Path, at: int
) -> None:
    rows, topic = dying(spark, 900, tmp_path / "died", at), f"public/default/worker-{at}"
    with pytest.raises(Exception, match="worker exited"):  # a local session tries a task once
        sink.save(rows, topic)
    assert await sink.entries(topic) == 0
    assert not sink.manifest().exists()
    sink.save(rows, topic)
    await assert_once(sink, topic, 900)


COUNT = 20_000


@pytest.mark.parametrize("entries", some_of([60, 0, 1, 140], every=4))
async def test_a_driver_killed_while_sending_sends_the_rest_when_started_again(
    sink: Sink, spark: SparkSession, entries: int
) -> None:
    topic = f"public/default/driver-{entries}"
    arguments = [sink.ledger, topic, "job", str(sink.staging), str(COUNT)]
    command = [sys.executable, "-m", "tests.spark.sink_process", *arguments]
    process = await create_subprocess_exec(*command, stdout=DEVNULL)

    async def reached() -> bool:
        assert process.returncode is None or sink.manifest().exists()
        return sink.manifest().exists() and await sink.entries(topic) >= entries

    await eventually(reached)
    if process.returncode is None:
        process.kill()
    await process.wait()
    sink.save(sink_rows(spark, COUNT), topic)
    await assert_once(sink, topic, COUNT)
    assert sink.files() == []


async def test_a_driver_killed_before_it_notes_that_all_is_sent_sends_nothing_again(
    sink: Sink, spark: SparkSession
) -> None:
    """Not even if deduplication has forgotten the producer meanwhile."""
    topic = "public/forgetful/topic"
    sink.save(sink_rows(spark, 100), topic)
    sink.save(sink_rows(spark, 1), topic, job="next")

    async def forgotten() -> bool:
        return "job" not in await sink.services.producers(topic)

    await eventually(forgotten)
    manifest = json.loads(sink.manifest().read_text())
    assert manifest["sent"]
    sink.manifest().write_text(json.dumps(manifest | {"sent": False}))
    sink.save(sink_rows(spark, 100), topic)
    assert [each.producer_name for each in await sink.stored(topic)] == ["job"] * 100 + ["next"]


@asynccontextmanager
async def writing(sink: Sink, topic: str, rows: int, folder: Path) -> AsyncIterator[Rebuild]:
    """A write as a job of its own, of which nothing is left at the end."""
    arguments = [sink.ledger, topic, "job", str(sink.staging), str(rows)]
    folder.mkdir(exist_ok=True)
    errors = folder / "job.err"
    with errors.open("wb") as stderr:
        process = await create_subprocess_exec(
            *[sys.executable, "-m", "tests.spark.sink_job", *arguments],
            stdout=PIPE,
            stderr=stderr,
            env={**os.environ, **quick_spark(folder)},
            start_new_session=True,
        )
    job = Rebuild(process, errors)
    try:
        yield job
    finally:
        await job.end()


EXECUTOR = b"CoarseGrainedExecutorBackend"

ROWS = times(quick=2_000, full=200_000)


@pytest.mark.deep
@pytest.mark.timeout(1800)  # a cluster starts seven times
async def test_a_cluster_killed_at_every_stage_stores_each_row_once(
    sink: Sink, tmp_path: Path
) -> None:
    topic = "public/default/cluster"

    def staging() -> bool:
        return len(sink.files()) >= 2

    def staged_most() -> bool:
        return len(sink.files()) >= 6

    def decided() -> bool:
        return sink.manifest().exists()

    async def sending() -> bool:
        return await sink.entries(topic) >= 30

    async def sent() -> bool:
        return (await last_id(sink, topic)) == ROWS - 1

    async with writing(sink, topic, ROWS, tmp_path / "early") as job:
        await job.runs(EXECUTOR)  # and is killed before anything is staged
    for name, state in (("staging", staging), ("decided", decided), ("sending", sending)):
        async with writing(sink, topic, ROWS, tmp_path / name) as job:
            await eventually(state, within_s=PATIENCE_S)
        assert not (name == "staging" and decided())
    async with writing(sink, topic, ROWS, tmp_path / "again") as job:
        if not decided():
            await eventually(staged_most, within_s=PATIENCE_S)
        await eventually(sent, within_s=PATIENCE_S)  # perhaps before it is noted
    for name in ("last", "repeated"):
        async with writing(sink, topic, ROWS, tmp_path / name) as job:
            assert await job.ended() == 0, job.warned
    await assert_once(sink, topic, ROWS)


@pytest.mark.deep
async def test_executors_and_workers_killed_while_staging_cost_only_time(
    sink: Sink, tmp_path: Path
) -> None:
    """Spark runs their tasks again, and slow ones twice."""
    topic = "public/default/executors"
    async with writing(sink, topic, ROWS, tmp_path / "job") as job:
        await job.runs(EXECUTOR)
        for count, command in ((1, WORKERS), (2, EXECUTOR), (4, WORKERS)):
            await eventually(partial(has_staged, sink, count), within_s=PATIENCE_S)
            await job.runs(command)
            victim = [each for each in job.members() if command in each.command][-1]
            os.kill(victim.pid, signal.SIGKILL)
        assert await job.ended() == 0, job.warned
    await assert_once(sink, topic, ROWS)


def has_staged(sink: Sink, files: int) -> bool:
    return len(sink.files()) >= files or sink.manifest().exists()


async def last_id(sink: Sink, topic: str) -> int | None:
    """The last sequence id that deduplication knows of the job."""
    producers = await sink.services.producers(topic) if await sink.entries(topic) else {}
    return producers["job"].persisted_sequence_id if "job" in producers else None


def tasks_of(writer: SeqgateWriter, count: int, tasks: int) -> list[Any]:
    """What the tasks of a write tell the driver."""
    size = count // tasks
    payloads = [f"{number}".encode() for number in range(count)]
    batches = [
        pa.record_batch([pa.array(payloads[n * size : (n + 1) * size])], names=["payload"])
        for n in range(tasks)
    ]
    return [replace(writer.write(iter([each])), partition=n) for n, each in enumerate(batches)]


async def driven(writer: SeqgateWriter, tasks: list[Any]) -> None:
    """Commit in a process of its own, as Spark does."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, writer.commit, tasks)


async def test_two_drivers_of_a_job_send_the_rows_of_the_first_manifest(sink: Sink) -> None:
    """The first one was taken for dead. The attempts of tasks that Spark ran twice do not count."""
    topic = "public/default/two"
    schema = pa.schema([("payload", pa.binary())])
    writer = SeqgateWriter(WriteOptions.parse(sink.options(topic)), schema)
    first, second = tasks_of(writer, 100, 4), tasks_of(writer, 100, 2)
    tasks_of(writer, 100, 4)  # speculative, and killed before the driver heard of it
    await driven(writer, second)
    await driven(writer, first)
    await assert_once(sink, topic, 100)
    assert len(sink.files()) == 4


async def test_a_damaged_file_is_noticed_before_its_rows_are_sent(sink: Sink) -> None:
    topic = "public/default/damaged"
    schema = pa.schema([("payload", pa.binary())])
    writer = SeqgateWriter(WriteOptions.parse(sink.options(topic)), schema)
    tasks = tasks_of(writer, 100, 1)
    (file,) = sink.files()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(StagedRowsLostError, match="not as it was staged"):
        await driven(writer, tasks)
    file.write_bytes(whole)
    await driven(writer, tasks)
    await assert_once(sink, topic, 100)


async def test_a_row_above_the_ledgers_limit_is_refused_before_anything_is_sent(sink: Sink) -> None:
    schema = pa.schema([("payload", pa.binary())])
    writer = SeqgateWriter(WriteOptions.parse(sink.options("too-large")), schema)
    (task,) = tasks_of(writer, 100, 1)
    with pytest.raises(MessageTooLargeError, match="a row of 1,099,511,627,776 bytes is too"):
        await driven(writer, [replace(task, message_bytes_max=2**40)])
    assert not sink.manifest().exists()
    assert await sink.entries("public/default/too-large") == 0


# ---- streams


@dataclass(frozen=True)
class Stream:
    """A stream of files of a hundred rows, each file an epoch."""

    sink: Sink
    spark: SparkSession
    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def add(self, epoch: int, first: int) -> None:
        path = self.folder / f"input/{epoch}"
        rows = self.spark.range(first, first + 100, 1, 2)
        rows.selectExpr("cast(id as string) as payload").write.parquet(str(path))

    def run(self, topic: str, **options: str) -> None:
        """Write the epochs that are not committed."""
        reader = self.spark.readStream.schema("payload string").option("maxFilesPerTrigger", 2)
        rows = reader.parquet(str(self.folder / "input/*"))
        writer = rows.writeStream.format("seqgate").options(**self.sink.options(topic, **options))
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()

    def uncommit(self, epoch: int) -> None:
        """Have Spark run the epoch again, as if it was killed before it noted its end."""
        for name in (f"{epoch}", f".{epoch}.crc"):
            (self.checkpoint / "commits" / name).unlink()


@pytest.fixture
def stream(sink: Sink, spark: SparkSession, tmp_path: Path) -> Stream:
    return Stream(sink, spark, tmp_path)


async def assert_epochs(stream: Stream, topic: str, epochs: int) -> None:
    """Each row is stored once, and a row's id is its epoch and its number."""
    messages = await stream.sink.stored(topic)
    assert sorted(int(each.payload) for each in messages) == list(range(100 * epochs))
    assert [each.sequence_id for each in messages] == [
        (epoch << 32) + number for epoch in range(epochs) for number in range(100)
    ]


async def test_an_epoch_that_runs_again_is_stored_once(stream: Stream) -> None:
    topic = "public/default/epochs"
    for epoch in range(2):
        stream.add(epoch, 100 * epoch)
        stream.run(topic)
    stream.uncommit(1)
    stream.run(topic)
    manifest = stream.sink.manifest(epoch=1)
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"sent": False}))
    stream.uncommit(1)
    stream.add(2, 200)
    stream.run(topic)
    await assert_epochs(stream, topic, 3)
    assert stream.sink.files() == []


async def test_an_epoch_with_other_rows_than_before_is_refused(stream: Stream) -> None:
    topic = "public/default/other-epochs"
    stream.add(0, 0)
    stream.run(topic)
    shutil.rmtree(stream.checkpoint)
    shutil.rmtree(stream.folder / "input")
    stream.add(0, 100)
    with pytest.raises(StreamingQueryException, match="OtherRowsError"):
        stream.run(topic)
    shutil.rmtree(stream.sink.staging)
    with pytest.raises(StreamingQueryException, match=r"StagingLostError.* up to id 99"):
        stream.run(topic)
    await assert_epochs(stream, topic, 1)


def test_a_stream_needs_the_id_of_a_job(stream: Stream) -> None:
    stream.add(0, 0)
    with pytest.raises((PySparkException, StreamingQueryException), match="option job is required"):
        stream.run("public/default/no-job", job="")
