"""The rebuild, the comparison and the audit over either store, and a rebuild that is killed halfway
and started again."""

from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio
from pyspark.sql import SparkSession

from seqgate.dev.stack import Stack
from seqgate.jobs.audit.__main__ import main as audit
from seqgate.jobs.rebuild.__main__ import main as rebuild
from seqgate.services.ledger.adapters.postgres import open_postgres_store
from seqgate.services.runtime.postgres import Server
from tests.integration.services import connected, running
from tests.spark.conftest import World
from tests.spark.logs import Log, fill, make_log, put
from tests.spark.test_spark import expected, forget, live, outcomes, output, stored_twice
from tests.support.depth import deep, times
from tests.support.jobs import rebuilding
from tests.support.postgres_server import PostgresServer, empty_database

pytestmark = pytest.mark.timeout(900)  # Spark starts slowly

STORES = deep(quick=["postgres"], full=["sqlite", "postgres"])  # test_spark.py runs on SQLite

BLOCKS = times(quick=20, full=100)

LEFT_TO_A_REBUILD = {"SEQGATE_LEDGER_INLINE_REPLAY_ENTRIES_MAX": "1"}
"""Otherwise a ledger that takes topics of the process that filled the store would replay them."""


def make_logs(random: Random) -> dict[str, Log]:
    logs = {f"whole/{n}/log": make_log(random, 20, BLOCKS // 4) for n in range(4)}
    logs["whole/wide/log"] = make_log(random, 2_000, BLOCKS)
    logs |= {f"small/{n}/log": make_log(random, 2, 2) for n in range(6)}
    logs["careless/x/log"] = make_log(random, 20, BLOCKS, careless=True)
    return logs


@pytest_asyncio.fixture(scope="module", params=STORES)
async def either(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    postgres: PostgresServer,
    seed: int,
) -> AsyncIterator[World]:
    """A stack over logs in one of the stores, without any deduplication state. On PostgreSQL, at
    full depth, two ledgers share the topics."""
    folder = tmp_path_factory.mktemp(f"spark-{request.param}")
    logs = make_logs(Random(seed))
    if request.param == "sqlite":
        await fill(folder, logs)
        async with running(folder, **LEFT_TO_A_REBUILD) as services:
            yield World(services, logs)
        return
    url = await empty_database(postgres, "spark")
    async with open_postgres_store(Server(url), migrates=True) as store:
        await put(store, logs)
    instances = deep(quick=1, full=2)
    stack = Stack(folder, postgres_url=url, instances=instances, environment=LEFT_TO_A_REBUILD)
    async with stack, connected(stack) as services:
        yield World(services, logs)


async def assert_rebuilt(world: World) -> None:
    for topic, log in world.logs.items():
        assert await live(world, topic) == expected(log), topic


async def test_a_rebuild_a_comparison_and_an_audit_agree_with_the_logs(
    either: World, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = sum(1 for log in either.logs.values() for _ in log.stored)
    assert rebuild([*either.addresses, "--json"], spark) == 0
    *lines, summary = output(capsys)
    assert outcomes(lines) == dict.fromkeys(either.logs, "loaded")
    assert summary["entries"] == entries
    await assert_rebuilt(either)

    assert rebuild([*either.addresses, "--json", "*"], spark) == 0
    *lines, summary = output(capsys)
    assert outcomes(lines) == dict.fromkeys(either.logs, "current")
    assert summary["entries"] == 0, "what was loaded is read again"

    assert rebuild([*either.addresses, "--diff", "--json"], spark) == 0
    *lines, summary = output(capsys)
    assert outcomes(lines) == dict.fromkeys(either.logs, "equal")
    assert summary["entries"] == entries

    ledger = ["--ledger", either.services.stack.address("ledger"), "--json"]
    assert audit([*ledger, "whole/*", "small/*"], spark) == 0
    capsys.readouterr()
    assert audit([*ledger, "careless/*"], spark) == 1
    found = [each["finding"] for each in output(capsys) if each["kind"] == "finding"]
    places = {
        (each["producer"], (each["ledger_id"], each["entry_id"]))
        for each in found
        if each["kind"] == "twice"
    }
    assert places == stored_twice(either.logs["careless/x/log"])


@pytest.mark.deep
async def test_a_rebuild_killed_halfway_reads_only_the_other_topics_when_started_again(
    either: World, tmp_path: Path
) -> None:
    for topic in either.logs:
        await forget(either, topic, snapshot=True)
    folders = [tmp_path / name for name in ("killed", "again")]
    for folder in folders:
        folder.mkdir()
    async with rebuilding(either.services.stack, folders[0]) as job:
        await job.topics(len(either.logs) // 2)
        await job.kill()
        loaded = set(job.outcomes)
    assert set(job.outcomes.values()) == {"loaded"}
    assert loaded < set(either.logs)
    async with rebuilding(either.services.stack, folders[1]) as again:
        assert await again.ended() == 0, again.warned
    assert again.outcomes
    assert set(again.outcomes.values()) == {"loaded"}
    assert loaded.isdisjoint(again.outcomes)
    await assert_rebuilt(either)
