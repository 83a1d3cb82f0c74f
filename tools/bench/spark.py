"""The process that has a Spark session: python -m tools.bench.spark

Takes a SparkJob as JSON on standard input, and writes the outcomes as JSON to standard output.
Everything reads the same logs; rounds follow one another as in tools.bench.load.
"""

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Final, NamedTuple, Self

import duckdb
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from redis import Redis

from seqgate.api.ledger.v1.ledger_pb2_grpc import LedgerServiceStub
from seqgate.spark import local_session, register
from seqgate.spark._columns import Range, connected, read_blocks
from seqgate.spark._source import Options, SeqgateReader
from services.dedup.core.sequence import Marks
from tools.bench.logs import PRODUCERS
from tools.bench.machine import busy_s, cpu_s, family_cpu_s
from tools.bench.measurement import BenchError
from tools.bench.rounds import Round
from tools.bench.workload import CLIENT, OTHERS, Outcome, outcomes_to_json
from tools.rebuild.__main__ import ENTRIES_PER_WAVE
from tools.rebuild.__main__ import main as rebuild
from tools.rebuild.folding import partials
from tools.rebuild.loading import State
from tools.rebuild.plan import TASKS_PER_CORE, Services, Source, Stubs, TopicPlan, plans, waves
from tools.rebuild.source import Reading, frame, reduced

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

TIMEOUT_S: Final = 60.0
"""How long a service may be away."""


class SparkJob(NamedTuple):
    """What the process is told: where everything is, which topics there are, how many entries each
    has, and whose computing is measured."""

    ledger: str
    dedup: str
    cursor: str
    redis_url: str
    topics: str
    topics_count: int
    entries: int
    rounds: int
    pids: dict[str, int]

    def to_json(self) -> str:
        """As it travels."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The opposite of to_json."""
        return cls(*json.loads(text))


def run(job: SparkJob) -> dict[str, Outcome]:
    """Everything, after a round of what Spark compiles."""
    with _session() as spark:
        work = _Work(job, spark)
        todo: dict[str, Callable[[], None]] = {
            COUNTED: work.count,
            READ: work.read,
            FOLDED: work.fold,
            DUCKDB: work.group,
            REBUILT: work.rebuild,
        }
        work.fold()
        work.read()
        outcomes = {name: Outcome([], {}) for name in todo}
        for _ in range(job.rounds):
            for name, call in todo.items():
                if call == work.rebuild:
                    work.forget()
                outcomes[name] = _then(outcomes[name], job, call)
        return outcomes


class _Work:
    """What is measured."""

    def __init__(self, job: SparkJob, spark: SparkSession) -> None:
        self._job = job
        self._spark = spark
        self._cores = spark.sparkContext.defaultParallelism
        services = Services(job.ledger, job.dedup, job.cursor, TIMEOUT_S)
        with Stubs(services) as stubs:
            found = plans(stubs, [job.topics], Source.EARLIEST, comparing=False)
            self._plans = [each for each in found if isinstance(each, TopicPlan)]
        _check(len(self._plans), job.topics_count)

    def count(self) -> None:
        """Read as many at a time as Spark does, and look at nothing."""
        with (
            connected(self._job.ledger) as stub,
            ThreadPoolExecutor(self._cores) as pool,
        ):
            ranges = [each for plan in self._plans for each in plan.ranges]
            _check(sum(pool.map(lambda each: _counted(stub, each), ranges)), self._entries)

    def read(self) -> None:
        """Have Spark read, and drop it."""
        reader = self._spark.read.format("seqgate").options(
            ledger=self._job.ledger, topics=self._job.topics
        )
        rows = reader.schema(from_arrow_schema(COLUMNS)).load()
        rows.write.format("noop").mode("overwrite").save()

    def fold(self) -> None:
        """The rebuild's waves, but nothing is asked of deduplication, and nothing loaded."""
        producers = entries = 0
        for wave in waves(self._plans, ENTRIES_PER_WAVE, self._cores):
            reading = Reading(self._job.ledger, TIMEOUT_S, skip_corrupt=False, tasks=wave.tasks)
            folded = frame(self._spark, reading)
            rows = reduced(folded, merged, MERGED, self._cores * TASKS_PER_CORE).collect()
            producers += sum(row.producers for row in rows)
            entries += sum(row.entries for row in rows)
        _check(producers, self._job.topics_count * PRODUCERS)
        _check(entries, self._entries)

    def group(self) -> None:
        """Have DuckDB group the batches that the data source's reader makes."""
        options = Options.parse({"ledger": self._job.ledger, "topics": self._job.topics})
        reader = SeqgateReader(options, COLUMNS)
        batches = (batch for share in reader.partitions() for batch in reader.read(share))
        with duckdb.connect() as database:
            database.register("entries", pa.RecordBatchReader.from_batches(COLUMNS, batches))
            ((groups,),) = database.execute(GROUPED).fetchall()
        _check(groups, self._job.topics_count * PRODUCERS)

    def rebuild(self) -> None:
        """The command, as it is."""
        job = self._job
        arguments = ["--ledger", job.ledger, "--dedup", job.dedup, "--cursor", job.cursor]
        wrote = io.StringIO()
        with redirect_stdout(wrote), redirect_stderr(io.StringIO()):
            status = rebuild([*arguments, "--from=earliest", "--json", job.topics], self._spark)
        _check(status, 0)
        summary = json.loads(wrote.getvalue().splitlines()[-1])
        _check(summary["outcomes"], {"loaded": job.topics_count})
        _check(summary["producers"], job.topics_count * PRODUCERS)

    def forget(self) -> None:
        """Redis loses everything."""
        with Redis.from_url(self._job.redis_url) as redis:
            redis.flushall()

    @property
    def _entries(self) -> int:
        return self._job.topics_count * self._job.entries


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


def _counted(stub: LedgerServiceStub, wanted: Range) -> int:
    blocks = read_blocks(stub, wanted, timeout_s=TIMEOUT_S)
    return sum(block.count for group in blocks for block in group)


def _check(found: object, expected: object) -> None:
    if found != expected:
        raise BenchError(f"there is {found} where {expected} was expected")


def _then(outcome: Outcome, job: SparkJob, call: Callable[[], None]) -> Outcome:
    """The outcome with one round more."""
    before, began = _computed_s(job), time.perf_counter()
    call()
    elapsed_s = time.perf_counter() - began
    cpu_s = {
        name: outcome.cpu_s.get(name, 0.0) + seconds - before[name]
        for name, seconds in _computed_s(job).items()
    }
    done = Round(job.topics_count * job.entries, elapsed_s, [])
    return Outcome([*outcome.rounds, done], cpu_s)


def _computed_s(job: SparkJob) -> dict[str, float]:
    """How much each has computed; Spark's driver and its workers are the client."""
    ours = {CLIENT: family_cpu_s(os.getpid())}
    ours |= {name: cpu_s(pid) for name, pid in job.pids.items()}
    return ours | {OTHERS: busy_s() - sum(ours.values())}


@contextmanager
def _session() -> Iterator[SparkSession]:
    """A session as the rebuild's own. Its Java ends with this process: whoever reads our standard
    error to its end has waited for it."""
    session = local_session("seqgate bench")
    register(session)
    try:
        yield session
    finally:
        session.stop()


def main() -> int:
    job = SparkJob.from_json(sys.stdin.read())
    # Whatever else Spark has to say to standard output goes the other way.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        answer.write(outcomes_to_json(run(job)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
