"""Rebuilding deduplication state from the log, in bulk.

    rebuilt  <  read and folded, then loaded  <  read as columns

The services are a stack of their own, with the logs in the ledger's store before it starts. Spark's
session is in a worker. Beside the fold: DuckDB, over the batches that the data source's reader
makes.
"""

import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from typing import Any, Final, NamedTuple

import duckdb
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from redis import Redis

from seqgate.jobs.rebuild.__main__ import ENTRIES_PER_WAVE
from seqgate.jobs.rebuild.__main__ import main as rebuild_main
from seqgate.jobs.rebuild.folding import partials
from seqgate.jobs.rebuild.loading import State
from seqgate.jobs.rebuild.plan import (
    TASKS_PER_CORE,
    Services,
    Source,
    Stubs,
    TopicPlan,
    plans,
    waves,
)
from seqgate.jobs.rebuild.source import Reading, frame, reduced
from seqgate.services.dedup.core.sequence import Marks
from seqgate.spark import local_session, register
from seqgate.spark._columns import Range, connected, read_blocks
from seqgate.spark._source import Options, SeqgateReader
from tools.bench import recovery
from tools.bench.bench import Bench
from tools.bench.figures import (
    ROUNDS,
    BenchError,
    Limit,
    Measurement,
    Round,
    in_series,
    rate,
)
from tools.bench.logs import PRODUCERS, Logs
from tools.bench.machine import family_cpu_s
from tools.bench.worker import Meter, in_worker

TOPICS: Final = 1_000
ENTRIES: Final = 10_000  # of each topic
COUNTED: Final = "read as columns, and only counted"
READ: Final = "read by Spark"
FOLDED: Final = "read and folded by the rebuild's job"
DUCKDB: Final = "read and grouped by DuckDB, without Spark"
REBUILT: Final = "rebuilt, from the plan to the last load"

COLUMNS: Final = pa.schema(
    {"topic": pa.string(), "producer": pa.string(), "highest_sequence_id": pa.int64()}
)
"""What Spark and DuckDB read."""

GROUPED: Final = """SELECT count(*) FROM (
    SELECT topic, producer, max(highest_sequence_id) FROM entries GROUP BY topic, producer)"""

MERGED: Final = pa.schema({"topic": pa.string(), "producers": pa.int64(), "entries": pa.int64()})
"""What is left of a topic's state where none is loaded."""

TIMEOUT_S: Final = 60.0  # how long a service may be away


async def rebuild(bench: Bench) -> list[Measurement]:
    """Entries a second, of reading, folding and rebuilding."""
    logs = Logs("bench/rebuild/log-", bench.scaled(TOPICS), ENTRIES)
    async with bench.another(logs=[logs]) as own:
        stack = own.stack
        addresses: dict[str, Any] = {
            each: stack.address(each) for each in ("ledger", "dedup", "cursor")
        }
        logged = Logged(**addresses, redis_url=stack.redis_url, **logs._asdict())
        pids = own.pids("ledger", "dedup", "redis")
        rounds = await in_worker("tools.bench.rebuild", logged, ROUNDS, pids)

    def figure(name: str, *limits: Limit | Measurement) -> Measurement:
        return rate(name, "entries", rounds[name], *limits)

    counted = figure(COUNTED)
    others = [figure(each, counted) for each in (READ, FOLDED, DUCKDB)]
    loaded = bench.limit(recovery.loading(PRODUCERS), each=ENTRIES / PRODUCERS).value
    both = Limit("fold + load, one after the other", in_series(others[1].value, loaded))
    return [counted, *others, figure(REBUILT, both)]


class Logged(NamedTuple):
    """Where the services are, and what the ledger has: topics, and entries of each."""

    ledger: str
    dedup: str
    cursor: str
    redis_url: str
    prefix: str
    topics: int
    entries: int

    @property
    def all_entries(self) -> int:
        """Of all topics."""
        return self.topics * self.entries


def run(logged: Logged, rounds: int, pids: dict[str, int]) -> dict[str, list[Round]]:
    """The rounds of everything, after a round of what Spark compiles. Driver and workers are the
    client; their Java ends with this process."""
    spark = local_session("seqgate bench")
    register(spark)
    try:
        work = _Work(logged, spark)
        calls = {
            COUNTED: work.count,
            READ: work.read,
            FOLDED: work.fold,
            DUCKDB: work.group,
            REBUILT: work.rebuild,
        }
        work.fold()
        work.read()
        done: dict[str, list[Round]] = {name: [] for name in calls}
        for _ in range(rounds):
            work.forget()
            for name, call in calls.items():
                meter = Meter(pids, ours=partial(family_cpu_s, os.getpid()))
                with meter:
                    call()
                done[name].append(meter.round(logged.all_entries))
        return done
    finally:
        spark.stop()


