"""Rebuilding deduplication state from the log, in bulk.

    rebuilt  <  read and folded, then loaded  <  read as columns

The services are a stack of their own, with the logs in the ledger's store before it starts. Beside
the fold: DuckDB, over the batches that the data source's reader makes.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tools.bench import recovery, spark
from tools.bench.bench import Bench, converse
from tools.bench.logs import PRODUCERS, Logs, fill
from tools.bench.measurement import Limit, Measurement, rate
from tools.bench.rounds import ROUNDS
from tools.bench.spark import SparkJob
from tools.bench.statistics import in_series
from tools.bench.workload import Outcome, outcomes_from_json
from tools.stack.stack import Stack

TOPICS: Final = 1_000
ENTRIES: Final = 10_000
"""How many topics there are, and how many entries each has, where rounds are as long as usual."""

GRACE_S: Final = 600.0
"""How long it may take."""

SERVICES: Final = ("ledger", "dedup", "redis")


async def rebuild(bench: Bench) -> list[Measurement]:
    """Entries a second, of reading, folding and rebuilding."""
    logs = Logs("bench/rebuild/log-", bench.scaled(TOPICS), ENTRIES)
    with tempfile.TemporaryDirectory(dir=bench.folder) as name:
        folder = Path(name)
        await fill(folder / "ledger" / "ledger.db", [logs])
        async with Stack(folder) as stack:
            answer = await converse("tools.bench.spark", _job(stack, logs).to_json(), GRACE_S)
    outcomes = outcomes_from_json(answer)
    counted = _measured(spark.COUNTED, outcomes)
    limit = Limit(counted.name, counted.value)
    others = [_measured(each, outcomes, limit) for each in (spark.READ, spark.FOLDED, spark.DUCKDB)]
    folded = others[1].value
    loaded = bench.limit(recovery.loading(PRODUCERS), each=logs.entries / PRODUCERS).value
    both = Limit("fold + load, one after the other", in_series(folded, loaded))
    return [counted, *others, _measured(spark.REBUILT, outcomes, both)]


def _job(stack: Stack, logs: Logs) -> SparkJob:
    pids = stack.endpoints["pids"]
    assert isinstance(pids, dict)
    return SparkJob(
        stack.address("ledger"),
        stack.address("dedup"),
        stack.address("cursor"),
        stack.redis_url,
        f"{logs.prefix}*",
        logs.topics,
        logs.entries,
        ROUNDS,
        {name: pids[name] for name in SERVICES},
    )


def _measured(
    name: str, outcomes: Mapping[str, Outcome], limit: Limit | None = None
) -> Measurement:
    outcome = outcomes[name]
    return rate(name, "entries", outcome.rounds, limit=limit, cpu=outcome.cpu)
