"""Rebuilding deduplication state from the log, in bulk.

    rebuilt  <  read by Spark, then loaded  <  read as columns

Ten million entries of ten thousand producers. The services are a stack of their own, with the logs
in the ledger's store before it starts. Spark's session is in a worker.

Beside Spark: DuckDB, over the batches that the reader of the data source makes, and over Parquet
files of the same columns. Files are no substitute for the log: they say what grouping alone costs,
without getting the entries out of a ledger.
"""

import io
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from typing import Final

import duckdb
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from redis import Redis

from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.jobs.rebuild.__main__ import main as rebuild_main
from seqgate.jobs.rebuild.plan import Services, Source, Stubs, TopicPlan, plans
from seqgate.spark import local_session, register
from seqgate.spark._columns import Range, connected, read_blocks
from seqgate.spark._options import Options
from seqgate.spark._source import EntriesReader
from tools.bench import recovery
from tools.bench.bench import Bench
from tools.bench.figures import Measurement, in_series, rate
from tools.bench.logs import PRODUCERS, Logs
from tools.bench.rounds import ROUNDS, Limit, Meter, Round, check, family_cpu_s
from tools.stack.worker import in_worker

TOPICS: Final = 100
ENTRIES: Final = 100_000  # of each topic, and of PRODUCERS
COUNTED: Final = "read as columns, and only counted"
READ: Final = "read by Spark"
DUCKDB: Final = "read and grouped by DuckDB, without Spark"
FILES: Final = "the same columns as Parquet files, grouped by DuckDB"
SPARK_FILES: Final = "the same Parquet files, grouped by Spark"
REBUILT: Final = "rebuilt, from the plan to the last load"

COLUMNS: Final = pa.schema(
    {"topic": pa.string(), "producer": pa.string(), "highest_sequence_id": pa.int64()}
)
"""What Spark and DuckDB read."""

GROUPED: Final = """SELECT count(*) FROM (
    SELECT topic, producer, max(highest_sequence_id) FROM {} GROUP BY topic, producer)"""

TIMEOUT_S: Final = 60.0  # how long a service may be away


async def rebuild(bench: Bench) -> list[Measurement]:
    """Entries a second, of reading, folding and rebuilding."""
    logs = Logs("bench/rebuild/log-", bench.scaled(TOPICS), ENTRIES)
    async with bench.another(logs=[logs]) as own:
        ledger, dedup, cursor = map(own.address, ("ledger", "dedup", "cursor"))
        services = Services(ledger, dedup, cursor, TIMEOUT_S)
        pids = own.pids("ledger", "dedup", "redis")
        arguments = (services, own.stack.redis_url, logs, pids)
        rounds = await in_worker("tools.bench.rebuild", *arguments)

    def figure(name: str, *limits: Limit | Measurement) -> Measurement:
        return rate(name, "entries", rounds[name], *limits)

    counted = figure(COUNTED)
    others = [figure(each, counted) for each in (READ, DUCKDB)]
    loaded = bench.limit(recovery.loading(PRODUCERS), each=ENTRIES / PRODUCERS).value
    both = Limit("Spark's read + load, one after the other", in_series(others[0].value, loaded))
    files = figure(FILES)
    return [counted, *others, files, figure(SPARK_FILES, files), figure(REBUILT, both)]


def run(
    services: Services, redis_url: str, logs: Logs, pids: dict[str, int]
) -> dict[str, list[Round]]:
    """The rounds of everything, after a round of what Spark compiles. Driver and workers are the
    client; their Java ends with this process."""
    spark = local_session("seqgate bench")
    register(spark)
    done: dict[str, list[Round]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = _Work(services, logs, spark, f"{folder}/entries")
        calls = {
            COUNTED: work.count,
            READ: work.read,
            DUCKDB: work.group,
            FILES: work.group_files,
            SPARK_FILES: work.group_files_by_spark,
            REBUILT: work.rebuild,
        }
        work.rebuild()
        work.keep()
        work.group_files_by_spark()
        for _ in range(ROUNDS):
            with Redis.from_url(redis_url) as redis:
                redis.flushall()
            for name, call in calls.items():
                meter = Meter(pids, ours=family_cpu_s)
                with meter:
                    call()
                done.setdefault(name, []).append(meter.round(logs.topics * logs.entries))
    spark.stop()
    return done


class _Work:
    """The calls that are measured. Each checks that it saw every entry or producer."""

    def __init__(self, services: Services, logs: Logs, spark: SparkSession, files: str) -> None:
        self._services = services
        self._files = files
        self._logs = logs
        self._spark = spark
        self._topics = f"{logs.prefix}*"
        self._options = {"ledger": services.ledger, "topics": self._topics, "rows": "entries"}
        self._producers = logs.topics * PRODUCERS
        with Stubs(services) as stubs:
            found = plans(stubs, [self._topics], Source.EARLIEST, comparing=False)
            self._plans = [each for each in found if isinstance(each, TopicPlan)]
        check(len(self._plans), logs.topics)

    def count(self) -> None:
        """Read as many at a time as Spark does, and look at nothing."""
        ranges = [each for plan in self._plans for each in plan.ranges]
        cores = self._spark.sparkContext.defaultParallelism
        with connected(self._services.ledger) as stub, ThreadPoolExecutor(cores) as pool:
            counted = sum(pool.map(partial(_counted, stub), ranges))
        check(counted, self._logs.topics * self._logs.entries)

    def read(self) -> None:
        """Have Spark read, and drop it."""
        self._frame().write.format("noop").mode("overwrite").save()

    def keep(self) -> None:
        """Have Spark read, and write it to the Parquet files."""
        self._frame().write.parquet(self._files)

    def _frame(self) -> DataFrame:
        reader = self._spark.read.format("seqgate").options(**self._options)
        return reader.schema(from_arrow_schema(COLUMNS)).load()

    def group(self) -> None:
        """Have DuckDB group the batches that the data source's reader makes."""
        reader = EntriesReader(Options.parse(self._options), COLUMNS)
        batches = (batch for share in reader.partitions() for batch in reader.read(share))
        with duckdb.connect() as database:
            database.register("entries", pa.RecordBatchReader.from_batches(COLUMNS, batches))
            check(database.execute(GROUPED.format("entries")).fetchall(), [(self._producers,)])

    def group_files(self) -> None:
        with duckdb.connect() as database:
            grouped = GROUPED.format(f"'{self._files}/*.parquet'")
            check(database.execute(grouped).fetchall(), [(self._producers,)])

    def group_files_by_spark(self) -> None:
        grouped = self._spark.sql(GROUPED.format(f"parquet.`{self._files}`"))
        check([tuple(each) for each in grouped.collect()], [(self._producers,)])

    def rebuild(self) -> None:
        """The command, as it is."""
        ledger, dedup, cursor, _ = self._services
        addresses = [f"--ledger={ledger}", f"--dedup={dedup}", f"--cursor={cursor}"]
        arguments = [*addresses, "--from=earliest", "--json", self._topics]
        wrote = io.StringIO()
        with redirect_stdout(wrote), redirect_stderr(io.StringIO()):
            status = rebuild_main(arguments, self._spark)
        summary = json.loads(wrote.getvalue().splitlines()[-1])
        found = (status, summary["outcomes"], summary["producers"])
        check(found, (0, {"loaded": self._logs.topics}, self._producers))


def _counted(stub: LedgerServiceStub, wanted: Range) -> int:
    blocks = read_blocks(stub, wanted, timeout_s=TIMEOUT_S)
    return sum(block.count for group in blocks for block in group)
