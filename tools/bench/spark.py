"""Messages as a Spark data source, to Arrow, and as a sink.

    read by Spark     <  the ledger's Read, and only counted
    written by Spark  <  published by the client, in the same batches

Beside Spark's reads: DuckDB, over Parquet files of the same rows. Spark drops what it reads, and
DuckDB makes Arrow tables of it. Spark writes the rows of those files, each time as another job.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

import duckdb
from pyspark.sql import DataFrame

from seqgate.api.common.v1 import common_pb2
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client import Batching, connect
from seqgate.spark import local_session, register
from seqgate.spark._columns import connected
from tools.bench.bench import Bench
from tools.bench.figures import Measurement, rate
from tools.bench.rounds import ROUNDS, Meter, Round, check, family_cpu_s
from tools.stack.worker import in_worker

TOPIC: Final = "bench/spark/messages"
MESSAGES: Final = 200_000
BATCH: Final = 100  # messages of an entry
PAYLOAD_BYTES: Final = 100
SENT: Final = 10_000  # messages at a time
TASK_BYTES: Final = 2_000_000  # so that there are several tasks for each core

COUNTED: Final = "messages, read by Read and only counted"
ONE: Final = "messages, read by Spark on one core"
TWO: Final = "messages, read by Spark on two cores"
UNOPENED: Final = "messages, read by Spark on two cores, without payloads"
DUCKDB: Final = "the same rows as Parquet, read by DuckDB"
PUBLISHED: Final = "the same rows, published by the client in batches"
WRITTEN: Final = "rows, written by Spark exactly once"

IDENTITY: Final = "topic string, message_id string, producer string, sequence_id bigint"
"""What is read without payloads."""


async def spark(bench: Bench) -> list[Measurement]:
    """Messages a second, and their payloads' MB/s."""
    messages = bench.scaled(MESSAGES)
    async with bench.another() as own:
        ledger = own.address("ledger")
        payloads = [b"%0*d" % (PAYLOAD_BYTES, each) for each in range(messages)]
        await _publish(ledger, TOPIC, payloads, Batching(messages_max=BATCH))
        rounds = await in_worker("tools.bench.spark", ledger, messages, own.pids("ledger"))

    def figure(name: str, *limits: Measurement, payload_bytes: int | None) -> Measurement:
        return rate(name, "messages", rounds[name], *limits, payload_bytes=payload_bytes)

    counted = figure(COUNTED, payload_bytes=PAYLOAD_BYTES)
    others = [figure(each, counted, payload_bytes=PAYLOAD_BYTES) for each in (ONE, TWO, DUCKDB)]
    published = figure(PUBLISHED, payload_bytes=PAYLOAD_BYTES)
    written = figure(WRITTEN, published, payload_bytes=PAYLOAD_BYTES)
    return [counted, *others, figure(UNOPENED, payload_bytes=None), published, written]


def run(ledger: str, messages: int, pids: dict[str, int]) -> dict[str, list[Round]]:
    """The rounds of everything, after a round of what Spark compiles."""
    session = local_session("seqgate bench", **{"spark.master": "local[2]"})
    register(session)

    def frame(schema: str = "") -> DataFrame:
        options = {"ledger": ledger, "topics": TOPIC, "bytesPerPartition": str(TASK_BYTES)}
        reader = session.read.format("seqgate").options(**options)
        return (reader.schema(schema) if schema else reader).load()

    numbers = count()
    payloads = [b"%0*d" % (PAYLOAD_BYTES, each) for each in range(messages)]

    def publish() -> None:
        topic = f"bench/spark/published-{next(numbers)}"
        asyncio.run(_publish(ledger, topic, payloads, Batching()))

    with tempfile.TemporaryDirectory() as folder:
        files = f"{folder}/rows"
        frame().write.parquet(files)

        def write() -> None:
            job = f"written-{next(numbers)}"
            writer = session.read.parquet(files).select("payload").write.format("seqgate")
            writer = writer.options(ledger=ledger, topic=f"bench/spark/{job}", job=job)
            writer.option("staging", f"{folder}/staging").mode("append").save()

        calls: dict[str, Callable[[], None]] = {
            COUNTED: lambda: check(_counted(ledger), messages),
            ONE: lambda: _drop(frame().coalesce(1)),
            TWO: lambda: _drop(frame()),
            UNOPENED: lambda: _drop(frame(IDENTITY)),
            DUCKDB: lambda: check(_rows(files), messages),
            PUBLISHED: publish,
            WRITTEN: write,
        }
        write()
        done: dict[str, list[Round]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                meter = Meter(pids, ours=family_cpu_s)
                with meter:
                    call()
                done[name].append(meter.round(messages))
    session.stop()
    return done


async def _publish(ledger: str, topic: str, payloads: Sequence[bytes], batching: Batching) -> None:
    async with (
        connect(ledger) as client,
        client.producer(topic, name="p", batching=batching) as producer,
    ):
        for first in range(0, len(payloads), SENT):
            await producer.send_many(payloads[first : first + SENT])


def _drop(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _counted(ledger: str) -> int:
    start = common_pb2.Start(earliest=common_pb2.Earliest())
    with connected(ledger) as stub:
        return sum(
            each.metadata.num_messages_in_batch or 1
            for response in stub.Read(ledger_pb2.ReadRequest(topic=TOPIC, start=start))
            for each in response.entries.entries
        )


def _rows(files: str) -> int:
    with duckdb.connect() as database:
        found = database.read_parquet(f"{files}/*.parquet").to_arrow_table()
        rows: int = found.num_rows
        return rows