class _Work:
    """What is measured."""

    def __init__(self, logged: Logged, spark: SparkSession) -> None:
        self._logged = logged
        self._spark = spark
        self._cores = spark.sparkContext.defaultParallelism
        services = Services(logged.ledger, logged.dedup, logged.cursor, TIMEOUT_S)
        with Stubs(services) as stubs:
            found = plans(stubs, [f"{logged.prefix}*"], Source.EARLIEST, comparing=False)
            self._plans = [each for each in found if isinstance(each, TopicPlan)]
        _check(len(self._plans), logged.topics)

    def count(self) -> None:
        """Read as many at a time as Spark does, and look at nothing."""
        with (
            connected(self._logged.ledger) as stub,
            ThreadPoolExecutor(self._cores) as pool,
        ):
            ranges = [each for plan in self._plans for each in plan.ranges]
            _check(
                sum(pool.map(lambda each: _counted(stub, each), ranges)), self._logged.all_entries
            )

    def read(self) -> None:
        """Have Spark read, and drop it."""
        reader = self._spark.read.format("seqgate").options(
            ledger=self._logged.ledger, topics=f"{self._logged.prefix}*"
        )
        rows = reader.schema(from_arrow_schema(COLUMNS)).load()
        rows.write.format("noop").mode("overwrite").save()

    def fold(self) -> None:
        """The rebuild's waves, but nothing is asked of deduplication, and nothing loaded."""
        producers = entries = 0
        for wave in waves(self._plans, ENTRIES_PER_WAVE, self._cores):
            reading = Reading(self._logged.ledger, TIMEOUT_S, skip_corrupt=False, tasks=wave.tasks)
            folded = frame(self._spark, reading)
            rows = reduced(folded, merged, MERGED, self._cores * TASKS_PER_CORE).collect()
            producers += sum(row.producers for row in rows)
            entries += sum(row.entries for row in rows)
        _check(producers, self._logged.topics * PRODUCERS)
        _check(entries, self._logged.all_entries)

    def group(self) -> None:
        """Have DuckDB group the batches that the data source's reader makes."""
        options = Options.parse(
            {"ledger": self._logged.ledger, "topics": f"{self._logged.prefix}*"}
        )
        reader = SeqgateReader(options, COLUMNS)
        batches = (batch for share in reader.partitions() for batch in reader.read(share))
        with duckdb.connect() as database:
            database.register("entries", pa.RecordBatchReader.from_batches(COLUMNS, batches))
            ((groups,),) = database.execute(GROUPED).fetchall()
        _check(groups, self._logged.topics * PRODUCERS)

    def rebuild(self) -> None:
        """The command, as it is."""
        logged = self._logged
        arguments = [f"--{each}={getattr(logged, each)}" for each in ("ledger", "dedup", "cursor")]
        arguments += ["--from=earliest", "--json", f"{logged.prefix}*"]
        wrote = io.StringIO()
        with redirect_stdout(wrote), redirect_stderr(io.StringIO()):
            status = rebuild_main(arguments, self._spark)
        _check(status, 0)
        summary = json.loads(wrote.getvalue().splitlines()[-1])
        _check(summary["outcomes"], {"loaded": logged.topics})
        _check(summary["producers"], logged.topics * PRODUCERS)

    def forget(self) -> None:
        """Redis loses everything."""
        with Redis.from_url(self._logged.redis_url) as redis:
            redis.flushall()


def merged(rows: pa.Table) -> pa.Table:
    """What the rebuild makes of a topic's rows, up to where it would load them."""
    states: dict[str, State] = {}
    entries = 0
    for producer, part in partials(rows):
        before = states.get(producer) or State(Marks(), 0)
        active_ms = max(before.active_ms, part.last_append_ms)
        states[producer] = State(part.applied(before.marks), active_ms)
        entries += part.entries
    topic = rows.column("topic")[0].as_py()
    row = {"topic": topic, "producers": len(states), "entries": entries}
    return pa.Table.from_pylist([row], MERGED)


def _counted(stub: Any, wanted: Range) -> int:
    blocks = read_blocks(stub, wanted, timeout_s=TIMEOUT_S)
    return sum(block.count for group in blocks for block in group)


def _check(found: object, expected: object) -> None:
    if found != expected:
        raise BenchError(f"there is {found} where {expected} was expected")
